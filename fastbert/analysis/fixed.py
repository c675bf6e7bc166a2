"""What a model loses when heads attend by fixed patterns, which depend on places alone, never on words.

`fastbert.layers.patterns` defines the patterns and computes them without a map; `fastbert.models.fixed_heads`
has models that are trained with patterns.

Source: Raganato, Scherrer and Tiedemann 2020, "Fixed Encoder Self-Attention Patterns in Transformer-Based
Machine Translation", sec. 3.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastbert.analysis.attention import (
    DIAGONAL,
    THRESHOLDS,
    VERTICAL,
    AttentionStatistics,
    Thresholds,
    attention_statistics,
)
from fastbert.analysis.intervals import Interval, mean_interval, paired_p
from fastbert.analysis.measures import Measure
from fastbert.analysis.walk import BATCH_TOKENS, at_rest, encode
from fastbert.layers.batch import PackedBatch
from fastbert.layers.patterns import (
    BACKWARD,
    CURRENT,
    FIRST_TOKEN,
    LEARNED,
    NAMES,
    NEXT,
    PREVIOUS,
    SEPARATORS,
    Rows,
    attend,
)
from fastbert.layers.taps import Taps
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import FIRST, SEPARATOR, Examples


class FixedPatterns(Taps):
    """Lets heads attend by fixed patterns, in every call inside `fastbert.models.encoder.tapped`.

    It also works in training: gradients flow to the values, and a fixed head's queries and keys have none.
    Attention dropout, a head mask and an attention bias do not affect a fixed head. One call runs at a time.

    Args:
        assignment: (layers, nheads), indices into `NAMES`.
        separators: (total,) bool, which tokens of the packed batch are separators; only SEPARATORS needs it.
    """

    def __init__(self, assignment: np.ndarray, separators: Tensor | None = None) -> None:
        self.assignment = np.asarray(assignment)
        self.separators = separators
        self._values: Tensor | None = None

    @functools.cached_property
    def _heads(self) -> list[dict[int, list[int]]]:
        """Per layer: pattern -> its heads."""
        return [
            {int(pattern): np.flatnonzero(row == pattern).tolist() for pattern in np.unique(row[row > 0])}
            for row in self.assignment
        ]

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sequences: PackedBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Taps`."""
        check_assignment(self.assignment, (max(len(self.assignment), layer + 1), q.shape[1]))
        ahead = [p for p in self._heads[layer] if p not in BACKWARD]
        if sequences.causal and ahead:
            raise ValueError(
                f"assignment: {NAMES[ahead[0]]!r}, but in a causal model no token attends to a later token"
            )
        self._values = v
        return q, k, v, sequences.bias

    def context(self, layer: int, context: Tensor, sequences: PackedBatch) -> Tensor:
        """See `Taps`."""
        values, self._values = self._values, None
        assert values is not None  # from `qkv`, which runs first
        rows = Rows.of(sequences.cu_seqlens, values.shape[0], sequences.max_seqlen)
        for pattern, heads in self._heads[layer].items():
            at = torch.tensor(heads, device=context.device)
            found = attend(pattern, values.index_select(1, at), rows, self.separators)
            context = context.index_copy(1, at, found.to(context.dtype))
        return context


