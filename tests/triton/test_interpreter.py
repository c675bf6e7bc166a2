"""The harness itself: each kind of fault that it detects is planted once and must be reported."""

import numpy as np
import pytest
import torch

from fastbert.testing import triton_interpreter
from fastbert.testing.triton_interpreter import float_to_bits
from tests.support.triton_sanitizer import SanitizerError, lazy_rows, sanitized

if not triton_interpreter.interpreting():
    pytest.skip("Triton is not installed, or compiles for the GPU in this process", allow_module_level=True)

import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, x_stride, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < n, other=0.0)
    tl.store(y_ptr + row * BLOCK + cols, x, mask=cols < n)


@triton.jit
def _shifted_kernel(x_ptr, y_ptr, WRITE_SHIFT: tl.constexpr, READ_SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Program p reads block p + READ_SHIFT of x and writes block p + WRITE_SHIFT (mod 2) of y."""
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + (tl.program_id(0) + READ_SHIFT) % 2 * BLOCK + cols)
    tl.store(y_ptr + (tl.program_id(0) * WRITE_SHIFT) % 2 * BLOCK + cols, x)


@triton.jit
def _lanes_kernel(y_ptr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols // 2, cols // STEP)


@triton.jit
def _atomic_kernel(y_ptr, PLAIN: tl.constexpr):
    tl.atomic_add(y_ptr, 1.0)
    if PLAIN:
        tl.store(y_ptr, 1.0, mask=tl.program_id(0) == 0)


def _copy(x, y, n, wide=True, block=16):
    _copy_kernel[(x.shape[0],)](x, y, n, x.stride(0), WIDE=wide, BLOCK=block)


def test_clean_launch_passes_and_is_counted():
    x, y = torch.randn(3, 13), torch.zeros(3, 16)
    with sanitized() as report:
        _copy(x, y, 13)
    assert torch.equal(y[:, :13], x)
    assert (report.launches, report.accesses, report.atomics) == (1, 2 * 3 * 13, 0)


@pytest.mark.parametrize(("width", "program"), [(13, 2), (20, 0)], ids=["the end", "between rows"])
def test_load_out_of_bounds(width, program):
    message = rf"program \({program}, 0, 0\) loads 1 of 14 elements .* x_ptr"
    with sanitized(), pytest.raises(SanitizerError, match=message):
        _copy(torch.randn(3, width)[:, :13], torch.zeros(3, 16), 14)


def test_two_programs_write_one_address():
    x, y = torch.randn(32), torch.zeros(32)
    with sanitized():
        _shifted_kernel[(2,)](x, y, WRITE_SHIFT=1, READ_SHIFT=0, BLOCK=16)
    with sanitized(), pytest.raises(SanitizerError, match=r"y_ptr \+ 0 bytes is written by program"):
        _shifted_kernel[(2,)](x, y, WRITE_SHIFT=0, READ_SHIFT=0, BLOCK=16)


def test_read_of_another_programs_write():
    x = torch.randn(32)
    with sanitized():
        _shifted_kernel[(2,)](x, x, WRITE_SHIFT=1, READ_SHIFT=0, BLOCK=16)
    with sanitized(), pytest.raises(SanitizerError, match=r"is read by program \d and written by program \d"):
        _shifted_kernel[(2,)](x, x, WRITE_SHIFT=1, READ_SHIFT=1, BLOCK=16)


def test_two_lanes_write_different_values():
    y = torch.zeros(16, dtype=torch.int32)
    with sanitized():
        _lanes_kernel[(1,)](y, STEP=2, BLOCK=16)
    with sanitized(), pytest.raises(SanitizerError, match="from two lanes to one address"):
        _lanes_kernel[(1,)](y, STEP=1, BLOCK=16)


def test_atomics_are_counted_and_clash_with_plain_stores():
    with sanitized() as report:
        _atomic_kernel[(4,)](torch.zeros(1), PLAIN=False)
    assert report.atomics == 4
    with sanitized(), pytest.raises(SanitizerError, match="updated atomically"):
        _atomic_kernel[(4,)](torch.zeros(1), PLAIN=True)


@triton.jit
def _handed_on_kernel(
    x_ptr, y_ptr, counter_ptr, BARRIER: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr, N: tl.constexpr
):
    """Each program writes its element of x; the last one to count itself adds them up and resets."""
    tl.store(x_ptr + tl.program_id(0), 1.0)
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem=SEM, scope=SCOPE) == N - 1:
        tl.store(counter_ptr, 0)
        tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


def _hand_on(barrier=True, sem="acq_rel", scope="gpu"):
    y, counter = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    _handed_on_kernel[(4,)](torch.zeros(4), y, counter, BARRIER=barrier, SEM=sem, SCOPE=scope, N=4)
    assert (y.item(), counter.item()) == (4.0, 0)


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_an_atomic_hands_on_what_was_written_before_a_barrier(scope):
    with sanitized():
        _hand_on(scope=scope)


@pytest.mark.parametrize(
    "missing",
    [{"barrier": False}, {"sem": "relaxed"}, {"sem": "acquire"}, {"sem": "release"}, {"scope": "cta"}],
    ids=str,
)
def test_without_a_barrier_or_an_order_nothing_is_handed_on(missing):
    with sanitized(), pytest.raises(SanitizerError, match=r"is (read|updated atomically) by program"):
        _hand_on(**missing)


def test_int32_wrap_beyond_2_to_31_elements():
    x = lazy_rows(3, 13, 2**30 + 8, torch.bfloat16)  # row 2 starts at element 2**31 + 16
    x[2] = torch.arange(13)
    y = torch.zeros(3, 16, dtype=torch.bfloat16)
    with sanitized():
        _copy(x, y, 13)
    assert torch.equal(y[2, :13].float(), torch.arange(13.0))
    with sanitized(), pytest.raises(SanitizerError, match=r"program \(2, 0, 0\) loads 13 of 13"):
        _copy(x, y, 13, wide=False)


def test_rounding_is_torchs_on_random_bits():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    bits[::2] &= 0xFFFF8000  # ties too
    values = torch.from_numpy(bits.view(np.float32))
    ours = torch.from_numpy(float_to_bits(bits.view(np.float32)).view(np.int16)).view(torch.bfloat16)
    theirs = values.to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()].view(torch.int16), theirs[~theirs.isnan()].view(torch.int16))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    a, b = tl.load(a_ptr + i * BLOCK + j), tl.load(b_ptr + i * BLOCK + j)
    tl.store(out_ptr + i * BLOCK + j, tl.dot(a, b, input_precision="ieee"))


def test_bfloat16_dot_accumulates_in_float32():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=g).bfloat16() for _ in range(2))
    out = torch.zeros(16, 16)
    with sanitized():
        _dot_kernel[(1,)](a, b, out, BLOCK=16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(out_ptr + i, tl.where(a < b, a + b, tl.abs(a)))


def test_bfloat16_arithmetic_is_torchs():
    a, b = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    _arithmetic_kernel[(1,)](a, b, out := torch.empty_like(a), BLOCK=64)
    assert torch.equal(out, torch.where(a < b, a + b, a.abs()))


def test_choose_after_triton_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="before anything imports Triton"):
        triton_interpreter.choose()
