"""Whole encoder layers for inference in one call of a backend.

It is no op of the dispatch table, but attention, linear (or linear_int8), layer_norm and rotary fused.

    q, k, v = x Wqᵀ + bq, x Wkᵀ + bk, x Wvᵀ + bv
    a = LayerNorm(x + attention(q, k, v) Woᵀ + bo)
    y = LayerNorm(a + act(a Wiᵀ + bi) Wfᵀ + bf)

or, with the norms before the blocks,

    n = LayerNorm(x), or x
    q, k, v = n Wqᵀ + bq, n Wkᵀ + bk, n Wvᵀ + bv
    a = x + attention(q, k, v) Woᵀ + bo
    y = a + act(LayerNorm(a) Wiᵀ + bi) Wfᵀ + bf

Norms may be RMSNorms, q and k may be rotated, several heads of q may share k and v, attention may have a
window, and tables may score distances. Instead of act(z),
z = a Wiᵀ + bi, there may be act(z1) z2, where z = [z1, z2], or act(g) z with g = a Wgᵀ + bg. A layer may have
bottlenecks, as in fastbert/layers/bottleneck.py, with NoNorms.

A fused layer returns bit for bit what those ops return one after another on the same backend. It saves the
fixed cost of nine calls and the memory of their results, which counts where tokens are few.

Backend functions, found by `launchers`, `open_team` and `sequence_blocks`:

    encoder_layer_weights(linears, norms, scratch, gated) -> weights
        linears: (weight, panels, scale, bias, smooth, input_range, float_rows) of query, key, value,
        attention output, intermediate and output, or of query, key and value joined, attention output, …;
        with panels as the backend's `linear_panels` makes them and scale None. Those of 8-bit layers are
        joined, with panels as `linear_int8_panels` makes them; the last three are as in `ops.linear_int8`.
        bias, smooth and input_range may be None. One more is the activated factor of the intermediate
        layer's rows. gated: whether the intermediate layer has both factors, and panels for
        that. panels may be None: then they are made for the call, in the memory that the list `scratch`
        holds or gets, and the layer works there too. The next call with that list overwrites it. With
        scratch None the weights own the memory.
        norms: (weight or None, bias or None) of both norms.
        A layer with bottlenecks has no joined product. Behind its six linear layers are the bottlenecks of
        the residual, of the output and, if there is one, of keys, then both linear layers of each
        feed-forward block before the last; its norms are in the same order.
    open_team(), close_team(): between the two, the threads of the calling thread's ops stay awake, so that
        each op starts and ends without waking them.
    keeps_panels(linear, rows): see `ops.linear`.
    sequence_blocks(cu_seqlens, rows, fused) -> [(first, last sequence), …]: see `sequence_blocks` below.
    encoder_layer_fwd(x, layers, cu_seqlens, max_seqlen, bias, gate, positions, tables, relative, out,
                      distances, kept) -> y, or (y, rows) with `kept`
        layers: `FusedLayer`s, one after the other, their windows as `checked_window` returns them; x, y:
        (total, hidden), last dimension contiguous; out: the memory for y, or None; bias 4-D; positions int64
        and contiguous, or None if no layer rotates; tables by `rotary` of the layers; the rest as in
        `ops.attention` and `ops.linear`. The backend checks the values of the lengths and positions.

Source: Vaswani et al. 2017, sec. 3.1-3.3; Devlin et al. 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.activation import ACTIVATIONS, GATES
from fastbert.ops.attention_checks import check_bias, check_lengths, checked_window
from fastbert.ops.attention_relative import RelativeScores, ScoreTable, check_columns, checked_relative
from fastbert.ops.rotary import check_tables
from fastbert.runtime import dispatch
from fastbert.runtime.plain import plain


class NarrowBlocks(NamedTuple):
    """How the blocks of a layer with bottlenecks compute; see `fastbert/layers/bottleneck.py`.

    Attributes:
        width: columns of the blocks.
        keys, values: whether queries and keys, and values too, are made from the bottleneck of keys, and not
            from the layer's input.
        feeds: the number of feed-forward blocks before the last.
    """

    width: int
    keys: bool
    values: bool
    feeds: int


class FusedLayer(NamedTuple):
    """A layer as `encoder_layer` takes it.

    Attributes:
        weights: what `encoder_layer_weights` made, for `x`'s device and dtype.
        nheads, headdim: heads, and the size of each; their product, the width of attention, need not be
            hidden.
        inner, activation: columns and activation of the intermediate layer, after the gate if there is one.
        softmax_scale: see `ops.attention`.
        eps: eps of the norm of attention, and of the norm of the feed-forward; None for no norm before
            attention.
        pre_norm: whether the norms come before the blocks, not after their residual sums.
        gated: see `ops.linear`.
        window: see `ops.attention`.
        rotary: the key of the tables that rotate queries and keys; None if they are not rotated.
        narrow: the bottlenecks; None if there are none. The layer's norms are NoNorms then, without eps.
        distances: the tables of distances that queries, and keys, are multiplied with, each None if there is
            none.
        kv_heads: heads of keys and values, a divisor of `nheads`; None for `nheads`.
        rms: whether the norms are RMSNorms.
        head_major: whether the one product of query, key and value has columns (nheads, 3, headdim).
        interleaved: see `ops.rotary`.
    """

    weights: Any
    nheads: int
    headdim: int
    inner: int
    softmax_scale: float
    activation: str | None
    eps: tuple[float | None, float]
    pre_norm: bool = False
    gated: str | None = None
    window: tuple[int, int] | None = None
    rotary: Hashable = None
    narrow: NarrowBlocks | None = None
    distances: tuple[ScoreTable | None, ScoreTable | None] = (None, None)
    kv_heads: int | None = None
    rms: bool = False
    head_major: bool = False
    interleaved: bool = False


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
    positions: Tensor | None = None,
    tables: Mapping[Any, tuple[Tensor, Tensor]] | None = None,
    relative: RelativeScores | None = None,
    out: Tensor | None = None,
    distances: tuple[Tensor, int, int] | None = None,
    kept: tuple[Tensor, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One or more layers, without autograd.

    Args:
        launch: `encoder_layer_fwd` of `launchers`.
        x: (total, hidden).
        layers: in execution order.
        cu_seqlens, max_seqlen, bias, gate: as in `ops.attention.attention`, packed layout; shared by all
            layers.
        positions: (total,) int32 or int64, each token's position in its sequence, if a layer rotates.
        tables: the layers' `rotary` -> (cos, sin) as in `ops.rotary`.
        relative: a bias by distance, shared by all layers; as in `ops.attention.attention`.
        out: memory for the result, contiguous, not overlapping `x`; None: new memory.
        distances: if a layer has tables of distances, (columns, first, last): the columns of
            `RelativeScores`, for scores by the tables' rows from `first` to `last` - 1.
        kept: of one layer without bottlenecks, window, bias and scores of distances: (cu_seqlens of the
            tokens that it keeps after attention, their number). It keeps the first token of each sequence,
            and those others that receive most attention (ops/attention_received.py).

    Returns:
        (total, hidden). With `kept`, ((kept, hidden), the rows of the kept tokens, int64, ascending).

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
        first, second = layer.eps
        if first is not None or not layer.pre_norm:
            checks.eps(cast(float, first))
        checks.eps(second)
        if layer.narrow is not None:
            _check_narrow(layer)
        if layer.kv_heads is not None and (layer.kv_heads < 1 or layer.nheads % layer.kv_heads):
            raise ValueError(f"kv_heads: expected a divisor of {layer.nheads} heads, got {layer.kv_heads}")
        if layer.gated not in (None, *GATES):
            raise ValueError(f"gated: expected None, 'first' or 'second', got {layer.gated!r}")
        batch = cu_seqlens.shape[0] - 1
        shared = check_bias(bias, batch, layer.nheads, max_seqlen, x)
        if relative is not None:
            of_layer = x.new_empty(0, layer.nheads, 1)
            relative = checked_relative(relative, x.shape[:1], batch, max_seqlen, of_layer)
            assert relative is not None
            if any(t is not None for t in (relative.query, relative.key, relative.positions)):
                raise ValueError("relative: expected a bias alone, got scores of tokens, or positions")
        if gate is not None:
            checks.float_tensor("gate", gate, x)
            checks.shape("gate", gate, (layer.nheads,))
    scoring = [table for layer in layers for table in layer.distances if table is not None]
    if scoring:
        if distances is None or relative is not None:
            raise ValueError("distances: expected (columns, first, last) for tables, and no relative")
        columns, first, last = distances
        if not 0 <= first < last <= min(table.rows for table in scoring):
            raise ValueError(f"distances: expected rows of the tables, got {first} to {last}")
        check_columns("distances", columns, max_seqlen, last - first, x)
    rotated = {layer.rotary: layer.headdim for layer in layers if layer.rotary is not None}
    used = {rotary: _checked_tables(rotary, size, positions, tables, x) for rotary, size in rotated.items()}
    if positions is not None:
        positions = plain(positions).long().contiguous() if used else None
    # The kernels know no window that reaches over all tokens
    windows = [layer.window for layer in layers]
    windows = [w if w is None else checked_window(False, w, max_seqlen) for w in windows]
    layers = [layer._replace(window=window) for layer, window in zip(layers, windows, strict=True)]
    if out is not None:
        checks.float_tensor("out", out, x)
        checks.shape("out", out, tuple(x.shape))
        if out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(
                f"out: expected contiguous {x.dtype}, got {out.dtype} with strides {out.stride()}"
            )
    if kept is not None:
        for name, there in {"bias": bias, "relative": relative, "distances": distances, "out": out}.items():
            if there is not None:
                raise ValueError(f"{name}: expected None for a layer that keeps some tokens")
        own = layers[0]
        if len(layers) != 1 or (own.narrow, own.window, own.kv_heads) != (None, None, None):
            raise ValueError(
                "kept: expected None for several layers, or one with a window, bottlenecks or kv_heads"
            )
        check_lengths(kept[0], max_seqlen, x)
        checks.shape("kept", kept[0], tuple(cu_seqlens.shape))
        if int(kept[0][-1]) != kept[1]:
            raise ValueError(f"kept: expected the number {int(kept[0][-1])} of its lengths, got {kept[1]}")
    shared, gate = (None if t is None else plain(t) for t in (shared, gate))
    x, cu_seqlens = plain(x), plain(cu_seqlens)
    given = positions, used, relative, out, distances if scoring else None
    if kept is not None:
        given = *given, (plain(kept[0]), kept[1])
    return launch(checks.rows(x), layers, cu_seqlens, max_seqlen, shared, gate, *given)


def _check_narrow(layer: FusedLayer) -> None:
    narrow = layer.narrow
    assert narrow is not None
    if narrow.width < 1 or narrow.feeds < 0 or (narrow.values and not narrow.keys):
        raise ValueError(
            f"narrow: expected width >= 1, feeds >= 0, and values only beside keys, got {narrow}"
        )
    for name in ("pre_norm", "gated", "rotary", "kv_heads", "rms", "head_major"):
        if getattr(layer, name):
            raise ValueError(
                f"{name}: expected none in a layer with bottlenecks, got {getattr(layer, name)!r}"
            )


def _checked_tables(
    rotary: Hashable,
    headdim: int,
    positions: Tensor | None,
    tables: Mapping[Any, tuple[Tensor, Tensor]] | None,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of a layer that rotates, checked like the positions."""
    if positions is None or tables is None or rotary not in tables:
        raise ValueError(f"tables: expected positions, and tables of {rotary!r}")
    checks.int_tensor("positions", positions, x)
    checks.shape("positions", positions, x.shape[:1])
    cos, sin = tables[rotary]
    check_tables(cos, sin, headdim, "x", x)
    return plain(cos).contiguous(), plain(sin).contiguous()
