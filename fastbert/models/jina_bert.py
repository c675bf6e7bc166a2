"""jina-embeddings-v2's encoder and heads: BERT's under the family's names, with ALiBi (`layers/alibi.py`)."""

from __future__ import annotations

from fastbert.layers.alibi import AlibiLayer
from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class JinaBertModel(BertModel):
    """jina-embeddings-v2's encoder; see `BertModel`.

    Source: Günther et al. 2023, "Jina Embeddings 2: 8192-Token General-Purpose Text Embeddings for Long
    Documents".
    """

    model_type = "jina_bert"
    layer_class = AlibiLayer


class JinaBertForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "jina_bert"


class JinaBertForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "jina_bert"


class JinaBertForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "jina_bert"


class JinaBertForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "jina_bert"


class JinaBertForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "jina_bert"
