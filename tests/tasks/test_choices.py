"""SWAG's CSV and RACE's folders, on hand-made files."""

from __future__ import annotations

import json

import pytest

from fastbert.tasks import race, swag

HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"


def test_rows_of_swag_have_quotes_and_line_ends(tmp_path):
    path = tmp_path / "train.csv"
    row = '0,v1,3,x,"A man, ""Ben"", waits.",He,gold,sits.,"runs,\r\nand falls.",,sings.'
    path.write_bytes(f"{HEADER},label\r\n{row},2\r\n\r\n1,v1,4,x,It rains.,It,gen,a,b,c,d,0\r\n".encode())
    found = swag.read(path)
    assert (found.ids, found.labels) == (["0", "1"], [2, 0])
    assert found.firsts == ['A man, "Ben", waits.', "It rains."]
    assert found.seconds[0] == ("He sits.", "He runs,\r\nand falls.", "He ", "He sings.")
    path.write_text(f"{HEADER}\n{row}\n")
    assert swag.read(path, labelled=False).labels is None


@pytest.mark.parametrize(
    ("rows", "message"),
    (
        ([HEADER], "line 1: expected one column 'label', found '', 'video-id'"),
        ([f"{HEADER},label"], "expected one example at least"),
        ([f"{HEADER},label,label"], "line 1: expected one column 'label', found it twice"),
        (
            [f"{HEADER},label", "0,v,3,x,a,b,g,c", "x"],
            "line 2: expected 12 fields, as in the header, found 8",
        ),
        (
            [f"{HEADER},label", '0,"v\n",3,x,a,b,g,c,d,e,f,0', "0,v,3,x,a,b,g,c,d,e,f,4"],
            "line 4: .*label of 0",
        ),
        ([f"{HEADER},label", '0,v,"3'], "line 2: no CSV"),
    ),
)
def test_defects_of_swag_name_file_and_line(tmp_path, rows, message):
    path = tmp_path / "val.csv"
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(ValueError, match=f"^{path}.*{message}"):
        swag.read(path)


ARTICLE = {
    "article": "Mia keeps\nbees.",
    "questions": ["What does Mia keep?", "Mia's _ are _ ."],
    "options": [["Bees", "Cats", "Owls", "Mice"], ["bees", "cats", "owls", "mice"]],
    "answers": ["A", "D"],
}


def write(folder, level, number, content):
    (folder / level).mkdir(exist_ok=True)
    path = folder / level / f"{number}.txt"
    path.write_text(json.dumps(content))
    return path


def test_options_of_race_follow_the_question_or_fill_its_gap(tmp_path):
    for level, number in (("high", 10), ("high", 9), ("middle", 3)):
        write(tmp_path, level, number, ARTICLE)
    found = race.read(tmp_path)
    assert [name for name in found.ids if name.endswith("#0")] == [
        "middle/3.txt#0",
        "high/9.txt#0",
        "high/10.txt#0",
    ]
    assert (found.firsts[1], found.labels[:2]) == ("Mia keeps\nbees.", [0, 3])
    assert (found.seconds[0][1], found.seconds[1][2]) == ("What does Mia keep? Cats", "Mia's owls are owls .")
    assert race.read(tmp_path, ("middle",)).ids == ["middle/3.txt#0", "middle/3.txt#1"]


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"article": None}, "expected an object with a text as 'article'"),
        ({"answers": ["A"]}, "expected lists of one length"),
        ({"questions": [1, 2]}, r"questions\[0\]: expected a text, found 1"),
        ({"options": [["a", "b", "c", "d"], ["a"]]}, r"questions\[1\]: expected four texts as options"),
        ({"answers": ["A", "E"]}, r"questions\[1\]: expected an answer of A, B, C, D, found 'E'"),
    ),
)
def test_defects_of_race_name_file_and_question(tmp_path, change, message):
    path = write(tmp_path, "high", 1, ARTICLE | change)
    with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
        race.read(tmp_path, ("high",))
    path.write_text("{")
    with pytest.raises(ValueError, match=f"^{path}: no JSON"):
        race.read(tmp_path, ("high",))
    with pytest.raises(FileNotFoundError, match=r"path: no .txt in"):
        race.read(tmp_path, ("middle",))
