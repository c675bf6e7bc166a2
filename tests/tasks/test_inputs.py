"""A user's own files of examples, with and without labels, and what is wrong with them."""

from __future__ import annotations

import json
import re

import pytest

from fastbert.tasks.inputs import read, spans_of

QUESTION, CONTEXT = "it rained", "The cat, a big red cat, sat on  the mats."


def test_files(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one\ttwo\n\nthree four\r\n")
    assert read(text) == {"texts": ["one\ttwo", "three four"]}
    table = tmp_path / "a.tsv"
    table.write_text("one\ttwo\nthree\tfour\n")
    assert read(table, pairs=True) == {"texts": ["one", "three"], "pairs": ["two", "four"]}
    lines = tmp_path / "a.jsonl"
    rows = [{"text": "one", "pair": "two", "class": 1}, {"text": "three", "pair": "four", "class": 0}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(lines, pairs=True, labels="class") == {
        "texts": ["one", "three"],
        "pairs": ["two", "four"],
        "labels": [1, 0],
    }
    assert read(lines) == {"texts": ["one", "three"]}


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("a.csv", "", {}, r"a\.csv: expected a file that ends in \.txt, \.tsv, \.jsonl"),
        ("a.txt", " \n\n", {}, r"a\.txt: expected one example at least, found none"),
        ("a.txt", "one\n", {"labels": "y"}, r"labels: .*a\.txt has none"),
        ("a.tsv", "a\tb\nc\n", {"pairs": True}, r"a\.tsv, line 2: expected two texts with a tab between"),
        ("a.jsonl", '{"text": "a"}\n{\n', {}, r"a\.jsonl, line 2: no JSON"),
        ("a.jsonl", '{"text": "a"}\n', {"labels": "y"}, r"line 1: expected an object with 'y'"),
        ("a.jsonl", '{"text": "a"}\n', {"pairs": True}, r"line 1: expected an object with a text as 'pair'"),
    ],
)
def test_bad_files(tmp_path, name, content, options, expected):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=expected):
        read(tmp_path / name, **options)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'a.txt'}, line 1: not UTF-8 (byte 0xff)")):
        read(tmp_path / "a.txt")


def test_answers_of_squad():
    """As datasets saves them, as the original file has them, by characters, and none."""
    start = CONTEXT.index("red cat")
    answers = [
        {"text": ["red cat", "cat"], "answer_start": [start, 4]},
        [{"text": "red cat", "answer_start": start}, {"text": "cat", "answer_start": 4}],
        [start, start + 7],
        {"text": [], "answer_start": []},
        [],
        None,
    ]
    span = (start, start + 7)
    assert spans_of(answers, [CONTEXT] * 6) == [span, span, span, None, None, None]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"text": ["dog"], "answer_start": [4]}, r"answers\[0\]: 'dog' is not at character 4 of its context"),
        ({"text": ["cat"], "answer_start": ["4"]}, r"answers\[0\]: 'cat' is not at character '4'"),
        ({"text": ["."], "answer_start": [-1]}, r"answers\[0\]: '.' is not at character -1"),
        ([1, 2, 3], r"answers\[0\]: expected .*, got "),
    ],
)
def test_answers_that_are_none(answer, expected):
    with pytest.raises(ValueError, match=expected):
        spans_of([answer], [CONTEXT])


def test_a_file_of_squad(tmp_path):
    row = {"question": QUESTION, "context": CONTEXT, "answers": {"text": ["cat"], "answer_start": [4]}}
    file = tmp_path / "squad.jsonl"
    file.write_text(json.dumps(row) + "\n")
    found = read(file, pairs=True, labels="answers")
    assert found == {"texts": [QUESTION], "pairs": [CONTEXT], "labels": [row["answers"]]}
    file.write_text(json.dumps({"question": QUESTION}) + "\n")
    with pytest.raises(ValueError, match="line 1: expected an object with a text as 'context'"):
        read(file, pairs=True)
    with pytest.raises(ValueError, match="line 1: expected an object with a text as 'text'"):
        read(file)
