"""Pooling: one vector per sequence from the packed hidden states of its tokens.

The op itself is `fastbert.ops.pooling`; this is its public name.
"""

from __future__ import annotations

from fastbert.ops.pooling import MODES as POOLINGS
from fastbert.ops.pooling import pooling as pool

__all__ = ["POOLINGS", "pool"]
