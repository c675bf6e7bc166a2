"""csrc/cuda/attention_hopper.cuh with heads of 32, two of which share a block, emulated."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from fastbert.backends.cuda import attention as launchers
from fastbert.backends.cuda import device
from fastbert.ops.attention_inputs import CAUSAL, Window
from fastbert.testing.op_cases.attention import CASES, ON_GPU
from tests.ptx.test_cuda_attention import TIGHT, check_neighbours, running
from tests.support.attention_calls import HALF, SEED, broken_rules, check_forward, ends_of, sequences
from tests.support.attention_calls import made as drawn
from tests.support.cpu_truth import assert_same_bits

pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")

made = partial(drawn, headdim=32)


@pytest.fixture
def pairs(emulated):
    """Inputs to out, lse and no bits."""
    return running(emulated, hopper=True)


@pytest.mark.parametrize(("dtype", "schedule"), ((torch.bfloat16, "late"), (torch.float16, "early")), ids=str)
@pytest.mark.parametrize("nheads", (1, 2, 3))
@pytest.mark.parametrize(
    "lengths",
    (
        *((n,) for n in (1, 7, 63, 64, 65, 128, 129, 193, 300, 320, 321, 384, 570)),
        (0, 1, 0),
        (127, 128, 129),
        (2, 0, 64, 0, 63, 65),
    ),
    ids=str,
)
def test_lengths(emulated, pairs, lengths, nheads, dtype, schedule):
    """Tiles with a rest, rings that turn once and twice, and a last head without another."""
    emulated.schedule, emulated.seed = schedule, len(lengths)
    check_forward(pairs, made(lengths, nheads, dtype=dtype, capacity=1, slack=1), TIGHT)


@pytest.mark.parametrize("capacity", (1, 63, 64, 65, 200))
@pytest.mark.parametrize("nheads", (1, 3, 4))
def test_rows_after_the_last_sequence_are_zero(pairs, nheads, capacity):
    for lengths in ((), (64,), (1, 0)):
        check_forward(pairs, made(lengths, nheads, capacity=capacity, slack=1), TIGHT)


@pytest.mark.parametrize("nheads", (2, 3))
@pytest.mark.parametrize("lengths", ((300, 66), (450,)), ids=str)
def test_every_order_of_warps_gives_the_same_bits(emulated, pairs, lengths, nheads):
    found = []
    for emulated.schedule, emulated.seed in (("late", 0), ("early", 1), ("late", 2), ("early", 3)):
        found.append(pairs(made(lengths, nheads)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("poison", (math.nan, math.inf, 3e4))
@pytest.mark.parametrize("lengths", ((40, 66), (64, 1, 200), (261, 10)), ids=str)
def test_nothing_outside_a_sequence_gets_in(pairs, lengths, poison):
    check_neighbours(pairs, made(lengths, 3, capacity=2), poison)


@pytest.mark.parametrize("name", "qkv")
def test_a_head_does_not_depend_on_the_other(pairs, name):
    """Whose keys and values are in the same tiles."""
    inputs = made((200, 9), 3)
    clean = pairs(inputs)
    for head in range(3):
        dirty = inputs._replace(q=inputs.q.clone(), k=inputs.k.clone(), v=inputs.v.clone())
        getattr(dirty, name)[5, head] = math.nan
        out, lse, _ = pairs(dirty)
        others = [h for h in range(3) if h != head]
        assert out[5 if name == "q" else 7, head].isnan().all()
        assert_same_bits(out[:, others].contiguous(), clean[0][:, others].contiguous())
        assert_same_bits(lse[others], clean[1][others])


def test_a_sequence_does_not_depend_on_its_batch(pairs):
    inputs = made((70, 140, 9), 2)
    out, lse, _ = pairs(inputs)
    for start, n in sequences(inputs):
        rows = slice(start, start + n)
        q, k, v = (t[rows] for t in inputs[:3])
        alone = pairs(inputs._replace(q=q, k=k, v=v, cu_seqlens=ends_of([n]), max_seqlen=n))
        assert_same_bits(alone[0], out[rows])
        assert_same_bits(alone[1], lse[:, rows])


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_maxima_that_grow(pairs, dtype):
    """Scores of one head grow from tile to tile in some rows and once jump; those of the other fall."""
    inputs = made((330,), 2, dtype=dtype)
    q, k = (torch.zeros(330, 2, 32, dtype=dtype) for _ in range(2))
    q[:, 0, 0], q[:, 1, 0] = torch.linspace(-8, 8, 330), -1.0
    k[:, :, 0] = (torch.arange(330) // 64 * 8.0)[:, None]
    k[200, 0, 0] = 3000.0
    check_forward(pairs, inputs._replace(q=q, k=k), TIGHT)


@pytest.mark.parametrize("gate", (None, (1.5, -0.25)))
@pytest.mark.parametrize("scale", (0.125, 1.0))
def test_scale_and_gate(pairs, scale, gate):
    gate = None if gate is None else torch.tensor(gate)
    check_forward(pairs, made((130, 20), 2, softmax_scale=scale, gate=gate), TIGHT)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_error_rule(emulated, monkeypatch, dtype):
    monkeypatch.setattr(launchers, "hopper_serves", launchers.hopper_reads)
    cases = [c for c in (*CASES, *ON_GPU) if c.headdim == 32 and sum(c.lengths) * c.nheads < 12_000]
    for case in cases:
        if not (case.probs or case.bias or case.relative or case.dropout_p or case.causal or case.window):
            assert broken_rules(case, dtype, backward=False) == []
    assert any("attention_hopper" in launch.kernel for launch in emulated.launches)


def test_which_calls_it_serves(emulated, monkeypatch):
    inputs, serves = made((128, 128), 4), launchers.hopper_serves
    monkeypatch.setattr(device, "multiprocessors", lambda _: 4)
    assert serves(inputs)
    assert serves(inputs._replace(gate=torch.ones(4)))
    assert not serves(inputs._replace(dropout_p=0.1, seed=SEED))
    assert not serves(inputs._replace(window=CAUSAL))
    assert not serves(inputs._replace(window=Window(3, 3)))
    assert not serves(inputs._replace(k=inputs.k[:, :2], v=inputs.v[:, :2]))
    assert not serves(made((128, 127), 4))
    assert not serves(made((128, 128), 3))
    assert not serves(inputs._replace(max_seqlen=127))
    monkeypatch.setattr(device, "multiprocessors", lambda _: 5)
    assert not serves(inputs)


def test_blocks_and_refusals(emulated, pairs):
    """A block has 64 queries of two heads."""
    pairs(made((130, 20), 5))
    (launch,) = emulated.launches
    assert (launch.grid, launch.block) == ((3, 150 // 64 + 3, 1), (256, 1, 1))
    for options in ({"dropout_p": 0.5, "seed": SEED}, {"window": CAUSAL}, {"window": Window(1, 1)}):
        with pytest.raises((ValueError, RuntimeError), match="headdim: expected 64, or 32 without dropout"):
            pairs(made((130,), 2, **options))
    with emulated.without_maps():
        found = emulated.launcher(launchers.forward)(made((130,), 2), False, True)
    assert "attention_forward" in emulated.launches[-1].kernel
    assert found[0].isfinite().all()
