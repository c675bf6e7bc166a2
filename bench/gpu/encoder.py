"""The encoder's forward on a GPU by every engine, ours and the peers', interleaved.

    python bench/gpu/encoder.py [--models base large] [--workloads full squad latency] [--budget SECONDS]

`full` (32 x 512), `squad` (96 SQuAD lengths), `latency` (one sequence of 128, one of 384 tokens) for
BERT-base and -large in bf16. Engines: ours, ours by CUDA graphs, and transformers' model after
`fastbert.accelerate`; transformers eager, sdpa, sdpa by cuDNN and flash-attention 2; torch's
nn.TransformerEncoder (its fused inference path); both by one CUDA graph per batch (`_graphs`);
transformers under torch.compile(mode="max-autotune"). An engine that is not installed or fails is a row with
the reason. Eager calls are compared with eager ones, graphs with graphs.

All have the same weights and inputs. Before anything is timed their vectors are compared (`cosine`). A sample
is one call with the device idle at both ends, as a caller waits for it. Samples are interleaved over several
batches; rows are medians. `of_floor` is the least time over the time taken. The least time is that of the
real tokens' operations at the measured bf16 rate, or of their bytes at the measured bandwidth if that is
longer.

torch.compile is timed last, again beside ours and sdpa: it compiles for a minute or more per shape, and
`--budget` drops it first. Rows are recorded as they are measured.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from bench.gpu import engines as gpu_engines
from bench.gpu import groups
from bench.lib import encoder, workloads
from bench.lib.engines import MODELS
from bench.lib.roofs import Roofs

WORKLOADS = ("full", "squad", "latency")
COMPILED = "torch_compile-bf16"
BESIDE_COMPILED = ("fastbert-bf16", "fastbert_graphs-bf16", "transformers_sdpa-bf16", COMPILED)
# seconds that a group of engines needs on one batch; with less of the budget left, the group is left out
PLAIN_SECONDS, COMPILE_SECONDS = {"base": 6.0, "large": 12.0, "minilm": 4.0}, {"base": 60.0, "large": 100.0}


def plan(args: argparse.Namespace, roofs: Roofs, left: Callable[[], float]) -> Iterator[groups.Group]:
    """What is timed together, the most important first: everything but torch.compile, then torch.compile."""
    engines = encoder.Engines(lambda model: gpu_engines.Bank(model, args.device))

    def rows(model: str, batch: str, candidates: tuple[str, ...]) -> Iterator[dict]:
        options = {"device": args.device, "samples": args.samples, "sets": 2 if args.smoke else 4}
        options["lengths"] = groups.lengths(args, workloads.lengths(batch))
        forwards = engines.of(MODELS[model], candidates)
        return encoder.bench_encoder(MODELS[model], batch, forwards, roofs, **options)

    plain = tuple(name for name in args.engines if name != COMPILED)
    compiled = BESIDE_COMPILED if COMPILED in args.engines else ()
    for candidates, seconds in ((plain, PLAIN_SECONDS), (compiled, COMPILE_SECONDS)):
        for model in args.models if candidates else ():
            for batch in (batch for name in args.workloads for batch in workloads.expand(name)):
                yield groups.Group(
                    step="encoder",
                    model=model,
                    workload=batch,
                    candidates=candidates,
                    rows=functools.partial(rows, model, batch, candidates),
                    seconds=seconds.get(model, 0.0),
                )


def wanted_engines(prefixes: Iterable[str] | None) -> tuple[str, ...]:
    """The engines whose name begins with one of `prefixes`; all without any."""
    chosen = tuple(prefixes or ("",))
    for prefix in chosen:
        if not any(name.startswith(prefix) for name in gpu_engines.ENGINES):
            names = ", ".join(gpu_engines.ENGINES)
            raise ValueError(f"--engines: got {prefix}, expected the beginning of one of {names}")
    return tuple(name for name in gpu_engines.ENGINES if name.startswith(chosen))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = groups.options(__doc__, samples=25)
    models, known = tuple(MODELS), (*WORKLOADS, *workloads.names())
    parser.add_argument("--models", nargs="+", choices=models, default=["base", "large"], metavar="MODEL")
    parser.add_argument("--workloads", nargs="+", choices=known, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="beginnings of names (default: all)")
    args = groups.parsed(parser, argv)
    try:
        args.engines = wanted_engines(args.engines)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    return groups.record(parse(argv), plan)


if __name__ == "__main__":
    sys.exit(main())
