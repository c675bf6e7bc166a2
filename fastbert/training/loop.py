"""The training loop: for pre-training and fine-tuning, on one process or many; any interruption is resumed.

A step:

    1. load the step's J micro-batches; process r of W takes those with j % W == r
    2. add up the counts of each loss over all micro-batches and processes
    3. for each micro-batch, and each of its passes: seed torch by (seed, step, j);
       loss = Σ weight · mean · count · W / all counts
    4. clip the norm of all gradients together; stop if it is not finite; take the optimizer's step

On a GPU a single process replays the forward and backward of encoders from CUDA graphs (graphs/training.py).
The host waits for a GPU when it reads the norm. So it reads the norm only in a step that is logged, and
before a checkpoint. A step that is not finite changes nothing, nor does any later step, and the run stops
there.

So a loss is the mean over the step's whole batch, however the batch is cut. Data, masks and dropout depend on
(seed, step, j) alone, never on a process, a worker or an interruption. No generator state is kept.

**The promise.** Rerun the command to resume an interrupted run. With the same code, device, dtype and number
of processes the weights and log.jsonl are bit-identical to those of a run without interruption. With another
number of processes the data are the same, and sums differ by rounding.

The module that is trained is a `Losses` (module.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import _VF, Tensor

from fastbert.checkpoint.files import CheckpointError, cause, read_json, replace
from fastbert.graphs.training import encoders_of, serving
from fastbert.runtime import expected
from fastbert.training import checkpoints, work
from fastbert.training.clock import Clock
from fastbert.training.draws import key_of
from fastbert.training.identity import difference, versions
from fastbert.training.logs import Logs, has_tensorboard
from fastbert.training.memory import kept_memory
from fastbert.training.module import Losses
from fastbert.training.optimizers import optimizer
from fastbert.training.parallel import Parallel
from fastbert.training.resume import (
    CONFIG,
    STATE,
    Interrupted,
    Signals,
    TrainingError,
    check_config,
    check_state,
)
from fastbert.training.stages import Stage, check_order
from fastbert.training.state import State
from fastbert.training.stream import Batch, Stream, loaded
from fastbert.training.update import Update, local, serves, whole

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# the least scale of fp16's scaler: its first scale after forty skips in a row
_LEAST_SCALE = 2.0**-24


@dataclass(frozen=True)
class Result:
    """How a run has ended.

    Attributes:
        step: number of steps taken.
        checkpoint: the last checkpoint.
        last: the last line of the log.
    """

    step: int
    checkpoint: Path
    last: dict[str, Any]


class Trainer:
    """Trains a module through stages; see the module's text.

    Args:
        stages: the stages, in order.
        output: the run's directory; created if missing.
        config: what the run's result depends on, for `config.json`; JSON values. A run that is in the
            directory already must have the same values.
        seed: seed of dropout, of the first weights and of the order of the examples.
        dtype: "fp32", "bf16" (autocast) or "fp16" (autocast and a scaler of the gradients).
        parallel: the processes; see `Parallel`.
        save_every: number of steps between checkpoints.
        keep: number of checkpoints that remain.
        log_every: number of steps between lines of the log.
        workers: processes that make micro-batches ahead; 0: none.
        graphs: whether a single process on a GPU replays its encoders from CUDA graphs.
        finish: writes more files into a checkpoint's folder, such as tokenizers.
        on_step: called after each step with the number of steps taken, such as for an evaluation.
        tensorboard, progress: see `Logs`.
        say: callback for progress messages, one line each.

    Raises:
        TrainingError, ValueError: naming the argument.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        output: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        dtype: str = "fp32",
        parallel: Parallel | None = None,
        save_every: int = 1000,
        keep: int = 2,
        log_every: int = 10,
        workers: int = 0,
        graphs: bool = True,
        finish: Callable[[Path], None] | None = None,
        on_step: Callable[[int], None] | None = None,
        tensorboard: bool | None = None,
        progress: bool | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if not stages:
            raise ValueError("stages: expected at least one")
        expected.one_of(DTYPES, dtype=dtype)
        expected.integers(1, save_every=save_every, keep=keep, log_every=log_every)
        expected.integers(0, workers=workers)
        self.stages, self.output = list(stages), Path(output)
        try:
            self.config = json.loads(json.dumps(dict(config or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"config: expected values of JSON: {error}") from None
        if type(seed) is not int:
            raise ValueError(f"seed: expected an integer, got {seed!r}")
        check_order(stages)
        has_tensorboard(tensorboard)
        self.seed, self.dtype = seed, DTYPES[dtype]
        self.parallel = parallel or Parallel(dtype=self.dtype)
        for stage in self.stages:
            if stage.micro_batches % self.parallel.world:
                raise ValueError(
                    f"micro_batches: {stage.micro_batches} per step cannot be shared equally by "
                    f"{self.parallel.world} processes"
                )
        self.save_every, self.keep, self.log_every, self.workers = save_every, keep, log_every, workers
        self._graphs = graphs
        self._finish, self._tensorboard, self._progress = finish, tensorboard, progress
        self._on_step = on_step or (lambda step: None)
        self._say = say if self.parallel.is_first else lambda text: None
        self.steps = sum(stage.steps for stage in self.stages)
        self._ends = list(itertools.accumulate(stage.steps for stage in self.stages))
        self._signals = Signals()
        self._failure: Exception | None = None

    # -- the run ---------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Train to the end, from the newest checkpoint if there is one.

        Raises:
            Interrupted: SIGTERM, SIGINT or SIGHUP arrived; a checkpoint was written.
            TrainingError, CheckpointError: the run cannot start or resume, or a file cannot be written.
        """
        found = logs = None
        self._signals = Signals()
        with contextlib.ExitStack() as held, self._signals:
            if self.parallel.device.type == "cpu":
                held.enter_context(kept_memory())
            with self.parallel.alike():
                if self.parallel.is_first:
                    checkpoints.begin(self.output)
                    if not os.path.lexists(self.output / checkpoints.LOCK):
                        check_config(self.output, self.config)  # a refused directory gets no lock file
                    held.enter_context(checkpoints.locked(self.output))
                    checkpoints.clear(self.output)
                    check_config(self.output, self.config)
                    found, rejected = checkpoints.newest(self.output)
                    for why in rejected:
                        self._say(f"not usable: {why}")
                    if rejected and not found:
                        raise TrainingError(
                            f"{self.output}: no checkpoint is usable: {'; '.join(rejected)}; "
                            "remove them to begin anew, or use another directory"
                        )
            found = self.parallel.broadcast(found)
            with self.parallel.alike():
                state = read_json(found / STATE) if found else {}
                module = self._begin(found, state)
            self._set_up(module)
            with self.parallel.alike():
                if found:
                    self._state().load(found)
                if self.parallel.is_first:
                    # only now: a run that was refused leaves no config to match
                    if not (self.output / CONFIG).exists():
                        text = json.dumps(self.config, indent=1, sort_keys=True) + "\n"
                        replace(self.output / CONFIG, text.encode())
                    offsets, digests = state.get("log_bytes", {}), state.get("log_sha256")
                    options = self._tensorboard, self._progress, digests
                    logs = Logs(self.output, self.step, self.steps, offsets, *options)
                    held.callback(logs.close)
                    for text in logs.lost:
                        self._say(text)
            return self._train(found, logs)

    def _begin(self, found: Path | None, state: Mapping[str, Any]) -> Losses:
        """Take over a checkpoint's trainer.json; returns the module of the first step, not filled."""
        mine = {key: value for key, value in self._decisive().items() if key in state}
        problem = difference({key: state[key] for key in mine}, mine, self.output / CONFIG)
        if problem:
            raise TrainingError(problem)
        if found:
            check_state(found, state, self.steps, self._stage_at)
        self.step = state.get("step", 0)
        self.totals = {key: state.get(key, 0) for key in ("tokens", "sequences", "skipped")}
        if found:
            self._say(f"{found}: resumes from step {self.step:,}")
            before, now = state.get("versions", {}), versions()
            changed = [f"{key} {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]
            if changed:
                self._say(f"versions have changed, bits may differ: {', '.join(changed)}")
        number = self._stage = state.get("stage", 0)
        self._sizes = {int(key): value for key, value in state.get("sizes", {}).items()}
        self.scaler = torch.amp.GradScaler(self.parallel.device.type, enabled=self.dtype == torch.float16)
        if state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        return self._new_module(number)

    def _new_module(self, number: int) -> Losses:
        """A stage's module with its first weights; without `enter`, the previous stage's module."""
        while self.stages[number].enter is None and number > 0:
            number -= 1
        torch.manual_seed(_seed(self.seed, "weights", number))
        return self.stages[number].build().to(self.parallel.device).train()

    def _set_up(self, module: Losses) -> None:
        """Wrap a module for the processes, and make its optimizer."""
        self.module = module
        self._wrapped = self.parallel.wrap(module)
        self._graphed = encoders_of(module) if self._graphs and self.parallel.kind == "none" else []
        self.names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        self._new_optimizer()
        self._warm = False

    def _new_optimizer(self) -> None:
        number = self._stage
        while number and self.stages[number].enter is None and not self.stages[number].fresh_optimizer:
            number -= 1  # the previous stage's optimizer is kept
        stage = self.stages[number]
        options = dict(stage.options)
        groups = stage.groups(self.module, options.get("weight_decay", 0.01))
        self.optimizer = optimizer(options.pop("kind", "adamw"), groups, **options)
        self.module.optimized(self.optimizer)
        self._update = None
        if self.parallel.waits and serves(self.optimizer):
            self._update = Update(self.optimizer, self.scaler, _LEAST_SCALE, self.parallel.device)

    def _enter(self, number: int) -> None:
        """Begin the next stage."""
        self._read_update()
        stage, self._stage = self.stages[number], number
        if stage.enter is not None:
            module = self._new_module(number)
            whole = self._state().parameters()  # all processes fill their own copy
            moments = self._state().moments() if stage.moments is not None else {}
            source = self._new_module(number - 1)
            for key, parameter in source.named_parameters():
                parameter.data.copy_(whole[key])
            stage.enter(source, module)
            if stage.moments is not None:
                moments = stage.moments(moments, source, module)
            self._set_up(module)
            self._state().fill_moments(moments)
        elif stage.fresh_optimizer:
            self._new_optimizer()

    def _stage_at(self, step: int) -> int:
        """The number of the stage of a step."""
        return next((i for i, end in enumerate(self._ends) if step < end), len(self.stages) - 1)

    # -- steps -----------------------------------------------------------------------------------------------

    def _train(self, found: Path | None, logs: Logs | None) -> Result:
        last: dict[str, Any] = {}
        saved = found
        roof = work.roof(self.parallel.device, self.dtype) if self.parallel.is_first else 0.0
        peak = work.peak(self.parallel.device, self.dtype)
        while self.step < self.steps:
            number = self._stage_at(self.step)
            self._stream = self._stream_of(number)
            if number != self._stage:
                self._enter(number)
                if self.stages[number].enter is not None:
                    saved = self._save(logs)
            stage = self.stages[number]
            done = self.step - (self._ends[number] - stage.steps)
            begin = stage.first_micro_batch + done * stage.micro_batches
            end = stage.first_micro_batch + stage.steps * stage.micro_batches
            numbers = range(begin + self.parallel.rank, end, self.parallel.world)
            per_step = stage.micro_batches // self.parallel.world
            with contextlib.closing(loaded(self._stream, numbers, self.workers)) as batches:
                clock = Clock()
                while self.step < self._ends[number]:
                    micro = []
                    with self._failing_later():
                        micro = clock.waiting(batches, per_step)
                    counts, stop = self._counted(micro)
                    if stop:
                        if saved is None or saved.name != checkpoints.name_of(self.step):
                            saved = self._save(logs)
                        raise Interrupted(stop, saved)
                    logged = (self.step + 1) % self.log_every == 0 or self.step + 1 == self.steps
                    computed = self._step(stage, micro, counts, logged)
                    clock.count(self.module, micro, counts)
                    self.step += 1
                    if logged:
                        last = {"step": self.step, **computed}
                        if logs is not None:
                            with self._failing_later(), self._writing():
                                logs.write(self.step, computed, clock.speed(roof, peak))
                    if logs is not None:
                        shown = {"loss": f"{last['loss']:.4f}"} if last.get("loss") is not None else {}
                        rate = f"{clock.tokens_per_second:,.0f}"
                        logs.show(self.step, {**shown, "tokens/s": rate}, last=self.step == self.steps)
                    if self._is_saved(self.step):
                        saved = self._save(logs)
                    self._on_step(self.step)
        if not last:  # nothing was left to do
            last = self.parallel.broadcast(logs.last() if logs is not None else None)
        assert saved is not None  # the last step is saved
        return Result(self.step, saved, last)

    def _is_saved(self, step: int) -> bool:
        """Whether a step ends with a checkpoint; if the next stage has `enter`, entering it saves instead."""
        following = self._stage_at(step)
        if step < self.steps and following != self._stage and self.stages[following].enter is not None:
            return False
        return step % self.save_every == 0 or step == self.steps

    def _stream_of(self, number: int) -> Stream:
        stage = self.stages[number]
        sizes = self._sizes.get(number, [])
        return Stream(stage.source, self.seed, stage.sequences, stage.tokens, sizes)

    def _counted(self, micro: Sequence[Batch]) -> tuple[dict[str, int], int]:
        """({loss, "tokens" and "sequences": count over all of the step's micro-batches}, signal or 0).

        Raises:
            Exception: what `_failing_later` has kept, in this process or another.
        """
        names = sorted(micro[0].counts) if micro else []
        values = [sum(batch.counts[name] for batch in micro) for name in names]
        values += [sum(int(batch.lengths.sum()) for batch in micro), sum(len(b.lengths) for b in micro)]
        # first: after a failure the counts mean nothing
        flags = [
            int(self._failure is not None),
            *(int(self._signals.noted == number) for number in Signals.NUMBERS),
        ]
        failed, *signals = self.parallel.summed(flags)
        if failed:
            self.parallel.raise_any(self._failure)
        summed = self.parallel.summed(values)
        stop = next((number for number, count in zip(Signals.NUMBERS, signals, strict=True) if count), 0)
        return dict(zip([*names, "tokens", "sequences"], summed, strict=True)), stop

    @contextlib.contextmanager
    def _failing_later(self) -> Iterator[None]:
        """A block without exchange. If it fails, all processes raise when they next exchange counts."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    def _step(
        self, stage: Stage, micro: Sequence[Batch], counts: Mapping[str, int], measure: bool
    ) -> dict[str, Any]:
        """Take one step of the optimizer; returns its values for the log if `measure`, else nothing."""
        if self.parallel.kind == "ddp" and self.parallel.world > 1 and not self._warm:
            # DDP fixes the order of its sums in its first backward, so each start has one extra backward
            self._backward(micro[0], 0, counts, {}, False, exchange=True)
            unused = [
                name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None
            ]
            if unused:
                raise TrainingError(f"{unused[0]}: no loss depends on it; ddp needs requires_grad=False")
            self.optimizer.zero_grad(set_to_none=True)
        self._warm = True
        lr = stage.schedule(stage.first_step + self.step - (self._ends[self._stage] - stage.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        sums: dict[str, Tensor] = {}
        for i, batch in enumerate(micro):
            j = self.parallel.rank + i * self.parallel.world
            self._backward(batch, j, counts, sums, measure, exchange=i + 1 == len(micro))
        self.scaler.unscale_(self.optimizer)
        if self._update is not None:
            self._update.step(self.step + 1, stage.clip)
            norm = self._read_update() if measure else math.nan
        else:
            norm = self._clip(stage.clip)
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.totals["skipped"] += self.scaler.get_scale() < before
        self.optimizer.zero_grad(set_to_none=True)
        self.totals["tokens"] += counts["tokens"]
        self.totals["sequences"] += counts["sequences"]
        return self._computed(sums, counts, lr, norm) if measure else {}

    def _backward(
        self,
        batch: Batch,
        j: int,
        counts: Mapping[str, int],
        sums: dict[str, Tensor],
        measure: bool,
        exchange: bool,
    ) -> None:
        """Forward and backward of micro-batch j of the step; adds losses and right predictions to `sums`."""
        device, half = self.parallel.device, self.dtype != torch.float32
        rounds = self.module.rounds(self._wrapped, batch.on(device), measure)
        for number in range(1, self.module.passes + 1):
            torch.manual_seed(_seed(self.seed, "step", self.step, j))
            with self.parallel.exchanging(self._wrapped, exchange and number == self.module.passes):
                with serving(self._graphed), torch.autocast(device.type, self.dtype, enabled=half):
                    losses, correct = next(rounds)
                missing = losses.keys() - batch.counts.keys()
                if missing:
                    raise TrainingError(f"losses: {', '.join(sorted(missing))}: a loss without a count")
                parts = []
                for name, loss in losses.items():
                    share = batch.counts[name] * self.parallel.world / max(counts[name], 1)
                    parts.append(loss * (self.module.weights.get(name, 1.0) * share))
                self.scaler.scale(functools.reduce(torch.add, parts)).backward()
            if measure:
                for name, loss in losses.items():
                    value = loss.detach().double() * batch.counts[name]
                    sums[name] = sums.get(name, 0) + value
                for name, value in correct.items():
                    sums[f"right {name}"] = sums.get(f"right {name}", 0) + value.double()

    def _clip(self, most: float | None) -> float:
        """Clip the norm of all gradients together; returns the norm before clipping.

        Raises:
            TrainingError: the norm is not finite, and no smaller scale can help.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        value = float(whole(torch.nn.utils.get_total_norm(gradients)))
        if not math.isfinite(value):
            if self.scaler.is_enabled() and self.scaler.get_scale() > _LEAST_SCALE:
                return value
            wrong = [p.grad is not None and not bool(torch.isfinite(local(p.grad)).all()) for p in parameters]
            raise self._not_finite(self.step + 1, parameters, wrong)
        if most is not None and value > most:
            _VF._foreach_mul_(gradients, most / (value + 1e-6))
        return value

    def _read_update(self) -> float:
        """The norm of the last step's gradients, read from the device; NaN if there is none.

        Raises:
            TrainingError: the norm of this or an earlier step was not finite.
        """
        if self._update is None or (found := self._update.read()) is None:
            return math.nan
        self.totals["skipped"] += found.skipped
        if found.step is not None:
            raise self._not_finite(found.step, self._update.parameters, found.wrong)
        return found.norm

    def _not_finite(self, step: int, parameters: Sequence[Tensor], wrong: Sequence[bool]) -> TrainingError:
        """The error of a step; `wrong`: for each parameter, whether this process has a bad gradient."""
        places = [i for i, count in enumerate(self.parallel.summed([int(each) for each in wrong])) if count]
        name = self.names[id(parameters[places[0]])] if places else "all parameters together"
        return TrainingError(f"step {step}: the gradient of {name} is not finite; nothing was updated")

    def _computed(
        self, sums: Mapping[str, Tensor], counts: Mapping[str, int], lr: float, norm: float
    ) -> dict[str, Any]:
        """A step's values for the log."""
        keys = list(sums)
        values = self.parallel.added(torch.stack([sums[key].to(torch.float64) for key in keys])).tolist()
        found = dict(zip(keys, values, strict=True))
        losses = {key: found[key] / max(counts[key], 1) for key in keys if key in counts}
        total = sum(self.module.weights.get(key, 1.0) * value for key, value in losses.items())
        accuracy = {
            f"{key[6:]}_{'accuracy' if key[6:] in losses else 'share'}": found[key] / max(counts[key[6:]], 1)
            for key in keys
            if key.startswith("right ")
        }
        return {
            "loss": _number(total),
            **{f"{key}_loss": _number(value) for key, value in losses.items()},
            **accuracy,
            "lr": lr,
            "grad_norm": _number(norm),
            "tokens": self.totals["tokens"],
            "sequences": self.totals["sequences"],
            **({"skipped": self.totals["skipped"]} if self.scaler.is_enabled() else {}),
        }

    # -- checkpoints -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A block that writes into the run's directory; turns an OSError into a CheckpointError."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.output}: could not be written: {cause(error)}") from error

    def _state(self) -> State:
        return State(self.parallel, self.module, self.optimizer, self.names)

    def _save(self, logs: Logs | None) -> Path:
        """Write a checkpoint of the current step."""
        self._read_update()
        whole = self._state()
        state, moments = whole.parameters(everywhere=False), whole.moments(everywhere=False)

        def write(folder: Path) -> None:
            whole.write(folder, state, moments)
            (folder / STATE).write_text(json.dumps(described, indent=1, sort_keys=True) + "\n")
            if self._finish is not None:
                self._finish(folder)

        with self.parallel.alike():
            if self._failure is not None:
                raise self._failure
            if logs is not None:
                with self._writing():
                    offsets, digests = logs.offsets(), logs.digests()
                described = {
                    "step": self.step,
                    "stage": self._stage,
                    **self.totals,
                    "log_bytes": offsets,
                    "log_sha256": digests,
                    "sizes": {**self._sizes, **self._known_sizes()},
                    "scaler": self.scaler.state_dict(),
                    "versions": versions(),
                    **self._decisive(),
                }
                checkpoints.save(self.output, self.step, write, self.keep)
        return self.output / checkpoints.name_of(self.step)

    def _decisive(self) -> dict[str, Any]:
        """What the result depends on besides `config`."""
        hashes = [stage.source.hash for stage in self.stages]
        return {"seed": self.seed, "dtype": str(self.dtype).removeprefix("torch."), "sources": hashes}

    def _known_sizes(self) -> dict[int, list[tuple[int, int]]]:
        stream = getattr(self, "_stream", None)
        return {} if stream is None else {self._stage: stream.sizes}


def _seed(*parts: object) -> int:
    """A seed for torch."""
    return key_of(*parts) & (1 << 63) - 1


def _number(value: float) -> float | None:
    """A number for JSON, which has no infinity."""
    return value if math.isfinite(value) else None
