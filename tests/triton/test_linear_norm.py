"""The Triton product with its norm: on the GPU where there is one, else in the interpreter, sanitized."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import triton as backend
from fastbert.kernels import tuning
from fastbert.ops.linear_norm import ARRIVALS, LinearNormInputs, linear_norm_ref, new_arrivals, pays
from fastbert.runtime import dispatch
from tests.support.triton_fixtures import (
    DEVICE,
    HALF,
    assert_bit_equal,
    fuzz,
    interpreted,
    kernels_of,
    normal,
)

kernels = kernels_of("linear_norm")
pytestmark = [pytest.mark.usefixtures("checked_memory"), pytest.mark.sweep]
LAUNCHES = pytest.mark.parametrize("one_launch", [True, False], ids=["one_launch", "two_launches"])
H100 = tuning.Device("NVIDIA H100", (9, 0), 132)


def arguments(rows, depth, out, dtype=torch.bfloat16, one_launch=True, seed=7, eps=1e-5):
    randn = normal(torch.Generator().manual_seed(seed), dtype)
    return LinearNormInputs(
        randn(rows, depth),
        randn(out, depth, scale=depth**-0.5),
        randn(out, scale=0.5),
        randn(rows, out),
        randn(out, scale=0.1, shift=1.0),
        randn(out, scale=0.1),
        eps,
        new_arrivals(DEVICE) if one_launch else None,
    )


def config(block_m=16, block_n=32, block_k=32, split_k=3):
    return kernels.Config(block_m, block_n, block_k, split_k, 4, 2)


def assert_right(args, y):
    """Against float64: float32's sums, and one rounding at the store."""
    wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args[:-1]]
    truth = linear_norm_ref(*wide)
    assert (y.dtype, y.shape, y.is_contiguous()) == (args.x.dtype, truth.shape, True)
    off = 4e-6 * (1 + truth.abs().max()) * (1 + args.weight.shape[1] ** 0.5 / 8)
    step = testing.rounding_step(truth, y.dtype)
    assert ((y.double() - truth).abs() <= 0.51 * step + off).all()
    if args.arrivals is not None:
        assert not args.arrivals.any()


def check(args, given_config=None):
    y = (
        kernels.linear_norm_fwd(args)
        if given_config is None
        else kernels.linear_norm_fwd_with(given_config, args)
    )
    assert_right(args, y)
    return y


# --- the error rule -----------------------------------------------------------------------------------------


@LAUNCHES
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_outputs_are_correctly_rounded(dtype, one_launch):
    """At least 99.9%: the sum is not rounded before it is normalized."""
    args = arguments(100, 64, 96, dtype, one_launch)
    wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args[:-1]]
    assert (check(args) == linear_norm_ref(*wide).to(dtype)).double().mean() >= 0.999


# --- tiles and parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 33, 64, 65])
@pytest.mark.parametrize("out", [1, 2, 8, 31, 32, 33, 64, 130])
def test_edges_of_tiles(rows, out):
    """Around the edges of tiles of 16 rows and 32 columns, at depths around those of 32 steps."""
    which = rows + out
    depth = (8, 33, 64, 100, 31)[which % 5]
    check(arguments(rows, depth, out, HALF[which % 2], which % 3 > 0))


