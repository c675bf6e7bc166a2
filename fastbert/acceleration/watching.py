"""What looks at a module or its operations: hooks, FSDP, tracers, torch.export."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.jit._trace import is_tracing

# Arguments that change nothing in a layer's or an encoder's result
HARMLESS = frozenset(("position_ids", "use_cache", "return_dict", "num_items_in_batch"))
_TRACERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())
_FSDP = "torch.distributed.fsdp"
_CAPTURE = "transformers.utils.output_capturing"


def exporting() -> bool:
    """Whether the model must run as stock, because its single operations are observed.

    It must in exports, and under fake tensors, make_fx, torch.func and forward-mode derivatives.
    """
    if is_tracing() or torch.compiler.is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    modes = torch._C._len_torch_dispatch_stack() and any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACERS
    )
    return bool(
        modes or torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )


@_disable_dynamo
def uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call that torch.compile does not compile.

    8-bit weights are derived outside the compiled graph. Inside they would be rounded again at every call.
    Longformer's stock code, which would be compiled, fails.
    """
    return module.forward(*args, **kwargs)


def collects(name: str) -> bool:
    """Whether transformers collects the modules' outputs of this name during the current call."""
    capture = sys.modules.get(_CAPTURE)
    collected = None if capture is None else capture._active_collector.get()
    return bool(collected) and name in collected


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP gathers the module's parameters before every call of it."""
    hooks = module.__dict__["_forward_pre_hooks"]
    return bool(hooks) and any(
        (getattr(h, "__module__", None) or "").startswith(_FSDP) for h in hooks.values()
    )
