"""A trained model's answers for new examples, one after the other, a few thousand in memory at a time."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.checkpoint import hub
from fastbert.checkpoint.files import read_json
from fastbert.finetuning.choices import Race
from fastbert.finetuning.encoded import Encoded, outputs
from fastbert.finetuning.run import RESULTS
from fastbert.finetuning.sequences import Glue, Table
from fastbert.finetuning.spans import Squad
from fastbert.finetuning.tagging import Ner
from fastbert.finetuning.task import Task
from fastbert.finetuning.tasks import options_of, task_of
from fastbert.runtime import expected
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks import glue_tasks, inputs, ner, swag
from fastbert.tasks.files import Choices, Texts
from fastbert.tasks.ner import Sentence
from fastbert.tasks.squad import Question, Questions
from fastbert.training.loop import DTYPES

CHUNK = 2048


class _Reader(ABC):
    """How the examples of one kind of task are read and answered."""

    def __init__(self, task: Task) -> None:
        self.task: Any = task

    @abstractmethod
    def read(self, path: Path, kind: str | None) -> Iterator[Any]:
        """The examples of a file of a kind; see `tasks.inputs`."""

    @abstractmethod
    def gathered(self, examples: list[Any]) -> Any:
        """Some examples as the task encodes them. Raises ValueError and TypeError, naming the example."""

    @abstractmethod
    def answers(
        self, examples: Any, encoded: Encoded, found: Sequence[np.ndarray]
    ) -> Iterator[dict[str, Any]]:
        """An answer per example, of the model's outputs."""


class _Texts(_Reader):
    def __init__(self, task: Task, text: str, pair: str | None) -> None:
        super().__init__(task)
        self.text, self.pair = text, pair

    def read(self, path: Path, kind: str | None) -> Iterator[tuple[str, ...]]:
        return inputs.texts(path, self.text, self.pair, kind)

    def gathered(self, examples: list[Any]) -> Texts:
        rows: list[Any] = [(example,) if isinstance(example, str) else example for example in examples]
        width = len(rows[0]) if _are_texts(rows[0]) else 0
        right = [width in (1, 2) and _are_texts(row) and len(row) == width for row in rows]
        _check(examples, right, "texts, or pairs of texts")
        pairs = [row[1] for row in rows] if width == 2 else None
        return Texts([], [row[0] for row in rows], pairs, None)

    def answers(
        self, examples: Texts, encoded: Encoded, found: Sequence[np.ndarray]
    ) -> Iterator[dict[str, Any]]:
        (logits,) = found
        if logits.shape[1] == 1:
            yield from ({"value": _rounded(value)} for value in logits[:, 0])
            return
        for row in _shares(logits):
            yield {"label": self.task.classes[row.argmax()], "score": _rounded(row.max())}


class _Questions(_Reader):
    def read(self, path: Path, kind: str | None) -> Iterator[tuple[str, ...]]:
        return inputs.questions(path, kind)

    def gathered(self, examples: list[Any]) -> Questions:
        right = [_are_texts(each) and len(each) == 2 for each in examples]
        _check(examples, right, "a question and a context")
        named = enumerate(examples)
        return Questions([Question(str(i), question, context, ()) for i, (question, context) in named])

    def answers(
        self, examples: Questions, encoded: Encoded, found: Sequence[np.ndarray]
    ) -> Iterator[dict[str, Any]]:
        predictions = self.task.predictions(examples, encoded, found)
        texts = predictions.texts(self.task.threshold)
        for question in examples.questions:
            text = texts[question.id]
            shares = {each["text"]: each["probability"] for each in predictions.nbest[question.id]}
            yield {"answer": text, "score": _rounded(shares[text])}


