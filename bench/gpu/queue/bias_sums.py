"""Is our pass over a gradient faster than PyTorch's for the bias of QKV? Column sums in bf16, few seconds.

    python bench/gpu/queue/bias_sums.py --json FILE [--device cpu]

`aten` is `dy.sum(0)`, `cuda` the pass that serves FFN1's backward, without an activation. `median_ms` is the
device's time, `host_ms` the host's to enqueue a call. A CPU times `aten` alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch  # noqa: E402

from bench.lib import lines  # noqa: E402
from bench.lib.machine import describe  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402
from bench.lib.timing import interleave, rotations  # noqa: E402
from fastbert.backends.cuda import linear  # noqa: E402

# rows and columns of the gradient of QKV: base 32 x 512, large 48 x 512; a short batch
SHAPES = ((16384, 2304), (24576, 3072), (1024, 2304))


def row(rows: int, columns: int, device: torch.device) -> dict:
    """The figures of a shape."""
    count = rotations(2 * rows * columns, device)
    given = [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(count)]
    sums = {"aten": lambda dy: dy.sum(0)}
    if device.type == "cuda":
        sums["cuda"] = lambda dy: linear.gradient(dy, None, None, False, True)[1]
    exact = given[0].double().sum(0)
    errors = {name: (call(given[0]).double() - exact).abs().max().item() for name, call in sums.items()}
    calls = {name: [lambda dy=dy, call=call: call(dy) for dy in given] for name, call in sums.items()}
    timed = interleave(calls, device)
    return {name: {**asdict(timed[name]), "samples_ms": None, "error": errors[name]} for name in sums}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no shape is begun")
    parser.add_argument("--device", type=torch.device, default="cuda:0")
    args, begin = parser.parse_args(), time.monotonic()
    lines.append(args.json, "head", {"environment": describe(args.device)})
    for rows, columns in SHAPES if args.device.type == "cuda" else ((64, 32),):
        made = {"step": "bias_sums", "name": f"bias_sums-{rows}x{columns}", "status": "ok"}
        try:
            if time.monotonic() - begin > args.budget:
                raise TimeoutError(f"--budget {args.budget:.0f} is spent")
            made |= row(rows, columns, args.device)
        except Exception as error:
            made |= {"status": "error", "error": reason_of(error)}
        lines.append(args.json, "row", made)
        print(made, flush=True)


if __name__ == "__main__":
    main()
