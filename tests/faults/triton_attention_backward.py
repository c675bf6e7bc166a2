"""Faults of the Triton attention's backward."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_KERNEL = "kernels/attention_backward.py"
_TILES = "kernels/attention_backward_tiles.py"
_DQ = "kernels/attention_dq.py"
_DKDV = "kernels/attention_dkdv.py"
_DBIAS = "kernels/attention_dbias.py"
_PHILOX = "kernels/philox.py"
_BACKEND = "fastbert/backends/triton/attention.py"


def _fault(name: str, old: str, new: str, file: str = _KERNEL) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # P from lse
    _fault("scale forgotten where not folded", "        scores *= scale\n", "        scores *= 1.0\n", _TILES),
    _fault("bias added twice", "scores += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)", "scores += 2 * tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)", _TILES),
    _fault("bias of the first row", "bias_at += rows.to(tl.int64) * bias_row_stride", "bias_at += rows.to(tl.int64) * 0", _TILES),
    _fault("bias transposed", "bias_at = bias_ptr + keys.to(tl.int64) * bias_key_stride", "bias_at = bias_ptr + keys.to(tl.int64) * bias_row_stride", _TILES),
    _fault("bias read past the sequence's rows", "inside = inside & (rows < length)", "inside = inside & (rows < length + 100)", _TILES),
    _fault("bias read past the sequence's keys", "        inside = keys < length\n", "        inside = keys < length + 100\n", _TILES),
    _fault("int32 rows of the bias", "rows.to(tl.int64) * bias_row_stride", "rows * bias_row_stride", _TILES),
    _fault("int32 keys of the bias", "keys.to(tl.int64) * bias_key_stride", "keys * bias_key_stride", _TILES),
    _fault("keys past the sequence seen", "    allowed = keys < length\n", "    allowed = keys < length + 1\n", _TILES),
    _fault("last key not seen", "    allowed = keys < length\n", "    allowed = keys < length - 1\n", _TILES),
    _fault("causal dropped", "allowed = allowed & (keys <= rows)", "allowed = allowed & (keys <= rows + 100)", _TILES),
    _fault("causal without the diagonal", "(keys <= rows)", "(keys < rows)", _TILES),
    _fault("lse not turned to log 2", "return lse * UNIT", "return lse", _TILES),
    _fault("rows without a key not guarded", "        return _finite(lse)\n", "        return lse\n", _TILES),
    _fault("factor before the shift", "tl.exp2((scores - shift) * unit)", "tl.exp2(scores * unit - shift * unit)", _TILES),
    _fault("chunks of q read as the first", "a = _load_rows(a_ptr + d, a_stride", "a = _load_rows(a_ptr, a_stride", _TILES),
    _fault("chunks of k beyond the head", "b = _load_rows(b_ptr + d, b_stride, first_b, length, HEAD_DIM - d", "b = _load_rows(b_ptr + d, b_stride, first_b, length, HEAD_DIM", _TILES),
    _fault("chunks do not add up", "acc = tl.dot(a, tl.trans(b), acc, input_precision", "acc = tl.dot(a, tl.trans(b), input_precision", _TILES),
    # dq
    _fault("delta of the first half", "delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)", "delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) * 0.5", _DQ),
    _fault("delta not subtracted in dq", "dscores = weights * (dprobs * factor - delta[:, None])\n                if", "dscores = weights * (dprobs * factor)\n                if", _DQ),
    _fault("gate not in dP of dq", "dscores = weights * (dprobs * factor - delta[:, None])\n                if", "dscores = weights * (dprobs * keep_scale - delta[:, None])\n                if", _DQ),
    _fault("dq of the last block only", "dq = tl.dot(dscores.to(k.dtype), k, dq, input", "dq = tl.dot(dscores.to(k.dtype), k, input", _DQ),
    _fault("dq not scaled", "dq * (inverse * scale)[:, None]", "dq * inverse[:, None]", _DQ),
    _fault("dq not normalised", "dq * (inverse * scale)[:, None]", "dq * scale", _DQ),
    _fault("sum of P of the last block only", "norm += tl.sum(weights, 1)", "norm = tl.sum(weights, 1)", _DQ),
    _fault("empty rows divided by 0", "inverse = 1.0 / tl.where(norm == 0.0, 1.0, norm)", "inverse = 1.0 / norm", _DQ),
    _fault("sum of P not handed on", "shift + tl.log2(norm) if FOLDED else inverse", "shift if FOLDED else inverse", _DQ),
    _fault("sum of P not handed on with a bias", "shift + tl.log2(norm) if FOLDED else inverse", "shift + tl.log2(norm) if FOLDED else inverse * 0.0 + 1.0", _DQ),
    _fault("causal leaves dq too early", "end = tl.minimum(length, first_row + BLOCK_M)\n            dq", "end = tl.minimum(length, first_row + 16)\n            dq", _DQ),
    # delta's error
    _fault("dq of a rough delta left as it is", "for again in (False, True) if rounding > 0 and need_dq else (False,):", "for again in (False,):"),
    _fault("delta's error left in it", "delta += rest / tl", "delta += 0.0 * rest / tl", _DQ),
    _fault("delta's error added once more", "delta += rest / tl", "delta -= rest / tl", _DQ),
    _fault("delta's error of the last block", "                    rest += tl.sum(dscores, 1)", "                    rest = tl.sum(dscores, 1)", _DQ),
    _fault("no delta is rough", "tl.abs(rest) > ROUNDING * size", "tl.abs(rest) > 1e9 * size", _DQ),
    _fault("whether another program's delta is rough", "tl.load(rough_ptr + tl.program_id(0)) == 0", "tl.load(rough_ptr) == 0", _DQ),
    _fault("dgate without its scale", "dgate * inverse * keep_scale", "dgate * inverse", _DQ),
    _fault("dgate not normalised", "dgate * inverse * keep_scale", "dgate * keep_scale", _DQ),
    _fault("dgate of the last block only", "dgate += tl.sum(weights * dprobs, 1)", "dgate = tl.sum(weights * dprobs, 1)", _DQ),
    _fault("dgate of dropped P only", "dgate += tl.sum(weights * dprobs, 1)", "dgate += tl.sum(weights, 1)", _DQ),
    _fault("dgate's tail left as it was", "mask=tail < total)", "mask=tail < 0)", _DQ),
    # dk, dv
    _fault("delta not subtracted in dk", "dscores = probs * (dprobs * factor - delta[None, :])", "dscores = probs * (dprobs * factor)", _DKDV),
    _fault("gate not in dP of dk", "dscores = probs * (dprobs * factor - delta[None, :])", "dscores = probs * (dprobs * keep_scale - delta[None, :])", _DKDV),
    _fault("P not normalised with a bias", "probs *= inverse[None, :]", "probs *= 1.0", _DKDV),
    _fault("dk not scaled", "dk_ptr, grad_stride, dk * scale", "dk_ptr, grad_stride, dk", _DKDV),
    _fault("dv without gate", "dv_ptr, grad_stride, dv * factor", "dv_ptr, grad_stride, dv * keep_scale", _DKDV),
    _fault("dv without dropout's scale", "dv_ptr, grad_stride, dv * factor", "dv_ptr, grad_stride, dv * (factor / keep_scale)", _DKDV),
    _fault("dv of all P", "dropped = tl.where(keep, probs, 0.0)", "dropped = probs", _DKDV),
    _fault("dP of all P", "                    dprobs = tl.where(keep, dprobs, 0.0)\n", "                    dprobs = dprobs\n", _DKDV),
    _fault("dropped P in dS", "dscores = probs * (dprobs * factor - delta[None, :])", "dscores = dropped * (dprobs * factor - delta[None, :])", _DKDV),
    _fault("causal starts a tile late", "begin = first_key // BLOCK_M * BLOCK_M", "begin = (first_key + BLOCK_M) // BLOCK_M * BLOCK_M", _DKDV),
    _fault("delta read past the sequence", "tl.load(both, mask=(rows < length)[:, None], other=0.0)", "tl.load(both, mask=(rows < length + 1)[:, None], other=0.0)", _DKDV),
    _fault("dv in low precision", "dv = tl.dot(dropped.to(do.dtype), do", "dv = tl.dot(dropped.to(tl.float16).to(do.dtype), do", _DKDV),
    _fault("lse without a guard in dk", "shift = _finite(tl.load(lse_ptr + rows, mask=rows < length, other=0.0))", "shift = tl.load(lse_ptr + rows, mask=rows < length, other=0.0)", _DKDV),
    # dropout
    _fault("dropout of plane 0", "            keep = philox_keep(seed, offset, head, start + rows, first_key, threshold, BLOCK_M, BLOCK_N)\n        dprobs", "            keep = philox_keep(seed, offset, 0, start + rows, first_key, threshold, BLOCK_M, BLOCK_N)\n        dprobs", _TILES),
    _fault("dropout by the row in its sequence", "            keep = philox_keep(seed, offset, head, start + rows, first_key, threshold, BLOCK_M, BLOCK_N)\n        dprobs", "            keep = philox_keep(seed, offset, head, rows, first_key, threshold, BLOCK_M, BLOCK_N)\n        dprobs", _TILES),
    _fault("saved bits by the row in its sequence", "saved_keep(bits_ptr, bits_stride, start + rows, rows < length, first_key, BLOCK_N, False)", "saved_keep(bits_ptr, bits_stride, rows, rows < length, first_key, BLOCK_N, False)", _TILES),
    _fault("dk's dropout by the row in its sequence", "                            seed, offset, head, start + rows, first_key", "                            seed, offset, head, rows, first_key", _DKDV),
    _fault("dk's saved bits by the row in its sequence", "bits_ptr, bits_stride, start + rows, rows < length, first_key, BLOCK_N, True\n", "bits_ptr, bits_stride, rows, rows < length, first_key, BLOCK_N, True\n", _DKDV),
    _fault("dk's dropout of the first keys", "                            seed, offset, head, start + rows, first_key", "                            seed, offset, head, start + rows, first_key * 0", _DKDV),
    _fault("dk's saved bits of the first keys", "bits_ptr, bits_stride, start + rows, rows < length, first_key, BLOCK_N, True\n", "bits_ptr, bits_stride, start + rows, rows < length, first_key * 0, BLOCK_N, True\n", _DKDV),
    _fault("words of the tile, not of the row", "column = col_start // WORD", "column = col_start * 0", _PHILOX),
    _fault("saved bits of another column", "axis)\n    return ((words >> (cols % WORD)) & 1) != 0", "axis)\n    return ((words >> ((cols + 1) % WORD)) & 1) != 0", _PHILOX),
    _fault("second saved word as the first", "tl.expand_dims(first, axis), tl.expand_dims(second, axis))", "tl.expand_dims(first, axis), tl.expand_dims(first, axis))", _PHILOX),
    _fault("int32 rows of the saved bits", "(rows.to(tl.int64) * bits_stride + column)", "(rows * bits_stride + column)", _PHILOX),
    _fault("pairs of words swapped", "first, second = tl.split(pair)", "second, first = tl.split(pair)", _PHILOX),
    _fault("int32 rows of pairs of words", "rows.to(tl.int64)[:, None] * bits_stride + column", "rows[:, None] * bits_stride + column", _PHILOX),
    _fault("normaliser in the place of delta", "delta, shift = tl.split(", "shift, delta = tl.split(", _DKDV),
    _fault("normaliser of a plane too near", "plane = tl.cast(total, tl.int64) * nheads", "plane = tl.cast(total, tl.int64) * (nheads - 1)", _DKDV),
    _fault("saved bits of rows past the sequence read", "tl.load(word_at, mask=inside & (column < bits_stride), other=0)", "tl.load(word_at, mask=column < bits_stride, other=0)", _PHILOX),
    _fault("dbias with the bits of the first head", "bits_at = bits_ptr + wide_head * total * bits_stride", "bits_at = bits_ptr + 0 * total * bits_stride", _DBIAS),
    _fault("dq made for nobody", "            dq if need_dq else None,", "            dq,"),
    _fault("dk made for nobody", "dk if need_dk else None,", "dk,"),
    _fault("keys' kernel for nobody", "    if need_dk or need_dv:\n", "    if True:\n"),
    _fault("dropout forgotten in dq", "        dprobs = tl.where(keep, dprobs, 0.0)\n    return", "        dprobs = dprobs\n    return", _TILES),
    _fault("a seed is dropout", "(seed, keep_bits) if dropout_p > 0 else (None, None)", "(seed, keep_bits)"),
    # dbias
    _fault("dbias not normalised", "acc += weights * inverse[:, None] * (", "acc += weights * (", _DBIAS),
    _fault("delta not subtracted in dbias", "* (dprobs * factor - delta[:, None])\n    rows", "* (dprobs * factor)\n    rows", _DBIAS),
    _fault("gate not in dbias", "* (dprobs * factor - delta[:, None])\n    rows", "* (dprobs * keep_scale - delta[:, None])\n    rows", _DBIAS),
    _fault("dbias of the last pair only", "acc += weights * inverse", "acc = weights * inverse", _DBIAS),
    _fault("dbias of the first sequence", "sequence = first_sequence + pair // heads", "sequence = first_sequence", _DBIAS),
    _fault("dbias of the first head", "head = first_head + pair % heads", "head = first_head", _DBIAS),
    _fault("a matrix of dbias for all sequences", "first_sequence = matrix // bias_heads % bias_batch", "first_sequence = 0", _DBIAS),
    _fault("splits overlap", "for pair in range(split, pairs, splits):", "for pair in range(0, pairs, splits):", _DBIAS),
    _fault("splits skip pairs", "for pair in range(split, pairs, splits):", "for pair in range(split, pairs, splits + 1):", _DBIAS),
    _fault("rows of other tiles too", "row_end = tl.minimum(length, first_row + BLOCK_M)", "row_end = length", _DBIAS),
    _fault("keys of other tiles too", "key_end = tl.minimum(length, first_key + BLOCK_N)", "key_end = length", _DBIAS),
    _fault("rows shared by the first tile only", "        row_end, key_end = length, length\n", "        row_end, key_end = tl.minimum(length, BLOCK_M), length\n", _DBIAS),
    _fault("keys shared by the first tile only", "        row_end, key_end = length, length\n", "        row_end, key_end = length, tl.minimum(length, BLOCK_N)\n", _DBIAS),
    _fault("dbias stored past its keys", "mask=(rows < n_rows)[:, None] & (keys < n_keys)[None, :]", "mask=(rows < n_rows)[:, None] & (keys < n_keys + 1)[None, :]", _DBIAS),
    _fault("dbias stored past its rows", "mask=(rows < n_rows)[:, None] & (keys < n_keys)[None, :]", "mask=(rows < n_rows + 1)[:, None] & (keys < n_keys)[None, :]", _DBIAS),
    _fault("keys of dbias not summed", "        acc = tl.sum(acc, 1, keep_dims=True)\n", "        acc = tl.max(acc, 1, keep_dims=True)\n", _DBIAS),
    _fault("rows of dbias not summed", "        acc = tl.sum(acc, 0, keep_dims=True)\n", "        acc = tl.max(acc, 0, keep_dims=True)\n", _DBIAS),
    _fault("bias by the sequence of dq", "bias_at = bias_ptr + wide_sequence * bias_batch_stride", "bias_at = bias_ptr + wide_sequence * 0", _DBIAS),
    _fault("int32 sequence of the bias in dbias", "wide_sequence = tl.cast(sequence, tl.int64)", "wide_sequence = sequence", _DBIAS),
    _fault("parts not added", "dbias = parts.sum(0)", "dbias = parts[0].clone()"),
    _fault("a part for each pair and more", "splits = max(1, min(pairs, ", "splits = max(1, max(pairs, "),
    # addresses
    _fault("int32 rows stored", "rows = first.to(tl.int64) + tl.arange(0, BLOCK)", "rows = first.to(tl.int32) + tl.arange(0, BLOCK)", _TILES),
    _fault("stored past the sequence", "mask = (rows < end)[:, None] & (dims < HEAD_DIM)[None, :]", "mask = (rows < end + 1)[:, None] & (dims < HEAD_DIM)[None, :]", _TILES),
    _fault("stored past the head", "mask = (rows < end)[:, None] & (dims < HEAD_DIM)[None, :]", "mask = (rows < end)[:, None]", _TILES),
    _fault("out by dout's strides", "            *out.stride()[:2],", "            *dout.stride()[:2],"),
    _fault("lse taken for contiguous", "if need_dq else (0, 0)),\n            lse.stride(0)", "if need_dq else (0, 0)),\n            total"),
    _fault("dk's lse taken for contiguous", "*(dk if need_dk else dv).stride()[:2],\n            lse.stride(0)", "*(dk if need_dk else dv).stride()[:2],\n            total"),
    _fault("broadcast dimensions keep their stride", "tuple(s if n > 1 else 0 for", "tuple(s if n > 0 else 0 for"),
    _fault("stride of cu_seqlens", "cu_seqlens = cu_seqlens.contiguous()", "cu_seqlens = cu_seqlens"),
    _fault("folded whatever the sign of the scale", "folded = bias is None and softmax_scale > 0", "folded = True"),
    _fault("rows of dk by dq's tiles", "_attention_bwd_dkdv_kernel,\n            grid(config.block_n)", "_attention_bwd_dkdv_kernel,\n            grid(4 * config.block_n)"),
    _fault("dk's tail steps too far", "total, tail_slots * BLOCK_N):", "total, 2 * tail_slots * BLOCK_N):", _DKDV),
    _fault("dq's tail steps too far", "total, tail_slots * BLOCK_M):", "total, 2 * tail_slots * BLOCK_M):", _DQ),
    _fault("nothing computed leaves no zeros", "*(torch.zeros(size, dtype", "*(torch.ones(size, dtype"),
    _fault("high tiles for short sequences", "if high <= max_seqlen and", "if"),
    _fault("wide heads not handed over", "inputs.q.shape[-1] > kernels(\"attention\").MAX_HEADDIM", "inputs.q.shape[-1] > 2 * kernels(\"attention\").MAX_HEADDIM", _BACKEND),
)  # fmt: skip

# What sees most comes first: a fault costs the tests up to the one that sees it.
TESTS = (
    "empty_sequences_and_capacity",
    "a_gate_of_0_has_a_gradient",
    "bias_broadcasts",
    "an_lse_that_is_slightly_wrong_cancels",
    "large_scores_do_not_overflow",
    "softmax_scale",
    "rows_without_an_allowed_key",
    "strided_inputs_with_poisoned_gaps",
    "dropout_bits_are_the_definitions",
    "saved_bits_and_drawn_ones_are_one",
    "bits_beyond_2_to_31_words",
    "what_backward_returns",
    "all_cuts_by_the_error_rule",
    "neighbours_and_unused_cells_may_be_nan",
    "a_mask_of_the_lowest_number_is_not_minus_infinity",
    "a_seed_without_dropout_is_not_read",
    "offsets_beyond_2_to_31_elements",
    "no_rows",
    "the_grid_is_known_without_the_lengths",
    "configs_fit_the_work",
    "heads_wider_than_the_kernel_serves_go_to_aten",
    "every_head_dimension",
)

SUITE = Suite(
    faults=FAULTS,
    tests=(
        *(f"tests/triton/test_attention_backward.py::test_{name}" for name in TESTS),
        "-m",
        "not slow",
        "-k",
        "not wide-high and not bfloat16",
    ),
    environment={"TRITON_INTERPRET": "1"},
    timeout_s=600.0,
)
