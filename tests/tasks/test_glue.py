"""GLUE's files on hand-made rows, and the submission."""

from __future__ import annotations

import zipfile

import pytest

from fastbert.tasks import glue
from fastbert.tasks.glue_tasks import TASKS

PAIRS = "index\tsentence1\tsentence2\tlabel"
# task -> (split, rows of the official form, what is read of the last row)
ROWS = {
    "cola": (
        "train",
        ["gj04\t1\t\tThe kettle sings.", 'x\t0\t*\tHe "sings.'],
        ('He "sings.', None, "unacceptable"),
    ),
    "sst2": (
        "dev",
        ["sentence\tlabel", "a dull\u202fevening \t0"],
        ("a dull\u202fevening ", None, "negative"),
    ),
    "mrpc": (
        "train",
        ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t7\t8\t"Rain fell.\tIt rained"'],
        ('"Rain fell.', 'It rained"', "equivalent"),
    ),
    "stsb": (
        "dev",
        [
            "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
            "0\tg\tf\t2012\t1\tnone\tnone\tA cup.\tA mug.\t3.750",
        ],
        ("A cup.", "A mug.", 3.75),
    ),
    "qqp": (
        "dev",
        ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "1\t2\t3\tWhy?\t\t1"],
        ("Why?", "", "duplicate"),
    ),
    "mnli": (
        "dev_matched",
        [
            "index\tpromptID\tpairID\tgenre\ta\tb\tc\td\tsentence1\tsentence2\tlabel1\tgold_label",
            "0\t1\t1\tx\t(\t(\t(\t(\tIt rains.\tIt is dry.\tneutral\tcontradiction",
        ],
        ("It rains.", "It is dry.", "contradiction"),
    ),
    "qnli": (
        "train",
        ["index\tquestion\tsentence\tlabel", "4\tWho?\tNo.\tnot_entailment"],
        ("Who?", "No.", "not_entailment"),
    ),
    "rte": ("dev", [PAIRS, "0\tA.\tB.\tentailment"], ("A.", "B.", "entailment")),
    "wnli": ("dev", [PAIRS, "0\tA.\tB.\t1"], ("A.", "B.", "entailment")),
    "ax": ("test", ["index\tsentence1\tsentence2", "0\tA.\tB."], ("A.", "B.", None)),
}


def write(folder, task, split, lines, end="\n"):
    path = folder / TASKS[task].files[split]
    path.write_bytes((end.join(lines) + end).encode())
    return path


@pytest.mark.parametrize("end", ("\n", "\r\n"))
@pytest.mark.parametrize("task", TASKS)
def test_rows_are_read(tmp_path, task, end):
    split, lines, expected = ROWS[task]
    for kind in ("train", "dev") if task == "cola" else (split,):
        write(tmp_path, task, kind, lines, end)
        found = glue.read(task, tmp_path, kind)
        last = found.texts[-1], found.pairs and found.pairs[-1], found.labels and found.labels[-1]
        assert last == expected
        assert len(found.texts) == len(lines) - (task != "cola")
        assert found.skipped == 0


@pytest.mark.parametrize("task", ("mrpc", "qqp", "mnli", "stsb", "qnli"))
def test_columns_are_found_by_name_and_then_by_place(tmp_path, task):
    split, (header, row), expected = ROWS[task]
    names, fields = header.split("\t"), row.split("\t")
    reversed_columns = ["\t".join(names[::-1]), "\t".join(fields[::-1])]
    renamed = ["\ufeff" + "\t".join(f"x{i}" for i in range(len(names))), "\t".join(["-", *fields[1:]])]
    if task == "mrpc":
        renamed[1] = row
    for lines in (reversed_columns, renamed):
        found = glue.read(task, write(tmp_path, task, split, lines), split)
        assert (found.texts[0], found.pairs[0], found.labels[0]) == expected


def test_test_files_have_ids_and_no_labels(tmp_path):
    for header, ids in (("\ufeffid\tquestion1\tquestion2", ["17"]), ("number\ta\tb", ["0"])):
        write(tmp_path, "qqp", "test", [header, "17\tWhy?\tHow?"])
        assert glue.read("qqp", tmp_path, "test") == (ids, ["Why?"], ["How?"], None, 0)
    (tmp_path / "CoLA").mkdir()
    write(tmp_path / "CoLA", "cola", "test", ["index\tsentence", "0\tHe went\rhome."])
    assert glue.read("cola", tmp_path, "test").texts == ["He went\rhome."]
    write(tmp_path, "qqp", "test", ["id\tquestion1\tquestion2", "17\tWhy?"])
    with pytest.raises(ValueError, match="line 2: expected 3 fields, found 2"):
        glue.read("qqp", tmp_path, "test")
    write(tmp_path, "cola", "test", ["index\tsentence", "0\tHe ran.", "0\tHe sat."])
    with pytest.raises(ValueError, match="line 3: expected one example per id, found '0' again"):
        glue.read("cola", tmp_path / "test.tsv", "test")


