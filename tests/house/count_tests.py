"""Says which tests of an earlier list are gone, by name; the three tiers together are all there are.

    in a worktree of the commit before:    python -m pytest --collect-only -q -m "" > before.txt
    here:                                  python tests/house/count_tests.py before.txt

A test's name is its id without the file's path, since tests move between files. RENAMED holds the names that
changed: ids with a source file's name in them, and the fault tests, which are one now.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIERS = {"test": "not slow and not sweep", "sweep": "sweep and not slow", "exhaustive": "slow"}
# name of before, as a pattern -> name of now
RENAMED = {
    r"depends_on\[cases/": "depends_on[testing/op_cases/",
    r"\[testing\.py-True\]": "[testing/error_rule.py-True]",
    r"\[models\.py-False\]": "[models/bert.py-False]",
}


def names(listing: str) -> collections.Counter[str]:
    """Names of the ids in what `pytest --collect-only -q` prints, each with how often it occurs."""
    ids = [line for line in listing.splitlines() if re.match(r"\S+\.py::", line)]
    return collections.Counter(line.partition("::")[2] for line in ids)


def collected(markers: str) -> collections.Counter[str]:
    """Names of the tests that `pytest -m markers` would run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        markers,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 5):
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return names(done.stdout)


def main() -> None:
    """Print the counts; the exit status is 1 where a name is gone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=pathlib.Path, help="what pytest printed in the tree of before")
    before = names(parser.parse_args().before.read_text())
    for old, new in RENAMED.items():
        for name in [name for name in before if re.search(old, name)]:
            before[re.sub(old, lambda match, new=new: new, name)] += before.pop(name)
    now: collections.Counter[str] = collections.Counter()
    for tier, markers in TIERS.items():
        found = collected(markers)
        print(f"{tier}: {found.total()} tests")
        now += found
    gone = before - now
    print(
        f"before: {before.total()}, now: {now.total()}, gone: {gone.total()}, new: {(now - before).total()}"
    )
    for name in sorted(gone):
        print(f"gone: {name}")
    raise SystemExit(bool(gone))


if __name__ == "__main__":
    main()
