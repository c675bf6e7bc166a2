"""Sequence classification and regression: one label, or several, per sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.models.config import EncoderConfig
from fastbert.models.families import Family
from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.models.labels import check_classes, check_one_per_sequence, check_tensor, sequence_loss
from fastbert.ops import checks


class BertForSequenceClassification(TaskModel):
    """Classifies a sequence, or predicts numbers for it.

    Config `problem_type` chooses the loss. If it is None, the first labels set it, by `num_labels` and their
    dtype, so that a saved model is served as it was trained:

    - regression (one label): mean squared error; labels (batch,), or (batch, num_labels).
    - single_label_classification (integer labels): mean cross-entropy; labels (batch,), -100 does not count.
    - multi_label_classification (other labels): mean binary cross-entropy; labels (batch, num_labels).

    Logits: (batch, num_labels).

    Source: Devlin et al. 2018, "BERT", sec. 4.1.
    """

    task = "ForSequenceClassification"
    reads_first_only = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.attach_classifier(self.family.classifier, self.num_labels)
        self.post_init()

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """If the head has no dense layer of its own."""
        return family.classifier.dense is None

    def problem(self, labels: Tensor) -> str:
        """The config's problem type, or the type that these labels imply."""
        if self.config.problem_type is not None:
            return self.config.problem_type
        if self.num_labels == 1:
            return "regression"
        return (
            "single_label_classification"
            if labels.dtype in (torch.int64, torch.int32)
            else "multi_label_classification"
        )

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """Classes, or numbers."""
        check_tensor("labels", labels)
        if self.problem(labels) == "single_label_classification":
            check_classes("labels", labels, self.num_labels)
        elif labels.dtype.is_complex:
            raise TypeError(f"labels: expected real numbers, got {labels.dtype}")

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """(batch, num_labels), twice."""
        logits = self.classify(self.family.classifier, encoded)
        return logits, logits

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """The loss of the problem type, which the config keeps; see the class."""
        problem = self.problem(labels)
        loss = self._loss_of(problem, logits, labels)
        if self.config.problem_type is None and not torch.compiler.is_exporting():
            self.config.problem_type = problem
        return loss

    def _loss_of(self, problem: str, logits: Tensor, labels: Tensor) -> Tensor:
        if problem == "single_label_classification":
            return sequence_loss("labels", logits, labels)
        checks.same_device("labels", labels, logits)
        if problem == "regression" and self.num_labels == 1:
            check_one_per_sequence("labels", labels, logits.shape[0], logits)
            labels = labels.reshape(-1, 1)
        elif labels.shape != logits.shape and problem != "regression":
            dtype = str(labels.dtype).removeprefix("torch.")
            raise ValueError(
                f"labels: {dtype} numbers with problem_type {self.config.problem_type!r} mean several labels "
                f"per sequence: expected shape {tuple(logits.shape)}, got {tuple(labels.shape)}; for one "
                "class per sequence pass integers, and problem_type None or 'single_label_classification'"
            )
        else:
            checks.shape("labels", labels, tuple(logits.shape))
        compute = checks.compute_dtype(logits)
        logits, labels = logits.to(compute), labels.to(compute)
        if problem == "regression":
            return F.mse_loss(logits, labels)
        return F.binary_cross_entropy_with_logits(logits, labels)
