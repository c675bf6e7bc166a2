"""csrc/cuda/attention_hopper.cuh, emulated: heads of 64, and of 32, two of which share a block.

What it has in common with the kernels for sm_80: test_cuda_attention.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from fastbert.backends.cuda import attention as launchers
from fastbert.backends.cuda import device
from fastbert.ops.attention_inputs import CAUSAL, Window
from fastbert.testing.op_cases.attention import CASES, ON_GPU, AttentionCase
from tests.ptx.test_cuda_attention import TIGHT, check_neighbours, running
from tests.support.attention_calls import HALF, SEED, broken_rules, check_forward, made

pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")


@pytest.fixture
def hopper(emulated):
    """Inputs to out, lse and the saved bits."""
    return running(emulated, hopper=True)


@pytest.fixture
def served(emulated, monkeypatch):
    """Every call goes to the kernel that may."""
    monkeypatch.setattr(launchers, "hopper_serves", launchers.hopper_reads)
    yield
    assert any("attention_hopper" in launch.kernel for launch in emulated.launches)


@pytest.mark.parametrize(
    ("nheads", "headdim", "dtype", "p", "schedule"),
    (
        (1, 64, torch.bfloat16, 0.0, "late"),
        (2, 64, torch.bfloat16, 0.25, "early"),
        (1, 64, torch.float16, 0.25, "late"),
        (1, 32, torch.bfloat16, 0.0, "late"),
        (2, 32, torch.float16, 0.0, "early"),
        (3, 32, torch.bfloat16, 0.0, "early"),
        (3, 32, torch.float16, 0.0, "late"),
    ),
    ids=str,
)
@pytest.mark.parametrize(
    "lengths",
    (
        *((n,) for n in (1, 7, 63, 64, 65, 127, 128, 129, 193, 300, 320, 321, 384, 430, 512, 570)),
        (0, 1, 0),
        (127, 128, 129),
        (2, 0, 64, 0, 63, 65),
        (191, 192, 193),
    ),
    ids=str,
)
def test_lengths(emulated, hopper, lengths, nheads, headdim, dtype, p, schedule):
    """Tiles with a rest, rings that turn once and twice, one group alone, a last head without another."""
    emulated.schedule, emulated.seed = schedule, len(lengths)
    check_forward(hopper, made(lengths, nheads, headdim, dtype, p=p, capacity=1, slack=1), TIGHT)


@pytest.mark.parametrize("poison", (math.nan, math.inf, -math.inf, 3e4))
@pytest.mark.parametrize(("nheads", "headdim", "p"), ((2, 64, 0.0), (2, 64, 0.25), (3, 32, 0.0)))
@pytest.mark.parametrize("lengths", ((40, 66), (64, 1, 200), (129, 63), (261, 10)), ids=str)
def test_nothing_outside_a_sequence_gets_in(hopper, lengths, nheads, headdim, p, poison):
    """Tiles reach into the sequence behind. Maxima of its queries, in the same warp, follow by themselves."""
    check_neighbours(hopper, made(lengths, nheads, headdim, p=p, capacity=2), poison)


@pytest.mark.parametrize("headdim", (64, 32))
@pytest.mark.parametrize("half", (0, 1, None))
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_maxima_that_grow(hopper, dtype, half, headdim):
    """Scores that grow from tile to tile in some rows, fall in others, and once jump by thousands.

    In all rows, or in those alone that are a lane's first or its second one. Those of another head only fall.
    """
    inputs = made((330,), 2, headdim, dtype)
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    q[:, 0, 0], q[:, 1, 0] = torch.linspace(-8, 8, 330), -1.0
    if half is not None:
        q[torch.arange(330) // 8 % 2 != half, 0] = 0.0
    k[:, :, 0] = (torch.arange(330) // 64 * 8.0)[:, None]
    k[200, 0, 0] = 3000.0
    check_forward(hopper, inputs._replace(q=q, k=k), TIGHT)


@pytest.mark.parametrize("headdim", (64, 32))
@pytest.mark.parametrize("gate", (None, (1.5, -0.25)))
@pytest.mark.parametrize("scale", (0.125, 1.0))
def test_scale_and_gate(hopper, scale, gate, headdim):
    gate = None if gate is None else torch.tensor(gate)
    check_forward(hopper, made((130, 20), 2, headdim, softmax_scale=scale, gate=gate), TIGHT)


@pytest.mark.parametrize("p", (0.0, 0.25))
def test_a_causal_mask(hopper, p):
    """Without shared heads, which choose the same kernel."""
    check_forward(hopper, made((250, 3, 70, 64, 129), 2, 64, p=p, causal=True), TIGHT)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize(
    "case",
    [
        c
        for c in (*CASES, *ON_GPU)
        if not (c.probs or c.bias or c.relative)
        and (c.headdim == 64 or (c.headdim == 32 and not (c.dropout_p or c.causal or c.window)))
        and sum(c.lengths) * c.nheads < 12_000
    ],
    ids=repr,
)
def test_error_rule(served, case, dtype):
    """As a self-check on a GPU runs it."""
    assert broken_rules(case, dtype, backward=False) == []


def test_gradients_use_what_it_saves(served):
    case = AttentionCase((140, 19), 2, 64, dropout_p=0.25, packed_qkv=True)
    assert broken_rules(case, torch.bfloat16) == []


def test_which_calls_it_serves(emulated, monkeypatch):
    inputs = made((128, 128), 2, 64)
    serves = launchers.hopper_serves
    monkeypatch.setattr(device, "multiprocessors", lambda _: 4)
    assert serves(inputs)
    assert serves(inputs._replace(gate=torch.ones(2)))
    assert serves(made((128, 128), 2, 64, p=0.1))
    assert serves(made((255, 1), 2, 64))
    assert serves(inputs._replace(window=Window(64, 0)))
    assert serves(inputs._replace(window=CAUSAL))
    assert serves(inputs._replace(k=inputs.k[:, :1], v=inputs.v[:, :1]))
    assert not serves(made((127, 128), 2, 64))
    assert not serves(made((128, 128, 0), 2, 64))
    assert not serves(made((255,), 2, 64))
    assert not serves(inputs._replace(bias=torch.zeros(1, 1, 1, 128)))
    assert not serves(inputs._replace(**{n: getattr(inputs, n).float() for n in "qkv"}))
    for scale in (0.0, -1.0, math.nan):
        assert not serves(inputs._replace(softmax_scale=scale))
    assert not serves(inputs._replace(**{n: getattr(inputs, n)[..., :32] for n in "qkv"}))
    for name in "qkv":
        t = getattr(inputs, name)
        assert serves(inputs._replace(**{name: t.contiguous()}))
        assert not serves(inputs._replace(**{name: t.transpose(0, 1).contiguous().transpose(0, 1)}))
        assert not serves(inputs._replace(**{name: t[:1].expand(256, -1, -1)}))
    monkeypatch.setattr(device, "multiprocessors", lambda _: 5)
    assert not serves(inputs)
    monkeypatch.setattr(device, "multiprocessors", lambda _: 4)
    monkeypatch.setattr(launchers, "HOPPER", False)
    assert not serves(inputs)
    monkeypatch.setattr(launchers, "HOPPER", True)
    monkeypatch.setattr(device, "is_hopper", lambda _: False)
    assert not serves(inputs)


def test_which_calls_with_pairs_it_serves(emulated, monkeypatch):
    inputs, serves = made((128, 128), 4, 32), launchers.hopper_serves
    monkeypatch.setattr(device, "multiprocessors", lambda _: 4)
    assert serves(inputs)
    assert serves(inputs._replace(gate=torch.ones(4)))
    assert not serves(inputs._replace(dropout_p=0.1, seed=SEED))
    assert not serves(inputs._replace(window=CAUSAL))
    assert not serves(inputs._replace(window=Window(3, 3)))
    assert not serves(inputs._replace(k=inputs.k[:, :2], v=inputs.v[:, :2]))
    assert not serves(made((128, 127), 4, 32))
    assert not serves(made((128, 128), 3, 32))
    assert not serves(inputs._replace(max_seqlen=127))
    monkeypatch.setattr(device, "multiprocessors", lambda _: 5)
    assert not serves(inputs)


def test_a_bias_is_for_the_other_kernel(emulated):
    fwd = emulated.backend.attention_fwd
    inputs = made((128, 128), 2, 64)
    fwd(inputs, False, False)
    assert "attention_hopper" in emulated.launches[-1].kernel
    fwd(inputs._replace(bias=torch.zeros(1, 1, 1, 128)), False, False)
    assert "attention_forward" in emulated.launches[-1].kernel


@pytest.mark.parametrize("dropout", (False, True))
def test_self_checks_reach_it(dropout):
    """On 132 multiprocessors, with rings that turn, and a group without queries."""
    assert any(
        c.headdim == 64
        and bool(c.dropout_p) == dropout
        and not (c.bias or c.probs)
        and c.total >= 128 * len(c.lengths)
        and c.total * c.nheads >= 128 * 132
        and max(c.lengths) > 5 * 64
        and any(0 < n % 128 <= 64 for n in c.lengths)
        for c in ON_GPU
    )


def test_blocks_and_refusals_of_pairs(emulated, hopper):
    """A block has 64 queries of two heads."""
    hopper(made((130, 20), 5, 32))
    (launch,) = emulated.launches
    assert (launch.grid, launch.block) == ((3, 150 // 64 + 3, 1), (256, 1, 1))
    for options in ({"dropout_p": 0.5, "seed": SEED}, {"window": CAUSAL}, {"window": Window(1, 1)}):
        with pytest.raises((ValueError, RuntimeError), match="headdim: expected 64, or 32 without dropout"):
            hopper(made((130,), 2, 32, **options))
