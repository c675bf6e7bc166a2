"""The end of a step without waiting for the device: clip all gradients, take the optimizer's step.

The norm, the factor and the test whether the norm is finite stay on the device. If the norm is not finite,
the optimizer skips this step and all later ones on the device, so weights and moments stay those of the
previous step. When the host reads the record, it finds which step and which gradients were not finite.

The results equal those of a host that reads the norm: the factor is computed in float64 and rounded to the
gradients' float32. Gradients that need no clipping are multiplied by 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import _VF, Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Found:
    """What the host has read.

    Attributes:
        norm: norm of all gradients together, before clipping, in the last step or in the first bad step.
        skipped: steps that the scaler has skipped since the last reading.
        step: the number of the first bad step, or None.
        wrong: for each parameter, whether the norm of this process's share of its gradient was not finite in
            that step. A norm may overflow though all elements are finite.
    """

    norm: float
    skipped: int
    step: int | None
    wrong: list[bool]


def serves(optimizer: Optimizer) -> bool:
    """Whether an optimizer can skip a step on the device, as PyTorch's GradScaler asks it to."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class Update:
    """Takes the steps of an optimizer.

    Args:
        optimizer: one that `serves`.
        scaler: scaler of the gradients; if enabled, it skips bad steps itself, down to `least_scale`.
        least_scale: with the scaler at this scale or below, a step that is not finite stops the run.
        device: where the parameters are.
    """

    def __init__(
        self, optimizer: Optimizer, scaler: torch.amp.GradScaler, least_scale: float, device: torch.device
    ) -> None:
        # Any: GradScaler's protocol sets attributes that `Optimizer` does not declare
        self.optimizer: Any = optimizer
        self.scaler, self.least_scale = scaler, least_scale
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)
        self._one = torch.ones((), device=device)
        # the step, the norm of all gradients, and the norm of each
        self._record: Tensor | None = None

    @torch.no_grad()
    def step(self, number: int, most: float | None) -> None:
        """Clip the unscaled gradients to the norm `most` and update, unless a norm was not finite.

        Args:
            number: number of the step.
            most: the norm to clip to; None: no clipping.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = self._measured(number, gradients)
        finite = norm.isfinite()
        if most is not None:
            wide = norm.double()
            factor = torch.full_like(wide, most) / (wide + 1e-6)
            factor = torch.where(finite & (wide > most), factor, torch.ones_like(wide))
            if norm.dtype != torch.float64:
                factor = factor.float()
            _VF._foreach_mul_([local(gradient) for gradient in gradients], factor)
        bad = finite.logical_not()
        if not self.scaler.is_enabled():
            self._stopped |= bad
            self.optimizer.found_inf = self._stopped.float()
            self.optimizer.step()
            del self.optimizer.found_inf
            return
        before = self.scaler.scale(self._one)
        self._stopped |= bad & (before <= self.least_scale)
        for found in self.scaler._found_inf_per_device(self.optimizer).values():
            torch.maximum(found, self._stopped.float(), out=found)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._skipped += self.scaler.scale(self._one) < before

    def _measured(self, number: int, gradients: list[Tensor]) -> Tensor:
        """The norm of all gradients together, as torch.nn.utils.get_total_norm has it; recorded."""
        sharded = any(hasattr(gradient, "to_local") for gradient in gradients)
        if sharded:
            norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        else:
            norms = list(_VF._foreach_norm(gradients))
        each = torch.stack(norms)
        norm = whole(torch.linalg.vector_norm(each))
        if sharded or len(gradients) < len(self.parameters):
            zero, left = torch.zeros_like(norm), iter(norms)
            each = torch.stack([zero if p.grad is None else local(next(left)) for p in self.parameters])
        where = torch.full((1,), number, dtype=torch.float64, device=norm.device)
        record = torch.cat([where, norm[None].double(), each.double()])
        # a run that has stopped keeps the record of its bad step
        self._record = record if self._record is None else torch.where(self._stopped, self._record, record)
        return norm

    def read(self) -> Found | None:
        """Wait for the device; what it has found, or None if no step was taken yet."""
        if self._record is None:
            return None
        counts = torch.stack([self._stopped.double(), self._skipped])
        stopped, skipped, step, norm, *norms = torch.cat([counts, self._record]).tolist()
        self._skipped.zero_()
        wrong = [not math.isfinite(value) for value in norms]
        return Found(norm, int(skipped), int(step) if stopped else None, wrong)


def local(t: Any) -> Tensor:
    """This process's share of a tensor that may be sharded."""
    return t.to_local() if hasattr(t, "to_local") else t


def whole(t: Any) -> Tensor:
    """All of a tensor that may be sharded. All processes call it."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t
