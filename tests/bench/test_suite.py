"""The benchmark suite: interleaved candidates, what a row may claim, the comparison of two runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench import compare
from bench.lib import engines, kernels, results, tables, timing, turns
from bench.lib.probe_steps import reason_of
from fastbert import testing
from fastbert.backends import aten
from tests.support.benches import ROOT, suite


def row(candidate: str, ms: float = 1.0, **facts: object) -> dict:
    """A measured row."""
    samples = facts.pop("samples_ms", [ms, ms, ms])
    timed = {"median_ms": ms, "min_ms": min(samples), "spread": 0.0, "n": len(samples), "inner": 1}
    return {"candidate": candidate, "status": "ok", "samples_ms": samples} | timed | facts


def test_each_sample_is_taken_within_its_candidates_context():
    events = []

    class Pin:
        def __enter__(self):
            events.append("in")

        def __exit__(self, *error):
            events.append("out")

    calls = {name: lambda name=name: events.append(name) for name in "ab"}
    timing.interleave(calls, "cpu", samples=(2, 2), warmup=0, inner=1, within={"b": Pin})
    inside = ["in", "out", "a", "in", "b", "out", "a", "in", "b", "out"]
    assert events == inside  # first its warm-up, of no call


def test_ratios_are_of_one_precision_and_honest():
    rows = [
        row("fastbert-fp32", 2.0),
        row("transformers-fp32", 5.0),
        row("openvino-fp32", 3.0, spread=0.5),
        row("onnxruntime-fp32", 1.0, cosine=0.5),
        {"candidate": "torch_compile-fp32", "status": "error", "error": "none"},
        row("transformers-bf16", 1.0),
        row("fastbert-bf16", 1.0),
    ]
    group = turns.Group("g", [each["candidate"] for each in rows])
    group.measure(lambda wanted: rows)
    assert group.rows["fastbert-fp32"]["over"] == {
        "transformers-fp32": 2.5,
        "openvino-fp32": "too noisy: openvino-fp32",
        "onnxruntime-fp32": "incorrect",
        "torch_compile-fp32": "error",
    }
    assert group.rows["fastbert-bf16"]["over"] == {"transformers-bf16": 1.0}
    assert group.rows["transformers-fp32"]["over"] == {}


def test_a_group_is_measured_once_and_a_failure_costs_no_row_before_it():
    asked = []

    def rows(wanted):
        asked.append(wanted)
        yield row("fastbert-fp32", 2.0)
        raise RuntimeError("planted")

    group = turns.Group("g", ["fastbert-fp32", "b-fp32"])
    for _ in range(2):
        group.measure(rows)
    assert asked == [("fastbert-fp32", "b-fp32")]
    assert str(group.error) == "planted"
    assert list(group.rows) == ["fastbert-fp32"]
    assert group.rows["fastbert-fp32"]["over"] == {}

    empty = turns.Group("g", ["a-fp32"])
    for _ in range(2):
        empty.measure(lambda wanted: asked.append(wanted) or ())
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"cosine": 0.99995}, None),
        ({"cosine": float("nan")}, "cosine nan"),
        ({"cosine": 0.99}, "cosine 0.99"),
        ({"grad_cosine": 0.5}, "grad_cosine 0.5"),
        ({"incorrect": "dx: max error 3"}, "dx: max error 3"),
        ({"incorrect": "", "cosine": 1.0}, None),
    ],
)
def test_what_counts_as_wrong(facts, why):
    found = turns.wrong(row("fastbert-fp32", **facts))
    assert found is None if why is None else found.startswith(why)


RIGHT = aten.packing_fwd
FAULTS = {
    "max error": lambda *a, **k: RIGHT(*a, **k) * 1.5,
    "RuntimeError: planted": mock.Mock(side_effect=RuntimeError("planted")),
    "NaN": lambda x, indices: x.new_empty(len(indices), *x.shape[1:]),  # a hole
}


@pytest.mark.parametrize("why", FAULTS)
def test_a_wrong_kernel_is_reported(monkeypatch, why):
    case = testing.bench_cases("packing", (5, 3))[0]
    assert kernels.incorrect(case, "aten", torch.float32, "cpu") == ""
    monkeypatch.setattr(aten, "packing_fwd", FAULTS[why])
    assert why in kernels.incorrect(case, "aten", torch.float32, "cpu")


# ---- the suite as pytest runs it ----

PLANTED = """
import pytest
ROWS = {ROWS}
def rows(wanted):
    for row in ROWS:
        if row["status"] == "raises":
            raise RuntimeError(row["error"])
        if row["candidate"] in wanted:
            yield row
