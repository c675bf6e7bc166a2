"""How a run is interrupted, and what its directory must hold so that the run resumes."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from fastbert.checkpoint.files import read_json
from fastbert.training import checkpoints
from fastbert.training.identity import difference

CONFIG = "config.json"
STATE = "trainer.json"


class TrainingError(ValueError):
    """A run cannot start or resume; the message names what is wrong and where."""


class Interrupted(Exception):
    """A signal has ended the run, after a step and its checkpoint.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int, where: Path | None) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; saved {where}")
        self.number = number


class Signals:
    """A context in which a signal of `NUMBERS` is noted; a second one has its usual effect.

    Attributes:
        noted: number of the signal, or None.
    """

    # those that the system has
    NUMBERS = tuple(
        int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
    )

    def __init__(self) -> None:
        self.noted: int | None = None
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: object) -> None:
        self.noted = number
        signal.signal(number, self._before[number])

    def __enter__(self) -> Signals:
        # other threads cannot set handlers
        if threading.current_thread() is threading.main_thread():
            for number in self.NUMBERS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def check_config(output: Path, config: Mapping[str, Any]) -> None:
    """Compare a run's config with the one of its directory; without one the directory must be empty.

    Raises:
        TrainingError: naming the file and what differs.
    """
    path = output / CONFIG
    problem = None
    if path.exists():
        problem = difference(read_json(path), config, path)
    elif checkpoints.steps_in(output):
        problem = f"{path}: is missing beside checkpoints; it has what they were trained with"
    else:
        checkpoints.check_begun(output)
    if problem:
        raise TrainingError(problem)


def check_state(found: Path, state: Mapping[str, Any], steps: int, stage_at: Callable[[int], int]) -> None:
    """Check the values of a checkpoint's trainer.json.

    Args:
        found: the checkpoint's folder.
        state: the values.
        steps: number of steps of the run.
        stage_at: step -> number of its stage.

    Raises:
        TrainingError: there is a value that no run writes.
    """
    step = state.get("step")
    if type(step) is not int or checkpoints.name_of(step) != found.name:
        raise TrainingError(f"{found / STATE}: step: expected that of the folder, got {step!r}")
    if step > steps:
        raise TrainingError(f"{found}: step {step}, but the run has {steps}")
    ended, begun = (stage_at(at) for at in (max(step - 1, 0), step))
    counts = ("tokens", "sequences", "skipped")
    for name, right, expected in (
        ("stage", lambda value: _is_one_of(value, (ended, begun)), f"{ended} or {begun}"),
        *((name, _is_count, "an integer >= 0") for name in counts),
        ("log_bytes", lambda value: _is_object(value, _is_count), "an object of integers >= 0"),
        ("log_sha256", lambda value: _is_object(value, _is_text), "an object of texts"),
        ("sizes", lambda value: _is_object(value, _are_sizes), "an object of pairs of integers"),
        ("scaler", lambda value: _is_object(value, _is_real), "an object of finite numbers"),
        ("versions", lambda value: _is_object(value, _is_text), "an object of texts"),
    ):
        if not right(state.get(name)):
            raise TrainingError(f"{found / STATE}: {name}: expected {expected}, got {state.get(name)!r}")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_one_of(value: object, numbers: Collection[int]) -> bool:
    return _is_count(value) and value in numbers


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_sizes(value: object) -> bool:
    pairs = value if isinstance(value, list) else [None]
    return all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair)) for pair in pairs)


def _is_object(value: object, right: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(right, value.values()))
