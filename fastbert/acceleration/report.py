"""`fastbert.explain`: which parts of a model run on our kernels, which do not, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import nn

from fastbert.acceleration import interface, layer_gaps, model_gaps
from fastbert.acceleration.classes import Accelerated
from fastbert.acceleration.parts import OWN, encoders, other_models, own_models
from fastbert.acceleration.watching import is_sharded
from fastbert.execution.call import Call
from fastbert.execution.plan import explain as explain_steps
from fastbert.execution.plan import survey
from fastbert.layers.batch import PackedBatch
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.modules import part
from fastbert.models.batch import distances_of
from fastbert.models.encoder import layers_of
from fastbert.models.families import FAMILIES, Family
from fastbert.runtime.prepared import module_of
from fastbert.testing.serving import Choice, choices

# The rows of the batch for which executors are reported
ROWS = 4096


@dataclass(frozen=True)
class LayerReport:
    """One encoder layer: whether it runs fused now, and how it ran since `accelerate`.

    Attributes:
        name: the layer's name.
        fused: whether it runs fused now.
        reason: why it does not run fused; None if it does.
        fused_calls, stock_calls: how often it ran fused and as stock.
        int8: whether it runs on 8-bit weights.
        float_reason: why it runs in floating point, if it runs fused and 8 bits were asked for; else None.
    """

    name: str
    fused: bool
    reason: str | None
    fused_calls: int
    stock_calls: int
    int8: bool = False
    float_reason: str | None = None


@dataclass(frozen=True)
class ExecutorReport:
    """The executor (`fastbert/execution`) that would run layers of one encoder in inference now.

    Attributes:
        model: name of the encoder; "" for the model itself.
        first, last: numbers of the layers.
        executor: "cpu", "gpu", "launchers", "eager", or "modules" for module by module on a padded batch;
            "graph" for a graphed model whose last call by this thread was replayed.
        refused: name of each faster executor -> one sentence on why it does not run the layers; for
            "modules", why "eager" does not.
    """

    model: str
    first: int
    last: int
    executor: str
    refused: dict[str, str]

    def __str__(self) -> str:
        others = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
        which = f"layer {self.first}" if self.first == self.last else f"layers {self.first} to {self.last}"
        return f"{self.model or 'model'}  {which} by executor {self.executor}" + (others and f" ({others})")


@dataclass(frozen=True)
class ModelReport:
    """One encoder: whether it removes padding now, and how it ran since `accelerate`.

    Attributes:
        name: the encoder's name; "" for the model itself.
        unpads: whether it removes padding now.
        reason: why it keeps padding; None if it removes it. For "other", why it is not accelerated, or how
            often its attention modules ran fused and as stock, with the reasons.
        packed_calls, padded_calls: how often it ran without and with padding; counted for "family" only.
        kind: "family" for an encoder whose layers `accelerate` can fuse, "own" for fastbert's own models,
            "other" for any other model.
    """

    name: str
    unpads: bool
    reason: str | None
    packed_calls: int
    padded_calls: int
    kind: str = "family"


@dataclass(frozen=True)
class Explanation:
    """What `fastbert.explain(model)` has found; `str` returns its `summary` and a table.

    Attributes:
        models: one report per encoder.
        layers: one report per layer, but none for layers of fastbert's own models.
        fused_layers, total_layers: how many encoder layers run fused now, and how many there are.
        executors: what would run the layers of encoders that take packed tokens now, in inference.
    """

    models: list[ModelReport]
    layers: list[LayerReport]
    fused_layers: int
    total_layers: int
    executors: list[ExecutorReport] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """How many layers run fused and whether padding is removed, in one line."""
        said = []
        shown = [m for m in self.models if m.kind != "other"]
        if shown:
            said.append(_fused(self.fused_layers, self.total_layers, [m.unpads for m in shown]))
        if any(m.kind == "own" for m in shown):
            said.append(OWN)
        said += [(m.reason or "").partition(" (calls")[0] for m in self.models if m.kind == "other"]
        return "; ".join(said) or "nothing to accelerate"

    def __str__(self) -> str:
        lines = [self.summary]
        for m in self.models:
            if m.kind == "own":
                lines.append(f"{m.name or 'model'}  {OWN}")
                continue
            how = "unpads: outputs of masked tokens are zeros" if m.unpads else f"padded: {m.reason}"
            lines.append(
                f"{m.name or 'model'}  {how}  (calls: {m.packed_calls} packed, {m.padded_calls} padded)"
            )
        for x in self.layers:
            how = "fused" if x.fused else f"stock: {x.reason}"
            if x.int8:
                how += ", int8"
            elif x.float_reason is not None:
                how += f", not int8: {x.float_reason}"
            lines.append(f"{x.name}  {how}  (calls: {x.fused_calls} fused, {x.stock_calls} stock)")
        lines += map(str, self.executors)
        return "\n".join(lines)


def _fused(fused: int, total: int, unpads: list[bool]) -> str:
    """How many layers run fused, in words."""
    words = f"{fused} of {total} encoder layers run fused"
    if not fused:
        return words
    if all(unpads) or not any(unpads):
        return f"{words}, padding {'taken out' if all(unpads) else 'left in'}"
    return f"{words}, padding taken out in {sum(unpads)} of {len(unpads)} encoders"


@overload
def explain(target: str | torch.device = "cpu") -> list[Choice]: ...
@overload
def explain(target: object) -> Explanation: ...
def explain(target: str | torch.device | object = "cpu") -> list[Choice] | Explanation:
    """Which backend serves each op and dtype on a device, or which parts of a model run on our kernels.

    Args:
        target: a device, or a model (accelerated, not accelerated, fastbert's own, or graphed).

    Returns:
        For a device, one row per op and dtype (see `fastbert.testing.serving.choices`). For a model, which
        parts run fused, which do not, and why.

    Raises:
        TypeError: `target` is no device and no module, and has no module.
    """
    if isinstance(target, (str, torch.device)):
        return choices(target)
    return _explain_model(target)


def _explain_model(model: Any) -> Explanation:
    root = module_of(model)
    reports, rows, executors = [], [], []
    for name, module, (_, kind), _ in encoders(root):
        state = module.fastbert_state if isinstance(module, Accelerated) else None
        if kind == "layer":
            reason = "not accelerated" if state is None else layer_gaps.gap(module, is_sharded(module))
            counts = (0, 0) if state is None else (state.calls.fused, state.calls.stock)
            asked = state is not None and reason is None and state.options.int8
            float_reason = layer_gaps.int8_gap(module) if asked else None
            rows.append(
                LayerReport(
                    name, reason is None, reason, *counts, asked and float_reason is None, float_reason
                )
            )
        else:
            reason = "not accelerated" if state is None else model_gaps.gap(module)
            counts = (0, 0) if state is None else (state.packed_calls, state.padded_calls)
            reports.append(ModelReport(name, reason is None, reason, *counts))
            if state is not None and reason is None:
                family = FAMILIES[state.model_type]
                executors += _executors(name, module, layers_of(module, module.config, family), family)
    for name, module in other_models(root):
        reason = interface.allows(module)
        if reason is None:
            reason = _calls_of(module)
        reports.append(ModelReport(name, False, f"{type(module).__name__}: {reason}", 0, 0, "other"))
    fused, total = sum(row.fused for row in rows), len(rows)
    for name, module in own_models(root):
        reports.append(ModelReport(name, True, None, 0, 0, "own"))
        executors += _executors(name, module, module.layer_list(), module.family)
        looked_at = [step.reason is None for step in survey(module.layer_list(), PackedLayer)]
        fused, total = fused + sum(looked_at), total + len(looked_at)
    if hasattr(model, "last_fallback"):
        executors = [_of_graphs(model, each) for each in executors]
    return Explanation(reports, rows, fused, total, executors)


def _of_graphs(graphed: Any, report: ExecutorReport) -> ExecutorReport:
    """The report of a graphed model, after this thread's last call."""
    reason = graphed.last_fallback if graphed.replays or graphed.last_fallback else "it was not called yet"
    if reason is None:
        return replace(report, executor="graph", refused={})
    return replace(report, refused={"graph": reason, **report.refused})


def _executors(name: str, encoder: Any, layers: list[nn.Module], family: Family) -> list[ExecutorReport]:
    """What would run the layers of an encoder on a batch of many tokens, without gradients."""
    steps = survey(layers, getattr(encoder, "layer_class", PackedLayer))
    parameter = next((p for p in layers[0].parameters() if p.dim() == 1), None) if layers else None
    if parameter is None or parameter.is_meta:
        return []
    device = parameter.device
    with torch.no_grad():
        # Rows without memory of their own, so many that nothing is kept for them
        one = torch.zeros(1, 1, dtype=parameter.dtype, device=device)
        x = one.expand(ROWS, encoder.config.hidden_size)
        x = x if device.type == "cpu" else x.contiguous()
        lengths = torch.tensor([0, ROWS], dtype=torch.int32, device=device)
        batch = PackedBatch(lengths, ROWS)
        if family.disentangled:
            table = distances_of(part(encoder, family.layers.partition(".")[0]))
            batch = replace(batch, distances=table)
        found = explain_steps(steps, x, Call(batch, len(steps) - 1))
    return [ExecutorReport(name, first, last, by, shown(refused)) for first, last, by, refused in found]


def shown(refused: dict[str, str]) -> dict[str, str]:
    """`refused` without the executor "modules", which is refused wherever nothing looks at the modules."""
    return {name: why for name, why in refused.items() if name != "modules"}


def _calls_of(module: nn.Module) -> str:
    """How often the attention of a model of no family ran fused and as stock."""
    sites = interface.sites(module).values()
    if not sites:
        return "not accelerated"
    stock = sum((site.stock for site in sites), Counter())
    stock_calls = "".join(f", {calls} stock ({reason})" for reason, calls in stock.items())
    cpu = ", which gains nothing on a CPU" if interface.on_cpu(module) else ""
    return f"attention alone{cpu} (calls: {sum(site.fused for site in sites)} fused{stock_calls})"
