"""Verdicts on GPU kernels: of this process, on its user's disk, and in the shipped table of proofs.

On disk there is one small JSON file per verdict, in `$FASTBERT_CACHE/self_checks` (by default
`~/.cache/fastbert/self_checks`; if FASTBERT_CACHE is empty, none is kept). The file's name contains a hash of
all that the verdict depends on (`verdict_keys.key_of`). The table, `proven/<gpu>.json`, has the verdicts of
runs on our GPUs (`verdict_keys.proof_key_of`). A kernel in the table is not checked again. A verdict on the
user's own disk overrides the table; `fastbert warmup --again` makes one.

A kernel may crash the process, or hang until it is killed; and a healthy check may be killed with its job. So
`attempt` writes "killed", and the number of attempts in a row, before a check begins; the check's end
replaces it. `proving` decides whether and how often a process tries the kernel again. Processes on the same
kind of device take turns (`turn`). Where they cannot, several may check the same kernel at once; a failure
overrides a success.

A user who can write these files could make a wrong kernel count as proven. So a file is trusted only if it is
a plain file, no link, that belongs to this user and that no other user may write. The same holds for the
folder, which is made with mode 0700. Anything else is ignored, with one warning. Nothing here raises because
of the disk: what cannot be read is no verdict, and what cannot be written causes one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastbert.testing.verdict_keys import Key, Unit, key_of, proof_key_of

DIED = "a process ended while the kernel was being checked: it crashed, or it was killed"

PASSED, FAILED, SLOWER, KILLED, UNDECIDED = OUTCOMES = "passed", "failed", "slower", "killed", "undecided"
FORWARD, TRAINING = "forward", "training"


class Time(NamedTuple):
    """Milliseconds per call of a kernel, and of the backend that would serve without it.

    Attributes:
        case: the shapes and options.
        passes: "forward", or "training": forward and backward.
        ms, other_ms: the device's time for the kernel and for the `other` backend.
        host_ms, other_host_ms: the host's time to enqueue a call of each; None where the host computes.
    """

    case: str
    passes: str
    ms: float
    other: str
    other_ms: float
    host_ms: float | None = None
    other_host_ms: float | None = None


def ratio_of(times: tuple[Time, ...], passes: str = "") -> float | None:
    """The kernel's time over the other backend's: the geometric mean of its times in `passes` ("": all)."""
    logs = [math.log(t.ms / t.other_ms) for t in times if passes in ("", t.passes)]
    return math.exp(sum(logs) / len(logs)) if logs else None


@dataclass(frozen=True)
class Verdict:
    """What a self-check found.

    Attributes:
        reason: None where the kernel passed, else what went wrong.
        seconds: how long the check took.
        date: when it ended, UTC.
        kept: whether it was read from disk rather than found by this process.
        outcome: "passed"; "failed"; "slower": right, but slower than the next backend in all that is judged;
            "killed": the process was ended from outside, or for an unknown reason; "undecided": an error
            that may be the machine's.
        times: the times of a kernel that is right.
        deaths: how many processes have ended during its check, in a row.
        commit: the checked commit, if the verdict is shipped with the package; else "".
    """

    reason: str | None
    seconds: float = 0.0
    date: str = ""
    kept: bool = False
    outcome: str = ""
    times: tuple[Time, ...] = ()
    deaths: int = 0
    commit: str = ""

    def __post_init__(self) -> None:
        if not self.outcome:
            object.__setattr__(self, "outcome", PASSED if self.reason is None else FAILED)

    @property
    def passed(self) -> bool:
        """Whether the kernel may serve; `speed.why_not` decides for each kind of call."""
        return self.reason is None


def now() -> str:
    """The date and time, UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# --- what is known ------------------------------------------------------------------------------------------

# The shipped tables.
FOLDER = Path(__file__).with_name("proven")
# Verdicts of this process's checks, and those from elsewhere that it has used.
found: dict[tuple[Unit, torch.device], Verdict] = {}


def known(unit: Unit, device: torch.device) -> Verdict | None:
    """The verdict on a kernel, found here or elsewhere; None where there is none."""
    if (unit, device) in found:
        return found[unit, device]
    return load(key_of(unit, device)) or _shipped(proof_key_of(unit, device))


