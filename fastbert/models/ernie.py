"""ERNIE's encoder and heads: BERT's under the family's names.

What differs from BERT is data in `families/`.
"""

from __future__ import annotations

from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.next_sentence import BertForNextSentencePrediction
from fastbert.models.heads.pretraining import BertForPreTraining
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class ErnieModel(BertModel):
    """ERNIE's encoder; see `BertModel`."""

    model_type = "ernie"


class ErnieForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "ernie"


class ErnieForPreTraining(BertForPreTraining):
    """See `BertForPreTraining`."""

    model_type = "ernie"


class ErnieForNextSentencePrediction(BertForNextSentencePrediction):
    """See `BertForNextSentencePrediction`."""

    model_type = "ernie"


class ErnieForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "ernie"


class ErnieForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "ernie"


class ErnieForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "ernie"


class ErnieForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "ernie"
