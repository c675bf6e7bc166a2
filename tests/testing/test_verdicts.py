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
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fastbert.testing import verdict_keys, verdicts
from fastbert.testing.verdict_keys import Unit
from fastbert.testing.verdicts import Time, Verdict

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
KEY = verdict_keys.key_of(Unit("layer_norm", "triton", torch.float32), CPU)
PASSED = Verdict(None)


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


def test_a_verdict_comes_back(cache):
    for verdict in (
        Verdict(None, 1.25, "2026-01-02T03:04:05Z", times=TIMES),
        Verdict('y: max error 1 over eager\'s "0" and …', 1.25, "2026-01-02T03:04:05Z"),
        *(Verdict("why", 1.0, "now", outcome=name, times=TIMES, deaths=2) for name in ("slower", "killed")),
    ):
        assert verdicts.load(KEY) is None
        verdicts.store(KEY, verdict)
        assert verdicts.load(KEY) == dataclasses.replace(verdict, kept=True)
        assert len(files(cache)) == 1
        verdicts.forget(KEY)
        assert files(cache) == []
    assert verdicts.ratio_of(TIMES) == pytest.approx(0.5**0.5)
    assert verdicts.ratio_of(TIMES, "training") == pytest.approx(0.25)
    assert verdicts.ratio_of(TIMES[:1], "training") is None


def test_a_change_of_any_part_of_the_key_is_another_verdict(monkeypatch):
    names = "op backend dtype device capability driver torch triton fastbert source tuned options"
    assert list(KEY) == names.split()
    assert KEY["torch"] == torch.__version__
    verdicts.store(KEY, Verdict("wrong"))
    for part in KEY:
        assert verdicts.load({**KEY, part: KEY[part] + "x"}) is None
    facts = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    name, capability, driver = verdict_keys._device_facts.__wrapped__(torch.device("cuda", 0))
    assert (name, capability, driver[:5]) == ("NVIDIA H200", "9.0", "13000")


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
        keys.append([verdict_keys.key_of(Unit(op, backend, torch.float32), CPU) for op in ops])
    assert [a != b for a, b in zip(*keys, strict=True)] == [True, True, False]


def test_every_file_of_a_kernel_is_a_source_of_some_op():
    from fastbert.backends import cuda, triton

    for op in cuda.DTYPES:
        paths = verdict_keys._kernel(op, "cuda", verdict_keys.PACKAGE)
        assert all(path.is_file() for path in paths), op
        names = {path.name for path in paths if path.parent.name == "cuda"}
        others = {"feed_forward": {"linear.py"}, "encoder_layers": {"attention.py", "linear.py"}}
        assert names == {"__init__.py", "device.py", f"{op}.py"} | others.get(op, set())
    sources = [verdict_keys._kernel(op, "triton", verdict_keys.PACKAGE) for op in triton.DTYPES]
    found = {path.name for paths in sources for path in paths if path.parent.name == "kernels"}
    assert {path.name for path in (verdict_keys.PACKAGE / "kernels").glob("*.py")} <= found


def test_a_failure_stands_before_a_success():
    for first, second in ((Verdict("wrong"), Verdict(None)), (Verdict(None), Verdict("wrong"))):
        verdicts.forget(KEY)
        verdicts.store(KEY, first)
        assert verdicts.store(KEY, second).reason == "wrong"
        assert verdicts.load(KEY).reason == "wrong"


def test_the_source_that_a_verdict_depends_on(tmp_path):
    """A shipped proof depends on the kernel alone."""
    package = tmp_path / "fastbert"
    ignored = shutil.ignore_patterns("*.so", "*.json", "__pycache__")
    for room in ("backends", "kernels", "ops", "testing"):
        shutil.copytree(verdict_keys.PACKAGE / room, package / room, ignore=ignored)

    def hashes():
        functions = verdict_keys.kernel_hash, verdict_keys.source_hash
        return [each.__wrapped__("layer_norm", "triton", package) for each in functions]

    for file, of_kernel, of_check in (
        ("kernels/layer_norm.py", True, True),
        ("kernels/launch.py", True, True),  # imported
        ("kernels/layer_norm_backward.py", True, True),
        ("backends/triton/forwarders.py", True, True),
        ("testing/op_cases/layer_norm.py", False, True),
        ("testing/speed.py", False, True),
        ("ops/layer_norm.py", False, True),
        ("kernels/activation.py", False, False),  # of `linear`
        ("backends/triton/attention.py", False, False),
        ("testing/op_cases/linear.py", False, False),
    ):
        before = hashes()
        (package / file).write_text((package / file).read_text() + "another = 1\n")
        changed = [a != b for a, b in zip(before, hashes(), strict=True)]
        assert changed == [of_kernel, of_check], file


