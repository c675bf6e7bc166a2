"""Peak memory of one forward, each engine in a fresh process of its own.

    python bench/memory.py [--model base] [--workload ragged64] [--engine fastbert-fp32] [--threads 2]

`peak_mib` is the most that was resident while the forward ran, everything included: Python, torch, weights.
`above_mib` is what of it came on top of the loaded model: activations, packed copies of weights, scratch.
The forward is the process' first: what a library keeps from its first call counts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

from bench import workloads  # noqa: E402

ENGINES = ("fastbert-fp32", "transformers-fp32", "fastbert-bf16", "transformers-bf16", "fastbert-int8")
WORKLOAD = "ragged64"
TIMEOUT_SECONDS = 600.0


def status_mib(key: str) -> float:
    """VmRSS (resident now) or VmHWM (most so far) of this process."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{key}:"):
            return int(text.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def forget_peak() -> bool:
    """Let VmHWM begin anew from what is resident now; False where the kernel does not permit it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return status_mib("VmHWM") - status_mib("VmRSS") < 8.0


def measure(engine: str, model: str, lengths: tuple[int, ...], threads: int) -> dict:
    """Load the engine's model in this process, run one forward and read the peak: figures of a row."""
    import torch

    from bench.engines import DTYPES, MODELS, ours, theirs, torch_forward

    torch.set_num_threads(threads)
    name, tag = engine.split("-")
    module, _ = ours(MODELS[model])
    if name == "transformers":
        peer = theirs(module.config)
        peer.load_state_dict(module.state_dict())
        module = peer
    module = module.quantize("int8") if tag == "int8" else module.to(DTYPES[tag])
    forward, inputs = torch_forward(module), workloads.padded_inputs(lengths, MODELS[model].vocab, "cpu")
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what loading has freed must not serve the forward unseen
    fresh = forget_peak()
    loaded = status_mib("VmRSS")
    start = time.perf_counter()
    forward(inputs)
    seconds = time.perf_counter() - start
    peak = status_mib("VmHWM") if fresh else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "peak_mib": peak,
        "loaded_mib": loaded,
        "above_mib": peak - loaded,
        "measured_by": "VmHWM" if fresh else "ru_maxrss, loading included",
        "first_call_s": seconds,
    }


def bench_memory(
    model: str,
    workload: str = WORKLOAD,
    engines: tuple[str, ...] = ENGINES,
    threads: int = 1,
    lengths: tuple[int, ...] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Iterator[dict]:
    """A row for each engine; one that fails, is killed or is missing is a row with the reason."""
    lengths = lengths or workloads.lengths(workload)
    for engine in engines:
        row = {"step": "memory", "name": f"memory-{engine}-{model}-{workload}"}
        facts = {"model": model, "workload": workload, "candidate": engine, "tokens": sum(lengths)}
        job = json.dumps([engine, model, lengths, threads])
        command = [sys.executable, str(Path(__file__).resolve()), "--child", job]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise RuntimeError(f"the process ended with status {done.returncode}: {last[:500]}")
            yield {**row, "status": "ok", **json.loads(done.stdout.splitlines()[-1]), **facts}
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield {**row, "status": "error", "error": str(error), **facts}


def line(row: dict) -> str:
    """The printed form of a row."""
    if row["status"] != "ok":
        return f"{row['name']:<50} {row['status']}: {row['error'].splitlines()[0][:150]}"
    return (
        f"{row['name']:<50} peak {row['peak_mib']:8,.0f} MiB, of it above the loaded model "
        f"{row['above_mib']:8,.0f} MiB"
    )


def main() -> int:
    """Print a line for each engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("base", "large", "minilm", "tiny"), default="base")
    parser.add_argument("--workload", choices=workloads.names(), default=WORKLOAD)
    parser.add_argument("--engine", choices=ENGINES, action="append", help="may be repeated; default: all")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--child", help=argparse.SUPPRESS)  # this process is the one that is measured
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measure(*json.loads(args.child))))
        return 0
    for row in bench_memory(args.model, args.workload, tuple(args.engine or ENGINES), args.threads):
        print(line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
