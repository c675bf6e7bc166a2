"""LengthDrop: one fine-tuning, after which a model serves with any schedule of tokens.

    full model      the task's loss, with all tokens and all layers
    smallest        share (1 - p)^l of the tokens after layer l
    sampled, N      share s_l = s_(l-1) (1 - u p), u uniform in [0, 1)

A sub-model's loss is the soft cross-entropy of its answers with those of the full model in the same step,
which have no gradient; for numbers it is the squared difference. The step's loss is the mean of the N + 2.
With LayerDrop the sub-models also skip layers; the full model skips none.

Afterwards `fastbert.compression.schedule_search` finds the schedules that are worth their cost.

Source: Kim and Cho 2021, "Length-Adaptive Transformer: Train Once with Length Drop, Use Anytime with Search".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastbert.compression.distillation.losses import mean_squared, soft_cross_entropy
from fastbert.compression.elimination import check_whole, scheduled
from fastbert.finetuning.losses import Method, TaskLosses, answers
from fastbert.finetuning.settings import Settings
from fastbert.models.base import PreTrainedModel
from fastbert.runtime import expected
from fastbert.training.module import Results


@dataclass(frozen=True)
class LengthDrop(Method):
    """How sub-models are drawn; `fastbert.finetuning.run.finetune` takes it as `method`.

    Attributes:
        drop: p, the largest share of the tokens that reach a layer which the layer drops, in (0, 1).
        models: N, the number of sampled sub-models per step, beside the smallest.

    Raises:
        ValueError: naming the attribute.

    Source: Kim and Cho 2021, and its code: p 0.2, N 2, 5 epochs from a fine-tuned model.
    """

    drop: float = 0.2
    models: int = 2

    name: ClassVar[str] = "length-drop"
    defaults: ClassVar[Mapping[str, float]] = {"epochs": 5}
    excludes: ClassVar[tuple[str, ...]] = ("freeze", "freelb", "smart")

    def __post_init__(self) -> None:
        expected.numbers("in (0, 1)", drop=self.drop)
        expected.integers(0, models=self.models)

    def schedule(self, layers: int, draw: Callable[[], float] = lambda: 1.0) -> list[float]:
        """A sub-model's schedule, as `fastbert.eliminate` takes it: by default the smallest.

        Args:
            layers: number of layers.
            draw: u of each layer.
        """
        shares = [1.0]
        for _ in range(layers):
            shares.append(shares[-1] * (1 - draw() * self.drop))
        return shares[1:]

    def losses(
        self, model: PreTrainedModel, settings: Settings, fields: Sequence[str], steps: int
    ) -> TaskLosses:
        """See `Method`."""
        return LengthDropLosses(model, fields, self, settings)


class LengthDropLosses(TaskLosses):
    """See the module.

    Args:
        model: with the head of the task; a model that `fastbert.eliminate` takes, without a schedule.
        fields: fields of the model's output that answers are made of.
        options: see `LengthDrop`.
        settings: see `TaskLosses`.

    Raises:
        ValueError: the model has a schedule, or cannot have one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        fields: Sequence[str] = ("logits",),
        options: LengthDrop | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(model, settings)
        self.fields, self.options, self._layers = fields, options or LengthDrop(), check_whole(model)
        self.passes, self._full = self.options.models + 2, list[Tensor]()

    def rounds(
        self, call: Callable[..., Results], inputs: dict[str, Any], measure: bool
    ) -> Iterator[Results]:
        """The full model, the smallest, then the sampled ones."""
        for number in range(self.passes):
            losses, right = call({**inputs, "sub_model": number}, measure)
            yield {name: loss / self.passes for name, loss in losses.items()}, right

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """({"task": the mean loss of the full model, or of the sub-model of this number}, {})."""
        inputs = dict(inputs)
        number = inputs.pop("sub_model", 0)
        if number == 0:
            skips, self.model.layerdrop = self.model.layerdrop, 0.0
            try:
                output = self.output(inputs)
            finally:
                self.model.layerdrop = skips
            self._full = [each.detach() for each in answers(output, self.fields, inputs)]
            return {"task": output.loss}, {}
        # Each sub-model drops and skips by its own draws
        torch.manual_seed((torch.initial_seed() + number) % (1 << 63))
        draw = (lambda: 1.0) if number == 1 else random.Random(torch.initial_seed()).random
        with scheduled(self.model, self.options.schedule(self._layers, draw)):
            found = answers(self.output(inputs), self.fields, inputs)
        apart = mean_squared if self.model.config.problem_type == "regression" else soft_cross_entropy
        pairs = zip(found, self._full, strict=True)
        return {"task": torch.stack([apart(*pair) for pair in pairs]).mean()}, {}
