"""`cuda`: CUDA C++ kernels through raw pointers and the current stream. Each launcher allocates the outputs.

The kernels come with `fastbert._C` where it was built with nvcc. They hold code for compute capability 8.0,
9.0, 10.0 and 12.0, and PTX for the rest.
"""

from __future__ import annotations

from fastbert.backends import gather

DTYPES = gather("cuda")
