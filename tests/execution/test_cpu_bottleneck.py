"""MobileBERT's layers in one call: the same bits as their ops one by one, and only where that is allowed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastbert.execution import cpu as executor
from fastbert.execution.call import Call
from fastbert.execution.plan import explain, survey
from fastbert.layers.batch import PackedBatch
from fastbert.ops.encoder_layer import encoder_layer
from fastbert.runtime import dispatch
from tests.execution.test_cpu import (
    BF16,
    FLOAT,
    FP16,
    assert_same_as_op_by_op,
    fused_layers,
    of,
    op_by_op,
    packed,
)
from tests.models.test_mobilebert import FORMS, LENGTHS, ragged
from tests.support.cpu_fixtures import every_isa, threads  # noqa: F401
from tests.support.inputs import ends_of
from tests.support.layer_calls import through

pytestmark = pytest.mark.skipif(
    dispatch.unsupported_reason("cpu", "linear", "cpu", torch.float32) is not None,
    reason="needs the compiled CPU kernels",
)
OP_BY_OP = ("LayerNorm", "no bottleneck")
FUSED = [form for form in FORMS if form not in OP_BY_OP]


def model_of(form="published", int8=False, dtype=FLOAT, **config):
    model = of("mobilebert", **{**FORMS[form], **config}).to(dtype)
    return model.quantize("int8") if int8 else model


def layer_of(*args, **config):
    return model_of(*args, **config).layer_list()[1]


# --- the same bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FUSED)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
def test_every_form(form, int8, dtype, every_isa):  # noqa: F811
    model, inputs = model_of(form, int8, dtype), ragged()
    assert_same_as_op_by_op(lambda: model(**inputs)[0], 3)


@pytest.mark.parametrize("form", ["own bottleneck", "wide keys"])  # as published: test_cpu.py
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
# threads share rows, or each has its own sequences: for two threads, for three, with empty sequences
@pytest.mark.parametrize("lengths", [[60, 1, 140, 154], [60, 0, 59, 0, 61, 58, 0], [40, 20, 60, 61]], ids=str)
@pytest.mark.parametrize("capacity", [0, 2])
@torch.no_grad()
def test_any_number_of_threads(form, int8, count, lengths, capacity, threads):  # noqa: F811
    config = dict(hidden_size=192, num_attention_heads=3, intermediate_size=260)
    narrow = 192 if form == "wide keys" else 72
    layer = layer_of(form, int8, **config, intra_bottleneck_size=narrow)
    x = torch.randn(sum(lengths) + capacity, 2 * 192)[:, :192]  # rows that are not next to each other
    before, bias = x.clone(), torch.randn(len(lengths), 3, max(lengths), max(lengths))
    for given in (None, bias):
        batch = PackedBatch(ends_of(lengths), max(lengths), given)
        torch.set_num_threads(1)
        with op_by_op():
            expected = through(layer, x, batch)
        torch.set_num_threads(count)
        assert torch.equal(through(layer, x, batch), expected)
        assert torch.equal(x, before)


@pytest.mark.parametrize("config", [{"intermediate_size": 1}, {"intermediate_size": 300}], ids=str)
@pytest.mark.parametrize("hidden_act", ["relu", "gelu", "tanh"])
@pytest.mark.parametrize("width", [6, 24, 129])
def test_widths_and_activations(config, hidden_act, width):
    model = model_of(hidden_act=hidden_act, intra_bottleneck_size=width, **config)
    assert_same_as_op_by_op(lambda: model(**ragged())[0], 3)


@pytest.mark.parametrize("int8", [False, True])
def test_float16_of_a_layer(int8, every_isa):  # noqa: F811
    """The model refuses it, the layer does not."""
    layer, x = layer_of(int8=int8, dtype=FP16), torch.randn(60, 48).half()
    batch = PackedBatch(ends_of([20, 40]), 40)
    assert_same_as_op_by_op(lambda: through(layer, x, batch), 1)


@pytest.mark.parametrize("int8", [False, True])
def test_missing_biases(int8):
    model = model_of()
    for layer in model.layer_list():
        for path in ("attention.self.key", "bottleneck.input.dense", "ffn.0.output.dense", "output.dense"):
            layer.get_submodule(path).bias = None
    model = model.quantize("int8") if int8 else model
    assert_same_as_op_by_op(lambda: model(**ragged())[0], 3)


def test_pruned_heads():
    model = model_of(pruned_heads={1: [0, 2]})
    bias = torch.randn(len(LENGTHS), 3, max(LENGTHS), max(LENGTHS))
    for given in (ragged(), {**ragged(), "attention_mask": bias}):
        assert_same_as_op_by_op(lambda given=given: model(**given)[0], 3)


# --- when the weights change --------------------------------------------------------------------------------


@torch.no_grad()
def test_every_parameter_counts_at_the_next_call():
    model, inputs = model_of(num_hidden_layers=1), ragged()
    last = model(**inputs)[0]
    for name, parameter in model.layer_list()[0].named_parameters():
        parameter.mul_(1.5)
        changed = model(**inputs)[0]
        # Softmax does not see what all keys add to a score
        assert name == "attention.self.key.bias" or not torch.equal(changed, last), name
        with op_by_op():
            assert torch.equal(model(**inputs)[0], changed), name
        last = changed


# --- where the ops run one by one ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", OP_BY_OP)
@torch.no_grad()
def test_forms_that_run_op_by_op_and_say_why(form):
    model = model_of(form)
    assert fused_layers(model, ragged()) == 0
    x = torch.randn(5, 48)
    (served,) = explain(survey(model.layer_list()), x, Call(packed(model, [5], x), 2))
    words = {"LayerNorm": "its norms are no NoNorms", "no bottleneck": "it has no bottleneck"}
    assert served.executor == "eager"
    assert served.refused["cpu"].startswith(words[form])


@pytest.mark.parametrize(
    "where", ["bottleneck.input.LayerNorm", "ffn.0.output.dense", "output.bottleneck.dense"]
)
@torch.no_grad()
def test_not_where_a_part_is_hooked_or_replaced(where):
    model, inputs = model_of(), ragged()
    expected, seen = model(**inputs)[0], []
    part = model.layer_list()[1].get_submodule(where)
    handle = part.register_forward_hook(lambda *_: seen.append(1))
    assert fused_layers(model, inputs) == 2
    assert seen
    handle.remove()
    part.__class__ = type("Own", (type(part),), {})
    assert fused_layers(model, inputs) == 2
    assert (model(**inputs)[0] - expected).abs().max() < 1e-4


@torch.no_grad()
def test_not_in_training_nor_with_probabilities_or_other_dtypes():
    model, inputs = model_of(), ragged()
    assert fused_layers(model, inputs) == 3
    assert fused_layers(model, inputs, output_hidden_states=True) == 3
    assert fused_layers(model, inputs, output_attentions=True) == 0
    assert fused_layers(model, inputs, first_token_only=True) == 2
    with torch.enable_grad():
        assert fused_layers(model, inputs) == 0
    assert fused_layers(model_of().double(), inputs) == 0
    with dispatch.use_backend(linear="aten"):
        assert fused_layers(model, inputs) == 0
    layer = model.layer_list()[1]
    layer.ffn[0].output.LayerNorm.double()
    x = torch.randn(5, 48)
    taken = executor.takes(survey([layer])[0], x, Call(packed(model, [5], x), 0))
    assert taken.startswith("a parameter has another dtype")


# --- bad input ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_bad_input_is_named():
    x, model = torch.randn(6, 48), model_of()
    batch = packed(model, [2, 4], x)
    taken = executor.takes(survey(model.layer_list())[0], x, Call(batch, 0))
    narrow = taken.layer.narrow

    def call(x=x, **changed):
        layers = [taken.layer, taken.layer._replace(**changed)]
        return encoder_layer(taken.launch, x, layers, batch.cu_seqlens, 4, bias=None)

    assert call().shape == (6, 48)
    for match, changed in (
        ("narrow: expected width >= 1", {"narrow": narrow._replace(width=0)}),
        ("narrow: expected width >= 1", {"narrow": narrow._replace(feeds=-1)}),
        ("narrow: expected width >= 1", {"narrow": narrow._replace(keys=False, values=True)}),
        ("weights: expected those of a layer", {"narrow": narrow._replace(width=23)}),
        ("weights: expected those of a layer", {"narrow": narrow._replace(feeds=1)}),
        ("weights: expected those of a layer", {"narrow": narrow._replace(values=True)}),
        ("weights: expected those of a layer", {"narrow": None}),
        ("weights: expected those of a layer", {"inner": 79}),
        ("weights: expected those of a layer from 47", {"x": torch.randn(6, 47)}),
        ("pre_norm: expected none", {"pre_norm": True}),
        ("gated: expected none", {"gated": "first"}),
        ("rotary: expected none", {"rotary": 1}),
    ):
        with pytest.raises(ValueError, match=match):
            call(**changed)


@pytest.mark.parametrize("name", ["bottleneck.input", "ffn.1.output", "output.bottleneck"])
def test_weights_and_norms_of_other_shapes_are_refused(name):
    for leaf, other in (("dense", nn.Linear(48, 32)), ("LayerNorm", None)):
        model = model_of()
        owner = model.layer_list()[1].get_submodule(name)
        if other is None:
            owner.LayerNorm.bias = nn.Parameter(torch.zeros(1))
        else:
            setattr(owner, leaf, other)
        with torch.no_grad(), pytest.raises(ValueError, match=r"weights: expected those of a layer from 48"):
            model(**ragged())
