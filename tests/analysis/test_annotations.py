"""Files that name patterns of heads, and what is wrong with them."""

from __future__ import annotations

import json

import pytest

from fastbert.analysis.annotations import read_patterns

NAMES = ("a", "b", "c")
COUNTS = {"example": 2, "layer": 3, "head": 4}


def test_a_file(tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text(
        '{"example": 0, "layer": 2, "head": 1, "pattern": "b", "note": "whatever"}\n\n'
        '{"example": 1, "layer": 0, "head": 3, "pattern": "a"}\n'
    )
    found = read_patterns(file, NAMES, COUNTS)
    assert {name: values.tolist() for name, values in found.items()} == (
        {"example": [0, 1], "layer": [2, 0], "head": [1, 3], "pattern": [1, 0]}
    )
    assert read_patterns(file, NAMES, {"head": 4})["head"].tolist() == [1, 3]


def line(example=1, layer=1, head=1, pattern="a"):
    return json.dumps({"example": example, "layer": layer, "head": head, "pattern": pattern})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[", "line 2: no JSON"),
        ("3", "line 2: expected an object with 'example'"),
        ('{"example": 1, "layer": 1, "pattern": "a"}', "line 2: expected an object with 'head'"),
        ('{"example": 1, "layer": 1, "head": 1}', "line 2: expected an object with 'pattern'"),
        (line(example=2), "line 2: example: expected an integer from 0 to 1, got 2"),
        (line(layer=-1), "layer: expected an integer from 0 to 2, got -1"),
        (line(head=4), "head: expected an integer from 0 to 3, got 4"),
        (line(head=True), "head: expected an integer from 0 to 3, got True"),
        (line(head="1"), "head: expected an integer from 0 to 3, got '1'"),
        (line(pattern="d"), "pattern: expected one of a, b, c, got 'd'"),
        (line(pattern=[1]), r"pattern: expected one of a, b, c, got \[1\]"),
        (line(0, 0, 0), "line 2: example 0, layer 0, head 0 again, which line 1 has"),
        ("\xe9", "no JSON"),
    ],
)
def test_a_mistake_names_its_line(tmp_path, text, expected):
    file = tmp_path / "labels.jsonl"
    file.write_text(f"{line(0, 0, 0)}\n{text}\n")
    with pytest.raises(ValueError, match=expected) as error:
        read_patterns(file, NAMES, COUNTS)
    assert str(file) in str(error.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="expected one pattern at least, found none"):
        read_patterns(tmp_path / "empty", NAMES, COUNTS)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_patterns(tmp_path / "bytes", NAMES, COUNTS)
    with pytest.raises(OSError, match="nothing"):
        read_patterns(tmp_path / "nothing", NAMES, COUNTS)
