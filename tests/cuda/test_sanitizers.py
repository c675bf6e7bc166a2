"""The CUDA kernels, compiled for the host, under g++'s sanitizers for addresses and undefined behaviour."""

import subprocess

import pytest

from fastbert.runtime import loader
from tests.support import cpu_build

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize(
    ("driver", "checks"), (("cuda_attention", 50), ("cuda_attention_backward", 40), ("cuda_linear", 100))
)
def test_kernels_under_sanitizers(driver, checks):
    if loader.extension is None or loader.extension.best_cpu_isa() == "none":
        pytest.skip(str(loader.missing or "fp16 is converted by F16C here, which this processor lacks"))
    program = cpu_build.sanitized(driver, "address,undefined", cuda=True)
    run = subprocess.run([str(program)], text=True, capture_output=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout.split()[0]) > checks, run.stdout
