"""The Triton attention_received: on the GPU where there is one, else interpreted under the sanitizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import aten, triton
from fastbert.ops.attention_received import AttentionReceivedInputs, attention_received_ref
from fastbert.testing.op_cases.attention_received import AttentionReceivedCase
from tests.support.triton_attention_inputs import at_strides, strided
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    counted,
    fuzz_tests,
    kernels_of,
    lucky_yardstick,
    needs_lazy_memory,
)

kernels = kernels_of("attention_received")
pytestmark = pytest.mark.usefixtures("checked_memory")
LENGTHS = (70, 0, 1, 24, 33)


def inputs_of(lengths=LENGTHS, dtype=torch.float32, slack=0, **options) -> AttentionReceivedInputs:
    case = AttentionReceivedCase(lengths, **options)
    numbers = {"max_seqlen": case.max_seqlen + slack, "softmax_scale": case.softmax_scale}
    return AttentionReceivedInputs(**case.inputs(dtype, DEVICE), **numbers)


def assert_right(inputs: AttentionReceivedInputs, config=None) -> torch.Tensor:
    """The formula in float64 but for float32's rounding of scores and sums."""
    given = () if config is None else (config,)
    found = (kernels.attention_received_with if given else kernels.attention_received_fwd)(*given, inputs)
    wide = [t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs]
    truth = attention_received_ref(*wide)
    assert (found.dtype, found.shape) == (torch.float32, truth.shape)
    torch.testing.assert_close(found.double(), truth, rtol=2e-5, atol=1e-5)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_config_at_the_edges_of_its_tiles(dtype):
    """Sequences without tokens, of one token, around each tile; more slots than tiles; a long tail."""
    for headdim in (16, 64):
        for config in kernels.ladder(headdim, dtype):
            edges = {config.block_m, config.block_n} if headdim == 16 else {config.block_n}
            lengths = (0, 1, *(n + d for n in edges for d in (-1, 0, 1)), 0)
            sizes = {"nheads": 2, "headdim": headdim, "tail": config.block_n + 3}
            assert_right(inputs_of(lengths, dtype, config.block_n + 1, **sizes), config)


@pytest.mark.parametrize("headdim", [1, 20, 33, 72, 128])
def test_head_dimensions(headdim):
    for dtype in DTYPES:
        assert_right(inputs_of((5, 40), dtype, headdim=headdim, nheads=2, tail=2))


def test_the_highest_tiles_that_sequences_fill_and_that_fill_the_device():
    high, middle, low = kernels.ladder(64, torch.bfloat16)
    for seqlen, rows, multiprocessors, expected in (
        *((9, 18, 132, high), (7, 14, 132, high), (6, 18, 132, middle), (5, 18, 132, low)),
        *((9, 13, 132, middle), (9, 12, 132, low), (9, 7, 132, low), (9, 8, 2, high)),
    ):
        assert kernels.config_for(64, torch.bfloat16, seqlen, rows, multiprocessors) == expected


