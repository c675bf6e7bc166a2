"""`attention`: the error rule on every backend, and each known bug of such kernels as a test."""

from __future__ import annotations

import contextlib
import math
from itertools import accumulate, combinations

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from fastbert import testing
from fastbert.backends import aten
from fastbert.backends.aten import attention as aten_attention
from fastbert.ops.attention import (
    attention,
    attention_bwd,
    attention_fwd,
    attention_ref,
    from_grid,
    keep_mask,
    to_grid,
)
from fastbert.ops.dropout import philox_keep, philox_words
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.attention import AttentionCase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = tuple(
    b for b in dispatch.backends_for("attention", "cpu") if dispatch.has_backward(b, "attention")
)  # the others have a test file of their own
# "grid" is what `aten` runs on devices other than the CPU; being plain PyTorch, it can be tested here.
DOUBLE = ("reference", "aten", "grid")
PLAIN = (*DOUBLE, *(b for b in BACKENDS if b not in DOUBLE))


@contextlib.contextmanager
def serving(backend: str):
    """Pin a backend, or the dense-grid half of `aten`."""
    with pytest.MonkeyPatch.context() as patch:
        if backend == "grid":
            patch.setattr(aten, "attention_fwd", aten_attention._grid_fwd)
            patch.setattr(aten, "attention_bwd", aten_attention._grid_bwd)
        with dispatch.use_backend(attention="aten" if backend == "grid" else backend):
            yield


def ends(lengths) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def qkv(total: int, nheads: int = 2, headdim: int = 8, dtype=torch.float32, seed: int = 0):
    """Three leaves that want a gradient."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(total, nheads, headdim, generator=g).to(dtype).requires_grad_() for _ in range(3)]


def grads_of(out: torch.Tensor, inputs, seed: int = 7):
    g = torch.Generator().manual_seed(seed)
    return torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=g).to(out.dtype))


def assert_same(actual, expected):
    """Bit-equal, tensor by tensor; NaN equals nothing."""
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


def assert_near(actual, expected, tolerance):
    """Within `tolerance` times the largest expected magnitude, or 1: the scale of a sum's error."""
    scale = max(expected.detach().abs().flatten().tolist(), default=1.0)
    assert torch.allclose(actual, expected, rtol=0, atol=tolerance * max(1.0, scale))


# --- the error rule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", testing.cases("attention"), ids=lambda case: case.id)
@pytest.mark.parametrize("backend", [*BACKENDS, "grid"])
def test_error_rule(backend, case, dtype):
    name = "aten" if backend == "grid" else backend
    reason = dispatch.unsupported_reason(name, "attention", "cpu", DTYPES[dtype])
    if reason is not None:
        pytest.skip(f"{name} {reason}")
    with serving(backend):
        rows = testing.run_case(case, name, DTYPES[dtype])
    assert {row.quantity for row in rows} >= {"out", "dqkv" if case.packed_qkv else "dq"}
    assert not [f"{row.quantity}: {row.reason}" for row in rows if not row.passed]


@pytest.mark.parametrize("backend", PLAIN)
def test_float32_is_no_worse_than_eager_in_the_median(backend):
    ratios = []
    with serving(backend):
        for case in testing.cases("attention"):
            rows = testing.run_case(case, "aten" if backend == "grid" else backend, torch.float32)
            ratios += [row.mean_error / row.eager_mean_error for row in rows if row.eager_mean_error > 0]
    assert torch.tensor(ratios).median() <= 1.02  # equal sums in another order are worth a per cent of noise


def test_error_rule_fails_a_wrong_result():
    case = AttentionCase((9, 4), 2, 16)
    inputs = case.inputs(torch.float32, "cpu")
    truth = case.oracle(
        **{n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in inputs.items()}
    )
    wrong = case.call(**(inputs | {"k": inputs["k"].roll(1, 0)}))
    assert testing.compare(
        wrong, case.eager(**inputs)[0], truth[0], torch.float32, case.floor(inputs, "out")
    )[-1]


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [False, True])
def test_only_the_gradients_that_are_wanted(backend, dtype, options):
    """One by one they are those of all together, and what is not wanted is not made."""
    lengths, seed = (5, 0, 9), torch.tensor([3])
    q, k, v = qkv(16, 2, 8, DTYPES[dtype])
    bias = torch.randn(3, 1, 9, 9, requires_grad=True) if options else None
    gate = torch.rand(2, requires_grad=True) if options else None
    inputs = {"q": q, "k": k, "v": v} | ({"bias": bias, "gate": gate} if options else {})
    tolerance = 1e-5 if dtype == "fp32" else 2**-7  # aten has another kernel for all at once
    made, call = [], dispatch.call

    def spy(function, key, *args):
        output = call(function, key, *args)
        if function == "attention_bwd":
            made.append([t.numel() > 0 for t in output])
        return output

    def gradients(names):
        for name, t in inputs.items():
            t.requires_grad_(name in names)
        drop = {"dropout_p": 0.3, "seed": seed} if options else {}
        out = attention(q, k, v, ends(lengths), 9, bias=bias, gate=gate, **drop)
        return grads_of(out, [inputs[name] for name in names])

    with serving(backend), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "call", spy)
        every = dict(zip(inputs, gradients(inputs), strict=True))
        for size in (1, 2):
            for names in combinations(inputs, size):
                for name, gradient in zip(names, gradients(names), strict=True):
                    assert_near(gradient, every[name], tolerance)
                assert made[-1] == [name in names for name in ("q", "k", "v", "bias", "gate")]


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_length(backend, dtype):
    lengths = tuple(range(1, 131))
    with serving(backend):
        rows = testing.run_case(
            AttentionCase(lengths, 1, 16), "aten" if backend == "grid" else backend, DTYPES[dtype]
        )
    assert not [row for row in rows if not row.passed]


