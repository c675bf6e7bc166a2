"""Pre-training on a GPU: the runs of `fastbert pretrain` that a machine without one cannot try.

    python bench/gpu/pretraining.py [--budget SECONDS] [--json FILE]

| row | what must hold |
|---|---|
| `killed` | a run that is killed and resumed ends with the weights, moments and log of an unbroken run |
| `fp16` | a run with a loss scaler ends, with finite losses that fall |
| `ddp`, `fsdp` | torchrun with one process on nccl (a CPU: gloo): losses as without it, within 2% |

`--rows` chooses rows. The text is a part of this Python installation's (examples/python_text.py). All runs
share the GPU at the same time, so the tokens per second in their rows are no measure of speed.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)


from bench.gpu import groups  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402

STEPS, SMOKE_STEPS = 120, 6
DOCUMENTS, SMOKE_DOCUMENTS = 300, 12
CLOSE = 0.02  # of a loss: what another order of sums may change in so many steps
PATIENCE = 0.05  # seconds between two looks at a log


Check = Callable[["Place", dict[str, subprocess.Popen]], dict]


@dataclass(frozen=True)
class Place:
    """Where and how large the runs are, and when they must end."""

    folder: Path
    device: str
    steps: int
    end: float

    def left(self) -> float:
        return max(1.0, self.end - time.monotonic())

    def command(self, name: str, *options: str, launcher: tuple[str, ...] = ()) -> list[str]:
        """The command of a run into the folder `name`."""
        sizes = "--batch-size 32 --max-length 128" if self.device == "cuda" else "--batch-size 4"
        fixed = f"--recipe bert --steps {self.steps} {sizes} --lr 1e-3 --warmup 0.1 --device {self.device}"
        fixed += f" --no-progress --no-tensorboard --log-every 2 --save-every {max(2, self.steps // 4)}"
        files = {"--data": self.folder / "shards", "--model": ROOT / "examples" / "bert-small.json"}
        files["--output"] = self.folder / name
        given = [str(word) for pair in files.items() for word in pair]
        return [sys.executable, *launcher, "-m", "fastbert", "pretrain", *given, *fixed.split(), *options]

    def log(self, name: str, file: str = "log.jsonl") -> list[dict]:
        """The whole lines of a run's log so far."""
        path = self.folder / name / file
        text = path.read_text() if path.is_file() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def files(self, name: str) -> dict[str, str]:
        """The SHA-256 of each file of a run's last checkpoint, but for the one that has its times."""
        last = sorted((self.folder / name).glob("step-*"))[-1]
        found = json.loads((last / "manifest.json").read_text())["sha256"]
        return {file: digest for file, digest in found.items() if file != "trainer.json"}

    def start(self, command: list[str]) -> subprocess.Popen:
        """A process of its own group, which can be killed with its workers."""
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with open(self.folder / "output.txt", "ab") as output:
            return subprocess.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def finish(self, process: subprocess.Popen) -> None:
        """Wait for a run. Raises RuntimeError with the end of its output where it fails or takes too long."""
        try:
            status = process.wait(self.left())
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "no time left"
        if status != 0:
            text = (self.folder / "output.txt").read_text(errors="replace")
            raise RuntimeError(f"a run ended with {status}: {text[-1500:]}")


def prepare(folder: Path, documents: int) -> None:
    """A corpus of the first texts of this installation, with a tokenizer of its own."""
    sys.path.append(str(ROOT / "examples"))
    try:
        import python_text
    finally:
        sys.path.remove(str(ROOT / "examples"))
    text = folder / "text.jsonl"
    with text.open("w", encoding="utf-8") as file:
        for document in itertools.islice(filter(None, python_text.documents()), documents):
            file.write(json.dumps({"text": document}) + "\n")
    tokenizer, shards = str(folder / "tokenizer"), str(folder / "shards")
    words = ["train-tokenizer", str(text), "--vocab-size", "2000", "--output", tokenizer]
    shards = ["prepare", str(text), "--tokenizer", tokenizer, "--output", shards]
    for arguments in (words, shards):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", "fastbert", *arguments], env=env, check=True)


