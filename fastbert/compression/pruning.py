"""`fastbert.prune`: a model without its least important heads and neurons, and without some layers.

The new model is physically smaller, so it is faster, and its files load like any other's. Half the heads of
BERT-base take at most a sixth of a layer's operations away, half the neurons a third.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fastbert.compression import scores, shrink
from fastbert.compression.factorization import factorize
from fastbert.compression.scores import SCORES, Scores
from fastbert.compression.size import Size, size_of
from fastbert.layers.modules import part
from fastbert.models.base import PreTrainedModel
from fastbert.models.config_values import brief
from fastbert.runtime import expected
from fastbert.tasks.examples import Examples

_Model = TypeVar("_Model", bound=PreTrainedModel)
# Layer -> numbers of heads or neurons
_Units = Mapping[int, Iterable[int]]


@dataclass(frozen=True)
class Pruned(Generic[_Model]):
    """A smaller model, and what was removed from the model that `prune` was given.

    Attributes:
        model: the smaller model; `save_pretrained` and `from_pretrained` support it.
        layers: the layers that were kept, by the given model's numbers.
        heads, neurons: kept layer, by its new number -> what was removed from it, by the layer's numbers
            before.
        before, after: the sizes of the given model and of the new one.
        zeros: the share of the weights of the new model's linear layers that are 0; None if not asked for.
    """

    model: _Model
    layers: list[int]
    heads: dict[int, list[int]]
    neurons: dict[int, list[int]]
    before: Size
    after: Size
    zeros: float | None = None

    def dense(self) -> _Model:
        """The model with zeros for heads and neurons and a whole table, which transformers can load."""
        return shrink.dense(self.model)


def prune(
    model: _Model,
    *,
    heads: float | _Units | None = None,
    neurons: float | _Units | None = None,
    layers: Sequence[int] | None = None,
    vocabulary: Sequence[int] | None = None,
    weights: float | None = None,
    embedding_rank: int | None = None,
    score: str = "taylor",
    examples: Examples | None = None,
    pooling: str | None = None,
    multiple: int = 64,
    seed: int = 0,
) -> Pruned[_Model]:
    """A smaller copy of a model.

    Args:
        model: a model of this package, with plain linear layers. It is not changed.
        heads: the share of all heads to remove, in [0, 1), or the heads to remove per layer. The heads of all
            layers compete, and a layer may lose all of them.
        neurons: the same of the neurons of the feed-forward blocks.
        layers: the layers to keep, ascending; None for all. They are removed first, so `heads` and
            `neurons` number the layers that are kept.
        vocabulary: the ids of word pieces to keep, ascending, which become 0, 1, …; None for all. They need
            another tokenizer; see `fastbert.compression.vocabulary`.
        weights: the share of the weights of all layers' linear maps to set to 0, in [0, 1): the smallest of
            all of them together, after all else was removed. The file compresses better; the matrices have
            the same shapes, so time and memory do not change.
        embedding_rank: the rank of the table of words, which becomes a product of two matrices
            (`fastbert.compression.factorization`); None leaves it as it is.
        score: by what heads and neurons are chosen: "taylor" (needs `examples`), "magnitude" or "random"; see
            `fastbert.compression.scores`.
        examples: labelled examples, or pairs for an encoder without a head
            (`fastbert.tasks.examples.tokenized`).
        pooling: pooling of an encoder without a head, for "taylor": "mean", "cls", ….
        multiple: each layer keeps a multiple of this number of neurons, in which kernels compute.
        seed: of "random".

    Returns:
        See `Pruned`.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Michel, Levy and Neubig 2019, "Are Sixteen Heads Really Better than One?"; McCarley, Chakravarti
    and Sil 2019, "Structured Pruning of a BERT-based Question Answering Model".
    """
    shrink.check(model)
    expected.one_of(SCORES, score=score)
    expected.integers(1, multiple=multiple)
    if type(seed) is not int:
        raise TypeError(f"seed: expected an integer, got {seed!r}")
    if weights is not None:
        _check_share("weights", weights)
    layers = None if layers is None else _numbers("layers", layers)
    vocabulary = None if vocabulary is None else _numbers("vocabulary", vocabulary)
    smaller = model if layers is None else shrink.without(model, layers=layers)

    @functools.cache
    def found() -> Scores:
        return _scores(smaller, score, examples, pooling, seed)

    gone_heads = _removed("heads", heads, lambda: found().heads)
    gone_neurons = _removed("neurons", neurons, lambda: found().neurons, multiple)
    smaller = shrink.without(smaller, heads=gone_heads, neurons=gone_neurons, vocabulary=vocabulary)
    if embedding_rank is not None:
        smaller = factorize(smaller, embedding_rank)
    kept = list(range(len(smaller.base_model.layer_list()))) if layers is None else layers
    gone_heads, gone_neurons = (
        {i: some for i, some in units.items() if some} for units in (gone_heads, gone_neurons)
    )
    zeros = None if weights is None else _zero(smaller, weights)
    return Pruned(smaller, kept, gone_heads, gone_neurons, size_of(model), size_of(smaller), zeros)


@torch.no_grad()
def _zero(model: PreTrainedModel, share: float) -> float:
    """Set the smallest weights of all layers' linear maps to 0; the share that is 0 then."""
    every: list[Any] = [
        part(layer, path).weight
        for layer in model.base_model.layer_list()
        for path in shrink.paths(layer.form)
    ]
    if not sum(t.numel() for t in every):
        return 0.0
    sizes = torch.cat([t.abs().flatten() for t in every])
    sizes = sizes.to(torch.promote_types(sizes.dtype, torch.float32))
    if not sizes.isfinite().all():
        raise ValueError("weights: expected finite weights")
    gone = smallest(sizes, round(share * len(sizes)))
    for t, own in zip(every, gone.split([t.numel() for t in every]), strict=True):
        t.masked_fill_(own.view_as(t), 0)
    return sum(int((t == 0).sum()) for t in every) / len(sizes)