# task -> (columns of text in the test files, from 0; metrics), as GLUE-baselines has them
OFFICIAL = {
    "cola": ((1,), ("matthews",)),
    "sst2": ((1,), ("accuracy",)),
    "mrpc": ((3, 4), ("f1", "accuracy")),
    "stsb": ((7, 8), ("spearman", "pearson")),
    "qqp": ((1, 2), ("f1", "accuracy")),
    "mnli": ((8, 9), ("accuracy",)),
    **dict.fromkeys(("qnli", "rte", "wnli"), ((1, 2), ("accuracy",))),
    "ax": ((1, 2), ("matthews",)),
}


@pytest.mark.parametrize("task", TASKS)
def test_columns_and_metrics_are_the_official_ones(tmp_path, task):
    places, names = OFFICIAL[task]
    assert TASKS[task].metrics == names
    rows = ["\t".join(f"{letter}{i}" for i in range(10)) for letter in "xc"]
    for split, name in TASKS[task].submissions.items():
        found = glue.read(task, write(tmp_path, task, split, rows), split)
        assert [*found.texts, *(found.pairs or ())] == [f"c{i}" for i in places]
        assert name.endswith("-mm") is ("mismatched" in split)


def test_malformed_rows_of_qqp_are_counted(tmp_path):
    header, row = ROWS["qqp"][1]
    lines = [header, "1\t2\t3\tWhy", "so?\tHow?\t0", row]
    write(tmp_path, "qqp", "dev", lines)
    found = glue.read("qqp", tmp_path, "dev")
    assert (found.skipped, found.labels) == (2, ["duplicate"])


@pytest.mark.parametrize(
    ("task", "lines", "message"),
    (
        ("rte", [PAIRS, "0\tA.\tB."], "line 2: expected 4 fields, found 3"),
        ("rte", [PAIRS, "0\tA.\tB.\tyes"], "line 2: expected a label of entail"),
        ("rte", ["0\tA.\tB.\tentailment"], "line 1: expected a header with sentence1"),
        ("rte", ["index\tsentence1"], "line 1: expected a header of 3 columns"),
        ("rte", [PAIRS], "expected one example at least"),
        ("stsb", [*ROWS["stsb"][1], ROWS["stsb"][1][1] + "?"], "line 3: expected a number as label"),
        ("stsb", [row.replace("3.750", "nan") for row in ROWS["stsb"][1]], "line 2: .*number as label"),
        ("stsb", [ROWS["stsb"][1][1]], "line 1: expected a header"),
        ("wnli", ["7\tA.\tB.\t"], "line 1: expected a header with sentence1"),
        ("sst2", ["sentence\tlabel", "fine\udce9\t1"], r"line 2: not UTF-8 \(byte 0xe9\)"),
    ),
)
def test_defects_name_file_and_line(tmp_path, task, lines, message):
    path = tmp_path / "dev.tsv"
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"^{path}.*{message}"):
        glue.read(task, path, "dev")


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="task: expected one of cola"):
        glue.read("mnl", tmp_path, "dev")
    with pytest.raises(ValueError, match="split: mnli has train, dev_matched"):
        glue.read("mnli", tmp_path, "dev")
    with pytest.raises(FileNotFoundError, match=r"path: no dev.tsv in"):
        glue.read("rte", tmp_path, "dev")


def test_scores_are_those_of_the_positive_class():
    true = ["equivalent", "equivalent", "not_equivalent"]
    assert glue.score("mrpc", ["equivalent"] * 3, true) == pytest.approx({"f1": 0.8, "accuracy": 2 / 3})


def test_the_submission_has_the_official_names(tmp_path):
    names = [name for task in TASKS.values() for name in task.submissions.values()]
    assert set(names) == {
        *("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI-m", "MNLI-mm", "QNLI", "RTE", "WNLI", "AX")
    }
    given = {"STS-B": {"0": 5.25, "1": 1.23456, "2": -1}, "CoLA": {"0": "acceptable"}, "AX": {"0": "neutral"}}
    with zipfile.ZipFile(glue.write_submission(tmp_path / "new", given)) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert texts == {
        "STS-B.tsv": "index\tprediction\n0\t5.000\n1\t1.235\n2\t0.000\n",
        "CoLA.tsv": "index\tprediction\n0\t1\n",
        "AX.tsv": "index\tprediction\n0\tneutral\n",
    }
    for wrong in ({"MNLI": {}}, {"CoLA": {"0": "1"}}, {"STS-B": {"0": "high"}}):
        with pytest.raises(ValueError, match="predictions"):
            glue.write_submission(tmp_path, wrong)
