"""The output file of `fastbert encode`: written beside its place, whole or not there at all."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fastbert.checkpoint import files
from fastbert.cli.usage import UsageError


@contextlib.contextmanager
def replacing(path: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """A file to write: it replaces `path` when the block ends, and is removed if the block raises.

    Raises:
        UsageError: `path` exists and `overwrite` is not set, or it cannot be written; nothing has changed.
    """
    target = Path(os.path.realpath(path))  # of a link, the target is replaced
    if path.is_symlink() and not target.exists() and not overwrite:
        raise UsageError(f"--output {path}: is a link to {target}, which is not there; --overwrite makes it")
    if not target.parent.is_dir():
        raise UsageError(f"--output {path}: the folder {target.parent} does not exist")
    mode = None
    _remove_leftovers(target)
    if target.exists():
        if not target.is_file():
            raise UsageError(f"--output {path}: exists and is no plain file")
        if not overwrite:
            raise UsageError(f"--output {path}: exists; --overwrite replaces it")
        mode = stat.S_IMODE(target.stat().st_mode)
    temporary = target.with_name(f".{target.name}.{files.own_tag()}.tmp")
    try:
        with named_errors(path):
            file = open(temporary, "xb")  # noqa: SIM115 - closed below, where a full disk is ignored
        try:
            yield file
            with named_errors(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):  # a full disk again
                file.close()
        with named_errors(path):
            if mode is not None:
                os.chmod(temporary, mode)
            if overwrite:
                os.replace(temporary, target)
            else:
                _publish(temporary, target, path)
        files.flush_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def named_errors(output: Path) -> Iterator[None]:
    """Turn an OSError into a UsageError that names the output."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--output {output}: could not be written ({error}); what was there is unchanged"
        ) from error


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files of this output if their process, on this machine, has ended."""
    begin, end = f".{target.name}.", ".tmp"
    with contextlib.suppress(OSError):  # leftovers cost only space
        for entry in target.parent.iterdir():
            name = entry.name
            if name.startswith(begin) and name.endswith(end) and files.is_dead(name[len(begin) : -len(end)]):
                entry.unlink()


def _publish(temporary: Path, target: Path, path: Path) -> None:
    """Rename without replacing a file that was created in the meantime."""
    taken = UsageError(f"--output {path}: was created in the meantime; --overwrite replaces it")
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise taken from None
    except OSError:  # a file system without links
        if target.exists():
            raise taken from None
        os.replace(temporary, target)


class _RawWriter:
    """Rows as little-endian float32, after a header of fixed size; `close` fills in their number."""

    def __init__(self, file: BinaryIO, width: int) -> None:
        self._file, self._width, self._rows = file, width, 0
        file.write(self.header(0, width))

    def write(self, texts: Sequence[str], rows: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(rows, "<f4").data)
        self._file.flush()
        self._rows += len(rows)

    def close(self) -> None:
        self._file.seek(0)
        self._file.write(self.header(self._rows, self._width))

    @staticmethod
    def header(rows: int, width: int) -> bytes:
        raise NotImplementedError


class _NpyWriter(_RawWriter):
    @staticmethod
    def header(rows: int, width: int) -> bytes:
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}"
        # 128 bytes
        return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


class _SafetensorsWriter(_RawWriter):
    @staticmethod
    def header(rows: int, width: int) -> bytes:
        tensor = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, 4 * rows * width]}
        text = json.dumps({"embeddings": tensor})
        # 160 bytes
        return (152).to_bytes(8, "little") + text.ljust(152).encode()


class _JsonlWriter:
    def __init__(self, file: BinaryIO, width: int) -> None:
        self._file = file
        self._numbers = ",".join(["%.9g"] * width)  # nine digits restore the same float32

    def write(self, texts: Sequence[str], rows: np.ndarray) -> None:
        for text, row in zip(texts, rows.tolist(), strict=True):
            quoted = json.dumps(text, ensure_ascii=False)
            line = f'{{"text": {quoted}, "embedding": [{self._numbers % tuple(row)}]}}\n'
            self._file.write(line.encode())
        self._file.flush()

    def close(self) -> None:
        """Nothing to do: the file has no header."""


WRITERS: dict[str, Callable[[BinaryIO, int], Any]] = {
    ".npy": _NpyWriter,
    ".safetensors": _SafetensorsWriter,
    ".jsonl": _JsonlWriter,
}
