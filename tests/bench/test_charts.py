"""The charts of bench/plot.py show the figures of the files: every bar, point, line and label."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import plot
from bench.lib import results
from bench.lib.charts import labels, roofline
from bench.lib.charts import suite as charts
from tests.support import suite_files

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="matplotlib is not installed: pip install .[bench]",
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


@needs_matplotlib
def test_bars_of_a_candidate_without_a_time_and_of_a_high_floor(run):
    rows = [each for each in run.benchmarks if each.candidate != "fastbert-fp32" or each.group.endswith("16")]
    tall = [replace(each, extra=each.extra | {"floor_tokens_per_s": {"fp32": 9e6}}) for each in rows]
    unknown = replace(tall[0], candidate="engine_of_tomorrow-bf16")
    [axes] = charts.bars(replace(run, benchmarks=(*tall, unknown)), "base").axes
    named = {bars.get_label() for bars in axes.containers}
    assert named == {"fastbert fp32", "transformers fp32", "engine_of_tomorrow bf16"}  # no one is left out
    assert sum("floor fp32 9,000,000 ↑" in t.get_text() for t in axes.texts) == 2  # it lies above the picture
    assert axes.get_ylim()[1] < 2000


# --- the roofline -------------------------------------------------------------------------------------------


@needs_matplotlib
def test_the_roofline_has_every_op_at_its_place(run):
    figure = roofline.roofline(run, "8x128")
    counted, moved = figure.axes
    points = {
        (round(line.get_xdata()[0], 6), round(line.get_ydata()[0], 6)): line.get_markerfacecolor()
        for line in counted.lines
        if line.get_marker() != "None"
    }
    blue = charts.BACKENDS["cpu"][0]
    assert points == {(100.0, 80.0): blue, (100.0, 50.0): "white", (150.0, 75.0): blue}
    roof = counted.lines[0].get_xydata().tolist()
    assert roof[1:] == [[5.0, 100.0], [roof[2][0], 100.0]]  # the ridge: 100 GFLOP/s at 20 GB/s
    assert roof[0][1] == pytest.approx(20 * roof[0][0])
    texts = [text.get_text() for text in counted.texts]
    assert texts == ["fp32: 100 GFLOP/s", "memory: 20 GB/s", "1", "2"]
    assert [line.get_xdata()[0] for line in moved.lines] == [10.0, 5.0, 20.0]  # packing twice, the memory
    assert [text.get_text() for text in moved.get_yticklabels()] == ["packing\nfp32"]
    meanings = figure.legends[0]
    assert [handle.get_marker() for handle in meanings.legend_handles] == ["$1$", "$2$"]
    assert [text.get_text() for text in meanings.get_texts()] == ["linear 768", "linear 2304-gelu"]
    named = [text.get_text() for text in counted.get_legend().get_texts()]
    assert named == [charts.BACKENDS["cpu"][3], "plain PyTorch"]


def test_short_names_are_what_tells_cases_apart():
    cases = {
        "linear": ["1024x768x768-no_bias", "1024x768x2304", "1024x3072x768"],
        "layer_norm": ["1024x768", "1024x768-residual"],
        "pooling": ["8x128-mean", "8x128-max"],
        "attention": ["8x128x12x64-packed_qkv"],
    }
    rows = [
        results.Benchmark("", "", {}, 1.0, 1, {"op": op, "case": case})
        for op, names in cases.items()
        for case in names
    ]
    assert list(roofline.short_names(rows).values()) == [
        "linear 768x768-no bias",
        "linear 768x2304",
        "linear 3072x768",
        "layer norm",
        "layer norm residual",
        "pooling mean",
        "pooling max",
        "attention",
    ]


@needs_matplotlib
def test_labels_cover_no_other_and_no_point():
    figure = charts.figure_of(5, 4)
    axes = figure.subplots()
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    points = [(5 + x / 10, 5 + y / 10) for x in range(4) for y in range(3)]
    figure.canvas.draw()
    notes = labels.place(axes, [(*p, f"label {i}", "black") for i, p in enumerate(points)], points)
    boxes = []
    for note in notes:
        note.update_positions(figure.canvas.get_renderer())
        box = super(type(note), note).get_window_extent()  # without the line to the point
        boxes.append((box.x0, box.y0, box.x1, box.y1))
    frame = axes.get_window_extent()
    for i, box in enumerate(boxes):
        assert all(labels.overlap(box, other) == 0 for other in boxes[:i])
        assert frame.x0 <= box[0]
        assert box[2] <= frame.x1
        for x, y in axes.transData.transform(points):
            assert labels.overlap(box, (x - 1, y - 1, x + 1, y + 1)) == 0


# --- ragged efficiency, history -----------------------------------------------------------------------------


@needs_matplotlib
def test_ragged_batches_stand_beside_the_dense_rate(run):
    [axes] = charts.ragged(run, "base").axes
    stars = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "*"]
    assert stars == [[[2048.0, 2000.0]], [[2048.0, 8000.0]]]
    rates = [line.get_xydata().tolist() for line in axes.lines if line.get_linestyle() == "--"]
    assert rates == [[[1024.0, 1000.0], [2048.0, 2000.0]], [[1024.0, 2000.0], [2048.0, 4000.0]]]
    assert sorted(text.get_text() for text in axes.texts) == ["1.00", "2.00"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1,024\n8x128", "2,048\nragged16"]


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


@needs_matplotlib
def test_a_kind_of_one_run_has_no_history(tmp_path):
    runs = runs_in(tmp_path, 1.0, 2.0)
    assert charts.is_repeated(runs, "encoder")
    assert charts.is_repeated(runs, "ops")
    assert not charts.is_repeated(runs[:1], "encoder")
    assert not charts.is_repeated([runs[0], replace(runs[1], benchmarks=())], "encoder")


def test_the_newest_runs_of_a_device_have_all_kinds(tmp_path):
    whole, part, again = runs_in(tmp_path / "x", 1.0, 1.0, 1.0)
    data = json.loads(part.path.read_text())
    data["benchmarks"] = [each for each in data["benchmarks"] if each["group"].startswith("ops")][:1]
    for path, group in ((part.path, "load-neighbour-base"), (again.path, "ops-again")):
        data["benchmarks"][0]["group"] = group
        data["benchmarks"][0]["extra_info"]["over"] = {}
        path.write_text(json.dumps(data))
    assert [run.path for run in results.newest(tmp_path)] == [whole.path, part.path]


# --- the command --------------------------------------------------------------------------------------------


@needs_matplotlib
def test_the_command_draws_all_and_names_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    runs = runs_in(tmp_path / "x", 1.0, 2.0)
    out = tmp_path / "out"
    saved = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, dpi: saved.append(path.name))
    assert plot.main([str(runs[1].path), "--out", str(out)]) == 0
    names = ["bars-base", "ragged-base", "roofline-8x128", "history-encoder", "history-ops"]
    assert saved == [f"{name}.png" for name in names]
    assert plot.main([str(runs[0].path), str(runs[1].path), "--what", "bars"]) == 0
    assert saved[5:] == [f"{run.path.stem}-bars-base.png" for run in runs]
    assert plot.main([]) == 2
    assert "no run of the suite there, expected [0-9]*_*.json or a FILE" in capsys.readouterr().err
    data = suite_files.suite_file()
    data["benchmarks"] = data["benchmarks"][:4]
    runs[0].path.write_text(json.dumps(data))
    assert plot.main([str(runs[0].path), "--what", "roofline"]) == 2
    assert f"{runs[0].path}: it has no rows for --what roofline" in capsys.readouterr().err


@pytest.fixture
def without_matplotlib(monkeypatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_matplotlib_there_is_a_message(without_matplotlib, tmp_path, capsys):
    assert plot.main([str(tmp_path / "x.json")]) == 2
    assert "no chart: matplotlib is not installed: pip install .[bench]" in capsys.readouterr().err


def test_the_newest_run_is_of_the_device_that_the_suite_prefers(tmp_path, monkeypatch):
    for slug in ("a-gpu", "a-cpu"):
        (tmp_path / slug).mkdir()
        (tmp_path / slug / "0001_x.json").write_text(json.dumps(suite_files.suite_file(slug=slug)))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(plot, "describe", lambda device: {"slug": f"a-{device.type}".replace("cuda", "gpu")})
    for there, slug in ((True, "a-gpu"), (False, "a-cpu")):
        monkeypatch.setattr(plot.torch.cuda, "is_available", lambda there=there: there)
        assert plot.here().parent.name == slug
