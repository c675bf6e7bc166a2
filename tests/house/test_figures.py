"""Every figure on a page is that of a committed row of bench/results.

Those of README.md and docs/numbers.md are made by docs/make.py (tests/bench/test_quoted.py); prose may quote
the files of one processor that the suite has not replaced, and the suite's newest run not at all.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from bench.lib import turns

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "bench" / "results" / "cpu-intel-xeon-processor-family-6-model-207-2c"
PAGES = ["README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
if not MACHINE.is_dir():
    pytest.skip("no results here", allow_module_level=True)

BASE = dict(step="encoder", model="base")
STEP = dict(step="training", model="base", workload="8x128", head="classification")
OTHER_BITS = dict(step="attention", theirs="fastbert_other_bits")


@functools.cache
def result(file: str) -> dict:
    """A file of the machine's results."""
    return json.loads((MACHINE / f"{file}.json").read_text())


def ratios(file: str, **wanted: object) -> list[float]:
    """The ratios of a file in bench/results whose keys are as wanted, from the smallest."""
    rows = result(file)["ratios"]
    return sorted(row["ratio"] for row in rows if all(row.get(k) == v for k, v in wanted.items()))


def ours_over(peer: str, dtype: str, workload: str, file: str = "bench_cpu", ours: str = "fastbert") -> float:
    """BERT-base's forward: our speed over a peer's."""
    (ratio,) = ratios(file, **BASE, workload=workload, ours=f"{ours}-{dtype}", theirs=f"{peer}-{dtype}")
    return ratio


def range_over(peer: str, dtype: str) -> tuple[float, float]:
    """The smallest and largest of our speeds over a peer's on dense input."""
    found = [ours_over(peer, dtype, workload) for workload in ("1x128", "1x512", "8x128")]
    return min(found), max(found)


def of_a_step(dtype: str) -> float:
    """A training step: our speed over transformers'."""
    (ratio,) = ratios("bench_cpu", **STEP, ours=f"fastbert-{dtype}", theirs=f"transformers-{dtype}")
    return ratio


def of_memory(dtype: str) -> float:
    """A forward of 64 ragged sequences: our share of transformers' peak."""
    (ratio,) = ratios("bench_cpu", step="memory", of="peak_mib", ours=f"fastbert-{dtype}")
    return ratio


def of_encode(texts: str) -> float:
    """`SentenceTransformer.encode` by MiniLM: accelerated over stock."""
    peers = dict(ours="accelerated-fp32", theirs="sentence_transformers-fp32")
    (ratio,) = ratios("bench_accelerate", workload=texts, **peers)
    return ratio


def losses(candidate: str) -> list[float]:
    """BERT-base's times beside a busy neighbour over its quiet times, in the latest run that has it.

    `candidate` is `fastbert`, or `other`: the engine of before, with plain OpenMP.
    """
    found = [json.loads(path.read_text()) for path in (ROOT / "bench" / "results").glob("*/bench_load.json")]
    runs = [
        [r["loss"] for r in run["rows"] if r["model"] == "base" and r["candidate"].startswith(candidate)]
        for run in sorted(found, key=lambda run: run["date"])
        if run["finished"]
    ]
    return [run for run in runs if run][-1]


def of_graphed_calls() -> tuple[float, float]:
    """The host's microseconds of a graphed call at 1 x 128: the least and the most of all kinds of calls."""
    found = [json.loads(path.read_text()) for path in (ROOT / "bench" / "results").glob("*/*graphs.json")]
    latest = max((run for run in found if run["finished"]), key=lambda run: run["date"])
    times = [
        row["median_us"] if "median_us" in row else 1e3 * row["median_ms"]
        for row in latest["rows"]
        if row["candidate"] == "fastbert" and row["case"].endswith("1x128")
    ]
    return min(times), max(times)


@functools.cache
def claims() -> dict[str, list[tuple[str, tuple[float, ...]]]]:
    """By page: what it says, and the figures in it, for every figure that no script writes."""
    bits = ratios("bench_training_attention", **OTHER_BITS)
    lost = (min(losses("fastbert")), max(losses("fastbert")), max(losses("other")))
    both = ("fp32", "bf16")
    neighbour = (
        "Beside one busy neighbour BERT-base on two cores takes {:.1f} to {:.1f} times its quiet time "
        "(`bench_load.json`); "
    )
    changes = [
        (
            "BERT-base on 16 ragged sequences runs {:.2f} × (fp32) and {:.2f} × (bf16) as fast as stock",
            [
                ours_over("transformers", dtype, "ragged16", "bench_accelerate", "accelerated")
                for dtype in both
            ],
        ),
        (
            "MiniLM's `SentenceTransformer.encode` {:.2f} × (1,000 sentences, fp32)",
            [of_encode("sentences1000")],
        ),
        ("peaks at {:.2f} × (fp32) and {:.2f} × (bf16) transformers' memory", map(of_memory, both)),
        (
            "on a CPU both passes together take {:.2f} to {:.2f} of the time of drawing the bits again",
            (1 / bits[-1], 1 / bits[0]),
        ),
        (
            "BERT-base on 16 ragged sequences at {:.2f} × (fp32) and {:.2f} × (bf16) transformers' speed, "
            "{:.2f} × and {:.2f} × OpenVINO's",
            [ours_over(peer, dtype, "ragged16") for peer in ("transformers", "openvino") for dtype in both],
        ),
        (
            "on dense input at {:.2f} to {:.2f} × (fp32) and {:.2f} to {:.2f} × (bf16) OpenVINO's",
            (*range_over("openvino", "fp32"), *range_over("openvino", "bf16")),
        ),
        (
            "int8 at {:.2f} × ONNX Runtime's (dense {:.2f} to {:.2f} ×)",
            (ours_over("onnxruntime", "int8", "ragged16"), *range_over("onnxruntime", "int8")),
        ),
        (
            "a training step at {:.2f} × (fp32) and {:.2f} × (bf16) transformers' on dense input",
            map(of_a_step, both),
        ),
        (
            "beside the replay itself: {:.0f} to {:.0f} µs for BERT-base, 1 x 128 (`bench_graphs.json`)",
            of_graphed_calls(),
        ),
        (neighbour + "before, it took up to {:.0f} times", lost),
    ]
    return {
        "CHANGELOG.md": [(text, tuple(figures)) for text, figures in changes],
        "docs/gpu-server.md": [("costs the host {:.0f} to {:.0f} µs beside the replay", of_graphed_calls())],
        "docs/threads.md": [(neighbour + "with plain OpenMP {:.0f} times at most", lost)],
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
