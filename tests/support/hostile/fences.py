"""Memory with nothing around it, and calls that are printed before they are made.

Inputs and outputs are between pages that may not be touched, so that an access outside ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import re

import torch

ERRORS = (ValueError, TypeError, RuntimeError, IndexError)
PAGE = mmap.PAGESIZE


class Fence:
    """Tensors that end where a page begins that may not be touched; there is such a page before them too."""

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.memory, self.tensors = [], []

    def empty(self, shape, dtype, fill=0xA5):
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > 2**40:
            raise RuntimeError(f"out of memory: {size} bytes")
        used = -(-size // PAGE) * PAGE
        pages = mmap.mmap(-1, used + 2 * PAGE)
        pages[PAGE : PAGE + used] = bytes([fill]) * used
        first = ctypes.c_char.from_buffer(pages)
        start = ctypes.addressof(first)
        for page in (start, start + PAGE + used):
            assert self.libc.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0
        before = used - size
        self.memory.append((pages, before))
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        t = torch.frombuffer(pages, dtype=dtype, offset=PAGE + before, count=torch.Size(shape).numel())
        return t.view(shape)

    def copy(self, t):
        """`t` behind a fence, with its strides."""
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        whole = self.empty((span,), t.dtype)
        fenced = whole.as_strided(t.shape, t.stride()) if t.numel() else self.empty(t.shape, t.dtype)
        if all(s > 0 or n == 1 for n, s in zip(t.shape, t.stride(), strict=True)):
            self.tensors.append(fenced.copy_(t))
            return fenced
        whole.copy_(t.as_strided((span,), (1,)))
        return fenced

    def check(self):
        """Fail if something was written before a tensor."""
        for pages, before in self.memory:
            assert pages[PAGE : PAGE + before] == b"\xa5" * before, "written before the start of a tensor"

    def forget(self):
        self.memory.clear()
        self.tensors.clear()


def fenced_outputs(fence):
    """From here on, put behind fences what the backends allocate."""

    def allocator(fill):
        def allocate(self, *size, dtype=None, **_):
            shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            t = fence.empty(tuple(shape), dtype or self.dtype)
            return t.zero_() if fill == 0 else t

        return allocate

    torch.Tensor.new_empty, torch.Tensor.new_zeros = allocator(None), allocator(0)


class Tried:
    """The calls of one door. Each is printed before it is made: the last one printed has crashed."""

    def __init__(self):
        self.fence, self.faults, self.told = Fence(), [], ""

    def fault(self, what):
        if what:
            self.faults.append(f"{self.told}: {what}")

    def one(self, told, call, words="", refused=True, within=False):
        """Make a call. `refused`: whether it must raise an error that matches `words`; None if it may.

        `within` another call: the memory of that one stays watched.
        """
        self.told, result = told[:200].replace("\n", " "), None
        print(self.told, flush=True)
        try:
            result = call()
        except ERRORS as error:
            if refused is False or not str(error) or not re.search(words, str(error)):
                self.fault(f"{type(error).__name__}: {str(error)[:300]}; expected {words or 'no error'}")
        except Exception as error:  # what dynamo raises around an error of ours
            if refused is not True or not re.search(words, str(error)):
                self.fault(f"{type(error).__name__}: {str(error)[:300]}; expected {words}")
        else:
            self.fault("not refused" if refused else "")
        try:
            self.fence.check()
        except AssertionError as error:
            self.fault(str(error))
        if not within:
            self.fence.forget()
        return result
