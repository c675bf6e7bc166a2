"""The task heads, by HuggingFace's contract: signatures, parameter names, outputs and losses.

Each class here is the head of every family that has it: `BertForMaskedLM` holds the code,
`RobertaForMaskedLM`, `DistilBertForMaskedLM`, … are the same class under the family's name, made at the end
of the file. What differs between families (names, dropouts, activations, which head reads a pooler) is data
in `families.py`. The `AutoModelFor…` classes choose by `model_type`.

Heads work on packed tokens: the logits of masked tokens are never computed. Where transformers returns
numbers for them, zeros stand here (in question answering: the lowest finite number, so that no softmax or
argmax picks them). Therefore a label on a masked token is an error, and so is a batch whose position 0, which
a classifier reads, is masked out (left padding). Labels of -100 do not count; where none counts the loss is
0, with zero gradients. A head that reads position 0 alone has the last layer computed for that token only, in
training too (`BertModel.forward`, first_token_only).

In training, heads over the vocabulary compute only what the loss asks for: the labelled tokens, chunk by
chunk (`ops/linear_cross_entropy.py`). They return no logits then, unless `output_logits=True` asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.config import EncoderConfig
from fastbert.families import FAMILIES, ClassifierHead, Family
from fastbert.inputs import Inputs
from fastbert.labels import (
    IGNORED,
    check_classes,
    check_positions,
    check_shares,
    one_a_sequence,
    sequence_loss,
)
from fastbert.layers import apply_linear, apply_norm, attach, is_plain, part, pool_first
from fastbert.models import AutoModel, PreTrainedModel, family_classes
from fastbert.ops import checks
from fastbert.ops.cross_entropy import cross_entropy
from fastbert.ops.linear_cross_entropy import linear_cross_entropy
from fastbert.ops.padding import pack
from fastbert.outputs import (
    AlbertPreTrainingOutput,
    LogitsOutput,
    ModelOutput,
    PreTrainingOutput,
    QuestionAnsweringOutput,
)


@dataclass(frozen=True)
class Encoded:
    """What the encoder hands to a head.

    Attributes:
        hidden: (rows, hidden), the kept tokens of all sequences; with `first_only` (batch, hidden), the
            token at position 0 of each, zeros where it is masked.
        inputs: the batch they come from.
        states, probs: all hidden states and attention probabilities, packed; None if not asked for.
        first_only: see `hidden`.
    """

    hidden: Tensor
    inputs: Inputs
    states: list[Tensor] | None
    probs: list[Tensor] | None
    first_only: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, seqlen)."""
        return self.inputs.packing.batch, self.inputs.packing.seqlen

    @property
    def mask(self) -> Tensor | None:
        """(batch, seqlen) bool, None where all tokens are kept."""
        return self.inputs.packing.mask

    def unpack(self, x: Tensor) -> Tensor:
        """(rows, …) -> (batch, seqlen, …), zeros where no token is kept."""
        return self.inputs.packing.unpack(x)

    def packed_labels(self, labels: Tensor) -> Tensor:
        """(batch, seqlen) -> (rows,), checked for shape and device."""
        checks.same_device("labels", labels, self.hidden)
        checks.shape("labels", labels, self.shape)
        if self.inputs.packing.capacity:  # rows behind the kept ones
            labels = labels.masked_fill(self.mask.logical_not(), IGNORED)
        return self.inputs.packing.pack(labels)

    def token_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of packed logits (rows, classes) against labels (batch, seqlen)."""
        return cross_entropy(logits, self.packed_labels(labels), ignore_index=IGNORED)

    def labelled(self, labels: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
        """Hidden states and labels of the `count` tokens that have one; of all rows where it is not known."""
        labels = self.packed_labels(labels)
        if count is None or count == labels.shape[0]:
            return self.hidden, labels
        at = torch.nonzero_static(labels != IGNORED, size=count).squeeze(1)
        return pack(self.hidden.unsqueeze(0), at), pack(labels.unsqueeze(0), at)

    def first(self) -> Tensor:
        """(batch, hidden): the token at position 0 of each sequence; zeros where the whole sequence is
        masked.
        """
        if self.inputs.headless is not None:
            raise ValueError(
                f"attention_mask: position 0 of sequence {self.inputs.headless}, which this head reads, is "
                "masked out; expected the first token to be kept (pad on the right)"
            )
        return self.hidden if self.first_only else self.inputs.packing.first_rows(self.hidden)

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """The embedding output and every layer's output, padded."""
        return None if self.states is None else tuple(self.unpack(s) for s in self.states)

    @property
    def attentions(self) -> tuple[Tensor, ...] | None:
        """Every layer's probabilities, padded."""
        return None if self.probs is None else tuple(self.inputs.packing.unpack_scores(p) for p in self.probs)