def table_of(device_name: str) -> Path:
    """The shipped table of a GPU, such as "NVIDIA H200"."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def _shipped(key: Key | None) -> Verdict | None:
    return None if key is None else _table(table_of(key["device"])).get(_text(key))


@cache
def _table(path: Path) -> dict[str, Verdict]:
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["proofs"]
    both = ((_text(row["key"]), verdict_of(row)) for row in rows)
    return {key: each for key, each in both if each is not None}


def _text(key: Key) -> str:
    return json.dumps(key, sort_keys=True)


# --- the folder on disk -------------------------------------------------------------------------------------


def folder() -> Path | None:
    """The folder of the verdicts, which may not exist yet; None where none are kept."""
    named = os.environ.get("FASTBERT_CACHE")
    try:
        if named is not None:
            return Path(named).expanduser() / "self_checks" if named else None
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "fastbert" / "self_checks"
    except RuntimeError as error:
        # no such user, or no home directory
        if named is not None:
            _tell(f"FASTBERT_CACHE={named} is ignored ({error})")
        return None


def _trusted_folder() -> Path | None:
    """The folder, unless another user could have written the files in it."""
    where = folder()
    # if it does not exist yet, or something else is wrong, the first write reports it
    with contextlib.suppress(OSError):
        problem = where and _distrust(os.lstat(where), stat.S_ISDIR)
        if problem:
            _tell(f"{where} is ignored: it {problem}")
            return None
    return where


def _file_of(key: Key) -> Path | None:
    where = _trusted_folder()
    return where and where / f"{stem(key)}.json"


def stem(key: Key) -> str:
    """The name of the verdict's file, without its ending."""
    digest = hashlib.sha256(_text(key).encode()).hexdigest()
    return f"{key['op']}-{key['backend']}-{key['dtype']}-{digest[:32]}"


def _distrust(facts: os.stat_result, kind: Callable[[int], bool]) -> str | None:
    """Why a file or folder is not trusted: another kind, another owner, or writable by other users."""
    if not kind(facts.st_mode):
        return "is a link" if stat.S_ISLNK(facts.st_mode) else "is no plain file or folder"
    # only POSIX has user numbers
    me = os.geteuid() if hasattr(os, "geteuid") else facts.st_uid
    if facts.st_uid != me:
        return f"belongs to user {facts.st_uid}, and this process runs as {me}"
    if facts.st_mode & 0o022:
        return f"may be written by others (mode {stat.S_IMODE(facts.st_mode):o}; chmod go-w)"
    return None


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


def _make(where: Path) -> None:
    """Make the folder, and those above it that are missing, for this user alone."""
    for path in [*reversed(where.parents), where]:
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    if problem := _distrust(os.lstat(where), stat.S_ISDIR):
        # another user made it first
        raise PermissionError(f"the folder {problem}")


def _write(key: Key, data: dict[str, Any] | None) -> None:
    """Replace the key's file in one step; None removes it. If that fails, warn once."""
    path = _file_of(key)
    if path is None:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        if data is None:
            return path.unlink(missing_ok=True)
        _make(path.parent)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(data, indent=1) + "\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _tell(f"verdicts of self-checks cannot be kept in {path.parent} ({path.name}: {error})")


def _read_own(path: Path) -> dict[str, Any]:
    """The JSON object in a file of this user; an empty one where there is none.

    A file of another user, a link or a FIFO is ignored, with one warning.
    """
    # without O_NONBLOCK, opening a FIFO would hang
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    data, problem = None, None
    try:
        descriptor = os.open(path, flags)
        try:
            problem = _distrust(os.fstat(descriptor), stat.S_ISREG)
            if problem is None:
                with open(descriptor, "rb", closefd=False) as file:
                    data = json.loads(file.read())
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        pass  # a decoding error is a ValueError too
    except OSError as error:
        problem = f"is a link, or cannot be read ({error})"
    if problem is not None:
        _tell(f"{path} is ignored: it {problem}")
    return data if isinstance(data, dict) else {}


# --- verdicts on disk ---------------------------------------------------------------------------------------


def load(key: Key) -> Verdict | None:
    """The verdict on disk; "killed" also while a check is under way."""
    path = _file_of(key)
    data = _read_own(path) if path else {}
    kept = verdict_of(data) if data.get("key") == key else None
    return replace(kept, kept=True) if kept else None


