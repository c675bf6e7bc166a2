"""`fastbert warmup`: verdicts of all kernels, whatever one of them does to its process; `fastbert env`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from fastbert.cli import env as cli_env
from fastbert.cli import main as cli
from fastbert.cli import warmup as cli_warmup
from fastbert.runtime import dispatch
from fastbert.testing import processes, proving, serving, verdict_keys, verdicts, warmup
from fastbert.testing.verdicts import Time, Verdict

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def planted(monkeypatch):
    """A function that plants a kernel in checking processes; this process has its line of the table."""
    import types

    module = types.ModuleType("triton")
    module.DTYPES = {"layer_norm": FLOATS}
    module.available = lambda device_type: None
    real = dispatch.backend_module
    monkeypatch.setattr(dispatch, "backend_module", lambda name: module if name == "triton" else real(name))
    monkeypatch.setitem(dispatch.TABLE["cpu"], "layer_norm", ("triton", "aten", "reference"))

    def plant(behaviours):
        command = [sys.executable, str(ROOT / "tests" / "support" / "planted_kernel.py"), behaviours, "check"]
        monkeypatch.setattr(processes, "COMMAND", command)

    return plant


@pytest.fixture
def run(capsys):
    """Call the command in this process, and return its standard output."""

    def call(*arguments, status=0):
        code = cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert code == status, (out, err)
        return out

    return call


def key(dtype):
    return verdict_keys.key_of("layer_norm", "triton", CPU, dtype)


def rows(report):
    return {row["dtype"]: row for row in json.loads(report)["rows"]}


def leftovers(cache):
    return [path.name for path in cache.iterdir() if path.suffix != ".json"]


# --- a CPU --------------------------------------------------------------------------------------------------


def test_on_a_cpu_nothing_needs_a_check(run, cache):
    text = run("warmup", "--device", "cpu")
    assert text == "nothing needs a check on cpu: only GPU kernels are checked before they serve\n"
    report = json.loads(run("warmup", "--device", "cpu", "--json"))
    assert report == {"device": "cpu", "verdicts": str(cache), "passed": True, "rows": [], "serving": []}
    assert not cache.exists()


def test_what_a_gpu_needs(monkeypatch):
    from fastbert.backends import cuda, triton

    for module in (triton, cuda):
        monkeypatch.setattr(module, "available", lambda device_type: None)
    found = {}
    for op, _, dtypes in warmup.wanted(torch.device("cuda", 0)):
        found[op] = found.get(op, set()) | set(dtypes)
    wanted = [(op, backend) for op, backend, _ in warmup.wanted(torch.device("cuda", 0))]
    assert {op for op, backend in wanted if backend == "cuda"} == set(cuda.DTYPES)
    # each behind the kernel beside which it is timed
    assert all(
        ("cuda" in pair) is False or wanted.index((pair[0], "triton")) < i for i, pair in enumerate(wanted)
    )
    assert found["attention"] == found["layer_norm"] == set(FLOATS)
    assert found["linear"] == {torch.bfloat16, torch.float16}  # as the table has it
    assert found["packing"] == set(triton.DTYPES["packing"])
    assert "linear_int8" not in found
    (only,) = warmup.wanted(torch.device("cuda", 0), ["embedding"], [torch.float16])
    assert only == ("embedding", "triton", [torch.float16])


def test_why_nothing_needs_a_check_on_a_gpu(monkeypatch):
    from fastbert.backends import cuda, triton

    monkeypatch.setattr(triton, "available", lambda device_type: "Triton is not installed")
    monkeypatch.setattr(cuda, "available", lambda device_type: "was built without CUDA")
    text = cli_warmup.why_none(torch.device("cuda", 0), dispatch.OPS)
    assert text == "triton: Triton is not installed; cuda: was built without CUDA"
    assert (
        cli_warmup.why_none(torch.device("cuda", 0), ["linear_int8"])
        == "no GPU kernel of theirs is in the table"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--timeout", "0"), "--timeout 0.0: expected a number of seconds above 0"),
        (("--timeout", "nan"), "--timeout nan"),
        (("--jobs", "0"), "--jobs 0: expected a number of processes above 0"),
        (("--device", "tpu"), "--device tpu"),
        (("--dtype", "int4"), "invalid choice: 'int4'"),
    ],
)
def test_mistakes_in_the_call(capsys, arguments, message):
    assert cli.main(["warmup", "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


# --- verdicts -----------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_whatever_one_kernel_does_the_others_are_checked(planted, run, cache):
    planted("float32=wrong,bfloat16=segv,float16=good")
    text = run("warmup", "--device", "cpu", status=1)
    head, columns, *lines, _, title, first, second, third, _, last = text.splitlines()
    assert head == f"verdicts on cpu are kept in {cache}"
    assert columns.split() == ["op", "backend", "dtype", "ms", "verdict"]
    assert [line.split()[:4] for line in lines] == [
        [f"{i}/3", "layer_norm", "triton", str(dtype).removeprefix("torch.")]
        for i, dtype in enumerate(FLOATS, 1)
    ]
    assert title.split() == ["op", "dtype", "served", "by", "why"]
    assert first.split()[:4] == ["layer_norm", "float32", "aten", "triton:"]
    assert second.split()[:3] == ["layer_norm", "bfloat16", "aten"]
    assert "SIGSEGV" in second
    assert third.split() == ["layer_norm", "float16", "triton", "first", "in", "the", "table"]
    assert "FAIL: 5x96 y: max error" in lines[0]
    assert "FAIL: its process ended by SIGSEGV" in lines[1]
    assert lines[2].endswith("pass")
    assert last == "3 kernels on cpu, 2 failed"
    assert leftovers(cache) == []
    assert [verdicts.load(key(dtype)).passed for dtype in FLOATS] == [False, False, True]
    monkey = processes.COMMAND
    processes.COMMAND = ["/no/such/program"]  # nothing is checked again
    try:
        kept = rows(run("warmup", "--device", "cpu", "--json", status=1))
    finally:
        processes.COMMAND = monkey
    assert [row["kept"] for row in kept.values()] == [True] * 3
    assert [row["outcome"] for row in kept.values()] == ["failed", "failed", "passed"]
    assert "SIGSEGV" in kept["bfloat16"]["reason"]
    assert kept["float16"]["reason"] is None
    assert kept["float16"]["date"]
    with pytest.warns(RuntimeWarning, match="SIGSEGV"):  # and first use reads them
        assert not proving._verdict("triton", "layer_norm", CPU, torch.bfloat16).passed
    proving._verdicts.clear()


@pytest.mark.sweep
def test_a_hang_is_ended_and_kept_and_again_checks_anew(planted, run, cache):
    planted("bfloat16=hang,float32=good")
    begin = time.monotonic()
    chosen = ("warmup", "--device", "cpu", "--dtype", "float32", "--dtype", "bfloat16", "--json")
    report = rows(run(*chosen, "--timeout", 5, status=1))
    assert time.monotonic() - begin < 120
    assert report["float32"]["passed"]
    assert report["bfloat16"]["reason"] == "no verdict within 5 s: it hangs"
    assert leftovers(cache) == []
    assert "it hangs" in verdicts.load(key(torch.bfloat16)).reason
    planted("good")
    again = rows(run(*chosen, "--again"))
    assert [row["passed"] for row in again.values()] == [True, True]
    assert not any(row["kept"] for row in again.values())
    assert verdicts.load(key(torch.bfloat16)).passed


def test_an_error_that_may_be_the_machines_is_shown_and_not_kept(planted, run):
    planted("raise")
    report = rows(run("warmup", "--device", "cpu", "--dtype", "float16", "--json", status=1))
    assert report["float16"]["reason"] == "RuntimeError: no compiler here"
    assert verdicts.load(key(torch.float16)) is None


def test_a_slower_kernel_is_no_failure_and_its_times_are_shown(planted, run, monkeypatch):
    planted("good")
    fake(
        monkeypatch,
        "send(ready=True)\n"
        "for unit in units:\n"
        "    begin(unit)\n"
        "    ms = 3.0 if unit[2] == 'float16' else 0.5\n"
        "    reason = 'slower than aten: 3.00 x its time' if ms > 1 else None\n"
        "    end(reason, 'slower' if reason else None, [['5x96', 'forward', ms, 'aten', 1.0]])\n",
    )
    lines = run("warmup", "--device", "cpu").splitlines()
    assert lines[2].endswith("pass, 0.50 x the time of aten")
    assert lines[4].endswith("slower: slower than aten: 3.00 x its time")
    assert lines[-1] == "3 kernels on cpu, 0 failed, 1 slower than the next backend"
    report = json.loads(run("warmup", "--device", "cpu", "--json"))
    assert report["passed"]
    slow = report["rows"][2]
    assert (slow["passed"], slow["outcome"]) == (False, "slower")
    assert slow["times"] == [
        {"case": "5x96", "passes": "forward", "ms": 3.0, "other": "aten", "other_ms": 1.0}
        | {"host_ms": None, "other_host_ms": None}
    ]


def test_a_killed_check_fails_the_command(planted, run, cache):
    planted("float32=killed,bfloat16=good")
    chosen = ("warmup", "--device", "cpu", "--dtype", "float32", "--dtype", "bfloat16")
    lines = run(*chosen, status=1).splitlines()
    assert f"KILLED: {verdicts.DIED}" in lines[2]
    assert lines[3].endswith("pass")
    assert verdicts.load(key(torch.float32)).deaths == 1
    assert leftovers(cache) == []


def test_a_process_that_never_begins(planted, monkeypatch, cache):
    planted("good")
    fake(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(processes, "START_SECONDS", 1.0)
    found = list(warmup.run(CPU))
    assert [row.reason for row in found] == ["not checked: it has not begun within 1 s"] * 3
    assert not cache.exists()


def test_a_process_that_never_reaches_a_kernel(planted, run, monkeypatch, cache):
    planted("good")
    code = "import sys; print('first'); sys.exit('no such module')"
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", code])
    report = rows(run("warmup", "--device", "cpu", "--json", status=1))
    assert set(report) == {"float32", "bfloat16", "float16"}
    for row in report.values():
        assert row["reason"] == "not checked: its process ended by status 1: no such module"
    assert not cache.exists()


FAKE = """
import json, os, sys
def send(**message):
    os.write(int(sys.argv[1]), (json.dumps(message) + chr(10)).encode())
