"""Classes that replace transformers' own on accelerated modules.

An accelerated module has another `__class__`, a subclass of one of our mixins and of its own class, with the
same name. Its parameters, buffers, hooks and attributes do not move, so nothing changes for an optimizer, a
parent, DDP or a pipeline that holds the module. There is one subclass per class and mixin.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastbert.layers.modules import is_own


@dataclass(frozen=True)
class Options:
    """The arguments of `fastbert.accelerate`; `int8` means dtype="int8"."""

    strict: bool = False
    attention: bool = True
    ffn: bool = True
    layer_norm: bool = True
    unpad: bool = True
    int8: bool = False


class Accelerated(nn.Module):
    """Mixin of every accelerated module.

    Attributes:
        fastbert_base: the class that the module had.
        fastbert_mixin: the mixin of its class.
        fastbert_state: what `accelerate` stored in it; None in a module that was created from an accelerated
            class, which runs as stock.
    """

    fastbert_base: Any = None
    fastbert_mixin: Any = None
    fastbert_state: Any = None

    def fastbert_how(self) -> str:
        """How the module runs now, in words; empty if its parts show it."""
        return ""

    def extra_repr(self) -> str:
        """The stock module's text, and how it runs."""
        try:
            how = self.fastbert_how()
        # A part is missing; printing the model must still work
        except (AttributeError, KeyError):
            how = "it has other parts than the stock model"
        return ", ".join(filter(None, (super().extra_repr(), how and f"fastbert: {how}")))

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # pickle cannot find the class by its name, which is the stock class's
        getstate = getattr(self, "__getstate__", None)
        state = self.__dict__ if getstate is None else getstate()
        return _bare, (self.fastbert_mixin, self.fastbert_base), state


def _bare(mixin: type, base: type) -> nn.Module:
    cls = class_for(mixin, base)
    return cls.__new__(cls)


@functools.cache
def class_for(mixin: type, base: Any) -> Any:
    """The subclass of `mixin` and `base` that has the name of `base`."""
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "fastbert_base": base,
        "fastbert_mixin": mixin,
    }
    if "forward" in vars(mixin):
        body["forward"] = _under_the_signature_of(base.forward, vars(mixin)["forward"])
    return _metaclass(type(base))(base.__name__, (mixin, base), body)


@functools.cache
def _metaclass(kind: type) -> type:
    """The metaclass of accelerated classes whose base has the metaclass `kind`.

    It makes pickle use `_recipe`, because by its name pickle would find the stock class.
    """
    made = type(f"Accelerated{kind.__name__}", (kind,), {})
    copyreg.pickle(made, _recipe)
    return made


def _recipe(cls: Any) -> Any:
    """How pickle makes a class again; a class that another library derived from ours has its own name."""
    if "fastbert_base" not in vars(cls):
        return cls.__qualname__
    return class_for, (cls.fastbert_mixin, cls.fastbert_base)


def _under_the_signature_of(original: Any, function: types.FunctionType) -> Any:
    """A copy of `function` with the signature of `original`, for `inspect.signature`.

    Trainer reads the signature to drop the columns of a data set that `forward` does not name.
    """
    twin = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return functools.wraps(original)(twin)


@functools.cache
def positional(base: Any) -> tuple[str, ...]:
    """The names of the arguments that a stock class's `forward` takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(base.forward).parameters.values() if p.kind in kinds)[1:]


def swap(module: nn.Module, mixin: type, state: Any) -> None:
    """Make `module` an accelerated one."""
    _change(module, class_for(mixin, type(module)))
    module.__dict__["fastbert_state"] = state


def _change(module: nn.Module, cls: Any) -> None:
    """Give `module` another class.

    HuggingFace's accelerate keeps a module's `forward` in an attribute under its hooks, and leaves it there
    when it removes them. The new class's `forward` replaces it.
    """
    functions = [vars(base).get("forward") for base in type(module).__mro__]
    kept = [
        name
        for name in ("forward", "_old_forward")
        if any(is_own(module.__dict__.get(name), module, function) for function in functions)
    ]
    module.__class__ = cls
    for name in kept:
        module.__dict__[name] = types.MethodType(cls.forward, module)


def swap_back(module: nn.Module) -> None:
    """Give an accelerated module its own class again.

    Raises:
        RuntimeError: another library has derived a class from ours.
    """
    if "fastbert_base" not in vars(type(module)):
        raise RuntimeError(
            f"model: {type(module).__name__} was wrapped (by FSDP?) after it was accelerated; it cannot be "
            "restored"
        )
    _change(module, vars(type(module))["fastbert_base"])
    module.__dict__.pop("fastbert_state", None)
