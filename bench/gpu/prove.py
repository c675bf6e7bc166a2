"""`make gpu OUT=DIR`: prove the project on this machine's GPU, in calls of under ten minutes each.

    python bench/gpu/prove.py --out DIR [--part a] [--only STEP[,STEP]] [--budget 570]   run the steps
    python bench/gpu/prove.py --out DIR --device cpu       the same, tiny, in Triton's interpreter
    python bench/gpu/prove.py merge DIR [DIR]              into bench/results, tuned configs, proofs and docs
    python bench/gpu/prove.py readme [--check]             tables of docs/numbers.md from bench/results

| part | what |
|---|---|
| a | the extension and all kernels compiled; roofs; correctness; self-checks; forward; training; breakdown |
| b | determinism, graphs, streams, memory; tuning; every op beside PyTorch; the forward as tuned |
| c | the sanitizer on single kernels; pre-training; torch.compile's peers |
| d | one short lease: headline rows beside graphed peers, the queue, the CUDA kernels' proofs, breakdown |

The queue (bench/gpu/queue/queue.toml) holds questions that wait for a GPU, in order of value.

Each step is its own process with a time limit. Its measurements are appended to `DIR/*.jsonl` and synced to
the disk line by line, its output to `DIR/log.txt`, so a kill loses nothing. A step that fails, crashes or
hangs is recorded in `DIR/steps.jsonl` with the end of its output, and the next step runs.

`--budget` is seconds for all steps. A step gets at most its share, and leaves later steps their least time; a
step with too little time left is recorded as skipped. The exit status is 1 if a step
failed.

After each step the archive `run-<part>.tar` in DIR has all other files: where few files come back from a
machine, the archive is enough, and `merge` takes it. A part writes at most eight files.

This file needs only Python's standard library: if torch cannot be imported, that is recorded too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

from bench.lib import lines  # noqa: E402

BUDGET_SECONDS = 570.0
QUEUE = Path(__file__).with_name("queue") / "queue.toml"
TAIL = 3000  # characters of output that the record of a failed step keeps
GRACE_SECONDS = 5.0  # what a step keeps between its own end and the one that is forced


@dataclass(frozen=True)
class Run:
    """The settings that all steps share."""

    out: Path
    device: str
    python: str = sys.executable

    @property
    def tiny(self) -> bool:
        """Whether the run is a dry run with tiny shapes."""
        return self.device == "cpu"

    def file(self, name: str) -> Path:
        return self.out / name

    def script(self, name: str, *arguments: object) -> list[str]:
        """The command of a script of bench/."""
        return [self.python, str(ROOT / "bench" / name), *map(str, arguments)]


@dataclass(frozen=True)
class Step:
    """A named step.

    Attributes:
        most, least: seconds that it may take, and without which it is not begun.
        command: makes the command from the run and the seconds after which the step should end.
    """

    name: str
    most: float
    least: float
    command: Callable[[Run, float], list[str]]


def script(run: Run, name: str, into: str, seconds: float) -> list[str]:
    """The command of a script of bench/, with the options that all of them have."""
    options = ["--device", run.device, "--json", run.file(into), "--budget", f"{seconds:.0f}"]
    return run.script(name, *options)


def build(run: Run, seconds: float) -> list[str]:
    """Compile the kernels, and on a GPU the extension beside them."""
    options = ["--device", run.device, "--budget", f"{seconds:.0f}"]
    return run.script("gpu/precompile.py", *options, *([] if run.tiny else ["--build"]))


def probe(run: Run, seconds: float) -> list[str]:
    return script(run, "probe.py", "probe.jsonl", seconds) + (["--smoke"] if run.tiny else [])


def selfcheck(*options: str) -> Callable[[Run, float], list[str]]:
    """What the first use of each kernel would check, so that nothing is checked while something is timed."""
    return lambda run, seconds: [*script(run, "gpu/selfcheck.py", "checks.jsonl", seconds), *options]


def check(name: str, *options: str) -> Callable[[Run, float], list[str]]:
    """A step of gpu/checks.py; with such options the dry run has one op, because part a or b has all."""

    def command(run: Run, seconds: float) -> list[str]:
        line = script(run, "gpu/checks.py", "checks.jsonl", seconds)
        return [*line[:2], name, *line[2:], *(("--op", "layer_norm") if run.tiny and options else options)]

    return command


def queue() -> tuple[Step, ...]:
    """A step for each question of the queue, in its order."""

    def step(question: dict) -> Step:
        name, *options = question["command"]

        def command(run: Run, seconds: float) -> list[str]:
            return script(run, name, "queue.jsonl", seconds) + options

        return Step(f"queue-{question['name']}", question["seconds"], question["least"], command)

    return tuple(step(question) for question in tomllib.loads(QUEUE.read_text())["question"])


def tuning(run: Run, seconds: float) -> list[str]:
    """The kernels' configs; later steps use what it finds."""
    tiny = ["--out", str(run.file("tuned.json"))] if run.tiny else []
    return [*script(run, "tune.py", "tuning.jsonl", seconds), "--dtype", "bfloat16", *tiny]


