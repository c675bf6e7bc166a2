"""Small classifiers of labelled spans, one per layer or mix of layers, all trained as one batched product.

A probe reads x = γ Σ_l s_l h_l, s = softmax(a) over the layers that it may read: one layer, or layers 0 to l.
A span's vectors are projected, and pooled by the softmax of a learned score within the span. A small network
classifies the pooled vector, or both vectors of two spans. Every parameter has a leading dimension of probes,
so each probe learns independently.

Source: Tenney et al. 2019, "What do you learn from context?", sec. 3; the mix: Peters et al. 2018, "Deep
contextualized word representations", eq. 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.runtime import expected

LOSSES = ("sigmoid", "softmax")


class Recipe(NamedTuple):
    """How probes are built and trained.

    Attributes:
        inner: width of the pooled spans and of the network's inner layer; 0: a linear classifier of the
            span's mean vector.
        dropout_p: dropout of the network's inner layer.
        lr: Adam's learning rate.
        mix_lr: Adam's learning rate for the weights of a mix, which with `lr` would hardly change.
        batch: targets per step.
        epochs: most epochs; a probe keeps its parameters of the epoch with the least loss on the held-out
            part.
        patience: training ends after so many epochs in which no probe improves.
    """

    inner: int = 256
    dropout_p: float = 0.3
    lr: float = 1e-3
    mix_lr: float = 1e-2
    batch: int = 256
    epochs: int = 20
    patience: int = 3

    def check(self) -> None:
        """Raise a ValueError that names the first invalid value."""
        expected.integers(0, inner=self.inner)
        expected.integers(1, batch=self.batch, epochs=self.epochs, patience=self.patience)
        expected.numbers("in [0, 1)", dropout_p=self.dropout_p)
        for name in ("lr", "mix_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)!r}")


DEFAULT = Recipe()


@dataclass(frozen=True)
class Spans:
    """Labelled spans of feature rows.

    Attributes:
        bounds: (n, spans, 2) int64, first row and end (last row + 1); no span is empty.
        labels: (n, classes) bool.
    """

    bounds: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds)

    def chosen(self, numbers: np.ndarray) -> Spans:
        """The targets with these numbers, in this order."""
        return Spans(self.bounds[numbers], self.labels[numbers])


def one_layer_each(layers: int) -> Tensor:
    """(layers, layers) bool, as `mixes` of `Probes`: probe l reads layer l."""
    return torch.eye(layers, dtype=torch.bool)


def up_to_each(layers: int) -> Tensor:
    """(layers, layers) bool, as `mixes` of `Probes`: probe l reads layers 0 to l."""
    return torch.ones(layers, layers, dtype=torch.bool).tril()


class Probes(nn.Module):
    """A probe per row of `mixes`.

    Args:
        mixes: (probes, layers) bool: the layers that each probe may read; at least one.
        width: width of the features.
        spans: number of spans per target, 1 or 2.
        classes: number of labels.
        recipe: how they are built; see `Recipe`.
        seed: seed of dropout, and of the initial parameters, which are the same for every probe.
    """

    hidden_from: Tensor

    def __init__(
        self, mixes: Tensor, width: int, spans: int, classes: int, recipe: Recipe = DEFAULT, seed: int = 0
    ) -> None:
        super().__init__()
        recipe.check()
        probes, layers = mixes.shape
        if not mixes.any(1).all():
            raise ValueError("mixes: expected one layer at least for every probe")
        self.draw = torch.Generator().manual_seed(seed)
        self.recipe = recipe
        self.register_buffer("hidden_from", ~mixes)
        self.mix = nn.Parameter(torch.zeros(probes, layers))
        self.factor = nn.Parameter(torch.ones(probes))
        inner = recipe.inner

        def weights(rows: int, columns: int) -> nn.Parameter:
            # torch.nn.Linear's distribution; the same for all probes, so that only their layers differ
            bound = 1 / math.sqrt(rows)
            one = (torch.rand(rows, columns, generator=self.draw) * 2 - 1) * bound
            return nn.Parameter(one.expand(probes, -1, -1).clone())

        def zeros(columns: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(probes, 1, columns))

        if inner:
            self.project = nn.ParameterList(weights(width, inner) for _ in range(spans))
            self.project_bias = nn.ParameterList(zeros(inner) for _ in range(spans))
            self.score = nn.ParameterList(weights(inner, 1) for _ in range(spans))
            self.first = weights(spans * inner, inner)
            self.first_bias = zeros(inner)
            self.norm = nn.Parameter(torch.ones(probes, 1, inner))
            self.norm_bias = zeros(inner)
        self.last = weights(inner or spans * width, classes)
        self.last_bias = zeros(classes)

    def weights_of_layers(self) -> Tensor:
        """s of each probe, (probes, layers): its weight of each layer."""
        return self.mix.masked_fill(self.hidden_from, -math.inf).softmax(1)

    def forward(self, states: Tensor, bounds: np.ndarray) -> Tensor:
        """Logits of targets.

        Args:
            states: (layers, rows, width), as `hidden_states` returns them.
            bounds: (n, spans, 2), as in `Spans`.

        Returns:
            (probes, n, classes).
        """
        pooled = []
        for slot in range(bounds.shape[1]):
            lengths = bounds[:, slot, 1] - bounds[:, slot, 0]
            owner = torch.from_numpy(np.repeat(np.arange(len(bounds)), lengths))
            rows = np.repeat(bounds[:, slot, 1] - np.cumsum(lengths), lengths) + np.arange(lengths.sum())
            read = states[:, torch.from_numpy(rows)].to(self.mix.device, self.mix.dtype)
            mixed = self._mixed(read)
            pooled.append(self._pooled(slot, mixed, owner.to(self.mix.device), len(bounds)))
        x = torch.cat(pooled, -1)
        if self.recipe.inner:
            x = torch.baddbmm(self.first_bias, x, self.first).tanh()
            x = F.layer_norm(x, x.shape[-1:]) * self.norm + self.norm_bias
            x = self._dropped(x)
        return torch.baddbmm(self.last_bias, x, self.last)

    def _mixed(self, read: Tensor) -> Tensor:
        """(layers, tokens, width) -> (probes, tokens, width)."""
        seen = ~self.hidden_from
        if (seen.sum(1) == 1).all():  # one layer each, so no weights
            return read[seen.int().argmax(1)] * self.factor[:, None, None]
        weights = self.weights_of_layers() * self.factor[:, None]
        return (weights @ read.flatten(1)).view(-1, *read.shape[1:])

    def _pooled(self, slot: int, x: Tensor, owner: Tensor, count: int) -> Tensor:
        """(probes, tokens, width) -> (probes, count, inner), or (probes, count, width) for linear probes."""
        if self.recipe.inner:
            x = torch.baddbmm(self.project_bias[slot], x, self.project[slot])
            score = (x @ self.score[slot]).squeeze(-1)
            index = owner.expand_as(score)
            most = score.new_full((len(score), count), -math.inf)
            most = most.scatter_reduce(1, index, score.detach(), "amax")
            weight = (score - most.gather(1, index)).exp()
        else:
            weight = x.new_ones(x.shape[:2])
        total = weight.new_zeros(len(x), count).index_add(1, owner, weight)
        weight = weight / total[:, owner]
        return x.new_zeros(len(x), count, x.shape[-1]).index_add(1, owner, x * weight[..., None])

    def _dropped(self, x: Tensor) -> Tensor:
        p = self.recipe.dropout_p
        if not self.training or p == 0:
            return x
        # one mask for all probes
        kept = torch.rand(x.shape[1:], generator=self.draw).to(x.device) >= p
        return x * kept / (1 - p)

    def logits(self, states: Tensor, bounds: np.ndarray, batch: int = 1024) -> Tensor:
        """As `forward` in eval mode without gradients, some targets at a time; on the CPU."""
        mode = self.training
        self.eval()
        with torch.no_grad():
            parts = [self(states, bounds[i : i + batch]).cpu() for i in range(0, len(bounds), batch)]
        self.train(mode)
        return torch.cat(parts, 1)


def check_finite(states: Tensor) -> None:
    """Raise a ValueError that names the first layer of (layers, rows, hidden) that is not finite."""
    for layer, each in enumerate(states):
        if not torch.isfinite(each).all():
            raise ValueError(f"states[{layer}]: expected finite numbers, got others")


def losses(logits: Tensor, labels: Tensor, loss: str) -> Tensor:
    """The loss of each probe and target, in nats.

    Args:
        logits: (probes, n, classes).
        labels: (n, classes) bool.
        loss: "sigmoid", the sum over classes; or "softmax", for one label per target.

    Returns:
        (probes, n).
    """
    wanted = labels.to(logits.dtype).expand_as(logits)
    if loss == "sigmoid":
        return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(-1)
    return -(logits.log_softmax(-1) * wanted).sum(-1)


def fit(
    probes: Probes, states: Tensor, train: Spans, held_out: Spans | None, *, loss: str, seed: int = 0
) -> Probes:
    """Train all probes at once; each keeps the parameters of its best epoch.

    Args:
        probes: changed in place, and returned in eval mode.
        states: (layers, rows, width).
        train: targets to learn from.
        held_out: targets on which epochs are compared; None, or empty: the last epoch counts.
        loss: see `losses`.
        seed: seed of the order of the targets.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    expected.one_of(LOSSES, loss=loss)
    if not len(train):
        raise ValueError("train: expected one target at least, got none")
    for name, some in (("train", train), ("held_out", held_out)):
        if loss == "softmax" and some is not None and (some.labels.sum(1) != 1).any():
            number = int(np.flatnonzero(some.labels.sum(1) != 1)[0])
            raise ValueError(f"{name}[{number}]: expected one label, got {int(some.labels[number].sum())}")
    recipe = probes.recipe
    device = probes.mix.device
    mix = [probes.mix, probes.factor]
    others = [p for p in probes.parameters() if all(p is not each for each in mix)]
    optimizer = torch.optim.Adam([{"params": mix, "lr": recipe.mix_lr}, {"params": others}], lr=recipe.lr)

    def of_step(numbers: np.ndarray) -> Tensor:
        some = train.chosen(numbers)
        return losses(probes(states, some.bounds), torch.from_numpy(some.labels).to(device), loss)

    def of_epoch(some: Spans) -> Tensor:
        return losses(probes.logits(states, some.bounds), torch.from_numpy(some.labels), loss).mean(1)

    probes.train()
    numbers, held = np.arange(len(train)), functools.partial(of_epoch, held_out) if held_out else None
    learn(probes, optimizer, numbers, of_step, held, recipe, seed)
    return probes.eval()


