"""The public names of fastbert and their signatures, as one flat table.

`python -m tests.support.public_api` prints it as JSON. tests/house/public_api.json is the table of the
package before its modules moved into rooms. A copy of this file prints the table of the fastbert on the path.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

PARSERS = ("fastbert.cli", "fastbert.cli.main")  # before and after the modules moved


def signature(function: Any) -> str:
    """Names, order, kinds and defaults of the parameters; annotations may be made more exact."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(?)"
    empty = inspect.Parameter.empty
    plain = [parameter.replace(annotation=empty) for parameter in found.parameters.values()]
    text = str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"\bfastbert(\.\w+)+\.", "", text))


def members(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """`value` itself and, of a class, the public methods that our own classes define."""
    if not inspect.isclass(value):
        yield name, signature(value) if callable(value) else type(value).__name__
        return
    yield name, f"class {signature(value)}"
    own = {key for base in value.__mro__ if base.__module__.startswith("fastbert") for key in vars(base)}
    for key in sorted(own):
        if not key.startswith("_"):
            member = inspect.getattr_static(value, key)
            kind = {classmethod: "classmethod ", staticmethod: "staticmethod ", property: "property"}
            shown = "" if isinstance(member, property) or not callable(getattr(value, key, None)) else None
            text = signature(getattr(value, key)) if shown is None else ""
            yield f"{name}.{key}", f"{kind.get(type(member), '')}{text}"


def options() -> Iterator[tuple[str, str]]:
    """Every option of every command of the command line, with its default."""
    for place in PARSERS:
        parser = getattr(importlib.import_module(place), "build_parser", None)
        if parser is not None:
            break
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        for action in command._actions:
            shown = " ".join(action.option_strings) or action.dest
            details = (action.nargs, action.choices and sorted(map(str, action.choices)), action.default)
            yield f"fastbert {name} {shown}", repr(details)


def public_api() -> dict[str, str]:
    """Public name -> what it is."""
    import fastbert
    import fastbert.ops
    from fastbert import testing

    found: dict[str, str] = {}
    for name in fastbert.__all__:
        found.update(members(name, getattr(fastbert, name)))
    for name, value in vars(testing).items():
        ours = getattr(value, "__module__", "fastbert.testing").startswith("fastbert.testing")
        if not name.startswith("_") and ours and not inspect.ismodule(value) and name != "annotations":
            found.update(members(f"testing.{name}", value))
    for module in pkgutil.iter_modules(fastbert.ops.__path__):
        op = importlib.import_module(f"fastbert.ops.{module.name}")
        for name, value in vars(op).items():
            own = getattr(value, "__module__", "") == op.__name__
            if own and inspect.isfunction(value) and not name.startswith("_"):
                found[f"ops.{module.name}.{name}"] = signature(value)
    found.update(options())
    return dict(sorted(found.items()))


if __name__ == "__main__":
    print(json.dumps(public_api(), indent=0, ensure_ascii=False))
