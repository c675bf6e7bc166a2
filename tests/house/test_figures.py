"""Every figure on a page is that of a committed row of bench/results.

docs/make.py writes the tables of README.md and docs/numbers.md (tests/bench/test_quoted.py). Figures in prose
are listed here, each with the result that it comes from.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from bench.lib import turns

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PAGES = ["README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
if not RESULTS.is_dir():
    pytest.skip("no results here", allow_module_level=True)


def losses(candidate: str) -> list[float]:
    """BERT-base's times beside a busy neighbour over its quiet times, in the latest run that has it.

    `candidate` is `fastbert`, or `other`, the previous engine with plain OpenMP.
    """
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*/bench_load.json")]
    runs = [
        [r["loss"] for r in run["rows"] if r["model"] == "base" and r["candidate"].startswith(candidate)]
        for run in sorted(found, key=lambda run: run["date"])
        if run["finished"]
    ]
    return [run for run in runs if run][-1]


def of_graphed_calls() -> tuple[float, float]:
    """The host's microseconds of a graphed call at 1 x 128: the least and the most of all kinds of calls."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*/*graphs.json")]
    latest = max((run for run in found if run["finished"]), key=lambda run: run["date"])
    times = [
        row["median_us"] if "median_us" in row else 1e3 * row["median_ms"]
        for row in latest["rows"]
        if row["candidate"] == "fastbert" and row["case"].endswith("1x128")
    ]
    return min(times), max(times)


def of_finetuning() -> list[float]:
    """MiniLM's speed over transformers' Trainer: pairs in fp32 and bf16, then windows."""
    rows = {}
    for path in sorted(RESULTS.glob("*/0*.json")):
        for each in json.loads(path.read_text())["benchmarks"]:
            row = each["extra_info"]
            if row.get("step") == "finetuning" and row["model"] == "minilm" and "over" in row:
                rows[row["workload"], row["candidate"]] = row["over"]
    cases = [(workload, dtype) for workload in ("mrpc", "squad") for dtype in ("fp32", "bf16")]
    return [rows[workload, f"fastbert-{dtype}"][f"transformers-{dtype}"] for workload, dtype in cases]


def of_compression(*kinds: str, peer: str = "whole") -> list[float]:
    """How many times as fast as `peer` smaller BERT-bases are: each in fp32 and 8 bits, as `peer` has it."""
    rows = {}
    for path in sorted(RESULTS.glob("*/0*.json"), key=lambda path: path.stem.split("_")[2:]):
        for each in json.loads(path.read_text())["benchmarks"]:
            row = each["extra_info"]
            if each["name"].startswith("test_compression[") and row["model"] == "base" and "over" in row:
                kind = each["name"].partition("[")[2].partition("-base-")[0]
                rows[kind, row["candidate"]] = row["over"]
    cases = [(kind, tag) for kind in kinds for tag in ("fp32", "int8")]
    found = [rows[kind, f"fastbert-{tag}"].get(f"{peer}-{tag}") for kind, tag in cases]
    return [times for times in found if times is not None]


def of_rest() -> list[float]:
    """The times of MiniLM's calls after 100 ms of rest over those after 20 ms, in fp32, bf16 and int8."""
    times = {}
    for path in sorted(RESULTS.glob("*/0*.json"), key=lambda path: path.stem.split("_")[2:]):
        run = json.loads(path.read_text())["benchmarks"]
        found = {each["name"].partition("-fastbert-")[2]: each["stats"]["median"] for each in run}
        if "fp32-minilm-1x128-rested]" in found:
            times = found
    cases = [f"{tag}-minilm-1x128" for tag in ("fp32", "bf16", "int8")]
    return [times[f"{case}-rested]"] / times[f"{case}]"] for case in cases]


