"""Time the configs of the Triton kernels on this GPU, and write the fastest to kernels/tuned/<gpu>.json.

    python bench/tune.py [--op OP] [--dtype bfloat16] [--model base] [--budget 240] [--json FILE]
    python bench/tune.py --jobs 16                     compile by so many processes first; default: all cores
    python bench/tune.py --merge FILE                  add what --json FILE recorded, here or elsewhere
    python bench/tune.py --device cpu --out FILE       tries the code, tiny, in Triton's interpreter

One entry for each op, shape of BERT-base and -large, dtype and bucket of rows (`linear`) or of the longest
sequence (`attention`). The ops that dispatch.py gives to Triton come first, in the first dtype. The
candidates are those of the kernel's own module, which tests/support/triton_compile.py compiles for other
GPUs: without spills, within shared memory. A candidate that still does not compile, or breaks the error
rule at the shape that is timed, is recorded and left out. The others are timed turn by turn. The config
that the module's heuristic chooses stays unless another is 1% faster.

The table is written after every entry, merged into what the file held. When the budget is spent, the other
entries stay as they were. At run time nothing is timed: kernels/tuning.py reads the table.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench import lines  # noqa: E402
from bench.probe import Report, describe, write_atomically  # noqa: E402
from bench.probe_steps import reason_of  # noqa: E402
from bench.timing import interleave, rotations, synchronize  # noqa: E402
from bench.workloads import MODELS  # noqa: E402
from fastbert import testing  # noqa: E402
from fastbert.kernels import tuning  # noqa: E402
from fastbert.runtime import dispatch  # noqa: E402
from fastbert.testing.op_cases.attention import AttentionCase  # noqa: E402
from fastbert.testing.op_cases.linear import LinearCase  # noqa: E402

BUDGET_SECONDS = 240.0
TOKENS = {0.0: 16_384, 0.1: 4096}  # by dropout_p: batches that fill the GPU; the oracle's bits take memory
AHEAD = 0.35  # of the budget, at most, to compile before anything is timed
WORTH = 0.99  # of the heuristic's time: a smaller gain is noise
ROWS = (14, 13, 12, 10, 8, 7)  # buckets of `linear`
SEQLENS = (9, 8, 7, 6, 5)  # buckets of `attention`


@dataclass(frozen=True)
class Task:
    """One entry of the table."""

    op: str
    key: str
    bucket: int
    case: testing.Case
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """As rows name it."""
        return f"{self.op} {self.key} {self.bucket}"


# ---- What is tuned ----


def module_of(op: str) -> ModuleType:
    """The kernel's module."""
    return importlib.import_module(f"fastbert.kernels.{op}")


def linear_task(case: LinearCase, dtype: torch.dtype) -> Task:
    """The entry that `case` uses."""
    shape = case.in_features, case.out_features, case.activation, case.residual
    return Task(
        "linear", module_of("linear").tuning_key(*shape, dtype), tuning.bucket(case.rows), case, dtype
    )


def extras_of(case: AttentionCase) -> str:
    """What the case has beside the products, as attention's configs tell it."""
    return module_of("attention").extras_of(bool(case.bias), case.dropout_p > 0, case.probs)


def attention_task(case: AttentionCase, dtype: torch.dtype) -> Task:
    """The entry that `case` uses."""
    key = module_of("attention").tuning_key(case.headdim, dtype, extras_of(case))
    return Task("attention", key, tuning.bucket(case.max_seqlen), case, dtype)


def linear_cases(model: str) -> Iterator[LinearCase]:
    """The products of a layer, those that the table of dispatch.py gives to Triton first."""
    gemms = MODELS[model].gemms()
    for name in ("ffn1", "qkv", "proj", "ffn2"):
        out, k = gemms[name]
        # the bias of the products before a norm goes into the norm
        options = {"activation": "gelu" if name == "ffn1" else None, "bias": name in ("ffn1", "qkv")}
        for bucket in ROWS:
            yield LinearCase(2**bucket, k, out, **options)


def attention_cases(model: str) -> Iterator[AttentionCase]:
    """A layer's attention over equal lengths, in inference and in training."""
    sizes = MODELS[model]
    for dropout_p, tokens in TOKENS.items():
        for bucket in SEQLENS:
            lengths = (2**bucket,) * (tokens >> bucket)
            heads = sizes.heads, sizes.hidden // sizes.heads
            yield AttentionCase(lengths, *heads, packed_qkv=True, dropout_p=dropout_p)


