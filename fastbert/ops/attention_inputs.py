"""What attention's launchers take: the arguments of forward, and which gradients are needed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastbert.ops.checks import TensorOrNone


class Window(NamedTuple):
    """The keys a query sees: `left` before it to `right` after it, both inclusive; -1 is no limit."""

    left: int = -1
    right: int = -1


EVERYWHERE, CAUSAL = Window(), Window(right=0)


class AttentionInputs(NamedTuple):
    """The arguments of forward that backward needs too.

    `bias` is 4-D, sizes of 1 broadcast. `k` and `v` may have fewer heads than `q`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    softmax_scale: float
    window: Window
    bias: TensorOrNone
    gate: TensorOrNone
    dropout_p: float
    seed: TensorOrNone
    offset: int

    @property
    def causal(self) -> bool:
        """Whether a query sees all keys up to its own position, and no other."""
        return self.window == CAUSAL


class AttentionNeeds(NamedTuple):
    """Which gradients backward computes."""

    dq: bool
    dk: bool
    dv: bool
    dbias: bool
    dgate: bool
