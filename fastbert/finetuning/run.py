"""Fine-tuning as a user asks for it: a grid of learning rates, restarts, the best model and its files.

    OUTPUT/                 the best model as a HuggingFace directory, with its tokenizer
      results.json          every run's settings and scores, and the best
      dev/, test/           the official prediction files of the best model
      runs/lr-…-seed-…/     each run: log.jsonl, results.json, and while it is trained its checkpoints;
                            the best run also has its models of the best and the last epoch, best/ and last/
      runs/features/        hidden states that all runs of `ner-features` read; removed at the end

The same call resumes where it was interrupted. Runs share no state, so their order changes nothing.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import torch

from fastbert.checkpoint import hub
from fastbert.checkpoint.files import digest, read_json, write_json
from fastbert.checkpoint.read import weights_digest
from fastbert.finetuning.encoded import has_segments, outputs
from fastbert.finetuning.fit import BATCH_TOKENS, BEST, Split, best_of, fit, score_of
from fastbert.finetuning.heads import Head
from fastbert.finetuning.losses import Method
from fastbert.finetuning.result import Result, Run
from fastbert.finetuning.settings import STABLE, Settings
from fastbert.finetuning.splits import Splits
from fastbert.finetuning.start import rounding
from fastbert.finetuning.task import Task
from fastbert.finetuning.tasks import NAMES, options_of, task_of
from fastbert.finetuning.trained import asked
from fastbert.runtime import expected
from fastbert.training import checkpoints
from fastbert.training.identity import difference
from fastbert.training.loop import DTYPES, TrainingError
from fastbert.training.parallel import Parallel

RESULTS, INTERMEDIATE, LAST, FEATURES = "results.json", "intermediate", "last", "features"
# settings that `predict_only` takes
AGAIN = ("max_length", "dtype")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "sentencepiece.bpe.model",
    "spiece.model",
)
# What a smaller copy of a model keeps: `predict` reads the training's options
COPIED = (*TOKENIZER_FILES, RESULTS)


def copy_files(source: Path, target: Path, names: Sequence[str] = COPIED) -> None:
    """Copy those of the files that a model's directory has."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def finetune(
    task: str | Task,
    model: str | Path | None,
    data: str | Path,
    output: str | Path,
    *,
    lr: float | Sequence[float] | None = None,
    restarts: int = 1,
    stable: bool = False,
    intermediate: tuple[str, str | Path] | None = None,
    predict_only: bool = False,
    parallel: Parallel | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: bool | None = None,
    workers: int = 0,
    method: Method | None = None,
    **options: Any,
) -> Result:
    """Fine-tune a model on a task, and keep the best of a grid; see the module for the files.

    Args:
        task: a name of `fastbert.finetuning.tasks`, or a task.
        model: a HuggingFace directory, or a name on the hub; None with `predict_only`.
        data: the directory of the task's official files.
        output: the directory to write; a run that is there resumes.
        lr: one learning rate or several; None is the task's default.
        restarts: runs per learning rate, with the seeds `seed`, `seed` + 1, …
        stable: whether the defaults are `settings.STABLE`: 20 epochs with a small rate.
        intermediate: (task, data) to fine-tune on before, into OUTPUT/intermediate; all runs begin with its
            best model. It has the defaults of its task, but for seed, dtype and max_length, and for the
            options of the task if it is the same.
        predict_only: train nothing: write the prediction files of the model in `output` again and score them,
            by the dev and test files that `data` has. Options of the task, max_length and dtype are by
            default those of the training; `model` must be None, and other settings are refused.
        parallel: the processes; None: those of torchrun, or this one.
        say: callback for messages, one line at a time.
        progress: whether to show a progress bar; None: if stderr is a terminal.
        workers: processes that make batches ahead.
        method: how the model learns besides, such as `fastbert.compression.movement.Movement`; None: as the
            settings say alone.
        options: of `Settings`, whose defaults are the task's, such as epochs=3 and batch_size=32; of `Head`,
            such as head_bilstm=True; and of the task, if it is given by name, such as text="review" for csv.

    Raises:
        ValueError, TypeError: naming the argument, or the file and the line.
        Interrupted: a signal came; the same call resumes.
    """
    settings, form = (
        {each.name: options.pop(each.name) for each in fields(kind) if each.name in options}
        for kind in (Settings, Head)
    )
    head = Head(**form)
    if isinstance(task, Task) and options:
        raise TypeError(f"{min(options)}: expected a setting, because the task has its options already")
    output, data = Path(output), Path(data)
    with contextlib.ExitStack() as held:
        if predict_only:
            unused = {
                **form,
                **settings,
                "model": model,
                "lr": lr,
                "intermediate": intermediate,
                "method": method,
            }
            unused |= {"restarts": restarts if restarts != 1 else None, "stable": stable or None}
            for name, value in unused.items():
                if value is not None and name not in AGAIN:
                    raise ValueError(f"{name}: expected none with predict_only, which trains nothing")
            made, best, result = _recalled(task, output, settings, options)
            parallel = parallel or _own_processes(held)
            return _predict_again(made, best, result, data, parallel, say if parallel.is_first else _silent)
        if model is None:
            raise ValueError("model: expected a directory or a name on the hub, got None")
        made = task if isinstance(task, Task) else task_of(task, **options)
        _check_output(output, Path(model))
        usual = {**made.defaults, **(method.defaults if method else {}), **(STABLE if stable else {})}
        grid = _grid({**usual, **settings}, lr, restarts)
        made.check(grid[0], head)
        parallel = parallel or _own_processes(held)
        if parallel.kind == "fsdp":
            raise ValueError("parallel: expected none or ddp for fine-tuning, got fsdp")
        say = say if parallel.is_first else _silent
        if intermediate is not None:
            kind, folder = intermediate
            if kind not in NAMES:
                raise ValueError(f"intermediate: expected a task of {', '.join(NAMES)}, got {kind!r}")
            say(f"intermediate: {kind}")
            own = {name: settings[name] for name in ("seed", "dtype", "max_length") if name in settings}
            own |= options if kind == made.name else {}
            shown: dict[str, Any] = {"say": say, "progress": progress, "workers": workers}
            first = finetune(kind, model, folder, output / INTERMEDIATE, parallel=parallel, **own, **shown)
            model = first.output
        place = hub.resolve(model)
        head = asked(head, place)
        head.check(grid[0])
        return _train(made, head, grid, place, data, output, parallel, say, progress, workers, method)


