"""What machine a run is on, and which commit: the facts that every results file begins with."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from bench.lib.timing import cache_bytes, memory_bytes
from fastbert.runtime import loader

ROOT = Path(__file__).resolve().parents[2]


def interpret() -> None:
    """Let Triton's kernels of this process run on the CPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    from fastbert.testing import triton_interpreter  # without it the interpreter computes bfloat16 wrong

    triton_interpreter.choose()
    torch.set_num_threads(1)


def read_clocks(device: torch.device) -> dict[str, str] | None:
    """Clocks, power, temperature (a CPU: clocks, load) as found; never set. None: cannot be read."""
    if device.type != "cuda":
        with contextlib.suppress(OSError):
            found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), re.M)
            return {"cpu_mhz": ", ".join(found), "load": ", ".join(f"{x:.1f}" for x in os.getloadavg())}
        return None
    fields = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu,persistence_mode"
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    if uuid is not None:
        command.append(f"--id=GPU-{uuid}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return None
    return dict(zip(fields.split(","), (value.strip() for value in lines[0].split(",")), strict=False))


def cpu_facts() -> dict[str, object]:
    """Name, family and model of the processor, and how many cores this process may use."""
    facts: dict[str, object] = {"name": platform.processor() or platform.machine()}
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        for key, field in (("name", "model name"), ("family", "cpu family"), ("model", "model")):
            if found := re.search(rf"^{field}\s*:\s*(.+)$", text, re.M):
                facts[key] = found[1].strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return facts | {"cores": cores, "isa": other_isa()}


def other_isa() -> str | None:
    """The instruction set of our kernels, where FASTBERT_ISA asks for another than they would take."""
    extension = loader.extension
    in_use = None if extension is None else extension.cpu_isa()
    return None if extension is None or in_use == extension.preferred_cpu_isa() else in_use


def slug(text: str) -> str:
    """Lower-case words joined by dashes, without trademark signs."""
    return "-".join(re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)", " ", text.lower())))


def device_slug(environment: dict) -> str:
    """The name of this device's folder under bench/results."""
    if environment["device_type"] == "cuda":
        return slug(environment["device"])
    cpu = environment["cpu"]
    which = f" family {cpu['family']} model {cpu['model']}" if "family" in cpu and "model" in cpu else ""
    return f"cpu-{slug(cpu['name'] + which)}-{cpu['cores']}c" + (f"-{cpu['isa']}" if cpu.get("isa") else "")


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit_here() -> dict[str, object]:
    """Commit of the checkout and whether tracked files differ from it; None where git cannot tell."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--verify", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "changed": None if changes is None else bool(changes)}


def describe(device: torch.device) -> dict[str, object]:
    """Device, versions and clocks as found."""
    cpu = cpu_facts()
    facts: dict[str, object] = {
        "device_type": device.type,
        "device": cpu["name"],
        "cpu": cpu | {"capability": torch.backends.cpu.get_cpu_capability()},
        "threads": torch.get_num_threads(),
        "cache_bytes": cache_bytes(device),
        "memory_bytes": memory_bytes(device),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "transformers": package_version("transformers"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "sms": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            facts["driver"] = done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
    return facts | {"slug": device_slug(facts), "clocks_at_start": read_clocks(device)}
