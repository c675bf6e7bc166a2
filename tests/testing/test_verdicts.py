"""Verdicts on disk: what they depend on, damaged files, and kernels that crash the process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from fastbert.testing import verdict_keys, verdicts
from fastbert.testing.verdicts import Time, Verdict

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
KEY = verdict_keys.key_of("layer_norm", "triton", CPU, torch.float32)


def files(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def first_use(behaviour, status=0, wait=True):
    """Run a process that uses the planted kernel."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.planted_kernel", behaviour, "first-use"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return finished(process, status) if wait else process


def finished(process, status=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    return json.loads(out) if status == 0 else None


# --- what is kept -------------------------------------------------------------------------------------------


TIMES = (
    Time("5x96", "forward", 0.5, "aten", 0.25),
    Time("5x96", "training", 0.5, "aten", 2.0, 0.125, 0.0625),
)


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(None, 1.25, "2026-01-02T03:04:05Z", times=TIMES),
        Verdict('y: max error 1 over eager\'s "0" and …', 1.25, "2026-01-02T03:04:05Z"),
        *(Verdict("why", 1.0, "now", outcome=name, times=TIMES, deaths=2) for name in ("slower", "killed")),
    ],
)
def test_a_verdict_comes_back(cache, verdict):
    assert verdicts.load(KEY) is None
    verdicts.store(KEY, verdict)
    assert verdicts.load(KEY) == dataclasses.replace(verdict, kept=True)
    assert len(files(cache)) == 1
    verdicts.forget(KEY)
    assert verdicts.load(KEY) is None
    assert files(cache) == []


def test_what_times_say():
    assert verdicts.ratio_of(TIMES) == pytest.approx(0.5**0.5)
    assert verdicts.ratio_of(TIMES, "forward") == pytest.approx(2.0)
    assert verdicts.ratio_of(TIMES, "training") == pytest.approx(0.25)
    assert verdicts.ratio_of(TIMES[:1], "training") is None
    assert verdicts.ratio_of(()) is None


@pytest.mark.parametrize("part", sorted(KEY))
def test_a_change_of_any_part_of_the_key_is_another_verdict(part):
    verdicts.store(KEY, Verdict("wrong"))
    assert verdicts.load({**KEY, part: KEY[part] + "x"}) is None
    assert verdicts.load(KEY) is not None


def test_the_key_names_all_that_a_verdict_depends_on(monkeypatch):
    names = "op backend dtype device capability driver torch triton fastbert source tuned options"
    assert list(KEY) == names.split()
    assert (KEY["op"], KEY["backend"], KEY["dtype"]) == ("layer_norm", "triton", "float32")
    assert KEY["torch"] == torch.__version__

    class Facts:
        name, major, minor = "NVIDIA H200", 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Facts)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    facts = verdict_keys._device_facts.__wrapped__(torch.device("cuda", 0))
    assert facts[:2] == ("NVIDIA H200", "9.0")
    assert facts[2].startswith("13000")


@pytest.mark.parametrize(
    ("backend", "module"),
    (("triton", "fastbert.kernels.activation"), ("cuda", "fastbert.backends.cuda.linear")),
)
def test_exact_gelu_has_verdicts_of_its_own(monkeypatch, backend, module):
    """It is another kernel."""
    options = pytest.importorskip(module)
    keys = []
    for exact in (False, True):
        monkeypatch.setattr(options, "EXACT_GELU", exact)
        ops = "linear", "feed_forward", "packing"
        keys.append([verdict_keys.key_of(op, backend, CPU, torch.float32) for op in ops])
    assert [a != b for a, b in zip(*keys, strict=True)] == [True, True, False]


def test_the_files_of_cuda_that_a_verdict_depends_on():
    from fastbert.backends import cuda

    for op in cuda.DTYPES:
        paths = verdict_keys._kernel(op, "cuda", verdict_keys.PACKAGE)
        assert all(path.is_file() for path in paths), op
        names = {path.name for path in paths if path.parent.name == "cuda"}
        own = {"feed_forward.py", "linear.py"} if op == "feed_forward" else {f"{op}.py"}
        assert names == {"__init__.py", "device.py"} | own


def test_a_failure_stands_before_a_success():
    verdicts.store(KEY, Verdict("wrong", date="earlier"))
    verdicts.store(KEY, Verdict(None))
    assert verdicts.load(KEY).reason == "wrong"
    verdicts.forget(KEY)
    verdicts.store(KEY, Verdict(None))
    verdicts.store(KEY, Verdict("wrong"))
    assert verdicts.load(KEY).reason == "wrong"


