"""The attention probabilities of layers that may have global tokens, as transformers returns them."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.layers.batch import PackedBatch
from fastbert.layers.form import LayerForm
from fastbert.ops.attention_grid import from_grid, to_grid


def bands(
    form: LayerForm,
    probs: Tensor,
    flags: Tensor | None,
    columns: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The probabilities of each token's band, (batch, S, nheads, 2 · most + window + 1), for its heads.

    They are those of a token's query for the global tokens, `most` in the sequence with most of them, for the
    tokens of its window that are not global, and those of each global token's query for this token. All are
    0 where there is no token. The first two are 0 for a global token.

    Args:
        form: the layer's.
        probs: (batch, nheads, S, S), those of all pairs of tokens.
        flags: (batch, S) bool, which tokens are global; None for none.
        columns: see `PackedBatch`.
        lengths: (batch,), of the sequences; None if all have S tokens.

    Raises:
        ValueError: the call is compiled.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "output_attentions: expected False under torch.compile, got True; the width of a band depends on "
            "the number of global tokens"
        )
    assert form.window is not None
    size, _, seqlen, _ = probs.shape
    place = torch.arange(seqlen, device=probs.device)
    flags = torch.zeros(size, seqlen, dtype=torch.bool, device=probs.device) if flags is None else flags
    columns = place.expand(size, seqlen) if columns is None else columns
    if lengths is not None:
        columns = columns.masked_fill(place >= lengths[:, None], 1 << 40)
    wanted = columns[:, :, None] + torch.arange(-form.window[0], form.window[1] + 1, device=probs.device)
    at = torch.searchsorted(columns.contiguous(), wanted.flatten(1)).clamp_max(max(seqlen - 1, 0))
    there = (columns.gather(1, at) == wanted.flatten(1)) & ~flags.gather(1, at)
    at, there = (t.view_as(wanted)[:, None] for t in (at, there))

    most = int(flags.sum(1).max()) if flags.numel() else 0
    slots = flags.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    real = flags.gather(1, slots)[:, None]
    own = probs.take_along_dim(slots[:, None, :, None], 2) * real[..., None]
    seen = torch.cat(
        (
            probs.take_along_dim(slots[:, None, None], 3) * real[:, :, None],
            probs.take_along_dim(at, 3) * there,
        ),
        -1,
    )
    return torch.cat((seen * ~flags[:, None, :, None], own.transpose(2, 3)), -1).transpose(1, 2)


def packed_bands(form: LayerForm, probs: Tensor, batch: PackedBatch, total: int) -> Tensor:
    """`bands` of packed tokens, (total, nheads, 2 · most + window + 1)."""
    ends, flags = batch.cu_seqlens, None
    if batch.globals is not None:
        flags = to_grid(batch.globals.flags, ends, batch.max_seqlen)
    return from_grid(bands(form, probs, flags, batch.columns, ends.diff()), ends, total)
