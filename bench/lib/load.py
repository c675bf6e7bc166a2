"""What load costs each engine on a CPU: its time per call under load, beside its time on the quiet machine.

| kind | the load | `loss` |
|---|---|---|
| `neighbour` | one process of one thread that never rests | time / quiet time |
| `processes` | 4 processes of one thread each, all of this engine | time / (quiet time × max(1, 4 / cores)) |
| `threads` | 2 Python threads that call one model | time / (quiet time × 2) |

The quiet time is that of one call at a time: of one thread in one process for `processes`, of all threads
for `neighbour` and `threads`. With several callers the time of a call follows from the throughput of all
together: callers / (calls per second of all). So `processes` and `threads` have a loss of 1.0 where the
callers share the cores perfectly; it is below 1.0 where one caller does not fill the cores. A neighbour takes
its own share: two threads on two cores keep 2/3 of the machine beside it, which is a loss of 1.5.

Every engine has its own process. Samples are interleaved: all engines quiet, then all engines loaded. The 4
processes of `processes` take much memory, so only one engine at a time has them, quiet and loaded
interleaved. Engines that are not called sleep, and an idle neighbour is stopped, not ended. Every process
ends with its parent.

**The promise.** We lose no more than the best peer of the same precision, or are faster than that peer under
load. The loss alone would reward being slower on the quiet machine: four processes of MiniLM on `1x16` all
wait for memory, and take 11.2 ms by ours and 11.5 and 11.7 by the peers, whether one of ours alone takes 6.6
ms (loss 1.10) or 4.7 (1.18). See `judge`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.lib import turns
from bench.lib.load_engine import CALLERS, EXPORTED
from bench.lib.probe_steps import reason_of
from bench.lib.timing import summarise

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("neighbour", "processes", "threads")
PROCESSES = 4
CANDIDATES = (
    "fastbert-fp32",
    "transformers-fp32",
    "openvino-fp32",
    "onnxruntime-fp32",
    "fastbert-int8",
    "onnxruntime-int8",
    "fastbert-bf16",
    "transformers-bf16",
    "openvino-bf16",
)
PAUSE_SECONDS = 0.05  # before each sample: idle threads fall asleep, the scheduler sees the neighbour
LEAST_SECONDS = 0.4  # of a sample: many turns of the scheduler. With 0.1 half of the rows were too noisy
LEAST_ALLOWANCE = 0.05
# What a process runs, with the package and the benchmarks of this checkout.
CODE = """
import sys
sys.path[0] = sys.argv[1]
from bench.lib import {module}
{module}.{function}(*sys.argv[2:])
"""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def factor(kind: str) -> float:
    """How many times the quiet time a call takes where nothing is lost to `kind`; 1 for a neighbour."""
    return {"neighbour": 1.0, "processes": max(1.0, PROCESSES / cores()), "threads": float(CALLERS)}[kind]


def started(function: str, *arguments: object, module: str = "load_engine", **options) -> subprocess.Popen:
    """A process that runs `function` of a module of bench/lib."""
    code = CODE.format(function=function, module=module)
    command = [sys.executable, "-c", code, str(ROOT), str(os.getpid()), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


class Engine:
    """A candidate's process. It is being built while others are: its first `answer` is that it is ready.

    Args:
        name: the candidate.
        arguments: the other arguments of `serve`.
        module: the module of bench/lib that has `serve`.
    """

    def __init__(self, name: str, *arguments: object, module: str = "load_engine"):
        self.name = name
        options = {"module": module, "stdin": subprocess.PIPE, "bufsize": 1}
        self.process = started("serve", name, *arguments, **options)

    def answer(self) -> dict:
        """Its next answer. Raises RuntimeError with its reason if it has failed."""
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.name}: its process ended with {self.process.wait()}")
        found = json.loads(text)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def ask(self, **asked: object) -> None:
        """Begin a sample; `answer` has the rest."""
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
        except BrokenPipeError:
            self.answer()
            raise

    def close(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError), self.process:
            pass


class Neighbour:
    """A process of one thread that never rests, while resumed; at first it is paused."""

    def __init__(self) -> None:
        # Linux shares processor time between sessions first, then between the threads of each
        command = [sys.executable, "-P", str(Path(__file__).with_name("neighbour.py")), str(os.getpid())]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self.process.stdout.readline()  # it knows its parent
        self.pause()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        with self.process:
            pass


def sample(
    engines: Sequence[Engine], workload: str, callers: int = 1, seconds: float = 0.0, lead: float = 0.0
) -> tuple[float, float]:
    """(seconds per call, least cosine of an output to the right vectors), by some callers in each process.

    Args:
        engines: the processes, which run at the same time.
        workload: what they are called on.
        callers: Python threads in each.
        seconds: how long the calls count; at least one of each caller does.
        lead: seconds before that, if there are several callers, until all of them run.
    """
    alone = len(engines) * callers == 1
    asked = {"workload": workload, "callers": callers, "seconds": seconds, "alone": alone}
    begin = time.perf_counter() + lead
    for engine in engines:
        engine.ask(**asked, begin=begin)
    found = [engine.answer() for engine in engines]
    rate = sum(answer["rate"] for answer in found)
    return len(engines) * callers / rate, min(answer["cosine"] for answer in found)


@dataclass
class Party:
    """One engine's processes, and what they took.

    Attributes:
        engines: its processes.
        quiet_ms: milliseconds per call, a sample each.
        loaded_ms: the same under load.
        call: about the seconds of a quiet call.
        cosine: the least of an output to the right vectors.
        error: why it cannot be measured.
    """

    engines: list[Engine]
    quiet_ms: list[float] = field(default_factory=list)
    loaded_ms: list[float] = field(default_factory=list)
    call: float = math.inf
    cosine: float = 1.0
    error: str | None = None


class Bench:
    """The processes of one model; `close` ends them.

    Args:
        model: a name of MODELS.
        folder: an empty one.
        threads: threads per call, in the kinds `neighbour` and `threads`.
        names: the engines that may be measured.
        batches: the workloads that may be measured.
        seconds: least seconds of a sample.

    Raises:
        RuntimeError: what the engines share could not be made.
    """

    def __init__(
        self,
        model: str,
        folder: Path,
        threads: int,
        names: Iterable[str],
        batches: Iterable[str],
        seconds: float = LEAST_SECONDS,
    ):
        self.model, self.folder, self.threads, self.seconds = model, folder, threads, seconds
        process = started("prepare", model, folder, ",".join(names), *batches)
        try:
            text = process.communicate()[0]
        finally:
            process.kill()
        if process.returncode or not text:
            raise RuntimeError(f"{model}: what its engines share: exit status {process.returncode}")
        self.no_export: str | None = json.loads(text)["error"]
        self.engines: dict[str, Engine] = {}  # those of all threads, which stay
        self.failed: dict[str, str] = {}  # engine of all threads -> why it cannot be measured
        self.neighbour = Neighbour()

    def close(self) -> None:
        self.neighbour.close()
        for engine in self.engines.values():
            engine.close()

    def start(self, name: str, threads: int) -> Engine:
        """A new process of the engine `name`."""
        if name.startswith(EXPORTED) and self.no_export is not None:
            raise RuntimeError(self.no_export)
        return Engine(name, self.model, self.folder, threads)

    def rows(self, kind: str, workload: str, names: Sequence[str], samples: int) -> Iterator[dict]:
        """A row for each engine; one that fails is a row with the reason. `median_ms` is the time under load.

        Args:
            kind: one of KINDS.
            workload: one of the `batches`.
            names: the engines.
            samples: samples per engine, quiet and loaded.
        """
        if kind not in KINDS:
            raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(KINDS)}")
        if kind == "processes":
            parties = {name: self._processes(name, workload, samples) for name in names}
        else:
            parties = self._engines(names)
            self._alternate(kind, workload, list(parties.values()), samples)
            for name, party in parties.items():
                if party.error is not None and name in self.engines:
                    self.failed[name] = party.error
                    self.engines.pop(name).close()
        rows = [row_of(kind, self.model, workload, name, parties[name]) for name in names]
        for row in rows:
            yield row | judge(row, rows)

    def _engines(self, names: Sequence[str]) -> dict[str, Party]:
        """Each engine's one process; all new ones are built at once."""
        new = [name for name in names if name not in self.engines and name not in self.failed]
        for name in new:
            try:
                self.engines[name] = self.start(name, self.threads)
            except Exception as error:
                self.failed[name] = reason_of(error)
        for name in new:
            try:
                if name in self.engines:
                    self.engines[name].answer()
            except Exception as error:
                self.failed[name] = reason_of(error)
                self.engines.pop(name).close()
        return {
            name: Party([self.engines[name]] if name in self.engines else [], error=self.failed.get(name))
            for name in names
        }

    def _processes(self, name: str, workload: str, samples: int) -> Party:
        """Measure one engine's processes of one thread each."""
        party = Party([])
        try:
            for _ in range(PROCESSES):
                party.engines.append(self.start(name, 1))
            for engine in party.engines:
                engine.answer()
            self._alternate("processes", workload, [party], samples)
        except Exception as error:
            party.error = reason_of(error)
        finally:
            for engine in party.engines:
                engine.close()
        return party

    def _alternate(self, kind: str, workload: str, parties: Sequence[Party], samples: int) -> None:
        """Measure interleaved: every party quiet, then every party loaded."""
        for turn in range(samples):
            first = turn % len(parties)
            order = [*parties[first:], *parties[:first]]
            for take in (self._quiet, self._loaded):
                for party in order:
                    if party.error is not None:
                        continue
                    try:
                        take(kind, workload, party, turn)
                    except Exception as error:
                        party.error = reason_of(error)

    def _quiet(self, kind: str, workload: str, party: Party, turn: int) -> None:
        """One call at a time, in one process."""
        if turn == 0:  # warms up all processes, and measures how long a call takes
            party.call = min(sample([engine], workload)[0] for engine in party.engines)
        time.sleep(PAUSE_SECONDS)
        engine = party.engines[turn % len(party.engines)]
        seconds, cosine = sample([engine], workload, seconds=max(self.seconds, 2 * party.call))
        party.quiet_ms.append(seconds * 1e3)
        party.call, party.cosine = min(party.call, seconds), min(party.cosine, cosine)

    def _loaded(self, kind: str, workload: str, party: Party, turn: int) -> None:
        """Under the load of this kind."""
        if kind == "neighbour":
            self.neighbour.resume()
        try:
            time.sleep(PAUSE_SECONDS)
            callers = CALLERS if kind == "threads" else 1
            call = party.call * (2 if kind == "neighbour" else factor(kind))
            # of what three callers' calls take, those at the ends do not count
            length = (2 if kind == "neighbour" else 3) * call
            options = {"seconds": max(self.seconds, length), "lead": 1.5 * call}
            seconds, cosine = sample(party.engines, workload, callers, **options)
        finally:
            if kind == "neighbour":
                self.neighbour.pause()
        party.loaded_ms.append(seconds * 1e3)
        party.cosine = min(party.cosine, cosine)


