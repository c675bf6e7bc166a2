"""What a student is trained on: the weighted sum of a phase's losses, on the real tokens of a packed batch.

The teacher reads the same batch without gradients, in eval mode. It is no part of the module, so it has no
optimizer's state and is in no checkpoint. With a cache its outputs are inputs of the batch instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.compression.distillation import losses, map_losses
from fastbert.compression.distillation.reading import (
    SPANS,
    TEXTS,
    TOKENS,
    VECTORS,
    WORDS,
    Read,
    read,
    rows_of,
    span_rows,
    word_product,
)
from fastbert.compression.distillation.recipes import READS
from fastbert.compression.distillation.sentences import SentenceVectors
from fastbert.compression.distillation.theseus import Replacing
from fastbert.layers.linear import apply_linear
from fastbert.layers.modules import part
from fastbert.models.base import PreTrainedModel
from fastbert.models.encoder import projection_of
from fastbert.models.labels import IGNORED
from fastbert.ops.cross_entropy import cross_entropy
from fastbert.ops.linear_distillation import linear_distillation
from fastbert.training.module import Losses, Results
from fastbert.training.stream import Batch
from fastbert.training.work import encoder_work

# Prefixes of the inputs of a batch that are the teacher's: its outputs, or its own tokens
CACHED, OTHER = "cached:", "teacher:"
# What a cache has of words per token: which, and their scores; see `losses.likeliest`
CACHED_WORDS = ("words", "word_scores")


class Distilled(Losses):
    """The losses of a phase.

    Args:
        student: the model that learns.
        teacher: in eval mode, on the device of the training.
        weights: loss -> its weight; see `recipes`.
        pairs: (layer of the student, layer of the teacher) that are compared.
        temperature: T of "kd".
        relation_heads: see `Recipe`.
        replacing: (k, b): the student's layers replace the teacher's; see `theseus.py`. None: they do not.
    """

    def __init__(
        self,
        student: Any,
        teacher: Any,
        weights: Mapping[str, float],
        pairs: Sequence[tuple[int, int]],
        temperature: float = 1.0,
        relation_heads: int | None = None,
        replacing: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        self.student, self.weights, self.pairs = student, dict(weights), list(pairs)
        inner = inner_of(student)
        self.exports = {"model": inner} if isinstance(inner, PreTrainedModel) else {}
        self.temperature, self.relation_heads = temperature, relation_heads
        # In a tuple, so that it is no child
        self._teacher = (teacher,)
        self.replacing = None
        if replacing is not None:
            self.replacing = Replacing(student, teacher, [n for _, n in self.pairs], *replacing)
        self.maps = nn.ModuleDict()
        for name in ("embeddings", "hidden"):
            widths = [getattr(model.config, "hidden_size", 0) for model in (student, teacher)]
            if name in self.weights and widths[0] != widths[1]:
                self.maps[name] = nn.Linear(*widths, bias=False)
        self.wanted, self.rows = wanted(self.weights, self.pairs, student, teacher), rows_of(student)
        if self.rows == VECTORS:
            freeze_above(inner, {f"states.{depth_of(inner)}"})
        elif not {"logits", "token_logits"} & self.wanted[0] and self.rows != WORDS:
            freeze_above(student, self.wanted[0])
        self._words = "kd" in self.weights and self.rows == WORDS

    @property
    def teacher(self) -> Any:
        """The teacher."""
        return self._teacher[0]

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """See `Losses.forward`."""
        own, of_teacher, cached = _parted(inputs)
        with contextlib.ExitStack() as held:
            if self.replacing is not None and self.training:
                held.enter_context(self.replacing.mixed())
            of_student = read(self.student, own, self.wanted[0])
        device = own["input_ids"].device
        taught = Read({name: t.to(device) for name, t in cached.items()})
        if not cached and (self.wanted[1] or self._words):
            with torch.no_grad():
                taught = read(self.teacher, of_teacher, self.wanted[1])
        found = {name: self._loss(name, of_student, taught, own) for name in self.weights}
        correct = {}
        if measure and "task" in found and not self._regression:
            logits, labels = self._answers(of_student, own)
            right = logits.argmax(-1) == labels
            # A span is right if its start and its end are
            correct["task"] = (right.unflatten(0, (2, -1)).all(0) if self.rows == SPANS else right).sum()
        return found, correct

    @property
    def _regression(self) -> bool:
        return self.rows == TEXTS and self.student.config.num_labels == 1

    def _logits(self, of: Read, inputs: dict[str, Any]) -> Tensor:
        """(rows, classes): a row per text, per labelled token, or per start and per end of a span."""
        if self.rows == TEXTS:
            return of.tensors["logits"]
        logits = of.tensors["token_logits"]
        if self.rows == SPANS:
            return span_rows(logits, inputs["cu_seqlens"])
        return logits[inputs["labels"] != IGNORED]

    def _answers(self, student: Read, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The logits and the label of each row."""
        logits = self._logits(student, inputs)
        if self.rows == SPANS:
            return logits, torch.cat([inputs["start_positions"], inputs["end_positions"]])
        labels = inputs["labels"]
        return logits, labels if self.rows == TEXTS else labels[labels != IGNORED]

    def _loss(self, name: str, student: Read, teacher: Read, inputs: dict[str, Any]) -> Tensor:
        s, t = student.tensors, teacher.tensors
        if name == "task":
            logits, labels = self._answers(student, inputs)
            if self._regression:
                return F.mse_loss(logits.float().squeeze(1), labels.float())
            return cross_entropy(logits, labels, ignore_index=IGNORED)
        if name == "mlm":
            return self.student.vocabulary_loss(student.encoded, inputs["labels"], inputs["labelled"])
        if name == "kd" and self._words:
            return self._words_loss(student, teacher)
        if name in ("kd", "logits"):
            own, taught = (self._logits(each, inputs) for each in (student, teacher))
            if name == "logits" or self._regression:
                return losses.mean_squared(own, taught)
            return losses.soft_cross_entropy(own, taught, self.temperature)
        if name in ("vectors", "angles"):
            compare = losses.mean_squared if name == "vectors" else losses.cosine
            return compare(s["vectors"], self.teacher.targets(t["vectors"]))
        compared = []
        for m, n in pairs_of(name, self.pairs, self.student, self.teacher):
            given = [(s[f"{kind}.{m}"], t[f"{kind}.{n}"]) for kind in reads(name, self.rows)]
            compared.append(self._compared(name, given, student))
        total = torch.stack(compared).sum()
        return total / len(compared) if name == "patient" else total

    def _compared(self, name: str, given: list[tuple[Tensor, Tensor]], student: Read) -> Tensor:
        """The loss of one pair of layers."""
        (a, b), batch = given[0], student.batch
        if name == "cosine":
            return losses.cosine(a, b)
        if name == "patient":
            return losses.unit_distance(a, b) / a.shape[1]
        if name in ("embeddings", "hidden"):
            return losses.mean_squared(apply_linear(self.maps[name], a) if name in self.maps else a, b)
        assert batch is not None
        if name in ("scores", "attention"):
            loss = map_losses.score_mse if name == "scores" else map_losses.attention_kl
            (c, d) = given[1]
            return loss(a, c, b, d, batch)
        return map_losses.relation_kl(a, b, batch, self.relation_heads)

    def _words_loss(self, student: Read, teacher: Read) -> Tensor:
        """T² · KL over the vocabulary, at all tokens; with a cache over the teacher's likeliest words."""
        assert student.encoded is not None
        own = word_product(self.student, student.encoded)
        if teacher.encoded is None:
            words, scores = (teacher.tensors[name] for name in CACHED_WORDS)
            return losses.linear_top_words(*own, words.long(), scores, self.temperature)
        with torch.no_grad():
            taught = word_product(self.teacher, teacher.encoded)
        return linear_distillation(*own, *taught, temperature=self.temperature)

    def optimized(self, optimizer: torch.optim.Optimizer) -> None:
        """The replacing counts the optimizer's steps."""
        if self.replacing is not None:
            self.replacing.optimizer = optimizer

    def work(self, batch: Batch) -> float:
        """See `Losses.work`; of the teacher one forward counts, and none with a cache."""
        found = 0.0
        live = not any(name.startswith(CACHED) for name in batch.inputs)
        for model, share in ((self.student, 1.0), (self.teacher, live / 3)):
            config = model.config
            if isinstance(inner_of(model), PreTrainedModel):
                sizes = config.hidden_size, config.num_hidden_layers, config.intermediate_size
                found += share * encoder_work(batch.lengths, *sizes)
        return found


