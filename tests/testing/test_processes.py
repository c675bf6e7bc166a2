"""First self-checks run in a process of their own: whatever a kernel does there, this process survives."""

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
from fastbert.ops.linear import linear
from fastbert.runtime import dispatch
from fastbert.runtime.table import TABLE
from fastbert.testing import checking, proving, serving, verdict_keys, verdicts
from fastbert.testing.verdict_keys import Unit
from fastbert.testing.verdicts import Verdict
from tests.support.fake_backends import fake_backend, next_process, run
from tests.support.processes import runs

pytestmark = pytest.mark.usefixtures("apart")

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LAYER_NORM = Unit("layer_norm", "triton", torch.float32)
LINEAR = Unit("linear", "triton", torch.float32)
ALL_GOOD = "send(ready=True)\nfor unit in units: end()\n"


def inside(monkeypatch):
    """Kernels that are checked in this process."""
    seen, real = [], checking.check
    monkeypatch.setattr(checking, "check", lambda unit, device: seen.append(unit) or real(unit, device))
    return seen


def served_by(dtype=torch.float32):
    return dispatch.serving_backend("layer_norm_fwd", CPU, dtype)


def key(dtype=torch.float32):
    return verdict_keys.key_of(Unit("layer_norm", "triton", dtype), CPU)


@pytest.mark.sweep
def test_a_good_kernel_serves_and_is_not_run_here_before(planted, monkeypatch):
    served, checks = planted("good"), inside(monkeypatch)
    run()
    assert (served, checks) == ([1], [])
    assert served_by() == "triton"
    assert verdicts.load(key()).passed


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "and .*: its process ended by SIGSEGV"),
        ("os._exit(3)", "its process ended by status 3"),
    ],
)
def test_whatever_it_does_this_process_goes_on(planted, fake, monkeypatch, fault, text):
    served, checks = planted("good"), inside(monkeypatch)
    fake(f"import os, signal\nsend(ready=True)\n{fault}\n")
    with pytest.warns(RuntimeWarning, match=f"failed its self-check on cpu in float32 .*{text}") as caught:
        y = run()
    assert len(caught) == 1
    with warnings.catch_warnings(action="error"):
        run()
    assert torch.equal(y, torch.zeros(2, 16))
    assert served == checks == []
    assert served_by() == "aten"
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
        next_process()
        (choice,) = (c for c in serving.choices("cpu") if (c.op, c.dtype) == ("layer_norm", "float32"))
        last = deaths == proving.MOST_DEATHS
        assert choice.why == f"triton: {verdicts.DIED if last else 'to be self-checked at first use'}"
    planted("good")
    with pytest.warns(RuntimeWarning, match="did not end"):
        run()  # enough is enough
    assert checks == []
    verdicts.forget(key())
    next_process()
    run()
    assert served_by() == "triton"


def test_a_death_is_not_tried_again_where_checks_run_inside(planted, monkeypatch):
    """There it would take the user's process along."""
    planted("good")
    verdicts.attempt(key())
    monkeypatch.setattr(checking, "COMMAND", ["/no/such/program"])
    checks = inside(monkeypatch)
    for _ in range(2):  # found out now, and known before
        with pytest.warns(RuntimeWarning, match="because 1 of its self-checks did not end"):
            run()
        next_process()
        proving._told.clear()
    assert checks == []


# --- one process for all kernels of a dtype -----------------------------------------------------------------


def asked(path):
    """The units of each process that was started."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [[unit[:3] for unit in json.loads(line)] for line in lines]


@pytest.fixture
def two_ops(monkeypatch):
    """`triton` has layer_norm and linear, first in the CPU's table."""
    module = fake_backend(monkeypatch)
    module.DTYPES = dict.fromkeys(("layer_norm", "linear"), (torch.float32, torch.bfloat16))
    module.linear_fwd, module.linear_bwd = aten.linear_fwd, aten.linear_bwd
    monkeypatch.setitem(TABLE["cpu"], "linear", ("triton", "aten", "reference"))


