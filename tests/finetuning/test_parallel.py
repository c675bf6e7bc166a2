"""Two processes fine-tune as one does, and resume together."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from fastbert.finetuning.settings import FreeLB, Smart
from fastbert.finetuning.tasks import task_of
from fastbert.training import loop
from fastbert.training.loop import Interrupted, Trainer
from fastbert.training.parallel import Parallel
from tests.support.ranks import together
from tests.support.rule_tasks import files, quick, written

pytestmark = pytest.mark.sweep

MADE = {"squad2": {"max_query": 10, "doc_stride": 8}, "ner-features": {"layers": "last"}}
OPTIONS = {"lr": [1e-3, 2e-3], "restarts": 2, "epochs": 2, "batch_size": 8}


def tuned(
    task: str, model: Path, data: Path, output: Path, stop: int | None = None, settings: dict | None = None
) -> dict:
    """Be one of the processes; how it ended, its scores and what it said."""
    loop.work.roof = lambda *device_and_dtype: 1e9
    counted, said = Trainer._counted, []

    def stops(self, micro):
        if self.step == stop and self.parallel.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return counted(self, micro)

    if stop is not None:
        Trainer._counted = stops
    try:
        made = task_of(task, **MADE.get(task, {}))
        parallel = Parallel(device="cpu")
        result = quick(
            made, model, data, output, parallel=parallel, say=said.append, **OPTIONS, **(settings or {})
        )
        parallel.broadcast(None)
    except Interrupted:
        return {"ended": "interrupted", "said": said}
    return {"ended": "done", "scores": [run.evaluations for run in result.runs], "said": said}


@pytest.mark.parametrize("task", ["csv", "squad2", "ner", "ner-features", "csv-beside"])
def test_two_processes_equal_one(tmp_path, model, task):
    more = None, {"beside": model, "head_bilstm": True} if task == "csv-beside" else None
    task = task.removesuffix("-beside")
    data = written(task.removesuffix("-features"), tmp_path / "data", 24, 12)
    (one,) = together(0, tuned, task, model, data, tmp_path / "one", *more)
    two = together(2, tuned, task, model, data, tmp_path / "two", *more)
    assert [answer["ended"] for answer in two] == ["done", "done"]
    assert two[0]["scores"] == two[1]["scores"]
    assert two[1]["said"] == []
    for ours, theirs in zip(two[0]["scores"], one["scores"], strict=True):
        assert [entry["dev"] for entry in ours] == [pytest.approx(each["dev"], rel=1e-3) for each in theirs]
    folders = tmp_path / "one", tmp_path / "two"
    names = [{path.relative_to(folder).as_posix() for path in files(folder)} for folder in folders]
    assert names[0] == names[1]
    for run in ("lr-0.001-seed-0", "lr-0.002-seed-1"):
        logs = [(folder / "runs" / run / "log.jsonl").read_text().splitlines() for folder in folders]
        losses = [[json.loads(line)["loss"] for line in lines] for lines in logs]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def tuned_alone(model: Path, data: Path, output: Path, begun: bool) -> bool:
    """Fine-tune twice without `parallel`; whether there is a process group afterwards."""
    loop.work.roof = lambda *device_and_dtype: 1e9
    # As under torchrun, one store serves all groups of a process
    if os.environ["RANK"] == "0":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=True, wait_for_workers=False)  # noqa: F841 - is served
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if begun:
        dist.init_process_group("gloo")
    for name in ("first", "second"):
        quick("csv", model, data, output / name, epochs=1, batch_size=8)
    return dist.is_initialized()


@pytest.mark.parametrize("begun", [True, False])
def test_a_group_is_closed_by_the_call_that_opened_it(tmp_path, model, begun):
    data = written("csv", tmp_path / "data", 24, 12)
    assert together(2, tuned_alone, model, data, tmp_path, begun) == [begun, begun]


@pytest.mark.parametrize("stop", [1, 3])
def test_two_processes_resume(tmp_path, model, stop):
    data = written("csv", tmp_path / "data", 24, 12)
    together(2, tuned, "csv", model, data, tmp_path / "whole")
    broken = together(2, tuned, "csv", model, data, tmp_path / "run", stop)
    assert [answer["ended"] for answer in broken] == ["interrupted", "interrupted"]
    together(2, tuned, "csv", model, data, tmp_path / "run")
    for name in ("results.json", "model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    "settings", [{"freelb": FreeLB(init=0.0)}, {"smart": Smart(momentum=0.9)}, {"decay_to_start": True}]
)
def test_steadier_runs_of_two_processes_equal_one(tmp_path, model, settings):
    """Without first noise for FreeLB, whose draws are of a micro-batch."""
    data = written("csv", tmp_path / "data", 24, 12)
    found = {}
    for count in (0, 2):
        answers = together(count, tuned, "csv", model, data, tmp_path / str(count), None, settings)
        assert {answer["ended"] for answer in answers} == {"done"}
        (path,) = (tmp_path / str(count)).glob("runs/lr-0.002-seed-1/log.jsonl")
        found[count] = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert found[2] == pytest.approx(found[0], rel=1e-3)