class TaskModel(PreTrainedModel):
    """An encoder with a head. Heads with one `labels` argument define `logits` and `loss`; `forward` is this
    one.
    """

    model_types: ClassVar[Sequence[str]] = tuple(FAMILIES)  # the families that have this head
    reads_first_only: ClassVar[bool] = False  # the head reads the token at position 0 and no other

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        if self.config.model_type not in self.model_types:
            raise ValueError(
                f"config model_type: {self.config.model_type!r} has no head {self.task!r}; "
                f"expected one of {', '.join(self.model_types)}"
            )
        encoder = AutoModel.class_for(self.config)
        self.add_module(
            self.base_model_prefix, encoder(self.config, add_pooling_layer=self.reads_pooler(self.family))
        )

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """Whether the head reads the pooler's output, so that the encoder needs one."""
        return False

    @property
    def num_labels(self) -> int:
        """Number of classes, from the config."""
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
    ) -> LogitsOutput | tuple:
        """Encode a padded batch and run the head; see the class for `labels`, and `BertModel.forward` for the
        rest.

        Returns:
            loss (if labels are given), logits, hidden_states, attentions.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        if labels is not None:
            self.check_labels(labels, attention_mask)
        encoded = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds,
            head_mask, output_attentions, output_hidden_states,
        )  # fmt: skip
        logits, padded = self.logits(encoded)
        loss = None if labels is None else self.loss(logits, labels, encoded)
        return self.answer(LogitsOutput(loss, padded, encoded.hidden_states, encoded.attentions), return_dict)

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """(what `loss` reads, what is returned)."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """The loss, a scalar."""
        raise NotImplementedError

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """Look at the labels' values, before the encoder is launched."""
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
    ) -> Encoded:
        """The packed tokens, encoded."""
        hidden, states, probs, inputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            head_mask=head_mask,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            first_token_only=self.reads_first_only,
            packed=True,
        )
        return Encoded(hidden, inputs, states, probs, self.reads_first_only)

    def answer(self, output: ModelOutput, return_dict: bool | None) -> Any:
        """`output`, or its tuple."""
        return (
            output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()
        )

    def dropout(self, x: Tensor, key: str | None) -> Tensor:
        """Dropout with the probability the config gives under `key`; `hidden_dropout_prob` where it gives
        none.
        """
        if key is None or not self.training:
            return x
        p = self.config.get(key)
        return F.dropout(x, self.config.hidden_dropout_prob if p is None else p)

    def pooled(self, encoded: Encoded) -> Tensor:
        """(batch, hidden): the pooler's output."""
        return pool_first(part(self.base_model, self.family.pooler), encoded.first())

    def attach_classifier(self, head: ClassifierHead, classes: int) -> None:
        """Make the layers of a head that reads one vector a sequence."""
        hidden = self.config.hidden_size
        if head.dense is not None:
            attach(self, head.dense, nn.Linear(hidden, hidden))
        attach(self, head.out, nn.Linear(hidden, classes))

    def classify(self, head: ClassifierHead, encoded: Encoded) -> Tensor:
        """(batch, classes) from the pooler's output, or from the first token through the head's own dense
        layer.
        """
        if head.dense is None:
            x = self.pooled(encoded)
        else:
            x = encoded.first()
            if head.dropout_first:
                x = self.dropout(x, head.dropout_key)
            if head.activation == "tanh":
                x = torch.tanh(apply_linear(part(self, head.dense), x))
            else:
                x = apply_linear(part(self, head.dense), x, head.activation)
        return apply_linear(part(self, head.out), self.dropout(x, head.dropout_key))


# -- language modelling --------------------------------------------------------------------------------------


