"""Published figures of others on GPUs beside the model's projections.

A figure is compared in its own unit. `fitted` marks those that the constants of `devices.GPU` come from; they
check nothing. The others were not fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.lib import mlperf_records, workloads
from bench.lib.costs import counts as costs
from bench.lib.costs import devices
from bench.lib.costs.counts import PASSES
from bench.lib.workloads import BASE, LARGE, Model

INFERENCE = "MLPerf Inference v4.1, closed, H200-SXM-141GB, BERT-large SQuAD offline, per GPU"
TRAINING = "MLPerf Training v4.1, BERT-large, packs of 512 tokens, per GPU"
TENSORRT = "TensorRT's demo/BERT"


@dataclass(frozen=True)
class Published:
    """One published figure.

    Attributes:
        value, unit: "samples/s", "packs/s", "ms" or "TFLOP/s".
        device: of devices.DATASHEETS.
        model, lengths, tag, train: what the model projects for it.
        source: who published it.
        note: what is comparable.
        op: if only one op of a layer is compared, its name and pass.
        fitted: whether the constants come from it.
    """

    value: float
    unit: str
    device: str
    model: Model
    lengths: tuple[int, ...]
    tag: str
    source: str
    note: str
    train: bool = False
    op: tuple[str, str] | None = None
    fitted: bool = False

    def unit_of(self, seconds: float, flops: float) -> float:
        """A time in this figure's unit."""
        if self.unit == "ms":
            return seconds * 1e3
        return flops / seconds * 1e-12 if self.unit == "TFLOP/s" else len(self.lengths) / seconds


# 16 lengths from a fifth of 512 to 512, evenly spread: their mean is 0.6 of the longest
SPREAD = tuple(round(512 * (0.2 + 0.8 * (i + 0.5) / 16)) for i in range(16))


def figures() -> tuple[Published, ...]:
    """All of them."""
    squad, packs, full = map(workloads.lengths, ("squad", "train", "full"))
    record = {name: [r.value for r in each.records] for name, each in mlperf_records.WORKLOADS.items()}
    nvidia_fp8, dell_fp8, _, dell_int8 = record["squad"]
    (trained,) = record["train"]
    half = "theirs in 8 bits, ours in bf16: how far bf16 is from it"
    eight = "8-bit products, attention in bf16; a projection, no fp8 kernel of ours exists"
    packed = "theirs with LAMB over 8 GPUs or more; ours one GPU, AdamW, fp8 products only"
    windows, steps = ("samples/s", "h200", LARGE, squad), ("packs/s", "h200", LARGE, packs)
    charts = ("TFLOP/s", "h100", LARGE, full, "bf16", "FlashAttention-3's charts")
    dell, nvidia = f"{INFERENCE}, 99.9%, FP8 (Dell)", f"{INFERENCE}, 99.9%, FP8 (NVIDIA)"
    engine, origin = "TensorRT-class engine, from its share of an A100's peak", "derived, not measured"
    # a product's figure does not depend on what its op is called: one of (65536, 1024, 1024)
    square = ("TFLOP/s", "h100", LARGE, (512,) * 128, "bf16", "cuBLAS at (65536, 1024, 1024)", "K = 1024")
    older = "16 sequences, mean 0.6 of 512; its kernels are of 2022, before the rates projected here"
    of_launch = "batch 1; a launch's time comes from it"
    forward, backward = ({"op": ("attention", which), "fitted": True} for which in PASSES[:2])
    return (
        Published(dell_fp8, *windows, "bf16", dell, half),
        Published(dell_fp8, *windows, "fp8", dell, eight),
        Published(nvidia_fp8, *windows, "fp8", nvidia, eight),
        Published(dell_int8, *windows, "int8", f"{INFERENCE}, 99%, INT8", "attention may be in 8 bits too"),
        Published(trained, *steps, "bf16", f"{TRAINING}, FP8", half, train=True),
        Published(trained, *steps, "fp8", f"{TRAINING}, FP8", packed, train=True),
        Published(340, *charts, "forward, 512 tokens, head_dim 64", **forward),
        Published(272, *charts, "backward, without dropout", **backward),
        Published(584, *square, op=("attention output", costs.FORWARD), fitted=True),
        Published(0.67, "ms", "a100", BASE, (128,), "fp16", TENSORRT, of_launch, fitted=True),
        Published(1.64, "ms", "a100", LARGE, (128,), "fp16", TENSORRT, "batch 1"),
        Published(5.8, "ms", "h200", BASE, full, "bf16", engine, origin),
        Published(18.3, "ms", "h200", LARGE, full, "bf16", engine, origin),
        Published(9.22, "ms", "a100", BASE, SPREAD, "fp16", "ByteTransformer's README", older),
    )


@dataclass(frozen=True)
class Beside:
    """A published figure, the projection, and the floor at the roofs, all in its unit."""

    figure: Published
    predicted: float
    floor: float
    word: str

    @property
    def verdict(self) -> str:
        """What the three say about each other."""
        sign = -1 if self.figure.unit == "ms" else 1
        value, predicted, floor = (sign * x for x in (self.figure.value, self.predicted, self.floor))
        if self.figure.fitted:
            return "what constants were fitted to"
        if value > floor:
            return "faster than the floor: this dtype cannot meet it at the rate of large products"
        return "faster than the model predicts" if value > predicted else "slower than the model predicts"


def beside() -> Iterator[Beside]:
    """Each figure beside the model's, for a GPU as its maker states it: a probe of ours is of another one."""
    for figure in figures():
        device = devices.of_datasheet(figure.device)
        build = costs.training if figure.train else costs.forward
        if figure.op is not None:
            # one op of each layer, without its launches
            op, which = figure.op
            works = costs.training(figure.model, figure.lengths, figure.tag, on_gpu=True)
            works = [replace(work, calls=0) for work in works if (work.op, work.which) == (op, which)]
        else:
            works = build(figure.model, figure.lengths, figure.tag, on_gpu=True)
        flops = sum(work.flops for work in works)
        least = 0 if figure.op else costs.least_bytes(figure.model, figure.lengths, figure.tag, on_gpu=True)
        seconds, floor = device.seconds(works), device.floor(works, least)
        yield Beside(figure, figure.unit_of(seconds, flops), figure.unit_of(floor, flops), device.word)
