"""A cost model: what each op, a forward or a training step takes on a device, and on how many GPUs.

    python bench/model.py --model base --workload 8x128 --dtype fp32 --device FILE_WITH_ROOFS
    python bench/model.py --model large --workload train --device h200 --train --gpus 8 --want 3000
    python bench/model.py check      # predicted beside measured, for every committed row
    python bench/model.py fit        # the CPU's constants, from the rows they were fitted to

Operations and bytes are counted (lib/costs/counts.py). The roofs are a device's measured ones or, for a GPU
without a probe, its datasheet's, which is then marked as projected (lib/costs/devices.py). `check` ends with
status 1 if a forward or training row of a CPU is off by more than 25% and is not in `committed.KNOWN`, which
it prints.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

from bench.lib import workloads  # noqa: E402
from bench.lib.costs import committed, devices, fleet, published  # noqa: E402
from bench.lib.costs import counts as costs  # noqa: E402
from bench.lib.costs.committed import WITHIN, Compared  # noqa: E402
from bench.lib.costs.counts import Work  # noqa: E402
from bench.lib.costs.devices import GIB, Device  # noqa: E402
from bench.lib.engines import MODELS  # noqa: E402

PREDICTING = ("device", "workload", "lengths", "train", "gpus", "want")
OP_LINE = "{:22} {:9} {:>5} {:>10} {:>10} {:>10} {:>6}  {}"
ROW_LINE = "{:20} {:62} {:>11} {:>11} {:>7}  {}"
FLEET_LINE = "{:>5} {:>9} {:>10} {:>9} {:>9} {:>9} {:>10} {:>7} {:>11}"


@dataclass(frozen=True)
class Prediction:
    """One forward or one training step on one device."""

    device: Device
    model: workloads.Model
    lengths: tuple[int, ...]
    tag: str
    works: tuple[Work, ...]

    @property
    def seconds(self) -> float:
        """Of all ops, one after the other."""
        return self.device.seconds(self.works)

    @property
    def floor(self) -> float:
        """At the roofs: of the real tokens' products and attention, on a GPU also of the weights' bytes."""
        gpu = self.device.kind == "gpu"
        least = costs.least_bytes(self.model, self.lengths, self.tag, on_gpu=gpu)
        # at the roof of the dtype, whatever arithmetic our products have
        works = [replace(w, tag=self.tag) if w.kind == "product" else w for w in self.works]
        return self.device.floor(works, least)

    def rows(self) -> list[dict]:
        """One row per op and pass, in order: calls, operations, bytes, seconds, what bounds it."""
        found: dict[tuple[str, str], dict] = {}
        # of each row, the seconds of its longest work, which says what bounds it
        most: dict[tuple[str, str], float] = {}
        for work in self.works:
            seconds, bound = self.device.parts(work)
            row = found.setdefault(
                (work.which, work.op),
                {"op": work.op, "pass": work.which, "calls": 0, "flops": 0.0, "bytes": 0.0, "seconds": 0.0},
            )
            row["calls"] += work.calls
            row["flops"] += work.flops
            row["bytes"] += work.moved
            row["seconds"] += seconds
            if seconds >= most.get((work.which, work.op), 0.0):
                most[work.which, work.op], row["bound"] = seconds, bound
        return list(found.values())


def predict(
    device: Device,
    model: workloads.Model,
    lengths: tuple[int, ...],
    tag: str,
    *,
    train: bool = False,
    head: str = "pretraining",
    pooling: bool = False,
) -> Prediction:
    """What a forward (or with `train` a step) takes.

    Args:
        device: of `devices.find`.
        model: the encoder's sizes.
        lengths: tokens of each sequence of the batch.
        tag: "fp32", "bf16", "fp16", "int8" or "fp8".
        train: forward, backward and AdamW, dropout 0.1.
        head: of costs.HEADS; only with `train`.
        pooling: also the mean of each sequence; only without `train`.

    Raises:
        ValueError: naming the argument.
    """
    gpu = device.kind == "gpu"
    if train:
        works = costs.training(model, lengths, tag, on_gpu=gpu, head=head)
    else:
        works = costs.forward(model, lengths, tag, on_gpu=gpu, pooling=pooling)
    return Prediction(device, model, tuple(lengths), tag, tuple(works))


# ---- arguments ----


def model_of(text: str) -> workloads.Model:
    """base, large, minilm, tiny, or `L,H,A`: layers, hidden size, heads; the inner size is then 4 H."""
    if text in MODELS:
        return MODELS[text]
    expected = f"expected one of {', '.join(MODELS)}, or layers,hidden,heads such as 12,768,12"
    if not re.fullmatch(r"\d+,\d+,\d+", text):
        raise ValueError(f"model: got {text!r}, {expected}")
    layers, hidden, heads = map(int, text.split(","))
    if min(layers, hidden, heads) < 1 or hidden % heads:
        raise ValueError(f"model: got {text!r}, expected positive sizes, hidden a multiple of heads")
    return workloads.Model(text, hidden, layers, heads, 4 * hidden)


def lengths_of(workload: str | None, lengths: str | None) -> tuple[int, ...]:
    """The batch: a workload's name, `NxS` for N sequences of S tokens, or a list of lengths."""
    if (workload is None) == (lengths is None):
        raise ValueError("workload: expected either --workload or --lengths")
    if lengths is not None:
        if not re.fullmatch(r"\d+(,\d+)*", lengths):
            raise ValueError(f"lengths: got {lengths!r}, expected numbers such as 128,97,30")
        found = tuple(map(int, lengths.split(",")))
    elif match := re.fullmatch(r"(\d+)x(\d+)", workload):
        found = (int(match[2]),) * int(match[1])
    elif workload in workloads.names():
        found = workloads.lengths(workload)
    else:
        known = ", ".join(workloads.names())
        raise ValueError(f"workload: got {workload!r}, expected NxS or one of {known}")
    costs.check_lengths(found)
    if max(found) > costs.POSITIONS:
        raise ValueError(f"lengths: got {max(found)}, expected at most {costs.POSITIONS} tokens")
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; argparse ends the process where one is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("predict", "check", "fit"), default="predict")
    parser.add_argument("--model", default="base", help=f"{', '.join(MODELS)}, or layers,hidden,heads")
    parser.add_argument("--workload", help="a batch of lib/workloads.py, or NxS: N sequences of S tokens")
    parser.add_argument("--lengths", help="the batch as a list: 128,97,30")
    parser.add_argument("--dtype", choices=tuple(costs.ITEMSIZE), default="bf16")
    parser.add_argument("--device", help=f"a file with roofs, or one of {', '.join(devices.DATASHEETS)}")
    parser.add_argument("--train", action="store_true", help="a training step; otherwise a forward")
    parser.add_argument("--head", choices=costs.HEADS, help="with --train; default: pretraining")
    parser.add_argument("--pooling", action="store_true", help="a forward with the mean of each sequence")
    parser.add_argument("--gpus", type=int, help="how many; a forward runs on each of them alone")
    parser.add_argument("--global-batch", type=int, help="sequences of all GPUs; default: a batch for each")
    parser.add_argument("--want", type=float, help="sequences per second: the fewest GPUs for them")
    parser.add_argument("--link-gbs", type=float, help="GB/s of a GPU's link in one direction")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--results", type=Path, default=devices.RESULTS, help="check, fit: the results")
    return parser.parse_args(argv)


