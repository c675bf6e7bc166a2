"""The tasks by name."""

from __future__ import annotations

from typing import Any

from fastbert.finetuning.choices import Race, Swag
from fastbert.finetuning.sequences import Glue, Table
from fastbert.finetuning.spans import Squad
from fastbert.finetuning.tagging import Ner
from fastbert.finetuning.task import Task
from fastbert.tasks import glue_tasks

# MNLI's model predicts ax
GLUE = tuple(name for name in glue_tasks.TASKS if name != "ax")
NAMES = (*GLUE, "squad", "squad2", "swag", "race", "ner", "csv")


def task_of(name: str, **options: Any) -> Task:
    """A task by its name.

    Args:
        name: one of `NAMES`.
        options: of the task's class: columns of `Table`, strides of `Squad`, context of `Ner`.

    Raises:
        ValueError: there is no task of this name.
        TypeError: the task has no such option.
    """
    if name in GLUE:
        return Glue(name, **options)
    if name in ("squad", "squad2"):
        return Squad(1 if name == "squad" else 2, **options)
    kinds = {"swag": Swag, "race": Race, "ner": Ner, "csv": Table}
    if name in kinds:
        return kinds[name](**options)
    raise ValueError(f"task: expected one of {', '.join(NAMES)}, got {name!r}")
