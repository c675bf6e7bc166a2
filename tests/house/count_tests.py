"""Lists the tests of an earlier collection that are gone, by name; every test is in one of the three tiers.

    in a worktree of the commit before:    python -m pytest --collect-only -q -m "" > before.txt
    here:                                  python tests/house/count_tests.py before.txt

A test's name is its id without the path of the file, because tests move between files. RENAMED holds the
names that changed on purpose.
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
# (old, new): if no test has an earlier name now, these replacements are made in it, in this order.
RENAMED = (
    # source files in ids
    (r"depends_on\[cases/", "depends_on[testing/op_cases/"),
    (r"\[testing\.py-True\]", "[testing/error_rule.py-True]"),
    (r"\[models\.py-False\]", "[models/bert.py-False]"),
    (r"triton/layer_norm\.py-True", "triton/forwarders.py-True"),
    (r"triton/linear\.py-False", "triton/attention.py-False"),
    # errors' texts: weights laid out for a kernel, plain English
    (r"\[packed: expected", "[panels: expected"),
    (r"65536 elements a row\]", "65536 elements per r]"),
    # the op and its launchers
    (r"\[pack_fwd-", "[packing_fwd-"),
    (r"\[unpack_fwd-", "[packing_bwd-"),
    (r"(?<![a-z])padding(?=[-\]])", "packing"),
    (r"pooling_bwd-names6", "pooling_bwd-names7"),
)


def names(listing: str) -> collections.Counter[str]:
    """Names of the ids that `pytest --collect-only -q` prints, each with the number of times it occurs."""
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
    """Print the counts; the exit status is 1 if a name is gone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=pathlib.Path, help="what pytest printed in the tree of before")
    before = names(parser.parse_args().before.read_text())
    now: collections.Counter[str] = collections.Counter()
    for tier, markers in TIERS.items():
        found = collected(markers)
        print(f"{tier}: {found.total()} tests")
        now += found
    for old, new in RENAMED:
        for name in [name for name in before if name not in now and re.search(old, name)]:
            times = before.pop(name)
            before[re.sub(old, new, name)] += times
    gone = before - now
    print(
        f"before: {before.total()}, now: {now.total()}, gone: {gone.total()}, new: {(now - before).total()}"
    )
    for name in sorted(gone):
        print(f"gone: {name}")
    raise SystemExit(bool(gone))


if __name__ == "__main__":
    main()
