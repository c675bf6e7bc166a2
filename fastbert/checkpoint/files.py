"""The files of a checkpoint: their names, JSON with a cause for each failure, and the config of the weights.

A save renames two files, config.json and then the weights. A process that is killed between the two leaves
the new config beside the old weights. So a save leaves notes in its folder (`.saving-…`) before it renames
anything: the old config and the new one. And weights say in their metadata with which config they were saved.
So the next reader can tell the case and takes the old config (`config_of_weights`).
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"

# Folders of saves under way, and the notes in them.
SAVING = ".saving-"
OLD_CONFIG = CONFIG + ".old"
NEW_CONFIG = CONFIG + ".new"

# Name of our entry in the metadata of safetensors files.
STAMP = "fastbert"

# Errors of a file system that cannot flush a folder, or of a folder that only its owner may read
_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)

# No file of a checkpoint nests deeper than a handful of levels; copying and writing recurse.
MAX_DEPTH = 100
_KINDS = {dict: "object", list: "array"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written: names the file, the key and the cause."""


class Stamp(NamedTuple):
    """The entry of a weights file that identifies the config of its save.

    Attributes:
        config: SHA-256 of config.json, hexadecimal.
        mathematics: the values of `EncoderConfig.mathematics()`.
    """

    config: str
    mathematics: dict[str, Any]

    def metadata(self) -> dict[str, str]:
        """The entry of a safetensors file's metadata."""
        return {STAMP: json.dumps(self._asdict(), sort_keys=True)}


