"""Mutation runs: a fault is planted in a source file, and the tests must fail.

    python tests/support/mutation.py triton_layer_norm [--sample 8]    one JSON object per fault
    python tests/support/mutation.py triton_layer_norm --one           for one fault: who caught it

A suite is a module `tests/faults/<suite>.py` with `SUITE`. It works on a copy of the tree. The tests of each
fault run in a fork of a process that has imported PyTorch already, so that a fault costs a second or two. A
fault counts as caught if the tests fail, crash or hang; tests that cannot be collected are an error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import filecmp
import importlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUIET = ("-p", "no:cacheprovider", "--no-header")
COPIED = ("fastbert", "kernels", "csrc", "tests", "pyproject.toml", "setup.py")


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in `file`, becomes `new`."""

    name: str
    file: str
    old: str
    new: str

    def apply(self, tree: pathlib.Path) -> None:
        """Plant the fault under `tree`; ValueError where `old` does not stand in the file once."""
        path = tree / self.file
        text = path.read_text()
        times = text.count(self.old)
        if times != 1:
            raise ValueError(
                f"fault {self.name!r}: {self.old!r} stands {times} times in {self.file}, expected 1"
            )
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Suite:
    """Faults and what must catch them.

    Attributes:
        faults: the faults, planted one at a time.
        tests: arguments for pytest; they must pass on the unchanged tree.
        build: command to run in the tree after a change, such as an in-place build of the extension.
        environment: variables of the test process.
        preload: modules to import once, before the forks; none that a fault can change.
        timeout_s: seconds after which the tests of one fault count as hanging.
    """

    faults: tuple[Fault, ...]
    tests: tuple[str, ...]
    build: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ("torch", "pytest", "hypothesis")
    timeout_s: float = 180.0


def copy_changed(source: str, target: str) -> None:
    """Copy a file unless it is there already, so that a build compiles only what differs."""
    if not (os.path.exists(target) and filecmp.cmp(source, target, shallow=False)):
        shutil.copy(source, target)


