"""Pre-training: masked words and next sentence together."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fastbert.layers.linear import apply_linear
from fastbert.layers.modules import attach
from fastbert.models.calls import PreTrainingCall
from fastbert.models.config import EncoderConfig
from fastbert.models.families import Family
from fastbert.models.heads.masked_lm import MaskedLMModel
from fastbert.models.heads.task_model import Encoded
from fastbert.models.labels import check_classes, sequence_loss
from fastbert.models.outputs import ModelOutput, PreTrainingOutput


class BertForPreTraining(MaskedLMModel):
    """Masked tokens and next sentence together.

    Labels: `labels` as in BertForMaskedLM, `next_sentence_label` as in BertForNextSentencePrediction; there
    is a loss, the sum of both, only where both are given. prediction_logits: (batch, seqlen, vocab_size),
    zeros at masked tokens, in training with both labels computed when they are read (`output_logits`);
    seq_relationship_logits: (batch, 2).

    Source: Devlin et al. 2018, "BERT", sec. 3.1.
    """

    task = "ForPreTraining"
    model_types = ("bert", "ernie")
    pair_label: ClassVar[str] = "next_sentence_label"  # what `forward` calls the labels of the pair
    needs_pair: ClassVar[bool] = True  # whether there is no loss without the labels of the pair
    output_class: ClassVar[type[ModelOutput]] = PreTrainingOutput
    __call__: PreTrainingCall

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        if self.family.next_sentence_dropout is not None:
            self.attach_dropout(*self.family.next_sentence_dropout)
        attach(self, self.family.next_sentence, nn.Linear(self.config.hidden_size, 2))
        self.post_init()

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """Always."""
        return True

    @property
    def pair_head(self) -> nn.Module:
        """The layer whose outputs are the classes of a pair."""
        return self.head_part(self.family.next_sentence)

    def pair_logits(self, encoded: Encoded) -> Tensor:
        """(batch, 2)."""
        pooled = self.pooled(encoded)
        if self.family.next_sentence_dropout is not None:
            pooled = self.head_part(self.family.next_sentence_dropout[0])(pooled)
        return apply_linear(self.pair_head, pooled)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool | None = None,
        output_logits: bool | None = None,
    ) -> PreTrainingOutput | tuple[Any, ...]:
        """Encode a padded or packed batch and run both heads; see the class.

        With `cu_seqlens` labels and prediction_logits are (total, …); the pair's label and logits stay
        (batch, …).

        Args:
            output_logits: as in `BertForMaskedLM.forward`, for prediction_logits.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        has_loss = labels is not None and not (self.needs_pair and next_sentence_label is None)
        self.check_output_logits(output_logits, has_loss)
        count = None
        if labels is not None:
            count = check_classes("labels", labels, self.config.vocab_size, attention_mask)
        if next_sentence_label is not None:
            check_classes(self.pair_label, next_sentence_label, 2)
        encoded = self.encode(
            *(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, head_mask),
            *(output_attentions, output_hidden_states, cu_seqlens, max_seqlen, causal),
        )
        words, words_loss = self.logits_and_loss(
            encoded, labels if has_loss else None, count, output_logits, "prediction_logits"
        )
        pair = self.pair_logits(encoded)
        loss = words_loss
        if next_sentence_label is not None:
            pair_loss = sequence_loss(self.pair_label, pair, next_sentence_label)
            loss = None if words_loss is None else words_loss + pair_loss
        return self._output(self.output_class, (loss, words, pair), encoded, return_dict)