class _Words(_Reader):
    def __init__(self, task: Task, columns: bool) -> None:
        super().__init__(task)
        self.columns = columns

    def read(self, path: Path, kind: str | None) -> Iterator[Any]:
        if self.columns:
            _check_official(kind)
            return ner.sentences(path, labelled=False)
        return self._lines(path, kind)

    def _lines(self, path: Path, kind: str | None) -> Iterator[list[str]]:
        for (text,) in inputs.texts(path, kind=kind):
            words = text.split()
            if words[:1] == [ner.DOCUMENT]:
                raise ValueError(f"{path}: has CoNLL's columns, which only columns=True (--columns) reads")
            if words:
                yield words

    def gathered(self, examples: list[Any]) -> list[Sentence]:
        if self.columns:
            return examples
        _check(examples, [_are_texts(each) and len(each) > 0 for each in examples], "a list of words")
        # Each sentence is a document
        return [Sentence(i, list(words), []) for i, words in enumerate(examples)]

    def answers(
        self, examples: list[Sentence], encoded: Encoded, found: Sequence[np.ndarray]
    ) -> Iterator[dict[str, Any]]:
        for sentence, tags in zip(examples, self.task.predictions(examples, encoded, found), strict=True):
            entities = [
                {"type": kind, "start": start, "end": end, "text": " ".join(sentence.words[start:end])}
                for start, end, kind in ner.entities(tags)
            ]
            yield {"words": sentence.words, "tags": tags, "entities": entities}


class _Choices(_Reader):
    def read(self, path: Path, kind: str | None) -> Iterator[Any]:
        _check_official(kind)
        if isinstance(self.task, Race):
            found = self.task.read(path.parent, path.name)
        else:
            found = swag.read(path, labelled=False)
        return zip(found.firsts, found.seconds, strict=True)

    def gathered(self, examples: list[Any]) -> Choices:
        right = [
            isinstance(each, (tuple, list))
            and len(each) == 2
            and isinstance(each[0], str)
            and _are_texts(each[1])
            and len(each[1]) == swag.CHOICES
            for each in examples
        ]
        _check(examples, right, "a text and four choices")
        return Choices([], [first for first, _ in examples], [tuple(four) for _, four in examples], None)

    def answers(
        self, examples: Choices, encoded: Encoded, found: Sequence[np.ndarray]
    ) -> Iterator[dict[str, Any]]:
        for seconds, row in zip(examples.seconds, _shares(found[0]), strict=True):
            best = int(row.argmax())
            yield {"choice": best, "text": seconds[best], "score": _rounded(row[best])}


