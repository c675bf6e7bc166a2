"""fastbert.ops.rotary: against complex numbers and transformers, layouts, refusals, gradients, compiled."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops.rotary import rotary
from fastbert.testing.op_cases.rotary import RotaryCase
from tests.support.ops import assert_compiled_is_eager, pinned

backend = pinned("rotary")
LENGTHS = (3, 0, 1, 5)


def inputs_of(dtype=torch.float32, **options):
    case = RotaryCase(LENGTHS, **{"heads": 2, "headdim": 6, "rotary_dim": 4} | options)
    return case.inputs(dtype, "cpu")


@pytest.mark.parametrize("interleaved", [False, True])
def test_is_a_product_of_complex_numbers(backend, interleaved):
    """Each pair times e^(i angle), for packed rows, for padded ones, and the rest of the head as it was."""
    inputs = inputs_of(torch.float32)
    x, cos, sin, positions = inputs.values()
    y = rotary(**inputs, interleaved=interleaved)
    assert (y.dtype, y.shape, y.is_contiguous()) == (x.dtype, x.shape, True)
    columns = ([0, 2], [1, 3]) if interleaved else ([0, 1], [2, 3])
    pair = torch.complex(*(x[..., c].contiguous() for c in columns))
    turned = pair * torch.complex(cos, sin)[positions].unsqueeze(1)
    for c, part in zip(columns, (turned.real, turned.imag), strict=True):
        torch.testing.assert_close(y[..., c], part, rtol=1e-6, atol=1e-6)
    assert torch.equal(y[..., 4:], x[..., 4:])
    longest = x[4:9]  # the positions 0 to 4
    assert torch.equal(rotary(longest[None], cos, sin, interleaved=interleaved)[0], y[4:9])
    both = rotary(x[None], cos, sin, positions[None], interleaved=interleaved)
    assert torch.equal(both[0], y)


def test_equals_transformers(backend):
    modernbert = pytest.importorskip("transformers.models.modernbert.modeling_modernbert")
    x, cos, sin, positions = inputs_of(rotary_dim=None).values()
    wide = (torch.cat((t, t), -1)[positions][None] for t in (cos, sin))
    expected, _ = modernbert.apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *wide)
    y = rotary(x, cos, sin, positions)
    torch.testing.assert_close(y, expected[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_turns_back_and_differentiates_twice(backend, interleaved):
    x, cos, sin, positions = inputs_of(torch.float64).values()
    if backend == "cpu":
        pytest.skip("it does not store float64")
    function = lambda t: rotary(t, cos, sin, positions, interleaved=interleaved)  # noqa: E731
    x = x.detach().requires_grad_()
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
    (dx,) = torch.autograd.grad(function(x), x, function(x.detach()))
    torch.testing.assert_close(dx, x.detach(), rtol=1e-14, atol=1e-14)


def test_forward_mode_and_vmap():
    """The tangent is rotated as `x` is; a batch of packed rows is rotated row by row."""
    x, cos, sin, positions = inputs_of().values()
    y = rotary(x, cos, sin, positions)
    _, tangent = torch.func.jvp(lambda t: rotary(t, cos, sin, positions), (x,), (x,))
    torch.testing.assert_close(tangent, y, rtol=1e-6, atol=1e-6)
    both = torch.func.vmap(lambda t: rotary(t, cos, sin, positions))(torch.stack((x, x)))
    torch.testing.assert_close(both, torch.stack((y, y)), rtol=1e-6, atol=1e-6)


def test_autocast_keeps_the_dtype(backend):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = inputs_of(dtype)
        expected = rotary(**inputs)
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(rotary(**inputs), expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_compiled_is_eager(interleaved, padded):
    def inputs_of(size):
        lengths = (size, size) if padded else (size, 3)
        case = RotaryCase(lengths, 3, 12, interleaved=interleaved, padded=padded)
        x, *tables = (t for t in case.inputs(torch.float32, "cpu").values() if t is not None)
        return x.detach().requires_grad_(), *tables

    assert_compiled_is_eager(lambda *args: rotary(*args, interleaved=interleaved), inputs_of, (7, 10))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(9, 6)}, ValueError, r"x: expected shape \(total, heads, headdim\) or"),
        ({"cos": torch.zeros(5, 2).bfloat16()}, TypeError, "cos: expected torch.float32 for torch.float32 x"),
        ({"sin": torch.zeros(5, 2).double()}, TypeError, "sin: expected torch.float32"),
        ({"cos": torch.zeros(5, 4)}, ValueError, "cos: expected .* rotary_dim from 2 to headdim 6"),
        ({"cos": torch.zeros(5, 0)}, ValueError, "cos: expected"),
        ({"sin": torch.zeros(6, 2)}, ValueError, r"sin: expected shape \(5, 2\), got \(6, 2\)"),
        ({"cos": torch.zeros(5, 2, requires_grad=True)}, ValueError, "cos: .* requires no gradient"),
        ({"positions": None}, ValueError, "positions: expected one position per row of a packed x, got None"),
        ({"positions": torch.zeros(8, dtype=torch.int32)}, ValueError, r"positions: expected shape \(9,\)"),
        ({"positions": torch.zeros(9)}, TypeError, "positions: expected int64 or int32"),
        ({"positions": torch.arange(9)}, ValueError, "positions: position 8 is out of range for tables of 5"),
        ({"positions": -torch.arange(9)}, ValueError, "positions: position -8 is out of range"),
        ({"x": torch.zeros(1, 6, 2, 6), "positions": None}, ValueError, "cos: expected a row for each of 6"),
    ],
)
def test_refuses(change, error, words):
    with pytest.raises(error, match=words):
        rotary(**inputs_of() | change)


def test_positions_changed_before_backward_are_refused():
    x, cos, sin, positions = inputs_of().values()
    y = rotary(x.detach().requires_grad_(), cos, sin, positions)
    positions.data[1] = 2**20
    with pytest.raises(ValueError, match="positions: position 1048576 is out of range"):
        y.sum().backward()


def test_nothing_to_rotate(backend):
    _, cos, sin, positions = inputs_of().values()
    for shape in ((0, 2, 6), (9, 0, 6)):
        x = torch.zeros(shape, requires_grad=True)
        y = rotary(x, cos, sin, positions[: shape[0]])
        y.sum().backward()
        assert y.shape == x.grad.shape == shape
    assert rotary(torch.zeros(0, 3, 2, 6), cos, sin).shape == (0, 3, 2, 6)
    assert rotary(torch.zeros(2, 0, 2, 6), cos[:0], sin[:0]).shape == (2, 0, 2, 6)