@pytest.mark.parametrize(
    ("file", "matters"),
    [
        ("kernels/layer_norm.py", "kernel"),
        ("kernels/launch.py", "kernel"),  # imported
        ("kernels/layer_norm_backward.py", "kernel"),
        ("backends/triton/forwarders.py", "kernel"),
        ("testing/op_cases/layer_norm.py", "check"),
        ("testing/speed.py", "check"),
        ("ops/layer_norm.py", "check"),
        ("kernels/activation.py", ""),  # of `linear`
        ("backends/triton/attention.py", ""),
        ("testing/op_cases/linear.py", ""),
    ],
)
def test_the_source_that_a_verdict_depends_on(tmp_path, file, matters):
    """A shipped proof depends on the kernel alone."""
    package = tmp_path / "fastbert"
    ignored = shutil.ignore_patterns("*.so", "*.json", "__pycache__")
    for room in ("backends", "kernels", "ops", "testing"):
        shutil.copytree(verdict_keys.PACKAGE / room, package / room, ignore=ignored)

    def hashes():
        functions = verdict_keys.kernel_hash, verdict_keys.source_hash
        return [each.__wrapped__("layer_norm", "triton", package) for each in functions]

    before = hashes()
    (package / file).write_text((package / file).read_text() + "# another line\n")
    changed = [a != b for a, b in zip(before, hashes(), strict=True)]
    assert changed == [matters == "kernel", matters != ""]


def test_every_file_of_kernels_is_a_source_of_some_op():
    from fastbert.backends import triton

    sources = [verdict_keys._kernel(op, "triton", verdict_keys.PACKAGE) for op in triton.DTYPES]
    found = {path.name for paths in sources for path in paths if path.parent.name == "kernels"}
    assert {path.name for path in (verdict_keys.PACKAGE / "kernels").glob("*.py")} <= found


def test_a_tuned_table_changes_the_verdicts_of_its_entries_alone(tmp_path, monkeypatch):
    tuning = pytest.importorskip("fastbert.kernels.tuning")
    monkeypatch.setattr(tuning, "TUNED", tmp_path)

    def keys(table):
        tuning.file_of("A GPU").write_text(json.dumps({"device": "A GPU"} | table))
        tuning._table.cache_clear()
        wanted = itertools.product(
            ("linear", "attention", "layer_norm", "linear_norm", "feed_forward"), ("bfloat16", "float16")
        )
        return {
            (op, name): verdict_keys._tuned(op, "triton", "A GPU", getattr(torch, name))
            for op, name in wanted
        }

    def changed(before, after):
        return {key for key in after if after[key] != before[key]}

    none, linear = keys({}), {"bfloat16 768x3072 gelu": {"7": {"block_m": 64}}}
    assert set(none.values()) == {""}
    first = keys({"linear": linear})
    # the first product of feed_forward is linear's
    assert changed(none, first) == {("linear", "bfloat16"), ("feed_forward", "bfloat16")}
    other = keys({"linear": {"bfloat16 768x3072 gelu": {"7": {"block_m": 128}}}})
    assert changed(first, other) == changed(none, first)
    # a kernel of backward belongs to the op; layer_norm's normalizes many rows of linear_norm
    for kernel, *ops in (
        ("attention", "attention"),
        ("attention_bwd", "attention"),
        ("feed_forward_bwd", "feed_forward"),
        ("layer_norm", "layer_norm", "linear_norm"),
        ("layer_norm_bwd", "layer_norm"),
        ("linear_bwd", "linear"),
        ("linear_norm", "linear_norm"),
    ):
        more = keys({"linear": linear, kernel: {"float16 64 dq": {"9": {}}}})
        assert changed(first, more) == {(op, "float16") for op in ops}, kernel
    # the same entry of two kernels is two entries
    one, two = (keys({kernel: {"bfloat16 768": {"9": {}}}}) for kernel in ("layer_norm", "layer_norm_bwd"))
    assert one["layer_norm", "bfloat16"] != two["layer_norm", "bfloat16"]
    tuning._table.cache_clear()


