"""`fastbert.accelerate`: transformers' models made fast in place, each against the untouched model."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import types
import warnings

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune

import fastbert
from fastbert import prepared
from tests.hf_models import FAMILY_NAMES, batch, hf_config, hf_model
from tests.test_heads import CASES, labels_for, token_level

LAYERS = 3
MODEL, HEAD = transformers.AutoModel, transformers.AutoModelForSequenceClassification
LAST, PROBE = "encoder.layer.1", "encoder.layer.1.attention.self"
UNSUPPORTED = "tanh"  # an activation that no op of ours knows


def stock(name: str = "bert", auto: type = MODEL, attention: str = "sdpa", **config) -> nn.Module:
    """A model of transformers, in eval, without dropout unless `config` says otherwise."""
    head = {"distilbert": "seq_classif_dropout", "albert": "classifier_dropout_prob"}.get(name)
    config = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **config}
    if head:
        config[head] = 0.0
    model = hf_model(name, auto, **config)
    if name != "mpnet":
        model.set_attn_implementation(attention)
    return model


def build(name: str = "bert", auto: type = MODEL, **config) -> tuple[nn.Module, nn.Module]:
    """(the stock model, the same model accelerated)."""
    model = stock(name, auto, **config)
    return model, fastbert.accelerate(copy.deepcopy(model))


pair = functools.lru_cache(maxsize=None)(build)  # shared between tests that change neither


def counts(model: nn.Module) -> dict[str, int]:
    report = fastbert.explain(model)
    return {
        "packed": sum(m.packed_calls for m in report.models),
        "padded": sum(m.padded_calls for m in report.models),
        "fused": sum(layer.fused_calls for layer in report.layers),
        "stock": sum(layer.stock_calls for layer in report.layers),
    }


@contextlib.contextmanager
def calls(model: nn.Module, **expected: int):
    """Checks which way the calls inside went: models packed or padded, layers fused or stock."""
    before = counts(model)
    yield
    after = counts(model)
    assert {k: after[k] - before[k] for k in expected} == expected


def layer_calls(name: str) -> int:
    return 2 * LAYERS if name == "albert-groups" else LAYERS


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to `tolerance` of the largest element, at least of 1."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    error = (a - b).abs().max().item() if a.numel() else 0.0
    assert error <= tolerance * max(1.0, b.abs().max().item() if b.numel() else 0.0), f"max error {error:.3g}"


def same_outputs(actual, expected, kept: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Two outputs of a model are of one class, with the same keys, and equal at the tokens of `kept`."""
    assert type(actual) is type(expected)
    assert list(actual.keys()) == list(expected.keys())
    flat = kept.reshape(-1, kept.shape[-1])
    for key in expected:
        a, e = actual[key], expected[key]
        if isinstance(e, tuple):
            assert len(a) == len(e)
            for one, other in zip(a, e, strict=True):
                if key == "hidden_states":
                    close(one[flat], other[flat], tolerance)
                else:
                    pairs = (flat[:, None, :, None] & flat[:, None, None, :]).expand_as(other)
                    close(one[pairs], other[pairs], tolerance)
        elif token_level(e, kept):
            close(a[kept], e[kept], tolerance)
        else:
            close(a, e, tolerance)


def same_gradients(fast: nn.Module, slow: nn.Module, tolerance: float) -> None:
    """Every parameter has the gradient of its twin, up to `tolerance` of its largest element; a key's bias
    has none but the rounding of terms as large as the others'.
    """
    reference = {k: p.grad for k, p in slow.named_parameters()}
    largest = max(g.abs().max().item() for g in reference.values() if g is not None)
    for key, parameter in fast.named_parameters():
        expected = reference[key]
        assert (parameter.grad is None) == (expected is None), key
        if expected is not None:
            error = (parameter.grad - expected).abs().max().item()
            assert error <= tolerance * (expected.abs().max().item() + 1e-2 * largest), (key, error)


def first_kept(name: str, **kwargs) -> dict[str, torch.Tensor]:
    """A batch with right padding, holes and a full row, the first token of every row kept."""
    inputs = batch(name, **kwargs)
    inputs["attention_mask"][:, 0] = 1
    inputs["input_ids"][:, 0] = 7
    return inputs


def submodule(model: nn.Module, path: str) -> nn.Module:
    return functools.reduce(getattr, path.split("."), model)


# -- every family, every head --------------------------------------------------------------------------------

MASKS = ("right", "holes", "left", "ones", "none", "empty-row")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_families_give_the_stock_outputs(name, mask):
    slow, fast = pair(name)
    inputs = first_kept(name)
    kept = inputs["attention_mask"]
    if mask in ("right", "left"):
        lengths = torch.tensor([40, 1, 17, 28])
        kept[:] = torch.arange(40)[None] < lengths[:, None]
        if mask == "left":
            kept[:] = kept.flip(1)
    elif mask == "ones":
        kept[:] = 1
    elif mask == "empty-row":
        kept[3] = 0
    if mask == "none":
        inputs.pop("attention_mask")
        kept = torch.ones_like(inputs["input_ids"])
    kept = kept.bool()
    packed = int(mask != "left")
    with torch.no_grad(), calls(fast, packed=packed, padded=1 - packed, fused=layer_calls(name), stock=0):
        actual = fast(**inputs)
    with torch.no_grad():
        expected = slow(**inputs)
    if mask == "empty-row":  # nobody says what a sequence of no tokens is; it is finite
        assert all(value.isfinite().all() for value in actual.values())
        kept, actual, expected = kept[:3], _rows(actual, 3), _rows(expected, 3)
    same_outputs(actual, expected, kept)
    if packed:
        assert actual.last_hidden_state[~kept].eq(0).all()


def _rows(output, count: int):
    return type(output)(**{key: value[:count] for key, value in output.items()})


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_hidden_states_of_families(name):
    slow, fast = pair(name)
    inputs = first_kept(name, seed=2)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = slow(**inputs, output_hidden_states=True)
        with calls(fast, packed=1, fused=layer_calls(name), stock=0):
            actual = fast(**inputs, output_hidden_states=True)
    same_outputs(actual, expected, kept)
    assert actual.hidden_states[-1] is actual.last_hidden_state
    for hidden in actual.hidden_states:
        assert hidden.shape == (4, 40, 48)
        assert hidden[~kept].eq(0).all()
    # nothing that the call left behind sends the next one another way
    with torch.no_grad(), calls(fast, packed=1, fused=layer_calls(name), stock=0):
        close(fast(**inputs).last_hidden_state[kept], expected.last_hidden_state[kept])


@pytest.mark.parametrize(("name", "task"), CASES)
def test_heads_give_the_stock_outputs_and_loss(name, task):
    slow, fast = pair(name, getattr(transformers, "AutoModel" + task))
    inputs = first_kept(name, seqlen=18, seed=1)
    if task == "ForMultipleChoice":
        inputs = {k: v.reshape(2, 2, -1) for k, v in inputs.items()}
    kept = inputs["attention_mask"].bool()
    labels = labels_for(slow, inputs, seed=1)
    if task == "ForQuestionAnswering":  # its softmax runs over padding too: the loss has a test of its own
        labels = {}
    with torch.no_grad():
        expected = slow(**inputs, **labels, output_hidden_states=True)
        with calls(fast, packed=1, padded=0, fused=layer_calls(name), stock=0):
            actual = fast(**inputs, **labels, output_hidden_states=True)
    same_outputs(actual, expected, kept)


@pytest.mark.parametrize(("name", "task"), CASES)
def test_gradients_of_heads(name, task):
    # in float64: deep ALBERT's gradients are so ill-conditioned that stock float32 ones are 4e-4 off
    slow, fast = (copy.deepcopy(m).double() for m in pair(name, getattr(transformers, "AutoModel" + task)))
    inputs = first_kept(name, seqlen=18, seed=1)
    if task == "ForQuestionAnswering":
        inputs["attention_mask"][:] = 1
    if task == "ForMultipleChoice":
        inputs = {k: v.reshape(2, 2, -1) for k, v in inputs.items()}
    labels = labels_for(slow, inputs, seed=1)
    slow(**inputs, **labels).loss.backward()
    with calls(fast, packed=1, fused=layer_calls(name), stock=0):
        fast(**inputs, **labels).loss.backward()
    same_gradients(fast, slow, 1e-9)


@pytest.mark.parametrize("mask", ["holes", "left"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_float32_gradients(name, mask):
    slow, fast = (copy.deepcopy(m).train() for m in pair(name))
    truth = copy.deepcopy(slow).double()
    inputs = (batch if mask == "left" else first_kept)(name, seed=5)
    kept = inputs["attention_mask"].bool()
    weights = torch.randn(int(kept.sum()), 48, generator=torch.Generator().manual_seed(0))
    for model in (slow, fast, truth):
        out = model(**inputs).last_hidden_state[kept]
        (out * weights.to(out.dtype)).sum().backward()
    exact = torch.cat([p.grad.flatten() for p in truth.parameters() if p.grad is not None])
    mine, theirs = (
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]).double() - exact
        for m in (fast, slow)
    )
    # a part of all gradients; where the stock model's rounding is larger, that
    assert mine.norm() <= max(1e-5 * exact.norm(), 1.5 * theirs.norm())


