"""First self-checks run in a process of their own: whatever a kernel does there, this process goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from fastbert.backends import aten
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.runtime import dispatch
from fastbert.testing import checking, processes, proving, serving, verdict_keys, verdicts
from fastbert.testing.processes import Unit
from fastbert.testing.verdicts import Verdict
from tests.support.fake_backends import fake_backend, run

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LAYER_NORM = Unit("layer_norm", "triton", torch.float32)


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """First checks on a CPU run in a process of their own; nothing is known of any kernel."""
    monkeypatch.setattr(processes, "DEVICES", ("cuda", "cpu"))
    for name in ("_verdicts", "_found"):
        monkeypatch.setattr(proving, name, {})
    monkeypatch.setattr(proving, "_alone", set())
    monkeypatch.setattr(dispatch, "_resolved", {})
    yield
    processes.end_kept()


@pytest.fixture
def planted(monkeypatch):
    """A function that plants a kernel in processes that check; in this one it is good."""
    served = []
    fake_backend(monkeypatch, layer_norm_fwd=lambda *args: served.append(1) or aten.layer_norm_fwd(*args))

    def plant(behaviours):
        command = [sys.executable, str(ROOT / "tests" / "support" / "planted_kernel.py"), behaviours, "check"]
        monkeypatch.setattr(processes, "COMMAND", command)
        return served

    return plant


def inside(monkeypatch):
    """Kernels that are checked in this process, as (backend, op, dtype)."""
    seen, real = [], checking.check
    monkeypatch.setattr(checking, "check", lambda *args: seen.append((*args[:2], args[3])) or real(*args))
    return seen


def next_process():
    proving._verdicts.clear()
    proving._found.clear()
    dispatch._resolved.clear()


def served_by(dtype=torch.float32):
    return dispatch.serving_backend("layer_norm_fwd", CPU, dtype)


def key(dtype=torch.float32):
    return verdict_keys.key_of("layer_norm", "triton", CPU, dtype)


def test_a_good_kernel_serves_and_is_not_run_here_before(planted, monkeypatch):
    served, checks = planted("good"), inside(monkeypatch)
    run()
    assert served == [1]
    assert checks == []
    assert served_by() == "triton"
    assert verdicts.load(key()).passed


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (
            "segv",
            "failed its self-check on cpu in float32 and .*: its process ended by SIGSEGV",
        ),
        ("exit", "failed its self-check.*its process ended by status 3"),
        ("wrong", "failed its self-check.*5x96 y: max error"),
    ],
)
def test_whatever_it_does_this_process_goes_on(planted, monkeypatch, cache, behaviour, text):
    served, checks = planted(behaviour), inside(monkeypatch)
    with pytest.warns(RuntimeWarning, match=text) as caught:
        y = run()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    assert torch.equal(y, torch.zeros(2, 16))
    assert served == checks == []
    assert served_by() == "aten"
    assert verdicts.load(key()).outcome == "failed"
    assert [path.suffix for path in cache.iterdir()] == [".json"]


@pytest.mark.sweep
def test_a_hang_ends_at_the_limit(planted, monkeypatch):
    planted("hang")
    defaults = processes.checked.__kwdefaults__
    monkeypatch.setattr(processes.checked, "__kwdefaults__", defaults | {"seconds": 2.0})
    with pytest.warns(RuntimeWarning, match="no verdict within 2 s: it hangs"):
        run()
    assert verdicts.load(key()).outcome == "failed"


@pytest.mark.sweep
def test_a_killed_check_is_tried_again_but_not_for_ever(planted, monkeypatch):
    checks = inside(monkeypatch)
    planted("killed")
    for deaths in range(1, proving.MOST_DEATHS + 1):
        with pytest.warns(RuntimeWarning, match=f"because {deaths} of its self-checks did not end, on cpu"):
            run()
        assert served_by() == "aten"
        kept = verdicts.load(key())
        assert (kept.outcome, kept.deaths) == ("killed", deaths)
        (choice,) = (c for c in serving.choices("cpu") if (c.op, c.dtype) == ("layer_norm", "float32"))
        last = deaths == proving.MOST_DEATHS
        next_process()
        (choice,) = (c for c in serving.choices("cpu") if (c.op, c.dtype) == ("layer_norm", "float32"))
        expected = verdicts.DIED if last else "to be self-checked at first use"
        assert choice.why == f"triton: {expected}"
    planted("good")
    with pytest.warns(RuntimeWarning, match="did not end"):
        run()  # enough is enough
    assert checks == []
    verdicts.forget(key())
    next_process()
    run()
    assert served_by() == "triton"


def test_a_kernel_killed_once_is_proven_by_the_next_process(planted):
    planted("killed")
    with pytest.warns(RuntimeWarning, match="did not end"):
        run()
    next_process()
    planted("good")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    assert served_by() == "triton"
    assert verdicts.load(key()).passed


def test_a_death_is_not_tried_again_where_checks_run_inside(planted, monkeypatch):
    """There it would take the user's process along."""
    planted("killed")
    with pytest.warns(RuntimeWarning, match="did not end"):
        run()
    next_process()
    checks = inside(monkeypatch)
    proving._alone.add(CPU)
    with pytest.warns(RuntimeWarning, match="because 1 of its self-checks did not end"):
        run()
    assert checks == []


