"""RoBERTa's encoder and heads: BERT's under the family's names.

What differs from BERT is data in `families/`.
"""

from __future__ import annotations

from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class RobertaModel(BertModel):
    """RoBERTa's encoder; see `BertModel`."""

    model_type = "roberta"


class RobertaForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "roberta"


class RobertaForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "roberta"


class RobertaForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "roberta"


class RobertaForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "roberta"


class RobertaForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "roberta"