TINY = {
    "linear": (LinearCase(40, 48, 96, "gelu"), LinearCase(9, 48, 96, "gelu"), LinearCase(40, 96, 48)),
    "attention": (
        AttentionCase((17, 17), 2, 16, packed_qkv=True),
        AttentionCase((20,), 1, 16, packed_qkv=True, dropout_p=0.1),
    ),
}
OPS: dict[str, tuple[Callable[[str], Iterator[Any]], Callable[[Any, torch.dtype], Task]]] = {
    "linear": (linear_cases, linear_task),
    "attention": (attention_cases, attention_task),
}


def tasks(ops: list[str], models: list[str], dtypes: list[torch.dtype], tiny: bool) -> list[Task]:
    """All entries, each once, in order: dtype, whether Triton serves the case by default, op, model."""
    found: dict[str, Task] = {}
    for dtype in dtypes:
        for later in (False, True):
            for op in ops:
                cases, task = OPS[op]
                for case in TINY[op] if tiny else (case for model in models for case in cases(model)):
                    if is_later(case) is later:
                        each = task(case, dtype)
                        found.setdefault(each.name, each)
    return list(found.values())


def is_later(case: testing.Case) -> bool:
    """Whether the case can come later: another backend serves it, or only training uses it."""
    return case.activation is None if case.op == "linear" else case.dropout_p > 0


def candidates(task: Task, device: tuning.Device) -> list[Any]:
    """The configs to time, the module's own first; in the same order on every run."""
    module, case = module_of(task.op), task.case
    if task.op == "attention":
        return list(module.candidates(case.headdim, task.dtype, extras_of(case), device.capability))
    return list(module.candidates(task.dtype, device.capability))


def heuristic(task: Task, device: tuning.Device) -> Any:
    """The config that the module chooses without a table."""
    unknown = device._replace(name="no such device")
    module, case = module_of(task.op), task.case
    if task.op == "linear":
        shape = case.in_features, case.out_features, case.activation, case.residual
        return module.config_for(2**task.bucket, *shape, task.dtype, True, unknown)
    rows = tuning.bucket(case.total * case.nheads)
    return module.config_for(case.headdim, task.dtype, extras_of(case), task.bucket, rows, unknown)


# ---- One entry ----


def launches(task: Task, device: torch.device, sets: list[dict]) -> list[Callable[[Any], torch.Tensor]]:
    """For each set of inputs a function from a config to the op's first output, without the op around it."""
    module = module_of(task.op)
    name = f"{task.op}_fwd_with"
    real, seen = getattr(module, name), []

    def record(config: Any, *args: Any) -> Any:
        seen.append(args)
        return real(config, *args)

    setattr(module, name, record)
    try:
        with torch.no_grad(), dispatch.use_backend(**{task.op: "triton"}):
            for inputs in sets:
                task.case.call(**inputs)
    finally:
        setattr(module, name, real)
    if len(seen) != len(sets):
        raise RuntimeError(f"{task.op}: its public op does not reach kernels/{task.op}.{name} once a call")
    return [functools.partial(lambda config, args: real(config, *args)[0], args=args) for args in seen]


def first(output: Any) -> torch.Tensor:
    """The op's main output."""
    return output[0] if isinstance(output, tuple) else output


