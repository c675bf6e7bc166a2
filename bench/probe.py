"""Measure the roofs of this machine and torch's own kernels: `python bench/probe.py [--json FILE]`.

Steps, in order of priority (a short `--budget` drops the last ones, and says so):
matrix, bandwidth, launch, cluster, gemm, sdpa.

As soon as a row is measured, a line is printed and the JSON file is replaced atomically: a kill loses
nothing. The steps run in a worker process. A row that fails is recorded with its error; a step that hangs
or crashes the process is recorded too, and the next step gets a fresh worker.

Needs only torch. The peers' encoders are measured by the suite and by `make gpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.lib.machine import describe, read_clocks  # noqa: E402
from bench.lib.probe_steps import PLANTED, STEPS, Bench, Step  # noqa: E402
from bench.lib.report import Report, count  # noqa: E402
from bench.lib.timing import synchronize  # noqa: E402

BUDGET_SECONDS = {"cuda": 450.0, "cpu": 225.0}
LEAST_SECONDS = 5.0  # a step is not begun with less than this left of the budget


# ---- The worker: reads step names from stdin, writes one JSON line per message to its channel ----


def work(channel: int, device_name: str | None, threads: int | None, smoke: bool) -> None:
    """Serve steps until stdin closes; a closed stdin ends the process even in the middle of a step."""
    os.set_inheritable(channel, False)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if threads is not None:
        torch.set_num_threads(threads)
    names: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            names.put(line.strip())
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()

    def send(message: dict) -> None:
        view = memoryview((json.dumps(message) + "\n").encode())
        while view:
            view = view[os.write(channel, view) :]

    if device_name == "cuda" and not torch.cuda.is_available():
        send({"kind": "refused", "error": "--device: got cuda, but torch finds no CUDA device here"})
        return
    name = device_name or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    torch.manual_seed(0)
    send({"kind": "environment", "environment": describe(device)})
    bench = Bench(device, smoke, lambda row: send({"kind": "row", "row": row}))
    steps = {step.name: step for step in (*STEPS, *PLANTED)}
    while True:
        step = steps[names.get()]
        bench.step = step.name
        error = None
        try:
            step.run(bench)
            synchronize(device)
        except Exception as caught:
            error = f"{type(caught).__name__}: {str(caught).strip()}"[:2000]
        with contextlib.suppress(Exception):  # a broken context fails here too, and the next step will tell
            bench.free()
        send({"kind": "end", "error": error, "clocks": read_clocks(device)})


class Worker:
    """The worker process, seen from the parent."""

    def __init__(self, device: str | None, threads: int | None, smoke: bool):
        reading, writing = os.pipe()
        command = [sys.executable, str(Path(__file__).resolve()), "--channel", str(writing)]
        command += ["--device", device] if device else []
        command += ["--threads", str(threads)] if threads is not None else []
        command += ["--smoke"] if smoke else []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            pass_fds=(writing,),
            start_new_session=True,  # so that the compilers it starts end with it
            cwd=ROOT,
        )
        os.close(writing)
        self.reading, self.pending = reading, b""

    def send(self, name: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # a dead worker shows at the next receive
            self.process.stdin.write(name.encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, deadline: float) -> dict | None:
        """The next message; None when the worker has ended; TimeoutError at the deadline."""
        while b"\n" not in self.pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            ready, _, _ = select.select([self.reading], [], [], min(remaining, 1.0))
            if ready:
                chunk = os.read(self.reading, 1 << 16)
                if not chunk:
                    return None
                self.pending += chunk
            elif self.process.poll() is not None:  # a grandchild may hold the pipe open
                return None
        line, _, self.pending = self.pending.partition(b"\n")
        return json.loads(line)

    def stop(self) -> int:
        """End the worker and all that it started; returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        os.close(self.reading)
        return code


# ---- The parent: plan, print, record ----


def choose_steps(only: list[str] | None, device_type: str) -> list[Step]:
    """The steps to run, in order of priority; names asked for must exist on this device."""
    here = [step for step in STEPS if device_type in step.guard]
    if not only:
        return here
    known = {step.name: step for step in (*here, *PLANTED)}
    missing = [name for name in only if name not in known]
    if missing:
        names = ", ".join(step.name for step in here)
        raise ValueError(f"--only: got {', '.join(missing)}, expected one of {names} on {device_type}")
    return [known[name] for name in only]


