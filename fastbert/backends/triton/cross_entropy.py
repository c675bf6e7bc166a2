"""`cross_entropy` by the `triton` backend: kernels/cross_entropy.py; contract in ops/cross_entropy.py."""

from __future__ import annotations

from fastbert.backends.triton.device import kernels


def cross_entropy_fwd(*args):
    return kernels("cross_entropy").cross_entropy_fwd(*args)


def cross_entropy_bwd(*args):
    return kernels("cross_entropy").cross_entropy_bwd(*args)
