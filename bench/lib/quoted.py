"""What docs/numbers.md quotes of the suite: the newest row of each benchmark on one device.

`python docs/make.py` writes the tables. A run may hold a part of the suite: a newer file replaces only the
rows that it has. A row and its peers are always of one run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib import results
from bench.lib.results import Run
from bench.lib.tables import table
from bench.lib.turns import RATES, is_ours, precision

# whose runs the pages quote: a folder of bench/results
DEVICE = "cpu-amd-epyc-family-26-model-2-2c"
PEERS = {
    "transformers": "transformers sdpa",
    "transformers_grouped": "grouped by length",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "torch_compile": "torch.compile",
    "sentence_transformers": "sentence-transformers",
}
MODELS = {"base": "BERT-base", "large": "BERT-large", "minilm": "MiniLM"}
OURS = {"fastbert": "", "fastbert_graphs": ", CUDA graphs", "accelerated": ", accelerated in place"}
HEADS = {"classification": "classification", "pretraining": "masked tokens and next sentence"}
LOADS = {"neighbour": "a busy neighbour", "processes": "four processes", "threads": "two Python threads"}
# files with ratios from before the suite, of another processor
EARLIER = "cpu-intel-xeon-processor-family-6-model-207-2c"
EARLIER_FILES = ("bench_cpu", "bench_training", "bench_accelerate")
OF = {"median_ms": "speed", "peak_mib": "peak memory", "above_mib": "memory above the loaded model"}
HEAD = ["fastbert", "peers (ratio)", "run"]


@dataclass(frozen=True)
class Row:
    """A benchmark of one run; `seconds` is None where it measured memory."""

    run: Run
    group: str
    candidate: str
    seconds: float | None
    extra: Mapping[str, Any]

    @property
    def over(self) -> Mapping[str, float | str]:
        """Peer -> ratio, or the reason why there is none."""
        return self.extra["over"]


Rows = Mapping[tuple[str, str], Row]


# ---- files -> rows ----


def rows_of(run: Run) -> dict[tuple[str, str], Row]:
    """(group, candidate) -> row of one run, peers included."""
    found = {
        (each.group, each.candidate): Row(run, each.group, each.candidate, each.seconds, each.extra)
        for each in run.benchmarks
    }
    return found | {
        (each["group"], each["candidate"]): Row(run, each["group"], each["candidate"], None, each)
        for each in run.memory
    }


def newest(folder: Path = results.RESULTS / DEVICE) -> dict[tuple[str, str], Row]:
    """(group, candidate) -> the newest row of ours, one with peers before one without.

    Raises:
        ValueError: naming a file that its schema refuses, or the folder, where it holds no run.
    """
    runs = [run for run in results.read_all(folder) if not run.smoke]
    if not runs:
        raise ValueError(f"{folder}: expected a run of the suite there, found none")
    found: dict[tuple[str, str], Row] = {}
    for run in runs:
        for key, row in rows_of(run).items():
            if is_ours(row.candidate) and (row.over or key not in found or not found[key].over):
                found[key] = row
    return found


# ---- rows -> cells ----


def figure(row: Row, unit: bool = True) -> str:
    """A row's rate, time or size; "too noisy" or "incorrect" where it has none to quote."""
    if not row.extra["correct"]:
        return "incorrect"
    if row.extra["noisy"]:
        return "too noisy"
    value, name = _amount(row)
    return f"{value} {name}" if unit else value


def _amount(row: Row) -> tuple[str, str]:
    """(number, unit) of a row's figure."""
    if row.seconds is None:
        return f"{row.extra['peak_mib']:,.0f}", "MiB"
    if "p90_ms" not in row.extra and "quiet_ms" not in row.extra:
        for key, (decimals, unit) in RATES.items():
            if row.extra.get(key):
                return f"{row.extra[key]:,.{decimals}f}", unit
    return f"{row.seconds * 1e3:,.{2 if row.seconds < 1e-2 else 1}f}", "ms"


def beside(row: Row) -> str:
    """Each peer's figure and, in brackets, the ratio; where there is no ratio the reason."""
    if not row.extra["correct"] or row.extra["noisy"]:
        return "–"
    peers = rows_of(row.run)
    cells = []
    for name, ratio in row.over.items():
        peer = name.partition("-")[0]
        label = PEERS.get(peer, peer)
        if isinstance(ratio, str):
            cells.append(f"{label}: {ratio.split(':')[0]}")
        else:
            cells.append(f"{label} {figure(peers[row.group, name], unit=False)} ({ratio:.2f} ×)")
    return ", ".join(cells) or "–"


