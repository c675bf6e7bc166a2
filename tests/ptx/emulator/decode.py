"""Statements as the engine runs them: a form, slots of registers, immediates."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.ptx.emulator import library, names
from tests.ptx.emulator.parse import (
    SINK,
    Address,
    Both,
    Kernel,
    Module,
    Number,
    Register,
    Statement,
    Symbol,
    Vector,
)
from tests.ptx.emulator.reports import UnknownForm

SLOTS = {0: 1, 1: 1, 2: 1, 4: 2, 8: 4}  # of 64 bytes, by the bytes of a register
# In the order of `set_special` in engine.cpp.
SPECIALS = [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
SPECIALS += ["%laneid", "%warpid"]
CLUSTERS = ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid")
SPECIALS += [f"%{name}.{axis}" for name in CLUSTERS for axis in "xyz"]
SPECIALS += ["%cluster_ctarank", "%cluster_nctarank"]
SPECIAL_NUMBERS = {name: i for i, name in enumerate(SPECIALS)}


class Mismatch(Exception):
    """The operands are not those of a form."""


@dataclass
class Decoded:
    """A kernel for the engine."""

    stream: list[int] = field(default_factory=list)
    constants: list[tuple[int, int, int]] = field(default_factory=list)  # slot, bytes, value
    specials: list[tuple[int, int]] = field(default_factory=list)
    constant_slots: int = 0
    slots: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    waits: bool = False


@dataclass
class Operation:
    """One entry of the stream, with slots as keys that are numbered at the end."""

    form: int
    line: int
    guard: object
    negated: bool
    dst: list = field(default_factory=list)
    src: list = field(default_factory=list)
    imm: list = field(default_factory=list)  # integers, and labels as strings


class Decoder:
    """Decodes one kernel of a module."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.kernel = kernel
        self.forms = library.forms()
        self.operations: list[Operation] = []
        self.starts: list[int] = []
        self.temporaries = 0
        results = (s.operands[0] for s in kernel.statements if s.operands)
        self.assigned = {o for r in results for o in flat((r,)) if isinstance(o, Register)}
        self.addresses = {p.name: p.offset for p in kernel.parameters}
        self.local_bytes = 0
        self.shared_bytes = self.place_variables(module)

    def place_variables(self, module: Module) -> int:
        """Give variables their offsets; returns the bytes of static shared memory."""
        used = {o.name for s in self.kernel.statements for o in flat(s.operands) if isinstance(o, Symbol)}
        declared = {n: v for n, v in module.variables.items() if n in used} | self.kernel.variables
        end, dynamic = 0, []
        for name, v in declared.items():
            if v.space == "local":
                self.local_bytes = -(-self.local_bytes // v.align) * v.align
                self.addresses[name] = self.local_bytes
                self.local_bytes += v.bytes
            elif v.space == "shared" and v.external:
                dynamic.append((name, v))
            elif v.space == "shared":
                end = -(-end // v.align) * v.align
                self.addresses[name] = end
                end += v.bytes
        self.local_bytes = -(-self.local_bytes // 16) * 16
        for name, v in dynamic:
            align = max(v.align, 16)
            end = -(-end // align) * align
            self.addresses |= {name: end}
        return end

    def decode(self) -> Decoded:
        for statement in self.kernel.statements:
            self.starts.append(len(self.operations))
            for part in names.simpler(statement, self.temporary):
                self.emit(part)
        self.starts.append(len(self.operations))
        last = self.kernel.statements[-1].line if self.kernel.statements else 0
        self.emit(Statement(last, "ret", ()))
        return self.numbered()

    def temporary(self, size: int = 0) -> Register:
        self.temporaries += 1
        return Register(-1, f"t{self.temporaries}", size)

    # --- one statement --------------------------------------------------------------------------------------

    def emit(self, statement: Statement) -> None:
        try:
            name, operands, kind = names.canonical(statement)
        except (KeyError, IndexError) as error:
            raise self.unknown(statement, str(error)) from None
        if name.startswith("prmt."):
            operands = tuple(self.undefined(o) for o in operands)
        flattened = []
        for operand in operands:
            flattened += [operand.first, operand.second] if isinstance(operand, Both) else [operand]
        reason = "no form of that name"
        for number, signature in self.forms.get(name, ()):
            try:
                before, operation, after = self.matched(statement, number, signature, flattened, kind)
            except Mismatch as error:
                reason = str(error)
                continue
            self.operations += [*before, operation, *after]
            return
        raise self.unknown(statement, reason)

    def undefined(self, operand):
        """LLVM packs bytes with prmt; for an unused byte it names a register that nothing writes."""
        missing = isinstance(operand, Register) and operand not in self.assigned
        return Number(0xA5C3965A) if missing else operand

    def unknown(self, statement: Statement, reason: str) -> UnknownForm:
        where = f"{self.kernel.name}, line {statement.line}"
        return UnknownForm(f"{statement.name} ({where}): {reason}; {len(statement.operands)} operands")

    def matched(self, statement: Statement, number: int, signature: list[str], operands: list, kind: str):
        """(operations before, the operation, operations after)."""
        if len(signature) != len(operands):
            raise Mismatch(f"expected {len(signature)} operands")
        operation = Operation(number, statement.line, statement.guard, statement.negated)
        before, after = [], []
        for token, operand in zip(signature, operands, strict=True):
            if token.startswith("@"):
                self.address(operation, before, token[1:], operand)
            elif token == "#":
                if not isinstance(operand, Number):
                    raise Mismatch("expected a number that is known")
                operation.imm.append(operand.value)
            elif token == "L":
                operation.imm.append(self.label(operand))
            else:
                for one, value in self.each(token, operand):
                    if one.startswith("="):
                        operation.dst.append(self.result(operation, after, one[1:], value, kind))
                    else:
                        operation.src.append(self.source(operation, before, one, value))
        return before, operation, after

    def each(self, token: str, operand) -> list[tuple[str, object]]:
        """The elements of a vector of a signature, or the one value."""
        one, _, count = token.partition("*")
        if not count:
            if isinstance(operand, Vector):
                if len(operand.items) != 1:
                    raise Mismatch("a vector where one value is expected")
                operand = operand.items[0]
            return [(one, operand)]
        if not isinstance(operand, Vector) or len(operand.items) != int(count):
            raise Mismatch(f"expected a vector of {count}")
        return [(one, item) for item in operand.items]

    def label(self, operand) -> str:
        if not isinstance(operand, Symbol) or operand.name not in self.kernel.labels:
            raise Mismatch(f"no label {operand}")
        return operand.name

    def address(self, operation: Operation, before: list, coordinates: str, operand) -> None:
        if not isinstance(operand, Address):
            raise Mismatch("expected an address")
        base = operand.base
        if isinstance(base, Register):
            if base.bytes not in (4, 8):
                raise Mismatch("an address of another width")
            operation.src.append(base)
            size = base.bytes
        else:
            value = base.value if isinstance(base, Number) else self.constant_of(base)
            operation.src.append(("constant", 8, value))
            size = 8
        operation.imm += [operand.offset, size]
        if coordinates:
            items = operand.coordinates
            items = items[0] if len(items) == 1 and isinstance(items[0], Vector) else Vector(items)
            for one, value in self.each(coordinates.removeprefix("+"), items):
                operation.src.append(self.source(operation, before, one, value))
        elif operand.coordinates:
            raise Mismatch("an address with coordinates")

    def constant_of(self, symbol: Symbol) -> int:
        if symbol.name not in self.addresses:
            raise Mismatch(f"unknown name {symbol.name}")
        return self.addresses[symbol.name] + symbol.offset

    def source(self, operation: Operation, before: list, token: str, operand):
        """The slot of something that is read."""
        if token == "p":
            return self.predicate(operation, before, operand)
        size = int(token[1:]) // 8
        if isinstance(operand, Number):
            return ("constant", size, operand.value & (2 ** (8 * size) - 1))
        if isinstance(operand, Symbol):
            if operand.name not in SPECIAL_NUMBERS:
                return ("constant", size, self.constant_of(operand) & (2 ** (8 * size) - 1))
            special = ("special", 4, SPECIAL_NUMBERS[operand.name])
            return special if size == 4 else self.resized(operation, before, special, 4, size)
        if not isinstance(operand, Register) or operand.bytes == 0 or operand.bytes < size:
            raise Mismatch(f"an operand of another width than {token}")
        if operand.bytes == size:
            return operand
        return self.resized(operation, before, operand, operand.bytes, size)

    def resized(self, operation: Operation, before: list, value, size: int, wanted: int):
        """A temporary with the low part of a value, or the value widened by zeros."""
        other = self.temporary(wanted)
        name = "narrow" if wanted < size else "widen.u"
        before.append(self.small(operation, name, other, wanted, value, size))
        return other

    def small(self, operation: Operation, name: str, to, to_bytes: int, of, of_bytes: int) -> Operation:
        wanted = [f"=b{8 * to_bytes}", f"b{8 * of_bytes}"]
        for number, signature in self.forms[name]:
            if signature == wanted:
                return Operation(number, operation.line, operation.guard, operation.negated, [to], [of])
        raise Mismatch(f"no {name} of {of_bytes} to {to_bytes} bytes")

    def predicate(self, operation: Operation, before: list, operand):
        if not names.is_predicate(operand):
            raise Mismatch("expected a predicate")
        if isinstance(operand, Register):
            return operand
        if isinstance(operand, Number):
            return ("constant", 0, 0xFFFFFFFF if operand.value else 0)
        other = self.temporary()
        number, _ = self.forms["not.pred"][0]
        before.append(
            Operation(number, operation.line, operation.guard, operation.negated, [other], [operand.register])
        )
        return other

    def result(self, operation: Operation, after: list, token: str, operand, kind: str):
        """The slot of something that is written; a wider register gets the widened value afterwards."""
        size = 0 if token == "p" else int(token[1:]) // 8
        if operand == SINK:
            return ("trash", size)
        if not isinstance(operand, Register) or (size == 0) != (operand.bytes == 0) or operand.bytes < size:
            raise Mismatch(f"a result of another width than {token}")
        if operand.bytes == size:
            return operand
        other = self.temporary(size)
        name = "widen.s" if kind.startswith("s") else "widen.u"
        after.append(self.small(operation, name, operand, operand.bytes, other, size))
        return other

    # --- numbers of slots -----------------------------------------------------------------------------------

    def numbered(self) -> Decoded:
        """Constants first, then everything else as it is met."""
        made = Decoded(shared_bytes=self.shared_bytes, local_bytes=self.local_bytes)
        slots: dict[object, int] = {}
        keys = [key for o in self.operations for key in (*o.dst, *o.src, o.guard) if key is not None]
        constants = [key for key in keys if isinstance(key, tuple) and key[0] == "constant"]
        for key in [*dict.fromkeys(constants), None, *dict.fromkeys(keys)]:
            if key is None:
                made.constant_slots = made.slots
            elif key not in slots:
                slots[key] = made.slots
                size = key.bytes if isinstance(key, Register) else key[1]
                made.slots += SLOTS[size]
                if isinstance(key, tuple) and key[0] == "constant":
                    # A predicate is one mask: four bytes "per lane" of the same value.
                    made.constants.append(
                        (slots[key], size or 1, key[2] & (2**64 - 1) if size else key[2] & 0xFF)
                    )
                elif isinstance(key, tuple) and key[0] == "special":
                    made.specials.append((slots[key], key[2]))
        labels = {name: self.starts[index] for name, index in self.kernel.labels.items()}
        for o in self.operations:
            guard = -1 if o.guard is None else slots[o.guard]
            imm = [labels[i] if isinstance(i, str) else wrapped(i) for i in o.imm]
            made.stream += [o.form, guard, o.negated, o.line, len(o.dst), *(slots[d] for d in o.dst)]
            made.stream += [len(o.src), *(slots[s] for s in o.src), len(imm), *imm]
        words = [s.name for s in self.kernel.statements]
        made.waits = any(w.startswith("atom") or ".acquire" in w or ".volatile" in w for w in words)
        return made


def wrapped(value: int) -> int:
    """An integer as 64 bits with a sign."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def flat(operands: tuple) -> list:
    """Everything that operands are made of."""
    found = []
    for operand in operands:
        if isinstance(operand, Vector):
            found += flat(operand.items)
        elif isinstance(operand, Both):
            found += flat((operand.first, operand.second))
        elif isinstance(operand, Address):
            found += [operand.base, *flat(operand.coordinates)]
        else:
            found.append(operand)
    return found


def decode(module: Module, kernel: Kernel) -> Decoded:
    """A kernel for the engine."""
    return Decoder(module, kernel).decode()
