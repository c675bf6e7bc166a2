"""What the tests of every op share: the backends that serve it on this CPU, layouts, and compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastbert.runtime import dispatch
from fastbert.runtime.table import TABLE

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
HALF = [torch.bfloat16, torch.float16]
# Layouts of a tensor whose values do not change.
LAYOUTS = {
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "stepped": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "offset": lambda t: torch.cat([t[:1], t])[1:],
}


class Largest(TorchDispatchMode):
    """The shape of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.shape = torch.Size()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.numel() > self.shape.numel():
                self.shape = t.shape
        return out


def serves(op: str, backend: str, dtype: torch.dtype | None = None) -> bool:
    """Whether the backend serves the op here; `dtype`: in this dtype."""
    return dispatch.unsupported_reason(backend, op, "cpu", dtype) is None


def backends(op: str, dtype: torch.dtype | None = None) -> list[str]:
    """The backends that serve the op here; `dtype`: in this dtype."""
    return [b for b in TABLE["cpu"][op] if serves(op, b) and serves(op, b, dtype)]


def served(op: str) -> list[tuple[str, torch.dtype]]:
    """(backend, dtype) of all that serve the op here."""
    return [(b, d) for b in backends(op) for d in DTYPES if serves(op, b, d)]


def pinned(op: str, dtype: torch.dtype | None = None) -> Callable:
    """A fixture: the name of each of `backends(op, dtype)`, which serves the op in the test."""

    @pytest.fixture(params=backends(op, dtype))
    def backend(request: pytest.FixtureRequest) -> Iterator[str]:
        with dispatch.use_backend(**{op: request.param}):
            yield request.param

    return backend


def assert_equal(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """Bit-equal, tensor by tensor; a NaN fails."""
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


def gradients(y: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`y` and the gradients of the leaves that want one, for numbers that depend on the shape alone."""
    wanted = [t for t in leaves if t.requires_grad]
    dy = torch.linspace(-1, 2, y.numel()).reshape(y.shape).to(y.dtype)
    return [y.detach(), *(torch.autograd.grad(y, wanted, dy) if wanted else ())]


def assert_compiled_is_eager(
    step: Callable, inputs_of: Callable[[int], Sequence[torch.Tensor]], sizes: Sequence[int] = (3, 8, 13)
) -> None:
    """Compiled once for all sizes, with results and gradients that are bit-equal."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    frames = set()
    for size in sizes:
        inputs = inputs_of(size)
        expected, actual = (gradients(f(*inputs), inputs) for f in (step, compiled))
        frames.add(counter.frame_count)
        assert_equal(actual, expected)
    assert len(frames) == 1, "recompiled for another size"
