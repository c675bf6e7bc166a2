"""Try every row of every door: `python -m tests.support.hostile.doors [DOOR ...]`.

It prints each row before it tries it. The faults that it found are its exit status.
"""

from __future__ import annotations

import resource
import sys

import torch

from tests.support.hostile.custom_ops import try_ops
from tests.support.hostile.exports import try_native
from tests.support.hostile.fences import Tried
from tests.support.hostile.public_ops import try_public

DOORS = {
    "native": try_native,
    "ops": try_ops,
    "public": try_public,
    "compiled": lambda tried: try_public(tried, compiled=True),
}

if __name__ == "__main__":
    # a length that got through must not take the machine's memory
    resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
    torch.manual_seed(0)
    tried = Tried()
    for door in sys.argv[1:] or DOORS:
        DOORS[door](tried)
    sys.exit("\n".join(tried.faults[:50]) or 0)
