"""Faults of the Triton embedding's backward."""

# ruff: noqa: E501 (a table)

from dataclasses import replace

from tests.support.mutation import faults_of, of_op

_KERNEL = "kernels/embedding.py"
_BACKWARD = "kernels/embedding_backward.py"
_NORM = "kernels/layer_norm_backward.py"
_fault = faults_of(_KERNEL)

FAULTS = (
    # tables
    _fault("the padding row gets its gradient", "last = tl.where(row == skipped, first, last)", "last = tl.where(row < 0, first, last)", _BACKWARD),
    _fault("every table skips the padding row", "(position_ids, position_rows, -1)", "(position_ids, position_rows, padding_idx)"),
    _fault("the first chunk of a run twice", "first_chunk = (first + CHUNK - 1) // CHUNK", "first_chunk = first // CHUNK", _BACKWARD),
    _fault("a run's chunks forgotten", "range(first_chunk, last_chunk, BLOCK_M)", "range(first_chunk, first_chunk, BLOCK_M)", _BACKWARD),
    _fault("tokens behind the last chunk forgotten", "after = tl.where(some, last_chunk * CHUNK, last)", "after = last", _BACKWARD),
    _fault("chunk beyond the run read", "mask = (chunks < last_chunk)[:, None]", "mask = (chunks <= last_chunk)[:, None]", _BACKWARD),
    _fault("chunk sums set, not added", "        total += tl.load(sums_ptr + at", "        total = tl.load(sums_ptr + at", _BACKWARD),
    _fault("a token too few in a chunk", "first, first + CHUNK, cols", "first, first + CHUNK - 1, cols", _BACKWARD),
    _fault("tokens in their own order", "row = tl.load(order_ptr + at, mask=inside, other=0) * HIDDEN", "row = at.to(tl.int64) * HIDDEN", _BACKWARD),
    _fault("only the last tile of tokens", "        total += tl.load(dz_ptr + row", "        total = tl.load(dz_ptr + row", _BACKWARD),
    _fault("tokens of the next run", "        inside = at < last\n", "        inside = at <= last\n", _BACKWARD),
    _fault("int32 offsets of tokens", "mask=inside, other=0) * HIDDEN", "mask=inside, other=0).to(tl.int32) * HIDDEN", _BACKWARD),
    _fault("a table's run from its neighbour's", "first = tl.load(starts_ptr + row)\n", "first = tl.load(starts_ptr + tl.maximum(row - 1, 0))\n", _BACKWARD),
    _fault("one column block of the table", "(table_rows, column_blocks), device", "(table_rows, 1), device"),
    _fault("second column block over the first", "    row = tl.program_id(0)\n    cols = tl.program_id(1) * BLOCK_N", "    row = tl.program_id(0)\n    cols = 0 * BLOCK_N", _BACKWARD),
    _fault("sums of chunks in storage type", "sums = dz.new_empty((chunks, hidden))", "sums = dz.new_empty((chunks, hidden), dtype=dtype)"),
    _fault("no chunk for a last one that is whole", "chunks, column_blocks = rows // CHUNK,", "chunks, column_blocks = (rows - 1) // CHUNK,"),
    # norm
    _fault("mean of g not subtracted", "g - g_mean[:, None] - x_hat", "g - x_hat", _NORM),
    _fault("projection not subtracted", "g_mean[:, None] - x_hat * gx_mean[:, None]\n", "g_mean[:, None]\n", _NORM),
    _fault("weight forgotten", "        g = dy * weight\n", "        g = dy\n", _NORM),
    _fault("rstd forgotten", "return rstd[:, None] * centred", "return centred", _NORM),
    _fault("x_hat without the mean", "return dy, (z - mean[:, None]) * rstd[:, None]", "return dy, z * rstd[:, None]", _NORM),
    _fault("mean over the block", "g_mean = tl.sum(g, 1) / HIDDEN", "g_mean = tl.sum(g, 1) / BLOCK_N", _NORM),
    _fault("wide means of the last block", "        g_sum += tl.sum(g, 1)", "        g_sum = tl.sum(g, 1)", _NORM),
    _fault("dweight without x_hat", "dweight += dy * x_hat", "dweight += dy", _NORM),
    _fault("dweight only of the last tile", "dweight += dy * x_hat", "dweight = dy * x_hat", _NORM),
    _fault("partial sums share a row", "partial_at = program.to(tl.int64) * HIDDEN + cols", "partial_at = cols", _NORM),
    _fault("every program takes every tile", "tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0))", "tl.cdiv(n_rows, BLOCK_M), 1)", _NORM),
    # dropout, layouts
    _fault("scale of the kept forgotten in backward", "dy = dropped(dy, dropout, rows", "dy = dropped(dy, (dropout[0], dropout[1], dropout[2], 1.0), rows", _NORM),
    _fault("other bits in backward", "dy = dropped(dy, dropout, rows,", "dy = dropped(dy, dropout, rows + 1,", _NORM),
    _fault("dropout of the input in backward", "        DROPS_OUTPUT=True,\n        num", "        DROPS_OUTPUT=False,\n        num"),
    _fault("wide means without dropout", "            DROPS_OUTPUT=True,\n", "            DROPS_OUTPUT=False,\n"),
    _fault("stride of z swapped for dy's", "z_ptr + rows[:, None] * z_stride", "z_ptr + rows[:, None] * dy_stride", _NORM),
    _fault("stride of dy forgotten", "dy_ptr + rows[:, None] * dy_stride", "dy_ptr + rows[:, None] * z_stride", _NORM),
    _fault("int32 rows in backward", "tl.cast(tile, tl.int64) * BLOCK_M", "tile * BLOCK_M", _NORM),
    _fault("row mask dropped in backward", "mask = row_mask[:, None] & col_mask[None, :]\n        mean", "mask = (rows >= 0)[:, None] & col_mask[None, :]\n        mean", _NORM),
    _fault("ids below zero counted as the first row's", "first = tl.load(starts_ptr + row)\n", "first = tl.load(starts_ptr + row, mask=row > 0, other=0)\n", _BACKWARD),
    # launcher
    _fault("no tokens: tables unset", "return *(dy.new_zeros((n, hidden) if n", "return *(dy.new_empty((n, hidden) if n"),
    _fault("dln alone not computed", "    if need_dz or need_dinputs_embeds or need_dln:\n", "    if need_dz or need_dinputs_embeds:\n"),
    _fault("position's rows for the segments", "(token_type_ids, segment_rows, -1)", "(token_type_ids, position_rows, -1)"),
)  # fmt: skip

SUITE = replace(of_op(FAULTS, "embedding_backward"), quick="not slow")
