"""What a model loses without a head or a layer, how important each head is, and how many can be removed.

Ablation, exact: without a head of layer l, the layers below l compute the same as before. So the examples
run once, and each layer's input and attention output are kept. The variants of layer l, each without one
head, are further sequences of one packed batch that starts after the layer's attention. All heads of a model
of L layers with H heads cost less than H (L + 1) / 2 forwards in place of H · L.

Importance: I_h = mean over examples of |∂ loss / ∂ ξ_h|, where the output of head h is multiplied by ξ_h = 1.
Each example has a derivative of its own, whose absolute value is taken. One backward computes the derivatives
of all heads and examples; parameters have no gradient.

Source: Michel, Levy and Neubig 2019, "Are Sixteen Heads Really Better than One?", eq. 1 and 2, sec. 3 and 4;
uniform heads: Kovaleva et al. 2019, "Revealing the Dark Secrets of BERT", sec. 4.6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fastbert.analysis.identities import uniform
from fastbert.analysis.intervals import Interval, estimate, finite, paired_p
from fastbert.analysis.measures import Measure
from fastbert.analysis.walk import BATCH_TOKENS, Batch, at_rest, check_heads, encode
from fastbert.execution.call import Call
from fastbert.execution.plan import run, survey
from fastbert.layers import encoder
from fastbert.layers.batch import PackedBatch
from fastbert.layers.taps import Taps
from fastbert.models.base import PreTrainedModel
from fastbert.models.encoder import last_norm, tapped
from fastbert.models.inputs import Inputs
from fastbert.ops.attention_places import attention_places
from fastbert.runtime import expected
from fastbert.tasks.examples import Examples

UNITS = ("head", "all-but-one", "layer")
MODES = ("zero", "uniform", "skip")


@dataclass(frozen=True)
class Ablation:
    """Each case's loss and score without each unit.

    A case is an example, or a pair of them for an encoder without a head; see `fastbert.analysis.measures`.

    Attributes:
        unit, mode: see `ablate`.
        score_name: see `Measure`.
        base_loss, base_score: (n,), of the unchanged model.
        loss, score: (n, layers, nheads), or (n, layers, 1) for unit "layer".
    """

    unit: str
    mode: str
    score_name: str
    base_loss: np.ndarray
    base_score: np.ndarray
    loss: np.ndarray
    score: np.ndarray

    def score_change(self) -> np.ndarray:
        """(layers, units): the mean score without the unit, minus the unchanged model's."""
        return (self.score - self.base_score[:, None, None]).mean(0)

    def loss_change(self) -> np.ndarray:
        """(layers, units): the mean loss without the unit, minus the unchanged model's."""
        return (self.loss - self.base_loss[:, None, None]).mean(0)

    def interval(self, layer: int, unit: int = 0, *, seed: int = 0) -> Interval:
        """The change of the score without one unit, with its 95% interval over examples."""
        return estimate(self.score[:, layer, unit] - self.base_score, seed=seed)

    def loss_interval(self, layer: int, unit: int = 0, *, seed: int = 0) -> Interval:
        """The change of the loss without one unit, with its 95% interval over examples."""
        return estimate(self.loss[:, layer, unit] - self.base_loss, seed=seed)

    def base_intervals(self, *, seed: int = 0) -> dict[str, Interval]:
        """ "score" and "loss" of the unchanged model, with their 95% intervals over examples."""
        return {"score": estimate(self.base_score, seed=seed), "loss": estimate(self.base_loss, seed=seed)}

    def p_values(self, *, seed: int = 0) -> np.ndarray:
        """(layers, units): the p-value of each change of the score; see `paired_p`."""
        change = self.score - self.base_score[:, None, None]
        flat = change.reshape(len(change), -1)
        return paired_p(flat, seed=seed).reshape(change.shape[1:])

    def best_head(self) -> np.ndarray:
        """(layers,): each layer's unit with the highest mean score; in a tie that with the least loss."""
        score, loss = finite("score", self.score).mean(0), finite("loss", self.loss).mean(0)
        return np.array([np.lexsort((loss[i], -score[i]))[0] for i in range(len(score))])


