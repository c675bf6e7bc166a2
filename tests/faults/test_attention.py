"""Faults planted in the attention kernels must make the tests fail."""

import pytest

from fastbert.runtime import native as _native
from tests.support import cpu_build, mutation


@pytest.mark.slow
def test_cpu_faults_are_caught():
    cpu_build.compiler()
    if _native.extension is None or _native.extension.best_cpu_isa() == "none":
        pytest.skip("needs the extension and a processor with AVX2")
    mutation.assert_caught(mutation.run_in_process("cpu_attention"), share=0.95)


@pytest.mark.slow
def test_cpu_bf16_faults_are_caught():
    cpu_build.compiler()
    if _native.extension is None or _native.extension.best_cpu_isa() != "avx512_bf16":
        pytest.skip("needs the extension and a processor with AVX-512-BF16")
    mutation.assert_caught(mutation.run_in_process("cpu_attention_bf16"), share=0.95)