class LMModel(TaskModel):
    """A model with the masked-LM head: act(dense(x)) -> LayerNorm -> decoder, tied to the word embeddings."""

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        config, head = self.config, self.family.lm_head
        width = config.embedding_width
        attach(self, head.dense, nn.Linear(config.hidden_size, width))
        attach(self, head.norm, nn.LayerNorm(width, eps=config.norm_eps))
        attach(self, head.decoder, nn.Linear(width, config.vocab_size))
        if head.bias is not None:
            owner, _, name = head.bias.rpartition(".")
            self.get_submodule(owner).register_parameter(name, nn.Parameter(torch.zeros(config.vocab_size)))

    def tied_weights(self) -> dict[str, str]:
        """The decoder's weight is the word embeddings', its bias the head's own, unless the config unties
        them.
        """
        head = self.family.lm_head
        if not self.config.tie_word_embeddings:
            return {}
        tied = {f"{head.decoder}.weight": f"{self.base_model_prefix}.{self.family.word_table}.weight"}
        if head.bias is not None:
            tied[f"{head.decoder}.bias"] = head.bias
        return tied

    def vocabulary_parameters(self) -> list[str]:
        """Names of the parameters with one row a token."""
        head = self.family.lm_head
        own = [f"{head.decoder}.weight", f"{head.decoder}.bias", head.bias]
        return super().vocabulary_parameters() + [name for name in own if name is not None]

    def get_output_embeddings(self) -> nn.Module:
        """The decoder."""
        return part(self, self.family.lm_head.decoder)

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the decoder; its bias becomes the head's.

        Raises:
            ValueError: the config ties the decoder to the word embeddings, and `value` holds another weight.
        """
        if self.config.tie_word_embeddings and value.weight is not self.get_input_embeddings().weight:
            raise ValueError(
                "value: its weight is not the word embeddings', to which config tie_word_embeddings = True "
                "ties it; set that to False, or replace both by set_input_embeddings"
            )
        head = self.family.lm_head
        attach(self, head.decoder, value)
        if head.bias is not None and getattr(value, "bias", None) is not None:
            owner, _, name = head.bias.rpartition(".")
            setattr(self.get_submodule(owner), name, value.bias)

    def transform(self, hidden: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, embedding size): what the decoder reads."""
        head = self.family.lm_head
        activation = head.activation or self.config.activation_name
        return apply_norm(part(self, head.norm), apply_linear(part(self, head.dense), hidden, activation))

    def lm_logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, vocab_size)."""
        return apply_linear(part(self, self.family.lm_head.decoder), self.transform(hidden))

    def lm_loss(self, encoded: Encoded, labels: Tensor, count: int | None) -> Tensor:
        """Mean cross-entropy of the labelled tokens, of which there are `count` if that is known."""
        hidden, labels = encoded.labelled(labels, count)
        x, decoder = self.transform(hidden), part(self, self.family.lm_head.decoder)
        if is_plain(decoder, nn.Linear):
            return linear_cross_entropy(
                x, decoder.weight, decoder.bias, labels, ignore_index=IGNORED, labelled=count
            )
        return cross_entropy(apply_linear(decoder, x), labels, ignore_index=IGNORED)

    def words(
        self, encoded: Encoded, labels: Tensor | None, count: int | None, with_logits: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """(padded logits, loss), each None where not asked for."""
        if not with_logits:
            return None, self.lm_loss(encoded, labels, count)
        logits = self.lm_logits(encoded.hidden)
        return encoded.unpack(logits), None if labels is None else encoded.token_loss(logits, labels)

    def gives_logits(self, output_logits: bool | None, has_loss: bool) -> bool:
        """What `output_logits` means in this call."""
        if output_logits is None:
            return not (self.training and has_loss)
        if not isinstance(output_logits, bool):
            raise TypeError(f"output_logits: expected True, False or None, got {output_logits!r}")
        if not output_logits and not has_loss:
            raise ValueError("output_logits: False leaves only the loss; there is none without all labels")
        return output_logits


class BertForMaskedLM(LMModel):
    """Predicts masked tokens.

    Labels: (batch, seqlen), token ids, -100 where nothing is to be predicted; loss: mean cross-entropy of the
    labelled tokens. Logits: (batch, seqlen, vocab_size), zeros at masked tokens; None in training with
    labels, where they are computed for the labelled tokens only (`output_logits`).

    Source: Devlin et al. 2018, "BERT", sec. 3.1, task 1.
    """

    task = "ForMaskedLM"

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
        output_logits: bool | None = None,
    ) -> LogitsOutput | tuple:
        """Encode a padded batch and run the head; see the class for `labels`, and `BertModel.forward` for the
        rest.

        Args:
            output_logits: True gives the logits, False only the loss; None gives them but in training with
                labels.

        Returns:
            loss (if labels are given), logits, hidden_states, attentions.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        with_logits, count = self.gives_logits(output_logits, labels is not None), None
        if labels is not None:
            count = check_classes("labels", labels, self.config.vocab_size, attention_mask)
        encoded = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds,
            head_mask, output_attentions, output_hidden_states,
        )  # fmt: skip
        logits, loss = self.words(encoded, labels, count, with_logits)
        output = LogitsOutput(loss, logits, encoded.hidden_states, encoded.attentions)
        return self.answer(output, return_dict)


