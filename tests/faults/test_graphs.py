"""Faults planted in graph replay must make its tests fail."""

import pytest

from tests.faults import graphs
from tests.support import mutation


def test_every_fault_can_be_planted():
    for fault in graphs.FAULTS:
        assert (mutation.ROOT / fault.file).read_text().count(fault.old) == 1, fault.name
    assert len({fault.name for fault in graphs.FAULTS}) == len(graphs.FAULTS)


def test_sample_of_the_faults_is_caught():
    mutation.assert_caught(mutation.run_in_process("graphs", sample=4), share=1.0)


@pytest.mark.slow
def test_faults_are_caught():
    mutation.assert_caught(mutation.run_in_process("graphs"), share=0.95)
