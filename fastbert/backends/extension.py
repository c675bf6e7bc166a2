"""What the backends that call `fastbert._C` pass to it: codes of dtypes, addresses, dropout's numbers."""

from __future__ import annotations

import torch

from fastbert.ops.dropout import threshold
from fastbert.runtime.loader import address

# The codes of csrc/dtype.h.
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The dtypes that its kernels store.
STORED = tuple(DTYPE_CODES)

_NO_DROPOUT = (0, 0, 0, 1.0)


def vector(t: torch.Tensor | None) -> tuple[int, int]:
    """(address, dtype code) of a parameter; zeros for None."""
    return (0, 0) if t is None else (address(t), DTYPE_CODES[t.dtype])


def dropout(p: float, seed: torch.Tensor | None, offset: int) -> tuple[int, int, int, float]:
    """(address of the seed, offset, threshold, 1 / (1 - p)): the numbers of csrc/layer_norm.h."""
    return (seed.data_ptr(), offset, threshold(p), 1.0 / (1.0 - p)) if p > 0 else _NO_DROPOUT
