"""Mutation runs: a fault is planted in a source file, and the tests must fail.

    python tests/support/mutation.py triton_layer_norm    one JSON object per fault
    python tests/support/mutation.py --one SUITE ...      for one fault of each suite: who caught it

A suite is a module `tests/faults/<suite>.py` with `SUITE`. Faults are planted in a copy of the tree. The
tests of each fault run in a fork of a process that has imported PyTorch already, so that a fault costs a
second or two. A fault is caught if the tests fail, crash or hang. It is an error if they cannot be collected.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import importlib
import itertools
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
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUIET = ("-p", "no:cacheprovider", "--no-header")
FOLDERS = ("fastbert", "kernels", "csrc", "tests", "bench", "docs", "examples")
COPIED = (*FOLDERS, "Makefile", "pyproject.toml", "setup.py")
# imported once, before the forks: what tests import, and no fault can change
PRELOAD = ("torch._inductor.config", "pytest", "hypothesis", "transformers")
_planted = itertools.count(10)


@contextlib.contextmanager
def replaced(path: pathlib.Path, text: str) -> Iterator[None]:
    """Write `text` to a file for a while.

    Python takes its cached bytecode for fresh if size and second are those of the source: each written
    .py file gets a second of its own, and its first one back afterwards. A source to be compiled must look
    new both times.
    """
    before, second = path.read_bytes(), int(path.stat().st_mtime)
    try:
        path.write_text(text)
        if path.suffix == ".py":
            os.utime(path, (second, second + next(_planted)))
        yield
    finally:
        path.write_bytes(before)
        if path.suffix == ".py":
            os.utime(path, (second, second))


@dataclass(frozen=True)
class Fault:
    """Replaces `old`, which occurs once in `file`, by `new`."""

    name: str
    file: str
    old: str
    new: str

    @contextlib.contextmanager
    def planted(self, tree: pathlib.Path) -> Iterator[None]:
        """Plant the fault under `tree` for a while; ValueError if `old` does not occur exactly once."""
        text = (tree / self.file).read_text()
        times = text.count(self.old)
        if times != 1:
            raise ValueError(
                f"fault {self.name!r}: {self.old!r} occurs {times} times in {self.file}, expected 1"
            )
        with replaced(tree / self.file, text.replace(self.old, self.new)):
            yield


@dataclass(frozen=True)
class Suite:
    """Faults and what must catch them.

    Attributes:
        faults: the faults, planted one at a time.
        tests: arguments for pytest; they must pass on the unchanged tree.
        build: command to run in the tree after a change, such as an in-place build of the extension.
        environment: variables of the processes that build and test.
        timeout_s: seconds after which the tests of one fault count as hanging.
        quick: markers of the tests that catch one fault; those of `make test`, if it runs any of the suite's.
    """

    faults: tuple[Fault, ...]
    tests: tuple[str, ...]
    build: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    quick: str = "not slow and not sweep"


# suites of C++ that runs on this machine
IN_PLACE = {
    "build": (sys.executable, "setup.py", "build_ext", "--inplace"),
    "environment": {"FASTBERT_CUDA": "0", "CXXFLAGS": "-O1"},
}
# suites whose CUDA kernels run in the PTX emulator
EMULATED = (
    *(sys.executable, "-c"),
    "from tests.ptx.emulator import library; from tests.support import cuda_build; "
    "cuda_build.emulated_extension(), library.engine()",
)
IN_EMULATOR = {"build": EMULATED, "quick": "not slow", "timeout_s": 1200.0}


def faults_of(usual: str) -> Callable[..., Fault]:
    """`Fault` of (name, old, new, file), where `usual` is the file if none is given."""
    return lambda name, old, new, file=usual: Fault(name, file, old, new)


def interpreted(faults: tuple[Fault, ...], *tests: str) -> Suite:
    """A suite whose tests need no build; Triton's kernels run in its interpreter."""
    return Suite(faults, tests, environment={"TRITON_INTERPRET": "1"}, timeout_s=1800.0)


def of_op(faults: tuple[Fault, ...], op: str, without: str = "") -> Suite:
    """`interpreted` by an op's own tests and its part in those of every op, `without` those of this `-k`."""
    files = "tests/triton/test_every_op.py", f"tests/triton/test_{op}.py"  # what sees most comes first
    return interpreted(faults, *files, "-k", f"{op} and not ({without})" if without else op)


def suites() -> dict[str, Suite]:
    """All suites by name: the modules of tests/faults that have one."""
    names = sorted(path.stem for path in (ROOT / "tests" / "faults").glob("*.py"))
    names = [name for name in names if not name.startswith(("test_", "__"))]
    return {name: importlib.import_module(f"tests.faults.{name}").SUITE for name in names}


def copy_changed(source: str, target: str) -> None:
    """Copy a file unless it is there already, so that a build compiles only what differs."""
    if not (os.path.exists(target) and filecmp.cmp(source, target, shallow=False)):
        shutil.copy(source, target)


def copy_tree(to: pathlib.Path) -> None:
    """Copy what the package and its tests need, without caches."""
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


