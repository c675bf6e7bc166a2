"""`fastbert bench`: list or run the benchmarks of a source checkout.

A benchmark is a file of the suite, `bench/suite/test_NAME.py`, which pytest-benchmark runs, or a script,
`bench/NAME.py`. `all` is the whole suite.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from fastbert.cli.usage import UsageError

# Where a source checkout has its benchmarks and their results; an installed package has no such folder. The
# package reads outside its own folder only here.
FOLDER = Path(__file__).resolve().parents[2] / "bench"
# our shorter name of an option -> pytest-benchmark's
CALLED = {
    "--json": "--benchmark-json",
    "--compare": "--benchmark-compare",
    "--fail": "--benchmark-compare-fail",
}
SAVE = ("--benchmark-autosave", "--benchmark-save-data")


def suite() -> dict[str, Path]:
    """Name -> file of the suite."""
    return {path.stem.removeprefix("test_"): path for path in sorted(FOLDER.glob("suite/test_*.py"))}


def scripts() -> dict[str, Path]:
    """Name -> script; a prefix `bench_` does not count."""
    runnable = [p for p in sorted(FOLDER.glob("*.py")) if "__main__" in p.read_text(encoding="utf-8")]
    return {path.stem.removeprefix("bench_"): path for path in runnable}


def summary(path: Path) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n", 1)[0]


def suite_command(files: list[Path], arguments: list[str]) -> list[str]:
    """The pytest command that runs files of the suite.

    `--json FILE`, `--compare`, `--fail` and `--save` (into `bench/results`) are shorter names of
    pytest-benchmark's options; all other arguments are passed to pytest unchanged.
    """
    for package in ("pytest", "pytest_benchmark"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"bench: needs {package.replace('_', '-')}: pip install '.[test,bench]'")
    words: list[str] = []
    for word in arguments:
        name, equals, value = word.partition("=")
        words += SAVE if word == "--save" else [CALLED.get(name, name) + equals + value]
    root = FOLDER.parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(root / "pyproject.toml"), "--rootdir", str(root)]
    command += [f"--benchmark-storage=file://{FOLDER / 'results'}"]
    if not any(word.startswith("--benchmark-compare") for word in words):
        command.append("--benchmark-quiet")  # the suite prints its own table
    return [*command, *map(str, files), *words]


def run(args: argparse.Namespace) -> int:
    """List the benchmarks or run one; returns its exit status."""
    tests, others = suite(), scripts()
    if not tests and not others:
        raise UsageError(f"bench: the benchmarks are in the source checkout, and {FOLDER} has none")
    others = {name: path for name, path in others.items() if name not in tests}
    if args.name is None:
        for name, path in (tests | others).items():
            print(f"fastbert bench {name:<12} {summary(path)}")
        return 0
    if args.name in tests or (args.name == "all" and tests):
        files = list(tests.values()) if args.name == "all" else [tests[args.name]]
        path = os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path}
        command = suite_command(files, args.arguments)
        return subprocess.run(command, env=environment, check=False).returncode
    script = others.get(args.name.removeprefix("bench_"))
    if script is None:
        raise UsageError(f"bench {args.name}: not among {', '.join([*tests, *others])}, all")
    return subprocess.run([sys.executable, str(script), *args.arguments], check=False).returncode
