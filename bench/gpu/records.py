"""Keeps a run of `make gpu`: in bench/results, kernels/tuned, the shipped proofs and two pages of docs."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.gpu.groups import ratios
from bench.lib import lines, proven, served, tables
from bench.lib import tuned as tuned_table
from bench.lib.charts import gpu as charts
from bench.lib.charts.suite import require_matplotlib
from bench.lib.machine import commit_here
from bench.lib.report import write_atomically
from bench.lib.roofs import TAGS, of_file
from bench.lib.tables import table
from fastbert.runtime import dispatch
from fastbert.testing import verdicts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "numbers.md"
MATRIX = ROOT / "docs" / "op-matrix.md"
FILES = ("steps", "probe", "checks", "kernels", "encoder", "training", "breakdown", "tuning", "queue")

GPU_WORKLOADS = {
    "full": "32x512",
    "squad": "squad",
    "latency-128": "1x128",
    "latency-384": "1x384",
    "short": "256 short",
}
TRAINING_WORKLOADS = {"full": "32x512", "train": "48x512"}
TRAINING_NAMES = {
    "fastbert": "**fastbert**",
    "transformers": "transformers sdpa",
    "torch_compile": "transformers, torch.compile",
}
GPU_NAMES = {
    "fastbert-bf16": "**fastbert**",
    "fastbert_graphs-bf16": "**fastbert, CUDA graphs**",
    "accelerated-bf16": "**transformers, fastbert.accelerate**",
    "transformers_eager-bf16": "transformers eager",
    "transformers_sdpa-bf16": "transformers sdpa",
    "transformers_sdpa_cudnn-bf16": "transformers sdpa, cuDNN",
    "transformers_sdpa_graphs-bf16": "transformers sdpa, CUDA graph",
    "transformers_flash2-bf16": "transformers flash-attention 2",
    "torch_encoder-bf16": "torch nn.TransformerEncoder",
    "torch_encoder_graphs-bf16": "torch nn.TransformerEncoder, CUDA graph",
    "torch_compile-bf16": "transformers, torch.compile max-autotune",
}


# ---- DIR -> bench/results ----


def latest(rows: Iterable[dict]) -> list[dict]:
    """The later of rows that were measured twice, for example by two runs into one folder."""
    found: dict[tuple, dict] = {}
    for row in rows:
        key = row.get("step"), row.get("name"), row.get("group")
        found.pop(key, None)  # its place is that of the later one
        found[key] = row
    return list(found.values())


@contextlib.contextmanager
def opened(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """Folders of runs; an archive is unpacked for as long as the block runs.

    Raises:
        ValueError: naming a file that is no archive.
    """
    with contextlib.ExitStack() as stack:
        folders = []
        for path in paths:
            folder = path
            if path.is_file():
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                try:
                    with tarfile.open(path) as archive:
                        archive.extractall(folder, filter="data")
                except tarfile.TarError as error:
                    raise ValueError(f"{path}: {error}") from error
            folders.append(folder)
        yield folders


def read(name: str, folders: Iterable[Path], commits: Sequence[str] = ()) -> list[dict]:
    """What the folders' files of that name hold, of the commits that are stated."""
    found = []
    for folder, commit in itertools.zip_longest(folders, commits):
        path = folder / f"{name}.jsonl"
        if path.is_file():
            stated = {"commit": commit, "changed": False, "commit_of": "stated when it was merged"}
            found.append(lines.read(path) | (stated if commit else {}))
    return found


def together(runs: list[dict]) -> dict:
    """One run: rows and steps one after the other, of all else the last.

    Where the runs are of several commits, each row has its own.
    """
    found: dict = {"rows": [], "steps": [], "torn": 0}
    several = len({run.get("commit") for run in runs}) > 1
    for run in runs:
        if several:
            run["rows"] = [{"commit": run.get("commit"), **row} for row in run["rows"]]
        found |= run | {name: found[name] + run[name] for name in ("rows", "steps", "torn")}
    return found


