"""Checkpoints of a run: `step-000500/` is there whole, or not at all.

A checkpoint is written in a hidden folder beside its place. All of its files are flushed to the disk, then
`manifest.json` with the SHA-256 of each, then the folder; then the folder is renamed and the run's directory
flushed. Older checkpoints are removed only after that. So a kill or a full disk at any moment leaves the
checkpoint before it, and a file that was damaged later is found: it is read only if its manifest agrees.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from fastbert.checkpoint.files import CheckpointError, cause, is_dead, own_tag, read_json

MANIFEST = "manifest.json"
LOCK = ".lock"
_NAME = re.compile(r"step-(\d{6,})$")
_HIDDEN = re.compile(r"\.(?:saving|removing)-step-\d+-(.+)$")


def name_of(step: int) -> str:
    """The folder of a checkpoint: "step-000500"."""
    return f"step-{step:06d}"


def steps_in(run: Path) -> list[int]:
    """The steps of the checkpoints in a run's directory, whole or damaged, in rising order."""
    if not run.is_dir():
        return []
    return sorted(int(found[1]) for entry in run.iterdir() if (found := _NAME.match(entry.name)))


def save(run: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Write a checkpoint, and then remove all but the newest ones.

    Args:
        run: the run's directory; it must exist.
        step: how many steps have been taken.
        write: writes the files into a folder; their folders are made by it too.
        keep: checkpoints that remain, >= 1.

    Raises:
        CheckpointError: it could not be written; the checkpoints before are unchanged.
    """
    place = run / name_of(step)
    folder = run / f".saving-{place.name}-{own_tag()}"
    try:
        try:
            folder.mkdir()
            write(folder)
            entries = {str(path.relative_to(folder)): _flushed(path) for path in _files(folder)}
            text = json.dumps({"step": step, "sha256": entries}, indent=1, sort_keys=True) + "\n"
            (folder / MANIFEST).write_text(text)
            _flushed(folder / MANIFEST)
            for inner in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
                _flush_folder(inner)
            if place.exists():  # a damaged one: a whole one would have been read
                _remove(run, step)
            os.rename(folder, place)
            _flush_folder(run)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except (OSError, CheckpointError, SafetensorError) as error:
        why = str(error) if isinstance(error, CheckpointError) else cause(error)
        raise CheckpointError(
            f"{place}: could not be saved, older checkpoints are unchanged: {why}"
        ) from error
    for old in steps_in(run)[:-keep]:
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
        entries = read_json(folder / MANIFEST).get("sha256")
        if not isinstance(entries, dict) or not entries:
            return f"{folder / MANIFEST}: lists no files"
        for name, expected in entries.items():
            path = folder / name
            if not path.is_file():
                return f"{path}: is missing"
            if _digest(path) != expected:
                return f"{path}: was changed since it was written (its SHA-256 is another one)"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def clear(run: Path) -> None:
    """Remove what processes that have ended left behind."""
    for entry in run.iterdir():
        found = _HIDDEN.match(entry.name)
        if found and is_dead(found[1]):
            shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Only one process at a time trains into a directory.

    Raises:
        CheckpointError: another one does.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(run / LOCK, "a") as file:
        try:
            # of this process alone: a worker that outlives it for a moment does not hold it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"{run}: another process is training into it ({cause(error)})") from None
        yield


def _remove(run: Path, step: int) -> None:
    """Remove a checkpoint: renamed first, so that nobody sees a part of it."""
    hidden = run / f".removing-{name_of(step)}-{own_tag()}"
    with contextlib.suppress(OSError):  # it only costs space
        os.rename(run / name_of(step), hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flushed(path: Path) -> str:
    """Flush a file to the disk; its SHA-256."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
