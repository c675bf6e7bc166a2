"""Two ways to keep a model near the weights W₀ that it began with.

    mixout         in each forward W̃ = W₀ + (W - W₀) · M / (1 - p), M = 1 with probability 1 - p, else 0; so
                   E[W̃] = W. It is for the weights of linear layers in the encoder, whose dropout is off.
                   The head has dropout, as usual
    decay          each step has W -= lr · weight_decay · (W - W₀) in place of the decay to 0; the head, which
                   no pre-training has made, decays to 0

W₀ is no part of a checkpoint: a run that resumes begins with the same weights again before it loads its own.

Source: Lee et al. 2019, "Mixout", whose published code draws one number per input of a layer; Li et al. 2018,
"Explicit inductive bias for transfer learning", and Zhang et al. 2020, "Revisiting few-sample BERT
fine-tuning", for the decoupled decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastbert.models.base import PreTrainedModel


class Mixout:
    """Mixes the weights of a model's encoder with its first weights; see the module.

    Args:
        model: its dropouts in the encoder are switched off.
        p: probability of a first weight, in (0, 1).
        mask: "column": one draw per input of a layer; "element": one per weight.
    """

    def __init__(self, model: PreTrainedModel, p: float, mask: str) -> None:
        self.p, self.by_column = p, mask == "column"
        self.weights: dict[str, Tensor] = {}
        self.starts: dict[str, Tensor] = {}
        for name, module in model.base_model.named_modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.Linear):
                key = f"{model.base_model_prefix}.{name}.weight"
                self.weights[key], self.starts[key] = module.weight, module.weight.detach().clone()

    def mixed(self) -> dict[str, Tensor]:
        """Name in the model -> mixed weight; each call draws masks by torch's generator."""
        found = {}
        for key, weight in self.weights.items():
            start = self.starts[key] = self.starts[key].to(weight.device)
            size = weight.shape[-1:] if self.by_column else weight.shape
            kept = torch.rand(size, device=weight.device) >= self.p
            found[key] = torch.addcmul(start, weight - start, kept.to(weight.dtype) / (1 - self.p))
        return found


def hook_decay(optimizer: Optimizer, starts: Mapping[Tensor, Tensor]) -> None:
    """Let an optimizer's decoupled weight decay pull to the first weights instead of to 0.

    Args:
        optimizer: each step decays its parameters to 0, which the hook makes good after it.
        starts: parameter -> its first value; all other parameters still decay to 0.
    """
    first = dict(starts)

    @torch.no_grad()
    def pull(optimizer: Optimizer, *_: Any) -> None:
        bad = getattr(optimizer, "found_inf", None)  # a step that was skipped on the device pulls nothing
        for group in optimizer.param_groups:  # read anew: loading a state replaces the groups
            share = group["lr"] * group["weight_decay"]
            for p in group["params"] if share else ():
                if p in first:
                    start = first[p] = first[p].to(p.device)
                    p.add_(start, alpha=share) if bad is None else p.add_(start * (share * (1 - bad)))

    optimizer.register_step_post_hook(pull)