def test_question_answering_loss_over_kept_tokens():
    slow, fast = pair("bert", transformers.AutoModelForQuestionAnswering)
    inputs = first_kept("bert", seqlen=18)
    inputs["attention_mask"][:] = 1
    labels = labels_for(slow, inputs)
    with torch.no_grad():
        close(fast(**inputs, **labels).loss, slow(**inputs, **labels).loss)


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "distilbert", "electra", "mpnet"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_no_larger_than_the_stock_models(name, dtype):
    slow, fast = (copy.deepcopy(m).to(dtype) for m in pair(name))
    truth_model = copy.deepcopy(slow).double()
    mine, theirs = [], []
    for seed in range(6):
        inputs = first_kept(name, seed=seed)
        kept = inputs["attention_mask"].bool()
        with torch.no_grad():
            truth = truth_model(**inputs).last_hidden_state[kept]
            for model, errors in ((fast, mine), (slow, theirs)):
                out = model(**inputs).last_hidden_state
                assert out.dtype == dtype
                errors.append(out[kept].double() - truth)
    mine, theirs = torch.cat(mine), torch.cat(theirs)
    assert mine.square().mean() <= 1.02 * theirs.square().mean()
    assert mine.abs().max() <= 2 * theirs.abs().max()


def test_eager_attention_is_replaced_alike():
    slow, fast = build("bert", attention="eager")
    inputs = first_kept("bert")
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        close(
            fast(**inputs)[0][inputs["attention_mask"].bool()],
            slow(**inputs)[0][inputs["attention_mask"].bool()],
        )


@pytest.mark.parametrize("activation", ["gelu_new", "relu", "silu", UNSUPPORTED])
def test_activations(activation):
    slow, fast = build("bert", hidden_act=activation)
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        same_outputs(fast(**inputs), slow(**inputs), kept)


def test_ernie_with_task_ids():
    slow, fast = build("ernie", use_task_id=True)
    inputs = first_kept("ernie")
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        for tasks in ({}, {"task_type_ids": torch.randint(0, 3, (4, 40))}):
            same_outputs(fast(**inputs, **tasks), slow(**inputs, **tasks), kept)


def test_chunked_feed_forward():
    slow, fast = build("bert", chunk_size_feed_forward=5)
    inputs = first_kept("bert")
    with torch.no_grad(), calls(fast, packed=0, padded=1, fused=0, stock=LAYERS):  # it saves memory there
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_inputs_embeds_and_their_gradient(name):
    slow, fast = (copy.deepcopy(m).double() for m in pair(name))
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    embeds = slow.get_input_embeddings()(inputs.pop("input_ids")).detach()
    mine, theirs = embeds.clone().requires_grad_(), embeds.clone().requires_grad_()
    expected = slow(inputs_embeds=theirs, **inputs)
    with calls(fast, packed=1, fused=layer_calls(name)):
        actual = fast(inputs_embeds=mine, **inputs)
    same_outputs(actual, expected, kept, 1e-12)
    for out in (actual, expected):
        out.last_hidden_state[kept].square().sum().backward()
    close(mine.grad, theirs.grad, 1e-9)
    gradient, mine.grad = mine.grad, None
    fast.requires_grad_(False)  # as attributions and adversarial examples have it
    fast(inputs_embeds=mine, **inputs).last_hidden_state[kept].square().sum().backward()
    close(mine.grad, gradient, 1e-12)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "albert", "mpnet"])
def test_positions_and_types_given_by_hand(name):
    slow, fast = pair(name)
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    for positions in (torch.randint(2, 70, (1, 40)), torch.randint(2, 70, (4, 40))):
        with torch.no_grad():
            same_outputs(fast(**inputs, position_ids=positions), slow(**inputs, position_ids=positions), kept)
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        same_outputs(fast(**inputs), slow(**inputs), kept)


def test_roberta_counts_positions_by_ids_not_by_the_mask():
    slow, fast = pair("roberta")
    inputs = first_kept("roberta")
    ids = torch.randint(5, 120, (4, 40))
    ids[0, 3] = ids[2, 7:9] = 1  # pads that are attended to; and masked tokens that are none
    inputs["input_ids"] = ids
    with torch.no_grad():
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())


@pytest.mark.parametrize("name", ["bert", "distilbert", "albert", "mpnet"])
def test_tuples(name):
    slow, fast = pair(name)
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        for extra in ({}, {"output_hidden_states": True}):
            expected = slow(**inputs, **extra, return_dict=False)
            actual = fast(**inputs, **extra, return_dict=False)
            assert type(actual) is type(expected) is tuple
            assert [type(a) for a in actual] == [type(e) for e in expected]
            assert len(actual[-1]) == len(expected[-1])
            close(actual[0][kept], expected[0][kept])


def test_outputs_asked_for_by_the_config():
    slow, fast = build("bert")
    inputs = first_kept("bert")
    for model in (slow, fast):
        model.config.output_hidden_states = True
    with torch.no_grad():
        expected, actual = slow(**inputs), fast(**inputs)
        same_outputs(actual, expected, inputs["attention_mask"].bool())
        assert len(actual.hidden_states) == LAYERS + 1
        for model in (slow, fast):
            model.config.return_dict = False
        assert [type(v) for v in fast(**inputs)] == [type(v) for v in slow(**inputs)]


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_attentions_asked_for_by_the_config(name):
    slow, fast = build(name, attention="eager")
    inputs = first_kept(name)
    for model in (slow, fast):
        model.config.output_attentions = True
    with torch.no_grad(), calls(fast, packed=0, padded=1, fused=0, stock=LAYERS):
        actual, expected = fast(**inputs), slow(**inputs)
    same_outputs(actual, expected, inputs["attention_mask"].bool())
    assert len(actual.attentions) == LAYERS


@pytest.mark.parametrize("selected", [1, [0, -1], [-2]])
def test_some_hidden_states_only(selected):
    slow, fast = pair("bert")
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = slow(**inputs, output_hidden_states=selected).hidden_states
        actual = fast(**inputs, output_hidden_states=selected).hidden_states
    assert [a is None for a in actual] == [e is None for e in expected]
    assert any(e is None for e in expected)
    for a, e in zip(actual, expected, strict=True):
        if e is not None:
            close(a[kept], e[kept])


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_attention_probabilities_come_from_the_stock_layers(name):
    slow, fast = build(name, attention="eager")
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = slow(**inputs, output_attentions=True, output_hidden_states=True)
        with calls(fast, packed=0, padded=1, fused=0, stock=layer_calls(name)):
            actual = fast(**inputs, output_attentions=True, output_hidden_states=True)
        same_outputs(actual, expected, kept)
        assert len(actual.attentions) == layer_calls(name)
        assert actual.attentions[0].shape == (4, 3, 40, 40)
        # the stock model leaves its hooks on the layers for good: they stop nothing
        with calls(fast, packed=1, fused=layer_calls(name), stock=0):
            close(fast(**inputs)[0][kept], expected[0][kept])


@pytest.mark.parametrize("name", ["bert", "distilbert", "albert", "mpnet"])
def test_hooks_that_transformers_left_before_do_not_matter(name):
    model = stock(name, attention="eager")
    inputs = first_kept(name)
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True, output_attentions=True)
    fast = fastbert.accelerate(model)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad(), calls(fast, packed=2, fused=2 * LAYERS, stock=0):
        close(fast(**inputs)[0][kept], expected[0][kept])
        hidden = fast(**inputs, output_hidden_states=True).hidden_states
    assert len(hidden) == LAYERS + 1
    for a, e in zip(hidden, expected.hidden_states, strict=True):
        close(a[kept], e[kept])


@pytest.mark.parametrize(
    ("name", "attention", "kind"),
    [
        ("bert", "sdpa", "bool"),
        ("bert", "eager", "additive"),
        ("bert", "sdpa", "per-head"),
        ("roberta", "sdpa", "bool"),
        ("distilbert", "sdpa", "additive"),
        ("electra", "sdpa", "per-head"),
        ("albert", "sdpa", "additive"),
        ("mpnet", "eager", "additive"),
        ("mpnet", "eager", "per-head"),
    ],
)
def test_four_dimensional_masks(name, attention, kind):
    slow, fast = build(name, attention=attention)
    slow, fast = slow.double(), fast.double()
    ids = first_kept(name)["input_ids"]
    allowed = (torch.rand(4, 1, 40, 40) > 0.3) | torch.eye(40, dtype=torch.bool)
    if kind == "bool":
        mask = allowed
    elif kind == "additive":
        mask = torch.zeros(4, 1, 40, 40, dtype=torch.float64).masked_fill(~allowed, -1e30)
    else:
        mask = torch.randn(4, 3, 40, 40, dtype=torch.float64)
    expected = slow(ids, attention_mask=mask)
    with calls(fast, packed=0, padded=1, fused=LAYERS, stock=0):
        actual = fast(ids, attention_mask=mask)
    same_outputs(actual, expected, torch.ones_like(ids).bool(), 1e-12)
    for out in (actual, expected):
        out.last_hidden_state.square().sum().backward()
    same_gradients(fast, slow, 1e-9)


