"""What the emulator says of a kernel that does something wrong."""

from __future__ import annotations


class EmulatorError(Exception):
    """A kernel does what no GPU defines, or the emulator cannot run it."""


class UnknownForm(EmulatorError):
    """A statement that the table of forms lacks."""


class UninitialisedRead(EmulatorError):
    """A register or a byte of shared memory was never written, or is written by a copy in flight."""


class OutOfBounds(EmulatorError):
    """An access outside the launch's tensors, the block's shared memory or a thread's own."""


class Misaligned(EmulatorError):
    """An access at an address that is no multiple of its size."""


class SharedRace(EmulatorError):
    """Two warps or lanes touch one byte of shared memory, one of them writing, and no barrier orders them."""


class DivergentBarrier(EmulatorError):
    """A barrier or a statement of a whole warp that only some of the threads reach."""


class Deadlock(EmulatorError):
    """No warp can continue, or none ends."""


class BlockOverlap(EmulatorError):
    """Two blocks write one byte of global memory."""


class BadLaunch(EmulatorError):
    """A trap, or operands that no GPU takes."""


class EarlyAccess(EmulatorError):
    """A chained kernel writes, or reads what kernels before it may write, before it has waited for them."""


class ProxyWarning(UserWarning):
    """An asynchronous operation reads what no fence.proxy.async followed: it works, but by no rule."""


# In the order of `Kind` in engine.h, which begins with none.
KINDS = (UninitialisedRead, OutOfBounds, Misaligned, SharedRace)
KINDS += (DivergentBarrier, Deadlock, BlockOverlap, BadLaunch, EarlyAccess)
