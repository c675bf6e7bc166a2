"""Planted faults must make the tests fail: one per suite, then all of them.

A suite is a module of this folder with `SUITE`. `make sweep` plants one fault of each that needs no build,
`make exhaustive` one of each and all.
"""

import pytest

from fastbert.runtime import loader
from tests.support import cpu_build, cuda_build, mutation

SUITES = mutation.suites()


def needs(name: str) -> None:
    """Skip the test where this machine cannot build or run what the suite plants its faults in."""
    if SUITES[name].build:
        cpu_build.compiler()
    if SUITES[name].build == mutation.EMULATED:
        cuda_build.nvcc()
    if name.endswith("_bf16") and getattr(loader.extension, "best_cpu_isa", str)() != "avx512_bf16":
        pytest.skip("needs the extension and a processor with AVX-512-BF16")
    if name.startswith("cpu_") and loader.cpu_gap() is not None:
        pytest.skip(loader.cpu_gap())


@pytest.mark.parametrize("suite", SUITES)
def test_every_fault_can_be_planted(suite):
    """Each text to be replaced occurs once in its file."""
    faults = SUITES[suite].faults
    for fault in faults:
        assert (mutation.ROOT / fault.file).read_text().count(fault.old) == 1, fault.name
        assert fault.old != fault.new, fault.name
    assert len({fault.name for fault in faults}) == len(faults)


def assert_one_caught(*names: str) -> None:
    """Of each suite, by a test whose markers `quick` allows."""
    rows = mutation.rows_of("mutation.py", "--one", *names)
    assert [row["suite"] for row in rows] == [*names]
    assert [row for row in rows if row["verdict"] != "failed"] == []


@pytest.mark.sweep
def test_one_fault_of_each_suite_without_a_build_is_caught():
    assert_one_caught(*(name for name in SUITES if not SUITES[name].build))


@pytest.mark.slow
@pytest.mark.parametrize("suite", [name for name in SUITES if SUITES[name].build])
def test_one_fault_of_a_built_suite_is_caught(suite):
    needs(suite)
    assert_one_caught(suite)


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_faults_are_caught(suite):
    needs(suite)
    mutation.assert_caught(mutation.rows_of("mutation.py", suite), share=0.95)
