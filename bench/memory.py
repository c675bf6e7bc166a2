"""Peak memory of one forward, of training steps or of analysis, each engine in a fresh process.

`fastbert bench memory` is the command.

`peak_mib` is the largest resident memory of the process during the forward: Python, torch and weights
included. `above_mib` is the part above the loaded model: activations, weights laid out as panels, working
memory; in training also gradients and AdamW's moments. The forward is the first of the process, so memory
that a library keeps from its first call counts. Training runs two steps, because the first step makes the
moments. Analysis is the statistics of attention of all examples; the plain way keeps transformers' maps of a
batch.

On a GPU both are the peak of torch's allocator, and `peak_mib` includes the weights.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.lib import workloads
from bench.lib.resident import forget_peak, return_freed, status_mib

ENGINES = ("fastbert-fp32", "transformers-fp32", "fastbert-bf16", "transformers-bf16", "fastbert-int8")
TRAINED = ENGINES[:4]
ANALYSED = ENGINES[:2]
FORWARD, STATISTICS = "forward", "statistics"  # what runs; else a head of training.HEADS, which is trained
WORKLOAD = "ragged64"
TIMEOUT_SECONDS = 600.0


def forward_call(engine: str, model: str, lengths: tuple[int, ...], device: str) -> Callable[[], object]:
    """One forward by `engine`, its model loaded."""
    from bench.lib.engines import DTYPES, MODELS, ours, theirs, torch_forward

    name, tag = engine.split("-")
    module, _ = ours(MODELS[model])
    if name == "transformers":
        peer = theirs(module.config)
        peer.load_state_dict(module.state_dict())
        module = peer
    module = module.quantize("int8") if tag == "int8" else module.to(DTYPES[tag])
    forward = torch_forward(module.to(device))
    inputs = workloads.padded_inputs(lengths, MODELS[model].vocab, device)
    return lambda: forward(inputs)


def training_call(
    engine: str, model: str, lengths: tuple[int, ...], head: str, device: str
) -> Callable[[], object]:
    """Two training steps by `engine`, its model loaded."""
    from bench.lib import training
    from bench.lib.engines import MODELS

    name, tag = engine.split("-")
    module = training.modules(MODELS[model], head, (name,), device)[name]
    if isinstance(module, str):
        raise RuntimeError(module)
    inputs, _ = training.batch(lengths, MODELS[model].vocab, head, device)
    step = training.Step(
        module.train(), training.optimizer_of(module), inputs, {"bf16": True, "fp32": False}[tag]
    )
    return lambda: (step(), step())


def statistics_call(engine: str, model: str, lengths: tuple[int, ...]) -> Callable[[], object]:
    """The statistics of attention of all heads over examples of these lengths, the model loaded."""
    from bench.lib import analysis
    from bench.lib.engines import MODELS

    both = analysis.Both.of(MODELS[model], lengths)
    plain = engine.startswith("transformers")
    if plain:
        del both.ours
    else:
        del both.theirs
    return lambda: (analysis.plain_statistics if plain else analysis.our_statistics)(both)


def measure(engine: str, model: str, lengths: tuple[int, ...], threads: int, what: str, device: str) -> dict:
    """Load the engine's model in this process, run what is asked for and read the peak: figures of a row."""
    import torch

    torch.set_num_threads(threads)
    if what == FORWARD:
        call = forward_call(engine, model, lengths, device)
    elif what == STATISTICS:
        call = statistics_call(engine, model, lengths)
    else:
        call = training_call(engine, model, lengths, what, device)
    return_freed()
    if device == "cuda":
        return _on_a_gpu(call)
    fresh = forget_peak()
    loaded = status_mib("VmRSS")
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    peak = status_mib("VmHWM") if fresh else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return _figures(loaded, peak, seconds, "VmHWM" if fresh else "ru_maxrss, loading included")


def _figures(loaded: float, peak: float, seconds: float, by: str) -> dict:
    above = {"peak_mib": peak, "loaded_mib": loaded, "above_mib": peak - loaded}
    return above | {"measured_by": by, "first_call_s": seconds}


def _on_a_gpu(call: Callable[[], object]) -> dict:
    """The same of torch's allocator."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    loaded, start = torch.cuda.memory_allocated() / 2**20, time.perf_counter()
    call()
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**20
    return _figures(loaded, peak, seconds, "torch.cuda.max_memory_allocated")


def bench_memory(
    model: str,
    workload: str = WORKLOAD,
    engines: tuple[str, ...] = ENGINES,
    threads: int = 1,
    lengths: tuple[int, ...] | None = None,
    timeout: float = TIMEOUT_SECONDS,
    what: str = FORWARD,
    device: str = "cpu",
) -> Iterator[dict]:
    """A row for each engine; one that fails, is killed or is missing is a row with the reason.

    `what` is FORWARD, STATISTICS (on a CPU), or a head of training.HEADS, which is trained.
    """
    lengths = lengths or workloads.lengths(workload)
    step = {FORWARD: "memory", STATISTICS: "analysis_memory"}.get(what, "training_memory")
    head = what if step == "training_memory" else None
    for engine in engines:
        row = {"step": step, "name": "-".join(filter(None, (step, engine, model, workload, head)))}
        facts = {"model": model, "workload": workload, "candidate": engine, "tokens": sum(lengths)}
        facts |= {} if head is None else {"head": head}
        job = json.dumps([engine, model, lengths, threads, what, device])
        command = [sys.executable, str(Path(__file__).resolve()), job]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise RuntimeError(f"the process ended with status {done.returncode}: {last[:500]}")
            yield {**row, "status": "ok", **json.loads(done.stdout.splitlines()[-1]), **facts}
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            yield {**row, "status": "error", "error": str(error), **facts}


if __name__ == "__main__":  # the process that is measured
    print(json.dumps(measure(*json.loads(sys.argv[1]))))
