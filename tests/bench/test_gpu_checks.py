"""The checks of `make gpu`, in the interpreter: each one fails on the fault that it is for."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import pytest
import torch

from bench.gpu import checks, tools
from bench.lib import lines
from fastbert import testing
from fastbert.backends import triton as backend
from fastbert.graphs import model as graphs
from fastbert.graphs import recorder as recorders
from fastbert.runtime import dispatch
from tests.support.triton_fixtures import interpreted


@pytest.fixture
def check(request):
    """A check in the interpreter, and its rows."""
    rows: list[dict] = []
    found = checks.Check("correctness", torch.device("cpu"), rows.append)
    found.rows = rows
    return found


def named(check, name: str):
    check.name = name
    return check


LINEAR = checks.Unit("linear", "triton", torch.bfloat16)
ENCODER = checks.Unit("encoder", None, torch.bfloat16)


def run(function, check, unit=LINEAR) -> list[dict]:
    function(check, unit)
    return check.rows


def spoiled(monkeypatch, change) -> None:
    """Plant a fault behind the Triton linear."""
    right = backend.linear_fwd

    def linear_fwd(*args):
        y, pre = right(*args)
        return change(y), pre

    monkeypatch.setattr(backend, "linear_fwd", linear_fwd)


def unwritten(y):
    out = torch.empty_like(y)
    out[1:] = y[1:]
    return out


@interpreted
@pytest.mark.parametrize(
    "change", [unwritten, lambda y: y * 1.02, lambda y: y[:-1]], ids=["hole", "wrong", "shape"]
)
def test_correctness_sees_a_hole_a_wrong_result_and_a_wrong_shape(check, monkeypatch, change):
    spoiled(monkeypatch, change)
    (row,) = run(checks.correctness, check)
    assert row["status"] == "failed"
    assert row["name"].startswith("linear-triton-bf16-")
    assert row["error"]


@interpreted
def test_correctness_of_the_kernel_itself(check):
    (row,) = run(checks.correctness, check)
    # the output, and the gradients of x, weight and bias
    assert (row["status"], row["step"], row["quantities"]) == ("ok", "correctness", 4)
    assert not torch.are_deterministic_algorithms_enabled()


def test_correctness_has_what_training_runs(check):
    """On a GPU: its lengths and dropout, and the cases that take the tiles of real work."""
    on_gpu = checks.Check("correctness", torch.device("cuda"), check.rows.append)
    lengths = (512, 300, 500, 257) * 4
    for op in dispatch.OPS:
        found = checks.cases(on_gpu, checks.Unit(op, "triton", torch.bfloat16))
        for case in (*testing.gpu_cases(op), *testing.training_cases(op, lengths)):
            assert case in found
    attention = testing.training_cases("attention", lengths)
    facts = [(c.lengths, c.nheads, c.headdim, c.packed_qkv, c.dropout_p, c.bias) for c in attention]
    assert facts == [(lengths, 12, 64, True, 0.1, bias) for bias in ("", "keys")]
    for op in ("layer_norm", "embedding"):
        assert [case.dropout_p for case in testing.training_cases(op, lengths)] == [0.1]
    for op in ("attention", "embedding", "layer_norm"):  # a graph must follow the seed that it finds
        assert checks.replayed_case(on_gpu, checks.Unit(op, "triton", torch.bfloat16)).dropout_p > 0


@interpreted
def test_determinism_sees_one_bit(check, monkeypatch):
    calls = []

    def last_bit(y):
        calls.append(1)
        if len(calls) == 3:
            y.view(torch.int16)[0, 0] ^= 1
        return y

    spoiled(monkeypatch, last_bit)
    (row,) = run(checks.determinism, named(check, "determinism"))
    assert (row["status"], row["error"]) == ("failed", "1 of 3 repeats differ from the first run")
    monkeypatch.undo()
    check.rows.clear()
    assert run(checks.determinism, check)[0]["status"] == "ok"


@pytest.mark.sweep
@interpreted
def test_a_hang_a_crash_and_an_ending_process_are_rows(check, monkeypatch):
    units = [checks.Unit(name, "triton", torch.float32) for name in ("hang", "crash", "silent", "fine")]

    def run_unit(check, unit):
        if unit.op == "hang":
            time.sleep(600)
        if unit.op == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if unit.op == "silent":
            sys.exit(3)

    monkeypatch.setattr(checks, "UNIT_SECONDS", 2.0)
    assert checks.in_processes(check, units, 4, run_unit) == 3
    found = {row["name"]: (row["status"], row["error"]) for row in check.rows}
    assert found == {
        "hang-triton-fp32": ("timeout", "its process did not end in its time"),
        "crash-triton-fp32": ("crashed", f"its process ended with {-int(signal.SIGKILL)}"),
        "silent-triton-fp32": ("crashed", "its process ended with 3"),
    }


@pytest.mark.sweep
@interpreted
def test_a_failed_row_makes_the_exit_status(tmp_path, monkeypatch):
    monkeypatch.setitem(checks.CHECKS, "stream", (checks.correctness, lambda tiny: [LINEAR]))
    options = ["stream", "--device", "cpu", "--json", str(tmp_path / "checks.jsonl")]
    before = torch.get_num_threads()
    try:
        assert checks.main(options) == 0
        spoiled(monkeypatch, lambda y: y + 1)
        assert checks.main(options) == 1
    finally:
        torch.set_num_threads(before)
    data = lines.read(tmp_path / "checks.jsonl")
    assert [row["status"] for row in data["rows"]] == ["ok", "failed"]
    assert data["environment"]["device_type"] == "cpu"


@pytest.mark.sweep
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_a_check_fails_and_says_why(tmp_path):
    file = tmp_path / "checks.jsonl"
    assert checks.main(["determinism", "--json", str(file)]) == 1
    rows = {row["name"]: (row["status"], row["error"]) for row in lines.read(file)["rows"]}
    assert rows.pop("environment-fp32")[0] == "failed"
    assert {status for status, _ in rows.values()} == {"skipped"}
    assert rows["linear-triton-bf16"][1] == "no CUDA device"


@pytest.mark.sweep
@interpreted
def test_memory_sees_growth(check, monkeypatch):
    assert run(checks.memory, named(check, "memory"), ENCODER)[0]["status"] == "ok"
    check.rows.clear()
    sizes = iter(range(0, 1 << 40, 1 << 30))
    monkeypatch.setattr(checks, "host_bytes", lambda: next(sizes))
    (row,) = run(checks.memory, check, ENCODER)
    assert row["status"] == "failed"
    assert row["error"] == "grew by 3072 MiB on the host"


@pytest.mark.sweep
@interpreted
def test_graphs_of_other_families(check):
    (row,) = run(checks.graphs, named(check, "graphs"), checks.Unit("modernbert", None, torch.bfloat16))
    assert (row["status"], row["replays"]) == ("ok", 4)


@pytest.mark.sweep
@interpreted
def test_graphs_see_stale_weights_and_calls_that_are_not_replayed(check, monkeypatch):
    assert run(checks.graphs, named(check, "graphs"), ENCODER)[0]["status"] == "ok"
    check.rows.clear()
    monkeypatch.setattr(graphs.GraphedModel, "_settle", lambda self: True)
    original = recorders.EagerRecorder.record

    def record(self, function):
        recording = original(self, function)
        return recorders.Recording(recording.outputs, lambda: None)  # its first outputs

    monkeypatch.setattr(recorders.EagerRecorder, "record", record)
    (row,) = run(checks.graphs, check, ENCODER)
    assert row["status"] == "failed"
    assert "away from the model itself" in row["error"]
    monkeypatch.undo()
    check.rows.clear()
    monkeypatch.setattr(recorders, "EagerRecorder", lambda device: None)
    (row,) = run(checks.graphs, check, ENCODER)
    assert row["status"] == "failed"
    assert "was not replayed: the model is on cpu" in row["error"]


class OnGpu(checks.Check):
    """A check that takes the path of a GPU."""

    tiny = False


@pytest.fixture
def on_gpu(monkeypatch):
    """Such a check in the interpreter: streams do nothing, and a replay calls the captured function again."""
    captured: dict = {}
    original = checks.evaluator

    def evaluator(*args):
        call = original(*args)

        def noting():
            outputs = call()
            if captured.get("open"):
                captured.update(call=call, static=outputs)
            return outputs

        return noting

    class Stream:
        def wait_stream(self, other):
            pass

    class Graph:
        def replay(self):
            for name, value in captured["call"]().items():
                captured["static"][name].copy_(value)

    @contextlib.contextmanager
    def capture(graph, stream):
        captured["open"] = True
        yield
        captured["open"] = False

    monkeypatch.setattr(checks, "evaluator", evaluator)
    monkeypatch.setattr(checks, "one_case", lambda check, unit: testing.small_cases(unit.op)[0])
    monkeypatch.setattr(checks, "REPLAYS", 3)
    for name, fake in {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": capture,
        "current_stream": Stream,
        "stream": contextlib.nullcontext,
        "synchronize": lambda: None,
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    rows: list[dict] = []
    check = OnGpu("graphs", torch.device("cpu"), rows.append)
    check.rows, check.graph = rows, Graph
    return check


@interpreted
@pytest.mark.parametrize("op", ["linear", "packing"])
def test_a_replay_must_follow_its_inputs(on_gpu, monkeypatch, op):
    unit = checks.Unit(op, "triton", torch.bfloat16)
    (row,) = run(checks.graphs, on_gpu, unit)
    assert (row["status"], row.get("error"), row["replays"]) == ("ok", None, 3)
    monkeypatch.setattr(on_gpu.graph, "replay", lambda self: None)
    on_gpu.rows.clear()
    (row,) = run(checks.graphs, on_gpu, unit)
    assert row["error"] == "3 of 3 replays differ from an eager call"


@interpreted
def test_a_side_stream_must_give_the_same_bits(on_gpu, monkeypatch):
    (row,) = run(checks.stream, named(on_gpu, "stream"))
    assert (row["status"], row.get("error")) == ("ok", None)
    on_gpu.rows.clear()
    late = []

    def early(x):  # reads before earlier work is done, when there is only NaN
        late.append(1)
        return torch.full_like(x, torch.nan) if len(late) > 3 else x

    spoiled(monkeypatch, early)
    (row,) = run(checks.stream, on_gpu)
    assert row["error"] == "3 of 5 runs on a side stream differ"


SANITIZERS = {
    "ok": ("echo 'tiny cases: done'", "ok", None),
    "silent": ("true", "skipped", "the tool does not work here (exit status 0)"),
    "found": ("echo '========= ERROR SUMMARY: 2 errors'; exit 99", "failed", "ERROR SUMMARY: 2 errors"),
    "refused": (
        "echo 'Device not supported'; exit 99",
        "skipped",
        "the tool does not work here (exit status 99)",
    ),
    "slow": ("sleep 600", "skipped", "did not end within 1 s"),
}


@pytest.mark.parametrize("name", SANITIZERS)
def test_the_sanitizer_says_what_it_found_or_why_it_could_not(name, tmp_path):
    text, status, reason = SANITIZERS[name]
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{text.replace('sleep', 'exec sleep')}\n")
    program.chmod(0o755)
    found = tools.sanitized(str(program), "memcheck", "tiny-cases", 1.0 if name == "slow" else 30.0)
    assert found[0] == status
    assert (found[1] is None) if reason is None else (reason in found[1])


@pytest.mark.parametrize("op", ["attention", "linear"])
def test_the_parts_of_an_op_are_all_of_its_cases(op):
    """Each case once, and few in a process."""
    units = [
        u for u in checks.shares(checks.op_units((torch.bfloat16,))) if (u.op, u.backend) == (op, "triton")
    ]
    on_gpu = checks.Check("correctness", torch.device("cuda"), print)
    parts = [checks.cases(on_gpu, unit) for unit in units]
    assert all(0 < len(part) <= checks.CASES for part in parts)
    ids = [case.id for part in parts for case in part]
    assert sorted(ids) == sorted(case.id for case in checks.cases_of(units[0]))
    assert units[1].process == f"{units[1].name}-part-2-of-{len(units)}"
