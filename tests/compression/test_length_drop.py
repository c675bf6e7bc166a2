"""LengthDrop: sub-models and what they learn from, in a loop and in runs of fine-tuning."""

from __future__ import annotations

import json
import random

import pytest
import torch

import fastbert
from fastbert.compression.distillation.losses import soft_cross_entropy
from fastbert.compression.length_drop import LengthDrop, LengthDropLosses
from fastbert.compression.token_search import LearnedSchedule
from fastbert.finetuning import fit
from fastbert.finetuning.settings import Settings
from fastbert.models.auto import AutoModelForQuestionAnswering, AutoModelForTokenClassification
from fastbert.training import loop
from fastbert.training.loop import TrainingError
from fastbert.training.parallel import Parallel
from tests.compression.test_elimination import LENGTHS, of
from tests.compression.test_token_search import batch
from tests.finetuning.conftest import memory, model, one_thread, tmp_path  # noqa: F401
from tests.support.ranks import together
from tests.support.rule_tasks import digests, quick, stopped, written

CLOSE = {"rtol": 1e-6, "atol": 0.0}


def losses_of(options=None, auto=fastbert.AutoModelForSequenceClassification, settings=None, **config):
    made = of(auto=auto, dtype=torch.float64, schedule=None, num_labels=2, **config).train()
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made.config.__dict__.update(dropout)
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        # Random biases would hide the difference that tokens make
        for name, p in made.named_parameters():
            if p.dim() == 1:
                p.fill_("LayerNorm.weight" in name)
    return LengthDropLosses(made, options=options, settings=settings)


def rounds(losses, inputs, seed=0, call=None):
    """The loss of each pass, seeded as the loop does."""
    found, passes = [], losses.rounds(call or losses, inputs, False)
    for _ in range(losses.passes):
        torch.manual_seed(seed)
        found.append(next(passes)[0]["task"])
    return found


def test_schedules():
    options = LengthDrop(0.2)
    assert options.schedule(3) == pytest.approx([0.8, 0.64, 0.512])
    draws = iter([0.5, 0.0, 1.0])
    assert options.schedule(3, lambda: next(draws)) == pytest.approx([0.9, 0.9, 0.72])
    drawn = options.schedule(12, random.Random(0).random)
    ratios = [b / a for a, b in zip([1.0, *drawn], drawn, strict=False)]
    assert all(0.8 <= ratio <= 1 for ratio in ratios)
    assert len(set(ratios)) == 12


def test_each_sub_model_learns_from_the_full_one():
    losses, inputs = losses_of(LengthDrop(0.5, 2)), batch()
    seen, own = [], losses.model

    def call(inputs, measure):
        before = len(seen)
        hook = own.base_model.register_forward_pre_hook(lambda *_: seen.append(own.config.token_schedule))
        try:
            return losses(inputs, measure)
        finally:
            hook.remove()
            assert len(seen) == before + 1

    found = rounds(losses, inputs, call=call)
    assert (len(found), seen[0], seen[1]) == (4, None, [0.5, 0.25, 0.125, 0.0625])
    assert seen[2] != seen[3]
    assert own.config.token_schedule is None
    with torch.no_grad():
        full = own(**inputs)
        torch.testing.assert_close(found[0], full.loss / 4)
        for schedule, loss in zip(seen[1:], found[1:], strict=True):
            logits = fastbert.eliminate(own, schedule)(**inputs).logits
            wanted = full.logits.softmax(1)
            apart = wanted * (wanted.log() - logits.log_softmax(1))
            torch.testing.assert_close(loss, apart.sum(1).mean() / 4, **CLOSE)
            assert loss > 1e-6
        fastbert.eliminate(own, None)
    assert [rounds(losses, inputs)[i] for i in (2, 3)] == found[2:]
    assert rounds(losses, inputs, seed=1)[2] != found[2]


def test_the_full_models_answers_have_no_gradient():
    losses, inputs = losses_of(LengthDrop(0.5, 0)), batch()
    full, smallest = rounds(losses, inputs)
    assert not any(each.requires_grad for each in losses._full)
    smallest.backward()
    grads = {name: p.grad for name, p in losses.model.named_parameters()}
    losses.model.zero_grad()
    wanted = losses._full[0]
    fastbert.eliminate(losses.model, LengthDrop(0.5).schedule(4))
    (soft_cross_entropy(losses.model(**inputs).logits, wanted) / 2).backward()
    for name, p in losses.model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-9, atol=1e-12)
    assert full.requires_grad


def test_spans_tokens_and_numbers():
    inputs = batch()
    places = {"start_positions": torch.zeros(4, dtype=torch.int64)}
    places["end_positions"] = torch.tensor([1, 0, 2, 3])
    spans = {name: value for name, value in inputs.items() if name != "labels"} | places
    tokens = torch.randint(2, (sum(LENGTHS),)).index_fill(0, torch.arange(20), -100)
    for auto, given, fields, config in (
        (AutoModelForQuestionAnswering, spans, ("start_logits", "end_logits"), {}),
        (AutoModelForTokenClassification, {**inputs, "labels": tokens}, ("logits",), {}),
        (
            fastbert.AutoModelForSequenceClassification,
            {**inputs, "labels": torch.randn(4, 2, dtype=torch.float64)},
            ("logits",),
            {"problem_type": "regression"},
        ),
    ):
        losses = losses_of(LengthDrop(0.5, 0), auto, **config)
        losses.fields = fields
        found = rounds(losses, given)[1]
        with torch.no_grad():
            full = losses.model(**given)
            small = fastbert.eliminate(losses.model, LengthDrop(0.5).schedule(4))(**given)
        if config:
            expected = (full.logits - small.logits).square().mean()
        elif len(fields) == 2:
            expected = torch.stack(
                [
                    (b.softmax(0) * (b.log_softmax(0) - a.log_softmax(0))).sum()
                    for name in fields
                    for a, b in zip(small[name].split(LENGTHS), full[name].split(LENGTHS), strict=True)
                ]
            ).mean()
        else:
            a, b = small.logits[20:], full.logits[20:]
            expected = (b.softmax(1) * (b.log_softmax(1) - a.log_softmax(1))).sum(1).mean()
        torch.testing.assert_close(found, expected / 2, **CLOSE)
        assert found > 1e-6


