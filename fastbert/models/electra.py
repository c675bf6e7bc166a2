"""ELECTRA's encoder and heads: BERT's under the family's names, and its own head for pre-training.

What else differs from BERT is data in `families/`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.layers.linear import apply_activated, apply_linear
from fastbert.layers.modules import attach
from fastbert.layers.parts import Activation
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.models.heads.token_classification import BertForTokenClassification
from fastbert.models.labels import check_probabilities
from fastbert.ops import checks


class ElectraModel(BertModel):
    """ELECTRA's encoder; see `BertModel`."""

    model_type = "electra"


class ElectraForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "electra"


class ElectraForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "electra"


class ElectraForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "electra"


class ElectraForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "electra"


class ElectraForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "electra"


class ElectraForPreTraining(TaskModel):
    """The discriminator: finds the tokens that were replaced.

    Labels: (batch, seqlen), 0 original, 1 replaced; labels of masked tokens do not count. Loss: mean binary
    cross-entropy of the kept tokens. Logits: (batch, seqlen), zeros at masked tokens.

    Source: Clark et al. 2020, "ELECTRA", sec. 2.
    """

    task = "ForPreTraining"
    model_type = "electra"
    model_types = ("electra",)

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        hidden = self.config.hidden_size
        attach(self, "discriminator_predictions.dense", nn.Linear(hidden, hidden))
        attach(self, "discriminator_predictions.activation", Activation(self.config.activation_name))
        attach(self, "discriminator_predictions.dense_prediction", nn.Linear(hidden, 1))
        self.post_init()

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """Numbers from 0 to 1 wherever a token is kept."""
        check_probabilities("labels", labels, attention_mask)

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Packed, and padded."""
        head = self._modules["discriminator_predictions"]
        logits = encoded.by_token(
            lambda x: apply_linear(head.dense_prediction, apply_activated(head.dense, head.activation, x))
        ).squeeze(1)
        return logits, encoded.unpack(logits)

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """Binary cross-entropy of the kept tokens; 0 if no token is kept."""
        checks.same_device("labels", labels, logits)
        checks.shape("labels", labels, encoded.shape)
        compute = checks.compute_dtype(logits)
        packing = encoded.inputs.packing
        losses = F.binary_cross_entropy_with_logits(
            logits.to(compute), packing.pack(labels).to(compute), reduction="none"
        )
        if packing.capacity and packing.mask is not None:  # there are rows after the kept tokens
            keep = packing.pack(packing.mask)
            return torch.where(keep, losses, 0.0).sum() / keep.sum().clamp_min(1)
        return losses.sum() / max(losses.shape[0], 1)
