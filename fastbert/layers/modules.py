"""Sub-modules by their dotted paths, and whether a fused op may read one instead of calling it."""

from __future__ import annotations

from torch import nn


def attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register `module` at a dotted path; containers that are missing are created."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root._modules[parent]
    root.add_module(name, module)


def part(root: nn.Module, path: str) -> nn.Module:
    """The sub-module at a dotted path; looked up at every call, so that a replaced one is found."""
    for name in path.split("."):
        root = root._modules[name]
    return root


def is_hooked(module: nn.Module) -> bool:
    """Whether someone watches the calls of `module` itself."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_plain(module: nn.Module, kind: type) -> bool:
    """Whether a fused op may read the weights of `module` instead of calling it."""
    return type(module) is kind and not is_hooked(module)
