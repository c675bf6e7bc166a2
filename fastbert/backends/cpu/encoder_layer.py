"""A whole layer by the `cpu` backend: csrc/cpu/encoder_layer; contract in fastbert/ops/encoder_layer.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fastbert.backends.cpu.attention import relative_args
from fastbert.backends.cpu.linear import linear_panels
from fastbert.backends.extension import DTYPE_CODES, bias_args, vector
from fastbert.ops.activation import CODES, GATE_CODES
from fastbert.ops.attention_relative import RelativeScores
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.encoder_layer import FusedLayer
from fastbert.runtime.loader import address
from fastbert.runtime.loader import extension as _C
from fastbert.runtime.plain import plain

# Bytes from which glibc returns a freed block to the system instead of leaving a hole in its heap.
_RETURNED = 33 << 20
# In place of a linear layer that is missing.
_NOTHING = (0, 0, 0, 0, 0, 0, False)


def open_team() -> None:
    _C.open_team(torch.get_num_threads())


def close_team() -> None:
    _C.close_team()


def encoder_layer_weights(
    linears: Sequence[Sequence[Any]],
    norms: Sequence[Sequence[TensorOrNone]],
    scratch: list[Tensor] | None = None,
    gated: bool = False,
) -> tuple[Any, ...]:
    """The `weights` of a `FusedLayer`: the numbers for csrc/bindings/encoder_layer.cpp, the instruction set
    that 8-bit panels are made for, the tensors behind the numbers, `scratch`, (shapes of the weights, gated),
    which the size of panels does not show, because panels are rounded up, and the numbers of bottlenecks.
    """
    made_for = [tuple(weight.shape) for weight, *_ in linears], gated
    linears, norms = (
        [[*map(_plain, one)] for one in each] for each in (_with_panels(linears, scratch, gated), norms)
    )
    numbers, isa = [], _C.cpu_isa()
    for each in linears[:7] if len(norms) == 2 else linears[:6]:
        numbers += _linear_numbers(*each)
        if len(linears) < 6 and len(numbers) == len(_NOTHING):  # one product makes query, key and value
            numbers += 2 * _NOTHING
    if len(linears) in (4, 6) or len(norms) > 2:
        numbers += _NOTHING
    for norm in norms[:2]:
        numbers += _norm_numbers(*norm)
    held = tuple(chain(*linears, *norms))
    return tuple(numbers), isa, held, scratch, made_for, _bottleneck_numbers(linears[6:], norms[2:])


def _norm_numbers(weight, bias):
    return *vector(weight), *vector(bias)


def _linear_numbers(panels, scale, bias, smooth, input_range, float_rows):
    scale, *rows = (0 if t is None else address(t) for t in (scale, smooth, input_range))
    return address(panels), scale, *vector(bias), *rows, float_rows


def _bottleneck_numbers(linears, norms):
    """The residual's bottleneck, the output's, that of keys or nothing, and the blocks before the last."""
    if not norms:
        return ()
    feeds = len(linears) - len(norms)
    pairs, numbers = len(norms) - feeds, []
    for linear, norm in zip(linears[:pairs], norms[:pairs], strict=True):
        numbers += (*_linear_numbers(*linear), *_norm_numbers(*norm))
    if pairs == 2:
        numbers += (*_NOTHING, *_norm_numbers(None, None))
    for i, norm in enumerate(norms[pairs:]):
        up, down = linears[pairs + 2 * i : pairs + 2 * i + 2]
        numbers += (*_linear_numbers(*up), *_linear_numbers(*down), *_norm_numbers(*norm))
    return tuple(numbers)


def _plain(value: Any) -> Any:
    return plain(value) if isinstance(value, Tensor) else value


def _with_panels(linears, scratch, gated):
    """Each without its weight; panels made here lie side by side in the scratch memory."""
    gates = [gated and each is linears[-2] for each in linears]
    sizes = [
        0 if panels is not None else _C.cpu_linear_panels_size(weight.shape[1], weight.shape[0], gate)
        for (weight, panels, *_), gate in zip(linears, gates, strict=True)
    ]
    memory = None
    if any(sizes):
        like = linears[0][0]
        memory = iter(_memory([] if scratch is None else scratch, 0, sum(sizes), like).split(sizes))
    return [
        (panels if memory is None or not size else linear_panels(weight, into, gate), *rest)
        for (weight, panels, *rest), size, into, gate in zip(
            linears, sizes, memory or [None] * len(sizes), gates, strict=True
        )
    ]


def _memory(scratch, place, size, like):
    """`size` elements of the dtype of `like`: the list's tensor at `place`, made where it is too small."""
    if len(scratch) <= place or scratch[place].dtype != like.dtype or scratch[place].numel() < size:
        scratch[place : place + 1] = [like.new_empty(max(size, _RETURNED // like.element_size()))]
    return scratch[place][:size]


def encoder_layer_fwd(
    x: Tensor,
    layers: Sequence[FusedLayer],
    cu_seqlens: Tensor,
    max_seqlen: int,
    bias: Tensor | None,
    gate: Tensor | None,
    positions: Tensor | None,
    tables: Mapping[Any, tuple[Tensor, Tensor]],
    relative: RelativeScores | None = None,
    out: Tensor | None = None,
    distances: tuple[Tensor, int, int] | None = None,
    kept: tuple[Tensor, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    total, hidden = x.shape
    batch = cu_seqlens.shape[0] - 1
    cu_seqlens = cu_seqlens.contiguous()
    # one form of bias serves all: a layer with other heads takes none, or one for each of them
    bias, bias_numbers = bias_args(bias, batch, layers[0].nheads, max_seqlen)
    if gate is not None:
        gate = gate.float().contiguous()
    scores, _held = relative_args(relative)
    if distances is not None:
        columns, start, end = distances[0].contiguous(), *distances[1:]
        half = x.dtype == torch.bfloat16
        scores, _held = (columns.data_ptr(), columns.shape[0], end - start, half, *7 * (0,)), [columns]
    y = x.new_empty(total if kept is None else kept[1], hidden) if out is None else out
    ends = None if kept is None else kept[0].contiguous()
    rows = None if kept is None else cu_seqlens.new_empty(kept[1], dtype=torch.int64)
    code, sizes = DTYPE_CODES[x.dtype], (batch, total, max_seqlen, hidden)
    threads, work, room = torch.get_num_threads(), None, 0
    scratch = layers[0].weights[3]
    # A large batch: the memory stays until its last layer has run, and leaves no holes in the heap.
    if scratch:
        room = max(_C.cpu_encoder_layer_work(code, sizes, _sizes(layer), threads) for layer in layers)
        work = _memory(scratch, 1, -(-room // x.element_size()), x)
    _C.cpu_encoder_layer_fwd(
        code,
        sizes,
        _numbers(layers, hidden, tables, 0 if distances is None else distances[1]),
        cu_seqlens.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        bias_numbers,
        0 if gate is None else gate.data_ptr(),
        0 if positions is None else positions.data_ptr(),
        y.data_ptr(),
        threads,
        0 if work is None else work.data_ptr(),
        room,
        scores,
        () if ends is None or rows is None else (ends.data_ptr(), rows.data_ptr()),
    )
    return y if rows is None else (y, rows)


def _sizes(layer):
    """The layer's sizes as csrc/bindings/encoder_layer.cpp takes them."""
    width = 0 if layer.narrow is None else layer.narrow.width
    return *layer[1:4], width, layer.nheads if layer.kv_heads is None else layer.kv_heads


def _shapes(layer, hidden, count):
    """The shapes of a layer's weights, `count` of them, and the columns of its norms."""
    inner, width, narrow = layer.inner, layer.nheads * layer.headdim, layer.narrow
    if narrow is not None:
        own, keys = narrow.width, int(narrow.keys)
        given = [own if from_keys else hidden for from_keys in (keys, keys, narrow.values)]
        shapes = [*((width, columns) for columns in given), (own, width), (inner, own), (own, inner)]
        shapes += [(own, hidden), (hidden, own), *[(own, hidden)] * keys]
        shapes += [(inner, own), (own, inner)] * narrow.feeds
        return shapes, [own, own, own, hidden, *[own] * (keys + narrow.feeds)]
    halves = 1 if layer.gated is None else 2
    shared = width if layer.kv_heads is None else layer.kv_heads * layer.headdim
    shapes = [(width, hidden), (shared, hidden), (shared, hidden)]
    shapes = [(width + 2 * shared, hidden)] if count < 6 else shapes
    shapes += (hidden, width), (halves * inner, hidden), (hidden, inner)
    return shapes + [(inner, hidden)] * (count - len(shapes)), [hidden] * 2


def _numbers(layers, hidden, tables, start):
    """Each layer as csrc/bindings/encoder_layer.cpp takes it."""
    isa, taken = _C.cpu_isa(), []
    for layer in layers:
        numbers, made_with, held, _, made_for, bottleneck = layer.weights
        _, nheads, headdim, inner, scale, activation, eps, pre_norm, gated, window, rotary, *more = layer
        narrow, scored, _, *forms = more
        if made_with != isa:
            raise RuntimeError(f"weights: panels made for {made_with}, and {isa} is in use now")
        count = len(made_for[0])
        shapes, columns = _shapes(layer, hidden, count)
        norms = held[6 * count :]
        last, int8 = held[18 if count < 6 else 30], held[1] is not None  # panels of the output layer
        size_of = _C.cpu_linear_int8_panels_size if int8 else _C.cpu_linear_panels_size
        if (
            made_for != (shapes, gated is not None)
            or len(norms) != 2 * len(columns)
            or any(
                narrow is not None if norm is None else norm.shape != (columns[i // 2],)
                for i, norm in enumerate(norms)
            )
            or last.numel() != size_of(inner, shapes[3][0] if count >= 6 else hidden)
        ):
            raise ValueError(
                f"weights: expected those of a layer from {hidden} to {nheads} heads of {headdim}, and to "
                f"{inner} columns{'' if gated is None else ' with a gate'}, and back"
                + ("" if narrow is None else f", with bottlenecks {narrow}")
            )
        left, right = (-1, -1) if window is None else window
        by_tables = (
            _table_numbers(rotary, tables),
            () if narrow is None else (narrow.keys, narrow.values, *bottleneck),
        )
        kind = scale, pre_norm, *forms, GATE_CODES[gated], left, right, *by_tables
        kind += (_distance_numbers(scored, nheads, headdim, start),)
        first = -1.0 if eps[0] is None else eps[0]
        taken.append((_sizes(layer), numbers, first, eps[1], CODES[activation], *kind))
    return tuple(taken)


def _distance_numbers(distances, nheads, headdim, start):
    panels, rows = [0 if each is None else each.panels.data_ptr() for each in distances], 0
    for each in distances:
        if each is None:
            continue
        rows, size = each.rows, nheads * _C.cpu_linear_panels_size(headdim, each.rows)
        if each.panels.numel() != size:
            raise ValueError(f"distances: expected {size} elements of panels, got {each.panels.numel()}")
    return *panels, rows, start


def _table_numbers(rotary, tables):
    if rotary is None:
        return 0, 0, 0, 0
    cos, sin = tables[rotary]
    return cos.data_ptr(), sin.data_ptr(), *cos.shape