def test_an_op_uses_no_tuned_entries_but_those_of_its_verdict():
    """An op's files look up what `tuning.KERNELS` says, and more only in functions that it never runs."""
    tuning = pytest.importorskip("fastbert.kernels.tuning")
    looked_up = re.compile(r"\btuning\.tuned\(\s*device,\s*\"(\w+)\"")
    found = {}
    for op in (*tuning.KERNELS, "cross_entropy", "embedding", "pooling"):
        texts = {
            path.name: path.read_text()
            for path in verdict_keys._kernel(op, "triton", verdict_keys.PACKAGE)
            if path.parent.name == "kernels" and path.name != "tuning.py"
        }
        assert all(t.count("tuning.tuned(") == len(looked_up.findall(t)) for t in texts.values())
        found[op] = {kernel for text in texts.values() for kernel in looked_up.findall(text)}
    # layer_norm's backward, and all of layer_norm but `row_of`
    not_run = {"linear_norm": {"layer_norm_bwd"}, "embedding": {"layer_norm", "layer_norm_bwd"}}
    for op, kernels in found.items():
        assert kernels == {*tuning.KERNELS.get(op, ()), *not_run.get(op, ())}, op


def test_where_verdicts_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTBERT_CACHE", "~/kept")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verdicts.folder() == tmp_path / "kept" / "self_checks"
    monkeypatch.delenv("FASTBERT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert verdicts.folder() == tmp_path / "xdg" / "fastbert" / "self_checks"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert verdicts.folder() == tmp_path / ".cache" / "fastbert" / "self_checks"


def test_with_an_empty_name_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTBERT_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdicts.store(KEY, Verdict("wrong"))
        assert verdicts.attempt(KEY) is verdicts.load(KEY) is None
        verdicts.settle(KEY, None)
    assert list(tmp_path.iterdir()) == []


# --- what harm a disk can do --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        (None, 0),
        ({"a": 1}, 0),
        ([["5x96", "forward", 0.5, "aten", 0.25]], 1),
        ([["5x96", "forward", 0.5, "aten", 0.25, None, 0.1]], 1),
        ([["5x96", "forward", 0.5, "aten", 0.25, "much", 0.1]], 0),
        ([["5x96", "forward", 0.5, "aten", 0.25, 0.1, 0.1, 0.1]], 0),
        ([["5x96", "forward", 0.5, "aten"], 7, ["5x96", "forward", "much", "aten", 1]], 0),
        ([["5x96", "forward", 0.0, "aten", 1.0], ["5x96", "forward", 1.0, "aten", float("nan")]], 0),
    ],
)
def test_what_is_no_time_is_left_out(rows, left):
    assert len(verdicts.times_of(rows)) == left


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: b"\xff\xfe\x00" + text,
        lambda text: b"[1, 2]",
        lambda text: b"{}",
        lambda text: text.replace(b'"reason": "wrong"', b'"reason": 7'),
        lambda text: text.replace(b'"op": "layer_norm"', b'"op": "linear"'),
        lambda text: text.replace(b'"outcome": "failed"', b'"outcome": "passed"'),
        lambda text: text.replace(b'"outcome": "failed"', b'"outcome": "well"'),
        lambda text: b"[" * 100_000,
    ],
)
def test_a_corrupt_file_is_no_verdict(cache, spoil):
    verdicts.store(KEY, Verdict("wrong"))
    (path,) = cache.iterdir()
    spoiled = spoil(path.read_bytes())
    assert spoiled != path.read_bytes()
    path.write_bytes(spoiled)
    assert verdicts.load(KEY) is None
    verdicts.store(KEY, Verdict(None))  # and it is written anew
    assert verdicts.load(KEY).passed


def test_a_verdict_is_replaced_in_one_step(cache):
    verdicts.store(KEY, Verdict(None, date="old"))
    (path,) = cache.iterdir()
    with open(path) as reader:  # another process, in the middle of reading
        verdicts.store(KEY, Verdict("wrong", date="new"))
        assert json.load(reader)["date"] == "old"
    assert verdicts.load(KEY).date == "new"


