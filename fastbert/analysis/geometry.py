"""How contextual the vectors of a word are, layer by layer, and how narrow the cone of all vectors is.

    SelfSim(w)    mean cosine of all pairs of a word's contexts: (‖Σu‖² - n) / (n² - n), u unit vectors
    IntraSim(s)   mean cosine of a sentence's words and their mean
    MEV(w)        share of the first direction: σ₁² / Σσ² of a word's vectors, not centred
    anisotropy    the baseline: SelfSim's formula over random tokens; for MEV, the MEV of random tokens

A number minus its baseline shows the effect of context; the baseline alone shows the shape of the space.

Source: Ethayarajh 2019, "How Contextual are Contextualized Word Representations?", sec. 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.analysis.features import hidden_states
from fastbert.analysis.intervals import Interval, estimate
from fastbert.analysis.walk import BATCH_TOKENS, Batch
from fastbert.models.base import PreTrainedModel
from fastbert.runtime import expected
from fastbert.tasks.examples import WORD, Examples

# the default of `geometry`'s `least`
LEAST = 5


@dataclass(frozen=True)
class Geometry:
    """Similarities of vectors, in float64; layer 0 is the embedding output.

    Attributes:
        token_ids: (types,) the tokens that were measured.
        counts: (types,) number of contexts of each.
        self_similarity, explained: (types, layers + 1), SelfSim and MEV.
        intra_similarity: (n, layers + 1), IntraSim; NaN for an example without words.
        anisotropy, explained_baseline: (layers + 1,), the baselines of random tokens.
        seed: seed of the draws.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    self_similarity: np.ndarray
    explained: np.ndarray
    intra_similarity: np.ndarray
    anisotropy: np.ndarray
    explained_baseline: np.ndarray
    seed: int

    def adjusted(self) -> dict[str, np.ndarray]:
        """Means over words and sentences minus their baselines, (layers + 1,) each."""
        return {
            "self similarity": self.self_similarity.mean(0) - self.anisotropy,
            "intra-sentence similarity": np.nanmean(self.intra_similarity, 0) - self.anisotropy,
            "explained variance": self.explained.mean(0) - self.explained_baseline,
        }

    def intervals(self, *, seed: int = 0) -> dict[str, list[Interval]]:
        """`adjusted` with 95% intervals, a list of layers + 1 each.

        Words are resampled, or sentences for the similarity within sentences; the baselines stay fixed.
        """
        with_words = self.intra_similarity[np.isfinite(self.intra_similarity).all(1)]
        of_each = {
            "self similarity": self.self_similarity - self.anisotropy,
            "intra-sentence similarity": with_words - self.anisotropy,
            "explained variance": self.explained - self.explained_baseline,
        }
        return {
            name: [estimate(column, seed=seed) for column in values.T] for name, values in of_each.items()
        }


def words_in(examples: Examples, least: int) -> np.ndarray:
    """The ids of the words with `least` contexts or more, without special tokens and punctuation."""
    types, counts = np.unique(examples.ids[examples.kinds == WORD], return_counts=True)
    return types[counts >= least]


def geometry(
    model: PreTrainedModel,
    examples: Examples,
    *,
    least: int = LEAST,
    max_types: int = 200,
    max_contexts: int = 50,
    random_tokens: int = 1000,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Geometry:
    """The geometry of all layers.

    The vectors of the measured tokens are kept: 4 bytes per token, hidden unit and layer.

    Args:
        model: an encoder, or a model with a head.
        examples: the texts.
        least: fewest contexts of a token that is measured, 2 at least. Special tokens and punctuation are
            left out.
        max_types, max_contexts: most tokens, and most contexts of each; if there are more, a random subset.
        random_tokens: number of tokens for the baselines; all, if there are fewer.
        seed: seed of the draws.
        batch_tokens: most tokens that run at a time.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    expected.integers(1, max_types=max_types)
    expected.integers(2, least=least, max_contexts=max_contexts, random_tokens=random_tokens)
    draw = np.random.default_rng(seed)
    usual = np.flatnonzero(examples.kinds == WORD)
    types = words_in(examples, least)
    if not len(types):
        raise ValueError(f"least: no word is in {least} contexts; expected more text, or a smaller number")
    if len(types) > max_types:
        types = np.sort(draw.choice(types, max_types, replace=False))
    followed = []
    for token in types:
        rows = usual[examples.ids[usual] == token]
        followed.append(rows if len(rows) <= max_contexts else draw.choice(rows, max_contexts, replace=False))
    others = usual if len(usual) <= random_tokens else draw.choice(usual, random_tokens, replace=False)
    rows = np.concatenate([*followed, others])
    vectors, intra = _vectors(model, examples, rows, batch_tokens)
    ends = np.cumsum([len(each) for each in followed])
    each = np.split(vectors, ends)
    return Geometry(
        token_ids=types,
        counts=np.array([len(rows) for rows in followed]),
        self_similarity=np.stack([_self_similarity(v) for v in each[:-1]]),
        explained=np.stack([_explained(v) for v in each[:-1]]),
        intra_similarity=intra,
        anisotropy=_self_similarity(each[-1]),
        explained_baseline=_explained(each[-1]),
        seed=seed,
    )


def _vectors(
    model: PreTrainedModel, examples: Examples, rows: np.ndarray, batch_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """(hidden states of `rows`, (len(rows), layers + 1, hidden); IntraSim of all examples)."""
    intra = np.empty((len(examples), len(model.base_model.layer_list()) + 1))

    def seen(batch: Batch, layer: int, hidden: Tensor) -> None:
        words = batch.on_device(examples.kinds == WORD)
        hidden = hidden.float() if hidden.dtype != torch.float64 else hidden
        intra[batch.numbers, layer] = _intra(batch.sums, hidden, words, batch.sequence)

    unique, where = np.unique(rows, return_inverse=True)
    found = hidden_states(model, examples, unique, dtype=torch.float32, batch_tokens=batch_tokens, seen=seen)
    return found.transpose(0, 1)[torch.from_numpy(where)].numpy(), intra


def _intra(sums: Callable[[Tensor], Tensor], hidden: Tensor, words: Tensor, sequence: Tensor) -> np.ndarray:
    """The mean cosine of each sequence's words and their mean; NaN without words."""
    weights = words.to(hidden.dtype)
    count = sums(weights)
    mean = sums(hidden * weights[:, None]) / count.clamp_min(1)[:, None]
    cosine = F.cosine_similarity(hidden, mean[sequence], dim=-1) * weights
    return torch.where(count > 0, sums(cosine) / count.clamp_min(1), torch.nan).double().cpu().numpy()


def _self_similarity(vectors: np.ndarray) -> np.ndarray:
    """(n, layers, hidden) -> (layers,)."""
    vectors = vectors.astype(np.float64)
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.finfo(float).tiny)
    n = len(unit)
    # a zero vector has cosine 0 with every vector
    return ((unit.sum(0) ** 2).sum(-1) - (unit**2).sum((0, -1))) / (n * n - n)


def _explained(vectors: np.ndarray) -> np.ndarray:
    """(n, layers, hidden) -> (layers,)."""
    sigma = np.linalg.svd(vectors.swapaxes(0, 1).astype(np.float64), compute_uv=False)
    squares = sigma**2
    return squares[:, 0] / np.maximum(squares.sum(-1), np.finfo(float).tiny)