def merge(
    paths: Path | Iterable[Path],
    results: Path = RESULTS,
    tuned: Path | None = None,
    commits: Sequence[str] = (),
    proofs: Path = verdicts.FOLDER,
) -> list[Path]:
    """Write one JSON file per kind of file of the runs, what they tuned and proved; returns their paths.

    A run on a machine without git gets the commit of this checkout, as `commit_of` records.

    Args:
        paths: what calls of `make gpu` made on one machine, the earlier first: folders, or their archives.
        results: instead of bench/results.
        tuned: the table of tuned configs, instead of the device's in kernels/tuned.
        commits: commit of the tree that ran per entry of `paths`, where the machine had no git.
        proofs: instead of the folder of shipped proofs.

    Raises:
        ValueError: naming the path, where it holds no run on a GPU, or a run on another one.
    """
    paths = [paths] if isinstance(paths, Path) else list(paths)
    if commits and len(commits) != len(paths):
        raise ValueError(f"--commit: got {len(commits)}, expected one for each of {len(paths)} runs")
    with opened(paths) as folders:
        where = ", ".join(map(str, paths))
        each_run = {name: read(name, folders, commits) for name in FILES}
        environments = [
            run["environment"] for found in each_run.values() for run in found if run.get("environment")
        ]
        runs = {name: together(found) for name, found in each_run.items() if found}
        if not runs:
            raise ValueError(f"{where}: no {', '.join(f'{name}.jsonl' for name in FILES)} there")
        if not environments:
            raise ValueError(f"{where}: expected rows that name the device, got none")
        for each in environments:
            if each["device_type"] != "cuda":
                raise ValueError(f"{where}: ran on {each['device']}: a dry run on a CPU is no result")
        devices = sorted({each["device"] for each in environments})
        if len(devices) > 1:
            raise ValueError(f"{where}: runs on {' and '.join(devices)}: merge them one by one")
        known = [run for run in runs.values() if run.get("commit")]
        for run in runs.values():
            # the file of the steps is written without torch, and names no commit
            first = known[0] if known and not run.get("commit") else run
            run |= {key: first[key] for key in ("commit", "changed") if key in first}
            run |= {"note": run.get("note"), "settings": run.get("settings", {})}
        written = [written_run(name, run, environments[0], results) for name, run in runs.items()]
        if "checks" in runs:
            written += proven.merge(runs["checks"]["rows"], runs["checks"].get("commit"), proofs)
        for folder in folders:
            if (folder / "tuning.jsonl").is_file():
                path, count = tuned_table.merge(folder / "tuning.jsonl", tuned)
                written += [path] * (count > 0 and path not in written)
    return written


def written_run(name: str, run: dict, environment: dict, results: Path) -> Path:
    """The file in `results` into which the run is written."""
    here, now = commit_here(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run["rows"] = latest(run["rows"])
    run["environment"] = run.get("environment") or environment
    if run.get("commit") is None:
        run |= here | {"commit_of": "the checkout that merged it; the machine had no git"}
    if name in ("encoder", "training"):
        run["ratios"] = ratios(run["rows"])
    target = results / environment["slug"] / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, run | {"merged": now})
    return target


# ---- bench/results -> docs/numbers.md ----


def where(data: dict, path: Path, results: Path) -> str:
    """File, commit, date and versions, as a caption."""
    own = (data.get("commit") or "unknown")[:9] + (" and changes" if data.get("changed") else "")
    others = dict.fromkeys((row["commit"] or "unknown")[:9] for row in data["rows"] if "commit" in row)
    earlier = [commit for commit in others if not own.startswith(commit)]
    commit = f"{own} (some rows {', '.join(earlier)})" if earlier else own
    file = f"bench/results/{path.relative_to(results)}"
    versions = [f"torch {data['environment']['torch']}"]
    if data["environment"]["device_type"] == "cuda":
        versions += [f"{what} {data['environment'].get(what.lower())}" for what in ("Triton", "driver")]
    return f"`{file}`, commit {commit}, {data['date'][:10]}, {', '.join(versions)}"


def dagger(row: dict) -> str:
    """A mark on a row of ours whose ops were not all served by the dispatch table's first backends."""
    return " †" if served.others(row.get("backends", {}), "cuda") else ""


def daggers(data: dict) -> list[str]:
    """What the mark means in these rows; nothing where none has it."""
    ok = (row.get("backends", {}) for row in data["rows"] if row["status"] == "ok")
    others = served.told(ok, "cuda")
    return [f"† Ops that another than their first backend serves: {others}.", ""] if others else []


def picture(path: Path) -> Path:
    """Where the picture of a device's results is, next to the page that shows it."""
    return PAGE.parent / f"gpu-{path.parent.name}.png"


def draw(path: Path) -> Path | None:
    """Draw a device's time by kernel for the page; None where matplotlib is missing."""
    try:
        require_matplotlib()
    except RuntimeError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return None
    charts.breakdown(json.loads(path.read_text())).savefig(picture(path), dpi=110)
    return picture(path)


