"""EuroBERT's encoder and heads: BERT's under the family's names, with layers that norm first and share keys.

What differs from BERT is data in `families/`, and rotary positions (`layers/positions.py`).
"""

from __future__ import annotations

from fastbert.layers.embeddings import WordEmbeddings
from fastbert.layers.rotary_layer import RotaryLayer
from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class EuroBertModel(BertModel):
    """EuroBERT's encoder; see `BertModel`.

    Source: Boizard et al. 2025, "EuroBERT: Scaling Multilingual Encoders for European Languages".
    """

    model_type = "eurobert"
    embeddings_class = WordEmbeddings
    layer_class = RotaryLayer


class EuroBertForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "eurobert"


class EuroBertForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "eurobert"


class EuroBertForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "eurobert"