def misplaced(args: argparse.Namespace) -> None:
    """Raises ValueError for an argument that the rest would ignore."""
    predicting = args.command == "predict"
    # (given, its place, argument, where it belongs)
    rules = [
        (args.head, predicting and args.train, "head", "--train"),
        (args.pooling, predicting and not args.train, "pooling", "a forward"),
        (args.global_batch, predicting and args.train, "global_batch", "--train"),
        (args.link_gbs, predicting and args.train, "link_gbs", "--train"),
        *((getattr(args, name), predicting, name, "a prediction") for name in PREDICTING),
    ]
    for given, right, name, where in rules:
        if given not in (None, False) and not right:
            raise ValueError(f"{name}: got {given}, expected only with {where}")
    if args.link_gbs is not None and not 0 < args.link_gbs < math.inf:
        raise ValueError(f"link_gbs: got {args.link_gbs:g}, expected a positive number")
    if args.gpus is not None and args.gpus < 1:
        raise ValueError(f"gpus: got {args.gpus}, expected at least 1")
    if args.want is not None and not 0 < args.want < math.inf:
        raise ValueError(f"want: got {args.want:g}, expected a positive number of sequences per second")
    if args.global_batch is not None:
        if args.gpus is None and args.want is None:
            raise ValueError(f"global_batch: got {args.global_batch}, expected only with --gpus or --want")
        if args.global_batch < (args.gpus or 1):
            raise ValueError(
                f"global_batch: got {args.global_batch}, expected at least one sequence for each GPU"
            )


