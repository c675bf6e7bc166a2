"""Verdicts of self-checks, kept on disk: which GPU kernels are proven on this machine, and which failed.

One small JSON file for each verdict, in `$FASTBERT_CACHE/self_checks` (`~/.cache/fastbert/self_checks`; with
FASTBERT_CACHE set to nothing, none is kept). Its name has a hash of all that the verdict depends on: op,
backend, dtype; the device's name, compute capability and driver; the versions of torch, Triton and fastbert;
the source of the kernel, of what it imports and of its check. If any of it changes, there is no verdict.

A kernel may take the process down, or hang until somebody kills it. So a marker lies beside the verdict while
a check runs. A marker whose process has gone counts as a failed verdict: the kernel is not tried again.
Several processes may check the same kernel at once; each has a marker of its own, and a failure stands before
a success.

Whoever could write these files could have a wrong kernel taken for proven. So only plain files are
believed that belong to this user, that nobody else may write, and that are no links; the same holds for their
folder, which is made with mode 0700. Anything else is told once and ignored.

Nothing here raises because of the disk: a file that cannot be read is no verdict, one that cannot be written
is told once by a warning, and the check runs again in the next process.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import json
import os
import secrets
import socket
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[1]
FOREIGN_SECONDS = 900.0  # a marker of another machine or container: after that long its process has gone
DIED = "a process ended while the kernel was being checked: it crashed, or it hung and was killed"

Key = dict[str, str]


@dataclass(frozen=True)
class Verdict:
    """What a self-check found.

    Attributes:
        reason: None where the kernel passed, else what went wrong.
        seconds: how long the check took.
        date: when it ended, UTC.
        kept: whether it was read from disk rather than found by this process.
    """

    reason: str | None
    seconds: float = 0.0
    date: str = ""
    kept: bool = False

    @property
    def passed(self) -> bool:
        """Whether the kernel may serve."""
        return self.reason is None


def now() -> str:
    """The date and time, UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# --- what a verdict depends on ------------------------------------------------------------------------------


def key_of(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> Key:
    """All that a verdict depends on."""
    import fastbert

    name, capability, driver = _device_facts(device)
    return {
        "op": op,
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "device": name,
        "capability": capability,
        "driver": driver,
        "torch": str(torch.__version__),
        "triton": _triton_version(),
        "fastbert": fastbert.__version__,
        "source": source_hash(op, backend, name),
    }


@cache
def _device_facts(device: torch.device) -> tuple[str, str, str]:
    if device.type != "cuda":
        return device.type, "", ""
    facts = torch.cuda.get_device_properties(device)
    driver = [str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "")())]
    with contextlib.suppress(OSError):  # the release, 580.65.06; elsewhere than on Linux the API's version
        driver.append(Path("/sys/module/nvidia/version").read_text().strip())
    return facts.name, f"{facts.major}.{facts.minor}", " ".join(driver)


@cache
def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def source_hash(op: str, backend: str, device_name: str, package: Path = PACKAGE) -> str:
    """Hash of the kernel's files, of those they import, of its tuned configs and of what checks it."""
    digest = hashlib.sha256()
    for path in _sources(op, backend, device_name, package):
        with contextlib.suppress(OSError):
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources(op: str, backend: str, device_name: str, package: Path) -> list[Path]:
    backends = package / "backends"
    checks = package / "testing"
    files = [checks / "error_rule.py", checks / "op_cases" / f"{op}.py", package / "ops" / f"{op}.py"]
    if backend == "triton":
        starts = [backends / "triton" / f"{op}.py", package / "kernels" / f"{op}.py"]
        files += sorted(_with_imports(starts, package))
        from fastbert.kernels import tuning

        files.append(tuning.file_of(device_name))
    else:
        from fastbert.runtime import native as _native

        files += [backends / backend / "__init__.py", backends / backend / f"{op}.py"]
        if _native.extension is not None:
            files.append(Path(_native.extension.__file__))
    return files


def _with_imports(starts: list[Path], package: Path) -> set[Path]:
    """The files and what they import from `fastbert.kernels` and `fastbert.backends.triton`, and so on."""
    found: set[Path] = set()
    left = list(starts)
    while left:
        path = left.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.startswith(("fastbert.kernels.", "fastbert.backends.triton.")):
                    left.append(package.joinpath(*name.split(".")[1:]).with_suffix(".py"))
    return found


