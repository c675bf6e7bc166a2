"""`make gpu` without a GPU: its lines, its steps, and a dry run of the whole command."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu import encoder as gpu_encoder
from bench.gpu import prove
from bench.gpu import training as gpu_training
from bench.lib import attention, lines, roofs
from fastbert.backends import triton as backend
from fastbert.kernels import tuning
from tests.support.triton_fixtures import interpreted

ROOT = Path(__file__).resolve().parents[2]
GPU = [sys.executable, str(ROOT / "bench" / "gpu" / "prove.py")]


# --- lines --------------------------------------------------------------------------------------------------


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
        "a": 2,
        "b": ["nan", "inf"],
        "rows": [{"n": 1}, {"n": 3}],
        "steps": [{"step": "s"}],
        "torn": 1,
    }


# --- steps --------------------------------------------------------------------------------------------------


def steps_of(folder: Path) -> dict[str, dict]:
    return {record["step"]: record for record in lines.read(folder / "steps.jsonl")["steps"]}


def test_a_step_that_fails_crashes_or_hangs_is_recorded_and_the_next_goes_on(tmp_path, capsys):
    names = ["planted-failure", "planted-crash", "planted-hang", "planted-missing", "planted-good"]
    assert prove.main(["--out", str(tmp_path), "--only", ",".join(names)]) == 1
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
    # the hang leaves the good step half a second, and it needs a whole one
    assert prove.main(["--out", str(tmp_path), "--only", "planted-good,planted-hang", "--budget", "0.5"]) == 0
    for record in steps_of(tmp_path).values():
        assert record["status"] == "skipped"
        assert record["reason"] in (
            "0 s left of --budget 0, 1 s needed",
            "1 s left of --budget 0, 1 s needed",
        )


def test_shares_keep_what_the_later_steps_need():
    step, later = prove.Step("a", 50, 10, None), [prove.Step("b", 90, 20, None), prove.Step("c", 9, 5, None)]
    assert prove.share(step, later, 500, 1.0) == 50  # at most its maximum
    assert prove.share(step, later, 500, 2.0) == 100  # unless the whole budget is larger
    assert prove.share(step, later, 60, 1.0) == 35  # b and c keep 25
    assert prove.share(step, later, 30, 1.0) == 10  # its minimum, at the cost of the last steps
    assert prove.share(step, later, 9.9, 1.0) == 0
    assert prove.share(step, [], 20, 1.0) == 20


@pytest.mark.parametrize("part", prove.PARTS)
def test_no_step_of_a_part_is_shortened_for_a_later_one(part):
    steps = prove.PARTS[part]
    assert sum(step.most for step in steps) <= prove.BUDGET_SECONDS < 600
    assert all(0 < step.least <= step.most for step in steps)
    for index, step in enumerate(steps):
        left = prove.BUDGET_SECONDS - sum(before.most for before in steps[:index])
        assert prove.share(step, list(steps[index + 1 :]), left, 1.0) == step.most


def test_the_commands_of_a_gpu_run_name_what_exists(tmp_path):
    """Each script of a step takes the arguments that it is given."""
    run = prove.Run(tmp_path, "cuda")
    for step in prove.STEPS:
        command = step.command(run, 30.0)
        assert command[0] == sys.executable
        assert Path(command[1]).is_file(), step.name
        assert command[command.index("--budget") + 1] == "30", step.name
        if not step.name.startswith("build"):
            assert str(tmp_path) in command[command.index("--json") + 1]
        for script, parse in (("encoder.py", gpu_encoder.parse), ("training.py", gpu_training.parse)):
            if command[1].endswith(f"gpu/{script}"):
                assert parse([*command[2:], "--device", "cpu"]).roofs == tmp_path / "probe.jsonl"
    assert prove.environment(run).get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert prove.environment(prove.Run(tmp_path, "cpu"))["TRITON_INTERPRET"] == "1"


@pytest.mark.sweep
def test_the_steps_need_neither_pytest_nor_jsonschema(tmp_path):
    """A GPU machine has torch, Triton and transformers, but neither of these nor a network; the parent of the
    steps needs not even torch.
    """
    scripts = {Path(step.command(prove.Run(tmp_path, "cuda"), 30.0)[1]) for step in prove.STEPS}
    names = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in scripts)
    missing = ("pytest", "pytest_benchmark", "jsonschema", "matplotlib")
    code = f"import importlib, sys; sys.modules.update(dict.fromkeys({missing}))\n"
    code += "import bench.gpu.prove; assert not [name for name in sys.modules if 'torch' in name]\n"
    code += f"for name in {names}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr


# --- the whole command, without a GPU -----------------------------------------------------------------------


# steps that run a script as another step does, on a CPU; test_breakdown.py runs breakdown.py
TWINS = {
    *("breakdown", "selfcheck-tuned", "encoder-tuned", "training-compile", "build-90a", "probe-bf16"),
    *("selfcheck-d", "encoder-peers", "encoder-short", "breakdown-d", "determinism-cuda", "stream-cuda"),
    *("correctness-fp16",),
}
DRY = {part: [step.name for step in steps if step.name not in TWINS] for part, steps in prove.PARTS.items()}


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> Callable[[str], Path]:
    """A function from a part to the folder of its dry run, which runs once."""

    @functools.cache
    def of(part: str) -> Path:
        folder = tmp_path_factory.mktemp("gpu") / part
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*GPU, "--out", str(folder), "--only", ",".join(DRY[part]), "--device", "cpu"]
        command += ["--budget", "3000"]
        done = subprocess.run(command, text=True, capture_output=True, timeout=1200, env=env)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        return folder

    return of


# c and d take minutes; `make exhaustive` runs them
@pytest.mark.sweep
@interpreted
@pytest.mark.parametrize("part", ["a", "b", *(pytest.param(p, marks=pytest.mark.slow) for p in "cd")])
def test_a_dry_run_passes_every_step(dry, part):
    folder = dry(part)
    found = {name: record["status"] for name, record in steps_of(folder).items()}
    assert found == dict.fromkeys(DRY[part], "ok")
    assert lines.read(folder / "steps.jsonl")["device_type"] == "cpu"
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) <= 8  # few files come back from some machines, and one has all
    with tarfile.open(folder / "run-some.tar") as file:
        assert sorted([*file.getnames(), "run-some.tar"]) == names


@pytest.mark.sweep
@interpreted
def test_a_dry_run_checks_every_triton_kernel(dry):
    found = {}
    for part, step in (("a", "correctness"), ("b", "determinism")):
        rows = found[part] = lines.read(dry(part) / "checks.jsonl")["rows"]
        ops = {row["name"].split("-")[0] for row in rows if (row["step"], row["status"]) == (step, "ok")}
        assert ops == set(backend.DTYPES), step
    checked = {row["step"]: row["status"] for row in found["b"] if row["name"] == "encoder-bf16"}
    assert checked == {"graphs": "ok", "memory": "ok"}
    assert {row["status"] for rows in found.values() for row in rows} == {"ok", "skipped"}


def encoder_rows(folder):
    found = lines.read(folder / "encoder.jsonl")["rows"]
    rows = {r["candidate"]: r for r in found if (r["step"], r["status"]) == ("encoder", "ok")}
    assert all(row["cosine"] > 0.999 for row in rows.values())
    return rows


@pytest.mark.slow
@interpreted
def test_a_dry_run_pretrains_and_compiles(dry):
    rows = [(row["step"], row["status"]) for row in lines.read(dry("c") / "checks.jsonl")["rows"]]
    assert rows == [("sanitizer", "skipped"), *[("pretrain", "ok")] * 4]
    names = "fastbert", "fastbert_graphs", "torch_compile", "transformers_sdpa"
    assert sorted(encoder_rows(dry("c"))) == [f"{name}-bf16" for name in names]


@pytest.mark.sweep
@interpreted
def test_a_dry_run_times_every_engine(dry):
    data, rows = lines.read(dry("a") / "encoder.jsonl"), encoder_rows(dry("a"))
    ours = ["fastbert", "fastbert_graphs", "accelerated"]
    theirs = ["transformers_eager", "transformers_sdpa", "torch_encoder"]
    assert sorted(rows) == sorted(f"{name}-bf16" for name in ours + theirs)
    measured = roofs.of_file(dry("a") / "probe.jsonl")  # by the probe, and not again
    assert data["roofs"]["gflops"]["bf16"] == pytest.approx(measured.gflops["bf16"])
    assert data["self_checks"] == []  # a CPU's kernels need none
    for name, row in rows.items():
        served_by = row["backends"]
        assert bool(served_by) is name.startswith(("fastbert", "accelerated"))
        assert set(served_by.values()) <= {"cpu", "aten", "reference"}
        assert not served_by or {"attention bf16", "linear bf16", "layer_norm bf16"} <= set(served_by)
    kernels = lines.read(dry("b") / "kernels.jsonl")["rows"]
    assert {row["pass"] for row in kernels if row.get("op") == "packing"} == {"forward", "backward"}


@pytest.mark.sweep
@interpreted
def test_a_dry_run_trains(dry):
    data = lines.read(dry("a") / "training.jsonl")
    rows = [(row["step"], row["candidate"], row["status"]) for row in data["rows"]]
    names = ("fastbert-bf16", "transformers-bf16")
    alone = [row for row in rows if row[0] == "attention"]
    assert alone == [("attention", f"{name}-bf16", "ok") for name in attention.CANDIDATES]
    rows = [row for row in rows if row not in alone]
    assert rows == [(step, name, "ok") for step in ("training", "footprint") for name in names]
    peers = [ratio["theirs"] for ratio in data["ratios"]]
    names = ["fastbert_other_bits", "torch_sdpa"] + ["transformers"] * 3
    assert sorted(peers) == [f"{name}-bf16" for name in names]
    (ours,) = (row for row in data["rows"] if row["name"].startswith("training-fastbert"))
    assert {"layer_norm fp32", "layer_norm bf16", "cross_entropy fp32"} <= set(ours["backends"])


@pytest.mark.sweep
@interpreted
def test_a_dry_run_tunes(dry):
    folder = dry("b")
    rows = [row for row in lines.read(folder / "tuning.jsonl")["rows"] if "entry" in row]
    kernels = {kernel for each in tuning.KERNELS.values() for kernel in each}
    assert {row["entry"][0] for row in rows} == kernels
    assert {row["status"] for row in rows} == {"ok"}
    assert set(json.loads((folder / "tuned.json").read_text())) == {"device", *kernels}
