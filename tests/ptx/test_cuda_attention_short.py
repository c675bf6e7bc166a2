"""csrc/cuda/attention_short.cu, emulated: it has the bits of attention_forward.cuh's kernels."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fastbert.backends.cuda import attention as launchers
from fastbert.ops.attention_inputs import EVERYWHERE, Window
from fastbert.testing.op_cases.attention import AttentionCase
from tests.support.attention_calls import HALF, broken_rules, check_forward, made, sequences
from tests.support.cpu_truth import assert_same_bits, randn

pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")

LONGEST, HEADDIMS = 64, (32, 64)  # that the kernel has
TIGHT = (1e-5, 1e-6)  # of sums of float32: relative to their terms, absolute
# One, two and four warps per sequence: lengths at the edges of 8 and 16 rows, blocks that are not full, and
# sequences without a row at both ends and between.
LENGTHS = ((16, 1, 7, 8, 9), (0, 15, 0, 0, 16, 0), (32, 17, 5), (31, 0, 32), (64, 33, 2), (49, 48, 0), (63,))


@pytest.fixture
def forward(emulated, kernels_only, monkeypatch):
    """Inputs to out and lse, by the one kernel that may serve them; no call may go to the next backend."""
    monkeypatch.setattr(launchers, "HOPPER", False)

    def run(inputs):
        out, lse, _, bits = emulated.backend.attention_fwd(inputs, False, False)
        if emulated.launches:
            short = inputs.max_seqlen <= LONGEST
            assert ("attention_short" if short else "attention_forward") in emulated.launches[-1].kernel
        return out, lse, bits

    return run


def longer(inputs):
    """The same call with room for longer sequences, which is another kernel's."""
    size, bias = LONGEST + 1, inputs.bias
    if bias is not None:
        bias = F.pad(bias, [0, size - inputs.max_seqlen, 0, (size - bias.shape[2]) * (bias.shape[2] > 1)])
    return inputs._replace(max_seqlen=size, bias=bias)


