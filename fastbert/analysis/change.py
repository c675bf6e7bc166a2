"""What fine-tuning changes: attention, hidden states and weights of two models, layer by layer.

Both models read the same batch. While the second model runs, the first model's queries and keys are compared
with its own. The cosine of two maps follows from sums (`identities`): Σ P P' / √(Σ P² · Σ P'²).

Source: Kovaleva et al. 2019, "Revealing the Dark Secrets of BERT", sec. 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fastbert.analysis.identities import Observer, Probabilities
from fastbert.analysis.intervals import Interval, estimate
from fastbert.analysis.walk import BATCH_TOKENS, Batch, at_rest, batches
from fastbert.models.base import PreTrainedModel
from fastbert.models.encoder import tapped
from fastbert.tasks.examples import Examples


@dataclass(frozen=True)
class Change:
    """How alike two models are.

    Attributes:
        attention: (n, layers, nheads) float32, the cosine of each head's two maps.
        hidden: (n, layers + 1) float32, the mean cosine of the tokens' hidden states; index 0 is the
            embedding output.
        weights: (layers,) float64, ‖ΔW‖ / ‖W‖ over all parameters of a layer.
    """

    attention: np.ndarray
    hidden: np.ndarray
    weights: np.ndarray

    def intervals(self, *, seed: int = 0) -> dict[str, Interval]:
        """Mean cosines of all maps and of the last hidden states, with their 95% intervals over examples."""
        return {
            "attention": estimate(self.attention, seed=seed),
            "last hidden states": estimate(self.hidden[:, -1], seed=seed),
        }


def change(
    model: PreTrainedModel, against: PreTrainedModel, examples: Examples, *, batch_tokens: int = BATCH_TOKENS
) -> Change:
    """Compare two models of the same shape over all examples.

    Args:
        model, against: encoders or models with a head, such as a model before and after fine-tuning.
        examples: the texts.
        batch_tokens: most tokens that run at a time. Queries, keys and hidden states of all layers are kept
            for a batch.

    Raises:
        ValueError: the models' shapes differ, or an argument is wrong; the message names it.
    """
    check(model, against, examples)
    weights = _of_weights(model, against)
    layers = len(model.base_model.layer_list())
    n, heads = len(examples), model.config.num_attention_heads
    attention = np.zeros((n, layers, heads), np.float32)
    hidden = np.zeros((n, layers + 1), np.float32)
    with at_rest(model), at_rest(against), torch.inference_mode():
        for batch in batches(model, examples, batch_tokens):
            kept = _Kept()
            states = _states(model, batch, kept)
            compared = _Compared(batch, kept.probabilities, attention)
            others = _states(against, batch, compared)
            for i, (one, other) in enumerate(zip(states, others, strict=True)):
                cosine = torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=-1)
                hidden[batch.numbers, i] = batch.means(cosine).cpu().numpy()
    return Change(attention, hidden, weights)


def check(model: PreTrainedModel, against: PreTrainedModel, examples: Examples) -> None:
    """Raise a ValueError if `change` cannot compare these models over these examples."""
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        one, other = (getattr(m.config, name) for m in (model, against))
        if one != other:
            raise ValueError(f"against: its {name} is {other}, expected the model's, {one}")
    examples.check(against.config)


def _states(model: PreTrainedModel, batch: Batch, taps: Observer) -> list[Tensor]:
    encoder = model.base_model
    with tapped(encoder, taps):
        states = encoder.encode_inputs(batch.inputs, None, False, True, False)[1]
    batch.check(states[-1])
    return states


class _Kept(Observer):
    """The probabilities of all layers of one forward, as queries and keys."""

    def __init__(self) -> None:
        self.probabilities: list[Probabilities] = []

    def seen(self, layer: int, probabilities: Probabilities) -> None:
        """See `Observer`."""
        self.probabilities.append(probabilities)


class _Compared(Observer):
    """Fills the cosines with another forward's probabilities."""

    def __init__(self, batch: Batch, others: list[Probabilities], found: np.ndarray) -> None:
        self.batch, self.others, self.found = batch, others, found

    def seen(self, layer: int, probabilities: Probabilities) -> None:
        """See `Observer`."""
        own, other = probabilities, self.others[layer]
        product, one, two = (
            self.batch.sums(values) for values in (own.overlap(other), own.collision(), other.collision())
        )
        self.found[self.batch.numbers, layer] = (product / (one * two).sqrt()).cpu().numpy()


def _of_weights(model: PreTrainedModel, against: PreTrainedModel) -> np.ndarray:
    found = []
    for i, (one, other) in enumerate(
        zip(model.base_model.layer_list(), against.base_model.layer_list(), strict=True)
    ):
        apart, size = _distance(one, other)
        if not size:
            raise ValueError(f"model: all weights of layer {i} are 0, so no change is relative to them")
        found.append((apart / size) ** 0.5)
    return np.array(found)


def _distance(one: nn.Module, other: nn.Module) -> tuple[float, float]:
    """(‖W' - W‖², ‖W‖²) over all parameters of two layers of the same kind."""
    before, after = ([p.detach().double() for p in m.parameters()] for m in (one, other))
    apart = sum(float((b.to(a.device) - a).square().sum()) for a, b in zip(before, after, strict=True))
    return apart, sum(float(a.square().sum()) for a in before)
