"""Taps see what a layer computes, change nothing unless they mean to, and what they return is used."""

from __future__ import annotations

import pytest
import torch

from fastbert.layers.taps import Taps
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from fastbert.models.encoder import tapped
from tests.support.hf_models import FAMILY_NAMES, batch, hf_config, hf_model
from tests.support.model_pairs import model_of

HEADS = 3


class Watching(Taps):
    """Keeps a note of each call."""

    def __init__(self):
        self.seen = []

    def qkv(self, layer, q, k, v, sequences):
        self.seen.append(("qkv", layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return super().qkv(layer, q, k, v, sequences)

    def context(self, layer, context, sequences):
        self.seen.append(("context", layer, tuple(context.shape)))
        return super().context(layer, context, sequences)

    def inner(self, layer, inner, sequences):
        self.seen.append(("inner", layer, tuple(inner.shape)))
        return super().inner(layer, inner, sequences)


def double(name="bert", **config):
    return model_of(name, **config).double()


def answer(model, inputs, **kwargs):
    with torch.no_grad():
        return model(**inputs, **kwargs).last_hidden_state


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_layer_is_seen_once_and_nothing_changes(family):
    model, inputs = double(family), batch(family)
    expected = answer(model, inputs)
    with tapped(model, taps := Watching()):
        found = answer(model, inputs)
    with tapped(model, first := Watching()):
        answer(model, inputs, first_token_only=True)
    assert first.seen == taps.seen  # no row is skipped
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    rows = int(inputs["attention_mask"].sum())
    width, inner = model.config.hidden_size, model.config.intermediate_size
    one = rows, HEADS, width // HEADS
    assert taps.seen == [
        each
        for layer in range(len(model.layer_list()))
        for each in (("qkv", layer, one, one, one), ("context", layer, one), ("inner", layer, (rows, inner)))
    ]
    torch.testing.assert_close(answer(model, inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_batches_are_not_cut(dtype):
    """Blocks of sequences would show a tap a part of the batch."""
    model = model_of("bert").to(dtype)
    ids = torch.arange(64 * 60).remainder(110).view(64, 60) + 5
    with tapped(model, taps := Watching()), torch.inference_mode():
        model(ids)
    assert len(taps.seen) == 3 * 3


class Without(Taps):
    """Takes the output of one head away."""

    def __init__(self, layer, head):
        self.at = layer, head

    def context(self, layer, context, sequences):
        if layer == self.at[0]:
            context = context.clone()
            context[:, self.at[1]] = 0
        return context


@pytest.mark.parametrize("family", ["bert", "albert-groups", "mpnet", "distilbert", "modernbert"])
def test_a_context_that_is_replaced(family):
    """As a head mask does it."""
    model, inputs = double(family), batch(family)
    layers = len(model.layer_list())
    for layer, head in ((0, 2), (layers - 1, 1)):
        mask = torch.ones(layers, HEADS, dtype=torch.float64)
        mask[layer, head] = 0
        with tapped(model, Without(layer, head)):
            found = answer(model, inputs)
        torch.testing.assert_close(found, answer(model, inputs, head_mask=mask), rtol=1e-12, atol=1e-12)
        assert not torch.allclose(found, answer(model, inputs), rtol=1e-3)


class Everything(Taps):
    """Swaps two heads' queries, keys and values, adds a bias, and halves what the feed-forward block has."""

    def qkv(self, layer, q, k, v, sequences):
        swapped = (t[:, [1, 0, 2]] for t in (q, k, v))
        longest = sequences.max_seqlen
        bias = torch.zeros(1, HEADS, longest, longest, dtype=q.dtype)
        bias[:, :, :, 0] = -1.5
        return *swapped, bias

    def context(self, layer, context, sequences):
        return context[:, [1, 0, 2]]

    def inner(self, layer, inner, sequences):
        return inner / 2


def test_everything_that_is_replaced():
    """Heads swapped there and back change nothing; the bias and the halved product are transformers'."""
    theirs, model = hf_model("bert").double(), double()
    inputs = {"input_ids": torch.arange(5, 23).view(2, 9)}
    with tapped(model, Everything()):
        found = answer(model, inputs)
    bias = torch.zeros(2, 1, 9, 9, dtype=torch.float64)
    bias[:, :, :, 0] = -1.5
    for layer in theirs.encoder.layer:
        layer.output.dense.weight.data /= 2
    with torch.no_grad():
        expected = theirs(**inputs, attention_mask=bias).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_gradients_flow_through():
    model, inputs = double(), batch("bert")

    class Scaled(Taps):
        def __init__(self):
            self.scale = torch.ones(HEADS, dtype=torch.float64, requires_grad=True)
            self.inner_scale = torch.ones((), dtype=torch.float64, requires_grad=True)

        def context(self, layer, context, sequences):
            return context * self.scale[:, None] if layer == 1 else context

        def inner(self, layer, inner, sequences):
            return inner * self.inner_scale if layer == 1 else inner

    taps = Scaled()
    with tapped(model, taps):
        loss = model(**inputs).last_hidden_state.square().mean()
        loss.backward()
    mask = torch.ones(3, HEADS, dtype=torch.float64, requires_grad=True)
    model(**inputs, head_mask=mask).last_hidden_state.square().mean().backward()
    torch.testing.assert_close(taps.scale.grad, mask.grad[1], rtol=1e-9, atol=1e-12)
    step = 1e-6
    with tapped(model, taps), torch.no_grad():
        sides = []
        for sign in (1, -1):
            taps.inner_scale.fill_(1 + sign * step)
            sides.append(model(**inputs).last_hidden_state.square().mean())
    torch.testing.assert_close(
        taps.inner_scale.grad, (sides[0] - sides[1]) / (2 * step), rtol=1e-6, atol=1e-10
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_draws_the_same_dropout(checkpointing):
    """And recomputed layers show their insides again."""
    model, inputs = model_of("bert").train(), batch("bert")
    if checkpointing:
        model.gradient_checkpointing_enable()
    outputs = []
    for taps in (None, Watching()):
        torch.manual_seed(3)
        with tapped(model, taps):
            outputs.append(model(**inputs).last_hidden_state)
            outputs[-1].square().mean().backward()
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    assert len(taps.seen) == 9 * (2 if checkpointing else 1)


def fails_under(model, taps):
    with tapped(model, taps):
        assert model.taps is taps
        raise RuntimeError("planted")


def test_taps_end_with_the_block_and_stack():
    model = double()
    with tapped(model, outer := Watching()):
        with pytest.raises(RuntimeError, match="planted"):
            fails_under(model, Watching())
        assert model.taps is outer
    assert model.taps is None


def test_int8_layers_show_their_insides():
    model = model_of("bert").quantize()
    inputs = batch("bert")
    with tapped(model, taps := Watching()):
        found = answer(model, inputs)
    assert len(taps.seen) == 9
    torch.testing.assert_close(found, answer(model, inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.sweep
def test_compiled_models_see_them():
    model = AutoModel.from_config(EncoderConfig.from_hf(hf_config("bert"))).eval()
    inputs = {"input_ids": torch.arange(5, 23).view(2, 9)}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = answer(compiled, inputs)
    with tapped(model, Without(1, 0)):
        found = answer(compiled, inputs)
        expected = answer(model, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-5)
    torch.testing.assert_close(answer(compiled, inputs), plain, rtol=1e-5, atol=1e-5)
