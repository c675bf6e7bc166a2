"""Executor of every layer, op by op as in `fastbert.layers.encoder`. No other executor trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastbert.execution.blocks import blocks_of, by_blocks
from fastbert.execution.call import Call, Step
from fastbert.layers import encoder, first_token
from fastbert.layers.asked import Asked
from fastbert.layers.linear import common_kind
from fastbert.ops import checks


def serves(x: Tensor, call: Call) -> str | None:
    """See `plan`; any call is served."""
    return None


def takes(step: Step, x: Tensor, call: Call) -> str | tuple[Any, ...]:
    """See `plan`."""
    return () if step.reason is None else step.reason


def kept(group: list[tuple[Step, tuple[Any, ...]]]) -> list[tuple[Step, tuple[Any, ...]]]:
    """See `plan`."""
    return group


def run(group: list[tuple[Step, tuple[Any, ...]]], x: Tensor, call: Call) -> Tensor:
    """See `plan`."""
    rounded, call.half = None, rounds_products(x)
    steps = [step for step, _ in group]
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        form, parts, asked = step.form, step.parts, call.asked(step)
        batch = call.batch if form is None else form.own_batch(call.batch)
        given, rounded = rounded, None
        if step.called or form is None or parts is None:
            x = finished(call, asked, x, *recomputed(step, call, step.layer, x, batch, asked))
            continue
        step.layer.begin(x)
        by_parts = not (asked.first_only or step.layer.training or any(parts.rates))
        blocks = blocks_of(step, x, call, fused=False) if by_parts else []
        if blocks:
            layer = functools.partial(encoder.layer, form, parts, asked=asked)
            x = call.keep(
                by_blocks(blocks, x, batch, lambda rows, some, _, layer=layer: layer(rows, some)[0])
            )
        else:
            reads = call.half and following is not None and _reads_rounded(following, x, call)
            rounds = [] if reads else None
            more = asked._replace(rounded=given, rounds=rounds)
            layer = first_token.layer if asked.first_only else encoder.layer
            found = recomputed(step, call, layer, form, parts, x, batch, more)
            x = finished(call, asked, x, *found)
            rounded = rounds[0] if rounds else None
    return x


def rounds_products(x: Tensor) -> bool:
    """Whether autocast rounds what products read to half precision."""
    half = checks.autocast_dtype(x) in (torch.bfloat16, torch.float16)
    return half and not torch.compiler.is_compiling()


def _reads_rounded(step: Step, x: Tensor, call: Call) -> bool:
    """Whether a layer, under such autocast, multiplies the output of the layer before once and as it is."""
    form, parts = step.form, step.parts
    if form is None or parts is None or step.called or parts.int8 or form.pre_norm or form.bottleneck:
        return False
    only = call.first_only and step.number == call.last
    if only or call.recompute_every or call.kept or call.after_first is not None:
        return False
    modules = [parts.query, parts.key, parts.value]
    kind = parts.kind or common_kind(*modules)
    return kind is not None and kind.float_weight and (form.packed or kind.joins(x, modules))


def finished(call: Call, asked: Asked, x: Tensor, y: Tensor, more: Tensor | None) -> Tensor:
    """`y`, the output of a layer for its input `x`, once the call has taken what else is asked for."""
    if asked.kept is None or more is None:
        return call.keep(y, more)
    call.shrink(x, asked.kept, more)
    return call.keep(y)


def recomputed(step: Step, call: Call, layer: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor | None]:
    """`layer(*args)`, whose results are computed again in backward if the call says so."""
    if call.recompute_every > 0 and step.number % call.recompute_every == 0:
        return checkpoint(layer, *args, use_reentrant=False)
    return layer(*args)
