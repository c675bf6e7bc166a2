"""What students read: text, labelled examples, sentences, or both readings of texts by two tokenizers.

Text is a corpus of `fastbert prepare`, or a file that is tokenized into OUTPUT/corpus. A row has whole lines
of one document, as many as fit; rows are the same in every epoch. Labelled examples are the files of a task
of `fastbert.finetuning.tasks`, or one file: .jsonl, objects with "text", maybe "pair" and maybe "label"; or
.txt, or .tsv for pairs, without labels. An example without a label is learned from the teacher alone.
Sentences are such a file without any label, of whose pairs the teacher reads the first text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.compression.distillation.cache import Cached
from fastbert.compression.distillation.objective import CACHED, OTHER
from fastbert.compression.distillation.reading import SPANS, TEXTS, TOKENS, WORDS
from fastbert.finetuning.encoded import Encoded, joined
from fastbert.finetuning.fit import Split
from fastbert.finetuning.sequences import SequenceTask, pairs_encoded
from fastbert.finetuning.splits import check_fits
from fastbert.finetuning.task import Task
from fastbert.models.config import EncoderConfig
from fastbert.models.labels import IGNORED
from fastbert.pretraining.corpus import INDEX, Corpus
from fastbert.pretraining.formats import DocSentences, Example
from fastbert.pretraining.masking import Masked
from fastbert.pretraining.objectives.masked import MaskedExample, Objective
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks import inputs
from fastbert.tasks.files import Texts, filled_lines, parsed
from fastbert.training.draws import Draws
from fastbert.training.parallel import Parallel
from fastbert.training.stream import Batch

_TEXTS = (".jsonl", ".txt", ".tsv")
# Losses whose mean is over tokens, and over examples
_TOKENS = ("cosine", "embeddings", "hidden", "attention", "queries", "keys", "values")
_EXAMPLES = ("kd", "logits", "patient", "vectors", "angles")


@dataclass(frozen=True)
class Unmasked(Objective):
    """The sequences of a corpus as they are."""

    def mask(self, example: Example, draws: Draws) -> MaskedExample:
        """A sequence without masks."""
        labels = np.full(len(example.ids), IGNORED)
        return MaskedExample(
            Masked(example.ids, labels, np.empty((0, 2), np.int64)), example.token_types, example.label
        )


@dataclass(frozen=True)
class Taught:
    """Examples with what the teacher needs, or has said, for the training loop; see `training.stream.Source`.

    Attributes:
        inner: the source of the student's inputs.
        losses: names of `recipes`; a batch counts what each is the mean of.
        rows: what logits are of; see `reading.rows_of`.
        other: the same texts as the teacher's tokens; None if it reads the student's.
        cached: the teacher's outputs, or None.
    """

    inner: Any
    losses: tuple[str, ...]
    rows: str = TEXTS
    other: Encoded | None = None
    cached: Cached | None = None

    @property
    def hash(self) -> str:
        """Of the examples, as both models read them."""
        hashes = [each.hash for each in (self.inner, self.other) if each is not None]
        return hashes[0] if self.other is None else hashlib.sha256("".join(hashes).encode()).hexdigest()

    def plan(self, epoch: int) -> Any:
        """The epoch's examples and their lengths."""
        return self.inner.plan(epoch)

    def example(self, plan: Any, epoch: int, index: int) -> tuple[int, Any]:
        """The number of an example, and the example."""
        return index, self.inner.example(plan, epoch, index)

    def collate(self, examples: Sequence[tuple[int, Any]]) -> Batch:
        """The inputs of some examples."""
        batch: Batch = self.inner.collate([example for _, example in examples])
        numbers = np.array([number for number, _ in examples])
        given, tokens = dict(batch.inputs), int(batch.lengths.sum())
        if self.other is not None and self.cached is None:
            read = self.other.batch(numbers, True).inputs
            # A tensor stays on the host, where lengths are read
            read["cu_seqlens"] = torch.from_numpy(read["cu_seqlens"])
            given |= {f"{OTHER}{name}": value for name, value in read.items()}
        if self.cached is not None:
            given |= {f"{CACHED}{name}": rows for name, rows in self.cached.rows(numbers).items()}
        counts = {**batch.counts, **dict.fromkeys(_TOKENS, tokens), **dict.fromkeys(_EXAMPLES, len(numbers))}
        counts["scores"] = int((batch.lengths.astype(np.int64) ** 2).sum())
        if self.rows == WORDS:
            counts["kd"] = tokens
        elif self.rows != SPANS and "labels" in given:
            counts["task"] = int((given["labels"] != IGNORED).sum())
        if self.rows == TOKENS:
            counts["kd"] = counts["logits"] = counts["task"]
        if self.rows in (TOKENS, SPANS):
            counts["patient"] = tokens
        return Batch(given, {name: counts[name] for name in self.losses}, batch.lengths)


