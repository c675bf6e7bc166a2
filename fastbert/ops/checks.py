"""Argument checks shared by the ops. Every error names the argument, what came and what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch

# `Tensor | None` where another argument decides which: a type checker cannot follow that.
TensorOrNone = Any

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_KINDS = frozenset(_ORDINARY)
# `torch.is_autocast_enabled` of a device's type takes four times as long
_any_autocast = torch._C._is_any_autocast_enabled
_is_neg, _is_zero = torch._C.TensorBase.is_neg, torch._C.TensorBase._is_zerotensor


def float_tensor(name: str, t: object, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return `t`: a float32, bfloat16, float16 or float64 tensor, on `like`'s device if given."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float32, bfloat16, float16 or float64, got {t.dtype}")
    if type(t) not in _ORDINARY:
        own_elements(name, t)
    same_device(name, t, like)
    return t


def float_tensors(like: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """`float_tensor` of each that is not None."""
    for name, t in tensors.items():
        if t is not None:
            float_tensor(name, t, like)


def are_ordinary(x: Any, *others: Any) -> bool:
    """Whether backends may take these tensors as they are, so that only shapes and values are left to check.

    All are of `x`'s dtype and device, with the last dimension contiguous; all but `x` may be None. There is
    no autocast, and torch.compile does not trace the call. This runs at every call, so it is one loop; checks
    one by one are for calls where it is false.
    """
    if torch.compiler.is_compiling() or type(x) not in _KINDS:
        return False
    dtype, device = x.dtype, x.device
    if dtype not in FLOATS or _any_autocast():
        return False
    for t in (x, *others):
        if t is not None and (
            type(t) not in _KINDS
            or t.dtype is not dtype
            or t.device != device
            or t.layout is not torch.strided
            or not (t.is_contiguous() or t.stride(-1) == 1)
        ):
            return False
    return True


def are_plain(tensors: list[Any], dtypes: list[torch.dtype], sizes: list[tuple[Any, ...]]) -> bool:
    """Whether kernels may read these tensors of a call of inference as they are.

    Where it is true, only values are left to check. This runs at every call.

    Args:
        tensors: objects that may be tensors.
        dtypes, sizes: the dtype and the shape that each tensor must have; each has a dimension.
    """
    if torch.is_grad_enabled() or dtypes[0] not in FLOATS or not are_ordinary(tensors[0]):
        return False
    device = tensors[0].device
    for t, dtype, size in zip(tensors, dtypes, sizes, strict=True):
        if (
            type(t) not in _KINDS
            or t.dtype is not dtype
            or t.device != device
            or t.layout is not torch.strided
            or t.shape != size
            or t.stride(-1) != 1
            or _is_neg(t)
            or _is_zero(t)
        ):
            return False
    return True


def own_elements(name: str, t: torch.Tensor) -> None:
    """`t` must not wrap other tensors, as a DTensor does: kernels read memory, and it has none."""
    if hasattr(type(t), "__tensor_flatten__") and not torch.compiler.is_compiling():
        raise TypeError(
            f"{name}: expected a torch.Tensor with elements of its own, got a {type(t).__name__}; shard and "
            "parallelize modules that are called, such as a whole layer, not what lies between"
        )


def int_tensor(name: str, t: object, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return `t`: a dense int64 or int32 tensor, on `like`'s device if given."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: expected int64 or int32, got {t.dtype}")
    if t.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got {t.layout}")
    same_device(name, t, like)
    return t


def typed(name: str, t: object, dtype: torch.dtype, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return `t`: a tensor of this dtype, on `like`'s device if given."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
    if t.dtype != dtype:
        raise TypeError(f"{name}: expected {str(dtype).removeprefix('torch.')}, got {t.dtype}")
    same_device(name, t, like)
    return t


def same_device(name: str, t: torch.Tensor, like: torch.Tensor | None) -> None:
    """`t` must live where `like` does."""
    if like is not None and t.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {t.device}")


def operand(
    name: str,
    t: torch.Tensor | None,
    expected: tuple[Any, ...],
    dtypes: tuple[torch.dtype, ...],
    like: torch.Tensor,
    strided: bool = False,
    needed: bool = False,
) -> None:
    """Check a tensor that a custom op passes on to kernels unchanged: `torch.ops` takes any tensor.

    Args:
        expected: the shape.
        strided: whether the last dimension alone must be contiguous.
        needed: whether None is an error.
    """
    if t is None:
        if needed:
            raise ValueError(f"{name}: expected a torch.Tensor, got None")
        return
    shape(name, t, expected)
    if t.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        raise TypeError(f"{name}: expected {names}, got {t.dtype}")
    same_device(name, t, like)
    if t.is_contiguous() or (strided and (t.shape[-1] == 1 or t.stride(-1) == 1)):
        return
    wanted = "the last dimension contiguous" if strided else "a contiguous tensor"
    raise ValueError(f"{name}: expected {wanted}, got strides {t.stride()}")


def rounded_operands(
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """`operand` of what a product with a weight of 8 bits, of `dtype`, takes besides 2-D `x`."""
    out = weight.shape[0] if weight.dim() else 0
    operand("weight", weight, (out, matrix("x", x)[1]), (dtype,), x)
    operand("scale", scale, (out,), (torch.float32,), x)
    operand("bias", bias, (out,), (x.dtype, torch.float32), x)


def rounded_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    **others: torch.Tensor | None,
) -> None:
    """Check the arguments of a product with a weight of 8 bits, of `dtype`; `others` only for gradients."""
    float_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected shape (..., in) with in >= 1, got {tuple(x.shape)}")
    typed("weight", weight, dtype, x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(f"weight: expected shape (out, {x.shape[-1]}), got {tuple(weight.shape)}")
    shape("scale", typed("scale", scale, torch.float32, x), weight.shape[:1])
    if bias is not None:
        shape("bias", float_tensor("bias", bias, x), weight.shape[:1])
        if bias.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"bias: expected x's dtype {x.dtype} or float32, got {bias.dtype}")
    if not torch.is_grad_enabled():
        return
    for name, t in {"x": x, "weight": weight, "scale": scale, "bias": bias, **others}.items():
        if isinstance(t, torch.Tensor) and t.requires_grad:
            raise RuntimeError(
                f"{name}: requires a gradient, and 8-bit weights have none: a quantised model cannot be "
                "trained. For inference call it under torch.no_grad(); to train, load the "
                "floating-point checkpoint, train that, and quantise it afterwards"
            )


def inference_only(op: str, tensors: Iterable[object], instead: str = "") -> None:
    """Raise RuntimeError where a gradient is asked for, which `op` lacks; `instead`: other ways out."""
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{op}: gradients are enabled and an argument requires one, but it is for inference: "
            f"call it under torch.no_grad(){instead}"
        )


def matrix(name: str, t: torch.Tensor) -> tuple[int, int]:
    """The shape of the 2-D `t` that a custom op takes, having checked it; rows are contiguous."""
    if t.dim() != 2 or t.shape[1] == 0:
        raise ValueError(f"{name}: expected shape (rows, columns), columns >= 1, got {tuple(t.shape)}")
    operand(name, t, t.shape, FLOATS, t, strided=True)
    return t.shape[0], t.shape[1]


def shape(name: str, t: torch.Tensor, expected: tuple[Any, ...]) -> None:
    """`t` must have exactly this shape."""
    if tuple(t.shape) != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)}, got {tuple(t.shape)}")


def shapes(expected: tuple[Any, ...], **tensors: torch.Tensor | None) -> None:
    """Each tensor that is not None must have exactly this shape."""
    for name, t in tensors.items():
        if t is not None and t.shape != expected:
            shape(name, t, expected)


def dropout(
    dropout_p: float, seed: torch.Tensor | None, offset: int, like: torch.Tensor
) -> torch.Tensor | None:
    """Check the dropout arguments; returns the seed, or None where nothing is dropped."""
    if not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p < 1.0:  # NaN fails both comparisons
        raise ValueError(f"dropout_p: expected a probability in [0, 1), got {dropout_p!r}")
    if dropout_p == 0.0:
        return None
    if seed is None:
        raise ValueError("seed: dropout_p > 0 needs an int64 tensor of one element, got None")
    if not isinstance(seed, torch.Tensor) or seed.dtype != torch.int64 or seed.numel() != 1:
        got = f"{seed.dtype} {tuple(seed.shape)}" if isinstance(seed, torch.Tensor) else type(seed).__name__
        raise ValueError(f"seed: expected an int64 tensor of one element, got {got}")
    same_device("seed", seed, like)
    if not isinstance(offset, (int, torch.SymInt)) or not 0 <= offset < 2**32:
        raise ValueError(f"offset: expected an integer in [0, 2**32), got {offset!r}")
    return seed.reshape(1)


def eps(value: float) -> float:
    """`eps` of a norm must be a finite number >= 0."""
    # comparisons only, which NaN fails: under torch.compile the value may be symbolic
    if not isinstance(value, (int, float, torch.SymFloat)) or not 0 <= value < math.inf:
        raise ValueError(f"eps: expected a finite number >= 0, got {value!r}")
    return float(value)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The autocast dtype in force on `x`'s device, or None."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return None


def compute_dtype(t: torch.Tensor) -> torch.dtype:
    """float64 for float64 tensors, else float32: what the reference and all statistics are computed in."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def under_autocast(*tensors: TensorOrNone) -> tuple[TensorOrNone, ...]:
    """The tensors in the autocast dtype where autocast is on, as PyTorch does it: float64 stays as it is."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def same_dtype(name: str, t: torch.Tensor, other: str, like: torch.Tensor) -> None:
    """`t` must have the dtype of `like`, which is the argument called `other`."""
    if t.dtype != like.dtype:
        raise TypeError(f"{name}: expected {other}'s dtype {like.dtype}, got {t.dtype}")


def same_dtypes(x: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Each tensor that is not None must have the dtype of `x`."""
    for name, t in tensors.items():
        if t is not None:
            same_dtype(name, t, "x", x)


