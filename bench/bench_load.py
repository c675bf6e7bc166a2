"""What one busy neighbour costs each engine on a CPU: `python bench/bench_load.py`.

Every engine has its own process. The engines are called turn by turn, first on the quiet machine, then
beside one process that never rests. `loss` is the time with the neighbour over the time without. While the
machine is to be quiet, the neighbour is stopped, not ended; engines that are not called sleep.

`--other DIR` also measures another checkout of this project, built in place, as `other-…`: before and after
a change in one run. Rows go to bench/results/<machine>/bench_load.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    # the process of `other-…` takes package and engines from that checkout
    sys.path[0] = sys.argv[sys.argv.index("--root") + 1] if "--root" in sys.argv else str(ROOT)

import torch  # noqa: E402

from bench.lib import workloads  # noqa: E402
from bench.lib.engines import MODELS, PACKAGES, Bank  # noqa: E402
from bench.lib.machine import describe, package_version  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402
from bench.lib.report import Report, count  # noqa: E402
from bench.lib.timing import summarise  # noqa: E402

LENGTHS = {"1x16": (16,)}  # beside those of workloads.py
# (model, workload): the calls that make one sample
CASES = {
    ("base", "1x128"): 4,
    ("base", "8x128"): 1,
    ("base", "ragged16"): 1,
    ("minilm", "1x16"): 60,
    ("tiny", "1x16"): 2,
}
CANDIDATES = (
    "fastbert-fp32",
    "openvino-fp32",
    "onnxruntime-fp32",
    "fastbert-int8",
    "onnxruntime-int8",
)
PEERS = {"fp32": ("openvino-fp32", "onnxruntime-fp32"), "int8": ("onnxruntime-int8",)}
PAUSE_SECONDS = 0.05  # before each sample: idle threads fall asleep, the scheduler sees the neighbour
# On Linux it ends with its parent, however that ends, also while stopped: 1 is PR_SET_PDEATHSIG, 9 SIGKILL.
NEIGHBOUR = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


def lengths_of(workload: str) -> tuple[int, ...]:
    """Token length of each sequence of the workload's batch."""
    return LENGTHS.get(workload) or workloads.lengths(workload)


# ---- one engine in a process of its own: reads a line per sample, answers with its times ----


def serve(candidate: str, model_name: str, onnx: str, threads: int) -> None:
    """Answer requests `{"workload", "calls"}` on standard input until it ends, each with milliseconds."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not mix with the answers
    torch.set_num_threads(threads)
    model = MODELS[model_name]
    bank = Bank(model, threads, Path(onnx).parent)
    if Path(onnx).exists():
        bank.__dict__["exported"] = Path(onnx)
    forward = bank.forward(candidate)
    inputs: dict[str, dict] = {}
    print(json.dumps({"ready": candidate}), file=answers, flush=True)
    for text in sys.stdin:
        request = json.loads(text)
        workload = request["workload"]
        if workload not in inputs:
            inputs[workload] = workloads.padded_inputs(lengths_of(workload), model.vocab, "cpu")
            for _ in range(2):
                forward(inputs[workload])
        given, times = inputs[workload], []
        for _ in range(request["calls"] + 1):
            start = time.perf_counter()
            forward(given)
            times.append((time.perf_counter() - start) * 1e3)
        # the first call loads the weights into the caches again, which the other engines have used in the
        # meantime
        print(json.dumps({"ms": statistics.fmean(times[1:])}), file=answers, flush=True)


def export(model_name: str, path: Path) -> None:
    """Write the model as ONNX, the peers' common input, to `path`."""
    made = Bank(MODELS[model_name], 1, path.parent).exported
    if made != path:  # weights lie in a second file beside it, which the first one names
        raise RuntimeError(f"exported to {made}, expected {path}")