@pytest.mark.parametrize("backend", PLAIN)
def test_every_length_alone_is_as_in_a_batch(backend):
    dtype, tolerance = (torch.float64, 1e-12) if backend in DOUBLE else (torch.float32, 5e-6)
    with serving(backend):
        for n in (*range(1, 131), 511, 512):
            inputs = qkv(n, 1, 16, torch.float64, seed=n)
            out = attention(*(t.to(dtype) for t in inputs), ends([n]), n)
            expected = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in inputs)).transpose(0, 1)
            pairs = zip((out, *grads_of(out, inputs)), (expected, *grads_of(expected, inputs)), strict=True)
            assert all((a.double() - e).abs().max() < tolerance for a, e in pairs), n


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_integers_are_exact(backend, dtype):
    g = torch.Generator().manual_seed(0)
    for n in (1, 2, 4, 8):  # equal scores: means of n integers, and dv sums of n integers over n
        q = torch.zeros(n, 2, 16, dtype=DTYPES[dtype], requires_grad=True)
        k = torch.randint(-3, 4, q.shape, generator=g).to(q.dtype).requires_grad_()
        v = torch.randint(-7, 8, q.shape, generator=g).to(q.dtype).requires_grad_()
        dout = torch.randint(-3, 4, q.shape, generator=g).to(q.dtype)
        with serving(backend):
            out, lse = attention(q, k, v, ends([n]), n, return_lse=True)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        assert torch.equal(out, v.detach().double().mean(0).expand(n, 2, 16).to(q.dtype))
        assert torch.equal(dv, dout.double().mean(0).expand(n, 2, 16).to(q.dtype))
        assert torch.equal(dk, torch.zeros_like(k))
        assert torch.allclose(lse, torch.full_like(lse, math.log(n)), rtol=0, atol=1e-6)
        p = 1 / n
        dscores = p * (
            torch.einsum("ihd,jhd->hij", dout.double(), v.double())
            - (dout.double() * out.double()).sum(-1).t().unsqueeze(-1)
        )
        truth = torch.einsum("hij,jhd->ihd", dscores, k.double()) * 0.25  # headdim 16
        assert (dq.double() - truth).abs().max() <= truth.abs().max() * torch.finfo(q.dtype).eps


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_that_leaves_one_key_picks_its_value(backend, dtype):
    n = 11
    q, k, v = qkv(n, 2, 16, DTYPES[dtype])
    picked = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    bias = torch.full((2, n, n), -math.inf)
    bias[:, torch.arange(n), picked] = 1.5
    with serving(backend):
        out = attention(q, k, v, ends([n]), n, bias=bias)
        dq, dk, dv = grads_of(out, (q, k, v))
    assert torch.equal(out, v[picked])
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    # Triton's backward computes the scores anew, in other tiles: float32 sums may come out otherwise.
    near = 1e-6 if (backend, dtype) == ("triton", "fp32") else 0.0
    torch.testing.assert_close(dv[picked], dout, rtol=near, atol=0.0)
    assert max(dq.abs().max(), dk.abs().max()) <= 64 * torch.finfo(q.dtype).eps  # dP - delta cancels


# --- autograd and torch.compile -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", DOUBLE)
@pytest.mark.parametrize("options", ["plain", "causal", "bias_gate", "masked", "dropout_bias_gate"])
def test_gradcheck(backend, options):
    lengths = (3, 0, 4)
    inputs = qkv(8, 2, 3, torch.float64)
    g = torch.Generator().manual_seed(1)
    bias = gate = None
    if "bias" in options or options == "masked":
        bias = torch.randn(3, 1, 5, 5, generator=g, dtype=torch.float64)
        if options == "masked":
            bias[0, 0, 1] = -math.inf
            bias[2, 0, :, 0] = -math.inf
        bias.requires_grad_(options != "masked")
    if "gate" in options:
        gate = torch.tensor([0.0, 1.3], dtype=torch.float64, requires_grad=True)
    dropout = {"dropout_p": 0.3, "seed": torch.tensor([9])} if "dropout" in options else {}

    def function(q, k, v, bias, gate):
        return attention(
            q, k, v, ends(lengths), 5, causal=options == "causal", bias=bias, gate=gate, **dropout
        )

    with serving(backend):
        assert torch.autograd.gradcheck(function, (*inputs, bias, gate))


def test_probs_are_differentiable_and_lse_is_not():
    q, k, v = qkv(7, 2, 3, torch.float64)
    gate = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    seed = torch.tensor([4])

    def function(q, k, v, gate):
        out, probs = attention(
            q, k, v, ends([4, 3]), 4, gate=gate, dropout_p=0.4, seed=seed, return_probs=True
        )
        return out, probs

    assert torch.autograd.gradcheck(function, (q, k, v, gate))
    out, lse, probs = attention(q, k, v, ends([4, 3]), 4, return_lse=True, return_probs=True)
    assert not lse.requires_grad
    assert probs.requires_grad
    with torch.no_grad():
        for backend in PLAIN:
            dtype, tolerance = (torch.float64, 1e-12) if backend in DOUBLE else (torch.float32, 1e-6)
            with serving(backend):
                served = attention(
                    *(t.to(dtype) for t in (q, k, v)), ends([4, 3]), 4, return_lse=True, return_probs=True
                )
            for a, e in zip(served, (out, lse, probs), strict=True):
                assert torch.allclose(a.double(), e, rtol=0, atol=tolerance)
    assert not attention(q, k, v, ends([4, 3]), 4, return_lse=True)[1].requires_grad
    assert torch.allclose(
        probs.sum(-1), (torch.arange(4) < torch.tensor([[4], [3]])).double().unsqueeze(1).expand(2, 2, 4)
    )


def test_second_derivative_is_refused():
    inputs = qkv(4)
    out = attention(*inputs, ends([4]), 4)
    (dq,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        dq.sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "gate": True},
        {"dropout_p": 0.2},
        {"dropout_p": 0.2, "save_bits": True},
        {"return_probs": True},
    ],
)
@pytest.mark.parametrize("backend", PLAIN)
def test_opcheck(backend, options):
    q, k, v = qkv(9, 2, 4)
    bias = torch.randn(1, 2, 5, 5, requires_grad=True) if "bias" in options else None
    gate = torch.rand(2, requires_grad=True) if "gate" in options else None
    p = options.get("dropout_p", 0.0)
    seed = torch.tensor([3]) if p else None
    probs = options.get("return_probs", False)
    with serving(backend):
        args = (q, k, v, ends([5, 0, 3]), 5, 0.5, True, bias, gate, p, seed, 1, probs)
        save_bits = options.get("save_bits", False)
        # two runs may differ where no bit is defined
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        checks = checks if save_bits else (*checks, "test_aot_dispatch_dynamic")
        torch.library.opcheck(attention_fwd, (*args, save_bits), test_utils=checks)
        plain = [t.detach() if torch.is_tensor(t) else t for t in args[:-1]]
        out, lse, _, bits = attention_fwd(*plain, False, save_bits)
        bits = bits if save_bits else None
        dout = torch.randn(out.shape)
        for needs in ((True, True, True), (False, True, False)):
            needs = *needs, bias is not None, gate is not None
            torch.library.opcheck(attention_bwd, (dout, *plain[:3], out, lse, *plain[3:], bits, *needs))


