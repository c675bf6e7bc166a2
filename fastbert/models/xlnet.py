"""XLNet's encoder and heads: BERT's under the family's names, with a second stream and memories.

What differs from BERT is data in `families/`, and the mathematics of `layers/two_streams.py`.

A usual call is packed. A call with `mems`, `perm_mask` or `target_mapping`, or of a model with config bi_data
or same_length, computes the padded batch as transformers does, masked tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.embeddings import WordEmbeddings
from fastbert.layers.modules import OwnMatrices
from fastbert.layers.two_streams import StreamLayer
from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.span_search import SpanSearch
from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.models.heads.token_classification import BertForTokenClassification
from fastbert.models.input_checks import head_gates
from fastbert.models.inputs import Inputs
from fastbert.models.labels import check_tensor
from fastbert.models.outputs import LogitsOutput, ModelOutput, QuestionAnsweringOutput
from fastbert.models.two_streams import both_streams, content_stream

_ABSENT: Any = None


@dataclass
class StreamOutput(ModelOutput):
    """last_hidden_state (batch, seqlen or predictions, hidden); mems: per layer (tokens, batch, hidden);
    hidden_states and attentions as of `BertModel`, per stream if there are two."""

    last_hidden_state: Tensor = _ABSENT
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None


@dataclass
class XLNetLogitsOutput(ModelOutput):
    """logits of a vocabulary, sequence, token or choice head; the model's class states their shape."""

    loss: Tensor | None = None
    logits: Tensor = _ABSENT
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None


@dataclass
class XLNetSpanOutput(ModelOutput):
    """start_logits, end_logits (batch, seqlen)."""

    loss: Tensor | None = None
    start_logits: Tensor = _ABSENT
    end_logits: Tensor = _ABSENT
    mems: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Any, ...] | None = None


class StreamEmbeddings(WordEmbeddings):
    """Word embeddings whose row of padding is trained.

    Args:
        config: the model's `EncoderConfig`.
    """

    def __init__(self, config: Any):
        size, width = config.vocab_size, config.hidden_size
        nn.Embedding.__init__(self, size, width, _weight=torch.empty(size, width))


