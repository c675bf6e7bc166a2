"""`triton`: the kernels of `kernels/`, on CUDA tensors, and on CPU tensors in Triton's interpreter.

Triton is imported at the first launch, so that `import fastbert` needs neither Triton nor a driver.
"""

from __future__ import annotations

from fastbert.backends import gather

DTYPES = gather("triton")
