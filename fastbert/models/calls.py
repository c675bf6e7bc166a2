"""What calling a model takes and returns, for type checkers and editors.

`nn.Module` declares `model(…)` as anything that returns anything. Each model declares one of these signatures
instead. They are the signatures of `forward` (a test compares them), except for three things:

- Options are typed Any, so that `model(**batch)` passes with a `dict[str, Tensor]`: mypy compares the type of
  its values with every parameter.
- The result is the output class alone, not the tuple that `return_dict=False` asks for. Its items are Any,
  so that code written for the tuple passes.
- `more`, which only XLNet's heads need, is left out, so that a misspelt argument is found.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from fastbert.models.outputs import (
    AlbertPreTrainingOutput,
    BaseModelOutputWithPooling,
    LogitsOutput,
    PreTrainingOutput,
    QuestionAnsweringOutput,
)


class EncoderCall(Protocol):
    """The signature of `BertModel`, without the arguments that it refuses."""

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Any = None,
        causal: Any = None,
        first_token_only: Any = False,
    ) -> BaseModelOutputWithPooling: ...


class LabelsCall(Protocol):
    """The signature of a head with one `labels` argument."""

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Any = None,
        causal: Any = None,
    ) -> LogitsOutput: ...


class ChoicesCall(Protocol):
    """The signature of `BertForMultipleChoice`."""

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Any = None,
        causal: Any = None,
        choices: Any = None,
    ) -> LogitsOutput: ...


class MaskedLMCall(Protocol):
    """The signature of `BertForMaskedLM`."""

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Any = None,
        causal: Any = None,
        output_logits: Any = None,
    ) -> LogitsOutput: ...


class PreTrainingCall(Protocol):
    """The signature of `BertForPreTraining`."""

    def __call__(
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
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Any = None,
        causal: Any = None,
        output_logits: Any = None,
    ) -> PreTrainingOutput: ...


class AlbertPreTrainingCall(Protocol):
    """The signature of `AlbertForPreTraining`."""

    def __call__(
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
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Any = None,
        causal: Any = None,
        output_logits: Any = None,
    ) -> AlbertPreTrainingOutput: ...


class SpanCall(Protocol):
    """The signature of `BertForQuestionAnswering`."""

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Any = None,
        causal: Any = None,
    ) -> QuestionAnsweringOutput: ...


class QuestionCall(Protocol):
    """The signature of `BigBirdForQuestionAnswering`."""

    def __call__(
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
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Any = None,
        causal: Any = None,
    ) -> QuestionAnsweringOutput: ...
