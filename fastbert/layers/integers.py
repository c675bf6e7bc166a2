"""The base of modules whose weight is integers with one float32 scale per row: linear layers, and tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbert.runtime import prepared

NO_TRAINING = (
    "is quantised to 8 bits, which have no gradient: it cannot be trained. Load the floating-point "
    "checkpoint, train that, and quantise it afterwards"
)


class IntegerWeight(nn.Module):
    """A module with the buffers `weight`, of integers, and `scale`; for inference.

    `weight` keeps its dtype and `scale` stays float32, whatever dtype the module is moved to.

    Args:
        weight: the integers, or zeros of their shape and dtype.

    Attributes:
        weight: (rows, columns) int8 from -127 to 127; or uint8, two integers of 4 bits per byte.
        scale: (rows,) float32, > 0; integers * scale is the floating-point weight, rounded.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.ones(weight.shape[0], dtype=torch.float32, device=weight.device))
        self.training = False

    @prepared.plain_train
    def train(self, mode: bool = True) -> IntegerWeight:
        """Accept `train(False)`, which changes nothing.

        Raises:
            RuntimeError: for training mode.
        """
        if mode:
            raise RuntimeError(f"{type(self).__name__} {NO_TRAINING}")
        return self

    def problem(self, name: str, tensor: Tensor) -> str | None:
        """What is wrong with `tensor` as this module's buffer `name`, or None."""
        wanted = self._buffers.get(name)
        if wanted is None or name == "bias":
            return None
        if tensor.dtype != wanted.dtype or tensor.layout is not torch.strided:
            return f"dtype {tensor.dtype}; expected {wanted.dtype} of a weight quantised by fastbert"
        if tensor.is_meta or tensor.numel() == 0:
            return None
        low, high = torch.aminmax(tensor)
        if tensor.dtype == torch.int8 and low < -127:
            return "holds -128; expected integers from -127 to 127"
        if name == "input_range":
            holds_zero = bool(tensor.flatten()[0] <= 0 <= tensor.flatten()[-1])
            return None if holds_zero and torch.isfinite(tensor).all() else "expected a finite range around 0"
        if name != "weight" and not (low > 0 and torch.isfinite(high)):
            return f"expected positive finite {'scales' if name == 'scale' else 'factors'}"
        return None

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        problems = [
            f"{prefix}{name}: {problem}"
            for name in self._buffers
            if isinstance(tensor := state_dict.get(prefix + name), Tensor)
            and (problem := self.problem(name, tensor))
        ]
        # Copying would round floating-point weights to integers
        if problems:
            error_msgs += problems
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn, recurse=True):
        kept = [(name, t) for name, t in self._buffers.items() if name != "bias" and t is not None]
        super()._apply(fn, recurse)
        # `.half()` and its kin move these buffers and keep their dtype
        for name, before in kept:
            if (now := getattr(self, name)).dtype != before.dtype:
                self._buffers[name] = before.to(now.device)
        return self
