"""What bench_cpu.py will do, how long that takes, and what a budget leaves out.

A `Unit` is one engine on one workload in one step. Its time is estimated from the machine's roofs, before
anything is built. Units that are compared with each other are a group. A budget takes groups by priority, the
cheaper ones first; a group that does not fit is left out as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from bench import memory
from bench.lib import training, workloads
from bench.lib.engines import MODELS
from bench.lib.roofs import Roofs
from fastbert import testing
from fastbert.runtime import dispatch

# for estimates only: the share of the roof that encoders reach; seconds for compiling and for starting
SHARE = {"fp32": 0.7, "bf16": 0.5, "int8": 0.25}
COMPILE_SECONDS = {"encoder": 15.0, "training": 60.0}
# per process
START_SECONDS = 7.0
# that AdamW and the gradients move per parameter
STEP_BYTES = 28
# per engine or training candidate
BUILD_SECONDS = 3.0


@dataclass
class Unit:
    """One engine (kernels: one op) on one workload.

    Attributes:
        seconds: estimated.
        priority: lower ones first. Units of one step, model, workload and priority are one group; in training
            of one dtype and head, in kernels of one op.
        chosen: within the budget.
        head: in training, what is trained.
    """

    step: str
    model: str
    workload: str
    who: str
    seconds: float
    priority: int
    chosen: bool = True
    head: str = ""


def work(lengths: tuple[int, ...], model: workloads.Model, who: str) -> int:
    """Operations of one forward by `who`: all engines but ours compute the padding."""
    padded = (max(lengths),) * len(lengths)
    return workloads.encoder_flops(lengths if who.startswith("fastbert") else padded, model)


def parameters(model: workloads.Model) -> int:
    """How many parameters the encoder has, to a few per cent."""
    h = model.hidden
    return model.layers * (4 * h * h + 2 * h * model.intermediate) + (model.vocab + 512) * h


def encoder_units(
    model: str, first: bool, names: Iterable[str], engines: Iterable[str], calls: int, roofs: Roofs
) -> list[Unit]:
    """Units of the encoder's forward; `first`: the most important model."""
    units, size = [], MODELS[model]
    for i, name in enumerate(names):
        for who in engines:
            tag = who.split("-")[1]
            once = work(workloads.lengths(name), size, who) / (SHARE[tag] * roofs.gflops[tag] * 1e9)
            compiled = who.startswith("torch_compile")
            seconds = calls * once + compiled * COMPILE_SECONDS["encoder"] + (i == 0) * BUILD_SECONDS
            heavy = name == "ragged64"
            if compiled:
                priority = 5 if heavy or not first else 2 if name == "8x128" else 3
            else:
                priority = (5 if heavy else 0) if first else (4 if heavy else 2)
            units.append(Unit("encoder", model, name, who, seconds, priority))
    return units


def training_seconds(model: str, workload: str, who: str, roofs: Roofs, head: str) -> float:
    """Seconds of one training step by `who` (fastbert-bf16). Ours computes logits of labelled tokens only."""
    size, tag, lengths = MODELS[model], who.split("-")[1], workloads.lengths(workload)
    operations = 3 * work(lengths, size, who)
    if head == "pretraining":
        rows = 0.15 * sum(lengths) if who.startswith("fastbert") else len(lengths) * max(lengths)
        operations += 6 * rows * size.hidden * size.vocab
    once = operations / (0.7 * SHARE[tag] * roofs.gflops[tag] * 1e9)
    return once + parameters(size) * STEP_BYTES / (roofs.gbytes * 1e9)


def training_units(
    model: str,
    names: Iterable[str],
    wanted: Iterable[str],
    calls: int,
    roofs: Roofs,
    tags: Iterable[str] = ("fp32", "bf16"),
    heads: Iterable[str] = ("classification",),
) -> list[Unit]:
    """Units of the training step."""
    units = []
    for name, head in itertools.product(names, heads):
        for who in (f"{who}-{tag}" for tag in tags for who in wanted):
            compiled = who.startswith("torch_compile")
            seconds = calls * training_seconds(model, name, who, roofs, head) + BUILD_SECONDS
            seconds += compiled * COMPILE_SECONDS["training"]
            priority = 6 if compiled else 1 if name == "8x128" else 2
            units.append(Unit("training", model, name, who, seconds, priority, head=head))
    return units


def training_memory_units(
    model: str,
    names: Iterable[str],
    engines: Iterable[str],
    roofs: Roofs,
    heads: Iterable[str] = ("classification",),
) -> list[Unit]:
    """Units of the peak memory of two training steps; each is a process."""
    units = []
    for name, head, who in itertools.product(names, heads, engines):
        seconds = START_SECONDS + BUILD_SECONDS + 2 * training_seconds(model, name, who, roofs, head)
        units.append(Unit("training_memory", model, name, who, seconds, 3, head=head))
    return units


def memory_units(model: str, engines: Iterable[str], roofs: Roofs) -> list[Unit]:
    """Units of the peak memory; each is a process."""
    units, lengths = [], workloads.lengths(memory.WORKLOAD)
    for who in engines:
        tag = who.split("-")[1]
        once = work(lengths, MODELS[model], who) / (SHARE[tag] * roofs.gflops[tag] * 1e9)
        units.append(Unit("memory", model, memory.WORKLOAD, who, START_SECONDS + 1.3 * once, 1))
    return units


def kernels_units(names: Iterable[str], ops: Iterable[str], roofs: Roofs) -> list[Unit]:
    """Units of the per-op lines: two dtypes, two passes, about two backends beside PyTorch."""
    units = []
    for i, name in enumerate(names):
        for op in ops:
            seconds = 0.0
            for case in testing.bench_cases(op, workloads.lengths(name)):
                least = roofs.seconds(case.flops(), case.bytes(torch.float32), "fp32")
                passes = (
                    1 if op in getattr(dispatch, "INFERENCE_ONLY", ()) else 3
                )  # a backward takes about two forwards
                seconds += 2 * 4 * passes * max(0.1, 9 * least / 0.4)
            units.append(Unit("kernels", "base", name, op, seconds, 2 if i == 0 else 3))
    return units


def choose(units: list[Unit], budget: float) -> None:
    """Mark the groups that fit into `budget` seconds (0: everything): by priority, then the cheaper first."""
    groups: dict[tuple, list[Unit]] = {}
    for unit in units:
        apart = {"kernels": unit.who, "training": unit.who.split("-")[-1]}.get(unit.step)
        key = unit.priority, unit.step, unit.model, unit.workload, unit.head, apart
        groups.setdefault(key, []).append(unit)
    left = budget
    for group in sorted(groups.values(), key=lambda group: (group[0].priority, cost(group))):
        chosen = budget == 0 or cost(group) <= left
        left -= cost(group) * chosen
        for unit in group:
            unit.chosen = chosen


def cost(units: Iterable[Unit]) -> float:
    """Estimated seconds of all of these."""
    return sum(unit.seconds for unit in units)


def training_candidates(wanted: Iterable[str]) -> tuple[str, ...]:
    """Those of training.CANDIDATES whose engine is wanted in the forward too."""
    names = tuple(wanted)
    return tuple(c for c in training.CANDIDATES if any(name.startswith(c) for name in names))
