"""NeoBERT's encoder and heads: BERT's under the family's names, with layers of another form.

What differs from BERT is data in `families/`, and the mathematics of `layers/pre_norm.py`.
"""

from __future__ import annotations

from fastbert.layers.embeddings import WordEmbeddings
from fastbert.layers.head_major_layer import HeadMajorLayer
from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.sequence_classification import BertForSequenceClassification


class NeoBertModel(BertModel):
    """NeoBERT's encoder; see `BertModel`.

    Source: Le Breton et al. 2025, "NeoBERT: A Next-Generation BERT".
    """

    model_type = "neobert"
    embeddings_class = WordEmbeddings
    layer_class = HeadMajorLayer


class NeoBertForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "neobert"


class NeoBertForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "neobert"
