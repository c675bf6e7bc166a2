"""Question answering by accelerated models: its softmax includes padding, which their encoders remove."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fastbert
from fastbert.acceleration import interface
from tests.acceleration.test_interface import masks
from tests.acceleration.test_interface import stock as other_stock
from tests.support.accelerated_models import (
    build,
    calls,
    close,
    first_kept,
    layer_calls,
    pair,
    same_gradients,
    stock,
)
from tests.support.hf_models import ACCELERATED, hf_config
from tests.support.model_pairs import native

SPANS = transformers.AutoModelForQuestionAnswering
LOGITS = ("start_logits", "end_logits")
# All but those that have no such head
READERS = [name for name in ACCELERATED if name not in ("nomic_bert", "gte", "eurobert")]


def asked(name: str = "bert", **kwargs) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(a batch with padding and holes, labels on kept tokens)."""
    inputs = first_kept(name, seqlen=18, seed=1, **kwargs)
    kept = inputs["attention_mask"].bool()
    last = (torch.arange(18) * kept).argmax(1)
    return inputs, {"start_positions": kept.long().argmax(1), "end_positions": last}


# -- what a head returns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READERS)
def test_padding_gets_no_probability(name):
    slow, fast = pair(name, SPANS)
    inputs, labels = asked(name)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = slow(**inputs, **labels)
        with calls(fast, packed=1, padded=0, fused=layer_calls(name), stock=0):
            found = [fast(**inputs, **labels), native(slow)(**inputs, **labels)]
    assert type(found[0]) is type(expected)
    for actual in found:
        assert list(actual.keys()) == list(expected.keys())
        losses = []
        for key, label in zip(LOGITS, labels.values(), strict=True):
            mine, theirs = actual[key], expected[key]
            assert (mine.shape, mine.dtype, mine.is_contiguous()) == (theirs.shape, theirs.dtype, True)
            close(mine[kept], theirs[kept])
            assert mine.isfinite().all()
            p = mine.softmax(-1)
            assert p[~kept].eq(0).all()
            close(p, theirs.masked_fill(~kept, -torch.inf).softmax(-1))
            losses.append(F.cross_entropy(theirs.masked_fill(~kept, -torch.inf), label))
        close(actual.loss, (losses[0] + losses[1]) / 2)
        assert actual.loss < expected.loss - 0.1  # else the test would show nothing
        assert actual.to_tuple()[0] is actual.loss is actual["loss"]


@pytest.mark.parametrize("name", ["bert", "distilbert", "mpnet"])
def test_tuples_and_labels_in_every_form(name):
    slow, fast = pair(name, SPANS)
    inputs, labels = asked(name)
    start, end = labels.values()
    with torch.no_grad():
        whole = fast(**inputs, **labels, output_hidden_states=True)
        for given in ({}, labels, {"start_positions": start}):
            flat = fast(**inputs, **given, return_dict=False, output_hidden_states=True)
            assert isinstance(flat, tuple)
            assert len(flat) == len(slow(**inputs, **given, return_dict=False, output_hidden_states=True))
            at = len(flat) - 3
            assert at == int(len(given) == 2)
            for mine, key in zip(flat[at:], (*LOGITS, "hidden_states"), strict=True):
                values = (mine, whole[key]) if key != "hidden_states" else (mine[1], whole[key][1])
                assert torch.equal(*values)
            assert at == 0 or torch.equal(flat[0], whole.loss)
        if name == "bert":
            assert torch.equal(fast(*inputs.values(), None, None, start, end).loss, whole.loss)
        assert torch.equal(
            fast(**inputs, start_positions=start[:, None], end_positions=end[:, None]).loss, whole.loss
        )
        # a position beyond the row is not counted; one before it means its first token
        moved = {"start_positions": start.clone(), "end_positions": end.clone()}
        moved["start_positions"][:2] = torch.tensor([18, 500])
        moved["end_positions"][3] = -7
        with calls(fast, packed=1, padded=0):
            actual = fast(**inputs, **moved)
        expected = (
            F.cross_entropy(whole.start_logits[2:], start[2:])
            + F.cross_entropy(whole.end_logits, torch.cat((end[:3], end.new_zeros(1))))
        ) / 2
        close(actual.loss, expected)
        gone = torch.full((4,), 18)
        assert fast(**inputs, start_positions=gone, end_positions=gone).loss.isnan()  # as in the stock model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    slow, fast = (copy.deepcopy(m).to(dtype) for m in pair("bert", SPANS))
    inputs, labels = asked()
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected, actual = slow(**inputs, **labels), fast(**inputs, **labels)
    assert actual.loss.isfinite()
    assert actual.loss.dtype == expected.loss.dtype
    for key in LOGITS:
        assert actual[key].dtype == dtype
        assert (actual[key] + actual[key]).isfinite().all()
        assert actual[key].softmax(-1)[~kept].eq(0).all()
        close(actual[key][kept], expected[key][kept], 0.05)


