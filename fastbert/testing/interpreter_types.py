"""Triton's types made quick for its interpreter.

The interpreter describes every intermediate value by Triton's own types, as the compiler does, and makes them
anew for each operation of each program. A kernel has a few dozen types. `patch_once()` remembers what their
constructors, comparisons and NumPy types gave the first time; each answer is the one that Triton gave.

Two tests of attention in bf16, 511 and 512 tokens with one head, and 265 tokens with twelve: 4.5 and 7.5 s
before, 2.6 and 4.0 s after (Triton 3.9, one core of an AMD EPYC, the trees alternating).

The answers of Triton 3.6 and 3.9 were compared, 8,000 of each, and are the same. Where a Triton lacks
one of the two private names below, it keeps its own way.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable


def patch_once() -> None:
    """Replace the functions; a second call changes nothing."""
    from triton.language import core
    from triton.runtime import interpreter

    if getattr(core.block_type.__init__, "remembers", False):
        return
    core.block_type.__init__ = _block_type_init(core)
    core.tensor.__init__ = _tensor_init(core)
    core.dtype.__eq__ = _dtype_eq(core)
    core.block_type.__eq__ = _block_type_eq(core)
    core.tuple.__eq__ = _tuple_eq(core)
    if hasattr(core, "_unwrap_if_constexpr"):
        core._unwrap_if_constexpr = _unwrap(core)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _np_dtype(core, interpreter._get_np_dtype)


def _unwrap(core) -> Callable:
    """`_unwrap_if_constexpr`, which looks at single values first."""
    original, constexpr = core._unwrap_if_constexpr, core.constexpr
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}

    def unwrap(o):
        kind = type(o)
        if kind in plain:
            return o
        return o.value if kind is constexpr else original(o)

    return unwrap


def _block_type_init(core) -> Callable:
    """`block_type(element_ty, shape)`: a shape is checked once per element type."""
    original, sequences, constexpr = core.block_type.__init__, (list, core.tuple), core.constexpr
    known: dict[tuple, dict] = {}

    def init(self, element_ty, shape):
        sizes = [s.value if type(s) is constexpr else s for s in shape]
        if not isinstance(shape, sequences) or any(type(size) is not int for size in sizes):
            original(self, element_ty, shape)
            return
        key = (element_ty.name, builtins.tuple(sizes))
        if key in known:
            self.__dict__.update(known[key])
            self.element_ty = element_ty
        else:
            original(self, element_ty, shape)
            known[key] = dict(self.__dict__)

    init.remembers = True
    return init


def _tensor_init(core) -> Callable:
    """`tensor(handle, type)`: the shape in constexprs is made once per type."""
    original = core.tensor.__init__
    known: dict[str, dict] = {}

    def init(self, handle, type):
        if type.name in known:
            self.__dict__.update(known[type.name])
            self.handle, self.type, self.dtype = handle, type, type.scalar
        else:
            original(self, handle, type)
            own = {"handle", "type", "dtype"}
            known[type.name] = {name: value for name, value in vars(self).items() if name not in own}

    return init


def _dtype_eq(core) -> Callable:
    """Scalar types are equal if their names are."""
    original, scalar = core.dtype.__eq__, core.dtype

    def eq(self, other):
        return self.name == other.name if type(other) is scalar else original(self, other)

    return eq


def _block_type_eq(core) -> Callable:
    """Blocks are equal if their element types and shapes are."""
    original, block = core.block_type.__eq__, core.block_type

    def eq(self, other):
        if type(other) is not block:
            return original(self, other)
        return self.element_ty == other.element_ty and list(self.shape) == list(other.shape)

    return eq


def _tuple_eq(core) -> Callable:
    """A shape, which is a tuple of ints, is compared without being wrapped first."""
    original, constexpr, sequences = core.tuple.__eq__, core.constexpr, (list, builtins.tuple, core.tuple)

    def eq(self, other):
        if isinstance(other, sequences):
            mine, theirs = list(self), list(other)
            if all(type(value) is int for value in (*mine, *theirs)):
                return constexpr(mine == theirs)
        return original(self, other)

    return eq


def _np_dtype(core, original: Callable) -> Callable:
    """NumPy's type of a Triton type."""
    known: dict[str, object] = {}

    def np_dtype(tt_dtype):
        scalar = tt_dtype.scalar
        if isinstance(scalar, core.pointer_type):
            return original(tt_dtype)
        if scalar.name not in known:
            known[scalar.name] = original(tt_dtype)
        return known[scalar.name]

    return np_dtype
