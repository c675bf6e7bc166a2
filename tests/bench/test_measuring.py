"""Memory, roofs and timing: what is measured."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from bench import memory
from bench.lib import roofs, timing
from bench.lib.probe_steps import Bench
from tests.support.benches import ROOT
from tests.support.stand_in_stream import Stream

# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_memory_grows_with_the_batch():
    small, large = (
        next(memory.bench_memory("tiny", "a", ("fastbert-fp32",), lengths=lengths))
        for lengths in ((8,), (512,) * 64)
    )
    for row in (small, large):
        assert row["status"] == "ok", row
        assert row["peak_mib"] == pytest.approx(row["loaded_mib"] + row["above_mib"])
    # a layer's input and output: 64 x 512 tokens x 2 x 64 floats are 16 MiB; less what the small one kept
    assert large["above_mib"] - small["above_mib"] > 10
    assert large["above_mib"] < 500


@pytest.mark.sweep
def test_a_peak_is_forgotten():
    code = (
        "from bench.lib import resident\n"
        "block = bytearray(200 << 20)\n"
        "held = resident.status_mib('VmHWM')\n"
        "del block\n"
        "assert held > 200\n"
        "print(resident.forget_peak(), resident.status_mib('VmHWM') < held - 150)\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"  # by hand: an OSError where forbidden
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if "Error" in done.stderr and "clear_refs" in done.stderr.splitlines()[-1]:
        assert done.stdout.split() == ["False", "False"]
        pytest.skip("this kernel does not let a process reset its VmHWM")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.sweep
def test_a_process_that_fails_or_hangs_is_a_row():
    [row] = memory.bench_memory("tiny", "a", ("fastbert-fp8",), lengths=(4,))
    assert row["status"] == "error"
    assert "the process ended with status 1: KeyError: 'fp8'" in row["error"]
    [row] = memory.bench_memory("tiny", "a", ("fastbert-fp32",), lengths=(4,), timeout=0.01)
    assert row["status"] == "error"
    assert "timed out" in row["error"]


# --- the roofs ----------------------------------------------------------------------------------------------


def test_no_roof_is_below_a_wider_dtypes():
    row = {"status": "ok"}
    rows = [
        {**row, "name": "matmul-torch-fp32-8x8x8", "gflops": 300.0},
        {**row, "name": "matmul-torch-tf32-8x8x8", "gflops": 9000.0},
        {**row, "name": "peak-registers-fp32-avx2", "gflops": 350.0},
        {**row, "name": "matmul-torch-bf16-8x8x8", "gflops": 200.0},
        {**row, "name": "matmul-int_mm-int8-8x8x8", "status": "error"},
        {**row, "name": "copy-torch-fp32-1MiB", "gbs": 20.0},
        {**row, "name": "write-torch-fp32-1MiB", "gbs": 10.0},
    ]
    found = roofs.from_rows(rows)
    assert found.gflops == {"fp32": 350.0, "fp16": 350.0, "bf16": 350.0, "int8": 350.0}
    assert found.gbytes == 20.0
    assert found.seconds(700e9, 1e9, "fp32") == pytest.approx(2.0)
    assert found.seconds(7e9, 1e9, "fp32") == pytest.approx(0.05)
    for missing in (rows[3:], rows[:5]):
        with pytest.raises(RuntimeError, match="no roof"):
            roofs.from_rows(missing)


@pytest.mark.sweep
def test_register_loops_do_the_work_they_count(tmp_path):
    try:
        library = roofs.build(tmp_path, "peak")
    except RuntimeError as error:
        pytest.skip(str(error))
    assert library.peak_operations(17) == 0
    library.peak_run(17, 10)  # nothing, and no harm
    rows: list[dict] = []
    bench = Bench(torch.device("cpu"), True, rows.append)
    bench.step = "registers"
    roofs.register_peaks(bench, library, 2)
    supported = [n for i, n in enumerate(roofs.REGISTER_LOOPS) if library.peak_operations(i)]
    assert [row["name"] for row in rows] == [f"peak-registers-{name}" for name in supported]
    for row in rows:
        kind = roofs.REGISTER_LOOPS.index(row["name"].removeprefix("peak-registers-"))
        counted = 2 * library.peak_operations(kind) * row["inner"] / row["median_ms"] / 1e6
        assert row["gflops"] == pytest.approx(counted)


# --- timing -------------------------------------------------------------------------------------------------


def test_events_measure_the_device_alone(monkeypatch):
    stream = Stream().install(monkeypatch)
    candidates = {
        "small": [lambda: stream.kernel(0.1, 0.01)] * 3,
        "large": lambda: stream.kernel(0.02, 0.5),
        "waits": lambda: (stream.kernel(0.1, 0.01), stream.wait()),
    }
    found = timing.interleave(candidates, "cuda", samples=(5, 20), seconds=0.05)
    assert {t.clock for t in found.values()} == {"event"}
    small, large, waits = found.values()
    assert (small.median_ms, small.host_ms) == (pytest.approx(0.01), pytest.approx(0.1))
    assert small.spread == pytest.approx(0.0, abs=1e-9)
    # as many calls as the host enqueues in time, and a spin that lasts a little longer
    assert small.inner in (int(timing.ENQUEUE_MS / 0.1), int(timing.ENQUEUE_MS / 0.1) - 1)
    assert (small.launch_bound, large.launch_bound) == (0, 0)
    assert (large.median_ms, large.inner) == (pytest.approx(0.5), 4)
    assert waits.launch_bound == waits.n
    # the spin counts as time: 0.05 s are 10 samples of 4.5 ms for it and 0.3 ms for the calls
    assert small.n == 10
    row = asdict(large)
    assert {"host_ms", "launch_bound"} <= {name for name, value in row.items() if value is not None}


def test_without_warm_up_the_spin_grows(monkeypatch):
    stream = Stream().install(monkeypatch)
    found = timing.measure(
        [lambda: stream.kernel(0.3, 0.01)] * 4, "cuda", warmup=0, samples=(3, 3), seconds=0.0
    )
    assert (found.inner, found.launch_bound) == (4, 0)
    assert found.median_ms == pytest.approx(0.01)
