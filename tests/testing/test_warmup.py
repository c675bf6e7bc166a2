"""`fastbert warmup`: verdicts of all kernels, whatever one of them does to its process; `fastbert env`."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from fastbert.cli import env as cli_env
from fastbert.cli import main as cli
from fastbert.cli import warmup as cli_warmup
from fastbert.runtime import dispatch
from fastbert.testing import checking, proving, serving, verdict_keys, verdicts
from fastbert.testing.verdict_keys import Unit

pytestmark = pytest.mark.usefixtures("nothing_known")

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
    return verdict_keys.key_of(Unit("layer_norm", "triton", dtype), CPU)


def rows(report):
    return {row["dtype"]: row for row in json.loads(report)["rows"]}


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
    found, units = {}, proving.to_check(torch.device("cuda", 0))
    for op, _, dtype in units:
        found.setdefault(op, set()).add(dtype)
    wanted = list(dict.fromkeys((op, backend) for op, backend, _ in units))
    assert {op for op, backend in wanted if backend == "cuda"} == set(cuda.DTYPES)
    # each behind the kernel beside which it is timed
    both = [op for op, backend in wanted if backend == "cuda" and op in triton.DTYPES]
    assert all(wanted.index((op, "triton")) < wanted.index((op, "cuda")) for op in both)
    assert found["attention"] == found["layer_norm"] == set(FLOATS)
    assert found["linear"] == {torch.bfloat16, torch.float16}  # as the table has it
    assert found["packing"] == set(triton.DTYPES["packing"])
    assert found["linear_fp8"] == {torch.bfloat16}
    assert found["attention_received"] == set(FLOATS)
    (only,) = proving.to_check(torch.device("cuda", 0), ["embedding"], [torch.float16])
    assert only == ("embedding", "triton", torch.float16)
    for module, why in ((triton, "Triton is not installed"), (cuda, "was built without CUDA")):
        monkeypatch.setattr(module, "available", lambda device_type, why=why: why)
    text = "triton: Triton is not installed; cuda: was built without CUDA"
    assert cli_warmup.why_none(torch.device("cuda", 0), dispatch.OPS) == text
    none = "these ops have no GPU kernel in the table"
    assert cli_warmup.why_none(torch.device("cuda", 0), ["linear_distillation"]) == none


def test_mistakes_in_the_call(capsys):
    for option, value, message in (
        ("--timeout", "0", "--timeout 0.0: expected a number of seconds above 0"),
        ("--timeout", "nan", "--timeout nan"),
        ("--device", "tpu", "--device tpu"),
        ("--dtype", "int4", "invalid choice: 'int4'"),
    ):
        assert cli.main(["warmup", "--device", "cpu", option, value]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err


# --- verdicts -----------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_whatever_one_kernel_does_the_others_are_checked(planted, run, cache, monkeypatch):
    planted("float32=killed,bfloat16=hang,float16=good")
    report = rows(run("warmup", "--device", "cpu", "--json", "--timeout", 5, status=1))
    assert [row["outcome"] for row in report.values()] == ["killed", "failed", "passed"]
    assert verdicts.load(key(torch.float32)).deaths == 1
    assert report["bfloat16"]["reason"] == "no verdict within 5 s: it hangs"
    assert "it hangs" in verdicts.load(key(torch.bfloat16)).reason
    planted("float32=wrong,bfloat16=segv,float16=good")
    text = run("warmup", "--device", "cpu", "--again", status=1)
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
    assert [verdicts.load(key(dtype)).passed for dtype in FLOATS] == [False, False, True]
    monkeypatch.setattr(checking, "COMMAND", ["/no/such/program"])  # nothing is checked again
    kept = rows(run("warmup", "--device", "cpu", "--json", status=1))
    assert [row["kept"] for row in kept.values()] == [True] * 3
    assert [row["outcome"] for row in kept.values()] == ["failed", "failed", "passed"]
    assert "SIGSEGV" in kept["bfloat16"]["reason"]
    assert kept["float16"]["reason"] is None
    assert kept["float16"]["date"]
    with pytest.warns(RuntimeWarning, match="SIGSEGV"):  # and first use reads them
        assert not proving.is_proven("triton", "layer_norm", CPU, torch.bfloat16)


def test_an_error_that_may_be_the_machines_is_shown_and_not_kept(planted, run, fake):
    fake("send(ready=True)\nend('RuntimeError: no compiler here', 'undecided')\n")
    report = rows(run("warmup", "--device", "cpu", "--dtype", "float16", "--json", status=1))
    assert report["float16"]["reason"] == "RuntimeError: no compiler here"
    assert verdicts.load(key(torch.float16)) is None


def test_a_slower_kernel_is_no_failure_and_its_times_are_shown(planted, run, fake):
    fake(
        "send(ready=True)\n"
        "for unit in units:\n"
        "    ms = 3.0 if unit[2] == 'float16' else 0.5\n"
        "    reason = 'slower than aten: 3.00 x its time' if ms > 1 else None\n"
        "    end(reason, 'slower' if reason else 'passed', [['5x96', 'forward', ms, 'aten', 1.0]])\n"
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


def test_a_process_that_never_reaches_a_kernel(planted, run, fake, monkeypatch, cache):
    fake("time.sleep(600)")
    monkeypatch.setattr(checking, "START_SECONDS", 1.0)
    ends, end = [], checking._Worker.end
    monkeypatch.setattr(checking._Worker, "end", lambda process: ends.append(end(process)))
    found = list(proving.warm_up(CPU))
    assert ends == [-signal.SIGKILL]
    assert [verdict.reason for _, verdict in found] == ["not checked: it has not begun within 1 s"] * 3
    fake("sys.exit('no such module')")
    report = rows(run("warmup", "--device", "cpu", "--json", status=1))
    assert set(report) == {"float32", "bfloat16", "float16"}
    for row in report.values():
        assert row["reason"] == "not checked: its process ended by status 1: no such module"
    assert not cache.exists()


# --- env ----------------------------------------------------------------------------------------------------


def test_cuda_without_an_index_is_the_current_gpu(run, monkeypatch):
    devices = []
    monkeypatch.setattr(cli_warmup, "device_of", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(proving, "to_check", lambda *a: [])
    monkeypatch.setattr(proving, "warm_up", lambda device, *a, **k: devices.append(device) or iter(()))
    run("warmup", "--json")
    assert devices == [torch.device("cuda", 3)]


def test_env_shows_them(run, cache, monkeypatch):
    report = json.loads(run("env", "--json"))
    assert report["verdicts"] == str(cache)
    if not torch.cuda.is_available():
        assert report["gpu_kernels"] == []
        assert f"GPU kernels (verdicts in {cache})\n  no GPU to run them\n" in run("env")
    row = serving.Proof("linear", "cuda:0", "bfloat16", "triton", "proven on NVIDIA H200", "at 012345678")
    environment = cli_env.environment() | {"gpu_kernels": [vars(row)]}
    monkeypatch.setattr(cli_env, "environment", lambda: environment)
    lines = [" ".join(line.split()) for line in run("env").splitlines()]
    assert "op device dtype backend state detail" in lines
    assert "linear cuda:0 bfloat16 triton proven on NVIDIA H200 at 012345678" in lines
