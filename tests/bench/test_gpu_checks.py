"""The checks of `make gpu`, in the interpreter: each one fails on the fault that it is for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

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


ROOT = Path(__file__).resolve().parents[2]
LINEAR = checks.Unit("linear", "triton", torch.bfloat16)
ENCODER = checks.Unit("encoder", None, torch.bfloat16)


def run(function, check, unit=LINEAR) -> list[dict]:
    for _ in function(check, unit):
        pass
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


@pytest.mark.sweep
@interpreted
@pytest.mark.parametrize("op", [op for op in dispatch.OPS if op in backend.DTYPES])
def test_correctness_of_a_small_training_step(check, monkeypatch, op):
    """In train mode: the outputs, and every gradient that the op has."""
    small = testing.training_cases(op, (7, 1, 5))
    if op == "embedding":  # backward goes over the whole table
        small = [dataclasses.replace(case, vocab=50) for case in small]
    monkeypatch.setattr(checks, "cases", lambda *_: small)
    rows = run(checks.correctness, check, checks.Unit(op, "triton", torch.bfloat16))
    assert [row["status"] for row in rows] == ["ok"] * len(small), rows
    for row, case in zip(rows, small, strict=True):
        assert row["quantities"] > (op not in ("packing", *dispatch.INFERENCE_ONLY)), case


def test_poisoned_memory_is_nan_and_only_within():
    with checks.poisoned():
        assert all(torch.empty(64, dtype=dtype).isnan().all() for dtype in checks.DTYPES)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), checks.poisoned():
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()


def test_unwritten_rows_show_even_where_memory_held_the_right_values(check, monkeypatch):
    seen = []

    def run_case(*_, **__):
        return seen.append(torch.are_deterministic_algorithms_enabled()) or []

    monkeypatch.setattr(testing, "run_case", run_case)
    run(checks.correctness, check)
    assert seen == [True]


@interpreted
def test_an_exception_is_a_row(check, monkeypatch):
    monkeypatch.setattr(backend, "linear_fwd", lambda *args: 1 / 0)
    (row,) = run(checks.correctness, check)
    assert (row["status"], row["error"]) == ("failed", "ZeroDivisionError: division by zero")


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


def test_bits_tell_zeros_apart_and_know_a_nan():
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert bool(checks.equal_bits({"y": nan}, {"y": nan.clone()}))
    assert not bool(checks.equal_bits({"y": zero}, {"y": -zero}))
    assert not bool(checks.equal_bits({"y": zero, "z": zero}, {"y": zero, "z": nan}))


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


def test_units_without_time_are_skipped(check):
    check.end = time.monotonic()
    assert checks.in_processes(check, [LINEAR], 1) == 0
    assert [(row["status"], row["error"]) for row in check.rows] == [("skipped", "the budget is spent")]


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_a_check_fails_and_says_why(tmp_path):
    file = tmp_path / "checks.jsonl"
    assert checks.main(["determinism", "--json", str(file)]) == 1
    rows = {row["name"]: (row["status"], row["error"]) for row in lines.read(file)["rows"]}
    assert rows.pop("environment-fp32")[0] == "failed"
    assert {status for status, _ in rows.values()} == {"skipped"}
    assert rows["linear-triton-bf16"][1] == "no CUDA device"


def test_every_kernel_of_every_gpu_backend_is_a_unit():
    units = checks.op_units((torch.bfloat16, torch.float32))
    ops = {unit.op for unit in units if unit.backend == "triton"}
    assert ops == set(backend.DTYPES)
    assert len(units) == len(set(units))
    assert {"attention", "linear"} >= {unit.op for unit in units[:4]}  # the longest begin first


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


@pytest.mark.sweep
@interpreted
@pytest.mark.parametrize("op", ["attention", "embedding", "layer_norm"])
def test_a_replay_must_draw_the_mask_of_the_seed_it_finds(on_gpu, monkeypatch, op):
    unit = checks.Unit(op, "triton", torch.float32)
    assert "dropout" in checks.replayed_case(on_gpu, unit).id
    monkeypatch.setattr(checks, "cases", lambda check, unit: testing.small_cases(unit.op))
    (row,) = run(checks.graphs, on_gpu, unit)
    assert (row["status"], row.get("error"), row["replays"]) == ("ok", None, 3)
    assert "dropout" in row["case"]
    on_gpu.rows.clear()
    replay, launch, captured = on_gpu.graph.replay, getattr(backend, f"{op}_fwd"), torch.tensor([5])

    def baked(*args):  # the seed of the capture
        return launch(*map(as_captured, args))

    def as_captured(a):
        if isinstance(a, tuple):  # a launcher's NamedTuple
            return type(a)(*map(as_captured, a))
        is_seed = isinstance(a, torch.Tensor) and a.dtype == torch.int64 and a.numel() == 1
        return captured if is_seed else a

    def stale(graph):
        with monkeypatch.context() as patch, dispatch.use_backend(**{op: "triton"}):
            patch.setattr(backend, f"{op}_fwd", baked)
            replay(graph)

    monkeypatch.setattr(on_gpu.graph, "replay", stale)
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


NCU = """==PROF== Connected to process 7
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",\
"Device","CC","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum",\
"launch__registers_per_thread","sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"
"","","","","","","","","","","","%","nsecond","register/thread","%"
"0","7","python3","127.0.0.1","_attention_fwd_kernel","1","7","(128, 1, 1)","(96, 1, 1)","0","9.0","12.5",\
"1,234.00","168","n/a"
==PROF== Disconnected
""".replace("\\\n", "")
PROFILERS = {
    "ok": (f"cat <<'END'\n{NCU}END", "ok", None),
    "refused": ("echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1", "skipped", "may not read the GPU's counters"),
    "silent": ("true", "skipped", "no figures (exit status 0)"),
    "no kernel": ("echo '==WARNING== No kernels were profiled.'", "skipped", "No kernels were profiled"),
    "slow": ("exec sleep 600", "skipped", "did not end within 1 s"),
}


@pytest.mark.parametrize("name", PROFILERS)
def test_the_profilers_figures_or_why_there_are_none(name, tmp_path):
    text, status, reason = PROFILERS[name]
    program = tmp_path / "ncu"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    seconds = 1.0 if name == "slow" else 30.0
    found = tools.profiled(str(program), "_attention_fwd_kernel", "triton", "attention", seconds)
    assert found[0] == status
    assert (found[1] is None) if reason is None else (reason in found[1])
    if status == "ok":
        # a counter that the device does not have is left out
        assert found[2] == {"dram_percent": 12.5, "us": pytest.approx(1.234), "registers": 168.0}


def test_the_kernels_that_are_profiled_exist():
    triton = "".join(path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    cuda = "".join(path.read_text() for path in (ROOT / "csrc" / "cuda").glob("*.cu*"))
    for kernel, (by, op) in tools.PROFILED.items():
        assert f"\ndef {kernel}(" in triton if by == "triton" else f" {kernel}(" in cuda, kernel
        assert op in dispatch.backend_module(by).DTYPES


def test_the_profiler_gets_a_row_per_kernel(monkeypatch, tmp_path):
    program = tmp_path / "ncu"
    program.write_text("")
    monkeypatch.setattr(tools, "program", lambda name, tiny: str(program))
    asked = []
    monkeypatch.setattr(
        tools, "profiled", lambda *args: asked.append((args[1], args[2:4])) or ("ok", None, {"us": 2.0})
    )
    rows = []
    check = checks.Check("profile", torch.device("cuda"), rows.append)
    list(checks.profile(check, None))
    assert asked == list(tools.PROFILED.items())
    assert [row["name"] for row in rows] == [f"profile-{kernel}" for kernel in tools.PROFILED]
    assert {row["us"] for row in rows} == {2.0}
    rows.clear()
    check.end = time.monotonic() + 3
    list(checks.profile(check, None))
    assert {row["status"] for row in rows} == {"skipped"}


@pytest.mark.parametrize("ops", [[], ["linear", "attention"], ["pooling"]])
def test_one_call_needs_one_op_that_is_profiled(ops, capsys):
    with pytest.raises(SystemExit):
        checks.main(["one-call", *(word for op in ops for word in ("--op", op))])
    assert "for one-call, expected one of attention, feed_forward, layer_norm, linear" in (
        capsys.readouterr().err
    )


def test_ops_and_dtypes_can_be_chosen():
    units = checks.shares(checks.op_units(checks.DTYPES))
    assert checks.wanted(units, checks.parse(["stream"])) == units
    args = checks.parse(["stream", "--op", "linear", "--op", "packing", "--dtype", "fp16"])
    found = checks.wanted(units, args)
    assert {(unit.op, unit.dtype) for unit in found} == {
        ("linear", torch.float16),
        ("packing", torch.float16),
    }
    assert len(found) == len([u for u in units if u.op in args.op and u.dtype == torch.float16])
    found = checks.wanted(units, checks.parse(["stream", "--op", "linear", "--backend", "cuda"]))
    assert {(unit.op, unit.backend) for unit in found} == {("linear", "cuda")}


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


def test_the_checks_file_is_one_that_many_may_append_to(tmp_path, capsys):
    with pytest.raises(SystemExit):
        checks.main(["stream", "--device", "cpu", "--json", str(tmp_path / "checks.json")])
    assert "expected a name ending in .jsonl" in capsys.readouterr().err
