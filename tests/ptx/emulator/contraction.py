"""Multiply-adds that ptxas makes from a kernel's products and sums.

PTX leaves `mul`, `add` and `sub` without a rounding mode to the assembler, which may make one fma of a
product and the sum that takes it; with `.rn` it may not. So machine code may round less often than its PTX,
and a difference of two equal products need not be 0. `contracted` makes every such fma of a basic block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.ptx.emulator.parse import Both, Kernel, Register, Statement, Vector

_SUMS = {f"{kind}{mode}.f32": mode for kind in ("add", "sub") for mode in ("", ".ftz")}
_PRODUCTS = {f"mul{mode}.f32": mode for mode in ("", ".ftz")}
_JUMPS = ("bra", "brx", "ret", "exit", "call")


def registers(operand: object) -> Iterator[Register]:
    """The registers of a result."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Both):
        yield from registers(operand.first)
        yield from registers(operand.second)


def contracted(kernel: Kernel) -> Kernel:
    """The kernel with each sum of a product as an fma; of two products the first one is taken in."""
    products: dict[Register, Statement] = {}
    starts = set(kernel.labels.values())
    statements: list[Statement] = []
    moved = []  # the new index of each statement, and of the end
    for index, statement in enumerate(kernel.statements):
        if index in starts:
            products.clear()
        moved.append(len(statements))
        statements += fused(statement, products, len(statements))
        if statement.name.partition(".")[0] in _JUMPS:
            products.clear()
        for register in registers(statement.operands[0]) if statement.operands else ():
            products.pop(register, None)
            for result in [r for r, product in products.items() if register in product.operands]:
                del products[result]
            free = statement.name in _PRODUCTS and statement.guard is None
            if free and register not in statement.operands[1:]:
                products[register] = statement
    moved.append(len(statements))
    labels = {name: moved[index] for name, index in kernel.labels.items()}
    return replace(kernel, statements=statements, labels=labels)


def fused(statement: Statement, products: dict[Register, Statement], at: int) -> list[Statement]:
    """The statement, or an fma in its place after the negation that it needs; `at` names its register."""
    if statement.name not in _SUMS:
        return [statement]
    mode = _SUMS[statement.name]
    result, *terms = statement.operands
    for place, term in enumerate(terms):
        product = products.get(term) if isinstance(term, Register) else None
        if product is None or _PRODUCTS[product.name] != mode:
            continue
        _, left, right = product.operands
        other = terms[1 - place]
        before = []
        if statement.name.startswith("sub"):
            # a b - c = a b + (-c), and c - a b = (-a) b + c
            source = left if place == 1 else other
            negated = Register(-1, f"negated{at}", 4)
            before = [replace(statement, name=f"neg{mode}.f32", operands=(negated, source))]
            left, other = (negated, other) if place == 1 else (left, negated)
        return [*before, replace(statement, name=f"fma.rn{mode}.f32", operands=(result, left, right, other))]
    return [statement]
