"""What one SASS instruction of sm_90 reads and writes, as masks of registers: bit i is R<i>."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# 64 rows of 32 bytes over the 128 threads of a warp group: what A takes, whatever the dtype
A_REGISTERS = 4

_PRODUCTS = {"HGMMA", "IGMMA", "QGMMA", "BGMMA"}
_CONVERSIONS = {"F2F", "F2I", "I2F", "FRND"}
_DOUBLES = {"DADD", "DMUL", "DFMA", "DMNMX", "DSETP"}
_ATOMICS = {"ATOM", "ATOMG", "ATOMS"}
_LOADS = {"LD", "LDG", "LDS", "LDL", "LDC"} | _ATOMICS
_STORES = {"ST", "STG", "STS", "STL", "RED"}
# their first operand is a source, though it may be a register
_NO_DESTINATION = {"BAR", "CALL", "FCHK", "NANOSLEEP", "R2P", "R2UR", "REDUX", "RET", "WARPSYNC"}
# registers of A, B and the sum, of products of one warp
_WARP_PRODUCTS = {
    ("HMMA", "16816", "F32"): (4, 2, 4),
    ("HMMA", "16816", "F16"): (4, 2, 2),
    ("HMMA", "1688", "TF32"): (4, 2, 4),
    ("HMMA", "1688", "F32"): (2, 1, 4),
    ("HMMA", "1688", "F16"): (2, 1, 2),
    ("IMMA", "16832", "S8"): (4, 2, 4),
    ("IMMA", "16816", "S8"): (2, 1, 4),
}


@dataclass(frozen=True)
class Instruction:
    """One line of a listing: `@!P0 LDG.E.64 R4, desc[UR8][R2.64]`."""

    line: int  # of the text, from 1
    address: int
    predicate: str | None
    parts: tuple[str, ...]  # of the opcode: ("LDG", "E", "64")
    operands: tuple[str, ...]

    def __str__(self) -> str:
        words = (self.predicate or "", ".".join(self.parts), ", ".join(self.operands))
        return " ".join(word for word in words if word)

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.parts[0]

    @property
    def unconditional(self) -> bool:
        """Whether it always runs."""
        return self.predicate in (None, "@PT", "@UPT")


@dataclass(frozen=True)
class Product:
    """The registers of a warp-group product."""

    left: int  # A; 0 if it lies in shared memory
    accumulators: int
    added: int  # the accumulators again, unless the product overwrites them
    shape: str  # "64x64x16.F32"
    closes: bool  # a group, to which the products before it belong too


def split(operands: str) -> tuple[str, ...]:
    """Operands at the commas outside brackets."""
    return tuple(part.strip() for part in re.findall(r"(?:[^,\[({]|[\[({][^\])}]*[\])}])+", operands))


def mask(operand: str, count: int) -> int:
    """`count` registers from the one that an operand names: `R4`, `-R4.reuse`, `|R4|`; else none."""
    found = re.match(r"[-~!|]*R(\d+)", operand)
    return ((1 << count) - 1) << int(found[1]) if found else 0


def names(registers: int) -> tuple[str, ...]:
    """The registers of a mask."""
    return tuple(f"R{i}" for i in range(registers.bit_length()) if registers >> i & 1)


def product(i: Instruction) -> Product | None:
    """The registers of a warp-group product, such as

        HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8].tnspB, R24, gsb0
        HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT

    None for other instructions. ValueError for a barrier other than gsb0.
    """
    if i.base not in _PRODUCTS:
        return None
    # 64 rows of so many columns over 128 threads; two of float16 share a register
    columns = int(i.parts[1].split("x")[1])
    count = columns // 4 if i.parts[2] == "F16" else columns // 2
    left = mask(i.operands[1], A_REGISTERS)
    added = mask(i.operands[3 if left else 2], count)
    barrier = next((o for o in i.operands if o.startswith("gsb")), None)
    if barrier not in (None, "gsb0"):
        raise ValueError(
            f"line {i.line}: {i}: barrier {barrier}: expected gsb0, the only one that is counted here"
        )
    return Product(left, mask(i.operands[0], count), added, ".".join(i.parts[1:3]), barrier is not None)


def written(i: Instruction) -> int:
    """Registers that an instruction writes."""
    place = _destination(i)
    if place is None:
        return 0
    if found := product(i):
        return found.accumulators
    base, parts = i.base, i.parts
    count = 1
    if base in ("HMMA", "IMMA"):
        count = _warp_product(parts)[2]
    elif base in _LOADS:
        count = _width(parts)
    elif base == "LDSM":
        count = _matrices(parts)
    elif base == "CS2R":
        count = 1 if "32" in parts else 2
    elif base in _CONVERSIONS:
        count = _converted(parts)[0]
    elif base in _DOUBLES or base == "LEPC" or (base == "IMAD" and "WIDE" in parts):
        count = 2
    return mask(i.operands[place], count)


def read(i: Instruction) -> int:
    """Registers that an instruction reads."""
    if found := product(i):
        return found.left | found.added
    destination, registers = _destination(i), 0
    for k, operand in enumerate(i.operands):
        if "[" in operand:
            for number, wide in re.findall(r"\bR(\d+)(\.64)?", operand):
                registers |= mask(f"R{number}", 2 if wide else 1)
        elif k != destination:
            registers |= mask(operand, _source_width(i, k))
    return registers


def _destination(i: Instruction) -> int | None:
    """The place of the register that is written, if there is one."""
    if i.base in _NO_DESTINATION:
        return None
    # predicates that are written come before it, `SHFL.IDX P0, R5, ...`, or behind it
    place = 1 if i.operands and re.fullmatch(r"P[\dT]", i.operands[0]) else 0
    return place if len(i.operands) > place and mask(i.operands[place], 1) else None


def _source_width(i: Instruction, k: int) -> int:
    """Registers of the operand at place `k`, which is read and no address."""
    base, parts = i.base, i.parts
    if base in ("HMMA", "IMMA"):
        return _warp_product(parts)[k - 1]
    if base == "STSM":
        return _matrices(parts)
    if base in _STORES | _ATOMICS:
        return _width(parts)
    if base in _CONVERSIONS:
        return _converted(parts)[1]
    wide = base == "IMAD" and "WIDE" in parts and k == len(i.operands) - 1
    return 2 if wide or base in _DOUBLES or base == "RET" else 1


def _width(parts: Sequence[str]) -> int:
    """Registers that a load or store moves per thread."""
    return 4 if "128" in parts else 2 if "64" in parts else 1


def _matrices(parts: Sequence[str]) -> int:
    """Registers that LDSM and STSM move per thread: one per matrix."""
    return next((int(p) for p in parts if p in ("2", "4")), 1)


def _warp_product(parts: Sequence[str]) -> tuple[int, int, int]:
    """Registers of A, B and the sum of a product of one warp."""
    for named, counts in _WARP_PRODUCTS.items():
        if all(part in parts for part in named):
            return counts
    raise ValueError(f"{'.'.join(parts)}: no product of a warp that is known here")


def _converted(parts: Sequence[str]) -> tuple[int, int]:
    """(registers of the result, of the source) of a conversion; a type that is left out is 32 bits wide."""
    kinds = [p for p in parts[1:] if re.fullmatch(r"BF16|[FSU](8|16|32|64)", p)]
    if len(kinds) < 2:
        # `I2F.U64` names its source, `I2F.F64` its result
        to = bool(kinds) and ((kinds[0][0] == "F") == (parts[0] == "I2F"))
        kinds = kinds * 2 if parts[0] in ("F2F", "FRND") else [*kinds, ""] if to else ["", *kinds, ""]
    return (2 if kinds[0].endswith("64") else 1, 2 if kinds[1].endswith("64") else 1)
