"""Faults of the Triton 8-bit product and of the pass that rounds its rows."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_fault = faults_of("kernels/linear_int8.py")

FAULTS = (
    # rows
    _fault("rounding and sum in one", "    product = tl.fma(a, b, tl.zeros_like(a))\n    return (product + 12582912.0) - 12582912.0", "    return tl.fma(a, b, tl.full(a.shape, 12582912.0, tl.float32)) - 12582912.0"),
    _fault("halves up", "return (product + 12582912.0) - 12582912.0", "return tl.floor(product + 0.5)"),
    _fault("rows divided by the step", "inv = tl.div_rn(1.0, tl.where(bad, 1.0, step))", "inv = 255.0 / tl.where(bad, 255.0, hi - lo)"),
    _fault("range without 0 below", "lo = tl.minimum(tl.min(first, 1), 0.0)", "lo = tl.min(first, 1)"),
    _fault("range without 0 above", "hi = tl.maximum(tl.max(first, 1), 0.0)", "hi = tl.max(first, 1)"),
    _fault("least of the first block", "        lo = tl.minimum(lo, tl.min(x, 1))\n", ""),
    _fault("largest of the first block", "        hi = tl.maximum(hi, tl.max(x, 1))\n", ""),
    _fault("NaN of later blocks", "        spoiled = tl.maximum(spoiled, tl.max(_not_finite(x), 1))\n", ""),
    _fault("NaN unseen", "bad = (spoiled != 0) | (step", "bad = (spoiled > 1) | (step"),
    _fault("infinity unseen", '| (step == float("inf"))', '| (step == float("-inf"))'),
    _fault("infinity within a range unseen", '(x != x) | (tl.abs(x) == float("inf"))', "x != x"),
    _fault("one range without 0 below", "lo = tl.minimum(tl.zeros((BLOCK_M,), tl.float32), tl.load(range_ptr))", "lo = tl.zeros((BLOCK_M,), tl.float32) + tl.load(range_ptr)"),
    _fault("one range without 0 above", "hi = tl.maximum(tl.zeros((BLOCK_M,), tl.float32), tl.load(range_ptr + 1))", "hi = tl.zeros((BLOCK_M,), tl.float32) + tl.load(range_ptr + 1)"),
    _fault("one range of one end", "tl.load(range_ptr + 1)", "-tl.load(range_ptr)"),
    _fault("one range for narrow rows alone", "    if range_ptr is not None:\n", "    if range_ptr is not None and BLOCK_N >= IN:\n"),
    _fault("step of a bad row", 'tl.where(bad, float("nan"), step), mask', "step, mask"),
    _fault("254 steps", "step = tl.div_rn(hi - lo, 255.0)", "step = tl.div_rn(hi - lo, 254.0)"),
    _fault("no smallest step", "tl.where(step < 1.1754943508222875e-38, 1.0, step)", "tl.where(step == 0.0, 1.0, step)"),
    _fault("zero forgotten", "x.shape)) + zero[:, None]", "x.shape))"),
    _fault("offset of 127", "(128.0 - zero)", "(127.0 - zero)"),
    _fault("bytes not clamped", "tl.minimum(tl.maximum(tl.where(u == u, u, 0.0), 0.0), 255.0)", "tl.where(u == u, u, 0.0)"),
    _fault("smooth of the first columns", "tl.load(smooth_ptr + cols, mask", "tl.load(smooth_ptr + cols - start, mask"),
    _fault("smooth past the last", "mask=cols < IN, other=0.0)[None, :]", "mask=cols <= IN, other=0.0)[None, :]"),
    _fault("later columns in place of the first", "_store_bytes(v_ptr, x, inv, zero, rows, start, n_rows, IN, B", "_store_bytes(v_ptr, x, inv, zero, rows, 0, n_rows, IN, B"),
    _fault("rows of x side by side", "rows[:, None] * x_stride", "rows[:, None] * IN"),
    _fault("32-bit rows", "rows = tl.program_id(0).to(tl.int64) * BLOCK_M", "rows = tl.program_id(0) * BLOCK_M"),
    # product
    _fault("depth past the last", "inside = ks < IN - k", "inside = ks <= IN - k"),
    _fault("x does not advance", "v = tl.load(v_at + k,", "v = tl.load(v_at,"),
    _fault("weight does not advance", "tl.load(weight_at + (ACTIVE * IN + k)", "tl.load(weight_at + (ACTIVE * IN)"),
    _fault("the gate is the active half", "tl.load(weight_at + (OTHER * IN + k)", "tl.load(weight_at + (ACTIVE * IN + k)"),
    _fault("rows past the last", "tl.minimum(rows, n_rows - 1)", "tl.minimum(rows, n_rows)"),
    _fault("columns past the last", "tl.minimum(cols, OUT - 1)", "tl.minimum(cols, OUT + OUT)"),
    _fault("sums in float", "y = acc.to(tl.float32) * (step", "y = acc.to(tl.float16).to(tl.float32) * (step"),
    _fault("channel sums not added", "acc += offset[:, None] * tl.load", "acc += 0 * offset[:, None] * tl.load"),
    _fault("scale of another half", "tl.load(scale_ptr + channels,", "tl.load(scale_ptr + channels % 16,"),
    _fault("bias forgotten", "    if bias_ptr is not None:\n        y += ", "    if bias_ptr is not None:\n        y += 0 * "),
    _fault("bias of the active half for both", "y *= _floats(gate, sums_ptr, scale_ptr, bias_ptr, offset, step, OTHER + cols", "y *= _floats(gate, sums_ptr, scale_ptr, bias_ptr, offset, step, ACTIVE + cols"),
    _fault("the gate activated instead", "y = activate(y, ACTIVATION,", "y = activate(y, ACTIVATION if OTHER is None else None,"),
    _fault("cheap gelu in float32", "CHEAP=HALF and not EXACT)", "CHEAP=not EXACT)"),
    _fault("rows of the tail stored", "mask=there[:, None] & inside[None, :])", "mask=inside[None, :])"),
    # launchers
    _fault("too few programs", "(cdiv(rows, block_m) * cdiv(columns, block_n),)", "(cdiv(rows, block_m),)"),
    _fault("halves exchanged", 'ACTIVE=columns if gated == "second" else 0', 'ACTIVE=columns if gated == "first" else 0'),
    _fault("panels of another weight", "panels is None or panels.numel() != 4 * out", "panels is None"),
    _fault("sums wrap", "weight.sum(1, dtype=torch.int32)", "weight.sum(1, dtype=torch.int16).int()"),
    _fault("rounded rows cut", "        _int8_rows_kernel,\n        (cdiv(rows, block_m),)", "        _int8_rows_kernel,\n        (rows // block_m or 1,)"),
)  # fmt: skip

SUITE = of_op(FAULTS, "linear_int8")
