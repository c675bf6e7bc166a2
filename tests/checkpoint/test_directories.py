"""Directories of results: old, new or none after a kill at any step; what is not ours is never replaced."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fastbert.analysis import results
from fastbert.checkpoint.files import CheckpointError, check_free, new_directory, replace
from fastbert.pretraining import vocabulary
from fastbert.pretraining.corpus import Corpus
from tests.support.killed import killed

NAMES = ("a", "b-*")


def filled(place: Path, content: str, overwrite: bool = True) -> None:
    with new_directory(place, NAMES, overwrite) as folder:
        for name in ("a", "b-1"):
            (folder / name).write_text(content)


def held(place: Path) -> dict[str, str] | None:
    read = functools.partial(Path.read_text, encoding="latin-1")
    return {path.name: read(path) for path in place.iterdir()} if place.exists() else None


TEXTS = {"old": "one two one two\n\none two", "new": "two three\n\nthree one two\n\nfour", "next": "five six"}


def commands(folder: Path) -> dict[str, Callable[[Path, str, bool], object]]:
    """What fills a directory: (place, which content, overwrite)."""
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    vocabulary.train([folder / "old.txt"], folder / "tok", vocab_size=64)
    return {
        "plain": filled,
        "train-tokenizer": lambda place, which, overwrite=True: vocabulary.train(
            [folder / f"{which}.txt"], place, vocab_size=64, overwrite=overwrite
        ),
        "prepare": lambda place, which, overwrite=True: Corpus.write(
            [folder / f"{which}.txt"], folder / "tok", place, overwrite=overwrite
        ),
    }


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "command",
    ["plain", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("train-tokenizer", "prepare"))],
)
def test_a_kill_at_every_step(command, overwrite, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    fill = commands(tmp_path)[command]
    whole = {}
    for which in TEXTS:
        fill(tmp_path / which / "c", which, True)
        whole[which] = held(tmp_path / which / "c")
    old, new, seen, at = whole["old"], whole["new"], [], 0
    assert old != new
    while True:
        at += 1
        place = tmp_path / str(at) / "c"
        if overwrite:
            fill(place, "old", True)
        else:
            place.parent.mkdir()
        if not killed(functools.partial(fill, place, "new", overwrite), place, at):
            break
        found = held(place)
        assert found in ((old, new, None) if overwrite else (new, None))
        seen.append(found)
        moved = command == "plain" and any(".old." in path.name for path in place.parent.iterdir())
        if found is None and moved:
            check_free(place, NAMES, True)
            assert held(place) == old  # nothing is lost
        fill(place, "next", True)
        assert held(place) == whole["next"]
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
    """A full disk names no file; the error of an input file stays what it is."""
    expected = f"^{tmp_path / 'c'}/a: is not a plain file$"
    with pytest.raises(CheckpointError, match=expected), new_directory(tmp_path / "c") as folder:
        raise CheckpointError(f"{folder / 'a'}: is not a plain file")
    for file, kind in ((None, CheckpointError), (str(tmp_path / "input"), OSError)):
        error = OSError(28, "No space left on device", file)
        with pytest.raises(kind, match="No space left on device") as raised, new_directory(tmp_path / "c"):
            raise error
        assert (raised.value is error) == (file is not None)


def test_a_replaced_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    replace(tmp_path / "a", b"abc")
    assert sizes == [3]


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