def test_strides():
    """NaN between heads and rows, and rows of q and k that overlap."""
    inputs = inputs_of(dtype=torch.bfloat16, kv_heads=1)
    expected = kernels.attention_received_fwd(inputs)
    apart = inputs._replace(q=strided(inputs.q), k=strided(inputs.k))
    assert torch.equal(kernels.attention_received_fwd(apart), expected)
    memory = torch.randn(4000, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    rows = sum(LENGTHS)
    overlapping = inputs_of()._replace(q=memory.as_strided((rows, 3, 16), (20, 8, 1)))
    truth = overlapping.q.double().contiguous(), overlapping.k.double()
    lse = torch.cat(
        [
            (torch.einsum("ihd,jhd->hij", *(t.split(LENGTHS)[i] for t in truth)) / 4).logsumexp(-1)
            for i in range(len(LENGTHS))
        ],
        1,
    )
    assert_right(overlapping._replace(lse=lse.float()))


def test_what_is_not_there_is_not_read():
    """NaN where a query sees nothing, in the tail, and in a sequence beside; a NaN key stays its own."""
    inputs = inputs_of((5, 9), tail=3, blind=True)
    expected = assert_right(inputs)
    assert not expected[14:].any()
    q, k = inputs.q.clone(), inputs.k.clone()
    q[13] = torch.nan
    assert torch.equal(kernels.attention_received_fwd(inputs._replace(q=q)), expected)
    k[2, 1], q[13] = torch.inf, 0.0
    found = kernels.attention_received_fwd(inputs._replace(q=q, k=k))
    assert found[2].isnan()
    others = [*range(2), *range(3, 17)]
    assert torch.equal(found[others], expected[others])


def test_a_query_with_an_infinite_lse_gives_nothing():
    inputs = inputs_of((5,))
    lse = inputs.lse.clone()
    lse[:, 1] = torch.inf
    without = kernels.attention_received_fwd(inputs._replace(lse=lse))
    lse[:, 1] = -torch.inf
    assert torch.equal(kernels.attention_received_fwd(inputs._replace(lse=lse)), without)
    lse[0, 1] = torch.nan
    assert kernels.attention_received_fwd(inputs._replace(lse=lse)).isnan().all()


def test_a_sequence_alone_receives_the_same_bits():
    inputs, start = inputs_of(dtype=torch.bfloat16), 0
    config = kernels.ladder(16, torch.bfloat16)[-1]
    found = kernels.attention_received_with(config, inputs)
    for length, each in zip(LENGTHS, found.split(LENGTHS), strict=True):
        rows = slice(start, start + length)
        ends = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
        alone = AttentionReceivedInputs(
            inputs.q[rows], inputs.k[rows], ends, length, inputs.lse[:, rows].contiguous(), 0.25
        )
        assert torch.equal(kernels.attention_received_with(config, alone), each)
        start += length


def test_scores_below_zero_and_a_scale_below_zero():
    inputs = inputs_of((33, 7), sharpness=8.0)
    flipped = inputs._replace(q=-inputs.q, softmax_scale=-inputs.softmax_scale)
    assert torch.equal(assert_right(inputs), assert_right(flipped))


@pytest.mark.parametrize("sizes", [((0, 0), 3), ((0, 0), 0)], ids=str)
def test_no_tokens(sizes):
    lengths, tail = sizes
    found = kernels.attention_received_fwd(inputs_of(lengths, tail=tail))
    assert found.tolist() == [0.0] * tail


def test_wide_heads_are_left_to_pytorch(monkeypatch):
    calls = [], counted(monkeypatch, aten.attention_received, "to_grid")
    monkeypatch.setattr(kernels, "launch", lambda *args, **config: calls[0].append(args))
    triton.attention_received_fwd(inputs_of((3,), headdim=128, nheads=1))
    assert [len(c) for c in calls] == [1, 0]
    triton.attention_received_fwd(inputs_of((3,), headdim=136, nheads=1))
    assert [len(c) for c in calls] == [1, 3]


@needs_lazy_memory
def test_offsets_beyond_2_to_31_elements():
    torch.use_deterministic_algorithms(False)  # it would fill the lazy pages
    inputs = inputs_of(dtype=torch.bfloat16)
    expected = kernels.attention_received_fwd(inputs)
    for strides in ((2**30 + 64, 40, 1), (64, 2**30 + 64, 1)):
        far = inputs._replace(q=at_strides(inputs.q, *strides), k=at_strides(inputs.k, *strides))
        assert torch.equal(kernels.attention_received_fwd(far), expected)


def test_many_slots_are_on_several_planes(monkeypatch):
    grids = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **config: grids.append(grid))
    t = torch.empty(2**20, 2, 16, device="meta", dtype=torch.bfloat16)
    ends = torch.empty(2**19, device="meta", dtype=torch.int32)
    lse = torch.empty(2, 2**20, device="meta")
    kernels.attention_received_with(
        kernels.ladder(16, t.dtype)[-1], AttentionReceivedInputs(t, t, ends, 33, lse, 0.25)
    )
    heads, slots, planes = grids[0]
    assert heads == 2
    assert 2**20 <= slots * planes < 2**20 + planes
    assert max(slots, planes) <= 65535


def check(lengths, nheads, headdim, kv_heads, packed_qkv, tail, dtype, seed):
    kv_heads = 0 if packed_qkv or nheads % kv_heads else kv_heads
    case = AttentionReceivedCase(lengths, nheads, headdim, kv_heads, packed_qkv, tail=tail)
    for row in testing.run_case(case, "triton", dtype, DEVICE, seed=seed):
        assert row.passed or lucky_yardstick(row, case, dtype, seed, sum(lengths)), row.reason


test_fuzz, test_fuzz_long = fuzz_tests(
    check,
    st.tuples(
        st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(sum).map(tuple),
        *(st.integers(1, 4), st.integers(1, 70), st.integers(1, 2), st.booleans(), st.integers(0, 40)),
        *(st.sampled_from(DTYPES), st.integers(0, 99)),
    ),
    20,
    150,
)
