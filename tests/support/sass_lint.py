"""Finds registers that are written while a product of a warp group still reads them.

ptxas may reuse the registers of a `wgmma`'s left operand, or touch its accumulators, before the product has
been waited for (triton#11781, fla#1262). The PTX is right then, so no interpreter of Triton or of PTX sees
it. The machine code shows it:

    HGMMA.64x64x16.F32.BF16 R120, R152, gdesc[UR28].tnspB, R120, gsb0   reads R152 … R155 until it is done
    WARPGROUP.DEPBAR.LE gsb0, 0x0                                       when all groups are done

A product is of the group that the next `gsb0` ends. `WARPGROUP.DEPBAR.LE gsb0, n` waits until at most the n
youngest groups are still at work. Every path through the branches of the kernel is followed.

    python tests/support/sass_lint.py LISTING     of `nvdisasm -c KERNEL.cubin`
"""

from __future__ import annotations

import itertools
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

MOST_STATES = 4096  # per instruction; more is an error, not a finding
MOST_GROUPS = 4  # that are told apart; the oldest ones count as one

_INSTRUCTION = re.compile(r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?P<text>\S.*?)\s*;")
_LABEL = re.compile(r"^(?P<label>\.L\w+):")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(?P<kernel>[^,\s]+)")
_TARGET = re.compile(r"`\((?P<label>[^)]+)\)")
_REGISTER = re.compile(r"^-?\|?R(?P<number>\d+)\b")
_PREDICATE = re.compile(r"^!?U?P(T|\d+)$")
# They begin with a predicate, and a register that they write comes second.
_SECOND = ("SHFL", "ATOM", "ATOMG", "ATOMS", "LOP3", "VOTE", "MATCH", "REDUX")
# They have no result in registers, though a register may come first.
_NO_RESULT = ("R2P", "BAR", "WARPSYNC", "NANOSLEEP", "R2UR", "BRX", "JMX", "RET", "CALL", "PRET", "SETCTAID")
_LEAVE = ("EXIT", "RET", "KILL", "BPT")


class Instruction(NamedTuple):
    """A line of a listing.

    Attributes:
        line: its number, from 1.
        address: in the kernel, hexadecimal as printed.
        predicate: "@P0", "@!P3", or "".
        opcode: with its modifiers.
        operands: as printed.
        target: the label that it names, or None.
    """

    line: int
    address: str
    predicate: str
    opcode: str
    operands: tuple[str, ...]
    target: str | None

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> list[str]:
        """The opcode's modifiers."""
        return self.opcode.split(".")[1:]


class Finding(NamedTuple):
    """A register that is touched too early.

    Attributes:
        kernel: its name.
        line, text: of the instruction that touches the registers.
        what: "operand" (written while it is read) or "accumulator" (read or written while it is computed).
        registers: their numbers.
        product: the line of the product that is still at work.
    """

    kernel: str
    line: int
    text: str
    what: str
    registers: tuple[int, ...]
    product: int


# --- reading a listing --------------------------------------------------------------------------------------


def kernels_of(listing: str) -> dict[str, list[Instruction | str]]:
    """Kernel -> its instructions and, as strings, its labels; a listing without sections is one kernel."""
    found: dict[str, list[Instruction | str]] = {}
    name = ""
    for number, line in enumerate(listing.splitlines(), 1):
        if (section := _SECTION.match(line)) is not None:
            name = section["kernel"]
        elif (label := _LABEL.match(line)) is not None:
            found.setdefault(name, []).append(label["label"])
        elif (match := _INSTRUCTION.match(line)) is not None:
            found.setdefault(name, []).append(_instruction(number, match["address"], match["text"]))
    return found


def _instruction(line: int, address: str, text: str) -> Instruction:
    predicate = ""
    if text.startswith("@"):
        predicate, _, text = text.partition(" ")
    opcode, _, rest = text.strip().partition(" ")
    target = _TARGET.search(rest)
    operands = tuple(part.strip() for part in rest.split(",")) if rest else ()
    return Instruction(line, address, predicate, opcode, operands, target and target["label"])


def _first_register(operand: str) -> int | None:
    found = _REGISTER.match(operand)
    return None if found is None else int(found["number"])


def _width(instruction: Instruction) -> int:
    """How many registers an instruction's result takes, or more."""
    name, modifiers = instruction.name, instruction.modifiers
    if name == "HGMMA":
        columns = int(modifiers[0].split("x")[1])
        return columns // 2 if "F32" in modifiers[1:2] else columns // 4
    if name in ("HMMA", "IMMA", "QMMA", "DMMA", "BMMA"):
        return 2 if "F16" in modifiers[1:2] else 4
    if name in ("LDSM", "LDTM"):
        return 4
    for modifier, width in (("128", 4), ("64", 2), ("WIDE", 2), ("M88", 4)):
        if modifier in modifiers:
            return width
    wide = name in ("DADD", "DMUL", "DFMA", "DMNMX") or "F64" in modifiers[:1] or "U64" in modifiers[:1]
    if name == "CS2R":
        wide = "32" not in modifiers
    return 2 if wide else 1


def written(instruction: Instruction) -> range:
    """The registers that an instruction may write."""
    operands = instruction.operands
    if not operands or instruction.name in _NO_RESULT:
        return range(0)
    at = 0
    if _PREDICATE.match(operands[0]):
        if instruction.name not in _SECOND or len(operands) < 2:
            return range(0)
        at = 1
    first = _first_register(operands[at])
    return range(0) if first is None else range(first, first + _width(instruction))


