"""What is done with embeddings, by sentence-transformers' names: similarity, and lower precision."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fastbert.ops import checks
from fastbert.ops.pooling import pooling as pool

Vectors = torch.Tensor | np.ndarray[Any, np.dtype[Any]] | Sequence[Sequence[float]] | Sequence[float]


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def _minus_distance(a: torch.Tensor, b: torch.Tensor, p: float) -> torch.Tensor:
    # A distance computed by products would not be 0 for equal rows
    return -torch.cdist(a, b, p, compute_mode="donot_use_mm_for_euclid_dist")


# Numbers of an embedding, as `quantized` makes them
PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")

# sentence-transformers' names: (n, width), (m, width) -> (n, m)
SIMILARITIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": lambda a, b: _normalized(a) @ _normalized(b).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: _minus_distance(a, b, 2.0),
    "manhattan": lambda a, b: _minus_distance(a, b, 1.0),
}


def matrix(name: str, vectors: Vectors) -> torch.Tensor:
    """(rows, width) of a floating-point dtype; a single vector becomes one row."""
    first = vectors[0] if isinstance(vectors, (list, tuple)) and vectors else None
    try:
        if isinstance(vectors, torch.Tensor):
            rows = vectors
        elif isinstance(first, (torch.Tensor, np.ndarray)):
            rows = torch.stack([torch.as_tensor(row) for row in vectors])
        else:
            rows = torch.tensor(vectors)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: expected rows of numbers, got {reprlib.repr(vectors)}") from error
    if rows.is_complex() or rows.layout != torch.strided:
        kind = rows.dtype if rows.is_complex() else rows.layout
        raise ValueError(f"{name}: {kind}; expected real numbers, dense")
    if rows.dim() not in (1, 2):
        raise ValueError(f"{name}: shape {tuple(rows.shape)}; expected (rows, width) or (width,)")
    return torch.atleast_2d(rows.to(checks.compute_dtype(rows)) if rows.is_floating_point() else rows.float())


def maxsim(
    queries: Sequence[Vectors] | Vectors, documents: Sequence[Vectors] | Vectors, *, mean: bool = False
) -> torch.Tensor:
    """MaxSim of all pairs: over a query's vectors, the sum of the largest dot product with the document's.

    Args:
        queries: for each query (tokens, width); or that of one query.
        documents: likewise. A document without vectors scores 0.
        mean: divide by the number of the query's vectors.

    Returns:
        (queries, documents) float32, or float64 if a vector is.

    Raises:
        ValueError: other shapes, or vectors of different widths.

    Source: Khattab and Zaharia 2020, "ColBERT", sec. 3.3.
    """
    sides = []
    for name, given in (("queries", queries), ("documents", documents)):
        every: list[Any] = [given] if getattr(given, "ndim", 0) == 2 else [*given]
        sides.append([matrix(f"{name}[{i}]", rows) for i, rows in enumerate(every)])
    texts, corpus = sides
    widths = {rows.shape[1] for rows in texts + corpus}
    if len(widths) > 1:
        raise ValueError(f"queries, documents: vectors of {sorted(widths)} numbers; expected one width")
    if not texts or not corpus:
        return torch.zeros((len(texts), len(corpus)))
    dtype = torch.float64 if any(rows.dtype == torch.float64 for rows in texts + corpus) else torch.float32
    flat = torch.cat(corpus).to(dtype)  # (tokens of all documents, width)
    ends = torch.tensor([0, *(len(rows) for rows in corpus)], device=flat.device).cumsum(0)
    scores = []
    for rows in texts:
        best = pool(flat @ rows.to(flat).T, ends, "max")  # (documents, tokens of the query)
        scores.append(best.mean(1) if mean else best.sum(1))
    return torch.stack(scores)


def quantized(rows: np.ndarray, precision: str) -> np.ndarray:
    """Embeddings (n, width) in one of `PRECISIONS`; "float32" keeps them as they are.

    int8 and uint8 divide the range of each dimension over the rows into 256 steps; binary and ubinary hold
    eight signs per number.

    Raises:
        ValueError: int8 or uint8 of one row, which has no ranges.
    """
    if precision == "float32":
        return rows
    if precision.endswith("binary"):
        values = np.packbits(rows > 0, axis=-1)
    else:
        if len(rows) == 1:
            raise ValueError(
                f"precision: {precision!r} takes the range of each dimension over all sentences, of which "
                "there is one; expected two at least, or another precision"
            )
        low = rows.min(axis=0, initial=np.inf)
        steps = (rows.max(axis=0, initial=-np.inf) - low) / 255
        values = np.clip(np.floor((rows - low) / np.where(steps == 0, 1, steps)), 0, 255).astype(np.uint8)
    return values if precision.startswith("u") else (values.astype(np.int16) - 128).astype(np.int8)