def inner_of(model: Any) -> Any:
    """The encoder of `SentenceVectors`; any other model itself."""
    return model.model if isinstance(model, SentenceVectors) else model


def depth_of(model: Any) -> int:
    """The number of layers; 0 of a BiLSTM, which has none to compare."""
    return len(model.base_model.layer_list()) if isinstance(model, PreTrainedModel) else 0


def freeze_above(student: Any, names: Collection[str]) -> None:
    """Freeze the parameters above all that is read of a student, because ddp waits for their gradients.

    Args:
        student: an encoder, or a model with a head.
        names: of `reading.py`, without "logits".
    """
    encoder = student.base_model
    layers, family = encoder.layer_list(), encoder.family
    last = max(int(name.rpartition(".")[2]) for name in names)
    whole = [part(encoder, family.embeddings), projection_of(encoder, family), *layers[:last]]
    if last and not {f"states.{last}", f"first.{last}"} & {*names}:
        # Of the top layer only queries, keys and values are read
        top, of = whole.pop(), layers[last - 1].form
        paths = {of.names.query, of.names.key, of.names.value, *of.names.norms[: int(of.pre_norm)]}
        whole += [part(top, path) for path in paths]
    elif last == len(layers) and family.final_norm is not None:
        whole.append(part(encoder, family.final_norm))
    learning = {id(p) for module in whole if module is not None for p in module.parameters()}
    for p in student.parameters():
        p.requires_grad_(id(p) in learning)


