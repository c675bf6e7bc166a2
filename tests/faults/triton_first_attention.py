"""Faults of the Triton attention of first tokens."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_KERNEL = "kernels/first_attention.py"
_fault = faults_of(_KERNEL)

FAULTS = (
    _fault("no scale", "tl.store(asked_at, asked * scale,", "tl.store(asked_at, asked,"),
    _fault("what is asked in one term", "                parts = tl.dot(x, lows[c], parts, input_precision=\"ieee\")\n", ""),
    _fault("what is mixed in one term", "        y = tl.dot(low, turned, y, input_precision=\"ieee\")\n", ""),
    _fault("the query of the next head", "+ head * q_head_stride +", "+ (head + 1) % nheads * q_head_stride +"),
    _fault("one block of a wide head", "tl.static_range(0, HEAD_DIM, BLOCK_K)", "tl.static_range(0, BLOCK_K, BLOCK_K)"),
    _fault("dimensions past the head", "q = tl.load(q_at, mask=here & (dims < HEAD_DIM)[None, :], other=0.0)", "q = tl.load(q_at, mask=here, other=0.0)"),
    _fault("one group of heads", "(batch * config.parts, triton.cdiv(nheads, ROWS.value)),", "(batch * config.parts, 1),"),
    _fault("parts overlap", "begin = part * per_part", "begin = part * (per_part - BLOCK_T)"),
    _fault("parts of a length that is not whole tiles", "(length + PARTS * BLOCK_T - 1) // (PARTS * BLOCK_T) * BLOCK_T", "length // (PARTS * BLOCK_T) * BLOCK_T"),
    _fault("tokens past the sequence read", "read = (tokens < length)[None, :, None] &", "read = (tokens < length + 1)[None, :, None] &"),
    _fault("tokens past the sequence attended to", "            scores = tl.where(allowed, scores, float(\"-inf\"))\n", ""),
    _fault("the last token not attended to", "allowed = (tokens < length)[:, None]", "allowed = (tokens < length - 1)[:, None]"),
    _fault("the sums not rescaled", "mixed[c] * shrink[None, :, None]", "mixed[c]"),
    _fault("a row that sees nothing yet", "shrink = tl.exp2((top - _finite(new_top)) * _LOG2_E)", "shrink = tl.exp2((top - new_top) * _LOG2_E)"),
    _fault("powers of two", "weights = tl.exp2((scores - _finite(top)[None, :]) * _LOG2_E)", "weights = tl.exp2(scores - _finite(top)[None, :])"),
    _fault("the power of a query of zeros", "tl.maximum(most.to(tl.int32, bitcast=True) & 0x7F800000, 0x0D800000)", "most.to(tl.int32, bitcast=True) & 0x7F800000"),
    _fault("scores not scaled back", "scores = tl.sum(parts, 0) * unit[None, :]", "scores = tl.sum(parts, 0) * 0.00390625"),
    _fault("the bias of the first sequence", "            bias_ptr += sequence * bias_batch_stride\n", ""),
    _fault("the queries' stride for the keys'", "bias_strides[3],", "bias_strides[2],"),
    _fault("32-bit offset of a token", "x_at = x_ptr + tokens.to(tl.int64)[None, :, None] * x_stride + cols", "x_at = x_ptr + tokens[None, :, None] * x_stride + cols"),
    _fault("32-bit offset of a sequence", "start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)", "start = tl.load(cu_seqlens_ptr + sequence)"),
    _fault("parts added without their tops", "factor = tl.exp2((tops - _finite(tl.max(tops, 0))[None, :]) * _LOG2_E)", "factor = tl.exp2((tops - _finite(tops)) * _LOG2_E)"),
    _fault("the sum of the weights forgotten", "factor *= (1.0 / tl.where(seen, norm, 1.0))[None, :]", "factor *= 1.0"),
    _fault("unwritten parts read", "mask=written & (cols < room)[None, None, :]", "mask=(cols < room)[None, None, :]"),
    _fault("NaN is nothing seen", "seen = norm != 0.0", "seen = norm > 0.0"),
    _fault("the value bias of what sees nothing", "    y = tl.where(seen[:, None], y, 0.0)\n", ""),
    _fault("the gate forgotten", "y *= tl.load(gate_ptr + head).to(tl.float32)", "y *= 1.0"),
    _fault("the gate before the value bias", "        y += tl.load(value_bias_ptr + at, mask=there, other=0.0).to(tl.float32)[None, :]\n    if gate_ptr is not None:\n        y *= tl.load(gate_ptr + head).to(tl.float32)\n", "        y *= tl.load(gate_ptr + head).to(tl.float32) if gate_ptr is not None else 1.0\n        y += tl.load(value_bias_ptr + at, mask=there, other=0.0).to(tl.float32)[None, :]\n    elif gate_ptr is not None:\n        y *= tl.load(gate_ptr + head).to(tl.float32)\n"),
    _fault("rows of the result past the batch", "mask=here[:, None] & there[None, :])", "mask=there[None, :])"),
    _fault("sixteen sequences only", "        _first_attention_asked_kernel,\n        (triton.cdiv(batch, ROWS.value),", "        _first_attention_asked_kernel,\n        (1,"),
    _fault("a column's stride taken for 1", "return t if t.stride(-1) == 1 else t.contiguous()", "return t"),
    _fault("more parts than multiprocessors", "and 2 * parts * programs <= device.multiprocessors", "and parts * programs <= device.multiprocessors"),
    _fault("parts without a limit of bytes", "        and 2 * parts * batch * nheads * width * 4 <= MOST_BYTES\n", ""),
)  # fmt: skip

SUITE = of_op(FAULTS, "first_attention")
