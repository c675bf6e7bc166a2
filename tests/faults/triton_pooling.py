"""Faults of the Triton pooling."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_KERNEL = "kernels/pooling.py"
_TOKENS = "mask = (tokens {} {})[:, None] & inside[None, :]\n            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]\n            if"


def _fault(name: str, old: str, new: str) -> Fault:
    return Fault(name, _KERNEL, old, new)


FAULTS = (
    _fault("mean over one token more", "y = y / tl.maximum(length, 1).to", "y = y / (length + 1).to"),
    _fault("an empty sequence divides by zero", "y = y / tl.maximum(length, 1).to", "y = y / length.to"),
    _fault("the next sequence's tokens read", _TOKENS.format("<", "length"), _TOKENS.format("<=", "length")),
    _fault("the last token forgotten", _TOKENS.format("<", "length"), _TOKENS.format("<", "length - 1")),
    _fault("one tile only", "        for first in range(0, length, BLOCK_M)", "        for first in range(0, tl.minimum(length, BLOCK_M), BLOCK_M)"),
    _fault("maximum of nothing below zero", "mask=mask, other=float(\"-inf\"))", "mask=mask, other=0.0)"),
    _fault("maximum starts at zero", "tl.full((BLOCK_N,), float(\"-inf\"), tl.float32)", "tl.zeros((BLOCK_N,), tl.float32)"),
    _fault("NaN passed over", "y = tl.where(spoiled > 0, float(\"nan\"), y)", "y = tl.where(y != y, 0.0, y)"),
    _fault("an empty sequence's maximum", "            y = tl.where(length > 0, y, 0.0)\n", ""),
    _fault("first token of an empty sequence", "mask=inside & (length > 0)", "mask=inside"),
    _fault("columns past the width", "inside = cols < width\n    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)\n    length", "inside = cols <= width\n    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)\n    length"),
    _fault("one block of columns", "(batch, cdiv(width, block_n))", "(batch, 1)"),
    _fault("row stride taken for the width", "            y,\n            hidden.stride(0),", "            y,\n            width,"),
    _fault("32-bit offset of a sequence", "start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)\n    length", "start = tl.load(cu_seqlens_ptr + sequence).to(tl.int32)\n    length"),
    _fault("32-bit offset of a token", "            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]\n            if", "            at = x_ptr + tokens[:, None] * x_stride + cols[None, :]\n            if"),
    _fault("sum in the storage type", "y = torch.empty((batch, width), dtype=torch.float32", "y = torch.empty((batch, width), dtype=hidden.dtype"),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=("tests/triton/test_pooling.py", "tests/triton/test_cases.py", "-k", "pooling"),
    timeout_s=600.0,
    environment={"TRITON_INTERPRET": "1"},
)