def text_of(
    data: Path,
    place: Path,
    folder: Path,
    max_length: int,
    seed: int,
    masks: bool,
    parallel: Parallel,
    static: int | None = None,
) -> Objective:
    """The sequences of a text.

    Args:
        data: a corpus, or a file of text.
        place: the directory of the teacher's tokenizer.
        folder: where to write the corpus of a file.
        max_length: most tokens of a sequence.
        seed: of masks.
        masks: whether words are masked.
        parallel: the processes; the first one writes.
        static: the number of epochs after which masks repeat; None: they never do.

    Raises:
        ValueError: the corpus has another vocabulary than the teacher.
    """
    if data.is_dir():
        if not (data / INDEX).is_file():
            raise ValueError(f"data: {data}: expected a corpus of fastbert prepare, or a file of text")
        corpus = Corpus.open(data)
        if corpus.tokenizer.get_vocab() != load_tokenizer(place).get_vocab():
            raise ValueError(f"data: {data} was made with another tokenizer than the teacher's")
    else:
        with parallel.alike():
            if parallel.is_first:
                Corpus.write([data], place, folder, overwrite=True)
        corpus = Corpus.open(folder, verify=False)
    if not masks:
        # All seeds have the same rows, and may share a cache
        return Unmasked(DocSentences(corpus, max_length, 0))
    return Objective(DocSentences(corpus, max_length, seed), seed=seed, static=static)


@dataclass(frozen=True)
class Labelled:
    """Examples of a task.

    Attributes:
        train: a reading per tokenizer: the student's, and the teacher's if it differs.
        dev: split -> (its examples, a reading per tokenizer).
        task: scores `dev`; None if the data are one file.
    """

    train: list[Encoded]
    dev: dict[str, list[Split]]
    task: Task | None = None


def labelled_of(
    data: Path,
    task: Task,
    teacher: EncoderConfig,
    readers: Sequence[tuple[Tokenizer, Any]],
    max_length: int,
) -> Labelled:
    """The examples of a task's directory or of a file.

    Args:
        data: see the module.
        task: of a directory; a file has texts.
        teacher: its config, whose classes the labels must be.
        readers: (tokenizer, config) of each model that reads.
        max_length: most tokens of an example; a longer one is cut.

    Raises:
        ValueError, TypeError, OSError: naming the argument, or the file and the line.
    """
    names = [teacher.id2label[i] for i in range(teacher.num_labels)]

    def checked(encoded: Encoded, reader: tuple[Tokenizer, Any]) -> Encoded:
        check_fits(encoded, reader[1], reader[0])
        return encoded

    if data.is_file():
        if not isinstance(task, SequenceTask):
            raise ValueError(f"data: {data}: expected a directory of {task.name}")
        texts = _file(data, names)
        given = texts.texts if texts.pairs is None else list(zip(texts.texts, texts.pairs, strict=True))
        labels = {"labels": np.asarray(texts.labels, np.float32 if len(names) == 1 else np.int64)}
        found = (
            checked(joined(pairs_encoded(reader[0], given, max_length), labels), reader) for reader in readers
        )
        return Labelled(list(found), {})
    splits = task.splits(data)
    if not splits["train"]:
        raise ValueError(f"data: {data} has no train file of {task.name}")
    train = task.read(data, splits["train"][0])
    task.adopt(teacher)
    if (task.classes and [*task.classes] != names) or (task.labels and task.labels != len(names)):
        raise ValueError(f"data: {data} has the classes {[*task.classes]}, but the teacher has {names}")
    read = {name: task.read(data, name) for name in splits["dev"]}
    return Labelled(
        [checked(task.encode(train, r[0], max_length, True), r) for r in readers],
        {
            name: [Split(each, checked(task.encode(each, r[0], max_length, False), r)) for r in readers]
            for name, each in read.items()
        },
        task,
    )