def _compiled_body(q, k, v, cu_seqlens, max_seqlen, bias, gate, seed):
    q = (
        q.transpose(0, 1).contiguous().transpose(0, 1)
    )  # Inductor may re-stride what a permuting producer made
    p = 0.0 if seed is None else 0.25
    out, lse = attention(
        q * 1,
        k,
        v,
        cu_seqlens,
        max_seqlen,
        bias=bias,
        gate=gate,
        dropout_p=p,
        seed=seed,
        offset=2,
        return_lse=True,
    )
    return out * 2, lse


def _same_compiled(function, dropout: bool, lengths):
    inputs = qkv(sum(lengths) + 2, 3, 16, seed=len(lengths))
    longest = max(lengths)
    bias = torch.randn(len(lengths), 1, 1, longest, requires_grad=True)
    gate = torch.rand(3, requires_grad=True)
    args = (*inputs, ends(lengths), longest, bias, gate, torch.tensor([11]) if dropout else None)
    wanted = (*inputs, bias, gate)
    expected, actual = _compiled_body(*args), function(*args)
    assert_same((*actual, *grads_of(actual[0], wanted)), (*expected, *grads_of(expected[0], wanted)))
    assert not actual[1].requires_grad


@pytest.mark.parametrize("dropout", [False, True])
def test_compiled_equals_eager(dropout):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(_compiled_body, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([5, 4, 7, 9], [6, 13, 0, 8, 2], [4, 11, 5, 30, 5, 8, 10], [19, 6, 17, 4, 12, 5]):
        _same_compiled(function, dropout, lengths)
    assert counter.frame_count == 1  # one graph for all lengths


def test_inductor_equals_eager():
    torch._dynamo.reset()
    _same_compiled(torch.compile(_compiled_body, fullgraph=True, dynamic=True), True, [6, 13, 0, 8, 2])


def test_compiled_probs_and_padded_layout():
    torch._dynamo.reset()

    def function(q, k, v):
        return attention(q, k, v, return_lse=True, return_probs=True)

    inputs = [torch.randn(2, 5, 2, 16, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    expected, actual = function(*inputs), compiled(*inputs)
    for a, e in zip(
        (*actual, *grads_of(actual[2], inputs[:2])),
        (*expected, *grads_of(expected[2], inputs[:2])),
        strict=True,
    ):
        assert_near(a, e, 1e-6)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_grid_reads_nothing_on_the_host(dropout_p):
    """Fake tensors have no values: reading one, which on a GPU would synchronise, raises."""
    with FakeTensorMode():
        cu_seqlens = torch.empty(4, dtype=torch.int32)
        with pytest.raises(DataDependentOutputException):
            cu_seqlens[1].item()
        q, k, v = (torch.empty(9, 2, 16, dtype=torch.bfloat16) for _ in range(3))
        bias, gate = torch.empty(3, 1, 1, 5), torch.empty(2)
        seed = torch.empty(1, dtype=torch.int64) if dropout_p else None
        options = (cu_seqlens, 5, 0.25, True, bias, gate, dropout_p, seed, 0)
        save = dropout_p > 0
        out, lse, probs, keep_bits = aten_attention._grid_fwd(q, k, v, *options, True, save)
        args, needs = (out, q, k, v, out, lse, *options), (True,) * 5
        grads = aten_attention._grid_bwd(*args, None, *needs)
        assert not save or aten_attention._grid_bwd(*args, keep_bits, *needs)[0].shape == q.shape
        keep = keep_mask(seed, 0, cu_seqlens[:-1], 2, 5, dropout_p) if dropout_p else None
        by_ref = attention_ref(q, k, v, *options[:6], dropout_p, keep)
    assert (keep_bits.dtype, tuple(keep_bits.shape)) == (torch.int32, (2, 9, 1) if save else (0,))
    for result in ((out, lse, probs), by_ref):
        assert [tuple(t.shape) for t in result] == [(9, 2, 16), (2, 9), (3, 2, 5, 5)]
        assert [t.dtype for t in result] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v, bias, gate)]


# --- arguments ----------------------------------------------------------------------------------------------

_Q = torch.zeros(6, 2, 8)
_PADDED = torch.zeros(2, 3, 2, 8)
_CU = ends([4, 2])
BAD = {
    "q_list": ("q", TypeError, {"q": [1.0]}),
    "q_int": ("q", TypeError, {"q": _Q.int()}),
    "q_2d": ("q", ValueError, {"q": _Q[0]}),
    "q_4d_with_cu_seqlens": ("q", ValueError, {"q": _PADDED}),
    "q_3d_without_cu_seqlens": ("q", ValueError, {"cu_seqlens": None, "max_seqlen": None}),
    "q_no_headdim": ("q", ValueError, {"q": _Q[..., :0]}),
    "q_no_heads": ("q", ValueError, {"q": _Q[:, :0]}),
    "k_dtype": ("k", TypeError, {"k": _Q.half()}),
    "v_dtype": ("v", TypeError, {"v": _Q.bfloat16()}),
    "k_shape": ("k", ValueError, {"k": _Q[:5]}),
    "v_heads": ("v", ValueError, {"v": _Q[:, :1]}),
    "k_device": ("k", ValueError, {"k": _Q.to("meta")}),
    "k_none": ("k", TypeError, {"k": None}),
    "cu_list": ("cu_seqlens", TypeError, {"cu_seqlens": [0, 4, 6]}),
    "cu_int64": ("cu_seqlens", TypeError, {"cu_seqlens": _CU.long()}),
    "cu_2d": ("cu_seqlens", ValueError, {"cu_seqlens": _CU.unsqueeze(0)}),
    "cu_empty": ("cu_seqlens", ValueError, {"cu_seqlens": _CU[:0]}),
    "cu_start": ("cu_seqlens", ValueError, {"cu_seqlens": torch.tensor([1, 4], dtype=torch.int32)}),
    "cu_falls": ("cu_seqlens", ValueError, {"cu_seqlens": torch.tensor([0, 4, 3], dtype=torch.int32)}),
    "cu_beyond": ("cu_seqlens", ValueError, {"cu_seqlens": torch.tensor([0, 4, 7], dtype=torch.int32)}),
    "cu_device": ("cu_seqlens", ValueError, {"cu_seqlens": _CU.to("meta")}),
    "max_none": ("max_seqlen", TypeError, {"max_seqlen": None}),
    "max_float": ("max_seqlen", TypeError, {"max_seqlen": 4.0}),
    "max_bool": ("max_seqlen", TypeError, {"max_seqlen": True}),
    "max_negative": ("max_seqlen", ValueError, {"max_seqlen": -1}),
    "max_short": ("max_seqlen", ValueError, {"max_seqlen": 3}),
    "max_padded": (
        "max_seqlen", ValueError, {"q": _PADDED, "k": _PADDED, "v": _PADDED, "cu_seqlens": None},
    ),
    "scale_nan": ("softmax_scale", ValueError, {"softmax_scale": math.nan}),
    "scale_inf": ("softmax_scale", ValueError, {"softmax_scale": math.inf}),
    "scale_text": ("softmax_scale", TypeError, {"softmax_scale": "0.1"}),
    "scale_bool": ("softmax_scale", TypeError, {"softmax_scale": True}),
    "causal_int": ("causal", TypeError, {"causal": 1}),
    "bias_bool": ("bias", TypeError, {"bias": torch.ones(2, 4, 4, dtype=torch.bool)}),
    "bias_2d": ("bias", ValueError, {"bias": torch.zeros(4, 4)}),
    "bias_heads": ("bias", ValueError, {"bias": torch.zeros(3, 4, 4)}),
    "bias_batch": ("bias", ValueError, {"bias": torch.zeros(3, 2, 4, 4)}),
    "bias_keys": ("bias", ValueError, {"bias": torch.zeros(2, 4, 5)}),
    "bias_device": ("bias", ValueError, {"bias": torch.zeros(2, 4, 4, device="meta")}),
    "gate_shape": ("gate", ValueError, {"gate": torch.ones(3)}),
    "gate_int": ("gate", TypeError, {"gate": torch.ones(2, dtype=torch.int64)}),
    "dropout_one": ("dropout_p", ValueError, {"dropout_p": 1.0, "seed": torch.tensor([1])}),
    "dropout_nan": ("dropout_p", ValueError, {"dropout_p": math.nan, "seed": torch.tensor([1])}),
    "seed_none": ("seed", ValueError, {"dropout_p": 0.1}),
    "seed_int": ("seed", ValueError, {"dropout_p": 0.1, "seed": 3}),
    "seed_two": ("seed", ValueError, {"dropout_p": 0.1, "seed": torch.tensor([1, 2])}),
    "offset_negative": ("offset", ValueError, {"dropout_p": 0.1, "seed": torch.tensor([1]), "offset": -1}),
    "offset_wide": ("offset", ValueError, {"dropout_p": 0.1, "seed": torch.tensor([1]), "offset": 2**32}),
}  # fmt: skip


@pytest.mark.parametrize(("argument", "error", "change"), BAD.values(), ids=BAD)
def test_bad_input_is_named(argument, error, change):
    arguments = {"q": _Q, "k": _Q, "v": _Q, "cu_seqlens": _CU, "max_seqlen": 4}
    attention(**arguments)  # without the change it runs
    with pytest.raises(error, match=rf"^{argument}: .*expected.*got|^{argument}: .*needs.*got"):
        attention(**(arguments | change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mixed", [False, True])
def test_autocast_casts_as_sdpa_does(dtype, mixed):
    q, k, v = qkv(6, 2, 8, dtype)
    if mixed and dtype != torch.float64:
        k = k.detach().float().requires_grad_()
    gate = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)))
        results = [attention(q, k, v, ends([6]), 6, gate=gate)]
        results.append(attention(q, k, v, ends([6]), 6, gate=gate, return_probs=True)[0])
    for out in results:
        assert out.dtype == expected.dtype
        grads = grads_of(out, (q, k, v, gate))
        assert [g.dtype for g in grads] == [dtype, k.dtype, dtype, torch.float32]
        tolerance = 1e-12 if dtype == torch.float64 else 0.03
        assert (out - expected.transpose(0, 1)).abs().max() < tolerance
    with torch.no_grad():  # inside the op nothing is cast again
        cast = (q, k, v) if dtype == torch.float64 else [t.bfloat16() for t in (q, k, v)]
        outside = attention(*cast, ends([6]), 6, gate=gate)
        for out in results:
            assert (out - outside).abs().max() <= (0 if out is results[0] else 2**-8 * outside.abs().max())


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", PLAIN)
def test_bias_and_gate_keep_their_own_dtype(backend, dtype, bias_dtype):
    if backend not in DOUBLE and dtype == torch.float64:
        with pytest.raises(dispatch.BackendError, match="float64"), serving(backend):
            attention(*qkv(6, 2, 8, dtype), ends([6]), 6)
        return
    q, k, v = qkv(6, 2, 8, dtype)
    bias = torch.randn(2, 6, 6).to(bias_dtype).requires_grad_()
    gate = torch.rand(2).to(bias_dtype).requires_grad_()
    with serving(backend):
        out = attention(q, k, v, ends([6]), 6, bias=bias, gate=gate)
        assert out.dtype == dtype
        dbias, dgate = grads_of(out, (bias, gate))
    assert dbias.dtype == dgate.dtype == bias_dtype
    wide = [t.detach().double() for t in (q, k, v)]
    truth = attention_ref(*wide, ends([6]), 6, bias=bias.double(), gate=gate.double())[0]
    assert (out - truth).abs().max() <= 4 * torch.finfo(dtype).eps * truth.abs().max() + 1e-6 * (
        dtype == torch.float32
    )
    assert (dbias - grads_of(truth.to(dtype), (bias,))[0]).abs().max() < 0.05


