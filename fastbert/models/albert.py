"""ALBERT's encoder and heads: BERT's under the family's names, and its own head for pre-training.

What else differs from BERT is data in `families/`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastbert.models.bert import BertModel
from fastbert.models.calls import AlbertPreTrainingCall
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.pretraining import BertForPreTraining
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification
from fastbert.models.outputs import AlbertPreTrainingOutput


class AlbertModel(BertModel):
    """ALBERT's encoder; see `BertModel`."""

    model_type = "albert"


class AlbertForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "albert"


class AlbertForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "albert"


class AlbertForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "albert"


class AlbertForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "albert"


class AlbertForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "albert"


class AlbertForPreTraining(BertForPreTraining):
    """Masked tokens and the order of two segments together.

    Labels: `labels` as in BertForMaskedLM, `sentence_order_label` (batch,): 0 in order, 1 swapped; there is a
    loss, the sum of both, only where both are given. prediction_logits: (batch, seqlen, vocab_size), zeros at
    masked tokens, in training with both labels computed when they are read (`output_logits`); sop_logits:
    (batch, 2).

    Source: Lan et al. 2019, "ALBERT", sec. 3.1.
    """

    model_type = "albert"
    model_types = ("albert",)
    pair_label = "sentence_order_label"
    output_class = AlbertPreTrainingOutput
    __call__: AlbertPreTrainingCall

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        if self.num_labels != 2:
            raise ValueError(f"config num_labels: expected 2, in order or swapped, got {self.num_labels}")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_order_label: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool | None = None,
        output_logits: bool | None = None,
    ) -> AlbertPreTrainingOutput | tuple[Any, ...]:
        """Encode a padded or packed batch and run both heads; see the class.

        With `cu_seqlens` labels and prediction_logits are (total, …); the pair's label and sop_logits stay
        (batch, …).

        Args:
            output_logits: as in `BertForMaskedLM.forward`, for prediction_logits.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        output: Any = super().forward(
            *(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, labels),
            sentence_order_label,
            head_mask=head_mask,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            causal=causal,
            output_logits=output_logits,
        )
        return output
