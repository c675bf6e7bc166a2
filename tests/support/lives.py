"""Lives of a training run: forked processes that are killed, or whose file operations fail.

A life runs in a fork of a process that has imported PyTorch, so it costs a tenth of a second. It computes
with one thread, because the threads of OpenMP do not survive a fork.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from fastbert.training import checkpoints, logs, loop, state, work
from tests.support import tiny_training

ENOSPC = OSError(28, "No space left on device")


@dataclass
class End:
    """How a life has ended.

    Attributes:
        code: the exit status; -N: by signal N.
        said: what it said, and its error.
    """

    code: int
    said: str


def begun(run: Path, make: Callable[[Path], loop.Trainer], before: Callable[[], None] | None = None) -> int:
    """Start a life; its process number. Its words go to RUN.txt."""
    _imported()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        said = os.open(run.with_suffix(".txt"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(said, 1)
        os.dup2(said, 2)
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # a shell ignores some for what runs in the background
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        torch.set_num_threads(1)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads do not survive a fork
        work.roof = lambda device, dtype: 1e12  # it is measured for a tenth of a second
        if before is not None:
            before()
        make(run).run()
        code = 0
    except loop.Interrupted as error:
        code = 128 + error.number
    except ValueError as error:  # what the command line prints
        os.write(2, f"{error}\n".encode())
        code = 2
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        os._exit(code)


@functools.cache
def _imported() -> None:
    """Let this process import what a run needs: each fork would import it anew, for a second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny_training.trainer(Path(folder), 1).run()
    torch.set_num_threads(threads)


def ended(pid: int, run: Path, seconds: float = 60.0) -> End:
    """Wait for the end of a life."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            said = run.with_suffix(".txt")
            return End(os.waitstatus_to_exitcode(status), said.read_text() if said.exists() else "")
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail(f"a life did not end in {seconds} s")
        time.sleep(0.003)


def life(
    run: Path,
    make: Callable[[Path], loop.Trainer] = tiny_training.trainer,
    *,
    kill_after: float | None = None,
    before: Callable[[], None] | None = None,
) -> End:
    """One life, killed after some seconds if it still runs then."""
    pid = begun(run, make, before)
    if kill_after is not None:
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return ended(pid, run)


def finished(run: Path, make: Callable[[Path], loop.Trainer] = tiny_training.trainer) -> dict[str, Any]:
    """Resume a run to its end; returns its digests."""
    end = life(run, make)
    assert end.code == 0, end.said
    return tiny_training.digests(run)


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint that is whole; -1 if there is none. All others must be whole too."""
    found, rejected = checkpoints.newest(run)
    assert rejected == []
    return -1 if found is None else int(found.name[5:])


# --- file operations ----------------------------------------------------------------------------------------


class Operations:
    """Counts the file operations of this process below a folder, and calls `act` at one of them.

    An operation is an open to write, a chmod, a flush, a rename, a removal, a new folder, half of a write and
    its other half. Audit hooks see most of them; the rest is wrapped. Never undone: for a process of its
    own.

    Args:
        folder: folder of the files.
        act: called at operation `at` with its name, before the operation.
        at: the operation's number, from 1 on; 0: none.
        writing: whether only those count that a full disk can refuse.
        record: gets a line per operation.
    """

    def __init__(
        self, folder: Path, act: Callable[[str], None], at: int, writing: bool = False, record: Any = None
    ) -> None:
        self.folder, self.act, self.at, self.writing, self.record = str(folder), act, at, writing, record
        self.count = 0
        self._busy = False
        sys.addaudithook(self._hook)
        self._wrap()

    def point(self, name: str) -> None:
        """One operation begins."""
        if self._busy:
            return
        self.count += 1
        if self.record is not None:
            self.record(name)
        if self.count == self.at:
            self._busy = True  # what follows an error is no further one
            self.act(name)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy or event not in (
            ("open", "os.rename", "os.mkdir")
            if self.writing
            else ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod")
        ):
            return
        if event == "open" and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        path, inside = str(args[0]), args[-1] if event in ("os.remove", "os.rmdir") else -1
        if inside != -1:  # relative to an open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{inside}"), path)
        if path.startswith(self.folder):
            self.point(f"{event} {os.path.relpath(path, self.folder)}")

    def _wrap(self) -> None:
        point, fsync = self.point, os.fsync

        def flushed(handle: int) -> None:
            place = os.readlink(f"/proc/self/fd/{handle}")
            point(f"fsync {os.path.relpath(place, self.folder)}")
            fsync(handle)

        os.fsync = flushed

        def write_text(path: Path, text: str) -> None:
            with open(path, "w") as file:
                file.write(text[: len(text) // 2])
                file.flush()
                point(f"write {os.path.relpath(path, self.folder)}")
                file.write(text[len(text) // 2 :])

        Path.write_text = write_text

        class Halves(io.FileIO):
            """A log, each line of which is written in two halves."""

            def write(self, line: bytes) -> int:
                half = line[: len(line) // 2 + 1]
                point(f"append {os.path.basename(self.name)}")
                return super().write(half)

            def truncate(self, size: int) -> int:
                point(f"truncate {os.path.basename(self.name)}")
                return super().truncate(size)

        logs.open = lambda path, mode, buffering: Halves(path, mode.replace("b", ""))

        def halved(save: Callable[..., None]) -> Callable[..., None]:
            def wrapper(tensors: dict[str, Any], path: Path, metadata: Any = None) -> None:
                save(tensors, path, metadata)
                content = path.read_bytes()
                with open(path, "r+b") as file:
                    file.truncate(len(content) // 2)
                try:
                    point(f"write {os.path.relpath(path, self.folder)}")
                except OSError as error:
                    raise SafetensorError(f"I/O error: {error.strerror} (os error {error.errno})") from None
                save(tensors, path, metadata)

            return wrapper

        state.save_file = halved(state.save_file)
        # fastbert.checkpoint.save imports it at each use
        safetensors.torch.save_file = halved(safetensors.torch.save_file)


def recorded(run: Path, make: Callable[[Path], loop.Trainer] = tiny_training.trainer) -> list[str]:
    """The file operations of a life from its beginning to its end."""
    names = run.with_suffix(".operations")

    def before() -> None:
        handle = os.open(names, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        Operations(run, lambda name: None, 0, record=lambda name: os.write(handle, f"{name}\n".encode()))

    end = life(run, make, before=before)
    assert end.code == 0, end.said
    return names.read_text().splitlines()


def killed_at(run: Path, number: int, make: Callable[[Path], loop.Trainer]) -> End:
    """A life that is killed at an operation."""

    def kill(name: str) -> None:
        os.write(1, f"killed at {name}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    return life(run, make, before=lambda: Operations(run, kill, number) and None)


def full_at(run: Path, number: int, make: Callable[[Path], loop.Trainer]) -> End:
    """A life whose disk is full at one writing operation."""

    def fail(name: str) -> None:
        os.write(1, f"full at {name}\n".encode())
        raise ENOSPC

    return life(run, make, before=lambda: Operations(run, fail, number, writing=True) and None)


def copied(run: Path, to: Path) -> Path:
    """A copy of a run's directory."""
    shutil.copytree(run, to)
    return to