# --- layouts, lengths, masks --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_equals_packed_and_sdpa(backend, dtype):
    q, k, v = (t.reshape(3, 5, 2, 8) for t in qkv(15, 2, 8, DTYPES[dtype]))
    bias = torch.randn(3, 1, 1, 5)
    with serving(backend):
        out, lse, probs = attention(q, k, v, bias=bias, return_lse=True, return_probs=True)
        with torch.no_grad():
            plain = attention(q, k, v, bias=bias)
            packed, packed_lse = attention(
                *(t.reshape(15, 2, 8) for t in (q, k, v)), ends([5, 5, 5]), 5, bias=bias, return_lse=True
            )
    assert torch.equal(plain.reshape(15, 2, 8), packed)
    assert out.shape == q.shape
    assert lse.shape == (3, 2, 5)
    assert probs.shape == (3, 2, 5, 5)
    assert torch.allclose(lse.transpose(0, 1).reshape(2, 15), packed_lse, rtol=0, atol=1e-5)
    sdpa = F.scaled_dot_product_attention(
        *(t.double().transpose(1, 2) for t in (q, k, v)), attn_mask=bias.double()
    )
    assert (plain - sdpa.transpose(1, 2)).abs().max() < 4 * torch.finfo(DTYPES[dtype]).eps * sdpa.abs().max()


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize(
    "lengths", [[0, 7, 0], [0, 0, 0, 1], [0, 1, 0, 1], [1], [1, 1, 1], [0], [0, 0], [], [3, 0, 0, 3]], ids=str
)
@pytest.mark.parametrize("capacity", [0, 3])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_zero_lengths(backend, lengths, capacity, options):
    longest, total = max(lengths, default=0), sum(lengths)
    inputs = qkv(total + capacity)
    bias = gate = None
    dropout = {}
    if options == "all":
        bias = torch.randn(len(lengths), 2, longest, longest, requires_grad=True)
        gate = torch.rand(2, requires_grad=True)
        dropout = {"dropout_p": 0.5, "seed": torch.tensor([2])}
    with serving(backend):
        out, lse = attention(
            *inputs,
            ends(lengths),
            longest,
            bias=bias,
            gate=gate,
            return_lse=True,
            causal=options == "all",
            **dropout,
        )
        wanted = [t for t in (*inputs, bias, gate) if t is not None]
        grads = grads_of(out, wanted)
    assert out.shape == (total + capacity, 2, 8)
    assert lse.shape == (2, total + capacity)
    for t in (out, lse, *grads):
        assert t.isfinite().all()
    keep = keep_mask(torch.tensor([2]), 0, ends(lengths)[:-1], 2, longest, 0.5) if dropout else None
    truth, _, _ = attention_ref(
        *inputs, ends(lengths), longest, bias=bias, gate=gate, causal=options == "all",
        dropout_p=0.5 if dropout else 0.0, keep_mask=keep,
    )  # fmt: skip
    for a, e in zip((out, *grads), (truth, *grads_of(truth, wanted)), strict=True):
        assert_near(a, e, 2e-6)


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_poison_outside_the_sequences_changes_nothing(backend, dtype, options):
    lengths, capacity = (5, 0, 3), 4
    clean = qkv(sum(lengths) + capacity, 2, 16, DTYPES[dtype])
    dout = torch.randn(clean[0].shape).to(DTYPES[dtype])
    bias = torch.randn(3, 2, 7, 7, requires_grad=True)
    real = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
    cells = (real.unsqueeze(2) & real.unsqueeze(1)).unsqueeze(1)

    def run(poison):
        inputs, g, b = [t.detach().clone() for t in clean], dout.clone(), bias.detach().clone()
        for t in (*inputs, g):
            t[sum(lengths) :] = poison
        b = torch.where(cells, b, poison).requires_grad_()
        inputs = [t.requires_grad_() for t in inputs]
        extra = {"bias": b, "dropout_p": 0.2, "seed": torch.tensor([1])} if options == "all" else {}
        out, lse = attention(*inputs, ends(lengths), 7, return_lse=True, **extra)
        grads = torch.autograd.grad(out, [*inputs, b][: 4 if extra else 3], g)
        with torch.no_grad():
            probs = attention(*inputs, ends(lengths), 7, return_probs=True, **extra)[1]
        through = attention(*inputs, ends(lengths), 7, return_probs=True, **extra)
        dprobs = torch.ones_like(through[1])
        return [out, lse, *grads, probs, *through, *torch.autograd.grad(through, inputs, (g, dprobs))]

    names = ["out", "lse", "dq", "dk", "dv", *(["dbias"] if options == "all" else []), "probs"]
    with serving(backend):
        expected = run(0.0)
        for poison in (math.nan, math.inf, 1e4):
            actual = run(poison)
            assert_same(actual, expected)
        for t in (actual[0], *actual[2:5]):
            assert torch.equal(t[sum(lengths) :], torch.zeros_like(t[sum(lengths) :]))
        assert torch.equal(actual[1][:, sum(lengths) :], torch.zeros(2, capacity))
        outside = (~cells).expand(3, 2, 7, 7)
        assert not actual[names.index("probs")][outside].any()
        if options == "all":
            assert not actual[names.index("dbias")][outside].any()


