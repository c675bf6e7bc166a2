"""Movement pruning: a model that is fine-tuned learns which weights, or heads and neurons, it can do without.

A weight W has a score S, which is trained beside it. The forward reads W ∘ M(S), with a mask M of zeros and
ones; the backward takes M for S (straight-through):

    dW = dout_W ∘ M           dS = dout_W ∘ W,  summed over the weights that share the score

    hard    M keeps the share v(t) with the largest scores, of each matrix, or of all heads and all neurons
    soft    M = σ(S) > τ(t);  the loss has λ τ(t)/τ · mean σ(S) besides

    v(t), τ(t): first value during the warm-up, last value during the cool-down, and in between
    last + (first - last) (1 - t/T)³, t steps after the warm-up of T

So scores of weights that move away from 0 rise. With units "weights" every weight of the layers' linear maps
has a score. The trained model has zeros: its file compresses, its time stays. With units "blocks" each head
(its query, key, value and output) and each neuron has one. They are removed, so the model is faster.

Source: Sanh, Wolf and Rush 2020, "Movement Pruning: Adaptive Sparsity by Fine-Tuning", and its code; Lagunas
et al. 2021, "Block Pruning For Faster Transformers".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastbert.compression import shrink
from fastbert.compression.pruning import Pruned, chosen, smallest
from fastbert.compression.size import size_of
from fastbert.finetuning.losses import Method, TaskLosses, with_rate
from fastbert.finetuning.settings import Settings
from fastbert.layers.modules import part
from fastbert.models.base import PreTrainedModel
from fastbert.runtime import expected, prepared
from fastbert.training.module import Results

_KINDS, _UNITS = ("hard", "soft"), ("weights", "blocks")
# Values that a kind has, with their defaults; the other kind refuses them
_OF_KIND = {"hard": {"keep": 0.15}, "soft": {"threshold": 0.1, "penalty": 400.0}}


@dataclass(frozen=True)
class Movement(Method):
    """How movement pruning chooses; `fastbert.finetuning.run.finetune` takes it as `method`.

    Attributes:
        kind: "hard" or "soft".
        units: "weights": a score per weight; "blocks": one per head and one per neuron.
        keep: hard: the share that is kept at the end, in (0, 1]; default 0.15.
        threshold: soft: τ at the end, in (0, 1); default 0.1.
        penalty: soft: λ; default 400.
        lr: the largest learning rate of scores.
        warmup, cooldown: shares of all steps with the first and with the last value.
        multiple: blocks: each layer keeps a multiple of this number of neurons, in which kernels compute.

    Raises:
        ValueError: naming the attribute.
    """

    kind: str = "hard"
    units: str = "weights"
    keep: float | None = None
    threshold: float | None = None
    penalty: float | None = None
    lr: float = 1e-2
    warmup: float = 0.1
    cooldown: float = 0.2
    multiple: int = 64

    name: ClassVar[str] = "movement"
    # The paper's fine-tuning
    defaults: ClassVar[Mapping[str, float]] = {"lr": 3e-5, "epochs": 10, "batch_size": 16}
    excludes: ClassVar[tuple[str, ...]] = (
        "freeze",
        "random_init",
        "decay_to_start",
        "mixout",
        "freelb",
        "smart",
    )

    def __post_init__(self) -> None:
        expected.one_of(_KINDS, kind=self.kind)
        expected.one_of(_UNITS, units=self.units)
        for kind, values in _OF_KIND.items():
            for name, usual in values.items():
                if self.kind == kind and getattr(self, name) is None:
                    object.__setattr__(self, name, usual)
                elif self.kind != kind and getattr(self, name) is not None:
                    raise ValueError(f"{name}: expected None, as it is for kind {kind!r}, got {self.kind!r}")
        if self.kind == "hard":
            expected.numbers("in (0, 1]", keep=self.keep)
        else:
            expected.numbers("in (0, 1)", threshold=self.threshold)
            expected.numbers(">= 0", penalty=self.penalty)
        expected.numbers("> 0", lr=self.lr)
        expected.numbers("in [0, 1)", warmup=self.warmup, cooldown=self.cooldown)
        if self.warmup + self.cooldown >= 1:
            raise ValueError(f"cooldown: expected less than 1 with warmup, got {self.cooldown!r}")
        expected.integers(1, multiple=self.multiple)

    def value(self, step: int, steps: int) -> float:
        """v or τ for the forward after `step` of `steps` steps."""
        first, last = (1.0, self.keep) if self.keep is not None else (0.0, self.threshold)
        assert last is not None
        begin, end = self.warmup * steps, (1 - self.cooldown) * steps
        if step <= begin:
            return first
        if step >= end:
            return last
        return last + (first - last) * (1 - (step - begin) / (end - begin)) ** 3

    def losses(
        self, model: PreTrainedModel, settings: Settings, fields: Sequence[str], steps: int
    ) -> TaskLosses:
        """See `Method`."""
        if model._modules.get("above") is not None:
            raise ValueError("head: expected the usual head with movement pruning")
        return MovementLosses(model, settings, steps, self)


class _Weight(NamedTuple):
    """A weight with a mask.

    Attributes:
        key: its name in the model.
        linear: its module.
        scores: the number of its scores' tensor.
        axis: what its scores divide; None: each weight has a score.
    """

    key: str
    linear: Any
    scores: int
    axis: shrink.Axis | None

    def masked(self, weight: Tensor, mask: Tensor) -> Tensor:
        """`weight` ∘ `mask`, a factor per score."""
        if self.axis is None:
            return (weight * mask).to(weight.dtype)
        apart = weight.unflatten(self.axis.dim, self.axis.shape)
        shape = [-1 if dim == self.axis.dim + 1 else 1 for dim in range(apart.dim())]
        return (apart * mask.view(shape)).flatten(self.axis.dim, self.axis.dim + 3).to(weight.dtype)


class MovementPruning(nn.Module):
    """Masks on a model's weights, in any training loop; see the module.

        pruning = MovementPruning(model, steps)
        optimizer = torch.optim.AdamW(
            [
                {"params": model.parameters()},
                {"params": pruning.scores, "lr": 1e-2, "weight_decay": 0.0},
            ],
            lr=3e-5,
        )
        (model(**batch).loss + pruning.penalty()).backward()
        optimizer.step()
        pruning.step()
        …
        smaller = pruning.finish().model

    Each call of the model reads masked weights, also in eval mode; its parameters keep the weights without a
    mask. `state_dict` and `load_state_dict` have the scores and the steps taken. In half precision keep the
    weights in float32, under autocast.

    Args:
        model: a model of this package with plain linear layers, which is trained. It gets two hooks.
        steps: number of steps of the training.
        options: see `Movement`; None: its defaults.

    Attributes:
        scores: of each matrix of the layers; or of the heads and of the neurons of each layer.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    def __init__(self, model: PreTrainedModel, steps: int, options: Movement | None = None) -> None:
        super().__init__()
        shrink.check(model)
        expected.integers(1, steps=steps)
        # In a tuple, so that it is no part of this module
        self._model, self.steps, self.options = (model,), steps, options or Movement()
        names = {id(module): name for name, module in model.named_modules()}
        self.scores, self._weights, self._layers = nn.ParameterList(), [], []
        for layer in model.base_model.layer_list():
            axes = {axis.path: axis for axis in shrink.axes(layer.form)}
            of_units: dict[str, int] = {}
            for path in shrink.paths(layer.form):
                linear: Any = part(layer, path)
                axis = None if self.options.units == "weights" else axes.get(path)
                if self.options.units == "weights":
                    number = self._new_scores(linear.weight, linear.weight.shape)
                elif axis is None:
                    continue
                elif axis.unit in of_units:
                    number = of_units[axis.unit]
                else:
                    size = layer.form.nheads if axis.unit == "heads" else shrink.inner_size(layer)
                    number = of_units[axis.unit] = self._new_scores(linear.weight, (size,))
                self._weights.append(_Weight(f"{names[id(linear)]}.weight", linear, number, axis))
            self._layers.append(of_units)
        self.taken = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self._read = (-1, 0)
        self._hooks = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _new_scores(self, weight: Tensor, shape: Sequence[int]) -> int:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.scores.append(nn.Parameter(torch.zeros(shape, dtype=dtype, device=weight.device)))
        return len(self.scores) - 1

    # -- steps -----------------------------------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """The number of steps taken; the device is asked only if the number was loaded."""
        if self._read[0] != self.taken._version:
            self._read = self.taken._version, int(self.taken)
        return self._read[1]

    @torch.no_grad()
    def step(self) -> None:
        """Note a step of the optimizer; call it after each."""
        number = self.step_number + 1
        self.taken.fill_(number)
        self._read = self.taken._version, number

    @property
    def is_final(self) -> bool:
        """Whether the schedule has reached its last value."""
        return self.step_number >= (1 - self.options.cooldown) * self.steps

    def penalty(self) -> Tensor:
        """What a soft mask adds to the loss, a scalar; 0 for a hard one."""
        options = self.options
        if options.penalty is None or options.threshold is None:
            return self.scores[0].new_zeros(()) if len(self.scores) else torch.zeros(())
        share = options.value(self.step_number, self.steps) / options.threshold
        each = [scores.sigmoid().mean() for scores in self.scores if scores.numel()]
        return options.penalty * share * torch.stack(each).mean()

    # -- masks -----------------------------------------------------------------------------------------------

    def masks(self) -> list[Tensor]:
        """Zeros and ones in the shape of each tensor of scores, for the steps taken."""
        return prepared.derived(self, "masks", (self.taken, *self.scores), self._new_masks)

    def _new_masks(self) -> list[Tensor]:
        value = self.options.value(self.step_number, self.steps)
        if self.options.units == "blocks":
            return self._of_blocks(value)
        return [
            _largest(scores, round(value * scores.numel()))
            if self.options.kind == "hard"
            else (scores.sigmoid() > value).to(scores.dtype)
            for scores in self.scores
        ]

    def _of_blocks(self, value: float) -> list[Tensor]:
        """Masks of heads and neurons; a layer keeps a multiple of neurons, as `prune` has it."""
        masks = [torch.ones_like(scores) for scores in self.scores]
        for unit, multiple in (("heads", 1), ("neurons", self.options.multiple)):
            numbers = [of_units[unit] for of_units in self._layers if unit in of_units]
            if self.options.kind == "hard":
                own = [self.scores[number].detach().double().cpu() for number in numbers]
                for i, gone in chosen(own, 1 - value, multiple).items():
                    masks[numbers[i]][gone] = 0
                continue
            for number in numbers:
                scores = self.scores[number].detach()
                kept = int((scores.sigmoid() > value).sum())
                masks[number] = _largest(scores, min(scores.numel(), -(-kept // multiple) * multiple))
        return masks

    def _masked(self) -> list[Tensor]:
        """The masked weight of each of `_weights`."""
        masks = self.masks()
        if torch.is_grad_enabled():
            through = [
                mask + (scores - scores.detach()) for mask, scores in zip(masks, self.scores, strict=True)
            ]
            return [each.masked(each.linear.weight, through[each.scores]) for each in self._weights]
        weights = [each.linear.weight for each in self._weights]

        def build() -> list[Tensor]:
            return [
                each.masked(w, masks[each.scores]) for each, w in zip(self._weights, weights, strict=True)
            ]

        # The same tensors while nothing changes, so that what is derived from them is kept too
        return prepared.derived(self, "weights", (self.taken, *self.scores, *weights), build)

    def _enter(self, model: Any, args: Any) -> None:
        base = model.base_model
        if base.checkpoint_every and torch.is_grad_enabled():
            raise ValueError("model: expected no activation checkpointing, which reads weights without masks")
        self._own = [each.linear.weight for each in self._weights]
        for each, weight in zip(self._weights, self._masked(), strict=True):
            each.linear._parameters["weight"] = weight

    def _leave(self, *_: Any) -> None:
        for each, weight in zip(self._weights, self.__dict__.pop("_own", ()), strict=False):
            each.linear._parameters["weight"] = weight

    # -- the pruned model ------------------------------------------------------------------------------------

    @torch.no_grad()
    def pruned(self) -> Pruned[Any]:
        """A copy of the model with the weights that the masks leave: physically smaller with blocks."""
        (model,), masks, gone = self._model, self.masks(), {}
        for unit in ("heads", "neurons"):
            found = {
                i: (masks[numbers[unit]] == 0).nonzero()[:, 0].tolist()
                for i, numbers in enumerate(self._layers)
                if unit in numbers
            }
            gone[unit] = {i: some for i, some in found.items() if some}
        made = shrink.without(model, **gone)
        if self.options.units == "weights":
            for each in self._weights:
                made.get_parameter(each.key).mul_(masks[each.scores])
        kept = list(range(len(self._layers)))
        return Pruned(made, kept, gone["heads"], gone["neurons"], size_of(model), size_of(made))

    def finish(self) -> Pruned[Any]:
        """See `pruned`; the given model computes without masks again."""
        for hook in self._hooks:
            hook.remove()
        return self.pruned()

    def exported(self, state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """The values of a state with masked weights, whose names begin with `prefix`."""
        masks = self.masks()
        own = {f"{prefix}{each.key}": each for each in self._weights}
        return {
            name: own[name].masked(value, masks[own[name].scores].to(value.device)) if name in own else value
            for name, value in state.items()
        }


def _largest(scores: Tensor, count: int) -> Tensor:
    """Ones for the `count` largest scores, zeros for the rest."""
    rest = smallest(scores.flatten(), scores.numel() - count)
    return torch.where(rest, 0.0, 1.0).to(scores.dtype).view_as(scores)


class MovementLosses(TaskLosses):
    """A task's loss of a model with masks; the embeddings do not learn, as in the paper.

    Args:
        model: with the head of the task.
        settings: of the run.
        steps: number of steps of the run.
        options: see `Movement`.
    """

    def __init__(self, model: PreTrainedModel, settings: Settings, steps: int, options: Movement) -> None:
        super().__init__(model, settings)
        part(model.base_model, model.family.embeddings).requires_grad_(False)
        self.pruning, self._rate = MovementPruning(model, steps, options), options.lr / settings.lr

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """({"task": the mean loss and the penalty}, {})."""
        losses, right = super().forward(inputs, measure)
        return {"task": losses["task"] + self.pruning.penalty()}, right

    def grouped(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Scores have their own learning rate, and do not decay."""
        return with_rate(groups, [*self.pruning.scores], self._rate)

    def optimized(self, optimizer: Optimizer) -> None:
        """Note each step."""
        super().optimized(optimizer)
        optimizer.register_step_post_hook(lambda *_: self.pruning.step())

    def exported(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Masked weights, of which a checkpoint has the whole ones beside the heads."""
        return self.pruning.exported(state, "model.")

    @property
    def is_final(self) -> bool:
        """Whether the masks keep what they keep at the end."""
        return self.pruning.is_final

    def trained(self) -> PreTrainedModel:
        """The pruned model."""
        return self.pruning.pruned().model