class XLNetModel(BertModel, OwnMatrices):
    """XLNet's encoder; see `BertModel`, and `forward` for the arguments that only XLNet has.

    Source: Yang et al. 2019, "XLNet: Generalized Autoregressive Pretraining for Language Understanding".
    """

    model_type = "xlnet"
    embeddings_class = StreamEmbeddings
    layer_class = StreamLayer
    __call__: Any

    def draw_own_(self, std: float) -> None:
        """See `OwnMatrices`."""
        self.mask_emb.normal_(0.0, std)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        perm_mask: Tensor | None = None,
        target_mapping: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        input_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_mems: bool | None = None,
        *,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool | None = None,
        first_token_only: bool = False,
        packed: bool = False,
    ) -> StreamOutput | tuple[Any, ...]:
        """Encode a padded or packed batch; see `BertModel.forward`.

        Args:
            mems: per layer (M, batch, hidden), `mems` of a previous call: further tokens before these, all of
                which are seen.
            perm_mask: (batch, seqlen, seqlen), non-zero where the first token does not see the second. In the
                content stream a token always sees itself.
            target_mapping: (batch, predictions, seqlen), which token each prediction is at. With it the
                query stream is returned.
            input_mask: (batch, seqlen), in place of attention_mask: non-zero at padding.
            use_mems: whether to return `mems`; None: config use_mems_train or use_mems_eval. Packed tokens
                have none.
            position_ids: (batch, seqlen), from which distances are counted; by default the padded columns.

        Returns:
            last_hidden_state, mems, hidden_states, attentions. Memories of masked tokens are zeros in a usual
            call. With target_mapping hidden_states has both streams of each layer in turn, and attentions a
            pair per layer.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        config = self.config
        attention_mask = kept_mask(attention_mask, input_mask)
        if use_mems is None:
            use_mems = config.use_mems_train if self.training else config.use_mems_eval
        use_mems, uni = bool(use_mems) and cu_seqlens is None, self.attends_backward(causal)
        wants = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        wants_probs, wants_states = (bool(config.get(k) if v is None else v) for k, v in wants.items())
        tokens = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        inputs = self.checked(*tokens, cu_seqlens, max_seqlen)
        special = mems, perm_mask, target_mapping
        if self.whole_batch(uni) or any(t is not None for t in special):
            others = {"cu_seqlens": cu_seqlens, "position_ids": position_ids, "head_mask": head_mask}
            for name in (name for name, value in others.items() if value is not None):
                raise ValueError(
                    f"{name}: expected None beside mems, perm_mask and target_mapping, and with config "
                    "bi_data or same_length"
                )
            whole = both_streams(self, (*tokens[:3], inputs_embeds), *special, uni)
            hidden, states, probs, inputs = whole
            if first_token_only:
                hidden = inputs.packing.first_rows(hidden)
            contents = states[:: 1 if target_mapping is None else 2]
        else:
            gates = None if head_mask is None else head_gates(config, head_mask, inputs.device)
            wanted = wants_probs, wants_states or use_mems
            hidden, states, probs = self.encode_inputs(inputs, gates, *wanted, first_token_only, uni)
            contents = [inputs.packing.unpack(s) for s in states[:-1]] if use_mems else []
        new = self._memories(contents[: config.num_hidden_layers], mems) if use_mems else None
        asked = states if wants_states else None, probs if wants_probs else None
        if packed:
            return hidden, *asked, inputs, new
        found = Encoded(hidden, inputs, *asked, first_token_only)
        if first_token_only:
            last = hidden if inputs.packing.flat else hidden.unsqueeze(1)
        else:
            last = inputs.packing.unpack(hidden)
        padded = found.hidden_states
        if padded is not None and states[-1] is hidden:
            padded = *padded[:-1], last
        output = StreamOutput.of(
            last_hidden_state=last, mems=new, hidden_states=padded, attentions=found.attentions
        )
        return self.as_output(output, return_dict)

    def attends_backward(self, causal: bool | None) -> bool:
        """Whether a token sees only itself and earlier tokens; None: what the config says.

        Raises:
            TypeError: `causal` is of another type.
        """
        if causal is not None and not isinstance(causal, bool):
            raise TypeError(f"causal: expected True, False or None, got {causal!r}")
        return self.config.attn_type == "uni" if causal is None else causal

    def whole_batch(self, causal: bool) -> bool:
        """Whether the config alone asks for the padded batch."""
        return self.config.bi_data or (self.config.same_length and causal)

    def _memories(self, contents: Sequence[Tensor], before: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """The memories of the layers' inputs, each (batch, seqlen, hidden)."""
        config, new = self.config, []
        for i, x in enumerate(contents):
            x = x.transpose(0, 1)[: config.reuse_len or None]
            x = x if before is None else torch.cat([before[i].to(x.dtype), x])
            new.append(x[-(config.mem_len or 0) :].detach())
        return tuple(new)

    def encode_inputs(
        self,
        inputs: Inputs,
        gates: Tensor | None,
        want_attentions: bool,
        want_states: bool,
        first_only: bool,
        causal: bool | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """See `BertModel`."""
        uni = self.attends_backward(causal)
        if self.whole_batch(uni):
            raise ValueError("cu_seqlens: expected None with config bi_data or same_length")
        return content_stream(
            *(self, self.family, self.layer_list(), inputs, self.config.clamp_len, uni, seed),
            gates=gates,
            want_attentions=want_attentions,
            want_states=want_states,
            first_only=first_only,
            recompute_every=self.checkpoint_every,
            taps=self.taps,
        )


def kept_mask(attention_mask: Tensor | None, input_mask: Tensor | None) -> Tensor | None:
    """The attention mask that either of the two is.

    Raises:
        TypeError, ValueError: both are given, or `input_mask` is no tensor.
    """
    if input_mask is None:
        return attention_mask
    check_tensor("input_mask", input_mask)
    if attention_mask is not None:
        raise ValueError("input_mask: expected None beside attention_mask, whose opposite it is")
    return input_mask == 0


_OUTPUTS: dict[Any, Any] = {LogitsOutput: XLNetLogitsOutput, QuestionAnsweringOutput: XLNetSpanOutput}


class _WithMemories(TaskModel):
    """A head whose output has the memories."""

    __call__: Any

    def _output(
        self, output_class: Any, values: tuple[Any, ...], encoded: Encoded, return_dict: bool | None
    ) -> Any:
        output = _OUTPUTS.get(output_class, output_class)
        return self.as_output(
            output(*values, encoded.mems, encoded.hidden_states, encoded.attentions), return_dict
        )


class XLNetLMHeadModel(_WithMemories, BertForMaskedLM):
    """Predicts tokens: those of `target_mapping`, labels (batch, predictions); without it as
    `BertForMaskedLM`, from a content stream that sees the tokens themselves."""

    model_type = "xlnet"
    task = "LMHeadModel"


class XLNetForSequenceClassification(_WithMemories, BertForSequenceClassification):
    """See `BertForSequenceClassification`. The last kept token is read, or what config summary_type says."""

    model_type = "xlnet"


class XLNetForMultipleChoice(_WithMemories, BertForMultipleChoice):
    """See `BertForMultipleChoice`, and `XLNetForSequenceClassification`."""

    model_type = "xlnet"

    def encode(self, *given: Any, input_mask: Tensor | None = None, **more: Any) -> Encoded:
        """See `TaskModel`; input_mask is (batch, choices, seqlen)."""
        if input_mask is not None:
            more["input_mask"] = input_mask.flatten(0, 1)
        return super().encode(*given, **more)


class XLNetForTokenClassification(_WithMemories, BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "xlnet"


class XLNetForQuestionAnsweringSimple(_WithMemories, BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "xlnet"
    task = "ForQuestionAnsweringSimple"


class XLNetForQuestionAnswering(_WithMemories, SpanSearch):
    """See `SpanSearch`."""

    model_type = "xlnet"