@pytest.mark.parametrize("backend", PLAIN)
def test_nan_in_one_sequence_stays_there(backend):
    inputs = [t.detach() for t in qkv(12)]
    with serving(backend):
        clean = attention(*inputs, ends([4, 5, 3]), 5)
        for t in inputs:
            t[4:9] = math.nan
        out = attention(*inputs, ends([4, 5, 3]), 5)
    assert_same((out[:4], out[9:]), (clean[:4], clean[9:]))
    assert out[4:9].isnan().all()


def _kinds(t):
    """0 for a number, 1 for inf, 2 for -inf, 3 for NaN."""
    return t.isposinf() + 2 * t.isneginf().int() + 3 * t.isnan().int()


# Triton never reads the tiles of keys that a causal mask hides, so there a NaN spreads less
@pytest.mark.parametrize("backend", [b for b in PLAIN if b not in ("reference", "triton")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [5, 40])  # within one vector of keys, and beyond
@pytest.mark.parametrize("options", ["plain", "causal", "bias", "causal_bias"])
def test_numbers_that_are_none_go_where_the_reference_says(backend, dtype, length, options):
    """NaN and infinities in one place of one input, and products that overflow: out, lse, dq, dk, dv."""
    clean = qkv(length, 1, 8, DTYPES[dtype])
    bias = torch.randn(1, 1, length, length, generator=torch.Generator().manual_seed(1))
    dout = torch.randn(clean[0].shape, generator=torch.Generator().manual_seed(2)).to(DTYPES[dtype])
    values = [math.nan, math.inf, -math.inf]
    planted = [*((i, value) for i in ("q", "k", "v") for value in values)]
    planted += [("qk", 6e4 if dtype == "fp16" else 1e30), ("dout", math.nan)]
    planted += [("bias", value) for value in (math.nan, math.inf)] if "bias" in options else []

    def run():
        inputs = [t.detach().clone().requires_grad_() for t in given]
        out, lse = attention(
            *inputs, ends([length]), length, causal="causal" in options, return_lse=True,
            bias=changed["bias"] if "bias" in options else None,
        )  # fmt: skip
        return out.detach(), lse, *torch.autograd.grad(out, inputs, changed["dout"])

    for where, value in planted:
        changed = dict(zip(("q", "k", "v", "bias", "dout"), (*clean, bias, dout), strict=True))
        for name in ("q", "k") if where == "qk" else (where,):
            changed[name] = changed[name].detach().clone()
            changed[name][(0, 0, 3, 1) if name == "bias" else (1, 0, 3)] = value
        given = [changed[name] for name in ("q", "k", "v")]
        with serving("reference"):
            expected = run()
        with serving(backend):
            actual = run()
        for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
            assert torch.equal(_kinds(a), _kinds(e)), f"{where} {value}: {name}"


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["rows", "sequence", "everything"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_wholly_masked_rows_are_zero(backend, dtype, what, dropout_p):
    q, k, v = qkv(9, 2, 16, DTYPES[dtype])
    bias = torch.zeros(2, 1, 6, 6)
    bias[{"rows": (0, 0, slice(1, 3)), "sequence": (1,), "everything": ()}[what]] = -math.inf
    bias.requires_grad_()
    dead = {"rows": [1, 2], "sequence": [6, 7, 8], "everything": list(range(9))}[what]
    seed = torch.tensor([1])
    with serving(backend):
        out, lse = attention(
            q, k, v, ends([6, 3]), 6, bias=bias, dropout_p=dropout_p, seed=seed, return_lse=True
        )
        grads = grads_of(out, (q, k, v, bias))
        with torch.no_grad():
            probs = attention(
                q, k, v, ends([6, 3]), 6, bias=bias, dropout_p=dropout_p, seed=seed, return_probs=True
            )[1]
    assert all(t.isfinite().all() for t in (out, probs, *grads))
    assert torch.equal(out[dead], torch.zeros_like(out[dead]))
    assert torch.equal(grads[0][dead], torch.zeros_like(out[dead]))
    assert (lse[:, dead] == -math.inf).all()
    live = [i for i in range(9) if i not in dead]
    assert lse[:, live].isfinite().all()
    assert (out[live].abs().amax((1, 2)) > 0).all()
    if what == "sequence":
        assert not any(g[dead].any() for g in grads[:3])
        assert not grads[3][1].any()
        assert not probs[1].any()


@pytest.mark.parametrize("backend", PLAIN)
def test_strides_are_respected(backend):
    lengths, total = [5, 7], 14
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    forms = {
        "packed": lambda: randn(total, 3, 2, 8).unbind(1),
        "heads_first": lambda: [t.transpose(0, 1) for t in randn(3, 2, total, 8)],
        "sliced": lambda: [t[::2, 1:3, 4:12] for t in randn(3, 2 * total, 4, 16)],
        "headdim_strided": lambda: [t[..., ::2] for t in randn(3, total, 2, 16)],
        "headdim_first": lambda: [t.permute(2, 1, 0) for t in randn(3, 8, 2, total)],
        "expanded_heads": lambda: [t.expand(total, 2, 8) for t in randn(3, total, 1, 8)],
        "expanded_rows": lambda: [t.expand(total, 2, 8) for t in randn(3, 1, 2, 8)],
    }
    biases = {
        "transposed": randn(2, 2, 7, 7).transpose(-1, -2),
        "heads_last": randn(7, 7, 2).permute(2, 0, 1),
        "expanded": randn(2, 1, 1, 7).expand(2, 2, 7, 7),
        "sliced": randn(2, 2, 14, 21)[:, :, ::2, ::3],
        "queries": randn(2, 1, 7, 1),
    }
    gate = randn(4)[::2]
    with serving(backend):
        for form, make in forms.items():
            for bias in (None, *biases.values()):
                tensors = [t.detach().requires_grad_() for t in make()]
                assert form == "packed" or not tensors[0].is_contiguous()
                results = []
                for copy in (False, True):
                    b = None if bias is None else bias.detach().requires_grad_()
                    used = (*tensors, b) if b is not None else tuple(tensors)
                    given_ = [t.contiguous() if copy else t for t in used]
                    out = attention(
                        *given_[:3], ends(lengths), 7, bias=given_[3] if b is not None else None,
                        gate=gate.contiguous() if copy else gate,
                    )  # fmt: skip
                    dout = torch.randn(2, 8, total, generator=torch.Generator().manual_seed(1)).permute(
                        2, 0, 1
                    )
                    grads = torch.autograd.grad(out, used, dout.contiguous() if copy else dout)
                    results.append((out, *grads))
                assert_same(*results)


@pytest.mark.parametrize("backend", PLAIN)
def test_expanded_upstream_gradient(backend):
    inputs = qkv(12, 2, 8)
    with serving(backend):
        out = attention(*inputs, ends([5, 7]), 7)
        expanded = torch.autograd.grad(out, inputs, torch.tensor(0.5).expand_as(out), retain_graph=True)
        dense = torch.autograd.grad(out, inputs, torch.full(out.shape, 0.5))
    assert_same(expanded, dense)


def test_views_of_packed_qkv_are_not_copied(monkeypatch):
    seen = {}
    original = aten.attention_fwd

    def spy(q, k, v, *rest):
        seen.update(q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr())
        return original(q, k, v, *rest)

    monkeypatch.setattr(aten, "attention_fwd", spy)
    packed, padded = torch.randn(10, 3, 2, 8), torch.randn(2, 5, 3, 2, 8)
    with dispatch.use_backend(attention="aten"), torch.no_grad():
        for tensor, rest in ((packed, (ends([4, 6]), 6)), (padded, ())):
            q, k, v = tensor.unbind(-3)
            attention(q, k, v, *rest)
            assert seen == {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr()}


def test_offsets_beyond_int32():
    step = 2**31 // 3 + 64
    try:
        storage = torch.empty(3 * step + 1024, dtype=torch.float16)  # mapped, and touched only where written
    except RuntimeError as error:
        pytest.skip(f"4 GiB of address space are not to be had: {error}")
    views = [storage.as_strided((4, 2, 16), (step, 16, 1), 64 * i) for i in range(3)]
    inputs = [t.detach().half() for t in qkv(4, 2, 16)]
    for view, t in zip(views, inputs, strict=True):
        view.copy_(t)
    for backend in ("reference", "aten"):
        with serving(backend):
            assert torch.equal(attention(*views, ends([1, 3]), 3), attention(*inputs, ends([1, 3]), 3))


@pytest.mark.parametrize(("total", "length"), [(65541, 7), (65535, 1), (65542, 2)])
def test_more_rows_than_16_bits(total, length):
    q, k, v = (t.detach() for t in qkv(total, 1, 16))
    lengths = [length] * (total // length)
    out = attention(q, k, v, ends(lengths), length)
    tail = total - length
    expected = attention(q[tail:], k[tail:], v[tail:], ends([length]), length)
    assert_near(out[tail:], expected, 1e-6)
    grid = F.scaled_dot_product_attention(
        *(t.reshape(-1, length, 1, 16).transpose(1, 2) for t in (q, k, v))
    ).transpose(1, 2)  # fmt: skip
    assert_near(out, grid.reshape(total, 1, 16), 1e-6)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_lengths_and_masks(data):
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=6), label="lengths")
    nheads, headdim = data.draw(st.sampled_from([(1, 16), (2, 8), (3, 5)]), label="heads")
    longest = max(lengths) + data.draw(st.sampled_from([0, 0, 3]), label="slack")
    total = sum(lengths) + data.draw(st.sampled_from([0, 0, 2]), label="capacity")
    causal = data.draw(st.booleans(), label="causal")
    p = data.draw(st.sampled_from([0.0, 0.0, 0.4]), label="dropout_p")
    seed = data.draw(st.integers(-(2**63), 2**63 - 1), label="seed")
    g = torch.Generator().manual_seed(seed & 0xFFFF)
    inputs = qkv(total, nheads, headdim, torch.float64, seed & 0xFFFF)
    bias = gate = None
    if data.draw(st.booleans(), label="has bias"):
        shape = [data.draw(st.sampled_from([1, full])) for full in (len(lengths), nheads, longest, longest)]
        bias = torch.randn(shape, generator=g, dtype=torch.float64)
        blocked = data.draw(st.sampled_from([0.0, 0.3, 0.9]), label="blocked")
        bias = bias.masked_fill(torch.rand(shape, generator=g) < blocked, -math.inf).requires_grad_()
    if data.draw(st.booleans(), label="has gate"):
        gate = torch.randn(nheads, generator=g, dtype=torch.float64, requires_grad=True)
    wanted = [t for t in (*inputs, bias, gate) if t is not None]
    seed = torch.tensor([seed])
    keep = keep_mask(seed, 3, ends(lengths)[:-1], nheads, longest, p) if p else None
    truth, truth_lse, _ = attention_ref(
        *inputs, ends(lengths), longest, causal=causal, bias=bias, gate=gate, dropout_p=p, keep_mask=keep
    )
    truths = (truth, *grads_of(truth, wanted))
    for backend in PLAIN:
        dtype, tolerance = (torch.float64, 1e-10) if backend in DOUBLE else (torch.float32, 5e-5)
        given_bias, given_gate = (None if t is None else t.to(dtype) for t in (bias, gate))
        with serving(backend):
            out, lse = attention(
                *(t.to(dtype) for t in inputs), ends(lengths), longest, causal=causal, bias=given_bias,
                gate=given_gate, dropout_p=p, seed=seed, offset=3, return_lse=True,
            )  # fmt: skip
            assert torch.equal(lse.isneginf(), truth_lse.isneginf())
            assert torch.allclose(lse.double(), truth_lse, rtol=0, atol=tolerance)
            for a, e in zip((out, *grads_of(out, wanted)), truths, strict=True):
                assert torch.allclose(a.double(), e, rtol=0, atol=tolerance)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 6), min_size=0, max_size=6), st.integers(0, 3), st.integers(0, 2))