def kernels(run: Run, seconds: float) -> list[str]:
    """Every op beside PyTorch, forward and backward."""
    command = script(run, "gpu/kernels.py", "kernels.jsonl", seconds)
    command += ["--roofs", str(run.file("probe.jsonl")), "--dtype", "bfloat16"]
    if run.tiny:
        return [*command, "--smoke", "--workload", "1x128", "--op", "packing"]
    return [*command, "--workload", "full", "--workload", "squad"]


def encoder(
    *engines: str, models: str = "base large", batches: str = ""
) -> Callable[[Run, float], list[str]]:
    """The encoder's forward by these engines."""

    def command(run: Run, seconds: float) -> list[str]:
        line = script(run, "gpu/encoder.py", "encoder.jsonl", seconds)
        line += ["--roofs", str(run.file("probe.jsonl")), "--engines", *engines]
        if run.tiny:
            return [*line, "--models", "tiny", "--workloads", "squad", "--samples", "2", "--smoke"]
        return line + ["--models", *models.split()] + (["--workloads", *batches.split()] if batches else [])

    return command


def training(*candidates: str) -> Callable[[Run, float], list[str]]:
    """A step of pretraining and its memory, base and large."""

    def command(run: Run, seconds: float) -> list[str]:
        line = script(run, "gpu/training.py", "training.jsonl", seconds)
        line += ["--roofs", str(run.file("probe.jsonl")), "--heads", "pretraining"]
        line += ["--candidates", *candidates]
        if run.tiny:
            line += ["--models", "tiny", "--dtypes", "bf16", "--samples", "2", "--smoke"]
            return [*line, "--steps", "training", "attention", "footprint"]
        # memory is measured there, and need not be counted
        return [*line, "--steps", "training", "training_memory", "attention", "--samples", "15"]

    return command


def breakdown(run: Run, seconds: float) -> list[str]:
    """The time of a forward and of a training step by kernel."""
    tiny = ["--models", "tiny", "--samples", "2"] if run.tiny else []
    return [*script(run, "gpu/breakdown.py", "breakdown.jsonl", seconds), *tiny]


def pretraining(run: Run, seconds: float) -> list[str]:
    """Runs of `fastbert pretrain`: killed, with a loss scaler, under torchrun."""
    return [*script(run, "gpu/pretraining.py", "checks.jsonl", seconds), *(["--smoke"] if run.tiny else [])]


PEERS = ("transformers_sdpa-", "transformers_sdpa_graphs", "torch_encoder")


