"""The rule that shares the tests between `make test` and `make sweep`, and its table."""

import collections
import itertools
import pathlib

import pytest

from tests.support import tiers

TESTS = pathlib.Path(__file__).resolve().parents[1]


def test_a_marker_leaves_all_sets_of_a_test_to_the_sweep_or_those_that_begin_so():
    def kept(*markers):
        items = [
            Item(f"tests/ops/test_x.py::test_a{name}", *markers) for name in ("[triton-1]", "[cpu-1]", "")
        ]
        return [item.nodeid.partition("::")[2] for item in items if not tiers.is_whole(item)]

    assert kept() == ["test_a[triton-1]", "test_a[cpu-1]", "test_a"]
    assert kept(pytest.mark.sweep) == []
    assert kept(pytest.mark.sweep_of("triton", "x")) == ["test_a[cpu-1]", "test_a"]


@pytest.mark.parametrize("count", [1, 4])
def test_each_file_is_in_one_part_and_the_parts_are_about_as_large(count):
    files = [str(path.relative_to(TESTS.parent)) for path in TESTS.rglob("test_*.py")]
    sizes = collections.Counter(tiers.part_of(path, count) for path in files)
    assert sorted(sizes) == list(range(1, count + 1))
    assert min(sizes.values()) > len(files) / count / 2


@pytest.mark.parametrize("text", ["", "2", "0/4", "5/4", "a/b", "1/4/2", "-1/4"])
def test_a_part_that_says_nothing_is_named(text):
    assert tiers.part("2/4") == (2, 4)
    with pytest.raises(ValueError, match="--part: got"):
        tiers.part(text)


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

    def __init__(self, nodeid, *markers):
        self.nodeid, self.markers = nodeid, [getattr(m, "mark", m) for m in markers]

    def add_marker(self, marker):
        self.markers.append(marker.mark)

    def get_closest_marker(self, name):
        return next((marker for marker in self.markers if marker.name == name), None)


def test_what_waits_for_a_build_is_left_to_the_sweep():
    items = [
        Item("tests/ptx/test_x.py::test_a"),
        Item("tests/ptx/test_x.py::test_b", pytest.mark.sweep),
        Item("tests/ops/test_x.py::test_a"),
    ]
    tiers.mark(items)
    assert [{marker.name for marker in item.markers} for item in items] == [
        {"built", "sweep"},
        {"sweep"},
        set(),
    ]
