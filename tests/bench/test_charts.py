"""The charts of bench/plot.py show the figures of the files: every bar, point, line and label."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import plot
from bench.lib import results
from bench.lib.charts import suite as charts
from tests.support import suite_files

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed: pip install .[bench]"
)


def runs_in(folder: Path, *speeds: float) -> list[results.Run]:
    """Made-up runs, one per day, of which ours take `1 / speed` times as long as in the first."""
    folder.mkdir(exist_ok=True)
    for day, speed in enumerate(speeds, 1):
        options = {"commit": f"{day}" * 40, "date": f"2026-11-{day:02}T10:00:00+00:00", "ours": 1 / speed}
        data = suite_files.suite_file(**options)
        (folder / f"{day:04}_{data['commit_info']['id']}.json").write_text(json.dumps(data))
    return results.read_all(folder)


@pytest.fixture
def run(tmp_path) -> results.Run:
    return runs_in(tmp_path / "one", 1.0)[0]


# --- bars ---------------------------------------------------------------------------------------------------


@needs_matplotlib
def test_bars_floors_and_units(run):
    figure = charts.bars(run, "base")
    [axes] = figure.axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {"fastbert fp32": [1024.0, 1024.0], "transformers fp32": [512.0, 256.0]}
    lines = [tuple(c.get_segments()[0][0]) for c in axes.collections]
    assert sorted(y for _, y in lines) == [2000.0, 2000.0]
    assert axes.get_ylim()[1] > 2000
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "floor fp32: 100 GFLOP/s" in legend[0]
    assert "tokens per second" in axes.get_ylabel()
    assert [t.get_text() for t in axes.get_xticklabels()] == ["8x128", "ragged16"]
    assert figure.get_suptitle().startswith(
        "BERT-base forward on 2 threads of a processor\ncommit 111111111, "
    )
    assert "Without a time: openvino fp32 (8x128)." in axes.get_xlabel()


# --- the ops beside the roofs -------------------------------------------------------------------------------


@needs_matplotlib
def test_shares_of_the_roof_are_those_of_the_rows(run):
    [workload] = charts.op_workloads(run)
    figure = charts.shares(run, workload)
    rows = [each for each in run.of("ops") if each.share is not None]
    drawn = [
        (axes.get_title(), line.get_label(), round(float(x), 6))
        for axes in figure.axes
        for line in axes.lines
        for x in line.get_xdata()
    ]
    labels = {"cpu": "fastbert, cpu", "aten": "fastbert by ATen", "torch": "plain PyTorch"}
    expected = [
        (f"{r.extra['pass']}, {r.extra['dtype']}", labels[r.candidate.split("-")[0]], round(100 * r.share, 6))
        for r in rows
    ]
    assert sorted(drawn) == sorted(expected)
    assert expected
    faster = [replace(r, extra=r.extra | {"of_roof": 3.0}) for r in rows]
    beyond = charts.shares(replace(run, benchmarks=tuple(faster)), workload)
    assert {float(x) for axes in beyond.axes for line in axes.lines for x in line.get_xdata()} == {100.0}
    assert not charts.op_workloads(replace(run, benchmarks=()))


# --- the history --------------------------------------------------------------------------------------------


@needs_matplotlib
def test_history_is_a_multiple_of_the_first_run(tmp_path):
    runs = runs_in(tmp_path, 1.0, 1.25, 2.0)
    first, second = charts.history(runs, "encoder").axes
    drawn = {
        tuple(round(y, 6) for y in line.get_ydata())
        for line in first.lines
        if line.get_gid() == "encoder-base-8x128"
    }
    assert drawn == {(1.0, 1.25, 2.0), (1.0, 1.0, 1.0)}
    assert [text.get_text() for text in second.get_xticklabels()] == ["1111111", "2222222", "3333333"]
    assert [axes.get_title() for axes in (first, second)] == ["base-8x128", "base-ragged16"]
    ops = charts.history(runs, "ops")
    assert [axes.get_title() for axes in ops.axes] == ["linear forward", "packing forward"]


# --- the command --------------------------------------------------------------------------------------------


@needs_matplotlib
def test_the_command_draws_all_and_names_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    runs = runs_in(tmp_path / "x", 1.0, 2.0)
    out = tmp_path / "out"
    saved = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, dpi: saved.append(path.name))
    assert plot.main([str(runs[1].path), "--out", str(out)]) == 0
    names = ["bars-base", "roofs-8x128", "history-encoder", "history-ops"]
    assert saved == [f"{name}.png" for name in names]
    assert plot.main([str(runs[0].path), str(runs[1].path), "--what", "bars"]) == 0
    assert saved[4:] == [f"{run.path.stem}-bars-base.png" for run in runs]
    assert plot.main([]) == 2
    assert "no run of the suite there, expected [0-9]*_*.json or a FILE" in capsys.readouterr().err
    data = suite_files.suite_file()
    data["benchmarks"] = data["benchmarks"][4:]
    runs[0].path.write_text(json.dumps(data))
    assert plot.main([str(runs[0].path), "--what", "bars"]) == 2
    assert f"{runs[0].path}: it has no rows for --what bars" in capsys.readouterr().err
