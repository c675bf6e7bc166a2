"""`bench_cpu` as a whole: rows, budgets, ratios, and which units it plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import bench_cpu, memory
from bench.lib import engines, kernels, plan, roofs, training
from fastbert import testing
from fastbert.runtime import dispatch
from tests.support.benches import ROOFS, has, run

# --- the whole command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict, str, Path]:
    """(report of bench_cpu.py, its output, its folder) for a tiny model."""
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
        "encoder-tiny": "ok",
        "training-tiny-8x128-pretraining": "ok",
        "training-tiny-8x128-classification": "ok",
        "kernels-base-8x128": "ok",
    }
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
        "openvino-bf16",
        "torch_compile-fp32",
        "torch_compile-bf16",
    }
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
    monkeypatch.setattr(kernels.testing, "bench_cases", broken)
    monkeypatch.setattr(  # the plan asks for the cases too
        plan, "kernels_units", lambda names, ops, r: [*planned(names, ["packing"], r), _unit("layer_norm")]
    )
    assert bench_cpu.main([*options, "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "bench_cpu.json").read_text())
    assert [(s["step"], s["status"]) for s in data["steps"]] == [
        ("encoder-tiny", "failed"),
        ("kernels-base-1x128", "ok"),
    ]
    assert data["steps"][0]["reason"] == "OSError: planted"
    rows = [(row["op"], row["status"]) for row in data["rows"] if row["step"] == "kernels"]
    assert ("packing", "ok") in rows
    assert rows[-1] == ("layer_norm", "error")


def _unit(op: str) -> plan.Unit:
    return plan.Unit("kernels", "base", "1x128", op, 1.0, 0)


# --- the plan -----------------------------------------------------------------------------------------------


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
