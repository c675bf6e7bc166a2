"""Faults of the Triton attention's backward."""

# ruff: noqa: E501 (a table)

from dataclasses import replace

from tests.support.mutation import faults_of, interpreted

_KERNEL = "kernels/attention_backward.py"
_TILES = "kernels/attention_backward_tiles.py"
_SHARED = "kernels/attention_tiles.py"
_DQ = "kernels/attention_dq.py"
_DKDV = "kernels/attention_dkdv.py"
_DBIAS = "kernels/attention_dbias.py"
_PHILOX = "kernels/philox.py"
_fault = faults_of(_KERNEL)

FAULTS = (
    # P from lse
    _fault("scale forgotten where not folded", "        scores *= scale\n", "        scores *= 1.0\n", _TILES),
    _fault("bias of the first row", "bias_at += rows.to(tl.int64) * bias_row_stride", "bias_at += rows.to(tl.int64) * 0", _TILES),
    _fault("bias transposed", "bias_at = bias_ptr + keys.to(tl.int64) * bias_key_stride", "bias_at = bias_ptr + keys.to(tl.int64) * bias_row_stride", _TILES),
    _fault("bias read past the sequence's rows", "inside = inside & (rows < length)", "inside = inside & (rows < length + 100)", _TILES),
    _fault("int32 rows of the bias", "rows.to(tl.int64) * bias_row_stride", "rows * bias_row_stride", _TILES),
    _fault("keys past the sequence seen", "    allowed = keys < length\n", "    allowed = keys < length + 1\n", _TILES),
    _fault("causal dropped", "allowed = allowed & (keys <= rows)\n", "allowed = allowed & (keys <= rows + 100)\n", _SHARED),
    _fault("causal without the diagonal", "(keys <= rows)", "(keys < rows)", _SHARED),
    _fault("lse not turned to log 2", "return lse * UNIT", "return lse", _TILES),
    _fault("rows without a key not guarded", "        return _finite(lse)\n", "        return lse\n", _TILES),
    _fault("factor before the shift", "tl.exp2((scores - shift) * unit)", "tl.exp2(scores * unit - shift * unit)", _TILES),
    _fault("chunks of q read as the first", "a = _load_rows(a_ptr + d, a_stride", "a = _load_rows(a_ptr, a_stride", _TILES),
    # dq
    _fault("delta of the first half", "delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)", "delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) * 0.5", _DQ),
    _fault("delta not subtracted in dq", "dscores = weights * (dprobs * factor - delta[:, None])\n                if", "dscores = weights * (dprobs * factor)\n                if", _DQ),
    _fault("dq of the last block only", "dq = tl.dot(dscores.to(k.dtype), k, dq, input", "dq = tl.dot(dscores.to(k.dtype), k, input", _DQ),
    _fault("dq not scaled", "dq * (inverse * scale)[:, None]", "dq * inverse[:, None]", _DQ),
    _fault("dq not normalised", "dq * (inverse * scale)[:, None]", "dq * scale", _DQ),
    _fault("empty rows divided by 0", "inverse = 1.0 / tl.where(norm == 0.0, 1.0, norm)", "inverse = 1.0 / norm", _DQ),
    _fault("sum of P not handed on", "shift + tl.log2(norm) if FOLDED else inverse", "shift if FOLDED else inverse", _DQ),
    _fault("causal leaves dq too early", "end = tl.minimum(length, first_row + BLOCK_M)\n", "end = tl.minimum(length, first_row + 16)\n", _SHARED),
    # windows and shared heads
    _fault("one key too many before the query", "keys >= rows - left", "keys >= rows - left - 1", _SHARED),
    _fault("keys after the query seen without a limit", "allowed = allowed & (keys <= rows + right)", "allowed = allowed", _SHARED),
    _fault("dq leaves the window too early", "end = tl.minimum(length, first_row + BLOCK_M + right)", "end = tl.minimum(length, first_row + BLOCK_M)", _SHARED),
    _fault("dq's k of the query's own head", "k_ptr += wide_start * k_stride + key_head * k_head_stride", "k_ptr += wide_start * k_stride + wide_head * k_head_stride", _DQ),
    _fault("dk begins a tile late", "begin = tl.maximum(first_key - right, 0) // BLOCK_M * BLOCK_M", "begin = (tl.maximum(first_key - right, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M", _DKDV),
    _fault("dk leaves its last queries out", "end = tl.minimum(length, first_key + BLOCK_N + left)", "end = tl.minimum(length, first_key + left)", _DKDV),
    _fault("dk and dv of each group's first head", "head = key_head * GROUP + member", "head = key_head * GROUP", _DKDV),
    _fault("dk and dv of the next group's heads", "head = key_head * GROUP + member", "head = key_head + member", _DKDV),
    _fault("dv of shared heads without their gates", "dropped *= gate", "dropped *= 1.0", _DKDV),
    _fault("dv of shared heads gated twice", "                factor = keep_scale\n            first", "                factor *= 1.0\n            first", _DKDV),
    _fault("dbias begins before its tile", "begin = tl.maximum(begin, first_key)", "begin = begin", _DBIAS),
    _fault("dbias's k of the query's own head", "k_at = k_ptr + wide_start * k_stride + key_head * k_head_stride", "k_at = k_ptr + wide_start * k_stride + wide_head * k_head_stride", _DBIAS),
    _fault("gradients of shared heads side by side as if not shared", "strides = (sum(heads) * headdim, headdim, 1)", "strides = (3 * heads[0] * headdim, headdim, 1)"),
    _fault("a program per head of q for dk and dv", "max_seqlen), k.shape[1]),", "max_seqlen), nheads),"),
    # delta's error
    _fault("dq of a rough delta left as it is", "for again in (False, True) if rounding > 0 and need_dq else (False,):", "for again in (False,):"),
    _fault("delta's error left in it", "delta += rest / tl", "delta += 0.0 * rest / tl", _DQ),
    _fault("no delta is rough", "tl.abs(rest) > ROUNDING * size", "tl.abs(rest) > 1e9 * size", _DQ),
    _fault("dgate without its scale", "dgate * inverse * keep_scale", "dgate * inverse", _DQ),
    _fault("dgate not normalised", "dgate * inverse * keep_scale", "dgate * keep_scale", _DQ),
    _fault("dgate's tail left as it was", "mask=tail < total)", "mask=tail < 0)", _DQ),
    # dk, dv
    _fault("delta not subtracted in dk", "dscores = probs * (dprobs * factor - delta[None, :])", "dscores = probs * (dprobs * factor)", _DKDV),
    _fault("P not normalised with a bias", "probs *= inverse[None, :]", "probs *= 1.0", _DKDV),
    _fault("dk not scaled", "dk_ptr, grad_stride, dk * scale", "dk_ptr, grad_stride, dk", _DKDV),
    _fault("dv without gate", "dv_ptr, grad_stride, dv * factor", "dv_ptr, grad_stride, dv * keep_scale", _DKDV),
    _fault("dv of all P", "dropped = tl.where(keep, probs, 0.0)", "dropped = probs", _DKDV),
    _fault("dropped P in dS", "dscores = probs * (dprobs * factor - delta[None, :])", "dscores = dropped * (dprobs * factor - delta[None, :])", _DKDV),
    _fault("causal starts a tile late", "begin = first_key // BLOCK_M * BLOCK_M", "begin = (first_key + BLOCK_M) // BLOCK_M * BLOCK_M", _DKDV),
    _fault("delta read past the sequence", "tl.load(both, mask=(rows < length)[:, None], other=0.0)", "tl.load(both, mask=(rows < length + 1)[:, None], other=0.0)", _DKDV),
    _fault("dv in low precision", "dv = tl.dot(dropped.to(do.dtype), do", "dv = tl.dot(dropped.to(tl.float16).to(do.dtype), do", _DKDV),
    # dropout
    _fault("dropout of plane 0", "philox_keep(seed, offset, head, packed_rows", "philox_keep(seed, offset, 0, packed_rows", _TILES),
    _fault("dropout by the row in its sequence", "_kept(dropout, head, start + rows, rows < length,", "_kept(dropout, head, rows, rows < length,", _TILES),
    _fault("saved bits transposed", "first_key, BLOCK_N, TRANSPOSED)\n    else", "first_key, BLOCK_N, not TRANSPOSED)\n    else", _TILES),
    _fault("dk's dropout by the row in its sequence", "_kept(dropout, head, start + rows, inside", "_kept(dropout, head, rows, inside", _DKDV),
    _fault("second saved word as the first", "tl.expand_dims(first, axis), tl.expand_dims(second, axis))", "tl.expand_dims(first, axis), tl.expand_dims(first, axis))", _PHILOX),
    _fault("int32 rows of the saved bits", "(rows.to(tl.int64) * bits_stride + column)", "(rows * bits_stride + column)", _PHILOX),
    _fault("pairs of words swapped", "first, second = tl.split(pair)", "second, first = tl.split(pair)", _PHILOX),
    _fault("normaliser in the place of delta", "delta, shift = tl.split(", "shift, delta = tl.split(", _DKDV),
    _fault("saved bits of rows past the sequence read", "tl.load(word_at, mask=inside & (column < bits_stride), other=0)", "tl.load(word_at, mask=column < bits_stride, other=0)", _PHILOX),
    _fault("dq made without need", "bits, dq if need_dq else None, delta", "bits, dq, delta"),
    _fault("dropout forgotten in dq", "        dprobs = tl.where(keep, dprobs, 0.0)\n    return", "        dprobs = dprobs\n    return", _TILES),
    # dbias
    _fault("dbias not normalised", "acc += weights * inverse[:, None] * (", "acc += weights * (", _DBIAS),
    _fault("delta not subtracted in dbias", "* (dprobs * factor - delta[:, None])\n    rows", "* (dprobs * factor)\n    rows", _DBIAS),
    _fault("dbias of the last pair only", "acc += weights * inverse", "acc = weights * inverse", _DBIAS),
    _fault("dbias of the first sequence", "sequence = first_sequence + pair // heads", "sequence = first_sequence", _DBIAS),
    _fault("splits overlap", "for pair in range(split, pairs, splits):", "for pair in range(0, pairs, splits):", _DBIAS),
    _fault("rows shared by the first tile only", "        row_end, key_end = length, length\n", "        row_end, key_end = tl.minimum(length, BLOCK_M), length\n", _DBIAS),
    _fault("dbias stored past its keys", "mask=(rows < n_rows)[:, None] & (keys < n_keys)[None, :]", "mask=(rows < n_rows)[:, None] & (keys < n_keys + 1)[None, :]", _DBIAS),
    _fault("keys of dbias not summed", "        acc = tl.sum(acc, 1, keep_dims=True)\n", "        acc = tl.max(acc, 1, keep_dims=True)\n", _DBIAS),
    _fault("int32 sequence of the bias in dbias", "wide_sequence = tl.cast(sequence, tl.int64)", "wide_sequence = sequence", _DBIAS),
    _fault("parts not added", "return parts.sum(0)", "return parts[0].clone()"),
    # addresses
    _fault("int32 rows stored", "rows = first.to(tl.int64) + tl.arange(0, BLOCK)", "rows = first.to(tl.int32) + tl.arange(0, BLOCK)", _TILES),
    _fault("stored past the sequence", "mask = (rows < end)[:, None] & (dims < HEAD_DIM)[None, :]", "mask = (rows < end + 1)[:, None] & (dims < HEAD_DIM)[None, :]", _TILES),
    _fault("lse taken for contiguous", "if need_dq else (0, 0)), lse.stride(0)", "if need_dq else (0, 0)), total"),
    _fault("broadcast dimensions keep their stride", "tuple(s if n > 1 else 0 for", "tuple(s if n > 0 else 0 for"),
    _fault("stride of cu_seqlens", "cu_seqlens = cu_seqlens.contiguous()", "cu_seqlens = cu_seqlens"),
    _fault("folded whatever the sign of the scale", "folded = bias is None and relative is None and softmax_scale > 0", "folded = True"),
    _fault("rows of dk by dq's tiles", "grid(slots(config.block_n, total, batch, max_seqlen), k.shape[1])", "grid(slots(config.block_n, total, batch, max_seqlen) // 2, k.shape[1])"),
    _fault("places of dq by the heights of its keys", "firsts[config.block_m]", "firsts[config.block_n]"),
    _fault("dq's places of the first section", "_place(places_ptr, first_slot + _slot())", "_place(places_ptr, _slot())", _DQ),
    _fault("rough tiles of the heads in one place", "rough_ptr += _slot() * nheads + tl.program_id(0)", "rough_ptr += _slot()", _DQ),
    _fault("a table that is given is not read", "    if places is None:\n        places = attention_places", "    if True:\n        places = attention_places"),
    _fault("nothing computed leaves no zeros", "*(torch.zeros(size, dtype", "*(torch.ones(size, dtype"),
)  # fmt: skip

# `make test` may draw cases without backward alone
SUITE = replace(
    interpreted(
        FAULTS,
        "tests/triton/test_attention_backward.py",
        "tests/triton/test_attention_error_rule.py",
        *("-k", "not wide-high and not bfloat16"),
    ),
    quick="not slow",
)
