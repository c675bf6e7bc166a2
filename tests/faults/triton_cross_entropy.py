"""Faults of the Triton cross-entropy."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_fault = faults_of("kernels/cross_entropy.py")

_FWD_LOAD = 'x = tl.load(x_ptr + cols, mask=cols < classes, other=float("-inf")).to(tl.float32)'

FAULTS = (
    _fault("ignored rows computed", "    if label != ignore_index:\n        x_ptr +=", "    if label != ignore_index - 1:\n        x_ptr +="),
    _fault("ignored rows given a gradient", "    if label != ignore_index:\n        x_at", "    if label != ignore_index - 1:\n        x_at"),
    _fault("label 0 ignored, too", "    if label != ignore_index:\n        x_ptr +=", "    if (label != ignore_index) & (label != 0):\n        x_ptr +="),
    _fault("gradient of ignored rows not written", "        tl.store(dx_at, tl.zeros((BLOCK_N,), dx_ptr.dtype.element_ty), mask=inside)", "        pass"),
    _fault("32-bit rows of the logits", "row = tl.program_id(0).to(tl.int64)\n    label", "row = tl.program_id(0)\n    label"),
    _fault("32-bit rows in backward", "row = tl.program_id(0).to(tl.int64)\n    cols", "row = tl.program_id(0)\n    cols"),
    _fault("stride of the rows forgotten", "x_ptr += row * stride_units * ALIGN", "x_ptr += row * classes"),
    _fault("gradient at the logits' stride", "dx_at = dx_ptr + row * class_units * ALIGN", "dx_at = dx_ptr + row * stride_units * ALIGN"),
    _fault("one class too many read", _FWD_LOAD, _FWD_LOAD.replace("cols < classes", "cols <= classes")),
    _fault("classes behind the last count as 0", _FWD_LOAD, _FWD_LOAD.replace("float(\"-inf\")", "0.0")),
    _fault("gradient written beyond the row", "    inside = cols < classes\n    label", "    inside = cols <= classes\n    label"),
    _fault("one block of classes in forward", "for start in range(0, classes, BLOCK_N):", "for start in range(0, tl.minimum(classes, BLOCK_N), BLOCK_N):"),
    _fault("one block of classes in backward", "(rows, cdiv(classes, block_n))", "(rows, 1)"),
    _fault("maximum of the last block", "new_top = tl.maximum(top, tl.max(x, 0))", "new_top = tl.max(x, 0)"),
    _fault("sum not rescaled", "sums = sums * tl.exp(top - finite) + tl.exp(x - finite)", "sums = sums + tl.exp(x - finite)"),
    _fault("minus infinity not guarded", "finite = tl.where(new_top == float(\"-inf\"), 0.0, new_top)", "finite = new_top"),
    _fault("minus infinity at the start of a row", "        base = tl.where(base == float(\"-inf\"), 0.0, base)\n", ""),
    _fault("log forgotten", "log_sum = tl.log(tl.sum(sums, 0))", "log_sum = tl.sum(sums, 0)"),
    _fault("target of the next class", "tl.load(x_ptr + label, mask=known", "tl.load(x_ptr + label + 1, mask=known"),
    _fault("labels below 0 read", "known = (label >= 0) & (label < classes)", "known = label < classes"),
    _fault("labels above the last read", "known = (label >= 0) & (label < classes)", "known = label >= 0"),
    _fault("a wrong label costs nothing", "mask=known, other=float(\"nan\"))", "mask=known, other=0.0)"),
    _fault("target not less the maximum", "loss = log_sum - (1.0 - smoothing) * (target - top)", "loss = log_sum - (1.0 - smoothing) * target"),
    _fault("target's share not lessened", "loss = log_sum - (1.0 - smoothing) * (target - top)", "loss = log_sum - (target - top)"),
    _fault("smoothing forgotten", "        if SMOOTH:\n            loss -=", "        if not SMOOTH:\n            loss -="),
    _fault("smoothing not over the classes", "tl.sum(above, 0) / classes +", "tl.sum(above, 0) +"),
    _fault("sum of the maximum and the log saved", "tl.store(lse_ptr + n_rows + row, log_sum)", "tl.store(lse_ptr + n_rows + row, log_sum + top)"),
    _fault("digits of the log lost", "p = tl.exp((x - tl.load(lse_ptr + row)) - tl.load(lse_ptr + n_rows + row))", "p = tl.exp(x - (tl.load(lse_ptr + row) + tl.load(lse_ptr + n_rows + row)))"),
    _fault("target's share not lessened in backward", "tl.where(cols == label, 1.0 - smoothing, 0.0)", "tl.where(cols == label, 1.0, 0.0)"),
    _fault("dloss forgotten", "tl.div_rn(tl.load(dloss_ptr), count)", "tl.div_rn(1.0, count)"),
    _fault("gradient of the mean of all rows", "count = tl.load(count_ptr).to(tl.float32)", "count = n_rows.to(tl.float32)"),
    _fault("no labelled row divides by zero", "tl.maximum(count, 1).to(tl.float32)))", "count.to(tl.float32)))"),
    _fault("rows behind the last counted", "counts += (inside & (labels != ignore_index))", "counts += (labels != ignore_index)"),
    _fault("losses read beyond their end", "inside = rows < n_rows", "inside = rows <= n_rows"),
    _fault("stride not asked for alignment", "align = math.gcd(16, classes, logits.stride(0))\n        launch(\n            _cross_entropy_bwd", "align = math.gcd(16, classes)\n        launch(\n            _cross_entropy_bwd"),
    _fault("gradient in float32", "dlogits = torch.empty((rows, classes), dtype=logits.dtype", "dlogits = torch.empty((rows, classes), dtype=torch.float32"),
    _fault("classes told apart by the compiler", "_FIXED_TYPES = (\"stride_units\", \"n_rows\", \"class_units\", \"ignore_index\")", "_FIXED_TYPES = (\"stride_units\", \"n_rows\", \"ignore_index\")"),
)  # fmt: skip

SUITE = of_op(FAULTS, "cross_entropy")
