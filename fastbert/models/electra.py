"""ELECTRA's encoder and heads: BERT's under the family's names, and its own head for pre-training.

What else differs from BERT is data in `families/`.
"""

from __future__ import annotations

from torch import Tensor, nn

from fastbert.layers.linear import apply_activated, apply_linear
from fastbert.layers.modules import attach
from fastbert.layers.parts import Activation
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.replaced_tokens import ReplacedTokensModel
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


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


class ElectraForPreTraining(ReplacedTokensModel):
    """The discriminator; see `ReplacedTokensModel`."""

    task = "ForPreTraining"
    model_type = "electra"

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        hidden = self.config.hidden_size
        attach(self, "discriminator_predictions.dense", nn.Linear(hidden, hidden))
        attach(self, "discriminator_predictions.activation", Activation(self.config.activation_name))
        attach(self, "discriminator_predictions.dense_prediction", nn.Linear(hidden, 1))
        self.post_init()

    def scores(self, x: Tensor) -> Tensor:
        """(…, hidden) -> (…, 1), by the head's own layers."""
        head = self._modules["discriminator_predictions"]
        return apply_linear(head.dense_prediction, apply_activated(head.dense, head.activation, x))
