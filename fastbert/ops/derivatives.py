"""First derivatives by kernels, and all others by PyTorch's own operations, inside `double_backward`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class _Plain(threading.local):
    """Whether the thread is inside `double_backward`."""

    asked = False


_plain = _Plain()


@contextlib.contextmanager
def double_backward() -> Iterator[None]:
    """Inside the block this thread calls fastbert's own models as modules of plain PyTorch.

    Their gradients can then be differentiated again (`create_graph=True`): for gradient penalties, Hessians,
    SMART, MAML. It is about as slow as transformers, and padding is computed. Accelerated models are not
    affected: call `fastbert.restore` on them.
    """
    before, _plain.asked = _plain.asked, True
    try:
        yield
    finally:
        _plain.asked = before


def plain_torch() -> str | None:
    """Why models must compute with PyTorch's own operations now; None if kernels may."""
    if _plain.asked:
        return "fastbert.double_backward is on"
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return "torch.func or forward-mode derivatives look at single operations"
    return None


class _Twice(torch.autograd.Function):
    """Passes gradients through unchanged; its backward raises, because they have no gradient themselves."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if g is None else g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "fastbert's operations are differentiated once, but this backward asks for the gradient of a "
            "gradient (create_graph=True); for a gradient penalty or a Hessian call fastbert.restore on an "
            "accelerated model, and fastbert's own models under fastbert.double_backward()"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd.Function whose gradients cannot be differentiated again.

    Differentiating them raises RuntimeError with advice; torch's decorator of this name has none.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *dout: torch.Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *dout)
        with torch.no_grad():
            grads = backward(ctx, *dout)
        grads = grads if isinstance(grads, tuple) else (grads,)
        # What the gradients depend on leads autograd here, to the error
        sources = [
            t for t in (*dout, *getattr(ctx, "saved_tensors", ())) if t is not None and t.requires_grad
        ]
        return _Twice.apply(
            len(grads), *(None if g is None else g.detach().requires_grad_() for g in grads), *sources
        )

    return checked
