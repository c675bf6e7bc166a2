"""What attention's launchers take: the arguments of forward, and which gradients are needed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastbert.ops.checks import TensorOrNone


class AttentionInputs(NamedTuple):
    """The arguments of forward that backward needs too; `bias` is 4-D, sizes of 1 broadcast."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    softmax_scale: float
    causal: bool
    bias: TensorOrNone
    gate: TensorOrNone
    dropout_p: float
    seed: TensorOrNone
    offset: int


class AttentionNeeds(NamedTuple):
    """Which gradients backward computes."""

    dq: bool
    dk: bool
    dv: bool
    dbias: bool
    dgate: bool
