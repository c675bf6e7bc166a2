"""Fixtures of the benchmark suite: `make bench`, `fastbert bench NAME`, or pytest on a file of this folder.

A test is parametrised by `candidate` and by its group: (model, workload), (op, case, dtype, pass), …
It uses `in_turns` and passes it a function that measures a group. See bench/lib/turns.py.
"""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch

from bench.gpu import engines as gpu_engines
from bench.lib import encoder, machine, roofs, served, turns, workloads
from bench.lib.engines import ENGINES, PACKAGES, Bank, NotInstalled, compile_cache
from bench.lib.report import count

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = 1


@dataclass
class Run:
    """The state of one run of the suite."""

    groups: dict[str, turns.Group] = field(default_factory=dict)
    roofs: roofs.Roofs | None = None
    self_checks: list[dict] = field(default_factory=list)  # on a GPU
    recorded: list[tuple[str, str, dict]] = field(default_factory=list)  # (group, test, row)
    left_out: dict[str, str] = field(default_factory=dict)  # benchmark or peer -> why not on this device
    begin: float = field(default_factory=time.monotonic)


RUN = pytest.StashKey[Run]()


class Saved(list):
    """A run's benchmarks. pytest-benchmark saves no empty list, but rows without a time are results too."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __bool__(self) -> bool:
        return bool(self.run.recorded)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastbert", "fastbert's benchmarks")
    group.addoption(
        "--peers",
        nargs="?",
        const="",
        help="peers by the beginnings of their names, separated by commas; none: ours alone",
    )
    for name, help_ in (
        ("--model", "base, minilm, large; by commas"),
        ("--workload", "a batch such as 8x128; by commas"),
        ("--dtype", "fp32, bf16, int8; by commas"),
    ):
        group.addoption(name, help=help_ + " (default: all that the suite has)")
    group.addoption(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    group.addoption(
        "--threads", type=count, help="threads of every candidate (default: the cores of this process)"
    )
    group.addoption(
        "--samples",
        type=count,
        default=7,
        help="samples per candidate; half as many for calls that take seconds",
    )
    group.addoption("--everything", action="store_true", help="also long benchmarks: over an hour in all")
    group.addoption("--note", help="a remark to keep with the results, such as 'shared machine'")
    group.addoption("--roofs", type=Path, help="the probe's file: the roofs are not measured again")
    group.addoption("--smoke", action="store_true", help="tiny models and roofs: tries the code only")


def pytest_configure(config: pytest.Config) -> None:
    """One run, with as many threads per candidate as the process may use cores."""
    config.addinivalue_line("markers", "long: left out unless --everything is given")
    config.addinivalue_line("markers", "cpu: measured on a CPU only")
    if config.getoption("device") == "cuda" and not (torch.cuda.is_available() or config.option.collectonly):
        raise pytest.UsageError("--device: got cuda, but torch finds no CUDA device here")
    if not hasattr(config, "workerinput"):  # inherited, where a test of ours starts the suite
        os.environ.pop("PYTEST_XDIST_WORKER", None)
    config.stash[RUN] = Run()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(config.getoption("threads") or len(os.sched_getaffinity(0)))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Runs are kept in results/<device>/, not in a folder with the interpreter's name."""
    if session.config.option.collectonly:  # where the device may be missing
        return
    benchmarks = session.config._benchmarksession
    slug = machine.describe(torch.device(session.config.getoption("device")))["slug"]
    benchmarks.machine_id = benchmarks.storage.default_machine_id = slug
    benchmarks.benchmarks = Saved(session.config.stash[RUN])


def chosen(option: str | None, value: str) -> bool:
    """Whether a comma-separated option allows a value."""
    return option is None or value in option.split(",")


