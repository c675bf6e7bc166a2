"""Recipes: the numbers of published pre-trainings, as data (`recipes/*.json`), and how to override them.

A recipe is a JSON object:

    objective     a name of `OBJECTIVES`; `options` are its arguments
    format        {"kind": "segment-pairs", "full-sentences" or "doc-sentences", …}; … are its arguments
    masking       arguments of `Masking`
    phases        in order: max_length, batch_size (sequences), steps, lr, warmup (steps, or a share of the
                  steps below 1), max_predictions
    optimizer     kind, betas, eps, weight_decay
    schedule      kind and its arguments; over all phases, or over each phase if `fresh_optimizer` is set
    clip          the largest norm of the gradients; null: no clipping
    dropout       the model's dropout; null: the config's
    layerdrop     the probability that a layer is skipped in a step, in each exported model
    static        null, or Google's `dupe_factor`
    micro_batch   sequences of max_length tokens computed at a time; null: as many as have 8,192 tokens
    published     tables that are printed beside a run

If a format's sequences differ in length (doc-sentences), a batch has batch_size · max_length tokens.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from fastbert.checkpoint.files import read_json
from fastbert.pretraining.formats import DocSentences, Format, FullSentences, SegmentPairs
from fastbert.pretraining.masking import Masking
from fastbert.runtime import expected
from fastbert.training.optimizers import optimizer as _optimizer
from fastbert.training.schedules import Schedule

FOLDER = Path(__file__).parent / "recipes"
FORMATS = {"segment-pairs": SegmentPairs, "full-sentences": FullSentences, "doc-sentences": DocSentences}
MICRO_TOKENS = 8192


class RecipeError(ValueError):
    """A recipe cannot be used; the message names the field."""


@dataclass(frozen=True)
class Phase:
    """A part of a recipe with one length of sequences.

    Attributes:
        max_length: tokens of a sequence, special ones included.
        batch_size: sequences of a step, all processes together.
        steps: number of steps.
        lr: the largest learning rate.
        warmup: number of steps; a number below 1 is a share of the steps.
        max_predictions: most predicted tokens of a sequence; None: only the masking's share limits them.
    """

    max_length: int
    batch_size: int
    steps: int
    lr: float
    warmup: float = 0
    max_predictions: int | None = None

    def __post_init__(self) -> None:
        expected.integers(1, max_length=self.max_length, batch_size=self.batch_size, steps=self.steps)
        expected.numbers(">= 0", lr=self.lr, warmup=self.warmup)
        if self.max_predictions is not None:
            expected.integers(1, max_predictions=self.max_predictions)


@dataclass(frozen=True)
class Recipe:
    """A recipe; see the module."""

    source: str
    objective: str
    format: Mapping[str, Any]
    phases: tuple[Phase, ...]
    masking: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"kind": "adamw"})
    schedule: Mapping[str, Any] = field(default_factory=lambda: {"kind": "linear"})
    clip: float | None = 1.0
    dropout: float | None = None
    layerdrop: float = 0.0
    static: int | None = None
    fresh_optimizer: bool = False
    micro_batch: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    published: tuple[Mapping[str, Any], ...] = ()

    # -- read ------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, name: str) -> Recipe:
        """A recipe by name, or from a JSON file.

        Raises:
            RecipeError: there is no such recipe, or a field is wrong.
        """
        path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
        if not path.is_file():
            raise RecipeError(f"recipe: {name!r} is neither a file nor one of {', '.join(names())}")
        try:
            return cls.of(read_json(path))
        except ValueError as error:
            raise RecipeError(f"recipe {name}: {error}") from None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from a JSON object.

        Raises:
            RecipeError: naming the field.
        """
        known = {each.name for each in fields(cls)}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise RecipeError(f"{unknown[0]}: is no field; expected {', '.join(sorted(known))}")
        for name in ("source", "objective", "format", "phases"):
            if name not in values:
                raise RecipeError(f"{name}: is missing")
        for name in ("format", "masking", "optimizer", "schedule", "options"):
            if not isinstance(values.get(name, {}), dict):
                raise RecipeError(f"{name}: expected an object, got {values[name]!r}")
        phases = values["phases"]
        if not isinstance(phases, list) or not phases or not all(isinstance(p, dict) for p in phases):
            raise RecipeError("phases: expected a list of objects")
        made = []
        for number, phase in enumerate(phases):
            made.append(_phase(number, phase))
        _check_published(values.get("published", ()))
        values = {**copy.deepcopy(dict(values)), "phases": tuple(made)}
        values["published"] = tuple(values.get("published", ()))
        recipe = cls(**values)
        recipe.check()
        return recipe

    def check(self) -> None:
        """Raise RecipeError for a field that no part of a run can use."""
        for name in ("source", "objective"):
            if not isinstance(getattr(self, name), str):
                raise RecipeError(f"{name}: expected a text, got {getattr(self, name)!r}")
        for name in ("static", "micro_batch"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise RecipeError(f"{name}: expected an integer >= 1, or null, got {value!r}")
        if self.clip is not None and not (_is_number(self.clip) and self.clip > 0):
            raise RecipeError(f"clip: expected a number > 0, or null, got {self.clip!r}")
        if self.dropout is not None and not (_is_number(self.dropout) and self.dropout < 1):
            raise RecipeError(f"dropout: expected a number in [0, 1), or null, got {self.dropout!r}")
        if not (_is_number(self.layerdrop) and self.layerdrop < 1):
            raise RecipeError(f"layerdrop: expected a number in [0, 1), got {self.layerdrop!r}")
        if type(self.fresh_optimizer) is not bool:
            raise RecipeError(f"fresh_optimizer: expected true or false, got {self.fresh_optimizer!r}")
        check_options("optimizer", _optimizer, self.optimizer, ("groups", "lr"))
        check_options("schedule", Schedule, self.schedule)
        check_options("masking", Masking, self.masking)
        try:
            _optimizer(groups=[torch.zeros(1)], **{"kind": "adamw", **self.optimizer})
        except (TypeError, ValueError) as error:
            raise RecipeError(f"optimizer: {error}") from None
        if self.format.get("kind") not in [*FORMATS]:
            raise RecipeError(
                f"format.kind: expected one of {', '.join(FORMATS)}, got {self.format.get('kind')!r}"
            )
        options = {name: value for name, value in self.format.items() if name != "kind"}
        check_options("format", FORMATS[self.format["kind"]], options, ("corpus", "max_length", "seed"))
        for number, phase in enumerate(self.phases):
            for name, make in (("masking", self.masking_of), ("schedule", self.schedule_of)):
                try:
                    make(phase)
                except (TypeError, ValueError) as error:
                    raise RecipeError(f"{name} (phase {number}): {error}") from None
            self.cut(phase)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return json.loads(json.dumps(asdict(self)))

    # -- override --------------------------------------------------------------------------------------------

    def changed(self, path: str, value: Any) -> Recipe:
        """The recipe with a new value at a dotted path: "masking.share", "phases.0.lr", "phases.lr" (all).

        Raises:
            RecipeError: there is no such field, or the value is wrong.
        """
        return self.with_changes([(path, value)])

    def with_changes(self, changes: Iterable[tuple[str, Any]]) -> Recipe:
        """The recipe with new values at dotted paths; a later change overrides an earlier one.

        Raises:
            RecipeError: as `changed`.
        """
        values = self.to_dict()
        for path, value in changes:
            at, *rest = path.split(".")
            if at not in values:
                raise RecipeError(f"{path}: is no field of a recipe; expected {', '.join(sorted(values))}")
            value = copy.deepcopy(value)
            if at == "phases" and rest and not rest[0].isdecimal():
                for phase in values["phases"]:
                    _put(phase, rest, value, path, {each.name for each in fields(Phase)})
            elif rest:
                _put(values[at], rest, value, path)
            else:
                values[at] = value
        return Recipe.of(values)

    def with_steps(self, steps: int) -> Recipe:
        """The recipe with a new number of steps; phases and warm-ups keep their shares.

        Raises:
            RecipeError: fewer steps than phases.
        """
        if type(steps) is not int or steps < len(self.phases):
            raise RecipeError(f"steps: expected an integer >= {len(self.phases)}, got {steps!r}")
        whole, phases, done, ended = sum(p.steps for p in self.phases), [], 0, 0
        for number, phase in enumerate(self.phases):
            done += phase.steps
            end = max(round(steps * done / whole), ended + 1)
            end = min(end, steps - (len(self.phases) - 1 - number))
            warmup = phase.warmup
            if warmup >= 1:
                # the same share of the steps that the schedule covers
                share = (end - ended) / phase.steps if self.fresh_optimizer else steps / whole
                warmup = round(warmup * share)
            phases.append(replace(phase, steps=end - ended, warmup=warmup))
            ended = end
        return replace(self, phases=tuple(phases))

    # -- use -------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def by_tokens(self) -> bool:
        """Whether batches are measured in tokens."""
        return self.format["kind"] == "doc-sentences"

    def format_of(self, phase: Phase, corpus: Any, seed: int) -> Format[Any]:
        """The sequences of a phase."""
        options = dict(self.format)
        kind = FORMATS[options.pop("kind")]
        return kind(corpus, phase.max_length, seed, **options)

    def masking_of(self, phase: Phase) -> Masking:
        """The masks of a phase."""
        limit = {} if phase.max_predictions is None else {"max_predictions": phase.max_predictions}
        return Masking(**{**limit, **self.masking})

    def schedule_of(self, phase: Phase) -> Schedule:
        """The learning rates of a phase; the schedule covers the phase, or all phases together."""
        steps = phase.steps if self.fresh_optimizer else self.steps
        options = dict(self.schedule)
        for name in ("lr", "steps", "warmup"):
            if name in options:
                raise ValueError(f"{name}: is a field of phases")
        return Schedule(options.pop("kind", "linear"), phase.lr, steps, phase.warmup, **options)

    def cut(self, phase: Phase) -> tuple[int, int]:
        """(micro-batches per step, sequences of max_length tokens per micro-batch).

        Raises:
            RecipeError: batch_size is not a multiple of micro_batch.
        """
        size = self.micro_batch
        if size is None:
            most = max(1, MICRO_TOKENS // phase.max_length)
            size = max(n for n in range(1, min(phase.batch_size, most) + 1) if phase.batch_size % n == 0)
        if type(size) is not int or size < 1 or phase.batch_size % size:
            raise RecipeError(
                f"micro_batch: expected a divisor of batch_size, {phase.batch_size}, got {size!r}"
            )
        return phase.batch_size // size, size


def _phase(number: int, values: Mapping[str, Any]) -> Phase:
    """A phase from a JSON object; a RecipeError names the field."""
    known = {each.name: each for each in fields(Phase)}
    if unknown := sorted(values.keys() - known.keys()):
        raise RecipeError(f"phases.{number}.{unknown[0]}: is no field; expected {', '.join(sorted(known))}")
    for name, each in known.items():
        if name not in values and each.default is MISSING:
            raise RecipeError(f"phases.{number}.{name}: is missing")
    try:
        return Phase(**values)
    except ValueError as error:
        raise RecipeError(f"phases.{number}.{error}") from None


def check_options(
    where: str, kind: Callable[..., Any], given: Mapping[str, Any], own: Iterable[str] = ()
) -> None:
    """Raise RecipeError if an option is no argument of `kind`, or differs in type from the default.

    Args:
        where: the field of the recipe, for messages.
        kind: what takes the options.
        given: the options.
        own: arguments of `kind` that no recipe sets.
    """
    known = {name: p.default for name, p in inspect.signature(kind).parameters.items() if name not in own}
    for name, value in given.items():
        if name not in known:
            raise RecipeError(f"{where}.{name}: is no field; expected {', '.join(sorted(known)) or 'none'}")
        default, real = known[name], type(value) in (int, float) and math.isfinite(value)
        for types, right, what in (
            (bool, type(value) is bool, "true or false"),
            ((int, float), real, "a finite number"),
            (str, isinstance(value, str), "a text"),
            (tuple, isinstance(value, (list, tuple)), "a list"),
        ):
            if isinstance(default, types):
                if not right:
                    raise RecipeError(f"{where}.{name}: expected {what}, got {value!r}")
                break


def _check_published(tables: Any) -> None:
    """Raise RecipeError unless `tables` are tables with a figure per row and column."""
    if not isinstance(tables, (list, tuple)) or not all(isinstance(table, dict) for table in tables):
        raise RecipeError(f"published: expected a list of objects, got {tables!r}")
    for number, table in enumerate(tables):
        where = f"published.{number}"
        columns, rows = table.get("columns"), table.get("rows")
        if not isinstance(table.get("source"), str):
            raise RecipeError(f"{where}.source: expected a text, got {table.get('source')!r}")
        if not isinstance(columns, list) or not columns or not all(isinstance(c, str) for c in columns):
            raise RecipeError(f"{where}.columns: expected a list of texts, got {columns!r}")
        if not isinstance(rows, dict) or not rows:
            raise RecipeError(f"{where}.rows: expected an object, a list per row, got {rows!r}")
        for name, row in rows.items():
            cells = row if isinstance(row, list) else []
            if len(cells) != len(columns) or not all(isinstance(c, (int, float, str)) for c in cells):
                raise RecipeError(f"{where}.rows.{name}: expected {len(columns)} figures, got {row!r}")


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number >= 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def _put(values: Any, path: list[str], value: Any, whole: str, known: set[str] | None = None) -> None:
    """Set the value at a path within JSON."""
    *above, last = path
    for key in above:
        if isinstance(values, list) and key.isdecimal() and int(key) < len(values):
            values = values[int(key)]
        elif isinstance(values, dict) and key in values:
            values = values[key]
        else:
            raise RecipeError(f"{whole}: there is no {key}")
    if not isinstance(values, dict) or (known is not None and last not in known):
        raise RecipeError(f"{whole}: there is no {last}")
    values[last] = value
