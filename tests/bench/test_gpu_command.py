"""`make gpu`: its steps, its checks and what is made of its results; all without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import attention, gpu, gpu_checks, gpu_results, lines, roofs
from fastbert import testing
from fastbert.backends import triton as backend
from fastbert.graphs import model as graphs
from fastbert.graphs import recorder as recorders
from fastbert.runtime import dispatch
from fastbert.testing import triton_interpreter

ROOT = Path(__file__).resolve().parents[2]
GPU = [sys.executable, str(ROOT / "bench" / "gpu.py")]
interpreted = pytest.mark.skipif(not triton_interpreter.interpreting(), reason="needs Triton's interpreter")


# ---- lines ----


def test_lines_come_back_in_order_and_a_torn_one_is_counted(tmp_path):
    path = tmp_path / "deep" / "a.jsonl"
    lines.append(path, "head", {"a": 1, "b": [float("nan"), float("inf")]})
    lines.append(path, "row", {"n": 1})
    with open(path, "ab") as file:
        file.write(b'{"row": {"n": 2')  # its writer was killed here
    lines.append(path, "row", {"n": 3})
    lines.append(path, "step", {"step": "s"})
    lines.append(path, "head", {"a": 2})
    assert lines.read(path) == {
        "a": 2, "b": ["nan", "inf"], "rows": [{"n": 1}, {"n": 3}], "steps": [{"step": "s"}], "torn": 1,
    }  # fmt: skip


def test_a_line_is_on_the_disk_before_the_next_is_made(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(lines.os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    path = tmp_path / "a.jsonl"
    for n in range(3):
        lines.append(path, "row", {"n": n})
        assert synced[-1] == path.stat().st_size
    assert len(synced) == 3


# ---- steps ----


def steps_of(folder: Path) -> dict[str, dict]:
    return {record["step"]: record for record in lines.read(folder / "steps.jsonl")["steps"]}


def test_a_step_that_fails_crashes_or_hangs_is_recorded_and_the_next_goes_on(tmp_path, capsys):
    names = ["planted-failure", "planted-crash", "planted-hang", "planted-missing", "planted-good"]
    assert gpu.main(["--out", str(tmp_path), "--only", ",".join(names)]) == 1
    found = steps_of(tmp_path)
    assert [found[name]["status"] for name in names] == ["failed", "crashed", "timeout", "failed", "ok"]
    assert found["planted-failure"]["reason"] == "exit status 3"
    assert found["planted-failure"]["tail"] == "planted failure\n"
    assert f"signal {int(signal.SIGABRT)}" in found["planted-crash"]["reason"]
    assert found["planted-hang"]["reason"] == "stopped after its 2 s"
    assert 2.0 <= found["planted-hang"]["seconds"] < 20
    assert found["planted-hang"]["tail"] == "begun\n"
    assert "not begun" in found["planted-missing"]["reason"]
    assert "tail" not in found["planted-good"]
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "log.txt").read_text()
    assert "planted failure" in printed
    assert "well" in printed
    head = lines.read(tmp_path / "steps.jsonl")
    assert (head["finished"], head["planned"], head["device_type"]) == (True, names, "cuda")


def processes_in(folder: Path) -> list[str]:
    """Command lines of the processes that were started with `folder` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_what_a_hanging_step_has_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED_IN", str(tmp_path))
    gpu.main(["--out", str(tmp_path / "out"), "--only", "planted-hang"])
    end = time.monotonic() + 20
    while processes_in(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)  # a killed process takes its time to go on a busy machine
    assert processes_in(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_an_interrupted_run_ends_its_step_and_keeps_what_it_had(tmp_path):
    env = os.environ | {"PLANTED_IN": str(tmp_path)}
    command = [*GPU, "--out", str(tmp_path / "out"), "--only", "planted-hang", "--budget", "57000"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not any(line.startswith("sleep 600") for line in processes_in(tmp_path)):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 143
    finally:
        process.kill()
        process.wait()
    assert processes_in(tmp_path) == []
    run = lines.read(tmp_path / "out" / "steps.jsonl")
    assert (run["finished"], run["steps"]) == (False, [])


def test_a_spent_budget_skips_with_the_reason(tmp_path):
    # the hang leaves the good step nothing but half a second, and that one needs a whole one
    assert gpu.main(["--out", str(tmp_path), "--only", "planted-good,planted-hang", "--budget", "0.5"]) == 0
    for record in steps_of(tmp_path).values():
        assert record["status"] == "skipped"
        assert record["reason"] in (
            "0 s left of --budget 0, 1 s needed",
            "1 s left of --budget 0, 1 s needed",
        )


def test_shares_keep_what_the_later_steps_need():
    step, later = gpu.Step("a", 50, 10, None), [gpu.Step("b", 90, 20, None), gpu.Step("c", 9, 5, None)]
    assert gpu.share(step, later, 500, 1.0) == 50  # never more than its most
    assert gpu.share(step, later, 500, 2.0) == 100  # unless the whole budget is larger
    assert gpu.share(step, later, 60, 1.0) == 35  # b and c keep 25
    assert gpu.share(step, later, 30, 1.0) == 10  # its least, at the cost of the last ones
    assert gpu.share(step, later, 9.9, 1.0) == 0
    assert gpu.share(step, [], 20, 1.0) == 20


def test_the_default_budget_reaches_every_step():
    assert sum(step.least for step in gpu.STEPS) < gpu.BUDGET_SECONDS / 2
    assert gpu.BUDGET_SECONDS < 600
    assert all(0 < step.least <= step.most for step in gpu.STEPS)


def test_only_picks_in_the_order_of_the_run():
    assert [step.name for step in gpu.choose("encoder, build")] == ["build", "encoder"]
    assert [step.name for step in gpu.choose(None)] == [step.name for step in gpu.STEPS]
    assert not any(step.name.startswith("planted") for step in gpu.choose(None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "probe,nothing"], "--only: got nothing, expected some of build, probe, "),
        (["--only", ""], "--only: got"),
        (["--budget", "0"], "got 0, expected a number of seconds above 0"),
        (["--budget", "nan"], "got nan, expected"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_arguments_are_named(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        gpu.main(["--out", str(tmp_path / "out"), *options])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_commands_of_a_gpu_run_name_what_exists(tmp_path):
    """Each script of a step takes the arguments that it is given."""
    run = gpu.Run(tmp_path, "cuda")
    for step in gpu.STEPS:
        command = step.command(run, 30.0)
        assert command[0] == sys.executable
        assert Path(command[1]).is_file(), step.name
        if step.name != "build":
            assert command[command.index("--budget") + 1] == "30", step.name
            assert str(tmp_path) in command[command.index("--json") + 1]
    assert gpu.environment(run).get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert gpu.environment(gpu.Run(tmp_path, "cpu"))["TRITON_INTERPRET"] == "1"


def test_the_parent_needs_the_standard_library_only():
    code = "import sys, bench.gpu; print([name for name in sys.modules if 'torch' in name])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_make_gpu_passes_its_arguments_on():
    command = ["make", "-n", "gpu", "VENV=", "PYTHON=some-python", "OUT=somewhere", "ARGS=--only probe"]
    # as from a shell, though the tests themselves may run under make
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=60)
    assert done.stdout.splitlines() == ["some-python bench/gpu.py --out somewhere --only probe"], done.stderr


# ---- checks ----


@pytest.fixture
def check(request):
    """A check in the interpreter and the rows it hands over."""
    rows: list[dict] = []
    found = gpu_checks.Check("correctness", torch.device("cpu"), rows.append)
    found.rows = rows
    return found


def named(check, name: str):
    check.name = name
    return check


LINEAR = gpu_checks.Unit("linear", "triton", torch.bfloat16)
ENCODER = gpu_checks.Unit("encoder", None, torch.bfloat16)


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
    (row,) = run(gpu_checks.correctness, check)
    assert row["status"] == "failed"
    assert row["name"].startswith("linear-triton-bf16-")
    assert row["error"]


@interpreted
def test_correctness_of_the_kernel_itself(check):
    (row,) = run(gpu_checks.correctness, check)
    # the output, and the gradients of x, weight and bias
    assert (row["status"], row["step"], row["quantities"]) == ("ok", "correctness", 4)
    assert not torch.are_deterministic_algorithms_enabled()


def test_poisoned_memory_is_nan_and_only_within():
    with gpu_checks.poisoned():
        assert all(torch.empty(64, dtype=dtype).isnan().all() for dtype in gpu_checks.DTYPES)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), gpu_checks.poisoned():
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()


def test_unwritten_rows_show_even_where_memory_held_the_right_values(check, monkeypatch):
    seen = []
    monkeypatch.setattr(
        testing, "run_case", lambda *args: seen.append(torch.are_deterministic_algorithms_enabled()) or []
    )
    run(gpu_checks.correctness, check)
    assert seen == [True]


@interpreted
def test_an_exception_is_a_row(check, monkeypatch):
    monkeypatch.setattr(backend, "linear_fwd", lambda *args: 1 / 0)
    (row,) = run(gpu_checks.correctness, check)
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
    (row,) = run(gpu_checks.determinism, named(check, "determinism"))
    assert (row["status"], row["error"]) == ("failed", "1 of 3 repeats differ from the first run")
    monkeypatch.undo()
    check.rows.clear()
    assert run(gpu_checks.determinism, check)[0]["status"] == "ok"


def test_bits_tell_zeros_apart_and_know_a_nan():
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert bool(gpu_checks.equal_bits({"y": nan}, {"y": nan.clone()}))
    assert not bool(gpu_checks.equal_bits({"y": zero}, {"y": -zero}))
    assert not bool(gpu_checks.equal_bits({"y": zero, "z": zero}, {"y": zero, "z": nan}))


@interpreted
def test_a_hang_a_crash_and_an_ending_process_are_rows(check, monkeypatch):
    units = [gpu_checks.Unit(name, "triton", torch.float32) for name in ("hang", "crash", "silent", "fine")]

    def run_unit(check, unit):
        if unit.op == "hang":
            time.sleep(600)
        if unit.op == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if unit.op == "silent":
            sys.exit(3)

    monkeypatch.setattr(gpu_checks, "UNIT_SECONDS", 2.0)
    assert gpu_checks.in_processes(check, units, 4, run_unit) == 3
    found = {row["name"]: (row["status"], row["error"]) for row in check.rows}
    assert found == {
        "hang-triton-fp32": ("timeout", "its process did not end in its time"),
        "crash-triton-fp32": ("crashed", f"its process ended with {-int(signal.SIGKILL)}"),
        "silent-triton-fp32": ("crashed", "its process ended with 3"),
    }


def test_units_without_time_are_skipped(check):
    check.end = time.monotonic()
    assert gpu_checks.in_processes(check, [LINEAR], 1) == 0
    assert [(row["status"], row["error"]) for row in check.rows] == [("skipped", "the budget is spent")]


@interpreted
def test_a_failed_row_makes_the_exit_status(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_checks.CHECKS, "stream", (gpu_checks.correctness, lambda tiny: [LINEAR]))
    options = ["stream", "--device", "cpu", "--json", str(tmp_path / "checks.jsonl")]
    before = torch.get_num_threads()
    try:
        assert gpu_checks.main(options) == 0
        spoiled(monkeypatch, lambda y: y + 1)
        assert gpu_checks.main(options) == 1
    finally:
        torch.set_num_threads(before)
    data = lines.read(tmp_path / "checks.jsonl")
    assert [row["status"] for row in data["rows"]] == ["ok", "failed"]
    assert data["environment"]["device_type"] == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_a_check_fails_and_says_why(tmp_path):
    file = tmp_path / "checks.jsonl"
    assert gpu_checks.main(["determinism", "--json", str(file)]) == 1
    rows = {row["name"]: (row["status"], row["error"]) for row in lines.read(file)["rows"]}
    assert rows.pop("environment-fp32")[0] == "failed"
    assert {status for status, _ in rows.values()} == {"skipped"}
    assert rows["linear-triton-bf16"][1] == "no CUDA device"


def test_every_kernel_of_every_gpu_backend_is_a_unit():
    units = gpu_checks.op_units((torch.bfloat16, torch.float32))
    ops = {unit.op for unit in units if unit.backend == "triton"}
    assert ops == set(backend.DTYPES)
    assert len(units) == len(set(units))
    assert {"attention", "linear"} >= {unit.op for unit in units[:4]}  # the longest begin first


@interpreted
def test_memory_sees_growth(check, monkeypatch):
    assert run(gpu_checks.memory, named(check, "memory"), ENCODER)[0]["status"] == "ok"
    check.rows.clear()
    sizes = iter(range(0, 1 << 40, 1 << 30))
    monkeypatch.setattr(gpu_checks, "host_bytes", lambda: next(sizes))
    (row,) = run(gpu_checks.memory, check, ENCODER)
    assert row["status"] == "failed"
    assert row["error"] == "grew by 3072 MiB on the host"


@interpreted
def test_graphs_see_stale_weights_and_calls_that_are_not_replayed(check, monkeypatch):
    assert run(gpu_checks.graphs, named(check, "graphs"), ENCODER)[0]["status"] == "ok"
    check.rows.clear()
    monkeypatch.setattr(graphs.GraphedModel, "_settle", lambda self: True)
    original = recorders.EagerRecorder.record

    def record(self, function):
        recording = original(self, function)
        return recorders.Recording(recording.outputs, lambda: None)  # what it gave once

    monkeypatch.setattr(recorders.EagerRecorder, "record", record)
    (row,) = run(gpu_checks.graphs, check, ENCODER)
    assert row["status"] == "failed"
    assert "away from the model itself" in row["error"]
    monkeypatch.undo()
    check.rows.clear()
    monkeypatch.setattr(recorders, "EagerRecorder", lambda device: None)
    (row,) = run(gpu_checks.graphs, check, ENCODER)
    assert row["status"] == "failed"
    assert "was not replayed: the model is on cpu" in row["error"]


class OnGpu(gpu_checks.Check):
    """A check that goes the way it goes on a GPU."""

    tiny = False


@pytest.fixture
def on_gpu(monkeypatch):
    """Such a check in the interpreter: streams do nothing, a replay calls again what was captured."""
    captured: dict = {}
    original = gpu_checks.evaluator

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

    monkeypatch.setattr(gpu_checks, "evaluator", evaluator)
    monkeypatch.setattr(gpu_checks, "one_case", lambda check, unit: testing.small_cases(unit.op)[0])
    monkeypatch.setattr(gpu_checks, "REPLAYS", 3)
    for name, fake in {
        "Stream": Stream, "CUDAGraph": Graph, "graph": capture, "current_stream": Stream,
        "stream": contextlib.nullcontext, "synchronize": lambda: None, "_sleep": lambda cycles: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    rows: list[dict] = []
    check = OnGpu("graphs", torch.device("cpu"), rows.append)
    check.rows, check.graph = rows, Graph
    return check


@interpreted
@pytest.mark.parametrize("op", ["linear", "packing"])
def test_a_replay_must_follow_its_inputs(on_gpu, monkeypatch, op):
    unit = gpu_checks.Unit(op, "triton", torch.bfloat16)
    (row,) = run(gpu_checks.graphs, on_gpu, unit)
    assert (row["status"], row.get("error"), row["replays"]) == ("ok", None, 3)
    monkeypatch.setattr(on_gpu.graph, "replay", lambda self: None)
    on_gpu.rows.clear()
    (row,) = run(gpu_checks.graphs, on_gpu, unit)
    assert row["error"] == "3 of 3 replays differ from an eager call"


@interpreted
@pytest.mark.parametrize("op", ["attention", "embedding", "layer_norm"])
def test_a_replay_must_draw_the_mask_of_the_seed_it_finds(on_gpu, monkeypatch, op):
    unit = gpu_checks.Unit(op, "triton", torch.float32)
    assert "dropout" in gpu_checks.replayed_case(on_gpu, unit).id
    monkeypatch.setattr(gpu_checks, "cases", lambda check, unit: testing.small_cases(unit.op))
    (row,) = run(gpu_checks.graphs, on_gpu, unit)
    assert (row["status"], row.get("error"), row["replays"]) == ("ok", None, 3)
    assert "dropout" in row["case"]
    on_gpu.rows.clear()
    replay, launch, captured = on_gpu.graph.replay, getattr(backend, f"{op}_fwd"), torch.tensor([5])

    def baked(*args):  # the seed that was there at the capture
        return launch(*(captured if is_seed(a) else a for a in args))

    def is_seed(a):
        return isinstance(a, torch.Tensor) and a.dtype == torch.int64 and a.numel() == 1

    def stale(graph):
        with monkeypatch.context() as patch, dispatch.use_backend(**{op: "triton"}):
            patch.setattr(backend, f"{op}_fwd", baked)
            replay(graph)

    monkeypatch.setattr(on_gpu.graph, "replay", stale)
    (row,) = run(gpu_checks.graphs, on_gpu, unit)
    assert row["error"] == "3 of 3 replays differ from an eager call"


@interpreted
def test_a_side_stream_must_give_the_same_bits(on_gpu, monkeypatch):
    (row,) = run(gpu_checks.stream, named(on_gpu, "stream"))
    assert (row["status"], row.get("error")) == ("ok", None)
    on_gpu.rows.clear()
    late = []

    def early(x):  # reads before what is enqueued before it is done: once only NaN is there
        late.append(1)
        return torch.full_like(x, torch.nan) if len(late) > 3 else x

    spoiled(monkeypatch, early)
    (row,) = run(gpu_checks.stream, on_gpu)
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
    found = gpu_checks.sanitized(str(program), "memcheck", 1.0 if name == "slow" else 30.0)
    assert found[0] == status
    assert (found[1] is None) if reason is None else (reason in found[1])


def test_the_checks_file_is_one_that_many_may_append_to(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_checks.main(["stream", "--device", "cpu", "--json", str(tmp_path / "checks.json")])
    assert "expected a name ending in .jsonl" in capsys.readouterr().err


# ---- merge and README ----

ENVIRONMENT = {
    "device_type": "cuda", "device": "NVIDIA H999", "slug": "nvidia-h999", "torch": "2.11.0+cu130",
    "triton": "3.6.0", "driver": "580.1",
}  # fmt: skip


def encoder_row(candidate: str, workload: str, ms: float, group: str = "plain", **facts) -> dict:
    row = {"step": "encoder", "name": f"encoder-{candidate}-base-{workload}", "status": "ok", "model": "base"}
    row |= {"candidate": candidate, "workload": workload, "median_ms": ms, "of_floor": 0.5, "group": group}
    return row | facts


@pytest.fixture
def finished(tmp_path) -> Path:
    """What a run on a GPU leaves, made up."""
    folder = tmp_path / "out"
    head = {"schema": 1, "date": "2026-11-30T10:00:00+00:00", "commit": None, "changed": None}
    for name in ("checks", "encoder"):
        lines.append(folder / f"{name}.jsonl", "head", head | {"environment": ENVIRONMENT})
    lines.append(folder / "steps.jsonl", "head", head | {"finished": True})
    lines.append(folder / "steps.jsonl", "step", {"step": "build", "status": "ok"})
    for case, status in enumerate(("ok", "failed", "skipped", "ok")):
        row = {"step": "correctness", "name": f"linear-{case}", "status": status}
        lines.append(folder / "checks.jsonl", "row", row)
    lines.append(
        folder / "encoder.jsonl", "head", {"roofs": {"gflops": {"bf16": 788_000.0}, "gbytes": 4300.0}}
    )
    for row in (
        encoder_row("fastbert-bf16", "full", 99.0),  # measured again below
        encoder_row("fastbert-bf16", "full", 6.0),
        encoder_row("fastbert_graphs-bf16", "full", 5.5),
        encoder_row("transformers_sdpa-bf16", "full", 11.0),
        encoder_row("transformers_eager-bf16", "full", 22.0, "plain"),
        encoder_row("transformers_flash2-bf16", "full", 0.0) | {"status": "error", "error": "not installed"},
        encoder_row("fastbert-bf16", "full", 6.2, "compile"),
        encoder_row("torch_compile-bf16", "full", 9.3, "compile"),
    ):
        lines.append(folder / "encoder.jsonl", "row", row)
    lines.append(folder / "tuning.jsonl", "head", head | {"environment": ENVIRONMENT})
    row = {"step": "tuning", "name": "linear k 7", "status": "ok", "entry": ["linear", "k", 7]}
    lines.append(folder / "tuning.jsonl", "row", row | {"config": {"block_m": 64}})
    return folder


def test_merge_keeps_a_run_with_commit_date_and_versions(finished, tmp_path):
    results, tuned = tmp_path / "results", tmp_path / "tuned.json"
    *paths, last = gpu_results.merge(finished, results, tuned)
    assert last == tuned
    entries = {"device": "NVIDIA H999", "linear": {"k": {"7": {"block_m": 64}}}}
    assert json.loads(tuned.read_text()) == entries
    assert [path.name for path in paths] == ["steps.json", "checks.json", "encoder.json", "tuning.json"]
    assert {path.parent for path in paths} == {results / "nvidia-h999"}
    for path in paths:
        data = json.loads(path.read_text())
        assert data["environment"] == ENVIRONMENT  # steps.jsonl itself does not know it
        assert data["commit"] == gpu_results.commit_here()["commit"]
        assert "no git" in data["commit_of"]
        assert data["date"] == "2026-11-30T10:00:00+00:00"
        assert data["merged"] >= data["date"][:4]
    data = json.loads((results / "nvidia-h999" / "encoder.json").read_text())
    assert [row["median_ms"] for row in data["rows"] if row["candidate"] == "fastbert-bf16"] == [6.0, 6.2]
    ratios = {(r["ours"], r["theirs"]): round(r["ratio"], 3) for r in data["ratios"]}
    assert ratios == {
        ("fastbert_graphs-bf16", "transformers_sdpa-bf16"): 2.0,
        ("fastbert_graphs-bf16", "transformers_eager-bf16"): 4.0,
        ("fastbert-bf16", "torch_compile-bf16"): 1.5,
    }


def test_a_commit_of_the_run_itself_stays(finished, tmp_path):
    lines.append(finished / "checks.jsonl", "head", {"commit": "a" * 40, "changed": False})
    gpu_results.merge(finished, tmp_path / "results", tmp_path / "tuned.json")
    data = json.loads((tmp_path / "results" / "nvidia-h999" / "checks.json").read_text())
    assert (data["commit"], data["changed"], "commit_of" in data) == ("a" * 40, False, False)


def test_merge_refuses_what_is_no_result(finished, tmp_path, capsys):
    results, readme = tmp_path / "results", tmp_path / "README.md"
    options = ["--results", str(results), "--readme", str(readme)]
    assert gpu.main(["merge", str(tmp_path / "nothing"), *options]) == 2
    assert "nothing: no steps.jsonl, probe.jsonl" in capsys.readouterr().err
    (finished / "checks.jsonl").unlink()
    (finished / "encoder.jsonl").unlink()
    (finished / "tuning.jsonl").unlink()
    assert gpu.main(["merge", str(finished), *options]) == 2
    assert "nothing there says on which device it ran" in capsys.readouterr().err
    on_cpu = {"environment": {"device_type": "cpu", "device": "a CPU", "slug": "cpu"}}
    lines.append(finished / "checks.jsonl", "head", on_cpu)
    assert gpu.main(["merge", str(finished), *options]) == 2
    assert "ran on a CPU: a dry run on a CPU is no result" in capsys.readouterr().err
    assert not results.exists()


MARKED = """# Title
<!-- cpu numbers: made by `python bench/gpu.py readme` -->
old
<!-- end of cpu numbers -->
between
<!-- gpu numbers: made by `python bench/gpu.py readme` -->
<!-- end of gpu numbers -->
end
"""


def test_merge_puts_the_numbers_into_the_readme(finished, tmp_path):
    results, readme = tmp_path / "results", tmp_path / "README.md"
    readme.write_text(MARKED)
    options = ["--results", str(results), "--readme", str(readme)]
    assert gpu.main(["merge", str(finished), *options, "--tuned", str(tmp_path / "tuned.json")]) == 0
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith("# Title\n<!-- cpu numbers")
    assert text.endswith("<!-- end of gpu numbers -->\nend\n")
    assert "NVIDIA H999, bf16" in text
    assert "788 TFLOP/s and 4.3 TB/s" in text
    assert "Triton 3.6.0, driver 580.1" in text
    assert "bench/results/nvidia-h999/encoder.json" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows == [
        "| | base 32x512 |",
        "|---|---|",
        "| **fastbert** | 6.00 (50%) |",
        "| **fastbert, CUDA graphs** | 5.50 (50%) |",
        "| transformers eager | 22.00 (50%) |",
        "| transformers sdpa | 11.00 (50%) |",
        "| transformers, torch.compile max-autotune | 9.30 (50%) |",
        "| ours over the best peer | 1.50 × |",
    ]
    assert "Checks there: correctness 1 failed, 2 ok, 1 skipped." in text.replace("\n", " ")
    assert gpu.main(["readme", "--check", *options]) == 0
    readme.write_text(text.replace("6.00", "5.00"))
    assert gpu.main(["readme", "--check", *options]) == 1
    assert "5.00" in readme.read_text()  # a check writes nothing


def test_no_gpu_run_claims_no_gpu_speed(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(MARKED)
    (tmp_path / "results").mkdir()
    assert gpu.main(["readme", "--results", str(tmp_path / "results"), "--readme", str(readme)]) == 0
    assert "No speed on a GPU is claimed" in readme.read_text()


@pytest.mark.parametrize("text", ["", MARKED + MARKED, MARKED.replace("<!-- end of gpu numbers -->\n", "")])
def test_a_readme_without_its_markers_is_an_error(text, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert gpu.main(["readme", "--readme", str(readme)]) == 2
    assert "expected <!-- " in capsys.readouterr().err
    assert readme.read_text() == text


def test_the_committed_readme_is_what_bench_results_say():
    text = gpu_results.PAGE.read_text()
    assert gpu_results.filled(text, gpu_results.sections()) == text, "run `python bench/gpu.py readme`"


# ---- the whole command, without a GPU ----


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> tuple[Path, str]:
    """(folder, printed) of a dry run."""
    folder = tmp_path_factory.mktemp("gpu") / "out"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*GPU, "--out", str(folder), "--device", "cpu", "--budget", "3000"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=1200, env=env)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return folder, done.stdout


@interpreted
def test_a_dry_run_passes_every_step(dry):
    folder, printed = dry
    assert {name: record["status"] for name, record in steps_of(folder).items()} == {
        step.name: "ok" for step in gpu.STEPS
    }
    assert "# all steps:" in printed
    head = lines.read(folder / "steps.jsonl")
    assert (head["finished"], head["device_type"]) == (True, "cpu")


@interpreted
def test_a_dry_run_checks_every_triton_kernel(dry):
    rows = lines.read(dry[0] / "checks.jsonl")["rows"]
    for step in ("correctness", "determinism"):
        ops = {row["name"].split("-")[0] for row in rows if (row["step"], row["status"]) == (step, "ok")}
        assert ops == set(backend.DTYPES), step
    checked = {row["step"]: row["status"] for row in rows if row["name"] == "encoder-bf16"}
    assert checked == {"graphs": "ok", "memory": "ok"}
    assert {row["status"] for row in rows} == {"ok", "skipped"}


@interpreted
def test_a_dry_run_times_every_engine(dry):
    data = lines.read(dry[0] / "encoder.jsonl")
    rows = {(row["group"], row["candidate"]): row for row in data["rows"] if row["status"] == "ok"}
    plain = ["fastbert", "fastbert_graphs", "transformers_eager", "transformers_sdpa", "torch_encoder"]
    assert [name for group, name in rows if group == "plain"] == [f"{name}-bf16" for name in plain]
    beside = ["fastbert-bf16", "fastbert_graphs-bf16", "transformers_sdpa-bf16"]
    assert [name for group, name in rows if group == "compile"] == [*beside, "torch_compile-bf16"]
    assert all(row["cosine"] > 0.999 for row in rows.values())
    measured = roofs.of_file(dry[0] / "probe.jsonl")  # by the probe, and not again
    assert data["roofs"]["gflops"]["bf16"] == pytest.approx(measured.gflops["bf16"])
    assert any(row["op"] == "packing" for row in lines.read(dry[0] / "kernels.jsonl")["rows"] if "op" in row)


@interpreted
def test_a_dry_run_trains(dry):
    data = lines.read(dry[0] / "training.jsonl")
    rows = [(row["step"], row["candidate"], row["status"]) for row in data["rows"]]
    names = ("fastbert-bf16", "transformers-bf16")
    alone = [row for row in rows if row[0] == "attention"]
    assert alone == [("attention", f"{name}-bf16", "ok") for name in attention.CANDIDATES]
    rows = [row for row in rows if row not in alone]
    assert rows == [(step, name, "ok") for step in ("training", "footprint") for name in names]
    peers = [ratio["theirs"] for ratio in data["ratios"]]
    assert sorted(peers) == ["fastbert_other_bits", "torch_sdpa"] + ["transformers"] * 3


@interpreted
def test_a_dry_run_tunes(dry):
    rows = [row for row in lines.read(dry[0] / "tuning.jsonl")["rows"] if "entry" in row]
    assert {row["entry"][0] for row in rows} == {"linear", "attention"}
    assert {row["status"] for row in rows} == {"ok"}
    assert set(json.loads((dry[0] / "tuned.json").read_text())) == {"device", "linear", "attention"}


@interpreted
def test_a_dry_run_is_no_result(dry, tmp_path, capsys):
    assert gpu.main(["merge", str(dry[0]), "--results", str(tmp_path / "results")]) == 2
    assert "a dry run on a CPU is no result" in capsys.readouterr().err
