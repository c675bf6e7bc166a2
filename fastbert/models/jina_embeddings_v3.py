"""jina-embeddings-v3's encoder and heads: BERT's under the family's names, with layers that rotate.

What differs from BERT is data in `families/`, and rotary positions (`layers/positions.py`).
"""

from __future__ import annotations

from fastbert.layers.rotary_layer import RotaryLayer
from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class JinaEmbeddingsV3Model(BertModel):
    """jina-embeddings-v3's encoder; see `BertModel`.

    Source: Sturua et al. 2024, "jina-embeddings-v3: Multilingual Embeddings With Task LoRA".
    """

    model_type = "jina_embeddings_v3"
    layer_class = RotaryLayer


class JinaEmbeddingsV3ForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "jina_embeddings_v3"


class JinaEmbeddingsV3ForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "jina_embeddings_v3"


class JinaEmbeddingsV3ForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "jina_embeddings_v3"


class JinaEmbeddingsV3ForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "jina_embeddings_v3"
