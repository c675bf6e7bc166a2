"""Logs: bytes that repeat, offsets, TensorBoard, a line on the terminal."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import shutil
import sys
import time
import types
from typing import ClassVar

import pytest

from fastbert.checkpoint.files import CheckpointError
from fastbert.training import curves, logs
from fastbert.training.logs import Logs
from tests.support.tiny_training import ROOF, trainer


def opened(run, step=0, offsets=None, **options) -> Logs:
    return Logs(run, step, 10, offsets or {}, **{"tensorboard": False, "progress": False, **options})


def test_lines_and_offsets(tmp_path):
    made = opened(tmp_path)
    assert made.offsets() == {"log.jsonl": 0, "speed.jsonl": 0}
    assert made.last() == {}
    made.write(1, {"loss": 0.5, "lr": None}, {"step_ms": 3})
    made.write(2, {"loss": 0.25, "lr": 1e-05}, {"step_ms": 4})
    offsets = made.offsets()
    assert (tmp_path / "log.jsonl").read_text() == (
        '{"step": 1, "loss": 0.5, "lr": null}\n{"step": 2, "loss": 0.25, "lr": 1e-05}\n'
    )
    assert (tmp_path / "speed.jsonl").read_text() == '{"step": 1, "step_ms": 3}\n{"step": 2, "step_ms": 4}\n'
    assert offsets == {name: (tmp_path / name).stat().st_size for name in offsets}
    made.write(3, {"loss": 9}, {})  # after the checkpoint: is cut off
    made.close()
    again = opened(tmp_path, 2, offsets)
    assert again.lost == []
    assert again.last() == {"step": 2, "loss": 0.25, "lr": 1e-05}
    again.write(3, {"loss": 0.125}, {})
    assert again.last() == {"step": 3, "loss": 0.125}
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
    again.close()
    opened(tmp_path).close()  # a run that begins anew
    assert (tmp_path / "log.jsonl").read_bytes() == b""


def test_a_log_that_is_cut_inside_a_line_is_cut_at_its_start(tmp_path):
    """As by a power cut; and a log that was changed, is said to be so."""
    run, path = tmp_path / "run", tmp_path / "run" / "log.jsonl"
    trainer(run, 6).run()
    whole = path.read_bytes()
    for content, told in (
        (whole[:-9], f"{path}: expected {len(whole)} bytes, got {len(whole) - 9}: lines are missing"),
        (whole.replace(b'"lr"', b'"lR"'), f"{path}: was changed since the checkpoint was written"),
        (whole[:-1] + b" ", f"{path}: ended inside a line, which was cut off"),
    ):
        said = []
        path.write_bytes(content)
        result = trainer(run, 6, say=said.append).run()
        assert told in said
        assert path.read_bytes() == content[: content.rfind(b"\n") + 1]
        assert curves.read(run)[-1]["step"] == result.last["step"] == (6 if b"lR" in content else 5)
    path.write_bytes(b"")
    assert trainer(run, 6).run().last == {}
    path.write_bytes(whole[:-9])
    for step in (2, 4, 6):  # all of the run anew
        (run / f"step-{step:06d}").exists() and shutil.rmtree(run / f"step-{step:06d}")
    trainer(run, 6).run()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("name", ["log.jsonl", "speed.jsonl", ".lock"])
@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder"])
def test_what_is_no_file_of_ours_is_not_opened(name, kind, tmp_path):
    """A FIFO would wait for a reader, and a link would empty what it points to."""
    run, path, aside = tmp_path / "run", tmp_path / "run" / name, tmp_path / "aside"
    trainer(run, 2).run()
    path.unlink()
    if kind == "link":
        aside.write_text("mine")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(aside)
    with pytest.raises(CheckpointError, match=rf"{name}: is not a plain file"):
        trainer(run, 2).run()
    assert not aside.exists() or aside.read_text() == "mine"


def test_each_write_goes_to_the_end_at_once(tmp_path, monkeypatch):
    """A system may take a part of a line only; nothing waits in a buffer that a kill would lose."""

    class Slow(io.FileIO):
        def write(self, line):
            return super().write(line[:7])

    monkeypatch.setattr(logs, "open", lambda path, mode, buffering: Slow(path, "a"), raising=False)
    made = opened(tmp_path)
    made.write(1, {"loss": 0.123456789}, {})
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"step": 1, "loss": 0.123456789}


def test_a_number_that_json_does_not_have_is_refused(tmp_path):
    made = opened(tmp_path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        made.write(1, {"loss": float("nan")}, {})
    assert (tmp_path / "log.jsonl").read_bytes() == b""


def test_offsets_are_on_the_disk(tmp_path, monkeypatch):
    made, flushed = opened(tmp_path), []
    monkeypatch.setattr(logs.os, "fsync", flushed.append)
    made.offsets()
    assert flushed == [file.fileno() for file in made._files.values()]


def test_the_speed_of_a_run(tmp_path):
    trainer(tmp_path, 6, log_every=2).run()
    lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    computed = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6] == [line["step"] for line in computed]
    counts = [0, *(line["tokens"] for line in computed)]
    tokens = [b - a for a, b in itertools.pairwise(counts)]
    for line, count in zip(lines, tokens, strict=True):
        seconds = 2 * line["step_ms"] / 1e3
        assert line["sequences_per_s"] == pytest.approx(16 / seconds)
        assert line["tokens_per_s"] == pytest.approx(count / seconds)
        assert line["gflops"] == pytest.approx(count / seconds / 1e9)  # the tiny module's work is its tokens
        assert line["of_roof"] == pytest.approx(count / seconds / ROOF)
        assert 0 <= line["data_wait"] <= 1
        assert "mfu" not in line  # a processor has no datasheet here


class Writer:
    """What TensorBoard's writer would get; it is not installed everywhere."""

    made: ClassVar[list] = []

    def __init__(self, folder, purge_step=None):
        self.folder, self.purge_step, self.scalars, self.flushed = folder, purge_step, [], 0
        Writer.made.append(self)

    def add_scalar(self, key, value, step):
        self.scalars.append((key, value, step))

    def flush(self):
        self.flushed = len(self.scalars)

    def close(self):
        self.closed = True