def use_linear():
    return linear(torch.ones(1, 2), torch.ones(3, 2))


def test_one_process_checks_all_kernels_of_the_dtype(two_ops, fake, monkeypatch):
    path, checks = fake(ALL_GOOD), inside(monkeypatch)
    use_linear()
    run()
    # the kernel that is waited for comes first
    assert asked(path) == [[["linear", "triton", "float32"], ["layer_norm", "triton", "float32"]]]
    run(torch.bfloat16)
    assert asked(path)[1:] == [[["layer_norm", "triton", "bfloat16"], ["linear", "triton", "bfloat16"]]]
    assert checks == []
    assert served_by() == served_by(torch.bfloat16) == "triton"
    next_process()
    verdicts.store(verdict_keys.key_of(Unit("linear", "triton", torch.float32), CPU), Verdict(None))
    verdicts.attempt(key())  # killed once, so it is due
    run()
    assert asked(path)[2:] == [[["layer_norm", "triton", "float32"]]]
    assert served_by() == "triton"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("sys.exit('out of it')", "its process ended by status 1: out of it"),
        ("end('broke the context', 'failed', broken=True)", "broke the context"),
        ("time.sleep(60)", "no verdict within 1 s: it hangs"),
    ],
)
def test_what_ends_the_process_costs_one_kernel(two_ops, fake, fault, text):
    path = fake(f"send(ready=True)\nif len(units) == 2:\n {fault}\nelse: end()\n")
    told = []
    found = checking.checked(CPU, [LINEAR, LAYER_NORM], seconds=1.0, telling=told.append)
    assert [(unit, verdict.reason) for unit, verdict in found] == [(LINEAR, text), (LAYER_NORM, None)]
    assert [len(units) for units in asked(path)] == [2, 1]
    assert told == [
        *("a process that checks is started", "linear of triton in float32 is checked"),
        *("a process that checks is started", "layer_norm of triton in float32 is checked"),
    ]


def test_one_warning_for_each_bad_kernel_when_it_is_used(two_ops, fake):
    fake(ALL_GOOD.replace("end()", "end('wrong', 'failed')"))
    for op, use in (("layer_norm", run), ("linear", use_linear)):
        with pytest.warns(RuntimeWarning, match=f"kernel of '{op}' failed") as caught:
            use()
        assert len(caught) == 1


# what the process does -> how many are started for two kernels: where it cannot start, it is not tried again
CANNOT = {
    "send(cannot='AcceleratorError: CUDA-capable device(s) is/are busy or unavailable')": 1,
    "sys.exit('no module named fastbert')": 1,
    "send(cannot='it would check layer_norm-triton-float32-0')": 1,
    "send(ready=True)\nfor unit in units: end('RuntimeError: no memory', 'undecided')": 2,
    "": 0,  # nothing can be started
}


@pytest.mark.parametrize("code", CANNOT)
def test_where_no_process_can_decide_this_one_does(two_ops, fake, monkeypatch, code):
    path, checks = fake(code), inside(monkeypatch)
    if not code:
        monkeypatch.setattr(checking, "COMMAND", ["/no/such/program"])
    with warnings.catch_warnings(action="error"):
        run()
        use_linear()
    assert served_by() == "triton"
    assert checks == [LAYER_NORM, LINEAR]
    assert len(asked(path)) == CANNOT[code]
    assert verdicts.load(key()).passed


# --- the process --------------------------------------------------------------------------------------------


def test_where_a_process_of_its_own_can_check(monkeypatch):
    """Not from programs that are not Python, from a process that checks, or for a CPU."""
    assert checking.possible(CPU)
    for name, value in (("frozen", True), ("executable", "/usr/sbin/uwsgi"), ("executable", None)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, value, raising=False)
            assert not checking.possible(CPU)
    with monkeypatch.context() as patch:
        patch.setenv("FASTBERT_CHECKING", "1")
        assert not checking.possible(CPU)
    monkeypatch.undo()
    assert checking.possible(torch.device("cuda", 0))
    assert not checking.possible(CPU)


