"""Faults of the Triton pooling, forward and backward."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_KERNEL = "kernels/pooling.py"
_TOKENS = "mask = (tokens {} {})[:, None] & inside[None, :]\n            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]\n            if"
_TIES = "mask = (tokens {} length)[:, None] & inside[None, :]\n            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]\n            x"
_fault = faults_of(_KERNEL)

FAULTS = (
    _fault("mean over one token more", "count = tl.maximum(length, 1).to", "count = (length + 1).to"),
    _fault("an empty sequence divides by zero", "count = tl.maximum(length, 1).to", "count = length.to"),
    _fault("the length for its root", "count = tl.sqrt_rn(count)", "count = count"),
    _fault("weights from zero in the sum of weights", "(count + 1) * 0.5", "(count - 1) * 0.5"),
    _fault("weights from zero", "                    x *= (tokens + 1)", "                    x *= tokens"),
    _fault("the token before the last", "tl.maximum(length - 1, 0).to", "tl.maximum(length - 2, 0).to"),
    _fault("the next sequence's first for the last token", "tl.maximum(length - 1, 0).to", "length.to"),
    _fault("gradient of the token before the last", "given = tokens[:, None] == length - 1", "given = tokens[:, None] == length - 2"),
    _fault("gradient without the weights", "        if MODE == \"weightedmean\":\n            dx *= (tokens + 1).to(tl.float32)[:, None]\n", ""),
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
    # backward
    _fault("rows behind the last sequence left out", "(batch + 1, cdiv(width, block_n))", "(batch, cdiv(width, block_n))"),
    _fault("one block of columns in backward", "(batch + 1, cdiv(width, block_n))", "(batch + 1, 1)"),
    _fault("end of the rows behind the last not known", "tl.where(within, end, n_rows) - start", "tl.where(within, end, start) - start"),
    _fault("cu_seqlens read beyond its end", "sequence + 1, mask=within, other=0)", "sequence + 1)"),
    _fault("gradient read beyond its end", "cols, mask=inside & within, other=0.0).to(tl.float32)\n    dx_ptr", "cols, mask=inside, other=0.0).to(tl.float32)\n    dx_ptr"),
    _fault("mean not divided", "        dy = dy / _divisor(length, MODE)\n", "        dy = dy\n"),
    _fault("every token is the first", "given = tokens[:, None] == 0", "given = tokens[:, None] >= 0"),
    _fault("first token of each tile", "given = tokens[:, None] == 0", "given = rows[:, None] == 0"),
    _fault("ties not shared", "dy = dy / tl.maximum(ties, 1).to(tl.float32)", "dy = dy / tl.maximum(ties, 1).to(tl.float32) * tl.maximum(ties, 1).to(tl.float32)"),
    _fault("ties of the last tile", "            ties += tl.sum(", "            ties = tl.sum("),
    _fault("ties among the next sequence's tokens", _TIES.format("<"), _TIES.format("<=")),
    _fault("masked tokens tie with zero", "mask=mask, other=float(\"nan\")).to(tl.float32)\n            ties", "mask=mask, other=0.0).to(tl.float32)\n            ties"),
    _fault("what is not the largest gets it", "given = x == y[None, :]", "given = x <= y[None, :]"),
    _fault("NaN ties with NaN", "given = x == y[None, :]", "given = (x == y[None, :]) | (x != x)"),
    _fault("rows behind the last tie with zero", "mask=mask & within, other=float(\"nan\"))", "mask=mask & within, other=0.0) * 0.0"),
    _fault("one tile only in backward", "    for first in range(0, length, BLOCK_M):\n        tokens = first + rows\n        mask = (tokens < length)[:, None] & inside[None, :]\n        if", "    for first in range(0, tl.minimum(length, BLOCK_M), BLOCK_M):\n        tokens = first + rows\n        mask = (tokens < length)[:, None] & inside[None, :]\n        if"),
    _fault("the next sequence's rows written", "mask = (tokens < length)[:, None] & inside[None, :]\n        if", "mask = (tokens <= length)[:, None] & inside[None, :]\n        if"),
    _fault("stride of dy forgotten", "dy_ptr + row * dy_stride", "dy_ptr + row * width"),
    _fault("stride of the tokens forgotten", "        x_ptr += start * x_stride\n        y =", "        x_ptr += start * width\n        y ="),
    _fault("dx at the tokens' stride", "dx_ptr += start * width", "dx_ptr += start * x_stride"),
    _fault("32-bit start of a sequence in backward", "start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)\n    end", "start = tl.load(cu_seqlens_ptr + sequence).to(tl.int32)\n    end"),
    _fault("32-bit rows of the result", "at = dx_ptr + tokens.to(tl.int64)[:, None] * width", "at = dx_ptr + tokens[:, None] * width"),
    _fault("32-bit rows where ties are counted", "            at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]\n            x = tl.load(at, mask=mask, other=float(\"nan\"))", "            at = x_ptr + tokens[:, None] * x_stride + cols[None, :]\n            x = tl.load(at, mask=mask, other=float(\"nan\"))"),
    _fault("gradient in the type of dy", "dx = torch.empty((rows, width), dtype=hidden.dtype", "dx = torch.empty((rows, width), dtype=dy.dtype"),
)  # fmt: skip

SUITE = of_op(FAULTS, "pooling")
