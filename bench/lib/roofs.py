"""The roofs that the benchmarks compare with: arithmetic peak per dtype and memory bandwidth, as measured.

The arithmetic roof of a dtype is the highest rate measured on this machine: torch's square matrix product
(`probe_steps.step_matrix`) or, on a CPU with a C++ compiler, multiply-adds on registers (`peak.cpp`).
Numbers of a narrow dtype may be computed in a wider one, so no roof is below that of a wider dtype: on a
processor that multiplies bf16 slower than fp32, bf16 has the roof of fp32.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.lib import lines
from bench.lib.probe_steps import Bench, reason_of, step_bandwidth, step_matrix
from bench.lib.timing import summarise

REGISTER_LOOPS = ("fp32-avx2", "fp32-avx512", "bf16-avx512", "int8-avx512")  # the kinds of peak.cpp
WIDER = {"fp32": (), "fp16": ("fp32",), "bf16": ("fp32",), "int8": ("bf16", "fp16", "fp32")}
TAGS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}


@dataclass(frozen=True)
class Roofs:
    """Peak GFLOP/s by dtype ("fp32", "bf16", "fp16", "int8") and GB/s of memory."""

    gflops: dict[str, float]
    gbytes: float

    def seconds(self, flops: float, moved: float, tag: str) -> float:
        """The least time in which this machine can do `flops` operations and move `moved` bytes."""
        return max(flops / self.gflops[tag], moved / self.gbytes) * 1e-9


def from_rows(rows: Iterable[dict]) -> Roofs:
    """The roofs from measured rows; the peak of a wider dtype counts for the narrower ones.

    Raises:
        RuntimeError: where no row shows an fp32 peak or a bandwidth.
    """
    shown, gbytes = dict.fromkeys(WIDER, 0.0), 0.0
    for row in rows:
        if row["status"] == "ok" and "gflops" in row:
            tag = row["name"].split("-")[2]
            if tag in shown:  # not tf32, fp8
                shown[tag] = max(shown[tag], row["gflops"])
        elif row["status"] == "ok" and "gbs" in row:
            gbytes = max(gbytes, row["gbs"])
    if not (shown["fp32"] and gbytes):
        raise RuntimeError("no roof: neither the matrix products nor the copies could be measured")
    best = {tag: max(shown[t] for t in (tag, *wide)) for tag, wide in WIDER.items()}
    return Roofs(best, gbytes)


def of_file(path: Path) -> Roofs:
    """The roofs that a run of the probe recorded in a `*.json` or `*.jsonl`. Raises as `from_rows`."""
    data = lines.read(path) if path.suffix == ".jsonl" else json.loads(path.read_text())
    return from_rows(row for row in data["rows"] if row["step"] in ("matrix", "bandwidth"))


def measure(
    device: torch.device | str, smoke: bool = False, emit: Callable[[dict], None] = lambda row: None
) -> Roofs:
    """Measure the roofs of `device` with torch's present number of threads.

    Args:
        device: a CPU or a GPU.
        smoke: tiny shapes: tries the code only.
        emit: is handed each row, with the keys of bench/results/README.md.
    """
    rows: list[dict] = []

    def keep(row: dict) -> None:
        rows.append(row)
        emit(row)

    bench = Bench(torch.device(device), smoke, keep)
    for name, step in (("matrix", step_matrix), ("bandwidth", step_bandwidth)):
        bench.step = name
        step(bench)
        bench.free()
    if not bench.cuda:
        bench.step = "registers"
        with bench.recorded("peak-registers"), tempfile.TemporaryDirectory() as folder:
            peaks = build(Path(folder), "peak")
            peaks.peak_operations.restype = ctypes.c_long
            peaks.peak_run.argtypes, peaks.peak_run.restype = (ctypes.c_int, ctypes.c_long), None
            register_peaks(bench, peaks, torch.get_num_threads())
    return from_rows(rows)


def known_or_measured(
    file: Path | None, device: torch.device | str, smoke: bool, emit: Callable[[dict], None]
) -> Roofs:
    """The roofs of the probe's file; measured now if there is no file or it has none."""
    if file is not None:
        try:
            return of_file(file)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            print(f"# {file}: {reason_of(error)}; the roofs are measured anew", flush=True)
    return measure(device, smoke, emit)


def build(folder: Path, name: str) -> ctypes.CDLL:
    """Compile <name>.cpp of this folder into `folder` and load it. Raises RuntimeError where it cannot."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise RuntimeError(f"no C++ compiler for {name}.cpp")
    library = folder / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.cpp")
    command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{compiler} could not build {name}.cpp: {done.stderr[-300:]}")
    return ctypes.CDLL(str(library))


def register_peaks(bench: Bench, library: ctypes.CDLL, threads: int) -> None:
    """A row for each loop of peak.cpp that the processor can run: GFLOP/s of all `threads` together."""
    samples, aim = (2, 1e-3) if bench.smoke else (5, 0.1)
    for kind, name in enumerate(REGISTER_LOOPS):
        operations = library.peak_operations(kind)
        if operations == 0 or (
            name.endswith("avx512") and os.environ.get("FASTBERT_ISA", "").startswith("avx2")
        ):
            continue
        rounds = 10_000
        while (once := _together(library, kind, rounds, 1)) < aim / 10:
            rounds *= 4
        rounds = int(rounds * aim / once) + 1
        samples_ms = [_together(library, kind, rounds, threads) * 1e3 for _ in range(samples)]
        timing = summarise(samples_ms, rounds, "wall")
        bench.row(f"peak-registers-{name}", timing, flops=float(operations * rounds * threads))


def _together(library: ctypes.CDLL, kind: int, rounds: int, threads: int) -> float:
    """Seconds until `threads` threads, started together, have each done `rounds` rounds."""
    barrier = threading.Barrier(threads + 1)

    def one() -> None:
        barrier.wait()
        library.peak_run(kind, rounds)  # ctypes releases the interpreter's lock

    workers = [threading.Thread(target=one) for _ in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start
