"""Time the configs of the Triton kernels on this GPU, and write the fastest to kernels/tuned/<gpu>.json.

    python bench/tune.py [--op OP] [--dtype bfloat16] [--model base] [--budget 240] [--json FILE]
    python bench/tune.py --jobs 16                     compile by 16 processes first; default: all cores
    python bench/tune.py --merge FILE                  add the record of --json FILE, from here or elsewhere
    python bench/tune.py --device cpu --out FILE       try the code, tiny, in Triton's interpreter

One entry for each kernel, shape of BERT-base and -large, dtype and bucket of rows, or of the longest sequence
(attention): `linear`, `attention` and `layer_norm`, forward and backward, the gradient between the two
products of `feed_forward`, and `linear_norm`. Kernels that Triton serves by dispatch.py's table come first,
in the first dtype, large batches before small ones. The candidates are the kernel module's own;
tests/support/triton_compile.py compiles them for other GPUs, without spills and within shared memory.

At most 12 candidates per entry are timed. The config that the module's heuristic chooses is the first. Other
candidates are pruned by a count: a tile is left out where the busiest multiprocessor would have more than 1.5
times the work that it has with the best tile (products; see `work` of kernels/linear.py, and of
kernels/linear_norm.py, where each number of parts counts as a tile of its own). The tiles that are left are
tried in the order of their work, each in several forms of depth, stages and order: the first 6 tiles, the
second form of the first 4, and the third form of the first 2, where there are as many.

A candidate that does not compile, or breaks the error rule at the shape that is timed, is recorded and left
out. Of a kernel of backward all gradients are compared. The timed candidates are interleaved. The
heuristic's config stays unless another is 1% faster. The two kernels of attention's backward are entries of
their own, timed as all of that backward.

The table is written after every entry, merged into what the file held. When the budget is spent, the other
entries stay as they were. At run time nothing is timed: kernels/tuning.py reads the table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from bench.lib.entries import KINDS, OPS, Task, candidates, heuristic, module_of, part_of, tasks
from bench.lib.machine import describe, interpret
from bench.lib.probe_steps import reason_of
from bench.lib.report import Report, write_atomically
from bench.lib.timing import interleave, rotations, synchronize
from bench.lib.tuned import merge, read_table, with_entry
from fastbert import testing
from fastbert.kernels import tuning
from fastbert.runtime import dispatch
from fastbert.runtime.table import HALF
from fastbert.testing.error_rule import with_grad

BUDGET_SECONDS = 240.0
AHEAD = 0.35  # of the budget, at most, to compile before anything is timed
WORTH = 0.99  # of the heuristic's time: a smaller gain is noise


# ---- One entry ----


def trains(task: Task) -> bool:
    """Whether the case runs as in training, where forward saves what backward needs."""
    return KINDS[task.op].backward or getattr(task.case, "dropout_p", 0.0) > 0


@contextlib.contextmanager
def launcher_of(task: Task, launcher: Callable[..., Any]) -> Iterator[None]:
    """`launcher`, which gets the real one before its arguments, in the place of the task's."""
    module, name = module_of(task.op), KINDS[task.op].launcher
    real = getattr(module, name)
    setattr(module, name, functools.partial(launcher, real))
    try:
        with dispatch.use_backend(**{KINDS[task.op].op: "triton"}):
            yield
    finally:
        setattr(module, name, real)


def evaluate(task: Task, function: Callable, inputs: dict, dtype: torch.dtype | None = None) -> dict:
    """What the error rule compares of `function`: the first output; of a kernel of backward the gradients."""
    case, kind = task.case, KINDS[task.op]
    if not kind.backward:
        wanted = case.grad_inputs if trains(task) and function == case.call else ()
        with torch.set_grad_enabled(bool(wanted)):
            output = first(function(**with_grad(inputs, wanted, dtype)))
        return {case.output_names[0]: output.detach()}
    randn = torch.randn(kind.shape(case), generator=torch.Generator().manual_seed(1))
    dout = randn.to(task.dtype).to(device_of(inputs))
    found = testing.evaluate(function, case, inputs, dtype, True, [dout])
    return {name: value for name, value in found.items() if name not in case.output_names}


def device_of(inputs: dict) -> torch.device:
    return next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))


def launches(task: Task, sets: list[dict]) -> list[Callable[[Any], Any]]:
    """For each set of inputs a function from a config to a launch, without the op around it."""
    kind, seen = KINDS[task.op], []

    def record(real: Callable, default: Any, *args: Any) -> Any:
        seen.append(functools.partial(launch, real, default, args))
        return real(default, *args)

    def launch(real: Callable, default: Any, args: tuple, config: Any) -> Any:
        return real(kind.launched(config, task, default), *args)

    with launcher_of(task, record):
        for inputs in sets:
            evaluate(task, task.case.call, inputs)
    if len(seen) != len(sets):
        raise RuntimeError(
            f"{task.op}: its public op does not reach kernels/{kind.module}.{kind.launcher} once a call"
        )
    return seen


