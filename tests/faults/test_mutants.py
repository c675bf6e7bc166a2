"""The mutants of `make exhaustive`: their list, how they are planted, and the tests that kill them."""

import ast

import pytest

from tests.support import mutants, mutation

TEXT = '''
"""Sums."""

class Sums:
    def most(self, a: int | None, b, *, c=0) -> int | None:
        if a < b and not c:
            self.last = f"{a + b}"
            raise ValueError(f"a: {a - b}")
        return call(a, device="cpu", key=b + 1)
'''


def found(text):
    return [(m.kind, m.old, m.new) for m in mutants.mutants("ops", "sums.py", text)]


def test_every_kind():
    """Nothing in annotations, docstrings and f-strings, and `device` stays."""
    assert found(TEXT) == [
        ("constant", "0", "(1)"),
        ("condition", "a < b and not c", "(not (a < b and (not c)))"),
        ("boolean", "a < b and not c", "(a < b or not c)"),
        ("comparison", "a < b", "(a <= b)"),
        ("operator removed", "not c", "(c)"),
        ("statement removed", 'self.last = f"{a + b}"', "pass"),
        ("statement removed", 'raise ValueError(f"a: {a - b}")', "pass"),
        ("return", 'return call(a, device="cpu", key=b + 1)', "return None"),
        ("argument removed", 'call(a, device="cpu", key=b + 1)', "(call(a, device='cpu'))"),
        ("arithmetic", "b + 1", "(b - 1)"),
        ("constant", "1", "(2)"),
    ]


def test_planted_mutants_parse_and_go(tmp_path):
    """Behind letters of several bytes too."""
    text = "# é\n" + TEXT.replace('"cpu"', '"é"')
    file = tmp_path / "sums.py"
    file.write_text(text)
    for mutant in mutants.mutants("ops", "sums.py", text):
        with mutant.planted(tmp_path):
            assert ast.dump(ast.parse(file.read_text())) != ast.dump(ast.parse(text)), mutant
        assert file.read_text() == text


@pytest.mark.sweep
def test_a_mutant_is_killed_and_the_run_resumes(tmp_path):
    command = ("mutants.py", "--sample", "3", "--room", "masking", "--out", str(tmp_path / "rows.jsonl"))
    (row,) = mutation.rows_of(*command)
    assert row["verdict"] == "killed"
    assert row["test"].startswith("tests/pretraining/test_masking.py")
    assert mutation.rows_of(*command) == []