def test_masks_of_every_dtype():
    _, fast = pair("bert")
    inputs = first_kept("bert")
    with torch.no_grad():
        expected = fast(**inputs).last_hidden_state
        for dtype in (torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16):
            inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
            assert torch.equal(fast(**inputs).last_hidden_state, expected)


def test_a_mask_of_ones_is_no_mask():
    _, fast = pair("bert")
    ids = first_kept("bert")["input_ids"]
    with torch.no_grad(), calls(fast, packed=2, fused=2 * LAYERS):
        assert torch.equal(fast(ids)[0], fast(ids, torch.ones_like(ids))[0])


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("shape", [(1, 40), (4, 41), (4, 39)])
def test_masks_of_other_shapes_do_what_they_do_in_the_stock_model(shape, padding):
    slow, fast = pair("bert")
    ids = first_kept("bert")["input_ids"]
    mask = torch.ones(shape, dtype=torch.long)
    if padding:
        mask[:, 20:30] = 0
    outputs = []
    for model in (slow, fast):
        try:
            with torch.no_grad():
                outputs.append(model(ids, mask).last_hidden_state)
        except (ValueError, RuntimeError, IndexError) as error:
            outputs.append(type(error))
    assert isinstance(outputs[0], torch.Tensor) or padding  # without any, transformers drops the mask unseen
    if isinstance(outputs[0], torch.Tensor):
        close(outputs[1], outputs[0])
    else:
        assert isinstance(outputs[1], type)


def test_arguments_of_the_attention_function_reach_it():
    slow, fast = pair("bert")
    ids = first_kept("bert")["input_ids"]
    with torch.no_grad():
        expected = slow(ids, is_causal=True)
        with calls(fast, packed=0, padded=1, fused=0, stock=LAYERS):
            same_outputs(fast(ids, is_causal=True), expected, torch.ones_like(ids).bool())
        assert not torch.allclose(expected[0], slow(ids)[0], atol=0.1)


def test_ids_of_32_bits():
    slow, fast = pair("bert")
    inputs = {k: v.int() for k, v in first_kept("bert").items()}
    with torch.no_grad(), calls(fast, packed=1):
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())


def test_attentions_that_sdpa_does_not_give():
    slow, fast = pair("bert")
    inputs = first_kept("bert")
    with torch.no_grad():
        expected = slow(**inputs, output_attentions=True)
        same_outputs(fast(**inputs, output_attentions=True), expected, inputs["attention_mask"].bool())
    assert expected.attentions == ()


def test_positional_arguments():
    slow, fast = pair("bert")
    inputs = first_kept("bert")
    ids, mask, types_ = inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"]
    positions = torch.randint(0, 70, (1, 40))
    with torch.no_grad(), calls(fast, packed=1):
        same_outputs(fast(ids, mask, types_, positions), slow(ids, mask, types_, positions), mask.bool())


def test_one_token_and_one_sequence():
    slow, fast = pair("bert")
    for shape in ((1, 1), (1, 7), (5, 1)):
        ids = torch.randint(5, 120, shape)
        with torch.no_grad():
            same_outputs(fast(ids), slow(ids), torch.ones_like(ids).bool())


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_mask(data):
    slow, fast = pair("bert", num_hidden_layers=2)
    size, seqlen = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    rows = st.lists(st.booleans(), min_size=seqlen, max_size=seqlen)
    mask = torch.tensor(data.draw(st.lists(rows, min_size=size, max_size=size)))
    ids = torch.randint(5, 120, (size, seqlen), generator=torch.Generator().manual_seed(seqlen))
    with torch.no_grad():
        actual, expected = fast(ids, mask), slow(ids, mask)
    assert all(value.isfinite().all() for value in actual.values())
    rows = mask.any(1)
    same_outputs(
        type(actual)(**{k: v[rows] for k, v in actual.items()}),
        type(expected)(**{k: v[rows] for k, v in expected.items()}),
        mask[rows],
    )


def test_errors_of_the_caller_stay_errors():
    slow, fast = pair("bert")
    ids = torch.randint(5, 120, (2, 9))
    long = torch.full_like(ids, 7)
    long[1, 3] = 120
    wrong = [
        dict(),
        dict(input_ids=ids, inputs_embeds=torch.randn(2, 9, 48)),
        dict(input_ids=torch.randint(5, 120, (2, 73))),
        dict(input_ids=long),
        dict(input_ids=-ids),
        dict(input_ids=ids, token_type_ids=torch.full_like(ids, 2)),
        dict(input_ids=ids, position_ids=torch.full_like(ids, 72)),
        dict(input_ids=ids, token_type_ids=ids[:, :5] * 0),
        dict(inputs_embeds=torch.randn(2, 9, 47)),
    ]
    for arguments in wrong:
        for model in (slow, fast):
            with pytest.raises((ValueError, IndexError, RuntimeError)), torch.no_grad():
                model(**arguments)
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS):  # and none of it left anything behind
        close(fast(ids)[0], slow(ids)[0])


# -- the three bugs of the nearest rival ---------------------------------------------------------------------


def test_float32_runs():
    slow, fast = pair("bert")
    inputs = first_kept("bert")
    with torch.no_grad(), calls(fast, fused=LAYERS, stock=0):
        out = fast(**inputs).last_hidden_state
    assert out.dtype == torch.float32
    close(out[0, :20], slow(**inputs).last_hidden_state[0, :20])


def test_left_padding_and_holes_are_read_from_the_mask():
    slow, fast = pair("bert")
    inputs = batch("bert")  # row 1 is padded on the left, row 2 has holes
    kept = inputs["attention_mask"].bool()
    assert not kept[1, 0]
    assert not kept[2].eq(torch.arange(40) < kept[2].sum()).all()
    with torch.no_grad():
        same_outputs(fast(**inputs), slow(**inputs), kept)


def test_embeddings_are_normalised():
    slow, fast = pair("bert")
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    norm = slow.embeddings.LayerNorm
    with torch.no_grad():
        embedded = fast(**inputs, output_hidden_states=True).hidden_states[0][kept]
        x_hat = (embedded - norm.bias) / norm.weight
        close(x_hat.mean(-1), torch.zeros(len(x_hat)), 1e-4)
        close(x_hat.var(-1, unbiased=False), torch.ones(len(x_hat)), 1e-3)
        close(
            embedded,
            slow.embeddings(inputs["input_ids"], token_type_ids=inputs["token_type_ids"])[kept],
        )


# -- accelerate, restore, explain ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_model_stays_what_it_was(name):
    slow = stock(name, HEAD)
    fast = copy.deepcopy(slow)
    tensors = {k: id(v) for k, v in [*fast.named_parameters(), *fast.named_buffers()]}
    assert fastbert.accelerate(fast) is fast
    assert {k: id(v) for k, v in [*fast.named_parameters(), *fast.named_buffers()]} == tensors
    assert list(fast.state_dict()) == list(slow.state_dict())
    ours, theirs = dict(fast.named_modules()), dict(slow.named_modules())
    assert list(ours) == list(theirs)
    changed = 0
    for path, module in ours.items():
        kind, original = type(module), type(theirs[path])
        assert isinstance(module, original), path
        changed += kind is not original
        for attribute in ("__name__", "__qualname__", "__module__"):
            assert getattr(kind, attribute) == getattr(original, attribute), path
        assert inspect.signature(module.forward) == inspect.signature(theirs[path].forward), path
    assert changed > 0
    assert repr(fast) == repr(slow)
    assert fast.config.to_dict() == slow.config.to_dict()
    assert fast._no_split_modules == slow._no_split_modules


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_restore_gives_the_stock_model_back(name):
    slow = stock(name, HEAD)
    fast = fastbert.accelerate(copy.deepcopy(slow))
    inputs = first_kept(name)
    with torch.no_grad():
        fast(**inputs)
        assert fastbert.restore(fast) is fast
        assert prepared.held(fast) == []
        for (path, a), (_, b) in zip(fast.named_modules(), slow.named_modules(), strict=True):
            assert type(a) is type(b), path
            assert vars(a).keys() == vars(b).keys(), path
        expected = slow(**inputs, output_hidden_states=True)
        actual = fast(**inputs, output_hidden_states=True)
    assert torch.equal(actual.logits, expected.logits)
    assert all(map(torch.equal, actual.hidden_states, expected.hidden_states))
    assert fastbert.restore(fast) is fast  # again, and of a model that never was accelerated
    assert not any(layer.fused for layer in fastbert.explain(fast).layers)
    fastbert.accelerate(fast)
    with torch.no_grad(), calls(fast, packed=1, fused=layer_calls(name)):
        close(fast(**inputs).logits, expected.logits)


