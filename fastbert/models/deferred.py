"""A tensor that is computed when its elements are first read: the logits of a vocabulary head in training.

The loss needs only the labelled tokens, so the logits of all tokens are not computed until they are read.
A `DeferredTensor` has shape, dtype and device from the start; the first function that reads elements computes
them, once. The result is what the forward would have returned: it is computed with the forward's grad mode
and autocast, and has a gradient if the forward's would.

Reading it raises RuntimeError in two cases in which the result would be wrong: the weights of the head have
changed since the forward (an optimizer's step), or FSDP gathers the weights for the forward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastbert.runtime import prepared


class DeferredTensor(Tensor):
    """See the module. Every function of torch that reads its elements gets the computed tensor."""

    _name: str
    # Deleted once it has run
    _compute: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls: type[Any],
        name: str,
        compute: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
    ) -> DeferredTensor:
        """A tensor of the given properties, whose elements are `compute()`."""
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        self._name, self._compute, self._value = name, compute, None
        if requires_grad:
            # A gradient arrives here only if an autograd.Function takes the deferred tensor itself
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient(name))
        return self

    @property
    def is_computed(self) -> bool:
        """Whether the elements have been computed."""
        return self._value is not None

    def computed(self) -> Tensor:
        """The computed tensor, an ordinary one; the same at every call.

        Raises:
            RuntimeError: it cannot be computed any more.
        """
        if self._value is None:
            value = self._compute()
            if value.shape != self.shape or value.dtype != self.dtype:
                raise RuntimeError(
                    f"{self._name}: expected {self.dtype} of shape {tuple(self.shape)} from the decoder, got "
                    f"{value.dtype} of shape {tuple(value.shape)}; pass output_logits=True to compute them "
                    "in forward"
                )
            self._value = value
            del self._compute
        return self._value

    def float(self) -> Tensor:
        """In float32, still deferred: accelerate calls this on every half-precision output."""
        return self if self.dtype == torch.float32 else self._then(Tensor.float, torch.float32)

    def clone(self) -> Tensor:
        """A copy, still deferred: DDP copies every output."""
        return self._then(Tensor.clone, self.dtype)

    def _then(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        if self.is_computed:
            return function(self.computed())
        return DeferredTensor(
            self._name, lambda: function(self.computed()), self.shape, dtype, self.device, self.requires_grad
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS_NO_ELEMENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        # DDP reads grad_fn, which must not compute the tensor
        if func == _GRAD_FN and not args[0].is_computed:
            return None
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, given = tree_map_only(DeferredTensor, DeferredTensor.computed, (args, kwargs or {}))
        return func(*args, **given)


_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__
_PROPERTIES = "shape dtype device ndim layout requires_grad itemsize nbytes"
_KINDS = "is_cpu is_cuda is_meta is_sparse is_quantized"
_METHODS = "size dim ndimension numel nelement __len__ element_size is_floating_point is_complex get_device"
_FUNCTIONS = "numel is_floating_point is_complex"
# Functions that read no element
_ASKS_NO_ELEMENT = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES.split(), *_KINDS.split())),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(getattr(torch, name) for name in _FUNCTIONS.split()),
    )
)


def _refuse_gradient(name: str) -> Callable[[Tensor | None], None]:
    def refuse(gradient: Tensor | None) -> None:
        # DDP's function passes every output on, also one that no loss uses
        if gradient is None:
            return
        raise RuntimeError(
            f"{name}: an autograd.Function took the deferred tensor, which passes no gradient on; pass "
            "output_logits=True to compute them in forward"
        )

    return refuse


class NotComputed:
    """The logits of a compiled training forward: any use raises an error with the reason."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(self._message())

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(self._message())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found: list[NotComputed] = []
        tree_map_only(NotComputed, found.append, (args, kwargs or {}))
        raise TypeError(found[0]._message())

    def _message(self) -> str:
        return (
            f"{self.__dict__.get('_name', 'logits')}: not computed in training under torch.compile, "
            "where a later read is impossible; pass output_logits=True to compute them in forward"
        )

    def __repr__(self) -> str:
        return f"<{self._message()}>"


def defer(
    name: str,
    compute: Callable[[], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    reads: Tensor,
    modules: list[nn.Module],
) -> DeferredTensor | NotComputed:
    """What `compute` would return now, computed when its elements are first read.

    Args:
        name: the tensor's name in errors.
        compute: reads `reads` and the parameters of `modules`, and nothing that changes.
        shape, dtype: the result's.
        reads: the activations that `compute` reads.
        modules: the modules that `compute` runs.

    Returns:
        The deferred tensor; under `torch.compile` a `NotComputed`.
    """
    if torch.compiler.is_compiling():
        return NotComputed(name)
    device = reads.device
    with_grad = torch.is_grad_enabled()
    cast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    cast_to = torch.get_autocast_dtype(device.type) if cast else None
    gathered = any(prepared.is_gathered(module) for module in modules)
    weights = _weights(modules)
    before = [] if gathered else [_state(p) for p in weights]

    def late() -> Tensor:
        if gathered:
            raise RuntimeError(
                f"{name}: FSDP gathers the head's weights for the forward alone; pass output_logits=True to "
                "compute them there"
            )
        # functional_call replaces the weights for the forward alone
        now = _weights(modules)
        if list(map(id, now)) != list(map(id, weights)) or [_state(p) for p in now] != before:
            raise RuntimeError(
                f"{name}: the head's weights have changed since this forward (an optimizer's step?); read "
                "them before, or pass output_logits=True to compute them in forward"
            )
        with torch.set_grad_enabled(with_grad):
            if device.type != "meta" and torch.amp.is_autocast_available(device.type):
                with torch.autocast(device.type, dtype=cast_to, enabled=cast):
                    return compute()
            return compute()

    wants_grad = with_grad and (reads.requires_grad or any(p.requires_grad for p in weights))
    return DeferredTensor(name, late, shape, dtype, device, wants_grad)


def _weights(modules: list[nn.Module]) -> list[Tensor]:
    return [p for module in modules for p in module.parameters()]


def _state(p: Tensor) -> tuple[int, int]:
    return p.data_ptr(), 0 if p.is_inference() else p._version
