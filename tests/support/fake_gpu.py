"""A device that is not the CPU, for tests without a GPU: tensors on `fakegpu:0`, which compute on the CPU.

Code of fastbert that asks "is this a CPU tensor?" takes the path of a GPU (the `aten` backend). `waits` sees
each operation for which the host of a real GPU would have to wait. Import this in a process of its own:
PyTorch takes the device for its accelerator from then on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fakegpu"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)

# autocast asks
torch.fakegpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]

# names of operations that return a value or a size from the device to the host
_WAITING = {
    *("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "unique", "_unique"),
    *("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount"),
}
_seen: list[str] = []


class FakeTensor(torch.Tensor):
    """A tensor on `DEVICE`; `raw` holds its elements."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )

    def __init__(self, raw: torch.Tensor):
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def tolist(self):
        _seen.append("tolist")
        return self.raw.tolist()


# what PyTorch's own code asks for by itself, as for the list in `t[[0, 2]]`
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl(
    "empty_strided",
    lambda size, stride, dtype=None, **_: FakeTensor(torch.empty_strided(size, stride, dtype=dtype)),
    "PrivateUse1",
)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _raw(target).copy_(_raw(source))
    return target


_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")


class _Factories(TorchDispatchMode):
    """`torch.zeros(…, device=DEVICE)` and other functions that get no FakeTensor but must return one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    wanted = kwargs.get("device")
    fakes = [t for t in tree_leaves((args, kwargs)) if isinstance(t, FakeTensor)]
    makes_fakes = bool(fakes) if wanted is None else torch.device(wanted).type == NAME
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    name = func.overloadpacket.__name__
    if (fakes or makes_fakes) and _waits(name, args, kwargs, makes_fakes):
        _seen.append(name)
    for t in tree_leaves((args, kwargs)):
        mixed = isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor) and t.dim() > 0
        if fakes and mixed and name not in ("copy_", "_to_copy"):
            raise RuntimeError(f"{func}: tensors on {DEVICE} and on {t.device}")
    raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
    out = func(*raw_args, **raw_kwargs)
    if func._schema.is_mutable and out is not None and fakes:
        return args[0] if "out" not in kwargs else kwargs["out"]
    return tree_map(lambda t: FakeTensor(t) if isinstance(t, torch.Tensor) and makes_fakes else t, out)


def _raw(value):
    return value.raw if isinstance(value, FakeTensor) else value


def _waits(name, args, kwargs, makes_fakes) -> bool:
    if name in _WAITING:
        return True
    if name == "_to_copy":  # device to host; or host to device, unless asked not to wait
        return not makes_fakes or (not isinstance(args[0], FakeTensor) and not kwargs.get("non_blocking"))
    if name == "copy_":
        target, source, *flag = args
        crosses = isinstance(target, FakeTensor) != isinstance(source, FakeTensor)
        return crosses and not (isinstance(target, FakeTensor) and any([*flag, kwargs.get("non_blocking")]))
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):  # a mask as an index has a size to find
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return False


def fake(t: torch.Tensor) -> FakeTensor:
    """`t` on the device."""
    return FakeTensor(t.clone())


def real(t: torch.Tensor) -> torch.Tensor:
    """The values of a tensor on the device; does not count as waiting."""
    assert type(t) is FakeTensor, f"expected a tensor on {DEVICE}, got one on {t.device}"
    return t.raw


def move(model: torch.nn.Module) -> torch.nn.Module:
    """Move the model's parameters and buffers to the device in place, and freeze them."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(fake(parameter.detach()), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    return model


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """A list that fills with the operations for which the host would wait."""
    _seen.clear()
    with _Factories():
        yield _seen