def ablate(
    model: PreTrainedModel,
    examples: Examples,
    *,
    unit: str = "head",
    mode: str = "zero",
    pooling: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Ablation:
    """Each case's loss and score without each head or layer.

    Args:
        model: a model that `Measure` takes; it runs in eval mode.
        examples: labelled examples, or pairs.
        unit: "head": without one head; "all-but-one": with only one head of a layer; "layer": without all
            heads of a layer.
        mode: "zero": the output of a removed head is 0; "uniform": it looks at all tokens alike; "skip", for
            unit "layer": the layer's output is its input.
        pooling: pooling of an encoder without a head; see `Measure.of`.
        batch_tokens: most tokens that run at a time. The kept inputs and attention outputs take 8 bytes
            (float32) per token, hidden unit and layer.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    check(unit, mode)
    measure = Measure.of(model, examples, pooling)
    n, layers = len(measure), len(model.base_model.layer_list())
    units = 1 if unit == "layer" else model.config.num_attention_heads
    loss, score = (np.zeros((n, layers, units)) for _ in range(2))
    base_loss, base_score = np.zeros(n), np.zeros(n)
    with at_rest(model), torch.inference_mode():
        for batch, numbers, labels in measure.batches(batch_tokens):
            kept = _Kept(with_uniform=mode == "uniform")
            hidden, inputs_of_layers = _with_inputs(model, batch, kept)
            base_loss[numbers], base_score[numbers] = measure.arrays(hidden, batch.inputs, labels)
            for layer in range(layers):
                for some, hidden, inputs in _variants(
                    model, batch, kept, inputs_of_layers, layer, unit, mode, units, batch_tokens
                ):
                    repeated = labels.repeat(len(some), *(1,) * (labels.dim() - 1))
                    found = measure.arrays(hidden, inputs, repeated)
                    for values, into in zip(found, (loss, score), strict=True):
                        into[numbers[:, None], layer, some] = values.reshape(len(some), -1).T
    return Ablation(unit, mode, measure.score_name, base_loss, base_score, loss, score)


def check(unit: str, mode: str) -> None:
    """Raise a ValueError if `ablate` has no such unit or mode."""
    expected.one_of(UNITS, unit=unit)
    expected.one_of(MODES, mode=mode)
    if mode == "skip" and unit != "layer":
        raise ValueError(f"mode: skip is for unit='layer', got unit={unit!r}")


class _Kept(Taps):
    """Keeps each layer's attention output in one forward, and that of uniform heads if asked."""

    sequences: PackedBatch

    def __init__(self, with_uniform: bool) -> None:
        self.with_uniform = with_uniform
        self.contexts: list[Tensor] = []
        self.uniform: list[Tensor] = []

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sequences: PackedBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Taps`."""
        if self.with_uniform:
            self.uniform.append(uniform(q, k, v, sequences))
        return q, k, v, sequences.bias

    def context(self, layer: int, context: Tensor, sequences: PackedBatch) -> Tensor:
        """See `Taps`."""
        self.contexts.append(context)
        self.sequences = sequences
        return context


def _with_inputs(model: PreTrainedModel, batch: Batch, kept: _Kept) -> tuple[Tensor, list[Tensor]]:
    """(last hidden states, the input of each layer) of a batch, (total, hidden) each."""
    encoder = model.base_model
    check_heads(model)
    with tapped(encoder, kept):
        hidden, states, _ = encoder.encode_inputs(batch.inputs, None, False, True, False)
    batch.check(hidden)
    return hidden, states[:-1]


def _variants(
    model: PreTrainedModel,
    batch: Batch,
    kept: _Kept,
    inputs_of_layers: list[Tensor],
    layer: int,
    unit: str,
    mode: str,
    units: int,
    batch_tokens: int,
) -> Iterator[tuple[np.ndarray, Tensor, Inputs]]:
    """(units, last hidden states, inputs) of the variants of one layer, as many at a time as fit."""
    layers = model.base_model.layer_list()
    steps, ablated = survey(layers), layers[layer]
    total = len(batch.rows)
    at_once = max(1, batch_tokens // total)
    context = kept.contexts[layer]
    other = kept.uniform[layer] if mode == "uniform" else torch.zeros_like(context)
    for first in range(0, units, at_once):
        some = np.arange(first, min(first + at_once, units))
        count = len(some)
        hidden = inputs_of_layers[layer].repeat(count, 1)
        sequences, inputs = _repeated(kept.sequences, batch, count, hidden.dtype)
        if mode != "skip":
            heads = torch.arange(context.shape[1], device=context.device)
            out = {
                "head": heads == torch.from_numpy(some).to(heads)[:, None],
                "all-but-one": heads != torch.from_numpy(some).to(heads)[:, None],
                "layer": torch.ones(count, len(heads), dtype=torch.bool, device=heads.device),
            }[unit]
            mixed = torch.where(out[:, None, :, None], other, context).flatten(0, 1)
            hidden = encoder.after_attention(ablated.form, ablated.parts(), hidden, mixed, sequences)
        hidden = run(steps[layer + 1 :], hidden, Call(sequences, len(layers) - 1))
        hidden = last_norm(model.base_model, model.family, hidden, inputs.packing)
        yield some, hidden, inputs


def _repeated(
    sequences: PackedBatch, batch: Batch, count: int, dtype: torch.dtype
) -> tuple[PackedBatch, Inputs]:
    """What layers and heads read about `count` copies of a batch, one after the other."""
    packing, total = batch.inputs.packing, len(batch.rows)
    ends = packing.cu_seqlens
    steps = torch.arange(count, device=ends.device, dtype=ends.dtype)[:, None] * total
    ends = torch.cat([ends[:1], (ends[1:] + steps).flatten()])
    bias = sequences.bias
    if bias is not None and bias.shape[0] > 1:
        bias = bias.repeat(count, 1, 1, 1)
    places = attention_places(ends, packing.max_seqlen, total * count, dtype)
    positions = None if sequences.positions is None else sequences.positions.repeat(count)
    repeated = replace(
        sequences, cu_seqlens=ends, bias=bias, seed=None, places=places, positions=positions, columns=None
    )
    # its ids are no longer read
    inputs = replace(batch.inputs, packing=replace(packing, batch=packing.batch * count, cu_seqlens=ends))
    return repeated, inputs


# --- importance ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Importance:
    """How much each case's loss depends on each head.

    Attributes:
        derivatives: (n, layers, nheads), ∂ loss / ∂ ξ_h of each case; see `Ablation` for cases.
    """

    derivatives: np.ndarray

    def values(self, *, normalized: bool = False) -> np.ndarray:
        """(layers, nheads): I_h, the mean over examples of the derivatives' absolute values.

        Args:
            normalized: whether to divide each layer's values by the root of their sum of squares.
        """
        found = np.abs(self.derivatives).mean(0)
        if normalized:
            found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(float).tiny)
        return found

    def interval(self, layer: int, head: int, *, seed: int = 0) -> Interval:
        """I_h of one head, with its 95% interval over examples."""
        return estimate(np.abs(self.derivatives[:, layer, head]), seed=seed)

    def order(self, *, normalized: bool = True) -> np.ndarray:
        """(layers · nheads,): the heads from the least to the most important, as layer · nheads + head."""
        finite("derivatives", self.derivatives)
        return np.argsort(self.values(normalized=normalized).ravel(), kind="stable")


class _Factors(Taps):
    """Multiplies each head's output by 1: a factor per case and head whose gradient is computed."""

    def __init__(self, batch: Batch, per_case: int) -> None:
        self.cases = len(batch) // per_case
        self.case = batch.sequence // per_case
        self.factors: list[Tensor] = []

    def context(self, layer: int, context: Tensor, sequences: PackedBatch) -> Tensor:
        """See `Taps`."""
        shape = self.cases, context.shape[1]
        factors = torch.ones(shape, dtype=context.dtype, device=context.device, requires_grad=True)
        self.factors.append(factors)
        return context * factors[self.case][:, :, None]


def importance(
    model: PreTrainedModel,
    examples: Examples,
    *,
    pooling: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Importance:
    """The derivative of each case's loss by each head's factor.

    Args:
        model: a model that `Measure` takes; it runs in eval mode, and no parameter gets a gradient.
        examples: labelled examples, or pairs.
        pooling: pooling of an encoder without a head; see `Measure.of`.
        batch_tokens: most tokens that run at a time.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    measure = Measure.of(model, examples, pooling)
    shape = len(measure), len(model.base_model.layer_list()), model.config.num_attention_heads
    found = np.zeros(shape)
    with at_rest(model), torch.enable_grad():
        for batch, numbers, labels in measure.batches(batch_tokens):
            taps = _Factors(batch, measure.per_case)
            hidden = encode(model, batch, taps)
            loss, _ = measure(hidden, batch.inputs, labels)
            grads = torch.autograd.grad(loss.sum(), taps.factors)
            found[numbers] = torch.stack(grads, 1).double().cpu().numpy()
    return Importance(found)


# --- pruning curves -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PruningCurve:
    """The score of each case as more and more heads are removed.

    Attributes:
        order: (layers · nheads,) the order of removal, as layer · nheads + head.
        removed: (points,) number of removed heads.
        score: (points, n), the score of each case.
        score_name: see `Measure`.
    """

    order: np.ndarray
    removed: np.ndarray
    score: np.ndarray
    score_name: str

    def intervals(self, *, seed: int = 0) -> list[Interval]:
        """The mean score of each point, with its 95% interval over examples."""
        return [estimate(each, seed=seed) for each in self.score]

    def removable(self, *, level: float = 0.01, seed: int = 0) -> int:
        """Number of heads that can be removed before the score is significantly below the whole model's.

        It is the last point before the first significant drop, by a paired bootstrap over examples at
        `level`.
        """
        change = (self.score - self.score[0]).T
        dropped = (change.mean(0) < 0) & (paired_p(change, seed=seed) < level)
        first = int(np.argmax(dropped)) if dropped.any() else len(self.removed)
        return int(self.removed[max(first - 1, 0)])


def pruning_curve(
    model: PreTrainedModel,
    examples: Examples,
    order: Sequence[int] | np.ndarray,
    *,
    step: float = 0.1,
    pooling: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> PruningCurve:
    """The score while heads are removed in this order, a share of all heads at a time.

    Args:
        model: a model that `Measure` takes; it runs in eval mode and is not changed.
        examples: labelled examples, or pairs.
        order: every head once, as layer · nheads + head: `Importance.order`, or random.
        step: the share of all heads that is removed per point, in (0, 1].
        pooling: pooling of an encoder without a head; see `Measure.of`.
        batch_tokens: most tokens that run at a time.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    measure = Measure.of(model, examples, pooling)
    layers, heads = len(model.base_model.layer_list()), model.config.num_attention_heads
    order = np.asarray(order)
    if not np.array_equal(np.sort(order), np.arange(layers * heads)):
        raise ValueError(f"order: expected each of the {layers * heads} heads once, got {len(order)} numbers")
    expected.numbers("in (0, 1]", step=step)
    points = max(1, math.ceil(1 / step - 1e-9))
    removed = np.array([min(round(i * step * len(order)), len(order)) for i in range(points + 1)])
    score = np.zeros((len(removed), len(measure)))
    with at_rest(model), torch.inference_mode():
        for batch, numbers, labels in measure.batches(batch_tokens):
            for point, count in enumerate(removed):
                gates = torch.ones(layers * heads)
                gates[torch.from_numpy(order[:count].astype(np.int64))] = 0
                gates = gates.view(layers, heads).to(batch.sequence.device)
                hidden = encode(model, batch, gates=gates if count else None)
                score[point, numbers] = measure.arrays(hidden, batch.inputs, labels)[1]
    return PruningCurve(order, removed, score, measure.score_name)