# ---- one prediction ----


def run_prediction(args: argparse.Namespace) -> dict:
    """Print the prediction that the arguments ask for; returns it for the JSON file."""
    if args.device is None:
        raise ValueError("device: expected --device, a file with roofs or a GPU's name")
    device, model = devices.find(args.device, args.results), model_of(args.model)
    lengths, head = lengths_of(args.workload, args.lengths), args.head or "pretraining"
    if (args.gpus or args.want) and device.kind != "gpu":
        name = "gpus" if args.gpus else "want"
        raise ValueError(f"{name}: got {getattr(args, name)}, expected a GPU as device, not {device.name}")
    found = predict(device, model, lengths, args.dtype, train=args.train, head=head, pooling=args.pooling)
    rows = found.rows()
    kind = f"training step, {head} head" if args.train else "forward"
    print(f"# {kind} of {model.name} ({model.layers} x {model.hidden}, {model.heads} heads), {args.dtype}")
    print(f"# {len(lengths)} sequences, {sum(lengths):,} tokens, on {device.name}: {device.word}")
    print(f"# {device.rate(product_tag(found)):,.0f} GFLOP/s, {device.gbytes:,.0f} GB/s; {device.source}")
    for line in caveats(device, args.dtype):
        print(f"# {line}")
    print(OP_LINE.format("op", "pass", "calls", "GFLOP", "MB", "ms", "share", "bound by"))
    for row in rows:
        figures = (row["flops"] * 1e-9, row["bytes"] * 1e-6, row["seconds"] * 1e3)
        share = f"{row['seconds'] / found.seconds:.0%}"
        print(
            OP_LINE.format(
                row["op"], row["pass"], row["calls"], *(f"{x:,.3f}" for x in figures), share, row["bound"]
            )
        )
    per_s = len(lengths) / found.seconds
    print(
        f"{device.word}: {found.seconds * 1e3:,.3f} ms, {per_s:,.1f} sequences/s, "
        f"{sum(lengths) / found.seconds:,.0f} tokens/s; floor {found.floor * 1e3:,.3f} ms"
    )
    memory = memory_of(found, head if args.train else None)
    print(f"memory, counted: {sizes(memory)}")
    data = {
        "device": {key: value for key, value in asdict(device).items() if key != "shares"},
        "word": device.word,
        "model": asdict(model),
        "lengths": lengths,
        "dtype": args.dtype,
        "kind": kind,
        "seconds": found.seconds,
        "floor_seconds": found.floor,
        "sequences_per_s": per_s,
        "memory_bytes": memory,
        "rows": rows,
        "measured": list(measured_beside(args, found)),
    }
    if args.gpus or args.want:
        data["fleet"] = run_fleet(args, found, head)
    return data


def product_tag(found: Prediction) -> str:
    """The dtype of the matrix products."""
    return next(work.tag for work in found.works if work.kind == "product")