def check(run, inputs):
    """Near the truth, with the bits of the kernel for longer sequences."""
    found = check_forward(run, inputs, TIGHT if inputs.bias is None else None)
    for a, b in zip(found, run(longer(inputs)), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(emulated, forward, lengths, dtype, headdim):
    for emulated.schedule, emulated.seed in (("late", 0), ("early", 1)):
        check(forward, made(lengths, 2, headdim, dtype, capacity=3))


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("lengths", ((9, 16, 3, 2, 11), (30, 20, 25), (60, 41)), ids=str)
@pytest.mark.parametrize("window", (EVERYWHERE, Window(right=0), Window(3, 2), Window(20, -1)), ids=str)
def test_biases_windows_and_shared_heads(forward, lengths, window, headdim):
    size, batch = max(lengths), len(lengths)
    base = made(lengths, 4, headdim, window=window)
    check(forward, base)
    for shape in ((batch, 4, size, size), (1, 4, size, size), (batch, 1, 1, size)):
        check(forward, base._replace(bias=randn(*shape)))
    k, v = (t[:, ::2] for t in base[1:3])
    check(forward, base._replace(k=k, v=v, gate=torch.tensor([1.5, 0.0, -0.25, 1.0])))


@pytest.mark.parametrize("scale", (0.0, -0.3, -30.0, 3.0))
def test_scales(forward, scale):
    check(forward, made((40, 64), 1, 32, torch.float16, softmax_scale=scale))


def test_masks_of_lowest_values_and_infinities(forward):
    bias = torch.zeros(2, 1, 40, 40)
    bias[0, :, 3] = -math.inf  # a row without a key
    bias[0, :, 4, :16] = -math.inf
    bias[1, :, :, 7:] = bias[1, :, 2] = torch.finfo(torch.float32).min
    inputs = made((40, 30), 2, 64, bias=bias)
    out, lse, _ = check_forward(forward, inputs)
    assert (out[3] == 0).all()
    assert (lse[:, 3] == -math.inf).all()
    torch.testing.assert_close(out[42].float(), inputs.v[40:].float().mean(0), rtol=0, atol=4e-3)


@pytest.mark.parametrize("poison", (math.nan, math.inf))
@pytest.mark.parametrize("lengths", ((5, 16, 1, 12), (20, 32, 3), (40, 64, 2)), ids=str)
def test_nothing_outside_a_sequence_gets_in(forward, lengths, poison):
    """Neither of other sequences nor of gaps between rows; and NaN stays in its sequence."""
    inputs = made(lengths, 2, 64, capacity=70)
    clean, end = forward(inputs), sum(lengths)
    for start, n in sequences(inputs):
        rows, tensors = slice(start, start + n), []
        for t in inputs[:3]:
            memory = t.new_full((t.shape[0] + 2, 136), poison)
            inside = memory[1:-1, :128].unflatten(1, (2, 64))
            inside[rows] = t[rows]
            tensors.append(inside)
        out, lse, _ = forward(inputs._replace(q=tensors[0], k=tensors[1], v=tensors[2]))
        assert_same_bits(out[rows], clean[0][rows])
        assert_same_bits(lse[:, rows], clean[1][:, rows])
        assert out[end - 1 if start == 0 else 0].isnan().all()
        assert (out[end:] == 0).all()
        assert (lse[:, end:] == 0).all()


@pytest.mark.parametrize("size", (0, 16, 64))
@pytest.mark.parametrize("capacity", (1, 64, 65, 300))
def test_rows_after_the_last_sequence_are_zero(forward, capacity, size):
    """Also where there is no sequence."""
    for lengths in ((), (0,), (5,), (1, 0, 3)) if size else ((), (0, 0)):
        check_forward(forward, made(lengths, 2, 64, capacity=capacity, slack=size - max(lengths, default=0)))


@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize(("size", "blocks"), ((1, 4), (16, 4), (17, 7), (32, 7), (33, 13), (64, 13)))
def test_a_block_has_several_sequences(emulated, forward, size, blocks, headdim):
    inputs = made([min(size, 1 + i) for i in range(13)], 3, headdim)
    check_forward(forward, inputs._replace(max_seqlen=size), TIGHT)
    (launch,) = emulated.launches
    assert (launch.grid, launch.block) == ((3, blocks, 1), (128, 1, 1))
    assert launch.shared_bytes == 3 * 64 * headdim * 2


@pytest.mark.slow
def test_more_blocks_than_an_axis_holds(forward):
    check_forward(forward, made([0] * 66000 + [33], 1, 32, capacity=2))


def test_which_calls_it_serves(emulated, forward):
    """Dropout, float32 and heads of 128 are other kernels'."""
    inputs = made((64, 3), 2, 64)
    names = []
    for call in (inputs, inputs._replace(max_seqlen=65), made((64, 3), 2, 64, p=0.25), made((64, 3), 2, 128)):
        emulated.backend.attention_fwd(call, False, False)
    emulated.backend.attention_fwd(made((64, 3), 2, 64, torch.float32), False, False)
    for launch in emulated.launches:
        names.append(next(n for n in ("short", "float_kernel", "forward") if n in launch.kernel))
    assert names == ["short", "forward", "forward", "forward", "float_kernel"]


def test_the_error_rule_and_gradients(emulated, kernels_only):
    """As a self-check on a GPU runs it, in all eight kernels; backward reads the lse."""
    for headdim in HEADDIMS:
        for case in (
            AttentionCase((30, 0, 17), 2, headdim, packed_qkv=True, lse=True, capacity=3),
            AttentionCase((16, 9, 3), 2, headdim, window=(4, 7), kv_heads=1, bias="shared", gate=True),
        ):
            for dtype in HALF.values():
                assert broken_rules(case, dtype) == []
    ours = {name for name in emulated.library.names if "attention_short" in name}
    assert len(ours) == 8
    assert ours <= {launch.kernel for launch in emulated.launches}