def test_sub_models_alone_skip_layers():
    losses = losses_of(LengthDrop(0.2, 2), settings=Settings(1e-3, 1, 8, 32, layerdrop=0.6))
    inputs, ran = batch(), []
    for number, layer in enumerate(losses.model.base_model.layer_list()):
        for p in layer.parameters():
            p.register_hook(lambda grad, number=number: ran[-1].add(number))
    for seed in range(6):
        passes = losses.rounds(losses, inputs, False)
        for _ in range(losses.passes):
            torch.manual_seed(seed)
            ran.append(set())
            next(passes)[0]["task"].backward()
    assert losses.model.layerdrop == 0.6
    assert all(ran[i] == {0, 1, 2, 3} for i in range(0, 24, 4))
    assert sum(map(len, ran)) < 24 + 50
    assert len({frozenset(each) for each in ran[2:4]} | {frozenset(each) for each in ran[6:8]}) > 1


def test_bad_arguments():
    for given, words in (
        ({"drop": 0}, "drop: expected a number in"),
        ({"drop": 1.0}, "drop: expected a number in"),
        ({"drop": True}, "drop: expected a number in"),
        ({"models": -1}, "models: expected an integer >= 0"),
        ({"models": 1.0}, "models: expected an integer >= 0"),
    ):
        with pytest.raises(ValueError, match=words):
            LengthDrop(**given)
    with pytest.raises(ValueError, match="model: expected one without a token_schedule"):
        LengthDropLosses(of(auto=fastbert.AutoModelForSequenceClassification))
    with pytest.raises(ValueError, match="lr: expected a finite number > 0"):
        LearnedSchedule(lr=0)
    with pytest.raises(ValueError, match="weight: expected a finite number >= 0"):
        LearnedSchedule(-1.0)


OPTIONS = {"lr": 2e-3, "epochs": 4, "batch_size": 8}
RUNS = {"length-drop": LengthDrop(0.3, 1), "token-search": LearnedSchedule(5e-2, 8, 3e-2)}


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
    schedule = fastbert.EncoderConfig.from_pretrained(tmp_path / "run").token_schedule
    counts = [entry.get("counts", True) for entry in whole.best.evaluations]
    config = json.loads((tmp_path / "run" / "results.json").read_text())
    assert config["task"] == "csv"
    if name == "length-drop":
        assert (schedule, counts) == (None, [True] * 4)
    else:
        assert len(schedule) == 2
        assert 0.125 <= schedule[1] <= schedule[0] < 1
        assert counts == [False, False, False, True]
        again = quick("csv", tmp_path / "run", data, tmp_path / "again", **OPTIONS)
        assert fastbert.EncoderConfig.from_pretrained(tmp_path / "again").token_schedule == schedule
        assert again.best.score >= whole.best.score
    with pytest.raises(TrainingError, match=r"^method.*: the run in"):
        quick("csv", model, data, tmp_path / "run", method=LengthDrop(), **OPTIONS)


def tuned(model, data, output, method):  # noqa: F811
    """Be one of the processes; the scores of all epochs."""
    loop.work.roof = lambda *device_and_dtype: 1e9
    parallel = Parallel(device="cpu")
    result = quick("csv", model, data, output, method=method, parallel=parallel, **OPTIONS)
    parallel.broadcast(None)
    return result.best.evaluations


@pytest.mark.sweep
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_learn_the_same(tmp_path, model, data, name):  # noqa: F811
    two = together(2, tuned, model, data, tmp_path / "two", RUNS[name])
    assert two[0] == two[1]
    assert two[0][-1]["dev"]["accuracy"] > 0.9


@pytest.mark.parametrize("option", [{"qat": "int8"}, {"head_mix": True}])
@pytest.mark.parametrize("name", RUNS)
def test_other_settings_beside(tmp_path, model, data, name, option):  # noqa: F811
    result = quick("csv", model, data, tmp_path / "out", method=RUNS[name], **OPTIONS, **option)
    assert result.best.score > 0.9


def test_a_learned_schedule_is_scored(tmp_path, monkeypatch, model, data):  # noqa: F811
    seen, scored = [], fit._scored

    def noted(task, model, *rest):
        seen.append(model.config.token_schedule)
        return scored(task, model, *rest)

    monkeypatch.setattr(fit, "_scored", noted)
    quick("csv", model, data, tmp_path / "out", method=RUNS["token-search"], **OPTIONS)
    found = fastbert.EncoderConfig.from_pretrained(tmp_path / "out").token_schedule
    assert seen[-1] == found
    assert len({*map(tuple, seen)}) == 4


def test_settings_that_exclude_a_method(tmp_path, model, data):  # noqa: F811
    for method, names in (
        (LengthDrop(), {"freeze": True, "freelb": True, "smart": True}),
        (LearnedSchedule(), {"freeze": True, "layerdrop": 0.2, "freelb": True, "smart": True}),
    ):
        for name, value in names.items():
            with pytest.raises(ValueError, match=f"^{name}: expected none with"):
                quick("csv", model, data, tmp_path / name, method=method, **{name: value})
