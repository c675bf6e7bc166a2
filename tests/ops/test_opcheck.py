"""`torch.library.opcheck` of every custom op: its schema, its autograd, and results as its fake says."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops.linear_fp8 import FP8
from fastbert.runtime import dispatch
from fastbert.runtime.table import INFERENCE_ONLY, op_of
from tests.support.hostile.custom_ops import OPS

SHAPES = ("test_schema", "test_faketensor")
BACKENDS = ("cpu", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("aten", "reference")))
# operands that may be left out one by one; others belong together
LEFT_OUT = ("bias", "gate", "residual", "x_bias", "ln_bias", "dsum", "panels", "places", "keep_bits")


def variants(name, base, schema):
    """Changes of the operands: no dropout, an option or gradient less, one gradient alone."""
    yield {}
    if base.get("dropout_p"):
        yield {"dropout_p": 0.0, "seed": None} | ({"save_bits": False} if "save_bits" in base else {})
    needs = [n for n, v in base.items() if v is True]
    for needed in needs:
        yield {needed: False}
        if name.endswith("_bwd"):
            yield dict.fromkeys(needs, False) | {needed: True}
    for kind, absent in (("rms_norm", ["mean"]), ("no_norm", ["mean", "rstd"])):
        if "kind" in base:
            yield {"kind": kind} | {name: base[name][:0] for name in absent if name in base}
    optional = {a.name for a in schema.arguments if str(a.type).startswith("Optional")}
    for left_out in optional & set(LEFT_OUT):
        if f"need_d{left_out}" not in base and base[left_out] is not None:
            yield {left_out: None}


@pytest.mark.sweep_of(*(op for op in OPS if op != "attention_fwd"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, backend):
    name = op_of(op)
    # its backward differentiates by autograd, which it cannot within a custom op
    untrained = op.startswith("pooling") and backend == "reference"
    if op == "pooling_bwd" and untrained:
        pytest.skip("it cannot run within a custom op")
    if dispatch.unsupported_reason(backend, name, "cpu", torch.float32) is not None:
        backend = "aten"
    function, base = getattr(torch.ops.fastbert, op).default, OPS[op].args()
    with dispatch.use_backend(**{name: backend}):
        for change in variants(op, base, function._schema):
            operands = {**base, **change}
            leaves = not (change or untrained) and op.endswith("_fwd") and name not in INFERENCE_ONLY
            args = [
                t.detach().clone().requires_grad_(leaves)
                if isinstance(t, torch.Tensor) and t.is_floating_point()
                else t
                for t in operands.values()
            ]
            checks = ("test_autograd_registration", "test_aot_dispatch_dynamic")
            checks = () if change or untrained else checks
            if operands.get("save_bits"):  # cells without a defined bit may differ between runs
                checks = checks[:1]
            # PyTorch's check of schemas multiplies operands, and cannot multiply 8-bit floats
            eight_bits = any(isinstance(t, torch.Tensor) and t.dtype == FP8 for t in args)
            shapes = SHAPES[1:] if eight_bits else SHAPES
            torch.library.opcheck(function, tuple(args), test_utils=(*shapes, *checks))
