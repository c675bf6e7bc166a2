"""SQuAD 1.1 and 2.0: the official file in, windows of tokens out.

A context that does not fit is read in windows: window k begins at context token k x doc_stride, and the first
window that reaches the context's end is the last. `squad_answers` makes answers of the windows' scores.

Source: Rajpurkar et al. 2016, "SQuAD"; Rajpurkar et al. 2018, "Know What You Don't Know"; Devlin et al. 2018,
"BERT", sec. 4.2 and 4.3; google-research/bert's run_squad.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from fastbert.tasks.files import read_json
from fastbert.tasks.tokens import check_whole

# Questions that are tokenized at once
_CHUNK = 1024


class Answer(NamedTuple):
    """A text, and its first character in the context."""

    text: str
    start: int


class Question(NamedTuple):
    """One question about a context.

    Attributes:
        id: the official id.
        question: its text.
        context: the paragraph.
        answers: the gold answers; none if the question is unanswerable.
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


class Questions(NamedTuple):
    """What a file has.

    Attributes:
        questions: in the order of the file.
        misplaced: ids of the questions left out of a training file, because the context has another text
            where the answer should be.
        labelled: whether the file has answers; a test file has none.
    """

    questions: list[Question]
    misplaced: Sequence[str] = ()
    labelled: bool = False


class Window(NamedTuple):
    """The tokens of a question and of a part of its context.

    Attributes:
        question: the number of the question, from 0.
        ids: (n,) int32, special tokens included.
        types: (n,) int8, the token types: for BERT 0 for the question, 1 for the context.
        first: the position in `ids` of the window's first context token; the m context tokens follow it.
        offsets: (m, 2) int32, the first character in the context and the one after the last, per token.
        max_context: (m,) bool, whether no other window has more context around the token.
        start: the position in `ids` of the answer's first token; 0, the [CLS], if the window has no answer.
        end: the position of its last token, or 0.
    """

    question: int
    ids: np.ndarray
    types: np.ndarray
    first: int
    offsets: np.ndarray
    max_context: np.ndarray
    start: int
    end: int


class Windows(NamedTuple):
    """The windows of many questions.

    Attributes:
        windows: in the order of the questions; one per question at least.
        inexact: ids of the questions whose first answer begins or ends within a token.
        cut: ids of the questions that lost tokens to `max_query`.
    """

    windows: list[Window]
    inexact: list[str]
    cut: list[str]


def read(path: str | Path, *, train: bool) -> Questions:
    """The questions of a file of version 1.1 or 2.0.

    Args:
        path: of a JSON file, data -> paragraphs -> context and qas.
        train: whether the questions are trained on. Each must then have one answer, or be unanswerable by its
            `is_impossible`; it is left out if the context does not have the answer's text where it should be.

    Raises:
        ValueError, OSError: naming the file and the place in it.
    """
    content = read_json(path)
    found, misplaced, seen, labelled = [], [], set(), False
    for where, context, entry in _entries(str(path), content):
        name = _get(where, entry, "id", str)
        if name in seen:
            raise ValueError(f"{where}: expected one question per id, got {name!r} again")
        seen.add(name)
        impossible = "is_impossible" in entry and _get(where, entry, "is_impossible", bool)
        answers = []
        labelled |= "answers" in entry or "is_impossible" in entry
        # A test file has no answers
        for i, answer in enumerate(_get(where, entry, "answers", list) if "answers" in entry else []):
            inner = f"{where}.answers[{i}]"
            answers.append(Answer(_get(inner, answer, "text", str), _get(inner, answer, "answer_start", int)))
        if impossible:
            answers = []
        elif train and len(answers) != 1:
            raise ValueError(f"{where}: expected one answer to train on, got {len(answers)}")
        elif train and not _is_placed(context, answers[0]):
            misplaced.append(name)
            continue
        found.append(Question(name, _get(where, entry, "question", str), context, tuple(answers)))
    if not found:
        raise ValueError(f"{path}: expected one question at least, found none")
    return Questions(found, misplaced, labelled)


def _is_placed(context: str, answer: Answer) -> bool:
    return answer.start >= 0 and bool(answer.text.strip()) and context.startswith(answer.text, answer.start)


def _entries(path: str, content: Any) -> Iterator[tuple[str, str, Any]]:
    """(the place, for messages; the context; the question's entry) of each question."""
    for i, article in enumerate(_get(path, content, "data", list)):
        where = f"{path}: data[{i}]"
        for j, paragraph in enumerate(_get(where, article, "paragraphs", list)):
            inner = f"{where}.paragraphs[{j}]"
            context = _get(inner, paragraph, "context", str)
            for k, entry in enumerate(_get(inner, paragraph, "qas", list)):
                yield f"{inner}.qas[{k}]", context, entry


