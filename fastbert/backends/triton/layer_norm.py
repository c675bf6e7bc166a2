"""`layer_norm` by the `triton` backend: kernels/layer_norm.py; contract in fastbert/ops/layer_norm.py."""

from __future__ import annotations

from fastbert.backends.triton.device import kernels


def layer_norm_fwd(*args):
    return kernels("layer_norm").layer_norm_fwd(*args)


def layer_norm_bwd(*args):
    return kernels("layer_norm").layer_norm_bwd(*args)
