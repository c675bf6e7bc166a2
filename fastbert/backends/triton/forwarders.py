"""The `triton` launchers that only call their namesake in kernels/<op>.py; contracts in fastbert/ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert.backends.triton.device import STORED, kernels
from fastbert.ops import packing
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.embedding import EmbeddingInputs, EmbeddingSaved
from fastbert.ops.layer_norm import LayerNormInputs, LayerNormNeeds, LayerNormSaved
from fastbert.ops.linear_int8 import LinearInt8Inputs

DTYPES = {
    "cross_entropy": STORED,
    "embedding": STORED,
    "layer_norm": STORED,
    "linear": STORED,
    "linear_int8": STORED,
    # nothing is computed
    "packing": packing.DTYPES,
    "pooling": STORED,
    "rotary": STORED,
}


def cross_entropy_fwd(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels("cross_entropy").cross_entropy_fwd(logits, labels, ignore_index, label_smoothing)


def cross_entropy_bwd(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    count: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    backward = kernels("cross_entropy").cross_entropy_bwd
    return backward(dloss, logits, labels, lse, count, ignore_index, label_smoothing)


def embedding_fwd(inputs: EmbeddingInputs, save: bool) -> tuple[Tensor, ...]:
    return kernels("embedding").embedding_fwd(inputs.in_floats(), save)


def bad_ids(device: torch.device) -> Any:
    return kernels("bad_ids").bad_ids(device)


def embedding_bwd(
    dy: Tensor, saved: EmbeddingSaved, need_dinputs_embeds: bool, need_dln: bool
) -> tuple[Tensor, ...]:
    return kernels("embedding").embedding_bwd(dy, saved, need_dinputs_embeds, need_dln)


def layer_norm_fwd(inputs: LayerNormInputs, save: bool, rounded: bool = False) -> tuple[Tensor, ...]:
    return kernels("layer_norm").layer_norm_fwd(inputs, save, rounded)


def layer_norm_bwd(
    dy: Tensor,
    saved: LayerNormSaved,
    need: LayerNormNeeds,
    drounded: Tensor | None = None,
    dsum: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return kernels("layer_norm").layer_norm_bwd(dy, saved, need, drounded, dsum)


def linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    save: bool,
    panels: Tensor | None = None,
    gated: str | None = None,
) -> tuple[Tensor, Tensor]:
    if gated is not None:
        return kernels("linear_gated").linear_fwd(x, weight, bias, activation, residual, save, gated)
    return kernels("linear").linear_fwd(x, weight, bias, activation, residual, save, panels)


def linear_bwd(
    dy: Tensor,
    x: TensorOrNone,
    weight: TensorOrNone,
    pre: TensorOrNone,
    activation: str | None,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
    gated: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    args = dy, x, weight, pre, activation, need_dx, need_dweight, need_dbias
    if gated is not None:
        return kernels("linear_gated").linear_bwd(*args, gated)
    return kernels("linear_backward").linear_bwd(*args)


def linear_int8_fwd(inputs: LinearInt8Inputs) -> Tensor:
    return kernels("linear_int8").linear_int8_fwd(inputs)


def linear_int8_panels(weight: Tensor, gated: bool = False) -> Tensor:
    return kernels("linear_int8").channel_sums(weight)


def packing_fwd(x: Tensor, indices: Tensor) -> Tensor:
    return kernels("packing").packing_fwd(x, indices)


def packing_bwd(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    return kernels("packing").packing_bwd(x, indices, rows)


def pooling_fwd(hidden: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    return kernels("pooling").pooling_fwd(hidden, cu_seqlens, mode)


def pooling_bwd(dy: Tensor, hidden: Tensor, y: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    return kernels("pooling").pooling_bwd(dy, hidden, y, cu_seqlens, mode)


def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return kernels("rotary").rotary_fwd(x, cos, sin, positions, interleaved)


def rotary_bwd(dy: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return kernels("rotary").rotary_bwd(dy, cos, sin, positions, interleaved)
