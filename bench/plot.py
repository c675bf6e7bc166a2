"""Charts and the page of tables from what the benchmarks keep in bench/results.

    python bench/plot.py [FILE.json ...] [--out DIR] [--what bars lengths roofs history]
    python bench/plot.py tables [--check]

The first command draws charts beside each FILE of the suite, by default this machine's newest:

| chart | what |
|---|---|
| `bars-MODEL` | real tokens per second of the forward, a bar per candidate, the floors |
| `roofs-WORKLOAD` | the part of the machine's roof that each op reaches, ours and PyTorch's |
| `history-KIND` | speed of each benchmark in all runs of FILE's folder, as a multiple of the first run's |

The second command writes the tables of bench/results/README.md from the newest file of each device. With
--check it writes nothing, and its exit status is 1 if the page would change. Charts need matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from bench.lib import results, tables
from bench.lib.charts import suite as drawn
from bench.lib.machine import describe

if TYPE_CHECKING:
    import matplotlib.figure

WHAT = ("bars", "lengths", "roofs", "history")


def of_run(run: results.Run, what: Iterable[str] = WHAT) -> Iterator[tuple[str, matplotlib.figure.Figure]]:
    """(name, figure) of each chart of one run that `what` asks for and the run has rows for."""
    for model in drawn.models(run) if "bars" in what else ():
        yield f"bars-{model}", drawn.bars(run, model)
    for model in drawn.models(run) if "lengths" in what else ():
        if len(drawn.of_one_text(run, model)) > 2:
            yield f"lengths-{model}", drawn.lengths(run, model)
    for workload in drawn.op_workloads(run) if "roofs" in what else ():
        yield f"roofs-{workload}", drawn.shares(run, workload)


def save(figures: Iterable[tuple[str, matplotlib.figure.Figure]], folder: Path) -> list[Path]:
    """Write each figure as `<name>.png`; returns the files."""
    written = []
    for name, figure in figures:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=130)
        written.append(path)
    return written


def here() -> Path:
    """The newest file of the suite on this machine: of its GPU, as the suite's default is, or of its CPU.

    Raises:
        ValueError: there is none.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = results.RESULTS / str(describe(torch.device(device))["slug"])
    runs = results.read_all(folder)
    if not runs:
        raise ValueError(f"{folder}: no run of the suite there, expected {results.SUITE_FILES} or a FILE")
    return runs[-1].path


def draw(files: Sequence[Path], out: Path | None, what: Sequence[str] | None) -> list[Path]:
    """Draw the charts of files; returns the pictures.

    Args:
        files: files of the suite.
        out: instead of each file's own folder.
        what: names out of WHAT; None: all.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: naming a file and the key that is wrong in it.
    """
    drawn.require_matplotlib()
    written: list[Path] = []
    runs: dict[Path, results.Run] = {}
    for path in files:
        folder = out or path.parent
        run = runs[path.resolve()] = results.read(path)
        before = f"{path.stem}-" if len(files) > 1 else ""
        found = of_run(run, what or WHAT)
        pictures = save(((before + name, figure) for name, figure in found), folder)
        if not pictures and what and "history" not in what:
            raise ValueError(f"{path}: it has no rows for --what {' '.join(what)}")
        written += pictures
    if "history" in (what or WHAT):
        written += histories(runs, out)
    return written


def histories(runs: dict[Path, results.Run], out: Path | None) -> list[Path]:
    """The histories of the runs, and of all others in their folders: a chart of each kind.

    Runs on other machines or with other threads, and smoke runs, have histories of their own.
    """
    found = dict(runs)
    for folder in dict.fromkeys(path.parent for path in runs):
        found |= {run.path.resolve(): run for run in results.read_all(folder)}
    written: list[Path] = []
    alike: dict[str, list[results.Run]] = {}
    for run in found.values():
        conditions = f"{run.machine['slug']}-{run.machine['threads']}t{'-smoke' * run.smoke}"
        alike.setdefault(conditions, []).append(run)
    for conditions, some in alike.items():
        if len(some) < 2:
            print(f"plot: no history: {some[0].path} is the only run of {conditions}", file=sys.stderr)
            continue
        some = results.in_order(some)
        before = f"{conditions}-" if len(alike) > 1 else ""
        kinds = [kind for kind in drawn.kinds(some) if drawn.is_repeated(some, kind)]
        figures = ((f"{before}history-{kind}", drawn.history(some, kind)) for kind in kinds)
        written += save(figures, out or some[-1].path.parent)
    return written


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["tables"]:
        return tables.main(argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="a run of the suite")
    parser.add_argument("--out", type=Path, help="folder of the pictures (default: the file's)")
    parser.add_argument("--what", nargs="+", choices=WHAT, help="which charts (default: all)")
    args = parser.parse_args(argv)
    try:
        for path in draw(args.files or [here()], args.out, args.what):
            print(path)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
