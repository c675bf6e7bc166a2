"""The encoder's forward on a GPU by every engine, ours and the peers', turn by turn.

    python bench/gpu/encoder.py [--models base large] [--workloads full squad latency] [--budget SECONDS]

`full` (32 x 512), `squad` (96 SQuAD lengths), `latency` (one sequence of 128, one of 384 tokens) for
BERT-base and -large in bf16. Engines: ours, ours by CUDA graphs, and transformers' model after
`fastbert.accelerate`; transformers eager, sdpa, sdpa by cuDNN and flash-attention 2; torch's
nn.TransformerEncoder (its fused inference path); both peers by one CUDA graph per batch (`_graphs`);
transformers under torch.compile(mode="max-autotune"). An engine that is not installed or fails is a row with
the reason. Eager calls are compared with eager ones, graphs with graphs.

All have the same weights and inputs. Before anything is timed their vectors are compared (`cosine`). A sample
is one call, the device idle at both ends: what a caller waits. Samples go turn by turn through several
batches; medians. `of_floor` is the time that the real tokens' operations take at this machine's measured bf16
rate, or their bytes at its measured bandwidth, whichever is longer, over the time taken.

torch.compile is timed after all others, again beside ours and sdpa: it compiles for a minute or more per
shape, and `--budget` leaves it out first. Rows are recorded as they are measured.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

from bench.gpu import engines as gpu_engines  # noqa: E402
from bench.gpu import groups  # noqa: E402
from bench.lib import encoder, roofs, served, workloads  # noqa: E402
from bench.lib.engines import MODELS, PACKAGES  # noqa: E402
from bench.lib.report import row_line  # noqa: E402

WORKLOADS = ("full", "squad", "latency")
COMPILED = "torch_compile-bf16"
BESIDE_COMPILED = ("fastbert-bf16", "fastbert_graphs-bf16", "transformers_sdpa-bf16", COMPILED)
# seconds that a group of engines needs on one batch; with less of the budget left, the group is left out
PLAIN_SECONDS, COMPILE_SECONDS = {"base": 6.0, "large": 12.0, "minilm": 4.0}, {"base": 60.0, "large": 100.0}
COLUMNS = ("model", "workload", "candidate", "ms", "tokens/s", "tflops", "of floor", "cosine", "spread", "n")
LINE = "{:5} {:11} {:27} {:>9} {:>11} {:>7} {:>8} {:>8} {:>7} {:>3}"


def line(row: dict) -> str:
    """The printed form of a row."""
    if row["status"] == "skipped":
        return f"{row['name']:<60} skipped: {row['error']}"
    if row["status"] != "ok" or row["step"] != "encoder":
        return row_line(row)
    return LINE.format(
        row["model"],
        row["workload"],
        row["candidate"],
        f"{row['median_ms']:,.3f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['gflops'] / 1e3:,.1f}",
        f"{row['of_floor']:.0%}",
        f"{row['cosine']:.5f}",
        f"{row['spread']:.1%}",
        row["n"],
    )


def graphed(candidate: str) -> bool:
    """Whether the engine replays CUDA graphs; torch.compile in the mode that is timed does."""
    return candidate.partition("-")[0].endswith(("_graphs", "torch_compile"))


def ratios(rows: Iterable[dict]) -> list[dict]:
    """Our speed over each peer's, from rows that were timed turn by turn: eager calls over eager ones, graphs
    over graphs.

    transformers' model after `fastbert.accelerate` is no peer: its layers are ours.
    """
    timed: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["step"] == "encoder" and row["status"] == "ok":
            timed.setdefault((row["model"], row["workload"], row["group"]), {})[row["candidate"]] = row
    found = []
    for (model, workload, _), group in timed.items():
        own = {graphed(name): name for name in group if name.startswith("fastbert")}
        for name, row in group.items():
            ours = own.get(graphed(name))
            if ours is not None and not name.startswith(served.OURS):
                ratio = row["median_ms"] / group[ours]["median_ms"]
                found.append(
                    {"model": model, "workload": workload, "ours": ours, "theirs": name, "ratio": ratio}
                )
    return found


class Forwards(groups.Group):
    """Engines that are timed together on one batch."""

    def facts(self, candidate: str) -> dict:
        """Step, name, model, workload, candidate."""
        facts = {"model": self.model, "workload": self.workload, "candidate": candidate}
        return {"step": "encoder", "name": f"encoder-{candidate}-{self.model}-{self.workload}", **facts}


def plan(models: Iterable[str], names: Iterable[str], engines: tuple[str, ...]) -> list[Forwards]:
    """What is timed together, the most important first: everything but torch.compile, then torch.compile."""
    batches = [batch for name in names for batch in workloads.expand(name)]
    plain = tuple(name for name in engines if name != COMPILED)
    found = []
    for wanted, together, seconds in (
        (bool(plain), plain, PLAIN_SECONDS),
        (COMPILED in engines, BESIDE_COMPILED, COMPILE_SECONDS),
    ):
        found += [
            Forwards(model=model, workload=batch, candidates=together, seconds=seconds.get(model, 0.0))
            for model in models
            for batch in batches
            if wanted
        ]
    return found


class Run(groups.Run):
    """One run over the groups; a bank of weights is held for one model at a time."""

    def __init__(self, args: argparse.Namespace, roof: roofs.Roofs):
        super().__init__(args, roof)
        self.bank: gpu_engines.Bank | None = None
        self.built: dict[str, encoder.Forward | str] = {}

    def groups(self) -> list[Forwards]:
        """What the arguments name."""
        return plan(self.args.models, self.args.workloads, self.args.engines)

    def measure(self, group: Forwards) -> Iterator[dict]:
        """Rows of one group."""
        model = MODELS[group.model]
        if self.bank is None or self.bank.model is not model:
            self.bank, self.built = None, {}  # the old weights go before the new ones come
            gc.collect()
            self.bank = gpu_engines.Bank(model, self.args.device)
        for name in group.candidates:
            if name not in self.built or name == COMPILED:  # what is compiled was reset
                self.built |= encoder.build(self.bank, (name,))
        forwards = {name: self.built[name] for name in group.candidates}
        options = {
            "device": self.args.device,
            "samples": self.args.samples,
            "sets": 2 if self.args.smoke else 4,
            "lengths": self.lengths(workloads.lengths(group.workload)),
        }
        for row in encoder.bench_encoder(model, group.workload, forwards, self.roofs, **options):
            served_by = served.backends(row["candidate"], self.args.device, "bf16")
            yield row | {"group": group.kind, "backends": served_by}


def wanted_engines(prefixes: Iterable[str] | None) -> tuple[str, ...]:
    """The engines whose name begins with one of `prefixes`; all without any."""
    chosen = tuple(prefixes or ("",))
    for prefix in chosen:
        if not any(name.startswith(prefix) for name in gpu_engines.ENGINES):
            names = ", ".join(gpu_engines.ENGINES)
            raise ValueError(f"--engines: got {prefix}, expected the beginning of one of {names}")
    return tuple(name for name in gpu_engines.ENGINES if name.startswith(chosen))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu/encoder.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = tuple(MODELS)
    groups.add_options(parser, samples=25)
    parser.add_argument("--models", nargs="+", choices=models, default=["base", "large"], metavar="MODEL")
    known = (*WORKLOADS, *workloads.names())
    parser.add_argument("--workloads", nargs="+", choices=known, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="beginnings of names (default: all)")
    args = parser.parse_args(argv)
    groups.check_options(parser, args)
    try:
        args.engines = wanted_engines(args.engines)
    except ValueError as error:
        parser.error(str(error))
    return args


def ratio_line(row: dict) -> str:
    """The printed form of a ratio."""
    where = f"{row['model']} {row['workload']}"
    return f"# {where:<18} {row['ours']:22} / {row['theirs']:28} {row['ratio']:.2f}"


def main(argv: list[str] | None = None) -> int:
    """Time what the arguments name."""
    return groups.record(
        parse(argv),
        Run,
        head=LINE.format(*COLUMNS),
        line=line,
        ratios=ratios,
        ratio_line=ratio_line,
        packages=(*PACKAGES, "flash_attn"),
    )


if __name__ == "__main__":
    sys.exit(main())
