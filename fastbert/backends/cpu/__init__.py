"""`cpu`: C++ kernels with AVX2 or AVX-512, through raw pointers. Allocates, and hands over.

They run on PyTorch's own threads, `torch.get_num_threads()` of them. Environment:
FASTBERT_ISA=avx512|avx2|none, read at import.
"""

from __future__ import annotations

import torch

from fastbert import _native
from fastbert.backends.cpu.attention import attention_bwd, attention_fwd
from fastbert.backends.cpu.layer_norm import layer_norm_bwd, layer_norm_fwd

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES: dict[str, tuple[torch.dtype, ...]] = dict.fromkeys(("attention", "layer_norm"), _FLOATS)

__all__ = ["DTYPES", "attention_bwd", "attention_fwd", "available", "layer_norm_bwd", "layer_norm_fwd"]


def available(device_type: str) -> str | None:
    """None where the kernels run on this device type, else why not."""
    if device_type != "cpu":
        return f"runs on cpu, not on {device_type}"
    return _native.cpu_gap()
