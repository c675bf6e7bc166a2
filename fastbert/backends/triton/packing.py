"""`packing` by the `triton` backend: kernels/packing.py; contract in fastbert/ops/packing.py."""

from __future__ import annotations

from fastbert.backends.triton.device import kernels


def packing_fwd(*args):
    return kernels("packing").packing_fwd(*args)


def packing_bwd(*args):
    return kernels("packing").packing_bwd(*args)
