"""BERT's pooler: a module, and what models apply to first tokens in its place.

Pooling is not in the encoder loop, for three reasons. Task heads and recorded graphs take the packed tokens
and pool them later, after a check of their own or in other memory, so the loop's result would be thrown away.
The pooler's input is a row of the padded output, which the loop does not make. And an accelerated model calls
its pooler as a module, because FSDP gathers the parameters in that module's hooks. So `pool` is a function of
its own, for every model of this package.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastbert.layers.linear import apply_activated
from fastbert.layers.modules import calls_all, changed, part, watched
from fastbert.layers.parts import Part, activation_of
from fastbert.models.families import Family


class Pooler(Part):
    """BERT's pooler, tanh(dense(first token)) (Devlin et al. 2018, sec. 3, "C").

    Args:
        dense: False for a pooler that is the first token.
    """

    def __init__(self, dense: bool = True):
        super().__init__(*(("dense", "activation") if dense else ()))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(batch, seqlen, hidden) -> (batch, hidden)."""
        return super().forward(hidden_states[:, 0])


def pooler_activation(family: Family) -> str:
    """The path of the activation of a family's pooler."""
    return family.stock_model.pooler_activation or "pooler.activation"


def pool(root: nn.Module, family: Family, first: Tensor) -> Tensor:
    """The output of an encoder's pooler for first tokens: (batch, hidden) -> (batch, hidden)."""
    assert family.pooler is not None
    module = root._modules.get("pooler")
    if isinstance(module, Pooler) and not module.steps:
        return first
    return apply_activated(part(root, family.pooler), part(root, pooler_activation(family)), first)


def pooler_gap(root: nn.Module, family: Family) -> bool:
    """Whether the pooler must be called on whole sequences: it is watched, or was replaced."""
    above, _, name = (family.pooler or "").rpartition(".")
    if not above:
        return False
    module: Any = root._modules[above]
    if calls_all() is not None or type(module) is not Pooler or watched(module):
        return True
    return bool(module.steps) and (
        changed(module._modules[name]) is not None
        or activation_of(part(root, pooler_activation(family))) is None
    )
