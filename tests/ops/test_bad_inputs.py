"""What is wrong with an operand in the same way for every op: its type, kind, device or dimensions.

What an op refuses besides is in its own test file.
"""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

from tests.support.hostile.public_ops import PUBLIC

WRONG = {
    "a list": lambda t: t.tolist(),
    "of another kind": lambda t: t.long() if t.is_floating_point() else t.double(),
    "elsewhere": lambda t: t.to("meta"),
    "of one more dimension": lambda t: t.unsqueeze(-1),
    "nothing": lambda t: None,
}
OPTIONAL = ("value_bias", "up_bias", "bias", "teacher_bias", "gate")  # also where they have no default
MOVED = ("pack", "unpack")  # ops that move what they get, of any kind and shape


@pytest.mark.parametrize("op", [op for op in PUBLIC if op.partition(",")[0] != "encoder_layer"])
def test_wrong_operands_are_named(op):
    """By the name of the operand, or of one that does not fit to it."""
    function, base = PUBLIC[op].function, PUBLIC[op].args()
    parameters = inspect.signature(function).parameters
    operands = {name: t for name, t in base.items() if isinstance(t, torch.Tensor)}
    for (name, t), (wrong, change) in itertools.product(operands.items(), WRONG.items()):
        if wrong.startswith("of") and op in MOVED and name == "x":
            continue
        # of a function with `**parameters` each of those is needed
        if wrong == "nothing" and (name in OPTIONAL or getattr(parameters.get(name), "default", 0) is None):
            continue
        with pytest.raises((TypeError, ValueError), match=r"^[\w, ]+: "):
            function(**{**base, name: change(t)})


@pytest.mark.parametrize("op", [op for op in PUBLIC if op.partition(",")[0] not in (*MOVED, "encoder_layer")])
def test_integers_alone_are_refused(op):
    """Where all operands are of one kind, and that is the wrong one."""
    base = {name: WRONG["of another kind"](t) if is_float(t) else t for name, t in PUBLIC[op].args().items()}
    with pytest.raises((TypeError, ValueError), match=r"^[\w, ]+: expected "):
        PUBLIC[op].function(**base)


def is_float(t: object) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()
