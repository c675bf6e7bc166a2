"""`cpu`: C++ kernels with AVX2, AVX-512 or AVX-512-BF16, through raw pointers. Launchers allocate outputs.

They run on PyTorch's own threads, `torch.get_num_threads()` of them. Environment:
FASTBERT_ISA=avx512_bf16|avx512|avx2_vnni|avx2|none|best, read at import (csrc/cpu/isa.h).
"""

from __future__ import annotations

from fastbert.backends import gather
from fastbert.runtime import loader

DTYPES = gather("cpu")


def available(device_type: str) -> str | None:
    """None where the kernels run on this device type, else why not."""
    if device_type != "cpu":
        return f"runs on cpu, not on {device_type}"
    return loader.cpu_gap()