@pytest.mark.parametrize("candidate", [r["candidate"] for r in ROWS])
def test_planted(in_turns, candidate):
    in_turns(rows)
"""


NOT_INSTALLED = engines.NotInstalled("transformers is not installed")


def run_suite(folder: Path, rows: list[dict], *options: str) -> tuple[str, dict]:
    """What pytest prints for a suite of planted rows, and its JSON."""
    (folder / "test_planted.py").write_text(PLANTED.replace("{ROWS}", repr(rows)))
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.suite.conftest", "--benchmark-quiet"]
    command += ["--benchmark-json=found.json", f"--benchmark-storage=file://{folder / 'kept'}", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    file = folder / "found.json"
    return done.stdout + done.stderr, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.sweep
def test_pytest_benchmark_has_the_samples_and_wrong_rows_have_no_time(tmp_path):
    rows = [
        row("fastbert-fp32", 2.0, samples_ms=[1.0, 2.0, 4.0], tokens_per_s=7.0, step="encoder"),
        row("transformers-fp32", 5.0),
        row("fastbert-bf16", 1.0, cosine=0.5),
        {"candidate": "openvino-fp32", "status": "error", "error": "not installed"},
        {"candidate": "fastbert-int8", "status": "error", "error": "planted"},
        {"candidate": "accelerated-fp32", "status": "error", "error": reason_of(NOT_INSTALLED)},
        row("accelerated-bf16", 1.0, step="training"),
        {"candidate": "onnxruntime-int8", "status": "raises", "error": "the group ends here"},
    ]
    text, data = run_suite(tmp_path, rows, "--benchmark-autosave")
    assert "3 failed, 3 passed, 2 skipped" in text
    assert "RuntimeError: the group ends here" in text
    found = {each["extra_info"]["candidate"]: each for each in data["benchmarks"]}
    assert set(found) == {"fastbert-fp32", "transformers-fp32", "accelerated-bf16"}
    # who served, a training step under autocast
    tags = {
        name: {op.split()[-1] for op in found[name]["extra_info"]["backends"]}
        for name in ("fastbert-fp32", "accelerated-bf16")
    }
    assert tags == {"fastbert-fp32": {"fp32"}, "accelerated-bf16": {"bf16", "fp32"}}
    assert found["fastbert-fp32"]["stats"]["data"] == [0.001, 0.002, 0.004]
    assert found["fastbert-fp32"]["group"] == "planted"
    assert found["fastbert-fp32"]["extra_info"]["over"]["transformers-fp32"] == 2.5
    without = {each["name"]: each["why"] for each in data["fastbert"]["without_a_time"]}
    assert without == {
        "test_planted[fastbert-bf16]": "incorrect: cosine 0.50000, at least 0.995 expected",
        "test_planted[openvino-fp32]": "not installed",
        "test_planted[fastbert-int8]": "planted",
        "test_planted[accelerated-fp32]": "NotInstalled: transformers is not installed",
    }
    assert "incorrect: cosine" in text
    (kept,) = (tmp_path / "kept").rglob("*.json")
    assert kept.parent.name == data["machine_info"]["slug"]
    assert data["fastbert"]["commit"] is None or len(data["fastbert"]["commit"]) == 40


@pytest.mark.sweep
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_files_of_the_suite_are_collected_with_unique_names(device):
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "bench/suite", "--everything"]
    command += ["--device", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert len(names) > 500, done.stdout[-2000:]
    assert len(set(names)) == len(names)
    ours = {"cpu": "cpu", "cuda": "aten"}[device]  # Triton's need a GPU
    assert any(f"layer_norm-{ours}-bf16-" in name for name in names)
    assert any("encoder-fastbert-bf16-base-" in name for name in names)
    assert max(map(len, names)) < 120  # no list of the lengths of 96 sequences
    memory = {name for name in names if name.startswith("test_memory")}
    assert any("-bf16" in name for name in memory)
    assert any("-int8" in name for name in memory) == (device == "cpu")
    left_out = {line.split()[2] for line in done.stdout.splitlines() if line.startswith("# no ")}
    assert bool(left_out) == (device == "cuda"), done.stdout[-2000:]
    assert ("# no load: measured on a CPU only, not on cuda" in done.stdout) == (device == "cuda")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("file", "options", "expected"),
    [
        (
            "test_latency.py",
            ["--model=base", "--workload=1x128", "--peers=transformers_sdpa"],
            ["accelerated", "fastbert", "fastbert_graphs", "transformers_sdpa"],
        ),
        ("test_training.py", ["--model=base", "-k", "classification", "--peers=none"], ["fastbert"]),
        (
            "test_ops.py",
            ["--workload=latency-128", "--everything", "-k", "packing and bf16"],
            ["aten", "torch"],
        ),
    ],
)
def test_smoke_on_cuda_that_computes_on_the_cpu(tmp_path, monkeypatch, file, options, expected):
    """The suite's ways on a GPU: its engines, clocks and dtypes (tests/support/fake_cuda.py)."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    path = tmp_path / "found.json"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # a GPU has none
    options = [*options, "--device=cuda", "--samples=2", f"--benchmark-json={path}", "--benchmark-quiet"]
    done = suite(
        "-p", "tests.support.fake_cuda", f"bench/suite/{file}", *options, FASTBERT_CACHE=str(tmp_path)
    )
    data = json.loads(path.read_text())
    timed = [each["params"]["candidate"] for each in data["benchmarks"]]
    assert sorted({name.partition("-")[0] for name in timed}) == expected, done.stdout[-3000:]
    assert all(name.endswith("-bf16") for name in timed)
    assert data["machine_info"]["slug"] == "nvidia-h999"
    run = results.read(path) if data["fastbert"]["commit"] else None
    if run is not None:
        assert tables.of_run(run)
    if file == "test_ops.py":  # Triton's kernels cannot run here, and cost other candidates nothing
        assert {each["candidate"] for each in data["fastbert"]["without_a_time"]} == {"triton-bf16"}