def test_a_verdict_is_never_half_written(cache):
    verdicts.store(KEY, Verdict(None, date="old"))
    (path,) = cache.iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # a write past it fails, like one to a full disk
    try:
        with pytest.warns(RuntimeWarning, match=rf"in {cache} \({path.name}: .*File too large"):
            verdicts.store(KEY, Verdict("wrong", date="new"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert verdicts.load(KEY).date == "old"
    assert len(files(cache)) == 1


@pytest.mark.parametrize("harm", ["a file stands there", "no permission"])
def test_a_folder_that_cannot_be_written_is_told_once(tmp_path, monkeypatch, harm):
    if harm == "no permission":  # root may write anywhere: refuse for it

        def refuse(*args):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "replace", refuse)
        monkeypatch.setattr(Path, "mkdir", lambda *args, **options: refuse())
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FASTBERT_CACHE", str(tmp_path / "file"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verdicts.settle(KEY, verdicts.attempt(KEY), Verdict(None))
        verdicts.store(KEY, Verdict("wrong"))
        assert verdicts.load(KEY) is None
        verdicts.forget(KEY)
    (one,) = caught
    assert "cannot be kept in" in str(one.message)
    assert "FASTBERT_CACHE" in str(one.message)


# --- a shared place -----------------------------------------------------------------------------------------


def owned_by(uid):
    """`os.fstat` and `os.lstat` as if that user owned all files, because only root can change owners."""

    def told(function):
        def wrapper(*args, **kwargs):
            facts = function(*args, **kwargs)
            return os.stat_result([*facts[:4], uid, *facts[5:]])

        return wrapper

    return told


FOREIGN = {
    "another user's": "belongs to user 12345",
    "group may write": "may be written by others",
    "others may write": "may be written by others",
    "a link": "link",
    "a FIFO": "no plain file",
    "a folder": "no plain file",
}


def make_foreign(path, whose, monkeypatch):
    if whose == "another user's":
        for name, is_it in (("fstat", stat.S_ISREG), ("lstat", stat.S_ISDIR)):
            if is_it(path.stat().st_mode):
                monkeypatch.setattr(os, name, owned_by(12345)(getattr(os, name)))
    elif whose.endswith("may write"):
        path.chmod(path.stat().st_mode | (0o020 if whose.startswith("group") else 0o002))
    elif whose == "a link":
        moved = path.with_name("moved")
        path.rename(moved)
        path.symlink_to(moved)
    else:
        path.unlink()
        os.mkfifo(path) if whose == "a FIFO" else path.mkdir()


@contextlib.contextmanager
def told_once(words):
    """The block warns once, with these words, and does not hang."""

    def late(*_):
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        with pytest.warns(RuntimeWarning, match=rf"is ignored: it .*{words}") as caught:
            yield caught
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("whose", FOREIGN)
def test_a_file_that_others_could_have_written_is_no_verdict(cache, monkeypatch, whose):
    verdicts.store(KEY, Verdict(None))
    (path,) = cache.iterdir()
    with monkeypatch.context() as patch:
        make_foreign(path, whose, patch)
        with told_once(FOREIGN[whose]) as caught:
            assert verdicts.load(KEY) is None
            assert verdicts.load(KEY) is None
        assert len(caught) == 1
    if whose != "a folder":
        verdicts.store(KEY, Verdict("wrong"))  # takes its place
        assert verdicts.load(KEY).reason == "wrong"
        modes = [stat.S_IMODE(p.lstat().st_mode) for p in (cache.parent, cache, path)]
        assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("whose", [w for w in FOREIGN if w not in ("a FIFO", "a folder")])
def test_a_folder_that_others_could_have_written_is_ignored(cache, monkeypatch, whose):
    verdicts.store(KEY, Verdict(None))
    before = files(cache)
    make_foreign(cache, whose, monkeypatch)
    with told_once(FOREIGN[whose]) as caught:
        assert verdicts.load(KEY) is None
        verdicts.attempt(KEY)
        verdicts.store(KEY, Verdict("wrong"))
        verdicts.forget(KEY)
        assert files(cache) == before
    assert len(caught) == 1


def test_a_folder_made_by_somebody_else_just_then_is_not_written(cache, monkeypatch):
    mkdir = Path.mkdir

    def quicker(path, *args, **options):
        mkdir(path, *args, **options)
        path.chmod(0o777)

    monkeypatch.setattr(Path, "mkdir", quicker)
    with pytest.warns(RuntimeWarning, match="the folder may be written by others"):
        verdicts.store(KEY, Verdict(None))
    assert files(cache) == []


def test_a_home_that_nobody_has(monkeypatch):
    monkeypatch.setenv("FASTBERT_CACHE", "~nobody-of-that-name/kept")
    with pytest.warns(RuntimeWarning, match=r"FASTBERT_CACHE=~nobody-of-that-name/kept is ignored") as caught:
        assert verdicts.folder() is verdicts.load(KEY) is verdicts.store(KEY, Verdict(None)) is None
    assert len(caught) == 1


# --- kernels that take the process down ---------------------------------------------------------------------


def test_a_check_that_does_not_end_leaves_its_death():
    assert verdicts.attempt(KEY) is None
    found = verdicts.load(KEY)
    assert (found.reason, found.outcome, found.deaths, found.kept) == (verdicts.DIED, "killed", 1, True)
    assert verdicts.attempt(KEY) == found
    assert verdicts.load(KEY).deaths == 2


@pytest.mark.parametrize("before", [None, Verdict("died", outcome="killed", deaths=2)])
def test_the_end_of_a_check_replaces_its_death(before):
    if before:
        verdicts.store(KEY, before)
    kept = verdicts.load(KEY)
    for nothing in (None, Verdict("no memory", outcome="undecided")):
        assert verdicts.attempt(KEY) == kept
        verdicts.settle(KEY, kept, nothing)
        assert verdicts.load(KEY) == kept
    for verdict in (Verdict(None), Verdict("wrong")):
        verdicts.attempt(KEY)
        verdicts.settle(KEY, kept, verdict)
        assert verdicts.load(KEY).reason == verdict.reason
        verdicts.forget(KEY)


def test_a_crash_is_not_tried_again():
    first_use("segv", -signal.SIGSEGV)
    assert verdicts.load(KEY).reason == verdicts.DIED
    report = first_use("segv")  # the next process lives
    assert report["by"] == "aten"
    assert not report["checked"]
    (text,) = report["warnings"]
    assert "triton kernel of 'layer_norm' has no verdict, because 1 of its self-checks did not end" in text
    assert verdicts.DIED in text
    assert "fastbert warmup --again" in text


# --- turns --------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from fastbert.testing import verdict_keys, verdicts
import torch
key = verdict_keys.key_of("layer_norm", "triton", torch.device("cpu"), torch.float32)
with verdicts.turn(key):
    print("mine", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def another_ones_turn():
    """Another process holds the turn; it ends with the block."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "mine\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_of_processes_that_begin_together_one_checks():
    """The ranks of a training run, for example."""
    found = [finished(p) for p in [first_use("slow", wait=False) for _ in range(3)]]
    assert [each["by"] for each in found] == ["triton"] * 3
    assert sorted(each["checked"] for each in found) == [False, False, True]
    assert [each["warnings"] for each in found] == [[]] * 3


def test_of_a_turn_that_ends_by_a_death_the_next_one_begins():
    """It finds what the one that died has left."""
    begin = time.monotonic()
    processes = [first_use("killed", wait=False) for _ in range(2)]
    ends = sorted(p.wait(120) for p in processes)
    assert time.monotonic() - begin < 100
    (survivor,) = [p for p in processes if p.returncode == 0]
    assert ends == [-signal.SIGKILL, 0]
    assert json.loads(survivor.communicate()[0])["by"] == "aten"
    assert verdicts.load(KEY).deaths == 1


def test_a_turn_waits_for_another_and_for_its_end(cache, monkeypatch):
    waited = []
    with another_ones_turn() as process:

        def waiting(seconds):
            waited.append(seconds)
            if len(waited) == 3:
                process.kill()

        with verdicts.turn(KEY, waiting):
            assert len(waited) >= 3
    assert files(cache) == []  # the lock is no verdict


def test_a_turn_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(verdicts, "TURN_SECONDS", 0.3)
    done = []
    with another_ones_turn():
        waited = []
        with verdicts.turn(KEY | {"device": "another"}, waited.append):
            assert waited == []
        with verdicts.turn(KEY):
            done.append(1)
    assert done


@pytest.mark.parametrize("why", ["no folder", "no locks", "Ctrl-C"])
def test_without_locks_there_are_no_turns(monkeypatch, why):
    import fcntl

    if why == "no folder":
        monkeypatch.setenv("FASTBERT_CACHE", "")
    error = KeyboardInterrupt if why == "Ctrl-C" else OSError(errno.ENOLCK, "No locks available")

    def refuse(*args):
        raise error

    monkeypatch.setattr(fcntl, "flock", refuse)
    before, done = len(os.listdir("/proc/self/fd")), []
    with contextlib.suppress(KeyboardInterrupt), warnings.catch_warnings():
        warnings.simplefilter("error")
        with verdicts.turn(KEY):
            done.append(1)
    assert done == ([] if why == "Ctrl-C" else [1])
    assert len(os.listdir("/proc/self/fd")) == before
