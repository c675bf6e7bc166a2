"""Question answering and pairs of texts: losses against transformers, heads out, derivatives, patterns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fastbert.analysis.fixed import fixed_heads
from fastbert.analysis.heads import ablate, importance, pruning_curve
from fastbert.layers import patterns as fixed
from fastbert.tasks.examples import paired, tokenized
from tests.analysis.conftest import PAIRS, TEXTS, make_tokenizer
from tests.support.analysis import both, cosines, inputs_of, losses, without_head
from tests.support.hf_models import ANALYSED
from tests.support.model_pairs import CASES

HEADS = 3
CLOSE = dict(rtol=1e-9, atol=1e-11)
PLACES = ((0, 0), (1, 2), (2, 1))
# with one of a single token, and one that is a whole example
SPANS = np.array([[1, 3], [5, 5], [0, 0], [2, 17], [4, 6]])


def question_answering(family):
    return both(family, "ForQuestionAnswering", num_labels=2)


def encoder(family):
    return both(family, "")


@pytest.fixture
def asked(pairs):
    return replace(pairs, labels=SPANS)


@pytest.fixture
def couples():
    """Five pairs whose lengths differ much, so that a batch by length would part them."""
    return paired(make_tokenizer(), TEXTS, PAIRS)


@pytest.fixture
def rated():
    return paired(make_tokenizer(), TEXTS, PAIRS, [0.9, -0.3, 0, 1, 0.5])


def mask_of(layers, layer, head, value=0.0):
    mask = torch.ones(layers, HEADS, dtype=torch.float64)
    mask[layer, head] = value
    return mask


# -- question answering --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [n for n, task in CASES if task == "ForQuestionAnswering" and n in ANALYSED]
)
def test_answers_as_transformers(asked, family):
    theirs, ours = question_answering(family)
    found = ablate(ours, asked)
    np.testing.assert_allclose(found.base_loss, losses(theirs, asked), **CLOSE)
    for layer, head in PLACES if not family.startswith("albert") else ():
        expected = losses(without_head(theirs, layer, head), asked)
        np.testing.assert_allclose(found.loss[:, layer, head], expected, **CLOSE)
    assert found.score_name == "exact match"


def test_an_exact_match(asked):
    """Both ends right: one right end is not enough."""
    ours = question_answering("bert")[1]
    ends = np.zeros((5, 2), int)
    for number in range(5):
        with torch.no_grad():
            out = ours(**inputs_of(ours, asked, number))
        ends[number] = out.start_logits.argmax(), out.end_logits.argmax()
    ordered = ends[:, 0] <= ends[:, 1]
    assert ordered.any()
    both_right = np.sort(ends, 1)
    np.testing.assert_array_equal(ablate(ours, replace(asked, labels=both_right)).base_score, ordered)
    # one end of each, so that the other is right only where the span is one token
    for end in (0, 1):
        one_right = np.repeat(ends[:, [end]], 2, 1)
        expected = ends[:, 0] == ends[:, 1]
        np.testing.assert_array_equal(ablate(ours, replace(asked, labels=one_right)).base_score, expected)
    assert (ends[:, 0] != ends[:, 1]).any()


# -- pairs of texts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("family", ANALYSED)
def test_pairs_as_transformers(couples, family, pooling):
    theirs, ours = encoder(family)
    found = ablate(ours, couples, pooling=pooling)
    expected = cosines(theirs, couples, pooling)
    np.testing.assert_allclose(found.base_score, expected, **CLOSE)
    np.testing.assert_allclose(found.base_loss, 1 - expected, **CLOSE)
    for layer, head in PLACES if not family.startswith("albert") else ():
        expected = cosines(without_head(theirs, layer, head), couples, pooling)
        np.testing.assert_allclose(found.score[:, layer, head], expected, **CLOSE)
    assert (found.score_name, found.loss.shape) == ("cosine", (5, len(ours.layer_list()), HEADS))


def test_rated_pairs(rated):
    """The squared error of the cosine."""
    theirs, ours = encoder("bert")
    found = ablate(ours, rated, pooling="mean")
    expected = (cosines(theirs, rated) - rated.labels[::2]) ** 2
    np.testing.assert_allclose(found.base_loss, expected, **CLOSE)
    np.testing.assert_allclose(found.base_score, -expected, **CLOSE)
    assert found.score_name == "negative squared error"
    expected = (cosines(without_head(theirs, 1, 2), rated) - rated.labels[::2]) ** 2
    np.testing.assert_allclose(found.loss[:, 1, 2], expected, **CLOSE)


# -- both ----------------------------------------------------------------------------------------------------


def cases(asked, rated, couples):
    """(model, examples, options, loss of each case under a head mask)."""
    of_answers, of_pairs = question_answering("bert")[1], encoder("bert")[1]

    def squared(**kwargs):
        return (cosines(of_pairs, rated, **kwargs) - rated.labels[::2]) ** 2

    return [
        (of_answers, asked, {}, lambda **kwargs: losses(of_answers, asked, **kwargs)),
        (of_pairs, rated, {"pooling": "mean"}, squared),
        (of_pairs, couples, {"pooling": "mean"}, lambda **kwargs: 1 - cosines(of_pairs, couples, **kwargs)),
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("tokens", [1, 40])
def test_heads_out_one_by_one(asked, rated, couples, tokens):
    """In batches only an example's own tokens compete, and both texts of a pair lose a head."""
    for model, examples, how, loss in cases(asked, rated, couples):
        found = ablate(model, examples, batch_tokens=tokens, **how)
        for layer, head in PLACES:
            expected = loss(head_mask=mask_of(3, layer, head))
            np.testing.assert_allclose(found.loss[:, layer, head], expected, **CLOSE)


