"""The launchers of the `triton` backend that only forward to kernels/<op>.py; contracts in fastbert/ops."""

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


def cross_entropy_fwd(*args):
    return kernels("cross_entropy").cross_entropy_fwd(*args)


def cross_entropy_bwd(*args):
    return kernels("cross_entropy").cross_entropy_bwd(*args)


def embedding_fwd(*args):
    return kernels("embedding").embedding_fwd(*args)


def embedding_bwd(*args):
    return kernels("embedding").embedding_bwd(*args)


def layer_norm_fwd(*args):
    return kernels("layer_norm").layer_norm_fwd(*args)


def layer_norm_bwd(*args):
    return kernels("layer_norm").layer_norm_bwd(*args)


def linear_fwd(*args):
    return kernels("linear").linear_fwd(*args)


def linear_bwd(*args):
    return kernels("linear").linear_bwd(*args)


def packing_fwd(*args):
    return kernels("packing").packing_fwd(*args)


def packing_bwd(*args):
    return kernels("packing").packing_bwd(*args)


def pooling_fwd(*args):
    return kernels("pooling").pooling_fwd(*args)


def pooling_bwd(*args):
    return kernels("pooling").pooling_bwd(*args)
