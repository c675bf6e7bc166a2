"""A side's process in the benchmark of fine-tuning: our loop, or transformers' Trainer, on the same examples.

`serve` first trains a few steps without dropout and answers with their losses. Then it trains with dropout.
When it is warm, and after each turn, it answers with the time and the process's memory, and waits for a line
on standard input before it continues.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.lib.engines import needed
from bench.lib.neighbour import end_with
from bench.lib.probe_steps import reason_of
from bench.lib.resident import forget_peak, return_freed, status_mib
from fastbert.finetuning.encoded import Encoded, Source, has_segments
from fastbert.finetuning.fit import TaskLosses
from fastbert.finetuning.tasks import task_of
from fastbert.training.loop import Trainer
from fastbert.training.schedules import Schedule
from fastbert.training.stages import Stage
from fastbert.training.stream import Stream

JOB, EXAMPLES, GROUPED, MODEL = "job.json", "examples.pickle", "grouped.pickle", "model"
SEED, WEIGHT_DECAY = 0, 0.01
CHECKED_STEPS = 4
# steps; later ones find their memory in the process
WARM_UP = 2
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Job:
    """What both sides do.

    Attributes:
        task: a name of `fastbert.finetuning.tasks`.
        batch_size: examples per step.
        turn: steps per turn.
        steps: steps of the schedule; a run ends before the last one.
        lr: the learning rate, which falls linearly from the first step on.
        checked: examples per step where losses are compared.
    """

    task: str
    batch_size: int
    turn: int
    steps: int
    lr: float
    checked: int


class Done(Exception):
    """A run has taken its steps. No checkpoint is written, and no time of one counts."""


class Check:
    """Ends a run after the steps whose losses are compared."""

    log_every = 1

    def begin(self) -> None:
        """The model is loaded."""

    def __call__(self, step: int) -> None:
        """After a step, counted from 1."""
        if step > CHECKED_STEPS:
            raise Done


class Pace:
    """Times the turns, and pauses after each.

    Args:
        turn: steps per turn; the first steps, to warm up, are a turn of their own.
        say: prints an answer.
    """

    log_every = 10

    def __init__(self, turn: int, say: Callable[..., None]) -> None:
        self.turn, self.say = turn, say

    def begin(self) -> None:
        """The model is loaded."""
        return_freed()
        self.is_fresh = forget_peak()
        self.loaded = status_mib("VmRSS")
        self.start = time.perf_counter(), time.process_time()

    def __call__(self, step: int) -> None:
        """After a step, counted from 1."""
        if step < WARM_UP or (step - WARM_UP) % self.turn:
            return
        now = time.perf_counter(), time.process_time()
        wall, cpu = (b - a for a, b in zip(self.start, now, strict=True))
        by = "VmHWM" if self.is_fresh else "VmHWM, loading included"
        memory = {"peak_mib": status_mib("VmHWM"), "loaded_mib": self.loaded, "measured_by": by}
        self.say(seconds=wall, cpu_seconds=cpu, **memory)
        if not sys.stdin.readline():
            raise Done
        self.start = time.perf_counter(), time.process_time()


def ours(folder: Path, tag: str, job: Job, on_step: Check | Pace, **config: float) -> list[dict[str, Any]]:
    """Train by the loop of `fastbert finetune`, without evaluation; the lines of the log.

    Args:
        folder: see `prepared` in finetuning.py.
        tag: "fp32" or "bf16".
        job: what to do.
        on_step: raises `Done` at the end.
        config: keys of the model's configuration.
    """
    examples = _examples(folder)
    module = TaskLosses(task_of(job.task).head.from_pretrained(folder / MODEL, **config))
    stage = Stage(
        job.steps,
        Source(examples, has_segments(module.model.config)),
        lambda: module,
        Schedule("linear", job.lr, job.steps),
        sequences=job.batch_size,
        options={"kind": "adamw", "weight_decay": WEIGHT_DECAY, "eps": 1e-8},
    )
    with tempfile.TemporaryDirectory() as output:
        options = {"save_every": job.steps + 1, "log_every": on_step.log_every, "tensorboard": False}
        trainer = Trainer([stage], output, seed=SEED, dtype=tag, on_step=on_step, progress=False, **options)
        on_step.begin()
        with contextlib.suppress(Done):
            trainer.run()
        return [json.loads(line) for line in Path(output, "log.jsonl").read_text().splitlines()]


def theirs(
    folder: Path, tag: str, job: Job, on_step: Check | Pace, grouped: bool = False, **config: float
) -> list[dict[str, Any]]:
    """Train by transformers' Trainer on padded batches; arguments and result as of `ours`.

    Each batch is padded to its longest example. The batches are ours, or with `grouped` those of examples of
    nearly one length, as `train_sampling_strategy="group_by_length"` makes them.
    """
    transformers = needed("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    examples = _examples(folder, GROUPED if grouped else EXAMPLES)
    kind = getattr(transformers, task_of(job.task).head.__name__)
    model = kind.from_pretrained(folder / MODEL, attn_implementation="sdpa", **config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / MODEL)
    if grouped:
        numbers = [i % len(examples) for i in range(job.steps * job.batch_size)]
    else:
        stream = Stream(Source(examples, True), SEED, sequences=job.batch_size)
        numbers = [index for step in range(job.steps) for _, index in stream.examples(step)]

    class OnStep(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            on_step.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            on_step(state.global_step)

    with tempfile.TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output,
            max_steps=job.steps,
            per_device_train_batch_size=job.batch_size,
            learning_rate=job.lr,
            weight_decay=WEIGHT_DECAY,
            lr_scheduler_type="linear",
            max_grad_norm=1.0,
            train_sampling_strategy="sequential",
            bf16=tag == "bf16",
            use_cpu=True,
            seed=SEED,
            save_strategy="no",
            logging_steps=on_step.log_every,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=[_plain(examples, number) for number in numbers],
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            callbacks=[OnStep()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        with contextlib.suppress(Done):
            trainer.train()
        return trainer.state.log_history


SIDES = dict(fastbert=ours, transformers=theirs, transformers_grouped=functools.partial(theirs, grouped=True))


def _examples(folder: Path, file: str = EXAMPLES) -> Encoded:
    return pickle.loads((folder / file).read_bytes())


def _plain(examples: Encoded, number: int) -> dict[str, Any]:
    """An example as a dataset for transformers has it."""
    rows = slice(*examples.starts[number : number + 2])
    labels = {name: int(values[number]) for name, values in examples.labels.items()}
    ids, types = examples.ids[rows].tolist(), examples.types[rows].tolist()
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": [1] * len(ids), **labels}


def serve(parent: str, candidate: str, folder: str, threads: str) -> None:
    """The side's process, until its standard input ends. A line with `error` is its last one."""
    end_with(int(parent))
    said, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not mix with the answers
    logging.disable(logging.WARNING)
    torch.set_num_threads(int(threads))
    place, (name, tag) = Path(folder), candidate.split("-")

    def say(**answer: object) -> None:
        print(json.dumps(answer), file=said, flush=True)

    try:
        job = Job(**json.loads((place / JOB).read_text()))
        few = replace(job, batch_size=job.checked, steps=CHECKED_STEPS + 2)
        # in the same order, also for the side that groups its batches
        side = theirs if name.startswith("transformers") else ours
        lines = side(place, tag, few, Check(), **WITHOUT_DROPOUT)[:CHECKED_STEPS]
        say(checked=[[line[key] for line in lines] for key in ("loss", "grad_norm")])
        SIDES[name](place, tag, job, Pace(job.turn, say))
    except Exception as error:
        say(error=reason_of(error))
