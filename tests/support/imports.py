"""Which module imports which, read from the syntax of a folder's files without running them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Arrow(NamedTuple):
    """One module imports another."""

    file: str  # relative to the root of the repository
    line: int
    source: str  # dotted names of modules
    target: str
    by_name: bool  # through importlib.import_module

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.source} imports {self.target}"


def modules(root: Path, folder: str) -> dict[str, Path]:
    """Dotted name -> file of every module under `root/folder`. A folder that is a link is followed."""
    top = root / folder
    files = [*top.rglob("*.py")]
    files += [f for link in top.iterdir() if link.is_symlink() and link.is_dir() for f in link.glob("*.py")]
    found = {}
    for file in sorted(set(files)):
        parts = file.relative_to(root).with_suffix("").parts
        if "__pycache__" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def arrows(root: Path, folder: str) -> list[Arrow]:
    """All imports by the modules under `root/folder`, in functions and below `if TYPE_CHECKING:` too.

    `from package import name` counts as an import of `package.name` where there is a module of that name, and
    of the package otherwise. `import_module(f"package.{x}")` counts as an import of the package.
    """
    known = modules(root, folder)
    found = []
    for name, file in known.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        nodes, constants = _imports(file.read_text())
        for node in nodes:
            for target in _targets(node, package, known, constants):
                where = file.relative_to(root).as_posix()
                found.append(Arrow(where, node.lineno, name, target, isinstance(node, ast.Call)))
    return found


@functools.cache
def _imports(source: str) -> tuple[list[ast.stmt | ast.Call], dict[str, str]]:
    """(the nodes of a module that import, its constants)."""
    tree = ast.parse(source)
    nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) or _loads(n)]
    return nodes, _constants(tree)


def _loads(node: ast.AST) -> bool:
    """Whether it is a call of `importlib.import_module` or `__import__`."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    return name in ("import_module", "__import__")


def _constants(tree: ast.Module) -> dict[str, str]:
    """The module's own names for literal strings."""
    return {
        statement.targets[0].id: statement.value.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    }


def _targets(node: ast.AST, package: str, known: dict[str, Path], constants: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *filter(None, [node.module])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in known or inner == "fastbert._C" else base
    else:
        argument = node.args[0]
        if isinstance(argument, ast.Name) and argument.id in constants:
            argument = ast.Constant(constants[argument.id])
        if isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
            argument = ast.Constant(argument.values[0].value.rstrip("."))
        # an argument that is no literal is named by its source, in angle brackets
        readable = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        yield argument.value if readable else f"<{ast.unparse(argument)}>"


def circles(all_arrows: list[Arrow]) -> list[list[str]]:
    """Groups of modules that reach each other: the strongly connected ones (Tarjan 1972), sorted by name."""
    targets: dict[str, set[str]] = {}
    for arrow in all_arrows:
        if arrow.source != arrow.target:
            targets.setdefault(arrow.source, set()).add(arrow.target)
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in sorted(targets.get(name, ())):
            if target not in order:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in sorted(targets):
        if name not in order:
            visit(name)
    return sorted(groups)
