"""The labels that callers pass to a head: checks, and the loss of one label per sequence.

Values are checked before the encoder is launched, with one transfer to the host: a GPU is idle then anyway.
Under `torch.compile` they are not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.cross_entropy import cross_entropy

# The label that does not count
IGNORED = -100


def check_tensor(name: str, t: object) -> None:
    """Raise TypeError for anything but a tensor."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")


def check_classes(name: str, labels: Tensor, classes: int, mask: Tensor | None = None) -> int | None:
    """Labels must be integers in [0, classes) or `IGNORED`, and `IGNORED` where a 2-D `mask` (if any) is 0.

    Returns:
        The number of labels other than `IGNORED`; None under `torch.compile`, where values are not checked.
    """
    checks.int_tensor(name, labels)
    if torch.compiler.is_compiling():
        return None
    if labels.numel() == 0:
        return 0
    counts = labels != IGNORED
    bad = [counts & ((labels < 0) | (labels >= classes))]
    if _is_mask_of(mask, labels):
        bad.append(counts & (mask == 0))
    *found, labelled = torch.stack([*(b.any() for b in bad), counts.sum()]).tolist()
    if found[0]:
        raise ValueError(
            f"{name}: {labels[bad[0]][0].item()} at {_where(bad[0])} is no class; "
            f"expected 0 to {classes - 1}, or {IGNORED} for none"
        )
    if found[-1]:
        raise ValueError(
            f"{name}: {labels[bad[1]][0].item()} at {_where(bad[1])}, where attention_mask is 0: masked "
            f"tokens are not computed; expected {IGNORED} there"
        )
    return labelled


def check_probabilities(name: str, labels: Tensor, mask: Tensor | None) -> None:
    """Labels must be numbers from 0 to 1, except where a 2-D `mask` (if given) is 0."""
    if not isinstance(labels, Tensor) or labels.dtype.is_complex:
        raise TypeError(
            f"{name}: expected a real torch.Tensor, got {getattr(labels, 'dtype', type(labels).__name__)}"
        )
    if torch.compiler.is_compiling() or labels.numel() == 0:
        return
    wrong = ~((labels >= 0) & (labels <= 1))
    if _is_mask_of(mask, labels):
        wrong &= mask != 0
    if wrong.any():
        raise ValueError(f"{name}: expected 0 or 1, got {labels[wrong][0].item()} at {_where(wrong)}")


def _is_mask_of(mask: object, labels: Tensor) -> bool:
    # The encoder, or the shape check after it, refuses a mask of another shape or device
    return isinstance(mask, Tensor) and mask.shape == labels.shape and mask.device == labels.device


def _where(wrong: Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())


def check_one_per_sequence(name: str, labels: Tensor, batch: int, logits: Tensor) -> None:
    """Raise ValueError unless there is one label per sequence: (batch,) or (batch, 1)."""
    checks.same_device(name, labels, logits)
    if tuple(labels.shape) not in ((batch,), (batch, 1)):
        raise ValueError(f"{name}: expected shape ({batch},), got {tuple(labels.shape)}")


def sequence_loss(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of one label per sequence."""
    check_one_per_sequence(name, labels, logits.shape[0], logits)
    return cross_entropy(logits, labels.reshape(-1), ignore_index=IGNORED)


def check_positions(name: str, positions: Tensor, mask: object) -> None:
    """Positions must be integers and, after clamping, those of kept tokens."""
    checks.int_tensor(name, positions)
    if torch.compiler.is_compiling() or not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    flat = positions.reshape(-1)
    # Such a mask is refused later, for its shape or device
    if mask.shape[0] != flat.shape[0] or mask.device != flat.device or mask.numel() == 0:
        return
    at = flat.long().clamp(0, mask.shape[1])
    wrong = (at < mask.shape[1]) & (mask.gather(1, at.clamp_max(mask.shape[1] - 1)[:, None])[:, 0] == 0)
    if wrong.any():
        sequence = _where(wrong)[0]
        raise ValueError(
            f"{name}: {flat[sequence].item()} in sequence {sequence} is a masked token, which is not "
            f"computed; expected a kept token, or seqlen ({mask.shape[1]}) for none"
        )
