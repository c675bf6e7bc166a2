"""The span-boundary objective: a masked span is also predicted from the two tokens beside it (SpanBERT).

Token i of a masked span s … e is predicted twice. The first prediction is from its own place, as in masked
LM. The second is from the last layer's vectors x of the span's two neighbours, with a vector p for the place
within the span:

    h = LayerNorm(GELU(W₁ [x(s-1); x(e+1); p(i-s+1)] + b₁))
    y = LayerNorm(GELU(W₂ h + b₂))
    logits = (word embeddings) y + b

    loss = mean over the masked tokens of -log p(token)  +  the same mean with these logits

Spans that touch are one span, so a neighbour is never masked. p has 200 numbers. As in the authors' code the
decoder has a bias b of its own, beside the masked LM's, and only the first 20 tokens of a span are targets.
In the authors' code a span at the first or last word of the text has no targets; here its neighbours are
[CLS] and [SEP].

Source: Joshi et al. 2019, "SpanBERT", sec. 3; facebookresearch/SpanBERT's pair_bert.py and masking.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.layers.linear import apply_linear, apply_norm
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.task_model import TaskModel
from fastbert.ops.linear import linear
from fastbert.ops.linear_cross_entropy import linear_cross_entropy
from fastbert.pretraining.masking import IGNORED, Masking
from fastbert.pretraining.objectives.masked import MaskedExample, MaskedLosses, Objective
from fastbert.runtime import expected
from fastbert.training.module import Losses, Results
from fastbert.training.stream import Batch
from fastbert.training.work import linear_work

PLACE_WIDTH = 200


@dataclass(frozen=True)
class SpanBoundary(Objective):
    """Examples of masked spans and their boundaries; see the module.

    Attributes:
        max_targets: most targets of a span; only the masked LM predicts later tokens of a longer span.
    """

    masking: Masking = field(default_factory=lambda: Masking("span"))
    max_targets: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_no_pairs("span boundaries")
        expected.integers(1, max_targets=self.max_targets)

    def collate(self, examples: Sequence[MaskedExample]) -> Batch:
        """Pack sequences, and list the targets of their spans.

        Raises:
            ValueError: a sequence's first or last token is masked, so a span has one neighbour only.
        """
        batch = super().collate(examples)
        labels, ends = batch.inputs["labels"], batch.inputs["cu_seqlens"][1:]
        edges = np.concatenate([ends - batch.lengths, ends - 1])
        if (labels[edges] != IGNORED).any():
            raise ValueError("examples: a sequence begins or ends with a masked token; expected special ones")
        left, right, place, rows = boundaries(labels != IGNORED, self.max_targets)
        targets = {"left": left, "right": right, "place": place, "boundary_labels": labels[rows]}
        return replace(batch, inputs={**batch.inputs, **targets}, counts={**batch.counts, "sbo": len(rows)})

    def losses(self, model: TaskModel) -> Losses:
        """The module that is trained."""
        return SpanBoundaryLosses(model, self.max_targets)


def boundaries(masked: np.ndarray, max_targets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The targets of the spans in packed tokens.

    Args:
        masked: (total,) bool; masked tokens in a row are one span.
        max_targets: most targets of a span, from its first token on.

    Returns:
        Four (targets,) int64: the row before the span, the row after it, the place within it from 0 on, and
        the target's own row.
    """
    changes = np.flatnonzero(np.diff(masked.astype(np.int8), prepend=0, append=0))
    begins, ends = changes[::2], changes[1::2]
    sizes = np.minimum(ends - begins, max_targets)
    span = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(span)) - (np.cumsum(sizes) - sizes)[span]
    return begins[span] - 1, ends[span], place, begins[span] + place


class BoundaryHead(nn.Module):
    """Two neighbours' vectors and a place -> what the decoder reads; see the module.

    Attributes:
        bias: the decoder's bias; its weight is the word embeddings.
    """

    def __init__(self, config: EncoderConfig, max_targets: int) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.embedding_width
        self.places = nn.Embedding(max_targets, PLACE_WIDTH)
        self.first = nn.Linear(2 * hidden + PLACE_WIDTH, hidden)
        self.first_norm = nn.LayerNorm(hidden, eps=config.norm_eps)
        self.second = nn.Linear(hidden, width)
        self.second_norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, left: Tensor, right: Tensor, place: Tensor) -> Tensor:
        """(rows, hidden) and three (targets,) int64 -> (targets, embedding size)."""
        # F.embedding, because its gradient is a sum in a fixed order on every device
        vectors = F.embedding(left, hidden), F.embedding(right, hidden), self.places(place).to(hidden.dtype)
        x = apply_linear(self.first, torch.cat(vectors, 1), "gelu")
        x = apply_linear(self.second, apply_norm(self.first_norm, x), "gelu")
        return apply_norm(self.second_norm, x)


class SpanBoundaryLosses(MaskedLosses):
    """Masked tokens, from their own place ("mlm") and from the boundary of their span ("sbo").

    Args:
        model: a model with a masked-LM head.
        max_targets: see `SpanBoundary`.
    """

    def __init__(self, model: TaskModel, max_targets: int = 20) -> None:
        super().__init__(model)
        self.boundary = BoundaryHead(model.config, max_targets)
        model.init_weights(self.boundary)

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """See `Losses.forward`."""
        encoded = self.encode(inputs)
        losses, correct = self.losses_of(encoded, inputs, measure)
        x = self.boundary(encoded.hidden, inputs["left"], inputs["right"], inputs["place"])
        labels, words = inputs["boundary_labels"], self.model.get_input_embeddings().weight
        losses["sbo"] = linear_cross_entropy(x, words, self.boundary.bias, labels, labelled=len(labels))
        if measure:
            with torch.no_grad():
                logits = linear(x, words, self.boundary.bias)
                correct["sbo"] = (logits.argmax(-1) == labels).sum()
        return losses, correct

    def work(self, batch: Batch) -> float:
        """See `Losses.work`."""
        config, targets = self.model.config, batch.counts["sbo"]
        hidden, width = config.hidden_size, config.embedding_width
        return (
            super().work(batch)
            + linear_work(targets, 2 * hidden + PLACE_WIDTH, hidden)
            + linear_work(targets, hidden, width)
            + linear_work(targets, width, config.vocab_size)
        )
