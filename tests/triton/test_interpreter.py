"""The harness itself: each kind of fault that it detects is planted once and must be reported."""

import threading
import types

import numpy as np
import pytest
import torch

from fastbert.testing import triton_interpreter
from fastbert.testing.triton_interpreter import bits_to_float, float_to_bits
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


def _meet():
    """What `_meeting_kernel` calls in Python, halfway."""


@triton.jit
def _meeting_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    _meet()
    tl.store(y_ptr + at, x * 3.0)


def _copy(x, y, n, wide=True, block=16):
    _copy_kernel[(x.shape[0],)](x, y, n, x.stride(0), WIDE=wide, BLOCK=block)


def test_clean_launch_passes_and_is_counted():
    x, y = torch.randn(3, 13), torch.zeros(3, 16)
    with sanitized() as report:
        _copy(x, y, 13)
    assert torch.equal(y[:, :13], x)
    assert (report.launches, report.accesses, report.atomics) == (1, 2 * 3 * 13, 0)


def test_load_out_of_bounds():
    message = r"program \(2, 0, 0\) loads 1 of 14 elements .* x_ptr"
    with sanitized(), pytest.raises(SanitizerError, match=message):
        _copy(torch.randn(3, 13), torch.zeros(3, 16), 14)


def test_store_out_of_bounds():
    with sanitized(), pytest.raises(SanitizerError, match=r"stores .* outside its tensors"):
        _copy(torch.randn(3, 16), torch.zeros(3, 16)[:2], 16)


def test_padding_between_rows_is_out_of_bounds():
    with sanitized(), pytest.raises(SanitizerError, match=r"program \(0, 0, 0\) loads 1 of 14"):
        _copy(torch.randn(3, 20)[:, :13], torch.zeros(3, 16), 14)


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


def test_patches_are_undone():
    from triton.runtime.interpreter import InterpreterBuilder

    before = InterpreterBuilder.create_masked_load
    with sanitized():
        assert InterpreterBuilder.create_masked_load is not before
    assert InterpreterBuilder.create_masked_load is before


# --- bfloat16 -----------------------------------------------------------------------------------------------

GOLDEN = [  # float32 bits, bfloat16 bits
    (0x3F800000, 0x3F80),  # 1
    (0x3F808000, 0x3F80),  # tie, down to even
    (0x3F818000, 0x3F82),  # tie, up to even
    (0x3F808001, 0x3F81),  # just above a tie
    (0x3F817FFF, 0x3F81),  # just below one
    (0x3FFFFFFF, 0x4000),  # carries into the exponent
    (0xBF808001, 0xBF81),
    (0x7F7FFFFF, 0x7F80),  # largest float32: infinity
    (0xFF800000, 0xFF80),  # -infinity
    (0x00000001, 0x0000),
    (0x00018000, 0x0002),  # subnormal tie
    (0x80000000, 0x8000),  # -0
]


def test_rounding_to_bfloat16_golden_values():
    given = np.array([g for g, _ in GOLDEN], np.uint32).view(np.float32)
    assert [hex(b) for b in float_to_bits(given)] == [hex(b) for _, b in GOLDEN]


def test_nan_stays_nan():
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(bits_to_float(float_to_bits(nans))).all()


def test_rounding_is_torchs_on_random_bits():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    values = torch.from_numpy(bits.view(np.float32))
    ours = torch.from_numpy(float_to_bits(bits.view(np.float32)).view(np.int16)).view(torch.bfloat16)
    theirs = values.to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()].view(torch.int16), theirs[~theirs.isnan()].view(torch.int16))


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(out_ptr + at, a + b)
    tl.store(out_ptr + BLOCK + at, a * b)
    tl.store(out_ptr + 2 * BLOCK + at, a - b)
    tl.store(out_ptr + 3 * BLOCK + at, -a)
    tl.store(out_ptr + 4 * BLOCK + at, tl.where(a < b, a, b))
    tl.store(out_ptr + 5 * BLOCK + at, tl.abs(a))
    tl.store(out_ptr + 6 * BLOCK + at, tl.maximum(a, b))


