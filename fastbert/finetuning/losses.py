"""What fine-tuning minimises: a task's loss, also with embeddings that are moved against it.

    plain     the loss of the model's own head
    FreeLB    the mean loss of K passes. Before each pass but the first, the embeddings of each sequence move
              by lr · g / ‖g‖ along their gradient g, within a ball; all passes have the same dropout
    SMART     loss + weight · D(x, x + delta), D the symmetric Kullback-Leibler divergence of the two answers,
              or the square of their difference. delta is noise, moved by one step along the gradient of D.
              With momentum the loss also has D between the model and the running mean of its weights

Gradients are divided by a norm of the sequence's own, so neighbours in a batch change nothing.

Source: Zhu et al. 2019, "FreeLB: enhanced adversarial training", algorithm 1; Jiang et al. 2019, "SMART",
sec. 3.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import _VF, Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from fastbert.finetuning.settings import Settings
from fastbert.finetuning.toward_start import Mixout, hook_decay
from fastbert.finetuning.trained import exports
from fastbert.layers.packing import send
from fastbert.models.base import PreTrainedModel
from fastbert.models.labels import IGNORED
from fastbert.training.module import Losses, Results


class TaskLosses(Losses):
    """The task's loss, computed by the model's own head.

    Args:
        model: with the head of the task.
        settings: `layerdrop`, `mixout` and `decay_to_start` count here; None: none of them.
    """

    weights: Mapping[str, float] = {}

    def __init__(self, model: PreTrainedModel, settings: Settings | None = None) -> None:
        super().__init__()
        self.model = model
        self.exports = exports(model)
        if settings is not None and settings.layerdrop:
            model.layerdrop = settings.layerdrop
        self.mixout = None
        if settings is not None and settings.mixout:
            self.mixout = Mixout(model, settings.mixout, settings.mixout_mask)
        self.starts = {}
        if settings is not None and settings.decay_to_start:
            self.starts = {p: p.detach().clone() for p in model.base_model.parameters()}

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """({"task": the mean loss}, {})."""
        return {"task": self.output(inputs).loss}, {}

    def output(self, inputs: dict[str, Any], model: PreTrainedModel | None = None) -> Any:
        """The model's output; an input "delta", (total, width), is added to the embeddings of words."""
        inputs = dict(inputs)
        own = self.model if model is None else model
        if (delta := inputs.pop("delta", None)) is not None:
            inputs["inputs_embeds"] = own.get_input_embeddings()(inputs.pop("input_ids")) + delta
        if self.mixout is None or model is not None:
            return own(**inputs)
        return torch.func.functional_call(own, self.mixout.mixed(), (), inputs)

    def optimized(self, optimizer: Optimizer) -> None:
        """Hook the decay to the first weights."""
        if self.starts:
            hook_decay(optimizer, self.starts)

    def grouped(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The parameter groups of this module, from the usual ones."""
        return groups

    def scored(self) -> PreTrainedModel:
        """The model as it is scored after an epoch."""
        return self.model

    @property
    def is_final(self) -> bool:
        """Whether the model may be the best of its run by now."""
        return True

    def trained(self) -> PreTrainedModel:
        """The model as it is saved."""
        return self.model


class Method(ABC):
    """How a run trains, if by more than its settings say; see `fastbert.compression.movement.Movement`.

    Attributes:
        name: its name in files and errors.
        defaults: settings in place of the task's defaults.
        excludes: names of settings that a run with it may not have.
    """

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, float]] = {}
    excludes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def losses(
        self, model: PreTrainedModel, settings: Settings, fields: Sequence[str], steps: int
    ) -> TaskLosses:
        """The module that is trained.

        Args:
            model, settings, fields: see `losses_of`.
            steps: number of steps of the run.
        """

    def check(self, settings: Settings) -> None:
        """Raise ValueError, naming a setting that the method excludes."""
        for name in self.excludes:
            if getattr(settings, name):
                raise ValueError(f"{name}: expected none with {self.name}")

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file: a run resumes only by an equal method."""
        own: Any = self
        return {"name": self.name, **asdict(own)}


def with_rate(groups: list[dict[str, Any]], own: Sequence[Tensor], scale: float) -> list[dict[str, Any]]:
    """Parameter groups, of which `own` learn `scale` times as fast as the rest, and do not decay."""
    apart = {*own}
    rest = [{**each, "params": [p for p in each["params"] if p not in apart]} for each in groups]
    own_group = {"params": [*own], "weight_decay": 0.0, "lr_scale": scale}
    return [*(each for each in rest if each["params"]), own_group]


class FreeLBLosses(TaskLosses):
    """See the module."""

    def __init__(self, model: PreTrainedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        assert settings.freelb is not None
        self.options = settings.freelb
        self.passes = self.options.steps

    def rounds(
        self, call: Callable[..., Results], inputs: dict[str, Any], measure: bool
    ) -> Iterator[Results]:
        """A pass of a K-th of the loss for each of K perturbations."""
        table, width = self.model.get_input_embeddings().weight, self.model.config.embedding_width
        segments = _Segments(inputs["cu_seqlens"], table.device)
        size = (segments.lengths * width).sqrt()
        shape = inputs["input_ids"].shape[0], width
        delta = _drawn(torch.rand, shape, table) * 2 - 1
        delta = delta * segments.each(self.options.init / size)
        for number in range(self.passes):
            delta.requires_grad_()
            losses, correct = call({**inputs, "delta": delta}, measure)
            yield {name: loss / self.passes for name, loss in losses.items()}, correct
            if number + 1 < self.passes:
                delta = self._moved(delta, segments)

    @torch.no_grad()
    def _moved(self, delta: Tensor, segments: _Segments) -> Tensor:
        """The perturbation after one step along its gradient."""
        assert delta.grad is not None
        norm = segments.norm(delta.grad).clamp_min(1e-30)
        moved = delta + delta.grad * segments.each(self.options.lr / norm)
        if self.options.ball is None:
            return moved
        norm = segments.norm(moved).clamp_min(1e-30)
        return moved * segments.each((self.options.ball / norm).clamp_max(1.0))


class SmartLosses(TaskLosses):
    """See the module.

    Args:
        model: with the head of the task.
        settings: with `smart`.
        fields: fields of the model's output that answers are made of.
    """

    def __init__(self, model: PreTrainedModel, settings: Settings, fields: Sequence[str]) -> None:
        super().__init__(model, settings)
        assert settings.smart is not None
        self.options, self.fields = settings.smart, fields
        self.past = copy.deepcopy(model).requires_grad_(False) if self.options.momentum else None

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """({"task": the mean loss and the divergences}, {})."""
        table = self.model.get_input_embeddings().weight
        segments = _Segments(inputs["cu_seqlens"], table.device)
        clean = self.output(inputs)
        shape = inputs["input_ids"].shape[0], self.model.config.embedding_width
        delta = (_drawn(torch.randn, shape, table) * self.options.noise).requires_grad_()
        apart = self._divergence(clean, self._again({**inputs, "delta": delta}, only_inputs=True), inputs)
        (gradient,) = torch.autograd.grad(apart, delta)
        largest = segments.largest(gradient.abs().amax(1)).clamp_min(1e-30)
        delta = delta.detach() + gradient * segments.each(self.options.lr / largest)
        apart = self._divergence(clean, self._again({**inputs, "delta": delta}), inputs)
        loss = clean.loss + self.options.weight * apart
        if self.past is not None:
            with torch.no_grad():
                past = self._again(inputs, model=self.past)
            loss = loss + self._divergence(clean, past, inputs)
        return {"task": loss}, {}

    def _again(
        self, inputs: dict[str, Any], only_inputs: bool = False, model: PreTrainedModel | None = None
    ) -> Any:
        """The output with the same dropout; with `only_inputs` no parameter has a gradient of it."""
        torch.manual_seed(torch.initial_seed())
        learning = [p for p in self.model.parameters() if p.requires_grad] if only_inputs else []
        try:
            for p in learning:
                p.requires_grad_(False)
            return self.output(inputs, model)
        finally:
            for p in learning:
                p.requires_grad_(True)

    def _divergence(self, one: Any, other: Any, inputs: dict[str, Any]) -> Tensor:
        """The mean divergence of two answers to the same inputs."""
        pairs = zip(answers(one, self.fields, inputs), answers(other, self.fields, inputs), strict=True)
        apart = F.mse_loss if self.model.config.problem_type == "regression" else symmetric_divergence
        return torch.stack([apart(a, b) for a, b in pairs]).mean()

    def optimized(self, optimizer: Optimizer) -> None:
        """Let the running mean of the weights follow each step."""
        super().optimized(optimizer)
        if self.past is not None:
            past: list[Tensor] = [*self.past.parameters()]
            now: list[Tensor] = [*self.model.parameters()]

            @torch.no_grad()
            def follow(*_: Any) -> None:
                _VF._foreach_lerp_(past, now, 1 - self.options.momentum)

            optimizer.register_step_post_hook(follow)


def losses_of(model: PreTrainedModel, settings: Settings, fields: Sequence[str]) -> TaskLosses:
    """The losses that the settings ask for.

    Args:
        model: with the head of the task.
        settings: of the run.
        fields: fields of the model's output that answers are made of.
    """
    if settings.freelb is not None:
        return FreeLBLosses(model, settings)
    if settings.smart is not None:
        return SmartLosses(model, settings, fields)
    return TaskLosses(model, settings)


def answers(output: Any, fields: Sequence[str], inputs: Mapping[str, Any]) -> list[Tensor]:
    """The scores of which each answer is one, per field: (n, classes).

    An answer is a sequence's class, a labelled token's class, or a token of a sequence.

    Args:
        output: a model's output for packed inputs.
        fields: of the output that answers are made of.
        inputs: with `cu_seqlens`, `input_ids` and labels.
    """
    found = []
    for name in fields:
        scores = output[name]
        if name != "logits":  # a score per token, of which a sequence chooses one
            lowest = torch.finfo(scores.dtype).min
            lengths = inputs["cu_seqlens"].diff().tolist()
            scores = pad_sequence(scores.split(lengths), batch_first=True, padding_value=lowest)
        elif scores.shape[0] == inputs["labels"].shape[0] == inputs["input_ids"].shape[0]:
            scores = scores[inputs["labels"] != IGNORED]
        found.append(scores)
    return found


def symmetric_divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(p ‖ q) + KL(q ‖ p) of the softmax p of `a` and q of `b`, (n, classes): the mean; 0 without rows."""
    a, b = a.log_softmax(-1), b.log_softmax(-1)
    return ((a.exp() - b.exp()) * (a - b)).sum() / max(len(a), 1)


class _Segments:
    """The sequences of a packed batch.

    Args:
        starts: (batch + 1,) `cu_seqlens`, on the host.
        device: of the tokens.
    """

    def __init__(self, starts: Tensor, device: torch.device) -> None:
        self.total = int(starts[-1])
        self.lengths = send(starts.diff().long(), device)

    def norm(self, x: Tensor) -> Tensor:
        """(total, width) -> (batch,): the Euclidean norm of each sequence."""
        squares = x.square().sum(1)
        return torch.segment_reduce(squares, "sum", lengths=self.lengths, unsafe=True).sqrt()

    def largest(self, x: Tensor) -> Tensor:
        """(total,) -> (batch,)."""
        return torch.segment_reduce(x, "max", lengths=self.lengths, unsafe=True)

    def each(self, x: Tensor) -> Tensor:
        """(batch,) -> (total, 1), a row per token."""
        return x.repeat_interleave(self.lengths, output_size=self.total).unsqueeze(1)


def _drawn(draw: Callable[..., Tensor], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Random numbers of the step's seed, by a generator of their own: dropout draws as without them."""
    generator = torch.Generator(like.device).manual_seed((torch.initial_seed() + 1) % (1 << 63))
    return draw(shape, generator=generator, dtype=like.dtype, device=like.device)
