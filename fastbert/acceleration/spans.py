"""Question-answering heads of transformers, which read the outputs of masked tokens.

A question-answering head takes a softmax over all tokens of a row, masked ones included. Its answer is better
without them. But a model that never learns to score padding low is useless as a stock model. So the encoder
keeps the padding in training mode; in eval mode masked tokens get no probability.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.acceleration.classes import Accelerated, positional
from fastbert.acceleration.watching import exporting
from fastbert.models.heads.task_model import without_masked


@dataclass
class Head:
    """What a question-answering head and its encoder exchange during a call.

    Attributes:
        reads_masked: whether the encoder must keep the padding; the head sets it.
        kept: (batch, seqlen) bool, True = kept, which an encoder sets that has removed padding; else None.
    """

    reads_masked: bool
    kept: Tensor | None = None


head_of_call: ContextVar[Head | None] = ContextVar("head_of_call", default=None)


class AcceleratedSpans(Accelerated):
    """Mixin of a question-answering head (BertForQuestionAnswering, …).

    If its encoder has removed padding, masked tokens get no probability. Then the loss is at most the stock
    model's, and a kept token's probability is at least the stock model's. In training mode, if a label is on
    a masked token, or if the encoder ran padded, the output is the stock model's.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stock model's call."""
        if exporting() or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        given = dict(zip(positional(self.fastbert_base), args, strict=False)) | kwargs
        positions = [given.get(name) for name in ("start_positions", "end_positions")]
        head = Head(self.training or _on_masked(positions, given.get("attention_mask")))
        token = head_of_call.set(head)
        try:
            output = super().forward(*args, **kwargs)
        finally:
            head_of_call.reset(token)
        return output if head.kept is None else _over_kept(output, head.kept, positions)


def _on_masked(positions: list[Tensor | None], mask: Any) -> bool:
    """Whether a label is on a masked token. The stock model refuses what is no label."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    batch, seqlen = mask.shape
    for p in positions:
        if isinstance(p, Tensor) and p.numel() == batch and seqlen > 0:
            at = p.reshape(batch, 1).long().clamp(0, seqlen)
            masked = mask.to(at.device).logical_not().gather(1, at.clamp(max=seqlen - 1))
            if (masked & (at < seqlen)).any():
                return True
    return False


def _over_kept(output: Any, kept: Tensor, positions: list[Tensor | None]) -> Any:
    """A head's output (a tuple or not) with its scores and their loss over kept tokens only."""
    labels = [p for p in positions if p is not None]
    loss = len(labels) == len(positions)
    at = slice(int(loss), int(loss) + 2)
    values = list(output[at])
    scores = [without_masked(s, kept.to(s.device)) for s in values]
    made = dict(zip(("start_logits", "end_logits"), scores, strict=True))
    if loss:
        seqlen = kept.shape[1]
        losses = [
            F.cross_entropy(s, p.reshape(-1).clamp(0, seqlen), ignore_index=seqlen)
            for s, p in zip(scores, labels, strict=True)
        ]
        made = {"loss": (losses[0] + losses[1]) / 2} | made
    if isinstance(output, tuple):
        return (*made.values(), *output[at.stop :])
    for name, value in made.items():
        output[name] = value
    return output
