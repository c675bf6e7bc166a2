"""A family is one entry of models/families/: no other code asks for a family by its name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fastbert.models.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2] / "fastbert"
ROOMS = ("layers", "checkpoint", "models", "graphs", "sentences", "acceleration", "cli")


def branches(source: str) -> list[str]:
    """Each comparison and each `case` with the name of a family, as source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Compare, ast.MatchValue)):
            names = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
            if names & set(FAMILIES):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_no_code_asks_for_a_family_by_name(room):
    found = {str(path): branches(path.read_text()) for path in sorted((ROOT / room).rglob("*.py"))}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "planted",
    [
        "if config.model_type == 'albert': pass",
        "x = 1 if model_type != 'mpnet' else 2",
        "if name in ('bert', 'ernie'): pass",
        "match name:\n    case 'distilbert': pass",
    ],
)
def test_a_planted_branch_is_found(planted):
    assert branches(planted)