def test_importance_is_the_central_difference(asked, rated, couples):
    step = 1e-5
    for model, examples, how, loss in cases(asked, rated, couples):
        layers = len(model.base_model.layer_list())
        found = importance(model, examples, **how).derivatives
        assert found.shape == (5, layers, HEADS)
        for layer, head in ((0, 0), (1, 2), (layers - 1, 1)):
            up, down = (loss(head_mask=mask_of(layers, layer, head, 1 + sign * step)) for sign in (1, -1))
            expected = (up - down) / (2 * step)
            np.testing.assert_allclose(found[:, layer, head], expected, rtol=1e-5, atol=1e-8)


def test_a_pruning_curve(asked, rated, couples):
    order = np.random.default_rng(0).permutation(9)
    for model, examples, how, loss in cases(asked, rated, couples)[1:]:
        found = pruning_curve(model, examples, order, step=1 / 3, batch_tokens=40, **how)
        assert found.score.shape == (4, 5)
        for point, count in enumerate((0, 3, 6, 9)):
            mask = torch.ones(9, dtype=torch.float64)
            mask[order[:count]] = 0
            expected = loss(head_mask=mask.view(3, 3))
            expected = 1 - expected if found.score_name == "cosine" else -expected
            np.testing.assert_allclose(found.score[point], expected, **CLOSE)
    model, examples, how, _ = cases(asked, rated, couples)[0]
    found = pruning_curve(model, examples, order, **how)
    assert found.score_name == "exact match"
    assert np.isin(found.score, (0, 1)).all()


def test_fixed_patterns(asked, rated, couples):
    assignment = np.full((3, HEADS), fixed.LEARNED)
    assignment[0], assignment[1, 2] = fixed.PREVIOUS, fixed.END
    mask = torch.from_numpy(assignment == fixed.LEARNED).double()
    for model, examples, how, loss in cases(asked, rated, couples):
        found = fixed_heads(model, examples, assignment, **how)
        np.testing.assert_allclose(found.base_loss, loss(), **CLOSE)
        np.testing.assert_allclose(found.zero_loss, loss(head_mask=mask), **CLOSE)
        by_one = fixed_heads(model, examples, assignment, batch_tokens=1, **how)
        np.testing.assert_allclose(by_one.loss, found.loss, **CLOSE)
        assert np.abs(found.loss - found.base_loss).min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(asked, couples, dtype):
    for model, examples, how, _ in cases(asked, couples, couples)[::2]:
        exact = ablate(model, examples, **how).loss
        ours = type(model)(model.config).eval()
        ours.load_state_dict(model.state_dict())
        found = ablate(ours.to(dtype), examples, **how).loss
        # some dozen roundings of a loss of about 1: the sums of a few narrow layers
        np.testing.assert_allclose(found, exact, atol=64 * torch.finfo(dtype).eps * max(1, exact.max()))


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (None, "labels: BertForQuestionAnswering needs them"),
        (SPANS - 1, r"labels\[2\]: -1 to -1 is no span of the example's 9 tokens"),
        (SPANS[:, ::-1], r"labels\[0\]: 3 to 1 is no span of the example's"),
        (SPANS + np.array([0, 9]), r"labels\[2\]: 0 to 9 is no span of the example's 9 tokens"),
    ],
)
def test_bad_spans(asked, labels, expected):
    for function in (ablate, importance):
        with pytest.raises(ValueError, match=expected):
            function(question_answering("bert")[1], replace(asked, labels=labels))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (np.array(["a"] * 10), "labels: expected cosines"),
        (np.arange(10) // 2 * 1.0, r"labels\[4\]: 2.0 is no cosine; expected -1 to 1"),
        (np.full(10, np.nan), r"labels\[0\]: nan is no cosine"),
        (np.arange(10) / 10, r"labels\[0\]: expected one label for both texts of a pair, got 0.0 and 0.1"),
    ],
)
def test_bad_ratings(couples, labels, expected):
    for function in (ablate, importance):
        with pytest.raises(ValueError, match=expected):
            function(encoder("bert")[1], replace(couples, labels=labels), pooling="mean")


def test_bad_models(couples, asked, pairs):
    ours = encoder("bert")[1]
    with pytest.raises(ValueError, match=r"examples: BertModel has no head, .* even number, got 9"):
        ablate(ours, couples.chosen(range(9)), pooling="mean")
    with pytest.raises(ValueError, match=r"examples\[0\]: has two texts; expected an example for each"):
        ablate(ours, pairs, pooling="mean")
    with pytest.raises(ValueError, match=r"pooling: BertModel has no head, .*mean, cls, max, .*got 'first'"):
        ablate(ours, couples, pooling="first")
    with pytest.raises(ValueError, match="pooling: BertForQuestionAnswering has a head; expected None"):
        importance(question_answering("bert")[1], asked, pooling="cls")
    with pytest.raises(ValueError, match="examples: expected one at least, got none"):
        ablate(ours, tokenized(make_tokenizer(), []), pooling="mean")