# The seconds of a part's steps add up to no more than the budget: no step is shortened for a later one.
PARTS = {
    "a": (
        Step("build", 75, 20, build),
        Step("probe", 40, 10, probe),
        # on all cores: it compiles what the self-checks would compile one after the other
        Step("correctness", 120, 30, check("correctness")),
        Step("selfcheck", 45, 10, selfcheck()),
        Step("encoder", 115, 40, encoder("fastbert", "accelerated", "transformers", "torch_encoder")),
        Step("training", 140, 40, training("fastbert", "transformers")),
        Step("breakdown", 35, 10, breakdown),
    ),
    "b": (
        Step("determinism", 50, 10, check("determinism")),
        Step("graphs", 50, 10, check("graphs")),
        Step("stream", 30, 10, check("stream")),
        Step("memory", 45, 10, check("memory")),
        Step("tuning", 150, 30, tuning),
        Step("selfcheck-tuned", 45, 10, selfcheck()),
        Step("kernels", 90, 20, kernels),
        Step("encoder-tuned", 110, 40, encoder("fastbert", "transformers_sdpa")),
    ),
    "c": (
        Step("sanitizer", 80, 20, check("sanitizer")),
        Step("pretraining", 75, 30, pretraining),
        Step("compile", 115, 60, encoder("torch_compile")),
        Step("training-compile", 105, 60, training("fastbert", "torch_compile")),
    ),
    # numbers before proofs: what is cut off at the end can be repeated elsewhere
    "d": (
        Step("build-90a", 95, 20, build),
        Step("probe-bf16", 20, 8, probe),
        Step("selfcheck-d", 60, 10, selfcheck("--dtype", "bf16")),
        Step("encoder-peers", 70, 30, encoder("fastbert", *PEERS)),
        Step("encoder-short", 30, 15, encoder("fastbert", *PEERS, models="minilm base", batches="short")),
        *queue(),
        Step("graphs-cuda", 12, 8, check("graphs", "--backend", "cuda")),
        Step("determinism-cuda", 12, 8, check("determinism", "--backend", "cuda")),
        Step("stream-cuda", 8, 6, check("stream", "--backend", "cuda")),
        Step("breakdown-d", 30, 10, breakdown),
        Step("correctness-fp16", 25, 20, check("correctness", "--dtype", "fp16")),
        Step("sanitizer-hopper", 15, 15, check("sanitizer-hopper")),
    ),
}
STEPS = tuple(step for part in PARTS.values() for step in part)


# ---- Steps that misbehave, for the tests: never run unless named ----


def _planted(code: str) -> Callable[[Run, float], list[str]]:
    return lambda run, seconds: [run.python, "-c", code]


_HANG = "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '600'])"
PLANTED = (
    Step("planted-failure", 30, 1, _planted("import sys; print('planted', 'failure'); sys.exit(3)")),
    Step("planted-crash", 30, 1, _planted("import os; os.abort()")),
    Step("planted-hang", 2, 1, _planted(_HANG)),
    Step("planted-missing", 30, 1, lambda run, seconds: ["/no/such/program"]),
    Step("planted-good", 30, 1, _planted("print('well')")),
)


def choose(only: str | None, part: str = "a") -> list[Step]:
    """The steps named, of any part, in the order in which they run; without a name those of the part."""
    if only is None:
        return list(PARTS[part])
    names = [name.strip() for name in only.split(",")]
    known = {step.name: step for step in (*STEPS, *PLANTED)}
    unknown = [name for name in names if name not in known]
    if unknown:
        expected = ", ".join(step.name for step in STEPS)
        raise ValueError(f"--only: got {', '.join(unknown) or repr(only)}, expected some of {expected}")
    return [step for step in known.values() if step.name in names]


def share(step: Step, later: list[Step], left: float, scale: float) -> float:
    """Seconds for `step`: its most, or less if later steps need the rest; 0 if too few are left."""
    if left < step.least:
        return 0.0
    return max(step.least, min(step.most * scale, left - sum(other.least for other in later)))


def environment(run: Run) -> dict[str, str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if run.tiny:
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return env


class Log:
    """Everything that is printed, in one file; what a step prints is shown at once."""

    def __init__(self, path: Path):
        self.path = path
        self.reading = open(path, "rb") if path.exists() else open(path, "w+b")  # noqa: SIM115
        self.reading.seek(0, os.SEEK_END)
        self.start = self.reading.tell()

    def say(self, text: str) -> None:
        """Print and record a line of this command."""
        with open(self.path, "a") as file:
            file.write(text + "\n")
        self.show()

    def show(self) -> None:
        """Print what was written since the last call."""
        sys.stdout.write(self.reading.read().decode(errors="replace"))
        sys.stdout.flush()

    def mark(self) -> None:
        """Remember where the output of a step begins."""
        self.show()
        self.start = self.reading.tell()

    def tail(self) -> str:
        """The end of what the step printed."""
        self.show()
        self.reading.seek(max(self.start, self.reading.tell() - TAIL))
        return self.reading.read().decode(errors="replace")


def end(process: subprocess.Popen) -> bool:
    """End a process and all that it started; returns whether it is gone."""
    for which, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, which)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            if which == signal.SIGKILL:
                return True
    return process.poll() is not None


