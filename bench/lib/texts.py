"""Real texts that every machine has: this project's example sentences, and prose from Python's docstrings.

Their lengths are mixed. Under one version of Python they are always the same texts.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "sentences.txt"


def sentences(wanted: int) -> list[str]:
    """`wanted` real sentences of mixed length: examples/sentences.txt, then Python's docstrings.

    Raises:
        ValueError: there are fewer.
    """
    texts = EXAMPLES.read_text().splitlines()
    own = list(dict.fromkeys(text.strip() for text in texts if text.strip()))[:wanted]
    missing = wanted - len(own)
    if missing == 0:
        return own
    found = dict.fromkeys(s for text in docstrings() for s in split(text))
    others = [s for s in found if s not in set(own)]
    if missing > len(others):
        raise ValueError(f"sentences: expected at most {len(own) + len(others)}, got {wanted}")
    # evenly from all of the library
    return own + [others[i * len(others) // missing] for i in range(missing)]


def paragraphs(wanted: int) -> list[str]:
    """`wanted` paragraphs of prose from Python's docstrings, evenly from all of the library.

    Raises:
        ValueError: there are fewer.
    """
    cut = (" ".join(part.split()) for text in docstrings() for part in re.split(r"\n\s*\n", text))
    found = list(dict.fromkeys(p for p in cut if ">>>" not in p and len(p.split()) >= 4 and p[-1:] in ".!?"))
    if wanted > len(found):
        raise ValueError(f"paragraphs: expected at most {len(found)}, got {wanted}")
    return [found[i * len(found) // wanted] for i in range(wanted)]


TEXTS = {"sentences": sentences, "paragraphs": paragraphs}


def docstrings() -> Iterator[str]:
    """Of the modules of Python's standard library, their classes and functions, in the files' order."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield ast.get_docstring(node) or ""


def split(text: str) -> list[str]:
    """The sentences in a docstring's paragraphs: a capital letter, some words, a full stop; no code."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        if ">>>" in paragraph:
            continue
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
            words = sentence.split()
            plain = re.fullmatch(r"[A-Z][A-Za-z0-9 ,;:'\"()/`-]+[.!?]", sentence)
            if plain and 4 <= len(words) <= 120:
                found.append(sentence)
    return found
