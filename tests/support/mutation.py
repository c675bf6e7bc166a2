"""Mutation runs: a fault is planted in a source file, and the tests must fail.

    python tests/support/mutation.py triton_layer_norm [--sample 8]        one JSON object a fault

A suite is a module `tests/faults/<suite>.py` with `SUITE`. It works on a copy of the tree. The tests of each
fault run in a fork of a process that has imported PyTorch already, so that a fault costs a second or two. A
fault counts as caught if the tests fail, crash or hang; tests that cannot be collected are an error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pathlib
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


def copy_tree(to: pathlib.Path) -> None:
    """What the package and its tests need, without caches."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "build", ".*")
            shutil.copytree(source, to / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, to / name)


def verdict(suite: Suite, tree: pathlib.Path, log: pathlib.Path) -> str:
    """Build, run the tests in a fork: "passed", "failed", "crashed", "hung", "not built" or "error"."""
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
            code = int(pytest.main([*suite.tests, "-x", "-q", "-m", "not slow", *QUIET]))
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


def run(suite: Suite, sample: int | None = None) -> Iterator[dict[str, object]]:
    """A dict for the unchanged tree and for each fault: name, verdict, caught, seconds, tail of the log.

    `sample` takes that many faults, evenly spaced. Needs a process to itself: changes directory and path.
    """
    faults = suite.faults
    if sample is not None and sample < len(faults):
        faults = tuple(faults[i * len(faults) // sample] for i in range(sample))
    sys.dont_write_bytecode = True  # a stale cache would hide a fault of the same size and second
    os.environ.update(suite.environment)
    with tempfile.TemporaryDirectory() as directory:
        tree, log = pathlib.Path(directory, "tree"), pathlib.Path(directory, "log")
        tree.mkdir()
        copy_tree(tree)
        for module in suite.preload:
            importlib.import_module(module)
        os.chdir(tree)
        original = (ROOT, ROOT / "tests")
        sys.path[:] = [str(tree), *(p for p in sys.path if pathlib.Path(p).resolve() not in original)]
        for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "fastbert")]:
            del sys.modules[name]
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


def run_in_process(suite: str, sample: int | None = None) -> list[dict[str, object]]:
    """`run` in a process of its own, for tests."""
    command = [sys.executable, str(ROOT / "tests/support/mutation.py"), suite]
    command += [] if sample is None else ["--sample", str(sample)]
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
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    suite = importlib.import_module(f"tests.faults.{options.suite}").SUITE
    for row in run(suite, options.sample):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