def number(run: Run) -> str:
    """The number of a run's file on its device, which the tables name it by."""
    return f"`{run.path.name.partition('_')[0]}`"


def line(words: str, row: Row) -> list[str]:
    return [words, figure(row), beside(row), number(row.run)]


def label(row: Row) -> str:
    """Model, what it works on, and in which precision."""
    extra = row.extra
    parts = [f"{MODELS.get(extra['model'], extra['model'])}, `{extra['workload']}`"]
    if head := extra.get("head"):
        parts.append(HEADS.get(head, head))
    if row.group.startswith("finetuning-memory-"):
        parts.append("peak memory")
    if row.group.startswith("load-"):
        parts.append(LOADS.get(extra["kind"], extra["kind"]))
    text = ", ".join([*parts, precision(row.candidate)])
    ours = row.candidate.partition("-")[0]
    return text + OURS.get(ours, f", {ours}")


# ---- the pages' parts ----


def earlier(*steps: str) -> list[str]:
    """The ratios to each peer in EARLIER_FILES, a column per peer."""
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    commits = {}
    for name in EARLIER_FILES:
        data = results.load(results.RESULTS / EARLIER / f"{name}.json")
        for row in data["ratios"]:
            if row["step"] not in steps or row["of"] not in OF:
                continue
            ours = row.get("ours") or f"fastbert-{row['dtype']}"
            place = f"{MODELS[row['model']]}, `{row['workload']}`, {row['step']}"
            words = ", ".join(filter(None, (place, HEADS.get(row.get("head")), precision(ours))))
            at = words + OURS[ours.partition("-")[0]], OF[row["of"]], f"`{name}`"
            # a later row replaces an earlier one
            cells.setdefault(at, {})[row["theirs"].partition("-")[0]] = f"{row['ratio']:.2f} ×"
            commits[name] = data["commit"][:9]
    peers = [peer for peer in PEERS if any(peer in found for found in cells.values())]
    body = [
        [words, of, *(found.get(peer, "–") for peer in peers), name]
        for (words, of, name), found in cells.items()
    ]
    files = ", ".join(f"`{name}` at commit {commit}" for name, commit in commits.items())
    head = ["what", "measured", *(f"over {PEERS[peer]}" for peer in peers), "file"]
    return [*table(head, body), "", f"Files of `bench/results/{EARLIER}/`: {files}."]


def kind(name: str, rows: Rows) -> list[str]:
    """Every row of ours of one kind ("encoder", "latency", "training", …) that has a workload."""
    found = [row for row in rows.values() if row.group.split("-")[0] == name and "workload" in row.extra]
    if not found:
        return ["No run holds this yet."]
    return table([name, *HEAD], [line(label(row), row) for row in found])


def runs_of(rows: Iterable[Row]) -> list[Run]:
    """The runs of some rows, the earliest first."""
    return results.in_order({row.run.path: row.run for row in rows}.values())


def source(run: Run) -> str:
    """File, machine, versions, commit and date of a run."""
    commit = run.commit[:9] + (" and changes" if run.changed else "")
    parts = [
        f"{number(run)} is `bench/results/{run.path.parent.name}/{run.path.name}`",
        f"{run.machine['device']}, {run.machine['threads']} threads, torch {run.machine['torch']}",
        f"commit {commit}, {run.date[:10]}",
        *([run.note] if run.note else []),
    ]
    return "; ".join(parts) + "."


def runs(rows: Rows) -> list[str]:
    """The runs that are quoted, then how sure their rows are: samples, spread, and how many are too noisy."""
    body, text = [], []
    for run in runs_of(rows.values()):
        text += [source(run), ""]
        each = [b for b in run.benchmarks if b.kind != "ops"]
        spread = sorted(b.extra["spread"] for b in each if not b.extra["noisy"])
        rounds = [b.rounds for b in each]
        middle = f"{spread[len(spread) // 2]:.0%}" if spread else "–"
        noisy = sum(b.extra["noisy"] for b in each)
        body.append([number(run), f"{min(rounds)} to {max(rounds)}" if rounds else "–", middle])
        body[-1].append(f"{noisy} of {len(each)}")
    return [*text, *table(["run", "samples per row", "median spread", "rows too noisy to quote"], body)]