def check_assignment(assignment: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The assignment as int8, after a check that it is (layers, nheads) indices into `NAMES`.

    Raises:
        ValueError: naming what came and what was expected.
    """
    found = np.asarray(assignment)
    if found.shape != shape or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(
            f"assignment: expected integers of shape {shape}, got {found.dtype} of shape {found.shape}"
        )
    bad = np.argwhere((found < 0) | (found >= len(NAMES)))
    if len(bad):
        layer, head = bad[0].tolist()
        raise ValueError(
            f"assignment[{layer}, {head}]: {found[layer, head]} is no pattern; expected 0 to {len(NAMES) - 1}"
        )
    return found.astype(np.int8)


def fitting(
    statistics: AttentionStatistics, thresholds: Thresholds = THRESHOLDS, *, causal: bool = False
) -> np.ndarray:
    """(layers, nheads) int8, indices into `NAMES`: the pattern nearest to each head.

    The class that a head has in most examples decides. A diagonal head is assigned the token that it looks at
    most: the same, the previous or the next token. A vertical head is assigned the first token or the
    separators, whichever it looks at more, if that is at least `thresholds.vertical` of its attention. All
    other heads stay learned.

    Args:
        statistics: statistics of the model's heads.
        thresholds: thresholds of the classes; see `AttentionStatistics.patterns`.
        causal: whether no token attends to a later token: heads that would look ahead stay learned.
    """
    classes = statistics.commonest(thresholds)
    near = np.stack([statistics.itself, statistics.previous, statistics.following]).mean(1)
    special = statistics.to_kind[[FIRST, SEPARATOR]].mean(1)
    vertical = (classes == VERTICAL) & (special.max(0) >= thresholds.vertical)
    of_diagonal = np.array([CURRENT, PREVIOUS, NEXT])[near.argmax(0)]
    of_vertical = np.array([FIRST_TOKEN, SEPARATORS])[special.argmax(0)]
    found = np.select([classes == DIAGONAL, vertical], [of_diagonal, of_vertical], LEARNED)
    if causal:
        found = np.where(np.isin(found, BACKWARD), found, LEARNED)
    return found.astype(np.int8)


@dataclass(frozen=True)
class FixedHeads:
    """Each case's loss and score with heads that attend by fixed patterns.

    A case is an example, or a pair of them for an encoder without a head; see `fastbert.analysis.measures`.

    Attributes:
        assignment: (layers, nheads) int8, indices into `NAMES`.
        score_name: see `Measure`.
        base_loss, base_score: (n,), of the unchanged model.
        loss, score: (n,), with the assigned heads fixed.
        zero_loss, zero_score: (n,), with the output of the same heads at 0; the patterns are worth the
            difference.
    """

    assignment: np.ndarray
    score_name: str
    base_loss: np.ndarray
    base_score: np.ndarray
    loss: np.ndarray
    score: np.ndarray
    zero_loss: np.ndarray
    zero_score: np.ndarray

    @property
    def count(self) -> int:
        """Number of heads that are fixed."""
        return int((self.assignment != LEARNED).sum())

    def counts(self) -> dict[str, int]:
        """Name -> number of heads that have it, LEARNED included."""
        return {name: int((self.assignment == i).sum()) for i, name in enumerate(NAMES)}

    def score_changes(self, *, zero: bool = False) -> np.ndarray:
        """(n,): the score with the patterns, or with the heads at 0, minus the unchanged model's."""
        return (self.zero_score if zero else self.score) - self.base_score

    def loss_changes(self, *, zero: bool = False) -> np.ndarray:
        """(n,): the loss with the patterns, or with the heads at 0, minus the unchanged model's."""
        return (self.zero_loss if zero else self.loss) - self.base_loss

    def score_change(self, *, zero: bool = False) -> float:
        """The mean of `score_changes`."""
        return float(self.score_changes(zero=zero).mean())

    def loss_change(self, *, zero: bool = False) -> float:
        """The mean of `loss_changes`."""
        return float(self.loss_changes(zero=zero).mean())

    def interval(self, *, zero: bool = False, seed: int = 0) -> Interval:
        """`score_change` with its 95% interval over examples.

        Raises:
            ValueError: fewer than two examples.
        """
        return mean_interval(self.score_changes(zero=zero), seed=seed)

    def p_value(self, *, zero: bool = False, seed: int = 0) -> float:
        """The p-value of `score_change`; see `paired_p`."""
        return float(paired_p(self.score_changes(zero=zero)[:, None], seed=seed)[0])


def fixed_heads(
    model: PreTrainedModel,
    examples: Examples,
    assignment: np.ndarray | None = None,
    *,
    pooling: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> FixedHeads:
    """Each case's loss and score with some heads fixed, beside the unchanged model's.

    Args:
        model: a model that `Measure` takes; it runs in eval mode and is not changed.
        examples: labelled examples, or pairs.
        assignment: (layers, nheads), indices into `NAMES`; None: what `fitting` returns for these examples.
        pooling: pooling of an encoder without a head; see `Measure.of`.
        batch_tokens: most tokens that run at a time.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    measure = Measure.of(model, examples, pooling)
    shape = len(model.base_model.layer_list()), model.config.num_attention_heads
    if assignment is None:
        plain = attention_statistics(model, examples, batch_tokens=batch_tokens)
        assignment = fitting(plain, causal=bool(model.config.is_decoder))
    assignment = check_assignment(assignment, shape)
    found = {
        f"{which}{what}": np.zeros(len(measure))
        for which in ("base_", "", "zero_")
        for what in ("loss", "score")
    }
    kept = torch.from_numpy(assignment == LEARNED).float().to(model.device)
    with at_rest(model), torch.inference_mode():
        for batch, numbers, labels in measure.batches(batch_tokens):
            taps = FixedPatterns(assignment, batch.on_device(examples.kinds) == SEPARATOR)
            for which, tap, gates in (("base_", None, None), ("", taps, None), ("zero_", None, kept)):
                loss, score = measure.arrays(encode(model, batch, tap, gates), batch.inputs, labels)
                found[f"{which}loss"][numbers] = loss
                found[f"{which}score"][numbers] = score
    return FixedHeads(assignment, measure.score_name, **found)
