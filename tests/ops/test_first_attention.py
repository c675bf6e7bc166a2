"""fastbert.ops.first_attention: the Cases by the error rule, its edges, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops.attention import attention
from fastbert.ops.checks import FLOATS
from fastbert.ops.first_attention import CAST_FROM, first_attention, pays
from fastbert.runtime import dispatch
from fastbert.runtime.table import HALF
from fastbert.testing.op_cases.first_attention import FirstAttentionCase

BACKENDS = ("reference", "aten")


def operands(lengths=(5, 0, 9), dtype=torch.float64, **options):
    case = FirstAttentionCase(lengths, **options)
    return case.inputs(dtype, "cpu") | {"softmax_scale": case.softmax_scale}


@pytest.mark.parametrize("backend", BACKENDS)
def test_is_the_first_row_of_attention(backend):
    made = operands((5, 1, 9), bias="full", gate=True)
    x, nheads = made["x"], 3
    k = (x @ made["key_weight"].T + torch.randn(48, dtype=x.dtype)).unflatten(1, (nheads, 16))
    v = (x @ made["value_weight"].T + made["value_bias"]).unflatten(1, (nheads, 16))
    starts = made["cu_seqlens"][:-1].long()
    q = torch.zeros_like(k).index_copy(0, starts, made["q"])
    whole = attention(
        q,
        k,
        v,
        made["cu_seqlens"],
        9,
        softmax_scale=made["softmax_scale"],
        bias=made["bias"].expand(-1, -1, 9, -1),
        gate=made["gate"],
    )
    with dispatch.use_backend(first_attention=backend):
        torch.testing.assert_close(first_attention(**made), whole[starts].flatten(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_sequences_and_batches(backend):
    with dispatch.use_backend(backend):
        y = first_attention(**operands((4, 0, 0, 3)))
        assert not y[1:3].any()
        assert y[0].any()
        assert y[3].any()
        none = operands((3,)) | {"q": torch.zeros(0, 3, 16, dtype=torch.float64)}
        none["cu_seqlens"] = torch.zeros(1, dtype=torch.int32)
        assert first_attention(**none).shape == (0, 48)
        made = operands((0, 0))
        assert made["x"].shape == (0, 48)
        assert torch.equal(first_attention(**made), torch.zeros(2, 48, dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_the_end_are_not_read(backend):
    made = operands((5, 2), tail=4)
    assert made["x"][7:].isnan().all()
    with dispatch.use_backend(backend):
        y = first_attention(**made)
        assert torch.equal(y, first_attention(**made | {"x": made["x"].nan_to_num(1e30)}))
    assert y.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_broadcasts(backend):
    made = operands((5, 2, 5))
    bias = torch.randn(3, 3, 1, 5, dtype=torch.float64)
    with dispatch.use_backend(backend):
        for part in (bias[:1], bias[:, :1], bias[:, :, :, :1], bias[0]):
            whole = (part if part.dim() == 4 else part[None]).expand(3, 3, 1, 5)
            torch.testing.assert_close(
                first_attention(**made | {"bias": part}), first_attention(**made | {"bias": whole})
            )
        long = torch.cat((bias, torch.full((3, 3, 1, 4), torch.nan, dtype=torch.float64)), -1)
        assert torch.equal(first_attention(**made | {"bias": long}), first_attention(**made | {"bias": bias}))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(14)}, ValueError, "x: expected shape"),
        ({"q": torch.zeros(3, 3, 16)}, TypeError, "q: "),
        ({"q": torch.zeros(3, 48, dtype=torch.float64)}, ValueError, "q: expected shape"),
        ({"key_weight": torch.zeros(48, 48)}, TypeError, "key_weight: "),
        ({"value_weight": torch.zeros(47, 48, dtype=torch.float64)}, ValueError, "value_weight: "),
        ({"value_bias": torch.zeros(47, dtype=torch.float64)}, ValueError, "value_bias: "),
        ({"cu_seqlens": torch.tensor([0, 5, 5, 14])}, TypeError, "cu_seqlens: expected int32"),
        ({"cu_seqlens": torch.tensor([0, 5, 14], dtype=torch.int32)}, ValueError, "cu_seqlens: "),
        ({"cu_seqlens": torch.tensor([0, 5, 5, 15], dtype=torch.int32)}, ValueError, "cu_seqlens: "),
        ({"bias": torch.zeros(3, 3, 1, 8)}, ValueError, "bias: "),
        ({"gate": torch.ones(2)}, ValueError, "gate: "),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale: "),
        ({"max_seqlen": 8}, ValueError, "max_seqlen: expected at least the longest length 9, got 8"),
        ({"max_seqlen": 9.0}, TypeError, "max_seqlen: expected an int or None"),
        ({"max_seqlen": 10, "bias": torch.zeros(3, 3, 1, 9)}, ValueError, "bias: expected 10 keys or more"),
    ],
)
def test_refuses(change, error, words):
    with pytest.raises(error, match=words):
        first_attention(**operands() | change)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bound_of_the_lengths_changes_nothing(backend):
    made = operands((5, 0, 9), bias="full")
    made["bias"] = torch.cat((made["bias"], torch.full((3, 3, 1, 3), torch.nan, dtype=torch.float64)), -1)
    with dispatch.use_backend(backend):
        expected = first_attention(**made)
        for bound in (9, 12):
            assert torch.equal(first_attention(**made, max_seqlen=bound), expected)


def test_pays_where_no_weight_is_cast_or_many_tokens_share_the_cast():
    for dtype in FLOATS:
        wide = dtype not in HALF
        assert pays(torch.empty(CAST_FROM - 1, 4, dtype=dtype), 1) == wide
        assert pays(torch.empty(CAST_FROM, 4, dtype=dtype), CAST_FROM)
    assert not pays(torch.empty(CAST_FROM, 4, device="meta"), 1)


def test_pays_elsewhere_if_the_backend_that_serves_says_so(monkeypatch):
    """In half precision; no backend is asked in other dtypes, and none that serves has no say."""
    asked = []

    def serving(function, ops, device, dtype):
        asked.append((function, ops, device.type, dtype))
        return lambda x, batch: len(x) >= 2 * batch

    half, other = (torch.empty(8, 4, device="meta", dtype=d) for d in (torch.bfloat16, torch.float64))
    assert not pays(half, 4)  # by aten
    monkeypatch.setattr(dispatch, "serving_function", serving)
    assert pays(half, 4)
    assert not pays(half, 5)
    assert asked == 2 * [("first_attention_pays", ("first_attention",), "meta", torch.bfloat16)]
    assert not pays(other, 1)
    assert len(asked) == 2
    monkeypatch.setattr(dispatch, "serving_function", lambda *_: None)
    assert not pays(half, 1)
