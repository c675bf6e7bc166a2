"""Runs of the training loop by several processes, and what tests ask of them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import fastbert
from fastbert.checkpoint.files import CheckpointError
from fastbert.testing.error_rule import compare
from fastbert.training import loop as loop_module
from fastbert.training.loop import DTYPES, Interrupted, Stage, Trainer, TrainingError
from fastbert.training.module import Losses
from fastbert.training.parallel import Parallel
from fastbert.training.schedules import Schedule
from fastbert.training.stream import Batch
from tests.support.processes import ROOT
from tests.support.tiny_training import CONFIG, Classes, Numbered, NumberedPlan, digests, log

STEPS = 4
MICRO_BATCHES = 6


class Placed(Numbered):
    """`Numbered`, with (epoch, index) of each example among the inputs."""

    def example(self, plan: NumberedPlan, epoch: int, index: int) -> tuple[np.ndarray, tuple[int, int]]:
        return super().example(plan, epoch, index), (epoch, index)

    def collate(self, examples: list[tuple[np.ndarray, tuple[int, int]]]) -> Batch:
        batch = super().collate([ids for ids, _ in examples])
        batch.inputs["places"] = np.array([place for _, place in examples])
        return batch


class Recording(Classes):
    """`Classes` that notes (torch's seed, hash of the arrays, places of the examples) of each micro-batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[int, str, list[list[int]]]] = []

    def forward(self, inputs, measure=False):
        given = dict(inputs)
        places = given.pop("places").tolist()
        text = "".join(f"{key}{torch.as_tensor(value).tolist()}" for key, value in sorted(inputs.items()))
        self.seen.append((torch.initial_seed(), hashlib.sha256(text.encode()).hexdigest(), places))
        return super().forward(given, measure)


class Words(Numbered):
    """Two losses: some tokens to predict, in some micro-batches none, and a class per sequence."""

    def collate(self, examples: list[np.ndarray]) -> Batch:
        batch = super().collate(examples)
        classes = batch.inputs.pop("labels")
        ids = batch.inputs["input_ids"]
        labels = np.where((ids % 3 == 0) & (examples[0][0] % 2 == 0), ids, -100)
        count = int((labels >= 0).sum())
        batch.inputs |= {"labels": labels, "labelled": count, "classes": classes}
        return Batch(batch.inputs, {"words": count, **batch.counts}, batch.lengths)


class TwoLosses(Losses):
    """Words and classes, with a head of its own and tied weights."""

    def __init__(self, dropout: float = 0.1, albert: bool = False) -> None:
        super().__init__()
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        kind = fastbert.AlbertForMaskedLM if albert else fastbert.BertForMaskedLM
        size = {"model_type": "albert", "embedding_size": 16} if albert else {"model_type": "bert"}
        self.model = kind(fastbert.EncoderConfig.from_dict({**CONFIG, **rates, **size}))
        self.head = nn.Linear(CONFIG["hidden_size"], 2)
        self.exports, self.weights = {"model": self.model}, {"class": 0.5}

    def forward(self, inputs, measure=False):
        ids, cu_seqlens = inputs["input_ids"], inputs["cu_seqlens"]
        packed = cu_seqlens, inputs["max_seqlen"]
        encoded = self.model.encode(ids, None, None, None, None, None, None, None, *packed, False)
        logits = self.head(encoded.hidden[cu_seqlens[:-1].long()]).float()
        losses = {
            "words": self.model.vocabulary_loss(encoded, inputs["labels"], inputs["labelled"]),
            "class": fastbert.ops.cross_entropy.cross_entropy(logits, inputs["classes"]),
        }
        right = {"class": (logits.argmax(-1) == inputs["classes"]).sum()} if measure else {}
        return losses, right


class Unused(TwoLosses):
    """`TwoLosses` with a parameter that no loss depends on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.spare = nn.Parameter(torch.ones(3))


MODULES = {"two": (TwoLosses, Words), "unused": (Unused, Words)}


@dataclass(frozen=True)
class Disturbance:
    """What happens to some ranks before a step.

    Attributes:
        what: "raise" an error, "kill", a "full" disk, no more room for the "log", a "batch" that
            cannot be made, "nan" or "inf" in one number of the head's gradient, or the name of a signal. The
            "inf" needs a scaler, and leaves the loss as it is.
        step: how many steps come before it.
        ranks: to whom; None: to all.
    """

    what: str
    step: int
    ranks: tuple[int, ...] | None = None


class Disturbed(Trainer):
    """A trainer to which a `Disturbance` happens."""

    disturbance: Disturbance | None = None

    def _stream_of(self, number):
        stream = super()._stream_of(number)
        d, made = self.disturbance, stream.batch
        if d is not None and d.what == "batch" and self.parallel.rank in d.ranks:
            first = d.step * self.stages[number].micro_batches
            stream.batch = lambda number: (
                made(number) if number < first else _raise(ValueError("ids: planted"))
            )
        return stream

    def _counted(self, micro):
        if self._what().startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self._what()))
        return super()._counted(micro)

    def _step(self, *args):
        what = self._what()
        if what == "raise":
            raise RuntimeError("planted")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "full":
            os.fsync = _full
        if what == "log":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        forward = self.module.forward
        if what in ("nan", "inf"):
            factor = float("nan") if what == "nan" else 3e38
            self.module.forward = lambda *given: _spoiled(self.module, forward(*given), factor)
        try:
            return super()._step(*args)
        finally:
            if what in ("nan", "inf"):
                del self.module.forward

    def _what(self) -> str:
        d = self.disturbance
        now = d is not None and d.step == self.step and (d.ranks is None or self.parallel.rank in d.ranks)
        return d.what if now else ""


def _fill(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict(source.state_dict())
    with torch.no_grad():
        target.head.weight.mul_(0.5)


def _spoiled(module: nn.Module, found: tuple[dict, dict], factor: float) -> tuple[dict, dict]:
    losses, right = found
    number = module.head.bias[0].float()
    return {**losses, "class": losses["class"] + (number - number.detach()) * factor}, right


def _raise(error: Exception) -> None:
    raise error


def _full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def train(
    output: Path,
    kind: str | None = None,
    *,
    module: str = "two",
    steps: int = STEPS,
    dtype: str = "fp32",
    dropout: float = 0.1,
    double: bool = False,
    disturbance: Disturbance | None = None,
    bucket_mb: float | None = None,
    micro_batches: int = MICRO_BATCHES,
    optimizer: str = "adamw",
    eps: float = 1e-4,
    clip: float | None = 1.0,
    albert: bool = False,
    grown: bool = False,
    waits: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Be one process of a run; how it ended ("done", or the error's type and text), and what was said.

    Args:
        double: whether the module is in float64: the truth of the error rule.
        bucket_mb: megabytes of DDP's buckets.
        grown: whether two stages follow: a module that is filled from the first one, with twice the
            micro-batches, and then a new optimizer.
        waits: whether the processes take the path of a GPU, which the host would have to wait for.
        others: see `Disturbance`, `MODULES`, `Parallel`, `Stage` and `Trainer`.
    """
    build, source = MODULES[module]
    named = {"albert": True} if albert else {}

    def made() -> nn.Module:
        return build(dropout, **named).to(torch.float64 if double else torch.float32)

    schedule = Schedule("linear", 1e-2, 50, 1)
    sequences = {"sequences": 2} if "tokens" not in options else {"tokens": options.pop("tokens")}
    of_stage = {"options": {"kind": optimizer, "eps": eps}, "clip": clip, **sequences}
    stages = [Stage(steps, source(), made, schedule, micro_batches, **of_stage)]
    if grown:
        later = {**of_stage, "first_micro_batch": steps * micro_batches}
        grows = {"enter": _fill, "moments": lambda moments, before, after: moments}
        stages += [
            Stage(2, source(), made, schedule, 2 * micro_batches, **grows, **later),
            Stage(1, source(), made, schedule, micro_batches, fresh_optimizer=True, **later),
        ]
    parallel = Parallel(kind, "cpu", DTYPES[dtype], bucket_mb)
    parallel.waits = waits
    own = {"save_every": 2, "log_every": 1, "tensorboard": False, "progress": False, "keep": 9}
    said: list[str] = []
    loop_module.work.roof = lambda *device_and_dtype: 1e9  # measuring it takes longer than the run
    ended, last = "done", {}
    try:
        trainer = Disturbed(
            stages,
            output,
            {"module": module},
            seed=3,
            dtype=dtype,
            parallel=parallel,
            say=said.append,
            **{**own, **options},
        )
        trainer.disturbance = disturbance
        last = trainer.run().last
    except (Interrupted, TrainingError, CheckpointError, ValueError, RuntimeError) as error:
        ended = f"{type(error).__name__}: {error}"
    return {"ended": ended, "last": last, "said": said}


class Alone(Parallel):
    """One of `world` processes, all others left out: what it computes has no meaning, what it reads has."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__("none", "cpu")
        self.rank, self.world = rank, world


def read(output: Path, world: int, workers: int) -> dict[tuple[int, int], tuple[str, list[list[int]]]]:
    """(step, j) -> (hash of its arrays, places of its examples), as `world` processes read them in turn."""
    steps, micro_batches, seed = 4, 12, 3
    numbers = {
        loop_module._seed(seed, "step", step, j): (step, j)
        for step in range(steps)
        for j in range(micro_batches)
    }
    found: dict[tuple[int, int], tuple[str, list[list[int]]]] = {}
    for rank in range(world):
        module = Recording()
        schedule = Schedule("constant", 1e-3, steps)
        stage = Stage(steps, Placed(), lambda m=module: m, schedule, micro_batches, sequences=2)
        options = {"tensorboard": False, "progress": False, "workers": workers, "seed": seed}
        Trainer([stage], output / str(rank), parallel=Alone(rank, world), **options).run()
        places = [numbers[seen[0]] for seen in module.seen]
        assert places == [(step, j) for step in range(steps) for j in range(rank, micro_batches, world)]
        found |= dict(zip(places, [seen[1:] for seen in module.seen], strict=True))
    return found


@contextlib.contextmanager
def in_use(run: Path) -> Iterator[None]:
    """Another process holds the lock of a run's directory."""
    code = (
        "import pathlib, sys\nfrom fastbert.training.checkpoints import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        yield
    finally:
        holder.communicate()


def leave(code: int) -> None:
    """End this process as `ranks` ends its own, once all have come here."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(code)


def newest(run: Path) -> Path:
    """The newest checkpoint's folder."""
    return max(entry for entry in run.iterdir() if entry.name.startswith("step-"))


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint: weights, heads and moments."""
    found = {}
    for path in sorted(newest(run).rglob("*.safetensors")):
        found |= {f"{path.relative_to(newest(run))}: {key}": value for key, value in load_file(path).items()}
    return found


def bits(run: Path) -> dict[str, str]:
    """SHA-256 of the log and of the newest checkpoint's weights and moments."""
    found = digests(run)
    assert found.pop("step") == log(run)[-1]["step"]
    return found


def misses(run: Path, one: Path, truth: Path, dtype: torch.dtype = torch.float32) -> list[str]:
    """Where a run breaks the error rule: names and why, beside one process in float32 and in float64.

    Some true gradients are 0, such as those of the keys' biases, and rounding is all that is left of them.
    The floor is for them.
    """
    found = []
    actual, eager = tensors(run), tensors(one)
    for name, value in tensors(truth).items():
        weight = "optimizer" not in name
        floor = 1e-6 * max(value.abs().max().item(), 1.0 if weight else 1e-2)
        *_, why = compare(actual[name], eager[name], value, dtype, floor)
        found += [f"{name}: {why}"] if why else []
    lines = [log(each) for each in (run, one, truth)]
    for key in ("loss", "words_loss", "class_loss", "class_accuracy", "grad_norm"):
        values = [torch.tensor([line.get(key, 0.0) for line in each], dtype=torch.float64) for each in lines]
        *_, why = compare(*values, dtype, 1e-6 * values[2].abs().max().item())
        found += [f"log: {key}: {why}"] if why else []
    for key in ("step", "lr", "tokens", "sequences"):
        if [line[key] for line in lines[0]] != [line[key] for line in lines[2]]:
            found.append(f"log: {key}")
    return found
