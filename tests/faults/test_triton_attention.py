"""Faults planted in the Triton attention, forward and backward, must make its tests fail."""

import pytest

from tests.support import mutation


def test_sample_of_the_faults_is_caught():
    mutation.assert_caught(mutation.run_in_process("triton_attention", sample=4), share=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["triton_attention", "triton_attention_backward"])
def test_faults_are_caught(suite):
    mutation.assert_caught(mutation.run_in_process(suite), share=0.95)
