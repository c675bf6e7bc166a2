"""The base of all task heads: what the encoder passes to a head, and the model around both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.layers.linear import apply_activated, apply_linear, apply_norm
from fastbert.layers.modules import attach, calls_all, changed, part, watched
from fastbert.layers.packing import Packing
from fastbert.layers.parts import Activation
from fastbert.models.base import PreTrainedModel, class_of
from fastbert.models.calls import LabelsCall
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES, Family
from fastbert.models.inputs import Inputs
from fastbert.models.labels import IGNORED
from fastbert.models.outputs import LogitsOutput, ModelOutput
from fastbert.models.paths import ClassifierHead
from fastbert.models.pooler import pooler_gap
from fastbert.ops import checks
from fastbert.ops.activation import SPELLINGS, activate_eager
from fastbert.ops.cross_entropy import cross_entropy
from fastbert.ops.packing import pack
from fastbert.ops.pooling import pooling

if TYPE_CHECKING:
    from fastbert.models.bert import BertModel

# Values of config classifier_pooling with which a classifier reads the last token
_LAST = ("last", "cls_index")
# encoder -> its substitute in calls of this context, set by `fastbert.graph`
served_by: ContextVar[Mapping[nn.Module, Callable[..., Any]]] = ContextVar(
    "served_by", default=MappingProxyType({})
)


@dataclass(frozen=True)
class Encoded:
    """What the encoder passes to a head.

    Attributes:
        hidden: (rows, hidden), the kept tokens of all sequences; with `first_only` (batch, hidden), the
            token at position 0 of each, zeros if it is masked.
        inputs: the batch.
        states, probs: all hidden states and attention probabilities, packed; None if not asked for. Those of
            XLNet's two streams are padded.
        first_only: see `hidden`.
        by_modules: whether the head's modules must be called on the padded batch; see `by_token`.
        pooled: the pooler's output, if it has run already.
        mems: XLNet's memories, or None.
    """

    hidden: Tensor
    inputs: Inputs
    states: list[Tensor] | None
    probs: list[Tensor] | None
    first_only: bool
    by_modules: bool = False
    pooled: Tensor | None = None
    mems: tuple[Tensor, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, seqlen), the shape of the labels of tokens; (total,) if the caller's tokens are packed."""
        packing = self.inputs.packing
        if packing.flat:
            return (self.inputs.position_ids.shape[0],)
        return packing.batch, packing.seqlen

    @property
    def mask(self) -> Tensor | None:
        """(batch, seqlen) bool; None if all tokens are kept."""
        return self.inputs.packing.mask

    def by_token(self, head: Callable[[Tensor], Tensor], hidden: Tensor | None = None) -> Tensor:
        """head(hidden), (rows, …); on the padded batch if the head has hooks or replaced modules.

        Args:
            head: a function of (…, hidden), with one result per token.
            hidden: (rows, hidden); all tokens if None.
        """
        if not self.by_modules:
            return head(self.hidden if hidden is None else hidden)
        packing = self.inputs.packing
        return packing.from_grid(head(packing.grid(self.hidden)[0]))

    def unpack(self, x: Tensor) -> Tensor:
        """(rows, …) -> (*shape, …), zeros at masked tokens."""
        return self.inputs.packing.unpack(x)

    def packed_labels(self, labels: Tensor) -> Tensor:
        """(*shape) -> (rows,), checked for shape and device."""
        checks.same_device("labels", labels, self.hidden)
        checks.shape("labels", labels, self.shape)
        # There are rows after the kept tokens
        if self.inputs.packing.capacity and self.mask is not None:
            labels = labels.masked_fill(self.mask.logical_not(), IGNORED)
        return self.inputs.packing.pack(labels)

    def token_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of packed logits (rows, classes) against labels (*shape)."""
        return cross_entropy(logits, self.packed_labels(labels), ignore_index=IGNORED)

    def labelled(self, labels: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
        """Hidden states and labels of the `count` labelled tokens, or of all rows if `count` is None."""
        labels = self.packed_labels(labels)
        if count is None or count == labels.shape[0] or self.by_modules:
            return self.hidden, labels
        at = torch.nonzero_static(labels != IGNORED, size=count).squeeze(1)
        return pack(self.hidden.unsqueeze(0), at), pack(labels.unsqueeze(0), at)

    def first(self) -> Tensor:
        """The token at position 0 of each sequence, (batch, hidden); zeros if all its tokens are masked.

        Raises:
            ValueError: position 0 of a sequence is masked, but a later token is kept.
        """
        if self.inputs.first_masked is not None:
            raise ValueError(
                f"attention_mask: position 0 of sequence {self.inputs.first_masked}, which this head reads, "
                "is masked out; expected the first token to be kept (pad on the right)"
            )
        return self.hidden if self.first_only else self.inputs.packing.first_rows(self.hidden)

    def last(self) -> Tensor:
        """The last kept token of each sequence, (batch, hidden); zeros for an empty sequence."""
        lengths, ends = self.inputs.packing.cu_seqlens.diff(), self.inputs.packing.cu_seqlens[1:].long()
        rows = self.hidden.index_select(0, (ends - 1).clamp_min(0)) if self.hidden.shape[0] else self.first()
        return torch.where(
            lengths.unsqueeze(1) > 0, rows, torch.zeros((), dtype=rows.dtype, device=rows.device)
        )

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """The embedding output and every layer's output, padded."""
        if self.states is None:
            return None
        return tuple(s if s.dim() == 3 else self.unpack(s) for s in self.states)

    @property
    def attentions(self) -> tuple[Tensor, ...] | None:
        """Every layer's probabilities, padded; those of two streams, which are pairs, are padded already."""
        unpack = self.inputs.packing.unpack_scores
        if self.probs is None:
            return None
        return tuple(p if isinstance(p, tuple) else unpack(p) for p in self.probs)


