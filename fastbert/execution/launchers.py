"""Executor of inference on a GPU, which calls the backends' launchers itself, where `gpu` does not serve.

On a GPU a batch of few tokens takes the device less time than the host's checks take, because each op checks
all its arguments, and each layer its parts. This executor checks the batch once, and all parameters of a
layer at a time. It calls the same launchers with the same arguments as the ops, so the bits are the same.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.execution.call import Call, Step
from fastbert.layers.batch import PackedBatch
from fastbert.layers.float_linear import joined_weights
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.modules import is_plain
from fastbert.ops import checks, linear_norm
from fastbert.ops.attention_checks import check_bias, check_lengths
from fastbert.ops.attention_inputs import CAUSAL, EVERYWHERE, AttentionInputs
from fastbert.ops.attention_places import checked_table
from fastbert.ops.layer_norm import NARROW, LayerNormInputs
from fastbert.ops.linear import LinearInputs, forward_of
from fastbert.ops.linear_norm import LinearNormInputs
from fastbert.runtime import dispatch
from fastbert.runtime.plain import plain
from fastbert.runtime.table import rows_kind

_ORDINARY = frozenset((Tensor, nn.Parameter))
_is_neg, _is_zero = torch._C.TensorBase.is_neg, torch._C.TensorBase._is_zerotensor


class Checked(NamedTuple):
    """What is known of a batch, for all layers with the same heads.

    Attributes:
        bias: the bias as attention's launcher takes it, or None.
        table: the table of attention's places, or None.
    """

    bias: Tensor | None
    table: Tensor | None


class Taken(NamedTuple):
    """What a layer computes with.

    Attributes:
        form: the layer's form, with an activation of `fastbert.ops.activation`.
        parameters: weight and bias of query, key, value, attention output, intermediate, output, both norms.
        eps: the eps of both norms.
    """

    form: LayerForm
    parameters: list[Tensor]
    eps: tuple[float, float]


def on_gpu(device: torch.device) -> bool:
    """Whether the host's time counts for layers on the device."""
    return device.type == "cuda"


def serves(x: Tensor, call: Call) -> str | None:
    """See `plan`."""
    if not on_gpu(x.device):
        return f"the tokens are on {x.device}"
    if not call.inference:
        return "gradients are recorded, or torch.compile traces the call"
    if call.wants_attentions or call.taps is not None or call.gates is not None:
        return "gates are set, or what attention computes inside is asked for"
    if call.batch.lengths is not None:
        return "a text is long enough to attend by blocks"
    if call.kept:
        return "tokens leave between the layers"
    if checks.autocast_dtype(x) is not None:
        return "autocast is on"
    ends = call.batch.cu_seqlens
    if (
        type(x) is not Tensor
        or x.dtype not in checks.FLOATS
        or x.dim() != 2
        or x.shape[0] == 0
        or x.shape[1] <= NARROW
        or not x.is_contiguous()
        or x.is_neg()
        or x._is_zerotensor()
        or type(ends) is not Tensor
        or ends.is_neg()
    ):
        return "the tokens are of a kind that each op has to check"
    return None


def takes(step: Step, x: Tensor, call: Call) -> str | Taken:
    """See `plan`."""
    if call.first_only and step.number == call.last:
        return "only the first token of each sequence is wanted"
    return parameters_of(step, x)


def parameters_of(step: Step, x: Tensor) -> str | Taken:
    """What the layer computes with, or why its ops would not pass all of it on as it is."""
    form, parts = step.form, step.parts
    if form is None or parts is None:
        return step.reason or "the layer has mathematics of its own"
    if form.kinds:
        return f"it does not know layers with {', '.join(sorted(form.kinds))}"
    if form.activation is None:
        return "fastbert does not have the activation"
    if parts.int8 or not parts.fuses_norm or parts.feed is not None or any(parts.rates):
        return "8-bit copies run, something drops, or our ops do not compute all of the layer"
    if step.called:
        return "something looks at the layer's calls"
    return _plain(form, parts, x) or "a part was replaced, or its op has to check a parameter"


def _plain(form: LayerForm, parts: Parts, x: Tensor) -> Taken | None:
    """The layer's parameters; None if a part is not plain, or if they do not fit `x` and one another."""
    found = []
    for module in parts[:8]:
        kind = nn.Linear if len(found) < 12 else nn.LayerNorm
        if not is_plain(module, kind):
            return None
        own = module._parameters
        weight, bias = own.get("weight"), own.get("bias")
        if weight is None or bias is None:
            return None
        found += (weight, bias)
    eps = checks.eps(parts.attention_norm.eps), checks.eps(parts.output_norm.eps)
    width, inner = form.nheads * form.head_dim, found[8].shape[0]
    fits = width > 0 and inner > 0 and _fit(found, _shapes(x.shape[1], width, inner), x)
    return Taken(form, found, eps) if fits else None


