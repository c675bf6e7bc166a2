"""csrc/cpu under sanitizers: no read or write out of bounds, no undefined behaviour, no race."""

from __future__ import annotations

import re
import subprocess

import pytest

from fastbert.runtime import loader
from tests.support import cpu_build, sanitized

# the tests of `make test` that run on an extension built with sanitizers
TESTS = {
    "attention": [f"tests/cpu/test_attention{part}.py" for part in ("", "_dropout", "_scores", "_window")],
    "cross_entropy": ["tests/cpu/test_cross_entropy.py"],
    "embedding": ["tests/cpu/test_embedding.py"],
    "encoder_layer": [
        *(f"tests/execution/test_cpu{part}.py" for part in ("", "_bottleneck")),
        "tests/cpu/test_threads.py",
    ],
    "layer_norm": ["tests/cpu/test_layer_norm.py"],
    "linear": [f"tests/cpu/test_linear{part}.py" for part in ("", "_bf16", "_gated", "_int8", "_prepared")],
    "packing": ["tests/cpu/test_packing.py"],
    "rotary": ["tests/cpu/test_rotary.py"],
}


@pytest.mark.sweep
@pytest.mark.parametrize("sanitizers", ["address,undefined", pytest.param("thread", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TESTS)
def test_kernels_under_sanitizers(name, sanitizers):
    if loader.extension.best_cpu_isa() == "none" and name != "packing":
        pytest.skip("this processor has no AVX2")
    assert int(re.search(r"(\d+) passed", sanitized.tested(sanitizers, *TESTS[name]))[1]) >= 10


@pytest.mark.sweep
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_every_task_runs_once_under_sanitizers(sanitizers):
    driver = cpu_build.sanitized_parallel(sanitizers)
    run = subprocess.run([str(driver)], text=True, capture_output=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert run.stdout.strip().endswith("shared jobs")