def test_grid_round_trip(lengths, capacity, slack):
    x = torch.randn(sum(lengths) + capacity, 2)
    size = max(lengths, default=0) + slack
    grid = to_grid(x, ends(lengths), size)
    assert grid.shape == (len(lengths), size, 2)
    for b, n in enumerate(lengths):
        start = sum(lengths[:b])
        assert torch.equal(grid[b, :n], x[start : start + n])
        assert not grid[b, n:].any()
    back = from_grid(grid, ends(lengths), x.shape[0])
    assert torch.equal(back[: sum(lengths)], x[: sum(lengths)])
    assert not back[sum(lengths) :].any()


def test_long_sequence():
    rows = testing.run_case(AttentionCase((1100, 3), 1, 16), "aten", torch.float32)
    assert all(row.passed for row in rows)


# --- dropout ------------------------------------------------------------------------------------------------


def test_philox_known_answers():
    """Random123's known answers of philox4x32-10: counter (col >> 2, row, plane, offset), key = seed."""
    vectors = [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]  # fmt: skip
    for (block, row, plane, offset), key, words in vectors:
        cols = torch.arange(4) + 4 * block
        got = philox_words(torch.tensor([key]), offset, torch.tensor(plane), torch.tensor(row), cols)
        assert [f"{word:08x}" for word in got.tolist()] == words.split()


