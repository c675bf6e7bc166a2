"""Planted faults must make the tests fail: one per suite, then samples, then all of them.

A suite is a module of this folder with `SUITE`. `make test` plants one fault of each suite that needs no
build, `make sweep` one of each other suite and larger samples, `make exhaustive` every fault of every suite.
"""

import pytest

from fastbert.runtime import loader
from tests.support import cpu_build, cuda_build, mutation

SUITES = mutation.suites()
SAMPLES = {
    "triton_attention": 4,
    "triton_layer_norm": 8,
    "triton_linear": 2,
    "triton_pooling_backward": 1,
}


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


def built_ones_in_the_sweep(name: str):
    return pytest.param(name, marks=pytest.mark.sweep) if SUITES[name].build else name


@pytest.fixture(scope="module")
def servers():
    running = mutation.Servers()
    yield running
    running.close()


@pytest.mark.parametrize("suite", SUITES)
def test_every_fault_can_be_planted(suite):
    """Each text to be replaced occurs once in its file."""
    faults = SUITES[suite].faults
    for fault in faults:
        assert (mutation.ROOT / fault.file).read_text().count(fault.old) == 1, fault.name
        assert fault.old != fault.new, fault.name
    assert len({fault.name for fault in faults}) == len(faults)


@pytest.mark.parametrize("suite", [built_ones_in_the_sweep(name) for name in SUITES])
def test_one_fault_is_caught(suite, servers):
    """By a test that passes without the fault, and that `make test` runs if it runs any of the suite's."""
    needs(suite)
    row = mutation.run_in_process(suite, one=True)[0] if SUITES[suite].build else servers.one(suite)
    assert row["verdict"] == "failed", row["log"]
    assert row["unchanged"] == "passed", row["log"]


@pytest.mark.sweep
@pytest.mark.parametrize("suite", SAMPLES)
def test_sample_of_the_faults_is_caught(suite):
    needs(suite)
    mutation.assert_caught(mutation.run_in_process(suite, sample=SAMPLES[suite]), share=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_faults_are_caught(suite):
    needs(suite)
    mutation.assert_caught(mutation.run_in_process(suite), share=0.95)
