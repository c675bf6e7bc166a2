"""How many tokens each layer of a model needs: factors of tokens by rank, which learn beside the task.

    a_i ← r_l,bin(i) a_i                      a: the attention block's output of layer l, token i
    loss = task + weight Σ_l l Σ_k r_lk       r in [0, 1]; layers count from 1

A token's rank is its place in its text by the attention that it receives; ranks / length fall into bins, so
that a schedule has shares of each text's own length. The factor of the first token is 1. A layer then keeps
the share Σ_k r_lk / bins, and no more than the layer before.

Source: Goyal et al. 2020, "PoWER-BERT: Accelerating BERT Inference via Progressive Word-vector Elimination",
sec. 3.3.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastbert.compression.elimination import check_whole, eliminate
from fastbert.finetuning.losses import Method, TaskLosses, with_rate
from fastbert.finetuning.settings import Settings
from fastbert.layers.batch import PackedBatch
from fastbert.layers.elimination import ranks_of
from fastbert.layers.taps import Taps
from fastbert.models.base import PreTrainedModel
from fastbert.models.encoder import tapped
from fastbert.ops.attention import attention
from fastbert.ops.attention_grid import from_grid
from fastbert.ops.attention_received import attention_received
from fastbert.runtime import expected
from fastbert.training.module import Losses, Results
from fastbert.training.optimizers import decay_groups


class _Soft(Taps):
    """Multiplies tokens by their factors."""

    def __init__(self, factors: Tensor):
        self.factors, self.of_tokens = factors, factors.new_empty(0)

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sequences: PackedBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Taps`."""
        where = sequences.cu_seqlens, sequences.max_seqlen
        with torch.no_grad():
            lse = attention(q, k, v, *where, return_lse=True)[1]
            ranks = ranks_of(attention_received(q, k, *where, lse), sequences)
            lengths = sequences.cu_seqlens.diff()[:, None].clamp_min(1)
            bins = (ranks * self.factors.shape[1] // lengths).clamp_max(self.factors.shape[1] - 1)
        grid = self.factors[layer][bins].masked_fill(ranks == 0, 1.0)
        self.of_tokens = from_grid(grid, sequences.cu_seqlens, q.shape[0])
        return q, k, v, sequences.bias

    def attended(self, layer: int, attended: Tensor, sequences: PackedBatch) -> Tensor:
        """See `Taps`."""
        return attended * self.of_tokens.to(attended.dtype).unsqueeze(1)


def _check(weight: object, bins: object) -> None:
    expected.integers(1, bins=bins)
    expected.numbers(">= 0", weight=weight)


class TokenSearch(Losses):
    """The losses of a task, and a price per token that a layer keeps. `schedule` has what was learnt.

    Args:
        losses: the losses of the task, of `model`.
        model: a model that `fastbert.eliminate` takes, without a schedule; its norms follow the blocks.
        weight: of the price, 1e-4 to 1e-3 in the paper.
        bins: the number of factors per layer.

    Raises:
        ValueError: naming the argument, what came and what was expected.

    Source: Goyal et al. 2020, sec. 3.3.
    """

    def __init__(self, losses: Losses, model: PreTrainedModel, *, weight: float = 5e-4, bins: int = 64):
        super().__init__()
        _check(weight, bins)
        if model.config.family.pre_norm:
            raise ValueError("model: expected one without norms before the blocks")
        layers = check_whole(model)
        self.losses, self.model, self.exports = losses, model, losses.exports
        self.weights, self.passes = {**losses.weights, "tokens": weight}, losses.passes
        self.factors = nn.Parameter(torch.ones(layers, bins, device=model.device))

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """The task's results, and the loss "tokens"."""
        with tapped(self.model.base_model, _Soft(self.factors)):
            found, right = self.losses(inputs, measure)
        number = torch.arange(1, len(self.factors) + 1, device=self.factors.device)
        return {**found, "tokens": (number.unsqueeze(1) * self.factors).sum()}, right

    def optimized(self, optimizer: Optimizer) -> None:
        """Keep the factors in [0, 1] after each step."""
        self.losses.optimized(optimizer)

        def clamp(*_: Any) -> None:
            self.factors.data.clamp_(0, 1)

        optimizer.register_step_post_hook(clamp)

    def schedule(self) -> list[float]:
        """The share of the tokens that each layer needs, as `fastbert.eliminate` takes it."""
        bins = self.factors.shape[1]
        share = self.factors.detach().double().mean(1).clamp(1 / bins, 1)
        return share.cummin(0).values.tolist()


@dataclass(frozen=True)
class LearnedSchedule(Method):
    """A schedule that is learned beside the task; `fastbert.finetuning.run.finetune` takes it as `method`.

    The trained model has the schedule. Fine-tune it again to recover what it lost.

    Attributes:
        weight, bins: see `TokenSearch`.
        lr: the largest learning rate of the factors, 1e-4 to 1e-2 in the paper.

    Raises:
        ValueError: naming the attribute.
    """

    weight: float = 5e-4
    bins: int = 64
    lr: float = 1e-2

    name: ClassVar[str] = "token-search"
    excludes: ClassVar[tuple[str, ...]] = ("freeze", "layerdrop", "freelb", "smart")

    def __post_init__(self) -> None:
        _check(self.weight, self.bins)
        expected.numbers("> 0", lr=self.lr)

    def losses(
        self, model: PreTrainedModel, settings: Settings, fields: Sequence[str], steps: int
    ) -> TaskLosses:
        """See `Method`."""
        return _LearnedLosses(model, settings, steps, self)


class _LearnedLosses(TaskLosses):
    """The losses of a `LearnedSchedule`; the model has the schedule when it is scored."""

    def __init__(
        self, model: PreTrainedModel, settings: Settings, steps: int, options: LearnedSchedule
    ) -> None:
        super().__init__(model)
        task = TaskLosses(model, settings)
        self.search = TokenSearch(task, model, weight=options.weight, bins=options.bins)
        self.steps, self._scale = steps, options.lr / settings.lr
        self.taken = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """({"task": the mean loss and the price}, {})."""
        found, right = self.search(inputs, measure)
        return {"task": found["task"] + self.search.weights["tokens"] * found["tokens"]}, right

    def grouped(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The factors have their own learning rate, and do not decay."""
        return with_rate(groups, [self.search.factors], self._scale)

    def optimized(self, optimizer: Optimizer) -> None:
        """Count each step."""
        self.search.optimized(optimizer)

        @torch.no_grad()
        def step(*_: Any) -> None:
            self.taken += 1

        optimizer.register_step_post_hook(step)

    def scored(self) -> PreTrainedModel:
        """A copy with the schedule."""
        return eliminate(copy.deepcopy(self.model), self.search.schedule())

    trained = scored

    @property
    def is_final(self) -> bool:
        """Whether all steps are taken: an earlier schedule keeps more tokens."""
        return int(self.taken) >= self.steps


def search_groups(scale: float) -> Any:
    """`groups` of a `Stage` whose factors learn `scale` times as fast as the model, and do not decay."""
    return lambda module, weight_decay: with_rate(decay_groups(module, weight_decay), [module.factors], scale)
