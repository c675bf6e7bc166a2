"""A user's own CSV and TSV."""

from __future__ import annotations

import pytest

from fastbert.tasks import csv_file


def test_columns_are_read_by_name(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text('stars,text,"title, short"\n1.5,"Rain,\nall ""day""",\n-2,\u202fSun.,Good\n', "utf-8")
    found = csv_file.read(path, "text", "title, short", "stars", regression=True)
    assert found == (["0", "1"], ['Rain,\nall "day"', "\u202fSun."], ["", "Good"], [1.5, -2.0], 0)
    found = csv_file.read(path, "text", label="stars")
    assert (found.pairs, found.labels) == (None, ["1.5", "-2"])
    path = tmp_path / "mine.tsv"
    path.write_bytes(b'text\tkind\r\n\xef\xbb\xbf"Hm, he said.\tx\r\n')
    assert csv_file.read(path, "text", label="kind")[1:] == (['\ufeff"Hm, he said.'], None, ["x"], 0)
    assert csv_file.read(path, "text").labels is None


def test_classes_that_are_numbers_are_sorted_as_numbers():
    assert csv_file.classes(["10", "9", "10"]) == ["9", "10"]
    assert csv_file.classes(["9" * 5000, "01", "1", "02"]) == ["1", "01", "02", "9" * 5000]
    assert csv_file.classes(["b", "10", "9"]) == ["10", "9", "b"]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    (
        ("a.txt", "", r"path: expected a file that ends in .csv or .tsv"),
        ("a.csv", "text,kind\na,1\n", "line 1: expected one column 'stars', found 'text', 'kind'"),
        ("a.csv", "", "expected one column 'text', found none"),
        ("a.csv", f"{'x' * 200_000}\na\n", "line 1: expected one column 'text', found 'x{199}$"),
        ("a.csv", "text,stars\na,1,2\n", "line 2: expected 2 fields, as in the header, found 3"),
        ("a.csv", "text,stars\n", "expected one example at least"),
        ("a.csv", 'text,stars\n"a\nb",1\na,x\n', "line 4: expected a finite float32 as label, found 'x'"),
        ("a.csv", "text,stars\na,nan\n", "line 2: expected a finite float32 as label, found 'nan'"),
        ("a.csv", "text,stars\na,1e39\n", "line 2: expected a finite float32 as label"),
        ("a.tsv", "text\tstars\na\n", "line 2: expected 2 fields, as in the header, found 1"),
    ),
)
def test_defects_name_file_and_line(tmp_path, name, rows, message):
    (tmp_path / name).write_text(rows)
    with pytest.raises(ValueError, match=message):
        csv_file.read(tmp_path / name, "text", label="stars", regression=True)


def test_a_class_has_a_name(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tkind\na\t\n")
    with pytest.raises(ValueError, match="line 2: expected a label, found none"):
        csv_file.read(tmp_path / "a.tsv", "text", label="kind")