def computed(task: Task, config: Any, inputs: dict) -> dict[str, torch.Tensor]:
    """What the public op computes where the task's kernel runs with `config`."""

    def chosen(real: Callable, default: Any, *args: Any) -> Any:
        return real(KINDS[task.op].launched(config, task, default), *args)

    with launcher_of(task, chosen):
        return evaluate(task, task.case.call, inputs)


def first(output: Any) -> torch.Tensor:
    """The op's main output."""
    return output[0] if isinstance(output, tuple) else output


def expected(task: Task, inputs: dict) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(plain PyTorch in the dtype, the truth in float32, which is exact compared with half precision)."""
    wide = torch.float32 if task.dtype in HALF else torch.float64
    return evaluate(task, task.case.eager, inputs), evaluate(task, task.case.eager, inputs, wide)


def wrong(task: Task, config: Any, inputs: dict, eager: dict, truth: dict) -> str:
    """Which result of a config breaks the error rule, and how; "" where none does."""
    for name, actual in computed(task, config, inputs).items():
        floor = task.case.floor(inputs, name) if task.dtype not in HALF else 0.0
        *_, reason = testing.compare(actual, eager[name], truth[name], task.dtype, floor)
        if reason:
            return f"{name}: {reason}" if KINDS[task.op].backward else reason
    return ""


def tune(task: Task, device: torch.device, tiny: bool, left: Callable[[], float]) -> Iterator[dict]:
    """Rows of one entry: each candidate, then the choice, which has `config` and `entry`: its place."""
    facts = tuning.device_of(device)
    entry = {"step": "tuning", "name": task.name, "entry": [task.op, task.key, task.bucket]}
    usual = heuristic(task, facts)
    configs = candidates(task, facts)
    count = 1 if tiny else rotations(task.case.bytes(task.dtype), device, limit=8)
    sets = [task.case.inputs(task.dtype, device, seed) for seed in range(count)]
    runs = launches(task, sets)
    eager, truth = expected(task, sets[0])
    good, tried = {}, 0
    for config in configs:
        if good and left() <= 0:
            break
        tried += 1
        row = {"step": "tuning", "name": f"{task.name} {label(config)}", "status": "ok"}
        try:
            reason = wrong(task, config, sets[0], eager, truth)
            synchronize(device)
        except Exception as error:
            yield row | {"status": "error", "error": reason_of(error)}
            synchronize(device)  # raises where nothing runs on the GPU any more
            continue
        if reason:
            yield row | {"status": "error", "error": f"wrong: {reason}"}
        else:
            good[config] = [functools.partial(run, config) for run in runs]
    if not good:
        yield entry | {"status": "error", "error": "no config works here"}
        return
    options = {"samples": (1, 1), "warmup": 0} if tiny else {"samples": (7, 40), "seconds": 0.05}
    times = interleave(good, device, **options)
    for config, timing in times.items():
        facts_of = timing.facts()
        yield {"step": "tuning", "name": f"{task.name} {label(config)}", "status": "ok", **facts_of}
    best = min(times, key=lambda config: times[config].median_ms)
    if usual in times and times[best].median_ms > WORTH * times[usual].median_ms:
        best = usual
    gain = times[usual].median_ms / times[best].median_ms if usual in times else None
    chosen = {"config": best._asdict(), "usual": usual._asdict(), "gain": gain}
    yield entry | {"status": "ok", **chosen, "tried": tried, "of": len(configs)}


def tuned(task: Task, device: torch.device, tiny: bool, left: Callable[[], float]) -> Iterator[dict]:
    """`tune`; an entry that cannot be prepared, for example for lack of memory, is a row."""
    try:
        yield from tune(task, device, tiny, left)
    except Exception as error:
        entry = {"step": "tuning", "name": task.name, "entry": [task.op, task.key, task.bucket]}
        yield entry | {"status": "error", "error": reason_of(error)}
        synchronize(device)  # raises where nothing runs on the GPU any more: the run ends here


# ---- Compiling ahead ----


def signature(task: Task) -> tuple:
    """What decides which kernels the task's configs compile to; the number of rows does not."""
    return task.op, task.dtype, *KINDS[task.op].constants(task.case)


def compile_units(todo: list[Task], device: tuning.Device) -> list[tuple[Task, Any]]:
    """(task, config) of every kernel that the tasks need, each once, by the task with the fewest rows.

    In the order of the tasks: where time is short, what is timed first is compiled.
    """
    least: dict[tuple, Task] = {}
    for task in sorted(todo, key=lambda task: task.bucket):
        least.setdefault((*signature(task), part_of(task)), task)
    units = [(least[*signature(t), part_of(t)], config) for t in todo for config in candidates(t, device)]
    return list(dict.fromkeys(units))


def compile_slice(units: list[tuple[Task, Any]], device: torch.device) -> int:
    """Launch each config once, so that Triton's cache on the disk holds it; how many work."""
    good, runs = 0, {}
    for task, config in units:
        try:
            if task.name not in runs:
                runs = {task.name: launches(task, [task.case.inputs(task.dtype, device)])[0]}
            runs[task.name](config)
            synchronize(device)
            good += 1
        except Exception as error:
            # the row of this config will say so
            print(f"  {task.name} {label(config)}: {reason_of(error)[:140]}", flush=True)
    return good


