"""BigBird's encoder and heads: BERT's under the family's names, with attention by blocks in long texts.

What differs from BERT is data in `families/`, and the mathematics of `layers/block_sparse.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.embeddings import DroppedEmbeddings
from fastbert.layers.linear import apply_activated, apply_linear, apply_norm
from fastbert.layers.modules import attach
from fastbert.layers.packing import positions_of
from fastbert.layers.parts import Activation
from fastbert.models.bert import BertModel
from fastbert.models.calls import QuestionCall
from fastbert.models.families import Family
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.pretraining import BertForPreTraining
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification
from fastbert.models.outputs import QuestionAnsweringOutput
from fastbert.models.paths import ClassifierHead
from fastbert.ops import checks

# Subtracted from the logits of a question's tokens
_BARRED = 1e6
_BLOCK = (
    "intermediate.dense",
    "intermediate.intermediate_act_fn",
    "output.dense",
    "output.dropout",
    "output.LayerNorm",
)


class BigBirdModel(BertModel):
    """BigBird's encoder; see `BertModel`.

    Source: Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences".
    """

    model_type = "big_bird"
    embeddings_class = DroppedEmbeddings


class BigBirdForPreTraining(BertForPreTraining):
    """See `BertForPreTraining`. Without the labels of the pair the loss is that of the words."""

    model_type = "big_bird"
    needs_pair = False


class _WithPooler:
    """A head whose encoder has a pooler that no output depends on, as in transformers and its files."""

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """So that there is one."""
        return True


class BigBirdForMaskedLM(_WithPooler, BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "big_bird"


class BigBirdForSequenceClassification(_WithPooler, BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "big_bird"


class BigBirdForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "big_bird"


class BigBirdForTokenClassification(_WithPooler, BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "big_bird"


class BigBirdForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`. No token of the question is a start or an end, except token 0.

    A text is [CLS] question [SEP] context. The logits of the question are lower by 1e6. Token types are 0 in
    the question and 1 in the context unless the caller passes them.
    """

    model_type = "big_bird"
    __call__: QuestionCall

    def attach_classifier(self, head: ClassifierHead, classes: int) -> None:
        """Create the layers of the head."""
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attach_dropout(head.dropout, head.dropout_key)
        attach(self, "qa_classifier.intermediate.dense", nn.Linear(hidden, inner))
        attach(self, "qa_classifier.intermediate.intermediate_act_fn", Activation(config.activation_name))
        attach(self, "qa_classifier.output.dense", nn.Linear(inner, hidden))
        attach(self, "qa_classifier.output.LayerNorm", config.norm(hidden))
        self.attach_dropout("qa_classifier.output.dropout", head.dropout_key)
        attach(self, head.out, nn.Linear(hidden, classes))

    def classes_of(self, head: ClassifierHead, x: Tensor) -> Tensor:
        """(…, hidden) -> (…, classes): a feed-forward block with its residual sum and norm, then a layer."""
        up, act, down, dropout, norm = (self.head_part(f"qa_classifier.{path}") for path in _BLOCK)
        inner = apply_activated(up, act, self.head_part(head.dropout)(x))
        x = apply_norm(norm, x + dropout(apply_linear(down, inner)))
        return apply_linear(self.head_part(head.out), x)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        question_lengths: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool | None = None,
    ) -> QuestionAnsweringOutput | tuple[Any, ...]:
        """As `BertForQuestionAnswering.forward`.

        Args:
            question_lengths: (batch,) or (batch, 1) int64, the number of tokens up to the first [SEP]; None
                finds config sep_token_id in `input_ids`. With `inputs_embeds` alone no logit is lowered.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        positions = self._positions(start_positions, end_positions, attention_mask)
        question, column = self._question(input_ids, question_lengths, inputs_embeds, cu_seqlens)
        if question is not None and token_type_ids is None:
            token_type_ids = 1 - question.long()
        encoded = self.encode(
            *(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, head_mask),
            *(output_attentions, output_hidden_states, cu_seqlens, max_seqlen, causal),
        )
        logits = encoded.by_token(lambda x: self.classes_of(self.family.spans, x))
        if question is not None and column is not None:
            barred = encoded.inputs.packing.pack(question & (column > 0)).to(logits.device)
            logits = logits - barred[:, None] * _BARRED
        return self._spans(logits, positions, encoded, return_dict)

    def _question(
        self,
        input_ids: Tensor | None,
        lengths: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which tokens are the question, bool of the shape of the tokens, and their columns.

        None if nothing says it, or if the tokens are of another shape, which `encode` refuses.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds[..., 0]
        if not isinstance(tokens, Tensor) or (lengths is None and input_ids is None):
            return None, None
        if cu_seqlens is None and tokens.dim() == 2:
            batch, device = tokens.shape[0], tokens.device
            sequence = torch.arange(batch, device=device)[:, None]
            column = torch.arange(tokens.shape[1], device=device)
        elif cu_seqlens is not None and tokens.dim() == 1:
            batch = cu_seqlens.shape[0] - 1
            sequence, column = positions_of(cu_seqlens.to(tokens.device), tokens.shape[0])
        else:
            return None, None
        if lengths is None:
            never = tokens.numel()
            ends = column.where(tokens == self.config.sep_token_id, never).flatten()
            first = torch.full((batch,), never, device=tokens.device)
            first = first.scatter_reduce(0, sequence.expand_as(tokens).flatten(), ends, "amin")
            lengths = first.where(first < never, 0) + 1
        else:
            checks.int_tensor("question_lengths", lengths)
            if lengths.shape not in ((batch,), (batch, 1)):
                raise ValueError(
                    f"question_lengths: expected shape ({batch},) or ({batch}, 1), got {tuple(lengths.shape)}"
                )
        return column < lengths.reshape(-1).to(tokens.device)[sequence], column
