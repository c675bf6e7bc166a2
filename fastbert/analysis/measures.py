"""Loss and score of each example, by the kind of the model's head.

| model | labels | loss | score |
|---|---|---|---|
| masked words, token classes | per token | mean cross-entropy of the example's labels | accuracy |
| sequence classes, next sentence | per example | cross-entropy | accuracy |
| several classes at once | (n, classes) of 0 and 1 | mean binary cross-entropy | accuracy |
| regression | numbers | squared error | negative squared error |
| question answering | (n, 2) tokens: start and end | mean cross-entropy of both | exact match |
| encoder without a head | none | 1 - cosine of a pair's vectors | cosine |
| encoder without a head | the cosine that a pair should have | squared error | negative squared error |

Question answering: tokens are numbered from 0 in their example, special tokens included. Only the example's
own tokens compete. A match is exact if the most likely start and the most likely end are right.

Encoders without a head, such as sentence encoders: examples 2i and 2i + 1 are a pair, and one case. The
vector of a text is pooled from its last hidden states. Both texts run through the changed model, and a pair
is never split between batches. Without labels, a model that makes all texts alike has the least loss. So
only labels show how well a model distinguishes texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.analysis.intervals import finite
from fastbert.analysis.walk import BATCH_TOKENS, Batch, at_rest, batches, encode, encoded
from fastbert.models.base import PreTrainedModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.next_sentence import BertForNextSentencePrediction
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.task_model import TaskModel
from fastbert.models.heads.token_classification import BertForTokenClassification
from fastbert.models.inputs import Inputs
from fastbert.models.labels import IGNORED
from fastbert.ops.pooling import MODES as POOLINGS
from fastbert.ops.pooling import pooling as pool
from fastbert.tasks.examples import Examples

# the score of pairs without labels: largest if all texts are alike, so it does not rate a model
UNRATED = "cosine"


def _numbered(labels: np.ndarray, label2id: dict[str, int]) -> np.ndarray:
    """The class numbers of labels that are the config's names."""
    unknown = next((i for i, label in enumerate(labels.tolist()) if label not in label2id), None)
    if unknown is not None:
        raise ValueError(
            f"labels[{unknown}]: {labels.tolist()[unknown]!r} is none of the config's, {', '.join(label2id)}"
        )
    return np.array([label2id[label] for label in labels.tolist()])


