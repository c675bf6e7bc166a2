"""A lint of SASS: the registers of a warp-group product (HGMMA) stay as they are until the wait for it.

On sm_90 a product runs beside its warps. Until `WARPGROUP.DEPBAR` waits for it, it reads its left
operand (A), where that lies in registers, and writes its accumulators. ptxas decides where waits and copies
go, and has put A's registers to other use too early (triton#11781, fla#1262). Triton's interpreter and PTX do
not show that; the machine code, as `cuobjdump -sass` prints it, does.

Rules, on every path from a product to the wait for it:

- No instruction writes a register of A. A write under a predicate is a write, a wait under one is no wait.
- No instruction reads or writes an accumulator, but for a product of the same shape into the same
  accumulators: those run in order.

A product with `gsb0` closes a group, to which all products since the last one belong.
`WARPGROUP.DEPBAR.LE gsb0, K` waits for all groups but the K closed last. `sass_registers.py` says what an
instruction reads and writes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.sass_registers import Instruction, names, product, read, split, written

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")

# opcodes with a target; `WARPSYNC.COLLECTIVE` has one, `WARPSYNC.ALL` has none. After `BSYNC B0`
# the code continues at the target of `BSSY B0`
_JUMPS = {"BRA", "JMP", "CALL", "BSSY"}
_MAY_JUMP = _JUMPS | {"WARPSYNC"}
_ENDS = {"EXIT", "KILL", "RET"}
_ANYWHERE = {"BRX", "BRXU", "JMX", "JMXU", "RTT"}

# product (its index) -> groups closed since it was issued, at most MOST: the fewest of all paths
State = dict[int, int]
MOST = 64


@dataclass(frozen=True)
class Hazard:
    """An instruction that touches registers of a product that may still run."""

    kernel: str
    line: int  # of the text, from 1
    instruction: str
    what: str  # "writes A", "writes accumulators" or "reads accumulators"
    registers: tuple[str, ...]
    product: str
    product_line: int

    def __str__(self) -> str:
        return (
            f"{self.kernel}, line {self.line}: {self.instruction}: {self.what} ({', '.join(self.registers)}) "
            f"before the wait for line {self.product_line}: {self.product}"
        )


def parsed(text: str) -> list[tuple[str, list[Instruction]]]:
    """(kernel, its instructions) of each function in a listing by `cuobjdump -sass`.

    Raises:
        ValueError: there is no instruction in the text.
    """
    kernels: list[tuple[str, list[Instruction]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if named := _FUNCTION.match(line):
            kernels.append((named[1], []))
        elif (found := _INSTRUCTION.match(line)) and kernels:
            address, predicate, opcode, operands = found.groups()
            parts = tuple(opcode.split("."))
            kernels[-1][1].append(Instruction(number, int(address, 16), predicate, parts, split(operands)))
    if not any(code for _, code in kernels):
        raise ValueError(f"text: expected a listing by `cuobjdump -sass`, got {text[:60]!r}")
    return kernels


def successors(code: Sequence[Instruction]) -> list[tuple[int, ...]]:
    """Of each instruction, which may run next, as places in `code`.

    A call is also followed by its next instruction, a return by that of every call, and a jump to the address
    in a register by every instruction. These are more paths than there are, never fewer.

    Raises:
        ValueError: a jump to a place that the listing does not show.
    """
    places = {i.address: k for k, i in enumerate(code)}
    targets: dict[int, int] = {}
    meeting: dict[str, list[int]] = defaultdict(list)  # barrier -> where its threads meet again
    for k, i in enumerate(code):
        jump = next((o for o in i.operands if re.fullmatch(r"0x[0-9a-f]+", o)), None)
        if i.base in _JUMPS and jump is None:
            raise ValueError(f"line {i.line}: {i}: where it goes cannot be seen")
        if i.base in _MAY_JUMP and jump is not None:
            if int(jump, 16) not in places:
                raise ValueError(f"line {i.line}: {i}: no instruction at {jump}")
            targets[k] = places[int(jump, 16)]
        if i.base == "BSSY":
            meeting[i.operands[0]].append(targets.pop(k))
    returns = [k + 1 for k, i in enumerate(code) if i.base == "CALL"]
    found = []
    for k, i in enumerate(code):
        if i.base in _ANYWHERE:
            found.append(tuple(range(len(code))))
            continue
        after = [targets[k]] if k in targets else []
        if i.base == "BSYNC":
            # right behind the region that it closes, where a BSSY says so
            own = meeting[i.operands[-1]]
            after += [k + 1] if k + 1 in own else own
        if i.base == "RET":
            after += returns
        # `BRA UP0, 0x80` and `BRA.DIV UR4, 0x80` depend on more than a predicate
        leaves = i.base in _ENDS or (i.base in ("BRA", "JMP") and len(i.operands) == 1)
        if not (leaves and i.unconditional):
            after.append(k + 1)
        found.append(tuple(sorted({a for a in after if a < len(code)})))
    return found


def hazards(text: str) -> list[Hazard]:
    """What breaks the rules in a listing by `cuobjdump -sass`, per kernel, instruction and rule.

    Of several products that an instruction disturbs, the finding names the first and the registers of all.

    Raises:
        ValueError: no listing, or one with jumps that cannot be followed.
    """
    return [finding for kernel, code in parsed(text) for finding in _hazards(kernel, code)]


def left_in_registers(text: str) -> int:
    """How many products of a listing have A in registers."""
    products = [product(i) for _, code in parsed(text) for i in code]
    return sum(bool(p and p.left) for p in products)


def _hazards(kernel: str, code: list[Instruction]) -> list[Hazard]:
    products = {k: p for k, i in enumerate(code) if (p := product(i))}
    states = _in_flight(code)
    found = []
    for k, i in enumerate(code):
        touched: dict[str, list[tuple[int, int]]] = defaultdict(list)
        writes, reads, own = written(i), read(i), products.get(k)
        for j in sorted(states[k]):
            other = products[j]
            chained = own and (own.accumulators, own.shape) == (other.accumulators, other.shape)
            touched["writes A"].append((j, writes & other.left))
            touched["writes accumulators"].append((j, 0 if chained else writes & other.accumulators))
            touched["reads accumulators"].append((j, (own.left if chained else reads) & other.accumulators))
        for what, pairs in touched.items():
            pairs = [(j, registers) for j, registers in pairs if registers]
            if pairs:
                every = 0
                for _, registers in pairs:
                    every |= registers
                first = code[pairs[0][0]]
                found.append(Hazard(kernel, i.line, str(i), what, names(every), str(first), first.line))
    return found


def _in_flight(code: list[Instruction]) -> list[State]:
    """The products that may still run when each instruction is issued."""
    after = successors(code)
    states: list[State] = [{} for _ in code]
    waiting = [k for k, i in enumerate(code) if product(i)]
    while waiting:
        k = waiting.pop()
        left = _passed(states[k], k, code[k])
        for s in after[k]:
            fewest = states[s] | {j: min(n, states[s].get(j, MOST)) for j, n in left.items()}
            if fewest != states[s]:
                states[s] = fewest
                waiting.append(s)
    return states


def _passed(state: State, k: int, i: Instruction) -> State:
    """What still runs behind an instruction."""
    if p := product(i):
        state = state | {k: 0}
        if p.closes and i.unconditional:
            state = {j: min(n + 1, MOST) for j, n in state.items()}
    elif i.base == "WARPGROUP" and "DEPBAR" in i.parts and i.unconditional:
        may_run = int(i.operands[-1], 16)
        state = {j: n for j, n in state.items() if n <= may_run}
    return state
