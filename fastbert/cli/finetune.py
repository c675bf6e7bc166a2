"""`fastbert finetune`: a checkpoint and a task's own files to a trained model and its official files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fastbert.checkpoint.files import read_json
from fastbert.cli.finetune_arguments import MOVEMENT, SETTINGS, option, task_options
from fastbert.cli.usage import UsageError, device_of, say
from fastbert.compression.length_drop import LengthDrop
from fastbert.compression.movement import Movement
from fastbert.compression.token_search import LearnedSchedule
from fastbert.finetuning import run as finetuning
from fastbert.finetuning.losses import Method
from fastbert.tasks.glue import write_archive
from fastbert.tasks.glue_tasks import TASKS
from fastbert.training.loop import DTYPES, Interrupted
from fastbert.training.parallel import Parallel


def run(args: argparse.Namespace) -> int:
    """Train and print the table; returns the exit status."""
    options = task_options(args)
    if args.wnli and args.task != "glue":
        raise UsageError(f"--wnli: is an option of glue, not of {args.task}")
    if args.model is None and not args.predict_only:
        raise UsageError("--model: is required for a training; only --predict-only does without")
    options |= {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    if args.intermediate_task and not args.intermediate:
        raise UsageError("--intermediate-task: needs --intermediate")
    if args.intermediate:
        if args.task == "glue":
            raise UsageError("--intermediate: is for one task; expected one of GLUE's in place of glue")
        options["intermediate"] = (args.intermediate_task or args.task, args.intermediate)
    options["method"] = _method(args)
    data, output = Path(args.data), Path(args.output)
    tasks = {args.task: output}
    if args.task == "glue":
        tasks = {name: output / name for name in _tasks_of_glue(data, args.wnli)}
    parallel = Parallel(None, device_of(args.device), DTYPES[args.dtype or "fp32"])
    found: dict[str, Any] = {}
    try:
        for name, folder in tasks.items():
            result = finetuning.finetune(
                name,
                args.model,
                data,
                folder,
                predict_only=args.predict_only,
                parallel=parallel,
                say=say if parallel.is_first else lambda text: None,
                progress=args.progress,
                workers=args.workers,
                **options,
            )
            if parallel.is_first:
                found[name] = read_json(folder / finetuning.RESULTS)
                if not args.json:
                    print(result.table(), flush=True)
    except Interrupted as stopped:
        if parallel.is_first:
            say(f"{stopped}; rerun the command to resume")
        return 128 + stopped.number
    finally:
        parallel.close()
    if parallel.is_first:
        if args.task == "glue":
            _write_submission(output, tuple(tasks))
        if args.json:
            print(json.dumps(found if args.task == "glue" else found[args.task]))
    return 0


def _method(args: argparse.Namespace) -> Method | None:
    kinds = [kind for kind in ("movement", "length_drop", "token_search") if getattr(args, kind) is not None]
    if len(kinds) > 1:
        raise UsageError(f"{option(kinds[1])}: expected none with {option(kinds[0])}")
    if args.length_drop_models is not None and args.length_drop is None:
        raise UsageError("--length-drop-models: needs --length-drop")
    if args.length_drop is not None:
        more = {} if args.length_drop_models is None else {"models": args.length_drop_models}
        return LengthDrop(args.length_drop, **more)
    if args.token_search is not None:
        return LearnedSchedule(args.token_search)
    given = {name: getattr(args, f"movement_{name}") for name in MOVEMENT}
    given = {name: value for name, value in given.items() if value is not None}
    if args.movement is not None:
        return Movement(args.movement, **given)
    for name in given:
        raise UsageError(f"{option(f'movement_{name}')}: needs --movement")
    return None


def _tasks_of_glue(data: Path, wnli: bool) -> list[str]:
    """The tasks of GLUE whose folders are there; WNLI only if it is asked for."""
    known = [name for name in TASKS if name != "ax" and (wnli or name != "wnli")]
    found = [name for name in known if (data / TASKS[name].folder).is_dir()]
    if wnli and "wnli" not in found:
        raise UsageError(f"--wnli: {data} has no folder {TASKS['wnli'].folder}")
    if not found:
        folders = ", ".join(TASKS[name].folder for name in known)
        raise UsageError(f"--data {data}: expected one of the folders {folders}")
    return found


def _write_submission(output: Path, tasks: tuple[str, ...]) -> None:
    """Write submission.zip from the tasks' test predictions, if all files but WNLI's are there."""
    # AX is predicted by MNLI's model
    files = {
        name: output / ("mnli" if task == "ax" else task) / "test" / f"{name}.tsv"
        for task, form in TASKS.items()
        for name in form.submissions.values()
    }
    missing = [name for name, path in files.items() if not path.is_file()]
    if set(missing) - {"WNLI"}:
        say(f"no submission.zip, because test predictions are missing: {', '.join(missing)}")
        return
    archive = write_archive(output, [path for name, path in files.items() if name not in missing])
    say(f"wrote {archive}")
    if missing:
        say("submission.zip lacks WNLI.tsv, which the server expects; --wnli trains it")
