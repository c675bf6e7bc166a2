"""The launchers of a backend, called with the flat arguments that `torch.ops.fastbert` takes.

A launcher takes the arguments that travel together as one NamedTuple (fastbert/ops). Tests name and change
them one by one, so they call these functions.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

from torch import Tensor

from fastbert.ops.attention import AttentionInputs
from fastbert.ops.embedding import EmbeddingInputs, EmbeddingSaved
from fastbert.ops.layer_norm import LayerNormInputs, LayerNormNeeds, LayerNormSaved


def flat(args: tuple) -> tuple:
    """`args` of a launcher, with the elements of its NamedTuples in their place."""
    return tuple(value for arg in args for value in (flat(arg) if isinstance(arg, tuple) else (arg,)))


def attention_fwd(backend: ModuleType | SimpleNamespace, *args) -> tuple[Tensor, ...]:
    return backend.attention_fwd(AttentionInputs(*args[:12]), *args[12:])


def layer_norm_fwd(backend: ModuleType | SimpleNamespace, *args) -> tuple[Tensor, ...]:
    return backend.layer_norm_fwd(LayerNormInputs(*args[:-1]), args[-1])


def layer_norm_bwd(
    backend: ModuleType | SimpleNamespace, dy: Tensor, *args, dsum: Tensor | None = None
) -> tuple[Tensor, ...]:
    more = () if dsum is None else (None, dsum)
    return backend.layer_norm_bwd(dy, LayerNormSaved(*args[:-4]), LayerNormNeeds(*args[-4:]), *more)


def embedding_fwd(backend: ModuleType | SimpleNamespace, *args) -> tuple[Tensor, ...]:
    """Without `padding_idx`, which no forward reads."""
    return backend.embedding_fwd(EmbeddingInputs(*args[:9], -1, *args[9:-1]), args[-1])


def embedding_bwd(backend: ModuleType | SimpleNamespace, dy: Tensor, *args) -> tuple[Tensor, ...]:
    return backend.embedding_bwd(dy, EmbeddingSaved(*args[:-2]), *args[-2:])
