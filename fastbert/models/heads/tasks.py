"""The task heads, by HuggingFace's contract: signatures, parameter names, outputs and losses.

Each class is the head of every family that has it: `BertForMaskedLM` holds the code, `RobertaForMaskedLM`,
`DistilBertForMaskedLM`, … are the same class under the family's name, at the end of the file. What
differs between families (names, dropouts, activations, which head reads a pooler) is data in `families.py`.
The `AutoModelFor…` classes choose by `model_type`. The heads over the vocabulary are in
`vocabulary_heads.py`, what all share in `task_model.py`.

Heads work on packed tokens: the logits of masked tokens are never computed. Where transformers returns
numbers for them, zeros stand here (in question answering: the lowest finite number, so that no softmax or
argmax picks them). Therefore a label on a masked token is an error, and so is a batch whose position 0, which
a classifier reads, is masked out (left padding). Labels of -100 do not count; where none counts the loss is
0, with zero gradients. A head that reads position 0 alone has the last layer computed for that token only, in
training too (`BertModel.forward`, first_token_only).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.layers.encoder import apply_linear, attach, part
from fastbert.models.bert import PreTrainedModel
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES, Family
from fastbert.models.heads.task_model import Encoded, TaskModel, unscored
from fastbert.models.heads.vocabulary import AlbertForPreTraining as AlbertForPreTraining
from fastbert.models.heads.vocabulary import BertForMaskedLM, BertForPreTraining
from fastbert.models.labels import check_classes, check_positions, check_shares, one_a_sequence, sequence_loss
from fastbert.models.outputs import LogitsOutput, QuestionAnsweringOutput
from fastbert.ops import checks
from fastbert.ops.cross_entropy import cross_entropy

if TYPE_CHECKING:
    from fastbert.models.calls import SpanCall

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
    and end_logits: (batch, seqlen), half the lowest finite number at masked tokens.

    Source: Devlin et al. 2018, "BERT", sec. 4.2.
    """

    task = "ForQuestionAnswering"
    __call__: SpanCall

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
        scores = [s.contiguous() for s in logits.unbind(-1)]
        if encoded.mask is not None:
            scores = [unscored(s, encoded.mask) for s in scores]
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


# -- Auto classes --------------------------------------------------------------------------------------------


class AutoTaskModel(PreTrainedModel):
    """Chooses the family's class by `model_type`: `from_pretrained(path)`, `from_config(config)`.

    Where all these classes extend one of BERT's, so does the Auto class: for a type checker `from_pretrained`
    returns an instance of the class on which it is called.
    """

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


class AutoModelForMaskedLM(AutoTaskModel, BertForMaskedLM):
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


class AutoModelForNextSentencePrediction(AutoTaskModel, BertForNextSentencePrediction):
    """Chooses the next-sentence class by `model_type`."""

    task = "ForNextSentencePrediction"


class AutoModelForSequenceClassification(AutoTaskModel, BertForSequenceClassification):
    """Chooses the sequence-classification class by `model_type`."""

    task = "ForSequenceClassification"


class AutoModelForMultipleChoice(AutoTaskModel, BertForMultipleChoice):
    """Chooses the multiple-choice class by `model_type`."""

    task = "ForMultipleChoice"


class AutoModelForTokenClassification(AutoTaskModel, BertForTokenClassification):
    """Chooses the token-classification class by `model_type`."""

    task = "ForTokenClassification"


class AutoModelForQuestionAnswering(AutoTaskModel, BertForQuestionAnswering):
    """Chooses the question-answering class by `model_type`."""

    task = "ForQuestionAnswering"


# -- the families' heads: BERT's, bound to a model_type ------------------------------------------------------


class RobertaForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "roberta"


class RobertaForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "roberta"


class RobertaForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "roberta"


class RobertaForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "roberta"


class RobertaForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "roberta"


class XLMRobertaForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "xlm-roberta"


class XLMRobertaForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "xlm-roberta"


class XLMRobertaForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "xlm-roberta"


class XLMRobertaForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "xlm-roberta"


class XLMRobertaForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "xlm-roberta"


class CamembertForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "camembert"


class CamembertForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "camembert"


class CamembertForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "camembert"


class CamembertForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "camembert"


class CamembertForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "camembert"


class DistilBertForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "distilbert"


class DistilBertForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "distilbert"


class DistilBertForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "distilbert"


class DistilBertForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "distilbert"


class DistilBertForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "distilbert"


class ElectraForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "electra"


class ElectraForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "electra"


class ElectraForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "electra"


class ElectraForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "electra"


class ElectraForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "electra"


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


class ErnieForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "ernie"


class ErnieForPreTraining(BertForPreTraining):
    """See `BertForPreTraining`."""

    model_type = "ernie"


class ErnieForNextSentencePrediction(BertForNextSentencePrediction):
    """See `BertForNextSentencePrediction`."""

    model_type = "ernie"


class ErnieForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "ernie"


class ErnieForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "ernie"


class ErnieForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "ernie"


class ErnieForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "ernie"


class MPNetForMaskedLM(BertForMaskedLM):
    """See `BertForMaskedLM`."""

    model_type = "mpnet"


class MPNetForSequenceClassification(BertForSequenceClassification):
    """See `BertForSequenceClassification`."""

    model_type = "mpnet"


class MPNetForMultipleChoice(BertForMultipleChoice):
    """See `BertForMultipleChoice`."""

    model_type = "mpnet"


class MPNetForTokenClassification(BertForTokenClassification):
    """See `BertForTokenClassification`."""

    model_type = "mpnet"


class MPNetForQuestionAnswering(BertForQuestionAnswering):
    """See `BertForQuestionAnswering`."""

    model_type = "mpnet"
