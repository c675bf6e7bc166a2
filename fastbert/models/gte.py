"""gte's encoder and heads: BERT's under the family's names, with layers that rotate and are gated.

What differs from BERT is data in `families/`, and rotary positions (`layers/positions.py`).
"""

from __future__ import annotations

from fastbert.layers.rotary_layer import RotaryLayer
from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class GteModel(BertModel):
    """gte's encoder; see `BertModel`.

    Source: Zhang et al. 2024, "mGTE: Generalized Long-Context Text Representation and Reranking Models for
    Multilingual Text Retrieval".
    """

    model_type = "gte"
    layer_class = RotaryLayer


class GteForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "gte"


class GteForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "gte"


class GteForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "gte"
