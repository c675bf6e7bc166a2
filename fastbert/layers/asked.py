"""What a caller asks of one layer, besides its output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastbert.layers.elimination import Kept
from fastbert.layers.form import SITES
from fastbert.layers.taps import Taps


class Asked(NamedTuple):
    """What a caller asks of one layer.

    Attributes:
        gate: (nheads,) factor of each head's output, or None.
        site: the number of the first of the layer's `SITES` dropout call sites.
        first_only: whether to compute only the rows of `packing.starts`, the first token of each sequence,
            by `first_token.layer`. The row of an empty sequence has no meaning. There must be a token, and
            `probabilities` must be False.
        probabilities: whether to return attention's probabilities too.
        taps: sees what the layer computes inside, or None.
        arrivals: keeps the counters of `ops.linear_norm` from layer to layer; None makes them where needed.
        kept: how many tokens of each sequence the layer keeps after attention; None for all. Then neither
            `probabilities` nor `taps` nor `first_only` may be asked for, and the layer returns the rows of
            the kept tokens in place of probabilities.
        rounded: the layer's input in the dtype of its first product, from the layer before; None if the
            product casts it.
        rounds: takes the output in the dtype of the next layer's first product; None if it is not wanted.
        half: whether autocast rounds what products read to half precision, so that the norm before a product
            rounds it in its own pass.
    """

    gate: Tensor | None = None
    site: int = 1
    first_only: bool = False
    probabilities: bool = False
    taps: Taps | None = None
    arrivals: list[Tensor] | None = None
    kept: Kept | None = None
    rounded: Tensor | None = None
    rounds: list[Tensor] | None = None
    half: bool = False

    @property
    def number(self) -> int:
        """The layer's number, from 0 in execution order."""
        return (self.site - 1) // SITES


NOTHING_MORE = Asked()
