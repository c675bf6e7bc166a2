"""The head over the vocabulary: masked words.

In training it computes only what the loss needs: the labelled tokens, chunk by chunk
(`ops/linear_cross_entropy.py`). The logits of all tokens are then deferred (`deferred.py`): they are computed
when they are first read, or in forward if `output_logits=True`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.factored import FactoredTable
from fastbert.layers.linear import apply_activated, apply_linear, apply_norm, has_float_weight
from fastbert.layers.modules import attach
from fastbert.layers.parts import Activation
from fastbert.layers.quantized import table_product
from fastbert.layers.quantized_table import QuantizedEmbedding, TiedDecoder
from fastbert.models.base import resized
from fastbert.models.calls import MaskedLMCall
from fastbert.models.config import EncoderConfig
from fastbert.models.deferred import DeferredTensor, NotComputed, defer
from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.models.labels import IGNORED, check_classes
from fastbert.models.outputs import LogitsOutput
from fastbert.ops import checks
from fastbert.ops.cross_entropy import cross_entropy
from fastbert.ops.linear import linear
from fastbert.ops.linear_cross_entropy import linear_cross_entropy
from fastbert.runtime import prepared


class MaskedLMModel(TaskModel):
    """A model with the masked-LM head: act(dense(x)) -> LayerNorm -> decoder, tied to the word embeddings."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.base_model._vocabulary_owner = type(self).__name__
        config, head = self.config, self.config.lm_head
        width = config.embedding_width if head.more is None else config.hidden_size
        if head.dense is not None:
            attach(self, head.dense, nn.Linear(config.hidden_size, width, config.has_bias(head.dense)))
        if head.act is not None:
            attach(self, head.act, Activation(head.activation or config.head_activation))
        if head.norm is not None:
            attach(self, head.norm, config.norm(width))
        if head.decoder:
            bias = config.has_bias(head.decoder)
            rank = config.word_embedding_rank if config.tie_word_embeddings else None
            attach(self, head.decoder, nn.Linear(rank or config.embedding_width, config.vocab_size, bias))
        if head.more is not None:
            if (more := width - config.embedding_width) < 0:
                raise ValueError(
                    f"config embedding_size: expected at most hidden_size {width}, got "
                    f"{config.embedding_width}"
                )
            attach(self, head.more, nn.Linear(config.vocab_size, more, bias=False))
        if head.bias is not None:
            owner, _, name = head.bias.rpartition(".")
            self.get_submodule(owner).register_parameter(name, nn.Parameter(torch.zeros(config.vocab_size)))

    def tied_weights(self) -> dict[str, str]:
        """The decoder has the word embeddings' weight and the head's bias, unless the config unties them."""
        head = self.config.lm_head
        if not (self.config.tie_word_embeddings and head.decoder):
            return {}
        tied = {f"{head.decoder}.weight": f"{self.base_model_prefix}.{self.family.word_table}.weight"}
        if isinstance(self.head_part(head.decoder), TiedDecoder):
            tied = {}
        if head.bias is not None:
            tied[f"{head.decoder}.bias"] = head.bias
        return tied

    def vocabulary_parameters(self) -> list[str]:
        """Names of the parameters with one row per token of the vocabulary."""
        head = self.config.lm_head
        own = [f"{head.decoder}.weight", head.bias] if head.decoder else [head.bias]
        if head.decoder and getattr(self.head_part(head.decoder), "bias", None) is not None:
            own.insert(1, f"{head.decoder}.bias")
        return super().vocabulary_parameters() + [name for name in own if name is not None]

    def get_output_embeddings(self) -> nn.Module:
        """The decoder, or the table of word embeddings in its place."""
        path = self.config.lm_head.decoder
        return self.head_part(path) if path else self.get_input_embeddings()

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """See `PreTrainedModel`."""
        table = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if (path := self.config.lm_head.more) is not None:
            more, std = self.head_part(path), None if mean_resizing else self.config.initializer_range
            more.weight = resized(more.weight, self.config.vocab_size, std, 1)
            more.in_features = self.config.vocab_size
        return table

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the decoder; its bias becomes the head's.

        Raises:
            ValueError: the config ties the decoder to the word embeddings, and `value` holds another weight;
                or the head has no decoder.
        """
        if not self.config.lm_head.decoder:
            raise ValueError("value: the head has no decoder; expected a call of set_input_embeddings")
        if self.config.tie_word_embeddings and value.weight is not self.get_input_embeddings().weight:
            raise ValueError(
                "value: its weight is not the word embeddings', to which config tie_word_embeddings = True "
                "ties it; set that to False, or replace both by set_input_embeddings"
            )
        head = self.config.lm_head
        attach(self, head.decoder, value)
        if head.bias is not None and getattr(value, "bias", None) is not None:
            owner, _, name = head.bias.rpartition(".")
            setattr(self.get_submodule(owner), name, value.bias)

    def transform(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> what the decoder reads: (…, embedding size), with `LMHead.more` (…, hidden), with a
        factored table (…, rank).
        """
        head = self.config.lm_head
        if head.dense is None or head.norm is None:
            return hidden
        dense = self.head_part(head.dense)
        if head.act is None:
            x = apply_linear(dense, hidden, head.activation or self.config.head_activation)
        else:
            x = apply_activated(dense, self.head_part(head.act), hidden)
        x, table = apply_norm(self.head_part(head.norm), x), self.get_input_embeddings()
        if isinstance(table, FactoredTable) and (self.config.tie_word_embeddings or not head.decoder):
            return linear(x, table.projection.weight.T)
        return x

    def lm_logits(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, vocab_size)."""
        return self.decode(self.transform(hidden))

    def decode(self, x: Tensor) -> Tensor:
        """The output of `transform` -> (…, vocab_size)."""
        decoder: Any = self.get_output_embeddings()
        if isinstance(decoder, (TiedDecoder, QuantizedEmbedding)):
            words: Any = self.get_input_embeddings()
            bias: Any = self._word_bias() if decoder is words else decoder.bias
            return table_product(x, words, bias)
        if isinstance(decoder, nn.Embedding):
            return linear(x, decoder.weight, self._word_bias())
        if self.config.lm_head.more is None:
            return apply_linear(decoder, x)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return linear(x, self._word_weight(decoder), decoder.bias)
        sources = decoder.weight, self.head_part(self.config.lm_head.more).weight, decoder.bias
        return apply_linear(prepared.derived(decoder, "whole", sources, lambda: self._whole(decoder)), x)

    def _word_weight(self, decoder: nn.Linear) -> Tensor:
        """The weight by which the output of `transform` is multiplied."""
        path = self.config.lm_head.more
        if path is None:
            return decoder.weight
        return torch.cat([decoder.weight, self.head_part(path).weight.T], 1)

    def _whole(self, decoder: nn.Linear) -> nn.Linear:
        """The decoder with the weight of `LMHead.more`."""
        weight = self._word_weight(decoder)
        whole = nn.Linear(weight.shape[1], weight.shape[0], device="meta").eval()
        whole.weight, whole.bias = nn.Parameter(weight, False), nn.Parameter(decoder.bias.detach(), False)
        return whole

    def _word_bias(self) -> Tensor:
        """The bias of a head without decoder."""
        path = self.config.lm_head.bias
        assert path is not None
        return self.get_parameter(path)

    def vocabulary_loss(self, encoded: Encoded, labels: Tensor, count: int | None) -> Tensor:
        """Mean cross-entropy of the labelled tokens; `count` is their number, or None if unknown."""
        hidden, labels = encoded.labelled(labels, count)
        if encoded.by_modules:
            return cross_entropy(encoded.by_token(self.lm_logits), labels, ignore_index=IGNORED)
        x, product = self.transform(hidden), self.vocabulary_product()
        if product is not None:
            return linear_cross_entropy(x, *product, labels, ignore_index=IGNORED, labelled=count)
        return cross_entropy(self.decode(x), labels, ignore_index=IGNORED)

    def vocabulary_product(self) -> tuple[Tensor, Tensor | None] | None:
        """(weight (vocab_size, width), bias or None) of `decode`; None if the decoder has no float weight."""
        decoder: Any = self.get_output_embeddings()
        if isinstance(decoder, nn.Embedding):
            return decoder.weight, self._word_bias()
        return (self._word_weight(decoder), decoder.bias) if has_float_weight(decoder) else None

    def logits_and_loss(
        self,
        encoded: Encoded,
        labels: Tensor | None,
        count: int | None,
        output_logits: bool | None,
        name: str,
    ) -> tuple[Tensor | NotComputed | None, Tensor | None]:
        """(padded logits, loss), each None if not asked for.

        Args:
            count: the number of labels; None if unknown.
            name: name of the logits in the output, for the errors of deferred logits.
        """
        if output_logits is False and labels is not None:
            return None, self.vocabulary_loss(encoded, labels, count)
        if output_logits is None and self.training and labels is not None and not encoded.by_modules:
            return self.deferred_logits(encoded, name), self.vocabulary_loss(encoded, labels, count)
        logits = encoded.by_token(self.lm_logits)
        return encoded.unpack(logits), None if labels is None else encoded.token_loss(logits, labels)

    def deferred_logits(self, encoded: Encoded, name: str) -> DeferredTensor | NotComputed:
        """The padded logits, not computed yet."""
        head, hidden = self.config.lm_head, encoded.hidden
        paths = head.dense, head.norm, head.more
        modules: list[Any] = [self.head_part(path) for path in paths if path]
        modules.append(self.get_output_embeddings())
        dtype = modules[-1].weight.dtype
        if dtype != torch.float64:  # which autocast leaves alone
            dtype = checks.autocast_dtype(hidden) or dtype
        return defer(
            name,
            lambda: encoded.unpack(encoded.by_token(self.lm_logits)),
            (*encoded.shape, self.config.vocab_size),
            dtype,
            hidden,
            modules,
        )

    def check_output_logits(self, output_logits: bool | None, has_loss: bool) -> None:
        """Refuse an `output_logits` that is no boolean, or that leaves nothing to return."""
        if output_logits is None:
            return
        if not isinstance(output_logits, bool):
            raise TypeError(f"output_logits: expected True, False or None, got {output_logits!r}")
        if not output_logits and not has_loss:
            raise ValueError("output_logits: False leaves only the loss; there is none without all labels")


class BertForMaskedLM(MaskedLMModel):
    """Predicts masked tokens.

    Labels: (batch, seqlen), token ids, -100 where nothing is to be predicted. Loss: mean cross-entropy of the
    labelled tokens. Logits: (batch, seqlen, vocab_size), zeros at masked tokens; in training with labels
    they are computed when they are read (`output_logits`).

    Source: Devlin et al. 2018, "BERT", sec. 3.1, task 1.
    """

    task = "ForMaskedLM"
    __call__: MaskedLMCall

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool | None = None,
        output_logits: bool | None = None,
        **more: Any,
    ) -> LogitsOutput | tuple[Any, ...]:
        """Encode a padded or packed batch and run the head; see the class for `labels`, and
        `BertModel.forward` for the rest. With `cu_seqlens` labels and logits are (total, …).

        Args:
            output_logits: True computes the logits, False returns only the loss. None computes them, but in
                training with labels it defers them: they are computed if they are read before the next step
                of the optimizer. Under `torch.compile` reading deferred logits is an error.
            more: what the family's encoder takes besides.

        Returns:
            loss (if labels are given), logits, hidden_states, attentions.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        self.check_output_logits(output_logits, labels is not None)
        count = None
        if labels is not None:
            count = check_classes("labels", labels, self.config.vocab_size, attention_mask)
        encoded = self.encode(
            *(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, head_mask),
            *(output_attentions, output_hidden_states, cu_seqlens, max_seqlen, causal),
            **more,
        )
        if labels is not None and self.config.get("sparse_prediction"):
            # As in transformers, the logits are those of the labelled tokens
            hidden, labels = encoded.labelled(labels, count)
            logits = self.lm_logits(hidden)[labels != IGNORED]
            loss = cross_entropy(logits, labels[labels != IGNORED], ignore_index=IGNORED)
        else:
            logits, loss = self.logits_and_loss(encoded, labels, count, output_logits, "logits")
        return self._output(LogitsOutput, (loss, logits), encoded, return_dict)
