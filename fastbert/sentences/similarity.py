"""How similar embeddings are, by sentence-transformers' names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastbert.ops import checks

if TYPE_CHECKING:
    Vectors = torch.Tensor | np.ndarray[Any, np.dtype[Any]] | Sequence[Sequence[float]] | Sequence[float]


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def _minus_distance(a: torch.Tensor, b: torch.Tensor, p: float) -> torch.Tensor:
    # computed by products, the distance of equal rows would not be 0
    return -torch.cdist(a, b, p, compute_mode="donot_use_mm_for_euclid_dist")


# sentence-transformers' names: (n, width), (m, width) -> (n, m)
SIMILARITIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": lambda a, b: _normalized(a) @ _normalized(b).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: _minus_distance(a, b, 2.0),
    "manhattan": lambda a, b: _minus_distance(a, b, 1.0),
}


def matrix(name: str, vectors: Vectors) -> torch.Tensor:
    """(rows, width) of a floating-point dtype; a single vector becomes one row."""
    if isinstance(vectors, (list, tuple)) and vectors and isinstance(vectors[0], (torch.Tensor, np.ndarray)):
        vectors = torch.stack([torch.as_tensor(row) for row in vectors])
    elif not isinstance(vectors, torch.Tensor):
        vectors = torch.tensor(vectors)
    if vectors.dim() not in (1, 2):
        raise ValueError(f"{name}: shape {tuple(vectors.shape)}; expected (rows, width) or (width,)")
    vectors = vectors.to(checks.compute_dtype(vectors)) if vectors.is_floating_point() else vectors.float()
    return torch.atleast_2d(vectors)
