"""What a device can do, what share of it the kernels reach, and so how long a `costs.Work` takes.

A device has roofs: arithmetic per dtype, memory bandwidth. They are measured (a file of the probe or of a
benchmark) or, for a GPU without such a file, its datasheet's times REACHED. A time from a datasheet is
projected, not measured.

    time = arithmetic / share + memory / share + launches     on a CPU, whose cores wait for what they load
    time = max(arithmetic / share, memory / share) + launches on a GPU, which does both at once

The shares are the constants of CPU and GPU below, one per kind of work and class of dtypes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.lib import lines, roofs
from bench.lib.costs.counts import BACKWARD, EIGHT_BIT, LIBRARY, PAIRS, Work
from bench.lib.results import Run

RESULTS = Path(__file__).resolve().parents[2] / "results"
GIB = 2.0**30

# Shares of the roofs that our kernels reach on a CPU: printed by `python bench/model.py fit`, from single ops
# of BERT-base (1x512, 8x128), AdamW and attention's dropout on one machine (committed.FITTED); no forward as
# a whole was fitted, and of a training step only AdamW. Given, not fitted: a product moves its bytes at the
# roof; a launch is the probe's call of a custom op on that machine.
# product library: of the rate of torch's own fp32 product of 2048, which the probe measures too.
# A share above 1: the copy that measures the bandwidth also reads what it overwrites, and small tensors stay
# in a cache. Attention's memory: each head's keys and values are laid out anew.
CPU = {
    "product fp32": 0.98,
    "product library": 0.97,
    "product half": 0.81,
    "product 8-bit": 0.88,
    "product memory": 1.0,
    "attention forward": 0.76,
    "attention backward": 0.72,
    "attention memory": 0.4,
    "rows fp32": 1.11,
    "rows half": 0.74,
    "draw": 0.243,
    "optimizer": 1.87,
    "launch us": 9.6,
}
# The same on a GPU, where no kernel of ours has been timed yet: what the best published kernels reach.
# product: cuBLAS at (65536, 1024, 1024), 584 of 790 TFLOP/s (H100); in 8 bits row-wise products at 1.9 times
# the rate of bf16. attention: 340 (Triton) and 272 (FlashAttention-3) TFLOP/s at 512 tokens, head_dim 64.
# launch: TensorRT's BERT-base, batch 1, 128 tokens on an A100, 0.67 ms. Assumed, not measured: products in
# fp32, row-wise work, AdamW, and random numbers at 30 instructions each.
GPU = {
    "product fp32": 0.74,
    "product half": 0.74,
    "product 8-bit": 0.70,
    "product memory": 0.9,
    "attention forward": 0.43,
    "attention backward": 0.344,
    "attention memory": 0.9,
    "rows fp32": 0.9,
    "rows half": 0.9,
    "draw": 0.33,
    "optimizer": 0.9,
    "launch us": 6.2,
}
SHARES = {"cpu": CPU, "gpu": GPU}
# of a datasheet, what an H200 shows: 790 of 989 TFLOP/s in a bf16 product of 8192, a copy at 4.3 of 4.8 TB/s
REACHED = {"arithmetic": 0.80, "memory": 0.896}


@dataclass(frozen=True)
class Datasheet:
    """A GPU's figures as its maker states them, without sparsity.

    Attributes:
        tflops: by dtype; fp32 without tensor cores.
        gbytes: GB/s of memory.
        memory_gb: of 10^9 bytes.
        nvlink: GB/s, both directions together.
        source: where they are from.
    """

    tflops: dict[str, float]
    gbytes: float
    memory_gb: float
    nvlink: float
    source: str


def _tflops(half: float, eight: float, fp32: float, fp8: bool = True) -> dict[str, float]:
    return {"fp32": fp32, "bf16": half, "fp16": half, "int8": eight} | ({"fp8": eight} if fp8 else {})


DATASHEETS = {
    "a100": Datasheet(
        _tflops(312, 624, 19.5, fp8=False), 2039, 80, 600, "NVIDIA A100 datasheet, A100 80GB SXM"
    ),
    "h100": Datasheet(_tflops(989, 1979, 67), 3350, 80, 900, "NVIDIA H100 datasheet, H100 SXM"),
    "h200": Datasheet(_tflops(989, 1979, 67), 4800, 141, 900, "NVIDIA H200 datasheet, H200 SXM"),
    "b200": Datasheet(
        _tflops(2250, 4500, 75),
        8000,
        180,
        1800,
        "NVIDIA DGX B200 and HGX B200 datasheets: an eighth of a system, half of the sparse rates",
    ),
}


@dataclass(frozen=True)
class Device:
    """One device as the model sees it.

    Attributes:
        name: of the device.
        kind: "cpu" or "gpu".
        gflops, gbytes: the roofs: GFLOP/s by dtype, on a CPU also of LIBRARY and PAIRS; GB/s of memory.
        measured: whether the roofs were measured.
        source: the file or datasheet.
        memory_gib: of one GPU, or None.
        link: GB/s of its NVLink in one direction, or None.
        shares: of the roofs that are reached.
    """

    name: str
    kind: str
    gflops: dict[str, float]
    gbytes: float
    measured: bool
    source: str
    memory_gib: float | None
    link: float | None
    shares: dict[str, float]

    @property
    def word(self) -> str:
        """How a prediction for this device is marked."""
        return "predicted from measured roofs" if self.measured else "projected from a datasheet"

    def seconds(self, works: Iterable[Work]) -> float:
        """The time of all of these together."""
        return sum(self.parts(work)[0] for work in works)

    def parts(self, work: Work) -> tuple[float, str]:
        """(seconds, what bounds them: "arithmetic", "memory" or "launch").

        Raises:
            ValueError: this device has no roof for the work's dtype.
        """
        arithmetic, memory, launch = self.terms(work)
        a, m = (seconds / self.shares[name] for name, seconds in (arithmetic, memory))
        body = a + m if self.kind == "cpu" else max(a, m)
        bounds = {"arithmetic": a, "memory": m, "launch": launch}
        return body + launch, max(bounds, key=bounds.__getitem__)

    def terms(self, work: Work) -> tuple[tuple[str, float], tuple[str, float], float]:
        """((share, seconds of the operations at the roof), (share, of the bytes), seconds of launches)."""
        a = work.flops / self.rate(work.tag) * 1e-9
        m = work.moved / self.gbytes * 1e-9
        arithmetic, memory = share_names(work)
        # the operations of row-wise work hide behind its bytes
        a = 0.0 if work.kind in ("rows", "optimizer") else a
        return (arithmetic, a), (memory, m), work.calls * self.shares["launch us"] * 1e-6

    def rate(self, tag: str) -> float:
        """The arithmetic roof of a dtype in GFLOP/s. Raises ValueError where there is none."""
        if tag not in self.gflops:
            known = ", ".join(self.gflops)
            raise ValueError(f"dtype: got {tag!r}, which {self.name} has no roof for; it has {known}")
        return self.gflops[tag]

    def floor(self, works: Iterable[Work], least_bytes: float = 0.0) -> float:
        """Seconds at the roofs themselves: of the products' and attention's operations; on a GPU no less than
        those of `least_bytes`.
        """
        heavy = [work for work in works if work.kind in ("product", "attention")]
        operations = sum(work.flops / self.rate(work.tag) for work in heavy) * 1e-9
        return max(operations, least_bytes / self.gbytes * 1e-9) if self.kind == "gpu" else operations


def share_names(work: Work) -> tuple[str, str]:
    """The constants for a work's operations and for its bytes."""
    if work.kind == "product":
        kind = "8-bit" if work.tag in EIGHT_BIT else "library" if work.tag == LIBRARY else work.storage
        return f"product {kind}", "product memory"
    if work.kind == "attention":
        which = "backward" if work.which == BACKWARD else "forward"
        return f"attention {which}", "attention memory"
    if work.kind == "rows":
        return f"rows {work.storage}", f"rows {work.storage}"
    return work.kind, work.kind