@LAUNCHES
@pytest.mark.parametrize("split_k", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("depth", [1, 32, 95, 96, 97, 160, 200])
def test_parts_of_the_depth(split_k, depth, one_launch):
    """Fewer steps than parts, as many, and numbers that the parts do not divide."""
    check(arguments(18, depth, 40, one_launch=one_launch), config(split_k=split_k))


@pytest.mark.parametrize("rows", [31, 32, 70])
def test_several_norm_tiles_per_row_tile(rows):
    """A row tile whose rows the last program normalizes in several steps."""
    tall = config(block_m=32, split_k=2)._replace(num_warps=1)
    assert kernels.norm_tile(tall, 130)[0] == 8
    check(arguments(rows, 70, 130), tall)


def test_parts_are_added_in_their_order():
    """2**24, then 1 twice: added in this order float32 loses each 1; the other order would keep 2."""
    one = torch.zeros(1, 96, dtype=torch.bfloat16, device=DEVICE)
    one[0, 0], one[0, 32], one[0, 64] = 1, 1, 1
    weight = torch.zeros(2, 96, dtype=torch.bfloat16, device=DEVICE)
    weight[0, 0], weight[0, 32], weight[0, 64], weight[1, 0] = 2.0**24, 1, 1, 2.0**24
    zeros, ones = torch.zeros(2, dtype=torch.bfloat16, device=DEVICE), torch.ones(2, device=DEVICE)
    for arrivals in (new_arrivals(DEVICE), None):
        args = LinearNormInputs(one, weight, None, zeros[None], ones, None, 1e-5, arrivals)
        # the first column's sum is 2**24, as the second's: nothing is left after the mean
        assert kernels.linear_norm_fwd_with(config(), args).tolist() == [[0.0, 0.0]]


@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_last_the_result_is_the_same(seed, monkeypatch):
    """Programs that run in another order: the last to arrive normalizes, bit for bit as ever."""
    from triton.runtime.interpreter import InterpreterBuilder

    args = arguments(40, 200, 70)
    expected = kernels.linear_norm_fwd_with(config(), args)
    programs = 3 * 3 * 3
    order = torch.randperm(programs, generator=torch.Generator().manual_seed(seed)).tolist()
    in_order = InterpreterBuilder.set_grid_idx

    def shuffled(self, x, y, z):
        assert self.grid_dim[0] == programs
        in_order(self, order[x], y, z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", shuffled)
    assert torch.equal(kernels.linear_norm_fwd_with(config(), args), expected)
    assert not args.arrivals.any()


def test_repeats_are_bit_equal_and_no_atomic_changes_a_sum(checked_memory):
    """The only atomics count arrivals: one per program. Counters serve call after call."""
    args = arguments(70, 200, 96)
    first = check(args)
    tiles = 5 * 3 * 3
    if DEVICE.type == "cpu":
        assert checked_memory.atomics == tiles
    for _ in range(2 if DEVICE.type == "cpu" else 250):
        assert torch.equal(check(args), first)
    before = checked_memory.atomics
    check(args._replace(arrivals=None))
    assert checked_memory.atomics == before


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_graph_of_many_calls_and_calls_on_two_streams():
    sizes = ((128, 3072, 768), (128, 768, 768), (1, 3072, 768), (250, 3072, 768))
    calls = [arguments(*size) for size in sizes]
    expected = [kernels.linear_norm_fwd(args) for args in calls]
    torch.cuda.synchronize()
    graph, counters = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        counters = new_arrivals(DEVICE)
        found = [kernels.linear_norm_fwd(args._replace(arrivals=counters)) for args in calls]
    for _ in range(250):
        for y in found:
            y.fill_(float("nan"))
        graph.replay()
        assert_bit_equal(found, expected)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(50):
        results = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                mine = new_arrivals(DEVICE)
                results.append([kernels.linear_norm_fwd(a._replace(arrivals=mine)) for a in calls])
        torch.cuda.synchronize()
        for each in results:
            assert_bit_equal(each, expected)


# --- layouts ------------------------------------------------------------------------------------------------


@LAUNCHES
def test_a_nan_stays_in_its_row(one_launch):
    args = arguments(40, 72, 70, one_launch=one_launch)
    clean = check(args)
    args.x[33, 5] = float("nan")
    dirty = kernels.linear_norm_fwd(args)
    assert dirty[33].isnan().all()
    kept = torch.arange(40, device=DEVICE) != 33
    assert torch.equal(clean[kept], dirty[kept])


@pytest.mark.parametrize("missing", [(), ("bias",), ("norm_bias",), ("bias", "norm_bias")], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_optional_operands_and_float32_norms(missing, dtype):
    args = arguments(20, 40, 33, dtype)._replace(**dict.fromkeys(missing))
    check(args)
    norms = {n: getattr(args, n).float() for n in ("norm_weight", "norm_bias") if n not in missing}
    check(args._replace(**norms))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-3, 2.0])
def test_eps(eps):
    args = arguments(9, 40, 33, eps=eps)
    check(args)
    flat = args._replace(x=args.x * 0, bias=None, residual=args.residual * 0 + 3)
    y = kernels.linear_norm_fwd(flat)  # a variance of zero
    assert torch.equal(y, flat.norm_bias.expand_as(y)) if eps else y.isnan().all()


# --- the contract -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 256, 257])
def test_no_rows_and_many(rows):
    """More rows than the kernels take are two calls, as are wider rows."""
    args = arguments(rows, 16, 24)
    assert kernels.takes(rows, 24) == backend.joins_norm(rows, 24) == (rows <= 256)
    y = backend.linear_norm_fwd(args)
    assert y.shape == (rows, 24)
    assert rows == 0 or torch.isfinite(y).all()
    assert not kernels.takes(1, kernels.MOST_COLUMNS + 1)
    assert kernels.takes(1, kernels.MOST_COLUMNS)


def test_launches(monkeypatch, noted):
    """One with counters where few sums are left to the end, else two, none without rows."""
    launched = noted(kernels, "launch", lambda kernel, *args, **options: kernel.fn.__name__)
    for rows, one_launch, names in (
        (20, True, ["_linear_norm_kernel"]),
        (20, False, ["_linear_norm_kernel", "_normalize_kernel"]),
        (0, True, []),
    ):
        launched.clear()
        kernels.linear_norm_fwd(arguments(rows, 40, 33, one_launch=one_launch))
        assert launched == names
    monkeypatch.setattr(kernels, "in_one_launch", lambda *sizes: False)
    launched.clear()
    args = arguments(20, 40, 33)
    check(args)
    assert launched == ["_linear_norm_kernel", "_normalize_kernel"]


def test_pays_where_a_kernel_serves():
    """Never on a CPU by the table; where Triton is pinned, for few rows in half precision."""
    few = torch.zeros(4, 8, dtype=torch.bfloat16, device=DEVICE)
    many = torch.zeros(257, 8, dtype=torch.bfloat16, device=DEVICE)
    if DEVICE.type == "cpu":
        assert not pays(few, 8)
    with dispatch.use_backend(linear_norm="triton"):
        assert pays(few, 8)
        assert not pays(many, 8)
        assert not pays(few, kernels.MOST_COLUMNS + 1)
        assert not pays(few.float(), 8)
    for name in ("aten", "reference", "cpu"):
        with dispatch.use_backend(name):
            assert not pays(few, 8)


# --- configs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
def test_candidates_fit_the_smallest_shared_memory(capability):
    assert {c.split_k for c in kernels.candidates(129, capability)} == {1, 2}  # no part without a step
    for c in kernels.candidates(4096, capability):
        stage = (c.block_m + c.block_n) * c.block_k * 2
        assert c.num_stages >= 3
        assert (c.num_stages - 1) * stage <= kernels.ROOM <= 98 * 1024
        assert -(-kernels.MOST_ROWS // c.block_m) <= ARRIVALS


def test_many_lengths_meet_few_configs():
    found = {
        kernels.config_for(tuning.bucket(n), depth, 768, True, torch.bfloat16, H100)
        for n, depth in itertools.product(range(1, 257), (768, 3072))
    }
    assert len(found) <= 8


@fuzz(20)
@given(
    st.integers(1, 70),
    st.integers(1, 150),
    st.integers(1, 150),
    st.sampled_from(HALF),
    st.booleans(),
    st.sampled_from([1, 2, 3, 5]),
    st.integers(0, 2**20),
)
def test_fuzz(rows, depth, out, dtype, one_launch, split_k, seed):
    check(arguments(rows, depth, out, dtype, one_launch, seed), config(split_k=split_k))
