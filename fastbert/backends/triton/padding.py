"""`padding` by the `triton` backend: kernels/padding.py; contract in fastbert/ops/padding.py."""

from __future__ import annotations

from fastbert.backends.triton.device import kernels


def pack_fwd(*args):
    return kernels("padding").pack_fwd(*args)


def unpack_fwd(*args):
    return kernels("padding").unpack_fwd(*args)
