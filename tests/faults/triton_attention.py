"""Faults of the Triton attention."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, interpreted

_KERNEL = "kernels/attention.py"
_TILES = "kernels/attention_tiles.py"
_FORWARD = "kernels/attention_forward.py"
_PHILOX = "kernels/philox.py"
_fault = faults_of(_KERNEL)

FAULTS = (
    # masks
    _fault("keys past the sequence seen", "            allowed = (keys < length)[None, :]\n", "            allowed = (keys < length + 1)[None, :]\n", _FORWARD),
    _fault("keys past the sequence seen with dropout", "(tl.arange(0, BLOCK_N) < length - first_key)[None, :]\n", "(tl.arange(0, BLOCK_N) < length - first_key + 1)[None, :]\n", _FORWARD),
    _fault("keys counted from the sequence's start", "(tl.arange(0, BLOCK_N) < length - first_key)[None, :]\n", "(tl.arange(0, BLOCK_N) < length)[None, :]\n", _FORWARD),
    _fault("load mask of rows dropped", "mask=(rows < end - first)[:, None] & (dims < HEAD_DIM)[None, :]", "mask=(dims < HEAD_DIM)[None, :]", _TILES),
    _fault("load mask of dims dropped", "mask=(rows < end - first)[:, None] & (dims < HEAD_DIM)[None, :]", "mask=(rows < end - first)[:, None]", _TILES),
    _fault("row end counted from the block", "(rows < end - first)", "(rows < end)", _TILES),
    _fault("causal dropped", "allowed = allowed & (keys <= rows)\n", "allowed = allowed\n", _TILES),
    _fault("causal without the diagonal", "(keys <= rows)", "(keys < rows)", _TILES),
    _fault("causal leaves the masked blocks too early", "end = tl.minimum(length, first_row + BLOCK_M)\n", "end = tl.minimum(length, first_row + BLOCK_N)\n", _TILES),
    _fault("causal blocks on the diagonal unmasked", "unmasked = tl.minimum(end, first_row)", "unmasked = tl.minimum(end, first_row + BLOCK_N)", _FORWARD),
    _fault("out stored past the sequence", "mask = (rows < end)[:, None] & (dims < HEAD_DIM)[None, :]", "mask = (rows < end + 1)[:, None] & (dims < HEAD_DIM)[None, :]", _FORWARD),
    # windows and shared heads
    _fault("one key too many after the query", "keys <= rows + right", "keys <= rows + right + 1", _TILES),
    _fault("one key too few before the query", "keys >= rows - left", "keys > rows - left", _TILES),
    _fault("keys before the query seen without a limit", "allowed = allowed & (keys >= rows - left)", "allowed = allowed", _TILES),
    _fault("the walk ends before the last rows' keys", "end = tl.minimum(length, first_row + BLOCK_M + right)", "end = tl.minimum(length, first_row + right + 1)", _TILES),
    _fault("the walk begins a tile late", "tl.maximum(first_row - left, 0) // BLOCK_N * BLOCK_N", "(tl.maximum(first_row - left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N", _TILES),
    _fault("the walk begins within a tile", "tl.maximum(first_row - left, 0) // BLOCK_N * BLOCK_N", "tl.maximum(first_row - left, 0)", _TILES),
    _fault("edges on the right unmasked", "unmasked = tl.minimum(end, first_row + right + 1)", "unmasked = tl.minimum(end, first_row + right + BLOCK_M)", _FORWARD),
    _fault("edges on the left unmasked", "whole = tl.maximum(first_row + BLOCK_M - 1 - left, 0)", "whole = tl.maximum(first_row - left, 0)", _FORWARD),
    _fault("whole tiles walked over twice", "                begin = upto\n", "", _FORWARD),
    _fault("rows without a key in the first tile", "shrink = tl.exp2(top - _finite(new_top))", "shrink = tl.exp2(top - new_top)", _FORWARD),
    _fault("weights of rows without a key in the first tile", "tl.exp2(scores * unit - _finite(top)[:, None])", "tl.exp2(scores * unit - top[:, None])", _FORWARD),
    _fault("probs before the window left as they were", "in tl.range(0, first_seen, BLOCK_N):", "in tl.range(0, 0, BLOCK_N):", _FORWARD),
    _fault("heads share by their remainder", "return head // GROUP", "return head % 2", _TILES),
    _fault("k of the query's own head", "k_ptr += wide_start * k_stride + key_head * k_head_stride", "k_ptr += wide_start * k_stride + wide_head * k_head_stride", _FORWARD),
    _fault("a window as far as the last key is dropped too early", "left if 0 <= left < farthest else None", "left if 0 <= left < farthest - 1 else None", _TILES),
    # softmax
    _fault("no rescaling of the output", "acc * shrink[:, None], input_precision", "acc, input_precision", _FORWARD),
    _fault("no rescaling of the sum", "norm = norm * shrink + tl.sum(weights, 1)", "norm = norm + tl.sum(weights, 1)", _FORWARD),
    _fault("maximum of the block only", "            new_top = tl.maximum(top, tl.max(scores, 1) * unit)\n", "            new_top = tl.max(scores, 1) * unit\n", _FORWARD),
    _fault("rows without a key not guarded", "return tl.where(top == float(\"-inf\"), 0.0, top)", "return top", _TILES),
    _fault("exp for exp2", "    elif FOLDED:\n        return tl.exp2(", "    elif FOLDED:\n        return tl.exp(", _FORWARD),
    _fault("scale forgotten where not folded", "        scores *= scale\n", "        scores *= 1.0\n", _FORWARD),
    _fault("folded whatever the sign of the scale", "folded = bias is None and relative is None and softmax_scale > 0", "folded = bias is None and relative is None"),
    _fault("P in low precision", "weights = _weights(scores, top, unit, left, FOLDED)\n", "weights = _weights(scores, top, unit, left, FOLDED).to(tl.float16).to(tl.float32)\n", _FORWARD),
    _fault("lse of base 2", "lse = (top + tl.log2(norm)) * LN_2", "lse = top + tl.log2(norm)", _FORWARD),
    _fault("empty rows divided by 0", "inverse = 1.0 / tl.where(empty, 1.0, norm)", "inverse = 1.0 / norm", _FORWARD),
    # options
    _fault("bias of the keys forgotten", "scores += tl.load(key_at, mask=keys < length, other=0.0).to(tl.float32)[None, :]", "scores += 0 * tl.load(key_at, mask=keys < length, other=0.0).to(tl.float32)[None, :]", _FORWARD),
    _fault("bias read past the sequence's rows", "inside = (rows < length)[:, None] & (keys < length)[None, :]\n            scores", "inside = (rows < length + 100)[:, None] & (keys < length)[None, :]\n            scores", _FORWARD),
    _fault("bias of the first sequence", "wide_sequence * bias_batch_stride", "0 * bias_batch_stride", _FORWARD),
    _fault("bias transposed", "bias_ptr + keys.to(tl.int64) * bias_key_stride", "bias_ptr + keys.to(tl.int64) * bias_row_stride", _FORWARD),
    _fault("broadcast dimensions keep their stride", "tuple(s if n > 1 else 0 for", "tuple(s if n > 0 else 0 for"),
    _fault("gate of the first head", "tl.load(gate_ptr + head)", "tl.load(gate_ptr)", _FORWARD),
    _fault("dropout scale forgotten", "factor = inverse * keep_scale", "factor = inverse", _FORWARD),
    _fault("dropout before the sum", "            weights = tl.minimum(weights,", "            norm = norm - tl.sum(tl.where(keep, 0.0, weights), 1)\n            weights = tl.minimum(weights,", _FORWARD),
    _fault("dropout by the row in its sequence", "packed_rows = start + first_row + tl.arange(0, BLOCK_M)", "packed_rows = first_row + tl.arange(0, BLOCK_M)", _FORWARD),
    _fault("bits of all heads in one place", "bits_ptr += wide_head * total * bits_stride", "bits_ptr += 0 * total * bits_stride", _FORWARD),
    _fault("word bits drawn of the first columns", "start = col_start + w * WORD", "start = col_start + 0 * w", _PHILOX),
    _fault("lanes of a word swapped", "(_two_bits(r1, least) << 2)", "(_two_bits(r2, least) << 2)", _PHILOX),
    _fault("halves of a saved word swapped", "(words << 16 >= least).to(tl.int32) | ((words >= least).to(tl.int32) << 1)", "(words >= least).to(tl.int32) | ((words << 16 >= least).to(tl.int32) << 1)", _PHILOX),
    _fault("int32 rows of the bits", "rows.to(tl.int64) * bits_stride + start", "rows * bits_stride + start", _PHILOX),
    _fault("half words in the place of words", "keep_bits if block_n % 32 == 0 else keep_bits.view(torch.int16)", "keep_bits", _TILES),
    _fault("probs unnormalised", "_weights(scores, top, unit, left, FOLDED) * inverse[:, None]", "_weights(scores, top, unit, left, FOLDED)", _FORWARD),
    _fault("probs only up to the sequence's end", "BLOCK_N * BLOCK_N, max_seqlen, BLOCK_N):", "BLOCK_N * BLOCK_N, length, BLOCK_N):", _FORWARD),
    _fault("probs of rows past the sequence", "probs = tl.where((rows < length)[:, None], probs, 0.0)", "probs = probs", _FORWARD),
    # addresses
    _fault("v by k's head stride", "v_ptr += wide_start * v_stride + key_head * v_head_stride", "v_ptr += wide_start * v_stride + key_head * k_head_stride", _FORWARD),
    _fault("v by k's row stride", "v = _load_rows(v_ptr, v_stride,", "v = _load_rows(v_ptr, k_stride,", _FORWARD),
    _fault("int32 start", "wide_start = start.to(tl.int64)", "wide_start = start", _FORWARD),
    _fault("int32 rows in a block", "rows.to(tl.int64)[:, None] * stride + dims", "rows[:, None] * stride + dims", _TILES),
    _fault("int32 rows of the bias", "rows.to(tl.int64)[:, None] * bias_row_stride", "rows[:, None] * bias_row_stride", _FORWARD),
    _fault("second chunk of q read as the first", "_load_rows(q_ptr + d, q_stride", "_load_rows(q_ptr, q_stride", _FORWARD),
    # the grid
    _fault("places of the table's first section", "_place(places_ptr, first_slot + _slot())", "_place(places_ptr, _slot())", _FORWARD),
    _fault("planes of slots overlap", "tl.program_id(2) * tl.num_programs(1)", "tl.program_id(2)", _TILES),
    _fault("start and length of a place swapped", "tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)", "tl.load(at), tl.load(at + 2), tl.load(at + 1), tl.load(at + 3)", _TILES),
    _fault("tail of probs steps too far", "- n_sequences * n_tiles) * BLOCK_M", "- n_sequences * n_tiles) * 2 * BLOCK_M", _TILES),
    _fault("places of another height", "HEIGHTS.index(config.block_m)]", "HEIGHTS.index(config.block_n)]"),
    _fault("a table that is given is not read", "        if places is None:\n            places = attention_places", "        if True:\n            places = attention_places"),
    _fault("stride of cu_seqlens", "cu_seqlens.contiguous() if return_probs else None", "cu_seqlens if return_probs else None"),
    # capacity and launcher
    _fault("tail only of the first tiles", "range(start + first_row, total, length)", "range(start + first_row, tl.minimum(total, start + length), length)", _FORWARD),
    _fault("a tile too few", "n_tiles = max(1, triton.cdiv(max_seqlen, config.block_m))", "n_tiles = max(1, max_seqlen // config.block_m)"),
)  # fmt: skip

SUITE = interpreted(
    FAULTS,
    "tests/triton/test_attention.py",
    "tests/triton/test_attention_error_rule.py",
    *("-k", "not 16x32 and not one-loop and not bfloat16"),
)
