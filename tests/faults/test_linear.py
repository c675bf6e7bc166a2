"""Faults planted in the linear kernels and their launchers must make the tests fail."""

import pytest

from fastbert.runtime import native as _native
from tests.faults import aten, cpu_linear, cpu_linear_int8, cpu_linear_python
from tests.support import cpu_build, mutation


def needs_kernels():
    if _native.cpu_gap() is not None:
        pytest.skip(_native.cpu_gap())


@pytest.mark.parametrize(
    "suite", (aten, cpu_linear, cpu_linear_int8, cpu_linear_python), ids=lambda suite: suite.__name__
)
def test_every_fault_can_be_planted(suite):
    """Each text to be replaced stands once in its file: the slow runs below are not run at every change."""
    for fault in suite.FAULTS:
        assert (mutation.ROOT / fault.file).read_text().count(fault.old) == 1, fault.name
        assert fault.old != fault.new, fault.name
    assert len({fault.name for fault in suite.FAULTS}) == len(suite.FAULTS)


def test_sample_of_the_launchers_faults_is_caught():
    needs_kernels()
    mutation.assert_caught(mutation.run_in_process("cpu_linear_python", sample=5), share=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("suite", ("cpu_linear_python", "cpu_linear_int8", "cpu_linear"))
def test_cpu_faults_are_caught(suite):
    needs_kernels()
    cpu_build.compiler()
    mutation.assert_caught(mutation.run_in_process(suite), share=0.95)
