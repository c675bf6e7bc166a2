"""Tokenized examples as training and evaluation take them, and a model's outputs for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding

from fastbert.models.config import EncoderConfig
from fastbert.models.labels import IGNORED
from fastbert.sentences.tokenizer import pack_batches
from fastbert.training.stream import Batch


@dataclass(frozen=True)
class Encoded:
    """Examples of one or more sequences each, packed one after the other.

    Attributes:
        ids: (total,) int64 token ids.
        types: (total,) int64 token types.
        starts: (sequences + 1,) int64; sequence i is rows starts[i] to starts[i + 1].
        labels: argument of the model -> (n,) labels of examples, or (total,) of tokens; empty without labels.
        choices: sequences per example, which follow one another.
        token_labels: whether there is a label per token; one that is `IGNORED` does not count.
        counts: what was cut or mended -> how often.
        windows: what the sequences are of, where a task reads its examples in windows.
    """

    ids: np.ndarray
    types: np.ndarray
    starts: np.ndarray
    labels: dict[str, np.ndarray]
    choices: int = 1
    token_labels: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    windows: Sequence[Any] = ()

    def __len__(self) -> int:
        return (len(self.starts) - 1) // self.choices

    @cached_property
    def lengths(self) -> np.ndarray:
        """(n,) tokens per example."""
        return np.diff(self.starts[:: self.choices])

    @cached_property
    def hash(self) -> str:
        """Of the ids, types, starts and labels."""
        found = hashlib.sha256()
        for array in (
            self.ids,
            self.types,
            self.starts,
            *(self.labels[name] for name in sorted(self.labels)),
        ):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    def batch(self, numbers: np.ndarray, segments: bool) -> Batch:
        """The inputs of some examples; see `training.stream.Batch`.

        Args:
            numbers: (batch,) of the examples.
            segments: whether the model takes token types.
        """
        sequences = (numbers[:, None] * self.choices + np.arange(self.choices)).ravel()
        lengths = np.diff(self.starts)[sequences]
        ends = np.cumsum(lengths)
        rows = np.arange(ends[-1]) + np.repeat(self.starts[sequences] - (ends - lengths), lengths)
        inputs = {
            "input_ids": self.ids[rows],
            "cu_seqlens": np.concatenate([[0], ends]).astype(np.int32),
            "max_seqlen": int(lengths.max()),
        }
        if segments:
            inputs["token_type_ids"] = self.types[rows]
        if self.choices > 1:
            inputs["choices"] = self.choices
        count = len(numbers)
        for name, labels in self.labels.items():
            inputs[name] = labels[rows if self.token_labels else numbers]
            if self.token_labels:
                count = int((inputs[name] != IGNORED).sum())
        return Batch(inputs, {"task": count}, lengths)


def joined(encodings: Sequence[Encoding], labels: dict[str, np.ndarray], choices: int = 1) -> Encoded:
    """The examples of what a tokenizer made of texts."""
    lengths = np.array([len(encoding) for encoding in encodings], np.int64)
    return Encoded(
        np.concatenate([np.asarray(encoding.ids, np.int64) for encoding in encodings]),
        np.concatenate([np.asarray(encoding.type_ids, np.int64) for encoding in encodings]),
        np.concatenate([[0], np.cumsum(lengths)]),
        labels,
        choices,
        counts={"sequences_cut": sum(bool(encoding.overflowing) for encoding in encodings)},
    )


@dataclass(frozen=True)
class Rows(Sequence[dict[str, Any]]):
    """Examples one by one, as plain dicts of lists and numbers, for `transformers.Trainer` and its collators.

    A dict has input_ids, attention_mask, token_type_ids if `segments`, and the labels; of an example of
    several sequences the first three are lists of lists.
    """

    examples: Encoded
    segments: bool

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        inputs = self.examples.batch(np.array([range(len(self))[index]]), self.segments).inputs
        inner = inputs["cu_seqlens"][1:-1]
        names = ("input_ids", "token_type_ids") if self.segments else ("input_ids",)
        row = {name: [part.tolist() for part in np.split(inputs[name], inner)] for name in names}
        row["attention_mask"] = [[1] * len(part) for part in row["input_ids"]]
        if self.examples.choices == 1:
            row = {name: value for name, (value,) in row.items()}
        labels = {name: inputs[name].tolist() for name in self.examples.labels}
        return {**row, **(labels if self.examples.token_labels else {n: v for n, (v,) in labels.items()})}


@dataclass(frozen=True)
class Source:
    """Examples for the training loop; see `training.stream.Source`."""

    examples: Encoded
    segments: bool

    @property
    def hash(self) -> str:
        """Of the examples."""
        return self.examples.hash

    @property
    def lengths(self) -> np.ndarray:
        """(n,) tokens per example."""
        return self.examples.lengths

    def plan(self, epoch: int) -> Source:
        """Every epoch has all examples."""
        return self

    def example(self, plan: Source, epoch: int, index: int) -> int:
        """The number of an example."""
        return index

    def collate(self, examples: Sequence[int]) -> Batch:
        """The inputs of some examples."""
        return self.examples.batch(np.asarray(examples), self.segments)


def has_segments(config: EncoderConfig) -> bool:
    """Whether a model tells the first text from the second by token types."""
    return config.family.segments and config.type_vocab_size > 1


def outputs(
    model: Any,
    examples: Encoded,
    names: Sequence[str] = ("logits",),
    *,
    batch_tokens: int = 8192,
    dtype: torch.dtype = torch.float32,
) -> list[np.ndarray]:
    """What a model computes for examples, in eval mode; its mode is restored.

    Args:
        model: with the head of the task.
        examples: labels are not used.
        names: fields of the model's output, one array each.
        batch_tokens: most tokens at a time; a longer example runs alone.
        dtype: float32, or the dtype of autocast.

    Returns:
        Per name (n, …) float32, a row per example, or (total, …), a row per token, as the output has them.

    Raises:
        ValueError: an output is not finite.
    """
    training, device = model.training, model.device
    unlabelled = replace(examples, labels={})
    numbers, found = [], [[] for _ in names]
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            for group in pack_batches(examples.lengths, batch_tokens):
                output = model(**unlabelled.batch(group, has_segments(model.config)).on(device))
                numbers.append(group)
                for name, parts in zip(names, found, strict=True):
                    parts.append(output[name].float().cpu().numpy())
    finally:
        model.train(training)
    order = np.concatenate(numbers)
    made = [_in_order(np.concatenate(parts), order, examples) for parts in found]
    if not all(np.isfinite(array).all() for array in made):
        raise ValueError("model: its outputs are not finite: its weights are not, or they are too large")
    return made


def _in_order(rows: np.ndarray, order: np.ndarray, examples: Encoded) -> np.ndarray:
    """Rows of batches -> rows in the order of the examples."""
    if len(rows) == len(order):
        return rows[np.argsort(order)]
    lengths = examples.lengths[order]
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1]) + np.repeat(
        examples.starts[:: examples.choices][order] - (ends - lengths), lengths
    )
    return rows[np.argsort(places)]
