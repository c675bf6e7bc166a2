"""`feed_forward` by a backend's `linear`, for every backend; contract in fastbert/ops/feed_forward.py.

`by_linear` makes the two functions of a backend from its `linear`, and from what makes the gradient between
the two products where the backend has a kernel for that.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from fastbert.backends.reference import linear
from fastbert.ops.checks import FLOATS
from fastbert.ops.feed_forward import FeedForwardInputs, FeedForwardNeeds, FeedForwardSaved
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved, wide_gradient

DTYPES = FLOATS


def by_linear(
    first: ModuleType, second: ModuleType, inner_gradient: Callable[..., Any] | None = None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(feed_forward_fwd, feed_forward_bwd).

    Args:
        first, second: modules with the `linear_fwd` and `linear_bwd` of the two products.
        inner_gradient: (dy, down_weight, pre, activation, need_dup_bias) -> (g, dup_bias); with None, and
            where the activation is gated, the two `linear_bwd` make g.
    """

    def forward(inputs: FeedForwardInputs, save: bool) -> tuple[Tensor, Tensor, Tensor]:
        x, up_weight, up_bias, down_weight, activation, gated = inputs
        inner, pre = first.linear_fwd(LinearInputs(x, up_weight, up_bias, activation, gated=gated), save)
        y = second.linear_fwd(LinearInputs(inner, down_weight), False)[0]
        return y, pre, inner if save else x.new_empty(0)

    def backward(dy: Tensor, saved: FeedForwardSaved, need: FeedForwardNeeds) -> tuple[Tensor, ...]:
        x, up_weight, down_weight, pre, inner, activation, gated = saved
        make_g = None if gated else inner_gradient
        need_dinner = need.g and make_g is None
        needs = LinearNeeds(need_dinner, need.ddown_weight and not need.wide, False)
        weight = down_weight if need_dinner else None
        dinner, ddown_weight, _ = second.linear_bwd(dy, LinearSaved(inner, weight), needs)
        if need.ddown_weight and need.wide and inner is not None:
            ddown_weight = wide_gradient(dy, inner)
        if not need.g:
            return *(dy.new_empty(0) for _ in range(3)), ddown_weight
        if make_g is None:
            ahead = LinearSaved(x, up_weight, pre, activation, gated)
            return *first.linear_bwd(dinner, ahead, LinearNeeds(*need[:3])), ddown_weight
        g, dup_bias = make_g(dy, down_weight, pre, activation, need.dup_bias)
        needs = LinearNeeds(need.dx, need.dup_weight and not need.wide, False)
        dx, dup_weight, _ = second.linear_bwd(g, LinearSaved(x, up_weight), needs)
        if need.dup_weight and need.wide and x is not None:
            dup_weight = wide_gradient(g, x)
        return dx, dup_weight, dup_bias, ddown_weight

    return forward, backward


feed_forward_fwd, feed_forward_bwd = by_linear(linear, linear)
