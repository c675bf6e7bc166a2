"""`attention` by the `triton` backend; contract in fastbert/ops/attention.py.

kernels/attention.py and kernels/attention_backward.py launch the kernels. kernels/attention_places.py
launches the kernel that makes their table of places.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastbert.backends.aten import attention as aten
from fastbert.backends.triton.device import STORED, kernels
from fastbert.ops.attention import AttentionInputs
from fastbert.ops.attention_inputs import AttentionNeeds
from fastbert.ops.attention_relative import RelativeScores

DTYPES = STORED


def attention_places(cu_seqlens: Tensor, total: int, max_seqlen: int) -> Tensor:
    return kernels("attention_places").attention_places(cu_seqlens, total, max_seqlen)


def _takes(inputs: AttentionInputs) -> bool:
    """Whether the kernels compute such calls. No BERT has wider heads; the kernels would spill."""
    return inputs.q.shape[-1] <= kernels("attention").MAX_HEADDIM


def reads_relative(relative: RelativeScores, headdim: int, training: bool) -> bool:
    """Whether `attention` may pass these scores of distances to the launchers."""
    if training:
        return headdim <= kernels("attention_backward").MAX_RELATIVE_HEADDIM
    return headdim <= kernels("attention").MAX_HEADDIM


def attention_fwd(
    inputs: AttentionInputs,
    return_probs: bool,
    save_bits: bool,
    places: Tensor | None = None,
    relative: RelativeScores | None = None,
) -> tuple[Tensor, ...]:
    module = kernels("attention")
    if not _takes(inputs):
        return aten.attention_fwd(inputs, return_probs, save_bits, places)
    return module.attention_fwd(inputs, return_probs, save_bits, places, relative)


def attention_bwd(
    dout: Tensor,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    keep_bits: Tensor | None,
    need: AttentionNeeds,
    places: Tensor | None = None,
    relative: RelativeScores | None = None,
    need_scores: Sequence[bool] = (False, False, False),
) -> tuple[Tensor, ...]:
    given = dout, inputs, out, lse, keep_bits, need, places
    if not _takes(inputs):
        return aten.attention_bwd(*given)
    return kernels("attention_backward").attention_bwd(*given, relative, need_scores)
