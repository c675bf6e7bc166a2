"""The table of word embeddings in 8 or 4 bits, and the decoder that reads it.

Only the words' table is quantised: those of positions and segments have few rows. Its rows stay integers in
memory too, and are turned into floats as they are looked up (`fastbert.ops.embedding`).

A masked-LM decoder that is tied to the table multiplies by these integers, as an 8-bit linear layer does
(`fastbert.ops.linear_int8`): a row's scale is the output channel's. There is no copy in floating point. For
the decoder a table of 4 bits is unpacked to int8, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.integers import IntegerWeight
from fastbert.layers.modules import attach, is_hooked, is_plain, part, watched
from fastbert.ops import integer_table

BITS = {"int8": 8, "int4": 4}


class QuantizedEmbedding(IntegerWeight):
    """An embedding table of integers, for inference; see `fastbert.ops.integer_table` for their rounding.

    Args:
        num_embeddings, embedding_dim, padding_idx: as nn.Embedding.
        bits: 8 or 4.
        dtype: the dtype of the rows that a call returns.
        device: the buffers' device.

    Attributes:
        weight: (num_embeddings, embedding_dim) int8, or (num_embeddings, ⌈embedding_dim / 2⌉) uint8.
        scale: (num_embeddings,) float32.
        dtype: follows `.to(dtype)`, `.half()` and their kin.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        bits: int = 8,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        kind = torch.int8 if bits == 8 else torch.uint8
        columns = integer_table.columns(embedding_dim, bits)
        super().__init__(torch.zeros(num_embeddings, columns, dtype=kind, device=device))
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.dtype = dtype

    @property
    def bits(self) -> int:
        """8 or 4."""
        return integer_table.bits_of(self.weight)

    @classmethod
    @torch.no_grad()
    def from_table(cls, table: nn.Embedding, bits: int, name: str = "table") -> QuantizedEmbedding:
        """The quantised copy of a table, which is not changed; on the meta device without values.

        Args:
            bits: 8 or 4.
            name: the table's name in errors.

        Raises:
            ValueError: a weight is NaN or infinite in float32.
        """
        weight, sizes = table.weight, (table.num_embeddings, table.embedding_dim, table.padding_idx)
        made = cls(*sizes, bits=bits, dtype=weight.dtype, device=weight.device)
        if not weight.is_meta:
            integers, scale = integer_table.rounded(weight, bits)
            # One weight that is not finite makes its row's scale so
            if not torch.isfinite(scale).all():
                raise ValueError(f"{name}.weight: holds NaN or infinity; expected finite weights")
            made.weight.copy_(integers if bits == 8 else integer_table.packed(integers))
            made.scale.copy_(scale)
        return made

    def forward(self, input_ids: Tensor, *_: Any) -> Tensor:
        """Ids of any shape -> (…, embedding_dim) in `dtype`; nothing else is read."""
        return integer_table.looked_up(self.weight, self.scale, input_ids, self.embedding_dim, self.dtype)

    def dequantized(self) -> Tensor:
        """The table in floating point, (num_embeddings, embedding_dim) float32."""
        return self.integers().float() * self.scale[:, None]

    def integers(self) -> Tensor:
        """int8 (num_embeddings, embedding_dim): `weight` itself, if that is int8."""
        return self.weight if self.bits == 8 else integer_table.unpacked(self.weight, self.embedding_dim)

    def gap(self) -> str | None:
        """See `Embeddings`, in whose place some families have the table."""
        return "the table of words has hooks or another forward" if watched(self) else None

    def dropout_rate(self) -> float:
        """See `Embeddings`; nothing is dropped."""
        return 0.0

    def extra_repr(self) -> str:
        """Shown between the parentheses of `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}"

    def _apply(self, fn, recurse=True):
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.scale.device)).dtype
        return super()._apply(fn, recurse)


class TiedDecoder(nn.Module):
    """The bias of a decoder whose weight is a quantised table; `quantized.table_product` multiplies.

    Args:
        bias: a parameter, or None.
    """

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("bias", bias)
        self.training = False


def table_of(model: Any) -> Any:
    """The module that looks up the words of a model of this package."""
    return part(model.base_model, model.family.word_table)


def replacement(model: Any, embeddings: str) -> QuantizedEmbedding | None:
    """What replaces the table of words; None if it has these bits already.

    Args:
        model: a model of this package.
        embeddings: "int8" or "int4".

    Raises:
        TypeError: the table is no plain one.
        ValueError: it has other bits already, or a weight is not finite; or a decoder reads more than it.
    """
    table, bits = table_of(model), BITS[embeddings]
    name = next(name for name, module in model.named_modules() if module is table)
    if isinstance(table, QuantizedEmbedding):
        if table.bits != bits:
            raise ValueError(
                f"embeddings: {name} has {table.bits} bits already, got {embeddings!r}; load the "
                "floating-point checkpoint and quantise that"
            )
        return None
    # A family's own class, and not one that an adapter has put there
    own = isinstance(table, nn.Embedding) and type(table).__module__.startswith(("torch.", "fastbert."))
    # A factored table is multiplied after the lookup
    if (
        not own
        or model.config.word_embedding_rank is not None
        or is_hooked(table)
        or "forward" in vars(table)
        or _unusual(table)
    ):
        raise TypeError(
            f"{name}: expected a plain nn.Embedding without hooks or options, got {type(table).__name__}"
        )
    for path in _readers(model, name):
        if not is_plain(reader := part(model, path), nn.Linear):
            raise TypeError(f"{path}: expected a plain nn.Linear without hooks, got {type(reader).__name__}")
    if _readers(model, name) and model.config.lm_head.more is not None:
        raise ValueError(
            f"embeddings: the decoder of {type(model).__name__} reads {name} and another matrix at once; "
            "quantise the encoder without this head"
        )
    return QuantizedEmbedding.from_table(table, bits, name)


def _unusual(table: nn.Embedding) -> bool:
    return table.max_norm is not None or table.scale_grad_by_freq or table.sparse


def _readers(model: Any, name: str) -> list[str]:
    """Paths of the linear layers tied to the table `name`."""
    ends = f"{name}.weight"
    return [target.rpartition(".")[0] for target, source in model.tied_weights().items() if source == ends]


def put(model: Any, table: QuantizedEmbedding) -> None:
    """Put the quantised table into a model, and tie its decoder to it."""
    name = next(name for name, module in model.named_modules() if module is table_of(model))
    readers = _readers(model, name)
    attach(model, name, table)
    for path in readers:
        attach(model, path, TiedDecoder(part(model, path).bias))
