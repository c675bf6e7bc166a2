"""Several processes train as one does: ddp and fsdp on gloo, in all precisions, with interruptions."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers
from safetensors import safe_open

import fastbert
from fastbert.training.parallel import Parallel
from tests.support import parallel_training as runs
from tests.support.parallel_training import Disturbance
from tests.support.processes import ROOT
from tests.support.ranks import Ended, together

KINDS = {
    "none": (None, 0),
    "ddp2": ("ddp", 2),
    "ddp3": ("ddp", 3),
    "fsdp2": ("fsdp", 2),
    "fsdp3": ("fsdp", 3),
}
MANY = ["ddp2", "fsdp2", "ddp3", "fsdp3"]


def train(folder, name, seconds=60.0, **options):
    """The answers of the processes of KINDS[name], which train into `folder`."""
    kind, world = KINDS[name]
    return together(world, functools.partial(runs.train, **options), folder, kind, seconds=seconds)


def ends(answers):
    return [answer["ended"] for answer in answers]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """name of an optimizer or option -> (a run of one process, the same in float64)."""
    made = {}

    def of(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp("one")
            assert ends(train(folder / "one", "none", **options)) == ["done"]
            truth = {k: v for k, v in options.items() if k != "dtype"}
            assert ends(train(folder / "truth", "none", double=True, **truth)) == ["done"]
            made[key] = folder / "one", folder / "truth"
        return made[key]

    return of


@pytest.fixture(scope="module")
def read_by_one(tmp_path_factory):
    return runs.read(tmp_path_factory.mktemp("read"), 1, 0)


# -- data ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [0, 2, 5])
def test_ranks_and_workers_read_the_same(tmp_path, read_by_one, world, workers):
    assert runs.read(tmp_path, world, workers) == read_by_one


# -- results -------------------------------------------------------------------------------------------------


@pytest.mark.sweep_of("ddp3", "fsdp3")
@pytest.mark.parametrize("name", MANY)
def test_processes_equal_one(tmp_path, reference, name):
    """With dropout, shared weights, and two losses with weights and unequal counts, some of them 0."""
    assert ends(train(tmp_path / "run", name)) == ["done"] * KINDS[name][1]
    assert runs.misses(tmp_path / "run", *reference()) == []


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [{"optimizer": "lamb", "clip": 0.5}, {"optimizer": "adamw-google"}, {"tokens": 16}, {"albert": True}],
    ids=["lamb", "google", "tokens", "shared-layers"],
)
@pytest.mark.parametrize("name", ["ddp2", "fsdp3"])
def test_processes_with_options_equal_one(tmp_path, reference, name, options):
    """Norms of LAMB are those of whole tensors, and the clipped norm is that of all gradients."""
    assert ends(train(tmp_path / "run", name, **options)) == ["done"] * KINDS[name][1]
    assert runs.misses(tmp_path / "run", *reference(**options)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["fsdp2", "ddp2"])
def test_saved_models_are_whole_directories(tmp_path, name):
    train(tmp_path / "run", name, steps=1)
    train(tmp_path / "one", "none", steps=1)
    folders = [runs.newest(tmp_path / each) for each in ("run", "one")]
    files = [sorted(str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()) for f in folders]
    assert files[0] == files[1]
    shapes = []
    for folder in folders:
        with safe_open(folder / "model" / "model.safetensors", "pt") as weights:
            shapes.append({key: weights.get_slice(key).get_shape() for key in weights.keys()})  # noqa: SIM118
    assert shapes[0] == shapes[1]
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folders[0] / "model").eval()
    ours = fastbert.AutoModelForMaskedLM.from_pretrained(folders[0] / "model").eval()
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["ddp2", "fsdp2"])
def test_stages(tmp_path, reference, name):
    """A module that grows from another one, more micro-batches, and a new optimizer; also when resumed."""
    assert ends(train(tmp_path / "run", name, grown=True)) == ["done"] * 2
    assert runs.misses(tmp_path / "run", *reference(grown=True)) == []
    expected = runs.bits(tmp_path / "run")
    for step in (7, 6):
        shutil.rmtree(tmp_path / "run" / f"step-{step:06d}", ignore_errors=True)
        assert ends(train(tmp_path / "run", name, grown=True)) == ["done"] * 2
        assert runs.bits(tmp_path / "run") == expected


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["none", "ddp2", "fsdp3"])
def test_bfloat16(tmp_path, reference, name):
    """Its losses are within the error rule of half precision; fsdp computes more of the model in it."""
    assert ends(train(tmp_path / "run", name, dtype="bf16", dropout=0.0))[0] == "done"
    one, truth = (runs.log(folder) for folder in reference(dtype="bf16", dropout=0.0))
    for line, eager, true in zip(runs.log(tmp_path / "run"), one, truth, strict=True):
        assert line["tokens"] == true["tokens"]
        for key in ("words_loss", "class_loss"):
            error = abs(line[key] - true[key])
            assert error <= abs(eager[key] - true[key]) + 2**-8 * abs(true[key]), (key, line["step"])


# -- interruptions -------------------------------------------------------------------------------------------


def unbroken(folder, name, **options):
    """The digests of a run without interruption."""
    assert set(ends(train(folder / "unbroken", name, **options))) == {"done"}
    return runs.bits(folder / "unbroken")


@pytest.mark.sweep_of("kill", "raise-ddp3", "raise-fsdp")
@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("what", ["raise", "kill"])
def test_resumed_bits_equal(tmp_path, name, what):
    """An error of all or a kill of one after the first checkpoint, at step 3."""
    options = {"bucket_mb": 0.002} if name.startswith("ddp") else {}
    expected = unbroken(tmp_path, name, **options)
    ranks = None if what == "raise" else (KINDS[name][1] - 1,)
    disturbed = functools.partial(train, tmp_path / "run", name, disturbance=Disturbance(what, 3, ranks))
    if what == "raise":
        assert set(ends(disturbed(**options))) == {"RuntimeError: planted"}
    else:
        with pytest.raises(Ended) as ended:
            disturbed(**options)
        assert ended.value.codes[-1] == -signal.SIGKILL
    answers = train(tmp_path / "run", name, **options)
    assert set(ends(answers)) == {"done"}
    assert "resumes from step 2" in " ".join(answers[0]["said"])
    assert runs.bits(tmp_path / "run") == expected


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["none", "ddp2", "fsdp2"])
@pytest.mark.parametrize("what", ["inf", "nan"])
def test_float16_and_its_scaler(tmp_path, name, what):
    """A bad number in a share of one process is skipped by all and counted. The scaler's state is resumed."""
    world = max(KINDS[name][1], 1)
    options = {"dtype": "fp16", "disturbance": Disturbance(what, 0, (world - 1,)), "clip": None}
    expected = unbroken(tmp_path, name, **options)
    lines = runs.log(tmp_path / "unbroken")
    assert [line["skipped"] for line in lines] == [1, 1, 1, 1]
    assert (lines[0]["class_loss"] is None) == (what == "nan")
    scaler = json.loads((runs.newest(tmp_path / "unbroken") / "trainer.json").read_text())["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (2.0**15, 3)
    train(tmp_path / "run", name, **{**options, "steps": 2})
    assert set(ends(train(tmp_path / "run", name, dtype="fp16", clip=None))) == {"done"}
    assert runs.bits(tmp_path / "run") == expected


@pytest.mark.sweep_of("fsdp")
@pytest.mark.parametrize("name", ["ddp2", "fsdp2", "fsdp3"])
def test_a_gradient_of_one_process_is_not_finite(tmp_path, name):
    found = ends(train(tmp_path / "run", name, disturbance=Disturbance("nan", 2, (1,))))
    said = "TrainingError: step 3: the gradient of head.bias is not finite; nothing was updated"
    assert found == [said] * KINDS[name][1]
    assert [line["step"] for line in runs.log(tmp_path / "run")] == [1, 2]
    assert runs.newest(tmp_path / "run").name == "step-000002"


@pytest.mark.sweep_of("SIGINT", "SIGTERM-None", "SIGTERM-ranks0", "SIGTERM-ranks1-fsdp3")
@pytest.mark.parametrize("name", ["ddp2", "fsdp3"])
@pytest.mark.parametrize("ranks", [(0,), (1,), None])
@pytest.mark.parametrize("what", ["SIGTERM", "SIGINT"])
def test_a_signal_to_one_or_all(tmp_path, name, ranks, what):
    expected = unbroken(tmp_path, name)
    answers = train(tmp_path / "run", name, workers=1, disturbance=Disturbance(what, 3, ranks))
    place = tmp_path / "run" / "step-000003"
    assert ends(answers) == [f"Interrupted: stopped by {what}; saved {place}"] * KINDS[name][1]
    assert runs.newest(tmp_path / "run") == place
    assert set(ends(train(tmp_path / "run", name))) == {"done"}
    assert runs.bits(tmp_path / "run") == expected


@pytest.mark.sweep_of("fsdp")
@pytest.mark.parametrize("name", ["ddp2", "fsdp2"])
def test_a_full_disk_ends_all(tmp_path, name):
    found = ends(train(tmp_path / "run", name, disturbance=Disturbance("full", 2, (0,))))
    why = "OSError: [Errno 28] No space left on device"
    said = f"CheckpointError: {tmp_path / 'run' / 'log.jsonl'}: could not be written: {why}"
    assert found == [said] * 2
    assert runs.newest(tmp_path / "run").name == "step-000002"
    expected = unbroken(tmp_path, name)
    assert set(ends(train(tmp_path / "run", name))) == {"done"}
    assert runs.bits(tmp_path / "run") == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_process_outside_a_step_ends_all(tmp_path, rank):
    """In making a batch; the log and the directory follow."""
    found = ends(train(tmp_path / "batch", "ddp2", disturbance=Disturbance("batch", 3, (rank,))))
    assert found == ["ValueError: ids: planted"] * 2
    assert runs.newest(tmp_path / "batch").name == "step-000002"


def test_a_log_that_cannot_be_written_ends_all(tmp_path):
    found = ends(train(tmp_path / "log", "ddp2", disturbance=Disturbance("log", 2, (0,))))
    why = "OSError: [Errno 27] File too large"
    assert found == [f"CheckpointError: {tmp_path / 'log' / 'log.jsonl'}: could not be written: {why}"] * 2


def test_a_parameter_without_a_loss_is_named(tmp_path):
    found = ends(train(tmp_path / "run", "ddp2", module="unused"))
    assert found == ["TrainingError: spare: no loss depends on it; ddp needs requires_grad=False"] * 2


def test_a_directory_in_use_ends_all(tmp_path):
    (tmp_path / "run").mkdir()
    with runs.in_use(tmp_path / "run"):
        found = ends(train(tmp_path / "run", "ddp2"))
    assert len(set(found)) == 1
    assert "another process is training into it" in found[0]


# -- from one kind to another --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """name -> a run that ended after half of its steps."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "run"
            train(made[name], name, steps=2)
        return made[name]

    return of


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(("none", "ddp2"), ("none", "fsdp3"), ("ddp3", "fsdp2"), ("ddp2", "none")),
        *(("fsdp2", "ddp3"), ("fsdp3", "none"), ("fsdp3", "fsdp2")),
    ],
)
def test_a_checkpoint_goes_on_under_another_kind(tmp_path, reference, halves, before, after):
    shutil.copytree(halves(before), tmp_path / "run")
    assert set(ends(train(tmp_path / "run", after))) == {"done"}
    assert runs.misses(tmp_path / "run", *reference()) == []


