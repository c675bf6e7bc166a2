"""`pooling` by the `reference` backend; contract in fastbert/ops/pooling.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops.checks import FLOATS
from fastbert.ops.pooling import pooling_ref

DTYPES = FLOATS


def pooling_fwd(hidden: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    return pooling_ref(hidden, cu_seqlens, mode)


def pooling_bwd(dy: Tensor, hidden: Tensor, y: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    with torch.enable_grad():
        wide = hidden.detach().to(y.dtype).requires_grad_()
        (grad,) = torch.autograd.grad(pooling_ref(wide, cu_seqlens, mode), wide, dy)
    return grad.to(hidden.dtype)
