"""Text files as documents and sentences."""

from __future__ import annotations

import collections
import random
import re

import pytest

from fastbert.pretraining.documents import _ABBREVIATION, _last_word, documents, split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Dr. Who met Mrs. Jones on Jan. 5 at 3.14 p.m. sharp.", None),
        ("J. S. Bach lived in the U.S. Army barracks, e.g. in No. 4.", None),
        ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
        ("It ended (at last.) Few knew.", ["It ended (at last.)", "Few knew."]),
        ("call foo.bar() or file.txt now", None),
        ("one line\nanother line. And more", ["one line", "another line.", "And more"]),
        ("It is done. 12 were left.", ["It is done.", "12 were left."]),
        ("nothing here. but lower case", None),
        ("これは文です。これも文です。", ["これは文です。", "これも文です。"]),
        ("Wait... What? Élan.", ["Wait...", "What?", "Élan."]),
        (" \n\t\n", []),
        ("", []),
    ],
)
def test_sentences_by_rule(text, sentences):
    assert split_sentences(text) == ([text] if sentences is None else sentences)


def test_formats_hold_the_same_documents(text_file, json_file, texts):
    expected = [split_sentences(text) for text in texts]
    assert list(documents([json_file])) == expected
    assert list(documents([text_file])) == expected
    assert list(documents([text_file, json_file])) == expected * 2
    assert list(documents([text_file], "text")) == expected


def test_what_a_line_may_end_with(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeff  one \r\ntwo\n \t \n\n\nthree".encode())
    sizes = []
    assert list(documents([path], seen=sizes.append)) == [["one", "two"], ["three"]]
    assert sum(sizes) == path.stat().st_size


def test_parquet(tmp_path, texts, json_file):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": texts, "id": list(range(len(texts)))}), path)
    sizes = []
    assert list(documents([path], seen=sizes.append)) == list(documents([json_file]))
    assert 0 < sum(sizes) <= path.stat().st_size
    parquet.write_table(pyarrow.table({"body": texts}), path)
    with pytest.raises(ValueError, match=r'a\.parquet: expected a column "text", got body'):
        list(documents([path]))
    parquet.write_table(pyarrow.table({"text": [f"one {i}" for i in range(1000)]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * 50 + content[150:])
    with pytest.raises(ValueError, match=r"a\.parquet: after row 0: damaged \("):
        list(documents([path]))
    path.write_bytes(b"PAR1 is not enough")
    with pytest.raises(ValueError, match=r"a\.parquet: not a Parquet file"):
        list(documents([path]))


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"fine\nbad \xff byte", r"a\.txt: line 2: not UTF-8 \(byte 5 is 0xff\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl: line 2: is not valid JSON"),
        (
            "a.jsonl",
            b'{"text": "\\ud800"}',
            r"a\.jsonl: line 1: half of a surrogate pair is no valid Unicode",
        ),
        ("a.jsonl", b'{"body": "x"}', r"a\.jsonl: line 1: expected an object"),
        ("a.csv", b"x", r"a\.csv: no format has this suffix"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        list(documents([tmp_path / name]))


def test_a_line_without_an_end_takes_no_longer_per_character():
    """A bibliography in one line: minutes, if each full stop reads the line from its beginning."""
    for text in (
        "A. " * 50_000,
        "a.b." * 40_000 + " A",
        "." + '"' * 10**5 + " " * 10**5 + "x",
        ". " * 50_000,
    ):
        assert "".join(split_sentences(text)).replace(" ", "") == text.replace(" ", "")


def test_abbreviations_are_those_of_the_definition():
    """Read from the beginning of the sentence on."""
    before = re.compile(rf"(?:^|[\s(\[\"'“‘])(?:{_ABBREVIATION.pattern})$", re.IGNORECASE)
    draw = random.Random(0)
    pieces = ["Dr", "e.g", "a", "B", "1", "U.S", "word", "etc", "_", "(", ".", "-", "é"]
    pieces += [" ", "\u2003", '"', "“"]
    found = collections.Counter()
    for _ in range(20_000):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 6)))
        ours = _ABBREVIATION.fullmatch(_last_word(f"x{text}y", 1, len(text) + 1)) is not None
        assert ours == (before.search(text) is not None), text
        found[ours] += 1
    assert min(found.values()) > 2000


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt: no such file"):
        list(documents([tmp_path / "nowhere.txt"]))
    with pytest.raises(ValueError, match="format: expected one of text, jsonl, parquet, got 'csv'"):
        list(documents([tmp_path / "a.txt"], "csv"))
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"deep\.jsonl: line 1: is nested deeper"):
        list(documents([tmp_path / "deep.jsonl"]))
