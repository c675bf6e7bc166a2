"""The tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastbert.finetuning.choices import Race, Swag
from fastbert.finetuning.features import NerFeatures
from fastbert.finetuning.sequences import Glue, Table
from fastbert.finetuning.spans import Squad
from fastbert.finetuning.tagging import Ner
from fastbert.finetuning.task import Task
from fastbert.runtime import expected
from fastbert.tasks import glue_tasks

# MNLI's model predicts ax
GLUE = tuple(name for name in glue_tasks.TASKS if name != "ax")
NAMES = (*GLUE, "squad", "squad2", "swag", "race", "ner", "ner-features", "csv")
# Task -> its options; tasks that are not here have none
OPTIONS = {
    "squad": ("doc_stride", "max_query"),
    "squad2": ("doc_stride", "max_query", "null_threshold"),
    "ner": ("context", "strict"),
    "ner-features": ("context", "strict", "layers"),
    "csv": ("text", "pair", "label", "regression"),
}


def options_of(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which a task was trained, from its results.json; those that the task has."""
    stored = results.get("options", {})
    return {option: stored[option] for option in OPTIONS.get(name, ()) if option in stored}


def task_of(name: str, **options: Any) -> Task:
    """A task by its name.

    Args:
        name: one of `NAMES`.
        options: those that `OPTIONS` has for the task; the task's class describes them.

    Raises:
        ValueError: there is no task of this name.
        TypeError: the task has no such option.
    """
    expected.one_of(NAMES, task=name)
    taken = OPTIONS.get(name, ())
    unknown = next((option for option in options if option not in taken), None)
    if unknown is not None:
        own = ", ".join(taken) or "it has none"
        raise TypeError(f"unknown option {unknown!r}: expected a setting, or an option of {name} ({own})")
    if name in GLUE:
        return Glue(name)
    if name in ("squad", "squad2"):
        return Squad(1 if name == "squad" else 2, **options)
    kinds = {"swag": Swag, "race": Race, "ner": Ner, "ner-features": NerFeatures, "csv": Table}
    return kinds[name](**options)
