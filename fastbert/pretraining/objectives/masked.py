"""Masked-language modelling, with or without a class per pair of sentences. BERT's, RoBERTa's and ALBERT's.

An objective has two halves. `Objective` makes examples, of arrays alone; worker processes run it. `Losses`
(training/module.py) is trained: a model, and heads that only this objective needs.

    loss = mean over the predicted tokens of -log p(token)  +  mean over the pairs of -log p(class)

The training loop takes both means over all tokens and pairs of a step (training/loop.py).

Source: Devlin et al. 2018, "BERT", sec. 3.1; Liu et al. 2019, "RoBERTa"; Lan et al. 2019, "ALBERT".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from fastbert.layers.linear import apply_linear
from fastbert.layers.modules import part
from fastbert.models.base import class_of
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.masked_lm import MaskedLMModel
from fastbert.models.heads.pretraining import BertForPreTraining
from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.ops.cross_entropy import cross_entropy
from fastbert.pretraining.formats import Example, Format, Plan
from fastbert.pretraining.masking import IGNORED, SPAN_UNITS, Masked, Masking, Vocabulary
from fastbert.training.draws import Draws, key_of
from fastbert.training.module import Losses, Results
from fastbert.training.stream import Batch
from fastbert.training.work import encoder_work, vocabulary_work

_ROWS = 4096  # rows whose logits are in memory at a time, to count right predictions


@dataclass(frozen=True)
class MaskedExample:
    """A sequence with its masks.

    Attributes:
        masked: what the model sees, and its labels.
        token_types: (length,) int64.
        label: class of the pair of sentences; -100 for none.
        more: what an objective adds.
    """

    masked: Masked
    token_types: np.ndarray
    label: int
    more: Any = None


@dataclass(frozen=True)
class Objective:
    """Examples of masked-language modelling; see the module.

    Attributes:
        format: which sentences make a sequence.
        masking: which tokens are predicted.
        seed: seed of the masks.
        static: None: new masks in every epoch. n: the masks repeat after n epochs, and so do the pairs of
            sentences, as with Google's `dupe_factor`.
    """

    format: Format[Any]
    masking: Masking = field(default_factory=Masking)
    seed: int = 0
    static: int | None = None

    causal: ClassVar[bool] = False
    token_loss: ClassVar[str] = "mlm"  # the name of the loss of tokens
    of_model: ClassVar[tuple[str, ...]] = ()  # attributes on which no example depends

    def __post_init__(self) -> None:
        if self.static is not None and (type(self.static) is not int or self.static < 1):
            raise ValueError(f"static: expected an integer >= 1 or None, got {self.static!r}")

    def check_no_pairs(self, what: str) -> None:
        """Raise ValueError if the format has classes of pairs, for which `what` has no loss."""
        if self.format.num_labels:
            raise ValueError(
                f"format: {what} have no loss for the {self.format.num_labels} classes of a pair; "
                "expected a format without pairs"
            )

    # -- examples: training.stream.Source --------------------------------------------------------------------

    @property
    def hash(self) -> str:
        """Hash of all that examples depend on."""
        described = {key: value for key, value in vars(self.format).items() if key != "corpus"}
        parts = [type(self).__name__, type(self.format).__name__, described, asdict(self.masking)]
        known = ("format", "masking", *self.of_model)
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in known}
        text = json.dumps([*parts, own], sort_keys=True, default=str)
        return f"{key_of(self.format.corpus.hash, text):032x}"

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The ids that masking writes."""
        corpus = self.format.corpus
        return Vocabulary(corpus.vocab_size, corpus.special_ids["mask"], tuple(corpus.special_ids.values()))

    def plan(self, epoch: int) -> Plan:
        """The sequences of an epoch."""
        return self.format.plan(self._epoch(epoch))

    def example(self, plan: Plan, epoch: int, index: int) -> MaskedExample:
        """One sequence with its masks."""
        draws = Draws(key_of(self.format.corpus.hash, self.seed, "mask"), self._epoch(epoch), index)
        return self.mask(self.format.build(plan, index), draws)

    def mask(self, example: Example, draws: Draws) -> MaskedExample:
        """Draw the masks of a sequence."""
        spans = example.spans if self.masking.unit in SPAN_UNITS else None
        masked = self.masking(example.ids, example.word_starts, self.vocabulary, draws, spans)
        return MaskedExample(masked, example.token_types, example.label)

    def collate(self, examples: Sequence[MaskedExample]) -> Batch:
        """Pack sequences."""
        lengths = np.array([len(each.masked.ids) for each in examples], np.int32)
        labels = np.concatenate([each.masked.labels for each in examples])
        inputs = {
            "input_ids": np.concatenate([each.masked.ids for each in examples]),
            "token_type_ids": np.concatenate([each.token_types for each in examples]),
            "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            "max_seqlen": int(lengths.max()),
            "labels": labels,
            "labelled": int((labels != IGNORED).sum()),
        }
        counts = {self.token_loss: inputs["labelled"]}
        if self.format.num_labels:
            inputs["sentence_labels"] = np.array([each.label for each in examples])
            counts["sentence"] = len(examples)
        return Batch(inputs, counts, lengths)

    def _epoch(self, epoch: int) -> int:
        return epoch if self.static is None else epoch % self.static

    # -- the model -------------------------------------------------------------------------------------------

    def model(self, config: EncoderConfig) -> TaskModel:
        """A new model for this objective, of the config's family."""
        with_pairs = class_of(config.family, "ForPreTraining")
        if self.format.num_labels and with_pairs is not None and issubclass(with_pairs, BertForPreTraining):
            return with_pairs(config)
        # every family has it
        return cast(type[MaskedLMModel], class_of(config.family, "ForMaskedLM"))(config)

    def losses(self, model: TaskModel) -> Losses:
        """The module that is trained."""
        return MaskedLosses(model, self.format.num_labels, self.causal, self.token_loss)


