"""GLUE: nine tasks and the diagnostic AX, from the official files to the official submission.

The files are UTF-8 with tabs between the fields and without quoting: a quote is a letter. Columns are found
by the names in the header, or by their place where the header has other names. CoLA's training and dev files
have no header.

Source: Wang et al. 2018, "GLUE"; nyu-mll/GLUE-baselines.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastbert.runtime import expected
from fastbert.tasks import metrics
from fastbert.tasks.files import Texts, rows
from fastbert.tasks.glue_tasks import TASKS, Task

# Columns that number the examples
_INDEX = ("index", "id")


def read(task: str, path: str | Path, split: str) -> Texts:
    """The examples of a split.

    Some questions of QQP have line ends in them (GLUE-baselines#5). Rows of its training and dev files that
    are malformed for this are left out and counted.

    Args:
        task: a key of `TASKS`.
        path: the file, the task's folder, or the folder of all tasks.
        split: train, dev or test; MNLI has dev_matched, dev_mismatched, test_matched and test_mismatched.

    Returns:
        Texts with `ids` from the columns index or id, if there is one. Labels are the names of classes, or
        floats for a regression, and None for a test split.

    Raises:
        ValueError, OSError: naming the argument, or the file and the line.
    """
    expected.one_of(TASKS, task=task)
    form = TASKS[task]
    if split not in form.files:
        raise ValueError(f"split: {task} has {', '.join(form.files)}, got {split!r}")
    labelled = split not in form.submissions
    path = _file(Path(path), form, split)
    table = rows(path, quoted=False)
    header: list[str] = []
    if split not in form.headless:
        where, header = next(table, (str(path), []))
        _check_header(where, header, form, labelled)
    numbers = [header.index(name) for name in _INDEX if name in header]
    places = form.places if labelled else form.test_places
    texts = [_place(header, name, place) for name, place in zip(form.texts, places, strict=True)]
    label = _place(header, form.label, form.label_place)
    width = len(header) or 4  # CoLA's
    labels: list[Any] | None = [] if labelled else None
    found = Texts([], [], [] if len(texts) == 2 else None, labels)
    skipped, seen = 0, set()
    for where, fields in table:
        if len(fields) != width:
            if task == "qqp" and labelled:
                skipped += 1
                continue
            raise ValueError(f"{where}: expected {width} fields, found {len(fields)}")
        name = fields[numbers[0]] if numbers else str(len(found.ids))
        if not labelled and name in seen:
            raise ValueError(f"{where}: expected one example per id, found {name!r:.40} again")
        seen.add(name)
        found.ids.append(name)
        found.texts.append(fields[texts[0]])
        if found.pairs is not None:
            found.pairs.append(fields[texts[1]])
        if labels is not None:
            labels.append(_label(where, form, fields[label]))
    if not found.texts:
        raise ValueError(f"{path}: expected one example at least, found none")
    return found._replace(skipped=skipped)


def _file(path: Path, task: Task, split: str) -> Path:
    name = task.files[split]
    tried = [path, path / task.folder / name, path / name]
    for file in tried:
        if file.is_file():
            return file
    raise FileNotFoundError(f"path: no {name} in {path} or {path / task.folder}")


def _place(header: list[str], name: str, place: int) -> int:
    return header.index(name) if name in header else place


def _check_header(where: str, header: list[str], task: Task, labelled: bool) -> None:
    """Refuse a file whose first line is an example, which would be lost, or too short."""
    places = task.places if labelled else task.test_places
    wanted = (*places, task.label_place) if labelled else places
    if len(header) < (least := max(wanted) + 1):
        raise ValueError(f"{where}: expected a header of {least} columns or more, found {header!r:.200}")
    if any(name in header for name in (*task.texts, *_INDEX, task.label)):
        return
    is_example = header[0].isdigit() or (labelled and header[task.label_place] in task.labels)
    if is_example:
        raise ValueError(f"{where}: expected a header with {', '.join(task.texts)}, found an example")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _label(where: str, task: Task, text: str) -> str | float:
    if task.regression:
        if not _is_number(text):
            raise ValueError(f"{where}: expected a number as label, found {text!r:.40}")
        return float(text)
    if text not in task.labels:
        raise ValueError(f"{where}: expected a label of {', '.join(task.labels)}, found {text!r:.40}")
    return task.labels[text]


def score(task: str, predictions: list[Any], labels: list[Any]) -> dict[str, float]:
    """Metric -> score in fractions of 1, the main metric first.

    Args:
        task: a key of `TASKS`.
        predictions: n class names, or floats for a regression.
        labels: the same, as `read` returns them.
    """
    form = TASKS[task]
    more = {"f1": (form.positive,)} if "f1" in form.metrics else {}
    return {name: getattr(metrics, name)(predictions, labels, *more.get(name, ())) for name in form.metrics}


def write_submission(folder: str | Path, predictions: Mapping[str, Mapping[str, str | float]]) -> Path:
    """Write a .tsv file per test split, and submission.zip with all of them.

    The server expects all eleven: CoLA, SST-2, MRPC, STS-B, QQP, MNLI-m, MNLI-mm, QNLI, RTE, WNLI and AX.

    Args:
        folder: is made if it is missing.
        predictions: one of these names -> id of the example -> the name of its class; for STS-B a number,
            which is cut to 0 to 5, as GLUE-baselines does.

    Returns:
        The zip file.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    tasks = {name: task for task in TASKS.values() for name in task.submissions.values()}
    texts = {}
    for name, of_task in predictions.items():
        if name not in tasks:
            raise ValueError(f"predictions: expected names of {', '.join(tasks)}, got {name!r}")
        lines = [
            f"{index}\t{_submitted(f'predictions[{name!r}][{index!r}]', tasks[name], value)}\n"
            for index, value in of_task.items()
        ]
        texts[f"{name}.tsv"] = "".join(["index\tprediction\n", *lines])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return write_archive(folder, [folder / name for name in texts])


def write_archive(folder: Path, files: Sequence[Path]) -> Path:
    """Write submission.zip with some files; equal files make equal bytes, whenever they were written."""
    with zipfile.ZipFile(folder / "submission.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, file.read_bytes())
    return folder / "submission.zip"


def _submitted(where: str, task: Task, value: str | float) -> str:
    """A prediction as the official file has it."""
    if task.regression:
        if not _is_number(str(value)):
            raise ValueError(f"{where}: expected a number, got {value!r}")
        return f"{min(max(float(value), 0.0), 5.0):.3f}"
    for text, name in task.labels.items():
        if name == value:
            return text
    raise ValueError(f"{where}: expected one of {', '.join(task.labels.values())}, got {value!r}")