def test_words_and_annotations_change_no_proof():
    """What Triton reads counts: the annotations of a decorated function."""
    before = """'Words.'
from typing import Any
import triton
def f(x: Any, *, y=1) -> int:
    'Words.'
    z = x  # words
    return z
@triton.jit
def g(x, N: tl.constexpr):
    return x
"""
    for old, new, same in (
        ("Words.", "Other words.", True),
        ("# words", "", True),
        ("from typing import Any\n", "", True),
        ("x: Any", "x", True),
        (" -> int", "", True),
        ("N: tl.constexpr", "N", False),
        ("y=1", "y=2", False),
        ("return z", "return x", False),
        ("import triton", "import other as triton", False),
        ("@triton.jit\n", "", False),
    ):
        assert old in before
        after = before.replace(old, new)
        assert (verdict_keys.code(after.encode()) == verdict_keys.code(before.encode())) is same, old


def test_a_tuned_table_changes_the_verdicts_of_its_entries_alone(tmp_path, monkeypatch):
    tuning = pytest.importorskip("fastbert.kernels.tuning")
    monkeypatch.setattr(tuning, "TUNED", tmp_path)
    ops = "linear", "attention", "layer_norm", "linear_norm", "feed_forward"
    wanted = [*itertools.product(ops, ("bfloat16", "float16"))]

    def keys(table):
        tuning.file_of("A GPU").write_text(json.dumps({"device": "A GPU"} | table))
        tuning._table.cache_clear()
        return {(o, d): verdict_keys._tuned(o, "triton", "A GPU", getattr(torch, d)) for o, d in wanted}

    none = keys({})
    assert set(none.values()) == {""}
    # the first product of feed_forward is linear's; a kernel of backward belongs to the op; layer_norm's
    # normalizes many rows of linear_norm
    for kernel, *ops in (
        ("linear", "linear", "feed_forward"),
        ("attention", "attention"),
        ("attention_bwd", "attention"),
        ("feed_forward_bwd", "feed_forward"),
        ("layer_norm", "layer_norm", "linear_norm"),
        ("layer_norm_bwd", "layer_norm"),
        ("linear_bwd", "linear"),
        ("linear_norm", "linear_norm"),
    ):
        one, other = (keys({kernel: {"float16 64 dq": {"9": {"block_m": m}}}}) for m in (64, 128))
        for before in (none, other):
            assert {key for key in one if one[key] != before[key]} == {(op, "float16") for op in ops}, kernel
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
    not_run = {"linear_norm": {"layer_norm_bwd"}}  # of layer_norm it runs forward alone
    for op, kernels in found.items():
        assert kernels == {*tuning.KERNELS.get(op, ()), *not_run.get(op, ())}, op


