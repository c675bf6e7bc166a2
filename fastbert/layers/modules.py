"""Sub-modules by their dotted paths, and whether our ops may read one instead of calling it."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.ops.derivatives import plain_torch

_FSDP = "torch.distributed.fsdp"
# Its hooks do nothing until outputs are collected
_CAPTURE = "transformers.utils.output_capturing"
_WANTS_GRADIENTS = "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads"
# Libraries whose linear layers treat each row by itself, and so also rows without padding
_BY_ROW = ("fastbert.", "peft.tuners.")
# Classes whose instances our ops read, and their code
_KINDS = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Dropout)
_forward = attrgetter("forward")
_Kind = TypeVar("_Kind", bound=nn.Module)
_FORWARDS = list(map(_forward, _KINDS))


class OwnMatrices:
    """A module with parameters that are drawn like matrices, but belong to no linear layer."""

    def draw_own_(self, std: float) -> None:
        """Draw the first values of these parameters: normal(0, std)."""
        raise NotImplementedError


def attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register `module` at a dotted path; containers that are missing are created."""
    *parents, name = path.split(".")
    for parent in parents:
        child = root._modules.get(parent)
        if child is None:
            root.add_module(parent, child := nn.Module())
        root = child
    root.add_module(name, module)


def take_over(made: Any, module: Any) -> None:
    """Give a module of a kindred class the sizes, the mode and the parameters of another."""
    names = ("training", *type(module).__constants__)
    made.__dict__.update({name: value for name, value in vars(module).items() if name in names})
    for name, parameter in module._parameters.items():
        made.register_parameter(name, parameter)


def part(root: Any, path: str) -> Any:
    """The sub-module at a dotted path; looked up at every call, so that a replacement is found."""
    for name in path.split("."):
        root = root._modules[name]
    return root


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks watch the calls of `module` itself."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_plain(module: nn.Module, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether a fused op may read the weights of `module` instead of calling it."""
    return type(module) is kind and not (is_hooked(module) or has_other_forward(module))


def watched(module: nn.Module) -> bool:
    """Whether the module's forward was replaced, or a hook watches it.

    FSDP's hooks do not count. Neither do transformers' hooks that capture outputs, or that train adapters
    with checkpoints.
    """
    # Faster than attributes
    own = module.__dict__
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    ):
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            for hook in own[kind].values():
                home = getattr(hook, "__module__", None) or ""
                if home == _CAPTURE:
                    collected = sys.modules[_CAPTURE]._active_collector.get()
                    if collected and collected.keys() - {"hidden_states", "_hidden_states_layers"}:
                        return True
                elif not home.startswith(_FSDP) and (getattr(hook, "__qualname__", "") != _WANTS_GRADIENTS):
                    return True
    return "forward" in own and has_other_forward(module)


def has_other_forward(module: nn.Module) -> bool:
    """Whether the module itself has a `forward` that is not its class's.

    HuggingFace's accelerate leaves the class's own `forward` on the module when it removes its hooks.
    """
    own = module.__dict__.get("forward")
    return own is not None and not is_own(own, module, type(module).forward)


def is_own(method: Any, module: nn.Module, function: Any) -> bool:
    """Whether `method` is `function`, bound to `module`."""
    return getattr(method, "__self__", None) is module and getattr(method, "__func__", None) is function


def plain_dropout(module: nn.Module) -> TypeGuard[nn.Dropout]:
    """Whether our dropout computes the same as the module. p = 1 is left to PyTorch."""
    return type(module) is nn.Dropout and module.p < 1.0 and not watched(module)


def by_row(module: nn.Module) -> bool:
    """Whether the module treats each row by itself, so that it may be called without the padding."""
    kind = type(module)
    if kind in (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Identity):
        return True
    if kind.__module__.startswith(_BY_ROW):
        return not any(map(watched, module.modules()))
    # Parametrized, or a subclass that only stores its weight in another way
    stored = isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward
    return stored or rms_eps(module) is not None


def changed(module: nn.Module) -> str | None:
    """Why a linear layer, norm or table must be called on a padded batch; None if it need not."""
    if watched(module):
        return "has hooks or another forward"
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and not has_weight(module):
        return "has no weight, or one of several dimensions"
    return None if by_row(module) else f"is a {type(module).__name__}"


def has_weight(norm: Any) -> bool:
    """Whether the norm has the weight that our ops take."""
    return norm.weight is not None and norm.weight.dim() == 1


def rms_eps(norm: nn.Module) -> float | None:
    """eps of an RMSNorm, be it PyTorch's or transformers' as Llama has it; None for any other module."""
    kind = type(norm)
    if kind is nn.RMSNorm:
        return cast(nn.RMSNorm, norm).eps
    # The classes that compute another norm name it otherwise
    known = kind.__name__.endswith("RMSNorm") and kind.__module__.startswith("transformers.models.")
    return getattr(norm, "variance_epsilon", None) if known else None


class NoNorm(nn.LayerNorm):
    """x · weight + bias in place of LayerNorm, whose parameters it has.

    Args:
        width: size of the last dimension.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(…, width) -> (…, width), rounded once."""
        return torch.addcmul(self.bias, input, self.weight)


def is_no_norm(module: nn.Module) -> bool:
    """Whether the module is `NoNorm`, or transformers' class of that name."""
    kind = type(module)
    stock = kind.__module__ == "transformers.models.mobilebert.modeling_mobilebert"
    return kind is NoNorm or (stock and kind.__name__ == "NoNorm")


def calls_all() -> str | None:
    """Why every module must be called now; None if our ops may read them."""
    if _has_any_global_hook():
        return "there are global module hooks"
    if not torch.compiler.is_compiling() and list(map(_forward, _KINDS)) != _FORWARDS:
        return "the forward of a class of PyTorch was replaced"
    return plain_torch()