def predict(
    task: str,
    model: str | Path,
    examples: str | Path | Iterable[Any],
    *,
    device: torch.device | str | None = None,
    dtype: str = "fp32",
    batch_tokens: int = 8192,
    max_length: int | None = None,
    input_format: str | None = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """What a trained model answers for new examples, in their order and in constant memory.

    SQuAD's .json and the files of SWAG and RACE are read whole. Each sentence of "ner" is tagged alone; with
    `columns` the neighbouring sentences of its document are its context, but for documents that 2,048
    sentences do not hold.

    Args:
        task: a name of `fastbert.finetuning.tasks`.
        model: a directory that `finetune` has written, another HuggingFace directory with the task's head, or
            a name on the hub.
        examples: a file or the examples themselves. GLUE and "csv": .txt, .csv, .tsv or .jsonl; texts, or
            tuples of two texts. "squad", "squad2": .jsonl with "question" and "context", or SQuAD's .json;
            tuples of both. "ner": one sentence per line, with spaces between the words, where empty
            lines are left out; lists of words; "ner-features": the same.
            "swag", "race": the official .csv, or the folder of a split; tuples of a text and four texts.
            "-" is stdin, which is read as it comes.
        device: None is a GPU if there is one, else the CPU.
        dtype: fp32, or bf16 or fp16 by autocast.
        batch_tokens: most tokens at a time; a longer example runs alone.
        max_length: most tokens per sequence; None is that of the training, else the task's default.
        input_format: txt, csv, tsv, jsonl or json, of a file whose name ends otherwise; for stdin None is
            txt, or jsonl of "squad" and "squad2".
        options: text and pair, the columns or keys of "csv" and GLUE; doc_stride and max_query of "squad" and
            "squad2", and null_threshold of "squad2", by default that of the training; context of "ner", and
            columns, whether its file has CoNLL's columns.

    Returns:
        An iterator of {"label", "score"}, the score being a probability, or {"value"} of a regression;
        {"answer", "score"}; {"words", "tags", "entities"}, whose "start" and "end" count words; or {"choice",
        "text", "score"}.

    Raises:
        ValueError, TypeError, OSError: naming the argument, or the file and the line.
    """
    expected.one_of(DTYPES, dtype=dtype)
    for name, value, least in (("batch_tokens", batch_tokens, 1), ("max_length", max_length, 3)):
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
    place = hub.resolve(model)
    stored = read_json(place / RESULTS) if (place / RESULTS).is_file() else {}
    reader = _reader_of(task, stored, options)
    loaded = _loaded(reader.task, place, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    usual = stored.get("best", {}).get("max_length", reader.task.defaults["max_length"])
    longest = max_length or min(usual, loaded.config.max_tokens)
    if longest > loaded.config.max_tokens:
        raise ValueError(
            f"max_length: the model reads at most {loaded.config.max_tokens} tokens, got {longest}"
        )
    is_file = isinstance(examples, (str, os.PathLike))
    given = reader.read(Path(examples), input_format) if is_file else iter(examples)
    return _answers(reader, loaded, place, load_tokenizer(place), given, longest, batch_tokens, DTYPES[dtype])


def _reader_of(name: str, stored: dict[str, Any], options: dict[str, Any]) -> _Reader:
    columns = options.pop("columns", False) if name in ("ner", "ner-features") else False
    texts = {key: options.pop(key) for key in ("text", "pair") if key in options and name in glue_tasks.TASKS}
    task = task_of(name, **{**options_of(name, stored), **options})
    task.recall(stored)
    if isinstance(task, Table):
        return _Texts(task, *task.columns[:2])
    if isinstance(task, Glue):
        official = dict(zip(("text", "pair"), task.form.texts, strict=False))
        texts = {**official, **texts}
        return _Texts(task, texts["text"], texts.get("pair"))
    if isinstance(task, Squad):
        return _Questions(task)
    return _Words(task, columns) if isinstance(task, Ner) else _Choices(task)


def _loaded(task: Task, place: Path, device: torch.device | str) -> Any:
    """The trained model, whose names of classes become the task's."""
    model = task.load(place, device)
    config = model.config
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise ValueError(f"model: {place} has several labels per text; expected one class or one number")
    task.classes = [str(config.id2label[i]) for i in range(len(config.id2label))]
    return model


def _answers(
    reader: _Reader,
    model: Any,
    place: Path,
    tokenizer: Tokenizer,
    examples: Iterator[Any],
    max_length: int,
    batch_tokens: int,
    dtype: torch.dtype,
) -> Iterator[dict[str, Any]]:
    task = reader.task
    while chunk := list(islice(examples, CHUNK)):
        gathered = reader.gathered(chunk)
        encoded = task.encode(gathered, tokenizer, max_length, False)
        encoded = task.prepared(encoded, gathered, place, model.device, dtype, batch_tokens)
        found = outputs(model, encoded, task.fields, batch_tokens=batch_tokens, dtype=dtype)
        yield from reader.answers(gathered, encoded, found)


def _check_official(kind: str | None) -> None:
    """Raise a ValueError if a format is asked for where only the official files are read."""
    if kind is not None:
        raise ValueError(f"input_format: expected None for the task's official files, got {kind!r}")


def _check(examples: Sequence[Any], right: Sequence[bool], expected: str) -> None:
    """Raise a ValueError that has the first example that is not right."""
    for example, is_right in zip(examples, right, strict=True):
        if not is_right:
            raise ValueError(f"examples: expected {expected}, got {example!r:.60}")


def _are_texts(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and all(isinstance(value, str) for value in values)


def _shares(logits: np.ndarray) -> np.ndarray:
    """(n, classes) logits -> probabilities."""
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def _rounded(value: float) -> float:
    return round(float(value), 6)
