"""Faults of scores of distances in the Triton attention."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, interpreted

_KERNEL = "kernels/attention_relative.py"
_FORWARD = "kernels/attention.py"
_BACKWARD = "kernels/attention_backward.py"
_TILES = "kernels/attention_backward_tiles.py"
_DBIAS = "kernels/attention_dbias.py"
_fault = faults_of(_KERNEL)

FAULTS = (
    # scores
    _fault("columns of the opposite distances", "distance = other[None, :] - own[:, None]", "distance = own[:, None] - other[None, :]"),
    _fault("keys' columns of the opposite distances", "distance = own[:, None] - other[None, :]", "distance = other[None, :] - own[:, None]"),
    _fault("columns one distance off", "columns_ptr + (reach + distance)", "columns_ptr + (reach + distance + 1)"),
    _fault("far positions beyond the table", "distance = tl.minimum(tl.maximum(distance, -reach), reach)", "distance = tl.maximum(distance, -reach)"),
    _fault("positions of the first sequence", "positions_ptr += sequence * positions_stride", "positions_ptr += 0 * positions_stride"),
    _fault("rows past the sequence read", "rows = tl.minimum(first_row + tl.arange(0, BLOCK_M), length - 1)", "rows = tl.minimum(first_row + tl.arange(0, BLOCK_M), length)"),
    _fault("keys past the sequence read", "keys = tl.minimum(first_key + tl.arange(0, BLOCK_N), length - 1)", "keys = first_key + tl.arange(0, BLOCK_N)"),
    _fault("queries of the first sequence", "(start + rows)[:, None] * query_stride", "rows.to(tl.int64)[:, None] * query_stride"),
    _fault("queries of the first head", "query_ptr + head * query_head_stride", "query_ptr + 0 * query_head_stride"),
    _fault("keys by the queries' stride", "(start + keys)[:, None] * key_stride", "(start + keys)[:, None] * query_stride"),
    _fault("bias of the first head", "bias_ptr + head * bias_head_stride", "bias_ptr + 0 * bias_head_stride"),
    _fault("keys' tile not turned", "(found if TRANSPOSED else tl.trans(found))", "(tl.trans(found) if TRANSPOSED else found)"),
    _fault("strides of key for those of query", "for t in (query, key) for n in", "for t in (key, query) for n in"),
    _fault("folded beside scores of distances", "folded = bias is None and relative is None and softmax_scale > 0", "folded = bias is None and softmax_scale > 0", _FORWARD),
    _fault("folded in backward", "folded = bias is None and relative is None and softmax_scale > 0", "folded = bias is None and softmax_scale > 0", _BACKWARD),
    _fault("rows past the sequence not masked", "allowed = allowed & (rows < length)", "allowed = allowed & (rows < length + 100)", _TILES),
    _fault("scores of distances scaled", "        scores *= scale\n    scores = _with_distances(scores, relative, first_row, first_key, length, BLOCK_M, BLOCK_N, TRANSPOSED)\n", "        pass\n    scores = _with_distances(scores, relative, first_row, first_key, length, BLOCK_M, BLOCK_N, TRANSPOSED)\n    scores *= scale\n", _TILES),
    # gradients
    _fault("dS of a bias of keys", "any(need_scores[:2]) or (need_dbias and bias.shape[0] > 1)", "any(need_scores[:2])", _BACKWARD),
    _fault("dS of the bias's rows", "**shared | {\"BIAS_HAS_ROWS\": shape[2] > 1}", "**shared", _BACKWARD),
    # gradients with positions
    _fault("dS of a bias by positions summed first", "apart = placed or any(need_scores[:2])", "apart = any(need_scores[:2])", _BACKWARD),
    _fault("gradients by positions of the first sequence", "positions_ptr += wide_sequence * positions_stride", "positions_ptr += 0 * wide_sequence"),
    _fault("positions at the wrong stride", "*(nheads, size, ncolumns, n_tiles, size, reach)", "*(nheads, size, ncolumns, n_tiles, size + 1, reach)"),
    _fault("positions of the first rows", "own = tl.minimum(first + tl.arange(0, BLOCK_M), length - 1)", "own = tl.minimum(tl.arange(0, BLOCK_M), length - 1)"),
    _fault("positions past the sequence", "others = tl.minimum(beside + tl.arange(0, BLOCK_M), length - 1)", "others = beside + tl.arange(0, BLOCK_M)"),
    _fault("keys' columns as the queries'", "column = _columns(columns_ptr, positions_ptr, reach, own, at, BACK)", "column = _columns(columns_ptr, positions_ptr, reach, own, at, False)"),
    _fault("tiles of one column left out", "(least < first_column + BLOCK_C) & (most >= first_column)", "(least < first_column + BLOCK_C) & (most > first_column)"),
    _fault("tiles of the last column left out", "(least < first_column + BLOCK_C) & (most >= first_column)", "(least < first_column + BLOCK_C - 1) & (most >= first_column)"),
    _fault("tiles looked for by their first keys", "least, most = tl.min(tl.min(found, 1), 0), tl.max(tl.max(found, 1), 0)", "least, most = tl.min(tl.min(found, 1), 0), tl.min(tl.max(found, 1), 0)"),
    _fault("a tile's last key left out", "tl.minimum(beside + BLOCK_M, length)):", "tl.minimum(beside + BLOCK_M - 1, length)):"),
    _fault("the last key left out", "tl.minimum(beside + BLOCK_M, length)):", "tl.minimum(beside + BLOCK_M, length - 1)):"),
    _fault("keys past the sequence added", "tl.minimum(beside + BLOCK_M, length)):", "beside + BLOCK_M):"),
    _fault("dS of the first key", "ds = tl.load(row_ptr + other,", "ds = tl.load(row_ptr + beside,"),
    _fault("the last key alone", "acc += tl.where(column == columns[None, :], ds, 0.0)", "acc = tl.where(column == columns[None, :], ds, 0.0)"),
    # gradients without
    _fault("the last distance of a column left out", "for which in range(tl.max(count, 0)):", "for which in range(tl.max(count, 0) - 1):"),
    _fault("distances of the next columns", "there = which < count", "there = which <= count"),
    _fault("keys' gradient of the opposite distances", "                if BACK:\n                    distance = -distance\n", ""),
    _fault("dS of keys not turned", "by_column(ds.mT.contiguous(), True)", "by_column(ds, True)"),
    _fault("gradients of a neighbouring sequence", "(others >= 0) & (others < length)", "(others >= 0)"),
    _fault("rows of the first sequence", "(start.to(tl.int64) + rows) * nheads + head", "(rows + 0 * start.to(tl.int64)) * nheads + head"),
    _fault("rows past the last sequence not zeroed", "out = ds.new_zeros((total, nheads, ncolumns))", "out = ds.new_empty((total, nheads, ncolumns))"),
    _fault("columns of the wrong end of the table", "columns[reach - size + 1 : reach + size]", "columns[: 2 * size - 1]"),
    _fault("gradient of the summed batch by its sequences", "    if batch < cu_seqlens.shape[0] - 1:\n", "    if False:\n"),
)  # fmt: skip

SUITE = interpreted(
    FAULTS,
    "tests/triton/test_attention_relative.py",
    "tests/triton/test_attention_error_rule.py",
    *("-k", "relative"),
)
