"""Mutants: small changes of the package's Python code, made by rule, that the tests of their room must kill.

    python tests/support/mutants.py --sample 400 --seed 0 --out FILE    one JSON object per mutant

A sample holds equally many mutants of each room, in turns. Which ones depends on the seed and on the text of
their functions alone, so that an edit elsewhere keeps them. The tests of a room run in a fork of a process
that has imported PyTorch already, in the tier of `make test`, those of the module first. Rerun a command with
`--out` to resume it. The survivors are listed at the end.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import hashlib
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support import mutation  # noqa: E402

HEADS = ("bad_inputs", "head_forwards", "head_training", "head_weights", "packed_heads", "vocabulary_loss")
PACKED = ("tests/models/test_packed_heads.py", "tests/models/test_first_token_only.py")
BAD_FILES = ("tests/layers/test_quantized_files.py", "tests/models/test_bad_inputs.py")
# room: (its code, its tests: arguments for pytest)
ROOMS = {
    "checkpoint": (
        "fastbert/checkpoint",
        ("tests/checkpoint", "tests/layers/test_quantized_files.py", "tests/models/test_bad_inputs.py"),
    ),
    "layers": ("fastbert/layers", ("tests/layers", *PACKED)),
    "masking": ("fastbert/pretraining/masking.py", ("tests/pretraining/test_masking.py",)),
    "heads": ("fastbert/models/heads", tuple(f"tests/models/test_{name}.py" for name in HEADS)),
    "ops": ("fastbert/ops", ("tests/ops",)),
    "runtime": ("fastbert/runtime", ("tests/runtime",)),
    "training": ("fastbert/training", ("tests/training",)),
    "tasks": ("fastbert/tasks", ("tests/tasks", "tests/cli/test_finetune.py")),
    "finetuning": ("fastbert/finetuning", ("tests/finetuning", "tests/cli/test_finetune.py")),
}
SWAPS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the text of `old` at these bytes becomes `new`."""

    key: str
    room: str
    file: str
    line: int
    function: str
    kind: str
    old: str
    new: str
    start: int
    end: int

    def planted(self, tree: pathlib.Path) -> contextlib.AbstractContextManager[None]:
        """Plant the mutant under `tree` for a while."""
        text = (tree / self.file).read_bytes()
        changed = text[: self.start] + self.new.encode() + text[self.end :]
        return mutation.replaced(tree / self.file, changed.decode())


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Kinds of changes of one node, each with the node that replaces it."""
    new = copy.copy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new.ops = [SWAPS[type(node.ops[0])]()]
        yield "comparison", new
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS:
        new.op = SWAPS[type(node.op)]()
        yield "arithmetic" if isinstance(node, ast.BinOp) else "boolean", new
    elif isinstance(node, ast.UnaryOp):
        yield "operator removed", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        new.value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "constant", new
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield "condition", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg != "device":  # there may be only one
                others = [k for k in node.keywords if k is not keyword]
                yield "argument removed", ast.Call(node.func, node.args, others)
    elif isinstance(node, ast.Return) and not isinstance(node.value, (ast.Constant, type(None))):
        yield "return", ast.Return(ast.Constant(None))
    elif (
        isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break))
        or (isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)))
        or (isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)))
    ):
        yield "statement removed", ast.Pass()


def sites(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Nodes below `node`, each with the name of its function; without annotations and f-strings.

    Python before 3.12 does not know the places of what is inside f-strings.
    """
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}".strip(".")
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child, function
                yield from sites(child, function)


def mutants(room: str, file: str, text: str, seed: int = 0) -> list[Mutant]:
    """All mutants of a file's text."""
    lines = list(itertools.accumulate((len(line) for line in text.encode().splitlines(True)), initial=0))
    seen: collections.Counter[tuple[str, ...]] = collections.Counter()
    found = []
    for node, function in sites(ast.parse(text)):
        for kind, changed in changes(node):
            at = node.test if kind == "condition" else node
            start = lines[at.lineno - 1] + at.col_offset
            end = lines[at.end_lineno - 1] + at.end_col_offset
            old, new = text.encode()[start:end].decode(), ast.unparse(changed)
            if isinstance(changed, ast.expr):
                new = f"({new})"
            name = (file, function, kind, old, new)
            seen[name] += 1
            key = hashlib.sha256(repr((seed, *name, seen[name])).encode()).hexdigest()[:16]
            found.append(Mutant(key, room, file, at.lineno, function, kind, old, new, start, end))
    return found


