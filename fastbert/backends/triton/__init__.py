"""`triton`: the kernels of `kernels/`, on CUDA tensors, and on CPU tensors in Triton's interpreter.

Triton is imported at the first launch, so that `import fastbert` needs neither Triton nor a driver.
"""

from __future__ import annotations

import torch

from fastbert.backends.triton.device import available
from fastbert.backends.triton.layer_norm import layer_norm_bwd, layer_norm_fwd

HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
DTYPES: dict[str, tuple[torch.dtype, ...]] = {"layer_norm": HALF_AND_SINGLE}

__all__ = ["DTYPES", "available", "layer_norm_bwd", "layer_norm_fwd"]
