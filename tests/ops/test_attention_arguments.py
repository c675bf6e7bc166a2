"""Bad arguments of `attention` are named, and its dtypes are the promised ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo.testing
from torch.nn import functional as F

from fastbert.ops.attention import attention, attention_ref
from fastbert.ops.attention_relative import RelativeScores
from fastbert.runtime import dispatch
from tests.support.attention_inputs import DOUBLE, PLAIN, grads_of, qkv, serving
from tests.support.inputs import ends_of

_Q = torch.zeros(6, 2, 8)
_PADDED = torch.zeros(2, 3, 2, 8)
_CU = ends_of([4, 2])
_COLUMNS = torch.tensor([0, 0, 1, 1, 2, 2, 2], dtype=torch.int32)


def _scores(name, error, **change):
    """A case of bad scores of distances."""
    good = RelativeScores(_COLUMNS, bias=torch.ones(2, 3))
    return rf"relative\.{name}", error, {"relative": good._replace(**change)}


BAD = {
    "q_2d": ("q", ValueError, {"q": _Q[0]}),
    "q_4d_with_cu_seqlens": ("q", ValueError, {"q": _PADDED}),
    "q_3d_without_cu_seqlens": ("q", ValueError, {"cu_seqlens": None, "max_seqlen": None}),
    "q_no_headdim": ("q", ValueError, {"q": _Q[..., :0]}),
    "k_dtype": ("k", TypeError, {"k": _Q.half()}),
    "k_shape": ("k", ValueError, {"k": _Q[:5]}),
    "k_heads": ("k", ValueError, {"k": _Q.repeat(1, 2, 1), "v": _Q.repeat(1, 2, 1)}),
    "k_no_heads": ("k", ValueError, {"k": _Q[:, :0], "v": _Q[:, :0]}),
    "v_heads": ("v", ValueError, {"v": _Q[:, :1]}),
    "cu_int64": ("cu_seqlens", TypeError, {"cu_seqlens": _CU.long()}),
    "cu_empty": ("cu_seqlens", ValueError, {"cu_seqlens": _CU[:0]}),
    "cu_start": ("cu_seqlens", ValueError, {"cu_seqlens": torch.tensor([1, 4], dtype=torch.int32)}),
    "cu_falls": ("cu_seqlens", ValueError, {"cu_seqlens": torch.tensor([0, 4, 3], dtype=torch.int32)}),
    "cu_beyond": ("cu_seqlens", ValueError, {"cu_seqlens": torch.tensor([0, 4, 7], dtype=torch.int32)}),
    "max_none": ("max_seqlen", TypeError, {"max_seqlen": None}),
    "max_float": ("max_seqlen", TypeError, {"max_seqlen": 4.0}),
    "max_negative": ("max_seqlen", ValueError, {"max_seqlen": -1}),
    "max_short": ("max_seqlen", ValueError, {"max_seqlen": 3}),
    "max_padded": ("max_seqlen", ValueError, {"q": _PADDED, "k": _PADDED, "v": _PADDED, "cu_seqlens": None}),
    "scale_nan": ("softmax_scale", ValueError, {"softmax_scale": math.nan}),
    "scale_text": ("softmax_scale", TypeError, {"softmax_scale": "0.1"}),
    "causal_int": ("causal", TypeError, {"causal": 1}),
    "window_int": ("window", TypeError, {"window": 64}),
    "window_list": ("window", TypeError, {"window": [64, 64]}),
    "window_one_side": ("window", TypeError, {"window": (64,)}),
    "window_float": ("window", TypeError, {"window": (64, 1.0)}),
    "window_bool": ("window", TypeError, {"window": (True, 1)}),
    "window_below": ("window", ValueError, {"window": (-2, 3)}),
    "bias_bool": ("bias", TypeError, {"bias": torch.ones(2, 4, 4, dtype=torch.bool)}),
    "bias_2d": ("bias", ValueError, {"bias": torch.zeros(4, 4)}),
    "bias_heads": ("bias", ValueError, {"bias": torch.zeros(3, 4, 4)}),
    "bias_keys": ("bias", ValueError, {"bias": torch.zeros(2, 4, 5)}),
    "relative_tuple": ("relative", TypeError, {"relative": (_COLUMNS, None, None, torch.ones(2, 3))}),
    "relative_nothing": ("relative", ValueError, {"relative": RelativeScores(_COLUMNS)}),
    "columns_int64": _scores("columns", TypeError, columns=_COLUMNS.long()),
    "columns_none": _scores("columns", TypeError, columns=None),
    "columns_even": _scores("columns", ValueError, columns=_COLUMNS[:6]),
    "columns_short": _scores("columns", ValueError, columns=_COLUMNS[:5]),
    "columns_beyond": _scores("columns", ValueError, columns=_COLUMNS + 1),
    "columns_below": _scores("columns", ValueError, columns=_COLUMNS - 1),
    "scores_of_query": _scores("query", ValueError, query=torch.ones(6, 1, 3)),
    "scores_of_key": _scores("key", ValueError, key=torch.ones(5, 2, 3)),
    "scores_int": _scores("key", TypeError, key=torch.ones(6, 2, 3, dtype=torch.int64)),
    "scores_alone": _scores("bias", ValueError, bias=torch.ones(2)),
    "positions": _scores("positions", ValueError, positions=torch.zeros(1, 4, dtype=torch.int64)),
    "gate_shape": ("gate", ValueError, {"gate": torch.ones(3)}),
    "dropout_one": ("dropout_p", ValueError, {"dropout_p": 1.0, "seed": torch.tensor([1])}),
    "seed_none": ("seed", ValueError, {"dropout_p": 0.1}),
    "seed_int": ("seed", ValueError, {"dropout_p": 0.1, "seed": 3}),
    "offset_negative": ("offset", ValueError, {"dropout_p": 0.1, "seed": torch.tensor([1]), "offset": -1}),
}


@pytest.mark.parametrize(("argument", "error", "change"), BAD.values(), ids=BAD)
def test_bad_input_is_named(argument, error, change):
    arguments = {"q": _Q, "k": _Q, "v": _Q, "cu_seqlens": _CU, "max_seqlen": 4}
    attention(**arguments)  # the call runs without the change
    with pytest.raises(error, match=rf"^{argument}: .*expected.*got|^{argument}: .*needs.*got"):
        attention(**(arguments | change))


def test_the_reference_names_a_missing_length():
    with pytest.raises(TypeError, match=r"^max_seqlen: expected .*got None"):
        attention_ref(_Q, _Q, _Q, _CU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mixed", [False, True])
def test_autocast_casts_as_sdpa_does(dtype, mixed):
    q, k, v = qkv(6, 2, 8, dtype)
    if mixed and dtype != torch.float64:
        k = k.detach().float().requires_grad_()
    gate = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)))
        results = [attention(q, k, v, ends_of([6]), 6, gate=gate)]
        results.append(attention(q, k, v, ends_of([6]), 6, gate=gate, return_probs=True)[0])
    for out in results:
        assert out.dtype == expected.dtype
        grads = grads_of(out, (q, k, v, gate))
        assert [g.dtype for g in grads] == [dtype, k.dtype, dtype, torch.float32]
        tolerance = 1e-12 if dtype == torch.float64 else 0.03
        assert (out - expected.transpose(0, 1)).abs().max() < tolerance
    with torch.no_grad():  # the op itself casts nothing
        cast = (q, k, v) if dtype == torch.float64 else [t.bfloat16() for t in (q, k, v)]
        outside = attention(*cast, ends_of([6]), 6, gate=gate)
        for out in results:
            assert (out - outside).abs().max() <= (0 if out is results[0] else 2**-8 * outside.abs().max())


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", PLAIN)
def test_bias_and_gate_keep_their_own_dtype(backend, dtype, bias_dtype):
    if backend not in DOUBLE and dtype == torch.float64:
        with pytest.raises(dispatch.BackendError, match="float64"), serving(backend):
            attention(*qkv(6, 2, 8, dtype), ends_of([6]), 6)
        return
    q, k, v = qkv(6, 2, 8, dtype)
    bias = torch.randn(2, 6, 6).to(bias_dtype).requires_grad_()
    gate = torch.rand(2).to(bias_dtype).requires_grad_()
    with serving(backend):
        out = attention(q, k, v, ends_of([6]), 6, bias=bias, gate=gate)
        assert out.dtype == dtype
        dbias, dgate = grads_of(out, (bias, gate))
    assert dbias.dtype == dgate.dtype == bias_dtype
    wide = [t.detach().double() for t in (q, k, v)]
    truth = attention_ref(*wide, ends_of([6]), 6, bias=bias.double(), gate=gate.double())[0]
    assert (out - truth).abs().max() <= 4 * torch.finfo(dtype).eps * truth.abs().max() + 1e-6 * (
        dtype == torch.float32
    )
    assert (dbias - grads_of(truth.to(dtype), (bias,))[0]).abs().max() < 0.05