@pytest.fixture
def writers(monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tensorboard" or find(name))
    monkeypatch.setattr(Writer, "made", [])
    return Writer.made


@pytest.mark.parametrize("asked", [None, True])
def test_tensorboard(asked, writers, tmp_path):
    """What a killed life wrote after its checkpoint is purged; the checkpoint's own step is not."""
    trainer(tmp_path, 4, save_every=4, tensorboard=asked).run()
    (writer,) = writers
    assert writer.folder == tmp_path / "tensorboard"
    assert writer.closed
    assert writer.flushed == len(writer.scalars)  # at the checkpoint, before its offsets are kept
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for line in lines:
        for key in ("loss", "lr", "grad_norm", "class_accuracy"):
            assert (key, line[key], line["step"]) in writer.scalars
    assert {key for key, _, _ in writer.scalars} >= {"step_ms", "tokens_per_s"}
    assert writer.purge_step == 1  # a killed run that had no checkpoint yet begins anew
    trainer(tmp_path, 4, save_every=4, tensorboard=asked).run()
    # a reader hides all events of `purge_step` and later
    assert writers[1].purge_step == 5


def test_tensorboard_that_is_not_wanted_or_not_there(writers, tmp_path, monkeypatch):
    trainer(tmp_path, 1, tensorboard=False).run()
    assert writers == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    opened(tmp_path, tensorboard=None).close()
    with pytest.raises(ImportError, match="tensorboard: is not installed: pip install tensorboard"):
        opened(tmp_path, tensorboard=True)
    assert writers == []


def test_the_line_for_a_person(tmp_path, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    made = opened(tmp_path, 2, progress=True)
    made.show(2, {})
    now[0] += 0.1
    made.show(3, {"loss": "0.5"})
    assert capsys.readouterr().err == "step 2 of 10: \n"  # at most five per second
    now[0] += 0.9
    made.show(4, {"loss": "0.5", "tokens/s": "9"})
    # two steps took a second, six are left
    assert capsys.readouterr().err == "step 4 of 10: loss 0.5, tokens/s 9, 0:00:03 left\n"
    made.show(10, {}, last=True)
    assert capsys.readouterr().err == "step 10 of 10: \n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    made = opened(tmp_path, 2, progress=None)
    now[0] += 7200
    made.show(6, {"loss": "0.5"})
    shown = capsys.readouterr().err
    assert shown == "step 6 of 10: loss 0.5, 2:00:00 left".ljust(99) + "\r"
    made.show(10, {}, last=True)
    assert capsys.readouterr().err.endswith("\n")
    quiet = opened(tmp_path, progress=False)
    quiet.show(10, {}, last=True)
    assert capsys.readouterr().err == ""
