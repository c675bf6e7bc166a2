"""nn.Linear on our ops: its product, and what is derived from its weights and kept for inference.

Panels are a weight in the layout of a backend's kernels; joined weights are those of several layers, which
one product multiplies.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.form import Half
from fastbert.ops import checks
from fastbert.ops.feed_forward import feed_forward, pays
from fastbert.ops.linear import LinearInputs, forward_of, linear
from fastbert.ops.linear import panel_maker as linear_panel_maker
from fastbert.ops.linear_norm import linear_norm, new_arrivals
from fastbert.ops.linear_norm import pays as joining_pays
from fastbert.runtime import dispatch, prepared


class _Panels(threading.local):
    """One thread's setting of panels.

    Attributes:
        kept: whether panels outlive the call that made them.
    """

    kept = True


_panels = _Panels()


@contextlib.contextmanager
def passing_panels() -> Iterator[None]:
    """A context in which this thread keeps no new panels, but makes them for each product.

    It is for many large batches in a row. There panels take as much memory as the weights and save little
    time, 3% for BERT-base at 1,024 rows (csrc/cpu/NOTES.md).
    """
    before, _panels.kept = _panels.kept, False
    try:
        yield
    finally:
        _panels.kept = before


def weight_panels(module: nn.Linear, x: Tensor, gated: bool = False) -> Tensor | None:
    """Panels of the module's weight for the serving backend, made at the first call and kept for inference.

    In `passing_panels` they are not kept. None in training, under torch.compile, and if the backend keeps no
    panels for this many rows. Panels for a gated product (`gated`) serve no other.
    """
    if module.training or torch.compiler.is_compiling():
        return None
    dtype = module.weight.dtype
    # Autocast does not cast float64
    if dtype != torch.float64:
        dtype = checks.autocast_dtype(x) or dtype
    make_panels = linear_panel_maker(x.device, dtype, x.shape[:-1].numel(), gated)
    if make_panels is None:
        return None

    def build():
        checks.float_tensor("weight", module.weight)
        return make_panels(module.weight.to(dtype).contiguous())

    return prepared.derived(module, ("panels", dtype, gated), (module.weight,), build, keep=_panels.kept)


def float_product(
    x: Tensor,
    owner: nn.Module,
    modules: list[nn.Linear],
    activation: str | None = None,
    with_bias: bool = True,
    gated: Half | None = None,
) -> Tensor:
    """act(x @ [W1; W2; …].T + [b1; b2; …]) of nn.Linear layers, as one product; see `LinearKind`."""
    if len(modules) == 1:
        module, own = modules[0], modules[0]._parameters
        rows, inner, outer, dtype = x.shape[0], module.in_features, module.out_features, x.dtype
        given, sizes = [x, own.get("weight"), own.get("bias")], [(rows, inner), (outer, inner), (outer,)]
        if with_bias and gated is None and checks.are_plain(given, [dtype] * 3, sizes):
            launch = dispatch.launcher(forward_of(activation, False, rows), x.device, dtype)
            panels = weight_panels(module, x) if checks.has_values(x) else None
            return launch(LinearInputs(x, given[1], given[2], activation, panels=panels), False)[0]
        bias = module.bias if with_bias else None
        panels = weight_panels(module, x, gated is not None)
        return linear(x, module.weight, bias, activation, panels=panels, gated=gated)
    weights: list[Tensor] = [m.weight for m in modules]
    biases: list[Tensor] = [m.bias for m in modules]
    grad = torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in weights))
    if grad or torch.compiler.is_compiling():
        weight, bias = torch.cat(weights), torch.cat(biases)
    else:
        dtype = checks.autocast_dtype(x) or weights[0].dtype
        weight, bias = joined_weights(owner, weights, biases, dtype)
    return linear(x, weight, bias if with_bias else None, activation)


def joined_weights(
    owner: nn.Module, weights: list[Tensor], biases: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """([W1; W2; …], [b1; b2; …]) in `dtype`, which `owner` keeps until one of them changes."""
    return prepared.derived(
        owner,
        ("joined", dtype),
        (*weights, *biases),
        lambda: (torch.cat(weights).to(dtype), torch.cat(biases).to(dtype)),
    )


def float_joins(x: Tensor, modules: list[nn.Linear]) -> bool:
    """Whether one product of all the modules is faster than one product each.

    On a CPU it is not, and it would need a copy of the weights.
    """
    return x.is_cuda and all(m.bias is not None for m in modules)


def float_layer_operands(
    x: Tensor, owner: nn.Module, modules: list[nn.Linear], gated: bool = False
) -> list[tuple[Any, ...]] | None:
    """See `LinearKind`. Each module keeps its own panels."""
    if any(m.weight.dtype != x.dtype or m.weight.device != x.device for m in modules):
        return None
    panels = [weight_panels(m, x, gated and m is modules[-2]) for m in modules]
    return [(m.weight, own, None, m.bias, None, None, False) for m, own in zip(modules, panels, strict=True)]


def float_feed(x: Tensor, up: Any, down: Any, activation: str | None, gated: Half | None) -> Tensor | None:
    """See `LinearKind`: one op in training, whose backward reads less memory."""
    if activation is None or not pays(x) or not _is_trained((x,), up, down):
        return None
    return feed_forward(x, up.weight, up.bias, down.weight, activation, gated)


def float_add(x: Tensor, module: nn.Linear, residual: Tensor) -> Tensor | None:
    """See `LinearKind`: one op on a CPU. On a GPU the fastest product takes no residual."""
    if x.is_cuda or not module.weight.dtype == x.dtype == residual.dtype:
        return None
    return linear(x, module.weight, module.bias, residual=residual, panels=weight_panels(module, x))


def float_norm(
    x: Tensor, module: nn.Linear, residual: Tensor, norm: Any, arrivals: list[Tensor] | None
) -> Tensor | None:
    """See `LinearKind`: one op with LayerNorm in inference, where that pays."""
    if (
        type(norm) is not nn.LayerNorm
        or torch.compiler.is_compiling()
        or not module.weight.dtype == residual.dtype == x.dtype
        or not joining_pays(x, module.weight.shape[0])
        or checks.autocast_dtype(x) is not None
        or _is_trained((x, residual), module, norm)
    ):
        return None
    if arrivals is not None and not arrivals:
        arrivals.append(new_arrivals(x.device))
    weights = module.weight, module.bias, residual, norm.weight, norm.bias
    return linear_norm(x, *weights, eps=norm.eps, arrivals=arrivals[0] if arrivals else None)


def _is_trained(tensors: tuple[Tensor, ...], *modules: Any) -> bool:
    """Whether backward will pass through these tensors, linear layers or norms."""
    if not torch.is_grad_enabled():
        return False
    parameters = [p for m in modules for p in (m.weight, m.bias) if p is not None]
    return any(map(attrgetter("requires_grad"), (*tensors, *parameters)))