class BertForPreTraining(LMModel):
    """Masked tokens and next sentence together.

    Labels: `labels` as in BertForMaskedLM, `next_sentence_label` as in BertForNextSentencePrediction; there
    is a loss, the sum of both, only where both are given. prediction_logits: (batch, seqlen, vocab_size),
    zeros at masked tokens, None in training with both labels (`output_logits`); seq_relationship_logits:
    (batch, 2).

    Source: Devlin et al. 2018, "BERT", sec. 3.1.
    """

    task = "ForPreTraining"
    model_types = ("bert", "ernie")
    pair_label: ClassVar[str] = "next_sentence_label"  # what `forward` calls the labels of the pair
    output_class: ClassVar[type[ModelOutput]] = PreTrainingOutput

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        attach(self, self.family.next_sentence, nn.Linear(self.config.hidden_size, 2))
        self.post_init()

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """Always."""
        return True

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
        output_logits: bool | None = None,
    ) -> PreTrainingOutput | tuple:
        """Encode a padded batch and run both heads; see the class.

        Args:
            output_logits: as in `BertForMaskedLM.forward`, of the prediction_logits.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        both = labels is not None and next_sentence_label is not None
        with_logits, count = self.gives_logits(output_logits, both), None
        if labels is not None:
            count = check_classes("labels", labels, self.config.vocab_size, attention_mask)
        if next_sentence_label is not None:
            check_classes(self.pair_label, next_sentence_label, 2)
        encoded = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds,
            head_mask, output_attentions, output_hidden_states,
        )  # fmt: skip
        words, words_loss = self.words(encoded, labels, count, with_logits)
        pooled = self.dropout(self.pooled(encoded), self.family.next_sentence_dropout_key)
        pair = apply_linear(part(self, self.family.next_sentence), pooled)
        loss = (
            None if next_sentence_label is None else sequence_loss(self.pair_label, pair, next_sentence_label)
        )
        output = self.output_class(
            words_loss + loss if both else None, words, pair, encoded.hidden_states, encoded.attentions
        )
        return self.answer(output, return_dict)


class AlbertForPreTraining(BertForPreTraining):
    """Masked tokens and the order of two segments together.

    Labels: `labels` as in BertForMaskedLM, `sentence_order_label` (batch,): 0 in order, 1 swapped; there is a
    loss, the sum of both, only where both are given. prediction_logits: (batch, seqlen, vocab_size), zeros at
    masked tokens, None in training with both labels (`output_logits`); sop_logits: (batch, 2).

    Source: Lan et al. 2019, "ALBERT", sec. 3.1.
    """

    model_type = "albert"
    model_types = ("albert",)
    pair_label = "sentence_order_label"
    output_class = AlbertPreTrainingOutput

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
        output_logits: bool | None = None,
    ) -> AlbertPreTrainingOutput | tuple:
        """Encode a padded batch and run both heads; see the class.

        Args:
            output_logits: as in `BertForMaskedLM.forward`, of the prediction_logits.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        return super().forward(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds,
            labels, sentence_order_label, head_mask=head_mask, output_attentions=output_attentions,
            output_hidden_states=output_hidden_states, return_dict=return_dict, output_logits=output_logits,
        )  # fmt: skip


