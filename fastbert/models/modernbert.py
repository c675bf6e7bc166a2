"""ModernBERT's encoder and heads: BERT's under the family's names, with layers of another form.

What differs from BERT is data in `families/`, and the mathematics of `layers/pre_norm.py`.
"""

from __future__ import annotations

from fastbert.layers.embeddings import TokenEmbeddings
from fastbert.layers.pre_norm_layer import PreNormLayer
from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class ModernBertModel(BertModel):
    """ModernBERT's encoder; see `BertModel`.

    Source: Warner et al. 2024, "Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder".
    """

    model_type = "modernbert"
    embeddings_class = TokenEmbeddings
    layer_class = PreNormLayer


class ModernBertForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "modernbert"


class ModernBertForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "modernbert"


class ModernBertForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "modernbert"


class ModernBertForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "modernbert"


class ModernBertForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "modernbert"
