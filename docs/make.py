"""The generated parts of docs: numbers and the speed picture from bench/results, tables from the package.

    python docs/make.py            write them
    python docs/make.py --check    write nothing; exit status 1 if something would change

A generated part lies between `<!-- NAME: made by docs/make.py -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # run as a script: docs/ need not be on the path, bench/ must be found
    sys.path[0] = str(ROOT)

from bench.lib import quoted  # noqa: E402
from bench.lib.charts import front  # noqa: E402
from bench.lib.tables import table  # noqa: E402
from fastbert.pretraining import recipe  # noqa: E402
from fastbert.runtime import dispatch  # noqa: E402
from fastbert.runtime.namespaces import has_backward  # noqa: E402
from fastbert.runtime.table import TABLE  # noqa: E402

DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


# ---- bench/results -> rows of numbers ----


def _quoted(part: Callable[..., list[str]], *arguments: str) -> Callable[[], list[str]]:
    """A part made from the suite's newest rows."""
    return lambda: part(*arguments, _newest())


@cache
def _newest() -> quoted.Rows:
    return quoted.newest()


# ---- the package -> op matrix, floors ----


def _passes(backend: str, op: str) -> str:
    return "fwd, bwd" if has_backward(backend, op) else "fwd"


def matrix() -> list[str]:
    """A row per op, a column per backend: the passes and the stored dtypes."""
    body = []
    for op in dispatch.OPS:
        cells = []
        for backend in dispatch.BACKENDS:
            stored = dispatch.backend_module(backend).DTYPES.get(op)
            if stored is None:
                cells.append("–")
                continue
            dtypes = " ".join(name for dtype, name in DTYPES.items() if dtype in stored)
            cells.append(f"{_passes(backend, op)} · {dtypes}")
        body.append([f"`{op}`", *cells])
    return table(["op", *(f"`{backend}`" for backend in dispatch.BACKENDS)], body)


def order() -> list[str]:
    """A row per line of the dispatch table."""
    body = [
        [f"`{line}`", device, ", ".join(f"`{name}`" for name in backends)]
        for device, lines in TABLE.items()
        for line, backends in lines.items()
    ]
    return table(["op, or a part of its calls", "device", "backends, best first"], body)


def recipes() -> list[str]:
    """A row per recipe: objective, sequences, phases, optimizer."""
    body = []
    for name in recipe.names():
        made = recipe.Recipe.load(name)
        kind = made.format["kind"] + (f" ({made.format['relation']})" if "relation" in made.format else "")
        phases = made.phases
        warm = [f"{p.warmup:,}" if p.warmup >= 1 else f"{p.warmup:.4g} of the steps" for p in phases]
        body.append(
            [
                f"`{name}`",
                made.objective,
                kind,
                _each([str(p.max_length) for p in phases]),
                _each([f"{p.batch_size:,}" for p in phases]),
                " + ".join(f"{p.steps:,}" for p in phases),
                _each([f"{p.lr:g}" for p in phases]),
                _each(warm),
                f"{made.optimizer['kind']}, {made.schedule['kind']}",
            ]
        )
    head = [
        "recipe",
        "objective",
        "sequences",
        "tokens",
        "batch",
        "steps",
        "lr",
        "warm-up",
        "optimizer, schedule",
    ]
    return table(head, body)


def _each(values: list[str]) -> str:
    """The values of the phases, or one value if all are equal."""
    return values[0] if len(set(values)) == 1 else ", ".join(values)


KERNELS = "Triton kernels and their launchers: `fastbert/kernels` is a link to `kernels/`"
IMPORT = re.compile(r"^(?:from fastbert import|from fastbert\.|import fastbert\.)(\w+)", re.MULTILINE)


def floors() -> list[str]:
    """A row per room, the highest floor first: its floor, what it is, and the rooms that it imports."""
    source = (ROOT / "tests" / "house" / "test_floors.py").read_text()
    (text,) = re.findall(r"^FLOORS = (\(.*?^\))", source, re.DOTALL | re.MULTILINE)
    plan = ast.literal_eval(text)
    order = [room for rooms in plan for room in rooms]
    body = []
    for floor, rooms in reversed(list(enumerate(plan))):
        for room in rooms:
            folder = ROOT / "kernels" if room == "kernels" else ROOT / "fastbert" / room
            files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
            imported = {name for file in files for name in IMPORT.findall(file.read_text())} - {room}
            uses = ", ".join(f"`{name}`" for name in order if name in imported)
            body.append([str(floor), f"`{room}`", _what(room, files), uses or "–"])
    return table(["floor", "room of `fastbert/`", "what", "imports, as it is loaded"], body)


def _what(room: str, files: list[Path]) -> str:
    """The first line of a room's docstring."""
    if room == "kernels":
        return KERNELS
    (start,) = [file for file in files if file.stem == "__init__" and file.parent.name == room] or files
    return ast.get_docstring(ast.parse(start.read_text())).splitlines()[0].rstrip(".")


# ---- files ----


# the suite's kinds that docs/numbers.md has a table of
KINDS = ("encoder", "latency", "training", "finetuning", "memory", "accelerate", "encode", "load", "mlperf")
PARTS: dict[str, list[tuple[str, Callable[[], list[str]]]]] = {
    "docs/numbers.md": [
        ("runs", _quoted(quoted.runs)),
        *((name, _quoted(quoted.kind, name)) for name in KINDS),
        ("counted memory", partial(quoted.earlier, "footprint")),
        ("Intel Xeon", partial(quoted.earlier, "encoder", "training", "memory", "encode")),
    ],
    "docs/op-matrix.md": [("op matrix", matrix), ("dispatch table", order)],
    "docs/floors.md": [("floors", floors)],
    "docs/pretrain.md": [("recipes", recipes)],
}
PICTURES: dict[str, Callable[[], str]] = {
    "docs/speed.svg": partial(front.picture, columns=3),
    "docs/speed-phone.svg": partial(front.picture, columns=1),
}


def made(text: str, name: str, lines: list[str]) -> str:
    """`text` with the part `name` replaced. ValueError where its two markers are not there once each."""
    begin, end = f"<!-- {name}: made by docs/make.py -->\n", f"<!-- end of {name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected {begin.strip()} and {end.strip()}, once each")
    body = begin + "\n" + "\n".join(lines) + "\n\n" + end
    return re.sub(re.escape(begin) + r".*?" + re.escape(end), lambda _: body, text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Write the generated parts and pictures; with --check, only print the files that are out of date."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    changed = []

    def keep(file: str, before: str, after: str) -> None:
        if after != before:
            changed.append(file)
            if not arguments:
                (ROOT / file).write_text(after)

    for file, parts in PARTS.items():
        before = after = (ROOT / file).read_text()
        for name, make in parts:
            after = made(after, name, make())
        keep(file, before, after)
    for file, picture in PICTURES.items():
        path = ROOT / file
        keep(file, path.read_text() if path.is_file() else "", picture())
    for file in changed:
        print(f"{file}: {'out of date' if arguments else 'written'}")
    return 1 if arguments and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