def _silent(text: str) -> None:
    """Say nothing."""


def _own_processes(held: contextlib.ExitStack) -> Parallel:
    """The processes of torchrun, or this one; their group ends with the block."""
    parallel = Parallel()
    held.callback(parallel.close)
    return parallel


def _grid(settings: dict[str, Any], lr: float | Sequence[float] | None, restarts: int) -> list[Settings]:
    """The settings of each run."""
    expected.integers(1, restarts=restarts)
    rates = [settings["lr"]] if lr is None else [lr] if isinstance(lr, (int, float)) else [*lr]
    firsts = [Settings(**{**settings, "lr": rate}) for rate in rates]
    if not rates or len({one.lr for one in firsts}) != len(rates):
        raise ValueError(f"lr: expected different learning rates, at least one, got {rates!r}")
    return [replaced(one, seed=one.seed + restart) for one in firsts for restart in range(restarts)]


def _train(
    task: Task,
    head: Head,
    grid: Sequence[Settings],
    place: Path,
    data: Path,
    output: Path,
    parallel: Parallel,
    say: Callable[[str], None],
    progress: bool | None,
    workers: int,
    method: Method | None,
) -> Result:
    splits = task.splits(data)
    for kind in ("train", "dev"):
        if not splits[kind]:
            raise ValueError(f"data: {data} has no {kind} file of {task.name}")
    tokens = Splits(task, place, grid[0].max_length, say)
    learned = task.read(data, splits["train"][0])
    task.adopt(tokens.config)
    train = tokens.of("train", learned, True)
    dev, tests = (
        {name: tokens.of(name, task.read(data, name)) for name in splits[kind]} for kind in ("dev", "test")
    )
    base = task.constant(train.examples, dev[splits["dev"][0]].examples)
    described = {
        "task": task.name,
        "model": weights_digest(place),
        "tokenizer": digest(tokens.tokenizer.to_str().encode()),
        "train": train.encoded.hash,
        "dev": {
            name: [each.encoded.hash, digest(repr(each.examples).encode())] for name, each in dev.items()
        },
        "classes": [*task.classes],
        "options": dict(task.options),
        "head": head.to_dict(),
        **({} if method is None else {"method": method.to_dict()}),
    }

    def finish(folder: Path) -> None:
        copy_files(place, folder, TOKENIZER_FILES)

    features = output / "runs" / FEATURES

    def prepared(split: Split) -> Split:
        options = parallel.device, DTYPES[grid[0].dtype], BATCH_TOKENS, features / described["model"]
        return replaced(split, encoded=task.prepared(split.encoded, split.examples, place, *options))

    if grid[0].cost:
        say(grid[0].cost)
    runs: list[Run] = []
    for one in grid:
        folder = output / "runs" / one.name
        decisive = {**described, "settings": one.to_dict()}
        history = _finished(folder, decisive)
        if history is None:
            history = fit(
                task,
                lambda one=one: task.first(place, one, head),
                prepared(train).encoded,
                {name: prepared(split) for name, split in dev.items()},
                folder,
                one,
                has_segments(tokens.config),
                decisive,
                finish,
                parallel=parallel,
                say=say,
                progress=progress,
                workers=workers,
                method=method,
                log_every=1 if len(train.encoded) < 50 * one.batch_size else 10,
            )
        score = score_of(task, best_of(task, history))
        runs.append(Run(one, history, score, base is not None and score <= base))
        say(f"lr {one.lr:g}, seed {one.seed}: {task.metric} {100 * score:.1f}")
        if parallel.is_first:
            content = {"config": decisive, "evaluations": history, "score": score}
            write_json(folder / RESULTS, content)
            _keep_the_best(output, runs, finish)
    result = Result(task.name, task.metric, runs, output, {}, tokens.counts)
    with parallel.alike():
        if parallel.is_first:
            best = output / "runs" / result.best.settings.name / BEST
            if not best.is_dir():
                raise TrainingError(
                    f"{best}: was removed, because another run of an earlier grid was better; "
                    "expected that grid, or another output"
                )
            shutil.copytree(best, output, dirs_exist_ok=True)
            task.complete(place, output)
            result.draw()
    dtype = DTYPES[result.best.settings.dtype]
    result = _predicted(task, result, dev, tests, dtype, parallel, say, prepared)
    if parallel.is_first:
        shutil.rmtree(features, ignore_errors=True)
    return result


