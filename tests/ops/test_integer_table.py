"""Tables of integers: rounding, packing, and `embedding` on them with all that callers may pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastbert.ops import integer_table
from fastbert.ops.embedding import embedding, embedding_fwd, embedding_ref
from tests.support.inputs import name, randn
from tests.support.ops import HALF, assert_compiled_is_eager, pinned

backend = pinned("embedding")
IDS = torch.tensor([[3, 0, 3, 10], [1, 3, 0, 0]])


def words(hidden=12, bits=8):
    integers, scale = integer_table.rounded(randn(11, hidden), bits)
    return integers if bits == 8 else integer_table.packed(integers), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name)
@pytest.mark.parametrize("bits", [8, 4])
def test_rounding(bits, dtype):
    weight = randn(30, 17, dtype=dtype)
    weight[3] = 0
    weight[4] *= 100
    weight[5] = 2.0**-130
    integers, scale = integer_table.rounded(weight, bits)
    most, wide = {8: 127, 4: 7}[bits], weight.float().numpy()
    expected = np.abs(wide).max(1) / np.float32(most)
    expected[expected < 2.0**-126] = 1
    assert np.array_equal(scale.numpy(), expected)
    assert np.array_equal(integers.numpy(), np.rint(wide / expected[:, None]))
    assert integers.dtype == torch.int8
    assert integers.abs().amax() == most
    assert not integers[3].any()


@pytest.mark.parametrize("width", [1, 2, 7, 16, 33])
def test_packing_is_exact(width):
    integers = torch.arange(-8, 8).repeat(width)[: 16 * width].reshape(16, width).to(torch.int8)
    table = integer_table.packed(integers)
    assert table.shape == (16, (width + 1) // 2)
    assert table.dtype == torch.uint8
    # Column 0 in the low half, column 1 in the high half
    for i in range(16):
        high = int(integers[i, 1]) + 8 if width > 1 else 8
        assert int(table[i, 0]) == int(integers[i, 0]) + 8 + 16 * high
    assert torch.equal(integer_table.unpacked(table, width), integers)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=name)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("hidden", [3, 5, 12])
def test_the_same_as_the_table_in_floats(backend, hidden, bits, dtype):
    table, scale = words(hidden, bits)
    w, b, position = (randn(*shape, dtype=dtype) for shape in ((hidden,), (hidden,), (4, hidden)))
    places = {"position_ids": torch.arange(4)[None], "position": position}
    y = embedding(IDS, table, w, b, word_scale=scale, padding_idx=0, **places)
    floats = integer_table.looked_up(table, scale, torch.arange(11), hidden, torch.float64)
    right = embedding_ref(IDS, floats, w.double(), b.double(), places["position_ids"], position.double())
    assert (y.shape, y.dtype) == ((2, 4, hidden), dtype)
    steps = torch.finfo(dtype).eps if dtype in HALF else 1e-5
    torch.testing.assert_close(y.double(), right, rtol=steps, atol=steps)
    embeds = randn(2, 4, hidden, dtype=dtype)
    with_embeds = embedding(None, table, w, b, word_scale=scale, inputs_embeds=embeds, **places)
    assert torch.equal(with_embeds, embedding(None, None, w, b, inputs_embeds=embeds, **places))


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_of_all_else(backend, bits):
    table, scale = words(bits=bits)
    leaves = [randn(12, grad=True), randn(12, grad=True), randn(4, 12, grad=True)]

    def loss(word, **more):
        y = embedding(IDS, word, *leaves[:2], position_ids=torch.arange(4), position=leaves[2], **more)
        return torch.autograd.grad(y.square().sum(), leaves)

    floats = integer_table.looked_up(table, scale, torch.arange(11), 12, torch.float32)
    for found, right in zip(loss(table, word_scale=scale), loss(floats), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_is_eager(bits):
    table, scale = words(bits=bits)

    def step(ids, w, b):
        return embedding(ids, table, w, b, word_scale=scale)

    leaves = randn(12, grad=True), randn(12, grad=True)
    assert_compiled_is_eager(step, lambda n: (torch.randint(11, (n, 4)), *leaves), (3, 5, 7))


BAD = {
    "floats": ({"word": torch.ones(11, 12)}, TypeError, "word: expected int8 or uint8, because word_scale"),
    "other width": ({"word": torch.ones(11, 13, dtype=torch.int8)}, ValueError, r"word: expected shape \(11"),
    "whole bytes": ({"word": torch.ones(11, 12, dtype=torch.uint8)}, ValueError, r"word: .*\(11, 6\)"),
    "no table": ({"word": None}, TypeError, "word: expected a torch.Tensor, got NoneType"),
    "few scales": ({"word_scale": torch.ones(10)}, ValueError, r"word_scale: expected shape \(11,\)"),
    "half scales": ({"word_scale": torch.ones(11).half()}, TypeError, "word_scale: expected float32"),
    "a number": ({"word_scale": 1.0}, TypeError, "word_scale: expected a torch.Tensor, got float"),
    "no scales": ({"word_scale": None}, TypeError, "word: expected float32, .*got torch.int8"),
    "another dtype": (
        {"position": torch.ones(4, 12).half(), "position_ids": torch.arange(4)},
        TypeError,
        "position: .*ln_weight",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    table, scale = words()
    change, kind, message = BAD[case]
    given = {"word": table, "word_scale": scale, **change}
    with pytest.raises(kind, match=message):
        embedding(IDS, given.pop("word"), torch.ones(12), torch.ones(12), **given)


@pytest.mark.parametrize("case", ["floats", "other width", "few scales"])
def test_bad_arguments_of_the_custom_op(case):
    table, scale = words()
    change, kind, message = BAD[case]
    given = {"word": table, "word_scale": scale, **change}
    rest = (None,) * 4, torch.ones(12), torch.ones(12), -1, 1e-12, 0.0, None, 0
    with pytest.raises(kind, match=message):
        embedding_fwd(IDS[0], None, given["word"], *rest[0], *rest[1:], given["word_scale"], False)
    embeds = torch.ones(4, 12)
    with pytest.raises(ValueError, match="word_scale: expected None, because inputs_embeds"):
        embedding_fwd(None, embeds, table, *rest[0], *rest[1:], scale, False)
