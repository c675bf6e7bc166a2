"""Schemas of custom ops, made of the NamedTuples that travel to the backends: an argument is spelled once."""

from __future__ import annotations

from typing import Any, get_type_hints

from torch import Tensor

# `Any` is `TensorOrNone` of checks.py; NamedTuples within NamedTuples hold integers.
_TYPES: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", Any: "Tensor?", int: "SymInt"}
_TYPES |= {float: "float", bool: "bool", str: "str", str | None: "str?"}


def schema(*parts: type | str, returns: int) -> str:
    """The schema of a custom op.

    Args:
        parts: in order, NamedTuples, whose fields are arguments, and texts of other arguments.
        returns: how many tensors the op returns.
    """
    arguments = [
        argument
        for part in parts
        for argument in (
            [part]
            if isinstance(part, str)
            else [f"{_TYPES.get(kind, 'SymInt[]')} {name}" for name, kind in get_type_hints(part).items()]
        )
    ]
    return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * returns)})"