# --- where they are -----------------------------------------------------------------------------------------


def folder() -> Path | None:
    """Where verdicts are kept; None where none are to be kept. It need not exist."""
    named = os.environ.get("FASTBERT_CACHE")
    try:
        if named is not None:
            return Path(named).expanduser() / "self_checks" if named else None
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "fastbert" / "self_checks"
    except RuntimeError as error:  # no such user, no home directory
        if named is not None:
            _tell(f"FASTBERT_CACHE={named} is ignored ({error})")
        return None


def _trusted_folder() -> Path | None:
    """The folder, unless somebody else could have written what is in it."""
    where = folder()
    if where is None:
        return None
    try:
        problem = _distrust(os.lstat(where), stat.S_ISDIR)
    except OSError:  # not there yet, or the first write says what is wrong
        return where
    if problem is not None:
        _tell(f"{where} is ignored: it {problem}")
        return None
    return where


def _distrust(facts: os.stat_result, kind: Callable[[int], bool]) -> str | None:
    """Why a file or folder is not believed: it is of another kind, another user's, or others may write it."""
    if not kind(facts.st_mode):
        return "is a link" if stat.S_ISLNK(facts.st_mode) else "is no plain file or folder"
    me = os.geteuid() if hasattr(os, "geteuid") else facts.st_uid  # elsewhere than on POSIX nothing tells
    if facts.st_uid != me:
        return f"belongs to user {facts.st_uid}, and this process runs as {me}"
    if facts.st_mode & 0o022:
        return f"may be written by others (mode {stat.S_IMODE(facts.st_mode):o}; chmod go-w)"
    return None


def _stem(key: Key) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{key['op']}-{key['backend']}-{key['dtype']}-{digest[:32]}"


_warned = False


def _tell(problem: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"fastbert: {problem}: GPU kernels are checked again in every process. "
            "FASTBERT_CACHE names another folder; set to nothing, it keeps none",
            RuntimeWarning,
            stacklevel=4,
        )


def _cannot_keep(file: Path, error: OSError) -> None:
    _tell(f"verdicts of self-checks cannot be kept in {file.parent} ({file.name}: {error})")


def _make(where: Path) -> None:
    """Make the folder, and those above it that are missing, for this user alone."""
    for path in [*reversed(where.parents), where]:
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    if problem := _distrust(os.lstat(where), stat.S_ISDIR):  # somebody else has been quicker
        raise PermissionError(f"the folder {problem}")


def _write(path: Path, data: dict[str, Any]) -> bool:
    """Replace the file in one step; whether it could be."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        _make(path.parent)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(data, indent=1) + "\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _cannot_keep(path, error)
        return False
    return True


def _read_own(path: Path) -> dict[str, Any] | None:
    """The object in a file of this user; an empty one where it holds none; None where there is no such file.

    A file of another user, a link or a FIFO counts for nothing and is told once.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a FIFO would hang
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:  # a link, or no permission
        _tell(f"{path} is ignored: it is a link, or cannot be read ({error})")
        return None
    try:
        if problem := _distrust(os.fstat(descriptor), stat.S_ISREG):
            _tell(f"{path} is ignored: it {problem}")
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return _object(file.read)
    finally:
        os.close(descriptor)


def _object(read: Callable[[], bytes]) -> dict[str, Any]:
    """The JSON object that `read` returns; an empty one where it fails or there is none."""
    try:
        data = json.loads(read())
    except (OSError, ValueError, RecursionError):  # a decoding error is a ValueError too
        return {}
    return data if isinstance(data, dict) else {}


# --- verdicts -----------------------------------------------------------------------------------------------


def load(key: Key) -> Verdict | None:
    """The verdict on disk. A marker without a process is one: it becomes a failed verdict."""
    where = _trusted_folder()
    if where is None:
        return None
    found = _verdict_in(where / f"{_stem(key)}.json", key)
    if found is not None:
        return found
    if dead := [path for path in _markers(where, key) if _abandoned(path)]:
        verdict = Verdict(DIED, date=now())
        store(key, verdict)
        for path in dead:
            with contextlib.suppress(OSError):
                path.unlink()
        return Verdict(DIED, date=verdict.date, kept=True)
    return None


