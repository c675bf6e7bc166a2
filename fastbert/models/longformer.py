"""Longformer's encoder and heads: BERT's under the family's names, with windows and global tokens.

What differs from BERT is data in `families/`, the mathematics of `layers/global_tokens.py`, and the argument
`global_attention_mask` of each call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fastbert.layers.packing import Packing
from fastbert.models.bert import BertModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification
from fastbert.models.outputs import BaseModelOutputWithPooling, LogitsOutput, QuestionAnsweringOutput
from fastbert.ops import checks
from fastbert.ops.attention_grid import from_grid, to_grid

_NAME = "global_attention_mask"
# What `GlobalMask.merged` reads of the other arguments, in its order
_READ = ("input_ids", "attention_mask", "inputs_embeds", "cu_seqlens", "max_seqlen")


@dataclass
class LongformerBaseModelOutputWithPooling(BaseModelOutputWithPooling):
    """As `BaseModelOutputWithPooling`, with bands of attention.

    With w = config attention_window of a layer, and g global tokens in the sequence with most of them:

    attentions: per layer (batch, nheads, seqlen, g + w + 1), each token's probabilities for the global tokens
        and then for the tokens of its window, from w / 2 tokens before it to w / 2 after it. The window's are
        0 at global tokens and outside the sequence. All are 0 for a global token.
    global_attentions: per layer (batch, nheads, seqlen, g), the global tokens' probabilities for each token;
        None if no token is global. They are 0 where a sequence has fewer global tokens.
    """

    global_attentions: tuple[Tensor, ...] | None = None


@dataclass
class LongformerLogitsOutput(LogitsOutput):
    """As `LogitsOutput`; attentions as in `LongformerBaseModelOutputWithPooling`."""

    global_attentions: tuple[Tensor, ...] | None = None


@dataclass
class LongformerQuestionAnsweringOutput(QuestionAnsweringOutput):
    """As `QuestionAnsweringOutput`; attentions as in `LongformerBaseModelOutputWithPooling`."""

    global_attentions: tuple[Tensor, ...] | None = None


_OUTPUTS: dict[type, Any] = {
    BaseModelOutputWithPooling: LongformerBaseModelOutputWithPooling,
    LogitsOutput: LongformerLogitsOutput,
    QuestionAnsweringOutput: LongformerQuestionAnsweringOutput,
}


class GlobalMask:
    """A model whose forward also takes a mask of global tokens, which becomes value 2 of the attention mask.

    global_attention_mask: of the shape of input_ids, other than 0 where a token is global; by name only. If
    it is None, `default_globals` are.
    """

    config: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.forward = _with_global_mask(cls.forward)

    def default_globals(self, input_ids: Tensor | None, like: Tensor) -> Tensor | None:
        """Which tokens are global if the caller does not say so; None for none.

        Args:
            input_ids: (…, seqlen), or None.
            like: (…, seqlen), of any dtype.

        Returns:
            (…, seqlen) bool.
        """
        return None

    def as_output(self, output: Any, return_dict: bool | None) -> Any:
        """See `PreTrainedModel`. Each layer's bands are split into `attentions` and `global_attentions`."""
        near, own = output.attentions, None
        if near is not None:
            sizes = [sum(self.config.window(i)) + 1 for i in range(len(near))]
            most = [(t.shape[-1] - size) // 2 for t, size in zip(near, sizes, strict=True)]
            whole, near = near, tuple(t[..., : t.shape[-1] - n] for t, n in zip(near, most, strict=True))
            if any(most):
                own = tuple(t[..., t.shape[-1] - n :] for t, n in zip(whole, most, strict=True))
        values = {name: getattr(output, name) for name in type(output).__dataclass_fields__}
        found = _OUTPUTS[type(output)].of(**values | {"attentions": near, "global_attentions": own})
        return cast(Any, super()).as_output(found, return_dict)

    def packed_scores(self, output: Any, packing: Packing) -> list[Tensor] | None:
        """See `TaskModel`."""
        if output.attentions is None:
            return None
        own = output.global_attentions or [t[..., :0] for t in output.attentions]
        pairs = zip(output.attentions, own, strict=True)
        return [packing.from_grid(torch.cat(pair, -1).transpose(1, 2)) for pair in pairs]

    def separators(self, input_ids: Tensor) -> Tensor:
        """How many separators each sequence has up to each token, that token included: (…, seqlen)."""
        return (input_ids == self.config.sep_token_id).cumsum(-1)

    def merged(
        self,
        global_attention_mask: Tensor | None,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> Tensor | None:
        """The attention mask with 2 at global tokens.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        tokens, mask = input_ids, global_attention_mask
        if tokens is None and isinstance(inputs_embeds, Tensor):
            tokens = inputs_embeds[..., 0] if inputs_embeds.dim() > 1 and inputs_embeds.shape[-1] else None
        if not isinstance(tokens, Tensor):
            return attention_mask
        if mask is not None:
            if not isinstance(mask, Tensor):
                raise TypeError(f"{_NAME}: expected a torch.Tensor, got {type(mask).__name__}")
            checks.same_device(_NAME, mask, tokens)
            checks.shape(_NAME, mask, tuple(tokens.shape))
            mask = mask != 0
        elif cu_seqlens is None:
            mask = self.default_globals(input_ids, tokens)
        elif type(self).default_globals is not GlobalMask.default_globals and tokens.dim() == 1:
            longest = max_seqlen if torch.compiler.is_compiling() else _longest(cu_seqlens, tokens.shape[0])
            if longest is not None:
                ends = cu_seqlens.to(tokens.device)
                grid = to_grid(tokens, ends, longest)
                mask = self.default_globals(None if input_ids is None else grid, grid)
                mask = None if mask is None else from_grid(mask, ends, tokens.shape[0])
        if mask is None:
            return attention_mask
        if attention_mask is None:
            return mask.long() + 1
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != mask.shape:
            got = tuple(getattr(attention_mask, "shape", ()))
            raise ValueError(
                f"attention_mask: expected shape {tuple(mask.shape)} beside global tokens, got {got}"
            )
        kept = (attention_mask != 0).long()
        return kept + kept * (mask.to(kept.device) | (attention_mask == 2)).long()


def _longest(cu_seqlens: object, total: int) -> int | None:
    """The longest length; None if there is none, or if `cu_seqlens` is what `forward` refuses."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        return None
    first, *ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip((first, *ends), ends, strict=False)]
    return max(lengths) if first == 0 and ends[-1] == total and min(lengths) >= 0 else None


def _with_global_mask(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with the argument `global_attention_mask`; see `GlobalMask`."""
    signature = inspect.signature(forward)
    parameters = list(signature.parameters.values())
    names = [p.name for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(forward)
    def taking(self: Any, *args: Any, global_attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        by_place = dict(zip(names, args, strict=False))
        if len(args) == len(by_place) and not by_place.keys() & kwargs.keys():
            # Else `forward` raises
            args, kwargs = (), by_place | kwargs
            kwargs["attention_mask"] = self.merged(global_attention_mask, *map(kwargs.get, _READ))
        return forward(self, *args, **kwargs)

    own = inspect.Parameter(_NAME, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Tensor | None")
    # What takes all other names comes last
    shown = sorted([*parameters, own], key=lambda parameter: parameter.kind)
    vars(taking)["__signature__"] = signature.replace(parameters=shown)
    return taking


class LongformerModel(GlobalMask, BertModel):
    """Longformer's encoder; see `BertModel`. By default no token is global.

    Source: Beltagy, Peters, Cohan 2020, "Longformer: The Long-Document Transformer".
    """

    model_type = "longformer"
    __call__: Callable[..., LongformerBaseModelOutputWithPooling]


class LongformerForMaskedLM(GlobalMask, BertForMaskedLM):
    """See `BertForMaskedLM`. By default no token is global."""

    model_type = "longformer"
    __call__: Callable[..., LongformerLogitsOutput]


class LongformerForSequenceClassification(GlobalMask, BertForSequenceClassification):
    """See `BertForSequenceClassification`. By default the first token is global."""

    model_type = "longformer"
    __call__: Callable[..., LongformerLogitsOutput]

    def default_globals(self, input_ids: Tensor | None, like: Tensor) -> Tensor | None:
        """The first token."""
        return (torch.arange(like.shape[-1], device=like.device) == 0).expand(like.shape)


class LongformerForMultipleChoice(GlobalMask, BertForMultipleChoice):
    """See `BertForMultipleChoice`.

    By default the tokens from the second one after the first separator on are global; with inputs_embeds no
    token is.
    """

    model_type = "longformer"
    __call__: Callable[..., LongformerLogitsOutput]

    def default_globals(self, input_ids: Tensor | None, like: Tensor) -> Tensor | None:
        """The tokens from the second one after the first separator on."""
        if input_ids is None:
            return None
        return self.separators(input_ids).clamp_max(1).cumsum(-1) > 2


class LongformerForTokenClassification(GlobalMask, BertForTokenClassification):
    """See `BertForTokenClassification`. By default no token is global."""

    model_type = "longformer"
    __call__: Callable[..., LongformerLogitsOutput]


class LongformerForQuestionAnswering(GlobalMask, BertForQuestionAnswering):
    """See `BertForQuestionAnswering`.

    By default the tokens before the first separator are global; with inputs_embeds, or in a sequence without
    a separator, no token is.
    """

    model_type = "longformer"
    __call__: Callable[..., LongformerQuestionAnsweringOutput]

    def default_globals(self, input_ids: Tensor | None, like: Tensor) -> Tensor | None:
        """The tokens before the first separator."""
        if input_ids is None:
            return None
        found = self.separators(input_ids)
        return (found == 0) & (found[..., -1:] > 0)
