"""The probe runs its code on tiny shapes here; no test checks a time."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import probe
from bench.lib import lines, probe_steps, report, timing, workloads

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.sweep
def test_the_whole_command(tmp_path):
    path = tmp_path / "deep" / "probe.json"
    command = [sys.executable, str(ROOT / "bench" / "probe.py"), "--device", "cpu", "--smoke"]
    command += ["--threads", "1", "--json", str(path), "--note", "a test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    assert (data["schema"], data["finished"], data["note"]) == (report.SCHEMA, True, "a test")
    assert {"date", "commit", "changed", "seconds", "settings"} <= set(data)
    environment = data["environment"]
    assert (environment["torch"], environment["threads"]) == (torch.__version__, 1)
    assert environment["slug"].startswith("cpu-")
    assert environment["memory_bytes"] > environment["cache_bytes"] > 0
    assert {row["name"] for row in data["rows"]} >= {
        "matmul-torch-bf16-64x64x64",
        "matmul-int_mm-int8-64x64x64",
        "copy-torch-fp32-1MiB",
        "read-torch_sum-fp32-1MiB",
    }
    for row in data["rows"]:
        assert (row["status"], row["clock"]) == ("ok", "wall")
        assert 0 < row["min_ms"] <= row["median_ms"] < math.inf
        assert row["n"] >= 2
        assert row["gbs" if row["step"] == "bandwidth" else "gflops"] > 0
        assert any(line.startswith(row["name"]) for line in done.stdout.splitlines()), row["name"]


@pytest.mark.sweep
def test_a_step_that_fails_is_recorded_with_its_rows(tmp_path, monkeypatch):
    def bad(bench):
        bench.row("good")
        with bench.recorded("bad"):
            raise ValueError("planted row failure")
        raise RuntimeError("planted step failure")

    monkeypatch.setattr(probe, "STEPS", {"bad": bad, "next": lambda bench: bench.row("after")})
    path = tmp_path / "probe.jsonl"
    assert probe.main(["--device", "cpu", "--json", str(path)]) == 0
    data = lines.read(path)
    ended = [(step["step"], step["status"], step["reason"]) for step in data["steps"]]
    assert ended == [("bad", "failed", "RuntimeError: planted step failure"), ("next", "ok", None)]
    # what a step measured before it failed is kept
    assert [(row["name"], row["status"]) for row in data["rows"]] == [
        ("good", "ok"),
        ("bad", "error"),
        ("after", "ok"),
    ]
    assert data["rows"][1]["error"] == "ValueError: planted row failure"


def test_a_kill_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "probe.json"

    def killed(bench):
        bench.row("before")
        raise KeyboardInterrupt

    monkeypatch.setattr(probe, "STEPS", {"killed": killed})
    with pytest.raises(KeyboardInterrupt):
        probe.main(["--device", "cpu", "--json", str(path)])
    data = json.loads(path.read_text())
    assert data["finished"] is False
    assert [row["name"] for row in data["rows"]] == ["before"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["probe.json"]  # no temporary left


# ---- Device-only code, without the device ----


@pytest.fixture
def fake_run(monkeypatch):
    """Run a GPU's step on fake tensors: shapes, dtypes and arguments are checked, nothing is computed.

    Every call runs once and takes a millisecond.
    """

    def once(candidates, device, *, clock=None, **options):
        for calls in candidates.values():
            for call in [calls] if callable(calls) else calls:
                call()
        return {name: timing.Timing(1.0, 1.0, 0.0, 1, 1, clock or "event") for name in candidates}

    monkeypatch.setattr(probe_steps, "interleave", once)
    monkeypatch.setattr(probe_steps, "synchronize", lambda device: None)
    monkeypatch.setattr(probe_steps, "rotations", lambda size, device, limit=16: 2)
    monkeypatch.setattr(probe_steps, "memory_bytes", lambda device: 64 << 30)

    def run(step) -> list[dict]:
        rows: list[dict] = []
        with FakeTensorMode():
            step(probe_steps.Bench(torch.device("cuda"), False, rows.append))
        return rows

    return run


@pytest.mark.sweep
def test_gpu_matrix_step_covers_every_dtype_at_full_size(fake_run):
    rows = fake_run(probe_steps.step_matrix)
    assert [row for row in rows if row["status"] == "error"] == []
    assert [row["name"] for row in rows] == [
        f"matmul-{kind}-8192x8192x8192"
        for kind in (
            "torch-bf16",
            "torch-fp16",
            "torch-tf32",
            "torch-fp32",
            "scaled_mm-fp8_tensorwise",
            "scaled_mm-fp8_rowwise",
            "int_mm-int8",
        )
    ]
    assert all(row["gflops"] == 2 * 8192**3 / 1e6 for row in rows)
    assert torch.get_float32_matmul_precision() == "highest"


def test_graph_clock_captures_the_rotation_and_times_replays(monkeypatch):
    """On streams, events and graphs that are a log; each pair of events is 1 ms apart."""
    log: list[str] = []

    class Stream:
        def wait_stream(self, other):
            pass

    class Graph:
        def replay(self):
            log.append("replay")

    class Event:
        def record(self):
            log.append("event")

        def synchronize(self):
            pass

        def query(self):
            return False

        def elapsed_time(self, end):
            return 1.0

    @contextlib.contextmanager
    def capture(graph, stream=None):
        log.append("capture")
        yield
        log.append("captured")

    for name, fake in {
        "Stream": lambda device=None: Stream(),
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: log.append("synchronize"),
        "CUDAGraph": Graph,
        "graph": capture,
        "Event": lambda enable_timing: Event(),
        "_sleep": lambda cycles: log.append("spin"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    calls = [lambda name=name: log.append(name) for name in "abc"]
    result = timing.measure(calls, "cuda", clock="graph", seconds=0.004, samples=(2, 9), warmup=1)
    # one call costs 1 ms here and a sample should last 2 ms, but all three buffers must be in it
    assert sorted(log[log.index("capture") + 1 : log.index("captured")]) == ["a", "b", "c"]
    timed = ["spin", "event", "replay", "event"] * 2
    assert log[log.index("captured") + 1 :] == ["replay", "synchronize", *timed]
    assert (result.median_ms, result.n, result.inner, result.clock) == (1 / 3, 2, 3, "graph")
    assert (result.samples_ms, result.launch_bound) == ((1 / 3, 1 / 3), 0)


# ---- Workloads ----


def test_squad_lengths_are_mlperfs():
    histogram = workloads.squad_histogram()
    windows = sum(count for _, count in histogram)
    assert windows == 10_833
    assert sum(tokens * count for tokens, count in histogram) / windows == pytest.approx(178.5, abs=0.05)
    assert histogram[-1][0] == 384
    gflops = sum(workloads.encoder_flops((t,), workloads.LARGE) * n for t, n in histogram) / windows / 1e9
    assert gflops == pytest.approx(111.4, abs=0.05)


@pytest.mark.parametrize("name", ["squad", "ragged16", "ragged64"])
def test_drawn_lengths_repeat_and_keep_the_mean(name):
    drawn = workloads.lengths(name)
    assert drawn == workloads.lengths(name, seed=0) != workloads.lengths(name, seed=1)
    assert set(drawn) <= {tokens for tokens, _ in workloads.squad_histogram()}
    # results of different machines and dates are comparable only while the draw stays
    assert name == "ragged64" or sum(drawn) == {"squad": 17_177, "ragged16": 2_860}[name]
    for seed in range(20):
        assert sum(workloads.lengths(name, seed)) / len(drawn) == pytest.approx(178.5, rel=0.04)


# ---- Timing ----


def test_summary_is_median_and_quartiles():
    summary = timing.summarise([4.0, 1.0, 2.0, 3.0, 100.0], 7, "wall")
    assert (summary.median_ms, summary.min_ms, summary.n, summary.inner) == (3.0, 1.0, 5, 7)
    assert summary.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert timing.summarise([2.0], 1, "wall").spread == 0.0
    with pytest.raises(ValueError, match="samples_ms"):
        timing.summarise([], 1, "wall")


def test_candidates_take_turns_and_buffers_rotate():
    log: list[str] = []

    def call(name: str):
        def run():
            log.append(name)
            time.sleep(0.002)

        return run

    candidates = {"x": [call("x0"), call("x1")], "y": call("y")}
    result = timing.interleave(candidates, "cpu", seconds=0.0, samples=(4, 4), warmup=1)
    assert log[2:] == ["x1", "y", "x0", "y", "x1", "y", "x0", "y"]
    assert {name: t.n for name, t in result.items()} == {"x": 4, "y": 4}