def _dropped(lengths, max_seqlen, p, seed, offset=0, nheads=2):
    """D of the op itself for equal scores: v holds unit vectors, so out shows the kept cells."""
    n = max(lengths)
    q = torch.zeros(sum(lengths), nheads, n)
    v = torch.cat([torch.eye(n)[:length] for length in lengths]).unsqueeze(1).expand(-1, nheads, -1)
    return attention(q, q, v.contiguous(), ends(lengths), max_seqlen, dropout_p=p, seed=seed, offset=offset)


@pytest.mark.parametrize("backend", [*BACKENDS, "grid"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1234, -5, 2**62 + 17])
def test_dropout_bits_are_the_golden_ones(backend, p, seed):
    lengths = [6, 0, 13, 16]
    seed = torch.tensor([seed])
    with serving(backend):
        out = _dropped(lengths, 16, p, seed, 2**32 - 3)
    start = 0
    for n in lengths:
        rows, cols = torch.arange(start, start + n).unsqueeze(1), torch.arange(n)
        for head in range(2):
            keep = philox_keep(seed, 2**32 - 3, head, rows, cols, p)
            cells = out[start : start + n, head]
            assert torch.equal(cells[:, :n] != 0, keep)
            assert not cells[:, n:].any()
            assert torch.allclose(cells[:, :n], keep / (n * (1 - p)), rtol=1e-6, atol=0)
        start += n


@pytest.mark.parametrize("backend", PLAIN)
def test_dropout_does_not_depend_on_max_seqlen_or_layout_or_address(backend):
    inputs = qkv(12, 2, 8)
    seed = torch.tensor([77])
    moved = torch.tensor([1, 2, 77])[2:]
    options = {"dropout_p": 0.3, "offset": 4}

    def run(max_seqlen, seed):
        out = attention(*inputs, ends([6, 6]), max_seqlen, seed=seed, **options)
        return (out, *grads_of(out, inputs))

    with serving(backend):
        expected = run(6, seed)
        padded = attention(*(t.reshape(2, 6, 2, 8) for t in inputs), seed=seed, **options)
        out = padded.reshape(12, 2, 8)
        assert_same((out, *grads_of(out, inputs)), expected)
        assert_same(run(6, moved), expected)
        for max_seqlen in (7, 33):
            for a, e in zip(run(max_seqlen, seed), expected, strict=True):
                if backend == "grid":  # sums of longer rows run in another order
                    assert_near(a, e, 1e-6)
                else:
                    assert torch.equal(a, e)
        assert not torch.equal(run(6, torch.tensor([78]))[0], expected[0])
        assert not torch.equal(
            attention(*inputs, ends([6, 6]), 6, seed=seed, dropout_p=0.3, offset=5), expected[0]
        )