def of_bits() -> list[tuple[str, tuple[float, ...]]]:
    """The rows of the table of formats."""
    (file,) = RESULTS.glob("*/bits.json")
    rows = {row["format"]: row for row in json.loads(file.read_text())["rows"]}
    near = "| {} | {{:.5f}} | {{:.5f}} | {{:.5f}} |"
    found = []
    for name in ("bfloat16", "int8", "int8-static", "int8-float", "fp8"):
        row = rows[name]
        figures = [row[key] for key in ("cosine_mean", "cosine_least", "spearman")]
        loud = [row[key] for key in ("sqnr_least", "sqnr_median") if key in row]
        claim = near.format(name) + (" {:.1f} | {:.1f} |" if loud else " – | – |") + " {:.3f} |"
        found.append((claim, (*figures, *loud, row["masked_lm_loss"])))
    return found


@functools.cache
def claims() -> dict[str, list[tuple[str, tuple[float, ...]]]]:
    """Page -> its sentences with figures that no script writes, and the measured figures."""
    lost = (min(losses("fastbert")), max(losses("fastbert")), max(losses("other")))
    neighbour = (
        "Beside one busy neighbour BERT-base on two cores takes {:.1f} to {:.1f} times its quiet time "
        "(`bench_load.json`); "
    )
    rest = "After 100 ms of rest a call of MiniLM with 128 tokens takes "
    learns = (
        "MiniLM learns MRPC-like pairs {:.2f} × as fast as by transformers' `Trainer` in fp32 and "
        "{:.2f} × in bf16, and SQuAD-like windows {:.2f} × and {:.2f} × as fast"
    )
    pruned = (
        "A BERT-base without half its neurons is {:.2f} × as fast as the whole one in fp32 and {:.2f} × in "
        "int8; without half its heads {:.2f} × and {:.2f} ×; without half its layers {:.2f} × and {:.2f} ×"
    )
    beside = (
        "in int8 the three are {:.2f}, {:.2f} and {:.2f} × as fast as ONNX Runtime's int8 of the same model"
    )
    fewer = "BERT-base is {:.2f} × as fast in fp32 and {:.2f} × in int8"
    whole = "{:.2f} × as fast as ONNX Runtime's int8"
    kinds = "half-neurons", "half-heads", "half-layers"
    return {
        "docs/compress.md": [
            (pruned, tuple(of_compression(*kinds))),
            (beside, tuple(of_compression(*kinds, peer="onnxruntime"))),
            (fewer, tuple(of_compression("power-bert"))),
            (whole, tuple(of_compression("power-bert", peer="onnxruntime"))),
        ],
        "docs/early-exit.md": [
            (fewer, tuple(of_compression("early-exit"))),
            (whole, tuple(of_compression("early-exit", peer="onnxruntime"))),
        ],
        "docs/fine-tune.md": [(learns, tuple(of_finetuning()))],
        "docs/quantise.md": of_bits(),
        "docs/gpu-server.md": [("costs the host {:.0f} to {:.0f} µs beside the replay", of_graphed_calls())],
        "docs/threads.md": [
            (neighbour + "with plain OpenMP {:.0f} times at most", lost),
            (
                rest + "{:.2f} × in fp32, {:.2f} × in bf16 and {:.2f} × in int8 of its time after 20 ms",
                tuple(of_rest()),
            ),
        ],
        "docs/numbers.md": [("further apart than {:.0%} of the median", (turns.NOISY,))],
    }


def page_text(file: str) -> str:
    """A page without its generated parts, each run of white space one space."""
    text = (ROOT / file).read_text()
    text = re.sub(r"<!-- ([\w ]+): made by .*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    return " ".join(text.split())


@pytest.mark.parametrize("file", PAGES)
def test_figures_are_those_of_the_results_and_no_other_speed_is_claimed(file):
    text = page_text(file)
    for claim, figures in claims().get(file, ()):
        said = claim.format(*figures)
        assert said in text
        text = text.replace(said, "")
    # the rule itself says "1.0 × (b)'s"
    assert [figure for figure in re.findall(r"\d+(?:\.\d+)? (?:×|times)", text) if figure != "1.0 ×"] == []