def gpu_table(data: dict) -> list[str]:
    """Milliseconds of one forward and share of the floor by every engine; then ours over the best peer."""
    over = ratios(data["rows"])
    ok = [row for row in data["rows"] if row["step"] == "encoder" and row["status"] == "ok"]
    cells: dict[tuple, str] = {}
    for row in sorted(ok, key=lambda row: row["group"] == "plain"):  # ours beside torch.compile comes second
        figures = f"{row['median_ms']:.2f} ({row['of_floor']:.0%}){dagger(row)}"
        cells[row["candidate"], row["model"], row["workload"]] = figures
    columns = [
        (model, workload)
        for model in ("base", "large", "minilm")
        for workload in GPU_WORKLOADS
        if any(key[1:] == (model, workload) for key in cells)
    ]
    body = [
        [label, *(cells.get((name, *column), "–") for column in columns)]
        for name, label in GPU_NAMES.items()
        if any((name, *column) in cells for column in columns)
    ]
    for label, ours in (
        ("eager over the best eager peer", "fastbert-"),
        ("graphs over the best graphed peer", "fastbert_graphs-"),
    ):
        best = [label]
        for column in columns:
            found = [
                r["ratio"]
                for r in over
                if (r["model"], r["workload"]) == column and r["ours"].startswith(ours)
            ]
            best.append(f"{min(found):.2f} ×" if found else "–")
        body.append(best)
    head = ["", *(f"{model} {GPU_WORKLOADS[workload]}" for model, workload in columns)]
    return table(head, body)


def training_table(data: dict) -> list[str]:
    """A training step by every candidate: milliseconds, share of the floor, peak memory."""
    cells: dict[tuple, str] = {}
    peaks = {
        (row["candidate"], row["model"], row["workload"], row["head"]): f"; {row['peak_mib'] / 1024:.1f} GiB"
        for row in data["rows"]
        if row["step"] == "training_memory" and row["status"] == "ok"
    }
    timed = [row for row in data["rows"] if row["step"] == "training" and row["status"] == "ok"]
    for row in sorted(timed, key=lambda row: row["group"] == "plain"):  # as in gpu_table
        at = row["candidate"], row["model"], row["workload"], row["head"]
        cells[at] = f"{row['median_ms']:.1f} ({row['of_floor']:.0%}){dagger(row)}{peaks.get(at, '')}"
    columns = sorted({key[1:] for key in cells}, key=lambda c: (c[2] != "pretraining", c[:2]))
    body = [
        [label, *(cells.get((f"{name}-bf16", *column), "–") for column in columns)]
        for name, label in TRAINING_NAMES.items()
        if any((f"{name}-bf16", *column) in cells for column in columns)
    ]
    names = (f"{model} {TRAINING_WORKLOADS.get(batch, batch)} {head}" for model, batch, head in columns)
    return table(["", *names], body)


def checks_line(data: dict) -> str:
    """How many checks of each kind passed."""
    parts = []
    for step in dict.fromkeys(row["step"] for row in data["rows"]):
        statuses = [row["status"] for row in data["rows"] if row["step"] == step]
        counts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(sorted(statuses))]
        parts.append(f"{step} {', '.join(counts)}")
    return "Checks on this GPU: " + "; ".join(parts) + "."


def _whose_roofs(roofs: dict, path: Path) -> str:
    """Where a file's roofs were measured: "there", or on the other device whose probe a run was given."""
    for probe in sorted(path.parent.parent.glob("*/probe.json")):
        if probe.parent != path.parent:
            data = json.loads(probe.read_text())
            with contextlib.suppress(RuntimeError):  # a probe without roofs
                if asdict(of_file(probe)) == roofs:
                    return f"on an {data['environment']['device']}"
    return "there"


