"""Text that every Python installation has, as documents for pre-training: `python python_text.py OUT.jsonl`.

A document is the docstrings of a module: of the standard library, and of numpy, scipy, torch and
transformers where they are installed. The topics of the language reference and the licence are documents too.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("numpy", "scipy", "torch", "transformers")
LEAST_WORDS = 40


def folders() -> Iterator[Path]:
    """Where modules are."""
    yield Path(sysconfig.get_paths()["stdlib"])
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations:
            yield Path(next(iter(found.submodule_search_locations)))


def docstrings(path: Path) -> str:
    """The docstrings of a source file, one paragraph each; "" if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in strings
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n".join(" ".join(text.split()) for text in found if text)


def documents() -> Iterator[str]:
    """Every document, in a fixed order."""
    from pydoc_data.topics import topics

    for folder in folders():
        for path in sorted(folder.rglob("*.py")):
            if "site-packages" not in path.relative_to(folder).parts and "test" not in str(
                path.relative_to(folder)
            ):
                yield docstrings(path)
    for name in sorted(topics):
        yield inspect.cleandoc(topics[name])
    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if licence.is_file():
        yield licence.read_text(encoding="utf-8")


def main() -> None:
    """Write the documents."""
    count = words = 0
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        for text in documents():
            if len(text.split()) >= LEAST_WORDS:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                count, words = count + 1, words + len(text.split())
    print(f"{sys.argv[1]}: {count:,} documents, {words:,} words")


if __name__ == "__main__":
    main()