def copy_tree(to: pathlib.Path) -> None:
    """What the package and its tests need, without caches."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            for old in (to / name).rglob("*"):  # of an earlier copy
                there = source / old.relative_to(to / name)
                if old.is_file() and old.suffix != ".so" and not there.exists():
                    old.unlink()
            ignore = shutil.ignore_patterns("__pycache__", "build", ".*")
            if (to / name).exists() and name == "fastbert":  # keep the extension that was built here
                ignore = shutil.ignore_patterns("__pycache__", "build", ".*", "_C*.so", "kernels")
            shutil.copytree(
                source,
                to / name,
                symlinks=True,
                ignore=ignore,
                copy_function=copy_changed,
                dirs_exist_ok=True,
            )
        else:
            copy_changed(str(source), str(to / name))


def verdict(suite: Suite, tree: pathlib.Path, log: pathlib.Path, markers: str = "not slow") -> str:
    """Build, run the tests with these markers in a fork.

    One of "passed", "failed", "crashed", "hung", "not built" and "error".
    """
    if suite.build:
        built = subprocess.run(suite.build, cwd=tree, capture_output=True, timeout=suite.timeout_s)
        if built.returncode != 0:
            log.write_bytes(built.stdout + built.stderr)
            return "not built"
    child = os.fork()
    if child == 0:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        import pytest

        code = 3
        with contextlib.suppress(BaseException):
            code = int(pytest.main([*suite.tests, "-x", "-q", "-m", markers, *QUIET]))
            sys.stdout.flush()
        os._exit(code)
    end = time.monotonic() + suite.timeout_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return "crashed" if code < 0 else {0: "passed", 1: "failed"}.get(code, "error")
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hung"
        time.sleep(0.02)


def enter(suite: Suite, tree: pathlib.Path) -> None:
    """Make this process one that imports from `tree`: changes directory, path and environment."""
    sys.dont_write_bytecode = True  # a stale cache would hide a fault of the same size and second
    os.environ.update(suite.environment)
    for module in suite.preload:
        importlib.import_module(module)
    os.chdir(tree)
    original = (ROOT, ROOT / "tests")
    sys.path[:] = [str(tree), *(p for p in sys.path if pathlib.Path(p).resolve() not in original)]
    for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "fastbert")]:
        del sys.modules[name]


@contextlib.contextmanager
def shared_tree() -> Iterator[pathlib.Path]:
    """build/tests/faults, for one process at a time: what is built there is kept for the next."""
    folder = ROOT / "build" / "tests" / "faults"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "faults.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@contextlib.contextmanager
def own_tree() -> Iterator[pathlib.Path]:
    """A temporary folder."""
    with tempfile.TemporaryDirectory() as directory:
        tree = pathlib.Path(directory, "tree")
        tree.mkdir()
        yield tree


def run_one(suite: Suite) -> dict[str, object]:
    """The first fault that a test catches by failing, and that test's verdict without the fault.

    A dict: fault, verdict, the failed test, `unchanged` (its verdict on the unchanged tree), tail of the log.
    A fault that crashes the tests tells no test's name, and one that only the sweep catches passes here: the
    next one is tried, five at most. Only tests that `make test` runs take part. Needs a process to itself.
    """
    with (shared_tree if suite.build else own_tree)() as tree, tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory, "log")
        copy_tree(tree)
        enter(suite, tree)
        for fault in suite.faults[:5]:
            before = (tree / fault.file).read_bytes()
            fault.apply(tree)
            try:
                result = verdict(suite, tree, log, "not slow and not sweep")
            finally:
                (tree / fault.file).write_bytes(before)
            if result == "failed":
                break
        text = log.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
        unchanged = None
        if failed is not None:
            alone = dataclasses.replace(suite, tests=(failed[1],))
            unchanged = verdict(alone, tree, log)
    return {
        "fault": fault.name,
        "verdict": result,
        "test": failed and failed[1],
        "unchanged": unchanged,
        "log": text[-2000:],
    }


def run(suite: Suite, sample: int | None = None) -> Iterator[dict[str, object]]:
    """A dict for the unchanged tree and for each fault: name, verdict, caught, seconds, tail of the log.

    `sample` takes that many faults, evenly spaced. Needs a process to itself: changes directory and path.
    """
    faults = suite.faults
    if sample is not None and sample < len(faults):
        faults = tuple(faults[i * len(faults) // sample] for i in range(sample))
    with own_tree() as tree:
        log = tree.with_name("log")
        copy_tree(tree)
        enter(suite, tree)
        for fault in (None, *faults):
            before = None
            if fault is not None:
                before = (tree / fault.file).read_bytes()
                fault.apply(tree)
            start = time.monotonic()
            result = verdict(suite, tree, log)
            yield {
                "fault": None if fault is None else fault.name,
                "verdict": result,
                "caught": result in ("failed", "crashed", "hung", "not built"),
                "seconds": round(time.monotonic() - start, 2),
                "log": log.read_text(errors="replace")[-2000:],
            }
            if before is not None:
                (tree / fault.file).write_bytes(before)


def run_in_process(suite: str, sample: int | None = None, one: bool = False) -> list[dict[str, object]]:
    """`run`, or `run_one`, in a process of its own, for tests."""
    command = [sys.executable, str(ROOT / "tests/support/mutation.py"), suite]
    command += [] if sample is None else ["--sample", str(sample)]
    command += ["--one"] if one else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_caught(rows: list[dict[str, object]], share: float) -> None:
    """The unchanged tree passes, and at least `share` of the faults are caught."""
    unchanged, *faults = rows
    assert unchanged["fault"] is None
    assert unchanged["verdict"] == "passed", unchanged["log"]
    assert [r for r in faults if r["verdict"] == "error"] == []
    survived = [r["fault"] for r in faults if not r["caught"]]
    assert 1 - len(survived) / len(faults) >= share, survived


def main() -> None:
    """Command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", help="name of a module in tests/faults")
    parser.add_argument("--sample", type=int, help="run only so many of the faults")
    parser.add_argument("--one", action="store_true", help="run the first fault, with what `make test` runs")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    suite = importlib.import_module(f"tests.faults.{options.suite}").SUITE
    for row in [run_one(suite)] if options.one else run(suite, options.sample):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