def _get(where: str, entry: Any, key: str, kind: type) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise ValueError(f"{where}: expected an object with {key!r}")
    if type(entry[key]) is not kind:
        raise ValueError(f"{where}: expected {key!r} to be of {kind.__name__}, got {entry[key]!r:.40}")
    return entry[key]


def windows(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    max_length: int = 384,
    doc_stride: int = 128,
    max_query: int = 64,
) -> Windows:
    """The windows of questions, with the positions of each question's first answer.

    Args:
        questions: as `read` returns them.
        tokenizer: as `fastbert.sentences.tokenizer.load_tokenizer` returns it.
        max_length: most tokens of a window, special tokens included.
        doc_stride: context tokens from the start of a window to the start of the next.
        max_query: most tokens of a question; later ones are cut.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    check_whole(tokenizer)
    room = max_length - max_query - tokenizer.num_special_tokens_to_add(True)
    for name, value in (("max_query", max_query), ("doc_stride", doc_stride)):
        if value < 1:
            raise ValueError(f"{name}: expected 1 or more, got {value}")
    if room < 1:
        raise ValueError(
            f"max_query: {max_query} leaves no context tokens; expected at most {max_query + room - 1} with "
            f"max_length {max_length}"
        )
    if doc_stride > room:
        raise ValueError(
            f"doc_stride: {doc_stride} leaves context tokens unread; expected at most {room}, which is "
            f"max_length {max_length} less max_query {max_query} and the special tokens"
        )
    found: list[Window] = []
    inexact: list[str] = []
    cut: list[str] = []
    for base in range(0, len(questions), _CHUNK):
        chunk = questions[base : base + _CHUNK]
        encoded = tokenizer.encode_batch([(question.question, question.context) for question in chunk])
        for number, (question, encoding) in enumerate(zip(chunk, encoded, strict=True), base):
            of_question, exact = _windows(number, question, encoding, max_length, doc_stride, max_query)
            found += of_question
            if not exact:
                inexact.append(question.id)
            if encoding.sequence_ids.count(0) > max_query:
                cut.append(question.id)
    return Windows(found, inexact, cut)


def _span(answers: Sequence[Answer], offsets: np.ndarray) -> tuple[tuple[int, int] | None, bool]:
    """(context tokens of the first answer, from 0, or None; whether they cover it exactly)."""
    if not answers:
        return None, True
    words = answers[0].text.strip()
    start = answers[0].start + answers[0].text.find(words)
    end = start + len(words)
    inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
    if not len(inside):
        return None, False
    first, last = int(inside[0]), int(inside[-1])
    return (first, last), bool(offsets[first, 0] == start and offsets[last, 1] == end)


def _windows(
    number: int, question: Question, encoding: Encoding, max_length: int, doc_stride: int, max_query: int
) -> tuple[list[Window], bool]:
    """(the windows of a question, whether tokens cover its answer exactly)."""
    ids, types = np.array(encoding.ids, np.int32), np.array(encoding.type_ids, np.int8)
    owners = np.array([-1 if owner is None else owner for owner in encoding.sequence_ids])
    context = np.flatnonzero(owners == 1)
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)[context]
    span, exact = _span(question.answers, offsets)
    kept = owners != 1
    kept[np.flatnonzero(owners == 0)[max_query:]] = False
    # The special tokens and the question that come before the context
    first = int(kept[: context[0]].sum()) if len(context) else int(kept.sum())
    room = max_length - int(kept.sum())
    starts = [0]
    while starts[-1] + room < len(context):
        starts.append(starts[-1] + doc_stride)
    ends = [min(start + room, len(context)) for start in starts]
    best = best_windows(starts, ends)
    found = []
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        chosen = kept.copy()
        chosen[context[start:end]] = True
        positions = (0, 0)
        if span is not None and start <= span[0] and span[1] < end:
            positions = (first + span[0] - start, first + span[1] - start)
        of_context = offsets[start:end], best[start:end] == k
        found.append(Window(number, ids[chosen], types[chosen], first, *of_context, *positions))
    return found, exact


def best_windows(starts: Sequence[int], ends: Sequence[int]) -> np.ndarray:
    """The window in which each context token has most context around it; of equal windows the first.

    A token's score in a window is the smaller of its distances to the window's two ends, plus 0.01 per token
    of the window.

    Args:
        starts: the first context token per window.
        ends: the context token after the last, per window.

    Returns:
        (tokens,) int64, the window's number.
    """
    tokens = np.arange(ends[-1])
    first, last = np.array(starts)[:, None], np.array(ends)[:, None] - 1
    scores = np.minimum(tokens - first, last - tokens) + 0.01 * (last - first + 1)
    return np.where((tokens >= first) & (tokens <= last), scores, -np.inf).argmax(0)
