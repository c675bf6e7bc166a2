"""ALiBi: each head subtracts a multiple of the distance from its scores, in place of positions (jina-v2).

    S_ij -= slope_h |i - j|

The slopes of n = 2^k heads are 2^(-8 h / n), h = 1 … n. Other numbers of heads have those of the next lower
power of two, then every other slope of the next higher one. Products are computed in float32, as in jina's
code, also for float64 models.

Source: Press et al. 2021, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
Extrapolation"; Günther et al. 2023, "Jina Embeddings 2" (both directions).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastbert.layers.encoder_layer import EncoderLayer
from fastbert.layers.modules import part
from fastbert.layers.parts import GatedPart, Part
from fastbert.layers.patterns import Heads
from fastbert.ops import derivatives
from fastbert.ops.attention_relative import RelativeScores


def slopes(nheads: int) -> list[float]:
    """The slope of each head."""
    lower = 1 << (nheads.bit_length() - 1)
    return (_of_power(lower) + _of_power(2 * lower)[::2])[:nheads]


def _of_power(nheads: int) -> list[float]:
    start = 2.0 ** (-8.0 / nheads)
    return [start**h for h in range(1, nheads + 1)]


def _slopes_on(nheads: int, device: torch.device) -> Tensor:
    return torch.tensor(slopes(nheads), dtype=torch.float32).to(device)


# A recorded graph cannot copy them from the host
_kept_slopes = functools.cache(_slopes_on)


def scores(nheads: int, seqlen: int, device: torch.device, positions: Tensor | None = None) -> RelativeScores:
    """What all layers add to the scores of sequences of up to `seqlen` tokens.

    Args:
        nheads: the number of heads of the model.
        seqlen: more than the largest distance.
        device: where the tokens are.
        positions: (batch, S) int64, the position of each token; None means 0 to S - 1.
    """
    distance = torch.arange(1 - max(seqlen, 1), max(seqlen, 1), dtype=torch.int32, device=device).abs()
    # What a trace makes belongs to the trace
    if torch.compiler.is_compiling() or derivatives.plain_torch() is not None:
        per_token = _slopes_on(nheads, device)
    else:
        # Autograd cannot save tensors that were made in inference mode
        with torch.inference_mode(False):
            per_token = _kept_slopes(nheads, device)
    bias = -per_token[:, None] * torch.arange(max(seqlen, 1), dtype=torch.float32, device=device)
    return RelativeScores(distance, bias=bias, positions=positions)


class AlibiLayer(EncoderLayer):
    """One layer of BERT's whose feed-forward block is gated, and which adds the batch's scores of distances.

    Args:
        config: the model's `EncoderConfig`.
        heads, kept, inner: see `EncoderLayer`.
    """

    def __init__(
        self,
        config: Any,
        heads: Heads | None = None,
        kept: tuple[int, ...] | None = None,
        inner: int | None = None,
    ):
        super().__init__(config, heads, kept, inner, gated="first")

    def _container(self, path: str) -> Part:
        """See `EncoderLayer`: the feed-forward block is one module, with its dropout and norm."""
        names, stock = self.form.names, self.form.stock
        if path != stock.containers[-1]:
            return super()._container(path)
        steps = names.intermediate, stock.activation, stock.dropouts[3], names.output, names.output_norm
        *leaves, norm = (str(step).rpartition(".")[2] for step in steps)
        return GatedPart(*leaves, norm=norm)

    def feed_by_modules(self, hidden: Tensor) -> Tensor:
        """See `PackedLayer`."""
        return part(self, self.form.stock.containers[-1])(hidden)
