"""Cases of `packing`: pack and unpack of one batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastbert.ops.packing import pack, pack_ref, unpack, unpack_ref
from fastbert.testing.error_rule import Case, Outputs, draws


@dataclass(frozen=True, repr=False)
class PackingCase(Case):
    """Sequences of `lengths` tokens, right-padded to the longest, with dimensions `inner` per token."""

    lengths: tuple[int, ...]
    inner: tuple[int, ...] = (32,)

    op = "packing"
    grad_inputs = ("padded", "packed")
    output_names = ("pack", "unpack")

    @property
    def seqlen(self) -> int:
        return max(1, *self.lengths)

    @property
    def shape(self) -> str:
        inner = "x".join(map(str, self.inner)) or "scalar"
        return f"{len(self.lengths)}x{self.seqlen}x{inner}-total{sum(self.lengths)}"

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        mask = torch.arange(self.seqlen)[None, :] < torch.tensor(self.lengths)[:, None]
        padded = randn(len(self.lengths), self.seqlen, *self.inner)
        padded[~mask.to(device)] = torch.nan if dtype.is_floating_point else 1
        packed = randn(sum(self.lengths), *self.inner)
        return {"padded": padded, "packed": packed, "indices": mask.flatten().nonzero().flatten().to(device)}

    def call(self, padded: Tensor, packed: Tensor, indices: Tensor) -> Outputs:
        return pack(padded, indices), unpack(packed, indices, len(self.lengths), self.seqlen)

    def eager(self, padded: Tensor, packed: Tensor, indices: Tensor) -> Outputs:
        grid = len(self.lengths), self.seqlen
        out = packed.new_zeros(math.prod(grid), *self.inner).index_put((indices,), packed)
        return padded.flatten(0, 1)[indices], out.unflatten(0, grid)

    def oracle(self, padded: Tensor, packed: Tensor, indices: Tensor) -> Outputs:
        return pack_ref(padded, indices), unpack_ref(packed, indices, len(self.lengths), self.seqlen)

    def flops(self) -> int:
        return 0

    def bytes(self, dtype: torch.dtype) -> int:
        """Both directions: the kept rows, read and written, their indices, and the zeros of the pads."""
        row, kept = math.prod(self.inner) * dtype.itemsize, sum(self.lengths)
        return kept * (3 * row + 16) + len(self.lengths) * self.seqlen * row


SMALL = [PackingCase((3, 5, 1)), PackingCase((2, 0, 4), (3, 7))]
ON_GPU = [PackingCase((33, 1, 20), (768,))]  # the blocks of base and large
CASES = [
    *SMALL,
    PackingCase((1,), ()),
    PackingCase((0, 0), (8,)),  # no token kept
    PackingCase((64, 17, 33, 50), (128,)),
    PackingCase((16, 16), (12, 64)),  # nothing padded
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [PackingCase(lengths, (768,))]
