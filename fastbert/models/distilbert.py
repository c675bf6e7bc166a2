"""DistilBERT's encoder and heads: BERT's under the family's names.

What differs from BERT is data in `families/`.
"""

from __future__ import annotations

from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class DistilBertModel(BertModel):
    """DistilBERT's encoder; see `BertModel`."""

    model_type = "distilbert"


class DistilBertForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "distilbert"


class DistilBertForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "distilbert"


class DistilBertForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "distilbert"


class DistilBertForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "distilbert"


class DistilBertForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "distilbert"
