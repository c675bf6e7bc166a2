"""The host's CUDA (tests/cpu/cpp/cuda_on_host.h) itself: it must show a missing barrier or wait."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from tests.support import cpu_build

FAULTS = (
    "none",
    "no barrier",
    "no wait",
    "wait too short",
    "no commit",
    "barrier for some",
    "shuffle for some",
    "mixed",
)
REVERSE, COPIED, WARP, EXCHANGE = range(4)
SEEDS = range(40)
IN = torch.arange(128, dtype=torch.float32)
BACKWARDS = IN.flip(0)


@pytest.fixture(scope="module")
def small_kernels():
    """The small kernels, as a shared library."""
    library = ctypes.CDLL(str(cpu_build.cuda_on_host_check()))
    library.run_small.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_ulonglong, *[ctypes.c_void_p] * 2]
    library.run_product.argtypes = [
        *(ctypes.c_int, ctypes.c_ulonglong, *[ctypes.c_void_p] * 3, ctypes.c_int),
    ]
    library.run_shape.argtypes = [*[ctypes.c_uint] * 5, ctypes.c_void_p]
    library.run_shape.restype = ctypes.c_char_p
    return library


def small(small_kernels, which, fault, seed):
    """(the output, whether copies landed late)."""
    out = torch.full((128,), torch.nan)
    late = small_kernels.run_small(which, FAULTS.index(fault), seed, IN.data_ptr(), out.data_ptr())
    return out, bool(late)


@pytest.mark.parametrize("which", [REVERSE, COPIED])
def test_right_kernels_are_right_in_every_order(small_kernels, which):
    late = set()
    for seed in SEEDS:
        out, landed_late = small(small_kernels, which, "none", seed)
        assert torch.equal(out, BACKWARDS)
        late.add(landed_late)
    assert late == {False, True}
    backwards_in_warps = IN.view(4, 32).flip(1).reshape(-1)
    for which in (WARP, EXCHANGE):
        assert torch.equal(small(small_kernels, which, "none", 3)[0], backwards_in_warps)


def test_a_missing_barrier_shows_in_either_warp(small_kernels):
    """Warps 0 and 3 read what the other writes: that which runs first reads NaN."""
    missing = [small(small_kernels, REVERSE, "no barrier", seed)[0].isnan().view(4, 32) for seed in SEEDS]
    for each in missing:
        assert torch.equal(each[0], ~each[3])
        assert torch.equal(each[0], each[0, :1].expand(32))
    assert {bool(each[0, 0]) for each in missing} == {False, True}


def test_a_missing_barrier_of_a_warp_shows_in_either_lane(small_kernels):
    missing = [small(small_kernels, EXCHANGE, "no barrier", seed)[0].isnan() for seed in SEEDS]
    assert all(torch.equal(each, ~each.view(4, 32).flip(1).reshape(-1)) for each in missing)
    # one lane in two reads too early, and which is drawn
    often = torch.stack(missing).float().mean(0)
    assert ((often > 0.1) & (often < 0.9)).all()


def test_a_seed_gives_one_order(small_kernels):
    orders = [small(small_kernels, EXCHANGE, "no barrier", seed)[0].isnan() for seed in (1, 7, 1, 7)]
    assert torch.equal(orders[0], orders[2])
    assert torch.equal(orders[1], orders[3])
    assert not torch.equal(orders[0], orders[1])


@pytest.mark.parametrize("fault", ["no wait", "wait too short", "no commit"])
def test_a_missing_wait_shows_where_copies_land_late(small_kernels, fault):
    for seed in SEEDS:
        out, late = small(small_kernels, COPIED, fault, seed)
        assert torch.equal(out, BACKWARDS) is not late
        if late and fault == "wait too short":
            # the second group copies the first half
            assert out[64:].isnan().all()
            assert torch.equal(out[:64], BACKWARDS[:64])


@pytest.mark.parametrize(
    ("which", "fault", "message"),
    [
        (REVERSE, "barrier for some", "__syncthreads that not all threads of a block reach"),
        (WARP, "shuffle for some", "an instruction of a whole warp that not all its lanes reach"),
        (WARP, "mixed", "lanes of a warp at different instructions of a whole warp"),
    ],
)
def test_what_is_undefined_on_a_gpu_aborts_and_names_the_seed(small_kernels, which, fault, message):
    code = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "values = (ctypes.c_float * 128)()\n"
        f"library.run_small({which}, {FAULTS.index(fault)}, ctypes.c_ulonglong(77), values, values)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, small_kernels._name], capture_output=True, text=True)
    assert run.returncode == -6
    assert run.stderr == f"cuda_on_host: {message} (FASTBERT_HOST_SEED=77)\n"


def test_the_seed_of_the_environment(small_kernels):
    """Without a call of reseed: a launch's order is that of FASTBERT_HOST_SEED."""
    code = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "values = (ctypes.c_float * 128)()\n"
        "library.run_shape.restype = ctypes.c_char_p\n"
        "library.run_shape(1, 1, 1, 128, 512, values)\n"
        "print(ctypes.c_int.in_dll(library, 'checked_late').value)\n"
    )
    found = set()
    for seed in range(6):
        run = subprocess.run(
            [sys.executable, "-c", code, small_kernels._name],
            capture_output=True,
            text=True,
            env=os.environ | {"FASTBERT_HOST_SEED": str(seed)},
        )
        assert run.returncode == 0, run.stderr
        found.add(run.stdout)
    assert found == {"0\n", "1\n"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_of_fragments(small_kernels, dtype, transposed):
    """Small integers, whose products and sums are exact."""
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randint(-8, 9, (2, 16, 16), generator=generator).to(dtype)
    expected = 1 + a.double() @ (b.double().T if transposed else b.double())
    for seed in range(4):
        c = torch.full((16, 16), torch.nan)
        small_kernels.run_product(
            dtype == torch.float16, seed, a.data_ptr(), b.data_ptr(), c.data_ptr(), transposed
        )
        assert torch.equal(c.double(), expected)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 1, 128, 512), None),
        ((2, 3, 2, 128, 512), None),
        ((0, 1, 1, 128, 512), b"invalid configuration argument"),
        ((1, 65536, 1, 128, 512), b"invalid configuration argument"),
        ((1, 1, 65536, 128, 512), b"invalid configuration argument"),
        ((1, 1, 1, 1025, 8192), b"invalid configuration argument"),
        ((1, 1, 1, 0, 512), b"invalid configuration argument"),
        ((1, 1, 1, 128, 163 * 1024), None),
        ((1, 1, 1, 128, 163 * 1024 + 1), b"invalid argument"),
    ],
)
def test_launches_that_a_gpu_refuses(small_kernels, shape, message):
    out = torch.zeros(128)
    assert small_kernels.run_shape(*shape, out.data_ptr()) == message