FAKE = """
import json, os, sys
from fastbert.testing import verdict_keys, verdicts
import torch
wanted = json.loads(sys.argv[2])
def send(**message):
    os.write(int(sys.argv[1]), (json.dumps(message) + chr(10)).encode())
def begin(op, backend, dtype):
    key = verdict_keys.key_of(op, backend, torch.device(wanted["device"]), getattr(torch, dtype))
    send(begin=[op, backend, dtype], key=verdicts.stem(key))
def end(reason=None, outcome="passed", times=(), broken=False):
    send(reason=reason, outcome=outcome, seconds=0.5, date="now", times=times, broken=broken)
"""


def fake(monkeypatch, code, path):
    """A process without kernels that runs `code`, and notes in a file what it was asked for."""
    note = f"print(json.dumps(wanted), file=open({str(path)!r}, 'a'), flush=True)\n"
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", FAKE + note + code])


ALL_GOOD = "send(ready=True)\nfor unit in wanted['units']:\n begin(*unit)\n end()\n"


def asked(path):
    """What the processes were asked for."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def two_ops(monkeypatch):
    """`triton` has layer_norm and linear, first in the CPU's table."""
    module = fake_backend(monkeypatch)
    module.DTYPES = dict.fromkeys(("layer_norm", "linear"), (torch.float32, torch.bfloat16))
    module.linear_fwd, module.linear_bwd = aten.linear_fwd, aten.linear_bwd
    monkeypatch.setitem(dispatch.TABLE["cpu"], "linear", ("triton", "aten", "reference"))


def test_a_kernel_is_checked_at_its_own_first_use(two_ops, monkeypatch, tmp_path):
    fake(monkeypatch, ALL_GOOD, tmp_path / "asked")
    checks = inside(monkeypatch)
    linear(torch.ones(1, 2), torch.ones(3, 2))
    (first,) = asked(tmp_path / "asked")
    assert first["units"] == [["linear", "triton", "float32"]]
    # not checked before it is used, but compiled in spare time
    assert first["ahead"] == [["layer_norm", "triton", "float32"]]
    assert (first["device"], first["uuid"], first["gpu"], first["jobs"]) == ("cpu", "", None, None)
    run(torch.bfloat16)
    second = asked(tmp_path / "asked")[1]
    assert second["units"] == [["layer_norm", "triton", "bfloat16"]]
    assert second["ahead"] == [["linear", "triton", "bfloat16"]]
    run()
    third = asked(tmp_path / "asked")[2]
    assert (third["units"], third["ahead"]) == ([["layer_norm", "triton", "float32"]], [])
    run()
    assert len(asked(tmp_path / "asked")) == 3
    assert checks == []
    assert served_by() == served_by(torch.bfloat16) == "triton"


# what is left of a process: it serves requests until it gets none
KEPT = (
    "send(ready=True)\nwhile True:\n for unit in wanted['units']:\n  begin(*unit)\n  end()\n"
    " line = sys.stdin.readline()\n if not line: break\n wanted |= json.loads(line)\n"
    " print(line, end='', file=open({path!r}, 'a'))\n"
)


def started(monkeypatch):
    """The processes that are started from now on."""
    found, real = [], subprocess.Popen
    monkeypatch.setattr(
        processes.subprocess,
        "Popen",
        lambda *args, **options: found.append(real(*args, **options)) or found[-1],
    )
    return found