# ---- the rows ----


def row_of(kind: str, model: str, workload: str, name: str, party: Party) -> dict:
    """A party's row, without the comparison with its group."""
    row = {
        "step": "load",
        "name": f"load-{kind}-{name}-{model}-{workload}",
        "kind": kind,
        "model": model,
        "workload": workload,
        "candidate": name,
    }
    if party.error is not None:
        return {**row, "status": "error", "error": party.error}
    quiet, loaded = (summarise(samples, 1, "wall") for samples in (party.quiet_ms, party.loaded_ms))
    return {
        **row,
        "status": "ok",
        "samples_ms": loaded.samples_ms,
        "median_ms": loaded.median_ms,
        "min_ms": loaded.min_ms,
        "spread": loaded.spread,
        "n": loaded.n,
        "quiet_ms": quiet.median_ms,
        "quiet_spread": quiet.spread,
        "factor": factor(kind),
        "loss": loaded.median_ms / (quiet.median_ms * factor(kind)),
        "cosine": party.cosine,
    }


def is_noisy(row: Mapping) -> bool:
    """Whether a row's samples, quiet or loaded, are too far apart for a verdict."""
    return max(row["spread"], row["quiet_spread"]) > turns.NOISY


def allowance(row: Mapping, peer: Mapping) -> float:
    """By which share our loss may be above a peer's: two standard errors of the ratio, at least 5%.

    The standard error of a median of normal samples is 0.93 × the distance of their quartiles / √samples. The
    ratio has four such medians.
    """
    squares = [each[key] ** 2 / each["n"] for each in (row, peer) for key in ("spread", "quiet_spread")]
    return max(LEAST_ALLOWANCE, 2 * 0.93 * math.sqrt(sum(squares)))