def learn(
    probes: nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: np.ndarray,
    of_step: Callable[[np.ndarray], Tensor],
    of_epoch: Callable[[], Tensor] | None,
    recipe: Recipe,
    seed: int,
) -> None:
    """Train all probes at once; each keeps the parameters of its best epoch.

    Args:
        probes: a module whose parameters have a leading dimension of probes.
        optimizer: optimizer of these parameters.
        numbers: numbers of the targets to learn from.
        of_step: some of the numbers -> the loss of each probe and number, (probes, n).
        of_epoch: -> (probes,) the losses by which epochs are compared; None: the last epoch counts.
        recipe: its `lr`, `batch`, `epochs` and `patience` are used.
        seed: seed of the order of the numbers.

    Raises:
        ValueError: a loss is not finite.
    """
    order = np.random.default_rng(seed)
    best = torch.full((len(next(probes.parameters())),), math.inf)
    kept = {name: value.detach().clone() for name, value in probes.named_parameters()}
    since = 0
    for _ in range(recipe.epochs):
        for some in np.array_split(order.permutation(numbers), math.ceil(len(numbers) / recipe.batch)):
            found = of_step(some)
            optimizer.zero_grad(set_to_none=True)
            found.mean(1).sum().backward()
            optimizer.step()
        if not torch.isfinite(found).all():
            raise ValueError(f"lr: probes have no finite loss with {recipe.lr}; expected a smaller rate")
        if of_epoch is None:
            continue
        found = of_epoch()
        better = found < best
        best = torch.where(better, found, best)
        since = 0 if better.any() else since + 1
        with torch.no_grad():
            for name, value in probes.named_parameters():
                which = better.to(value.device).view(-1, *(1,) * (value.dim() - 1))
                kept[name] = torch.where(which, value, kept[name])
        if since >= recipe.patience:
            break
    if of_epoch is not None:
        with torch.no_grad():
            for name, value in probes.named_parameters():
                value.copy_(kept[name])
