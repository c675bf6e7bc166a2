"""Faults planted in the layer_norm kernels must make the tests fail."""

import pytest

from tests import mutation


def assert_caught(rows, share):
    unchanged, *faults = rows
    assert unchanged["fault"] is None
    assert unchanged["verdict"] == "passed", unchanged["log"]
    assert [r for r in faults if r["verdict"] == "error"] == []
    survived = [r["fault"] for r in faults if not r["caught"]]
    assert 1 - len(survived) / len(faults) >= share, survived


def test_sample_of_the_triton_faults_is_caught():
    assert_caught(mutation.run_in_process("triton_layer_norm", sample=8), share=1.0)


@pytest.mark.slow
def test_triton_faults_are_caught():
    assert_caught(mutation.run_in_process("triton_layer_norm"), share=0.95)
