"""`attention` by the `triton` backend; contract in fastbert/ops/attention.py.

kernels/attention.py and kernels/attention_backward.py launch the kernels. kernels/attention_places.py
launches the kernel that makes their table of places.
"""

from __future__ import annotations

from torch import Tensor

from fastbert.backends.aten import attention as aten
from fastbert.backends.triton.device import STORED, kernels
from fastbert.ops.attention import AttentionInputs, AttentionNeeds

DTYPES = STORED


def attention_places(cu_seqlens: Tensor, total: int, max_seqlen: int) -> Tensor:
    return kernels("attention_places").attention_places(cu_seqlens, total, max_seqlen)


def _takes(inputs: AttentionInputs) -> bool:
    """Whether the kernels compute such calls. No BERT has wider heads; the kernels would spill."""
    return inputs.q.shape[-1] <= kernels("attention").MAX_HEADDIM


def attention_fwd(
    inputs: AttentionInputs, return_probs: bool, save_bits: bool, places: Tensor | None = None
) -> tuple[Tensor, ...]:
    module = kernels("attention")
    backend = module if _takes(inputs) else aten
    return backend.attention_fwd(inputs, return_probs, save_bits, places)


def attention_bwd(
    dout: Tensor,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    keep_bits: Tensor | None,
    need: AttentionNeeds,
    places: Tensor | None = None,
) -> tuple[Tensor, ...]:
    backend = kernels("attention_backward") if _takes(inputs) else aten
    return backend.attention_bwd(dout, inputs, out, lse, keep_bits, need, places)
