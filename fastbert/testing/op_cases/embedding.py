"""Cases of `embedding`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops import integer_table
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.dropout import keep_mask_2d
from fastbert.testing.error_rule import Case, Outputs, draws
from fastbert.testing.op_cases.layer_norm import steepness

OFFSET = 5


@dataclass(frozen=True, repr=False)
class EmbeddingCase(Case):
    """`tokens` ids of a `vocab` x `hidden` table, with the op's options; `bits` of integers, 0 for floats."""

    tokens: int
    vocab: int
    hidden: int
    position: bool = True
    segment: bool = True
    inputs_embeds: bool = False
    padding_idx: int | None = None
    dropout_p: float = 0.0
    bits: int = 0

    op = "embedding"
    shape = "{0.tokens}x{0.vocab}x{0.hidden}"
    marks = (
        "position=no_position segment=no_segment inputs_embeds padding_idx=padding dropout_p=dropout "
        "bits={}bits"
    )
    options = ("padding_idx", "dropout_p")

    @property
    def grad_inputs(self) -> tuple[str, ...]:
        """Names of the inputs to differentiate."""
        floats = "position", "segment", "inputs_embeds", "ln_weight", "ln_bias"
        return floats if self.bits else ("word", *floats)

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        g, randn = draws(seed, dtype, device)

        def ids(high):
            return torch.randint(high, (self.tokens,), generator=g).to(device)

        positions = max(1, self.tokens // 2)
        word: Any = None if self.inputs_embeds else randn(self.vocab, self.hidden)
        integers = {}
        if self.bits:
            word, scale = integer_table.rounded(word, self.bits)
            word = word if self.bits == 8 else integer_table.packed(word)
            integers = {"word_scale": scale}
        return {
            **integers,
            "input_ids": None if self.inputs_embeds else ids(self.vocab),
            "word": word,
            "position_ids": torch.arange(self.tokens, device=device) % positions if self.position else None,
            "position": randn(positions, self.hidden) if self.position else None,
            "token_type_ids": ids(2) if self.segment else None,
            "segment": randn(2, self.hidden) if self.segment else None,
            "inputs_embeds": randn(self.tokens, self.hidden) if self.inputs_embeds else None,
            "ln_weight": 1 + 0.1 * randn(self.hidden),
            "ln_bias": 0.1 * randn(self.hidden),
            "seed": torch.tensor([77 + seed], device=device) if self.dropout_p else None,
        }

    def call(self, **inputs: Any) -> Outputs:
        return super().call(**inputs, offset=OFFSET)

    def _keep(self, seed: TensorOrNone) -> TensorOrNone:
        shape = self.tokens, self.hidden
        return keep_mask_2d(seed, OFFSET, *shape, self.dropout_p) if self.dropout_p else None

    def _sum(self, word, inputs_embeds, position, segment, **more):
        if self.bits:
            dtype = more["ln_weight"].dtype
            integers = word if self.bits == 8 else integer_table.unpacked(word, self.hidden)
            word = integers.to(dtype) * more["word_scale"].to(dtype)[:, None]
        z = inputs_embeds if word is None else F.embedding(more["input_ids"], word, self.padding_idx)
        if segment is not None:
            z = z + F.embedding(more["token_type_ids"], segment)
        if position is not None:
            z = z + F.embedding(more["position_ids"], position)
        return z

    def eager(self, ln_weight: Tensor, ln_bias: Tensor, seed: TensorOrNone, **tables: Any) -> Outputs:
        z = self._sum(**tables, ln_weight=ln_weight)
        y = F.layer_norm(z, (self.hidden,), ln_weight, ln_bias, 1e-12)
        return y * self._keep(seed) / (1 - self.dropout_p) if self.dropout_p else y

    def oracle(self, seed: TensorOrNone, **inputs: Any) -> Outputs:
        return super().oracle(**inputs, keep_mask=self._keep(seed))

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        eps = torch.finfo(inputs["ln_weight"].dtype).eps
        times = {"dln_bias": 0, "y": 1, "dln_weight": 1}
        eps *= steepness(self._sum(**inputs)) ** times.get(name, 2)
        if name in ("y", "dinputs_embeds"):
            return 4 * eps
        return 4 * eps * max(1.0, self.tokens**0.5)  # sums over tokens

    def flops(self) -> int:
        return (8 + self.position + self.segment) * self.tokens * self.hidden

    def bytes(self, dtype: torch.dtype) -> int:
        reads = 1 + self.position + self.segment
        ids = 8 * self.tokens * (reads - self.inputs_embeds)
        rows = ((reads + 1 - bool(self.bits)) * self.tokens + 2) * self.hidden * dtype.itemsize
        return ids + rows + self.tokens * (self.hidden * self.bits // 8 + 4 * bool(self.bits))


SMALL = [EmbeddingCase(6, 11, 96, padding_idx=0), EmbeddingCase(5, 11, 100, position=False, dropout_p=0.25)]
ON_GPU = [
    EmbeddingCase(40, 500, 768, padding_idx=3, dropout_p=0.1),  # the blocks of base and large
    EmbeddingCase(600, 3, 64),  # tables whose gradients are sums in several steps
]
CASES = [
    *SMALL,
    EmbeddingCase(1, 1, 1, position=False, segment=False),  # variance 0
    EmbeddingCase(7, 11, 1, dropout_p=0.25),
    EmbeddingCase(64, 211, 2),  # narrow rows: see those of layer_norm
    EmbeddingCase(64, 211, 3, inputs_embeds=True),
    EmbeddingCase(64, 211, 384),  # MiniLM's width, ids repeated
    EmbeddingCase(40, 500, 768, padding_idx=3, dropout_p=0.1),  # BERT-base in training
    EmbeddingCase(33, 7, 128, inputs_embeds=True),
    EmbeddingCase(33, 7, 31, position=False, inputs_embeds=True, dropout_p=0.1),
    EmbeddingCase(64, 211, 384, bits=8),
    EmbeddingCase(40, 211, 101, position=False, dropout_p=0.25, bits=8),
    EmbeddingCase(64, 211, 768, bits=4),
    EmbeddingCase(33, 50, 31, segment=False, bits=4),  # the last byte of a row holds one integer
    EmbeddingCase(257, 5, 64, segment=False),  # every row of the table many times over
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [EmbeddingCase(sum(lengths), 30522, 768, padding_idx=0)]


def training(lengths: tuple[int, ...]) -> list[Case]:
    return [EmbeddingCase(sum(lengths), 30522, 768, padding_idx=0, dropout_p=0.1)]
