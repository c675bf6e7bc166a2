"""What attention's launchers get: the arguments of forward, and the gradients that are wanted."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionInputs(NamedTuple):
    """The arguments of forward that backward needs too; `bias` is 4-D, sizes of 1 broadcast."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    softmax_scale: float
    causal: bool
    bias: Tensor | None
    gate: Tensor | None
    dropout_p: float
    seed: Tensor | None
    offset: int


class AttentionNeeds(NamedTuple):
    """Which gradients backward computes."""

    dq: bool
    dk: bool
    dv: bool
    dbias: bool
    dgate: bool
