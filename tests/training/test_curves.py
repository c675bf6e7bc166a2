"""The picture of a run's log, with and without matplotlib, of a whole run or of a running one."""

from __future__ import annotations

import json
import math
import os
import sys

import numpy as np
import pytest

from fastbert.checkpoint.files import CheckpointError
from fastbert.training import curves


def written(run, steps: int, **more) -> list[dict]:
    """A log with losses that fall, of which one is not finite."""
    lines = []
    for step in range(1, steps + 1):
        loss = 1 + 5 * math.exp(-step / 30)
        line = {"step": step, "loss": loss, "mlm_loss": loss - 0.5, "sentence_loss": 0.5}
        line |= {"mlm_accuracy": 1 - loss / 7, "lr": 1e-3 * min(1, step / 20), "tokens": step, **more}
        lines.append(line)
    lines[0]["loss"] = None
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def drawn(run, noted) -> list:
    """The panels of the picture."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    kept = noted(figure, "savefig", lambda self, *args, **options: self)
    assert curves.draw(run) == run / "curves.png"
    content = (run / "curves.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(content) > 5000
    return kept[0].axes


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [1, 30, 200])
def test_a_picture_has_the_lines_of_the_log(steps, tmp_path, noted):
    lines = written(tmp_path, steps)
    panels = drawn(tmp_path, noted)
    assert [axes.get_title() for axes in panels] == ["loss (nats)", "accuracy", "learning rate"]
    names = {"loss (nats)": ["loss", "mlm_loss", "sentence_loss"], "accuracy": ["mlm_accuracy"]}
    for axes in panels:
        own = names.get(axes.get_title(), ["lr"])
        drawn_lines = axes.get_lines()
        each = 2 if steps > 40 and own != ["lr"] else 1  # the values, and their mean
        assert len(drawn_lines) == len(own) * each
        for name, line in zip(own, drawn_lines[::each], strict=True):
            assert list(line.get_xdata()) == list(range(1, steps + 1))
            expected = [math.nan if row[name] is None else row[name] for row in lines]
            assert np.allclose(np.array(line.get_ydata(), float), expected, equal_nan=True)
        assert axes.get_xlabel() == "step"
    legend = [text.get_text() for text in panels[0].get_legend().get_texts()]
    assert legend == ["total", "mlm", "sentence"]
    assert panels[1].get_ylim() == (0, 1)


def test_a_line_that_is_being_written_is_left_out(tmp_path, noted):
    written(tmp_path, 3)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in curves.read(tmp_path)] == [1, 2, 3]
    assert list(drawn(tmp_path, noted)[0].get_lines()[0].get_xdata()) == [1, 2, 3]


def test_a_picture_replaces_a_link_and_not_its_target(tmp_path):
    pytest.importorskip("matplotlib")
    written(tmp_path, 3)
    (tmp_path / "mine.png").write_text("mine")
    (tmp_path / "curves.png").symlink_to(tmp_path / "mine.png")
    curves.draw(tmp_path)
    assert (tmp_path / "mine.png").read_text() == "mine"
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_line_that_is_no_object_is_named(tmp_path):
    for line, problem in (
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is nested deeper"),
        ('{"loss": 1}', "expected numbers, with a step"),
        ('{"step": 2, "loss": "x"}', "expected numbers, with a step"),
    ):
        (tmp_path / "log.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(CheckpointError, match=rf"log\.jsonl: line 2: {problem}"):
            curves.read(tmp_path)
    (tmp_path / "log.jsonl").unlink()
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(CheckpointError, match=r"log\.jsonl: is not a plain file"):
        curves.read(tmp_path)


def test_no_picture(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_text("")
    pytest.importorskip("matplotlib")
    assert curves.draw(tmp_path) is None
    written(tmp_path, 3)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    assert curves.draw(tmp_path) is None
    assert not (tmp_path / "curves.png").exists()
