"""`linear` by the `triton` backend: kernels/linear.py; contract in fastbert/ops/linear.py."""

from __future__ import annotations

from fastbert.backends.triton.device import kernels


def linear_fwd(*args):
    return kernels("linear").linear_fwd(*args)


def linear_bwd(*args):
    return kernels("linear").linear_bwd(*args)
