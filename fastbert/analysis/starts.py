"""What pre-training is worth for a task: the same training from three starts.

    frozen          the model's weights; only the head learns, its pooler included
    random weights  a new model of the same config; all weights learn
    pre-trained     the model's weights; all of them learn

Each start learns from the same examples in the same order, and is scored on the same held-out examples. The
head's last layer is drawn anew, with the same values for all starts. The loop, its optimizer and its order
are those of `fastbert.training`: AdamW, weight decay 0.01, a learning rate that rises over a tenth of the
steps and falls linearly to 0, gradients clipped at 1.

Source: Kovaleva et al. 2019, "Revealing the Dark Secrets of BERT", sec. 4.3 and table 1, also for the epochs
and the batch; the learning rate is one of Devlin et al. 2018, "BERT", sec. 4.1, and the schedule that of
google-research/bert's run_classifier.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastbert.analysis.intervals import Interval, estimate
from fastbert.analysis.measures import Measure
from fastbert.analysis.walk import BATCH_TOKENS, at_rest, encode
from fastbert.layers.quantized import is_quantized
from fastbert.models.base import PreTrainedModel
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.tasks.examples import Examples
from fastbert.training.draws import key_of
from fastbert.training.loop import Trainer
from fastbert.training.module import Losses, Results
from fastbert.training.parallel import Parallel
from fastbert.training.schedules import Schedule
from fastbert.training.stages import Stage
from fastbert.training.stream import Batch

STARTS = ("frozen", "random weights", "pre-trained")
FROZEN, RANDOM, PRETRAINED = range(len(STARTS))


class Published(NamedTuple):
    """Scores of bert-base-uncased in percent, in the order of `STARTS`; Kovaleva et al. 2019, table 1.

    Their frozen models score as low as chance, so their heads may not have learned either.
    """

    task: str
    examples: str
    scores: tuple[float, float, float]


PUBLISHED = (
    Published("MRPC", "5.8K", (31.6, 68.3, 82.3)),
    Published("STS-B", "8.6K", (33.1, 2.9, 82.7)),
    Published("SST-2", "70K", (49.1, 80.5, 92.0)),
    Published("QQP", "400K", (60.9, 63.2, 78.6)),
    Published("RTE", "2.7K", (52.7, 52.7, 64.6)),
    Published("QNLI", "130K", (52.8, 49.5, 84.4)),
    Published("MNLI-m", "440K", (31.7, 61.0, 78.6)),
)


@dataclass(frozen=True)
class Recipe:
    """How each start learns.

    Attributes:
        epochs: number of times that each example is seen.
        batch_size: examples per step.
        lr: the largest learning rate.
    """

    epochs: int = 3
    batch_size: int = 32
    lr: float = 2e-5

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr: expected a finite number > 0, got {self.lr!r}")


DEFAULT = Recipe()


@dataclass(frozen=True)
class Starts:
    """Loss and score of each start on the held-out examples.

    Attributes:
        score_name: see `Measure`.
        loss, score: (starts, n), in the order of `STARTS`.
        baseline: (n,), the score of always predicting the most frequent training label, or the mean label.
        learned_from: number of examples that the starts have learned from.
        steps: number of training steps.
    """

    score_name: str
    loss: np.ndarray
    score: np.ndarray
    baseline: np.ndarray
    learned_from: int
    steps: int

    def intervals(self, *, seed: int = 0) -> dict[str, Interval]:
        """Start, or "baseline" -> its mean score with its 95% interval over the held-out examples."""
        rows = dict(zip(STARTS, self.score, strict=True)) | {"baseline": self.baseline}
        return {name: estimate(row, seed=seed) for name, row in rows.items()}


@dataclass(frozen=True)
class _Plan:
    """See `training.stream.Plan`."""

    lengths: np.ndarray


@dataclass(frozen=True)
class _Source:
    """Examples for the loop; see `training.stream.Source`."""

    examples: Examples
    with_types: bool

    @property
    def hash(self) -> str:
        """Hash of the examples."""
        arrays = self.examples.ids, self.examples.starts, self.examples.types, self.examples.needed_labels
        return f"{key_of(*(np.ascontiguousarray(array).tobytes().hex() for array in arrays)):032x}"

    def plan(self, epoch: int) -> _Plan:
        return _Plan(self.examples.lengths)

    def example(self, plan: _Plan, epoch: int, index: int) -> int:
        return index

    def collate(self, examples: Sequence[int]) -> Batch:
        numbers = np.asarray(examples)
        rows, lengths = self.examples.rows(numbers), self.examples.lengths[numbers]
        inputs = {
            "input_ids": self.examples.ids[rows],
            "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            "max_seqlen": int(lengths.max()),
            "labels": self.examples.needed_labels[numbers],
        }
        if self.with_types:
            inputs["token_type_ids"] = self.examples.types[rows]
        return Batch(inputs, {"task": len(numbers)}, lengths)


class _Task(Losses):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.exports, self.weights = {"model": model}, {}

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        return {"task": self.model(**inputs).loss}, {}


def trained(
    model: BertForSequenceClassification,
    examples: Examples,
    *,
    recipe: Recipe = DEFAULT,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> int:
    """Fine-tune a model on examples, in place, and leave it in eval mode; returns the number of steps.

    Args:
        model: the model; its parameters that require gradients learn.
        examples: examples with labels as the model takes them.
        recipe: how the model learns.
        seed: seed of the order and of dropout.
        batch_tokens: most tokens that run at a time. A larger step is cut into micro-batches, which changes
            the result by rounding and by dropout's draws.
    """
    count, size = len(examples), recipe.batch_size
    longest = int(examples.lengths.max())
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    parts = next((n for n in divisors if size // n * longest <= batch_tokens), size)
    steps = -(-recipe.epochs * count // size)
    segments = model.config.family.segments and model.config.type_vocab_size > 1
    stage = Stage(
        steps,
        _Source(examples, segments),
        lambda: _Task(model),
        Schedule("linear", recipe.lr, steps, warmup=0.1 if steps > 1 else 0),
        micro_batches=parts,
        sequences=size // parts,
        options={"kind": "adamw", "weight_decay": 0.01, "eps": 1e-8},
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=devices):
        run = Trainer(
            [stage],
            Path(folder, "run"),
            seed=seed,
            parallel=Parallel("none", model.device),
            save_every=steps,
            log_every=steps,
            tensorboard=False,
            progress=False,
        )
        run.run()
    model.eval()
    return steps


def starts(
    model: BertForSequenceClassification,
    examples: Examples,
    *,
    recipe: Recipe = DEFAULT,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Starts:
    """Train from the three starts on four fifths of the examples, and score on the rest.

    Args:
        model: a model with a head for the labels; it is not changed.
        examples: examples with labels, as `Measure.of` takes them.
        recipe: how each start learns.
        seed: seed of the split, the head, the random weights, the order and dropout.
        batch_tokens: most tokens that run at a time.

    Raises:
        TypeError: `model` has no head for a class or a number per sequence.
        ValueError: naming the argument, what came and what was expected.
    """
    if not isinstance(model, BertForSequenceClassification):
        raise TypeError(
            f"model: expected one with a head for sequence classification, got {type(model).__name__}"
        )
    if is_quantized(model):
        raise ValueError("model: is quantised, and cannot learn; expected floating-point weights")
    examples.check(model.config)
    measure = Measure.of(model, examples)
    examples = measure.examples
    if len(examples) < 10:
        raise ValueError(
            f"examples: expected 10 at least, to learn from and to score on, got {len(examples)}"
        )
    drawn = np.random.default_rng(seed).permutation(len(examples))
    fifth = len(examples) // 5
    held_out, known = (examples.chosen(np.sort(part)) for part in (drawn[:fifth], drawn[fifth:]))
    loss, score = np.zeros((2, len(STARTS), fifth))
    for number in range(len(STARTS)):
        one = _start(model, number, seed)
        steps = trained(one, known, recipe=recipe, seed=seed, batch_tokens=batch_tokens)
        of_one = Measure.of(one, held_out)
        with at_rest(one), torch.inference_mode():
            for batch, cases, labels in of_one.batches(batch_tokens):
                found = of_one.arrays(encode(one, batch), batch.inputs, labels)
                loss[number, cases], score[number, cases] = found
    return Starts(
        measure.score_name,
        loss,
        score,
        _baseline(known.needed_labels, held_out.needed_labels, measure.score_name),
        len(known),
        steps,
    )


def _start(model: BertForSequenceClassification, number: int, seed: int) -> BertForSequenceClassification:
    """A model to train, for the start with this number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(model)(model.config)
    if number != RANDOM:
        head = {name: value for name, value in fresh.state_dict().items() if _is_head(fresh, name)}
        fresh.load_state_dict(model.state_dict() | head)
    fresh = fresh.to(device=model.device, dtype=torch.float32)
    if number == FROZEN:
        pooler = f"{fresh.config.family.pooler}." if fresh.config.family.pooler else None
        for name, parameter in fresh.base_model.named_parameters():
            parameter.requires_grad_(pooler is not None and name.startswith(pooler))
    return fresh


def _is_head(model: PreTrainedModel, name: str) -> bool:
    """Whether a parameter is outside the encoder, which includes the pooler."""
    return not name.startswith(f"{model.base_model_prefix}.")


def _baseline(known: np.ndarray, held_out: np.ndarray, score_name: str) -> np.ndarray:
    """(n,): the score of always giving one answer."""
    if score_name == "accuracy" and known.ndim == 1:
        values, counts = np.unique(known, return_counts=True)
        return (held_out == values[counts.argmax()]).astype(np.float64)
    if score_name == "accuracy":
        return (held_out == np.round(known.mean(0))).mean(1)
    apart = (held_out - known.mean(0)).reshape(len(held_out), -1)
    return -np.square(apart).mean(1)
