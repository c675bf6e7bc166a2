"""What an example's result is worth: its loss and its score, by the kind of the model's head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.analysis.examples import Examples
from fastbert.analysis.walk import Batch, encoded
from fastbert.models.base import PreTrainedModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.next_sentence import BertForNextSentencePrediction
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification
from fastbert.models.inputs import Inputs
from fastbert.models.labels import IGNORED


def _numbered(labels: np.ndarray, label2id: dict[str, int]) -> np.ndarray:
    """The numbers of labels that are names of the config."""
    unknown = next((i for i, label in enumerate(labels.tolist()) if label not in label2id), None)
    if unknown is not None:
        raise ValueError(
            f"labels[{unknown}]: {labels.tolist()[unknown]!r} is none of the config's, {', '.join(label2id)}"
        )
    return np.array([label2id[label] for label in labels.tolist()])


@dataclass(frozen=True)
class Measure:
    """Loss and score of examples by a model's head.

    The loss of an example is the head's; of several labels the mean. The score is the share of its labels
    that are right (accuracy); in a regression it is the negative squared error.

    Attributes:
        model: with a head.
        examples: with the labels that the head needs.
        score_name: "accuracy" or "negative squared error".
    """

    model: PreTrainedModel
    examples: Examples
    score_name: str

    @classmethod
    def of(cls, model: PreTrainedModel, examples: Examples) -> Measure:
        """The measure for a model and labelled examples.

        Raises:
            TypeError: the model has no head with labels per example or token.
            ValueError: labels are missing or do not fit the head; the message names the first.
        """
        of_tokens = isinstance(model, (BertForMaskedLM, BertForTokenClassification))
        of_examples = isinstance(model, (BertForSequenceClassification, BertForNextSentencePrediction))
        if not (of_tokens or of_examples):
            raise TypeError(
                "model: expected one with a head for masked words, tokens, sequences or next sentences, "
                f"got {type(model).__name__}"
            )
        labels = examples.labels
        if labels is None:
            raise ValueError(f"labels: {type(model).__name__} needs them, the examples have none")
        if not np.issubdtype(labels.dtype, np.number):
            labels = _numbered(labels, model.config.label2id)
            examples = replace(examples, labels=labels)
        if of_tokens != examples.labels_tokens:
            what = ("one per token", "one per example")
            raise ValueError(f"labels: expected {what[not of_tokens]}, got {what[of_tokens]}")
        score = "accuracy"
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

    def labels_of(self, batch: Batch) -> Tensor:
        """The labels of a batch, on its device."""
        if self.examples.labels_tokens:
            return batch.on_device(self.examples.labels)
        labels = torch.from_numpy(np.ascontiguousarray(self.examples.labels[batch.numbers]))
        return labels.to(batch.sequence.device)

    def __call__(self, hidden: Tensor, inputs: Inputs, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, score) of each sequence, both (batch,) in float32, or float64 for float64.

        Args:
            hidden: (total, hidden), the last hidden states.
            inputs: the batch, which may repeat that of `labels_of`.
            labels: as `labels_of` returns them, repeated as often.
        """
        model = self.model
        if isinstance(model, (BertForMaskedLM, BertForTokenClassification)):
            return self._of_tokens(hidden, inputs, labels)
        logits = model.logits(encoded(model, hidden, inputs))[0]
        logits = logits if logits.dtype == torch.float64 else logits.float()
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
        """What a call returns, as float64 on the host."""
        loss, score = self(hidden, inputs, labels)
        return loss.double().cpu().numpy(), score.double().cpu().numpy()

    def _of_tokens(self, hidden: Tensor, inputs: Inputs, labels: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model
        at = (labels != IGNORED).nonzero().squeeze(1)
        some, labels = hidden.index_select(0, at), labels.index_select(0, at).long()
        if isinstance(model, BertForMaskedLM):
            logits = model.lm_logits(some)
        else:
            logits = model.logits(encoded(model, some, inputs))[0]
        logits = logits if logits.dtype == torch.float64 else logits.float()
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