def wanted(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the command line asks for this test."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if item.get_closest_marker("long") and not config.getoption("everything"):
        return False
    if item.get_closest_marker("cpu") and config.getoption("device") != "cpu":
        return False
    candidate, peers = params.get("candidate", ""), config.getoption("peers")
    if peers is not None and candidate and not turns.is_ours(candidate):
        beginnings = tuple(name for name in peers.split(",") if name and name != "none")
        if not beginnings or not candidate.startswith(beginnings):
            return False
    dtype = params.get("dtype") or turns.precision(candidate)
    return all(
        name not in params or chosen(config.getoption(name), params[name]) for name in ("model", "workload")
    ) and (not dtype or chosen(config.getoption("dtype"), dtype))


def check_names(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every name on the command line must be one of the tests to choose from."""
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    candidates = {each["candidate"] for each in params if "candidate" in each}
    known = {name: {each[name] for each in params if name in each} for name in ("model", "workload", "dtype")}
    known["dtype"] |= {turns.precision(name) for name in candidates} - {""}
    for name, names in known.items():
        for value in filter(None, (config.getoption(name) or "").split(",")):
            if value not in names:
                raise pytest.UsageError(f"--{name}: got {value}, expected one of {', '.join(sorted(names))}")
    peers = sorted(name for name in candidates if not turns.is_ours(name))
    for value in filter(None, (config.getoption("peers") or "").split(",")):
        if value != "none" and not any(name.startswith(value) for name in peers):
            expected = ", ".join(peers)
            raise pytest.UsageError(
                f"--peers: got {value}, expected none or the beginning of one of {expected}"
            )


def left_out(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> dict[str, str]:
    """Benchmark or peer -> why the device has none of it, though it was collected."""
    device = config.getoption("device")
    why = f"measured on a CPU only, not on {device}"
    found = {}
    for item in items:
        if item.get_closest_marker("cpu") and device != "cpu":
            found[Path(item.fspath).stem.removeprefix("test_")] = why
    if device != "cpu" and any(Path(item.fspath).stem == "test_encoder" for item in kept):
        there = {name.partition("-")[0] for name in gpu_engines.ENGINES}
        for name in ENGINES:
            peer = name.partition("-")[0]
            if peer not in there and f"transformers_{peer}" not in there and peer != "transformers":
                found[peer] = why
    return found


def group_of(item: pytest.Item) -> str:
    """The group's name: the file's, and every parameter but the candidate."""
    name = Path(item.fspath).stem.removeprefix("test_")
    if item.originalname != f"test_{name}":
        name += "-" + item.originalname.removeprefix("test_")
    others = [str(value) for key, value in item.callspec.params.items() if key != "candidate"]
    return "-".join([name, *others])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for, and note who is in which group.

    Last, after pytest's own `-k`: what that deselects is not measured either.
    """
    check_names(config, items)
    collected = [*items]
    kept = [item for item in items if wanted(item, config)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    config.stash[RUN].left_out = left_out(config, collected, kept)
    groups = config.stash[RUN].groups
    for item in items:
        if hasattr(item, "callspec") and "candidate" in item.callspec.params:
            group = groups.setdefault(group_of(item), turns.Group(group_of(item)))
            group.candidates.append(item.callspec.params["candidate"])


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Run:
    return request.config.stash[RUN]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where everything runs."""
    return torch.device(request.config.getoption("device"))


@pytest.fixture(scope="session")
def proven(run: Run, device: torch.device, request: pytest.FixtureRequest) -> None:
    """On a GPU every kernel's self-check, so that none runs while something is timed or its memory read."""
    if device.type == "cuda":
        say(request.config, "# the self-checks of all kernels")
        run.self_checks = served.prove(device)


@pytest.fixture(scope="session")
def peak(run: Run, device: torch.device, proven: None, request: pytest.FixtureRequest) -> roofs.Roofs:
    """The roofs of this machine, measured once per run; on a GPU after every kernel's self-check."""
    option = request.config.getoption
    say(request.config, "# the roofs of this machine")
    run.roofs = roofs.known_or_measured(option("roofs"), device, option("smoke"), lambda row: None)
    return run.roofs


@pytest.fixture(scope="session")
def engines(device: torch.device) -> Iterator[encoder.Engines]:
    """The encoders' engines, those of one model at a time."""
    with tempfile.TemporaryDirectory() as scratch, compile_cache():

        def bank_of(model: workloads.Model) -> Bank | gpu_engines.Bank:
            if device.type == "cuda":
                return gpu_engines.Bank(model, device)
            folder = Path(scratch, model.name)
            folder.mkdir(exist_ok=True)
            return Bank(model, torch.get_num_threads(), folder)

        yield encoder.Engines(bank_of)


@pytest.fixture
def in_turns(request: pytest.FixtureRequest, run: Run) -> Callable[[turns.Rows], dict]:
    """Measure this test's group if it is the first of it, and record this test's candidate."""

    def record(rows: turns.Rows) -> dict:
        config, item, option = request.config, request.node, request.config.getoption
        candidate, group = item.callspec.params["candidate"], run.groups[group_of(item)]
        if not group.measured:
            say(config, f"# {group.name}: {', '.join(group.candidates)}")
        group.measure(rows)
        row = group.rows.get(candidate)
        if row is None and group.error is not None:
            raise group.error
        if row is None:
            pytest.fail(f"{group.name}: no row of {candidate} among {', '.join(group.rows)}")
        run.recorded.append((group.name, item.name, row))
        if row["status"] != "ok":
            # what is not installed stops nothing, nor does a peer that cannot run here; ours has to run
            text = f"{candidate}: {row['error']}"
            missing = row["status"] == "skipped" or row["error"].startswith(NotInstalled.__name__)
            ours_failed = turns.is_ours(candidate) and not missing
            pytest.fail(text, pytrace=False) if ours_failed else pytest.skip(text)
        why = turns.wrong(row)
        if why is not None:  # and so it has no line of speed
            pytest.fail(f"{candidate}: incorrect: {why}", pytrace=False)
        if not turns.is_timed(row):
            return row
        seconds = [ms * 1e-3 for ms in row["samples_ms"]]
        item.add_marker(pytest.mark.benchmark(group=group.name, timer=turns.ReplayClock(seconds)))
        benchmark = request.getfixturevalue("benchmark")
        benchmark.extra_info.update(turns.facts(row))
        if by := served.of_row(row, option("device")):  # which backend served each op
            benchmark.extra_info["backends"] = by
        benchmark.pedantic(lambda: None, rounds=len(seconds), iterations=1)
        return row

    return record


@pytest.fixture
def few(request: pytest.FixtureRequest) -> int:
    """Samples of each candidate where one takes seconds: half of --samples, but 2 if there may be as many."""
    samples = request.config.getoption("samples")
    return min(samples, max(2, samples // 2))


def say(config: pytest.Config, text: str) -> None:
    """A line of progress on stderr, whatever pytest captures."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(text, file=sys.stderr, flush=True)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """The facts of the machine that the other benchmarks keep, in place of names of hosts."""
    environment = machine.describe(torch.device(config.getoption("device")))
    packages = (*PACKAGES, "flash_attn") if config.getoption("device") == "cuda" else PACKAGES
    environment["versions"] = {name: machine.package_version(name) for name in packages}
    machine_info.clear()
    machine_info.update(environment)


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list, output_json: dict) -> None:
    """What belongs to the run as a whole, and the rows without a time."""
    run, option = config.stash[RUN], config.getoption
    names = ("device", "peers", "model", "workload", "dtype", "threads", "samples", "everything", "smoke")
    output_json["fastbert"] = {
        "schema": SCHEMA,
        **machine.commit_here(),
        "note": option("note"),
        "settings": {name: option(name) for name in names},
        "roofs": None if run.roofs is None else asdict(run.roofs),
        "self_checks": run.self_checks,
        "left_out": run.left_out,
        "seconds": round(time.monotonic() - run.begin, 1),
        "without_a_time": [
            {
                "group": group,
                "name": name,
                "candidate": row["candidate"],
                "why": row.get("error") or f"incorrect: {turns.wrong(row)}",
            }
            for group, name, row in run.recorded
            if row["status"] != "ok" or turns.wrong(row)
        ],
        "memory": [
            {"group": group, "name": name, **turns.facts(row)}
            for group, name, row in run.recorded
            if row["status"] == "ok" and not turns.is_timed(row)
        ],
    }


def lines_of(run: Run) -> Iterator[str]:
    last = None
    for group, _, row in run.recorded:
        if group != last:
            yield f"{group}"
            for remark in row.get("remarks", ()):
                options = {"break_long_words": False, "break_on_hyphens": False}
                yield textwrap.fill(remark, 110, initial_indent="  ", subsequent_indent="    ", **options)
            last = group
        name = f"  {row['candidate']:<22}"
        if row["status"] != "ok":
            yield f"{name} {row['status']}: {row['error']}"
        elif why := turns.wrong(row):
            yield f"{name} incorrect: {why}"
        else:
            yield f"{name} {'  '.join(turns.told(row))}".rstrip()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash[RUN]
    for name, why in run.left_out.items():
        terminalreporter.write_line(f"# no {name}: {why}")
    if run.recorded:
        terminalreporter.section("benchmarks")
        for line in lines_of(run):
            terminalreporter.write_line(line)