def expected(task: Task, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(plain PyTorch in the dtype, the truth in float32, which is exact compared with half precision)."""
    wide = torch.float32 if task.dtype in testing.HALF else torch.float64
    exact = {
        name: value.to(wide) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with torch.no_grad():
        return first(task.case.eager(**inputs)), first(task.case.eager(**exact))


def tune(task: Task, device: torch.device, tiny: bool, left: Callable[[], float]) -> Iterator[dict]:
    """Rows of one entry: each candidate, then the choice, which has `config` and `entry`: its place."""
    facts = tuning.device_of(device)
    entry = {"step": "tuning", "name": task.name, "entry": [task.op, task.key, task.bucket]}
    usual = heuristic(task, facts)
    configs = list(dict.fromkeys([usual, *candidates(task, facts)]))
    count = 1 if tiny else rotations(task.case.bytes(task.dtype), device, limit=8)
    sets = [task.case.inputs(task.dtype, device, seed) for seed in range(count)]
    runs = launches(task, device, sets)
    eager, truth = expected(task, sets[0])
    floor = task.case.floor(sets[0], task.case.output_names[0]) if task.dtype not in testing.HALF else 0.0
    good, tried = {}, 0
    for config in configs:
        if good and left() <= 0:
            break
        tried += 1
        row = {"step": "tuning", "name": f"{task.name} {label(config)}", "status": "ok"}
        try:
            output = runs[0](config)
            *_, reason = testing.compare(output, eager, truth, task.dtype, floor)
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
    options = {"samples": (1, 1), "warmup": 0} if tiny else {"samples": (7, 40), "seconds": 0.08}
    times = interleave(good, device, **options)
    for config, timing in times.items():
        facts_of = {key: value for key, value in asdict(timing).items() if value is not None}
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
    case = task.case
    if task.op == "linear":
        return task.op, task.dtype, case.activation, case.bias, case.residual
    return task.op, task.dtype, case.headdim, extras_of(case)


def compile_units(todo: list[Task], device: tuning.Device) -> list[tuple[Task, Any]]:
    """(task, config) of every kernel that the tasks need, each once, by the task with the fewest rows."""
    least: dict[tuple, Task] = {}
    for task in sorted(todo, key=lambda task: task.bucket):
        least.setdefault(signature(task), task)
    return [
        (task, config)
        for task in least.values()
        for config in dict.fromkeys([heuristic(task, device), *candidates(task, device)])
    ]


def compile_slice(units: list[tuple[Task, Any]], device: torch.device) -> int:
    """Launch each config once, so that Triton's cache on the disk holds it; how many work."""
    good, runs = 0, {}
    for task, config in units:
        try:
            if task.name not in runs:
                runs = {task.name: launches(task, device, [task.case.inputs(task.dtype, device)])[0]}
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
    """A config in a row's name."""
    return "_".join(str(int(value)) for value in config)


# ---- The table ----


def read_table(path: Path, name: str) -> dict:
    """What the file holds. Raises if it belongs to another device."""
    if not path.exists():
        return {"device": name}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--out {path}: is no JSON: {error}") from error
    if not isinstance(table, dict) or table.get("device") != name:
        whose = table.get("device") if isinstance(table, dict) else None
        raise ValueError(f"--out {path}: is the table of {whose!r}, not of {name!r}")
    return table


def with_entry(table: dict, entry: list, config: dict) -> dict:
    """The table with one more entry, or a newer one; sorted, so that two runs differ in configs only."""
    op, key, bucket = entry
    buckets = table.get(op, {}).get(key, {}) | {str(bucket): config}
    keys = table.get(op, {}) | {key: {b: buckets[b] for b in sorted(buckets, key=int)}}
    table = table | {op: {key: keys[key] for key in sorted(keys)}}
    return {"device": table["device"], **{op: table[op] for op in sorted(table) if op != "device"}}


def merge(record: Path, path: Path | None = None) -> tuple[Path, int]:
    """Take the entries of a run's `--json` file into the table; the table's path and how many there were.

    Raises:
        ValueError: the file is of no run on a GPU, or the table is of another one.
    """
    data = lines.read(record) if record.suffix == ".jsonl" else json.loads(record.read_text(encoding="utf-8"))
    where = data.get("environment", {})
    if where.get("device_type") != "cuda":
        raise ValueError(f"--merge {record}: is of no run on a GPU")
    path = path or tuning.file_of(where["device"])
    table = read_table(path, where["device"])
    entries = [row for row in data["rows"] if row.get("step") == "tuning" and "config" in row]
    for row in entries:
        table = with_entry(table, row["entry"], row["config"])
    if entries:
        write_atomically(path, table)
    return path, len(entries)


def line(row: dict) -> str:
    """The printed form of a row."""
    if row["status"] != "ok":
        return f"  {row['name']}: {row['error'].splitlines()[0][:140]}"
    if "entry" not in row:
        return f"  {row['name']}: {row['median_ms'] * 1e3:,.1f} us, spread {row['spread']:.0%}"
    gain = "" if row["gain"] is None else f", {row['gain']:.2f} x the heuristic's"
    values = "_".join(str(int(value)) for value in row["config"].values())
    return f"{row['name']}: {values}{gain}, {row['tried']} of {row['of']} configs"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--op", choices=tuple(OPS), action="append", help="only this op (may be repeated)")
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
    parser.add_argument("--merge", type=Path, metavar="FILE", help="time nothing; take over this record")
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
        os.environ["TRITON_INTERPRET"] = "1"
        from fastbert.testing import triton_interpreter  # without it the interpreter computes bfloat16 wrong

        triton_interpreter.choose()
        torch.set_num_threads(1)
    device = (
        torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    )
    name = tuning.device_of(device).name
    path = args.out or tuning.file_of(name)
    table = read_table(path, name)
    dtypes = [getattr(torch, each) for each in args.dtype or ("bfloat16", "float16")]
    todo = tasks(args.op or list(OPS), args.model or ["base", "large"], dtypes, tiny)
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
