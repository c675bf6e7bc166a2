"""Checkpoints of a run: `step-000500/` is there whole, or not at all.

A checkpoint is written in a hidden folder beside its place. All of its files are flushed to the disk, then
`manifest.json` with the SHA-256 of each, then the folder; then the folder is renamed and the run's directory
flushed. Older checkpoints are removed only after that. So a kill or a full disk at any moment leaves the
previous checkpoint. A file that was damaged later is found, since its SHA-256 differs from the manifest.

A damaged checkpoint stays, unless a new one of the same step replaces it. It does not count among the
checkpoints that remain.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from fastbert.checkpoint.files import (
    CONFIG,
    CheckpointError,
    cause,
    check_plain,
    flush_folder,
    is_dead,
    listed,
    own_tag,
    read_json,
)

MANIFEST = "manifest.json"
LOCK = ".lock"
_NAME = re.compile(r"step-(\d{6,})$")
_HIDDEN = re.compile(rf"\.(?:(?:saving|removing)-step-\d+-(.+)|{re.escape(CONFIG)}\.(.+)\.tmp)$")
_held: set[Path] = set()


def name_of(step: int) -> str:
    """The folder of a checkpoint: "step-000500"."""
    return f"step-{step:06d}"


def steps_in(run: Path) -> list[int]:
    """The steps of the checkpoints in a run's directory, whole or damaged, in rising order."""
    if not run.is_dir():
        return []
    found = [match for entry in run.iterdir() if (match := _NAME.match(entry.name))]
    return sorted(int(match[1]) for match in found if match[0] == name_of(int(match[1])))


def begin(run: Path) -> None:
    """Create a run's directory, and flush its name to the disk so that it survives a power cut.

    Raises:
        CheckpointError: the path is a file, or cannot be created.
    """
    missing, place = [], run.absolute()
    try:
        while not place.exists():
            missing.append(place)
            place = place.parent
        if not place.is_dir():
            raise CheckpointError(f"{run}: cannot be created: {place} is not a directory")
        run.mkdir(parents=True, exist_ok=True)
        for made in missing:
            flush_folder(made.parent)
    except OSError as error:
        raise CheckpointError(f"{run}: cannot be created: {cause(error)}") from error


def save(run: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Write a checkpoint, and then remove all but the newest ones.

    Args:
        run: the run's directory; it must exist.
        step: number of steps taken.
        write: writes the files into a folder, and makes the folders inside.
        keep: number of checkpoints that remain, >= 1.

    Raises:
        CheckpointError: the checkpoint could not be written; older checkpoints are unchanged.
    """
    place = run / name_of(step)
    folder = run / f".saving-{place.name}-{own_tag()}"
    try:
        try:
            folder.mkdir()
            write(folder)
            readable = folder.stat().st_mode & 0o666  # safetensors lets only the owner read its files
            for path in _files(folder):
                path.chmod(readable)
            entries = {path.relative_to(folder).as_posix(): _flushed(path) for path in _files(folder)}
            text = json.dumps({"step": step, "sha256": entries}, indent=1, sort_keys=True) + "\n"
            (folder / MANIFEST).write_text(text)
            _flushed(folder / MANIFEST)
            for inner in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
                flush_folder(inner)
            if place.exists():  # it is damaged, else the run would have resumed from it
                _remove(run, step)
            os.rename(folder, place)
            flush_folder(run)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except (OSError, CheckpointError, SafetensorError) as error:
        why = str(error) if isinstance(error, CheckpointError) else cause(error)
        raise CheckpointError(
            f"{place}: could not be saved, older checkpoints are unchanged: {why}"
        ) from error
    older = [old for old in steps_in(run) if old < step]  # a later checkpoint is damaged
    for old in older[: max(0, len(older) - keep + 1)]:
        _remove(run, old)
    return place


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """(the newest checkpoint that is whole, what is wrong with each newer one)."""
    rejected = []
    for step in reversed(steps_in(run)):
        why = fault_of(run / name_of(step))
        if why is None:
            return run / name_of(step), rejected
        rejected.append(why)
    return None, rejected


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint: "FILE: why", or None."""
    try:
        manifest = read_json(folder / MANIFEST)
        entries = manifest.get("sha256")
        if not isinstance(entries, dict) or not entries:
            return f"{folder / MANIFEST}: lists no files"
        step = manifest.get("step")
        if type(step) is not int or name_of(step) != folder.name:
            return f"{folder / MANIFEST}: is of step {step!r}"
        for name, expected in entries.items():
            path = folder / name
            if not path.is_file():
                return f"{path}: is missing"
            if _digest(path) != expected:
                return f"{path}: was changed since it was written (its SHA-256 differs)"
        for path in _files(folder):
            name = path.relative_to(folder).as_posix()
            if path.suffix in (".json", ".safetensors") and name not in {*entries, MANIFEST}:
                return f"{path}: is not listed in {MANIFEST}"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def check_begun(run: Path) -> None:
    """Raise CheckpointError if a directory holds more than traces of a run; the caller holds the lock."""
    foreign = [e.name for e in run.iterdir() if e.name != LOCK and not _HIDDEN.match(e.name)]
    if foreign:
        held = listed(sorted(foreign), 3)
        raise CheckpointError(f"{run}: holds {held}, and no run; expected a new or an empty directory")


def clear(run: Path) -> None:
    """Remove what processes that have ended left behind; the caller holds the lock.

    Files with this process's own number are removed too. It has not begun to write, so they are of an earlier
    process: a container that starts again often assigns the same numbers.
    """
    own = f".{socket.gethostname()}.{os.getpid()}"
    for entry in run.iterdir():
        found = _HIDDEN.match(entry.name)
        if found is None:
            continue
        tag = found[1] or found[2]
        if not is_dead(tag) and not tag.endswith(own):
            continue
        if found[1]:
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                entry.unlink()


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """A block in which only this process trains into a directory.

    Raises:
        CheckpointError: another process trains into it, or the directory cannot be written.
    """
    place = run.resolve()
    if place in _held:
        raise CheckpointError(f"{run}: this process is training into it already")
    _held.add(place)
    try:
        with _locked_file(run):
            yield
    finally:
        _held.discard(place)


@contextlib.contextmanager
def _locked_file(run: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    check_plain(run / LOCK)
    try:
        file = open(run / LOCK, "a")  # noqa: SIM115 - closed below
    except OSError as error:
        raise CheckpointError(f"{run}: cannot be written: {cause(error)}") from error
    with file:
        try:
            # lockf's lock is this process's alone: a worker that outlives it does not hold the lock
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(f"{run}: another process is training into it") from None
            raise CheckpointError(f"{run / LOCK}: cannot be locked: {cause(error)}") from error
        yield


def _remove(run: Path, step: int) -> None:
    """Remove a checkpoint. It is renamed first, so that no part of it is ever read."""
    hidden = run / f".removing-{name_of(step)}-{own_tag()}"
    with contextlib.suppress(OSError):  # what stays costs only space
        os.rename(run / name_of(step), hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flushed(path: Path) -> str:
    """Flush a file to the disk; returns its SHA-256."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