@pytest.mark.parametrize("backend", PLAIN)
def test_dropout_probability_zero_ignores_the_seed_and_probs_are_before_dropout(backend):
    inputs = [t.detach() for t in qkv(12, 2, 8)]
    with serving(backend):
        plain = attention(*inputs, ends([5, 7]), 7)
        assert torch.equal(attention(*inputs, ends([5, 7]), 7, dropout_p=0, seed=torch.tensor([1])), plain)
        probs = attention(*inputs, ends([5, 7]), 7, return_probs=True)[1]
        dropped = attention(
            *inputs, ends([5, 7]), 7, return_probs=True, dropout_p=0.5, seed=torch.tensor([1])
        )[1]
    torch.testing.assert_close(probs, dropped, rtol=1e-6, atol=0)  # dropout may take another way to them


def test_dropout_rate_and_mean():
    out = _dropped([64] * 16, 64, 0.25, torch.tensor([3]))
    kept = (out != 0).double().mean().item()
    assert abs(kept - 0.75) < 4 * (0.75 * 0.25 / out.numel()) ** 0.5
    assert abs(out.double().sum(-1).mean().item() - 1) < 0.01


def test_checkpointing_draws_the_same_mask():
    from torch.utils.checkpoint import checkpoint

    inputs = qkv(12, 2, 8)

    def run(q, k, v):
        return attention(q, k, v, ends([5, 7]), 7, dropout_p=0.3, seed=torch.tensor([5])).tanh()

    expected = run(*inputs)
    actual = checkpoint(run, *inputs, use_reentrant=False)
    assert_same((actual, *grads_of(actual, inputs)), (expected, *grads_of(expected, inputs)))


# --- repeats, modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aten", "grid"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("threads", "repeats"), [(1, 250), (2, 8)])
def test_repeats_are_bit_equal(backend, dtype, threads, repeats):
    inputs = qkv(60, 3, 16, DTYPES[dtype])
    bias = torch.randn(3, 33, 33, requires_grad=True)
    gate = torch.rand(3, requires_grad=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with serving(backend):
            for extra, wanted in (({}, inputs), ({"bias": bias, "gate": gate}, (*inputs, bias, gate))):
                first = None
                for _ in range(repeats):
                    out, lse = attention(*inputs, ends([20, 7, 33]), 33, return_lse=True, **extra)
                    result = (out, lse, *grads_of(out, wanted))
                    first = first or result
                    assert_same(result, first)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", PLAIN)
def test_inference_and_partial_gradients(backend):
    q, k, v = qkv(12, 2, 8)
    bias = torch.randn(2, 7, 7, requires_grad=True)
    gate = torch.rand(2, requires_grad=True)
    everything = (q, k, v, bias, gate)
    with serving(backend):
        out = attention(q, k, v, ends([5, 7]), 7, bias=bias, gate=gate)
        expected = grads_of(out, everything)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(attention(q, k, v, ends([5, 7]), 7, bias=bias, gate=gate), out)
        for i in range(5):
            used = [t if j == i else t.detach() for j, t in enumerate(everything)]
            out = attention(*used[:3], ends([5, 7]), 7, bias=used[3], gate=used[4])
            (grad,) = grads_of(out, (everything[i],))
            assert_near(grad, expected[i], 1e-6)


@pytest.mark.parametrize("backend", DOUBLE)
@pytest.mark.parametrize("scale", [0.0, -0.7, 3])
def test_softmax_scale(backend, scale):
    inputs = qkv(12, 2, 8, torch.float64)
    with serving(backend):
        out = attention(*inputs, ends([5, 7]), 7, softmax_scale=scale)
        grads = grads_of(out, inputs)
    truth = attention_ref(*inputs, ends([5, 7]), 7, softmax_scale=float(scale))[0]
    for a, e in zip((out, *grads), (truth, *grads_of(truth, inputs)), strict=True):
        assert torch.allclose(a, e, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", PLAIN)
def test_large_scores_do_not_overflow(backend, dtype):
    q, k, v = (t.detach() for t in qkv(12, 2, 16, DTYPES[dtype]))
    with serving(backend):
        out, lse = attention(100 * q, 100 * k, v, ends([5, 7]), 7, return_lse=True)
    truth, truth_lse, _ = attention_ref(*((100 * t).double() for t in (q, k)), v.double(), ends([5, 7]), 7)
    assert torch.isfinite(out).all()
    assert ((lse - truth_lse) / truth_lse).abs().max() < 1e-5
    assert (out - truth).abs().max() < 0.02


@pytest.mark.parametrize("nheads", [1, 3, 5])
def test_explicit_products_cut_by_heads_and_sequences(nheads, monkeypatch):
    """A tiny budget of scores cuts every run; the bits and sums must not notice."""
    inputs = qkv(31, nheads, 8, torch.float64)
    bias = torch.randn(4, nheads, 9, 9, dtype=torch.float64, requires_grad=True)
    gate = torch.rand(nheads, dtype=torch.float64, requires_grad=True)
    wanted = (*inputs, bias, gate)

    def run():
        out, lse = attention(
            *inputs,
            ends([8, 8, 8, 5]),
            9,
            bias=bias,
            gate=gate,
            dropout_p=0.3,
            seed=torch.tensor([1]),
            return_lse=True,
        )
        return (out, lse, *grads_of(out, wanted))

    expected = run()
    for scores in (1, 130, 200, 450):
        monkeypatch.setattr(aten_attention, "_MAX_SCORES", scores)
        monkeypatch.setattr(aten_attention, "_MAX_GRID_SCORES", scores)
        for backend in ("aten", "grid"):
            with serving(backend):
                for a, e in zip(run(), expected, strict=True):
                    assert torch.allclose(a, e, rtol=0, atol=1e-12)


def test_without_the_private_operator(monkeypatch):
    inputs = qkv(12, 2, 8, torch.bfloat16)
    expected = attention(*inputs, ends([5, 7]), 7, causal=True)
    monkeypatch.setattr(aten_attention, "_flash", None)
    for case in testing.small_cases("attention"):
        for dtype in DTYPES.values():
            assert all(row.passed for row in testing.run_case(case, "aten", dtype))
    with serving("aten"):
        out = attention(*inputs, ends([5, 7]), 7, causal=True)
    assert (out - expected).abs().max() <= 2**-7


def test_ids_and_costs():
    cases = testing.cases("attention")
    assert len({case.id for case in cases}) == len(cases)
    case = AttentionCase((3, 5), 2, 16)
    assert case.flops() == 4 * (9 + 25) * 2 * 16
    assert case.bytes(torch.bfloat16) == 4 * 8 * 2 * 16 * 2
    assert testing.self_check("attention", "aten", torch.device("cpu"), torch.bfloat16) is None