def _verdict_in(path: Path, key: Key) -> Verdict | None:
    data = _read_own(path) or {}
    reason = data.get("reason")
    if data.get("key") != key or data.get("passed") is not (reason is None):
        return None  # not there, half a file, or somebody's edit
    if not (reason is None or isinstance(reason, str)):
        return None
    seconds = data.get("seconds")
    seconds = float(seconds) if isinstance(seconds, (int, float)) else 0.0
    return Verdict(reason, seconds, str(data.get("date", "")), kept=True)


def store(key: Key, verdict: Verdict) -> None:
    """Keep a verdict. A success does not replace the failure that another process has found meanwhile."""
    where = _trusted_folder()
    if where is None:
        return
    path = where / f"{_stem(key)}.json"
    if verdict.passed:
        found = _verdict_in(path, key)
        if found is not None and not found.passed:
            return
    _write(path, {
        "passed": verdict.passed, "reason": verdict.reason, "seconds": round(verdict.seconds, 3),
        "date": verdict.date, "key": key,
    })  # fmt: skip


def forget(key: Key) -> None:
    """Drop the verdict and what dead processes left, so that the kernel is checked anew."""
    where = _trusted_folder()
    if where is None:
        return
    try:
        (where / f"{_stem(key)}.json").unlink(missing_ok=True)
        for path in _markers(where, key):
            if _abandoned(path):
                path.unlink(missing_ok=True)
    except OSError as error:
        _cannot_keep(where / _stem(key), error)


# --- proof by other machines -------------------------------------------------------------------------------

_TAGS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def proven_elsewhere(op: str, backend: str, dtype: torch.dtype, capability: str) -> str | None:
    """The file in bench/results that proves the kernel on a device of that capability; or None.

    `make gpu` makes it, and only a source checkout has it. All correctness rows of the kernel must be good.
    """
    name = str(dtype).removeprefix("torch.")
    begin = f"{op}-{backend}-{_TAGS.get(name, name)}"
    for path in sorted(PACKAGE.parent.glob("bench/results/*/checks.json")):
        data = _object(path.read_bytes)
        facts, rows = data.get("environment"), data.get("rows")
        if not isinstance(facts, dict) or facts.get("compute_capability") != capability:
            continue
        mine = [
            row.get("status")
            for row in (rows if isinstance(rows, list) else [])
            if row.get("step") == "correctness" and f"{row.get('name')}-".startswith(f"{begin}-")
        ]
        if mine and set(mine) == {"ok"}:
            return str(path.relative_to(PACKAGE.parent))
    return None


# --- markers ------------------------------------------------------------------------------------------------


def _markers(where: Path, key: Key) -> list[Path]:
    try:
        return sorted(where.glob(f"{_stem(key)}.*.running"))
    except OSError:
        return []


@cache
def _host() -> dict[str, str]:
    """What tells machines, their boots, and containers with process ids of their own apart."""
    facts = {"host": socket.gethostname(), "boot": "", "pids": ""}
    with contextlib.suppress(OSError):
        facts["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        facts["pids"] = os.readlink("/proc/self/ns/pid")
    return facts


def _born(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; "" where that is not told; None: there is none."""
    try:
        # the name in brackets may hold anything; the state is the 1st field after it, the start the 20th
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # somebody else's process
        pass
    return ""


def _abandoned(path: Path) -> bool:
    """Whether the process that left this marker has ended without taking it away."""
    data = _read_own(path)
    if data is None:  # taken away in the meantime, or somebody else's
        return False
    here = _host()
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:  # taken away meanwhile
        return False
    if data.get("host") == here["host"] and data.get("boot") != here["boot"]:
        return True  # the machine has been started anew
    if {name: data.get(name) for name in here} == here and isinstance(data.get("pid"), int):
        born = _born(data["pid"])
        return born is None or (born != data.get("born") and "" not in (born, data.get("born")))
    return age > FOREIGN_SECONDS


@contextlib.contextmanager
def running(key: Key) -> Iterator[None]:
    """A marker lies beside the verdict as long as the block runs; without a folder to write to, none."""
    where, pid = _trusted_folder(), os.getpid()
    path = None
    if where is not None:
        path = where / f"{_stem(key)}.{pid}-{threading.get_native_id()}-{secrets.token_hex(4)}.running"
        if not _write(path, {**_host(), "pid": pid, "born": _born(pid) or "", "date": now()}):
            path = None
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
