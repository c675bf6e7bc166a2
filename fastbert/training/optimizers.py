"""Optimizers of BERT's recipes, and which parameters decay.

With g the gradient, m and v its running mean and square, t the step from 1 on:

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g²

    m̂ = m / (1 - beta1ᵗ)               v̂ = v / (1 - beta2ᵗ)

    adamw          w -= lr (m̂ / (√v̂ + eps) + weight_decay w): torch.optim.AdamW's
    adamw-google   w -= lr (m / (√v + eps) + weight_decay w): no correction of the bias
    lamb           r = m̂ / (√v̂ + eps) + weight_decay w;   w -= lr (‖w‖ / ‖r‖) r, per tensor; the ratio is 1
                   where a norm is 0 and for parameters without decay

LAMB's recipe also clips the norm of all gradients together to 1, which is the loop's task: clipping per layer
and clamping the ratio, as some implementations do, are not the published algorithm.

Source: Loshchilov & Hutter 2017, "Decoupled weight decay regularization"; google-research/bert,
optimization.py; You et al. 2019, "Large batch optimization for deep learning: training BERT in 76 minutes",
algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import _VF, Tensor, nn
from torch.optim import Optimizer

from fastbert.runtime import expected
from fastbert.training.update import whole

KINDS = ("adamw", "adamw-google", "lamb")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: biases and the parameters of LayerNorm do not decay.

    A shared parameter is in one group. Parameters that need no gradient are left out.

    Args:
        model: the model whose parameters are optimized.
        weight_decay: decay of all other parameters; >= 0.
    """
    decayed: dict[Tensor, None] = {}
    plain: dict[Tensor, None] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                free = name.startswith("bias") or isinstance(module, (nn.LayerNorm, nn.RMSNorm))
                (plain if free else decayed)[parameter] = None
    groups = [
        {"params": [p for p in decayed if p not in plain], "weight_decay": weight_decay},
        {"params": list(plain), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def optimizer(
    kind: str,
    groups: Iterable[Any],
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Optimizer:
    """An optimizer of `KINDS`; see the module.

    Args:
        kind: one of `KINDS`.
        groups: parameters, or groups such as `decay_groups` makes.
        lr, betas, eps, weight_decay: values for groups that have none of their own.

    Raises:
        ValueError: naming the argument.
    """
    expected.one_of(KINDS, kind=kind)
    made = {"adamw": AdamW, "adamw-google": GoogleAdamW, "lamb": Lamb}[kind]
    return made(groups, lr, betas, eps, weight_decay)


def _check(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")
    if len(betas) != 2 or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas: expected two numbers in [0, 1), got {betas!r}")


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW with half the host time per step: it looks at each parameter once.

    States, results and checkpoints are torch's.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: see `optimizer`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        _check(lr, betas, eps, weight_decay)
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; ValueError for `amsgrad`, which no recipe has."""
        if param_group.get("amsgrad"):
            raise ValueError("amsgrad: expected False, got True")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Parameters without a gradient stay as they are.

        Returns:
            What `closure` returns, if there is one; it computes the loss anew, with gradients.
        """
        found = _evaluated(closure)
        for group in self.param_groups:
            alike: dict[tuple[Any, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((p.device, p.dtype), []).append(p)
            for params in alike.values():
                self._update(group, params)
        return found

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update parameters of one device and dtype."""
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        means, squares, steps = ([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        (beta1, beta2), device = group["betas"], params[0].device
        # set by a loss scaler
        scale, bad = (
            None if t is None else t.to(device, non_blocking=True)
            for t in (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        )
        _VF._foreach_add_(steps, 1)
        _VF._fused_adamw_(
            *(params, _gradients(params), means, squares, [], self._corrected_by(steps)),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=group["maximize"],
            grad_scale=scale,
            found_inf=bad,
        )
        if bad is not None:
            # `bad` is 1 if a gradient was not finite: then no step was taken
            _VF._foreach_sub_(steps, [bad] * len(steps))

    def _corrected_by(self, steps: list[Tensor]) -> list[Tensor]:
        """The steps by which the bias is corrected."""
        return steps


class GoogleAdamW(AdamW):
    """AdamW as google-research/bert has it, without correction of the bias; see the module.

    It is torch's fused AdamW at a step so late that both corrections are exactly 1. The same sums tensor by
    tensor take several times as long on a CPU; most of that time goes to memory that is new in each step.
    """

    _LATE = 2.0**30  # beta ** _LATE is 0 for a beta up to 1 - 2**-20

    def _corrected_by(self, steps: list[Tensor]) -> list[Tensor]:
        late = torch.full((), self._LATE, dtype=torch.float32, device=steps[0].device)
        return [late] * len(steps)


class Lamb(Optimizer):
    """LAMB; see the module. The norm of a sharded parameter is taken over all its shards.

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: see `optimizer`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        _check(lr, betas, eps, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Parameters without a gradient stay as they are.

        Returns:
            What `closure` returns, if there is one; it computes the loss anew, with gradients.
        """
        loss = _evaluated(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = _gradients(params)
            if any(grad.is_sparse for grad in grads):
                raise TypeError(f"{type(self).__name__}: expected dense gradients, got a sparse one")
            for p in params:
                if not self.state[p]:
                    self.state[p].update(
                        step=torch.zeros((), dtype=torch.float32),  # on the host: nothing waits for it
                        exp_avg=torch.zeros_like(p, memory_format=torch.preserve_format),
                        exp_avg_sq=torch.zeros_like(p, memory_format=torch.preserve_format),
                    )
            means = [self.state[p]["exp_avg"] for p in params]
            squares = [self.state[p]["exp_avg_sq"] for p in params]
            _VF._foreach_lerp_(means, grads, 1 - beta1)
            _VF._foreach_mul_(squares, beta2)
            _VF._foreach_addcmul_(squares, grads, grads, 1 - beta2)
            steps = []
            for p in params:
                self.state[p]["step"] += 1
                steps.append(int(self.state[p]["step"]))
            self._apply(group, params, means, squares, steps)
        return loss

    def _apply(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        steps: list[int],
    ) -> None:
        beta1, beta2 = group["betas"]
        scale = _VF._foreach_div(squares, [1 - beta2**t for t in steps])
        _VF._foreach_sqrt_(scale)
        _VF._foreach_add_(scale, group["eps"])
        updates = _VF._foreach_div(means, scale)
        _VF._foreach_div_(updates, [1 - beta1**t for t in steps])
        if not group["weight_decay"]:
            _VF._foreach_add_(params, updates, alpha=-group["lr"])
            return
        _VF._foreach_add_(updates, params, alpha=group["weight_decay"])
        for p, update in zip(params, updates, strict=True):
            of_weight, of_update = _norm(p), _norm(update)
            ratio = torch.where((of_weight > 0) & (of_update > 0), of_weight / of_update, 1.0)
            p.sub_(update * (group["lr"] * ratio).to(update.dtype))


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    with torch.enable_grad():
        return None if closure is None else closure()


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _norm(t: Tensor) -> Tensor:
    """The Euclidean norm, over all shards of a sharded tensor."""
    dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
    return whole(torch.linalg.vector_norm(t, dtype=dtype))
