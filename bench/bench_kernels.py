"""One line per op, case, dtype and backend: µs, GFLOP/s, GB/s, share of this machine's measured copy
bandwidth, and how many times plain eager PyTorch's speed. `python bench/bench_kernels.py [--op OP] [--device
cuda] [--json FILE]`.

All backends of a case and eager PyTorch are timed turn by turn in one run; medians. The shapes are
BERT-base's at 8 x 128 tokens on a CPU and 32 x 512 on a GPU, from the same `testing.Case`s the tests use.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.timing import interleave, rotations  # noqa: E402
from fastbert import dispatch, testing  # noqa: E402
from fastbert.cases.layer_norm import LayerNormCase  # noqa: E402


def bench_cases(op: str, device: torch.device) -> list[testing.Case]:
    """The cases of `op` worth timing: those its case file names, at this device's token count."""
    tokens = 16_384 if device.type == "cuda" else 1_024
    if op == "layer_norm":
        return [
            LayerNormCase(tokens, 768),
            LayerNormCase(tokens, 768, residual=True, x_bias=True),
            LayerNormCase(tokens, 768, residual=True, x_bias=True, dropout_p=0.1),
        ]
    found = testing.cases(op)
    resized = [replace(c, rows=tokens) for c in found if hasattr(c, "rows") and c.rows >= 64]
    return resized or found


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read and write counted."""
    size = (1 << 30 if device.type == "cuda" else 1 << 28) // 4
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    timing = interleave({"copy": lambda: target.copy_(source)}, device)["copy"]
    return 2 * source.nbytes / (timing.median_ms * 1e-3)


def bench_case(
    case: testing.Case, dtype: torch.dtype, device: torch.device, backward: bool, bandwidth: float
) -> list[dict]:
    """Rows of one case: eager PyTorch and every backend that runs here, interleaved."""
    sets = [case.inputs(dtype, device, seed) for seed in range(rotations(case.bytes(dtype), device, limit=8))]
    names = [b for b in dispatch.BACKENDS if dispatch.gap(b, case.op, device.type, dtype) is None]
    if device.type != "cpu":
        names = [n for n in names if n != "reference"]
    names = [
        n for n in names if not (n == "triton" and device.type == "cpu")
    ]  # the interpreter is no backend to time

    def calls(function, pin):
        def call(inputs):
            def run():
                if backward:
                    testing.evaluate(
                        function, case, inputs, None, True, [torch.ones_like(o) for o in outputs]
                    )
                else:
                    with torch.no_grad():
                        function(**inputs)

            if backward:
                with torch.no_grad():
                    outputs = function(**inputs)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return run

        return [call(inputs) for inputs in sets]

    candidates = {"eager": calls(case.eager, None)}
    timings = {}
    for name in names:
        # a pin is process-wide: each backend is interleaved with eager in a run of its own
        with dispatch.use_backend(**{case.op: name}):
            timed = interleave({**candidates, name: calls(case.call, name)}, device)
        timings[name] = (timed[name], timed["eager"])
    rows = []
    for name, (timing, eager) in timings.items():
        seconds = timing.median_ms * 1e-3
        rows.append(
            {
                "op": case.op,
                "case": case.id,
                "pass": "forward+backward" if backward else "forward",
                "dtype": str(dtype).removeprefix("torch."),
                "backend": name,
                "us": round(timing.median_ms * 1e3, 2),
                "gflops": round(case.flops() / seconds / 1e9, 1),
                "gbytes": round(case.bytes(dtype) / seconds / 1e9, 2),
                "share_of_copy": round(case.bytes(dtype) / seconds / bandwidth, 3),
                "times_eager": round(eager.median_ms / timing.median_ms, 3),
                "spread": round(timing.spread, 3),
                "n": timing.n,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=dispatch.OPS, action="append", help="only this op (may be repeated)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), action="append")
    parser.add_argument("--backward", action="store_true", help="forward and backward instead of forward")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the rows here, after each case")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    bandwidth = copy_bandwidth(device)
    machine = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )
    print(f"# {machine}; torch {torch.__version__}; copy {bandwidth / 1e9:.1f} GB/s")
    print(
        f"{'op':14} {'case':34} {'dtype':9} {'backend':10} {'µs':>10} {'GFLOP/s':>9} {'GB/s':>8} "
        f"{'of copy':>8} {'× eager':>8}"
    )
    rows: list[dict] = []
    for op in args.op or dispatch.OPS:
        for dtype in [getattr(torch, d) for d in args.dtype or ("float32", "bfloat16")]:
            for case in bench_cases(op, device):
                for row in bench_case(case, dtype, device, args.backward, bandwidth):
                    rows.append(row)
                    print(
                        f"{row['op']:14} {row['case']:34} {row['dtype']:9} {row['backend']:10} "
                        f"{row['us']:10.1f} {row['gflops']:9.1f} {row['gbytes']:8.2f} "
                        f"{row['share_of_copy']:8.1%} {row['times_eager']:8.2f}",
                        flush=True,
                    )
                if args.json:
                    args.json.write_text(
                        json.dumps(
                            {
                                "machine": machine,
                                "torch": torch.__version__,
                                "copy_bytes_per_s": bandwidth,
                                "rows": rows,
                            },
                            indent=1,
                        )
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