def test_where_verdicts_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FASTBERT_CACHE", "~/kept")
    assert verdicts.folder() == tmp_path / "kept" / "self_checks"
    monkeypatch.delenv("FASTBERT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert verdicts.folder() == tmp_path / "xdg" / "fastbert" / "self_checks"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert verdicts.folder() == tmp_path / ".cache" / "fastbert" / "self_checks"
    monkeypatch.setenv("FASTBERT_CACHE", "")  # nothing is kept
    with warnings.catch_warnings(action="error"):
        verdicts.store(KEY, Verdict("wrong"))
        assert verdicts.attempt(KEY) is verdicts.load(KEY) is None
        verdicts.settle(KEY, None)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("FASTBERT_CACHE", "~nobody-of-that-name/kept")
    with pytest.warns(RuntimeWarning, match=r"FASTBERT_CACHE=~nobody-of-that-name/kept is ignored") as caught:
        assert [verdicts.folder(), verdicts.load(KEY), verdicts.store(KEY, PASSED)] == [None, None, PASSED]
    assert len(caught) == 1


# --- what harm a disk can do --------------------------------------------------------------------------------


def test_what_is_no_time_is_left_out():
    good = ["5x96", "forward", 0.5, "aten", 0.25]
    bad = (
        [*good, "much", 0.1],
        [*good, 0.1, 0.1, 0.1],
        good[:4],
        7,
        [*good[:2], 0.0, "aten", 1.0],
        [*good[:4], float("nan")],
    )
    assert len(verdicts.times_of([good, *bad, [*good, None, 0.1]])) == 2
    assert verdicts.times_of(None) == verdicts.times_of({"a": 1}) == ()


def test_a_corrupt_file_is_no_verdict(cache):
    verdicts.store(KEY, Verdict("wrong"))
    (path,) = cache.iterdir()
    text = path.read_bytes()
    for spoiled in (
        b"",
        text[: len(text) // 2],
        b"\xff\xfe\x00" + text,
        b"[1, 2]",
        b"{}",
        text.replace(b'"reason": "wrong"', b'"reason": 7'),
        text.replace(b'"op": "layer_norm"', b'"op": "linear"'),
        text.replace(b'"outcome": "failed"', b'"outcome": "passed"'),
        text.replace(b'"outcome": "failed"', b'"outcome": "well"'),
        b"[" * 100_000,
    ):
        assert spoiled != text
        path.write_bytes(spoiled)
        assert verdicts.load(KEY) is None
        verdicts.store(KEY, Verdict(None))  # and it is written anew
        assert verdicts.load(KEY).passed


def test_a_verdict_is_replaced_in_one_step_or_not_at_all(cache):
    verdicts.store(KEY, Verdict(None, date="old"))
    (path,) = cache.iterdir()
    with open(path) as reader:  # another process, in the middle of reading
        verdicts.store(KEY, Verdict("wrong", date="new"))
        assert json.load(reader)["date"] == "old"
    assert verdicts.load(KEY).date == "new"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # a write past it fails, like one to a full disk
    try:
        with pytest.warns(RuntimeWarning, match=rf"in {cache} \({path.name}: .*File too large"):
            verdicts.store(KEY, Verdict("wrong", date="newer"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert verdicts.load(KEY).date == "new"
    assert len(files(cache)) == 1


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTBERT_CACHE", str(tmp_path / "file"))
    with warnings.catch_warnings(record=True, action="always") as caught:
        verdicts.settle(KEY, verdicts.attempt(KEY), Verdict(None))
        verdicts.store(KEY, Verdict("wrong"))
        assert verdicts.load(KEY) is None
        verdicts.forget(KEY)
    (one,) = map(str, caught)
    assert "cannot be kept in" in one
    assert "FASTBERT_CACHE" in one


# --- a shared place -----------------------------------------------------------------------------------------


FOREIGN = {
    "another user's": "belongs to user 12345",
    "group may write": "may be written by others",
    "others may write": "may be written by others",
    "a link": "link",
    "a FIFO": "no plain file",
    "a folder": "no plain file",
}


def make_foreign(path, whose, monkeypatch):
    if whose == "another user's":  # only root can change owners
        for name, is_it in (("fstat", stat.S_ISREG), ("lstat", stat.S_ISDIR)):
            if is_it(path.stat().st_mode):
                real = getattr(os, name)
                told = lambda *a, r=real, **k: os.stat_result([*r(*a, **k)[:4], 12345, *r(*a, **k)[5:]])  # noqa: E731
                monkeypatch.setattr(os, name, told)
    elif whose.endswith("may write"):
        path.chmod(path.stat().st_mode | (0o020 if whose.startswith("group") else 0o002))
    elif whose == "a link":
        moved = path.with_name("moved")
        path.rename(moved)
        path.symlink_to(moved)
    else:
        path.unlink()
        os.mkfifo(path) if whose == "a FIFO" else path.mkdir()


@pytest.mark.parametrize("whose", FOREIGN)
def test_a_file_that_others_could_have_written_is_no_verdict(cache, monkeypatch, whose):
    verdicts.store(KEY, Verdict(None))
    (path,) = cache.iterdir()
    with monkeypatch.context() as patch:
        make_foreign(path, whose, patch)
        with pytest.warns(RuntimeWarning, match=f"is ignored: it .*{FOREIGN[whose]}") as caught:
            assert verdicts.load(KEY) is verdicts.load(KEY) is None
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

    def use():
        assert verdicts.load(KEY) is verdicts.attempt(KEY) is None
        verdicts.store(KEY, Verdict("wrong"))
        verdicts.forget(KEY)

    with pytest.warns(RuntimeWarning, match=f"is ignored: it .*{FOREIGN[whose]}") as caught:
        use()
    assert len(caught) == 1
    assert files(cache) == before


# --- kernels that take the process down ---------------------------------------------------------------------


def test_until_its_end_a_check_has_died():
    assert verdicts.attempt(KEY) is None
    found = verdicts.load(KEY)
    assert (found.reason, found.outcome, found.deaths, found.kept) == (verdicts.DIED, "killed", 1, True)
    assert verdicts.attempt(KEY) == found
    assert verdicts.load(KEY).deaths == 2
    for before in (None, Verdict("died", outcome="killed", deaths=2)):
        verdicts.forget(KEY)
        if before:
            verdicts.store(KEY, before)
        kept = verdicts.load(KEY)
        for nothing in ((), (Verdict("no memory", outcome="undecided"),)):
            assert verdicts.attempt(KEY) == kept
            verdicts.settle(KEY, kept, *nothing)
            assert verdicts.load(KEY) == kept
        for verdict in (Verdict(None), Verdict("wrong")):
            verdicts.attempt(KEY)
            verdicts.settle(KEY, kept, verdict)
            assert verdicts.load(KEY).reason == verdict.reason


@pytest.mark.sweep
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


@contextlib.contextmanager
def another_ones_turn():
    """Another process holds the turn; the function that is yielded ends it, as the block's end does."""
    ready, stop = os.pipe(), os.pipe()
    child = os.fork()  # quicker than another Python with torch
    if child == 0:
        with verdicts.turn(KEY):
            os.write(ready[1], b"!")
            os.read(stop[0], 1)
            os._exit(0)
    os.read(ready[0], 1)
    try:
        yield lambda: os.write(stop[1], b"!")
    finally:
        os.write(stop[1], b"!")
        os.waitpid(child, 0)


@pytest.mark.sweep
def test_of_processes_that_begin_together_one_checks():
    """The ranks of a training run, for example. Of a turn that ends by a death the next one begins.

    It finds what the one that died has left.
    """
    found = [finished(p) for p in [first_use("slow", wait=False) for _ in range(2)]]
    assert [each["by"] for each in found] == ["triton"] * 2
    assert sorted(each["checked"] for each in found) == [False, True]
    assert [each["warnings"] for each in found] == [[]] * 2
    verdicts.forget(KEY)
    processes = [first_use("killed", wait=False) for _ in range(2)]
    ends = sorted(p.wait(120) for p in processes)
    (survivor,) = [p for p in processes if p.returncode == 0]
    assert ends == [-signal.SIGKILL, 0]
    assert json.loads(survivor.communicate()[0])["by"] == "aten"
    assert verdicts.load(KEY).deaths == 1


def test_a_turn_waits_for_another_and_for_its_end_but_not_for_ever(cache, monkeypatch):
    waited = []
    with another_ones_turn() as end:

        def waiting(seconds):
            waited.append(seconds)
            if len(waited) == 3:
                end()

        with verdicts.turn(KEY | {"device": "another"}, waiting):
            assert waited == []
        with verdicts.turn(KEY, waiting):
            assert len(waited) >= 3
    assert files(cache) == []  # the lock is no verdict
    monkeypatch.setattr(verdicts, "TURN_SECONDS", 0.3)
    with another_ones_turn(), verdicts.turn(KEY):
        waited.append("done")
    assert waited[-1] == "done"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOLCK, "No locks available")])
def test_without_locks_there_are_no_turns(monkeypatch, error):
    import fcntl

    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=error))
    before, done = len(os.listdir("/proc/self/fd")), []
    with contextlib.suppress(KeyboardInterrupt), warnings.catch_warnings(action="error"), verdicts.turn(KEY):
        done.append(1)
    assert done == ([] if error is KeyboardInterrupt else [1])
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setenv("FASTBERT_CACHE", "")  # nor without a folder
    with verdicts.turn(KEY):
        pass
