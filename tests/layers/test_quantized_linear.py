"""`QuantizedLinear`: its integers and scales, casts, states and refusals."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from fastbert.layers.quantized import QuantizedLinear
from fastbert.ops.linear_int8 import linear_int8
from tests.support.inputs import name
from tests.support.quantized_models import FLOATS


def random_linear(width=24, out=10, bias=True, dtype=torch.float32):
    torch.manual_seed(width)
    return nn.Linear(width, out, bias=bias).to(dtype)


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
    if not any(word in message for word in ("Missing", "Unexpected", "size")):  # PyTorch's own copy
        assert torch.equal(made.weight, before.weight)
        assert torch.equal(made.scale, before.scale)
