"""NVIDIA's tools over single kernels, for gpu/checks.py: compute-sanitizer, and the profiler ncu."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).resolve().with_name("checks.py")
# A kernel -> the backend and an op that launches it in training.
PROFILED = {
    "attention_hopper_kernel": ("cuda", "attention"),
    "dq_hopper_kernel": ("cuda", "attention"),
    "dkdv_hopper_kernel": ("cuda", "attention"),
    "hopper_kernel": ("cuda", "feed_forward"),
    "_attention_fwd_kernel": ("triton", "attention"),
    "_attention_bwd_dkdv_kernel": ("triton", "attention"),
    "_attention_bwd_dq_kernel": ("triton", "attention"),
    "_layer_norm_fwd_kernel": ("triton", "layer_norm"),
    "_linear_fwd_kernel": ("triton", "linear"),
    "_feed_forward_bwd_kernel": ("triton", "feed_forward"),
}
# ncu's name of a figure -> ours.
METRICS = {
    "gpu__time_duration.sum": "us",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
}
# Units of time in ncu's tables, in microseconds.
MICROSECONDS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}


def program(name: str, tiny: bool) -> str:
    """The path of a tool, or why there is none."""
    if tiny:
        return "needs a GPU"
    return shutil.which(name) or f"no {name} on the PATH"


def sanitized(program: str, tool: str, cases: str, seconds: float) -> tuple[str, str | None]:
    """(status, reason) of one of compute-sanitizer's tools over `tiny-cases` or `hopper-cases`."""
    command = [program, f"--tool={tool}", "--error-exitcode=99", "--target-processes=application-only"]
    command += [sys.executable, str(CHECKS), cases]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor has bounds of its own
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env)
    except subprocess.TimeoutExpired:
        return "skipped", f"did not end within {seconds:.0f} s"
    text = done.stdout + done.stderr
    print(text[-3000:], flush=True)
    if done.returncode == 0 and f"{cases.replace('-', ' ')}: done" in text:
        return "ok", None
    found = [line for line in text.splitlines() if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
    if done.returncode == 99 and "not supported" not in text:
        return "failed", f"{'; '.join(found)}: {text[-1500:]}"
    return "skipped", f"the tool does not work here (exit status {done.returncode}): {text[-600:]}"


def profiled(
    program: str, kernel: str, backend: str, op: str, seconds: float
) -> tuple[str, str | None, dict]:
    """(status, reason, figures) of a kernel's second launch, the first being its warm-up."""
    command = [program, "--csv", "--page", "raw", "--kernel-name", f"regex:^{kernel}"]
    command += ["--launch-skip", "1", "--launch-count", "1", "--metrics", ",".join(METRICS)]
    command += [sys.executable, str(CHECKS), "one-call", "--op", op, "--backend", backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "skipped", f"did not end within {seconds:.0f} s", {}
    text = done.stdout + done.stderr
    found = figures(done.stdout)
    if found:
        return "ok", None, found
    if "ERR_NVGPUCTRPERM" in text:
        return "skipped", "this user may not read the GPU's counters", {}
    return "skipped", f"no figures (exit status {done.returncode}): {text[-600:]}", {}


def figures(text: str) -> dict[str, float]:
    """The figures of the first kernel in ncu's raw CSV page: names, units, values."""
    table = [row for row in csv.reader(text.splitlines()) if len(row) > 10]
    start = next((i for i, row in enumerate(table) if row[0] == "ID"), None)
    if start is None or len(table) < start + 3:
        return {}
    found = {}
    for name, unit, value in zip(*table[start : start + 3], strict=False):
        if name not in METRICS:
            continue
        try:
            number = float(value.replace(",", ""))
        except ValueError:
            # a counter that this GPU does not have
            continue
        found[METRICS[name]] = number * (MICROSECONDS.get(unit, 1.0) if METRICS[name] == "us" else 1.0)
    return found
