"""`model.quantize("int8")`: what is replaced, and what is refused; no training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fastbert
from fastbert.layers.quantized import QuantizedLinear, is_quantized
from fastbert.layers.quantizing import kinds_of
from fastbert.models.config import EncoderConfig
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.quantized_models import FLOATS, alike, hidden, hook, ours

# --- quantize -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_layers_are_replaced_and_nothing_else(family):
    full = ours(family)
    model = copy.deepcopy(full)
    linears = {n for n, m in model.named_modules() if type(m) is nn.Linear}
    ends = tuple(f".{path}" for path in model.layer_list()[0].form.linears)
    assert {*model.family.layer.linears} <= {*model.layer_list()[0].form.linears}
    in_layers = {n for n in linears if n.startswith(model.family.layers + ".") and n.endswith(ends)}
    assert model.quantize() is model
    int8 = {n for n, m in model.named_modules() if type(m) is QuantizedLinear}
    assert int8 == in_layers
    assert {n for n, m in model.named_modules() if type(m) is nn.Linear} == linears - in_layers
    shared = model.family.shared_layers
    groups = 4 if family == "albert-groups" else 1
    each = len({*model.layer_list()[0].form.linears})
    assert len(int8) == each * (groups if shared else model.config.num_hidden_layers)
    for n in int8:  # each from its own original
        expected = QuantizedLinear.from_linear(full.get_submodule(n))
        found = model.get_submodule(n)
        assert all(torch.equal(a, b) for a, b in zip(found.buffers(), expected.buffers(), strict=True))
    kept = batch(family)["attention_mask"].bool()
    # A product of two halves has outliers, which widen the range of its row
    least = 0.99 if model.layer_list()[0].form.names.gate is None else 0.9
    alike(hidden(model), hidden(full), kept, least)
    assert model.num_parameters() == full.num_parameters()
    assert model.num_parameters(only_trainable=True) == 0
    assert "QuantizedLinear(in_features=48, out_features=48, bias=" in repr(model)


def test_dtypes_of_the_rest(bert):
    full, kept = hidden(bert), batch("bert")["attention_mask"].bool()
    for dtype in (*FLOATS[1:], torch.float64):
        before, after = copy.deepcopy(bert).to(dtype).quantize(), copy.deepcopy(bert).quantize().to(dtype)
        for model in (before, after):
            assert model.dtype == dtype
            y = hidden(model)
            assert y.dtype == dtype
            alike(y, full, kept)
        scale = after.layer_list()[0].intermediate.dense.scale
        assert scale.dtype == torch.float32
        assert torch.equal(scale, copy.deepcopy(bert).quantize().layer_list()[0].intermediate.dense.scale)
    with torch.autocast("cpu", torch.bfloat16):
        y = hidden(bert.quantize())
    alike(y, full, kept)


def test_twice_is_once(bert):
    bert.quantize("int8")
    expected = hidden(bert)
    parts = [m for m in bert.modules() if isinstance(m, QuantizedLinear)]
    bert.layer_list()[0].output.dense.register_forward_hook(lambda *a: None)  # hooks are allowed from now on
    assert bert.quantize("int8") is bert
    assert [m for m in bert.modules() if isinstance(m, QuantizedLinear)] == parts
    torch.testing.assert_close(hidden(bert), expected)


@pytest.mark.parametrize("value", ["int3", "INT8", "", 8, torch.int8, ["int8"]], ids=repr)
@pytest.mark.parametrize("name", ["weights", "embeddings"])
def test_unknown_modes(bert, name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected 'int8', 'int4' or None, got "):
        bert.quantize(**{name: value})
    with pytest.raises(ValueError, match=r"^weights, embeddings: expected at least one"):
        bert.quantize(None)
    assert not is_quantized(bert)


def test_other_bits_than_there_are_already(bert):
    bert.quantize("int8", embeddings="int4")
    for given in ({"weights": "int4"}, {"weights": None, "embeddings": "int8"}):
        with pytest.raises(ValueError, match=r"^(weights|embeddings): .* has [84] bits already, got 'int"):
            bert.quantize(**given)
    assert kinds_of(bert) == ("int8", "int4")
    assert kinds_of(bert.quantize()) == ("int8", "int4")


def test_models_without_values_are_refused():
    with torch.device("meta"):
        model = fastbert.AutoModel.from_config(EncoderConfig("bert", hidden_size=24, num_attention_heads=2))
    words = r"^model: on meta, where weights have no values: load its weights"
    with pytest.raises(ValueError, match=words):
        model.quantize()
    assert not is_quantized(model)


class Adapted(nn.Linear):
    """A stand-in for LoRA: another class in the place of nn.Linear."""


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (hook, "nn.Linear, got Linear with hooks"),
        (lambda m: m.register_forward_pre_hook(lambda *_: None), "got Linear with hooks"),
        (
            lambda m: parametrize.register_parametrization(m, "weight", nn.Identity()),
            "got ParametrizedLinear",
        ),
        (lambda m: setattr(m, "__class__", Adapted), "got Adapted"),
        (lambda m: setattr(m, "forward", lambda x: x), "got Linear with hooks"),
        (nn.utils.weight_norm, "got Linear with hooks"),
        (lambda m: m.weight.data[0].fill_(torch.nan), r"\.weight: holds NaN"),
    ],
    ids=["hook", "pre-hook", "parametrize", "adapt", "wrap", "weight_norm", "not finite"],
)
@pytest.mark.parametrize("cls", ["AutoModel", "AutoModelForMaskedLM"])
def test_what_cannot_be_quantised_is_refused_by_name(change, words, cls):
    model = ours("bert", cls)
    change(model.base_model.layer_list()[1].attention.output.dense)
    before = {n: type(m) for n, m in model.named_modules()}
    path = ("" if cls == "AutoModel" else r"bert\.") + r"encoder\.layer\.1\.attention\.output\.dense"
    with pytest.raises((TypeError, ValueError), match=f"^{path}.*{words}"):
        model.quantize()
    assert {n: type(m) for n, m in model.named_modules()} == before
    assert all(p.requires_grad for p in model.parameters())
    model.train()


@pytest.mark.parametrize("count", [0, 1])
def test_a_fresh_model_of_few_layers_is_put_in_eval_mode(count):
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": count}
    model = fastbert.BertModel(EncoderConfig("bert", **sizes))
    assert model.training
    assert model.quantize() is model
    assert not any(m.training for m in model.modules())
    assert model(torch.tensor([[1, 2]])).last_hidden_state.shape == (1, 2, 24)


# --- no training --------------------------------------------------------------------------------------------


def test_train_is_refused_and_changes_nothing():
    model = ours("bert", "AutoModelForSequenceClassification").quantize()
    for owner in (model, model.base_model):
        words = r"^train: Bert\w+ is quantised to 8 bits.*cannot be trained.*quantise it"
        with pytest.raises(RuntimeError, match=words):
            owner.train()
        with pytest.raises(RuntimeError, match="cannot be trained"):
            owner.train(True)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        nn.Sequential(model).train()
    assert not any(m.training for m in model.modules())
    assert model.train(False) is model
    assert model.eval() is model


def test_init_weights_is_refused():
    model = ours("bert", "AutoModelForSequenceClassification").quantize()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"^init_weights: .*quantised"):
        model.init_weights()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model.init_weights(model.classifier)  # a part without integers is allowed
    assert not torch.equal(model.classifier.weight, before["classifier.weight"])


def test_no_gradient_for_parts_only():
    model = ours("bert", "AutoModelForSequenceClassification").quantize()
    inputs = batch("bert")
    inputs["attention_mask"][1] = 1
    assert not any(p.requires_grad for p in model.parameters())
    output = model(**inputs, labels=torch.tensor([0, 1, 1, 0]))  # gradients are enabled
    assert not output.loss.requires_grad
    assert not output.logits.requires_grad
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, output.logits)
    model.bert.embeddings.word_embeddings.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"^x: requires a gradient.*cannot be trained.*no_grad"):
        model(**inputs)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, output.logits)
    model.requires_grad_(False)
    model.bert.layer_list()[1].output.LayerNorm.requires_grad_(True)  # in the middle: layer 2 comes after it
    with pytest.raises(RuntimeError, match="x: requires a gradient"):
        model(**inputs)
    model.requires_grad_(False)
    embeds = torch.randn(2, 5, 48, requires_grad=True)
    with pytest.raises(RuntimeError, match="x: requires a gradient"):
        model(inputs_embeds=embeds)
