"""`first_attention` by the `triton` backend; contract in fastbert/ops/first_attention.py.

kernels/first_attention.py launches the kernels.
"""

from __future__ import annotations

from torch import Tensor

from fastbert.backends.aten import first_attention as aten
from fastbert.backends.triton.device import kernels
from fastbert.ops.first_attention import FirstAttentionInputs
from fastbert.runtime.table import HALF

DTYPES = HALF
# With so many tokens per query the kernels have less to do than keys, values and `attention`, and with so few
# queries: their products then read the weights and little else (kernels/NOTES.md, "First tokens").
_TOKENS_PER_QUERY = 8
_FEW_QUERIES = 16


def first_attention_fwd(inputs: FirstAttentionInputs) -> Tensor:
    backend = kernels("first_attention") if _fits(inputs.x) else aten
    return backend.first_attention_fwd(inputs)


def first_attention_pays(x: Tensor, batch: int) -> bool:
    """`pays` of fastbert/ops/first_attention.py, for tokens on a GPU."""
    return (x.shape[0] >= _TOKENS_PER_QUERY * batch or batch <= _FEW_QUERIES) and _fits(x)


def _fits(x: Tensor) -> bool:
    """Whether the kernels can hold a token of the width of `x`."""
    module = kernels("first_attention")
    return x.shape[1] <= module.most_width(module.tuning.device_of(x.device).capability)
