"""No CUDA kernel spills: nvcc compiles csrc/cuda with the build's flags, and ptxas reports spills.

Files named *_hopper.cu are for sm_90a alone: test_hopper_sass.py compiles them, and asks for their spills.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for p in (ROOT / "csrc" / "cuda").glob("*.cu") if not p.stem.endswith("_hopper"))
# with the most values in registers; `make exhaustive` compiles the rest
LARGE = ("attention_backward_dkdv", "attention_backward_dq", "attention_forward_bf16", "linear_passes")

pytestmark = pytest.mark.sweep


def of_setup(name: str) -> list[str]:
    """A list of constants that setup.py assigns; importing setup.py would run it."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return eval(compile(ast.Expression(node.value), "setup.py", "eval"), {"__builtins__": {}})
    raise KeyError(name)


def compiled(source: Path, output: Path, arch: str, *flags: str) -> dict[str, int]:
    """Kernel -> bytes of spill stores and loads, as `ptxas -v` counts them while it compiles to `output`."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    if f"sm_{arch.rstrip('af')}\n" not in known:
        pytest.skip(f"this nvcc does not know sm_{arch}")
    command = [nvcc, *of_setup("NVCC_FLAGS"), "-Xptxas", "-v", *flags, str(source)]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-o", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "Performance Loss" not in result.stderr, result.stderr
    kernels = re.findall(
        r"Function properties for (\w+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr
    )
    assert len(kernels) >= source.read_text().count("__global__")
    return {name: int(stores) + int(loads) for name, stores, loads in kernels}


# `make exhaustive` compiles for the other architectures. All have as many registers per thread.
SWEPT = ("90a",)


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[] if a in SWEPT else pytest.mark.slow) for a in of_setup("CUDA_ARCHS")]
)
@pytest.mark.parametrize(
    "source", [pytest.param(s, marks=[] if s.stem in LARGE else pytest.mark.slow, id=s.stem) for s in SOURCES]
)
def test_no_kernel_spills(source, arch, tmp_path):
    found = compiled(source, tmp_path / "object.o", arch, "-c")
    assert {name: count for name, count in found.items() if count > 0} == {}


def test_a_spill_is_seen(tmp_path):
    """40 values at once do not fit into 24 registers."""
    source = tmp_path / "planted.cu"
    source.write_text(
        "__global__ void kernel(float* x) {\n"
        "    float a[40];\n"
        "    for (int i = 0; i < 40; ++i) a[i] = x[i * threadIdx.x];\n"
        "    for (int i = 0; i < 40; ++i) x[i * threadIdx.x + 7] = a[39 - i] * a[i];\n"
        "}\n"
    )
    arch = of_setup("CUDA_ARCHS")[0]
    (found,) = compiled(source, tmp_path / "object.o", arch, "-c", "-maxrregcount=24").values()
    assert found > 0
