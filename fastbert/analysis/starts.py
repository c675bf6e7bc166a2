"""What pre-training is worth for a task: the same training from three starts.

    frozen          the model's weights; only the head learns, its pooler included
    random weights  a new model of the same config; all weights learn
    pre-trained     the model's weights; all of them learn

Each start learns from the same examples in the same order, and is scored on the same held-out examples. The
head's last layer is drawn anew, with the same values for all starts. The training is that of
`fastbert.finetuning`.

Source: Kovaleva et al. 2019, "Revealing the Dark Secrets of BERT", sec. 4.3 and table 1, also for the epochs
and the batch; the learning rate is one of Devlin et al. 2018, "BERT", sec. 4.1, and the schedule that of
google-research/bert's run_classifier.py.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fastbert.analysis.intervals import Interval, estimate, finite
from fastbert.analysis.measures import Measure
from fastbert.analysis.walk import BATCH_TOKENS, encode
from fastbert.finetuning.encoded import Encoded, has_segments
from fastbert.finetuning.fit import fit
from fastbert.finetuning.sequences import Table
from fastbert.finetuning.settings import Settings
from fastbert.finetuning.start import first_model
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.models.base import PreTrainedModel
from fastbert.models.config import EncoderConfig
from fastbert.tasks.examples import Examples
from fastbert.tasks.published import STARTS
from fastbert.training.parallel import Parallel

# The examples are tokenized already, so nothing reads `max_length`
DEFAULT = Settings(lr=2e-5, epochs=3, batch_size=32, max_length=512)


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


def starts(
    model: str | Path,
    examples: Examples,
    *,
    settings: Settings = DEFAULT,
    device: torch.device | str = "cpu",
    batch_tokens: int = BATCH_TOKENS,
) -> Starts:
    """Train from the three starts on four fifths of the examples, and score on the rest.

    Args:
        model: a HuggingFace directory or a name on the hub, with any head or none.
        examples: examples with a label each, a class from 0 on or a float.
        settings: how each start learns; its seed is also that of the split.
        device: where the models learn.
        batch_tokens: most tokens that run at a time. A larger step is cut into micro-batches, which changes
            the result by rounding and by dropout's draws.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    config, labels = EncoderConfig.from_pretrained(model), examples.needed_labels
    if examples.labels_tokens or labels.ndim != 1 or labels.dtype.kind not in "iuf":
        raise ValueError(
            f"labels: expected an integer or a float per example, got {labels.dtype} of shape {labels.shape}"
        )
    regression = labels.dtype.kind == "f"
    if regression:
        finite("labels", labels)
    elif (bad := np.flatnonzero(labels < 0)).size:
        raise ValueError(f"labels[{bad[0]}]: expected a class from 0 on, got {labels[bad[0]]}")
    if len(examples) < 10:
        raise ValueError(
            f"examples: expected 10 at least, to learn from and to score on, got {len(examples)}"
        )
    examples.check(config)
    drawn = np.random.default_rng(settings.seed).permutation(len(examples))
    fifth = len(examples) // 5
    held_out, known = (examples.chosen(np.sort(part)) for part in (drawn[:fifth], drawn[fifth:]))
    outputs = 1 if regression else max(2, int(labels.max()) + 1)
    loss, score = np.zeros((2, len(STARTS), fifth))
    name, steps = "", 0
    for number, changes in enumerate(({"freeze": True}, {"random_init": True}, {})):
        one, steps = trained(model, known, outputs, replace(settings, **changes), device, batch_tokens)
        measure = Measure.of(one, held_out)
        name = measure.score_name
        with torch.inference_mode():
            for batch, cases, given in measure.batches(batch_tokens):
                found = measure.arrays(encode(one, batch), batch.inputs, given)
                loss[number, cases], score[number, cases] = found
    known, held_out = known.needed_labels, held_out.needed_labels
    if regression:
        baseline = -np.square(held_out - known.mean())
    else:
        baseline = (held_out == np.bincount(known).argmax()).astype(np.float64)
    return Starts(name, loss, score, baseline, len(drawn) - fifth, steps)


def trained(
    model: str | Path,
    examples: Examples,
    outputs: int,
    settings: Settings,
    device: torch.device | str = "cpu",
    batch_tokens: int = BATCH_TOKENS,
) -> tuple[PreTrainedModel, int]:
    """(A model fine-tuned on all examples, in eval mode; the number of steps).

    Args:
        model, examples, settings, device, batch_tokens: see `starts`.
        outputs: of the head, which is drawn anew.
    """
    built: list[PreTrainedModel] = []

    def build() -> PreTrainedModel:
        built[:] = [first_model(AutoModelForSequenceClassification, model, settings, (), outputs)]
        return built[0]

    encoded = Encoded(examples.ids, examples.types, examples.starts, {"labels": examples.needed_labels})
    parallel = Parallel("none", device)
    devices = [parallel.device] if parallel.device.type == "cuda" else []
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=devices):
        history = fit(
            Table(),
            build,
            encoded,
            dev={},
            folder=Path(folder, "run"),
            settings=settings,
            segments=has_segments(EncoderConfig.from_pretrained(model)),
            config={},
            finish=lambda folder: None,
            parallel=parallel,
            batch_tokens=batch_tokens,
            tensorboard=False,
            progress=False,
        )
    return built[0].eval(), history[-1]["step"]
