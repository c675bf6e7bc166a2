"""Fine-tuning with movement pruning: the pruned model that a run ends with, resuming, and two processes."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import fastbert
from fastbert.compression import shrink
from fastbert.compression.movement import Movement, MovementPruning
from fastbert.finetuning.run import finetune
from fastbert.layers.modules import part
from fastbert.training import loop
from fastbert.training.loop import TrainingError
from fastbert.training.parallel import Parallel
from tests.finetuning.conftest import memory, model, one_thread, tmp_path  # noqa: F401
from tests.support.model_pairs import build
from tests.support.ranks import together
from tests.support.rule_tasks import digests, quick, stopped, written
from tests.support.trainers import trainer_of, word_tokenizer

OPTIONS = {"lr": 2e-3, "epochs": 4, "batch_size": 8}
RUNS = {
    "hard": Movement(keep=0.3, cooldown=0.4),
    "soft-blocks": Movement("soft", "blocks", penalty=20.0, lr=1.0, multiple=4, cooldown=0.4),
}


@pytest.fixture(scope="module")
def data(memory):  # noqa: F811
    return written("csv", memory / "data", 24, 12)


@pytest.mark.parametrize("name", RUNS)
def test_runs_resume_to_the_same_bytes(tmp_path, monkeypatch, model, data, name):  # noqa: F811
    method = RUNS[name]
    whole = quick("csv", model, data, tmp_path / "whole", method=method, **OPTIONS)
    stopped(monkeypatch, 7, lambda: quick("csv", model, data, tmp_path / "run", method=method, **OPTIONS))
    quick("csv", model, data, tmp_path / "run", method=method, **OPTIONS)
    assert digests(tmp_path / "run") == digests(tmp_path / "whole")
    # The model of an early epoch, which has more weights, is not the best
    history = whole.best.evaluations
    assert [entry.get("counts", True) for entry in history] == [False, False, True, True]
    assert whole.best.score == max(entry["dev"]["accuracy"] for entry in history[2:])
    made = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    config, layers = made.config, made.base_model.layer_list()
    if name == "hard":
        (last,) = (tmp_path / "run" / "runs").glob("*/last")
        last = fastbert.AutoModelForSequenceClassification.from_pretrained(last)
        for layer in [*layers, *last.base_model.layer_list()]:
            for path in shrink.paths(layer.form):
                weight = part(layer, path).weight
                assert int((weight != 0).sum()) == round(0.3 * weight.numel())
    else:
        sizes = config.intermediate_sizes or [config.intermediate_size] * len(layers)
        assert sum(sizes) < len(layers) * config.intermediate_size
    with pytest.raises(TrainingError, match=r"^method.*: the run in"):
        quick("csv", model, data, tmp_path / "run", method=Movement(keep=0.2), **OPTIONS)


def test_embeddings_rest_and_papers_defaults(tmp_path, model, data):  # noqa: F811
    first = fastbert.AutoModel.from_pretrained(model).get_input_embeddings().weight
    quick("csv", model, data, tmp_path / "run", method=Movement(), epochs=1)
    made = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert torch.equal(made.get_input_embeddings().weight, first)
    result = finetune("csv", model, data, tmp_path / "paper", method=Movement(), max_length=32, epochs=0.1)
    assert (result.best.settings.lr, result.best.settings.batch_size) == (3e-5, 16)


def tuned(model, data, output):  # noqa: F811
    """Be one of the processes; the scores of all epochs."""
    loop.work.roof = lambda *device_and_dtype: 1e9
    parallel = Parallel(device="cpu")
    # Single weights have scores so near to each other that rounding chooses among them
    method = Movement(units="blocks", keep=0.5, multiple=4, cooldown=0.4)
    result = quick("csv", model, data, output, method=method, parallel=parallel, **OPTIONS)
    parallel.broadcast(None)
    return result.best.evaluations


@pytest.mark.sweep
def test_two_processes_equal_one(tmp_path, model, data):  # noqa: F811
    (one,) = together(0, tuned, model, data, tmp_path / "one")
    two = together(2, tuned, model, data, tmp_path / "two")
    assert two[0] == two[1]
    assert [entry["dev"] for entry in two[0]] == [pytest.approx(entry["dev"], rel=1e-3) for entry in one]
    losses = []
    for name in ("one", "two"):
        (log,) = (tmp_path / name / "runs").glob("*/log.jsonl")
        losses.append([json.loads(line)["loss"] for line in log.read_text().splitlines()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_bad_runs(tmp_path, model, data):  # noqa: F811
    for name, value in (("freeze", True), ("mixout", 0.5), ("smart", True)):
        with pytest.raises(ValueError, match=f"{name}: expected none with movement"):
            quick("csv", model, data, tmp_path / name, method=Movement(), **{name: value})
    with pytest.raises(ValueError, match="head: expected the usual head"):
        quick("csv", model, data, tmp_path / "mix", method=Movement(), head_mix=True)


class _Noting(transformers.TrainerCallback):
    """Calls `step` of a pruning after each step of a Trainer."""

    def __init__(self, pruning):
        self.pruning = pruning

    def on_step_end(self, *_, **__):
        self.pruning.step()


def test_transformers_trainer(tmp_path, fresh_accelerator):  # noqa: F811
    ours = build("bert", "ForSequenceClassification", num_labels=3)[1]
    pruning = MovementPruning(ours, 8, Movement(keep=0.3))
    trainer = trainer_of(ours, tmp_path, word_tokenizer((f"w{i}" for i in range(115)), 48))
    scores = {"params": pruning.scores, "lr": 1e-2, "weight_decay": 0.0}
    trainer.optimizer = torch.optim.AdamW([{"params": ours.parameters()}, scores], lr=1e-3)
    trainer.add_callback(_Noting(pruning))
    trainer.train()
    assert pruning.step_number == 8
    assert all(scores.abs().max() > 1e-3 for scores in pruning.scores)
    masked = trainer.evaluate()["eval_loss"]
    trainer.model = pruning.finish().model
    assert trainer.evaluate()["eval_loss"] == pytest.approx(masked, rel=1e-6)
    weight = part(trainer.model.base_model.layer_list()[0], "output.dense").weight
    assert int((weight != 0).sum()) == round(0.3 * weight.numel())
