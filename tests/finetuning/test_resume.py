"""A run that is killed, stopped or done already ends in the same bytes, and restarts share no state."""

import json
import os
import shutil
import statistics
from dataclasses import replace

import pytest

from fastbert.finetuning import run as run_module
from fastbert.finetuning.settings import Settings, Smart
from fastbert.finetuning.spans import Squad
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.training.loop import TrainingError
from tests.support.killed import killed
from tests.support.rule_tasks import digests, files, quick, stopped, tiny_model, written

# 24 examples: 3 steps per epoch, 6 in all
OPTIONS = {"lr": 2e-3, "epochs": 2, "batch_size": 8}


@pytest.fixture(scope="module")
def data(memory):
    return written("csv", memory / "data", 24, 12)


@pytest.fixture(scope="module")
def dropping(memory):
    """A model with dropout, whose draws must be resumed too."""
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return tiny_model(memory / "dropping", **rates)


@pytest.fixture(scope="module")
def unbroken(memory, dropping, data):
    """A run without interruption."""
    quick("csv", dropping, data, memory / "unbroken", **OPTIONS)
    return memory / "unbroken"


# operations on files; a whole run has more than 260 and fewer than 290
@pytest.mark.skipif(not hasattr(os, "fork"), reason="cannot fork")
@pytest.mark.parametrize("at", range(1, 290, 4))
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, dropping, data, unbroken, at):
    output = tmp_path / "run"

    def call():
        return quick("csv", dropping, data, output, **OPTIONS)

    assert killed(call, output, at) or at > 260
    call()
    assert digests(output) == digests(unbroken)


@pytest.mark.parametrize("step", range(6))
def test_a_stopped_run_resumes_to_the_same_bytes(tmp_path, monkeypatch, dropping, data, unbroken, step):
    stopped(monkeypatch, step, lambda: quick("csv", dropping, data, tmp_path / "run", **OPTIONS))
    quick("csv", dropping, data, tmp_path / "run", **OPTIONS)
    assert digests(tmp_path / "run") == digests(unbroken)


STEADIER = {
    "freelb": {"freelb": True},
    "smart": {"smart": Smart(momentum=0.9)},
    "mixout": {"mixout": 0.7},
    "qat": {"qat": "int8"},
    "qat and FreeLB": {"qat": "int4", "freelb": True},
    "layerdrop": {"layerdrop": 0.4},
    "decay_to_start": {"decay_to_start": True, "weight_decay": 0.5},
}


@pytest.mark.parametrize("name", STEADIER)
def test_steadier_runs_resume_to_the_same_bytes(tmp_path, monkeypatch, dropping, data, unbroken, name):
    given = {**OPTIONS, **STEADIER[name]}
    quick("csv", dropping, data, tmp_path / "unbroken", **given)
    stopped(monkeypatch, 4, lambda: quick("csv", dropping, data, tmp_path / "run", **given))
    quick("csv", dropping, data, tmp_path / "run", **given)
    assert digests(tmp_path / "run") == digests(tmp_path / "unbroken")
    logs = [next(folder.glob("runs/*/log.jsonl")).read_text() for folder in (tmp_path / "run", unbroken)]
    assert logs[0] != logs[1]


def test_a_run_that_has_ended_is_not_trained_again(tmp_path, monkeypatch, dropping, data, unbroken):
    shutil.copytree(unbroken, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "dev")
    monkeypatch.setattr(run_module, "fit", None)
    quick("csv", dropping, data, tmp_path / "run", **OPTIONS)
    assert digests(tmp_path / "run") == digests(unbroken)


