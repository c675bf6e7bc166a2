"""An interpreter of the PTX that Triton and nvcc emit, on CPU tensors. See ../README.md."""

from tests.ptx.emulator.program import Program
from tests.ptx.emulator.reports import (
    BlockOverlap,
    Deadlock,
    DivergentBarrier,
    EmulatorError,
    Misaligned,
    OutOfBounds,
    SharedRace,
    UninitialisedRead,
    UnknownForm,
)
from tests.ptx.emulator.single import run_instruction

__all__ = [
    "BlockOverlap",
    "Deadlock",
    "DivergentBarrier",
    "EmulatorError",
    "Misaligned",
    "OutOfBounds",
    "Program",
    "SharedRace",
    "UninitialisedRead",
    "UnknownForm",
    "run_instruction",
]
