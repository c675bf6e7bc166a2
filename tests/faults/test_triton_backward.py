"""Faults planted in the Triton kernels of training must make their tests fail."""

import pytest

from tests.support import mutation

SUITES = (
    "triton_cross_entropy",
    "triton_embedding_backward",
    "triton_linear_backward",
    "triton_pooling_backward",
)


def test_sample_of_the_faults_is_caught():
    mutation.assert_caught(mutation.run_in_process("triton_pooling_backward", sample=1), share=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_faults_are_caught(suite):
    mutation.assert_caught(mutation.run_in_process(suite), share=0.95)
