"""One line per op, case, dtype and backend: µs, GFLOP/s, GB/s, share of this machine's measured copy
bandwidth, and how many times plain eager PyTorch's speed.

    python bench/bench_kernels.py [--op OP] [--workload 8x128] [--device cuda] [--backward] [--json FILE]

Every backend is timed turn by turn with eager PyTorch; medians. The shapes are BERT-base's for a workload of
bench/workloads.py (`8x128` on a CPU, `full` on a GPU), from the `testing.Case`s that the tests use too.
GFLOP/s and GB/s count the forward's work, so with --backward only the time and the ratio are given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench import workloads  # noqa: E402
from bench.timing import interleave, rotations  # noqa: E402
from fastbert import dispatch, testing  # noqa: E402

COLUMNS = ("op", "case", "dtype", "backend", "us", "gflops", "gbytes", "of_copy", "times_eager")
LINE = "{:13} {:38} {:9} {:8} {:>10} {:>9} {:>8} {:>8} {:>11}"


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read and write counted."""
    source = torch.randn((1 << 28 if device.type == "cuda" else 1 << 26), device=device)
    target = torch.empty_like(source)
    timing = interleave({"copy": lambda: target.copy_(source)}, device)["copy"]
    return 2 * source.nbytes / (timing.median_ms * 1e-3)


def one_call(function: Callable, case: testing.Case, inputs: dict, backward: bool) -> Callable[[], object]:
    """`function` on one set of inputs, with the gradients of all its inputs if `backward`."""
    with torch.no_grad():
        outputs = function(**inputs)
    douts = [torch.ones_like(o) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
    if backward:
        return lambda: testing.evaluate(function, case, inputs, None, True, douts)

    def forward() -> None:
        with torch.no_grad():
            function(**inputs)

    return forward


def timed_backends(op: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Backends worth timing: not the reference, which is there to be right, nor Triton's interpreter."""
    left_out = {"reference", "triton"} if device.type == "cpu" else {"reference"}
    return [
        name
        for name in dispatch.BACKENDS
        if name not in left_out and dispatch.gap(name, op, device.type, dtype) is None
    ]


def bench_case(
    case: testing.Case, dtype: torch.dtype, device: torch.device, backward: bool, bandwidth: float
) -> list[dict]:
    """A row for every backend that runs this case here."""
    moved, rows = case.bytes(dtype), []
    sets = [case.inputs(dtype, device, seed) for seed in range(rotations(moved, device, limit=4))]
    eager = [one_call(case.eager, case, inputs, backward) for inputs in sets]
    for name in timed_backends(case.op, device, dtype):
        with dispatch.use_backend(
            **{case.op: name}
        ):  # a pin is process-wide: one backend a run, beside eager
            ours = [one_call(case.call, case, inputs, backward) for inputs in sets]
            timed = interleave({"eager": eager, name: ours}, device)
        seconds = timed[name].median_ms * 1e-3
        work = {} if backward else {
            "gflops": round(case.flops() / seconds / 1e9, 1),
            "gbytes": round(moved / seconds / 1e9, 2),
            "of_copy": round(moved / seconds / bandwidth, 3),
        }  # fmt: skip
        rows.append(
            {
                "op": case.op,
                "case": case.id,
                "pass": "forward+backward" if backward else "forward",
                "dtype": str(dtype).removeprefix("torch."),
                "backend": name,
                "us": round(seconds * 1e6, 1),
                **work,
                "times_eager": round(timed["eager"].median_ms / timed[name].median_ms, 2),
                "spread": round(timed[name].spread, 3),
                "n": timed[name].n,
            }
        )
    return rows


def main() -> int:
    """Time what the arguments name; print a line and rewrite the JSON file after each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=dispatch.OPS, action="append", help="only this op (may be repeated)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workload", choices=workloads.names(), help="which batch; see bench/workloads.py")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), action="append")
    parser.add_argument("--backward", action="store_true", help="forward and backward instead of forward")
    parser.add_argument("--threads", type=int, help="threads on a CPU")
    parser.add_argument("--json", type=Path, help="write the rows here, after each case")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    workload = args.workload or ("full" if on_gpu else "8x128")
    bandwidth = copy_bandwidth(device)
    machine = torch.cuda.get_device_name(device) if on_gpu else f"cpu, {torch.get_num_threads()} threads"
    head = {
        "machine": machine,
        "torch": torch.__version__,
        "workload": workload,
        "copy_gbytes": bandwidth / 1e9,
    }
    print(f"# {machine}; torch {torch.__version__}; {workload}; copy {bandwidth / 1e9:.1f} GB/s")
    print(LINE.format(*COLUMNS), flush=True)
    rows: list[dict] = []
    for op in args.op or dispatch.OPS:
        for dtype in [getattr(torch, d) for d in args.dtype or ("float32", "bfloat16")]:
            for case in testing.bench_cases(op, workloads.lengths(workload)):
                for row in bench_case(case, dtype, device, args.backward, bandwidth):
                    rows.append(row)
                    print(LINE.format(*(str(row.get(column, "")) for column in COLUMNS)), flush=True)
                if args.json:
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    args.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
