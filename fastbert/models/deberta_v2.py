"""DeBERTa-v2's and v3's encoder and heads: BERT's under the family's names, with scores of distances.

The head of v3's pre-training is here too. What else differs from BERT is data in `families/`, and the
mathematics of `layers/disentangled.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbert.layers.linear import apply_linear, apply_norm
from fastbert.layers.modules import attach
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.replaced_tokens import ReplacedTokensModel
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.task_model import Encoded
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


class DebertaV2ForReplacedTokens(ReplacedTokensModel):
    """v3's discriminator, which transformers has no class for; see `ReplacedTokensModel`.

    Each token's state is first added to that of the sequence's first token. Position 0 must not be masked.

    Source: microsoft/DeBERTa's replaced_token_detection_model.py.
    """

    task = "ForReplacedTokens"
    model_type = "deberta-v2"

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        hidden = self.config.hidden_size
        attach(self, "mask_predictions.dense", nn.Linear(hidden, hidden))
        attach(self, "mask_predictions.LayerNorm", self.config.norm(hidden))
        attach(self, "mask_predictions.classifier", nn.Linear(hidden, 1))
        self.post_init()

    def head_input(self, encoded: Encoded) -> Tensor:
        """(rows, hidden): what the head's first layer reads."""
        hidden, ends = encoded.hidden, encoded.inputs.packing.cu_seqlens[1:]
        rows = torch.arange(hidden.shape[0], dtype=ends.dtype, device=ends.device)
        # Under torch.compile there may be rows after the kept tokens
        sequence = torch.bucketize(rows, ends, right=True).clamp_max(ends.shape[0] - 1)
        return hidden + encoded.first()[sequence]

    def scores(self, x: Tensor) -> Tensor:
        """(…, hidden) -> (…, 1), by the head's own layers."""
        head = self._modules["mask_predictions"]
        x = apply_linear(head.dense, apply_norm(head.LayerNorm, x), self.config.activation_name)
        return apply_linear(head.classifier, x)