def caveats(device: Device, tag: str) -> list[str]:
    """What a reader has to know about a prediction for this device and dtype."""
    said = []
    if device.kind == "gpu":
        said.append(
            "shares of the roofs: the best published kernels'; no kernel of ours has been timed on a GPU"
        )
    if tag == "fp8":
        said.append("fp8: the roof only; no fp8 kernel of ours exists")
    return said


def memory_of(found: Prediction, head: str | None) -> dict[str, int]:
    """Bytes on one device."""
    gpu = found.device.kind == "gpu"
    if head is None:
        return costs.inference_memory(found.model, found.lengths, found.tag, on_gpu=gpu)
    return costs.training_memory(found.model, found.lengths, found.tag, on_gpu=gpu, head=head)


def sizes(memory: dict[str, int]) -> str:
    """A memory's parts and their sum in words."""
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.items() if size)
    return f"{sum(memory.values()) / GIB:.2f} GiB ({parts})"


def measured_beside(args: argparse.Namespace, found: Prediction) -> Iterable[dict]:
    """The committed rows of what was predicted, beside a file with roofs; printed."""
    if not found.device.measured or args.workload is None or args.pooling:
        return
    paths = sorted(Path(args.device).parent.glob("*.json")) if Path(args.device).exists() else []
    for row in committed.read(paths)[0]:
        if row.step != ("training" if args.train else "forward") or row.tag != args.dtype:
            continue
        head = args.head or "pretraining"
        same = row.workload == args.workload and f"-{found.model.name}-{args.workload}" in row.name
        if same and (not args.train or row.name.endswith(head)):
            error = found.seconds * 1e3 / row.measured - 1
            print(f"measured: {row.measured:,.3f} ms, {row.name} in {row.file}; predicted is {error:+.0%}")
            yield {"file": row.file, "name": row.name, "ms": row.measured, "error": error}


def run_fleet(args: argparse.Namespace, found: Prediction, head: str) -> dict:
    """Print what several GPUs do, and how many are enough; returns both."""
    data: dict = {}
    if not args.train:
        each = len(found.lengths) / found.seconds
        if args.gpus:
            print(f"{args.gpus} GPUs, each on its own batches: {args.gpus * each:,.1f} sequences/s")
            data |= {"gpus": args.gpus, "sequences_per_s": args.gpus * each}
        if args.want:
            data |= {"want": args.want, "enough": math.ceil(args.want / each)}
            print(f"{data['enough']} GPUs are enough for {args.want:,.1f} sequences/s")
        return data
    run = fleet.Run(found.device, found.model, found.lengths, args.dtype, head, args.link_gbs)
    if args.gpus:
        counts = [n for n in (2**i for i in range(13)) if n < args.gpus] + [args.gpus]
        plans = [fleet.plan(run, n, args.global_batch) for n in counts]
        print_fleet(plans)
        data["plans"] = [asdict(plan) | {"step": plan.step} for plan in plans]
    if args.want:
        least = fleet.enough(run, args.want, args.global_batch)
        data["want"], data["enough"] = args.want, least and asdict(least) | {"step": least.step}
        if least is None:
            print(f"no count of up to {fleet.MOST_GPUS} GPUs trains {args.want:,.1f} sequences/s")
        else:
            print(f"{least.gpus} GPUs are enough for {args.want:,.1f} sequences/s:")
            print_fleet([least])
    return data


def print_fleet(plans: list[fleet.Plan]) -> None:
    """A line per plan."""
    print(
        f"all-reduce: {fleet.OVERLAP:.0%} of it can run beside backward, links reach "
        f"{fleet.LINK_SHARE:.0%} (both assumed)"
    )
    head = "GPUs", "sequences", "micro", "step ms", "ring ms", "exposed", "seq/s", "effic.", "GiB per GPU"
    print(FLEET_LINE.format(*head))
    for plan in plans:
        times = (f"{seconds * 1e3:,.2f}" for seconds in (plan.step, plan.all_reduce, plan.exposed))
        gib = sum(plan.memory.values()) / GIB
        size = f"{gib:.1f}" if plan.micro_batches else f"{gib:.1f} no fit"
        rest = f"{plan.per_s:,.1f}", f"{plan.efficiency:.1%}", size
        print(FLEET_LINE.format(plan.gpus, plan.sequences, plan.micro_batches, *times, *rest))


