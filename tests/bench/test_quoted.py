"""The figures that docs/numbers.md and the front picture quote: the newest row of each benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.lib import quoted, results
from bench.lib.charts import front
from tests.support import suite_files

DAYS = [f"2026-11-{day:02}T10:00:00+00:00" for day in (1, 2, 3)]
OURS = ("encoder-base-ragged16", "fastbert-fp32")
SVG = "{http://www.w3.org/2000/svg}"


def written(folder: Path, number: int, content: dict) -> None:
    """A file of the suite, named as pytest-benchmark names it."""
    name = f"{number:04}_{content['commit_info']['id']}_20261101_100000.json"
    (folder / name).write_text(json.dumps(content))


def without(content: dict, group: str) -> dict:
    """A file without one group's rows."""
    content["benchmarks"] = [each for each in content["benchmarks"] if each["group"] != group]
    return content


def noisy(content: dict, group: str) -> dict:
    """A file in which our row of a group is too noisy for a ratio."""
    for each in content["benchmarks"]:
        if each["group"] == group and each["extra_info"]["over"]:
            each["extra_info"] |= {"noisy": True, "spread": 0.5}
            each["extra_info"]["over"] = {"transformers-fp32": "too noisy: fastbert-fp32"}
    return content


@pytest.fixture
def folder(tmp_path) -> Path:
    written(tmp_path, 1, suite_files.suite_file(date=DAYS[0]))
    return tmp_path


def test_a_newer_file_replaces_the_rows_that_it_has(folder):
    first = ["ragged", "1,024 tokens/s", "transformers sdpa 256 (4.00 ×)", "`0001`"]
    assert quoted.line("ragged", quoted.newest(folder)[OURS]) == first
    faster = suite_files.suite_file("b" * 40, DAYS[1], ours=0.5)
    written(folder, 2, without(faster, "encoder-base-8x128"))
    rows = quoted.newest(folder)
    assert quoted.line("ragged", rows[OURS]) == [
        "ragged",
        "2,048 tokens/s",
        "transformers sdpa 256 (8.00 ×)",
        "`0002`",
    ]
    assert quoted.number(rows["encoder-base-8x128", "fastbert-fp32"].run) == "`0001`"
    text = "\n".join(quoted.runs(rows))
    for number, commit in (("0001", suite_files.COMMIT), ("0002", "b" * 40)):
        assert f"`{number}` is `bench/results/{folder.name}/{number}_{commit}_" in text


def test_a_smoke_run_and_one_without_peers_replace_nothing(folder):
    smoke = suite_files.suite_file("b" * 40, DAYS[1], ours=0.5)
    smoke["fastbert"]["settings"]["smoke"] = True
    written(folder, 2, smoke)
    alone = suite_files.suite_file("c" * 40, DAYS[2], ours=0.25)
    alone["benchmarks"] = [each for each in alone["benchmarks"] if "transformers" not in each["name"]]
    for each in alone["benchmarks"]:
        each["extra_info"]["over"] = {}
    written(folder, 3, alone)
    assert quoted.number(quoted.newest(folder)[OURS].run) == "`0001`"


def test_a_noisy_row_has_neither_a_figure_nor_a_ratio(folder):
    late = noisy(suite_files.suite_file("b" * 40, DAYS[1]), OURS[0])
    written(folder, 2, late)
    rows = quoted.newest(folder)
    assert quoted.line("ragged", rows[OURS]) == ["ragged", "too noisy", "–", "`0002`"]
    lines = quoted.runs(rows)
    assert lines[-1] == "| `0002` | 3 to 3 | 2% | 1 of 4 |"


def test_a_peer_without_a_ratio_has_the_reason(folder):
    rows = quoted.newest(folder)
    memory = rows["memory-base-ragged64", "fastbert-fp32"]
    assert quoted.figure(memory) == "500 MiB"
    assert quoted.beside(memory) == "transformers sdpa 1,000 (0.50 ×), ONNX Runtime: error"
    assert quoted.label(memory) == "BERT-base, `ragged64`, fp32"


def test_the_front_picture_shows_committed_rows_and_their_ratios(monkeypatch):
    """Each bar's number and, per group, our speed over the fastest peer; a noisy peer has no bar."""
    rows = quoted.newest()
    row = rows["encoder-base-ragged16", "fastbert-fp32"]
    peers = [quoted.rows_of(row.run)[row.group, name] for name in row.over]
    assert len(peers) >= 2
    texts = [text.text for text in ElementTree.fromstring(front.picture(3)).iter(f"{SVG}text")]
    start = texts.index("16 texts of mixed lengths, fp32")
    speeds = sorted((each.extra["tokens_per_s"] for each in (row, *peers)), reverse=True)
    assert texts[start + 1] == f"{speeds[0] / speeds[1]:.2f} ×"
    end = start + 3 + 2 * len(speeds)
    assert texts[start + 3 : end : 2] == [f"{speed:,.0f}" for speed in speeds]
    monkeypatch.setattr(front, "rows_of", lambda run: loud(quoted.rows_of(run), peers[0].candidate))
    assert len(front.panels()[0].groups["16 texts of mixed lengths, fp32"]) == len(peers)


def loud(rows: dict, candidate: str) -> dict:
    """Rows of which one candidate's are noisy."""
    return {
        key: replace(row, extra={**row.extra, "noisy": True}) if key[1] == candidate else row
        for key, row in rows.items()
    }


def test_every_ratio_of_the_pages_is_one_of_a_committed_row():
    """A ratio is that of two medians of the row's own file, and neither is noisy."""
    rows = quoted.newest()
    assert all(row.run.path.parent == results.RESULTS / quoted.DEVICE for row in rows.values())
    for row in rows.values():
        for name, ratio in row.over.items():
            if isinstance(ratio, float) and row.seconds is not None:
                theirs = quoted.rows_of(row.run)[row.group, name]
                assert not theirs.extra["noisy"], (row.group, name)
                assert ratio == pytest.approx(theirs.seconds / row.seconds, rel=1e-6)