def commands(place: Place) -> dict[str, list[str]]:
    """Folder -> the command of a run."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    found = {name: place.command(name, "--dtype", "bf16") for name in ("whole", "killed")}
    found["fp16"] = place.command("fp16", "--dtype", "fp16")
    for kind in ("ddp", "fsdp"):
        found[kind] = place.command(kind, "--dtype", "bf16", "--parallel", kind, launcher=launcher)
    return found


def killed(place: Place, runs: dict[str, subprocess.Popen]) -> dict:
    """One run to its end, one that is killed after its first checkpoint and resumed."""
    process = runs["killed"]
    while not list((place.folder / "killed").glob("step-*/manifest.json")) and process.poll() is None:
        time.sleep(PATIENCE)
        if time.monotonic() > place.end:
            break
    at = len(place.log("killed"))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    place.finish(place.start(commands(place)["killed"]))
    place.finish(runs["whole"])
    mine, other = place.files("killed"), place.files("whole")
    if mine != other:
        names = ", ".join(sorted(file for file in mine.keys() | other if mine.get(file) != other.get(file)))
        raise RuntimeError(f"killed after {2 * at} steps: {names} differ")
    if place.log("killed") != place.log("whole"):
        raise RuntimeError(f"killed after {2 * at} steps: the logs differ")
    return {"run": "whole", "killed_after": 2 * at}


def fp16(place: Place, runs: dict[str, subprocess.Popen]) -> dict:
    """Half precision with a scaler."""
    place.finish(runs["fp16"])
    losses = [line["loss"] for line in place.log("fp16")]
    half = len(losses) // 2
    first, last = statistics.fmean(losses[:half]), statistics.fmean(losses[half:])
    if not last < first:
        raise RuntimeError(f"the loss does not fall: {first:.3f}, then {last:.3f}")
    return {"run": "fp16", "first_loss": first, "last_loss": last}


def parallel(kind: str) -> Check:
    """One process under torchrun, beside the run without it."""

    def row(place: Place, runs: dict[str, subprocess.Popen]) -> dict:
        place.finish(runs[kind])
        ours, plain = ([line["loss"] for line in place.log(name)] for name in (kind, "whole"))
        gap = max((abs(a - b) / b for a, b in zip(ours, plain, strict=True)), default=float("inf"))
        if not gap <= CLOSE:
            raise RuntimeError(f"losses differ by {gap:.3g} of themselves, {CLOSE:g} allowed")
        return {"run": kind, "loss_gap": gap}

    return row


ROWS: dict[str, Check] = {"killed": killed, "fp16": fp16, "ddp": parallel("ddp"), "fsdp": parallel("fsdp")}


def main(argv: list[str] | None = None) -> int:
    """Run every row; the exit status is 1 if one failed."""
    parser = groups.options(__doc__, samples=1)
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS), metavar="ROW")
    args = groups.parsed(parser, argv)
    report = groups.begun(args)
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        end = time.monotonic() + (args.budget or float("inf"))
        place = Place(Path(name), args.device, SMOKE_STEPS if args.smoke else STEPS, end)
        prepare(place.folder, SMOKE_DOCUMENTS if args.smoke else DOCUMENTS)
        needed = {run for row in args.rows for run in ("fp16",) * (row == "fp16") or (row, "whole")}
        runs = {name: place.start(line) for name, line in commands(place).items() if name in needed}
        for what in args.rows:
            row = {"step": "pretrain", "name": f"pretrain-{what}"}
            begin = time.monotonic()
            try:
                facts = ROWS[what](place, runs)
                speeds = [line["tokens_per_s"] for line in place.log(facts["run"], "speed.jsonl")]
                row |= {"status": "ok", "error": None, **facts}
                row["tokens_per_s"] = statistics.median(speeds[len(speeds) // 2 :])
                row.pop("error")
            except Exception as error:
                row |= {"status": "failed", "error": reason_of(error)}
                bad += 1
            report.row(row | {"seconds": round(time.monotonic() - begin, 1)})
        for process in runs.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
