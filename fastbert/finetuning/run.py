"""Fine-tuning as a user asks for it: a grid of learning rates, restarts, the best model and its files.

    OUTPUT/                 the best model as a HuggingFace directory, with its tokenizer
      results.json          every run's settings and scores, and the best
      dev/, test/           the official prediction files of the best model
      runs/lr-…-seed-…/     each run: log.jsonl, results.json, and while it is trained its checkpoints;
                            the best run also has its model in best/

The same call resumes where it was interrupted. Runs share no state, so their order changes nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.checkpoint import hub
from fastbert.checkpoint.files import digest, read_json, replace
from fastbert.checkpoint.read import weights_digest
from fastbert.finetuning.encoded import Encoded, has_segments, outputs
from fastbert.finetuning.fit import BATCH_TOKENS, BEST, Split, fit, score_of
from fastbert.finetuning.settings import STABLE, Settings
from fastbert.finetuning.start import first_model
from fastbert.finetuning.task import Task
from fastbert.finetuning.tasks import NAMES, task_of
from fastbert.models.config import EncoderConfig
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.published import FROZEN, PRETRAINED, PUBLISHED, RANDOM, Published
from fastbert.training import checkpoints
from fastbert.training.identity import difference
from fastbert.training.loop import DTYPES, TrainingError
from fastbert.training.parallel import Parallel

RESULTS, INTERMEDIATE = "results.json", "intermediate"
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


@dataclass(frozen=True)
class Run:
    """One run of the grid.

    Attributes:
        settings: how it learned.
        evaluations: {"step", "epoch", split -> scores} after each epoch.
        score: the best main score, in fractions of 1.
        failed: whether the model has learned nothing: it predicts one class at best.
    """

    settings: Settings
    evaluations: list[dict[str, Any]]
    score: float
    failed: bool


@dataclass(frozen=True)
class Result:
    """What fine-tuning has found.

    Attributes:
        task: its name.
        metric: the main metric.
        runs: all of the grid.
        output: the directory of the best model.
        published: rows of papers for this task and this start.
    """

    task: str
    metric: str
    runs: list[Run]
    output: Path
    published: list[Published]

    @property
    def best(self) -> Run:
        """The run of the best main score; of equal ones the first."""
        return max(self.runs, key=lambda run: run.score)

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """Split -> metric -> score of the best model, in fractions of 1."""
        entry = max(
            self.best.evaluations,
            key=lambda e: next(s[self.metric] for s in e.values() if isinstance(s, dict)),
        )
        return {split: scores for split, scores in entry.items() if isinstance(scores, dict)}

    def table(self) -> str:
        """The runs, the best, mean and deviation over seeds, and the published rows, in percent."""
        lines = [f"{self.task}: {self.metric} on dev, in percent"]
        lines += [
            f"  lr {run.settings.lr:g}, seed {run.settings.seed}: {100 * run.score:.1f}"
            + (" (failed: at the score of one answer for all)" if run.failed else "")
            for run in self.runs
        ]
        for lr in dict.fromkeys(run.settings.lr for run in self.runs):
            scores = [100 * run.score for run in self.runs if run.settings.lr == lr]
            if len(scores) > 1:
                lines.append(f"  lr {lr:g}: mean {np.mean(scores):.1f} ± {np.std(scores, ddof=1):.1f}")
        for split, scores in self.scores.items():
            shown = {name: value for name, value in scores.items() if not name.endswith("threshold")}
            words = ", ".join(f"{name} {100 * value:.1f}" for name, value in shown.items())
            lines.append(f"  best, {split}: {words}")
        lines += [
            f"  {row.model} ({row.split}, published): {row.scores[self.metric]:.1f}"
            for row in self.published
            if self.metric in row.scores
        ]
        return "\n".join(lines)


def finetune(
    task: str | Task,
    model: str | Path,
    data: str | Path,
    output: str | Path,
    *,
    lr: float | Sequence[float] | None = None,
    restarts: int = 1,
    stable: bool = False,
    intermediate: tuple[str, str | Path] | None = None,
    parallel: Parallel | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: bool | None = None,
    workers: int = 0,
    **options: Any,
) -> Result:
    """Fine-tune a model on a task, and keep the best of a grid; see the module for the files.

    Args:
        task: a name of `fastbert.finetuning.tasks`, or a task.
        model: a HuggingFace directory, or a name on the hub.
        data: the directory of the task's official files.
        output: the directory to write; a run that is there resumes.
        lr: one learning rate or several; None is the task's default.
        restarts: runs per learning rate, with the seeds `seed`, `seed` + 1, …
        stable: whether the defaults are `settings.STABLE`: 20 epochs with a small rate.
        intermediate: (task, data) to fine-tune on before, with the defaults of that task, into
            OUTPUT/intermediate; all runs begin with its best model.
        parallel: the processes; None: those of torchrun, or this one.
        say: callback for messages, one line at a time.
        progress: whether to show a progress bar; None: if stderr is a terminal.
        workers: processes that make batches ahead.
        options: of `Settings`, whose defaults are the task's, such as epochs=3 and batch_size=32; and of the
            task, if it is given by name, such as text="review" for csv.

    Raises:
        ValueError, TypeError: naming the argument, or the file and the line.
        Interrupted: a signal came; the same call resumes.
    """
    settings = {each.name: options.pop(each.name) for each in fields(Settings) if each.name in options}
    if isinstance(task, Task) and options:
        raise TypeError(f"{min(options)}: expected a setting, because the task has its options already")
    made = task if isinstance(task, Task) else task_of(task, **options)
    output, data = Path(output), Path(data)
    _check_output(output, Path(model))
    if type(restarts) is not int or restarts < 1:
        raise ValueError(f"restarts: expected an integer >= 1, got {restarts!r}")
    usual = {**made.defaults, **(STABLE if stable else {})}
    rates = [usual["lr"]] if lr is None else [lr] if isinstance(lr, (int, float)) else [*lr]
    firsts = [Settings(**{**usual, **settings, "lr": rate}) for rate in rates]
    if not rates or len({one.lr for one in firsts}) != len(rates):
        raise ValueError(f"lr: expected different learning rates, at least one, got {rates!r}")
    grid = [replaced(one, seed=one.seed + restart) for one in firsts for restart in range(restarts)]
    parallel = parallel or Parallel(dtype=DTYPES[grid[0].dtype])
    say = say if parallel.is_first else lambda text: None
    if intermediate is not None:
        kind, folder = intermediate
        if kind not in NAMES:
            raise ValueError(f"intermediate: expected a task of {', '.join(NAMES)}, got {kind!r}")
        own = {name: getattr(grid[0], name) for name in ("seed", "dtype")}
        shown: dict[str, Any] = {"parallel": parallel, "say": say, "progress": progress, "workers": workers}
        say(f"intermediate: {kind}")
        model = finetune(kind, model, folder, output / INTERMEDIATE, **own, **shown).output
    place = hub.resolve(model)
    config = EncoderConfig.from_pretrained(place)
    tokenizer = load_tokenizer(place)
    splits = made.splits(data)
    for kind in ("train", "dev"):
        if not splits[kind]:
            raise ValueError(f"data: {data} has no {kind} file of {made.name}")

    def encoded(name: str, examples: Any, labelled: bool) -> Split:
        found = made.encode(examples, tokenizer, grid[0].max_length, labelled)
        _check_fits(found, config, tokenizer)
        cut = f", {found.truncated:,} sequences cut to {grid[0].max_length} tokens" if found.truncated else ""
        say(f"{name}: {len(found):,} examples{cut}")
        return Split(examples, found)

    learned = made.read(data, splits["train"][0])
    made.adopt(config)
    train = encoded("train", learned, True)
    dev = {name: encoded(name, made.read(data, name), False) for name in splits["dev"]}
    tests = {name: encoded(name, made.read(data, name), False) for name in splits["test"]}
    base = made.constant(train.examples, dev[splits["dev"][0]].examples)
    described = {
        "task": made.name,
        "model": weights_digest(place),
        "tokenizer": digest(tokenizer.to_str().encode()),
        "train": train.encoded.hash,
        "dev": {
            name: [each.encoded.hash, digest(repr(each.examples).encode())] for name, each in dev.items()
        },
        "classes": [*made.classes],
        "options": dict(made.options),
    }

    def finish(folder: Path) -> None:
        for name in TOKENIZER_FILES:
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)

    if grid[0].cost:
        say(grid[0].cost)
    runs: list[Run] = []
    for one in grid:
        folder = output / "runs" / one.name
        decisive = {**described, "settings": one.to_dict()}
        history = _finished(folder, decisive)
        if history is None:
            history = fit(
                made,
                lambda one=one: first_model(made.head, place, one, made.classes, made.labels),
                train.encoded,
                dev,
                folder,
                one,
                has_segments(config),
                decisive,
                finish,
                parallel=parallel,
                say=say,
                progress=progress,
                workers=workers,
                log_every=1 if len(train.encoded) < 50 * one.batch_size else 10,
            )
        score = max(score_of(made, entry) for entry in history)
        runs.append(Run(one, history, score, base is not None and score <= base))
        say(f"lr {one.lr:g}, seed {one.seed}: {made.metric} {100 * score:.1f}")
        if parallel.is_first:
            content = {"config": decisive, "evaluations": history, "score": score}
            replace(folder / RESULTS, (json.dumps(content, indent=1) + "\n").encode())
            _keep_the_best(output, runs)
    start = FROZEN if grid[0].freeze else RANDOM if grid[0].random_init else PRETRAINED
    published = [row for row in PUBLISHED if (row.task, row.start) == (made.name, start)]
    result = Result(made.name, made.metric, runs, output, published)
    if parallel.is_first:
        best = output / "runs" / result.best.settings.name / BEST
        if not best.is_dir():
            raise TrainingError(
                f"{best}: was removed, because another run of an earlier grid was better; "
                "expected that grid, or another output"
            )
        shutil.copytree(best, output, dirs_exist_ok=True)
        for folder, of_kind in (("dev", dev), ("test", tests)):
            dtype = DTYPES[result.best.settings.dtype]
            for path in predicted(made, output, of_kind, output / folder, parallel.device, dtype):
                say(f"wrote {path}")
        replace(output / RESULTS, (json.dumps(_described(result), indent=1) + "\n").encode())
        draw(result)
    return result


def _check_output(output: Path, model: Path) -> None:
    """Refuse a directory that has other files, which the best model would overwrite."""
    if output.resolve() == model.resolve():
        raise ValueError(f"output: expected another directory than the model's, got {output}")
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: expected a directory, got the file {output}")
    known = any((output / name).is_dir() for name in ("runs", INTERMEDIATE))
    if output.is_dir() and any(output.iterdir()) and not known:
        raise ValueError(f"output: expected a new directory or one of fine-tuning, got {output}")


def _check_fits(examples: Encoded, config: EncoderConfig, tokenizer: Tokenizer) -> None:
    """Refuse tokens that the model does not know, and sequences longer than its positions."""
    if (most := int(examples.ids.max())) >= config.vocab_size:
        token = tokenizer.id_to_token(most)
        raise ValueError(
            f"model: knows {config.vocab_size} tokens, but its tokenizer makes {token!r} with id {most}"
        )
    if (longest := int(np.diff(examples.starts).max())) > config.max_tokens:
        raise ValueError(
            f"max_length: expected at most {config.max_tokens} for this model, got {longest} tokens"
        )


def _finished(folder: Path, config: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The evaluations of a run that has ended, or None."""
    if not (folder / RESULTS).is_file():
        return None
    found = read_json(folder / RESULTS)
    problem = difference(found["config"], config, folder / RESULTS)
    if problem:
        raise TrainingError(problem)
    return found["evaluations"]