# ---- check and fit ----


def run_check(args: argparse.Namespace) -> tuple[dict, bool]:
    """(what was printed, whether every row that is held is within 25%)."""
    rows, left_out = committed.read(results_of(args.results))
    if not any(row.held for row in rows):
        raise ValueError(
            f"results: got {str(args.results)!r}, which holds no forward or training row of a CPU"
        )
    print(ROW_LINE.format("step", "row", "predicted", "measured", "error", ""))
    for row in rows:
        print(check_line(row))
    summary = committed.summary(rows)
    print("\nabsolute errors of the rows that no constant was fitted to:")
    for step, figures in summary.items():
        errors = f"median {figures['median']:6.1%}, worst {figures['worst']:6.1%}"
        print(f"  {step:22} {figures['rows']:4} rows, {errors}")
    for reason, n in left_out.items():
        print(f"  left out: {n} rows, {reason}")
    print("\npublished figures on GPUs, beside projections; floor: every share 1, no launches")
    figures = list(published.beside())
    for found in figures:
        figure = found.figure
        print(f"  {figure.source}: {figure.value:,.4g} {figure.unit} on {figure.device.upper()}")
        told = f"{found.word} {found.predicted:,.4g}, floor {found.floor:,.4g} {figure.unit}"
        print(f"    {figure.model.name} {figure.tag}: {told}")
        print(f"    published is {found.verdict} ({figure.note})")
    failed = [row for row in rows if row.failed]
    held = [row for row in rows if row.held and row.known is None]
    print(f"\n{len(held) - len(failed)} of {len(held)} forward and training rows are within {WITHIN:.0%}")
    for row in rows:
        if row.held and row.known is not None:
            print(f"not held: {row.name} in {row.file}, {row.error:+.0%}: {row.known}")
    facts = ("step", "file", "name", "predicted", "measured", "unit", "error", "fitted", "held", "failed")
    data = {
        "rows": [{key: getattr(row, key) for key in facts} for row in rows],
        "summary": summary,
        "left_out": dict(left_out),
        "published": [asdict(f) | {"verdict": f.verdict} for f in figures],
    }
    return data, not failed


def results_of(folder: Path) -> list[Path]:
    """The result files of all machines. Raises ValueError where there is none."""
    paths = sorted(folder.glob("*/*.json"))
    if not paths:
        raise ValueError(f"results: got {str(folder)!r}, which holds no */*.json")
    return paths


def check_line(row: Compared) -> str:
    """The printed form of a row beside its prediction."""
    word = "fitted" if row.fitted else "known" if row.held and row.known else "OFF" if row.failed else ""
    figures = (f"{x:,.3f} {row.unit}" for x in (row.predicted, row.measured))
    return ROW_LINE.format(row.step, row.name[:62], *figures, f"{row.error:+.0%}", word)


def run_fit(args: argparse.Namespace) -> dict:
    """Print the CPU's constants as the fitted rows have them beside those in use."""
    found = committed.fit(committed.read(results_of(args.results))[0])
    for name, value in found.items():
        print(f"{name:22} {value:6.3f}   in use {devices.CPU[name]:g}")
    return found


def main(argv: list[str] | None = None) -> int:
    """Do what the arguments ask for; 0, 1 if `check` found a row that is off, 2 for a wrong argument."""
    args = parse(argv)
    try:
        misplaced(args)
        fine = True
        if args.command == "check":
            data, fine = run_check(args)
        else:
            data = run_fit(args) if args.command == "fit" else run_prediction(args)
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(data, indent=1) + "\n")
    except (OSError, ValueError, RuntimeError) as error:
        print(f"model: {error}", file=sys.stderr)
        return 2
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