# -- torchrun ------------------------------------------------------------------------------------------------

SCRIPT = """
import pathlib, sys
sys.path.insert(0, {root!r})
from tests.support import parallel_training as runs
if __name__ == "__main__":
    found = runs.train(pathlib.Path({folder!r}), {kind!r}, workers=1, steps={steps})
    print(found["ended"] + "\\n", end="", flush=True)  # one write: two processes share the pipe
    runs.leave(143 if found["ended"].startswith("Interrupted") else 0)
"""


def torchrun(folder, kind, steps):
    script = folder / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT), folder=str(folder / "run"), kind=kind, steps=steps))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*launcher, str(script)], env=environment, cwd=ROOT, **pipes)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_torchrun(tmp_path, reference, kind):
    process = torchrun(tmp_path, kind, runs.STEPS)
    said, _ = process.communicate(timeout=120)
    assert (process.returncode, said.count("done\n")) == (0, 2), said
    assert runs.misses(tmp_path / "run", *reference()) == []


@pytest.mark.sweep
def test_torchrun_is_terminated(tmp_path):
    """Its signal reaches each process and its workers; the step ends, and a checkpoint is saved."""
    process = torchrun(tmp_path, "ddp", 100_000)
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("run/step-*")) and time.monotonic() < end:
            time.sleep(0.05)
        process.terminate()
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert said.count("Interrupted: stopped by SIGTERM") == 2, said
    lines = runs.log(tmp_path / "run")
    assert runs.newest(tmp_path / "run").name == f"step-{lines[-1]['step']:06d}"


# -- Parallel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        ({"kind": "both"}, {}, "parallel: expected one of none, ddp, fsdp, got 'both'"),
        ({"kind": "none"}, {"RANK": "0", "WORLD_SIZE": "2"}, "parallel: none, but torchrun has started 2"),
        ({"kind": "ddp"}, {}, "parallel: ddp is for processes that torchrun starts; RANK is not set"),
        ({}, {"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE: expected an integer >= 1, got '0'"),
        ({}, {"WORLD_SIZE": "2", "RANK": "2"}, "RANK: expected an integer >= 0 and < 2, got '2'"),
        ({"bucket_mb": 0.0}, {}, "bucket_mb: expected a number > 0, or None, got 0.0"),
    ],
)
def test_bad_arguments(monkeypatch, options, variables, expected):
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match=expected):
        Parallel(**options)