CHANGES = {
    "settings.epochs": {"epochs": 3},
    "settings.batch_size": {"batch_size": 4},
    "settings.max_length": {"max_length": 30},
    "settings.warmup": {"warmup": 0.2},
    "settings.weight_decay": {"weight_decay": 0.1},
    "settings.layer_decay": {"layer_decay": 0.9},
    "settings.reinit": {"reinit": 1},
    "settings.freeze": {"freeze": True},
    "settings.random_init": {"random_init": True},
    "settings.dtype": {"dtype": "bf16"},
}


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_an_error(tmp_path, dropping, data, unbroken, name, ended):
    shutil.copytree(unbroken, tmp_path / "run")
    if not ended:
        (tmp_path / "run" / "runs" / "lr-0.002-seed-0" / "results.json").unlink()
    before = digests(tmp_path / "run")
    with pytest.raises(TrainingError, match=rf"^{name}: the run in .*lr-0.002-seed-0 has"):
        quick("csv", dropping, data, tmp_path / "run", **{**OPTIONS, **CHANGES[name]})
    assert digests(tmp_path / "run") == before


@pytest.mark.parametrize("split", ["train", "dev"])
def test_other_labels_are_an_error(tmp_path, dropping, data, unbroken, split):
    shutil.copytree(unbroken, tmp_path / "run")
    shutil.copytree(data, tmp_path / "data")
    rows = (data / f"{split}.csv").read_text().splitlines()
    labels = [row.rpartition(",") for row in rows]
    # the last two rows change their labels
    rows[-2:] = [f"{labels[-2][0]},{labels[-1][2]}", f"{labels[-1][0]},{labels[-2][2]}"]
    assert labels[-1][2] != labels[-2][2]
    (tmp_path / "data" / f"{split}.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(TrainingError, match=rf"^{split}\b"):
        quick("csv", dropping, tmp_path / "data", tmp_path / "run", **OPTIONS)


def test_another_model_is_an_error(tmp_path, model, data, unbroken):
    shutil.copytree(unbroken, tmp_path / "run")
    with pytest.raises(TrainingError, match=r"^model: the run in"):
        quick("csv", model, data, tmp_path / "run", **OPTIONS)


def test_another_option_of_the_task_is_an_error(tmp_path, model):
    data = written("squad2", tmp_path / "data", 8, 8)
    for threshold in ("auto", 1.0):
        task = Squad(2, max_query=10, doc_stride=8, null_threshold=threshold)
        if threshold == "auto":
            quick(task, model, data, tmp_path / "run", **OPTIONS)
            continue
        with pytest.raises(TrainingError, match=r"^options\.null_threshold: the run in"):
            quick(task, model, data, tmp_path / "run", **OPTIONS)


GRID = {"lr": [1e-5, 2e-3], "restarts": 2, "epochs": 2, "batch_size": 8}


@pytest.fixture(scope="module")
def grid(memory, dropping, data):
    return quick("csv", dropping, data, memory / "grid", **GRID)


def test_a_tokenizer_in_one_file_is_copied(tmp_path, model, data):
    copy = shutil.copytree(model, tmp_path / "model")
    load_tokenizer(copy).save(str(copy / "tokenizer.json"))
    (copy / "vocab.txt").unlink()
    output = quick("csv", copy, data, tmp_path / "run", epochs=0.1).output
    assert (output / "tokenizer.json").read_bytes() == (copy / "tokenizer.json").read_bytes()


def test_near_learning_rates_have_folders_of_their_own():
    rates = (2e-5, 2.1e-5, 2.05e-5, 2.0000002e-5)
    assert len({Settings(lr=lr, epochs=1, batch_size=8, max_length=8).name for lr in rates}) == 4


def test_the_best_of_a_grid_is_kept(grid):
    scores = [run.score for run in grid.runs]
    assert len(scores) == 4
    assert len({(run.settings.lr, run.settings.seed) for run in grid.runs}) == 4
    assert grid.best is grid.runs[scores.index(max(scores))]
    equal = replace(grid, runs=[grid.best, replace(grid.best)])
    assert equal.best is equal.runs[0]
    kept = [path.parent.parent.name for path in files(grid.output / "runs") if path.suffix == ".safetensors"]
    assert kept == [grid.best.settings.name] * 2
    assert (grid.output / "model.safetensors").read_bytes() == (
        grid.output / "runs" / grid.best.settings.name / "best" / "model.safetensors"
    ).read_bytes()
    names = [
        {path.name for path in files(grid.output / "runs" / grid.best.settings.name / kind)}
        for kind in ("best", "last")
    ]
    assert names[0] == names[1] > {"model.safetensors", "config.json", "vocab.txt"}
    for lr in GRID["lr"]:
        own = [100 * run.score for run in grid.runs if run.settings.lr == lr]
        mean = f"  lr {lr:g}: mean {statistics.mean(own):.1f} ± {statistics.stdev(own):.1f}"
        assert mean in grid.table().splitlines()


def test_a_restart_equals_the_run_alone(tmp_path, dropping, data, grid):
    for number in (1, 2):
        of_grid = grid.runs[number]
        given = {**GRID, "lr": of_grid.settings.lr, "restarts": 1, "seed": of_grid.settings.seed}
        alone = quick("csv", dropping, data, tmp_path / str(number), **given)
        assert alone.best == of_grid
        place = f"runs/{of_grid.settings.name}/log.jsonl"
        assert (grid.output / place).read_bytes() == (alone.output / place).read_bytes()


def test_restarts_differ_in_head_and_order(grid):
    logs = [(grid.output / "runs" / run.settings.name / "log.jsonl").read_text() for run in grid.runs]
    first = [log.splitlines()[0] for log in logs]
    # with one seed the first step has the same loss at each learning rate
    losses = [line.split('"loss": ')[1].split(",")[0] for line in first]
    assert losses[0] == losses[2] != losses[1] == losses[3]


def test_more_restarts_keep_what_is_there(tmp_path, dropping, data, grid):
    quick("csv", dropping, data, tmp_path / "run", **{**GRID, "restarts": 1})
    quick("csv", dropping, data, tmp_path / "run", **GRID)
    assert digests(tmp_path / "run") == digests(grid.output)


def test_a_grid_whose_best_was_removed_is_an_error(tmp_path, dropping, data, grid):
    shutil.copytree(grid.output, tmp_path / "run")
    worst = min(grid.runs, key=lambda run: run.score).settings
    given = {**GRID, "lr": worst.lr, "seed": worst.seed, "restarts": 1}
    with pytest.raises(TrainingError, match="was removed, because another run of an earlier grid was better"):
        quick("csv", dropping, data, tmp_path / "run", **given)


def test_an_intermediate_task(tmp_path, dropping, data):
    before = written("cola", tmp_path / "cola", 24, 12)
    given = {**OPTIONS, "intermediate": ("cola", before), "stable": True, "seed": 3}
    result = quick("csv", dropping, data, tmp_path / "run", **given)
    first = result.output / "intermediate"
    best = json.loads((first / "results.json").read_text())["best"]
    assert (best["seed"], best["max_length"]) == (3, 32)
    alone = quick("csv", first, data, tmp_path / "alone", **{**OPTIONS, "stable": True, "seed": 3})
    assert alone.runs == result.runs
    assert result.best.settings.eps == 1e-6
    assert digests(result.output / "runs") == digests(alone.output / "runs")
    before_again = digests(result.output)
    quick("csv", dropping, data, tmp_path / "run", **given)
    assert digests(result.output) == before_again


def test_an_intermediate_stage_of_the_same_task_has_its_options(tmp_path, dropping):
    data, before = (written("squad2", tmp_path / str(i), 8, 8, seed=i) for i in range(2))
    given = {"max_query": 10, "doc_stride": 8, "epochs": 0.1}
    result = quick("squad2", dropping, data, tmp_path / "run", intermediate=("squad2", before), **given)
    stored = json.loads((result.output / "intermediate" / "results.json").read_text())
    assert (stored["options"]["max_query"], stored["options"]["doc_stride"]) == (10, 8)
