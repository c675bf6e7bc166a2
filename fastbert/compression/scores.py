"""How much a model needs each head and each neuron: Taylor, magnitude, or random scores.

    Taylor, a head:    I_h = mean over examples of |∂ loss / ∂ ξ_h|, the head's output multiplied by ξ_h = 1
    Taylor, a neuron:  I_j = mean over examples of |sum over tokens t of a_tj ∂ loss / ∂ a_tj|
    magnitude:         the root of the sum of squares of all weights that go with the head or neuron

a is the feed-forward block between its two products. One backward per batch computes the Taylor scores of
all heads and neurons. Those of a layer are divided by the root of their sum of squares, as in the paper.

Source: Michel, Levy and Neubig 2019, "Are Sixteen Heads Really Better than One?", sec. 4.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.analysis.measures import Measure
from fastbert.analysis.walk import BATCH_TOKENS, at_rest
from fastbert.compression import shrink
from fastbert.layers.batch import PackedBatch
from fastbert.layers.taps import Taps
from fastbert.models.base import PreTrainedModel
from fastbert.models.encoder import tapped
from fastbert.tasks.examples import Examples

SCORES = ("taylor", "magnitude", "random")


class Scores(NamedTuple):
    """What each layer's units are worth; the smallest are removed first.

    Attributes:
        heads: (nheads,) float64 per layer.
        neurons: (inner,) float64 per layer.
    """

    heads: list[Tensor]
    neurons: list[Tensor]


class _Seen(Taps):
    """Keeps what is multiplied by a factor of 1, by layer."""

    def __init__(self) -> None:
        self.contexts: dict[int, Tensor] = {}
        self.inners: dict[int, Tensor] = {}

    def context(self, layer: int, context: Tensor, sequences: PackedBatch) -> Tensor:
        """See `Taps`."""
        self.contexts[layer] = _with_gradient(context)
        return context

    def inner(self, layer: int, inner: Tensor, sequences: PackedBatch) -> Tensor:
        """See `Taps`."""
        self.inners[layer] = _with_gradient(inner)
        return inner


def _with_gradient(t: Tensor) -> Tensor:
    # No parameter has a gradient, so it begins at the first of these tensors
    return t if t.requires_grad else t.requires_grad_()


def taylor(
    model: PreTrainedModel,
    examples: Examples,
    *,
    pooling: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Scores:
    """Scores by the derivatives of the loss.

    Args:
        model: a model that `fastbert.analysis.measures.Measure` takes; it runs in eval mode.
        examples: labelled examples, or pairs.
        pooling: pooling of an encoder without a head; see `Measure.of`.
        batch_tokens: most tokens that run at a time.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    measure = Measure.of(model, examples, pooling)
    layers = model.base_model.layer_list()
    found = Scores(
        [torch.zeros(layer.form.nheads, dtype=torch.float64) for layer in layers],
        [torch.zeros(shrink.inner_size(layer), dtype=torch.float64) for layer in layers],
    )
    with at_rest(model), torch.enable_grad():
        for batch, _, labels in measure.batches(batch_tokens):
            taps, case = _Seen(), batch.sequence // measure.per_case
            cases = len(batch) // measure.per_case
            with tapped(model.base_model, taps):
                hidden = model.base_model.encode_inputs(batch.inputs, None, False, False, False)[0]
            batch.check(hidden.detach())
            loss, _ = measure(hidden, batch.inputs, labels)
            seen = [(t, found.heads[i]) for i, t in taps.contexts.items()]
            seen += [(t, found.neurons[i]) for i, t in taps.inners.items()]
            if not seen:
                break
            grads = torch.autograd.grad(loss.sum(), [t for t, _ in seen], allow_unused=True)
            for (t, total), grad in zip(seen, grads, strict=True):
                if grad is None:
                    continue
                product = t.detach() * grad
                product = product.sum(-1) if product.dim() == 3 else product
                each = product.new_zeros(cases, product.shape[1]).index_add_(0, case, product)
                total += each.abs().sum(0).double().cpu()
    of_layers = ([each / len(measure) for each in units] for units in found)
    return Scores(*([each / each.norm().clamp(min=1e-300) for each in units] for units in of_layers))


def magnitude(model: PreTrainedModel) -> Scores:
    """Scores by the sizes of the weights."""
    found = Scores([], [])
    for layer in model.base_model.layer_list():
        squares = {"heads": torch.zeros(layer.form.nheads), "neurons": torch.zeros(shrink.inner_size(layer))}
        squares = {unit: total.double() for unit, total in squares.items()}
        for axis in shrink.axes(layer.form):
            weight: Any = layer.get_parameter(f"{axis.path}.weight").detach().double().cpu()
            apart = weight.square().unflatten(axis.dim, axis.shape).movedim(axis.dim + 1, 0)
            squares[axis.unit] += apart.flatten(1).sum(1)
        found.heads.append(squares["heads"].sqrt())
        found.neurons.append(squares["neurons"].sqrt())
    return found


def random(model: PreTrainedModel, seed: int = 0) -> Scores:
    """Scores that are drawn, for comparison."""
    draw, layers = torch.Generator().manual_seed(seed), model.base_model.layer_list()
    sizes = [layer.form.nheads for layer in layers], [shrink.inner_size(layer) for layer in layers]
    drawn = ([torch.rand(n, dtype=torch.float64, generator=draw) for n in each] for each in sizes)
    return Scores(*drawn)
