"""How long a training benchmark will take, estimated from the machine's roofs before anything is built."""

from __future__ import annotations

from bench.lib import workloads
from bench.lib.engines import MODELS
from bench.lib.roofs import Roofs

# for estimates only: the share of the roof that encoders reach; training reaches 0.7 of it
SHARE = {"fp32": 0.7, "bf16": 0.5, "int8": 0.25}
SHARE_OF_TRAINING = 0.7
COMPILE_SECONDS = 60.0
# per process
START_SECONDS = 7.0
# that AdamW and the gradients move per parameter
STEP_BYTES = 28
# per candidate
BUILD_SECONDS = 3.0


def work(lengths: tuple[int, ...], model: workloads.Model, who: str) -> int:
    """Operations of one forward by `who`: all engines but ours compute the padding."""
    padded = (max(lengths),) * len(lengths)
    return workloads.encoder_flops(lengths if who.startswith("fastbert") else padded, model)


def parameters(model: workloads.Model) -> int:
    """How many parameters the encoder has, to a few per cent."""
    h = model.hidden
    return model.layers * (4 * h * h + 2 * h * model.intermediate) + (model.vocab + 512) * h


def step_seconds(model: str, workload: str, who: str, roofs: Roofs, head: str) -> float:
    """Seconds of one training step by `who` (fastbert-bf16). Ours computes logits of labelled tokens only."""
    size, tag, lengths = MODELS[model], who.split("-")[1], workloads.lengths(workload)
    operations = 3 * work(lengths, size, who)
    if head == "pretraining":
        rows = 0.15 * sum(lengths) if who.startswith("fastbert") else len(lengths) * max(lengths)
        operations += 6 * rows * size.hidden * size.vocab
    once = operations / (SHARE_OF_TRAINING * SHARE[tag] * roofs.gflops[tag] * 1e9)
    return once + parameters(size) * STEP_BYTES / (roofs.gbytes * 1e9)


def training_seconds(model: str, workload: str, who: str, calls: int, roofs: Roofs, head: str) -> float:
    """Seconds of `calls` steps and what comes before them."""
    compiling = COMPILE_SECONDS if who.startswith("torch_compile") else 0.0
    return calls * step_seconds(model, workload, who, roofs, head) + BUILD_SECONDS + compiling


def memory_seconds(model: str, workload: str, who: str, roofs: Roofs, head: str) -> float:
    """Seconds of a process that trains two steps, for their peak memory."""
    return START_SECONDS + BUILD_SECONDS + 2 * step_seconds(model, workload, who, roofs, head)
