"""The logs of a run.

log.jsonl     a line per `log_every` steps: losses, accuracies, counts. The same run writes the same bytes,
              however often it is interrupted
speed.jsonl   a line for the same steps: rates and times, which differ from run to run
tensorboard/  both, if the package is installed
stderr        on a terminal: one line, overwritten in place
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fastbert.checkpoint.files import CheckpointError, cause, check_plain, parse_json
from fastbert.runtime.progress import Progress

LOG, SPEED = "log.jsonl", "speed.jsonl"


class Logs:
    """The logs of a run.

    Args:
        run: the run's directory.
        step: number of steps already taken.
        steps: number of steps of the whole run.
        offsets: file name -> number of bytes that belong to the steps taken; the rest is cut off, and so is a
            line without an end.
        tensorboard: whether to log for TensorBoard; None: if the package is installed.
        progress: whether to show a line on stderr; None: if stderr is a terminal.
        digests: file name -> SHA-256 of those bytes; see `digests`.

    Attributes:
        lost: one message for each file that lacks lines of the steps taken, or was changed.

    Raises:
        CheckpointError: a file cannot be written; all methods that write raise it too.
        ImportError: tensorboard is True, and the package is not installed.
    """

    def __init__(
        self,
        run: Path,
        step: int,
        steps: int,
        offsets: Mapping[str, int],
        tensorboard: bool | None = None,
        progress: bool | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        has_board = has_tensorboard(tensorboard)
        self._files: dict[Path, BinaryIO] = {}
        self._digests: dict[Path, Any] = {}
        self.lost: list[str] = []
        for path in (run / LOG, run / SPEED):
            kept = offsets.get(path.name, 0)
            check_plain(path)
            with _naming(path):
                file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
                self._files[path] = file
                content = path.read_bytes()[:kept]
                whole = content[: content.rfind(b"\n") + 1]
                file.truncate(len(whole))
                file.seek(0, os.SEEK_END)
            self._digests[path] = hashlib.sha256(whole)
            if len(content) < kept:
                self.lost.append(f"{path}: expected {kept} bytes, got {len(content)}: lines are missing")
            elif digests and digests.get(path.name) != self._digests[path].hexdigest():
                self.lost.append(f"{path}: was changed since the checkpoint was written")
            if len(whole) < len(content):
                self.lost.append(f"{path}: ended inside a line, which was cut off")
        self._board = None
        if has_board:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(run / "tensorboard", purge_step=step + 1)
        self._first, self._steps = step, steps
        self._progress = Progress(progress)

    def write(self, step: int, computed: Mapping[str, Any], speed: Mapping[str, Any]) -> None:
        """Write a line to each file, after `step` steps."""
        for (path, file), values in zip(self._files.items(), (computed, speed), strict=True):
            line = (json.dumps({"step": step, **values}, allow_nan=False) + "\n").encode()
            with _naming(path):
                while line:
                    written = file.write(line)
                    self._digests[path].update(line[:written])
                    line = line[written:]
        if self._board is not None:
            for key, value in {**computed, **speed}.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(key, value, step)

    def show(self, step: int, values: Mapping[str, Any], *, last: bool = False) -> None:
        """Show the line on stderr, at most five times per second."""
        text = ", ".join(f"{key} {value}" for key, value in values.items())
        done = (step - self._first) / max(self._steps - self._first, 1)
        self._progress.show(f"step {step:,} of {self._steps:,}: {text}", done, last=last)

    def offsets(self) -> dict[str, int]:
        """Flush the files to the disk; returns file name -> number of bytes."""
        for path, file in self._files.items():
            with _naming(path):
                os.fsync(file.fileno())
        if self._board is not None:
            self._board.flush()
        return {path.name: file.tell() for path, file in self._files.items()}

    def digests(self) -> dict[str, str]:
        """File name -> SHA-256, hexadecimal."""
        return {path.name: digest.hexdigest() for path, digest in self._digests.items()}

    def last(self) -> dict[str, Any]:
        """The last line of log.jsonl; empty if there is none."""
        path = next(iter(self._files))
        lines = path.read_bytes().splitlines()
        return parse_json(lines[-1], path) if lines else {}

    def close(self) -> None:
        """Close the files. What `write` could not write is lost: it has said so."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        if self._board is not None:
            self._board.close()


def has_tensorboard(wanted: bool | None) -> bool:
    """Whether to log for TensorBoard.

    Args:
        wanted: None: if the package is installed.

    Raises:
        ImportError: `wanted` is True, and the package is not installed.
    """
    there = importlib.util.find_spec("tensorboard") is not None
    if wanted and not there:
        raise ImportError("tensorboard: is not installed: pip install tensorboard")
    return there if wanted is None else wanted


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: could not be written: {cause(error)}") from error
