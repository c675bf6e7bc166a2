"""Faults planted in the layer_norm kernels must make the tests fail."""

import pytest

from tests.support import mutation


def test_sample_of_the_triton_faults_is_caught():
    mutation.assert_caught(mutation.run_in_process("triton_layer_norm", sample=8), share=1.0)


@pytest.mark.slow
def test_triton_faults_are_caught():
    mutation.assert_caught(mutation.run_in_process("triton_layer_norm"), share=0.95)
