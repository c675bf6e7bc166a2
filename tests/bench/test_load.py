"""The benchmark beside a busy neighbour runs and says what it measured; speeds are not checked here."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

from bench import bench_load


def test_a_whole_run(tmp_path, capsys):
    options = [
        "--smoke",
        "--models",
        "tiny",
        "--candidates",
        "fastbert-fp32",
        "fastbert-int8",
        "--samples",
        "2",
    ]
    threads = str(torch.get_num_threads())
    status = bench_load.main(
        [*options, "--threads", threads, "--out", str(tmp_path), "--other", str(bench_load.ROOT)]
    )
    data = json.loads((tmp_path / "bench_load.json").read_text())
    printed = capsys.readouterr().out
    assert (status, data["finished"], data["other"]) == (0, True, True)
    names = ["fastbert-fp32", "fastbert-int8", "other-fp32", "other-int8"]
    assert [row["candidate"] for row in data["rows"]] == names
    for row in data["rows"]:
        assert row["status"] == "ok"
        assert row["n"] == 2
        assert min(row["quiet_ms"], row["busy_ms"]) > 0
        assert row["loss"] == row["busy_ms"] / row["quiet_ms"]
        assert bench_load.line(row) in printed
    assert {row["of"] for row in data["verdicts"]} == {"other"}


def test_an_engine_that_fails_is_an_error_row(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_load, "PAUSE_SECONDS", 0.0)
    arguments = ["--models", "tiny", "--candidates", "fastbert-fp32", "--samples", "1", "--smoke"]
    missing = tmp_path / "nothing"
    missing.mkdir()
    status = bench_load.main([*arguments, "--out", str(tmp_path), "--other", str(missing)])
    rows = json.loads((tmp_path / "bench_load.json").read_text())["rows"]
    assert status == 1
    assert [(row["status"], row["name"]) for row in rows if row["status"] == "error"] == [
        ("error", "load-other-fp32-tiny")
    ]


def test_verdicts_compare_with_the_best_peer_of_the_precision():
    def row(name, quiet, busy):
        what = {"model": "base", "workload": "1x128", "status": "ok", "candidate": name}
        return {**what, "quiet_ms": quiet, "busy_ms": busy, "loss": busy / quiet}

    rows = [
        row("fastbert-fp32", 10.0, 18.0),
        row("openvino-fp32", 12.0, 24.0),
        row("onnxruntime-fp32", 20.0, 22.0),
        row("fastbert-int8", 5.0, 9.0),
        row("other-fp32", 11.0, 36.0),
    ]
    first, second = bench_load.verdicts(rows)
    assert (first["best_peer"], first["best_peer_loss"]) == ("onnxruntime-fp32", 1.1)
    assert (first["busy_ratio_to"], first["busy_ratio"]) == ("onnxruntime-fp32", 22.0 / 18.0)
    assert (second["quiet_ratio"], second["busy_ratio"]) == (1.1, 2.0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stopped neighbour stays")
@pytest.mark.parametrize("state", ["pause", "resume"])
def test_the_neighbour_ends_with_a_benchmark_that_is_killed(state):
    script = (
        "import sys, time; from bench import bench_load; n = bench_load.Neighbour(False); time.sleep(0.5); "
    )
    script += f"n.{state}(); print(n.process.pid, flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=bench_load.ROOT, stdout=subprocess.PIPE, text=True
    ) as run:
        neighbour = pathlib.Path("/proc", run.stdout.readline().strip(), "stat")
        assert neighbour.exists()
        os.kill(run.pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while neighbour.exists() and neighbour.read_text().split(") ")[1][0] != "Z":  # a zombie has ended
        assert time.monotonic() < end
        time.sleep(0.02)
