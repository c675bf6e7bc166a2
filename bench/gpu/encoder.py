"""The encoder's forward on a GPU by every engine, ours and the peers', turn by turn.

    python bench/gpu/encoder.py [--models base large] [--workloads full squad latency] [--budget SECONDS]

`full` (32 x 512), `squad` (96 SQuAD lengths), `latency` (one sequence of 128, one of 384 tokens) for
BERT-base and -large in bf16. Engines: ours, ours by CUDA graphs, and transformers' model after
`fastbert.accelerate`; transformers eager, sdpa, sdpa by cuDNN and flash-attention 2; torch's
nn.TransformerEncoder (its fused inference path); transformers under torch.compile(mode="max-autotune"). An
engine that is not installed or fails is a row with the reason.

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
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.gpu import engines as gpu_engines  # noqa: E402
from bench.lib import encoder, roofs, served, workloads  # noqa: E402
from bench.lib.engines import PACKAGES, compile_cache  # noqa: E402
from bench.lib.machine import describe, package_version  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402
from bench.lib.report import Report, count, row_line  # noqa: E402

WORKLOADS = ("full", "squad", "latency")
COMPILED = "torch_compile-bf16"
BESIDE_COMPILED = ("fastbert-bf16", "fastbert_graphs-bf16", "transformers_sdpa-bf16", COMPILED)
# seconds that a group of engines needs on one batch; with less of the budget left, the group is left out
PLAIN_SECONDS, COMPILE_SECONDS = {"base": 6.0, "large": 12.0}, {"base": 60.0, "large": 100.0}
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


def ratios(rows: Iterable[dict]) -> list[dict]:
    """Our better engine's speed over each peer's, from rows that were timed turn by turn."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["step"] == "encoder" and row["status"] == "ok":
            groups.setdefault((row["model"], row["workload"], row["group"]), {})[row["candidate"]] = row
    found = []
    for (model, workload, _), group in groups.items():
        own = [name for name in group if name.startswith("fastbert")]
        best = min(own, key=lambda name: group[name]["median_ms"], default=None)
        for name, row in group.items():
            if best is not None and name not in own:
                ratio = row["median_ms"] / group[best]["median_ms"]
                what = {"model": model, "workload": workload, "ours": best, "theirs": name}
                found.append({**what, "ratio": ratio})
    return found


@dataclass
class Group:
    """Engines that are timed together on one batch."""

    model: str
    workload: str
    engines: tuple[str, ...]
    least: float  # seconds that must be left of the budget

    @property
    def compiled(self) -> bool:
        """Whether something is compiled for it."""
        return COMPILED in self.engines


def groups(models: Iterable[str], names: Iterable[str], engines: tuple[str, ...]) -> list[Group]:
    """What is timed together, the most important first: everything but torch.compile, then torch.compile."""
    batches = [batch for name in names for batch in workloads.expand(name)]
    plain = tuple(name for name in engines if name != COMPILED)
    found = [
        Group(model, batch, plain, PLAIN_SECONDS.get(model, 0.0))
        for model in models
        for batch in batches
        if plain
    ]
    if COMPILED in engines:
        found += [
            Group(model, batch, BESIDE_COMPILED, COMPILE_SECONDS.get(model, 0.0))
            for model in models
            for batch in batches
        ]
    return found


