"""The discriminator: finds the tokens that were replaced."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.models.labels import check_probabilities
from fastbert.ops import checks


class ReplacedTokensModel(TaskModel):
    """A model with one logit per token, which is positive where the token was replaced.

    Labels: (batch, seqlen), 0 original, 1 replaced; labels of masked tokens do not count. Loss: mean binary
    cross-entropy of the kept tokens. Logits: (batch, seqlen), zeros at masked tokens.

    Source: Clark et al. 2020, "ELECTRA", sec. 2.
    """

    def check_labels(self, labels: Tensor, attention_mask: Tensor | None) -> None:
        """Numbers from 0 to 1 wherever a token is kept."""
        check_probabilities("labels", labels, attention_mask)

    def scores(self, x: Tensor) -> Tensor:
        """(…, hidden) -> (…, 1), by the head's own layers."""
        raise NotImplementedError

    def head_input(self, encoded: Encoded) -> Tensor:
        """(rows, hidden): what the head's first layer reads."""
        return encoded.hidden

    def logits(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Packed, and padded."""
        logits = encoded.by_token(self.scores, self.head_input(encoded)).squeeze(1)
        return logits, encoded.unpack(logits)

    def loss(self, logits: Tensor, labels: Tensor, encoded: Encoded) -> Tensor:
        """Binary cross-entropy of the kept tokens; 0 if no token is kept."""
        checks.same_device("labels", labels, logits)
        checks.shape("labels", labels, encoded.shape)
        compute = checks.compute_dtype(logits)
        packing = encoded.inputs.packing
        losses = F.binary_cross_entropy_with_logits(
            logits.to(compute), packing.pack(labels).to(compute), reduction="none"
        )
        if packing.capacity and packing.mask is not None:  # there are rows after the kept tokens
            keep = packing.pack(packing.mask)
            return torch.where(keep, losses, 0.0).sum() / keep.sum().clamp_min(1)
        return losses.sum() / max(losses.shape[0], 1)