def run_step(worker: Worker, step: Step, seconds: float, report: Report) -> bool:
    """Run one step in the worker and record how it ended; returns False if the worker is gone."""
    start = time.monotonic()
    worker.send(step.name)
    try:
        while (message := worker.receive(start + seconds)) is not None:
            if message["kind"] == "row":
                report.row(message["row"])
                continue
            status = "ok" if message["error"] is None else "failed"
            report.step(step.name, status, time.monotonic() - start, message["error"], message["clocks"])
            return True
    except TimeoutError:
        worker.stop()
        reason = f"stopped after its {seconds:.0f} s"
        report.step(step.name, "timeout", time.monotonic() - start, reason)
        return False
    code = worker.stop()
    report.step(step.name, "crashed", time.monotonic() - start, f"the worker ended with status {code}")
    return False


def run(args: argparse.Namespace) -> int:
    """Plan the steps and run them; returns the exit status of the command."""
    begin = time.monotonic()
    unknown = set(args.only or ()) - {step.name for step in (*STEPS, *PLANTED)}
    if unknown:  # known at once; whether a step exists on this device only the worker can tell
        names = ", ".join(step.name for step in STEPS)
        print(f"probe: --only: got {', '.join(sorted(unknown))}, expected one of {names}", file=sys.stderr)
        return 2
    settings = {"device": args.device, "threads": args.threads, "budget_s": args.budget}
    settings |= {"only": args.only, "smoke": args.smoke}
    report = Report(args.json, settings, args.note)
    report.save()
    worker: Worker | None = None
    environment: dict = {}

    def start() -> str | None:
        """A fresh worker, or why there is none."""
        nonlocal worker, environment
        worker = Worker(args.device, args.threads, args.smoke)
        try:
            message = worker.receive(time.monotonic() + 120)
        except TimeoutError:
            message = {"kind": "refused", "error": "the worker did not start within 120 s"}
        if message is None or message["kind"] != "environment":
            code = worker.stop()
            worker = None
            return message["error"] if message else f"the worker ended with status {code} before it began"
        environment = message["environment"]
        return None

    try:
        if error := start():
            print(f"probe: {error}", file=sys.stderr)
            return 2
        report.data["environment"] = environment
        try:
            plan = choose_steps(args.only, environment["device_type"])
        except ValueError as wrong:
            print(f"probe: {wrong}", file=sys.stderr)
            return 2
        budget = args.budget if args.budget is not None else BUDGET_SECONDS[environment["device_type"]]
        settings["budget_s"] = budget
        print(f"# {environment['device']}: torch {environment['torch']}, budget {budget:.0f} s", flush=True)
        for step in plan:
            left = budget - (time.monotonic() - begin)
            if left < LEAST_SECONDS:
                report.step(step.name, "skipped", 0.0, "budget")
                continue
            if worker is None and (error := start()):
                report.step(step.name, "failed", 0.0, error)
                continue
            if not run_step(worker, step, min(step.guard[environment["device_type"]], left), report):
                worker = None
    finally:
        if worker is not None:
            worker.stop()
    report.data["finished"] = True
    report.data["seconds"] = round(time.monotonic() - begin, 2)
    report.save()
    print(f"# done in {report.data['seconds']:.1f} s; kept under bench/results/{environment['slug']}/")
    return 0


def positive(text: str) -> float:
    """A finite number of seconds above zero."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of seconds above 0")
    return value


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="probe", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json",
        type=Path,
        help="file to write: replaced after every row, or grown by a line each if it ends in .jsonl",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--budget", type=positive, help="seconds in all (default: 450 on a GPU, 225 on a CPU)"
    )
    steps = ", ".join(step.name for step in STEPS)
    parser.add_argument("--only", action="append", metavar="STEP", help=f"may be repeated; one of {steps}")
    parser.add_argument("--note", help="a remark to keep with the results, such as 'shared machine'")
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: tries the code only")
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)  # this process is the worker
    args = parser.parse_args(argv)
    if args.channel is not None:
        work(args.channel, args.device, args.threads, args.smoke)
        return 0
    return run(args)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs `finally`: the worker ends too
    sys.exit(main())
