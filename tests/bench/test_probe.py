"""The probe runs its code on tiny shapes here; no test checks a time."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # bench/ is part of the checkout, not of the package

from bench import probe  # noqa: E402
from bench.lib import lines, probe_steps, report, timing, workloads  # noqa: E402

PROBE = [sys.executable, str(ROOT / "bench" / "probe.py"), "--device", "cpu", "--smoke", "--threads", "1"]
QUIET = os.environ | {"OMP_NUM_THREADS": "1"}


def probe_run(path: Path, *steps: str, extra: tuple[str, ...] = ()) -> dict:
    """Run the probe's tiny mode and return what it wrote."""
    command = [*PROBE, "--json", str(path), *extra]
    for step in steps:
        command += ["--only", step]
    done = subprocess.run(command, env=QUIET, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    lines = done.stdout.splitlines()
    for row in data["rows"]:  # every recorded row was printed too
        assert any(line.startswith(row["name"]) for line in lines), row["name"]
    return data


# ---- The whole command ----


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> dict:
    steps = ("matrix", "bandwidth", "launch", "gemm", "sdpa")
    path = tmp_path_factory.mktemp("probe") / "deep" / "probe.json"
    return probe_run(path, *steps, extra=("--note", "a test"))


@pytest.mark.sweep
def test_json_says_what_was_measured_where(smoke):
    assert smoke["schema"] == report.SCHEMA
    assert smoke["finished"] is True
    assert smoke["note"] == "a test"
    assert {"date", "commit", "changed", "seconds", "settings"} <= set(smoke)
    environment = smoke["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["device_type"] == "cpu"
    assert environment["slug"].startswith("cpu-")
    assert environment["threads"] == 1
    assert environment["cpu"]["cores"] >= 1
    assert environment["memory_bytes"] > environment["cache_bytes"] > 0


@pytest.mark.sweep
def test_every_row_has_its_figures(smoke):
    timed = [row for row in smoke["rows"] if "median_ms" in row]
    for row in timed:
        assert row["status"] == "ok"
        assert row["clock"] == "wall"
        assert 0 < row["min_ms"] <= row["median_ms"] < math.inf
        assert row["n"] >= 2
        assert row["inner"] >= 1
        assert row["spread"] >= 0
        assert row["step"] == "launch" or row["cpu_ms"] >= 0
        if row["step"] != "launch":
            rate = "gbs" if row["step"] == "bandwidth" else "gflops"
            assert row[rate] > 0
    names = {row["name"] for row in timed}
    for name in (
        "matmul-torch-bf16-64x64x64",
        "matmul-int_mm-int8-64x64x64",
        "copy-torch-fp32-1MiB",
        "read-torch_sum-fp32-1MiB",
        "launch-host-custom_op",
        "linear-torch-bf16-8x192x64-bias_gelu",
        "attention_fwd-sdpa_flash-fp32-1x16x2x16",
        "attention_bwd-sdpa_math-fp32-1x16x2x16",
    ):
        assert name in names
    assert {row["step"] for row in timed} == {"matrix", "bandwidth", "launch", "gemm", "sdpa"}
    assert not [row for row in smoke["rows"] if row["status"] == "error"]


def test_a_step_that_fails_is_recorded_with_its_rows(tmp_path, monkeypatch):
    def bad(bench):
        bench.row("good")
        with bench.recorded("bad"):
            raise ValueError("planted row failure")
        raise RuntimeError("planted step failure")

    steps = (probe_steps.Step("bad", bad), probe_steps.Step("next", lambda bench: bench.row("after")))
    monkeypatch.setattr(probe, "STEPS", steps)
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

    monkeypatch.setattr(probe, "STEPS", (probe_steps.Step("killed", killed),))
    with pytest.raises(KeyboardInterrupt):
        probe.main(["--device", "cpu", "--json", str(path)])
    data = json.loads(path.read_text())
    assert data["finished"] is False
    assert [row["name"] for row in data["rows"]] == ["before"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["probe.json"]  # no temporary left


def test_a_spent_budget_skips_the_rest(tmp_path):
    path = tmp_path / "probe.json"
    arguments = ["--device", "cpu", "--json", str(path), "--only", "launch", "--only", "sdpa"]
    assert probe.main([*arguments, "--budget", "1e-9"]) == 0
    data = json.loads(path.read_text())
    assert [(s["step"], s["status"], s["reason"]) for s in data["steps"]] == [
        ("launch", "skipped", "budget"),
        ("sdpa", "skipped", "budget"),
    ]
    assert data["rows"] == []
    assert data["finished"] is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nonsense"], "--only: got nonsense, expected one of matrix"),
        (["--budget", "-3"], "got -3, expected a number of seconds above 0"),
        (["--budget", "nan"], "expected a number of seconds above 0"),
        (["--threads", "0"], "got 0, expected a whole number above 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said, capfd):
    try:
        code = probe.main(["--device", "cpu", *arguments])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert said in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused(capfd):
    assert probe.main(["--device", "cuda"]) == 2
    assert "--device: got cuda, but torch finds no CUDA device" in capfd.readouterr().err


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "probe.json"
    report.write_atomically(path, {"old": 1})
    with pytest.raises(TypeError):
        report.write_atomically(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["probe.json"]


def test_as_a_script_bench_is_not_on_the_path():
    path = str(ROOT / "bench" / "probe.py")
    code = (
        "import runpy, sys\n"
        f"sys.path[0] = {str(ROOT / 'bench')!r}\n"  # what `python bench/probe.py` begins with
        f"runpy.run_path({path!r}, run_name='script')\n"
        f"assert sys.path[0] == {str(ROOT)!r}, sys.path\n"
        f"assert {str(ROOT / 'bench')!r} not in sys.path\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- Device-only code, without the device ----


class RecordedBench(probe_steps.Bench):
    """A bench whose rows are kept in a list."""

    def __init__(self, device: str, smoke: bool):
        self.rows: list[dict] = []
        super().__init__(torch.device(device), smoke, self.rows.append)


@pytest.fixture
def untimed(monkeypatch):
    """Every call runs once and takes a millisecond; no GPU is used."""

    def once(candidates, device, *, clock=None, **options):
        for calls in candidates.values():
            for call in [calls] if callable(calls) else calls:
                call()
        return {name: timing.Timing(1.0, 1.0, 0.0, 1, 1, clock or "event") for name in candidates}

    monkeypatch.setattr(probe_steps, "interleave", once)
    monkeypatch.setattr(probe_steps, "synchronize", lambda device: None)
    monkeypatch.setattr(probe_steps, "rotations", lambda size, device, limit=16: 2)
    monkeypatch.setattr(probe_steps, "memory_bytes", lambda device: 64 << 30)


def fake_run(run, smoke: bool = False) -> list[dict]:
    """Run a GPU step on fake tensors: shapes, dtypes and arguments are checked, nothing is computed."""
    with FakeTensorMode():
        bench = RecordedBench("cuda", smoke)
        bench.step = "fake"
        run(bench)
    return bench.rows


@pytest.mark.sweep
def test_gpu_matrix_step_covers_every_dtype_at_full_size(untimed):
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


@pytest.mark.sweep
def test_gpu_bandwidth_step(untimed):
    rows = fake_run(probe_steps.step_bandwidth)
    expected = {
        "copy-torch-fp32-1024MiB": (2 << 30) / 1e6,
        "read-torch_sum-fp32-1024MiB": (1 << 30) / 1e6,
        "write-torch_fill-fp32-1024MiB": (1 << 30) / 1e6,
        "copy-torch-bf16-16384x768": 2 * 16384 * 768 * 2 / 1e6,
        "add-torch-bf16-16384x768": 3 * 16384 * 768 * 2 / 1e6,
    }
    assert {row["name"] for row in rows} == set(expected)
    for row in rows:
        if row["status"] == "error":  # a CPU build of torch cannot copy fake CUDA tensors
            assert row["name"].startswith("copy-")
            assert "not linked with support for cuda" in row["error"]
        else:
            assert row["gbs"] == expected[row["name"]]


@pytest.mark.sweep
def test_gpu_gemm_step_covers_every_shape(untimed):
    rows = fake_run(probe_steps.step_gemm)
    # the fused GELU operator asks the device its properties even for fake tensors
    errors = [row["name"] for row in rows if row["status"] == "error"]
    assert all(name.endswith("-bias_fused_gelu") for name in errors)
    shapes = {tuple(map(int, row["name"].split("-")[3].split("x"))) for row in rows}
    weights = {(2304, 768), (768, 768), (3072, 768), (768, 3072)}
    weights |= {(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)}
    assert shapes == {(t, n, k) for t in (128, 384, 2048, 4096, 8192, 16384) for n, k in weights}
    assert len(rows) == len(shapes) * 4


def gpu_plan_on_cpu(run) -> list[dict]:
    """Run the GPU plan of a step with tiny shapes on the CPU: autograd has no fake CUDA tensors."""
    bench = RecordedBench("cpu", smoke=True)
    bench.step, bench.cuda = "planned", True
    run(bench)
    return bench.rows


@pytest.mark.sweep
def test_gpu_sdpa_step_covers_every_backend(untimed):
    rows = gpu_plan_on_cpu(probe_steps.step_sdpa)
    assert {row["name"] for row in rows} == {
        f"attention_{way}-sdpa_{backend}-fp32-1x16x2x16{dropout}"
        for way in ("fwd", "bwd")
        for backend in ("flash", "efficient", "cudnn", "math")
        for dropout in ("", "-dropout0.1")
    }
    # a CPU has only flash (without dropout) and math
    done = {row["name"] for row in rows if row["status"] == "ok"}
    assert {name for name in done if "math" in name} == {row["name"] for row in rows if "math" in row["name"]}
    assert {f"attention_{way}-sdpa_flash-fp32-1x16x2x16" for way in ("fwd", "bwd")} <= done


@pytest.fixture
def fake_cuda(monkeypatch) -> list[str]:
    """Replace CUDA's streams, events and graphs by a log; each pair of events is 1 ms apart."""
    log: list[str] = []

    class Stream:
        def __init__(self, *args):
            pass

        def wait_stream(self, other):
            log.append("wait")

    class Graph:
        def replay(self):
            log.append("replay")

    class Captured:
        def __init__(self, graph, stream=None):
            assert isinstance(graph, Graph)
            assert stream is None or isinstance(stream, Stream)

        def __enter__(self):
            log.append("capture")

        def __exit__(self, *error):
            log.append("captured")

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            pass

        def query(self):
            log.append("query")
            return False

        def elapsed_time(self, end):
            return 1.0

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Captured)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("spin"))
    return log


def test_graph_clock_captures_the_rotation_and_times_replays(fake_cuda):
    log = fake_cuda
    calls = [lambda name=name: log.append(name) for name in "abc"]
    result = timing.measure(calls, "cuda", clock="graph", seconds=0.004, samples=(2, 9), warmup=1)
    inside = log[log.index("capture") + 1 : log.index("captured")]
    # one call costs 1 ms here and a sample should last 2 ms, but all three buffers must be in it
    assert sorted(inside) == ["a", "b", "c"]
    assert log[log.index("captured") + 1 :] == [
        "replay",
        "synchronize",
        *["spin", "event", "replay", "query", "event"] * 2,
    ]
    assert result.host_ms > 0
    result = dataclasses.replace(result, host_ms=None)
    assert result == timing.Timing(
        1 / 3, 1 / 3, 0.0, 2, 3, "graph", samples_ms=(1 / 3, 1 / 3), launch_bound=0
    )


def test_event_clock_spins_before_the_first_event(fake_cuda):
    log = fake_cuda
    result = timing.measure(lambda: log.append("call"), "cuda", seconds=0.0, samples=(1, 1), warmup=1)
    warm, timed = (
        ["spin", "event", "call", "query", "event"],
        ["spin", "event", "call", "call", "query", "event"],
    )
    assert log == warm + timed
    assert result.host_ms > 0
    result = dataclasses.replace(result, host_ms=None)
    assert result == timing.Timing(0.5, 0.5, 0.0, 1, 2, "event", samples_ms=(0.5,), launch_bound=0)


def test_gpu_launch_step(untimed, fake_cuda):
    rows = gpu_plan_on_cpu(probe_steps.step_launch)
    assert {row["name"]: row["status"] for row in rows} == dict.fromkeys(
        (
            *(f"launch-host-{call}" for call in ("add_", "clone", "autograd_function", "custom_op")),
            "launch-eager-add_-synchronize",
            "launch-eager-kernel",
            "launch-graph-kernel",
            "launch-graph-1_kernels-synchronize",
            "launch-graph-60_kernels-synchronize",
        ),
        "ok",
    )
    assert fake_cuda.count("capture") == 2


class FakeDriver:
    """A stand-in for libcuda: checks its arguments, and says that 132 SMs hold one block each."""

    def __init__(self, fail: str = ""):
        self.fail, self.attributes, self.asked = fail, {}, []

    def __getattr__(self, name):
        if name == self.fail:
            return lambda *args: 999
        return {
            "cuCtxGetDevice": lambda device: 0,
            "cuDeviceGetAttribute": self.device_attribute,
            "cuModuleLoadData": lambda module, ptx: 0 if b"cluster_probe" in ptx.value else 218,
            "cuModuleGetFunction": lambda kernel, module, name: 0 if name.value == b"cluster_probe" else 500,
            "cuFuncSetAttribute": self.set_attribute,
            "cuOccupancyMaxActiveClusters": self.occupancy,
            "cuGetErrorName": self.error_name,
        }[name]

    def device_attribute(self, value, attribute, device):
        assert attribute.value == 97
        value._obj.value = 232448
        return 0

    def set_attribute(self, kernel, attribute, value):
        self.attributes[attribute.value] = value.value
        return 0

    def occupancy(self, count, kernel, config):
        config = config._obj
        assert config.attribute_count == 1
        assert config.attributes[0].id == 4
        size = config.attributes[0].value[0]
        assert list(config.attributes[0].value[1:3]) == [1, 1]
        assert config.grid[0] % size == 0
        self.asked.append((size, config.block[0], config.shared_bytes))
        count._obj.value = 132 // size
        return 0

    def error_name(self, code, text):
        text._obj.value = b"CUDA_ERROR_UNKNOWN"
        return 0


def test_cluster_query_asks_the_driver_rightly():
    driver = FakeDriver()
    query = probe_steps.ClusterQuery(driver)
    assert query.most_shared_bytes == 232448
    assert driver.attributes == {8: 232448, 14: 1}  # all shared memory; clusters of 16 allowed
    assert [query.clusters(size, 384, 232448, 132) for size in (1, 2, 4, 8)] == [132, 66, 33, 16]
    assert driver.asked[1] == (2, 384, 232448)
    with pytest.raises(
        RuntimeError, match=r"cuOccupancyMaxActiveClusters returned 999 \(CUDA_ERROR_UNKNOWN\)"
    ):
        probe_steps.ClusterQuery(FakeDriver("cuOccupancyMaxActiveClusters")).clusters(2, 384, 0, 132)


def test_launch_structures_have_the_drivers_layout():
    # CUlaunchConfig and CUlaunchAttribute as a C compiler lays them out from cuda.h of CUDA 13.0
    config, attribute = probe_steps._LaunchConfig, probe_steps._LaunchAttribute
    assert (ctypes.sizeof(config), ctypes.sizeof(attribute)) == (56, 72)
    assert (config.shared_bytes.offset, config.stream.offset) == (24, 32)
    assert (config.attributes.offset, config.attribute_count.offset) == (40, 48)
    assert attribute.value.offset == 8


def ptxas() -> str | None:
    """An assembler: the toolkit's or the one inside Triton."""
    if found := shutil.which("ptxas"):
        return found
    try:
        import triton
    except ImportError:
        return None
    inside = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return str(inside) if inside.exists() else None


@pytest.mark.skipif(ptxas() is None, reason="needs ptxas, from a CUDA toolkit or from Triton")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_cluster_kernel_assembles(arch, tmp_path):
    source, target = tmp_path / "cluster.ptx", tmp_path / "cluster.cubin"
    source.write_text(probe_steps.CLUSTER_PTX)
    command = [ptxas(), f"-arch={arch}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if arch != "sm_90" and "is not defined for option" in done.stderr:
        pytest.skip(f"this ptxas does not know {arch}")
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size > 0


def test_clusters_need_hopper(monkeypatch, untimed):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    (row,) = fake_run(probe_steps.step_cluster)
    assert row["status"] == "error"
    assert "needs compute capability 9.0, this device has 8.0" in row["error"]


def test_steps_come_in_order_of_priority():
    cuda = [step.name for step in probe.choose_steps(None, "cuda")]
    assert cuda == ["matrix", "bandwidth", "launch", "cluster", "gemm", "sdpa"]
    cpu = [step.name for step in probe.choose_steps(None, "cpu")]
    assert cpu == [name for name in cuda if name != "cluster"]
    with pytest.raises(ValueError, match=r"--only: got cluster, expected one of matrix, .* on cpu"):
        probe.choose_steps(["cluster"], "cpu")


# ---- Workloads ----


def test_squad_lengths_are_mlperfs():
    histogram = workloads.squad_histogram()
    windows = sum(count for _, count in histogram)
    assert windows == 10_833
    assert sum(tokens * count for tokens, count in histogram) / windows == pytest.approx(178.5, abs=0.05)
    assert histogram[-1][0] == 384
    gflops = sum(workloads.encoder_flops((t,), workloads.LARGE) * n for t, n in histogram) / windows / 1e9
    assert gflops == pytest.approx(111.4, abs=0.05)


def test_workload_sizes():
    sizes = {name: (len(workloads.lengths(name)), sum(workloads.lengths(name))) for name in workloads.FIXED}
    assert sizes == {
        "full": (32, 16384),
        "latency-128": (1, 128),
        "latency-384": (1, 384),
        "train": (48, 24576),
        "short": (256, 10248),
        "1x128": (1, 128),
        "1x512": (1, 512),
        "8x128": (8, 1024),
    }
    assert {name: len(workloads.lengths(name)) for name in workloads.DRAWN} == {
        "squad": 96,
        "ragged16": 16,
        "ragged64": 64,
    }
    assert workloads.expand("latency") == ("latency-128", "latency-384")
    assert workloads.encoder_flops(workloads.lengths("full"), workloads.BASE) / 1e12 == pytest.approx(
        3.09, abs=0.01
    )


@pytest.mark.parametrize("name", ["squad", "ragged16", "ragged64"])
def test_drawn_lengths_repeat_and_keep_the_mean(name):
    drawn = workloads.lengths(name)
    assert drawn == workloads.lengths(name, seed=0) != workloads.lengths(name, seed=1)
    assert set(drawn) <= {tokens for tokens, _ in workloads.squad_histogram()}
    for seed in range(20):
        mean = sum(workloads.lengths(name, seed)) / len(drawn)
        assert mean == pytest.approx(178.5, rel=0.04)


def test_the_draw_of_seed_zero_is_pinned():
    # results of different machines and dates are comparable only while this holds
    assert sum(workloads.lengths("squad")) == 17_177
    assert (sum(workloads.lengths("ragged16")), max(workloads.lengths("ragged16"))) == (2_860, 326)


@pytest.mark.parametrize("name", ["latency", "bogus"])
def test_a_name_that_is_no_batch_is_refused(name):
    with pytest.raises(ValueError, match="name:"):
        workloads.lengths(name)


def test_padded_inputs_match_their_lengths():
    inputs = workloads.padded_inputs((5, 2, 7), 211, "cpu", seed=3)
    assert inputs["attention_mask"].sum(1).tolist() == [5, 2, 7]
    assert int(inputs["input_ids"].max()) < 211
    assert int(inputs["input_ids"][1, 2:].abs().sum()) == 0
    again = workloads.padded_inputs((5, 2, 7), 211, "cpu", seed=3)
    assert all(torch.equal(inputs[key], again[key]) for key in inputs)
    assert "attention_mask" not in workloads.padded_inputs((4, 4), 211, "cpu")


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


def test_clocks_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="clock: got 'sundial'"):
        timing.measure(lambda: None, "cpu", clock="sundial")
    with pytest.raises(ValueError, match="clock: got 'graph' on cpu, expected 'wall'"):
        timing.measure(lambda: None, "cpu", clock="graph")
    with pytest.raises(ValueError, match="calls: got an empty sequence"):
        timing.measure([], "cpu")


def test_rotation_exceeds_the_cache_twice(monkeypatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 60 << 20)
    assert timing.rotations(40 << 20, "cpu") == 3
    assert timing.rotations(1 << 30, "cpu") == 1
    assert timing.rotations(1, "cpu", limit=16) == 16
