"""PTX text as data: modules, kernels, statements and their operands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.ptx.emulator.reports import EmulatorError

BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "pred": 0}
BYTES |= {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4}
BYTES |= {"b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}


@dataclass(frozen=True)
class Register:
    """A register, by the scope that declares it and its name; `bytes` is 0 for a predicate."""

    scope: int
    name: str
    bytes: int


@dataclass(frozen=True)
class Number:
    """An integer, or the bits of a floating-point number."""

    value: int


@dataclass(frozen=True)
class Symbol:
    """A variable, a parameter, a label or a special register, with an offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """Operands in braces."""

    items: tuple


@dataclass(frozen=True)
class Address:
    """The text in brackets; of a tensor's address the coordinates too."""

    base: Register | Number | Symbol
    offset: int = 0
    coordinates: tuple = ()


@dataclass(frozen=True)
class Negated:
    """`!p`."""

    register: Register


@dataclass(frozen=True)
class Both:
    """`p|q`: two results."""

    first: object
    second: object


SINK = Symbol("_")


@dataclass(frozen=True)
class Statement:
    """One instruction of a kernel."""

    line: int
    name: str
    operands: tuple
    guard: Register | None = None
    negated: bool = False


@dataclass
class Variable:
    """A declared piece of memory."""

    space: str
    bytes: int
    align: int
    external: bool = False


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: its place in the block of parameters."""

    name: str
    type: str
    size: int
    offset: int
    align: int


@dataclass
class Kernel:
    """A parsed kernel."""

    name: str
    parameters: list[Parameter]
    cluster: tuple[int, int, int] | None = None  # what the text requires
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label -> index of the statement that follows
    variables: dict[str, Variable] = field(default_factory=dict)

    @property
    def shared_bytes(self) -> int:
        """Static shared memory that the kernel itself declares."""
        return sum(v.bytes for v in self.variables.values() if v.space == "shared")


@dataclass
class Module:
    """A parsed file."""

    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]


COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
LINES = re.compile(r"^\s*\.(?:loc|file|version|address_size)\b[^\n;]*;?", re.M)
SECTION = re.compile(r"^\s*\.section\s[^{]*\{.*?^\s*\}", re.S | re.M)
ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)*\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)\{")
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+)?(?:\.(?:global|shared|const|local)\s+)?"
    r"(?:\.align\s+\d+\s+)?([\w$]+)(?:\[(\d+)\])?"
)
VARIABLE = re.compile(
    r"(?P<before>(?:\.(?:extern|visible|weak|common|managed)\s+)*)\.(?P<space>shared|global|const|local)\s+"
    r"(?:\.align\s+(?P<align>\d+)\s+)?(?:\.attribute\([^)]*\)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$]+)"
    r"(?P<dims>(?:\[\d*\])*)\s*(?:=[^;]*)?\s*;"
)
LABEL = re.compile(r"([$%]?[A-Za-z_$][\w$]*)\s*:(?!:)")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*);")
GUARD = re.compile(r"@(!?)\s*([%\w$]+)\s+")
CLUSTER = re.compile(r"\.reqnctapercluster\s+([\d, ]+)")
PRAGMA = re.compile(r"\.pragma\b[^;]*;")


def blanked(match: re.Match) -> str:
    """The same number of lines, empty."""
    return "\n" * match.group().count("\n")


def parse(text: str) -> Module:
    """The kernels and variables of PTX text."""
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.M)
    text = COMMENT.sub(blanked, text)
    text = SECTION.sub(blanked, text)
    text = LINES.sub(blanked, text)
    module = Module(target.group(1) if target else "sm_80", {}, {})
    at = 0
    while entry := ENTRY.search(text, at):
        for match in VARIABLE.finditer(text, at, entry.start()):
            module.variables[match["name"]] = variable(match)
        body = Body(text, entry.end(), text.count("\n", 0, entry.end()) + 1)
        kernel = Kernel(entry.group(1), parameters(entry.group(2) or ""))
        if asked := CLUSTER.search(entry.group(3)):
            kernel.cluster = triple([int(n) for n in asked[1].split(",")])
        at = body.read(kernel)
        module.kernels[kernel.name] = kernel
    for match in VARIABLE.finditer(text, at):
        module.variables[match["name"]] = variable(match)
    return module


def triple(sizes: Sequence[int]) -> tuple[int, int, int]:
    """Sizes of three axes; those that are not given are 1."""
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


def parameters(text: str) -> list[Parameter]:
    """The parameters of an entry, each aligned to its own size or as it says."""
    found, end = [], 0
    for align, kind, name, count in PARAMETER.findall(text):
        size = BYTES[kind] * int(count or 1)
        boundary = int(align or BYTES[kind])
        offset = -(-end // boundary) * boundary
        found.append(Parameter(name, kind, size, offset, boundary))
        end = offset + size
    return found


def variable(match: re.Match) -> Variable:
    """A declaration of memory."""
    size = BYTES[match["type"]]
    count = 1
    for n in re.findall(r"\[(\d*)\]", match["dims"]):
        count *= int(n or 0)
    external = "extern" in match["before"]
    return Variable(match["space"], size * count, int(match["align"] or size), external)


def number(text: str) -> int | None:
    """An integer or the bits of a floating-point literal; None if it is neither."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return int(text[2:], 16)
    match = re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|\d+)[uU]?", text)
    if match is None:
        return None
    digits = match.group(2)
    value = int(digits, 8 if len(digits) > 1 and digits.isdigit() and digits[0] == "0" else 0)
    return -value if match.group(1) else value


