"""`pooling` by the `triton` backend: kernels/pooling.py; contract in fastbert/ops/pooling.py.

Forward only.
"""

from __future__ import annotations

from fastbert.backends.triton.device import kernels


def pooling_fwd(*args):
    return kernels("pooling").pooling_fwd(*args)
