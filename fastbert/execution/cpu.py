"""Executor of inference on a CPU, which runs whole layers in one call of the backend (ops/encoder_layer.py).

A kept plan runs all its layers in one call, unless the call asks each layer for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastbert.execution.blocks import blocks_of, by_blocks
from fastbert.execution.call import Call, Step
from fastbert.layers import disentangled
from fastbert.layers.batch import PackedBatch, Relative
from fastbert.layers.elimination import Kept
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.linear import FLOAT, INT8, LinearKind
from fastbert.layers.modules import is_plain, rms_eps
from fastbert.layers.quantized import QuantizedLinear
from fastbert.ops import checks
from fastbert.ops.encoder_layer import (
    FusedLayer,
    NarrowBlocks,
    close_team,
    encoder_layer,
    launchers,
    open_team,
)
from fastbert.runtime import prepared

# The kinds of layer that the fused layer computes
KINDS = frozenset({"bottleneck", "gated", "packed", "pre_norm", "relative", "rotary", "window"})
KINDS |= {"head_major", "interleaved", "kv_heads"}


class Taken(NamedTuple):
    """How a layer runs.

    Attributes:
        launch: the backend's function.
        layer: the layer as the function takes it, or what makes that for one call.
    """

    launch: Callable[..., Any]
    layer: FusedLayer | Callable[[], FusedLayer]


def serves(x: Tensor, call: Call) -> str | None:
    """See `plan`."""
    if x.device.type != "cpu":
        return f"the tokens are on {x.device}"
    if not call.inference:
        return "gradients are recorded, or torch.compile traces the call"
    if x.shape[0] == 0:
        return "there are no tokens"
    if call.batch.causal:
        return "a token sees only tokens before it"
    if call.batch.columns is not None:
        return "kept tokens are not adjacent, and layers count columns"
    if call.batch.lengths is not None:
        return "a text is long enough to attend by blocks"
    if call.wants_attentions or call.taps is not None:
        return "what attention computes inside is asked for"
    return None if checks.autocast_dtype(x) is None else "autocast is on"


def takes(step: Step, x: Tensor, call: Call) -> str | Taken:
    """See `plan`."""
    form, parts, layer = step.form, step.parts, step.layer
    if form is None or parts is None:
        return step.reason or "the layer has mathematics of its own"
    if layer.training or any(parts.rates):
        return "the layer is in training mode, or drops"
    if unknown := form.kinds - KINDS:
        return f"it does not know layers with {', '.join(sorted(unknown))}"
    if call.kept and form.kv_heads is not None:
        return "tokens leave between the layers, and heads share keys"
    if call.first_only and step.number == call.last:
        return "only the first token of each sequence is wanted"
    if not parts.fuses_norm or parts.feed is not None:
        return "the norms or the feed-forward block are not ours"
    if step.called:
        return "the module's own call must run: something looks at it, or it has another forward"
    if form.bottleneck is not None and form.bottleneck.output is None:
        return "it has no bottleneck back to the hidden size"
    if form.bottleneck is not None and is_plain(parts.attention_norm, nn.LayerNorm):
        return "its norms are no NoNorms"
    if parts.kind is None:
        return "a linear layer or a norm was replaced or has hooks, or there are no heads or inner columns"
    dense, norms = _linears(form, parts), _norms(form, parts)
    kind = INT8 if parts.int8 else parts.kind
    found = launchers(x.device, x.dtype, kind.op)
    if found is None:
        return "another backend than cpu serves an op of the layer"
    make, launch, keeps_panels = found
    distances = _distances(form, parts, x, call)
    if isinstance(distances, str):
        return distances
    if not keeps_panels(kind.op, x.shape[0]):
        if _another_kind(dense, norms, kind, x):
            return "a parameter has another dtype or device than the tokens"
        return Taken(
            launch,
            lambda: _fused(form, parts, _weights(kind, make, form, parts, dense, x, call.scratch), distances),
        )
    modules = (*dense, *norms)
    tables = [d for m in modules for d in (m._parameters, m._buffers) if d]
    sources = tuple([t for d in tables for t in d.values() if t is not None])

    def build() -> object | None:
        if _another_kind(dense, norms, kind, x):
            return None
        if not parts.int8:
            return _weights(kind, make, form, parts, dense, x)
        # Temporary copies: only their panels are kept
        paths = form.names.linears[2 if form.packed else 0 :]
        named = zip(dense, (*paths, *["bottlenecks"] * (len(dense) - len(paths))), strict=True)
        copies = [QuantizedLinear.from_linear(m, f"{parts.label}.{path}") for m, path in named]
        return _weights(kind, make, form, parts, copies, x)

    weights = prepared.derived(layer, ("layer", kind.op, x.dtype, launch), sources, build)
    if weights is None:
        return "a parameter has another dtype or device than the tokens, or biases are missing"
    return Taken(launch, _fused(form, parts, weights, distances))


def _distances(form: LayerForm, parts: Parts, x: Tensor, call: Call) -> str | tuple[Any, Any]:
    """The tables of distances of a layer that scores them, or one sentence on why they are not kept."""
    if form.relative is None or not form.relative.terms:
        return None, None
    if call.batch.distances is None:
        return "there is no table of distances"
    tables = disentangled.kept_tables(form, parts, call.batch, x)
    if tables is None or any(isinstance(table, Tensor) for table in tables):
        return "something looks at the table of distances, or another backend than cpu multiplies it"
    return tables[0], tables[1]


def keeps_panels(x: Tensor) -> tuple[bool, ...] | None:
    """Whether the serving backend keeps the weights of float and of 8-bit layers for that many rows."""
    if x.device.type != "cpu":
        return None
    found = {kind.op: launchers(x.device, x.dtype, kind.op) for kind in (FLOAT, INT8)}
    return tuple(each is not None and each[2](op, x.shape[0]) for op, each in found.items())


class Stack(list[Any]):
    """A group whose layers run in one call, where nothing is asked of a single layer."""

    def __init__(self, group: list[tuple[Step, Taken]]):
        super().__init__(group)
        self.layers = [taken.layer for _, taken in group if not callable(taken.layer)]
        forms = [step.form for step, _ in group if step.form is not None]
        self.owns_bias = any(form.kept is not None for form in forms)
        self.relatives = {form.relative for form in forms if form.relative is not None}

    def serves(self, call: Call) -> bool:
        """Whether one call runs all layers."""
        asked = call.wants_states or call.gates is not None or call.after_first is not None or call.kept
        return not (asked or (self.owns_bias and call.batch.has_bias) or len(self.relatives) > 1)


def kept(group: list[tuple[Step, Taken]]) -> list[tuple[Step, Taken]] | None:
    """See `plan`."""
    return None if any(callable(taken.layer) for _, taken in group) else Stack(group)


def run(group: list[tuple[Step, Taken]], x: Tensor, call: Call) -> Tensor:
    """See `plan`. Between layers the threads wait without sleeping."""
    try:
        open_team(x)
        if isinstance(group, Stack) and group.serves(call) and not blocks_of(group[0][0], x, call, True):
            for step, _ in group:
                step.layer.begin(x)
            return _launched(
                group[0][1].launch, x, group.layers, call.batch, next(iter(group.relatives), None)
            )
        for step, (launch, taken) in group:
            step.layer.begin(x)
            gate, kept = (asked := call.asked(step)).gate, asked.kept
            fused: list[Any] = [taken() if callable(taken) else taken]
            relative = None if step.form is None else step.form.relative
            if kept is not None:
                y, rows = _launched(launch, x, fused, call.batch, None, gate, None, kept)
                call.shrink(x, kept, rows)
                x = call.keep(y)
                continue

            def layer(x, batch, out, launch=launch, fused=fused, relative=relative, gate=gate):
                return _launched(launch, x, fused, batch, relative, gate, out)

            blocks, batch = blocks_of(step, x, call, fused=True), call.batch
            batch = batch if step.form is None else step.form.own_batch(batch)
            x = call.keep(by_blocks(blocks, x, batch, layer))
    finally:
        close_team()
    return x


def _launched(
    launch: Callable[..., Any],
    x: Tensor,
    layers: Sequence[FusedLayer],
    batch: PackedBatch,
    relative: Relative | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    kept: Kept | None = None,
) -> Any:
    distances = None
    if relative is not None and relative.terms:
        distances = disentangled.columns_of(relative, disentangled.reach_of(batch.max_seqlen), x.device)
    if batch.relative is not None and batch.relative.positions is not None:
        batch = batch.dense()
    lengths, rotates = (batch.cu_seqlens, batch.max_seqlen), (batch.positions, batch.tables)
    more: dict[str, Any] = {"bias": batch.bias, "relative": batch.relative, "gate": gate, "out": out}
    more["distances"] = distances
    if kept is not None:
        more |= {"kept": (kept.cu_seqlens, kept.total)}
    return encoder_layer(launch, x, layers, *lengths, positions=rotates[0], tables=rotates[1], **more)


def _linears(form: LayerForm, parts: Parts) -> Sequence[Any]:
    """The linear layers, query, key and value of a packed layer once."""
    more = [] if parts.steps is None else parts.steps.modules[0]
    return (*parts.linears[2 if form.packed else 0 :], *more)


def _norms(form: LayerForm, parts: Parts) -> list[nn.Module]:
    """The norms; of a pre-norm layer the first may be missing."""
    first = form.pre_norm and is_plain(parts.attention_norm, nn.Identity)
    more = [] if parts.steps is None else parts.steps.modules[1]
    return [parts.attention_norm, parts.output_norm, *more][first:]


def _fused(form: LayerForm, parts: Parts, weights: object, distances: tuple[Any, Any]) -> FusedLayer:
    # An nn.Identity in place of the first norm has none, and neither have transformers' NoNorms
    none, rms = None if form.pre_norm else 0.0, rms_eps(parts.output_norm)
    eps = getattr(parts.attention_norm, "eps", none), getattr(parts.output_norm, "eps", 0.0)
    if rms is not None:
        eps = rms_eps(parts.attention_norm), rms
    gated = form.gated if parts.gate is None else None
    inner = parts.intermediate.out_features // (1 if gated is None else 2)
    sizes = form.nheads, form.head_dim, inner
    kind = form.pre_norm, gated, form.window, form.rotary, _narrow(form, parts), distances
    kind = *kind, form.kv_heads, rms is not None, form.head_major, form.interleaved
    return FusedLayer(weights, *sizes, form.softmax_scale, form.activation, eps, *kind)


def _narrow(form: LayerForm, parts: Parts) -> NarrowBlocks | None:
    """The bottlenecks as the fused layer takes them."""
    own = form.bottleneck
    if own is None:
        return None
    return NarrowBlocks(
        parts.output.out_features, own.keys is not None, own.values is not None, len(own.feeds)
    )


def _another_kind(
    dense: Sequence[nn.Module], norms: Sequence[nn.Module], kind: LinearKind, x: Tensor
) -> bool:
    """Whether a parameter has another dtype or device than `x`; then the ops check it."""
    for module in (*dense, *norms):
        for name, t in module._parameters.items():
            if t is not None:
                checks.own_elements(name, t)
    of_norms = [t for m in norms for t in (m.weight, getattr(m, "bias", None))]
    of_linears = [t for m in dense for t in ((m.weight, m.bias) if kind is FLOAT else (m.bias,))]
    known = [t for t in (*of_norms, *of_linears) if t is not None]
    return any(t.dtype != x.dtype or t.device != x.device for t in known)


def _weights(
    kind: LinearKind,
    make: Callable[..., Any],
    form: LayerForm,
    parts: Parts,
    dense: Sequence[nn.Module],
    x: Tensor,
    scratch: list[Tensor] | None = None,
) -> object | None:
    """The layer's weights as `make` prepares them; None if they cannot run as a whole layer."""
    # The argument after `x` keeps what is derived. For temporary copies that must not be the layer.
    gated = form.gated is not None and parts.gate is None
    owner = dense[0] if parts.int8 else parts.owner
    if form.bottleneck is None:
        linears = kind.layer_operands(x, owner, list(dense), gated)
    else:  # products of different inputs
        linears = [one for m in dense for one in kind.layer_operands(x, m, [m], False) or ()]
    norms = [(norm.weight, getattr(norm, "bias", None)) for norm in _norms(form, parts)]
    norms = [(None, None)] * (2 - len(norms)) + norms
    return None if linears is None else make(linears, norms, scratch, gated)