def pairs_of(
    name: str, pairs: Sequence[tuple[int, int]], student: Any, teacher: Any
) -> Sequence[tuple[int, int]]:
    """The pairs of layers that a loss compares."""
    if name == "embeddings":
        return [(0, 0)]
    if name == "cosine":
        return [(depth_of(student), depth_of(teacher))]
    return pairs


def reads(name: str, rows: str) -> tuple[str, ...]:
    """The kinds of tensors that a loss reads; of tokens and spans those of all tokens, not of [CLS]."""
    kinds: tuple[str, ...] = READS[name]
    if rows not in (TOKENS, SPANS):
        return kinds
    return tuple({"logits": "token_logits", "first": "states"}.get(kind, kind) for kind in kinds)


def wanted(
    weights: Mapping[str, float], pairs: Sequence[tuple[int, int]], student: Any, teacher: Any
) -> tuple[set[str], set[str]]:
    """What losses read of the student and of the teacher, as names of `reading.py`."""
    own, of_teacher, rows = set(), set(), rows_of(student)
    for name in weights:
        if name == "task":
            own |= {*reads("kd", rows)}
        for kind in reads(name, rows):
            if kind == "vectors" or kind.endswith("logits"):
                if rows != WORDS:
                    own.add(kind)
                    of_teacher.add(kind)
                continue
            for m, n in pairs_of(name, pairs, student, teacher):
                own.add(f"{kind}.{m}")
                of_teacher.add(f"{kind}.{n}")
    return own, of_teacher


def _parted(inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """The inputs of the student, those of the teacher, and the teacher's outputs if they are cached."""
    parts: dict[str, dict[str, Any]] = {"": {}, OTHER: {}, CACHED: {}}
    for name, value in inputs.items():
        prefix = next((each for each in (OTHER, CACHED) if name.startswith(each)), "")
        parts[prefix][name.removeprefix(prefix)] = value
    return parts[""], parts[OTHER] or parts[""], parts[CACHED]