def compile_ahead(argv: list[str], jobs: int, seconds: float) -> None:
    """Compile all configs in `jobs` processes of this script, each a share of them, for at most `seconds`."""
    begin = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), *argv]
    running = [subprocess.Popen([*command, "--slice", f"{i}/{jobs}"]) for i in range(jobs)]
    for process in running:
        try:
            process.wait(max(0.1, seconds - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    statuses = [process.returncode for process in running]
    print(f"# compiled ahead for {time.monotonic() - begin:.0f} s, {jobs} at once; {statuses}", flush=True)


def slice_of(text: str) -> tuple[int, int]:
    """ "2/16": the third of 16 shares."""
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise argparse.ArgumentTypeError(f"got {text}, expected such as 0/16")
    return int(first), int(count)


def label(config: Any) -> str:
    """A config in a row's name; "n" for None."""
    return "_".join("n" if value is None else str(int(value)) for value in config)


# ---- The command ----


def line(row: dict) -> str:
    if row["status"] != "ok":
        return f"  {row['name']}: {row['error'].splitlines()[0][:140]}"
    if "entry" not in row:
        return f"  {row['name']}: {row['median_ms'] * 1e3:,.1f} us, spread {row['spread']:.0%}"
    gain = "" if row["gain"] is None else f", {row['gain']:.2f} x the heuristic's"
    values = label(row["config"].values())
    return f"{row['name']}: {values}{gain}, {row['tried']} of {row['of']} configs"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--op", choices=OPS, action="append", help="only this op (may be repeated)")
    parser.add_argument("--model", choices=("base", "large"), action="append", help="may be repeated; both")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        action="append",
        help="may be repeated; default: bfloat16, then float16",
    )
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds in all (240)")
    parser.add_argument("--out", type=Path, help="the table; default: kernels/tuned/<gpu>.json")
    parser.add_argument("--json", type=Path, help="record every candidate here too, *.json or *.jsonl")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="time nothing; merge this record")
    parser.add_argument("--jobs", type=int, help="processes that compile ahead; default: the cores, on a GPU")
    parser.add_argument("--slice", type=slice_of, metavar="I/N", help="only compile a share of the configs")
    args = parser.parse_args(argv)
    if not args.budget > 0:
        parser.error(f"--budget {args.budget}: expected seconds above 0")
    if args.jobs is None:
        args.jobs = len(os.sched_getaffinity(0)) if args.device == "cuda" else 0
    if args.jobs < 0:
        parser.error(f"--jobs {args.jobs}: expected a number of processes, or 0 for none")
    if args.merge is not None:
        return args
    if args.device == "cpu" and args.out is None:
        parser.error("--device cpu: tries the code only, and needs --out FILE for what it finds")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    return args


def main(argv: list[str] | None = None) -> int:
    """Tune what the arguments name; the exit status is 1 where an entry found no config that works."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        return run(args, argv)
    except ValueError as error:
        print(f"tune: error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """What `main` does after the arguments are read."""
    if args.merge is not None:
        path, count = merge(args.merge, args.out)
        print(f"# {count} entries of {args.merge} are in {path}")
        return 0
    begin = time.monotonic()
    tiny = args.device == "cpu"
    if tiny:
        interpret()
    device = (
        torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    )
    name = tuning.device_of(device).name
    path = args.out or tuning.file_of(name)
    table = read_table(path, name)
    dtypes = [getattr(torch, each) for each in args.dtype or ("bfloat16", "float16")]
    todo = tasks(args.op or OPS, args.model or ["base", "large"], dtypes, tiny)
    if args.slice is not None:
        first, count = args.slice
        units = compile_units(todo, tuning.device_of(device))[first::count]
        print(f"# slice {first}/{count}: {compile_slice(units, device)} of {len(units)} work", flush=True)
        return 0
    settings = {key: str(value) for key, value in vars(args).items() if value is not None}
    report = Report(args.json, settings, None, line)
    report.data["environment"] = describe(device)
    report.save()
    print(f"# {name}: {len(todo)} entries of {path}", flush=True)
    if args.jobs > 1:
        compile_ahead(argv, args.jobs, AHEAD * args.budget)

    def left() -> float:
        return args.budget - (time.monotonic() - begin)

    done, failed = 0, 0
    for task in todo:
        if left() <= 0:
            print(f"# the budget is spent: {len(todo) - done} entries are left as they were", flush=True)
            break
        for row in tuned(task, device, tiny, left):
            report.row(row)
            failed += "entry" in row and row["status"] != "ok"
            if "config" in row:
                table = with_entry(table, row["entry"], row["config"])
                write_atomically(path, table)
        done += 1
    report.data["finished"] = done == len(todo)
    report.save()
    print(f"# {done} of {len(todo)} entries in {time.monotonic() - begin:.0f} s, {failed} without a config")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
