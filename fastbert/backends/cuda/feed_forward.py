"""`feed_forward` by the `cuda` backend: its `linear`, and the gradient between the products in an epilogue.

Contract in fastbert/ops/feed_forward.py. The other products are PyTorch's, as in the table of `dispatch`.
Backward goes to the next backend where the kernels cannot read its matrices in 16 bytes
(fastbert/backends/cuda/linear.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.aten import linear as plain
from fastbert.backends.cuda import device, linear
from fastbert.backends.reference.feed_forward import by_linear
from fastbert.ops.feed_forward import FeedForwardNeeds, FeedForwardSaved
from fastbert.runtime import dispatch

DTYPES = linear.DTYPES
# On compute capability 9.0 the gradient between the products by `linear.slope_product`. Off until
# `bench/gpu/queue/training_step.py` has timed it.
SLOPE_PRODUCTS = False


def inner_gradient(
    dy: Tensor,
    down_weight: Tensor,
    pre: Tensor,
    activation: str | None,
    need_dbias: bool,
    plan: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """((dy @ down_weight) * act'(pre), its column sums), in the product's epilogue.

    With tensor cores that `linear.product` does not fill, PyTorch's product and a pass over it are faster.
    """
    if plan is None and SLOPE_PRODUCTS and linear.hopper_serves(dy, down_weight, None, activation):
        found = linear.slope_product(dy, down_weight, pre, activation, need_dbias)
        if found is not None:
            return found
    if plan is None and device.has_group_products(dy.device):
        return linear.gradient(dy @ down_weight, pre, activation, True, need_dbias)
    rows, out = dy.shape
    inner = down_weight.shape[1]
    parts = device.extension.cuda_linear_sums(rows)
    sums = dy.new_empty((parts, inner), dtype=torch.float32) if need_dbias else None
    g, _ = linear.product(
        *(linear.INPUTS, (rows, inner, out), dy, down_weight),
        activation=activation,
        slope_at=pre,
        sums=sums,
        plan=plan,
    )
    return g, dy.new_empty(0) if sums is None else linear.add_sums(sums, dy)


feed_forward_fwd, _by_kernels = by_linear(linear, plain, inner_gradient)


def feed_forward_bwd(dy: Tensor, saved: FeedForwardSaved, need: FeedForwardNeeds) -> tuple[Tensor, ...]:
    backward = _by_kernels
    if need.g and (dy.shape[0] == 0 or not linear.in_chunks(dy, saved.down_weight, saved.pre)):
        backward = dispatch.next_function("cuda", "feed_forward_bwd training", dy.device, dy.dtype)
    return backward(dy, saved, need)