class Engine:
    """A candidate's process."""

    def __init__(self, name: str, model: str, onnx: Path, threads: int, root: Path):
        candidate = name.replace("other-", "fastbert-")
        command = [sys.executable, str(ROOT / "bench" / "bench_load.py"), "--serve", candidate, model]
        command += [str(onnx), "--threads", str(threads), "--root", str(root)]
        self.name = name
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._answer()

    def _answer(self) -> dict:
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.name}: its process ended with {self.process.wait()}")
        return json.loads(text)

    def sample(self, workload: str, calls: int) -> float:
        """Mean milliseconds of a call, over `calls` calls."""
        self.process.stdin.write(json.dumps({"workload": workload, "calls": calls}) + "\n")
        return self._answer()["ms"]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


class Neighbour:
    """A process of one thread that never rests, while resumed."""

    def __init__(self, same_session: bool) -> None:
        # Linux shares processor time between sessions first, then between the threads of each
        command = [sys.executable, "-c", NEIGHBOUR]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=not same_session)
        self.process.stdout.readline()  # it knows its parent
        self.pause()

    def pause(self) -> None:
        """Let it sleep."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def line(row: dict) -> str:
    """The printed form of a row."""
    if row["status"] != "ok":
        return f"{row['name']:<40} {row['status']}: {row['error']}"
    return (
        f"{row['name']:<40} quiet {row['quiet_ms']:>9.2f} ms ({row['quiet_spread']:.0%})  busy "
        f"{row['busy_ms']:>9.2f} ms ({row['busy_spread']:.0%})  loss {row['loss']:.2f}  n={row['n']}"
    )


def verdicts(rows: Iterable[dict]) -> list[dict]:
    """Ours beside the best peer of the same precision: the losses, and the ratio of the busy times."""
    ok = {(r["model"], r["workload"], r["candidate"]): r for r in rows if r["status"] == "ok"}
    found = []
    for (model, workload, name), row in ok.items():
        owner, precision = name.split("-")
        peers = [ok.get((model, workload, peer)) for peer in PEERS[precision]]
        peers = [peer for peer in peers if peer is not None]
        if owner == "fastbert" and peers:
            best, fastest = (min(peers, key=lambda r, k=key: r[k]) for key in ("loss", "busy_ms"))
            found.append(
                {
                    "model": model,
                    "workload": workload,
                    "precision": precision,
                    "loss": row["loss"],
                    "best_peer": best["candidate"],
                    "best_peer_loss": best["loss"],
                    "busy_ratio": fastest["busy_ms"] / row["busy_ms"],
                    "busy_ratio_to": fastest["candidate"],
                }
            )
        other = ok.get((model, workload, f"other-{precision}"))
        if owner == "fastbert" and other is not None:
            ratios = {f"{kind}_ratio": other[f"{kind}_ms"] / row[f"{kind}_ms"] for kind in ("quiet", "busy")}
            what = {"model": model, "workload": workload, "precision": precision, "of": "other"}
            found.append({**what, **ratios, "loss": row["loss"], "other_loss": other["loss"]})
    return found


def measure(model: str, args: argparse.Namespace, report: Report, neighbour: Neighbour, folder: Path) -> None:
    """Measure all candidates on all cases of one model, and record each row at once."""
    onnx = folder / model / "model.onnx"
    onnx.parent.mkdir()
    names = list(args.candidates)
    if args.other is not None:
        names += [n.replace("fastbert-", "other-") for n in names if n.startswith("fastbert-")]
    if any(not n.startswith(("fastbert-", "other-")) for n in names):
        subprocess.run([sys.executable, __file__, "--export", model, str(onnx)], check=True)
    engines: list[Engine] = []
    try:
        for name in names:
            root = args.other if name.startswith("other-") else ROOT
            try:
                engines.append(Engine(name, model, onnx, args.threads, root))
            except Exception as error:
                row = {"step": "load", "name": f"load-{name}-{model}", "status": "error"}
                report.row(row | {"error": reason_of(error)})
        for (case_model, workload), calls in CASES.items():
            if case_model == model and workload in args.workloads:
                _measure(engines, model, workload, 1 if args.smoke else calls, args, report, neighbour)
    finally:
        for engine in engines:
            engine.close()


def _measure(
    engines: list[Engine],
    model: str,
    workload: str,
    calls: int,
    args: argparse.Namespace,
    report: Report,
    neighbour: Neighbour,
) -> None:
    samples: dict[tuple[str, str], list[float]] = {}
    for engine in engines:  # warms up
        engine.sample(workload, 1)
    for turn in range(args.samples):
        order = engines[turn % len(engines) :] + engines[: turn % len(engines)]
        for state in ("quiet", "busy"):
            if state == "busy":
                neighbour.resume()
            for engine in order:
                time.sleep(PAUSE_SECONDS)
                samples.setdefault((engine.name, state), []).append(engine.sample(workload, calls))
            neighbour.pause()
    for engine in engines:
        quiet, busy = (summarise(samples[engine.name, state], calls, "wall") for state in ("quiet", "busy"))
        report.row(
            {
                "step": "load",
                "name": f"load-{engine.name}-{model}-{workload}",
                "status": "ok",
                "model": model,
                "workload": workload,
                "candidate": engine.name,
                "quiet_ms": quiet.median_ms,
                "quiet_spread": quiet.spread,
                "busy_ms": busy.median_ms,
                "busy_spread": busy.spread,
                "loss": busy.median_ms / quiet.median_ms,
                "n": quiet.n,
                "inner": calls,
            }
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = list(dict.fromkeys(model for model, _ in CASES))
    parser.add_argument("--models", nargs="+", choices=models, default=["base", "minilm"])
    parser.add_argument("--workloads", nargs="+", default=list(dict.fromkeys(w for _, w in CASES)))
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--other", type=Path, help="another checkout of this project, built in place")
    parser.add_argument("--samples", type=count, default=15, help="of each candidate, quiet and busy")
    parser.add_argument("--threads", type=count, default=len(os.sched_getaffinity(0)), help="of everybody")
    parser.add_argument("--out", type=Path, help="folder (default: bench/results/<machine>)")
    parser.add_argument("--note", help="a remark to keep with the results")
    parser.add_argument(
        "--same-session",
        action="store_true",
        help="the neighbour is of the engines' own session, not a service beside them",
    )
    parser.add_argument("--smoke", action="store_true", help="one call a sample: tries the code only")
    parser.add_argument("--serve", nargs=3, metavar=("ENGINE", "MODEL", "ONNX"), help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    parser.add_argument("--export", nargs=2, metavar=("MODEL", "ONNX"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure what the arguments name; print and record each row at once. Returns 1 if a row is an error."""
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.serve:
        serve(*args.serve, args.threads)
        return 0
    if args.export:
        export(args.export[0], Path(args.export[1]))
        return 0
    environment = describe(torch.device("cpu"))
    environment["versions"] = {name: package_version(name) for name in PACKAGES}
    folder = args.out or ROOT / "bench" / "results" / environment["slug"]
    settings = {
        k: v for k, v in vars(args).items() if k not in ("out", "note", "other", "serve", "export", "root")
    }
    report = Report(folder / "bench_load.json", settings, args.note, line)
    report.data |= {"environment": environment, "other": args.other is not None}
    print(f"# {environment['device']}, {args.threads} threads, torch {torch.__version__}", flush=True)
    start = time.monotonic()
    neighbour = Neighbour(args.same_session)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for model in args.models:
                begin = time.monotonic()
                measure(model, args, report, neighbour, Path(scratch))
                report.step(model, "ok", time.monotonic() - begin, None)
    finally:
        neighbour.close()
    report.data["verdicts"] = verdicts(report.data["rows"])
    for row in report.data["verdicts"]:
        print("# " + "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    report.data["finished"] = True
    report.data["seconds"] = round(time.monotonic() - start, 1)
    report.save()
    print(f"# done in {report.data['seconds'] / 60:.1f} minutes: {report.path}")
    return int(any(row["status"] == "error" for row in report.data["rows"]))


if __name__ == "__main__":
    sys.exit(main())