@pytest.mark.sweep
def test_the_real_process_finds_this_package_and_not_the_users_files(tmp_path, monkeypatch):
    """It is started as users' processes start it."""
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    unit = Unit("layer_norm", "aten", torch.float32)
    assert [(each, verdict.passed) for each, verdict in checking.checked(CPU, [unit])] == [(unit, True)]


@pytest.fixture
def answer(monkeypatch, capfd):
    """What the process that checks prints, here without a process of its own."""
    monkeypatch.setattr(checking, "_end_with", lambda parent: None)

    def ask(count=1, uuid=""):
        unit = ["layer_norm", "triton", "float32", verdicts.stem(key())]
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup2", lambda *args: None)
            checking.main(json.dumps({"device": "cpu", "uuid": uuid, "units": [unit] * count}))
        return capfd.readouterr().out.splitlines()

    return ask


def test_what_it_has_found_counts_for_the_next_kernel_without_a_folder(monkeypatch, answer):
    """Which is timed beside it."""
    monkeypatch.setenv("FASTBERT_CACHE", "")
    seen = []
    found = lambda *args: (seen.append(verdicts.known(LAYER_NORM, CPU)) or Verdict(None), False)  # noqa: E731
    monkeypatch.setattr(checking, "_found", found)
    assert answer(count=2)[0] == '{"ready": true}'
    assert [each and each.passed for each in seen] == [None, True]


def test_another_gpu_or_other_sources_are_not_checked_instead(monkeypatch, answer):
    """What it sees may be another device of the same name, or another tree."""
    monkeypatch.setattr(checking, "_found", lambda *args: pytest.fail("checked"))
    assert answer(uuid="GPU-1") == ['{"cannot": "cpu is another device there"}']
    stem = verdicts.stem(key())
    monkeypatch.setattr(verdicts, "stem", lambda key, real=[stem, "its own"]: real.pop(0))
    assert answer() == ['{"cannot": "it would check its own"}']


@pytest.mark.sweep
def test_it_ends_with_its_parent(cache):
    """Else a kernel that hangs would hold the GPU for ever."""
    planted_kernel = str(ROOT / "tests" / "support" / "planted_kernel.py")
    code = (
        "from fastbert.testing import checking\nimport torch\n"
        "from fastbert.testing.verdict_keys import Unit\n"
        "from tests.support import planted_kernel\nplanted_kernel.plant('good')\n"
        f"checking.COMMAND = [{sys.executable!r}, {planted_kernel!r}, 'hang', 'check']\n"
        "def telling(text):\n"
        "    import gc; print(*(o.process.pid for o in gc.get_objects() if type(o) is checking._Worker),"
        " flush=True)\n"
        "units = [Unit('layer_norm', 'triton', torch.float32)]\n"
        "list(checking.checked(torch.device('cpu'), units, telling=telling))\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "\n"
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + 60
    while not list(cache.glob("*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.communicate()
    while runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert verdicts.load(key()).outcome == "killed"


def test_a_long_wait_is_told_once(planted, fake, monkeypatch):
    planted("good")
    fake("time.sleep(2.5)\n" + ALL_GOOD)
    monkeypatch.setattr(checking, "SLOW_SECONDS", 0.01)
    with pytest.warns(RuntimeWarning, match="kernels are checked on cpu before their first use") as caught:
        run()
    assert len(caught) == 1
    assert "fastbert warmup" in str(caught[0].message)


@pytest.mark.sweep
def test_ctrl_c_ends_the_process_and_blames_no_kernel(planted, monkeypatch, cache):
    planted("hang")
    receive, pids = checking._Worker.receive, []

    def interrupted(self, deadline):
        if not pids:
            pids.append(self.process.pid)
            return receive(self, deadline)
        while not any(cache.glob("*.json")):
            time.sleep(0.05)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checking._Worker, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert not runs(pids[0])
    assert list(cache.iterdir()) == []
    planted("good")
    run()
    assert served_by() == "triton"