def test_bfloat16_arithmetic_is_pytorchs():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, generator=g).bfloat16() for _ in range(2))
    out = torch.zeros(7, 256, dtype=torch.bfloat16)
    with sanitized():
        _arithmetic_kernel[(1,)](a, b, out, BLOCK=256)
    expected = (a + b, a * b, a - b, -a, torch.minimum(a, b), a.abs(), torch.maximum(a, b))
    for ours, theirs in zip(out, expected, strict=True):
        assert torch.equal(ours, theirs)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _reduce_kernel(x_ptr, sum_ptr, max_ptr, generic_ptr, scan_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows, cols = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + rows[:, None] * BLOCK + cols[None, :])
    tl.store(sum_ptr + rows, tl.sum(x, 1))
    tl.store(max_ptr + rows, tl.max(x, 1))
    tl.store(generic_ptr + rows, tl.reduce(x, 1, _add))
    tl.store(scan_ptr + rows[:, None] * BLOCK + cols[None, :], tl.cumsum(x, 1))


def test_bfloat16_reductions():
    x = torch.arange(1, 33).reshape(4, 8).bfloat16() * 0.5  # every partial sum is exact
    outs = [torch.zeros(4, dtype=torch.bfloat16) for _ in range(3)]
    scan = torch.zeros(4, 8, dtype=torch.bfloat16)
    with sanitized():
        _reduce_kernel[(1,)](x, *outs, scan, ROWS=4, BLOCK=8)
    assert torch.equal(outs[0], x.sum(1))
    assert torch.equal(outs[1], x.amax(1))
    assert torch.equal(outs[2], x.sum(1))
    assert torch.equal(scan, x.float().cumsum(1).bfloat16())


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
def _cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.int32, torch.float64], ids=str)
@pytest.mark.parametrize("back", [False, True], ids=["from_bf16", "to_bf16"])
def test_bfloat16_casts_are_pytorchs(to, back):
    x = (torch.randn(256, generator=torch.Generator().manual_seed(0)) * 100).bfloat16()
    source, target = (x.to(to) * 3, torch.bfloat16) if back else (x, to)
    out = torch.zeros(256, dtype=target)
    with sanitized():
        _cast_kernel[(1,)](source, out, BLOCK=256)
    assert torch.equal(out, source.to(target))


@triton.jit
def _sum_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK))))


def test_after_a_launch_the_language_is_as_it_was():
    """Also what device functions of other modules see: `tl.sum` is written with `tl.core`."""
    modules = tl, tl.core, tl.math, tl.standard, tl.tensor
    before = [dict(vars(module)) for module in modules]
    x, y = torch.arange(16.0), torch.zeros(1)
    for _ in range(2):
        _sum_kernel[(1,)](x, y, BLOCK=16)
        assert y.item() == 120.0
        for module, names in zip(modules, before, strict=True):
            assert dict(vars(module)) == names


def test_threads_launch_in_turns_and_leave_the_language_as_it_was():
    """The second begins while the first runs, and would end after it."""
    before = tl.tensor.__mul__, tl.load, tl.arange
    begun, ended, second_has_begun = threading.Event(), threading.Event(), threading.Event()
    overlapped = []

    def first():
        begun.set()
        overlapped.append(second_has_begun.wait(0.3))

    def second():
        second_has_begun.set()
        ended.wait(0.3)

    def of_another_module(meet):
        """`_meeting_kernel` with globals of its own: each module's language is redirected apart."""
        own = {**_meeting_kernel.fn.__globals__, "_meet": meet}
        function = types.FunctionType(_meeting_kernel.fn.__code__, own, "_meeting_kernel")
        function.__annotations__ = _meeting_kernel.fn.__annotations__
        return triton.jit(function)

    x, results = torch.arange(16.0), [torch.zeros(16), torch.zeros(16)]
    kernels = [of_another_module(first), of_another_module(second)]
    threads = [
        threading.Thread(target=lambda k=k, y=y: k[(1,)](x, y, BLOCK=16))
        for k, y in zip(kernels, results, strict=True)
    ]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    threads[0].join(30)
    ended.set()
    threads[1].join(30)
    assert overlapped == [False]
    assert all(torch.equal(y, 3 * x) for y in results)
    assert (tl.tensor.__mul__, tl.load, tl.arange) == before


def test_choose_after_triton_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="before anything imports Triton"):
        triton_interpreter.choose()
