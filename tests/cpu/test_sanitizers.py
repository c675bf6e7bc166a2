"""csrc/cpu under sanitizers: no read or write out of bounds, no undefined behaviour, no race."""

from __future__ import annotations

import subprocess

import pytest

from fastbert.runtime import loader
from tests.support import cpu_build

pytestmark = pytest.mark.skipif(loader.extension is None, reason="the extension is not built")

# name of tests/cpu/cpp/sanitize_<name>.cpp -> calls of kernels that it makes at least
CALLS = {
    "attention": 501,
    "cross_entropy": 301,
    "embedding": 301,
    "encoder_layer": 432,
    "layer_norm": 501,
    "linear": 1001,
    "packing": 301,
}


def ran(name: str, sanitizers: str) -> str:
    """What a driver prints."""
    driver = cpu_build.sanitized(name, sanitizers)
    run = subprocess.run([str(driver)], text=True, capture_output=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    return run.stdout


@pytest.mark.sweep
@pytest.mark.parametrize("sanitizers", ["address,undefined", pytest.param("thread", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_under_sanitizers(name, sanitizers):
    if loader.extension.best_cpu_isa() == "none" and name not in ("encoder_layer", "packing"):
        pytest.skip("this processor has no AVX2")
    calls = int(ran(name, sanitizers).split()[0])
    # a race needs fewer calls of layer_norm
    assert calls >= (51 if (name, sanitizers) == ("layer_norm", "thread") else CALLS[name])


@pytest.mark.sweep
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_every_task_runs_once_under_sanitizers(sanitizers):
    assert ran("parallel", sanitizers).strip().endswith("shared jobs")
