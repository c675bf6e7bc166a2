"""Permutation language modelling on BERT's layer: tokens are predicted in a random order. XLNet's objective.

A share of the tokens are targets, the last ones of a random order z; all other tokens are context. A target
is predicted from the context and from the targets that come before it in z:

    loss = mean over the targets t of -log p(token of t | context, targets before t in z, place of t)

A sequence of n tokens with k targets becomes n + k rows of one sequence:

    content row   each token at its place. It attends to the context; a target also attends to itself and to
                  the targets before it
    query row     [MASK] at a target's place, with the target's token type. It attends to the context and to
                  the targets before its own

No row attends to a query row, and targets are predicted from query rows. So no row that a target is predicted
from depends on that target, however many layers there are, and one pass predicts all targets. XLNet computes
the same by two streams, which share the layers' weights. Its query rows begin with its trained vector, and
distances are counted between the tokens of two rows. In other families a query row begins with [MASK], so
that the result is a plain BERT.

Targets are 1 / `k` of the tokens that are not special, rounded, at least one. They are chosen as in XLNet:
draw a length L from 1 to `max_span`, take one span of L tokens at a random place among the next k L tokens,
and repeat; the last, shorter piece has its share in one span. Special tokens are never targets; a span skips
them and continues behind. All orders of the targets are equally likely.

Transformers' DataCollatorForPermutationLanguageModeling differs in one thing. It lets special tokens attend
to the targets before them in z, and lets all rows attend to special tokens. So from the second layer on a
prediction can depend on its own target. Here special tokens are context and attend to context alone.

Other families whose attention counts distances (MPNet) raise an error, because the distance between two rows
is not the distance between their tokens.

Source: Yang et al. 2019, "XLNet", sec. 2.2, 2.3 and 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.pretraining.formats import Example
from fastbert.pretraining.masking import IGNORED, Masked, Masking
from fastbert.pretraining.objectives.masked import MaskedExample, MaskedLosses, Objective
from fastbert.runtime import expected
from fastbert.training.draws import Draws
from fastbert.training.module import Losses
from fastbert.training.stream import Batch
from fastbert.training.work import encoder_work, vocabulary_work

_QUERY = 1 << 30  # above every limit: no row attends to a query row


@dataclass(frozen=True)
class Rows:
    """What a sequence's rows attend to: row i attends to row j if ranks[j] <= limits[i].

    Attributes:
        places: (n + k,) int64, the token of each row, from 0 on.
        ranks: (n + k,) int64: 0 for a context token; for a target its place in the order, from 1 on.
        limits: (n + k,) int64: a content row's own rank; for a query row its target's rank minus 1.
    """

    places: np.ndarray
    ranks: np.ndarray
    limits: np.ndarray

    @classmethod
    def of(cls, length: int, targets: np.ndarray, order: np.ndarray) -> Rows:
        """The rows of a sequence.

        Args:
            length: number of tokens of the sequence.
            targets: (k,) places of the targets, ascending; the query rows have the same order.
            order: (k,) the rank of each target, the numbers from 0 to k - 1.
        """
        ranks = np.zeros(length, np.int64)
        ranks[targets] = 1 + order
        return cls(
            np.concatenate([np.arange(length), targets]),
            np.concatenate([ranks, np.full(len(targets), _QUERY)]),
            np.concatenate([ranks, order]),
        )


@dataclass(frozen=True)
class Permutation(Objective):
    """Examples of permutation language modelling; see the module.

    Attributes:
        masking: must be the default; `k` and `max_span` set what is predicted.
        seed: seed of targets and orders.
        k: one in `k` tokens is predicted.
        max_span: most targets of a span.

    Raises:
        ValueError: naming the attribute.
    """

    k: int = 6
    max_span: int = 5

    token_loss: ClassVar[str] = "permutation"

    def __post_init__(self) -> None:
        super().__post_init__()
        expected.integers(1, k=self.k, max_span=self.max_span)
        if self.masking != Masking():
            raise ValueError(
                f"masking: k and max_span choose the targets; expected the default, got {self.masking}"
            )

    def mask(self, example: Example, draws: Draws) -> MaskedExample:
        """Draw targets and order; the result has a row per content token, then one per target."""
        ids = np.asarray(example.ids).astype(np.int64)
        candidates = np.flatnonzero(~np.isin(ids, self.vocabulary.special))
        spans = self.spans(len(candidates), draws)
        chosen = np.zeros(len(candidates), bool)
        for begin, end in spans:
            chosen[begin:end] = True
        targets = candidates[chosen]
        rows = Rows.of(len(ids), targets, draws.shuffled(len(targets)))
        masked = Masked(
            np.append(ids, np.full(len(targets), self.vocabulary.mask)),
            np.append(np.full(len(ids), IGNORED), ids[targets]),
            np.stack([targets, targets + 1], 1),
        )
        return MaskedExample(masked, np.asarray(example.token_types)[rows.places], example.label, rows)

    def spans(self, count: int, draws: Draws) -> np.ndarray:
        """(m, 2) first and end of the targets among `count` candidates, in ascending order."""
        # at most: all pieces of the shortest length, and the rest
        sizes = 1 + draws.below(self.max_span, count // self.k + 1)
        ends = np.cumsum(self.k * sizes)
        whole = int(np.searchsorted(ends, count, side="right"))  # pieces that fit
        sizes, begins = sizes[: whole + 1], np.append(0, ends[:whole])
        rest = count - int(begins[-1])
        last = (2 * rest + self.k) // (2 * self.k)  # rest / k, rounded
        sizes[whole:] = max(last, 1) if whole == 0 and count else last
        pieces = np.append(self.k * sizes[:whole], rest)
        begins = begins + draws.below(pieces - sizes + 1, whole + 1)
        return np.stack([begins, begins + sizes], 1)[sizes > 0]

    def collate(self, examples: Sequence[MaskedExample]) -> Batch:
        """Pack sequences of content and query rows; `lengths` counts content rows alone."""
        batch = super().collate(examples)
        rows: list[Rows] = [each.more for each in examples]
        most = batch.inputs["max_seqlen"]
        ranks = np.full((len(rows), most), _QUERY, np.int32)
        limits = np.zeros((len(rows), most), np.int32)
        for i, each in enumerate(rows):
            ranks[i, : len(each.ranks)] = each.ranks
            limits[i, : len(each.limits)] = each.limits
        batch.inputs |= {
            "position_ids": np.concatenate([each.places for each in rows]),
            "ranks": ranks,
            "limits": limits,
        }
        content = np.array([1 + each.places.max() for each in rows], np.int32)
        return Batch(batch.inputs, batch.counts, content)

    def losses(self, model: TaskModel) -> Losses:
        """The module that is trained.

        Raises:
            ValueError: the family counts distances between rows.
        """
        if model.family.counts_columns and not model.family.two_streams:
            raise ValueError(
                f"model: {model.config.model_type} has relative positions, but the distance between two rows "
                "is not that between their tokens; expected a family with absolute positions alone"
            )
        return PermutationLosses(model, self.format.num_labels, False, self.token_loss)


class PermutationLosses(MaskedLosses):
    """Targets of a random order ("permutation") and the class of a pair ("sentence")."""

    def encode(self, inputs: dict[str, Any]) -> Encoded:
        """Encode the packed rows."""
        config, more = self.model.config, {}
        if config.family.two_streams:
            encoder, query = self.model.base_model, inputs["labels"] != IGNORED
            words = encoder.get_input_embeddings()(inputs["input_ids"])
            embeds = torch.where(query[:, None], encoder.mask_emb[0].to(words.dtype), words)
            more = {"input_ids": None, "inputs_embeds": embeds}
        sees = inputs["ranks"][:, None, None, :] <= inputs["limits"][:, None, :, None]
        return super().encode(
            {
                **inputs,
                **more,
                "position_ids": inputs["position_ids"] + config.first_position,
                "attention_mask": sees,
            }
        )

    def work(self, batch: Batch) -> float:
        """See `Losses.work`. Counts all rows, and the pairs of rows with attention between them."""
        config, targets = self.model.config, batch.counts[self.token_loss]
        sizes = config.hidden_size, config.num_hidden_layers, config.intermediate_size
        # n - k context rows, k targets and k query rows attend to (n - k)², k (n - k) + k (k + 1) / 2 and
        # k (n - k) + k (k - 1) / 2 rows, n² together
        rows = int(batch.lengths.sum()) + targets
        return encoder_work(batch.lengths, *sizes, rows=rows) + vocabulary_work(
            targets, config.hidden_size, config.vocab_size
        )
