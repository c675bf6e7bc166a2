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

from typing import Any, Protocol, TypedDict, Unpack

from torch import Tensor

from fastbert.models.outputs import (
    AlbertPreTrainingOutput,
    BaseModelOutputWithPooling,
    LogitsOutput,
    PreTrainingOutput,
    QuestionAnsweringOutput,
)


class Options(TypedDict, total=False):
    """What every model takes by name alone; each is None by default."""

    head_mask: Tensor | None
    output_attentions: Any
    output_hidden_states: Any
    return_dict: Any
    cu_seqlens: Tensor | None
    max_seqlen: Any
    causal: Any


class EncoderOptions(Options, total=False):
    """Those of `BertModel`."""

    first_token_only: Any


class VocabularyOptions(Options, total=False):
    """Those of a head over the vocabulary."""

    output_logits: Any


class ChoicesOptions(Options, total=False):
    """Those of `BertForMultipleChoice`."""

    choices: Any


class EncoderCall(Protocol):
    """The signature of `BertModel`, without the arguments that it refuses."""

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **options: Unpack[EncoderOptions],
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
        **options: Unpack[Options],
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
        **options: Unpack[ChoicesOptions],
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
        **options: Unpack[VocabularyOptions],
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
        **options: Unpack[VocabularyOptions],
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
        **options: Unpack[VocabularyOptions],
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
        **options: Unpack[Options],
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
        **options: Unpack[Options],
    ) -> QuestionAnsweringOutput: ...