def begin(unit):
    send(begin=unit, key=keys[unit[2]])
def end(reason=None, outcome=None, times=(), broken=False):
    outcome = outcome or ("failed" if reason else "passed")
    send(reason=reason, outcome=outcome, seconds=0.5, date="now", times=times, broken=broken)
units = json.loads(sys.argv[2])["units"]
"""


def fake(monkeypatch, code):
    """A process without kernels that runs `code`."""
    keys = {str(dtype).removeprefix("torch."): verdicts.stem(key(dtype)) for dtype in FLOATS}
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", f"{FAKE}\nkeys = {keys}\n{code}"])


def test_a_broken_context_costs_its_dtype_only(planted, monkeypatch):
    planted("good")
    fake(
        monkeypatch,
        "send(ready=True)\n"
        "broken = units[0][2] == 'bfloat16'\n"
        "begin(units[0])\n"
        "end(reason='broke the context' if broken else None, broken=broken)\n",
    )
    found = list(warmup.run(CPU))
    assert [row.dtype for row in found] == ["float32", "bfloat16", "float16"]
    assert [row.passed for row in found] == [True, False, True]
    assert found[1].reason == "broke the context"
    assert found[1].seconds == 0.5


def test_a_stopped_warmup_blames_no_kernel(planted, monkeypatch, cache):
    planted("hang")
    receive, seen = processes._Child.receive, []

    def interrupted(self, deadline):
        if len(seen) == 2:
            while not any(cache.glob("*.running")):
                time.sleep(0.05)
            seen.append(self.process.pid)
            raise KeyboardInterrupt
        seen.append(receive(self, deadline))
        return seen[-1]

    monkeypatch.setattr(processes._Child, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(warmup.run(CPU, dtypes=[torch.float32]))
    assert seen[0] == {"ready": True}
    assert seen[1]["begin"] == ["layer_norm", "triton", "float32"]
    assert verdicts._born(seen[2]) is None  # it has been ended
    assert list(cache.iterdir()) == []


def test_without_a_folder_verdicts_are_shown_only(planted, run, monkeypatch):
    planted("good")
    monkeypatch.setenv("FASTBERT_CACHE", "")
    fake(monkeypatch, "send(ready=True)\nfor unit in units:\n begin(unit)\n end()\n")
    text = run("warmup", "--device", "cpu")
    assert text.startswith("verdicts are not kept: FASTBERT_CACHE=\n")
    assert text.endswith("3 kernels on cpu, 0 failed\n")


# --- env ----------------------------------------------------------------------------------------------------


def test_env_on_a_cpu_says_that_there_are_no_gpu_kernels(run, cache):
    report = json.loads(run("env", "--json"))
    assert report["verdicts"] == str(cache)
    if not torch.cuda.is_available():
        assert report["gpu_kernels"] == []
        assert f"GPU kernels (verdicts in {cache})\n  no GPU to run them\n" in run("env")


def test_cuda_without_an_index_is_the_current_gpu(run, monkeypatch):
    devices = []
    monkeypatch.setattr(cli_warmup, "device_of", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(warmup, "wanted", lambda *a: [])
    monkeypatch.setattr(warmup, "run", lambda device, *a, **k: devices.append(device) or iter(()))
    run("warmup", "--json")
    assert devices == [torch.device("cuda", 3)]


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU with everything that `proofs` reads."""
    from fastbert.backends import cuda, triton

    monkeypatch.setattr(triton, "available", lambda device_type: None)
    monkeypatch.setattr(cuda, "available", lambda device_type: "was built without CUDA")
    monkeypatch.setattr(verdict_keys, "_device_facts", lambda device: ("NVIDIA H200", "9.0", "13000 580.65"))
    return torch.device("cuda", 0)


