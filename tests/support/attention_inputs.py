"""Inputs of `attention`, the backends that its tests pin, and how near their results must be."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._dynamo.testing

from fastbert.backends import aten
from fastbert.backends.aten import attention as aten_attention
from fastbert.backends.triton.device import kernels
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.attention import AttentionCase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = tuple(
    b
    for b in dispatch.BACKENDS
    if dispatch.unsupported_reason(b, "attention", "cpu", None, "attention_bwd") is None
)  # one without a backward has a test file of its own
# "grid" is what `aten` runs on devices other than the CPU; being plain PyTorch, it can be tested here.
DOUBLE = ("reference", "aten", "grid")
PLAIN = (*DOUBLE, *(b for b in BACKENDS if b not in DOUBLE))


def as_in_bfloat16(config_for):
    """The launcher's choice of tiles for bfloat16, whatever the dtype."""
    return lambda headdim, dtype, *rest: config_for(headdim, torch.bfloat16, *rest)


def is_long(case: AttentionCase) -> bool:
    return sum(case.lengths) * case.nheads > 1000


@contextlib.contextmanager
def serving(backend: str, long: bool = False):
    """Pin a backend, or the dense-grid half of `aten`.

    long: let Triton cut float32 as it cuts bfloat16. The small tiles of float32 take its interpreter minutes
    for long sequences; tests/triton tests them on short ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        if long and backend == "triton":
            for file, name in (("attention", "config_for"), ("attention_backward", "configs_for")):
                module = kernels(file)
                patch.setattr(module, name, as_in_bfloat16(getattr(module, name)))
        if backend == "grid":
            patch.setattr(aten, "attention_fwd", aten_attention._grid_fwd)
            patch.setattr(aten, "attention_bwd", aten_attention._grid_bwd)
        with dispatch.use_backend(attention="aten" if backend == "grid" else backend):
            yield


def qkv(total: int, nheads: int = 2, headdim: int = 8, dtype=torch.float32, seed: int = 0):
    """Three leaves that want a gradient."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(total, nheads, headdim, generator=g).to(dtype).requires_grad_() for _ in range(3)]


def grads_of(out: torch.Tensor, inputs, seed: int = 7):
    g = torch.Generator().manual_seed(seed)
    return torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=g).to(out.dtype))


def assert_near(actual, expected, tolerance):
    """Within `tolerance` times the largest expected magnitude, or 1: the scale of a sum's error."""
    scale = max(expected.detach().abs().flatten().tolist(), default=1.0)
    assert torch.allclose(actual, expected, rtol=0, atol=tolerance * max(1.0, scale))
