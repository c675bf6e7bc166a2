"""A layer by executor `launchers`: the bits of its ops one by one, and only where that is allowed.

On a CPU with `on_gpu` saying yes: the code looks at no device otherwise.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import fastbert
from fastbert.execution import launchers
from fastbert.execution.call import Call
from fastbert.layers import float_linear
from fastbert.layers import linear as linear_layers
from fastbert.layers.batch import PackedBatch
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from fastbert.ops import linear_norm as linear_norm_op
from fastbert.runtime import dispatch
from tests.support.hf_models import BERT_LAYERS, batch, hf_config
from tests.support.layer_calls import through

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of(name: str, **overrides):
    return AutoModel.from_config(EncoderConfig.from_hf(hf_config(name, **overrides))).eval()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """One product for query, key and value; no backend runs a whole layer."""
    joined = linear_layers.FLOAT._replace(joins=lambda x, modules: all(m.bias is not None for m in modules))
    monkeypatch.setattr(linear_layers, "FLOAT", joined)
    monkeypatch.setitem(linear_layers.LINEAR_KINDS, nn.Linear, joined)
    with dispatch.use_backend("aten"):
        yield


@contextlib.contextmanager
def direct_calls(allowed: bool = True):
    """A list to which every layer that runs directly appends its number of rows."""
    seen, run, on_gpu = [], launchers._layer, launchers.on_gpu

    def watched(layer, x, *args):
        seen.append(x.shape[0])
        return run(layer, x, *args)

    launchers._layer, launchers.on_gpu = watched, lambda device: allowed
    try:
        yield seen
    finally:
        launchers._layer, launchers.on_gpu = run, on_gpu


def both_ways(call):
    """(result op by op, result, rows of the layers that ran directly)."""
    with direct_calls(allowed=False) as none:
        expected = call()
    assert none == []
    with direct_calls() as seen:
        actual = call()
    return expected, actual, seen


# --- the same bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BERT_LAYERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_every_family(name, dtype):
    model, inputs = of(name).to(dtype), batch(name)
    expected, actual, seen = both_ways(lambda: model(**inputs)[0])
    assert len(seen) == len(model.layer_list())
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_causal(causal):
    layer, x = of("bert").layer_list()[0], torch.randn(20, 48)
    ends = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    sequences = PackedBatch(ends, 13, causal=causal)
    expected, actual, seen = both_ways(lambda: through(layer, x, sequences))
    assert seen == [20]
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_product_and_norm_as_one_op(monkeypatch):
    """Where that pays, with the counters of the call."""
    asked = []

    def pays(x, out_features):
        asked.append(x.shape)
        return True

    monkeypatch.setattr(linear_norm_op, "pays", pays)
    monkeypatch.setattr(float_linear, "joining_pays", pays)
    layer, x = of("bert").layer_list()[0], torch.randn(9, 48)
    sequences = PackedBatch(torch.tensor([0, 9], dtype=torch.int32), 9)
    expected, actual, seen = both_ways(lambda: through(layer, x, sequences))
    assert seen == [9]
    assert len(asked) == 4
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["bert", "distilbert"])
@torch.no_grad()
def test_accelerated_models(name):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_config(hf_config(name)).eval()
    inputs = batch(name)
    stock = model(**inputs)[0]
    fastbert.accelerate(model)
    expected, actual, seen = both_ways(lambda: model(**inputs)[0])
    assert len(seen) == model.config.num_hidden_layers
    assert torch.equal(actual, expected)
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(actual[kept], stock[kept], rtol=0, atol=5e-5)


# --- what the ops have to look at ---------------------------------------------------------------------------


class Low(nn.Module):
    """A linear layer with something beside it, as LoRA adds."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) + x.sum(-1, keepdim=True)


def watch(module):
    module.register_forward_hook(lambda *_: None)


def swap(module, name, value):
    setattr(module, name, value)


