"""SmoothQuant: factors move the range of inputs into the weights, and nothing else changes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fastbert
from fastbert.checkpoint.files import CheckpointError
from fastbert.execution import eager, modules, plan
from fastbert.layers import quantized, smoothing
from fastbert.layers.modules import part
from fastbert.layers.quantized import QuantizedLinear
from fastbert.layers.quantizing import each_linear
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.model_pairs import build, inputs_for
from tests.support.quantized_models import hidden, ours


def inputs(model):
    return [batch(model.config.model_type)]


def smoothed(family="bert", alpha=0.5, **how):
    model = ours(family, **how)
    return model.quantize(smooth=alpha, calibrate=inputs(model))


def uneven():
    """A model some of whose hidden columns are large, as in trained BERTs."""
    model = ours("bert")
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
            norm.weight[[3, 17]] *= 40
    return model


def layers_of(model):
    return {name: module for _, _, module, name in each_linear(model)}


# --- factors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_ranges_are_those_of_the_real_tokens(family):
    """Against hooks on the padded batch, whose padding does not count."""
    model, given = ours(family), batch(family)
    found = smoothing.ranges(model, [*each_linear(model)], [given])
    kept, seen = given["attention_mask"].bool(), {}
    for name, module in layers_of(model).items():
        module.register_forward_hook(
            lambda m, args, out, name=name: seen.setdefault(name, []).append(args[0])
        )
    hidden(model)
    assert seen
    for name, given in seen.items():
        # The rows of DeBERTa's table of distances are no tokens
        if given[0].dim() == 3 and not (family == "deberta-v2" and "self" in name):
            rows = torch.nn.functional.pad(torch.cat([x[kept] for x in given]), (0, 0, 1, 0))
            ends = torch.stack(torch.aminmax(rows, dim=0))
            torch.testing.assert_close(found[name], ends, rtol=1e-3, atol=1e-4)


def test_ranges_are_over_all_inputs():
    model = ours("bert")
    linears, (given,) = [*each_linear(model)], inputs(model)
    other = {**given, "input_ids": given["input_ids"].roll(1, 1)}
    first, second, both = (
        smoothing.ranges(model, linears, each) for each in ([given], [other], [given, other])
    )
    for name, (least, largest) in both.items():
        assert torch.equal(least, torch.minimum(first[name][0], second[name][0]))
        assert torch.equal(largest, torch.maximum(first[name][1], second[name][1]))
        assert not torch.equal(first[name], second[name])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_factors_are_those_of_the_paper(alpha):
    model = uneven()
    linears = [*each_linear(model)]
    ranges = smoothing.ranges(model, linears, inputs(model))
    found = smoothing.smoothing(ranges, linears, alpha)
    by_name = layers_of(model)
    names = [name for name in by_name if name.startswith("encoder.layer.1.")]
    groups = [[name for name in names if ".self." in name], *([n] for n in names if ".self." not in n)]
    assert [len(group) for group in groups] == [3, 1, 1, 1]
    for group in groups:
        weights = torch.cat([by_name[name].weight.detach() for name in group]).abs().amax(0)
        s = ranges[group[0]].abs().amax(0) ** alpha / weights ** (1 - alpha)
        for name in group:
            torch.testing.assert_close(found[name], 1 / s)
    for name, module in by_name.items():
        assert found[name].dtype == torch.float32
        x = torch.randn(5, module.in_features, dtype=torch.float64)
        f, weight = found[name].double(), module.weight.detach().double()
        torch.testing.assert_close((x * f) @ (weight / f).T, x @ weight.T, rtol=1e-12, atol=1e-12)


def test_an_input_that_is_always_zero_has_no_factor():
    model = ours("bert")
    dense = model.layer_list()[0].output.dense
    with torch.no_grad():
        model.layer_list()[0].intermediate.dense.weight[5] = 0
        model.layer_list()[0].intermediate.dense.bias[5] = 0
        dense.weight[:, 7] = 0
    model.quantize(smooth=0.5, calibrate=inputs(model))
    smooth = model.layer_list()[0].output.dense.smooth
    assert smooth[5] == smooth[7] == 1
    assert (smooth != 1).sum() == len(smooth) - 2


def test_uneven_columns_lose_less():
    full, model = uneven(), uneven()
    truth = hidden(full)
    errors = {}
    for alpha in (None, 0.5):
        more = {} if alpha is None else {"smooth": alpha, "calibrate": inputs(full)}
        errors[alpha] = (hidden(copy.deepcopy(model).quantize(**more)) - truth).norm() / truth.norm()
    assert errors[0.5] < 0.5 * errors[None]


def test_query_key_and_value_stay_one_product():
    model = smoothed()
    attention = model.layer_list()[0].attention.self
    three = [attention.query, attention.key, attention.value]
    x = torch.randn(4, 48)
    assert quantized.int8_joins(x, three)
    y = quantized.int8_product(x, model, three)
    assert torch.equal(y, torch.cat([quantized.int8_product(x, m, [m]) for m in three], 1))
    attention.value.smooth = attention.value.smooth * 2
    assert not quantized.int8_joins(x, three)
    attention.value.smooth = None
    assert not quantized.int8_joins(x, three)
    attention.query.smooth = attention.key.smooth = None
    assert quantized.int8_joins(x, three)


def test_query_key_and_value_of_a_shared_layer_stay_one_product():
    """At its last call it makes the query of the first token alone."""
    _, model = build("albert", "ForSequenceClassification")
    model.quantize(smooth=0.5, calibrate=[inputs_for("albert", "ForSequenceClassification")])
    (layer,) = {id(layer): layer for layer in model.base_model.layer_list()}.values()
    assert quantized.int8_joins(torch.randn(4, 48), [part(layer, path) for path in layer.form.linears[:3]])


def test_factors_that_differ_are_seen_by_the_whole_layer():
    model = smoothed()
    before = hidden(model)
    value = model.layer_list()[1].attention.self.value
    value.smooth.mul_(2)
    after = hidden(model)
    assert not torch.equal(before, after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "EXECUTORS", (modules, eager))
        assert torch.equal(hidden(copy.deepcopy(model)), after)


# --- calibration --------------------------------------------------------------------------------------------


def test_calibration_leaves_the_model_as_it_was():
    model = ours("bert")
    model.train()
    model.layer_list()[1].eval()
    modes = [m.training for m in model.modules()]
    before = dict(model.named_modules())
    smoothing.ranges(model, [*each_linear(model)], inputs(model))
    assert [m.training for m in model.modules()] == modes
    assert dict(model.named_modules()) == before
    with pytest.raises(ZeroDivisionError):
        model.quantize(smooth=0.5, calibrate=lambda: 1 / 0)
    assert dict(model.named_modules()) == before
    assert [m.training for m in model.modules()] == modes


def test_calibration_by_a_function_is_that_by_inputs():
    one, other = ours("bert"), ours("bert")
    one.quantize(smooth=0.5, calibrate=inputs(one))
    other.quantize(smooth=0.5, calibrate=lambda: other(**inputs(other)[0]))
    state = other.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in one.state_dict().items())
    assert any(key.endswith(".smooth") for key in state)


BAD = [
    ({"smooth": 1.5}, ValueError, "smooth: expected None or a number from 0 to 1, got 1.5"),
    ({"smooth": True}, ValueError, "smooth: expected None or a number"),
    ({"smooth": "0.5"}, ValueError, "smooth: expected None or a number"),
    ({"smooth": float("nan")}, ValueError, "smooth: expected None or a number"),
    (
        {"smooth": 0.5, "calibrate": None},
        ValueError,
        "calibrate: expected typical inputs with smooth, got None",
    ),
    ({"smooth": None}, ValueError, "calibrate: expected None without smooth or activations='static'"),
    ({"activations": "float"}, ValueError, "smooth: expected None with activations='float', got 0.5"),
    (
        {"activations": "static", "smooth": None, "calibrate": None},
        ValueError,
        "calibrate: expected typical inputs with activations='static', got None",
    ),
    ({"activations": "none"}, ValueError, "activations: expected 'dynamic', 'static', 'float', got 'none'"),
    ({"activations": None}, ValueError, "activations: expected 'dynamic', 'static', 'float', got None"),
    (
        {"weights": None, "embeddings": "int8", "activations": "static"},
        ValueError,
        "activations: expected 'dynamic' without weights, got 'static'",
    ),
    ({"weights": "fp8", "activations": "float"}, ValueError, "activations: expected 'dynamic' with fp8"),
    ({"calibrate": []}, ValueError, "calibrate: expected at least one input"),
    ({"calibrate": [3]}, TypeError, "calibrate: expected dicts of inputs, got int"),
]


@pytest.mark.parametrize(("change", "kind", "words"), BAD, ids=lambda value: "")
def test_bad_calibration(change, kind, words):
    model = ours("bert")
    given = {"smooth": 0.5, "calibrate": inputs(model), **change}
    with pytest.raises(kind, match=f"^{words}"):
        model.quantize(**given)
    assert not quantized.is_quantized(model)


def test_inputs_that_are_not_finite():
    model = ours("bert")
    with torch.no_grad():
        model.layer_list()[1].intermediate.dense.bias[0] = float("inf")
    with pytest.raises(
        ValueError, match=r"^calibrate: expected finite inputs of encoder\.layer\.1\.output\.dense"
    ):
        model.quantize(smooth=0.5, calibrate=inputs(model))


# --- files --------------------------------------------------------------------------------------------------


def test_files(tmp_path):
    model = smoothed()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["smooth"] == "one float32 factor per input"
    loaded = fastbert.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(hidden(loaded), hidden(model))
    assert "smooth=True" in repr(loaded)
    half = fastbert.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(m.smooth.dtype == torch.float32 for m in layers_of(half).values())
    plain = ours("bert").quantize()
    plain.save_pretrained(tmp_path / "plain")
    assert "smooth" not in json.loads((tmp_path / "plain" / "config.json").read_text())["quantization_config"]
    state, key = load_file(tmp_path / "model.safetensors"), "encoder.layer.1.output.dense.smooth"
    for bad in (-state[key], state[key].double(), state[key] * float("nan")):
        save_file({**state, key: bad}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"encoder\.layer\.1\.output\.dense\.smooth.*expected"):
            fastbert.AutoModel.from_pretrained(tmp_path)
    del state[key]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing keys: encoder\.layer\.1\.output\.dense\.smooth"):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_the_weight_in_floating_point():
    model, full = smoothed(), ours("bert")
    for name, module in layers_of(full).items():
        made = model.get_submodule(name)
        assert type(made) is QuantizedLinear
        step = made.scale[:, None] * made.smooth
        assert ((made.dequantized() - module.weight).abs() <= 0.501 * step).all()
