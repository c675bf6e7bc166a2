"""Directories of results: old, new or none after a kill at any step; what is not ours is never replaced."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from fastbert.analysis import results
from fastbert.checkpoint.files import CheckpointError, check_free, new_directory
from fastbert.pretraining import vocabulary
from fastbert.pretraining.corpus import Corpus

NAMES = ("a", "b-*")
EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")


def filled(place: Path, content: str, overwrite: bool = True) -> None:
    with new_directory(place, NAMES, overwrite) as folder:
        for name in ("a", "b-1"):
            (folder / name).write_text(content)


def held(place: Path) -> dict[str, str] | None:
    return {path.name: path.read_text() for path in place.iterdir()} if place.exists() else None


def killed(place: Path, at: int, overwrite: bool) -> bool:
    """Fill in a process that is killed at its file operation number `at`; whether it lived so long."""
    pid = os.fork()
    if not pid:
        count = [0]

        def hook(event: str, args: tuple) -> None:
            if event not in EVENTS:
                return
            path, inside = str(args[0]), args[-1] if event in ("os.remove", "os.rmdir") else -1
            if inside != -1:  # relative to an open folder
                path = os.path.join(os.readlink(f"/proc/self/fd/{inside}"), path)
            count[0] += path.startswith(str(place.parent))
            if count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        filled(place, "new", overwrite)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_at_every_step(overwrite, tmp_path):
    old, new = ({"a": text, "b-1": text} for text in ("old", "new"))
    seen, at = [], 0
    while True:
        at += 1
        place = tmp_path / str(at) / "c"
        if overwrite:
            filled(place, "old")
        else:
            place.parent.mkdir()
        if not killed(place, at, overwrite):
            break
        found = held(place)
        assert found in ((old, new, None) if overwrite else (new, None))
        seen.append(found)
        if found is None and overwrite and any(".old." in path.name for path in place.parent.iterdir()):
            check_free(place, NAMES, True)
            assert held(place) == old  # nothing is lost
        filled(place, "next")
        assert held(place) == {"a": "next", "b-1": "next"}
        assert [path.name for path in place.parent.iterdir()] == ["c"]
    assert len(seen) > (10 if overwrite else 5)
    assert new in seen or not overwrite


@pytest.mark.parametrize(
    ("make", "overwrite", "problem"),
    [
        (
            lambda p: (p.mkdir(), (p / "a").write_text("mine")),
            False,
            "exists already; expected a new or an empty",
        ),
        (lambda p: (p.mkdir(), (p / "mine").write_text("mine")), True, "holds mine besides"),
        (lambda p: p.write_text("mine"), True, "exists already and is no directory"),
        (lambda p: os.mkfifo(p), True, "exists already and is no directory"),
        (lambda p: p.symlink_to(p.parent / "gone"), True, "is a link to .*gone, which does not exist"),
        (lambda p: p.symlink_to("/proc"), True, "is a mount point"),
    ],
    ids=["file", "foreign", "plain", "fifo", "dangling", "mount"],
)
def test_what_is_not_ours_is_refused_and_kept(make, overwrite, problem, tmp_path):
    make(tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=rf"c: {problem}"):
        filled(tmp_path / "c", "new", overwrite)
    assert sorted(tmp_path.rglob("*")) == before


def test_through_a_link_its_target_is_filled_and_the_umask_counts(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "far")
    before = os.umask(0o077)
    try:
        filled(tmp_path / "c", "new")
        results.save(tmp_path / "r", "found", {"n": 1}, {"x": np.zeros(1)}, {})
    finally:
        os.umask(before)
    assert (tmp_path / "c").is_symlink()
    assert held(tmp_path / "far") == {"a": "new", "b-1": "new"}
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "far", tmp_path / "r")}
    assert modes == {0o700}


def test_every_command_that_writes_a_directory_refuses_what_is_not_its_own(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one two one two\n\none two")
    vocabulary.train([text], tmp_path / "tok", vocab_size=64)
    Corpus.write([text], tmp_path / "tok", tmp_path / "c")
    calls = {
        "tok": lambda: vocabulary.train([text], tmp_path / "tok", vocab_size=64, overwrite=True),
        "c": lambda: Corpus.write([text], tmp_path / "tok", tmp_path / "c", overwrite=True),
        "r": lambda: results.save(tmp_path / "r", "found", {"n": 1}, {}, {}),
    }
    for name, call in calls.items():
        call()
        (tmp_path / name / "mine").write_text("mine")
        with pytest.raises(ValueError, match=rf"{name}: (holds mine besides|exists already)"):
            call()
        assert (tmp_path / name / "mine").read_text() == "mine"
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="site: is no corpus"):
        Corpus.write([text], tmp_path / "tok", site, overwrite=True)
    assert (site / "index.json").read_text() == "{}"