def sample(count: int, seed: int) -> list[Mutant]:
    """`count` mutants, the rooms in turns."""
    chosen = []
    for room, (code, _) in ROOMS.items():
        path = ROOT / code
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        all_ = [m for f in files for m in mutants(room, str(f.relative_to(ROOT)), f.read_text(), seed)]
        chosen.append(sorted(all_, key=lambda m: m.key))
    turns = itertools.zip_longest(*chosen)
    return list(itertools.islice((m for turn in turns for m in turn if m is not None), count))


class OwnFirst:
    """Plugin of pytest: the tests in files named like the module first."""

    def __init__(self, module: str) -> None:
        self.begin = f"test_{module}"

    def pytest_collection_modifyitems(self, items) -> None:
        items.sort(key=lambda item: not item.path.name.startswith(self.begin))


def judge(room: str, tree: pathlib.Path, module: str = "") -> tuple[str, str]:
    """The verdict of a room's tests on `tree`, and what pytest printed. The tests of `module` run first."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory  # compiled code is another mutant's
        log = pathlib.Path(directory, "log")
        suite = mutation.Suite(faults=(), tests=ROOMS[room][1], timeout_s=1800.0)
        result = mutation.verdict(suite, tree, log, suite.quick, (OwnFirst(module),))
        return result, log.read_text(errors="replace")


def run(chosen: list[Mutant], done: set[str]) -> Iterator[dict[str, object]]:
    """Verdicts of mutants whose key is not in `done`. RuntimeError if a test fails on the unchanged tree."""
    passed = set()
    with mutation.own_tree() as tree:
        mutation.enter(tree, {})
        for mutant in chosen:
            if mutant.key in done:
                continue
            if mutant.room not in passed:
                result, log = judge(mutant.room, tree)
                if result != "passed":
                    raise RuntimeError(f"{mutant.room}'s tests without a mutant: {result}\n{log[-4000:]}")
                passed.add(mutant.room)
            start = time.monotonic()
            with mutant.planted(tree):
                result, log = judge(mutant.room, tree, pathlib.Path(mutant.file).stem)
            yield {
                **asdict(mutant),
                "verdict": {"passed": "survived", "hung": "timeout"}.get(result, "killed"),
                "test": mutation.failed_test(log) if result in ("failed", "error") else None,
                "seconds": round(time.monotonic() - start, 2),
            }


def report(rows: list[dict]) -> str:
    """The share of mutants that were killed or hung, by room, and the survivors."""
    lines = []
    for room in ROOMS:
        own = [row for row in rows if row["room"] == room]
        caught = sum(row["verdict"] != "survived" for row in own)
        lines.append(f"{room}: {caught} of {len(own)} caught")
    for row in rows:
        if row["verdict"] == "survived":
            place = f"{row['file']}:{row['line']} {row['function']}"
            lines.append(f"survived: {place}: {' '.join(row['old'].split())} -> {row['new']}")
    return "\n".join(lines)


def main() -> None:
    """Command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=400, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="another seed chooses others")
    parser.add_argument(
        "--room", choices=ROOMS, action="append", help="only those of the sample in this room"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="a file that keeps the rows; its mutants are not repeated"
    )
    options = parser.parse_args()
    chosen = [m for m in sample(options.sample, options.seed) if m.room in (options.room or ROOMS)]
    out = options.out and options.out.resolve()  # the run changes the directory
    known = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    new = []
    for row in run(chosen, {row["key"] for row in known}):
        new.append(row)
        print(json.dumps(row), flush=True)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a") as file:
                print(json.dumps(row), file=file)
    keys = {mutant.key for mutant in chosen}
    print(report([row for row in known + new if row["key"] in keys]), file=sys.stderr)


if __name__ == "__main__":
    main()
