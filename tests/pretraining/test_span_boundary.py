"""The span-boundary objective: targets and neighbours, and losses and gradients against plain PyTorch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fastbert
from fastbert.models.config import EncoderConfig
from fastbert.pretraining.masking import IGNORED, Masked, Masking
from fastbert.pretraining.objectives.masked import MaskedExample
from fastbert.pretraining.objectives.span_boundary import SpanBoundary, SpanBoundaryLosses, boundaries
from tests.support.numbered_text import (
    CLS,
    MASK,
    SEP,
    SIZES,
    VOCAB,
    Numbered,
    assert_as_papers,
    at_unit_scale,
    padded,
    relative_error,
)
from tests.support.objectives import batch_of, tensors
from tests.support.vocabulary_rows import VocabularyRows

WIDE = Masking("span", share=0.5)  # more and longer spans


def module_of(family: str = "bert", max_targets: int = 20, seed: int = 0, **config) -> SpanBoundaryLosses:
    """The model and its head."""
    torch.manual_seed(seed)
    objective = SpanBoundary(Numbered(), max_targets=max_targets)
    return at_unit_scale(objective.losses(objective.model(EncoderConfig(family, **{**SIZES, **config}))))


# --- examples -----------------------------------------------------------------------------------------------


def test_spans_that_touch_are_one():
    masked = np.zeros(14, bool)
    masked[[1, 2, 3, 4, 6, 9, 10, 11]] = True
    left, right, place, rows = boundaries(masked, 3)
    assert rows.tolist() == [1, 2, 3, 6, 9, 10, 11]  # the fourth of the first span has no target
    assert left.tolist() == [0, 0, 0, 5, 8, 8, 8]
    assert right.tolist() == [5, 5, 5, 7, 12, 12, 12]
    assert place.tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert [len(each) for each in boundaries(np.zeros(5, bool), 3)] == [0] * 4
    # as the masking rule draws them
    ids = np.array([CLS, 9, 10, 11, 12, SEP])
    labels = np.array([IGNORED, 9, 10, 11, IGNORED, IGNORED])
    spans = np.array([[1, 2], [2, 4]])
    seen = np.array([CLS, MASK, 100, 101, 12, SEP])
    example = MaskedExample(Masked(seen, labels, spans), np.zeros(6, np.int64), -100)
    batch = SpanBoundary(Numbered()).collate([example, example])
    assert batch.inputs["left"].tolist() == [0, 0, 0, 6, 6, 6]
    assert batch.inputs["right"].tolist() == [4, 4, 4, 10, 10, 10]
    assert batch.inputs["boundary_labels"].tolist() == [9, 10, 11] * 2
    assert ids[labels != IGNORED].tolist() == [9, 10, 11]


@pytest.mark.parametrize("at", [0, 5])
def test_a_span_without_a_neighbour_is_an_error(at):
    labels = np.full(6, IGNORED)
    labels[at] = 9
    whole = MaskedExample(Masked(np.arange(6), np.full(6, IGNORED), np.empty((0, 2))), np.zeros(6), -100)
    example = MaskedExample(Masked(np.arange(6), labels, np.array([[at, at + 1]])), np.zeros(6), -100)
    for examples in ([example, whole], [whole, example]):
        with pytest.raises(ValueError, match="examples: a sequence begins or ends with a masked token"):
            SpanBoundary(Numbered()).collate(examples)


# --- losses -------------------------------------------------------------------------------------------------


class Paper(nn.Module):
    """The paper's equations on a padded batch, around transformers' model."""

    def __init__(self, module: SpanBoundaryLosses, max_targets: int) -> None:
        super().__init__()
        own, head = module.model, module.boundary
        config = transformers.AutoConfig.for_model(**own.config.to_dict())
        self.model = transformers.AutoModelForMaskedLM.from_config(config)
        self.model.set_attn_implementation("eager")
        self.model.load_state_dict(own.state_dict(), strict=True)
        self.boundary = copy.deepcopy(head)  # only its parameters are used
        self.max_targets = max_targets

    def forward(self, inputs: dict) -> dict[str, torch.Tensor]:
        given, head = padded(inputs), self.boundary
        labels, base = given.pop("labels"), self.model.base_model
        hidden = base(**given).last_hidden_state
        logits = self.model(**given).logits
        vectors, targets = [], []
        for row, marks in zip(hidden, labels.tolist(), strict=True):
            begin = None
            for i, label in enumerate(marks):
                if label == IGNORED:
                    begin = None
                    continue
                if begin is None:
                    begin = i
                    end = next(k for k in range(i, len(marks) + 1) if marks[k] == IGNORED) - 1
                if i - begin < self.max_targets:
                    place = head.places.weight[i - begin]
                    vectors.append(torch.cat([row[begin - 1], row[end + 1], place]))
                    targets.append(label)
        x = torch.stack(vectors)
        for linear, norm in ((head.first, head.first_norm), (head.second, head.second_norm)):
            x = F.gelu(x @ linear.weight.T + linear.bias)
            x = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
        scores = x @ base.embeddings.word_embeddings.weight.T + head.bias
        mlm = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"mlm": mlm, "sbo": F.cross_entropy(scores, torch.tensor(targets))}


def gradients(module: nn.Module, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    sum(losses.values()).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "max_targets", "config"),
    [
        ("bert", 20, {}),
        ("bert", 4, {"layer_norm_eps": 1e-3}),
        ("roberta", 20, {"type_vocab_size": 1}),
        ("electra", 20, {"embedding_size": 24}),
    ],
)
def test_losses_and_gradients_are_the_papers(family, max_targets, config):
    batch = batch_of(SpanBoundary(Numbered(), WIDE, max_targets=max_targets))
    assert (batch.counts["sbo"] < batch.counts["mlm"]) == (max_targets == 4)
    assert batch.inputs["token_type_ids"].any()
    if family == "roberta":  # it has one type
        batch.inputs["token_type_ids"] = np.zeros_like(batch.inputs["token_type_ids"])
    module, inputs = module_of(family, max_targets, **config), tensors(batch)
    assert module.weights == {}
    single = Paper(module, max_targets).train()
    double = copy.deepcopy(single).double()
    wide = copy.deepcopy(module).double()
    found = []
    for trained in (module, single, wide, double):
        losses = trained(inputs)[0] if isinstance(trained, SpanBoundaryLosses) else trained(inputs)
        found.append((losses, gradients(trained, losses)))
    assert found[0][1].keys() == found[3][1].keys()
    assert len(found[0][1]) == len(list(module.parameters()))
    for each in zip(*found, strict=True):
        assert_as_papers(*each)


def test_autocast_gradients_are_no_worse_than_eager():
    mine, theirs = [], []
    for seed in range(3):
        inputs = tensors(batch_of(SpanBoundary(Numbered(), WIDE, seed=seed)))
        module = module_of(seed=seed)
        eager = Paper(module, 20).train()
        double = copy.deepcopy(eager).double()
        truth = gradients(double, double(inputs))
        with torch.autocast("cpu", torch.bfloat16):
            losses, plain = module(inputs)[0], eager(inputs)
        assert all(loss.dtype == torch.float32 for loss in losses.values())
        mine.append(relative_error(gradients(module, losses), truth))
        theirs.append(relative_error(gradients(eager, plain), truth))
    assert sum(mine) <= 1.1 * sum(theirs), f"{mine} against {theirs}"


def test_what_is_counted():
    batch = batch_of(SpanBoundary(Numbered()))
    module, inputs = module_of(), tensors(batch)
    with VocabularyRows(VOCAB) as seen:
        assert module(inputs)[1] == {}
    assert 0 < max(seen.rows) <= batch.counts["mlm"]
    with torch.no_grad():  # a bias makes two tokens nearly certain, one for each loss
        module.boundary.bias[inputs["boundary_labels"][3]] = 1e4
        module.model.cls.predictions.bias[inputs["boundary_labels"][0]] = 1e4
    losses, counted = module(inputs, measure=True)
    assert counted == {"mlm": 1, "sbo": 1}
    assert losses.keys() == {"mlm", "sbo"}


def test_no_prediction_at_all():
    batch = batch_of(SpanBoundary(Numbered([2, 2])))
    assert batch.counts == {"mlm": 0, "sbo": 0}
    module = module_of()
    losses, counted = module(tensors(batch), measure=True)
    assert losses == {"mlm": 0, "sbo": 0}
    assert counted == {"mlm": 0, "sbo": 0}
    sum(losses.values()).backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in module.parameters())


# --- the model that is saved --------------------------------------------------------------------------------


def test_the_export_is_the_model_alone():
    objective = SpanBoundary(Numbered())
    module = objective.losses(objective.model(EncoderConfig("bert", **SIZES)))
    assert type(module.model) is fastbert.BertForMaskedLM
    assert list(module.exports) == ["model"]
    own = {id(p) for p in module.exports["model"].parameters()}
    heads = {name for name, p in module.named_parameters() if id(p) not in own}
    parts = ("first", "first_norm", "second", "second_norm")
    weights = {f"boundary.{part}.{kind}" for part in parts for kind in ("weight", "bias")}
    assert heads == weights | {"boundary.places.weight", "boundary.bias"}
    # new heads begin as BERT does
    assert module.boundary.places.weight.shape == (20, 200)
    for weight in (
        module.boundary.places.weight,
        module.boundary.first.weight,
        module.boundary.second.weight,
    ):
        assert 0.015 < weight.std() < 0.025
    assert module.boundary.first_norm.weight.eq(1).all()
    for bias in (module.boundary.first.bias, module.boundary.second.bias, module.boundary.bias):
        assert bias.eq(0).all()


def test_errors_are_named():
    with pytest.raises(ValueError, match="format: span boundaries have no loss for the 3 classes of a pair"):
        SpanBoundary(Numbered(num_labels=3))
    for bad in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"max_targets: expected an integer >= 1, got {bad}"):
            SpanBoundary(Numbered(), max_targets=bad)
    with pytest.raises(ValueError, match="static: expected"):
        SpanBoundary(Numbered(), static=0)


def test_what_examples_depend_on():
    first = SpanBoundary(Numbered())
    assert SpanBoundary(Numbered()).hash == first.hash
    assert first.masking.unit == "span"
    others = (
        SpanBoundary(Numbered(), max_targets=10),
        SpanBoundary(Numbered(), seed=1),
        SpanBoundary(Numbered(), WIDE),
    )
    assert len({first.hash, *(other.hash for other in others)}) == 4


def test_work_is_that_of_the_products():
    """Of the head's products on one sequence, counted by PyTorch; a step is three forwards."""
    batch = batch_of(SpanBoundary(Numbered([40]), WIDE, max_targets=4))
    module, n = module_of(max_targets=4), batch.counts["sbo"]
    assert 0 < n < batch.counts["mlm"]
    head, x = module.boundary, torch.randn(n, 2 * 48 + 200)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        words = module.model.get_input_embeddings().weight
        F.linear(F.linear(F.linear(x, head.first.weight), head.second.weight), words)
    plain = super(SpanBoundaryLosses, module).work(batch)
    assert module.work(batch) - plain == 3 * counted.get_total_flops()