class ElectraForPreTraining(TaskModel):
    """The discriminator: tells which tokens were replaced.

    Labels: (batch, seqlen), 0 original, 1 replaced; those of masked tokens do not count; loss: mean binary
    cross-entropy of the kept tokens. Logits: (batch, seqlen), zeros at masked tokens.

    Source: Clark et al. 2020, "ELECTRA", sec. 2.
    """

    task = "ForPreTraining"
    model_type = "electra"
    model_types = ("electra",)

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        hidden = self.config.hidden_size
        attach(self, "discriminator_predictions.dense", nn.Linear(hidden, hidden))
        attach(self, "discriminator_predictions.dense_prediction", nn.Linear(hidden, 1))
        self.post_init()

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """Numbers from 0 to 1 wherever a token is kept."""
        check_shares("labels", labels, attention_mask)

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Packed, and padded."""
        head = self.discriminator_predictions
        x = apply_linear(head.dense, encoded.hidden, self.config.activation_name)
        logits = apply_linear(head.dense_prediction, x).squeeze(1)
        return logits, encoded.unpack(logits)

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """Binary cross-entropy of the kept tokens; 0 where there are none."""
        checks.same_device("labels", labels, logits)
        checks.shape("labels", labels, encoded.shape)
        compute = checks.compute_dtype(logits)
        packing = encoded.inputs.packing
        losses = F.binary_cross_entropy_with_logits(
            logits.to(compute), packing.pack(labels).to(compute), reduction="none"
        )
        if packing.capacity:  # rows behind the kept ones
            keep = packing.pack(packing.mask)
            return torch.where(keep, losses, 0.0).sum() / keep.sum().clamp_min(1)
        return losses.sum() / max(losses.shape[0], 1)


# -- one vector a sequence -----------------------------------------------------------------------------------


class BertForNextSentencePrediction(TaskModel):
    """Tells whether the second segment follows the first.

    Labels: (batch,), 0 it follows, 1 it is random; loss: mean cross-entropy. Logits: (batch, 2).

    Source: Devlin et al. 2018, "BERT", sec. 3.1, task 2.
    """

    task = "ForNextSentencePrediction"
    model_types = ("bert", "ernie")
    reads_first_only = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        attach(self, self.family.next_sentence, nn.Linear(self.config.hidden_size, 2))
        self.post_init()

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """Always."""
        return True

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """0 or 1."""
        check_classes("labels", labels, 2)

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """(batch, 2), twice."""
        logits = apply_linear(part(self, self.family.next_sentence), self.pooled(encoded))
        return logits, logits

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """Cross-entropy."""
        return sequence_loss("labels", logits, labels)


class BertForSequenceClassification(TaskModel):
    """Classifies a sequence, or predicts numbers for it.

    The loss goes by config `problem_type`; where that is None, by `num_labels` and the labels' dtype at each
    call:

    - regression (one label): mean squared error; labels (batch,), or (batch, num_labels).
    - single_label_classification (integer labels): mean cross-entropy; labels (batch,), -100 does not count.
    - multi_label_classification (other labels): mean binary cross-entropy; labels (batch, num_labels).

    Logits: (batch, num_labels).

    Source: Devlin et al. 2018, "BERT", sec. 4.1.
    """

    task = "ForSequenceClassification"
    reads_first_only = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.attach_classifier(self.family.classifier, self.num_labels)
        self.post_init()

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """Where the head has no dense layer of its own."""
        return family.classifier.dense is None

    def problem(self, labels: Tensor) -> str:
        """The config's problem type, or the one these labels mean."""
        if self.config.problem_type is not None:
            return self.config.problem_type
        if self.num_labels == 1:
            return "regression"
        return (
            "single_label_classification"
            if labels.dtype in (torch.int64, torch.int32)
            else "multi_label_classification"
        )

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """Classes, or numbers."""
        _check_tensor("labels", labels)
        if self.problem(labels) == "single_label_classification":
            check_classes("labels", labels, self.num_labels)
        elif labels.dtype.is_complex:
            raise TypeError(f"labels: expected real numbers, got {labels.dtype}")

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """(batch, num_labels), twice."""
        logits = self.classify(self.family.classifier, encoded)
        return logits, logits

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """By the problem type; see the class."""
        problem = self.problem(labels)
        if problem == "single_label_classification":
            return sequence_loss("labels", logits, labels)
        checks.same_device("labels", labels, logits)
        if problem == "regression" and self.num_labels == 1:
            one_a_sequence("labels", labels, logits.shape[0], logits)
            labels = labels.reshape(-1, 1)
        else:
            checks.shape("labels", labels, tuple(logits.shape))
        compute = checks.compute_dtype(logits)
        logits, labels = logits.to(compute), labels.to(compute)
        if problem == "regression":
            return F.mse_loss(logits, labels)
        return F.binary_cross_entropy_with_logits(logits, labels)


