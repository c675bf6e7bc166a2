"""The rule that shares the tests between `make test` and `make sweep`, and its table."""

import ast
import itertools
import pathlib

import pytest

from tests.support import tiers

TESTS = pathlib.Path(__file__).resolve().parents[1]


def test_every_name_of_the_table_is_a_test():
    for folder, names in tiers.WHOLE.items():
        there = {
            node.name
            for path in (TESTS / folder).glob("test_*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert {name.partition("[")[0] for name in names.split()} - there == set(), folder


def test_a_bracket_names_the_beginning_of_an_id(monkeypatch):
    monkeypatch.setattr(tiers, "WHOLE", {"ops": "test_a test_b[triton"})
    ids = ("test_a", "test_a[1]", "test_ab", "test_b", "test_b[triton-1]", "test_b[cpu-1]")
    whole = [name for name in ids if tiers.is_whole(f"tests/ops/test_x.py::{name}")]
    assert whole == ["test_a", "test_a[1]", "test_b[triton-1]"]
    assert not tiers.is_whole("tests/cpu/test_x.py::test_a")


def test_keys_are_combined_and_values_covered():
    cases = [{"a": "case of one test", "n": [i]} for i in range(5)]
    product = itertools.product(("triton", "cpu"), ("fp32", "bf16", "fp16"), cases)
    sets = [{"backend": b, "dtype": d, "case": c} for b, d, c in product]
    ids = [str(i) for i in range(len(sets))]
    kept = [sets[int(i)] for i in tiers.cover(ids, sets)]
    assert len({(s["backend"], s["dtype"]) for s in kept}) == 6
    assert {str(s["case"]) for s in kept} == set(map(str, cases))
    assert len(kept) < len(sets) // 2
    assert tiers.cover(ids[::-1], sets[::-1]) == tiers.cover(ids, sets)


@pytest.mark.parametrize("values", [range(1, 131), [(i, 2 * i) for i in range(130)]], ids=("ints", "pairs"))
def test_of_many_numbers_the_ends_and_two_between_are_kept(values):
    sets = [{"length": value} for value in values]
    kept = tiers.cover([str(i) for i in range(130)], sets)
    assert {"0", "129"} < kept
    assert len(kept) == tiers.SOME


def test_of_many_cases_of_a_sampled_parameter_four_are_kept():
    sets = [{"case": f"case {i}", "dtype": dtype} for i in range(20) for dtype in ("fp32", "bf16")]
    ids = [str(i) for i in range(40)]
    kept = [sets[int(i)] for i in tiers.cover(ids, sets, frozenset({"case"}))]
    assert len({s["case"] for s in kept}) == len(kept) == tiers.SOME
    assert {s["dtype"] for s in kept} == {"fp32", "bf16"}
    assert len(tiers.cover(ids, sets)) == 20


def test_no_value_that_is_not_a_number_is_left_out():
    sets = [{"change": {"hidden": i}} for i in range(50)] + [
        {"change": flag} for flag in (True, 1, None, "1")
    ]
    ids = [str(i) for i in range(len(sets))]
    assert tiers.cover(ids, sets) == set(ids)


class Item:
    """What `mark` asks of a test."""

    fixturenames = ()

    def __init__(self, nodeid):
        self.nodeid, self.names = nodeid, []

    def add_marker(self, marker):
        self.names.append(marker.name)

    def get_closest_marker(self, name):
        return name if name in self.names else None


def test_what_waits_for_a_build_is_left_to_the_sweep(monkeypatch):
    monkeypatch.setattr(tiers, "WHOLE", {"ptx": "test_b"})
    items = [
        Item(f"tests/{name}")
        for name in ("ptx/test_x.py::test_a", "ptx/test_x.py::test_b", "ops/test_x.py::test_a")
    ]
    tiers.mark(items)
    assert [item.names for item in items] == [["built", "sweep"], ["sweep"], []]