class Body:
    """Reads the statements of one kernel from where its brace opens."""

    def __init__(self, text: str, at: int, line: int) -> None:
        self.text, self.at, self.line = text, at, line
        # Innermost last: (number, name -> bytes, prefix -> bytes).
        self.scopes: list[tuple[int, dict[str, int], dict[str, int]]] = [(0, {}, {})]
        self.opened = 0
        # Of each scope: the first of its statements, and its labels.
        self.labels: list[tuple[int, list[str]]] = [(0, [])]

    def read(self, kernel: Kernel) -> int:
        """Fill in the kernel; returns where its brace closes."""
        while True:
            self.skip()
            character = self.text[self.at]
            if character == "{":
                self.opened += 1
                self.scopes.append((self.opened, {}, {}))
                self.labels.append((len(kernel.statements), []))
                self.at += 1
            elif character == "}":
                self.at += 1
                number = self.scopes.pop()[0]
                first, labels = self.labels.pop()
                if not self.scopes:
                    return self.at
                local(kernel, first, labels, number)
            else:
                self.item(kernel)

    def skip(self) -> None:
        while self.text[self.at] in " \t\r\n;":
            self.line += self.text[self.at] == "\n"
            self.at += 1

    def take(self, match: re.Match) -> re.Match:
        self.line += match.group().count("\n")
        self.at = match.end()
        return match

    def item(self, kernel: Kernel) -> None:
        text, at = self.text, self.at
        if match := LABEL.match(text, at):
            name = self.take(match).group(1)
            kernel.labels[name] = len(kernel.statements)
            self.labels[-1][1].append(name)
        elif match := REGISTERS.match(text, at):
            self.declare(*self.take(match).groups())
        elif match := VARIABLE.match(text, at):
            kernel.variables[match["name"]] = variable(self.take(match))
        elif match := PRAGMA.match(text, at):
            self.take(match)
        else:
            end = text.index(";", at)
            line = self.line
            self.line += text.count("\n", at, end)
            self.at = end + 1
            kernel.statements.append(self.statement(" ".join(text[at:end].split()), line))

    def declare(self, kind: str, names: str) -> None:
        _, single, prefixes = self.scopes[-1]
        for name in names.split(","):
            name = name.strip()
            if name.endswith(">"):
                prefixes[name.partition("<")[0]] = BYTES[kind]
            else:
                single[name] = BYTES[kind]

    def statement(self, text: str, line: int) -> Statement:
        guard, negated = None, False
        if match := GUARD.match(text):
            negated = bool(match.group(1))
            guard = self.register(match.group(2))
            if guard is None:
                raise EmulatorError(f"line {line}: {text}: no such predicate")
            text = text[match.end() :]
        name, _, rest = text.partition(" ")
        operands = tuple(self.operand(part) for part in split(rest))
        return Statement(line, name, operands, guard, negated)

    def register(self, name: str) -> Register | None:
        for scope, single, prefixes in reversed(self.scopes):
            if name in single:
                return Register(scope, name, single[name])
            prefix = name.rstrip("0123456789")
            if prefix != name and prefix in prefixes:
                return Register(scope, name, prefixes[prefix])
        return None

    def operand(self, text: str):
        if text.startswith("{"):
            return Vector(tuple(self.operand(part) for part in split(text[1:-1])))
        if text.startswith("["):
            return self.address(text[1:-1])
        if text.startswith("!"):
            return Negated(self.register(text[1:].strip()))
        if "|" in text:
            return Both(*(self.operand(part.strip()) for part in text.split("|")))
        value = number(text)
        if value is not None:
            return Number(value)
        register = self.register(text)
        if register is not None:
            return register
        match = re.fullmatch(r"(%?[\w$.]+?)\s*(?:\+\s*(\d+))?", text)
        if match is None:
            raise EmulatorError(f"operand {text!r}")
        return Symbol(match.group(1), int(match.group(2) or 0))

    def address(self, text: str) -> Address:
        parts = split(text)
        coordinates = tuple(self.operand(part) for part in parts[1:])
        base, sign, offset = re.fullmatch(r"(.*?)\s*(?:([+-])\s*(-?\w+))?", parts[0]).groups()
        if not base:  # a negative number alone
            base, sign, offset = parts[0], None, None
        value = int(offset, 0) if offset else 0
        operand = self.operand(base)
        if isinstance(operand, Symbol):
            operand, value = Symbol(operand.name), value + operand.offset
        return Address(operand, -value if sign == "-" else value, coordinates)


def local(kernel: Kernel, first: int, labels: list[str], scope: int) -> None:
    """Labels in braces are known there alone: others may have their names."""
    for name in labels:
        own = f"{name} of scope {scope}"
        kernel.labels[own] = kernel.labels.pop(name)
        for i in range(first, len(kernel.statements)):
            statement = kernel.statements[i]
            operands = tuple(Symbol(own) if o == Symbol(name) else o for o in statement.operands)
            kernel.statements[i] = replace(statement, operands=operands)


def split(text: str) -> list[str]:
    """Parts between commas that are in no brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