class BertForMultipleChoice(TaskModel):
    """Chooses among several sequences.

    Inputs have a dimension more: input_ids, attention_mask, token_type_ids and position_ids (batch, choices,
    seqlen), inputs_embeds (batch, choices, seqlen, embedding size). Labels: (batch,), the right choice; loss:
    mean cross-entropy. Logits: (batch, choices). hidden_states and attentions have batch x choices sequences.

    Source: Devlin et al. 2018, "BERT", sec. 4.4.
    """

    task = "ForMultipleChoice"
    reads_first_only = True

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        if self.config.model_type == "electra":
            _check_summary(self.config)
        self.attach_classifier(self.family.choice, 1)
        self.post_init()

    @staticmethod
    def reads_pooler(family: Family) -> bool:
        """Where the head has no dense layer of its own."""
        return family.choice.dense is None

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
    ) -> LogitsOutput | tuple:
        """Encode all choices as one batch and compare them; see the class.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        named = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        choices, flat = None, {}
        for name, t in named.items():
            if t is not None:
                _check_tensor(name, t)
                dims = 4 if name == "inputs_embeds" else 3
                if t.dim() != dims or t.shape[1] == 0:
                    shape = "(batch, choices, seqlen" + (", embedding size)" if dims == 4 else ")")
                    raise ValueError(
                        f"{name}: expected shape {shape} with choices >= 1, got {tuple(t.shape)}"
                    )
                if name in ("input_ids", "inputs_embeds"):
                    choices = t.shape[1]
                flat[name] = t.flatten(0, 1)
        if labels is not None and choices is not None:
            check_classes("labels", labels, choices)
        encoded = self.encode(
            *(flat.get(name) for name in named), head_mask, output_attentions, output_hidden_states
        )
        logits = self.classify(self.family.choice, encoded).reshape(-1, choices)
        loss = None if labels is None else sequence_loss("labels", logits, labels)
        return self.answer(LogitsOutput(loss, logits, encoded.hidden_states, encoded.attentions), return_dict)


def _check_tensor(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")


def _check_summary(config: EncoderConfig) -> None:
    """ELECTRA's way to one vector a sequence has options; published checkpoints use one setting."""
    for key, expected in (
        ("summary_type", "first"),
        ("summary_use_proj", True),
        ("summary_activation", "gelu"),
    ):
        if config.get(key, expected) != expected:
            raise ValueError(
                f"config {key}: only {expected!r} is supported in this head, got {config.get(key)!r}"
            )
    for key in ("summary_first_dropout", "summary_proj_to_labels"):
        if config.get(key):
            raise ValueError(f"config {key}: not supported in this head, got {config.get(key)!r}")


# -- one vector a token --------------------------------------------------------------------------------------


