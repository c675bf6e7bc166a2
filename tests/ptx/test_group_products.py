"""The products of csrc/cuda/hopper.cuh as nvcc compiles them for sm_90a: places of operands, and sums."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.ptx.emulator.cudart import Emulation, Library
from tests.support import cuda_build
from tests.support.cuda_draws import whole_numbers

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")]

# Whether b is transposed, plus 2 if a is, or 4 if a is in registers.
FORMS = {
    "shared": 0,
    "shared, b transposed": 1,
    "shared, a transposed": 2,
    "shared, both transposed": 3,
    "registers": 4,
    "registers, b transposed": 5,
}


@pytest.fixture(scope="module")
def library():
    loaded = Library(cuda_build.group_products())
    loaded.calls.product.restype = ctypes.c_char_p
    return loaded


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize("columns", (64, 128, 192))
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_exact_integers(library, dtype, form, columns, schedule):
    """(64, 64) times (64, columns), added twice; of other operands the sums would be others."""
    a = whole_numbers(64, 64, dtype=dtype, most=9, seed=form)
    b = whole_numbers(64, columns, dtype=dtype, most=9, seed=columns)
    c = torch.full((64, columns), torch.nan)
    given_a = a.T.contiguous() if form & 2 else a
    given_b = b if form & 1 else b.T.contiguous()
    emulation = Emulation(library, schedule, allowed=library.allowed)
    emulation.register(given_a, given_b, c)
    with emulation.connected():
        places = (ctypes.c_void_p(t.data_ptr()) for t in (given_a, given_b, c))
        error = library.calls.product(int(dtype == torch.float16), columns, form, *places)
        emulation.raise_report()
    assert error is None
    assert torch.equal(c, 2 * a.float() @ b.float())