def test_the_process_waits_for_the_next_kernel(two_ops, monkeypatch, tmp_path):
    path = tmp_path / "asked"
    fake(monkeypatch, KEPT.format(path=str(path)), path)
    children, checks = started(monkeypatch), inside(monkeypatch)
    linear(torch.ones(1, 2), torch.ones(3, 2))
    run()
    run(torch.bfloat16)
    (child,) = children
    assert [request["units"] for request in asked(path)] == [
        [["linear", "triton", "float32"]],
        [["layer_norm", "triton", "float32"]],
        [["layer_norm", "triton", "bfloat16"]],
    ]
    assert checks == []
    assert served_by() == served_by(torch.bfloat16) == "triton"
    assert child.poll() is None
    processes.end_kept()
    assert child.poll() is not None


def test_a_process_that_has_gone_meanwhile_is_started_anew(two_ops, monkeypatch, tmp_path):
    path = tmp_path / "asked"
    fake(monkeypatch, KEPT.format(path=str(path)), path)
    children = started(monkeypatch)
    linear(torch.ones(1, 2), torch.ones(3, 2))
    children[0].kill()
    children[0].wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    assert len(children) == 2
    assert served_by() == "triton"
    assert proving._alone == set()


def test_in_other_surroundings_another_process_is_started(two_ops, monkeypatch, tmp_path):
    """Its environment says where verdicts are kept, and which GPUs there are."""
    path = tmp_path / "asked"
    fake(monkeypatch, KEPT.format(path=str(path)), path)
    children = started(monkeypatch)
    linear(torch.ones(1, 2), torch.ones(3, 2))
    monkeypatch.setenv("FASTBERT_CACHE", str(tmp_path / "other"))
    run()
    assert len(children) == 2
    assert children[0].poll() is not None


def test_a_fork_does_not_use_its_parents_process(two_ops, monkeypatch, tmp_path):
    path = tmp_path / "asked"
    fake(monkeypatch, KEPT.format(path=str(path)), path)
    children = started(monkeypatch)
    linear(torch.ones(1, 2), torch.ones(3, 2))
    (kept,) = processes._kept.values()
    kept.owner += 1
    run()
    kept.owner -= 1
    assert len(children) == 2
    assert children[0].poll() is None  # and does not end it
    kept.close()


def test_the_real_process_is_kept_and_ends_when_nothing_is_asked(planted, monkeypatch):
    planted("good")
    children = started(monkeypatch)
    run()
    run(torch.bfloat16)
    assert len(children) == 1
    assert verdicts.load(key()).passed
    assert verdicts.load(key(torch.bfloat16)).passed
    monkeypatch.setattr(processes, "KEPT_SECONDS", 0.01)
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w"):
        monkeypatch.setattr(processes.sys, "stdin", stdin)
        assert processes._next_request() is None


def test_notes_of_compiling_are_logged(two_ops, monkeypatch, tmp_path, caplog):
    code = ALL_GOOD.replace("for unit", "send(compiled=1, of=2)\nsend(note='no room')\nfor unit")
    fake(monkeypatch, code, tmp_path / "asked")
    told = []
    units = processes.checked(CPU, [LAYER_NORM], telling=told.append)
    assert [verdict.passed for _, verdict in units] == [True]
    assert [record.message for record in caplog.records] == ["cpu: no room"]
    assert told == [
        "a process that checks is started",
        "1 of 2 kernels are compiled",
        "layer_norm of triton in float32 is checked",
    ]


def test_a_kernel_with_a_verdict_is_not_checked_again(two_ops, monkeypatch, tmp_path):
    fake(monkeypatch, ALL_GOOD, tmp_path / "asked")
    verdicts.store(key(), Verdict(None))
    linear(torch.ones(1, 2), torch.ones(3, 2))
    (only,) = asked(tmp_path / "asked")
    assert only["units"] == [["linear", "triton", "float32"]]


def test_one_warning_for_each_bad_kernel_when_it_is_used(two_ops, monkeypatch, tmp_path):
    bad = ALL_GOOD.replace("end()", "end(reason='wrong', outcome='failed')")
    fake(monkeypatch, bad, tmp_path / "asked")
    with pytest.warns(RuntimeWarning, match="kernel of 'layer_norm' failed") as caught:
        run()
    assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match="kernel of 'linear' failed") as caught:
        linear(torch.ones(1, 2), torch.ones(3, 2))
    assert len(caught) == 1


