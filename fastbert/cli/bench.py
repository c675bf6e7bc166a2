"""`fastbert bench`: list or run the benchmarks of a source checkout."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from fastbert.cli.usage import UsageError

# Where a source checkout has its benchmarks and their results; an installed package has no such folder. Only
# here does the package look beside itself.
FOLDER = Path(__file__).resolve().parents[2] / "bench"


def run(args: argparse.Namespace) -> int:
    """List the benchmarks or run one; returns its exit status."""
    runnable = [p for p in sorted(FOLDER.glob("*.py")) if "__main__" in p.read_text(encoding="utf-8")]
    scripts = {path.stem: path for path in runnable}
    if not scripts:
        raise UsageError(f"bench: the benchmarks are in the source checkout, and {FOLDER} has none")
    if args.name is None:
        for name, path in scripts.items():
            print(f"fastbert bench {name:<16} {path}")
        return 0
    path = scripts.get(args.name) or scripts.get(f"bench_{args.name}")
    if path is None:
        raise UsageError(f"bench {args.name}: not among {', '.join(scripts)}")
    return subprocess.run([sys.executable, str(path), *args.arguments], check=False).returncode
