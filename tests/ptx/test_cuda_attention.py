"""csrc/cuda/attention*.cu as nvcc compiles them for sm_80, with their host code, in the PTX emulator."""

from __future__ import annotations

import math

import pytest
import torch

from fastbert import testing
from fastbert.backends.cuda import attention as launchers
from fastbert.ops.attention_grid import keep_mask, unpack_bits
from fastbert.testing.op_cases.attention import CASES, AttentionCase

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}

pytest_plugins = ("tests.support.ptx_fixtures",)


@pytest.fixture(autouse=True)
def without_hopper(monkeypatch):
    """Calls that test_cuda_attention_hopper.py is about go to these kernels too."""
    monkeypatch.setattr(launchers, "HOPPER", False)


# Every kernel: each head with nothing, with dropout, with a bias.
EVERY_KERNEL = [
    case
    for headdim in (32, 64, 128)
    for case in (
        AttentionCase((70, 0, 33), 2, headdim, packed_qkv=True, lse=True, capacity=3),
        AttentionCase((140, 9), 1, headdim, causal=True, dropout_p=0.25, gate=True),
        AttentionCase((66, 65), 2, headdim, bias="shared", masked=True, dropout_p=0.1, causal=True),
        AttentionCase((130,), 1, headdim, bias="keys", sharpness=8.0, lse=True),
    )
]


def broken_rules(case, dtype):
    rows = testing.run_case(case, "cuda", dtype, backward=False)
    return [(r.quantity, r.reason) for r in rows if not r.passed]


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", EVERY_KERNEL, ids=repr)
def test_every_kernel(emulated, case, dtype, schedule):
    emulated.schedule = schedule
    assert broken_rules(case, dtype) == []
    assert len(emulated.launches) == 1
    assert "attention_forward" in emulated.launches[0].kernel


def test_every_kernel_is_launched(emulated):
    for dtype in HALF.values():
        for case in EVERY_KERNEL:
            broken_rules(case, dtype)
    ours = {name for name in emulated.library.names if "attention_forward" in name}
    assert len(ours) == 18
    assert {launch.kernel for launch in emulated.launches} == ours


@pytest.mark.parametrize("case", [c for c in CASES if c.headdim >= 32 and not c.probs], ids=repr)
def test_error_rule(emulated, case):
    assert broken_rules(case, torch.bfloat16) == []
    assert emulated.launches


@pytest.mark.parametrize("lengths", [(1,), (63, 64, 65), (0, 1, 0), (127, 128, 129), (0, 0)], ids=str)
def test_lengths(emulated, lengths):
    assert broken_rules(AttentionCase(lengths, 2, 64, capacity=66, slack=1, lse=True), torch.bfloat16) == []


@pytest.mark.parametrize("seed", range(4))
def test_every_order_of_warps_gives_the_same_bits(emulated, seed):
    case = AttentionCase((140, 66), 1, 64, causal=True, dropout_p=0.25)
    inputs = case.inputs(torch.bfloat16, "cpu")
    found = []
    for schedule in ("late", "early"):
        emulated.schedule, emulated.seed = schedule, seed
        with testing.error_rule.dispatch.use_backend(attention="cuda"):
            found.append(case.call(**inputs))
    assert torch.equal(*found)
    emulated.seed = 100
    with testing.error_rule.dispatch.use_backend(attention="cuda"):
        assert torch.equal(found[0], case.call(**inputs))


@pytest.mark.parametrize("p", (0.1, 0.5, 0.9))
def test_dropout_bits(emulated, p):
    from fastbert.ops.attention import AttentionInputs

    lengths = (70, 33)
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(103, 2, 32, generator=g).half() for _ in range(3))
    ends, seed = torch.tensor([0, 70, 103], dtype=torch.int32), torch.tensor([-0x123456789ABCDEF])
    inputs = AttentionInputs(q, k, v, ends, 70, 0.1, False, None, None, p, seed, 2**32 - 1)
    *_, bits = emulated.backend.attention_fwd(inputs, False, True)
    keep = keep_mask(seed, inputs.offset, ends[:-1], 2, 70, p)
    for b, n in enumerate(lengths):
        found = unpack_bits(bits[:, ends[b] : ends[b + 1]], n)
        assert torch.equal(found, keep[b, :, :n, :n])


def test_memory_of_other_sequences_is_not_read(emulated):
    """The emulator knows only whole tensors; NaN elsewhere would spread."""
    case = AttentionCase((40, 66), 2, 64, capacity=2, packed_qkv=True)
    inputs = case.inputs(torch.bfloat16, "cpu")
    with testing.error_rule.dispatch.use_backend(attention="cuda"):
        clean = case.call(**inputs)
        inputs["qkv"][40:] = math.nan
        assert torch.equal(case.call(**inputs)[:40], clean[:40])