CHANGES = {
    "hook": lambda layer: watch(layer.output.dense),
    "hook of a norm": lambda layer: watch(layer.attention.output.LayerNorm),
    "other module": lambda layer: swap(layer.intermediate, "dense", Low(layer.intermediate.dense)),
    "other norm": lambda layer: swap(layer.output, "LayerNorm", nn.RMSNorm(48)),
    "no bias": lambda layer: swap(layer.attention.self.key, "bias", None),
    "norm in float64": lambda layer: layer.output.LayerNorm.double(),
    "stepped rows": lambda layer: swap(
        layer.output.dense.weight, "data", torch.randn(48, 2 * 64)[:, : 2 * 64 : 2]
    ),
    "negative": lambda layer: swap(
        layer.output.dense.bias, "data", torch.randn(48, dtype=torch.complex64).conj().imag
    ),
    "dropout": lambda layer: layer.train(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after a call"])
@torch.no_grad()
def test_what_a_layer_has_that_the_ops_must_see(change, when):
    layer, x = of("bert", intermediate_size=64).layer_list()[0], torch.randn(9, 48)
    seed = torch.tensor([5])
    sequences = PackedBatch(torch.tensor([0, 9], dtype=torch.int32), 9, seed=seed)
    if when == "after a call":
        with direct_calls() as seen:
            through(layer, x, sequences)
        assert seen == [9]
    CHANGES[change](layer)
    expected, actual, seen = both_ways(lambda: through(layer, x, sequences))
    assert seen == []
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "what", ["bias", "probs", "gate", "first only", "gradients", "autocast", "rows", "none"]
)
def test_what_a_call_has_that_the_ops_must_see(what):
    layer, x = of("bert").layer_list()[0], torch.randn(9, 48)
    sequences = PackedBatch(torch.tensor([0, 9], dtype=torch.int32), 9)
    options, scope = {}, contextlib.nullcontext()
    if what == "bias":
        sequences = replace(sequences, bias=torch.randn(1, 9, 9, dtype=torch.complex64).conj().imag)
    elif what == "probs":
        options = {"call": Call(sequences, 0, wants_attentions=True)}
    elif what == "gate":
        options = {"gate": torch.ones(layer.form.nheads)}
    elif what == "first only":
        options = {"call": Call(sequences, 0, first_only=True)}
    elif what == "autocast":
        scope = torch.autocast("cpu", torch.bfloat16)
    elif what == "rows":
        x = torch.randn(9, 96)[:, ::2]
    with torch.set_grad_enabled(what == "gradients"), scope:
        expected, actual, seen = both_ways(lambda: through(layer, x, sequences, **options))
    assert seen == ([9] if what in ("none", "bias") else [])
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_new_values_are_read():
    """Also of query, key and value, whose joined copy is derived again."""
    layer, x = of("bert").layer_list()[0], torch.randn(9, 48)
    sequences = PackedBatch(torch.tensor([0, 9], dtype=torch.int32), 9)
    with direct_calls() as seen:
        before = through(layer, x, sequences)
        for module in (layer.attention.self.query, layer.output.dense):
            module.weight.data = torch.randn_like(module.weight)
            after = through(layer, x, sequences)
            assert not torch.allclose(after, before)
            before = after
    assert seen == [9] * 3
    with direct_calls(allowed=False):
        assert torch.equal(through(layer, x, sequences), after)


@torch.no_grad()
def test_a_wrong_batch_raises_as_from_the_op():
    """Also a batch that comes after a right one, and shares its lists."""
    layer, x = of("bert").layer_list()[0], torch.randn(9, 48)
    right = PackedBatch(torch.tensor([0, 9], dtype=torch.int32), 9)
    wrong = {
        "cu_seqlens: expected int32": replace(right, cu_seqlens=torch.tensor([0, 9])),
        "cu_seqlens: expected to end within": replace(right, cu_seqlens=torch.tensor([0, 10]).int()),
        "max_seqlen: expected at least": replace(right, max_seqlen=8),
        "bias: expected": replace(right, bias=torch.zeros(1, 1, 8, 8)),
    }
    with direct_calls() as seen:
        through(layer, x, right)
        for message, sequences in wrong.items():
            with pytest.raises((TypeError, ValueError), match=message):
                through(layer, x, sequences)
        with pytest.raises(ValueError, match="to end within"):
            through(layer, x[:8], right)
        through(layer, x, right)
    assert seen == [9, 9]
    layer.output.LayerNorm.eps = float("nan")
    with direct_calls(), pytest.raises(ValueError, match="eps: expected a finite number"):
        through(layer, x, right)