def run_step(step: Step, run: Run, seconds: float, log: Log) -> dict:
    """Run one step to its end; its record."""
    log.mark()
    begin = time.monotonic()
    soft = max(seconds - GRACE_SECONDS, 0.8 * seconds)
    record: dict = {"step": step.name, "status": "ok", "limit_s": round(seconds, 1), "reason": None}
    try:
        with open(log.path, "ab") as output:
            process = subprocess.Popen(
                step.command(run, soft),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=environment(run),
                start_new_session=True,
            )
    except OSError as error:
        return record | {"status": "failed", "seconds": 0.0, "reason": f"not begun: {error}"}
    try:
        while process.poll() is None and time.monotonic() - begin < seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            log.show()
        code = process.poll()
        if code is None:
            gone = end(process)
            record |= {"status": "timeout", "reason": f"stopped after its {seconds:.0f} s"}
            record["reason"] += "" if gone else "; it could not be ended"
        elif code:
            what = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
            record |= {"status": "crashed" if code < 0 else "failed", "reason": what}
    finally:  # whatever it has started ends with it; an interrupted run too
        if end(process):
            record["exit"] = process.returncode
    record["seconds"] = round(time.monotonic() - begin, 1)
    tail = log.tail()
    return record if record["status"] == "ok" else record | {"tail": tail}


def pack(folder: Path, name: str) -> None:
    """Put all files of the folder but its archives into `name` there, in one step."""
    temporary = folder / f".{name}.tmp"
    with tarfile.open(temporary, "w") as archive:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith(".") and path.suffix != ".tar":
                archive.add(path, path.name)
    os.replace(temporary, folder / name)


def proceed(run: Run, steps: list[Step], budget: float, part: str) -> int:
    """Run the steps one after the other; the exit status of the command."""
    begin = time.monotonic()
    run.out.mkdir(parents=True, exist_ok=True)
    log, file = Log(run.file("log.txt")), run.file("steps.jsonl")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    head = {"schema": 1, "date": now, "finished": False, "budget_s": budget, "device_type": run.device}
    head |= {"part": part}
    head |= {"python": platform.python_version(), "platform": platform.platform()}
    lines.append(file, "head", head | {"planned": [step.name for step in steps]})
    records = []
    for index, step in enumerate(steps):
        left = budget - (time.monotonic() - begin)
        seconds = share(step, steps[index + 1 :], left, max(1.0, budget / BUDGET_SECONDS))
        if seconds == 0.0:
            reason = f"{max(0.0, left):.0f} s left of --budget {budget:.0f}, {step.least:.0f} s needed"
            record = {"step": step.name, "status": "skipped", "seconds": 0.0, "reason": reason}
        else:
            log.say(f"# {step.name}: at most {seconds:.0f} s")
            record = run_step(step, run, seconds, log)
        records.append(record)
        lines.append(file, "step", record)
        log.say(summary(record))
        pack(run.out, f"run-{part}.tar")
    spent = round(time.monotonic() - begin, 1)
    lines.append(file, "head", {"finished": True, "seconds": spent})
    log.say("# all steps:")
    for record in records:
        log.say(summary(record))
    log.say(f"# {spent:.0f} s; in {run.out}; `python bench/gpu/prove.py merge {run.out}` keeps it")
    pack(run.out, f"run-{part}.tar")
    return int(any(record["status"] not in ("ok", "skipped") for record in records))


def summary(record: dict) -> str:
    reason = f": {record['reason']}" if record["reason"] else ""
    return f"# {record['step']:<16} {record['status']:<8} {record['seconds']:6.1f} s{reason}"


def seconds_of(text: str) -> float:
    """A finite number of seconds above zero."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of seconds above 0")
    return value


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] in (["merge"], ["readme"]):
        from bench.gpu import records

        return records.main(arguments)
    parser = argparse.ArgumentParser(
        prog="gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the steps' records")
    names = ", ".join(step.name for step in STEPS)
    parser.add_argument("--part", choices=tuple(PARTS), default="a", help="the part (a)")
    parser.add_argument("--only", metavar="STEP[,STEP]", help=f"some of {names}")
    parser.add_argument("--budget", type=seconds_of, default=BUDGET_SECONDS, help="seconds in all (570)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    try:
        steps = choose(args.only, args.part)
    except ValueError as error:
        parser.error(str(error))
    part = args.part if args.only is None else "some"
    return proceed(Run(args.out.resolve(), args.device), steps, args.budget, part)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs `finally`: the step ends too
    sys.exit(main())
