"""Instances that pass for a class of transformers, which is never imported here.

transformers' Trainer and pipelines ask `isinstance(model, PreTrainedModel)` and `isinstance(outputs,
ModelOutput)` and treat anything else as a stranger: the Trainer then saves no config.json, a pipeline turns
the outputs into a plain dict. `isinstance` also asks an object for its `__class__`. Once transformers is
loaded, ours answers with a subclass of both its type and the class of transformers. `type(x)` stays what it
was; the class that answers has no instances and no subclasses.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar


class Lookalike:
    """Base of the classes whose instances pass for a class of transformers.

    Attributes:
        looks_like: module and name of that class.
    """

    looks_like: ClassVar[tuple[str, str]]

    @property
    def __class__(self) -> type:
        """The own class, or one below it and the class of transformers."""
        return _facade(type(self))

    @__class__.setter
    def __class__(self, cls: type) -> None:
        object.__dict__["__class__"].__set__(self, _native(cls))

    def __reduce_ex__(self, protocol: int) -> Any:
        # pickle wants `__class__` to be the type where an object is made by copyreg's own function
        made = super().__reduce_ex__(max(int(protocol), 2))
        return (_blank, made[1][:1], *made[2:])


class _Facade(type):
    """The type of the classes that answer `isinstance`. Making an instance or a subclass of one makes that of
    the native class.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
        if any(isinstance(base, _Facade) for base in bases):
            return type(name, tuple(_native(base) for base in bases), body)
        return super().__new__(cls, name, bases, body)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__native__(*args, **kwargs)


class _Quiet:
    """Keeps transformers' `__init_subclass__` from looking at a facade."""

    def __init_subclass__(cls) -> None:
        pass


_facades: dict[tuple[type, type], type] = {}


def _facade(native: type) -> type:
    module, name = native.looks_like
    foreign = getattr(sys.modules.get(module), name, None)
    if foreign is None:
        return native
    found = _facades.get((native, foreign))
    if found is None:
        body = {
            "__native__": native,
            "__module__": native.__module__,
            "__qualname__": native.__qualname__,
            "__doc__": native.__doc__,
        }
        found = _facades[native, foreign] = _Facade(native.__name__, (_Quiet, native, foreign), body)
    return found


def _native(cls: type) -> type:
    return cls.__native__ if isinstance(cls, _Facade) else cls


def _blank(cls: type) -> Any:
    return cls.__new__(cls)
