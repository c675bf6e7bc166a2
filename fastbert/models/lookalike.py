"""Instances that pass `isinstance` for a class of transformers, which is never imported here.

transformers' Trainer and pipelines ask `isinstance(model, PreTrainedModel)` and `isinstance(outputs,
ModelOutput)`. If the answer is no, the Trainer saves no config.json, and a pipeline turns the outputs into a
plain dict. `isinstance` also asks an object for its `__class__`. Once transformers is loaded, our objects
return a facade there: a subclass of both their own class and that of transformers. `type(x)` does not change,
and a facade has neither instances nor subclasses.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, ClassVar


class Lookalike:
    """Base of the classes whose instances pass for a class of transformers.

    Attributes:
        looks_like: module and name of that class.
    """

    looks_like: ClassVar[tuple[str, str]]

    @property
    def __class__(self) -> type:
        """The object's own class, or its facade."""
        return _facade(type(self))

    @__class__.setter
    def __class__(self, cls: type) -> None:
        object.__dict__["__class__"].__set__(self, _own(cls))

    def __reduce_ex__(self, protocol: int) -> Any:
        # If copyreg's own function creates the object, pickle requires `__class__` to be its type
        made = super().__reduce_ex__(max(int(protocol), 2))
        return (_blank, made[1][:1], *made[2:])


class _Facade(type):
    """The type of facades. Constructing or subclassing a facade makes an object of our own class instead."""

    __own__: type

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
        if any(isinstance(base, _Facade) for base in bases):
            return type(name, tuple(_own(base) for base in bases), body)
        return super().__new__(cls, name, bases, body)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__own__(*args, **kwargs)


class _Quiet:
    """Keeps transformers' `__init_subclass__` from running for a facade."""

    def __init_subclass__(cls) -> None:
        pass


_facades: dict[tuple[type, type], type] = {}


@cache
def _facade_type(foreign: type) -> type:
    """`_Facade` for a class of transformers whose metaclass is `foreign`: ModelOutput has one since 5.24."""
    if issubclass(_Facade, foreign):
        return _Facade
    return type(_Facade.__name__, (_Facade, foreign), {})


def _facade(own: type) -> type:
    """The facade of one of our classes; the class itself while transformers is not loaded."""
    module, name = own.looks_like
    foreign = getattr(sys.modules.get(module), name, None)
    if foreign is None:
        return own
    found = _facades.get((own, foreign))
    if found is None:
        body = {
            "__own__": own,
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
            "__doc__": own.__doc__,
        }
        make = _facade_type(type(foreign))
        found = _facades[own, foreign] = make(own.__name__, (_Quiet, own, foreign), body)
    return found


def _own(cls: type) -> type:
    """The class that a facade belongs to; any other class itself."""
    return cls.__own__ if isinstance(cls, _Facade) else cls


def _blank(cls: Any) -> Any:
    return cls.__new__(cls)