def read(instruction: Instruction) -> set[int]:
    """The first registers of the operands that an instruction reads; not the ones behind them."""
    result = written(instruction)
    operands = instruction.operands[1:] if result else instruction.operands
    return {int(n) for operand in operands for n in re.findall(r"\bR(\d+)", operand)}


def product_operand(instruction: Instruction) -> range:
    """The registers of the left operand of a product of a warp group; none if it is in shared memory."""
    if instruction.name != "HGMMA" or len(instruction.operands) < 2:
        return range(0)
    first = _first_register(instruction.operands[1])
    return range(0) if first is None else range(first, first + 4)  # 64 x 32 bytes over 128 threads


# --- following the paths ------------------------------------------------------------------------------------

# The products at work: the indices of those of the group that is not ended, and of each ended group, the
# oldest first.
State = tuple[frozenset[int], tuple[frozenset[int], ...]]


def _successors(
    code: list[Instruction], labels: dict[str, int], joins: dict[str, set[int]], i: int
) -> set[int]:
    """The indices of what may run after instruction i."""
    instruction, following = code[i], {i + 1} & set(range(len(code)))
    name = instruction.name
    if name in ("BRX", "JMX", "CALL"):
        raise ValueError(f"line {instruction.line}: {instruction.opcode} goes where the listing does not say")
    if name in _LEAVE:
        return following if instruction.predicate else set()
    if name in ("BRA", "JMP"):
        if instruction.target not in labels:
            raise ValueError(f"line {instruction.line}: no label {instruction.target}")
        # `BRA.DIV ~URZ` and `BRA P0, …` have their condition among the operands
        always = not instruction.predicate and len(instruction.operands) == 1
        return {labels[instruction.target]} | (set() if always else following)
    if name == "BSYNC":
        return following | joins.get(instruction.operands[0], set())
    return following


def _after(state: State, i: int, instruction: Instruction) -> State:
    group, groups = state
    if instruction.name == "HGMMA":
        group |= {i}
        if any(operand.startswith("gsb") for operand in instruction.operands):
            groups = (*groups, group)
            # what is never waited for must not grow with every turn of a loop
            if len(groups) > MOST_GROUPS:
                groups = (groups[0] | groups[1], *groups[2:])
            return frozenset(), groups
        return group, groups
    if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        left = int(instruction.operands[1], 0)
        # products of a group that is not ended are not waited for
        return group, groups[len(groups) - left :] if left else ()
    return state


def _touched(code: list[Instruction], state: State, i: int) -> list[tuple[str, tuple[int, ...], int]]:
    """(what, registers, index of the product) that instruction i touches too early."""
    instruction, found = code[i], []
    results = set(written(instruction))
    for product in sorted(set().union(state[0], *state[1])):
        operand = results & set(product_operand(code[product]))
        if operand:
            found.append(("operand", tuple(sorted(operand)), product))
        if instruction.name != "HGMMA":  # products run one after another
            accumulators = (results | read(instruction)) & set(written(code[product]))
            if accumulators:
                found.append(("accumulator", tuple(sorted(accumulators)), product))
    return found


def findings(listing: str) -> list[Finding]:
    """All registers that a listing's kernels touch too early.

    Raises:
        ValueError: the listing has no instructions, or a branch that cannot be followed.
    """
    kernels = kernels_of(listing)
    if not any(isinstance(item, Instruction) for items in kernels.values() for item in items):
        raise ValueError("listing: expected the output of nvdisasm -c, found no instruction")
    return [finding for name, items in kernels.items() for finding in _findings(name, items)]


def _findings(kernel: str, items: list[Instruction | str]) -> list[Finding]:
    code = [item for item in items if isinstance(item, Instruction)]
    labels, count = {}, 0
    for item in items:
        if isinstance(item, str):
            labels[item] = count
        else:
            count += 1
    if not any(instruction.name == "HGMMA" for instruction in code):
        return []
    joins: dict[str, set[int]] = {}
    for instruction in code:
        if instruction.name == "BSSY":
            joins.setdefault(instruction.operands[0], set()).add(labels[instruction.target])
    seen: list[set[State]] = [set() for _ in code]
    left: list[tuple[int, State]] = [(0, (frozenset(), ()))]
    found: dict[tuple, Finding] = {}
    while left:
        i, state = left.pop()
        if i >= len(code) or state in seen[i]:
            continue
        seen[i].add(state)
        if len(seen[i]) > MOST_STATES:
            raise ValueError(f"line {code[i].line}: more than {MOST_STATES} states of products at work")
        for what, registers, product in _touched(code, state, i):
            text = " ".join(filter(None, (code[i].predicate, code[i].opcode, ", ".join(code[i].operands))))
            finding = Finding(kernel, code[i].line, text, what, registers, code[product].line)
            found[finding] = finding
        state = _after(state, i, code[i])
        left += [(j, state) for j in _successors(code, labels, joins, i)]
    return sorted(found.values(), key=lambda f: (f.line, f.product, f.what))


def products_with_operands_in_registers(listing: str) -> int:
    """How many products of a listing read their left operand from registers."""
    items = itertools.chain.from_iterable(kernels_of(listing).values())
    return sum(isinstance(item, Instruction) and len(product_operand(item)) > 0 for item in items)


def listing_of(cubin: bytes) -> str:
    """What Triton's own nvdisasm prints of a cubin."""
    import triton

    nvdisasm = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def main() -> int:
    """Command line of this file."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = findings(pathlib.Path(sys.argv[1]).read_text())
    for finding in found:
        numbers = ", ".join(f"R{n}" for n in finding.registers)
        print(f"line {finding.line}: {finding.text}: {finding.what} {numbers} of line {finding.product}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
