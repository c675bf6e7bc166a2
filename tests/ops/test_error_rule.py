"""The error rule over all cases of every op, by every way in which a CPU computes it here.

A way is a backend (attention: one with a backward), an instruction set of `cpu` for an op with kernels of its
own, `packed` for a product whose weight comes as panels, and what `aten` does on a GPU: `grid` for attention,
`all tokens` for first_attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from fastbert import testing
from fastbert.backends import aten
from fastbert.backends.aten import first_attention as aten_first_attention
from fastbert.backends.cpu import linear as cpu_linear
from fastbert.ops.linear import linear, panel_maker
from fastbert.ops.linear_int8 import linear_int8
from fastbert.ops.linear_int8 import panel_maker as linear_int8_panels
from fastbert.runtime import dispatch, loader
from fastbert.runtime.table import INFERENCE_ONLY
from fastbert.testing.op_cases.linear import LinearCase
from fastbert.testing.op_cases.linear_int8 import LinearInt8Case
from tests.support.attention_inputs import BACKENDS, is_long, serving
from tests.support.cpu_fixtures import ISAS, available_isas
from tests.support.inputs import name
from tests.support.ops import DTYPES, backends, serves

_C = loader.extension


class PackedLinear(LinearCase):
    """The weight is given as panels, as in inference, also where a gradient is wanted."""

    def call(self, x, weight, bias, residual):
        panels = panel_maker(x.device, x.dtype, gated=self.gated is not None)(weight.detach())
        return linear(x, weight, bias, self.activation, residual, panels, self.gated)


class PackedInt8(LinearInt8Case):
    """The weight is given as panels."""

    def call(self, x, weight, scale, bias, **rows):
        panels, rows = linear_int8_panels(x.device, x.dtype)(weight), rows | {"float_rows": self.float_rows}
        return linear_int8(x, weight, scale, bias, self.activation, panels, self.gated, **rows)


PACKED = {"linear": PackedLinear, "linear_int8": PackedInt8}
# of more blocks of rows and columns than the op's cases have
LARGE = {
    "linear": [
        LinearCase(200, 801, 200, "gelu", residual=True),
        LinearCase(350, 64, 40, "silu", bias=False),
        LinearCase(350, 1100, 330, "gelu", gated="first"),
    ],
    "linear_int8": [LinearInt8Case(250, 200, 130, "gelu")],
}
# ops with kernels of their own: for pairs of bfloat16, for AVX-VNNI
OWN = {"avx512_bf16": ("attention", "linear"), "avx2_vnni": ("linear_int8",)}
COMPILED = ("attention", "linear", "cross_entropy", "embedding", "layer_norm", "linear_int8", "rotary")


def ways(op: str) -> Iterator[tuple[str, str]]:
    """(backend, way) of an op."""
    if op == "first_attention":
        yield "aten", "all tokens"
    for backend in (*BACKENDS, "grid") if op == "attention" else backends(op):
        if backend != "cpu" or op not in COMPILED:
            yield backend, backend
            continue
        for isa in available_isas():
            if op in OWN.get(isa, (op,)):
                yield "cpu", isa
                if op in PACKED:
                    yield "cpu", f"{isa} packed"


WAYS = [
    pytest.param(op, backend, way, dtype, case, id=f"{op}-{way}-{name(dtype)}-{case}")
    for op in dispatch.OPS
    for backend, way in ways(op)
    for dtype in DTYPES
    if serves(op, "aten" if backend == "grid" else backend, dtype)
    for case in testing.cases(op) + (LARGE.get(op, []) if backend == "cpu" else [])
]


@pytest.fixture
def any_isa():
    """Sets the instruction set for the test."""
    before = _C and _C.cpu_isa()
    yield lambda isa: _C.set_cpu_isa(isa)
    if _C:
        _C.set_cpu_isa(before)


@pytest.mark.parametrize(("op", "backend", "which", "dtype", "case"), WAYS)
def test_error_rule(op, backend, which, dtype, case, any_isa, monkeypatch):
    # products of few rows too, which `cpu` leaves to `aten`
    monkeypatch.setattr(cpu_linear, "_FEWEST_ROWS", 1)
    isa, _, packed = which.partition(" ")
    if which == "all tokens":
        monkeypatch.setattr(aten, "first_attention_fwd", aten_first_attention._by_attention)
    if isa in ISAS:
        any_isa(isa)
    if packed == "packed":
        case = PACKED[op](**vars(case))
    attention = op == "attention"
    with serving(backend, is_long(case)) if attention else contextlib.nullcontext():
        rows = testing.run_case(case, "aten" if backend == "grid" else backend, dtype)
    trained = dtype.is_floating_point and op not in INFERENCE_ONLY
    assert any(row.quantity.startswith("d") for row in rows) == trained
    assert [f"{row.quantity}: {row.reason}" for row in rows if not row.passed] == []
    assert op != "packing" or not any(row.max_error for row in rows), "nothing is computed or may be off"