@dataclass(frozen=True)
class Measure:
    """Loss and score of each case: an example, or a pair of them for an encoder without a head.

    Attributes:
        model: see the module.
        examples: examples with the labels that the model needs.
        score_name: see the module.
        pooling: how an encoder without a head makes its vectors, a mode of `fastbert.ops.pooling`; None for
            a model with a head.
    """

    model: PreTrainedModel
    examples: Examples
    score_name: str
    pooling: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, examples: Examples, pooling: str | None = None) -> Measure:
        """The measure for a model and labelled examples.

        Args:
            model: see the module.
            examples: labelled examples, or pairs.
            pooling: a mode of `ops.pooling` for an encoder without a head; None for a model with a head.

        Raises:
            TypeError: the module's table does not have the model.
            ValueError: labels are missing, or one does not fit the model; the message names the first.
        """
        if isinstance(model, PreTrainedModel) and not isinstance(model, TaskModel):
            return cls._of_pairs(model, examples, pooling)
        of_tokens = isinstance(model, (BertForMaskedLM, BertForTokenClassification))
        of_examples = isinstance(
            model, (BertForSequenceClassification, BertForNextSentencePrediction, BertForQuestionAnswering)
        )
        if not (of_tokens or of_examples):
            raise TypeError(
                "model: expected an encoder, or one with a head for masked words, tokens, sequences, next "
                f"sentences or answers, got {type(model).__name__}"
            )
        if pooling is not None:
            raise ValueError(f"pooling: {type(model).__name__} has a head; expected None, got {pooling!r}")
        labels = examples.labels
        if labels is None:
            raise ValueError(f"labels: {type(model).__name__} needs them, the examples have none")
        if isinstance(model, BertForQuestionAnswering):
            _check_spans(labels, examples.lengths)
            return cls(model, examples, "exact match")
        if not np.issubdtype(labels.dtype, np.number):
            labels = _numbered(labels, model.config.label2id)
            examples = replace(examples, labels=labels)
        if of_tokens != examples.labels_tokens:
            what = ("one per token", "one per example")
            raise ValueError(f"labels: expected {what[not of_tokens]}, got {what[of_tokens]}")
        score = "accuracy"
        if np.issubdtype(labels.dtype, np.floating):
            finite("labels", labels)
        if isinstance(model, BertForSequenceClassification):
            problem = model.problem(torch.as_tensor(labels))
            if problem == "regression":
                score = "negative squared error"
            if problem != "single_label_classification":
                if labels.size != len(examples) * model.num_labels:
                    raise ValueError(f"labels: expected {model.num_labels} per example, got {labels.shape}")
                return cls(model, examples, score)
        classes = model.config.vocab_size if isinstance(model, BertForMaskedLM) else model.num_labels
        classes = 2 if isinstance(model, BertForNextSentencePrediction) else classes
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(f"labels: expected integers, got {labels.dtype} of shape {labels.shape}")
        bad = np.flatnonzero((labels != IGNORED) & ((labels < 0) | (labels >= classes)))
        if len(bad):
            raise ValueError(f"labels[{bad[0]}]: {labels[bad[0]]} is no class; expected 0 to {classes - 1}")
        return cls(model, examples, score)

    @classmethod
    def _of_pairs(cls, model: PreTrainedModel, examples: Examples, pooling: str | None) -> Measure:
        if pooling not in POOLINGS:
            raise ValueError(
                f"pooling: {type(model).__name__} has no head, whose loss would be measured; to compare the "
                f"vectors of pairs, expected one of {', '.join(POOLINGS)}, got {pooling!r}"
            )
        joined = np.flatnonzero(examples.segments)
        if len(joined):
            number = int(np.searchsorted(examples.starts, joined[0], side="right")) - 1
            raise ValueError(
                f"examples[{number}]: has two texts; expected an example for each, as "
                "fastbert.tasks.examples.paired makes them"
            )
        n, labels = len(examples), examples.labels
        if n % 2:
            raise ValueError(
                f"examples: {type(model).__name__} has no head, so they are pairs; expected an even number, "
                f"got {n}"
            )
        if labels is None:
            return cls(model, examples, UNRATED, pooling)
        if labels.shape != (n,) or not np.issubdtype(labels.dtype, np.number):
            raise ValueError(
                f"labels: expected cosines, numbers of shape ({n},), got {labels.dtype} of shape "
                f"{labels.shape}"
            )
        bad = np.flatnonzero(~(np.abs(labels) <= 1))
        if len(bad):
            raise ValueError(f"labels[{bad[0]}]: {labels[bad[0]]} is no cosine; expected -1 to 1")
        bad = np.flatnonzero(labels[::2] != labels[1::2])
        if len(bad):
            first, second = labels[2 * bad[0] : 2 * bad[0] + 2]
            raise ValueError(
                f"labels[{2 * bad[0]}]: expected one label for both texts of a pair, got {first} and {second}"
            )
        return cls(model, examples, "negative squared error", pooling)

    @property
    def per_case(self) -> int:
        """Number of examples per case."""
        return 1 if self.pooling is None else 2

    def __len__(self) -> int:
        """Number of cases."""
        return len(self.examples) // self.per_case

    def batches(self, batch_tokens: int = BATCH_TOKENS) -> Iterator[tuple[Batch, np.ndarray, Tensor]]:
        """(batch, the numbers of its cases, their labels) of all examples; see `walk.batches`."""
        for batch in batches(self.model, self.examples, batch_tokens, self.per_case):
            yield batch, batch.numbers[:: self.per_case] // self.per_case, self.labels_of(batch)

    def labels_of(self, batch: Batch) -> Tensor:
        """The labels of a batch's tokens, or of its cases, on its device; zeros if there are none."""
        labels = self.examples.labels
        if labels is not None and self.examples.labels_tokens:
            return batch.on_device(labels)
        firsts = batch.numbers[:: self.per_case]
        of_cases = np.zeros(len(firsts)) if labels is None else labels[firsts]
        return torch.from_numpy(np.ascontiguousarray(of_cases)).to(batch.sequence.device)

    def __call__(self, hidden: Tensor, inputs: Inputs, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, score) of each case, both (cases,) in float32, or float64 for float64.

        Args:
            hidden: (total, hidden), the last hidden states.
            inputs: the batch, or several repetitions of the batch of `labels_of`.
            labels: what `labels_of` returns, repeated as often as the batch.
        """
        model = self.model
        if self.pooling is not None:
            return self._of_vectors(pool(hidden, inputs.packing.cu_seqlens, self.pooling), labels)
        if isinstance(model, (BertForMaskedLM, BertForTokenClassification)):
            return _of_tokens(model, hidden, inputs, labels)
        if isinstance(model, BertForQuestionAnswering):
            return _of_spans(model, hidden, inputs, labels)
        assert isinstance(model, TaskModel)  # `of` refuses all others
        logits = _wide(model.logits(encoded(model, hidden, inputs))[0])
        problem = "single_label_classification"
        if isinstance(model, BertForSequenceClassification):
            problem = model.problem(labels)
        if problem == "single_label_classification":
            counts = (labels != IGNORED).to(logits.dtype)
            loss = F.cross_entropy(logits, labels.long(), ignore_index=IGNORED, reduction="none")
            return loss, (logits.argmax(-1) == labels).to(logits.dtype) * counts
        labels = labels.to(logits.dtype).reshape(logits.shape)
        if problem == "regression":
            loss = (logits - labels).square().mean(-1)
            return loss, -loss.detach()
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1)
        return loss, ((logits > 0) == (labels > 0.5)).to(logits.dtype).mean(-1)

    def arrays(self, hidden: Tensor, inputs: Inputs, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The result of a call as float64 on the host.

        Raises:
            ValueError: a loss is not finite.
        """
        loss, score = (each.double().cpu().numpy() for each in self(hidden, inputs, labels))
        if not np.isfinite(loss).all():
            raise ValueError("model: the loss of its head is not finite: its weights are not, or too large")
        return loss, score

    def scores(self, batch_tokens: int = BATCH_TOKENS) -> np.ndarray:
        """The score of each case, (cases,) float64. The model runs in eval mode.

        Raises:
            ValueError: as `arrays`.
        """
        found = np.zeros(len(self))
        with at_rest(self.model), torch.inference_mode():
            for batch, numbers, labels in self.batches(batch_tokens):
                found[numbers] = self.arrays(encode(self.model, batch), batch.inputs, labels)[1]
        return found

    def _of_vectors(self, vectors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        first, second = vectors.unflatten(0, (-1, 2)).unbind(1)
        cosine = F.cosine_similarity(first, second, dim=-1)
        if self.examples.labels is None:
            return 1 - cosine, cosine.detach()
        loss = (cosine - labels.to(cosine.dtype)).square()
        return loss, -loss.detach()


def _of_tokens(
    model: BertForMaskedLM | BertForTokenClassification, hidden: Tensor, inputs: Inputs, labels: Tensor
) -> tuple[Tensor, Tensor]:
    at = (labels != IGNORED).nonzero().squeeze(1)
    some, labels = hidden.index_select(0, at), labels.index_select(0, at).long()
    if isinstance(model, BertForMaskedLM):
        logits = model.lm_logits(some)
    else:
        logits = model.logits(encoded(model, some, inputs))[0]
    logits = _wide(logits)
    ends = inputs.packing.cu_seqlens.long()
    sequence = torch.searchsorted(ends, at, right=True) - 1
    count = torch.bincount(sequence, minlength=inputs.packing.batch).clamp_min(1).to(logits.dtype)
    losses = F.cross_entropy(logits, labels, reduction="none")
    right = (logits.argmax(-1) == labels).to(logits.dtype)
    loss, score = (
        values.new_zeros(inputs.packing.batch).index_add(0, sequence, values) / count
        for values in (losses, right)
    )
    return loss, score


def _of_spans(
    model: BertForQuestionAnswering, hidden: Tensor, inputs: Inputs, labels: Tensor
) -> tuple[Tensor, Tensor]:
    scores, kept = inputs.packing.grid(_wide(model.classes_of(model.family.spans, hidden)))
    if kept is not None:
        scores = scores.masked_fill(~kept[..., None], -torch.inf)
    scores, labels = scores.transpose(1, 2), labels.long()  # (batch, 2, seqlen) and (batch, 2)
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return loss.mean(1), (scores.argmax(-1) == labels).all(1).to(loss.dtype)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _check_spans(labels: np.ndarray, lengths: np.ndarray) -> None:
    if labels.shape != (len(lengths), 2) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels: expected the tokens of start and end, integers of shape ({len(lengths)}, 2), got "
            f"{labels.dtype} of shape {labels.shape}"
        )
    start, end = labels.T
    bad = np.flatnonzero((start < 0) | (start > end) | (end >= lengths))
    if len(bad):
        raise ValueError(
            f"labels[{bad[0]}]: {start[bad[0]]} to {end[bad[0]]} is no span of the example's "
            f"{lengths[bad[0]]} tokens"
        )
