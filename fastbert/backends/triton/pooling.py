"""`pooling` by the `triton` backend: kernels/pooling.py; contract in fastbert/ops/pooling.py."""

from __future__ import annotations

from fastbert.backends.triton.device import kernels


def pooling_fwd(*args):
    return kernels("pooling").pooling_fwd(*args)


def pooling_bwd(*args):
    return kernels("pooling").pooling_bwd(*args)