def sections(results: Path = RESULTS) -> dict[str, list[str]]:
    """Name of a generated section -> its lines."""
    found: dict[str, list[str]] = {"gpu numbers": []}
    for path in sorted(results.glob("*/encoder.json")):
        data = json.loads(path.read_text())
        device, roofs = data["environment"]["device"], data.get("roofs")
        caption = f"{device}, bf16, milliseconds of one forward and share of the floor"
        if roofs:
            rate, width = roofs["gflops"]["bf16"] / 1e3, roofs["gbytes"] / 1e3
            caption += (
                f" at the {rate:,.0f} TFLOP/s and {width:.1f} TB/s measured {_whose_roofs(roofs, path)}"
            )
        found["gpu numbers"] += [f"{caption}; {where(data, path, results)}:", "", *gpu_table(data), ""]
        found["gpu numbers"] += daggers(data)
        trained = path.with_name("training.json")
        if trained.exists():
            steps = json.loads(trained.read_text())
            caption = (
                "A training step on it, bf16 autocast, dropout 0.1, AdamW: milliseconds, share of the floor"
            )
            found["gpu numbers"] += [f"{caption}, peak memory; {where(steps, trained, results)}:", ""]
            found["gpu numbers"] += [*training_table(steps), "", *daggers(steps)]
        if path.with_name("breakdown.json").exists():
            found["gpu numbers"] += [f"![GPU time by kind of kernel]({picture(path).name})", ""]
        checks = path.with_name("checks.json")
        if checks.exists():
            found["gpu numbers"] += [checks_line(json.loads(checks.read_text())), ""]
    if not found["gpu numbers"]:
        found["gpu numbers"] = ["No speed on a GPU is claimed: `bench/results/` holds no GPU run yet.", ""]
    return found


def proves(data: dict, op: str, backend: str, tag: str) -> bool:
    """Whether a run has checked the kernel's correctness in the dtype, and found nothing.

    Args:
        data: a file `checks.json` of `bench/results`.
    """
    begin = f"{op}-{backend}-{tag}-"
    mine = {
        row.get("status")
        for row in data["rows"]
        if row.get("step") == "correctness" and f"{row.get('name')}-".startswith(begin)
    }
    return mine == {"ok"}


def matrix(results: Path = RESULTS) -> dict[str, list[str]]:
    """The section of docs/op-matrix.md: which kernels have passed every check of correctness on which GPU."""
    runs = [(path, json.loads(path.read_text())) for path in sorted(results.glob("*/checks.json"))]
    runs = [(path, data) for path, data in runs if data["environment"]["device_type"] == "cuda"]
    if not runs:
        return {
            "proven kernels": ["No kernel is proven on a GPU: `bench/results/` holds no GPU run yet.", ""]
        }
    body = []
    for op in dispatch.OPS:
        for backend in dispatch.SELF_CHECKED:
            stored = dispatch.backend_module(backend).DTYPES.get(op, ())
            cells = []
            for _, data in runs:
                good = [tag for tag in TAGS.values() if proves(data, op, backend, tag)]
                cells.append(" ".join(good) or "–")
            if stored:
                body.append([f"`{op}`", f"`{backend}`", *cells])
    found = table(["op", "kernels", *(data["environment"]["device"] for _, data in runs)], body)
    sources = "; ".join(where(data, path, results) for path, data in runs)
    return {"proven kernels": [*found, "", f"From {sources}.", ""]}


def filled(text: str, made: dict[str, list[str]]) -> str:
    """`text` with each generated section between its two markers replaced. Raises as `tables.filled`."""
    return tables.filled(text, made, "python bench/gpu/prove.py readme")


def main(argv: list[str]) -> int:
    """`merge DIR` and `readme [--check]`."""
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser("merge", help="into bench/results, kernels/tuned and the docs")
    merging.add_argument(
        "paths", type=Path, nargs="+", metavar="DIR", help="or run-….tar; earlier ones first"
    )
    merging.add_argument(
        "--commit", action="append", default=[], help="of a DIR that does not name its commit, once each"
    )
    merging.add_argument("--tuned", type=Path, help="instead of kernels/tuned/<gpu>.json")
    merging.add_argument("--proofs", type=Path, default=verdicts.FOLDER, help="instead of the shipped folder")
    making = commands.add_parser("readme", help="the docs' tables from bench/results")
    making.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if it would change"
    )
    for command in (merging, making):
        command.add_argument("--results", type=Path, default=RESULTS, help="instead of bench/results")
        command.add_argument("--readme", type=Path, default=PAGE, help="instead of docs/numbers.md")
        command.add_argument("--matrix", type=Path, default=MATRIX, help="instead of docs/op-matrix.md")
    args = parser.parse_args(argv)
    try:
        if args.command == "merge":
            for path in merge(args.paths, args.results, args.tuned, args.commit, args.proofs):
                print(path)
                if path.name == "breakdown.json" and args.results == RESULTS:
                    print(draw(path) or "no picture")
        made = {args.readme: sections(args.results), args.matrix: matrix(args.results)}
        before = {path: path.read_text() for path in made}
        after = {path: filled(before[path], found) for path, found in made.items()}
    except (OSError, ValueError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    if args.command == "readme" and args.check:
        return int(before != after)
    for path, text in after.items():
        if text != before[path]:
            path.write_text(text)
            print(path)
    return 0