def test_accelerate_twice_is_accelerate_once():
    slow, fast = build("bert", HEAD)
    classes = [type(m) for m in fast.modules()]
    inputs = first_kept("bert")
    assert fastbert.accelerate(fast) is fast
    assert [type(m) for m in fast.modules()] == classes
    assert len(fastbert.explain(fast).layers) == LAYERS
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        close(fast(**inputs).logits, slow(**inputs).logits)


def test_second_call_changes_the_options():
    slow, fast = build("bert")
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = slow(**inputs)
        for unpad in (False, True, False):
            assert fastbert.accelerate(fast, unpad=unpad) is fast
            with calls(fast, packed=int(unpad), padded=int(not unpad), fused=LAYERS, stock=0):
                same_outputs(fast(**inputs), expected, kept)


@pytest.mark.parametrize(
    "options",
    [
        {"unpad": False},
        {"attention": False},
        {"ffn": False},
        {"layer_norm": False},
        {"attention": False, "ffn": False, "layer_norm": False, "unpad": False},
        {"attention": False, "ffn": False},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("name", ["bert", "distilbert", "albert", "mpnet"])
def test_options_give_the_stock_outputs_and_gradients(name, options):
    slow = stock(name).double()
    fast = fastbert.accelerate(copy.deepcopy(slow), **options)
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    expected, actual = slow(**inputs), fast(**inputs)
    same_outputs(actual, expected, kept, 1e-12)
    for out in (actual, expected):
        out.last_hidden_state[kept].square().sum().backward()
    same_gradients(fast, slow, 1e-9)


def test_options_leave_that_part_to_the_stock_modules(monkeypatch):
    from transformers.models.bert import modeling_bert as bert

    ran = []
    for key, kind in (
        ("attention", bert.BertSelfAttention),
        ("ffn", bert.BertIntermediate),
        ("layer_norm", nn.LayerNorm),
    ):
        original = kind.forward

        @functools.wraps(original)
        def forward(self, *args, _original=original, _key=key, **kwargs):
            ran.append(_key)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward)
    inputs = first_kept("bert")
    for off in (None, "attention", "ffn", "layer_norm"):
        fast = fastbert.accelerate(stock("bert"), **({} if off is None else {off: False}))
        ran.clear()
        with torch.no_grad():
            fast(**inputs)
        assert set(ran) - {"layer_norm"} == {off} - {"layer_norm", None}
        assert ("layer_norm" in ran) == (off is not None)  # the norm is part of either block's stock module
        assert len(ran) >= (LAYERS if off else 0)


def test_dtype_is_that_of_the_model():
    model = stock("bert")
    fast = fastbert.accelerate(copy.deepcopy(model), dtype=torch.bfloat16)
    assert {p.dtype for p in fast.parameters()} == {torch.bfloat16}
    inputs = first_kept("bert")
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        out = fast(**inputs).last_hidden_state
    assert out.dtype == torch.bfloat16
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        assert (out[kept] - model(**inputs).last_hidden_state[kept]).abs().mean() < 0.02
    assert {p.dtype for p in fastbert.accelerate(model).parameters()} == {torch.float32}


@pytest.mark.parametrize("model", [None, "bert-base-uncased", nn.Linear, {}])
def test_what_is_no_module_is_refused(model):
    for function in (fastbert.accelerate, fastbert.restore):
        with pytest.raises(TypeError, match="model"):
            function(model)


def test_module_without_a_transformers_model():
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.warns(RuntimeWarning, match="nothing of Sequential"):
        assert fastbert.accelerate(model) is model
    with pytest.raises(ValueError, match="no transformers model"):
        fastbert.accelerate(model, strict=True)
    assert fastbert.restore(model) is model


@pytest.mark.parametrize("option", ["strict", "attention", "ffn", "layer_norm", "unpad", "dtype"])
def test_options_of_the_wrong_type_are_named(option):
    model = stock("bert")
    for value in ("no", 1, torch.int64):
        with pytest.raises(TypeError, match=option):
            fastbert.accelerate(model, **{option: value})
    assert type(model) is transformers.BertModel


def test_explain_says_which_layers_are_fused_and_why_not():
    model = stock("bert", HEAD)
    submodule(model, "bert." + LAST).output.dense = _Twice(80, 48)
    fast = fastbert.accelerate(model)
    report = fastbert.explain(fast)
    names = dict(fast.named_modules())
    assert [names[layer.name] for layer in report.layers] == list(fast.bert.encoder.layer)
    assert [layer.fused for layer in report.layers] == [True, False, True]
    for layer in report.layers:
        assert (layer.reason is None) == layer.fused
        assert layer.fused_calls == layer.stock_calls == 0
    assert "output.dense" in report.layers[1].reason
    (encoder,) = report.models
    assert names[encoder.name] is fast.bert
    assert encoder.packed_calls == encoder.padded_calls == 0
    assert encoder.unpads is False
    assert encoder.reason
    with torch.no_grad():
        fast(**first_kept("bert"))
    report = fastbert.explain(fast)
    assert [(x.fused_calls, x.stock_calls) for x in report.layers] == [(1, 0), (0, 1), (1, 0)]
    assert report.models[0].padded_calls == 1
    table = str(report)
    for layer in report.layers:
        assert layer.name in table
    assert report.layers[1].reason in table
    # evaluated now
    submodule(fast, "bert." + LAST).output.dense = nn.Linear(80, 48)
    report = fastbert.explain(fast)
    assert all(layer.fused for layer in report.layers)
    assert report.models[0].unpads is True
    assert report.models[0].reason is None


def test_explain_of_a_stock_model_says_that_nothing_is_fused():
    report = fastbert.explain(stock("bert"))
    assert not any(layer.fused for layer in report.layers)
    assert all(layer.reason for layer in report.layers)
    assert not any(model.unpads for model in report.models)
    assert str(report)


def test_strict_changes_nothing_where_a_part_cannot_be_accelerated():
    model = stock("bert")
    submodule(model, LAST).output.dense = _Twice(80, 48)
    classes, keys = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    with pytest.raises(ValueError, match=r"encoder\.layer\.1"):
        fastbert.accelerate(model, strict=True, dtype=torch.bfloat16)
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == keys
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_strict_raises_where_a_layer_must_take_the_stock_path():
    inputs = first_kept("bert")
    fast = fastbert.accelerate(stock("bert", attention="eager"), strict=True)
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        fast(**inputs)
    with pytest.raises(RuntimeError, match=r"encoder\.layer\.0: attention\.self"):
        fast(**inputs, output_attentions=True)
    handle = submodule(fast, LAST).intermediate.dense.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"encoder\.layer\.1.*intermediate\.dense"):
        fast(**inputs)
    handle.remove()
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        fast(**inputs)
    handle = submodule(fast, LAST).intermediate.dense.register_forward_hook(lambda *_: None)
    fastbert.accelerate(fast)  # no longer strict
    with torch.no_grad(), calls(fast, fused=2, stock=1):
        fast(**inputs)


