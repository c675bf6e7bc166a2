"""The `triton` launchers that only call their namesake in kernels/<op>.py; contracts in fastbert/ops."""

from __future__ import annotations

from fastbert.backends.triton.device import STORED, kernels
from fastbert.ops import packing

DTYPES = {
    "cross_entropy": STORED,
    "embedding": STORED,
    "layer_norm": STORED,
    "linear": STORED,
    # nothing is computed
    "packing": packing.DTYPES,
    "pooling": STORED,
}


def cross_entropy_fwd(logits, labels, ignore_index, label_smoothing):
    return kernels("cross_entropy").cross_entropy_fwd(logits, labels, ignore_index, label_smoothing)


def cross_entropy_bwd(dloss, logits, labels, lse, count, ignore_index, label_smoothing):
    backward = kernels("cross_entropy").cross_entropy_bwd
    return backward(dloss, logits, labels, lse, count, ignore_index, label_smoothing)


def embedding_fwd(inputs, save):
    return kernels("embedding").embedding_fwd(inputs, save)


def bad_ids(device):
    return kernels("bad_ids").bad_ids(device)


def embedding_bwd(dy, saved, need_dinputs_embeds, need_dln):
    return kernels("embedding").embedding_bwd(dy, saved, need_dinputs_embeds, need_dln)


def layer_norm_fwd(inputs, save, rounded=False):
    return kernels("layer_norm").layer_norm_fwd(inputs, save, rounded)


def layer_norm_bwd(dy, saved, need, drounded=None):
    return kernels("layer_norm").layer_norm_bwd(dy, saved, need, drounded)


def linear_fwd(x, weight, bias, activation, residual, save, panels=None):
    return kernels("linear").linear_fwd(x, weight, bias, activation, residual, save, panels)


def linear_bwd(dy, x, weight, pre, activation, need_dx, need_dweight, need_dbias):
    backward = kernels("linear_backward").linear_bwd
    return backward(dy, x, weight, pre, activation, need_dx, need_dweight, need_dbias)


def packing_fwd(x, indices):
    return kernels("packing").packing_fwd(x, indices)


def packing_bwd(x, indices, rows):
    return kernels("packing").packing_bwd(x, indices, rows)


def pooling_fwd(hidden, cu_seqlens, mode):
    return kernels("pooling").pooling_fwd(hidden, cu_seqlens, mode)


def pooling_bwd(dy, hidden, y, cu_seqlens, mode):
    return kernels("pooling").pooling_bwd(dy, hidden, y, cu_seqlens, mode)