def encode(model: TaskModel, inputs: dict[str, Any], causal: bool = False) -> Encoded:
    """Encode the packed tokens of a batch.

    Args:
        model: the encoder and its head.
        inputs: inputs of a `Batch`, as tensors; `inputs_embeds`, if there, in place of the ids.
        causal: whether a token attends only to itself and earlier tokens.
    """
    has_types = model.config.family.segments and model.config.type_vocab_size > 1
    types = inputs["token_type_ids"] if has_types else None
    lengths = inputs["cu_seqlens"], inputs["max_seqlen"]
    given = inputs["input_ids"], inputs.get("attention_mask"), types, inputs.get("position_ids")
    return model.encode(*given, inputs.get("inputs_embeds"), None, None, None, *lengths, causal)


class MaskedLosses(Losses):
    """Masked tokens ("mlm") and the class of a pair of sentences ("sentence").

    If the model has a head for pairs with `num_labels` classes, that head is trained. Otherwise this module
    adds a head, on the model's pooler if it has one.

    Args:
        model: a model with a masked-LM head.
        num_labels: number of classes of a pair; 0: no pairs.
        causal: whether a token attends only to itself and earlier tokens.
        token_loss: the name of the loss of tokens.

    Raises:
        TypeError: the model has no masked-LM head.
    """

    sentence_dense: nn.Linear | None
    sentence_out: nn.Linear | None

    def __init__(
        self, model: TaskModel, num_labels: int = 0, causal: bool = False, token_loss: str = "mlm"
    ) -> None:
        super().__init__()
        if not isinstance(model, MaskedLMModel):
            raise TypeError(f"model: expected one with a masked-LM head, got {type(model).__name__}")
        self.model, self.causal, self.num_labels, self.token_loss = model, causal, num_labels, token_loss
        self.exports, self.weights = {"model": model}, {}
        self.sentence_dense = self.sentence_out = None
        pair = model.pair_head if isinstance(model, BertForPreTraining) else None
        if pair is not None and num_labels == pair.out_features:
            return
        # a head that no loss reads is saved unchanged
        if pair is not None and (pooler := model.family.pooler) is not None:
            pair.requires_grad_(False)
            part(model.base_model, pooler).requires_grad_(num_labels > 0)
        if num_labels:
            hidden = model.config.hidden_size
            if pair is None:
                self.sentence_dense = nn.Linear(hidden, hidden)
                model.init_weights(self.sentence_dense)
            self.sentence_dropout = nn.Dropout(model.config.hidden_dropout_prob)
            self.sentence_out = nn.Linear(hidden, num_labels)
            model.init_weights(self.sentence_out)

    def encode(self, inputs: dict[str, Any]) -> Encoded:
        """Encode the packed tokens."""
        return encode(self.model, inputs, self.causal)

    def sentence_logits(self, encoded: Encoded) -> Tensor:
        """(sequences, num_labels)."""
        if self.sentence_out is None:
            assert isinstance(self.model, BertForPreTraining)
            return self.model.pair_logits(encoded)
        if self.sentence_dense is None:
            pooled = self.model.pooled(encoded)
        else:
            pooled = apply_linear(self.sentence_dense, encoded.first(), "tanh")
        return apply_linear(self.sentence_out, self.sentence_dropout(pooled))

    @torch.no_grad()
    def token_hits(self, encoded: Encoded, labels: Tensor, count: int) -> Tensor:
        """How many of the `count` labelled tokens are predicted right."""
        hidden, targets = (x.split(_ROWS) for x in encoded.labelled(labels, count))
        right = [
            (self.model.lm_logits(h).argmax(-1) == t).sum() for h, t in zip(hidden, targets, strict=True)
        ]
        return torch.stack(right).sum()

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """See `Losses.forward`."""
        return self.losses_of(self.encode(inputs), inputs, measure)

    def losses_of(self, encoded: Encoded, inputs: dict[str, Any], measure: bool) -> Results:
        """What `forward` returns, from the encoded tokens."""
        labelled = encoded, inputs["labels"], inputs["labelled"]
        losses = {self.token_loss: self.model.vocabulary_loss(*labelled)}
        correct = {self.token_loss: self.token_hits(*labelled)} if measure else {}
        if self.num_labels:
            logits = self.sentence_logits(encoded)
            losses["sentence"] = cross_entropy(logits, inputs["sentence_labels"])
            if measure:
                correct["sentence"] = (logits.argmax(-1) == inputs["sentence_labels"]).sum()
        return losses, correct

    def work(self, batch: Batch) -> float:
        """See `Losses.work`."""
        config = self.model.config
        layers = config.num_hidden_layers * (1 - self.model.layerdrop)
        sizes = config.hidden_size, layers, config.intermediate_size
        n = batch.lengths.astype(np.float64)
        pairs = (n * (n + 1)).sum() / 2 if self.causal else None
        return encoder_work(batch.lengths, *sizes, pairs=pairs) + vocabulary_work(
            batch.counts[self.token_loss], config.hidden_size, config.vocab_size
        )