def _keep_the_best(output: Path, runs: list[Run]) -> None:
    """Remove the checkpoints of all runs that have ended, and the models of all but the best."""
    best = max(runs, key=lambda run: run.score)
    for run in runs:
        folder = output / "runs" / run.settings.name
        parts = [folder / checkpoints.name_of(step) for step in checkpoints.steps_in(folder)]
        for part in parts if run is best else [folder / BEST, *parts]:
            shutil.rmtree(part, ignore_errors=True)


def predicted(
    task: Task,
    model: Path,
    splits: Mapping[str, Split],
    folder: Path,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[Path]:
    """Write the prediction files of a trained model for some splits."""
    if not splits:
        return []
    trained = task.head.from_pretrained(model, device=device)
    written: list[Path] = []
    for name, each in splits.items():
        found = outputs(trained, each.encoded, task.fields, batch_tokens=BATCH_TOKENS, dtype=dtype)
        said = task.predictions(each.examples, each.encoded, found)
        written += task.write(folder, name, each.examples, said)
    return list(dict.fromkeys(written))


def _described(result: Result) -> dict[str, Any]:
    """For results.json."""
    return {
        "task": result.task,
        "metric": result.metric,
        "scores": result.scores,
        "best": result.best.settings.to_dict(),
        "runs": [
            {
                "settings": run.settings.to_dict(),
                "evaluations": run.evaluations,
                "score": run.score,
                "failed": run.failed,
            }
            for run in result.runs
        ],
        "published": [row._asdict() for row in result.published],
    }


def draw(result: Result) -> Path | None:
    """Draw the dev score of each run over its epochs, as curves.png; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rates = list(dict.fromkeys(run.settings.lr for run in result.runs))
    for run in result.runs:
        best = run is result.best
        scores = [
            100 * next(s[result.metric] for s in e.values() if isinstance(s, dict)) for e in run.evaluations
        ]
        axes.plot(
            [entry["epoch"] for entry in run.evaluations],
            scores,
            color=f"C{rates.index(run.settings.lr)}",
            marker="o",
            alpha=1.0 if best else 0.45,
            linewidth=2.0 if best else 1.0,
            label=f"lr {run.settings.lr:g}" if run.settings.seed == result.runs[0].settings.seed else None,
        )
    axes.set(xlabel="epoch", ylabel=f"{result.metric} on dev, percent", title=result.task)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path = result.output / "curves.png"
    figure.savefig(path, dpi=150)
    return path
