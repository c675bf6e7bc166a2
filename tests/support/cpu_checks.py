"""What the tests of all compiled CPU kernels check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from fastbert.runtime import loader
from tests.support.cpu_fixtures import using_isa
from tests.support.cpu_truth import assert_same_bits

Result = TypeVar("Result")


def on_each_isa(call: Callable[[], Result], *isas: str) -> list[Result]:
    """What `call` returns under each of these instruction sets; skips where the processor lacks one."""
    found = []
    for isa in isas:
        with contextlib.contextmanager(using_isa)(isa):
            found.append(call())
    return found


def assert_same_on_any_threads(call: Callable[[], Iterable[torch.Tensor]], repeats: int = 0) -> None:
    """`call` gives the same bits on 1, 2, 3 and 8 threads, and at `repeats` more calls on two."""
    assert loader.extension.has_team(), "PyTorch's OpenMP pool was not found: kernels never run in parallel"
    before, first = torch.get_num_threads(), None
    try:
        for count in (1, 2, 3, 8, *[2] * repeats):
            torch.set_num_threads(count)
            results = tuple(call())
            first = first or results
            for i, (a, b) in enumerate(zip(results, first, strict=True)):
                assert_same_bits(a, b, f"result {i} on {count} threads")
    finally:
        torch.set_num_threads(before)