@functools.cache
def _shapes(hidden: int, width: int, inner: int) -> list[tuple[int, ...]]:
    """The shapes of a layer's parameters; attention has `width` columns, the feed-forward block `inner`."""
    wide = [(width, hidden)] * 3 + [(hidden, width), (inner, hidden), (hidden, inner)]
    return [shape for matrix in wide for shape in (matrix, matrix[:1])] + [(hidden,)] * 4


def _fit(parameters: list[Tensor], shapes: list[tuple[int, ...]], x: Tensor) -> bool:
    """Whether the ops would pass on these parameters as they are.

    It runs at every call, because `parameter.data = other` may change the answer. So C code walks the lists.
    """
    dtype, index = x.dtype, x.get_device()
    return (
        _ORDINARY.issuperset(map(type, parameters))
        and list(map(Tensor.size, parameters)) == shapes
        and all(map(Tensor.is_contiguous, parameters))
        and [t.dtype for t in parameters] == [dtype] * 16
        and list(map(Tensor.get_device, parameters)) == [index] * 16
        and not any(map(_is_neg, parameters))
        and not any(map(_is_zero, parameters))
    )


def _checked(x: Tensor, batch: PackedBatch, nheads: int) -> Checked:
    """What is known of the batch; raises `attention`'s errors."""
    ends, longest = batch.cu_seqlens, batch.max_seqlen
    check_lengths(ends, longest, x)
    table = checked_table(batch.fitting_places(), ends, longest, x)
    bias = check_bias(batch.bias, ends.shape[0] - 1, nheads, longest, x)
    return Checked(None if bias is None else plain(bias), table)


def run(group: list[tuple[Step, Taken]], x: Tensor, call: Call) -> Tensor:
    """See `plan`."""
    known: dict[tuple[Any, ...], Checked] = {}
    dense = call.batch.dense()
    for step, taken in group:
        step.layer.begin(x)
        form = taken.form
        batch = form.own_batch(dense)
        key = form.nheads, form.kept
        if key not in known:
            known[key] = _checked(x, batch, form.nheads)
        x = call.keep(_layer(step.layer, x, batch, known[key], taken, call.arrivals))
    return x


def _layer(layer, x, batch, known: Checked, taken: Taken, arrivals: list[Tensor]) -> Tensor:
    device, dtype, rows = x.device, x.dtype, x.shape[0]
    form, parameters, (eps, last_eps) = taken
    out_weight, out_bias, up_weight, up_bias, down_weight, down_bias = parameters[6:12]
    norm_weight, norm_bias, last_weight, last_bias = parameters[12:]
    product = dispatch.launcher("linear_fwd", device, dtype)
    qkv_weight, qkv_bias = joined_weights(layer, parameters[0:6:2], parameters[1:6:2], dtype)
    qkv = product(LinearInputs(x, qkv_weight, qkv_bias), False)[0]
    q, k, v = qkv.view(rows, 3, form.nheads, form.head_dim).unbind(1)
    how = batch.cu_seqlens, batch.max_seqlen, form.head_dim**-0.5, CAUSAL if batch.causal else EVERYWHERE
    inputs = AttentionInputs(q, k, v, *how, known.bias, None, 0.0, None, 0)
    attend = dispatch.launcher("attention_fwd", device, dtype)
    context = attend(inputs, False, False, known.table)[0].view(rows, -1)
    x = _dense_norm(product, context, out_weight, out_bias, x, norm_weight, norm_bias, eps, arrivals)
    activate = dispatch.launcher(forward_of(form.activation, False, rows), device, dtype)
    inner = activate(LinearInputs(x, up_weight, up_bias, form.activation), False)[0]
    return _dense_norm(product, inner, down_weight, down_bias, x, last_weight, last_bias, last_eps, arrivals)


def _dense_norm(product, x, weight, bias, residual, norm_weight, norm_bias, eps, arrivals) -> Tensor:
    """norm(residual + x @ weight.T + bias), as `layers.dense_norm.dense_norm` does it."""
    if linear_norm.pays(x, weight.shape[0]):
        if not arrivals:
            arrivals.append(linear_norm.new_arrivals(x.device))
        function = f"linear_norm_fwd{rows_kind(x.shape[0])}"
        launch = dispatch.launcher(function, x.device, x.dtype)
        inputs = LinearNormInputs(x, weight, bias, residual, norm_weight, norm_bias, eps, arrivals[0])
        return launch(inputs)
    z = product(LinearInputs(x, weight), False)[0]
    launch = dispatch.launcher("layer_norm_fwd", x.device, x.dtype)
    return launch(LayerNormInputs(z, norm_weight, norm_bias, residual, bias, eps), False)[0]
