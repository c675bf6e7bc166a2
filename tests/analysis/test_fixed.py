"""Heads with fixed patterns against transformers with the patterns' maps."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch

from fastbert.analysis.attention import attention_statistics
from fastbert.analysis.fixed import NAMES, FixedPatterns, fitting, fixed_heads
from fastbert.layers import patterns as fixed
from fastbert.layers.modules import part
from fastbert.models.encoder import layers_of, tapped
from fastbert.models.families import FAMILIES
from fastbert.tasks.examples import FIRST, KINDS, SEPARATOR
from tests.support.analysis import both, inputs_of, losses, statistics
from tests.support.hf_models import ANALYSED
from tests.support.pattern_maps import ALL, dense

HEADS = 3
CLOSE = dict(rtol=1e-9, atol=1e-11)


# -- models --------------------------------------------------------------------------------------------------


def assignment_of(layers, seed=0):
    """Every pattern, and learned heads too."""
    found = np.resize(np.random.default_rng(seed).permutation(len(NAMES)), (layers, HEADS))
    return found.astype(np.int8)


@contextlib.contextmanager
def with_maps(theirs, assignment, kinds):
    """transformers' model with heads that multiply their values by maps, for one sequence."""
    family = FAMILIES[theirs.config.model_type]
    base, number, values = theirs.base_model, [0], []
    separators = (kinds == SEPARATOR).tolist()

    def keep(module, inputs, output):
        packed = family.layer.value == family.layer.query
        value = output.chunk(3, -1)[2] if packed else output
        size = theirs.config.hidden_size // HEADS
        shared = value.unflatten(-1, (-1, size)).repeat_interleave(HEADS * size // value.shape[-1], -2)
        values[:] = [shared.flatten(-2)]

    def put(module, inputs):
        (context,) = inputs
        context = context.clone()
        n, width = context.shape[1], context.shape[2] // HEADS
        for head, pattern in enumerate(assignment[number[0]]):
            if pattern != fixed.LEARNED:
                columns = slice(head * width, (head + 1) * width)
                weights = torch.from_numpy(dense(pattern, n, separators))
                context[..., columns] = weights @ values[0][..., columns]
        number[0] = (number[0] + 1) % len(assignment)
        return (context,)

    hooks = []
    for layer in dict.fromkeys(layers_of(base, theirs.config, family)):
        hooks.append(part(layer, family.layer.value).register_forward_hook(keep))
        hooks.append(part(layer, family.layer.attention_output).register_forward_pre_hook(put))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def losses_with_maps(theirs, examples, assignment):
    found = []
    for number in range(len(examples)):
        start, end = examples.starts[number : number + 2]
        with with_maps(theirs, assignment, examples.kinds[start:end]):
            found.append(losses(theirs, examples.chosen([number])).item())
    return np.array(found)


@pytest.mark.parametrize("tokens", [1, 40, 4096])
@pytest.mark.parametrize("family", ANALYSED)
def test_as_transformers_with_maps(labelled, family, tokens):
    theirs, ours = both(family)
    layers = len(ours.base_model.layer_list())
    assignment = assignment_of(layers)
    found = fixed_heads(ours, labelled, assignment, batch_tokens=tokens)
    np.testing.assert_allclose(found.base_loss, losses(theirs, labelled), **CLOSE)
    np.testing.assert_allclose(found.loss, losses_with_maps(theirs, labelled, assignment), **CLOSE)
    mask = torch.from_numpy(assignment == fixed.LEARNED).double()
    np.testing.assert_allclose(found.zero_loss, losses(ours, labelled, head_mask=mask), **CLOSE)
    assert (
        found.count
        == int((assignment != 0).sum())
        == sum(found.counts().values()) - found.counts()["learned"]
    )
    assert np.abs(found.loss - found.base_loss).max() > 1e-3


def test_heads_that_attend_so_already_lose_nothing(labelled):
    """Queries that meet their own key alone: `current` is what they do, and `fitting` finds it."""
    model = copy.deepcopy(both("bert")[1])
    embeddings, attention = model.bert.embeddings, model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        # a code per place, in which no two share the part of a head
        code = torch.randn(72, 48, generator=torch.Generator().manual_seed(0)).sign()
        embeddings.position_embeddings.weight.copy_(code)
        for table in (embeddings.word_embeddings, embeddings.token_type_embeddings):
            table.weight.mul_(0.05)
        embeddings.LayerNorm.weight.fill_(1)
        embeddings.LayerNorm.bias.zero_()
        for linear in (attention.query, attention.key):
            linear.weight.copy_(10 * torch.eye(48))
            linear.bias.zero_()
    assignment = fitting(attention_statistics(model, labelled))
    assert (assignment[0] == fixed.CURRENT).all()
    first = np.where([[True], [False], [False]], assignment, fixed.LEARNED)
    found = fixed_heads(model, labelled, first)
    np.testing.assert_allclose(found.loss, found.base_loss, rtol=1e-5)
    assert np.abs(found.zero_loss - found.base_loss).max() > 0.05
    given = fixed_heads(model, labelled)
    assert np.array_equal(given.assignment, assignment)
    np.testing.assert_array_equal(given.loss, fixed_heads(model, labelled, assignment).loss)


def test_changes_and_intervals(labelled):
    found = fixed_heads(both("bert")[1], labelled, assignment_of(3))
    for zero, loss, score in ((False, found.loss, found.score), (True, found.zero_loss, found.zero_score)):
        change = score.mean() - found.base_score.mean()
        assert found.score_change(zero=zero) == pytest.approx(change)
        assert found.loss_change(zero=zero) == pytest.approx(loss.mean() - found.base_loss.mean())
        interval = found.interval(zero=zero)
        assert interval.mean == pytest.approx(change)
        assert interval.low <= interval.mean <= interval.high
        assert 0 < found.p_value(zero=zero) <= 1
    with pytest.raises(ValueError, match="an interval needs two examples at least, got 1"):
        fixed_heads(both("bert")[1], labelled.chosen([0]), assignment_of(3)).interval()


# -- which pattern -------------------------------------------------------------------------------------------


def statistics_of(**heads):
    """Of 3 examples of 30 tokens and one layer, a head per name: numbers per feature, 0 if not given."""
    share = np.zeros((len(KINDS), 3), np.float32)
    share[[FIRST, SEPARATOR]] = 1 / 30
    made = statistics((3, 1, len(heads)), 30, texts=1, share_of_kind=share)
    for i, given in enumerate(heads.values()):
        for name, values in given.items():
            kind = {"first": FIRST, "separator": SEPARATOR}.get(name)
            where = getattr(made, name) if kind is None else made.to_kind[kind]
            where[:, 0, i] = values
    return made


def test_the_fitting_pattern():
    heads = {
        "previous": {"previous": 0.8, "itself": 0.1},
        "current": {"itself": 0.6, "previous": 0.2, "following": 0.15},
        "next": {"following": [0.9, 0.2, 0.9], "itself": [0.0, 0.7, 0.0]},
        "first token": {"first": 0.7, "separator": 0.2},
        "separators": {"first": 0.1, "separator": 0.8},
        # vertical by a column that is no special token
        "learned": {"most_received": 0.9, "first": 0.2},
        "both": {"previous": 0.5, "separator": 0.5},
        "block": {"spread": 0.9},
        # vertical in one example of three
        "seldom": {"first": [0.9, 0.1, 0.1]},
    }
    found = fitting(statistics_of(**heads))
    assert found.dtype == np.int8
    expected = [name if name in NAMES else "learned" for name in heads]
    assert [NAMES[i] for i in found[0]] == expected


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        (np.zeros((3, 3)), r"assignment: expected integers of shape \(3, 3\), got float64"),
        (np.eye(3, dtype=int) * 10, r"assignment\[0, 0\]: 10 is no pattern; expected 0 to 9"),
        (-np.eye(3, dtype=int), r"assignment\[0, 0\]: -1 is no pattern"),
    ],
)
def test_bad_assignments(labelled, assignment, expected):
    ours = both("bert")[1]
    with pytest.raises(ValueError, match=expected):
        fixed_heads(ours, labelled, assignment)


def test_separators_must_be_known(labelled):
    ours = both("bert")[1]
    taps = FixedPatterns(np.full((3, HEADS), fixed.SEPARATORS))
    with (
        pytest.raises(ValueError, match=r"separators: expected .* for the pattern 'separators', got None"),
        tapped(ours.bert, taps),
    ):
        ours(**inputs_of(ours, labelled, 0))


def test_a_causal_model_has_no_later_token(labelled):
    ours = both("bert", is_decoder=True)[1]
    for pattern in ALL:
        assignment = np.zeros((3, HEADS), int)
        assignment[2, 1] = pattern
        if pattern in fixed.BACKWARD:
            assert fixed_heads(ours, labelled, assignment).count == 1
        else:
            with pytest.raises(ValueError, match=f"assignment: '{NAMES[pattern]}', but in a causal model"):
                fixed_heads(ours, labelled, assignment)
    assert np.isin(fixed_heads(ours, labelled).assignment, fixed.BACKWARD).all()
