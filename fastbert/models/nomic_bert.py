"""nomic-embed's encoder and heads: BERT's under the family's names, with layers that rotate and are gated.

What differs from BERT is data in `families/`, and rotary positions (`layers/positions.py`).
"""

from __future__ import annotations

from fastbert.layers.rotary_layer import RotaryLayer
from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class NomicBertModel(BertModel):
    """nomic-embed's encoder; see `BertModel`.

    Source: Nussbaum et al. 2024, "Nomic Embed: Training a Reproducible Long Context Text Embedder".
    """

    model_type = "nomic_bert"
    layer_class = RotaryLayer


class NomicBertForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "nomic_bert"


class NomicBertForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "nomic_bert"


class NomicBertForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "nomic_bert"
