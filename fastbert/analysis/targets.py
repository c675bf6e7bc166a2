"""The targets of probes: labelled spans of examples, from a treebank or a file of edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fastbert.analysis.probes import Spans, check_finite
from fastbert.analysis.treebank import Sentence, pieces_of
from fastbert.runtime import expected
from fastbert.tasks.examples import Examples
from fastbert.tasks.files import filled_lines, parsed

LABELS = ("upos", "relation")


@dataclass(frozen=True)
class Targets:
    """Targets of one or two labelled spans each, over the tokens of `Examples`.

    Attributes:
        label_names: names of the classes.
        example: (n,) int64, the number of the example of each target, in ascending order.
        tokens: (n, spans, 2) int64: first row in the arrays of `Examples`, and end (last row + 1).
        labels: (n, classes) bool.
        types: (n,) int64, the number of the word type of the first span, for a control task.
    """

    label_names: tuple[str, ...]
    example: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray
    types: np.ndarray

    def __len__(self) -> int:
        return len(self.example)

    @property
    def rows(self) -> np.ndarray:
        """The rows of the arrays of `Examples` that the spans cover, each once, in ascending order."""
        first, last = self.tokens[..., 0].ravel(), self.tokens[..., 1].ravel()
        covered = np.zeros(int(last.max(initial=0)) + 1, np.int64)
        np.add.at(covered, first, 1)
        np.add.at(covered, last, -1)
        return np.flatnonzero(np.cumsum(covered) > 0)

    def check(self, states: Tensor) -> None:
        """Raise a ValueError if `states` is not (layers, rows, hidden) of `rows`, all finite."""
        if states.dim() != 3 or states.shape[1] != len(self.rows):
            raise ValueError(
                f"states: expected (layers + 1, {len(self.rows)}, hidden), the rows of the targets, got "
                f"{tuple(states.shape)}"
            )
        check_finite(states)

    def check_labels(self) -> None:
        """Raise a ValueError that names the first target that has not exactly one label."""
        many = np.flatnonzero(self.labels.sum(1) != 1)
        if len(many):
            raise ValueError(f"targets[{many[0]}]: expected one label, got {self.labels[many[0]].sum()}")

    def spans(self, numbers: np.ndarray) -> Spans:
        """The targets with these numbers; their spans are counted in `rows`."""
        bounds = np.searchsorted(self.rows, self.tokens[numbers])
        return Spans(bounds, self.labels[numbers])

    def split(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers of targets (to train, held out, to test); the examples are drawn in 8 : 1 : 1.

        Raises:
            ValueError: fewer than 10 examples have a target.
        """
        examples = np.unique(self.example)
        if len(examples) < 10:
            raise ValueError(f"examples: a split needs 10 with a target at least, got {len(examples)}")
        drawn = np.random.default_rng(seed).permutation(examples)
        tenth = len(drawn) // 10
        part = np.zeros(int(examples.max()) + 1, np.int64)
        part[drawn[:tenth]] = 2
        part[drawn[tenth : 2 * tenth]] = 1
        of_target = part[self.example]
        train, held_out, test = (np.flatnonzero(of_target == i) for i in range(3))
        return train, held_out, test

    def control(self, seed: int) -> Targets:
        """The control task: each word type has one label, drawn with the labels' frequencies.

        Source: Hewitt and Liang 2019, "Designing and Interpreting Probes with Control Tasks", sec. 2.
        """
        self.check_labels()
        share = self.labels.mean(0)
        drawn = np.random.default_rng((seed, 1)).choice(
            len(share), int(self.types.max()) + 1, p=share / share.sum()
        )
        labels = np.zeros_like(self.labels)
        labels[np.arange(len(self)), drawn[self.types]] = True
        return replace(self, labels=labels)


