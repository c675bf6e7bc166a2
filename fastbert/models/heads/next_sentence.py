"""Next-sentence prediction: one label per pair of segments."""

from __future__ import annotations

from torch import Tensor, nn

from fastbert.layers.linear import apply_linear
from fastbert.layers.modules import attach
from fastbert.models.config import EncoderConfig
from fastbert.models.families import Family
from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.models.labels import check_classes, sequence_loss


class BertForNextSentencePrediction(TaskModel):
    """Tells whether the second segment follows the first.

    Labels: (batch,), 0 if it follows, 1 if it is random; loss: mean cross-entropy. Logits: (batch, 2).

    Source: Devlin et al. 2018, "BERT", sec. 3.1, task 2.
    """

    task = "ForNextSentencePrediction"
    model_types = ("bert", "ernie")
    reads_first_only = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        attach(self, self.family.next_sentence, nn.Linear(self.config.hidden_size, 2))
        self.post_init()

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """Always."""
        return True

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """0 or 1."""
        check_classes("labels", labels, 2)

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """(batch, 2), twice."""
        logits = apply_linear(self.head_part(self.family.next_sentence), self.pooled(encoded))
        return logits, logits

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """Cross-entropy."""
        return sequence_loss("labels", logits, labels)
