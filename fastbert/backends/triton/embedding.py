"""`embedding` by the `triton` backend: kernels/embedding.py; contract in fastbert/ops/embedding.py."""

from __future__ import annotations

from fastbert.backends.triton.device import kernels


def embedding_fwd(*args):
    return kernels("embedding").embedding_fwd(*args)


def embedding_bwd(*args):
    return kernels("embedding").embedding_bwd(*args)