def _one_hot(names: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """(the names that occur, sorted; (n, classes) bool)."""
    known, number = np.unique(np.asarray(names, str), return_inverse=True)
    labels = np.zeros((len(number), len(known)), bool)
    labels[np.arange(len(number)), number] = True
    return tuple(known.tolist()), labels


def _numbers_of_types(words: Sequence[str]) -> np.ndarray:
    return np.unique(np.array([word.lower() for word in words], str), return_inverse=True)[1]


def of_treebank(sentences: Sequence[Sentence], examples: Examples, label: str) -> Targets:
    """A target per word.

    Args:
        sentences: what `read_conllu` returns.
        examples: what `as_examples` returns for these sentences.
        label: "upos": the part of speech of each word. "relation": the relation between each word and its
            head, with both words as spans (subtypes such as nsubj:pass count as their type); the root has
            none.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    expected.one_of(LABELS, label=label)
    if len(sentences) != len(examples):
        raise ValueError(f"examples: expected {len(sentences)}, one per sentence, got {len(examples)}")
    starts, ends = pieces_of(examples)
    pieces = np.stack([starts, ends], 1)
    base, of_word, names, words, tokens = 0, [], [], [], []
    for number, sentence in enumerate(sentences):
        for i, word in enumerate(sentence.words):
            own = pieces[base + i]
            if label == "upos":
                names.append(sentence.upos[i])
                tokens.append([own])
            elif sentence.heads[i] > 0:
                names.append(sentence.relations[i].partition(":")[0])
                tokens.append([own, pieces[base + sentence.heads[i] - 1]])
            else:
                continue
            of_word.append(number)
            words.append(word)
        base += len(sentence.words)
    if not names:
        raise ValueError(f"sentences: none has a word with a label {label}")
    label_names, labels = _one_hot(names)
    return Targets(
        label_names, np.array(of_word), np.array(tokens, np.int64), labels, _numbers_of_types(words)
    )


@dataclass(frozen=True)
class LabelledText:
    """A text of words, and its targets.

    Attributes:
        words: words of the text.
        spans: per target, one or two (first word, last word + 1).
        labels: per target, its labels.
        where: the file and the line, for messages.
    """

    words: tuple[str, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]
    labels: tuple[tuple[str, ...], ...]
    where: str = field(default="", compare=False)

    def __len__(self) -> int:
        return len(self.words)


def read_edges(path: str | Path, max_examples: int | None = None) -> list[LabelledText]:
    """Read the targets of edge probes, in the format of jiant.

    A line per text: {"text": words with spaces between, "targets": [{"span1": [first, last + 1], "span2":
    the same (may be missing), "label": a name or several}]}. Either all targets of a file have one span, or
    all have two.

    Args:
        path: path of the file, in UTF-8.
        max_examples: most texts, from the start of the file; None: all.

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    path = Path(path)
    found: list[LabelledText] = []
    spans_each = None
    for where, line in filled_lines(path):
        words, targets = _text_and_targets(where, line)
        pairs = [_target(where, target, len(words)) for target in targets]
        for spans, _ in pairs:
            spans_each = spans_each or len(spans)
            if len(spans) != spans_each:
                raise ValueError(f"{where}: a target of {len(spans)} spans; expected {spans_each}, as before")
        spans, labels = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
        found.append(LabelledText(words, spans, labels, where))
        if len(found) == max_examples:
            break
    if spans_each is None:
        raise ValueError(f"{path}: expected one target at least, found none")
    return found


def _text_and_targets(where: str, line: str) -> tuple[tuple[str, ...], list[Any]]:
    values = parsed(where, line)
    if (
        not isinstance(values, dict)
        or not isinstance(values.get("text"), str)
        or not isinstance(values.get("targets"), list)
    ):
        raise ValueError(f"{where}: expected an object with a 'text' and a list of 'targets'")
    words = tuple(values["text"].split())
    if not words:
        raise ValueError(f"{where}: text: expected one word at least")
    return words, values["targets"]


def _target(where: str, target: Any, words: int) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """(its spans, its labels)."""
    if not isinstance(target, dict) or "span1" not in target or "label" not in target:
        raise ValueError(f"{where}: targets: expected objects with 'span1' and 'label', got {target!r}")
    spans = []
    for key in ("span1", "span2"):
        span = target.get(key)
        if span is None and key == "span2":
            continue
        if (
            not isinstance(span, list)
            or not (len(span) == 2 and all(type(i) is int for i in span))
            or not 0 <= span[0] < span[1] <= words
        ):
            raise ValueError(f"{where}: {key}: expected [first, last + 1] of {words} words, got {span!r}")
        spans.append((span[0], span[1]))
    names = target["label"] if isinstance(target["label"], list) else [target["label"]]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: label: expected a name or a list of names, got {target['label']!r}")
    return tuple(spans), tuple(names)


def of_texts(texts: Sequence[LabelledText], examples: Examples) -> Targets:
    """The targets of labelled texts.

    Args:
        texts: what `read_edges` returns; one target at least.
        examples: what `treebank.as_examples` returns for these texts.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    if len(texts) != len(examples):
        raise ValueError(f"examples: expected {len(texts)}, one per text, got {len(examples)}")
    starts, ends = pieces_of(examples)
    label_names = sorted({name for text in texts for names in text.labels for name in names})
    if not label_names:
        raise ValueError("texts: expected one target with a label at least, got none")
    number_of = {name: i for i, name in enumerate(label_names)}
    base, example, tokens, labels, words = 0, [], [], [], []
    for number, text in enumerate(texts):
        for spans, names in zip(text.spans, text.labels, strict=True):
            example.append(number)
            tokens.append([(starts[base + first], ends[base + last - 1]) for first, last in spans])
            row = np.zeros(len(label_names), bool)
            row[[number_of[name] for name in names]] = True
            labels.append(row)
            words.append(" ".join(text.words[slice(*spans[0])]))
        base += len(text)
    return Targets(
        tuple(label_names),
        np.array(example),
        np.array(tokens, np.int64),
        np.stack(labels),
        _numbers_of_types(words),
    )