def of_file(path: Path) -> Device:
    """The device that a file of the probe or of a benchmark describes, with its measured roofs.

    Raises:
        ValueError: it cannot be read, or holds no roofs.
    """
    try:
        data = lines.read(path) if path.suffix == ".jsonl" else json.loads(path.read_text())
        environment = data["environment"]
        if data.get("roofs"):
            found = roofs.Roofs(**data["roofs"])
        else:
            found = roofs.from_rows(r for r in data["rows"] if r["step"] in ("matrix", "bandwidth"))
        kind = "gpu" if environment["device_type"] == "cuda" else "cpu"
        name = environment["device"]
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"device: got {str(path)!r}, which holds no roofs ({reason})") from error
    gflops = dict(found.gflops)
    matrix = {r["name"]: r["gflops"] for r in data["rows"] if r["step"] == "matrix" and "gflops" in r}
    for tag, part in (("fp8", "-fp8"), (LIBRARY, "matmul-torch-fp32-")):
        rates = [rate for row, rate in matrix.items() if part in row]
        if rates and (tag == "fp8" or kind == "cpu"):
            gflops[tag] = max(rates)
    if kind == "cpu":
        gflops = _of_cpu(gflops)
    sheet = next((s for key, s in DATASHEETS.items() if key in name.lower()), None)
    memory = environment.get("memory_bytes", 0) / GIB if kind == "gpu" else 0
    return Device(
        name=name,
        kind=kind,
        gflops=gflops,
        gbytes=found.gbytes,
        measured=True,
        source=path.name,
        memory_gib=memory or (gib(sheet) if sheet and kind == "gpu" else None),
        link=sheet.nvlink / 2 if sheet and kind == "gpu" else None,
        shares=SHARES[kind],
    )


