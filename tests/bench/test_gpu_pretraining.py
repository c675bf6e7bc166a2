"""Pre-training on a GPU, tried on a CPU: what each row checks, and the whole command."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import pretraining

SECONDS = 60.0


def place(folder: Path) -> pretraining.Place:
    return pretraining.Place(folder, "cpu", 4, time.monotonic() + SECONDS)


def run_of(folder: Path, name: str, losses: list[float], weights: str = "one") -> None:
    """What a run leaves behind."""
    (folder / name / "step-000004").mkdir(parents=True)
    (folder / name / "log.jsonl").write_text("".join(json.dumps({"loss": loss}) + "\n" for loss in losses))
    sums = {"model.safetensors": weights, "trainer.json": name}
    (folder / name / "step-000004" / "manifest.json").write_text(json.dumps({"sha256": sums}))


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A place whose runs have ended already, and the runs."""
    done = [sys.executable, "-c", ""]
    monkeypatch.setattr(pretraining.Place, "command", lambda *_, **__: done)
    run_of(tmp_path, "whole", [3.0, 2.0])
    here = place(tmp_path)
    return here, {name: here.start(command) for name, command in pretraining.commands(here).items()}


def test_a_killed_run_must_leave_what_another_left(there):
    run_of(there[0].folder, "killed", [3.0, 2.0])
    assert pretraining.killed(*there) == {"run": "whole", "killed_after": 4}


@pytest.mark.parametrize(
    ("losses", "weights", "why"),
    [([3.0, 2.0], "other", "model.safetensors differ"), ([3.0, 2.1], "one", "the logs differ")],
)
def test_a_killed_run_that_leaves_something_else_is_told(there, losses, weights, why):
    run_of(there[0].folder, "killed", losses, weights)
    with pytest.raises(RuntimeError, match=why):
        pretraining.killed(*there)


def test_losses_must_fall_and_agree(there):
    run_of(there[0].folder, "fp16", [2.0, 3.0])
    with pytest.raises(RuntimeError, match=r"does not fall: 2\.000, then 3\.000"):
        pretraining.fp16(*there)
    run_of(there[0].folder, "ddp", [3.0, 2.1])
    with pytest.raises(RuntimeError, match=r"differ by 0\.05 of themselves, 0\.02 allowed"):
        pretraining.parallel("ddp")(*there)
    run_of(there[0].folder, "fsdp", [3.0, 2.01])
    assert pretraining.parallel("fsdp")(*there)["loss_gap"] == pytest.approx(0.005)