class BertForTokenClassification(TaskModel):
    """Classifies every token.

    Labels: (batch, seqlen), -100 where a token does not count; loss: mean cross-entropy of the labelled
    tokens. Logits: (batch, seqlen, num_labels), zeros at masked tokens.

    Source: Devlin et al. 2018, "BERT", sec. 5.3.
    """

    task = "ForTokenClassification"

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.classifier = nn.Linear(self.config.hidden_size, self.num_labels)
        self.post_init()

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """Classes, none of them on a masked token."""
        check_classes("labels", labels, self.num_labels, attention_mask)

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Packed, and padded."""
        logits = apply_linear(self.classifier, self.dropout(encoded.hidden, self.family.token_dropout_key))
        return logits, encoded.unpack(logits)

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """Cross-entropy of the labelled tokens."""
        return encoded.token_loss(logits, labels)


class BertForQuestionAnswering(TaskModel):
    """Finds the span of tokens that answers a question.

    Labels: start_positions and end_positions, (batch,), below 0 taken as 0, from seqlen on not counted; there
    is a loss, the mean of both cross-entropies over the kept tokens, only where both are given. start_logits
    and end_logits: (batch, seqlen), the lowest finite number at masked tokens.

    Source: Devlin et al. 2018, "BERT", sec. 4.2.
    """

    task = "ForQuestionAnswering"

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        if self.num_labels != 2:
            raise ValueError(f"config num_labels: expected 2, start and end, got {self.num_labels}")
        self.qa_outputs = nn.Linear(self.config.hidden_size, 2)
        self.post_init()

    def forward(
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
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> QuestionAnsweringOutput | tuple:
        """Encode a padded batch and score every token as start and as end; see the class.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        positions = {"start_positions": start_positions, "end_positions": end_positions}
        for name, p in positions.items():
            if p is not None:
                check_positions(name, p, attention_mask)
        encoded = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds,
            head_mask, output_attentions, output_hidden_states,
        )  # fmt: skip
        logits = apply_linear(self.qa_outputs, self.dropout(encoded.hidden, self.family.qa_dropout_key))
        logits = encoded.unpack(logits)
        if encoded.mask is not None:
            logits = logits.masked_fill(encoded.mask.logical_not()[..., None], torch.finfo(logits.dtype).min)
        scores = [s.contiguous() for s in logits.unbind(-1)]
        batch, seqlen = encoded.shape
        losses = []
        for (name, p), s in zip(positions.items(), scores, strict=True):
            if p is not None:
                one_a_sequence(name, p, batch, s)
                losses.append(cross_entropy(s, p.reshape(-1).clamp(0, seqlen), ignore_index=seqlen))
        loss = (losses[0] + losses[1]) / 2 if len(losses) == 2 else None
        return self.answer(
            QuestionAnsweringOutput(loss, *scores, encoded.hidden_states, encoded.attentions), return_dict
        )


# -- Auto classes --------------------------------------------------------------------------------------------


class AutoTaskModel(PreTrainedModel):
    """Chooses the family's class by `model_type`: `from_pretrained(path)`, `from_config(config)`."""

    def __init__(self, config: EncoderConfig):
        raise TypeError(f"{type(self).__name__}: use from_pretrained(…) or from_config(…)")

    @classmethod
    def class_for(cls, config: EncoderConfig) -> type[PreTrainedModel]:
        """The class of `config`'s family.

        Raises:
            ValueError: the family has no such head.
        """
        found = globals().get(config.family.class_prefix + cls.task)
        if found is None:
            have = [m for m, family in FAMILIES.items() if family.class_prefix + cls.task in globals()]
            raise ValueError(
                f"config model_type: {config.model_type!r} has no head {cls.task!r}; "
                f"expected one of {', '.join(have)}"
            )
        return found


class AutoModelForMaskedLM(AutoTaskModel):
    """Chooses the masked-LM class by `model_type`."""

    task = "ForMaskedLM"


class AutoModelForPreTraining(AutoTaskModel):
    """Chooses the pre-training class by `model_type`; the masked-LM class where the family has no other."""

    task = "ForPreTraining"

    @classmethod
    def class_for(cls, config: EncoderConfig) -> type[PreTrainedModel]:
        """The class of `config`'s family."""
        prefix = config.family.class_prefix
        return globals().get(prefix + cls.task) or globals()[prefix + BertForMaskedLM.task]


class AutoModelForNextSentencePrediction(AutoTaskModel):
    """Chooses the next-sentence class by `model_type`."""

    task = "ForNextSentencePrediction"


class AutoModelForSequenceClassification(AutoTaskModel):
    """Chooses the sequence-classification class by `model_type`."""

    task = "ForSequenceClassification"


class AutoModelForMultipleChoice(AutoTaskModel):
    """Chooses the multiple-choice class by `model_type`."""

    task = "ForMultipleChoice"


class AutoModelForTokenClassification(AutoTaskModel):
    """Chooses the token-classification class by `model_type`."""

    task = "ForTokenClassification"


class AutoModelForQuestionAnswering(AutoTaskModel):
    """Chooses the question-answering class by `model_type`."""

    task = "ForQuestionAnswering"


# RobertaForMaskedLM, …, MPNetForQuestionAnswering, ErnieForPreTraining
for _head in (
    BertForMaskedLM,
    BertForPreTraining,
    BertForNextSentencePrediction,
    BertForSequenceClassification,
    BertForMultipleChoice,
    BertForTokenClassification,
    BertForQuestionAnswering,
):
    _others = [model_type for model_type in _head.model_types if model_type != "bert"]
    globals().update(family_classes(_head, _others, __name__))
del _head, _others