def _recalled(
    task: str | Task, output: Path, settings: dict[str, Any], options: dict[str, Any]
) -> tuple[Task, Settings, Result]:
    """The task, the settings and the result of a training that has ended, which the arguments override."""
    if not (output / RESULTS).is_file():
        raise ValueError(
            f"output: expected a directory that finetune has written, found no {output / RESULTS}"
        )
    stored = read_json(output / RESULTS)
    made = task if isinstance(task, Task) else task_of(task, **{**options_of(task, stored), **options})
    if made.name != stored["task"]:
        raise ValueError(f"task: {output} was trained on {stored['task']}, got {made.name}")
    made.recall(stored)
    given = {name: settings[name] for name in AGAIN if name in settings}
    return made, Settings(**{**stored["best"], **given}), Result.from_dict(stored, output)


def _predict_again(
    task: Task, best: Settings, result: Result, data: Path, parallel: Parallel, say: Callable[[str], None]
) -> Result:
    splits = task.splits(data)
    if not splits["dev"] and not splits["test"]:
        raise ValueError(f"data: {data} has no dev file and no test file of {task.name}")
    tokens = Splits(task, result.output, best.max_length, say)
    dev, tests = (
        {name: tokens.of(name, task.read(data, name)) for name in splits[kind]} for kind in ("dev", "test")
    )
    result = replaced(result, counts={**result.counts, **tokens.counts})

    def prepared(split: Split) -> Split:
        options = parallel.device, DTYPES[best.dtype], BATCH_TOKENS
        return replaced(split, encoded=task.prepared(split.encoded, split.examples, result.output, *options))

    return _predicted(task, result, dev, tests, DTYPES[best.dtype], parallel, say, prepared)


