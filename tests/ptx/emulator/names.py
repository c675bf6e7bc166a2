"""PTX names as the table of forms has them: without what changes nothing here, such as hints to caches."""

from __future__ import annotations

import re

from tests.ptx.emulator.parse import BYTES, SINK, Both, Negated, Number, Register, Statement

SPACES = {"global": "global", "shared": "shared", "local": "local", "param": "param", "const": "global"}
SPACES |= {"shared::cta": "shared", "shared::cluster": "cluster", "param::entry": "param"}
# Blocks run one after another and memory is always up to date: orders and scopes have nothing to add.
ORDERS = {"weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"}
ORDERS |= {"cta", "cluster", "gpu", "sys"}
CACHES = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"}
HINT = re.compile(r"L[12]::(evict_\w+|no_allocate|cache_hint|64B|128B|256B)$")


def bits(kind: str) -> str:
    """The type of bits as wide as a type: `b32` of `f32`."""
    return "pred" if kind == "pred" else f"b{8 * BYTES[kind]}"


def canonical(statement: Statement) -> tuple[str, tuple, str]:
    """(name in the table, operands, type of the result); a KeyError where a modifier is not known."""
    opcode, *modifiers = re.sub(r"(?<=L[12]):+(?=\w)", "::", statement.name).split(".")
    operands = statement.operands
    if any(m == "L2::cache_hint" for m in modifiers) and opcode != "cp":
        operands = operands[:-1]
    if opcode in ("ld", "st"):
        return accesses(opcode, modifiers, operands)
    if opcode in ("atom", "red") and "async" not in modifiers:
        return updates(opcode, modifiers, operands)
    if opcode == "cp" and modifiers[:2] in (["async", "ca"], ["async", "cg"]):
        if "L2::cache_hint" in modifiers:
            operands = operands[:-1]
        kept = [SPACES.get(m, m) for m in modifiers if not HINT.match(m)]
        return ".".join([opcode, *kept]), operands, ""
    if opcode in ("mov", "selp") and len(modifiers) == 1:
        return f"{opcode}.{bits(modifiers[0])}", operands, modifiers[0]
    if opcode == "cvta":
        modifiers = [m.removesuffix("::cta") for m in modifiers]
    kind = modifiers[-2 if opcode == "cvt" else -1] if modifiers else ""
    return ".".join([opcode, *modifiers]), operands, kind


def accesses(opcode: str, modifiers: list[str], operands: tuple) -> tuple[str, tuple, str]:
    space, vector, kind = "generic", "", modifiers[-1]
    for modifier in modifiers[:-1]:
        if modifier in SPACES:
            space = SPACES[modifier]
        elif modifier in ("v2", "v4", "v8"):
            vector = f".{modifier}"
        elif modifier not in ORDERS | CACHES and not HINT.match(modifier):
            raise KeyError(modifier)
    return f"{opcode}.{space}{vector}.{bits(kind)}", operands, kind


def updates(opcode: str, modifiers: list[str], operands: tuple) -> tuple[str, tuple, str]:
    *rest, kind = modifiers
    space, kept = "generic", []
    for modifier in rest:
        if modifier in SPACES:
            space = SPACES[modifier]
        elif modifier not in ORDERS and not HINT.match(modifier):
            kept.append(modifier)
    return ".".join([opcode, space, *kept, kind]), operands, kind


def simpler(statement: Statement, fresh) -> list[Statement]:
    """A statement as several that the table has: setp with a second result or a further predicate.

    `fresh()` gives a predicate that nothing else uses.
    """
    opcode, *modifiers = statement.name.split(".")
    if opcode != "setp" or modifiers[-1].endswith("x2"):  # whose second result is that of the upper halves
        return [statement]
    logic = [m for m in modifiers if m in ("and", "or", "xor")]
    result, *sources = statement.operands
    if not logic and not isinstance(result, Both):
        return [statement]

    def part(name: str, *operands) -> Statement:
        return Statement(statement.line, name, operands, statement.guard, statement.negated)

    name = ".".join(["setp", *(m for m in modifiers if m not in logic)])
    truth, inverse = fresh(), fresh()
    parts = [part(name, truth, *sources[:2]), part("not.pred", inverse, truth)]
    results = (result.first, result.second) if isinstance(result, Both) else (result, SINK)
    for to, value in zip(results, (truth, inverse), strict=True):
        if to != SINK:
            parts.append(
                part(f"{logic[0]}.pred", to, value, sources[2]) if logic else part("mov.pred", to, value)
            )
    return parts


def is_predicate(operand: object) -> bool:
    """Whether an operand can be a predicate that is read."""
    if isinstance(operand, Negated):
        return True
    return isinstance(operand, Number) or (isinstance(operand, Register) and operand.bytes == 0)
