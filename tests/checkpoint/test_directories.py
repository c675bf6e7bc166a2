"""Directories of results: old, new or none after a kill at any step; what is not ours is never replaced."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from fastbert.analysis import results
from fastbert.checkpoint.files import CheckpointError, check_free, new_directory
from fastbert.cli.main import main
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
        (lambda p: (p / ".git").mkdir(parents=True), True, r"holds \.git besides"),
        (lambda p: p.write_text("mine"), True, "exists already and is no directory"),
        (lambda p: os.mkfifo(p), True, "exists already and is no directory"),
        (lambda p: p.symlink_to(p.parent / "gone"), True, "is a link to .*gone, which does not exist"),
        (lambda p: p.symlink_to("/proc"), True, "is a mount point"),
    ],
    ids=["file", "foreign", "hidden", "plain", "fifo", "dangling", "mount"],
)
def test_what_is_not_ours_is_refused_and_kept(make, overwrite, problem, tmp_path):
    make(tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=rf"c: {problem}"):
        filled(tmp_path / "c", "new", overwrite)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("moved", ["c", ".c.new."])
def test_a_new_directory_that_cannot_take_its_place_gives_the_old_one_back(moved, tmp_path, monkeypatch):
    place, rename = Path(os.path.realpath(tmp_path)) / "c", os.rename
    filled(place, "old")

    def fails(source: Path, target: Path) -> None:
        if source.name.startswith(moved):
            raise OSError(5, "Input/output error", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(CheckpointError, match=rf"^{place}: could not be written: OSError: .*Input/output"):
        filled(place, "new")
    assert held(place) == {"a": "old", "b-1": "old"}
    assert list(place.parent.iterdir()) == [place]


def test_a_working_directory_is_not_replaced(tmp_path, monkeypatch):
    """A shell would be left in a directory that is no more."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    for inside in ("a", "a/b"):
        monkeypatch.chdir(tmp_path / inside)
        with pytest.raises(CheckpointError, match=r"a: the working directory is in it|a: exists already"):
            filled(tmp_path / "a", "new")
    (tmp_path / "a" / "b").rmdir()
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"\.: the working directory is in it, so it is not replaced"):
        filled(Path("."), "new")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_a_name_too_long_for_what_is_written_beside_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"nn: could not be written: OSError: .*File name too long"):
        check_free(tmp_path / ("n" * 255))


def test_errors_name_the_place_and_not_the_folder_beside_it(tmp_path):
    expected = f"^{tmp_path / 'c'}/a: is not a plain file$"
    with pytest.raises(CheckpointError, match=expected), new_directory(tmp_path / "c") as folder:
        raise CheckpointError(f"{folder / 'a'}: is not a plain file")


def test_through_a_link_its_target_is_filled_and_the_umask_counts(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "far")
    before = os.umask(0o027)
    try:
        filled(tmp_path / "c", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "c").is_symlink()
    assert held(tmp_path / "far") == {"a": "new", "b-1": "new"}
    assert stat.S_IMODE((tmp_path / "far").stat().st_mode) == 0o750


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
        with pytest.raises(ValueError, match=rf"{name}: (holds mine besides|exists)"):
            call()
        assert (tmp_path / name / "mine").read_text() == "mine"
    for name in ("tok", "c"):
        (tmp_path / name / "mine").unlink()
    inside, link = tmp_path / "tok" / "vocab.txt", tmp_path / "link.txt"
    link.symlink_to(inside)
    for path in (inside, link):
        with pytest.raises(ValueError, match=rf"tok: {path} is in it, so it is not overwritten"):
            vocabulary.train([path], tmp_path / "tok", vocab_size=64, overwrite=True)
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="site: is no corpus"):
        Corpus.write([text], tmp_path / "tok", site, overwrite=True)
    assert (site / "index.json").read_text() == "{}"


def lived(arguments: list[str], kill_after: float | None = None) -> int:
    """The exit status of a command in a process of its own, which is killed after some seconds."""
    pid = os.fork()
    if not pid:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os._exit(main(arguments))
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def content(place: Path) -> dict[str, bytes] | None:
    return {path.name: path.read_bytes() for path in sorted(place.iterdir())} if place.exists() else None


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("command", ["train-tokenizer", "prepare"])
def test_commands_that_are_killed_at_random_moments(command, overwrite, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    texts = [" ".join(topics[name].split()) for name in sorted(topics)[:60]]
    for name, half in (("old", texts[::2]), ("new", texts[1::2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in half))
    vocabulary.train([tmp_path / "old.jsonl"], tmp_path / "tok", vocab_size=500)
    more = ["--vocab-size", "500"] if command == "train-tokenizer" else ["--tokenizer", str(tmp_path / "tok")]

    def call(name: str, folder: Path, kill_after: float | None = None, overwrite: bool = True) -> int:
        given = [command, str(tmp_path / f"{name}.jsonl"), *more, "--output", str(folder / "out")]
        return lived([*given, *(["--overwrite"] if overwrite else [])], kill_after)

    begin = time.perf_counter()
    old, new = (call(name, tmp_path / name) or content(tmp_path / name / "out") for name in ("old", "new"))
    seconds, draw = (time.perf_counter() - begin) / 2, random.Random(command)
    died = 0
    while died < 100:
        folder = tmp_path / str(died)
        if overwrite:
            assert call("old", folder) == 0
        if call("new", folder, draw.uniform(0, 1.1 * seconds), overwrite) == 0:
            shutil.rmtree(folder)
            continue
        died += 1
        assert content(folder / "out") in ((old, new, None) if overwrite else (new, None))
        assert call("new", folder) == 0
        assert content(folder / "out") == new
        assert [path.name for path in folder.iterdir()] == ["out"]
        shutil.rmtree(folder)
