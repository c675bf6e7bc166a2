"""Whole encoder layers for inference in one call of a backend.

It is no op of the dispatch table, but attention, linear (or linear_int8) and layer_norm fused.

    q, k, v = x Wqᵀ + bq, x Wkᵀ + bk, x Wvᵀ + bv
    a = LayerNorm(x + attention(q, k, v) Woᵀ + bo)
    y = LayerNorm(a + act(a Wiᵀ + bi) Wfᵀ + bf)

A fused layer returns bit for bit what those ops return one after another on the same backend. It saves the
fixed cost of nine calls and the memory of their results, which counts where tokens are few.

Backend functions, found by `launchers`, `open_team` and `sequence_blocks`:

    encoder_layer_weights(linears, norms, scratch) -> weights
        linears: (weight, panels, scale, bias) of query, key, value, attention output, intermediate and
        output, with panels as the backend's `linear_panels` makes them and scale None. Or, of 8-bit layers:
        of query, key and value joined, attention output, …, with panels as `linear_int8_panels` makes them.
        bias may be None. norms: (weight, bias or None) of both norms. panels may be None: then they are made
        for the call, in the memory that the list `scratch` holds or gets, and the layer works there too. The
        next call with that list overwrites it. With scratch None the weights own the memory.
    open_team(), close_team(): between the two, the threads of the calling thread's ops stay awake, so that
        each op starts and ends without waking them.
    keeps_panels(linear, rows): see `ops.linear`.
    sequence_blocks(cu_seqlens, rows, fused) -> [(first, last sequence), …]: see `sequence_blocks` below.
    encoder_layer_fwd(x, layers, cu_seqlens, max_seqlen, bias, gate, out) -> y
        layers: `FusedLayer`s, one after the other; x, y: (total, hidden), last dimension contiguous; out:
        the memory for y, or None; bias 4-D; the rest as in `ops.attention` and `ops.linear`.

Source: Vaswani et al. 2017, sec. 3.1-3.3; Devlin et al. 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.activation import ACTIVATIONS
from fastbert.ops.attention_checks import check_bias, check_lengths
from fastbert.runtime import dispatch


class FusedLayer(NamedTuple):
    """A layer as `encoder_layer` takes it.

    Attributes:
        weights: what `encoder_layer_weights` made, for `x`'s device and dtype.
        nheads, headdim: heads, and the size of each; their product, the width of attention, need not be
            hidden.
        inner, activation: columns and activation of the intermediate layer.
        softmax_scale: see `ops.attention`.
        eps: eps of the norm after attention, and of the norm after the feed-forward.
    """

    weights: Any
    nheads: int
    headdim: int
    inner: int
    softmax_scale: float
    activation: str | None
    eps: tuple[float, float]


_LAUNCHERS = ("encoder_layer_weights", "encoder_layer_fwd", "keeps_panels")


def launchers(device: torch.device, dtype: torch.dtype, linear: str) -> tuple[Callable[..., Any], ...] | None:
    """(encoder_layer_weights, encoder_layer_fwd, keeps_panels) of the serving backend.

    That backend serves attention, layer_norm and `linear` ("linear" or "linear_int8"). None where several
    backends serve these, or where the serving backend has no fused layer.
    """
    return dispatch.serving_functions(_LAUNCHERS, ("attention", "layer_norm", linear), device, dtype)


def sequence_blocks(cu_seqlens: Tensor, x: Tensor, fused: bool) -> list[tuple[int, int]]:
    """(first, last) sequence of each block of a large batch that should run through a layer in inference.

    The blocks run one after the other. Empty where all rows should run at once. The device decides, whichever
    backend serves on it: a CPU needs less memory for blocks, a GPU is faster on all rows together.

    Args:
        cu_seqlens: (batch + 1,) of the packed rows.
        x: (total, hidden), the rows.
        fused: whether each block runs as one `encoder_layer`, or op by op.
    """
    find = dispatch.device_function("sequence_blocks", "attention", x.device, x.dtype)
    return [] if find is None else find(cu_seqlens, x.shape[0], fused)


_close: Callable[[], None] | None = None  # of the backend whose `open_team` was called


def open_team(x: Tensor) -> None:
    """Keep the serving backend's threads awake for the layers that follow, in inference on a CPU.

    Otherwise it does nothing. `close_team` has to follow in any case. Until then only our ops should run:
    PyTorch's own get no threads.

    Args:
        x: (total, hidden), the first layer's input.
    """
    global _close
    if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    team = dispatch.serving_functions(
        ("open_team", "close_team"), ("attention", "layer_norm"), x.device, x.dtype
    )
    if team is not None:
        launch, _close = team
        launch()


def close_team() -> None:
    """Release the threads that `open_team` keeps awake, if it did."""
    if _close is not None and not torch.compiler.is_compiling():
        _close()


def encoder_layer(
    launch: Callable[..., Any],
    x: Tensor,
    layers: Sequence[FusedLayer],
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    bias: Tensor | None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One or more layers, without autograd.

    Args:
        launch: `encoder_layer_fwd` of `launchers`.
        x: (total, hidden).
        layers: in execution order.
        cu_seqlens, max_seqlen, bias, gate: as in `ops.attention.attention`, packed layout; shared by all
            layers.
        out: memory for the result, contiguous, not overlapping `x`; None: new memory.

    Returns:
        (total, hidden).

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    checks.float_tensor("x", x)
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"x: expected shape (total, hidden), got {tuple(x.shape)}")
    check_lengths(cu_seqlens, max_seqlen, x)
    if not layers:
        raise ValueError("layers: expected at least one")
    for layer in layers:
        for name, size in zip(FusedLayer._fields[1:4], layer[1:4], strict=True):
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        activation = layer.activation
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(
                f"activation: expected None or one of {', '.join(ACTIVATIONS)}, got {activation!r}"
            )
        for eps in layer.eps:
            checks.eps(eps)
        shared = check_bias(bias, cu_seqlens.shape[0] - 1, layer.nheads, max_seqlen, x)
        if gate is not None:
            checks.float_tensor("gate", gate, x)
            checks.shape("gate", gate, (layer.nheads,))
    if out is not None:
        checks.float_tensor("out", out, x)
        checks.shape("out", out, tuple(x.shape))
        if out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(
                f"out: expected contiguous {x.dtype}, got {out.dtype} with strides {out.stride()}"
            )
    shared, gate = (None if t is None else dispatch.plain(t) for t in (shared, gate))
    x, cu_seqlens = dispatch.plain(x), dispatch.plain(cu_seqlens)
    return launch(checks.rows(x), layers, cu_seqlens, max_seqlen, shared, gate, out)