def facts_of(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON."""
    facts = {name: getattr(verdict, name) for name in ("outcome", "reason", "date", "deaths")}
    times = [[round(each, 6) if isinstance(each, float) else each for each in t] for t in verdict.times]
    return facts | {"seconds": round(verdict.seconds, 3), "times": times}


def verdict_of(data: dict[str, Any]) -> Verdict | None:
    """The verdict in what `facts_of` has made; None where the data is no verdict, as in an edited file."""
    reason, outcome = data.get("reason"), data.get("outcome", "")
    sound = isinstance(reason, str | None) and (outcome == PASSED) is (reason is None)
    with contextlib.suppress(TypeError, ValueError):
        date, commit = (str(data.get(name, "")) for name in ("date", "commit"))
        facts = {"times": times_of(data.get("times")), "deaths": int(data.get("deaths", 0)), "commit": commit}
        found = Verdict(reason, float(data.get("seconds", 0.0)), date, outcome=outcome, **facts)
        return found if sound and outcome in OUTCOMES else None
    return None


def times_of(rows: Any) -> tuple[Time, ...]:
    """The times in a JSON list of lists; those that are not such a row are left out."""
    times = []
    for row in rows if isinstance(rows, list) else []:
        with contextlib.suppress(TypeError, ValueError):
            case, passes, ms, other, other_ms, *host = row
            hosts = [None if each is None else float(each) for each in host]
            one = Time(str(case), str(passes), float(ms), str(other), float(other_ms), *hosts)
            if 0 < one.ms < math.inf and 0 < one.other_ms < math.inf:
                times.append(one)
    return tuple(times)


def store(key: Key, verdict: Verdict) -> Verdict:
    """Keep a verdict, unless it is a success and another process has found a failure in the meantime.

    Returns the verdict that counts.
    """
    kept = load(key) if verdict.passed else None
    if kept is not None and kept.outcome in (FAILED, SLOWER):
        return kept
    _write(key, facts_of(verdict) | {"key": key})
    return verdict


def forget(key: Key) -> None:
    """Drop the verdict, so that the kernel is checked anew."""
    _write(key, None)


def attempt(key: Key) -> Verdict | None:
    """Record that a check begins: until `settle` the verdict is "killed". Return the previous verdict."""
    before = load(key)
    deaths = 1 + (before.deaths if before else 0)
    store(key, Verdict(DIED, date=now(), outcome=KILLED, deaths=deaths))
    return before


_STOPPED = Verdict("its self-check was stopped", outcome=UNDECIDED)


def settle(key: Key, before: Verdict | None, verdict: Verdict = _STOPPED) -> Verdict:
    """Keep what a check has found; if it decided nothing, the previous verdict.

    Returns the verdict that counts: `verdict`, or a failure that another process has found.
    """
    if verdict.outcome != UNDECIDED:
        return store(key, verdict)
    forget(key) if before is None else store(key, before)
    return verdict


# --- turns --------------------------------------------------------------------------------------------------

# How long a process waits for its turn.
TURN_SECONDS = 900.0
_TURN_POLL_SECONDS = 0.1


@contextlib.contextmanager
def turn(key: Key, waiting: Callable[[float], None] = lambda seconds: None) -> Iterator[None]:
    """Let no other process check on the key's kind of device while the block runs.

    The system ends the turn of a process that dies. After `TURN_SECONDS`, or where files cannot be locked,
    the block runs all the same. `waiting` is called now and then with the seconds waited so far.
    """
    where = _trusted_folder()
    with contextlib.ExitStack() as stack:
        # Windows has no fcntl; and where a file cannot be made, the first write of a verdict warns
        with contextlib.suppress(ImportError, OSError):
            if where is not None:
                _lock(where, key, waiting, stack)
        yield


def _lock(where: Path, key: Key, waiting: Callable[[float], None], stack: contextlib.ExitStack) -> None:
    """Lock a file until the stack ends, unless another process holds it for `TURN_SECONDS`."""
    import fcntl

    device = hashlib.sha256(f"{key['device']} {key['capability']}".encode()).hexdigest()[:16]
    _make(where.parent)
    # beside the folder, in which files are verdicts
    path = where.with_name(f"{where.name}-{device}.turn")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    stack.callback(os.close, descriptor)
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < TURN_SECONDS:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(waited)
            time.sleep(_TURN_POLL_SECONDS)