def _of_cpu(gflops: dict[str, float]) -> dict[str, float]:
    """A CPU's roofs with those of LIBRARY and PAIRS."""
    fp32, bf16 = gflops["fp32"], gflops.get("bf16", 0.0)
    # as csrc/cpu/isa.cpp chooses: where pairs are hardly faster, they are widened
    return {LIBRARY: fp32, PAIRS: bf16 if bf16 > 1.5 * fp32 else fp32} | gflops


def of_run(run: Run) -> Device:
    """The CPU of a run of the suite. Raises ValueError where it recorded no roofs, or is of a GPU."""
    if run.roofs is None or run.machine["device_type"] != "cpu":
        raise ValueError(f"run: got {run.path.name}, expected one of a CPU with its roofs")
    return Device(
        name=run.machine["device"],
        kind="cpu",
        gflops=_of_cpu(dict(run.roofs.gflops)),
        gbytes=run.roofs.gbytes,
        measured=True,
        source=run.path.name,
        memory_gib=None,
        link=None,
        shares=CPU,
    )


def gib(sheet: Datasheet) -> float:
    """A datasheet's memory in GiB."""
    return sheet.memory_gb * 1e9 / GIB


def of_datasheet(name: str) -> Device:
    """The GPU of that name from its datasheet."""
    sheet = DATASHEETS[name]
    return Device(
        name=name.upper(),
        kind="gpu",
        gflops={tag: rate * 1e3 * REACHED["arithmetic"] for tag, rate in sheet.tflops.items()},
        gbytes=sheet.gbytes * REACHED["memory"],
        measured=False,
        source=sheet.source,
        memory_gib=gib(sheet),
        link=sheet.nvlink / 2,
        shares=GPU,
    )


def find(name: str, results: Path = RESULTS) -> Device:
    """A device by the name of its file, or of a GPU. A probe of that GPU in `results` wins over a datasheet.

    Raises:
        ValueError: neither a file nor a known GPU.
    """
    path = Path(name)
    if path.suffix in (".json", ".jsonl") or path.exists():
        return of_file(path)
    key = name.lower()
    if key not in DATASHEETS:
        known = ", ".join(DATASHEETS)
        raise ValueError(f"device: got {name!r}, expected a file with roofs or one of {known}")
    folders = (f for f in sorted(results.glob("*")) if key in re.split(r"[^a-z0-9]", f.name.lower()))
    probes = [folder / "probe.json" for folder in folders if (folder / "probe.json").exists()]
    return of_file(probes[0]) if probes else of_datasheet(key)
