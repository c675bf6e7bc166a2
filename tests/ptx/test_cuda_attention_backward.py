"""csrc/cuda/attention_backward*.cu as nvcc compiles them for sm_80 in the PTX emulator."""

from __future__ import annotations

import pytest
import torch

from fastbert import testing
from fastbert.backends.cuda import attention as launchers
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.attention import CASES, AttentionCase

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}

pytest_plugins = ("tests.support.ptx_fixtures",)


@pytest.fixture(autouse=True)
def without_hopper(monkeypatch):
    """Calls that test_cuda_attention_backward_hopper.py is about go to these kernels too."""
    monkeypatch.setattr(launchers, "HOPPER_BACKWARD", False)


EVERY_KERNEL = [
    case
    for headdim in (32, 64, 128)
    for case in (
        AttentionCase((70, 0, 33), 2, headdim, packed_qkv=True, capacity=3),
        AttentionCase((140, 9), 1, headdim, causal=True, dropout_p=0.25, gate=True),
        AttentionCase((66, 65), 2, headdim, bias="shared", masked=True, dropout_p=0.1, causal=True),
    )
]


def broken_rules(case, dtype):
    rows = testing.run_case(case, "cuda", dtype)
    return [(r.quantity, r.reason) for r in rows if not r.passed]


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("case", EVERY_KERNEL, ids=repr)
def test_every_kernel(emulated, case, dtype, schedule):
    emulated.schedule = schedule
    assert broken_rules(case, dtype) == []
    launched = {launch.kernel for launch in emulated.launches}
    for part in ("forward", "dq", "dkdv", *(("dbias",) if case.bias else ())):
        assert any(part in name for name in launched), part


def test_every_kernel_is_launched(emulated):
    for dtype in HALF.values():
        for case in EVERY_KERNEL:
            testing.run_case(case, "cuda", dtype)
    ours = {name for name in emulated.library.names if "attention" in name and "hopper" not in name}
    assert {launch.kernel for launch in emulated.launches} >= ours


@pytest.mark.parametrize("case", [c for c in CASES if c.headdim >= 32 and not c.probs], ids=repr)
def test_error_rule(emulated, case):
    assert broken_rules(case, torch.bfloat16) == []
    assert emulated.launches


@pytest.mark.parametrize("seed", range(4))
def test_every_order_of_warps_gives_the_same_bits(emulated, seed):
    case = AttentionCase((140, 66), 1, 64, causal=True, dropout_p=0.25, bias="shared")
    found = []
    for schedule in ("late", "early"):
        emulated.schedule, emulated.seed = schedule, seed
        inputs = case.inputs(torch.bfloat16, "cpu")
        wanted = [inputs[name].requires_grad_() for name in ("q", "k", "v")]
        with dispatch.use_backend(attention="cuda"):
            out = case.call(**inputs)
            out = out[0] if isinstance(out, tuple) else out
            found.append(torch.autograd.grad(out, wanted, torch.ones_like(out)))
    for late, early in zip(*found, strict=True):
        assert torch.equal(late, early)