class Benchmark:
    """One run over the groups; a bank of weights is held for one model at a time."""

    def __init__(self, args: argparse.Namespace, roof: roofs.Roofs):
        self.args, self.roofs, self.begin = args, roof, time.monotonic()
        self.bank: gpu_engines.Bank | None = None
        self.built: dict[str, encoder.Forward | str] = {}

    def left(self) -> float:
        """Seconds of the budget that are not spent; without a budget there is no end."""
        return self.args.budget - (time.monotonic() - self.begin) if self.args.budget else float("inf")

    def rows(self) -> Iterator[dict]:
        """Every row of the run."""
        for group in groups(self.args.models, self.args.workloads, self.args.engines):
            if self.left() < group.least:
                reason = f"{max(0.0, self.left()):.0f} s left of --budget {self.args.budget:.0f}"
                yield from self.failed(group, "skipped", f"{reason}, about {group.least:.0f} s needed")
                continue
            try:
                yield from self.group(group)
            # for example, the batch itself does not fit
            except Exception as error:
                yield from self.failed(group, "error", reason_of(error))
            torch._dynamo.reset()
            gc.collect()

    @staticmethod
    def failed(group: Group, status: str, reason: str) -> Iterator[dict]:
        """A row for every engine of a group that was not timed."""
        for name in group.engines if not group.compiled else (COMPILED,):
            facts = {"model": group.model, "workload": group.workload, "candidate": name}
            name = f"encoder-{name}-{group.model}-{group.workload}"
            yield {"step": "encoder", "name": name, "status": status, "error": reason, **facts}

    def group(self, group: Group) -> Iterator[dict]:
        """Rows of one group."""
        model = workloads.MODELS[group.model]
        if self.bank is None or self.bank.model is not model:
            self.bank, self.built = None, {}  # the old weights go before the new ones come
            gc.collect()
            self.bank = gpu_engines.Bank(model, self.args.device)
        for name in group.engines:
            if name not in self.built or name == COMPILED:  # what is compiled was reset
                self.built |= encoder.build(self.bank, (name,))
        lengths = workloads.lengths(group.workload)
        if self.args.smoke:
            lengths = tuple(max(2, n // 32) for n in lengths[:3])
        forwards = {name: self.built[name] for name in group.engines}
        options = {
            "device": self.args.device,
            "samples": self.args.samples,
            "sets": 2 if self.args.smoke else 4,
        }
        for row in encoder.bench_encoder(
            model, group.workload, forwards, self.roofs, lengths=lengths, **options
        ):
            served_by = served.backends(row["candidate"], self.args.device, "bf16")
            yield row | {"group": "compile" if group.compiled else "plain", "backends": served_by}


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
    models = tuple(workloads.MODELS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=models, default=["base", "large"], metavar="MODEL")
    known = (*WORKLOADS, *workloads.names())
    parser.add_argument("--workloads", nargs="+", choices=known, default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="beginnings of names (default: all)")
    parser.add_argument("--samples", type=count, default=25, help="of each engine on each workload")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds in all; 0: no end")
    parser.add_argument("--roofs", type=Path, help="the probe's file: its roofs are not measured again")
    parser.add_argument("--json", type=Path, help="write the rows here, after each one (*.jsonl: appended)")
    parser.add_argument("--note", help="a remark to keep with the results, such as 'shared machine'")
    parser.add_argument("--smoke", action="store_true", help="tiny batches and roofs: tries the code only")
    args = parser.parse_args(argv)
    if not 0 <= args.budget < float("inf"):
        parser.error(f"--budget: got {args.budget}, expected seconds, or 0 for no end")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, but torch finds no CUDA device here")
    try:
        args.engines = wanted_engines(args.engines)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    """Time what the arguments name; every row is printed and recorded at once."""
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    report = Report(
        args.json,
        {k: v for k, v in vars(args).items() if k not in ("json", "roofs", "note")},
        args.note,
        line,
    )
    environment = describe(torch.device(args.device))
    environment["versions"] = {name: package_version(name) for name in (*PACKAGES, "flash_attn")}
    report.data |= {"environment": environment, "weights": "random"}
    report.save()
    print(f"# {environment['device']}: torch {torch.__version__}", flush=True)
    report.data["self_checks"] = served.prove(args.device)
    roof = roofs.known_or_measured(args.roofs, args.device, args.smoke, report.row)
    report.data["roofs"] = asdict(roof)
    report.save()
    print(LINE.format(*COLUMNS), flush=True)
    with compile_cache():
        for row in Benchmark(args, roof).rows():
            report.row(row)
    report.data["ratios"] = ratios(report.data["rows"])
    if others := served.told((row.get("backends", {}) for row in report.data["rows"]), args.device):
        print(f"# not by the first backend: {others}", flush=True)
    for row in report.data["ratios"]:
        where = f"{row['model']} {row['workload']}"
        print(f"# {where:<18} {row['ours']:22} / {row['theirs']:28} {row['ratio']:.2f}", flush=True)
    report.data["finished"] = True
    report.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
