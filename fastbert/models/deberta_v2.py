"""DeBERTa-v2's and v3's encoder and heads: BERT's under the family's names, with scores of distances.

What differs from BERT is data in `families/`, and the mathematics of `layers/disentangled.py`.
"""

from __future__ import annotations

from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class DebertaV2Model(BertModel):
    """DeBERTa's encoder of the second version, which the third has too; see `BertModel`.

    Source: He et al. 2021, "DeBERTaV3: Improving DeBERTa using ELECTRA-Style Pre-Training with
    Gradient-Disentangled Embedding Sharing".
    """

    model_type = "deberta-v2"


class DebertaV2ForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "deberta-v2"


class DebertaV2ForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "deberta-v2"


class DebertaV2ForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "deberta-v2"


class DebertaV2ForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "deberta-v2"


class DebertaV2ForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "deberta-v2"
