"""Runs another benchmark with fastbert and its peers held to AVX2, on a processor with AVX-512.

    fastbert bench avx2 encoder --model minilm --everything

All options are the other benchmark's. Results are kept in `bench/results/<device>-avx2`. The first run takes
half a minute longer, for the copies of ONNX Runtime and OpenVINO (lib/held.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib import held


def main(arguments: list[str]) -> int:
    """Run `fastbert bench ARGUMENTS`; returns its exit status."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    folder = held.ROOT / "build" / "held"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fastbert", "bench", *arguments]
    return subprocess.run(command, env=held.environment(folder)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
