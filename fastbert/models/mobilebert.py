"""MobileBERT's encoder and heads: BERT's under the family's names, with narrow layers and its own embeddings.

What differs from BERT is data in `families/`, and the mathematics of `layers/bottleneck.py`.
"""

from __future__ import annotations

from fastbert.layers.bottleneck_layer import BottleneckLayer
from fastbert.layers.embeddings import TrigramEmbeddings
from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.next_sentence import BertForNextSentencePrediction
from fastbert.models.heads.pretraining import BertForPreTraining
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class MobileBertModel(BertModel):
    """MobileBERT's encoder; see `BertModel`. Its hidden states exceed the range of float16, which is refused.

    Source: Sun et al. 2020, "MobileBERT: a Compact Task-Agnostic BERT for Resource-Limited Devices".
    """

    model_type = "mobilebert"
    embeddings_class = TrigramEmbeddings
    layer_class = BottleneckLayer


class MobileBertForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "mobilebert"


class MobileBertForPreTraining(BertForPreTraining):
    """See `BertForPreTraining`."""

    model_type = "mobilebert"


class MobileBertForNextSentencePrediction(BertForNextSentencePrediction):
    """See `BertForNextSentencePrediction`."""

    model_type = "mobilebert"


class MobileBertForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "mobilebert"


class MobileBertForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "mobilebert"


class MobileBertForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "mobilebert"


class MobileBertForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "mobilebert"
