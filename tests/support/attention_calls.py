"""Calls of attention's kernels on packed inputs, and their results in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fastbert import testing
from fastbert.backends import reference
from fastbert.ops.attention import AttentionInputs, attention_ref
from fastbert.ops.attention_grid import keep_mask, outside_window, unpack_bits
from fastbert.ops.attention_inputs import CAUSAL, EVERYWHERE, AttentionNeeds
from fastbert.testing.op_cases.attention import AttentionCase
from tests.support.cpu_truth import randn
from tests.support.inputs import ends_of

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEADDIMS = (32, 64, 128)
NAMES = ("dq", "dk", "dv", "dbias", "dgate")
SEED = torch.tensor([0x123456789ABCDEF])


def made(
    lengths,
    nheads=2,
    headdim=32,
    dtype=torch.bfloat16,
    *,
    capacity=0,
    slack=0,
    p=0.0,
    causal=False,
    device="cpu",
    **options,
) -> AttentionInputs:
    """Inputs whose q, k, v are views of one packed tensor; `options` replace the defaults."""
    q, k, v = randn(sum(lengths) + capacity, 3, nheads, headdim, dtype=dtype, seed=5).to(device).unbind(1)
    size, seed = max(lengths, default=0) + slack, SEED if p > 0 else None
    window = CAUSAL if causal else EVERYWHERE
    inputs = AttentionInputs(
        *(q, k, v, ends_of(lengths), size, headdim**-0.5, window, None, None, p, seed, 11)
    )._replace(**options)
    return AttentionInputs(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in inputs))


def sequences(inputs: AttentionInputs) -> list[tuple[int, int]]:
    """(first row, length) of each sequence."""
    return list(zip(inputs.cu_seqlens.tolist(), inputs.cu_seqlens.diff().tolist(), strict=False))


def broken_rules(case: AttentionCase, dtype: torch.dtype, backward: bool = True) -> list[tuple]:
    """What the `cuda` backend breaks of the error rule."""
    rows = testing.run_case(case, "cuda", dtype, backward=backward)
    return [(case, dtype, r.quantity, r.reason) for r in rows if not r.passed]


def in_float64(inputs: AttentionInputs) -> AttentionInputs:
    """The same numbers, wider."""
    named = ((name, getattr(inputs, name)) for name in ("q", "k", "v", "bias", "gate"))
    return inputs._replace(**{name: None if t is None else t.double() for name, t in named})


# --- forward ------------------------------------------------------------------------------------------------


def drawn(inputs: AttentionInputs) -> torch.Tensor | None:
    """The mask of dropout by its definition, (batch, nheads, S, S); None without dropout."""
    if inputs.dropout_p == 0:
        return None
    starts, heads = inputs.cu_seqlens[:-1], inputs.q.shape[1]
    return keep_mask(inputs.seed, inputs.offset, starts, heads, inputs.max_seqlen, inputs.dropout_p)


def forward_truth(inputs: AttentionInputs, sums: tuple[float, float] | None):
    """(out, lse, bound) in float64; the bound is what rounding P and out to the dtype may cost.

    `sums`: what sums in float32 may cost, relative to their terms and absolute.
    """
    q, k, v, ends, size, scale, window, bias, gate, p, _, _ = in_float64(inputs)
    options = dict(softmax_scale=scale, window=window, bias=bias, dropout_p=p, keep_mask=drawn(inputs))
    out, lse, _ = attention_ref(q, k, v, ends, size, gate=gate, **options)
    positive = None if gate is None else gate.abs()
    terms, *_ = attention_ref(q, k, v.abs(), ends, size, gate=positive, **options)
    eps = torch.finfo(inputs.q.dtype).eps
    rounding = eps / 2 * (terms * 1.01 + out.abs() * (1 + eps))
    if sums is not None:
        return out, lse, rounding + sums[0] * terms + sums[1]
    scores = q.norm(dim=-1).max() * k.norm(dim=-1).max() * abs(scale) if q.numel() else 0.0
    # float's own part, and fp16's numbers below 2^-14
    largest = v.abs().max() if v.numel() else 0.0
    noise = 1e-6 * (1 + scores) * terms + 1e-7 * largest * size / (1 - p)
    return out, lse, rounding + (noise if gate is None else noise * (1 + positive.unsqueeze(-1)))


def check_bits(inputs: AttentionInputs, bits: torch.Tensor) -> None:
    """The saved bits are those of the definition, where a query sees the key."""
    size, nheads = inputs.max_seqlen, inputs.q.shape[1]
    assert (bits.shape, bits.dtype) == ((nheads, inputs.q.shape[0], -(-size // 32)), torch.int32)
    keep = drawn(inputs)
    for b, (start, n) in enumerate(sequences(inputs)):
        found, wanted = unpack_bits(bits[:, start : start + n], n), keep[b, :, :n, :n]
        outside = outside_window(n, inputs.window, found.device)
        if outside is not None:
            found, wanted = found & ~outside, wanted & ~outside
        assert torch.equal(found, wanted), f"bits of sequence {b}"


def check_forward(run: Callable, inputs: AttentionInputs, sums: tuple[float, float] | None = None):
    """`run(inputs)`: out, lse and bits. They are near the truth, zeros follow the last sequence."""
    out, lse, bits = run(inputs)
    expected, expected_lse, bound = forward_truth(inputs._replace(q=inputs.q.to(out.dtype)), sums)
    end = int(inputs.cu_seqlens[-1])
    assert (out.shape, out.is_contiguous()) == (inputs.q.shape, True)
    assert (out[end:] == 0).all()
    assert (lse[:, end:] == 0).all()
    error = (out.double() - expected).abs()
    assert out.isfinite().all(), "NaN or infinity"
    assert (error <= bound).all(), f"error {(error / bound).max():.3g} times what rounding allows"
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=4e-6)
    if inputs.dropout_p > 0:
        check_bits(inputs, bits)
    return out, lse, bits


# --- backward -----------------------------------------------------------------------------------------------


class Call:
    """A call of backward: what the reference's forward made of the inputs, dout, and which gradients.

    `backend`: whose `attention_bwd` is called. `tolerance`: of gradients, relative to the largest.
    """

    def __init__(self, backend, inputs: AttentionInputs, dout=None, saved=True, tolerance=0.03) -> None:
        self.backend, self.inputs, self.places, self.tolerance = backend, inputs, None, tolerance
        self.need = AttentionNeeds(True, True, True, inputs.bias is not None, inputs.gate is not None)
        self.out, self.lse, _, bits = reference.attention_fwd(inputs, False, inputs.dropout_p > 0)
        self.bits = bits if saved and inputs.dropout_p > 0 else None
        self.dout = randn(*inputs.q.shape, seed=9).to(inputs.q) if dout is None else dout

    def on(self, dout=None, **inputs) -> Call:
        """A call of the same kernels, in which some inputs are others."""
        return Call(self.backend, self.inputs._replace(**inputs), dout, tolerance=self.tolerance)

    def run(self, backend=None):
        """The five gradients."""
        args = self.dout, self.inputs, self.out, self.lse, self.bits, self.need
        return (backend or self.backend).attention_bwd(*args, self.places)

    def truth(self):
        """The gradients in float64, without an `out` that was rounded."""
        wide = in_float64(self.inputs)
        out, lse, _, bits = reference.attention_fwd(wide, False, wide.dropout_p > 0)
        bits = bits if wide.dropout_p > 0 else None
        return reference.attention_bwd(self.dout.double(), wide, out, lse, bits, self.need)

    def check(self, tolerance=None):
        """Every gradient is near the truth."""
        grads, tolerance = self.run(), tolerance or self.tolerance
        for name, a, e in zip(NAMES, grads, self.truth(), strict=True):
            assert a.shape == e.shape, name
            scale = max(1.0, e.abs().max().item()) if e.numel() else 1.0
            torch.testing.assert_close(
                a.double(), e, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
            )
        return grads


def assert_bit_equal(a, b) -> None:
    """The same gradients."""
    for name, x, y in zip(NAMES, a, b, strict=True):
        assert torch.equal(x, y), name


class Kernels(NamedTuple):
    """The kernels of a backend for one width of heads; those for sm_90a lack some options.

    `tile`: rows of about one tile, of which the lengths of some tests are multiples.
    """

    backend: object
    headdim: int
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cpu"
    hopper: bool = False
    tile: int = 64

    def call(self, lengths, dout=None, saved=True, **options) -> Call:
        """A call of them on drawn inputs."""
        options = {"headdim": self.headdim, "dtype": self.dtype, "device": self.device} | options
        inputs = made(lengths, **options)
        hopper = 0.012 if inputs.q.dtype == torch.bfloat16 else 0.002
        half = hopper if self.hopper else 0.03
        return Call(self.backend, inputs, dout, saved, 2e-5 if inputs.q.dtype == torch.float32 else half)

    def extras(self, **options) -> dict:
        """Options that the kernels for sm_90a lack."""
        return {n: v for n, v in options.items() if n != "bias"} if self.hopper else options
