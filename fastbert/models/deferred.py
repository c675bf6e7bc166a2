"""A tensor that is computed when somebody needs its elements: the logits of a vocabulary head in training.

The loss needs the labelled tokens only, so the logits of all tokens are not computed unless they are touched.
Until then a `DeferredTensor` knows its shape, dtype and device, which cost nothing to ask for; the first
function that reads elements computes them, once. They are what the forward would have returned: computed with
its grad mode and its autocast, so they have a gradient where it had one.

Two things make that wrong, and then touching it is a RuntimeError: weights of the head that have changed
since (an optimizer's step), and weights that FSDP gathers for the forward alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastbert.runtime import prepared


class DeferredTensor(Tensor):
    """See the module. Every function of torch that reads its elements is given the computed tensor."""

    _name: str
    _compute: Callable[[], Tensor] | None
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls,
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
            # only an autograd.Function that was handed the deferred tensor itself leads a gradient here
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient(name))
        return self

    @property
    def is_computed(self) -> bool:
        """Whether the elements are there."""
        return self._value is not None

    def computed(self) -> Tensor:
        """The tensor itself, an ordinary one; the same at every call.

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
            self._value, self._compute = value, None
        return self._value

    def float(self) -> Tensor:
        """In float32; as deferred as before (accelerate asks every half-precision output for it)."""
        return self if self.dtype == torch.float32 else self._then(Tensor.float, torch.float32)

    def clone(self) -> Tensor:
        """A copy, as deferred as before (DDP copies every output)."""
        return self._then(Tensor.clone, self.dtype)

    def _then(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        if self.is_computed:
            return function(self.computed())
        return DeferredTensor(
            self._name, lambda: function(self.computed()), self.shape, dtype, self.device, self.requires_grad
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ASKS_NO_ELEMENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == _GRAD_FN and not args[0].is_computed:
            return None  # DDP asks, and must not compute it
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.computed, (args, kwargs or {}))
        return func(*args, **kwargs)


_GRAD_FN = Tensor.grad_fn.__get__
_ASKS_NO_ELEMENT = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (
                "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cpu", "is_cuda", "is_meta",
                "is_sparse", "is_quantized", "itemsize", "nbytes",
            )
        ),
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__,
        Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device,
        torch.numel, torch.is_floating_point, torch.is_complex,
    }
)  # fmt: skip


def _refuse_gradient(name: str) -> Callable[[Tensor | None], None]:
    def refuse(gradient: Tensor | None) -> None:
        if gradient is None:  # DDP's function passes every output on, used or not
            return
        raise RuntimeError(
            f"{name}: an autograd.Function took the deferred tensor, past which no gradient goes; pass "
            "output_logits=True to compute them in forward"
        )

    return refuse


class NotComputed:
    """What a compiled training forward returns for logits: any use is an error that says so."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(self._message())

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(self._message())

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        found: list[NotComputed] = []
        tree_map_only(NotComputed, found.append, (args, kwargs or {}))
        raise TypeError(found[0]._message())

    def _message(self) -> str:
        return (
            f"{self.__dict__.get('_name', 'logits')}: not computed in training under torch.compile, "
            "where nobody can touch them later; pass output_logits=True to compute them in forward"
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
    """What `compute` would return now, computed when it is touched.

    Args:
        name: what errors call it.
        compute: reads `reads` and the parameters of `modules`, nothing that changes.
        shape, dtype: of the result.
        reads: the activations it starts from.
        modules: those it runs.

    Returns:
        The deferred tensor; under `torch.compile` a stand-in that names the remedy when it is used.
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
                f"{name}: their weights are gathered by FSDP for the forward alone; pass output_logits=True "
                "to compute them there"
            )
        # functional_call puts others in their place for the forward alone
        now = _weights(modules)
        if list(map(id, now)) != list(map(id, weights)) or [_state(p) for p in now] != before:
            raise RuntimeError(
                f"{name}: the head's weights have changed since this forward (an optimizer's step?); touch "
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
