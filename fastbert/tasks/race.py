"""RACE: the official folders in, four choices per question out.

The first text of all choices is the article. The second is the question, a space and the option, or the
question with the option in the place of "_".

Source: Lai et al. 2017, "RACE"; transformers' run_multiple_choice.py, which reads RACE with BERT.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastbert.tasks.files import Choices, read_json

LEVELS = ("middle", "high")
_ANSWERS = ("A", "B", "C", "D")


def read(path: str | Path, levels: tuple[str, ...] = LEVELS) -> Choices:
    """The questions of a split.

    Args:
        path: of the split's folder, which has a folder per level with one file per article.
        levels: middle, high or both, which are also scored alone.

    Returns:
        Choices whose ids are level/file#question, such as high/12.txt#0.

    Raises:
        ValueError, OSError: naming the file, and the question from 0.
    """
    ids, articles, seconds, labels = [], [], [], []
    for level in levels:
        files = sorted((Path(path) / level).glob("*.txt"), key=_number)
        if not files:
            raise FileNotFoundError(f"path: no .txt in {Path(path) / level}")
        for file in files:
            for i, (article, texts, label) in enumerate(_questions(file)):
                ids.append(f"{level}/{file.name}#{i}")
                articles.append(article)
                seconds.append(texts)
                labels.append(label)
    return Choices(ids, articles, seconds, labels)


def _number(file: Path) -> tuple[int, str]:
    """In the order of the numbers in the names: 2.txt before 10.txt."""
    digits = re.search(r"\d+", file.name)
    return int(digits[0]) if digits else -1, file.name


def _questions(file: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """(article, four second texts, number of the right one) of each question."""
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("article"), str):
        raise ValueError(f"{file}: expected an object with a text as 'article'")
    columns = [content.get(key) for key in ("questions", "options", "answers")]
    if not all(isinstance(values, list) and len(values) == len(columns[0] or ()) for values in columns):
        raise ValueError(f"{file}: expected lists of one length as 'questions', 'options' and 'answers'")
    for i, (question, options, answer) in enumerate(zip(*columns, strict=True)):
        where = f"{file}: questions[{i}]"
        if not isinstance(question, str):
            raise ValueError(f"{where}: expected a text, found {question!r:.40}")
        if not (_are_texts(options) and len(options) == len(_ANSWERS)):
            raise ValueError(f"{where}: expected four texts as options, found {options!r:.40}")
        if answer not in _ANSWERS:
            raise ValueError(f"{where}: expected an answer of {', '.join(_ANSWERS)}, found {answer!r:.40}")
        texts = tuple(_joined(question, option) for option in options)
        yield content["article"], texts, _ANSWERS.index(answer)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _joined(question: str, option: str) -> str:
    return question.replace("_", option) if "_" in question else f"{question} {option}"