def verdict(
    suite: Suite,
    tree: pathlib.Path,
    log: pathlib.Path,
    markers: str = "not slow",
    plugins: tuple[object, ...] = (),
) -> str:
    """Build, run the tests with these markers in a fork, with these plugins of pytest.

    One of "passed", "failed", "crashed", "hung", "not built" and "error".
    """
    if suite.build:
        environment = os.environ | suite.environment
        built = subprocess.run(
            suite.build, cwd=tree, env=environment, capture_output=True, timeout=suite.timeout_s
        )
        if built.returncode != 0:
            log.write_bytes(built.stdout + built.stderr)
            return "not built"
    child = os.fork()
    if child == 0:
        # processes that a test starts must end with it
        os.setpgid(0, 0)
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        import pytest

        code = 3
        with contextlib.suppress(BaseException):
            code = int(pytest.main([*suite.tests, "-x", "-q", "-m", markers, *QUIET], plugins))
            sys.stdout.flush()
        os._exit(code)
    end = time.monotonic() + suite.timeout_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return "crashed" if code < 0 else {0: "passed", 1: "failed"}.get(code, "error")
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hung"
        time.sleep(0.02)


def failed_test(log: str) -> str | None:
    """The first test that failed, or the file that could not be collected, in what pytest printed."""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log, re.MULTILINE)
    return found and found[1]


def enter(tree: pathlib.Path, environment: dict[str, str]) -> None:
    """Copy into `tree`, and make this process import from there: its directory, path and environment.

    RuntimeError if fastbert is imported already: pybind11 3.1 gives a process that imports a second
    `fastbert._C` the first one again, and no fault would be seen.
    """
    if "fastbert" in sys.modules:
        raise RuntimeError("fastbert was imported before its faults: a module of tests/faults must not do so")
    copy_tree(tree)
    os.environ.update(environment)
    os.environ["PYTHONPATH"] = str(tree)  # of the processes that tests start
    import torch

    if not torch.cuda.is_available():  # as tests/support/fixtures.py decides, before anything imports Triton
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for module in PRELOAD:
        importlib.import_module(module)
    os.chdir(tree)
    original = (ROOT, ROOT / "tests")
    sys.path[:] = [str(tree), *(p for p in sys.path if pathlib.Path(p).resolve() not in original)]
    for name in [n for n in sys.modules if n.split(".")[0] == "tests"]:
        del sys.modules[name]


@contextlib.contextmanager
def shared_tree() -> Iterator[pathlib.Path]:
    """The folder build/tests/faults, for one process at a time. Builds are kept for the next."""
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


def one_caught(suite: Suite, tree: pathlib.Path) -> dict[str, object]:
    """The first fault that a test catches by failing: fault, verdict, the failed test, tail of the log.

    Only tests of `make test` run, or those of `suite.quick`; that they pass without the fault, their own run
    shows. If a fault crashes them, no test's name is known; if only the sweep catches it, they pass. Then the
    next fault is tried, five at most. Follows `enter`.
    """
    with tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory, "log")
        for fault in suite.faults[:5]:
            with fault.planted(tree):
                result = verdict(suite, tree, log, suite.quick)
            if result == "failed":
                break
        text = log.read_text(errors="replace")
    return {"fault": fault.name, "verdict": result, "test": failed_test(text), "log": text[-2000:]}


def run_one(names: Sequence[str]) -> Iterator[dict[str, object]]:
    """`one_caught` of each suite, with its name. Needs a process to itself: PyTorch is imported once for all.

    They share a tree: one whose builds are kept, if any suite builds.
    """
    known = suites()
    builds = any(known[name].build for name in names)
    with (shared_tree if builds else own_tree)() as tree:
        enter(tree, {"TRITON_INTERPRET": "1"})
        for name in names:
            with unittest.mock.patch.dict(os.environ, known[name].environment):
                yield {"suite": name, **one_caught(known[name], tree)}


def run(suite: Suite) -> Iterator[dict[str, object]]:
    """A dict for the unchanged tree and for each fault: name, verdict, caught, seconds, tail of the log.

    Needs a process to itself: changes directory and path.
    """
    with own_tree() as tree:
        log = tree.with_name("log")
        enter(tree, suite.environment)
        for fault in (None, *suite.faults):
            start = time.monotonic()
            with contextlib.nullcontext() if fault is None else fault.planted(tree):
                result = verdict(suite, tree, log)
            yield {
                "fault": None if fault is None else fault.name,
                "verdict": result,
                "caught": result in ("failed", "crashed", "hung", "not built"),
                "seconds": round(time.monotonic() - start, 2),
                "log": log.read_text(errors="replace")[-2000:],
            }


def rows_of(script: str, *arguments: str) -> list[dict[str, object]]:
    """What a script of this folder prints in a process of its own, one JSON object per line."""
    command = [sys.executable, str(ROOT / "tests" / "support" / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
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
    parser.add_argument("suites", nargs="+", metavar="SUITE", help="a module in tests/faults")
    parser.add_argument("--one", action="store_true", help="run the first fault, with what `make test` runs")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if not options.one and len(options.suites) > 1:
        parser.error("several suites: only with --one")
    for row in run_one(options.suites) if options.one else run(suites()[options.suites[0]]):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
