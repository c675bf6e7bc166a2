"""A training step beside transformers', on a GPU: time, peak memory, share of the floor.

    python bench/gpu/training.py [--models base large] [--budget SECONDS]

| step | what |
|---|---|
| `training` | forward, backward, fused AdamW step: ours, transformers (sdpa), torch.compile of it |
| `training_memory` | peak of two steps, each candidate in its own process |
| `attention` | attention alone, forward and backward with dropout, its bits saved and drawn again; SDPA |
| `footprint` | what a step keeps and needs on a GPU, counted on tensors without data |

BERT-base on `full` (32 x 512) and -large on `train` (48 x 512), dropout 0.1, fp32 parameters, bf16 autocast:
masked tokens (15%) and next sentence, and classification.

All candidates of a group have the same weights, batch and optimizer and are interleaved. A sample is one step
with the device idle at both ends; rows are medians. `grad_cosine` compares gradients before anything counts.
`of_floor` is the time of the real tokens' operations, forward and backward, at the measured rate of the
dtype, over the time of the step. A candidate that is missing or fails is a row with the reason.

The most important groups come first, torch.compile last; the run prints the groups that `--budget` leaves
out. For a CPU (`--device cpu --workloads 8x128`) `fastbert bench training` has more.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from bench import footprint, memory
from bench.gpu import groups
from bench.gpu.groups import COMPILED
from bench.lib import attention, training, workloads
from bench.lib.engines import MODELS
from bench.lib.roofs import Roofs

STEPS = ("training", "training_memory", "attention", "footprint")
BATCHES = {"base": "full", "large": "train", "tiny": "1x128"}
PLAIN = tuple(name for name in training.CANDIDATES if name != COMPILED)
# seconds that a candidate takes on a GPU, where kernels compile and processes start
SECONDS = {"training": 7.0, "training_memory": 20.0, "attention": 3.0, "footprint": 5.0, COMPILED: 90.0}


def plan(args: argparse.Namespace, roofs: Roofs, left: Callable[[], float]) -> Iterator[groups.Group]:
    """What is measured together, the most important first."""

    def rows(step: str, model: str, batch: str, head: str, tag: str, who: tuple[str, ...]) -> Iterable[dict]:
        lengths, size = groups.lengths(args, workloads.lengths(batch)), MODELS[model]
        if step == "footprint":
            return footprint.rows(size, batch, head, tag, who)
        if step == "attention":
            return attention.rows(size, batch, lengths, tag, args.device, args.samples, roofs)
        if step == "training_memory":
            engines = tuple(f"{name}-{tag}" for name in who)
            timeout = min(memory.TIMEOUT_SECONDS, max(1.0, left()))
            options = {"timeout": timeout, "what": head, "device": args.device}
            return memory.bench_memory(model, batch, engines, torch.get_num_threads(), lengths, **options)
        options = {"head": head, "samples": args.samples, "lengths": lengths, "roofs": roofs}
        return training.bench_training(size, batch, tag, wanted=who, device=args.device, **options)

    def together(step: str, who: tuple[str, ...], head: str) -> Iterator[groups.Group]:
        counted = args.device == "cuda" and not args.smoke
        each = [SECONDS[COMPILED if name == COMPILED else step] for name in who]
        for model in args.models if step in args.steps and who else ():
            batches, tags = args.workloads or [BATCHES.get(model, "8x128")], args.dtypes
            if step == "footprint":  # counted for a GPU
                batches, tags = [BATCHES.get(model, footprint.WORKLOAD)], ["bf16"]
            for batch, tag in itertools.product(batches, tags):
                yield groups.Group(
                    step=step,
                    model=model,
                    workload=batch,
                    head=head,
                    candidates=tuple(f"{name}-{tag}" for name in who),
                    rows=functools.partial(rows, step, model, batch, head, tag, who),
                    seconds=sum(each) * (2.0 if model == "large" else 1.0) * counted,
                )

    plain = tuple(name for name in PLAIN if name in args.candidates)
    for i, head in enumerate(args.heads):
        yield from together("training", plain, head)
        yield from together("training_memory", plain, head)
        if i == 0:
            yield from together("attention", attention.CANDIDATES, "dropout")
        yield from together("footprint", plain, head)
    if COMPILED in args.candidates:
        for head in args.heads:
            yield from together("training", (*PLAIN, COMPILED), head)
        # a CPU's resident memory would be the compiler's
        for head in args.heads if args.device == "cuda" else ():
            yield from together("training_memory", (COMPILED,), head)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser, candidates = groups.options(__doc__, samples=7), training.CANDIDATES
    models = tuple(MODELS)
    parser.add_argument("--models", nargs="+", choices=models, default=["base", "large"], metavar="MODEL")
    parser.add_argument("--workloads", nargs="+", choices=workloads.names(), metavar="WORKLOAD")
    parser.add_argument("--heads", nargs="+", choices=tuple(training.HEADS), default=list(training.HEADS))
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16"])
    parser.add_argument("--candidates", nargs="+", choices=candidates, default=list(candidates))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    return groups.parsed(parser, argv)


def main(argv: list[str] | None = None) -> int:
    return groups.record(parse(argv), plan)


if __name__ == "__main__":
    sys.exit(main())