def _check_share(name: str, given: Any, expected: str = "a share") -> None:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name}: expected {expected}, got {given!r}")
    if not 0 <= given < 1:
        raise ValueError(f"{name}: expected a share in [0, 1), got {given!r}")


def _removed(
    name: str, given: float | _Units | None, units: Callable[[], list[Tensor]], multiple: int = 1
) -> dict[int, list[int]]:
    """The units to remove per layer."""
    if given is None or isinstance(given, Mapping):
        some = {layer: _numbers(f"{name}[{layer!r}]", own) for layer, own in (given or {}).items()}
        return {layer: sorted(set(own)) for layer, own in some.items()}
    _check_share(name, given, "a share, or numbers per layer")
    found = units()
    for layer, own in enumerate(found):
        if not own.isfinite().all():
            raise ValueError(f"{name}: the scores of layer {layer} are not finite; give numbers per layer")
    return chosen(found, given, multiple)


def _numbers(name: str, given: Iterable[Any]) -> list[int]:
    """The integers of a list, an array or a tensor."""
    try:
        # A bool is left for the check of the numbers
        return [i if isinstance(i, bool) else operator.index(i) for i in given]
    except TypeError:
        raise TypeError(f"{name}: expected a list of integers, got {brief(given)}") from None


def _scores(
    model: PreTrainedModel, score: str, examples: Examples | None, pooling: str | None, seed: int
) -> Scores:
    if score == "magnitude":
        return scores.magnitude(model)
    if score == "random":
        return scores.random(model, seed)
    if examples is None:
        raise ValueError("examples: expected labelled examples for score 'taylor', got None")
    if not isinstance(examples, Examples):
        raise TypeError(
            f"examples: expected Examples (`tokenized` makes them), got {type(examples).__name__}"
        )
    return scores.taylor(model, examples, pooling=pooling)


def smallest(values: Tensor, count: int) -> Tensor:
    """Which of `values` (n,) are the `count` smallest, (n,) bool; of equal ones the first."""
    if not count:
        return torch.zeros_like(values, dtype=torch.bool)
    largest = values.kthvalue(count).values
    below, equal = values < largest, values == largest
    return below | (equal & (equal.cumsum(0) <= count - below.sum()))


def chosen(units: list[Tensor], share: float, multiple: int = 1) -> dict[int, list[int]]:
    """The units to remove per layer: those with the smallest scores of all layers.

    Args:
        units: a score per unit of each layer.
        share: the share of all units to remove. As many go as come nearest to it from below.
        multiple: units are removed in groups, the smallest of a layer together, so that each layer keeps a
            multiple of this number. A group's score is the mean of its units'.
    """
    groups: list[tuple[float, int, list[int]]] = []
    for layer, own in enumerate(units):
        order = own.argsort(stable=True).tolist()
        first = len(order) % multiple
        ends = [*([first] if first else []), *range(first + multiple, len(order) + 1, multiple)]
        for start, end in zip([0, *ends], ends, strict=False):
            some = order[start:end]
            groups.append((own[some].mean().item(), layer, some))
    left, gone = round(share * sum(map(len, units))), {i: [] for i in range(len(units))}
    # The sort is stable, so groups of a layer with equal scores stay in order
    for _, layer, some in sorted(groups, key=lambda group: group[0]):
        if len(some) > left:
            break
        gone[layer] += some
        left -= len(some)
    return {layer: sorted(some) for layer, some in gone.items()}