def sentences_of(data: Path, student: SentenceEncoder, teacher: SentenceEncoder) -> tuple[Encoded, Encoded]:
    """The sentences of a file as the student reads them, and as the teacher does.

    Of a pair the teacher reads the first text; the student reads both, an example each.

    Args:
        data: .txt, a sentence per line; .tsv, pairs; or .jsonl, objects with "text" and maybe "pair".
        student, teacher: with their tokenizers.

    Raises:
        ValueError, OSError: naming the argument, or the file and the line.
    """
    texts = _file(data, [])
    # Teachers of pairs of texts have no vectors of sentences
    sides = (texts.texts + (texts.pairs or []), student), (texts.texts * (2 if texts.pairs else 1), teacher)
    found = (encoder.tokenize(read) for read, encoder in sides)
    own, other = (Encoded(each.ids, np.zeros_like(each.ids), each.starts, {}) for each in found)
    return own, other


def _file(path: Path, names: list[str]) -> Texts:
    """The texts of a file; labels are numbers of classes, `IGNORED` where there is none."""
    folder = "a directory, or " if names else ""
    if not path.is_file() or path.suffix not in _TEXTS:
        raise ValueError(f"data: {path}: expected {folder}a file that ends in {', '.join(_TEXTS)}")
    if path.suffix != ".jsonl":
        texts = inputs.read(path, pairs=path.suffix == ".tsv")
        labels: list[Any] = [IGNORED] * len(texts["texts"])
        if len(names) == 1:
            raise ValueError(f"data: {path} has no labels; expected .jsonl with a number as 'label'")
        return Texts([], texts["texts"], texts.get("pairs"), labels)
    texts, pairs, labels = [], [], []
    for where, line in filled_lines(path):
        values = parsed(where, line)
        if not isinstance(values, dict) or not isinstance(values.get("text"), str):
            raise ValueError(f"{where}: expected an object with a text as 'text'")
        if not isinstance(values.get("pair"), str | None) or (texts and ("pair" in values) != bool(pairs)):
            raise ValueError(f"{where}: expected a text as 'pair' in all lines, or in none")
        texts.append(values["text"])
        pairs += [values["pair"]] if "pair" in values else []
        labels.append(_label(where, values.get("label"), names))
    if not texts:
        raise ValueError(f"{path}: expected one example at least, found none")
    return Texts([], texts, pairs or None, labels)


def _label(where: str, label: Any, names: Collection[str]) -> float:
    """The number of a class, or of a regression the number itself."""
    of_number = len(names) == 1
    if of_number and isinstance(label, (int, float)) and not isinstance(label, bool):
        return float(label)
    if not of_number and label is None:
        return IGNORED
    if not of_number and type(label) is int and 0 <= label < len(names):
        return label
    if not of_number and label in [*names]:
        return [*names].index(label)
    expected = "a number" if of_number else f"one of the teacher's classes {[*names]}, or its number"
    expected = expected if names else "none"
    raise ValueError(f"{where}: label: expected {expected}, got {label!r}")