def judge(row: Mapping, rows: Iterable[Mapping]) -> dict[str, object]:
    """Whether our `row` loses no more than the best peer of its precision among `rows`; {} for a peer.

    `holds` is False where the loss is above a peer's by more than `allowance`, that peer is faster under the
    load too, and neither row is noisy. It is None where noise hides the answer. `promise` is the same in
    words.
    """
    name = row["candidate"]
    if row["status"] != "ok" or not turns.is_ours(name):
        return {}
    peers = [
        other
        for other in rows
        if other["status"] == "ok"
        and turns.precision(other["candidate"]) == turns.precision(name)
        and not turns.is_ours(other["candidate"])
        and turns.wrong(other) is None
    ]
    peers.sort(key=lambda peer: peer["loss"])
    if not peers:
        return {}
    best, holds = peers[0], True
    broken = [
        p
        for p in peers
        if not is_noisy(p)
        and row["loss"] > p["loss"] * (1 + allowance(row, p))
        and row["median_ms"] > p["median_ms"]
    ]
    if is_noisy(row):
        holds = None
    elif broken:
        best, holds = broken[0], False
    elif is_noisy(best):
        holds = None
    words = f"best peer {best['candidate'].split('-')[0]} {best['loss']:.2f}"
    words += {True: "", False: ": promise broken", None: ": too noisy"}[holds]
    return {
        "best_peer": best["candidate"],
        "best_peer_loss": best["loss"],
        "allowance": allowance(row, best),
        "holds": holds,
        "promise": words,
    }