# -- where all is as in the stock model ----------------------------------------------------------------------


def left_padded(inputs):
    inputs["attention_mask"][1, :4] = 0


def four_dimensional(inputs):
    masked = inputs["attention_mask"].logical_not()[:, None, None].expand(-1, 1, 18, -1)
    inputs["attention_mask"] = torch.zeros(masked.shape).masked_fill(masked, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("change", "options", "given"),
    [
        (left_padded, {}, {}),
        (None, {"unpad": False}, {}),
        (None, {}, {"output_attentions": True}),
        (lambda inputs: inputs.update(attention_mask=torch.ones(4, 18)), {}, {}),
        (lambda inputs: inputs.pop("attention_mask"), {}, {}),
        (four_dimensional, {}, {}),
    ],
    ids=["left-padding", "unpad=False", "output_attentions", "no-padding", "no-mask", "4-D-mask"],
)
def test_what_is_not_packed_is_scored_as_in_the_stock_model(change, options, given):
    slow = stock("bert", SPANS, attention="eager")
    fast = fastbert.accelerate(copy.deepcopy(slow), **options)
    inputs, labels = asked()
    labels = {key: torch.full((4,), 5) for key in labels}
    inputs["attention_mask"][:, 5] = 1
    if change is not None:
        change(inputs)
    with torch.no_grad():
        expected, actual = (m(**inputs, **labels, **given) for m in (slow, fast))
    assert list(actual.keys()) == list(expected.keys())
    for key in ("loss", *LOGITS):
        close(actual[key], expected[key])


@pytest.mark.parametrize("key", ["start_positions", "end_positions"])
@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32])
def test_label_on_a_masked_token(key, kind):
    """A useless label, but no reason for a loss of 1e38."""
    slow, fast = pair("bert", SPANS)
    inputs, labels = asked()
    inputs["attention_mask"] = inputs["attention_mask"].to(kind)
    labels[key] = labels[key].clone()
    labels[key][0] = 17
    assert not inputs["attention_mask"][0, 17]
    with torch.no_grad():
        with calls(fast, packed=0, padded=1):
            actual = fast(**inputs, **labels)
        expected = slow(**inputs, **labels)
    for key in ("loss", *LOGITS):
        close(actual[key], expected[key])
    with torch.no_grad(), calls(fast, packed=2, padded=0):  # the next call is as before
        fast.bert(**inputs)
        fast(**inputs)


def in_training(name: str = "bert") -> list[nn.Module]:
    """[stock, accelerated], in float64 and without dropout."""
    return [copy.deepcopy(m).double().train() for m in pair(name, SPANS)]


@pytest.mark.parametrize("name", READERS)
def test_training_is_the_stock_models(name):
    slow, fast = in_training(name)
    inputs, labels = asked(name)
    expected = slow(**inputs, **labels)
    with calls(fast, packed=0, padded=1, fused=layer_calls(name), stock=0):
        actual = fast(**inputs, **labels)
    for key in ("loss", *LOGITS):
        close(actual[key], expected[key], 1e-10)
    for out in (actual, expected):
        out.loss.backward()
    same_gradients(fast, slow, 1e-9)
    (encoder,) = fastbert.explain(fast).models
    assert not encoder.unpads
    assert "question-answering" in encoder.reason
    fast.eval()
    assert fastbert.explain(fast).models[0].unpads