@pytest.mark.parametrize("version", ["4.57.3", "6.0.0", "6.1.0.dev0", "7.0"])
def test_other_versions_of_transformers_are_left_alone(version, monkeypatch):
    model = stock("bert")
    classes, keys = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(RuntimeError, match=version):
        fastbert.accelerate(model, strict=True)
    with pytest.warns(RuntimeWarning, match=version):
        assert fastbert.accelerate(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == keys


@pytest.mark.parametrize("version", ["5.0.0", "5.23.0", "5.99.1", "5.24.0.dev0"])
def test_versions_in_range_are_accelerated_without_a_word(version, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = fastbert.accelerate(stock("bert"))
    assert all(layer.fused for layer in fastbert.explain(fast).layers)


def test_import_asks_for_no_transformers(tmp_path):
    """And a pickled model is read by a process that never imported fastbert itself."""
    slow, fast = build("bert", HEAD)
    inputs = first_kept("bert")
    torch.save({"model": fast, "inputs": inputs, "logits": slow(**inputs).logits.detach()}, tmp_path / "all")
    code = (
        "import sys, fastbert\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "assert callable(fastbert.accelerate) and callable(fastbert.restore) and callable(fastbert.explain)\n"
        "assert 'transformers' not in sys.modules\n"
        "del fastbert, sys.modules['fastbert']\n"
        "import torch\n"
        f"saved = torch.load({str(tmp_path / 'all')!r}, weights_only=False)\n"
        "with torch.no_grad(): out = saved['model'](**saved['inputs']).logits\n"
        "assert (out - saved['logits']).abs().max() < 1e-5\n"
    )
    root = pathlib.Path(fastbert.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr


# -- copies, files, weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_saved_model_is_vanilla(name, tmp_path):
    slow, fast = build(name, HEAD)
    inputs = first_kept(name)
    with torch.no_grad():
        fast(**inputs)
    fast.save_pretrained(tmp_path / "fast")
    slow.save_pretrained(tmp_path / "slow")
    files = sorted(p.name for p in (tmp_path / "slow").iterdir())
    assert sorted(p.name for p in (tmp_path / "fast").iterdir()) == files
    for file in files:
        assert (tmp_path / "fast" / file).read_bytes() == (tmp_path / "slow" / file).read_bytes(), file
    loaded, info = type(slow).from_pretrained(tmp_path / "fast", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert [type(m) for m in loaded.modules()] == [type(m) for m in slow.modules()]
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, slow(**inputs).logits)
        again = type(fast).from_pretrained(tmp_path / "fast")  # the class of the accelerated model itself
        close(again(**inputs).logits, slow(**inputs).logits)


@pytest.mark.parametrize("name", ["bert", "albert-groups", "mpnet", "distilbert"])
def test_deepcopy_runs_its_own_weights(name):
    slow, fast = build(name, HEAD)
    inputs = first_kept(name)
    with torch.no_grad():
        before = fast(**inputs).logits
        twin, slow_twin = copy.deepcopy(fast), copy.deepcopy(slow)
        assert [type(a) is type(b) for a, b in zip(twin.modules(), fast.modules(), strict=True)]
        for model in (twin, slow_twin):
            for parameter in model.parameters():
                parameter.mul_(1.25)
        with (
            calls(fast, packed=0, padded=0, fused=0, stock=0),
            calls(twin, packed=1, fused=layer_calls(name), stock=0),
        ):
            close(twin(**inputs).logits, slow_twin(**inputs).logits)
        assert torch.equal(fast(**inputs).logits, before)
        assert not torch.allclose(twin(**inputs).logits, before, atol=1e-2)
        fastbert.restore(twin)
        with calls(fast, packed=1, fused=layer_calls(name), stock=0):
            assert torch.equal(fast(**inputs).logits, before)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_pickle(name):
    slow, fast = build(name, HEAD)
    fastbert.accelerate(fast, unpad=False)
    inputs = first_kept(name)
    loaded = pickle.loads(pickle.dumps(fast))
    # the options came along
    with torch.no_grad(), calls(loaded, packed=0, padded=1, fused=layer_calls(name), stock=0):
        close(loaded(**inputs).logits, slow(**inputs).logits)
    for a, b in zip(loaded.modules(), slow.modules(), strict=True):
        assert isinstance(a, type(b))
    fastbert.restore(loaded)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in slow.modules()]
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, slow(**inputs).logits)


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "electra", "distilbert", "mpnet"])
def test_resized_token_embeddings(name):
    slow, fast = build(name, transformers.AutoModelForMaskedLM)
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        fast(**inputs)
    for size in (131, 90):
        for model in (slow, fast):
            torch.manual_seed(1)
            model.resize_token_embeddings(size, mean_resizing=False)
        inputs["input_ids"] = torch.where(kept, torch.randint(5, size, (4, 40)), 1)
        with calls(fast, packed=1, fused=LAYERS, stock=0):
            actual = fast(**inputs, labels=inputs["input_ids"].where(kept, -100))
        same_outputs(actual, slow(**inputs, labels=inputs["input_ids"].where(kept, -100)), kept)
        assert actual.logits.shape[-1] == size
        assert fast.get_output_embeddings().weight is fast.get_input_embeddings().weight
        actual.loss.backward()
        assert fast.get_input_embeddings().weight.grad.shape == (
            size,
            fast.get_input_embeddings().weight.shape[1],
        )
        fast.zero_grad()
        del actual  # its graph remembers the size


