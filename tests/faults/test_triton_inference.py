"""Faults planted in the Triton linear, embedding, padding and pooling must make the tests fail."""

import pytest

from tests.support import mutation

SUITES = ("triton_linear", "triton_embedding", "triton_packing", "triton_pooling")


def test_sample_of_the_linear_faults_is_caught():
    mutation.assert_caught(mutation.run_in_process("triton_linear", sample=2), share=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_faults_are_caught(suite):
    mutation.assert_caught(mutation.run_in_process(suite), share=0.95)