def _predicted(
    task: Task,
    result: Result,
    dev: Mapping[str, Split],
    tests: Mapping[str, Split],
    dtype: torch.dtype,
    parallel: Parallel,
    say: Callable[[str], None],
    prepared: Callable[[Split], Split],
) -> Result:
    """Write the prediction files of the model in the output and results.json; the result with its scores."""
    scores = dict(result.scores)
    with parallel.alike():
        if parallel.is_first:
            model = rounding(task.load(result.output, parallel.device), result.best.settings)
            written: list[Path] = []
            for kind, splits in (("dev", dev), ("test", tests)):
                for name, each in ((name, prepared(split)) for name, split in splits.items()):
                    found = outputs(model, each.encoded, task.fields, batch_tokens=BATCH_TOKENS, dtype=dtype)
                    said = task.predictions(each.examples, each.encoded, found)
                    if kind == "dev":
                        task.tune(each.examples, said)
                    written += task.write(result.output / kind, name, each.examples, said)
                    scores[name] = task.scores(each.examples, said)
            for path in dict.fromkeys(written):
                say(f"wrote {path}")
            result = replaced(result, scores={name: found for name, found in scores.items() if found})
            content = {**result.to_dict(), "classes": [*task.classes], "options": dict(task.options)}
            write_json(result.output / RESULTS, content)
    return replaced(result, scores=parallel.broadcast(result.scores))


def _check_output(output: Path, model: Path) -> None:
    """Refuse a directory that has other files, which the best model would overwrite."""
    if output.resolve() == model.resolve():
        raise ValueError(f"output: expected another directory than the model's, got {output}")
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: expected a directory, got the file {output}")
    known = any((output / name).is_dir() for name in ("runs", INTERMEDIATE))
    if output.is_dir() and any(output.iterdir()) and not known:
        raise ValueError(f"output: expected a new directory or one of fine-tuning, got {output}")


def _finished(folder: Path, config: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The evaluations of a run that has ended, or None."""
    if not (folder / RESULTS).is_file():
        return None
    found = read_json(folder / RESULTS)
    problem = difference(found["config"], config, folder / RESULTS)
    if problem:
        raise TrainingError(problem)
    return found["evaluations"]


def _keep_the_best(output: Path, runs: list[Run], finish: Callable[[Path], None]) -> None:
    """Keep the best run's models of the best and the last epoch; remove other models and all checkpoints."""
    best = max(runs, key=lambda run: run.score)
    for run in runs:
        folder = output / "runs" / run.settings.name
        parts = [folder / checkpoints.name_of(step) for step in checkpoints.steps_in(folder)]
        if run is not best:
            parts += [folder / BEST, folder / LAST]
        elif parts and (last := parts[-1] / "model").is_dir() and not (folder / LAST).is_dir():
            finish(last)
            last.rename(folder / LAST)
        for part in parts:
            shutil.rmtree(part, ignore_errors=True)