def without_masked(scores: Tensor, kept: Tensor) -> Tensor:
    """Scores (batch, seqlen) with half the lowest finite number at masked tokens.

    So their probability is 0 in a softmax over tokens, and a start's and an end's score can be added.
    """
    return scores.masked_fill(kept.logical_not(), torch.finfo(scores.dtype).min / 2)


class FirstTokenHead(nn.Module):
    """A classifier of the first token, by its own layers; called only if it is watched, or wrapped (PEFT)."""

    _modules: dict[str, Any]

    def __init__(self, head: ClassifierHead):
        super().__init__()
        self.head = head

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(batch, seqlen, hidden) -> (batch, classes)."""
        head, x = self.head, hidden_states[:, 0]
        dropout, dense, out = (
            self._modules[path.rpartition(".")[2]] for path in (head.dropout, head.dense or "", head.out)
        )
        if head.dropout_first:
            x = dropout(x)
        act = None if head.act is None else self._modules[head.act.rpartition(".")[2]]
        x = activate_eager(dense(x), head.activation) if act is None else act(dense(x))
        return out(dropout(x))


class TaskModel(PreTrainedModel):
    """An encoder with a head. A head with one `labels` argument defines `logits` and `loss`.

    Attributes:
        model_types: the families that a head's own class accepts; a family's subclass accepts its family.
        reads_first_only: whether the head reads only the token at position 0.
        around_classifier: the path of the `FirstTokenHead`, "" if there is none.

    A module that is assigned as `above` is called between the encoder and the head: `Encoded` -> `Encoded`.
    Its `reads_states` says whether it needs all hidden states.
    """

    model_types: ClassVar[Sequence[str]] = tuple(FAMILIES)
    reads_first_only: bool = False
    around_classifier: str = ""
    __call__: LabelsCall

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        if self.model_type is None and self.config.model_type not in self.model_types:
            raise ValueError(
                f"config model_type: {self.config.model_type!r} has no head {self.task!r}; "
                f"expected one of {', '.join(self.model_types)}"
            )
        encoder: Any = class_of(self.family, "Model")
        self.add_module(
            self.base_model_prefix, encoder(self.config, add_pooling_layer=self.reads_pooler(self.family))
        )

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """Whether the head reads the pooler's output, so that the encoder needs one."""
        return False

    @property
    def base_model(self) -> BertModel:
        """The encoder."""
        return self._modules[self.base_model_prefix]

    @property
    def num_labels(self) -> int:
        """Number of classes, from the config.

        Raises:
            ValueError: there are none.
        """
        if not self.config.id2label:
            raise ValueError("config id2label: expected at least one class, got {}")
        return self.config.num_labels

    def post_init(self) -> None:
        """Initialise the head (the encoder has done its own part) and tie."""
        if self.device.type != "meta":
            for name, child in self.named_children():
                if name != self.base_model_prefix:
                    self.init_weights(child)
        self.tie_weights()

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
        **more: Any,
    ) -> LogitsOutput | tuple[Any, ...]:
        """Encode a padded or packed batch and run the head; see the class for `labels`, and
        `BertModel.forward` for the rest. `more` is what the family's encoder takes besides.

        With `cu_seqlens` labels and logits of tokens are (total, …); labels and logits of sequences stay
        (batch, …).

        Returns:
            loss (if labels are given), logits, hidden_states, attentions.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        if labels is not None:
            self.check_labels(labels, attention_mask)
        encoded = self.encode(
            *(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, head_mask),
            *(output_attentions, output_hidden_states, cu_seqlens, max_seqlen, causal),
            **more,
        )
        logits, padded = self.logits(encoded)
        loss = None if labels is None else self.loss(logits, labels, encoded)
        return self._output(LogitsOutput, (loss, padded), encoded, return_dict)

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """(logits for `loss`, logits to return)."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """The loss, a scalar."""
        raise NotImplementedError

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """Check the labels' values before the encoder is launched."""
        raise NotImplementedError

    # -- parts that heads share ------------------------------------------------------------------------------

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        head_mask: Tensor | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        causal: bool | None,
        **more: Any,
    ) -> Encoded:
        """The packed tokens, encoded; `more` is what the family's encoder takes besides."""
        encoder, by_modules = self.base_model, self._calls_modules()
        if not hasattr(encoder, "has_pooler"):
            raise TypeError(
                f"model: {self.base_model_prefix} was replaced by a {type(encoder).__name__}; expected an "
                "encoder of fastbert, which may be hooked"
            )
        given: dict[str, Any] = dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        asked: dict[str, Any] = dict(
            head_mask=head_mask,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            causal=causal,
        )
        above: Any = self._modules.get("above")
        if above is not None and above.reads_states:
            asked["output_hidden_states"] = True
        if (watched(encoder) or _has_any_global_hook()) and not more:
            # Hooks read the output of transformers' encoder
            inputs, ids = encoder.checked(**given), given.pop("input_ids")
            output = encoder(ids, **given, **asked, return_dict=True)
            pack, states = inputs.packing.pack, output.hidden_states
            encoded = Encoded(
                pack(output.last_hidden_state),
                inputs,
                None if states is None else [pack(s) for s in states],
                self.packed_scores(output, inputs.packing),
                False,
                by_modules,
                output.get("pooler_output"),
                output.get("mems"),
            )
            return encoded if above is None else above(encoded)
        # torch.compile cannot trace a ContextVar, and no graph serves it
        call: Any = encoder if torch.compiler.is_compiling() else served_by.get().get(encoder, encoder)
        first_only = self.reads_first()
        found = call(**given, **asked, **more, first_token_only=first_only, packed=True)
        hidden, states, probs, inputs, *mems = found
        encoded = Encoded(hidden, inputs, states, probs, first_only, by_modules, None, *mems)
        return encoded if above is None else above(encoded)

    def reads_first(self) -> bool:
        """Whether the head reads only the token at position 0 now: nothing looks at its modules' inputs."""
        encoder = self.base_model
        whole = (encoder.has_pooler and pooler_gap(encoder, self.family)) or self._calls_head()
        return self.reads_first_only and not whole and self._modules.get("above") is None

    def packed_scores(self, output: Any, packing: Packing) -> list[Tensor] | None:
        """The probabilities in an encoder's output, as its layers return them on packed tokens, or None."""
        probs = output.attentions
        return None if probs is None else [packing.pack_scores(p) for p in probs]

    def _calls_modules(self) -> bool:
        """Whether the head's linear layers and norms must be called on the padded batch.

        Raises:
            TypeError: a module of the head without code of its own is watched or was replaced.
        """
        found = calls_all() is not None
        for name, child in self._modules.items():
            # `above` calls its own modules
            if name in (self.base_model_prefix, "above"):
                continue
            for path, module in child.named_modules(prefix=name):
                if type(module) is nn.Module:
                    if watched(module):
                        raise TypeError(
                            f"model: {path} has hooks or another forward, but this package never calls it; "
                            f"use one of {', '.join(f'{path}.{n}' for n in module._modules)}, or "
                            "fastbert.accelerate with transformers' model"
                        )
                elif watched(module) or (
                    type(module) not in (Activation, nn.Dropout) and changed(module) is not None
                ):
                    found = True
        return found

    def _output(
        self,
        output_class: Callable[..., ModelOutput],
        values: tuple[Any, ...],
        encoded: Encoded,
        return_dict: bool | None,
    ) -> Any:
        """An output of loss and logits (`values`), hidden states and attentions; see `as_output`."""
        return self.as_output(output_class(*values, encoded.hidden_states, encoded.attentions), return_dict)

    def _calls_head(self) -> bool:
        """Whether the module around a classifier's layers must be called, on whole sequences."""
        if not self.around_classifier:
            return False
        module = part(self, self.around_classifier)
        return type(module) is not FirstTokenHead or watched(module) or calls_all() is not None

    def head_part(self, path: str) -> Any:
        """The head's module at a dotted path: ours, or what a caller has put there.

        Raises:
            TypeError: a module around it was replaced; nothing here would call it.
        """
        module: Any = self
        names = path.split(".")
        for i, name in enumerate(names):
            module = module._modules.get(name)
            if i + 1 < len(names) and type(module) not in (nn.Module, FirstTokenHead):
                above = ".".join(names[: i + 1])
                raise TypeError(
                    f"model: {above} was replaced by a {type(module).__name__}, but this package never calls "
                    "it; replace what is inside, or use fastbert.accelerate with transformers' model"
                )
        return module

    def attach_dropout(self, path: str, key: str) -> None:
        """Create dropout with the probability at the config's `key`, or `hidden_dropout_prob`."""
        p = self.config.get(key)
        attach(self, path, nn.Dropout(self.config.hidden_dropout_prob if p is None else p))

    def pooled(self, encoded: Encoded) -> Tensor:
        """(batch, hidden): the pooler's output."""
        if encoded.pooled is not None:
            encoded.first()  # raises if position 0 is masked
            return encoded.pooled
        return self.base_model.pooled(encoded.inputs, encoded.hidden, encoded.first(), encoded.first_only)

    def attach_classifier(self, head: ClassifierHead, classes: int) -> None:
        """Create the layers of a head that reads one vector per sequence, or each token's."""
        hidden = self.config.hidden_size
        if self.config.get("classifier_pooling") in ("mean", "late", *_LAST):
            self.reads_first_only = False
        if "." in head.out:
            self.around_classifier = head.out.rpartition(".")[0]
            attach(self, self.around_classifier, FirstTokenHead(self._named(head)))
        if head.dense is not None:
            attach(self, head.dense, nn.Linear(hidden, hidden, self.config.has_bias(head.dense)))
        if head.act is not None:
            name = SPELLINGS[self.config.get(head.act_key)] if head.act_key else head.activation
            attach(self, head.act, Activation(name or self.config.head_activation))
        if head.first_dropout is not None:
            self.attach_dropout(*head.first_dropout)
        if head.norm is not None:
            attach(self, head.norm, self.config.norm(hidden))
        if head.dropout:
            self.attach_dropout(head.dropout, head.dropout_key)
        attach(self, head.out, nn.Linear(hidden, classes))

    def _named(self, head: ClassifierHead) -> ClassifierHead:
        """The head with the activation of the config key that names it, where it has no module of its own."""
        if head.act is not None or not head.act_key:
            return head
        return replace(head, activation=SPELLINGS[self.config.get(head.act_key)])

    def classify(self, head: ClassifierHead, encoded: Encoded) -> Tensor:
        """(batch, classes), from the pooler's output or the head's own dense layer on the first token."""
        if self._calls_head():
            encoded.first()  # raises if position 0 is masked
            return part(self, self.around_classifier)(encoded.inputs.packing.grid(encoded.hidden)[0])
        if head.dense is None:
            return self.classes_of(head, self.pooled(encoded))
        if self.config.get("classifier_pooling") == "late":
            scores = encoded.by_token(lambda x: self.classes_of(head, x))
            return pooling(scores, encoded.inputs.packing.cu_seqlens).to(scores.dtype)
        return self.classes_of(head, self.sequence_vectors(encoded))

    def sequence_vectors(self, encoded: Encoded) -> Tensor:
        """(batch, hidden): what a classifier of this config reads: the first token, the last or all."""
        how = self.config.get("classifier_pooling")
        if how in ("mean", "late"):
            return pooling(encoded.hidden, encoded.inputs.packing.cu_seqlens).to(encoded.hidden.dtype)
        return encoded.last() if how in _LAST else encoded.first()

    def classes_of(self, head: ClassifierHead, x: Tensor) -> Tensor:
        """(…, hidden) -> (…, classes), by the head's own layers."""
        dropout = self.head_part(head.dropout) if head.dropout else nn.Identity()
        if head.dense is not None:
            if head.dropout_first:
                x = dropout(x)
            if head.first_dropout is not None:
                x = self.head_part(head.first_dropout[0])(x)
            dense = self.head_part(head.dense)
            if head.act is None:
                x = apply_linear(dense, x, self._named(head).activation)
            else:
                x = apply_activated(dense, self.head_part(head.act), x)
        if head.norm is not None:
            x = apply_norm(self.head_part(head.norm), x)
        return apply_linear(self.head_part(head.out), dropout(x))
