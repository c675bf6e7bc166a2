"""The rule that shares the tests between `make test` and `make sweep`: what falls out of both never runs."""

import collections
import itertools
import pathlib

import pytest

from tests.support import tiers
from tests.support.hf_models import FAMILY_NAMES

TESTS = pathlib.Path(__file__).resolve().parents[1]


class Item:
    """What the rule asks of a test."""

    fixturenames = ()

    def __init__(self, nodeid, *markers):
        self.nodeid, self.markers = nodeid, [getattr(m, "mark", m) for m in markers]

    def add_marker(self, marker):
        self.markers.append(marker.mark)

    def get_closest_marker(self, name):
        return next((marker for marker in self.markers if marker.name == name), None)


def test_markers_leave_tests_to_the_sweep():
    def kept(*markers):
        names = "[triton-1]", "[cpu-1]", ""
        return [n for n in names if not tiers.is_whole(Item(f"tests/ops/test_x.py::test_a{n}", *markers))]

    assert kept() == ["[triton-1]", "[cpu-1]", ""]
    assert kept(pytest.mark.sweep) == []
    assert kept(pytest.mark.sweep_of("triton", "x")) == ["[cpu-1]", ""]
    assert f'"-m", "{tiers.USUAL}"' in (TESTS.parent / "pyproject.toml").read_text()
    items = [Item(f"tests/{folder}/test_x.py::test_a") for folder in ("ptx", "ops")]
    tiers.mark(items)
    assert [{marker.name for marker in item.markers} for item in items] == [{"built", "sweep"}, set()]


def test_each_file_is_in_one_part_and_the_parts_are_about_as_large():
    assert tiers.part("2/4") == (2, 4)
    files = [str(path.relative_to(TESTS.parent)) for path in TESTS.rglob("test_*.py")]
    sizes = collections.Counter(tiers.part_of(path, 4) for path in files)
    assert sorted(sizes) == [1, 2, 3, 4]
    assert min(sizes.values()) > len(files) / 8


def kept_of(sets, *sampled):
    ids = [str(i) for i in range(len(sets))]
    return [sets[int(i)] for i in tiers.cover(ids, sets, frozenset(sampled))]


def test_keys_are_combined_and_values_covered():
    product = itertools.product(("triton", "cpu"), ("fp32", "bf16", "fp16"), range(5))
    sets = [{"backend": b, "dtype": d, "case": {"n": [n]}} for b, d, n in product]
    kept = kept_of(sets)
    assert len({(s["backend"], s["dtype"]) for s in kept}) == 6
    assert {s["case"]["n"][0] for s in kept} == {*range(5)}
    assert len(kept) < len(sets) // 2


def test_of_a_long_list_of_numbers_or_of_a_sampled_parameter_few_are_kept():
    for values in (range(1, 131), [(i, 2 * i) for i in range(130)]):
        kept = [s["length"] for s in kept_of([{"length": value} for value in values])]
        assert len(kept) == tiers.SOME
        assert {values[0], values[-1]} < {*kept}
    sets = [{"case": f"case {i}", "dtype": dtype} for i in range(20) for dtype in ("fp32", "bf16")]
    assert len(kept_of(sets, "case")) == tiers.SOME
    assert len(kept_of(sets)) == 20


def test_of_all_families_four_are_kept_and_each_test_has_its_own():
    def kept(test):
        ids = [f"{test}[{family}-{dtype}]" for family, dtype in itertools.product(FAMILY_NAMES, "ab")]
        sets = [{"name": name, "dtype": dtype} for name, dtype in itertools.product(FAMILY_NAMES, "ab")]
        return {name.partition("[")[2].rpartition("-")[0] for name in tiers.cover(ids, sets)}

    found = [kept(f"test_{i}") for i in range(40)]
    assert {len(names) for names in found} == {tiers.SOME}
    assert set().union(*found) == {*FAMILY_NAMES}