def test_weights_may_change_at_any_time():
    """Whatever was derived from the weights before does not serve after."""
    slow, fast = build("bert", HEAD)
    inputs = first_kept("bert")
    other = stock("bert", HEAD, seed=9).state_dict()

    def scaled(model):
        for parameter in model.parameters():
            parameter.mul_(1.1)

    def stepped(model):
        with torch.enable_grad():
            model.zero_grad()
            model(**inputs, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()

    def replaced(model):
        torch.manual_seed(2)
        submodule(model, "bert." + LAST).output.dense = nn.Linear(80, 48)
        submodule(model, "bert." + LAST).attention.self.key.weight = nn.Parameter(torch.randn(48, 48))

    def written_behind_autograd(model):
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        model.eval()

    changes = [
        scaled,
        lambda model: model.load_state_dict(other),
        lambda model: model.load_state_dict({k: v.clone() for k, v in other.items()}, assign=True),
        stepped,
        replaced,
        written_behind_autograd,
        lambda model: model.double(),
        lambda model: model.float(),
        lambda model: model.requires_grad_(False),
    ]
    with torch.no_grad():
        for change in changes:
            fast(**inputs)
            for model in (slow, fast):
                change(model)
            with calls(fast, packed=1, fused=LAYERS, stock=0):
                close(fast(**inputs).logits, slow(**inputs).logits, 2e-5)


def test_functional_call_runs_the_weights_that_it_is_given():
    slow, fast = pair("bert", HEAD)
    inputs = first_kept("bert")
    other = {k: v.clone() for k, v in stock("bert", HEAD, seed=9).named_parameters()}
    with torch.no_grad():
        fast(**inputs)
        actual, expected = (torch.func.functional_call(m, other, (), inputs).logits for m in (fast, slow))
        close(actual, expected)
        close(fast(**inputs).logits, slow(**inputs).logits)


# -- parts replaced or watched -------------------------------------------------------------------------------


class _Twice(nn.Linear):
    """A linear layer of another kind."""

    def forward(self, x):
        return 2 * super().forward(x)


class _TwiceNorm(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class _RootMeanSquare(nn.Module):
    def forward(self, x):
        return x / x.square().mean(-1, keepdim=True).sqrt()


def _wrap_forward(module: nn.Module) -> None:
    """As accelerate's hooks and many a recipe do it: the instance gets a forward of its own."""
    original = module.forward

    def forward(self, *args, **kwargs):
        out = original(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    module.forward = types.MethodType(forward, module)


def _fewer_heads(layer: nn.Module) -> None:
    """Attention of two heads in place of three, as pruning of heads leaves it."""
    attention = layer.attention.self
    attention.num_attention_heads, attention.all_head_size = 2, 32
    for key in ("query", "key", "value"):
        setattr(attention, key, nn.Linear(48, 32))
    layer.attention.output.dense = nn.Linear(32, 48)


def _other_attention(layer: nn.Module) -> None:
    class Halved(type(layer.attention.self)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return 0.5 * out[0], *out[1:]

    layer.attention.self.__class__ = Halved


def _other_block(layer: nn.Module) -> None:
    class Negated(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.dense, self.intermediate_act_fn = block.dense, block.intermediate_act_fn

        def forward(self, hidden_states):
            return -self.intermediate_act_fn(self.dense(hidden_states))

    layer.intermediate = Negated(layer.intermediate)


def _plain_norm(layer: nn.Module, **kwargs) -> None:
    layer.output.LayerNorm = nn.LayerNorm(48, **kwargs)


def _no_bias(layer: nn.Module) -> None:
    for owner, key in (
        (layer.attention.self, "query"),
        (layer.attention.self, "value"),
        (layer.attention.output, "dense"),
        (layer.intermediate, "dense"),
        (layer.output, "dense"),
    ):
        old = getattr(owner, key)
        setattr(owner, key, nn.Linear(old.in_features, old.out_features, bias=False))


REPLACEMENTS = {  # what is done to a layer, and whether the layer must run as it stands
    "subclassed-linear": (lambda layer: setattr(layer.output, "dense", _Twice(80, 48)), True),
    "subclassed-key": (lambda layer: setattr(layer.attention.self, "key", _Twice(48, 48)), True),
    "sequential": (
        lambda layer: setattr(layer.intermediate, "dense", nn.Sequential(nn.Linear(48, 80), nn.Tanh())),
        True,
    ),
    "other-norm": (lambda layer: setattr(layer.attention.output, "LayerNorm", _RootMeanSquare()), True),
    "subclassed-norm": (lambda layer: setattr(layer.output, "LayerNorm", _TwiceNorm(48)), True),
    "activation": (lambda layer: setattr(layer.intermediate, "intermediate_act_fn", nn.Tanh()), None),
    "parametrized": (lambda layer: parametrizations.weight_norm(layer.attention.self.value), True),
    "pruned": (lambda layer: prune.l1_unstructured(layer.output.dense, "weight", 0.5), True),
    "forward-of-a-linear": (lambda layer: _wrap_forward(layer.attention.output.dense), True),
    "forward-of-attention": (lambda layer: _wrap_forward(layer.attention.self), True),
    "forward-of-the-layer": (_wrap_forward, None),
    "fewer-heads": (_fewer_heads, None),
    "norm-without-bias": (lambda layer: _plain_norm(layer, bias=False), None),
    "norm-without-weights": (lambda layer: _plain_norm(layer, elementwise_affine=False), None),
    "norm-of-another-eps": (lambda layer: _plain_norm(layer, eps=0.1), None),
    "linear-without-bias": (_no_bias, None),
    "scaling": (lambda layer: setattr(layer.attention.self, "scaling", 0.1), True),
    "no-dropout-module": (lambda layer: setattr(layer.output, "dropout", nn.Identity()), True),
    "another-dropout": (lambda layer: setattr(layer.attention.output, "dropout", nn.Hardtanh()), True),
    "subclassed-attention": (_other_attention, True),
    "module-of-another-class": (_other_block, True),
    "frozen": (lambda layer: layer.requires_grad_(False), None),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", REPLACEMENTS)
def test_replaced_parts_run(what, when):
    change, unfused = REPLACEMENTS[what]
    slow = stock("bert")
    fast = copy.deepcopy(slow)
    inputs = first_kept("bert")
    if when == "after":
        fastbert.accelerate(fast)
        with torch.no_grad():
            fast(**inputs)
    for model in (slow, fast):
        torch.manual_seed(4)
        change(submodule(model, LAST))
    if when == "before":
        fastbert.accelerate(fast)
    kept = inputs["attention_mask"].bool()
    expected = slow(**inputs)
    fused = [layer.fused for layer in fastbert.explain(fast).layers]
    assert fused[::2] == [True, True]
    assert fused[1] is not unfused
    # a forward that the layer had of its own before is what runs, and nothing of ours
    own = what == "forward-of-the-layer" and when == "before"
    with calls(fast, fused=LAYERS - (own or not fused[1]), stock=int(not fused[1])):
        actual = fast(**inputs)
    same_outputs(actual, expected, kept, 2e-5)
    for out in (actual, expected):
        out.last_hidden_state[kept].square().sum().backward()
    same_gradients(fast, slow, 2e-4)


class _Shifted(nn.Module):
    """Embeddings, or a table of them, of another making."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs) + 0.5


class _MeanPooler(nn.Module):
    def forward(self, hidden_states):
        return hidden_states[:, :6].mean(1)  # kept in every row


def _early_exit(model: nn.Module) -> None:
    class Early(type(model.encoder)):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            out = super().forward(hidden_states, attention_mask, **kwargs)
            out.last_hidden_state = out.last_hidden_state - hidden_states
            return out

    model.encoder.__class__ = Early


def _other_embedding_class(model: nn.Module) -> None:
    class Scaled(type(model.embeddings)):
        def forward(self, *args, **kwargs):
            return 3 * super().forward(*args, **kwargs)

    model.embeddings.__class__ = Scaled


MODEL_REPLACEMENTS = {
    "embeddings": lambda model: setattr(model, "embeddings", _Shifted(model.embeddings)),
    "class-of-embeddings": _other_embedding_class,
    "table": lambda model: setattr(
        model.embeddings, "position_embeddings", _Shifted(model.embeddings.position_embeddings)
    ),
    "words": lambda model: model.set_input_embeddings(_Shifted(model.get_input_embeddings())),
    "max-norm": lambda model: setattr(model.embeddings.word_embeddings, "max_norm", 0.5),
    "frequency": lambda model: setattr(model.embeddings.word_embeddings, "scale_grad_by_freq", True),
    "sparse": lambda model: setattr(model.embeddings.word_embeddings, "sparse", True),
    "norm": lambda model: setattr(model.embeddings, "LayerNorm", _RootMeanSquare()),
    "norm-without-bias": lambda model: setattr(model.embeddings, "LayerNorm", nn.LayerNorm(48, bias=False)),
    "no-dropout-module": lambda model: setattr(model.embeddings, "dropout", nn.Identity()),
    "pooler": lambda model: setattr(model, "pooler", _MeanPooler()),
    "no-pooler": lambda model: setattr(model, "pooler", None),
    "encoder": _early_exit,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", MODEL_REPLACEMENTS)
def test_replaced_parts_around_the_layers_run(what, when):
    slow = stock("bert")
    fast = copy.deepcopy(slow)
    inputs = first_kept("bert")
    inputs["attention_mask"][:, :6] = 1
    kept = inputs["attention_mask"].bool()
    if when == "after":
        fastbert.accelerate(fast)
        with torch.no_grad():
            fast(**inputs)
    for model in (slow, fast):
        MODEL_REPLACEMENTS[what](model)
    if when == "before":
        fastbert.accelerate(fast)
    expected = slow(**inputs)
    with calls(fast, fused=LAYERS, stock=0):
        actual = fast(**inputs)
    actual.cross_attentions = expected.cross_attentions = None
    if what == "no-pooler":
        assert actual.pooler_output is expected.pooler_output is None
    same_outputs(actual, expected, kept)
    for out in (actual, expected):
        out.last_hidden_state[kept].square().sum().backward()
    if what == "sparse":
        table, other = (m.embeddings.word_embeddings.weight for m in (fast, slow))
        assert table.grad.is_sparse
        assert other.grad.is_sparse
        table.grad, other.grad = table.grad.to_dense(), other.grad.to_dense()
    same_gradients(fast, slow, 1e-4)


def test_replaced_group_of_layers_runs():
    slow, fast = build("albert")
    inputs = first_kept("albert")
    for model in (slow, fast):
        (group,) = model.encoder.albert_layer_groups

        class Residual(type(group)):
            def forward(self, hidden_states, *args, **kwargs):
                return hidden_states + super().forward(hidden_states, *args, **kwargs)

        group.__class__ = Residual
    with torch.no_grad(), calls(fast, packed=0, padded=1, fused=LAYERS, stock=0):
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())


def test_classes_made_from_a_stock_class():
    class Named(transformers.BertModel):
        def size(self):
            return self.config.hidden_size

    class Doubled(transformers.BertModel):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.last_hidden_state = 2 * out.last_hidden_state
            return out

    inputs = first_kept("bert")
    for cls in (Named, Doubled):
        slow = stock("bert")
        slow.__class__ = cls
        fast = copy.deepcopy(slow)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it does with Doubled is its own affair, if it is right
            fastbert.accelerate(fast)
        assert isinstance(fast, cls)
        assert type(fast).__qualname__ == cls.__qualname__ != cls.__name__
        with torch.no_grad():
            same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())
    fast = stock("bert")
    fast.__class__ = Named
    fastbert.accelerate(fast, strict=True)
    assert fast.size() == 48
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS):
        fast(**inputs)
    assert type(fastbert.restore(fast)) is Named


def test_layers_may_be_dropped_added_and_shared():
    slow, fast = build("bert")
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    extra = copy.deepcopy(slow.encoder.layer[0])
    with torch.no_grad():
        for model in (slow, fast):
            model.encoder.layer = model.encoder.layer[:2]
        with calls(fast, packed=1, fused=2, stock=0):
            same_outputs(fast(**inputs), slow(**inputs), kept)
        for model in (slow, fast):
            model.encoder.layer.append(model.encoder.layer[0])
        with calls(fast, packed=1, fused=3, stock=0):
            same_outputs(fast(**inputs), slow(**inputs), kept)
        for model in (slow, fast):  # a layer that nobody has accelerated
            model.encoder.layer.append(extra)
        same_outputs(fast(**inputs), slow(**inputs), kept)
        fastbert.accelerate(fast)
        with calls(fast, packed=1, fused=4, stock=0):
            same_outputs(fast(**inputs), copy.deepcopy(fastbert.restore(copy.deepcopy(fast)))(**inputs), kept)


HOOKED = (
    "embeddings",
    "embeddings.word_embeddings",
    "embeddings.LayerNorm",
    "encoder",
    "encoder.layer.1",
    "encoder.layer.1.attention",
    PROBE,
    "encoder.layer.1.attention.self.query",
    "encoder.layer.1.attention.output.LayerNorm",
    "encoder.layer.1.intermediate.dense",
    "encoder.layer.1.intermediate.intermediate_act_fn",
    "encoder.layer.1.output.dropout",
    "encoder.layer.2.output",
    "pooler",
    "",
)


@pytest.mark.parametrize("path", HOOKED)
@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
def test_hooks_see_and_change_what_they_do_in_the_stock_model(path, kind):
    slow, fast = build("bert")
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    seen = {id(slow): [], id(fast): []}

    def shapes(values):
        values = values if isinstance(values, (tuple, list)) else (values,)
        return [v.shape for v in values if isinstance(v, torch.Tensor)]

    def forward(model, module, args, output):
        seen[id(model)].append(shapes(output))
        if isinstance(output, torch.Tensor):
            return 1.5 * output
        return None

    def pre(model, module, args, kwargs):
        seen[id(model)].append((shapes(args), sorted(k for k, v in kwargs.items() if v is not None)))
        if args and args[0].is_floating_point():
            return (1.5 * args[0], *args[1:]), kwargs
        return None

    def backward(model, module, given, taken):
        seen[id(model)].append((shapes(given), shapes(taken)))

    handles = []
    with torch.no_grad():
        fast(**inputs)
    for model in (slow, fast):
        module = submodule(model, path) if path else model
        if kind == "forward":
            handle = module.register_forward_hook(functools.partial(forward, model))
        elif kind == "pre":
            handle = module.register_forward_pre_hook(functools.partial(pre, model), with_kwargs=True)
        else:
            handle = module.register_full_backward_hook(functools.partial(backward, model))
        handles.append(handle)
    expected, actual = slow(**inputs), fast(**inputs)
    same_outputs(actual, expected, kept, 2e-5)
    for out in (actual, expected):
        (out.last_hidden_state[kept].square().sum() + out.pooler_output.sum()).backward()
    same_gradients(fast, slow, 2e-4)
    assert seen[id(slow)] or (kind == "backward" and path in ("encoder", ""))  # which give no tensors
    assert seen[id(fast)] == seen[id(slow)]
    for handle in handles:
        handle.remove()
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        same_outputs(fast(**inputs), slow(**inputs), kept)


def test_layers_without_hooks_stay_fused():
    slow, fast = build("bert")
    submodule(fast, PROBE).register_forward_hook(lambda *_: None)
    inputs = first_kept("bert")
    with torch.no_grad(), calls(fast, packed=0, padded=1, fused=LAYERS - 1, stock=1):
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())
    report = fastbert.explain(fast)
    assert [layer.fused for layer in report.layers] == [True, False, True]
    assert "hook" in report.layers[1].reason
    assert "attention.self" in report.layers[1].reason


def test_hooks_of_all_modules_see_all_modules():
    """Profilers and counters of operations watch every module at once."""
    slow, fast = build("bert")
    inputs = first_kept("bert")
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(type(module).__name__)
    )
    try:
        with torch.no_grad():
            slow(**inputs)
            expected, seen[:] = list(seen), []
            fast(**inputs)
    finally:
        handle.remove()
    assert seen == expected


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "distilbert", "albert", "mpnet"])
def test_training_follows_the_stock_model(name, tmp_path):
    slow, fast = (m.train() for m in build(name, HEAD))
    losses = {}
    for model in (slow, fast):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        losses[model] = []
        for step in range(6):
            inputs = first_kept(name, seqlen=18, seed=step % 2)
            loss = model(**inputs, labels=torch.tensor([0, 1, 1, 0])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[model].append(loss.item())
    torch.testing.assert_close(losses[fast], losses[slow], rtol=2e-4, atol=2e-4)
    assert losses[fast][-1] < losses[fast][0]
    fast.eval().save_pretrained(tmp_path)
    loaded = type(slow).from_pretrained(tmp_path)
    for key, value in fast.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    with torch.no_grad():
        close(fast(**inputs).logits, loaded(**inputs).logits)


def test_frozen_parameters_have_no_gradient():
    slow, fast = build("bert", HEAD)
    inputs = first_kept("bert")
    for model in (slow, fast):
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].requires_grad_(False)
        model.bert.encoder.layer[1].output.LayerNorm.requires_grad_(False)
        model.bert.encoder.layer[1].attention.self.key.requires_grad_(False)
        model.bert.encoder.layer[2].intermediate.dense.bias.requires_grad_(False)
        model(**inputs, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
    same_gradients(fast, slow, 1e-4)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_hidden_states_keep_their_gradients(name):
    slow, fast = (copy.deepcopy(m).double().train() for m in pair(name))
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    grads = []
    for model in (slow, fast):
        out = model(**inputs, output_hidden_states=True)
        for hidden in out.hidden_states:
            hidden.retain_grad()
        out.last_hidden_state[kept].square().sum().backward()
        assert all(hidden.grad is not None for hidden in out.hidden_states)
        grads.append([hidden.grad[kept] for hidden in out.hidden_states])
    for theirs, ours in zip(*grads, strict=True):
        close(ours, theirs, 1e-9)


def test_attentions_keep_their_gradients():
    slow, fast = build("bert", attention="eager")
    inputs = first_kept("bert")
    grads = []
    for model in (slow, fast):
        out = model(**inputs, output_attentions=True)
        for probabilities in out.attentions:
            probabilities.retain_grad()
        out.last_hidden_state[0, 0].sum().backward()
        grads.append([probabilities.grad for probabilities in out.attentions])
    for theirs, ours in zip(*grads, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra", "ernie"])
def test_activation_checkpointing(name, reentrant):
    slow, fast = (m.double().train() for m in build(name, HEAD))
    inputs = first_kept(name)
    for model in (slow, fast):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    labels = torch.tensor([0, 1, 0, 1])
    expected = slow(**inputs, labels=labels)
    with calls(fast, packed=1, fused=LAYERS, stock=0):  # whatever hook transformers put on the embeddings
        actual = fast(**inputs, labels=labels)
    close(actual.loss, expected.loss, 1e-12)
    expected.loss.backward()
    with calls(fast, fused=LAYERS, stock=0):  # each layer once more
        actual.loss.backward()
    same_gradients(fast, slow, 1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_over_frozen_embeddings(reentrant):
    slow, fast = (m.double().train() for m in build("bert", HEAD))
    inputs = first_kept("bert")
    for model in (slow, fast):
        model.bert.embeddings.requires_grad_(False)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with calls(fast, packed=int(model is fast)):
            model(**inputs, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        model.disable_input_require_grads()
    same_gradients(fast, slow, 1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_checkpointed_layers_drop_the_same_elements_again(name, reentrant):
    """Else the gradient is none of the loss: compare it with differences of losses of the same seed."""
    _, fast = build(name, HEAD, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    fast = fast.double().train()
    fast.activation_checkpointing_enable({"use_reentrant": reentrant})
    inputs = first_kept(name)

    def loss():
        torch.manual_seed(5)
        return fast(**inputs, labels=torch.tensor([0, 1, 0, 1])).loss

    loss().backward()
    parameters = [p for p in fast.parameters() if p.grad is not None]
    directions = [torch.randn_like(p) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions, strict=True)).item()
    ends = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(step * direction)
            ends.append(loss().item())
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("train", [False, True])
def test_autocast(train):
    slow, fast = build("bert", HEAD)
    truth_model = copy.deepcopy(slow).double()
    labels = torch.tensor([0, 1, 0, 1])
    mine, theirs = [], []
    for seed in range(6):
        inputs = first_kept("bert", seed=seed)
        for model in (slow, fast, truth_model):
            model.train(train)
            model.zero_grad()
        truth = truth_model(**inputs, labels=labels)
        truth.loss.backward()
        for model, errors in ((fast, mine), (slow, theirs)):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(**inputs, labels=labels)
            if train:
                out.loss.backward()
                assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
                errors += [
                    (p.grad - t.grad).flatten() / t.grad.norm()
                    for p, t in zip(model.parameters(), truth_model.parameters(), strict=True)
                    if t.grad.norm() > 1e-6
                ]
            else:
                errors.append((out.logits - truth.logits).flatten())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with calls(fast, packed=1, fused=LAYERS, stock=0):
            actual = fast.bert(**inputs)
        expected = slow.bert(**inputs)
    assert actual.last_hidden_state.dtype == expected.last_hidden_state.dtype
    assert actual.pooler_output.dtype == expected.pooler_output.dtype
    assert torch.cat(mine).square().mean() <= 1.1 * torch.cat(theirs).square().mean()


# -- dropout -------------------------------------------------------------------------------------------------

COPIES = 600


def same_distribution(fast: nn.Module, slow: nn.Module, name: str) -> None:
    """Mean and variance of every output element over many draws are those of the stock model."""
    row = {k: v[3:] for k, v in first_kept(name, seqlen=6, seed=3).items()}
    row["attention_mask"][0, 5] = 0
    inputs = {k: v.expand(COPIES, -1) for k, v in row.items()}
    samples = []
    for seed, model in enumerate((fast, slow)):
        torch.manual_seed(seed)
        with torch.no_grad():
            samples.append(model(**inputs).last_hidden_state[:, :5].double())
    ours, theirs = samples
    assert theirs.std(0).max() > 0.01
    for statistic in (lambda x: x, lambda x: (x - x.mean(0)).square()):
        a, b = statistic(ours), statistic(theirs)
        error = (a.var(0) / COPIES + b.var(0) / COPIES).sqrt()
        z = (a.mean(0) - b.mean(0)) / error.clamp_min(1e-9)
        # 240 elements, far from independent
        assert z.abs().max() < 5.5, z.abs().max()
        assert z.square().mean() < 4.0, z.square().mean()


@pytest.mark.parametrize(
    ("name", "part", "unpad"),
    [
        (n, p, True)
        for n in ("bert", "distilbert", "albert", "electra", "mpnet")
        for p in ("hidden", "attention")
    ]
    + [("bert", "hidden", False), ("bert", "attention", False), ("mpnet", "hidden", False)],
)
def test_dropout_in_training_is_distributed_as_the_stock_models(name, part, unpad):
    probability = {f"{k}_dropout_prob": 0.2 * (k.startswith(part)) for k in ("hidden", "attention_probs")}
    slow, fast = (m.train() for m in build(name, num_hidden_layers=2, **probability))
    fastbert.accelerate(fast, unpad=unpad)
    with calls(fast, packed=int(unpad), padded=int(not unpad), fused=2, stock=0):
        same_distribution(fast, slow, name)


MONTE_CARLO = {
    "bert": (
        "embeddings.dropout",
        "encoder.layer.0.attention.self.dropout",  # transformers goes by the attention's own mode, not this
        "encoder.layer.0.attention.self",
        "encoder.layer.0.attention.output.dropout",
        "encoder.layer.0.output.dropout",
        "encoder.layer.1",
    ),
    "mpnet": ("encoder.layer.0.attention.attn.dropout", "encoder.layer.0.attention.dropout"),
    "distilbert": ("transformer.layer.0.ffn.dropout", "transformer.layer.0.attention"),
    "albert": (
        "encoder.albert_layer_groups.0.albert_layers.0.attention.output_dropout",
        "encoder.albert_layer_groups.0.albert_layers.0.attention.attention_dropout",
        "encoder.albert_layer_groups.0.albert_layers.0.dropout",  # which the stock layer never calls
    ),
}


@pytest.mark.parametrize(("name", "path"), [(n, p) for n, paths in MONTE_CARLO.items() for p in paths])
def test_dropout_of_one_module_in_an_eval_model(name, path):
    slow, fast = build(name, num_hidden_layers=2, hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.25)
    inputs = first_kept(name)
    with torch.no_grad():
        for model in (slow, fast):
            model(**inputs)
            submodule(model, path).train()
        random = [not torch.equal(m(**inputs)[0], m(**inputs)[0]) for m in (slow, fast)]
        assert random[0] == random[1]
        if random[0]:
            same_distribution(fast, slow, name)
        else:
            same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())
        for model in (slow, fast):
            model.eval()
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())


@pytest.mark.parametrize(
    "path",
    ["embeddings", "encoder.layer.1.attention.output", "encoder.layer.1.output", PROBE],
)
@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_dropout_probabilities_are_read_at_every_call(path, probability):
    """Everything dropped is as sure as nothing."""
    slow, fast = (m.train() for m in build("bert"))
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        before = fast(**inputs)
        for model in (slow, fast):
            submodule(model, path).dropout.p = probability
        actual = fast(**inputs)
        same_outputs(actual, slow(**inputs), kept)
    assert torch.equal(before[0], actual[0]) == (probability == 0.0)


@pytest.mark.parametrize("unpad", [False, True])
def test_dropout_follows_the_seed(unpad):
    _, fast = build("bert", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    fastbert.accelerate(fast, unpad=unpad).train()
    fast.embeddings.eval()  # of the layers, whichever way they are called
    inputs = first_kept("bert")
    out = []
    with torch.no_grad():
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            out.append([fast(**inputs)[0] for _ in range(2)])
    assert torch.equal(out[0][0], out[1][0])
    assert torch.equal(out[0][1], out[1][1])
    assert not torch.equal(out[0][0], out[0][1])
    assert not torch.equal(out[0][0], out[2][0])


# -- around the model ----------------------------------------------------------------------------------------


class _Pair(nn.Module):
    """Two encoders and what they share, as retrieval models have it."""

    def __init__(self):
        super().__init__()
        self.left, self.right = stock("bert"), stock("distilbert")
        self.again = self.left

    def forward(self, inputs):
        types_ = {k: v for k, v in inputs.items() if k != "token_type_ids"}
        return (
            self.left(**inputs)[0][:, 0]
            + self.right(**types_)[0][:, 0]
            + self.again(inputs["input_ids"])[0][:, 0]
        )


def test_models_inside_any_module():
    slow = _Pair().eval()
    fast = fastbert.accelerate(copy.deepcopy(slow))
    assert type(fast) is _Pair
    inputs = first_kept("bert")
    with torch.no_grad(), calls(fast, packed=3, padded=0, fused=3 * LAYERS, stock=0):
        close(fast(inputs), slow(inputs))
    report = fastbert.explain(fast)
    assert [m.name for m in report.models] == ["left", "right"]
    assert [m.packed_calls for m in report.models] == [2, 1]
    assert len(report.layers) == 2 * LAYERS
    with torch.no_grad():
        assert torch.equal(fastbert.restore(fast)(inputs), slow(inputs))


DECODERS = {
    "bert": transformers.BertLMHeadModel,
    "roberta": transformers.RobertaForCausalLM,
    "xlm-roberta": transformers.XLMRobertaForCausalLM,
    "camembert": transformers.CamembertForCausalLM,
    "electra": transformers.ElectraForCausalLM,
    "ernie": transformers.ErnieForCausalLM,
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_run_as_they_are(name):
    torch.manual_seed(0)
    config = hf_config(name, is_decoder=True)
    slow = DECODERS[name](config).eval()
    fast = fastbert.accelerate(copy.deepcopy(slow))
    inputs = first_kept(name)
    with torch.no_grad():
        assert torch.equal(fast(**inputs).logits, slow(**inputs).logits)
    assert not any(layer.fused for layer in fastbert.explain(fast).layers)
    with pytest.raises(ValueError, match="decoder"):
        fastbert.accelerate(copy.deepcopy(slow), strict=True)
    ids = inputs["input_ids"][3:, :5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings_ = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert torch.equal(fast.generate(ids, **settings_), slow.generate(ids, **settings_))


def test_cross_attention_runs_as_it_is():
    torch.manual_seed(0)
    config = hf_config("bert", is_decoder=True, add_cross_attention=True)
    slow = transformers.BertModel(config).eval()
    fast = fastbert.accelerate(copy.deepcopy(slow))
    inputs = first_kept("bert")
    other = dict(encoder_hidden_states=torch.randn(4, 7, 48), encoder_attention_mask=torch.ones(4, 7))
    with torch.no_grad():
        assert torch.equal(fast(**inputs, **other)[0], slow(**inputs, **other)[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_autograd(mode):
    slow, fast = build("bert")
    inputs = first_kept("bert")
    kept = inputs["attention_mask"].bool()
    for _ in range(2):
        with mode():
            actual, expected = fast(**inputs), slow(**inputs)
            same_outputs(actual, expected, kept)
        assert actual[0].requires_grad == expected[0].requires_grad
        assert actual[0].is_inference() == expected[0].is_inference()
    fast(**inputs)[0].sum().backward()  # and what was derived there does not stand in the way here
    assert all(p.grad is not None for k, p in fast.named_parameters() if "pooler" not in k)


def test_threads_do_not_disturb_each_other():
    slow, fast = build("bert")
    work = []
    for seed in range(6):
        inputs = first_kept("bert", seed=seed, seqlen=10 + 5 * seed)
        if seed % 3 == 2:  # the padded layout at the same time as the packed one
            inputs["attention_mask"][0, 0] = 0
        work.append(inputs)
    with torch.no_grad():
        expected = [slow(**inputs, output_hidden_states=True) for inputs in work]
    failures = []

    def serve(offset):
        try:
            with torch.no_grad():
                for step in range(12):
                    at = (offset + step) % len(work)
                    out = fast(**work[at], output_hidden_states=True)
                    same_outputs(out, expected[at], work[at]["attention_mask"].bool())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.filterwarnings("ignore")
def test_traced_model_is_the_stock_one():
    slow, fast = build("bert")
    inputs = first_kept("bert")
    arguments = (inputs["input_ids"], inputs["attention_mask"])
    other = first_kept("bert", seed=7)
    with torch.no_grad():
        traced = torch.jit.trace(fast, arguments, check_trace=False, strict=False)
        reference = torch.jit.trace(slow, arguments, check_trace=False, strict=False)
        assert "fastbert" not in str(traced.inlined_graph)
        actual, expected = (m(other["input_ids"], other["attention_mask"]) for m in (traced, reference))
        assert torch.equal(actual["last_hidden_state"], expected["last_hidden_state"])
        with calls(fast, packed=1, fused=LAYERS, stock=0):
            fast(**inputs)


def test_model_on_the_meta_device_gives_shapes():
    slow, fast = (m.to("meta") for m in build("bert"))
    ids = torch.zeros(4, 40, dtype=torch.long, device="meta")
    with torch.no_grad():
        assert fast(ids)[0].shape == slow(ids)[0].shape == (4, 40, 48)


def test_flops_are_counted_as_in_the_stock_model():
    from torch.utils.flop_counter import FlopCounterMode

    slow, fast = build("bert", attention="eager")
    inputs = first_kept("bert")
    totals = []
    for model in (slow, fast):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(**inputs)
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


@pytest.mark.parametrize("what", ["grad", "vmap", "jvp", "forward-mode"])
def test_transforms_of_functions_see_the_stock_model(what):
    """Per-sample gradients, directional derivatives: our operations have no rules for them."""
    slow, fast = (m.double() for m in build("bert", attention="eager"))
    embeds = torch.randn(3, 7, 48, dtype=torch.float64)
    results = []
    for model in (slow, fast):

        def loss(x, model=model):
            return model(inputs_embeds=x)[0].square().sum()

        if what == "grad":
            results.append(torch.func.grad(loss)(embeds))
        elif what == "vmap":
            results.append(torch.func.vmap(torch.func.grad(loss))(embeds[:, None]))
        elif what == "jvp":
            results.append(torch.func.jvp(loss, (embeds,), (torch.ones_like(embeds),))[1])
        else:
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(embeds, torch.ones_like(embeds))
                results.append(torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent)
    close(results[1], results[0], 1e-9)
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        fast(inputs_embeds=embeds)
