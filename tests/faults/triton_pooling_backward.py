"""Faults of the Triton pooling's backward."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_TIES = "mask = (tokens {} length)[:, None] & inside[None, :]\n            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]\n            x"


def _fault(name: str, old: str, new: str) -> Fault:
    return Fault(name, "kernels/pooling.py", old, new)


FAULTS = (
    _fault("rows behind the last sequence left out", "(batch + 1, cdiv(width, block_n))", "(batch, cdiv(width, block_n))"),
    _fault("one block of columns in backward", "(batch + 1, cdiv(width, block_n))", "(batch + 1, 1)"),
    _fault("end of the rows behind the last not known", "tl.where(within, end, n_rows) - start", "tl.where(within, end, start) - start"),
    _fault("cu_seqlens read beyond its end", "sequence + 1, mask=within, other=0)", "sequence + 1)"),
    _fault("gradient read beyond its end", "cols, mask=inside & within, other=0.0).to(tl.float32)\n    dx_ptr", "cols, mask=inside, other=0.0).to(tl.float32)\n    dx_ptr"),
    _fault("result read beyond its end", "cols, mask=inside & within, other=0.0).to(tl.float32)\n        ties", "cols, mask=inside, other=0.0).to(tl.float32)\n        ties"),
    _fault("mean not divided", "    if MODE == \"mean\":\n        dy = dy / tl.maximum(length, 1).to(tl.float32)\n", ""),
    _fault("mean over one token more in backward", "dy = dy / tl.maximum(length, 1).to(tl.float32)", "dy = dy / (length + 1).to(tl.float32)"),
    _fault("every token is the first", "given = tokens[:, None] == 0", "given = tokens[:, None] >= 0"),
    _fault("first token of each tile", "given = tokens[:, None] == 0", "given = rows[:, None] == 0"),
    _fault("ties not shared", "dy = dy / tl.maximum(ties, 1).to(tl.float32)", "dy = dy / tl.maximum(ties, 1).to(tl.float32) * tl.maximum(ties, 1).to(tl.float32)"),
    _fault("ties of the last tile", "            ties += tl.sum(", "            ties = tl.sum("),
    _fault("ties of the first tile", "tl.where(within, length, 0), BLOCK_M)", "tl.where(within, tl.minimum(length, BLOCK_M), 0), BLOCK_M)"),
    _fault("ties among the next sequence's tokens", _TIES.format("<"), _TIES.format("<=")),
    _fault("masked tokens tie with zero", "mask=mask, other=float(\"nan\")).to(tl.float32)\n            ties", "mask=mask, other=0.0).to(tl.float32)\n            ties"),
    _fault("what is not the largest gets it", "given = x == y[None, :]", "given = x <= y[None, :]"),
    _fault("NaN ties with NaN", "given = x == y[None, :]", "given = (x == y[None, :]) | (x != x)"),
    _fault("rows behind the last tie with zero", "mask=mask & within, other=float(\"nan\"))", "mask=mask & within, other=0.0) * 0.0"),
    _fault("one tile only in backward", "    for first in range(0, length, BLOCK_M):\n        tokens = first + rows\n        mask = (tokens < length)[:, None] & inside[None, :]\n        if", "    for first in range(0, tl.minimum(length, BLOCK_M), BLOCK_M):\n        tokens = first + rows\n        mask = (tokens < length)[:, None] & inside[None, :]\n        if"),
    _fault("the next sequence's rows written", "mask = (tokens < length)[:, None] & inside[None, :]\n        if", "mask = (tokens <= length)[:, None] & inside[None, :]\n        if"),
    _fault("stride of dy forgotten", "dy_ptr + row * dy_stride", "dy_ptr + row * width"),
    _fault("stride of y forgotten", "y_ptr + row * y_stride + cols, mask=inside & within", "y_ptr + row * width + cols, mask=inside & within"),
    _fault("stride of the tokens forgotten", "        x_ptr += start * x_stride\n        y =", "        x_ptr += start * width\n        y ="),
    _fault("dx at the tokens' stride", "dx_ptr += start * width", "dx_ptr += start * x_stride"),
    _fault("32-bit start of a sequence in backward", "start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)\n    end", "start = tl.load(cu_seqlens_ptr + sequence).to(tl.int32)\n    end"),
    _fault("32-bit rows of the result", "at = dx_ptr + tokens.to(tl.int64)[:, None] * width", "at = dx_ptr + tokens[:, None] * width"),
    _fault("32-bit rows where ties are counted", "            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]\n            x = tl.load(at, mask=mask, other=float(\"nan\"))", "            at = x_ptr + tokens[:, None] * x_stride + cols[None, :]\n            x = tl.load(at, mask=mask, other=float(\"nan\"))"),
    _fault("32-bit rows where ties are found", "            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]\n            x = tl.load(at, mask=mask & within", "            at = x_ptr + tokens[:, None] * x_stride + cols[None, :]\n            x = tl.load(at, mask=mask & within"),
    _fault("gradient in the type of dy", "dx = torch.empty((rows, width), dtype=hidden.dtype", "dx = torch.empty((rows, width), dtype=dy.dtype"),
)  # fmt: skip

# what catches most comes first
_TESTS = (
    "ties_are_exact",
    "nothing_to_pool",
    "a_nan_is_no_largest",
    "strided_rows_with_poisoned_padding",
    "only_max_reads_the_hidden_states",
    "offsets_beyond_2_to_31_elements",
    "ties_share_the_gradient",
    "edges_of_tiles",
)

SUITE = Suite(
    faults=FAULTS,
    tests=tuple(f"tests/triton/test_pooling_backward.py::test_{name}" for name in _TESTS),
    timeout_s=600.0,
    environment={"TRITON_INTERPRET": "1"},
)
