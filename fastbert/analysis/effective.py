"""Effective attention: the part of the attention probabilities that reaches the output.

A head's output is A T, T = V W_O (n × hidden) with values V (n × d) of n tokens. The part of a row of A in
the left null space of T is lost. For n > d that space has n - d dimensions at least, so different A have the
same output. Effective attention is the rest, A⊥ = A - Proj A, and A⊥ T = A T.

With a thin decomposition T = U Σ Rᵀ of rank r, A⊥ = A U Uᵀ. W = A U is one call of the attention op with U in
place of the values. It has all of A⊥ in n × r numbers, since A⊥ = W Uᵀ. If the head's W_O has full row rank,
U follows from V alone.

    mass on groups      A⊥ G = W (Uᵀ G)
    correlation         Pearson's r of all entries of A and A⊥, with t = ΣA⊥:
                        (‖W‖² - t/n) / √((ΣA² - 1)(‖W‖² - t²/n²))

Source: Brunner et al. 2020, "On Identifiability in Transformers", sec. 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastbert.analysis.identities import Probabilities
from fastbert.analysis.intervals import Interval, estimate, ratio_interval
from fastbert.analysis.walk import BATCH_TOKENS, Batch, at_rest, batches, encode
from fastbert.layers.batch import PackedBatch
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.modules import part
from fastbert.layers.taps import Taps
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import KINDS, Examples


@dataclass(frozen=True)
class EffectiveAttention:
    """Numbers of each example, layer and head; float32 (n, layers, nheads) unless noted.

    Attributes:
        correlation: Pearson's r between attention and effective attention; NaN where one of them does not
            vary, as with one token.
        rank: int32, rank of the values.
        to_kind: (kinds, n, layers, nheads), the mean effective attention of a row to the tokens of each kind
            of `examples.KINDS`. Its sum may differ from 1.
        lengths: (n,) number of tokens.
    """

    correlation: np.ndarray
    rank: np.ndarray
    to_kind: np.ndarray
    lengths: np.ndarray

    def known(self) -> tuple[np.ndarray, np.ndarray]:
        """(the correlations with 0 for NaN, whether each is no NaN), both (n, layers, nheads)."""
        known = np.isfinite(self.correlation)
        return np.where(known, self.correlation, 0.0), known

    def means(self) -> np.ndarray:
        """(layers, nheads): the mean of each head's correlations without NaN; NaN if all are NaN."""
        filled, known = self.known()
        counts = known.sum(0)
        return np.where(counts > 0, filled.sum(0) / np.maximum(counts, 1), np.nan)

    def by_length(self) -> tuple[np.ndarray, np.ndarray]:
        """(lengths of examples with a correlation, its mean over all heads and examples of each length)."""
        filled, known = (each.sum((1, 2)) for each in self.known())
        lengths = np.unique(self.lengths[known > 0])
        means = [filled[self.lengths == n].sum() / known[self.lengths == n].sum() for n in lengths]
        return lengths, np.array(means)

    def intervals(self, *, seed: int = 0) -> dict[str, Interval]:
        """Means over all heads with their 95% intervals over examples: "correlation", "known", "to …".

        "correlation" is the mean without NaN, over the examples that have a correlation; NaN if none has.
        "known" is the share of correlations that are no NaN. "to …" are the shares of effective attention to
        each kind of token.
        """
        filled, known = self.known()
        sums, counts = filled.sum((1, 2)), known.sum((1, 2))
        some = counts > 0
        correlation = Interval(float("nan"), None, None, 0, seed)
        if some.any():
            correlation = ratio_interval(sums[some], counts[some], seed=seed)
        found = {"correlation": correlation, "known": estimate(known, seed=seed)}
        kinds = zip(KINDS, self.to_kind, strict=True)
        return found | {f"to {kind}": estimate(values, seed=seed) for kind, values in kinds}