@pytest.mark.parametrize("how", ["frozen", "recomputed"])
def test_gradients_over_an_encoder_that_is(how):
    slow, fast = in_training()
    inputs, labels = asked()
    if how == "frozen":
        for m in (slow, fast):
            m.bert.eval().requires_grad_(False)
    else:
        fast.bert.forward = functools.partial(checkpoint, fast.bert.forward, use_reentrant=False)
    for m in (slow, fast):
        m(**inputs, **labels).loss.backward()
    same_gradients(fast, slow, 1e-9)


class Reads(transformers.BertForQuestionAnswering):
    """A head that a user wrote."""

    def forward(self, input_ids, attention_mask):
        return self.qa_outputs(self.bert(input_ids, attention_mask=attention_mask)[0])


def test_a_head_with_a_forward_of_its_own_reads_what_it_did():
    slow = Reads(hf_config("bert")).eval()
    fast = fastbert.accelerate(copy.deepcopy(slow))
    inputs, _ = asked()
    inputs.pop("token_type_ids")
    with torch.no_grad(), calls(fast, packed=0, padded=1, stock=0):
        close(fast(**inputs), slow(**inputs))
    assert "forward of its own" in fastbert.explain(fast).models[0].reason
    with pytest.raises(ValueError, match="forward of its own"):
        fastbert.accelerate(copy.deepcopy(slow), strict=True)
    fastbert.accelerate(copy.deepcopy(slow), strict=True, unpad=False)


@pytest.mark.parametrize("name", sorted(interface.PACKED))
def test_attention_alone_does_not_pack_for_a_head_that_scores_padding(name):
    if type(transformers.AutoConfig.for_model(name)) not in SPANS._model_mapping:
        pytest.skip("transformers has no such head")
    slow = other_stock(name, SPANS)
    fast = fastbert.accelerate(copy.deepcopy(slow))
    ids = torch.randint(5, 99, (4, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for mask in (masks()["right"], masks()["left"]):
            expected, actual = (m(input_ids=ids, attention_mask=mask) for m in (slow, fast))
            for key in LOGITS:
                close(actual[key], expected[key])


# -- around the head -----------------------------------------------------------------------------------------


def test_restore_copies_and_pickles():
    slow, fast = build("bert", SPANS)
    inputs, labels = asked()
    with torch.no_grad():
        expected, padded = fast(**inputs, **labels), slow(**inputs, **labels)
        for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            assert torch.equal(twin(**inputs, **labels).loss, expected.loss)
            fastbert.restore(twin)
            assert [type(m) for m in twin.modules()] == [type(m) for m in slow.modules()]
            assert [vars(m).keys() for m in twin.modules()] == [vars(m).keys() for m in slow.modules()]
            assert torch.equal(twin(**inputs, **labels).loss, padded.loss)
        assert fastbert.accelerate(fast) is fast  # a second time
        assert torch.equal(fast(**inputs, **labels).loss, expected.loss)
        inner = fastbert.accelerate(copy.deepcopy(slow).bert)  # the encoder first, the head later
        whole = copy.deepcopy(slow)
        whole.bert = inner
        close(fastbert.accelerate(whole)(**inputs, **labels).loss, expected.loss)
        assert whole.train().bert.fastbert_state.spans


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["vmap", "compile"])
def test_mapped_and_compiled_heads_are_the_stock_models(how):
    slow, fast = build("bert", SPANS, attention="eager")
    inputs, labels = asked()
    given = inputs | labels
    with torch.no_grad():
        expected = slow(**given)
        if how == "vmap":  # over labels: their values must not be read
            pairs = torch.stack([*labels.values()]), torch.stack([*labels.values()]).flip(0)
            losses = [
                torch.func.vmap(lambda a, b, m=m: m(**inputs, start_positions=a, end_positions=b).loss)(
                    *pairs
                )
                for m in (slow, fast)
            ]
            close(*losses)
            return
        torch._dynamo.reset()
        actual = torch.compile(fast, fullgraph=True, backend="eager")(**given)
    for key in ("loss", *LOGITS):
        close(actual[key], expected[key])