# ---- two runs compared ----


def file_of(path: Path, times: dict[str, float], noise: float = 0.0) -> Path:
    """A file of the suite; name -> median in seconds, of candidates in one group."""
    benchmarks = [
        {
            "name": name,
            "fullname": f"suite::{name}",
            "group": "g",
            "params": {"candidate": name},
            "stats": {"median": seconds, "min": seconds * (1 - noise)},
            "extra_info": {"candidate": name},
        }
        for name, seconds in times.items()
    ]
    path.write_text(json.dumps({"benchmarks": benchmarks}))
    return path


BEFORE = {"cpu-fp32": 1.0, "cpu-bf16": 0.5, "torch-fp32": 2.0, "aten-fp32": 2.2}


@pytest.mark.parametrize(
    ("after", "status", "verdict"),
    [
        (BEFORE, 0, "0 of ours are slower, 0 faster, 0 gone"),
        (BEFORE | {"cpu-fp32": 1.2}, 1, "1 of ours are slower"),
        (BEFORE | {"cpu-fp32": 1.14}, 0, "0 of ours are slower"),
        (BEFORE | {"torch-fp32": 4.0}, 0, "0 of ours are slower"),  # a peer's own matter
        # peers that drift by 8% hide nothing; where they are 15% slower it is the machine
        (BEFORE | {"cpu-fp32": 1.2, "torch-fp32": 2.16, "aten-fp32": 2.376}, 1, "1 of ours are slower"),
        (BEFORE | {"cpu-fp32": 1.2, "torch-fp32": 2.3, "aten-fp32": 2.53}, 0, "0 of ours are slower"),
        (BEFORE | {"cpu-fp32": 0.7}, 0, "1 faster"),
        ({name: t for name, t in BEFORE.items() if name != "cpu-fp32"}, 1, "1 gone"),
    ],
)
def test_a_slower_kernel_is_flagged_and_a_slower_machine_is_not(tmp_path, capsys, after, status, verdict):
    files = [str(file_of(tmp_path / f"{i}.json", times)) for i, times in enumerate((BEFORE, after))]
    assert compare.main(files) == status
    out = capsys.readouterr().out
    assert verdict in out.splitlines()[-1]
    assert ("SLOWER" in out) == ("1 of ours are slower" in verdict)


def test_several_runs_per_side_are_one(tmp_path, capsys):
    """The best run of each side counts, so one slow run of three is no slower kernel, and three are."""

    def side(name: str, *seconds: float) -> str:
        files = [
            file_of(tmp_path / f"{name}{i}.json", BEFORE | {"cpu-fp32": s}) for i, s in enumerate(seconds)
        ]
        return ",".join(map(str, files))

    assert compare.main([side("a", 1.0, 1.1, 1.05), side("b", 1.4, 1.05, 1.5)]) == 0
    assert compare.main([side("a", 1.0, 1.1, 1.05), side("b", 1.4, 1.25, 1.5)]) == 1
    out = capsys.readouterr().out
    assert "at best beside them 1.25" in out
    assert "beside its peers 1.33" in out
