"""An interpreter of the PTX that Triton and nvcc emit, on CPU tensors. See ../README.md."""

from tests.ptx.emulator.program import Program
from tests.ptx.emulator.reports import (
    BlockOverlap,
    Deadlock,
    DivergentBarrier,
    EarlyAccess,
    EmulatorError,
    Misaligned,
    OutOfBounds,
    ProxyWarning,
    SharedRace,
    UninitialisedRead,
    UnknownForm,
)
from tests.ptx.emulator.single import run_instruction
from tests.ptx.emulator.tensors import tensor_map

__all__ = ["BlockOverlap", "Deadlock", "DivergentBarrier", "EarlyAccess", "EmulatorError", "Misaligned"]
__all__ += ["OutOfBounds", "Program", "ProxyWarning", "SharedRace", "UninitialisedRead", "UnknownForm"]
__all__ += ["run_instruction", "tensor_map"]