def cause(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def listed(keys: Iterable[str], most: int = 20) -> str:
    """The first `most` keys, and the number of further keys, as messages show them."""
    keys = list(keys)
    rest = f" … and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + rest


def digest(content: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


# --- the owners of temporary files --------------------------------------------------------------------------


def own_tag() -> str:
    """The mark of temporary files and folders of this process: "token.host.pid"."""
    return f"{secrets.token_hex(4)}.{socket.gethostname()}.{os.getpid()}"


def is_dead(tag: str) -> bool:
    """Whether an `own_tag` is of a process of this machine that has ended."""
    host, _, pid = tag.partition(".")[2].rpartition(".")
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    # Alive and another user's, or not one of ours
    except (OSError, ValueError):
        return False
    return False


# --- places of results --------------------------------------------------------------------------------------


def check_plain(path: Path) -> None:
    """Raise CheckpointError if a path is taken by anything but a plain file: a link, a folder, a FIFO, …

    Opening a FIFO for writing would hang, and opening a link would empty a file elsewhere.
    """
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise CheckpointError(f"{path}: is not a plain file")


def check_free(place: Path, ours: Iterable[str] = (), overwrite: bool = False) -> None:
    """Raise CheckpointError unless a directory of results can be written to a place; see `new_directory`.

    Args:
        place: path of the directory; a link is followed.
        ours: patterns of the names in such a directory.
        overwrite: whether a directory that holds only such names may be replaced.
    """
    where, place = place, Path(os.path.realpath(place))
    _settle(place)
    if os.path.lexists(place) and not place.is_dir():
        raise CheckpointError(f"{where}: exists already and is no directory")
    if os.path.ismount(place):
        raise CheckpointError(f"{where}: is a mount point, which cannot be replaced; name a folder in it")
    if where.is_symlink() and not place.exists():
        raise CheckpointError(f"{where}: is a link to {place}, which does not exist")
    _check_place(where, place)
    held = sorted(path.name for path in place.iterdir()) if place.exists() else []
    if held and not overwrite:
        hint = ", or overwrite=True (--overwrite)" if ours else ""
        raise CheckpointError(f"{where}: exists already; expected a new or an empty directory{hint}")
    foreign = [name for name in held if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ours)]
    if foreign:
        raise CheckpointError(f"{where}: holds {listed(foreign, 3)} besides, so it is not overwritten")


def check_kept(place: Path, inputs: Iterable[str | Path]) -> None:
    """Raise CheckpointError if an input is in a directory that is to be replaced."""
    for path in inputs:
        if Path(os.path.realpath(place)) in Path(os.path.realpath(path)).parents:
            raise CheckpointError(f"{place}: {path} is in it, so it is not overwritten")


def _check_place(where: Path, place: Path) -> None:
    """Raise CheckpointError if a folder beside a place cannot be made, or cannot be renamed to it."""
    above = next((each for each in place.parents if os.path.lexists(each)), place)
    if not above.is_dir():
        raise CheckpointError(f"{above}: is no directory; expected one for {where}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise CheckpointError(f"{above}: no results can be written there; expected a directory of yours")
    if place.is_dir() and place in (Path.cwd(), *Path.cwd().parents):
        raise CheckpointError(
            f"{where}: the working directory is in it, so it is not replaced; name a folder in it"
        )
    try:
        os.lstat(_beside(place, "new", own_tag()))
    except FileNotFoundError:
        return
    except OSError as error:  # the name is too long
        raise CheckpointError(f"{where}: could not be written: {cause(error)}") from error


@contextlib.contextmanager
def new_directory(place: Path, ours: Iterable[str] = (), overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill. It is renamed to `place` when the block ends, and removed if the block raises.

    A kill at any moment leaves the old directory, the new one or none. The next call removes what killed
    calls have left, and puts back an old directory that a killed call had moved away.

    Args:
        place: path of the directory; a link is followed. It must be missing or empty.
        ours, overwrite: what else may be there and is replaced; see `check_free`.

    Raises:
        CheckpointError: something else is there, or it could not be written; what was there is unchanged.
    """
    where, place = place, Path(os.path.realpath(place))
    new, old, gone = (_beside(place, kind, own_tag()) for kind in ("new", "old", "gone"))
    try:
        check_free(where, ours, overwrite)
        place.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir()
        try:
            yield new
            flush_folder(new)
            if overwrite and place.exists():
                os.rename(place, old)
            os.rename(new, place)
            flush_folder(place.parent)
        finally:
            if old.exists():
                os.rename(old, gone if place.exists() else place)
            for left in (new, gone):
                shutil.rmtree(left, ignore_errors=True)
    except CheckpointError as error:
        if str(new) not in str(error):
            raise
        # the folder is gone by now
        raise CheckpointError(str(error).replace(str(new), str(where))) from error
    except OSError as error:
        # An error of an input file names it and passes; that of a full disk names no file
        ours = str(_beside(place, "", "")).removesuffix("..tmp")
        if error.errno is None or not str(error.filename or ours).startswith((ours, str(place))):
            raise
        raise CheckpointError(f"{where}: could not be written: {cause(error)}") from error


def _beside(place: Path, kind: str, tag: str) -> Path:
    return place.with_name(f".{place.name}.{kind}.{tag}.tmp")


def _settle(place: Path) -> None:
    """Remove what killed calls have left beside a place; put back a directory that one had moved away."""
    for left in sorted(place.parent.glob(f".{glob.escape(place.name)}.*.tmp")):
        kind, _, tag = left.name[len(place.name) + 2 : -len(".tmp")].partition(".")
        if kind not in ("new", "old", "gone") or not is_dead(tag):
            continue
        if kind == "old" and not os.path.lexists(place):
            os.rename(left, place)
            continue
        if kind == "old":  # renamed first: no reader sees it partly removed
            left = left.rename(_beside(place, "gone", tag))
        shutil.rmtree(left, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, if the file system can flush a folder."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH:
            raise


# --- JSON ---------------------------------------------------------------------------------------------------


def read(path: Path) -> bytes:
    """The content of a plain file.

    Raises:
        CheckpointError: there is none, it is no plain file (a FIFO would hang), or it cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: is not a plain file")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {cause(error)}") from error


def parse_json(content: bytes | str, where: object, kind: type = dict) -> Any:
    """The object (or with kind `list` the array, with `object` any value) in a JSON text.

    Args:
        content: the text, UTF-8.
        where: the file, for messages.
        kind: dict, list or object.

    Raises:
        CheckpointError: broken JSON or UTF-8, another kind, or nested deeper than `MAX_DEPTH`.
    """
    try:
        value = json.loads(content if isinstance(content, str) else content.decode("utf-8"))
    except ValueError as error:  # broken JSON, broken UTF-8, or an integer of thousands of digits
        raise CheckpointError(f"{where}: is not valid JSON: {error}") from error
    except RecursionError as error:
        raise _too_deep(where) from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{where}: expected a JSON {_KINDS[kind]}, got {type(value).__name__}")
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return value
        inside = (entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [entry for entries in inside for entry in entries if isinstance(entry, (dict, list))]
    raise _too_deep(where)


def _too_deep(where: object) -> CheckpointError:
    return CheckpointError(f"{where}: is nested deeper than {MAX_DEPTH} levels")


def read_json(path: Path, kind: type = dict) -> Any:
    """The object (or with kind `list` the array) in a JSON file.

    Raises:
        CheckpointError: naming the file and the cause; see `read` and `parse_json`.
    """
    return parse_json(read(path), path, kind)


def replace(path: Path, content: bytes) -> None:
    """Write a file in one step: the old file stays whole if the disk is full.

    Raises:
        CheckpointError: naming the file.
    """
    temporary = path.with_name(f".{path.name}.{own_tag()}.tmp")
    try:
        try:
            with open(temporary, "xb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{path}: could not be saved, what was there is unchanged: {cause(error)}"
        ) from error


def write_json(path: Path, values: Any, indent: int = 1) -> None:
    """Write a JSON file in one step; see `replace`."""
    replace(path, (json.dumps(values, indent=indent) + "\n").encode())


# --- which config belongs to the weights --------------------------------------------------------------------


def read_stamp(file: Path) -> Stamp | None:
    """The stamp in a safetensors file; None if other software wrote the file.

    Raises:
        CheckpointError: the file cannot be read, or its entry is not one that this package writes.
    """
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as reader:
            text = (reader.metadata() or {}).get(STAMP)
    except Exception as error:  # SafetensorError, OSError
        raise CheckpointError(f"{file}: truncated, or not a safetensors file: {cause(error)}") from error
    if text is None:
        return None
    where = f"{file}: metadata {STAMP}"
    values = parse_json(text, where)
    config, mathematics = values.get("config"), values.get("mathematics")
    if not isinstance(config, str) or not isinstance(mathematics, dict):
        raise CheckpointError(f"{where}: expected config, a text, and mathematics, an object")
    return Stamp(config, mathematics)


def config_of_weights(directory: Path, saves: Iterable[Path] | None = None) -> bytes | None:
    """The content of the config.json that belongs to the weights in a directory; None if there is none.

    It is the file itself, unless a save was killed after it had renamed its config and before it renamed its
    weights. Then it is the old config, from that save's folder.

    Args:
        directory: may hold no checkpoint yet.
        saves: the folders of saves to look at; default: all in the directory.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    path = directory / CONFIG
    there = read(path) if path.is_file() else None
    for folder in sorted(directory.glob(f"{SAVING}*")) if saves is None else saves:
        # Read first, because a save removes its folder when it ends
        old = _content(folder / OLD_CONFIG)
        if there is None or _content(folder / NEW_CONFIG) != there:
            continue
        if _config_digest(directory) != digest(there):
            return old
    return there


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    # Not there, or removed in the meantime by the save, which has ended
    except OSError:
        return None


def _config_digest(directory: Path) -> str | None:
    """Digest of the config with which a directory's weights were saved; None if they have no stamp."""
    file = directory / SAFETENSORS
    try:
        if not os.path.lexists(file):
            shards = read_json(directory / SAFETENSORS_INDEX).get("weight_map") or {}
            file = directory / Path(min(shards.values())).name
        stamp = read_stamp(file)
    # Loading the weights reports what is wrong
    except (CheckpointError, AttributeError, TypeError, ValueError):
        return None
    return None if stamp is None else stamp.config
