"""Token classification: one label per token."""

from __future__ import annotations

from torch import Tensor

from fastbert.models.config import EncoderConfig
from fastbert.models.families import families_with
from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.models.labels import check_classes


class BertForTokenClassification(TaskModel):
    """Classifies every token.

    Labels: (batch, seqlen), -100 where a token does not count; loss: mean cross-entropy of the labelled
    tokens. Logits: (batch, seqlen, num_labels), zeros at masked tokens.

    Source: Devlin et al. 2018, "BERT", sec. 5.3.
    """

    task = "ForTokenClassification"
    model_types = families_with(task)

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.attach_classifier(self.family.tokens, self.num_labels)
        self.post_init()

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """Classes, none of them on a masked token."""
        check_classes("labels", labels, self.num_labels, attention_mask)

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Packed, and padded."""
        logits = encoded.by_token(lambda x: self.classes_of(self.family.tokens, x))
        return logits, encoded.unpack(logits)

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """Cross-entropy of the labelled tokens."""
        return encoded.token_loss(logits, labels)