def row_space(v: Tensor, output: Tensor | None = None) -> Tensor:
    """An orthonormal basis U of the space that the values of one sequence span, per head.

    Args:
        v: (n, nheads, d) values.
        output: (nheads, d, hidden), W_O of each head; None: all have full row rank.

    Returns:
        (n, nheads, d); columns from the rank on are 0.
    """
    columns = v.transpose(0, 1)  # (nheads, n, d)
    if output is not None:
        columns = columns @ output
    u, sigma, _ = torch.linalg.svd(columns, full_matrices=False)
    eps = torch.finfo(v.dtype).eps
    kept = sigma > max(columns.shape[-2:]) * eps * sigma[:, :1]
    width = v.shape[-1]
    u = (u * kept[:, None, :])[..., :width]
    return torch.nn.functional.pad(u, (0, width - u.shape[-1])).transpose(0, 1)


def effective_attention(
    model: PreTrainedModel, examples: Examples, *, batch_tokens: int = BATCH_TOKENS
) -> EffectiveAttention:
    """The effective attention of all heads over all examples.

    Args:
        model: an encoder, or a model with a head.
        examples: the texts.
        batch_tokens: most tokens that run at a time.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    shape = len(examples), len(model.base_model.layer_list()), model.config.num_attention_heads
    found = EffectiveAttention(
        np.zeros(shape, np.float32),
        np.zeros(shape, np.int32),
        np.zeros((len(KINDS), *shape), np.float32),
        examples.lengths,
    )
    with at_rest(model), torch.inference_mode():
        outputs = [_output(layer) for layer in model.base_model.layer_list()]
        for batch in batches(model, examples, batch_tokens):
            encode(model, batch, _Effective(examples, batch, outputs, found))
    return found


def _output(layer: PackedLayer) -> Tensor | None:
    """W_O of each head, (nheads, d, hidden), if a head's lacks full row rank; else None."""
    weight = part(layer, layer.form.names.attention_output).weight
    heads = weight.t().reshape(layer.form.nheads, layer.form.head_dim, -1).double()
    ranks = torch.linalg.matrix_rank(heads)
    return None if (ranks == layer.form.head_dim).all() else heads


class _Effective(Taps):
    """Fills the arrays with what a batch's heads do."""

    def __init__(
        self, examples: Examples, batch: Batch, outputs: list[Tensor | None], found: EffectiveAttention
    ) -> None:
        self.batch, self.outputs, self.found = batch, outputs, found
        kinds = batch.on_device(examples.kinds)
        self.groups = torch.stack([kinds == kind for kind in range(len(KINDS))], 1)

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sequences: PackedBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Taps`."""
        batch, found = self.batch, self.found
        # the decomposition of values that are not finite fails without naming an example
        batch.check(v)
        probabilities = Probabilities.of(q, k, sequences)
        values = v.detach().to(probabilities.q.dtype)
        output = self.outputs[layer]
        output = None if output is None else output.to(values.dtype)
        lengths = batch.lengths.tolist()
        basis = torch.cat([row_space(each, output) for each in values.split(lengths)])
        kept = probabilities.of_values(basis)  # W, (total, nheads, d)
        ones = batch.sums(basis)  # Uᵀ 1, (batch, nheads, d)
        n = batch.lengths.to(kept.dtype)[:, None]
        squares = batch.sums(kept.square().sum(-1))
        total = batch.sums((kept * ones[batch.sequence]).sum(-1))
        of_all = batch.sums(probabilities.collision())
        top = squares - total / n
        below = (of_all - 1).clamp_min(0) * (squares - total.square() / n.square()).clamp_min(0)
        floor = 64 * torch.finfo(kept.dtype).eps
        correlation = torch.where(below > floor, top / below.clamp_min(floor).sqrt(), torch.nan)
        found.correlation[batch.numbers, layer] = correlation.cpu().numpy()
        rank = batch.sums(basis.square()).sum(-1).round()
        found.rank[batch.numbers, layer] = rank.int().cpu().numpy()
        for kind in range(len(KINDS)):
            in_kind = batch.sums(basis * self.groups[:, kind, None, None])  # Uᵀ G
            masses = batch.means((kept * in_kind[batch.sequence]).sum(-1))
            found.to_kind[kind, batch.numbers, layer] = masses.cpu().numpy()
        return q, k, v, sequences.bias