def proofs(gpu, results=None):
    return {(p.op, p.backend, p.dtype): (p.state, p.detail) for p in serving.proofs(gpu, results)}


def test_what_is_known_of_each_kernel(gpu, tmp_path):
    def keep(op, dtype, reason, **facts):
        verdict = Verdict(reason, date="2026-01-01", **facts)
        verdicts.store(verdict_keys.key_of(op, "triton", gpu, dtype), verdict)

    keep("layer_norm", torch.float32, None)
    keep("layer_norm", torch.bfloat16, "y: max error")
    times = (Time("5x96", "forward", 1.0, "aten", 2.0),)
    keep("packing", torch.float32, None, times=times)
    keep("packing", torch.bfloat16, "slower than aten: 2.00 x its time", outcome="slower")
    keep("pooling", torch.float32, "died", outcome="killed", deaths=1)
    keep("pooling", torch.bfloat16, "died", outcome="killed", deaths=proving.MOST_DEATHS)
    results = tmp_path / "bench" / "results"
    checks = results / "nvidia-h100" / "checks.json"
    checks.parent.mkdir(parents=True)
    names = ["attention-triton-bf16-a", "attention-triton-bf16-b", "attention-triton-fp16-a"]
    good = [{"step": "correctness", "name": name, "status": "ok"} for name in names]
    bad = [{"step": "correctness", "name": "attention-triton-fp16-b", "status": "failed"}]
    other = [{"step": "determinism", "name": "embedding-triton-bf16", "status": "ok"}]
    crashed = [{"step": "correctness", "name": "linear-triton-bf16", "status": "crashed"}]
    data = {"environment": {"compute_capability": "9.0"}, "rows": good + bad + other + crashed}
    checks.write_text(json.dumps(data))
    found = proofs(gpu, results)
    assert found["layer_norm", "triton", "float32"] == ("proven here", "2026-01-01")
    assert found["layer_norm", "triton", "bfloat16"] == ("failed here", "y: max error")
    assert found["layer_norm", "triton", "float16"] == ("unverified", "checked at first use")
    assert found["packing", "triton", "float32"] == ("proven here", "2026-01-01, 0.50 x the time of aten")
    assert found["packing", "triton", "bfloat16"] == ("slower here", "slower than aten: 2.00 x its time")
    assert found["pooling", "triton", "float32"] == ("unverified", "checked at first use again: died")
    assert found["pooling", "triton", "bfloat16"] == ("killed here", "died")
    (row,) = (
        p for p in serving.proofs(gpu) if (p.op, p.backend, p.dtype) == ("packing", "triton", "float32")
    )
    assert row.times == times
    elsewhere = "proven elsewhere", "bench/results/nvidia-h100/checks.json"
    assert found["attention", "triton", "bfloat16"] == elsewhere
    assert found["attention", "triton", "float16"][0] == "unverified"  # one row is bad
    assert found["attention", "triton", "float32"][0] == "unverified"  # no row
    assert found["embedding", "triton", "bfloat16"][0] == "unverified"  # not its correctness
    assert found["linear", "triton", "bfloat16"][0] == "unverified"
    assert found["linear", "triton", "float32"] == ("unverified", "not in the table: use_backend reaches it")
    assert found["layer_norm", "cuda", "float32"] == ("cannot run here", "was built without CUDA")
    data["environment"]["compute_capability"] = "8.0"
    assert proofs(gpu)["attention", "triton", "bfloat16"][0] == "unverified"
    checks.write_text(json.dumps(data))
    assert proofs(gpu, results)["attention", "triton", "bfloat16"][0] == "unverified"


def test_env_shows_them(gpu, run, monkeypatch):
    environment = cli_env.environment()
    environment["gpu_kernels"] = [vars(row) for row in serving.proofs(gpu)]
    monkeypatch.setattr(cli_env, "environment", lambda: environment)
    lines = [" ".join(line.split()) for line in run("env").splitlines()]
    assert "op device dtype backend state detail" in lines
    assert "attention cuda:0 bfloat16 triton unverified checked at first use" in lines