def rows(t: torch.Tensor) -> torch.Tensor:
    """The 2-D view (rows, last dimension) of `t`, copied only where the last dimension has gaps."""
    if t.dim() != 2:
        t = t.reshape(-1, t.shape[-1])
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def as_dtype(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`t.to(dtype)`, which takes a microsecond also where there is nothing to do."""
    return t if t.dtype == dtype else t.to(dtype)


def norm_vector(vector: torch.Tensor | None, dtype: torch.dtype) -> TensorOrNone:
    """A norm's parameter for the backends: contiguous, in `dtype` or float32 (float64 with float64)."""
    if vector is None:
        return None
    if vector.dtype not in (dtype, torch.float32) or dtype == torch.float64:
        vector = vector.to(dtype if dtype == torch.float64 else torch.float32)
    return vector.contiguous()


def has_values(t: torch.Tensor) -> bool:
    """Whether the host may look at the tensor's elements without waiting."""
    return t.device.type == "cpu"


def ids_in_range(name: str, what: str, ids: torch.Tensor, size: int, table: str) -> None:
    """Every id must index a table of `size` rows. Looks at CPU tensors only: a GPU would have to sync."""
    if not has_values(ids) or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = map(torch.Tensor.item, torch.aminmax(ids))
    if low < 0 or high >= size:
        raise ValueError(f"{name}: {what} {low if low < 0 else high} is out of range for {table} of {size}")


def lengths(cu_seqlens: torch.Tensor, rows: int, of: str) -> int | None:
    """The longest length. `cu_seqlens` must begin at 0, never fall, and end within the `rows` rows of `of`.

    Looks at CPU tensors only, and returns None for others: a GPU would have to sync.
    """
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    ends = cu_seqlens.tolist()
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {ends[0]}")
    each = [end - start for start, end in pairwise(ends)]
    if min(each, default=0) < 0:
        b = next(b for b, length in enumerate(each) if length < 0)
        raise ValueError(
            f"cu_seqlens: expected to be non-decreasing, got {ends[b]} then {ends[b + 1]} at {b}"
        )
    if ends[-1] > rows:
        raise ValueError(f"cu_seqlens: expected to end within the {rows} rows of {of}, got {ends[-1]}")
    return max(each, default=0)
