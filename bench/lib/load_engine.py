"""An engine's process in the benchmark under load, and the process that makes what such engines share.

`serve` reads a line of JSON per sample on standard input, and answers with a line on standard output.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.lib import workloads
from bench.lib.encoder import kept
from bench.lib.engines import MODELS, Bank, Forward
from bench.lib.neighbour import end_with
from bench.lib.probe_steps import reason_of

CALLERS = 2  # the most Python threads that call at once
EXPORTED = ("openvino", "onnxruntime")  # they run the ONNX export
EXPORT = "model.onnx"
LENGTHS = {"1x16": (16,)}  # beside those of workloads.py


def lengths_of(workload: str) -> tuple[int, ...]:
    """Token length of each sequence of the workload's batch."""
    return LENGTHS.get(workload) or workloads.lengths(workload)


def timed(forward: Callable[[], object], begin: float, seconds: float, alone: bool) -> tuple[int, float]:
    """(calls that count, their seconds); at least one call.

    `alone` calls count from now on, for `seconds`. With other callers those count that lie within the
    `seconds` from `begin` (a reading of `time.perf_counter`): what begins before only keeps the machine
    loaded, and after it the other callers have stopped. The first call never counts: it loads the weights
    into the caches again, which other engines have used in the meantime.
    """
    forward()
    if alone:
        begin = time.perf_counter()
    calls, start, stop, end = 0, 0.0, 0.0, begin + seconds
    while (now := time.perf_counter()) < end or calls == 0:
        forward()
        after = time.perf_counter()
        if now >= begin and (calls == 0 or alone or after <= end):
            start, stop, calls = start or now, after, calls + 1
    return calls, stop - start


def sampled(forward: Forward, given: dict, asked: dict, pool: ThreadPoolExecutor) -> tuple[float, list]:
    """(calls per second of all callers together, the last output of each)."""
    last: dict[int, torch.Tensor] = {}
    together = threading.Barrier(asked["callers"])

    def call(caller: int) -> tuple[int, float]:
        def once() -> None:
            last[caller] = forward(given)

        together.wait()  # so that no thread is the caller twice
        return timed(once, asked["begin"], asked["seconds"], asked["alone"])

    counted = list(pool.map(call, range(asked["callers"])))
    return sum(calls / seconds for calls, seconds in counted), list(last.values())


def answers(name: str, model_name: str, folder: Path, threads: int) -> Iterator[dict]:
    """Answer each line of standard input: {workload, callers, begin, seconds, alone} of a sample."""
    torch.set_num_threads(threads)
    model = MODELS[model_name]
    bank = Bank(model, threads, folder)
    if name.startswith(EXPORTED):
        bank.__dict__["exported"] = folder / EXPORT
    forward = bank.forward(name)
    del bank  # and with it the weights that this engine does not use
    yield {"ready": name}
    known: dict[str, tuple[dict, torch.Tensor]] = {}
    # each caller keeps its thread: a new one would start OpenMP's threads anew
    with ThreadPoolExecutor(CALLERS, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        for text in sys.stdin:
            asked = json.loads(text)
            workload = asked["workload"]
            if workload not in known:
                given = workloads.padded_inputs(lengths_of(workload), model.vocab, "cpu")
                known[workload] = given, torch.load(folder / f"{workload}.pt")
                pool.submit(forward, given).result()
            given, truth = known[workload]
            rate, last = sampled(forward, given, asked, pool)
            cosines = [torch.cosine_similarity(kept(hidden, given), truth).mean().item() for hidden in last]
            yield {"rate": rate, "cosine": min(cosines)}


def serve(parent: str, name: str, model: str, folder: str, threads: str) -> None:
    """The engine's process, until its standard input ends. A line with `error` is its last one."""
    end_with(int(parent))
    said, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not mix with the answers
    try:
        for answer in answers(name, model, Path(folder), int(threads)):
            print(json.dumps(answer), file=said, flush=True)
    except Exception as error:
        print(json.dumps({"error": reason_of(error)}), file=said, flush=True)


def prepare(parent: str, model_name: str, folder: str, names: str, *batches: str) -> None:
    """Write what the engines `names` (by commas) share into `folder`; print why there is no ONNX export.

    That is the vectors of each batch by transformers in fp32 (by ours where it is not installed), and for
    those that run it the ONNX export, once more in int8 for ONNX Runtime.
    """
    end_with(int(parent))
    said, sys.stdout = sys.stdout, sys.stderr
    bank, reason = Bank(MODELS[model_name], torch.get_num_threads(), Path(folder)), None
    exported = [name for name in names.split(",") if name.startswith(EXPORTED)]
    if exported:
        try:
            made = bank.exported
            if made != Path(folder) / EXPORT:
                raise RuntimeError(f"exported to {made}, expected {EXPORT} in {folder}")
        except Exception as error:
            reason = f"no ONNX export: {reason_of(error)}"
    if reason is None and "onnxruntime-int8" in exported:
        with contextlib.suppress(Exception):  # its own process prints the reason
            bank.forward("onnxruntime-int8")
    try:
        forward = bank.forward("transformers-fp32")
    except RuntimeError:
        forward = bank.forward("fastbert-fp32")
    for workload in batches:
        inputs = workloads.padded_inputs(lengths_of(workload), bank.model.vocab, "cpu")
        torch.save(kept(forward(inputs), inputs), Path(folder) / f"{workload}.pt")
    print(json.dumps({"error": reason}), file=said, flush=True)
