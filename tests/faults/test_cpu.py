"""Faults planted in the C++ row kernels, the fused layer and the aten backend must make the tests fail."""

import pytest

from fastbert.runtime import native as _native
from tests.support import cpu_build, mutation


@pytest.mark.slow
@pytest.mark.parametrize("op", ("cross_entropy", "embedding", "encoder_layer", "packing"))
def test_faults_are_caught(op):
    cpu_build.compiler()
    if _native.extension is None or _native.extension.best_cpu_isa() == "none":
        pytest.skip("needs the extension and a processor with AVX2")
    mutation.assert_caught(mutation.run_in_process(f"cpu_{op}"), share=0.95)


@pytest.mark.slow
def test_aten_faults_are_caught():
    mutation.assert_caught(mutation.run_in_process("aten"), share=0.95)