CANNOT = {
    "in exclusive mode": "send(cannot='AcceleratorError: CUDA-capable device(s) is/are busy or unavailable')",
    "does not start": "sys.exit('no module named fastbert')",
    "another kernel": "send(ready=True)\nsend(begin=wanted['units'][0], key='layer_norm-triton-float32-0')\n",
}


@pytest.mark.parametrize("why", CANNOT)
def test_where_no_process_can_check_this_one_does(two_ops, monkeypatch, tmp_path, why):
    fake(monkeypatch, CANNOT[why], tmp_path / "asked")
    checks = inside(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
        linear(torch.ones(1, 2), torch.ones(3, 2))
    assert served_by() == "triton"
    assert checks == [("triton", "layer_norm", torch.float32), ("triton", "linear", torch.float32)]
    assert len(asked(tmp_path / "asked")) == 1  # it is not tried again on this device
    assert verdicts.load(key()).passed


def test_where_nothing_can_be_started_this_process_checks(planted, monkeypatch):
    planted("good")
    monkeypatch.setattr(processes, "COMMAND", ["/no/such/program"])
    checks = inside(monkeypatch)
    run()
    assert checks == [("triton", "layer_norm", torch.float32)]
    assert served_by() == "triton"


def test_what_it_cannot_decide_is_decided_here(planted, monkeypatch):
    planted("raise")  # for want of memory, for example
    checks = inside(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    assert checks == [("triton", "layer_norm", torch.float32)]
    assert served_by() == "triton"


def test_times_come_through(planted, monkeypatch, tmp_path):
    times = [["5x96", "forward", 2.0, "aten", 1.0]]
    code = ALL_GOOD.replace("end()", f"end('slower than aten', 'slower', {times})")
    fake(monkeypatch, code, tmp_path / "asked")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    assert served_by() == "aten"
    verdict = proving.known_verdict("triton", "layer_norm", CPU, torch.float32)
    assert (verdict.outcome, verdict.ratio) == ("slower", 2.0)


def test_a_failure_that_another_process_has_found_counts(planted, monkeypatch, tmp_path):
    fake(monkeypatch, ALL_GOOD, tmp_path / "asked")
    units = processes.checked(CPU, [LAYER_NORM])
    receive = processes._Child.receive

    def meanwhile(self, deadline):
        message = receive(self, deadline)
        if message and "outcome" in message:
            verdicts.store(key(), Verdict("wrong"))
        return message

    monkeypatch.setattr(processes._Child, "receive", meanwhile)
    assert [(unit, verdict.reason) for unit, verdict in units] == [(LAYER_NORM, "wrong")]


@pytest.mark.parametrize(
    ("change", "value"),
    [("frozen", True), ("executable", "/usr/sbin/uwsgi"), ("executable", ""), ("executable", None)],
)
def test_programs_that_are_not_python_check_inside(monkeypatch, change, value):
    assert processes.possible(CPU)
    monkeypatch.setattr(sys, change, value, raising=False)
    assert not processes.possible(CPU)


def test_a_process_that_checks_starts_no_other(monkeypatch):
    monkeypatch.setenv("FASTBERT_CHECKING", "1")
    assert not processes.possible(CPU)


def test_only_gpus_are_checked_apart(monkeypatch):
    monkeypatch.undo()
    assert processes.possible(torch.device("cuda", 0))
    assert not processes.possible(CPU)


def test_the_real_process_finds_this_package_and_not_the_users_files(tmp_path, monkeypatch):
    """It is started as users' processes start it; a kernel that needs no check has nothing to do there."""
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with processes._Child(CPU, [Unit("layer_norm", "aten", torch.float32)], lambda: None) as child:
        child.start()
        message = child.receive(time.monotonic() + 60)
    assert message["begin"] == ["layer_norm", "aten", "float32"]
    assert message["key"] == verdicts.stem(verdict_keys.key_of("layer_norm", "aten", CPU, torch.float32))


def test_another_gpu_of_the_same_name_is_not_checked_instead(monkeypatch):
    monkeypatch.setattr(processes, "_uuid", lambda device: "GPU-1")
    with pytest.raises(processes.CannotStart, match="cpu is another device there"):
        list(processes.checked(CPU, [LAYER_NORM]))


@pytest.mark.sweep
def test_it_ends_with_its_parent(tmp_path, cache):
    """Else a kernel that hangs would hold the GPU for ever."""
    planted_kernel = str(ROOT / "tests" / "support" / "planted_kernel.py")
    code = (
        "from fastbert.testing import processes\nimport torch\n"
        "from tests.support import planted_kernel\nplanted_kernel.plant('good')\n"
        f"processes.COMMAND = [{sys.executable!r}, {planted_kernel!r}, 'hang', 'check']\n"
        "list(processes.checked(torch.device('cpu'), "
        "[processes.Unit('layer_norm', 'triton', torch.float32)]))\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env)
    deadline = time.monotonic() + 60
    while not list(cache.glob("*.running")):
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (marker,) = cache.glob("*.running")
    child = json.loads(marker.read_text())["pid"]
    assert child != parent.pid
    parent.kill()
    parent.wait()
    while verdicts._born(child) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert verdicts.load(key()).outcome == "killed"


def test_a_long_wait_is_told_once(planted, monkeypatch):
    planted("slow")
    monkeypatch.setattr(checking, "SLOW_SECONDS", 0.01)
    with pytest.warns(RuntimeWarning, match="kernels are checked on cpu before their first use") as caught:
        run()
    assert len(caught) == 1
    assert "fastbert warmup" in str(caught[0].message)


@pytest.mark.sweep
def test_ctrl_c_ends_the_process_and_blames_no_kernel(planted, monkeypatch, cache):
    planted("hang")
    receive, pids = processes._Child.receive, []

    def interrupted(self, deadline):
        if self.begun is None:
            return receive(self, deadline)
        while not any(cache.glob("*.running")):
            time.sleep(0.05)
        pids.append(self.process.pid)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(processes._Child, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert verdicts._born(pids[0]) is None
    assert list(cache.iterdir()) == []
    planted("good")
    run()
    assert served_by() == "triton"


def test_layer_norm_is_right_whoever_serves(planted):
    planted("good")
    x = torch.randn(3, 8)
    y = layer_norm(x, torch.ones(8))
    assert torch.allclose(y, torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)


class Compiler:
    """In the place of `compiling.Compiler`: notes what it is asked for."""

    def __init__(self):
        self.calls = []

    def ask(self, units, ahead):
        self.calls.append(("ask", units, ahead))

    def wait(self, units, progress):
        self.calls.append(("wait", list(units)))
        progress(1, 2)
        return ["one kernel was not compiled"]

    def hold(self, whether):
        self.calls.append(("hold", whether))


def test_kernels_are_compiled_before_the_first_check(planted, monkeypatch):
    """And while a check runs, which takes times, nothing is begun that is not needed yet."""
    planted("good")
    compiler, sent = Compiler(), []
    monkeypatch.setattr(
        checking,
        "check",
        lambda *args: compiler.calls.append(("check", args[1])) or Verdict(None, date="now"),
    )
    units = [["layer_norm", "triton", "float32"], ["linear", "cuda", "float32"]]
    assert processes._check_all(units, CPU, compiler, sent.append)
    mine = units[:1]  # Triton compiles no other
    assert compiler.calls == [
        ("wait", mine),
        ("hold", True),
        ("check", "layer_norm"),
        ("check", "linear"),
        ("hold", False),
    ]
    assert sent[:2] == [{"compiled": 1, "of": 2}, {"note": "one kernel was not compiled"}]
    assert [message["begin"] for message in sent if "begin" in message] == units
    asked = processes._compiled_by_triton({"units": units, "ahead": units[::-1]})
    assert asked == [mine, mine]


def test_where_the_gpu_cannot_be_used_what_compiles_ends_too(monkeypatch, tmp_path):
    from fastbert.testing import stand_in

    device = torch.device("cuda", 0)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    facts = stand_in.Facts("NVIDIA H100 80GB HBM3", 9, 0, 132)
    monkeypatch.setattr(stand_in, "facts_of", lambda device: facts)
    monkeypatch.setattr(processes, "_uuid", lambda device: "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    children = started(monkeypatch)
    with pytest.raises(processes.CannotStart, match=r"CUDA|cuda|NVIDIA"):
        list(processes.checked(device, [Unit("attention", "triton", torch.float16)], jobs=2))
    group = children[0].pid
    end = time.monotonic() + 20
    while group in (_group(path) for path in Path("/proc").glob("[0-9]*")) and time.monotonic() < end:
        time.sleep(0.1)
    assert group not in [_group(path) for path in Path("/proc").glob("[0-9]*")]


def _group(process):
    """The process group of a process that runs."""
    try:
        state, _, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state == "Z" else int(group)
