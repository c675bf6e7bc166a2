"""Faults of the Triton cross-entropy."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite


def _fault(name: str, old: str, new: str) -> Fault:
    return Fault(name, "kernels/cross_entropy.py", old, new)


_FWD_LOAD = 'x = tl.load(x_ptr + cols, mask=cols < classes, other=float("-inf")).to(tl.float32)'
_BWD_LOAD = 'x = tl.load(x_at, mask=inside, other=float("-inf")).to(tl.float32)'

FAULTS = (
    _fault("ignored rows computed", "    if label != ignore_index:\n        x_ptr +=", "    if label != ignore_index - 1:\n        x_ptr +="),
    _fault("ignored rows given a gradient", "    if label != ignore_index:\n        x_at", "    if label != ignore_index - 1:\n        x_at"),
    _fault("label 0 ignored, too", "    if label != ignore_index:\n        x_ptr +=", "    if (label != ignore_index) & (label != 0):\n        x_ptr +="),
    _fault("gradient of ignored rows not written", "        tl.store(dx_at, tl.zeros((BLOCK_N,), dx_ptr.dtype.element_ty), mask=inside)", "        pass"),
    _fault("loss of ignored rows not written", "        tl.store(losses_ptr + row, 0.0)\n", ""),
    _fault("maximum of ignored rows not written", "        tl.store(lse_ptr + row, 0.0)\n", ""),
    _fault("32-bit rows of the logits", "row = tl.program_id(0).to(tl.int64)\n    label", "row = tl.program_id(0)\n    label"),
    _fault("32-bit rows in backward", "row = tl.program_id(0).to(tl.int64)\n    cols", "row = tl.program_id(0)\n    cols"),
    _fault("stride of the rows forgotten", "x_ptr += row * stride_units * ALIGN", "x_ptr += row * classes"),
    _fault("stride of the rows forgotten in backward", "x_at = x_ptr + row * stride_units * ALIGN", "x_at = x_ptr + row * classes"),
    _fault("gradient at the logits' stride", "dx_at = dx_ptr + row * class_units * ALIGN", "dx_at = dx_ptr + row * stride_units * ALIGN"),
    _fault("one class too many read", _FWD_LOAD, _FWD_LOAD.replace("cols < classes", "cols <= classes")),
    _fault("classes behind the last count as 0", _FWD_LOAD, _FWD_LOAD.replace("float(\"-inf\")", "0.0")),
    _fault("logits read beyond the row in backward", _BWD_LOAD, _BWD_LOAD.replace("mask=inside", "mask=cols <= classes")),
    _fault("gradient written beyond the row", "    inside = cols < classes\n    label", "    inside = cols <= classes\n    label"),
    _fault("one block of classes in forward", "for start in range(0, classes, BLOCK_N):", "for start in range(0, tl.minimum(classes, BLOCK_N), BLOCK_N):"),
    _fault("one block of classes in backward", "(rows, cdiv(classes, block_n))", "(rows, 1)"),
    _fault("maximum of the last block", "new_top = tl.maximum(top, tl.max(x, 0))", "new_top = tl.max(x, 0)"),
    _fault("maximum of the first block", "            top = new_top\n", "            top = tl.where(start == 0, new_top, top)\n"),
    _fault("sum not rescaled", "sums = sums * tl.exp(top - finite) + tl.exp(x - finite)", "sums = sums + tl.exp(x - finite)"),
    _fault("sum rescaled the other way", "sums = sums * tl.exp(top - finite) +", "sums = sums * tl.exp(finite - top) +"),
    _fault("sum of the last block", "sums = sums * tl.exp(top - finite) + tl.exp(x - finite)", "sums = tl.exp(x - finite)"),
    _fault("minus infinity not guarded", "finite = tl.where(new_top == float(\"-inf\"), 0.0, new_top)", "finite = new_top"),
    _fault("minus infinity at the start of a row", "        base = tl.where(base == float(\"-inf\"), 0.0, base)\n", ""),
    _fault("no maximum subtracted", "tl.exp(x - finite)", "tl.exp(x)"),
    _fault("log forgotten", "log_sum = tl.log(tl.sum(sums, 0))", "log_sum = tl.sum(sums, 0)"),
    _fault("log of base two", "log_sum = tl.log(tl.sum(sums, 0))", "log_sum = tl.log2(tl.sum(sums, 0))"),
    _fault("target of the next class", "tl.load(x_ptr + label, mask=known", "tl.load(x_ptr + label + 1, mask=known"),
    _fault("labels below 0 read", "known = (label >= 0) & (label < classes)", "known = label < classes"),
    _fault("labels above the last read", "known = (label >= 0) & (label < classes)", "known = label >= 0"),
    _fault("a wrong label costs nothing", "mask=known, other=float(\"nan\"))", "mask=known, other=0.0)"),
    _fault("target not less the maximum", "loss = log_sum - (1.0 - smoothing) * (target - top)", "loss = log_sum - (1.0 - smoothing) * target"),
    _fault("target's share not lessened", "loss = log_sum - (1.0 - smoothing) * (target - top)", "loss = log_sum - (target - top)"),
    _fault("smoothing forgotten", "        if SMOOTH:\n            loss -=", "        if not SMOOTH:\n            loss -="),
    _fault("smoothing not over the classes", "tl.sum(above, 0) / classes +", "tl.sum(above, 0) +"),
    _fault("smoothing counted from the first logit", "+ (base - top))", ")"),
    _fault("smoothing counts classes behind the last", "above += tl.where(cols < classes, x - base, 0.0)", "above += tl.where(cols < classes, x - base, 1.0)"),
    _fault("smoothing of the last block", "above += tl.where(", "above = tl.where("),
    _fault("sum of the maximum and the log saved", "tl.store(lse_ptr + n_rows + row, log_sum)", "tl.store(lse_ptr + n_rows + row, log_sum + top)"),
    _fault("maximum in the log's place", "        tl.store(lse_ptr + row, top)\n", "        tl.store(lse_ptr + row, log_sum)\n"),
    _fault("digits of the log lost", "p = tl.exp((x - tl.load(lse_ptr + row)) - tl.load(lse_ptr + n_rows + row))", "p = tl.exp(x - (tl.load(lse_ptr + row) + tl.load(lse_ptr + n_rows + row)))"),
    _fault("target of the next class in backward", "tl.where(cols == label,", "tl.where(cols == label + 1,"),
    _fault("target's share not lessened in backward", "tl.where(cols == label, 1.0 - smoothing, 0.0)", "tl.where(cols == label, 1.0, 0.0)"),
    _fault("smoothing forgotten in backward", "1.0 - smoothing, 0.0) + smoothing / classes", "1.0 - smoothing, 0.0)"),
    _fault("dloss forgotten", "tl.div_rn(tl.load(dloss_ptr), count)", "tl.div_rn(1.0, count)"),
    _fault("gradient not of the mean", "* tl.div_rn(tl.load(dloss_ptr), count)", "* tl.load(dloss_ptr)"),
    _fault("gradient of the mean of all rows", "count = tl.load(count_ptr).to(tl.float32)", "count = n_rows.to(tl.float32)"),
    _fault("mean of all rows", "tl.maximum(count, 1).to(tl.float32)))", "tl.maximum(n_rows, 1).to(tl.float32)))"),
    _fault("no labelled row divides by zero", "tl.maximum(count, 1).to(tl.float32)))", "count.to(tl.float32)))"),
    _fault("losses of the last block", "total += tl.load(losses_ptr", "total = tl.load(losses_ptr"),
    _fault("count of the last block", "counts += (inside", "counts = (inside"),
    _fault("rows behind the last counted", "counts += (inside & (labels != ignore_index))", "counts += (labels != ignore_index)"),
    _fault("losses read beyond their end", "inside = rows < n_rows", "inside = rows <= n_rows"),
    _fault("rows claimed to lie on 16 elements", "align = math.gcd(16, classes, logits.stride(0))\n        launch(\n            _cross_entropy_fwd", "align = 16\n        launch(\n            _cross_entropy_fwd"),
    _fault("stride not asked for alignment", "align = math.gcd(16, classes, logits.stride(0))\n        launch(\n            _cross_entropy_bwd", "align = math.gcd(16, classes)\n        launch(\n            _cross_entropy_bwd"),
    _fault("gradient in float32", "dlogits = torch.empty((rows, classes), dtype=logits.dtype", "dlogits = torch.empty((rows, classes), dtype=torch.float32"),
    _fault("classes told apart by the compiler", "_FIXED_TYPES = (\"stride_units\", \"n_rows\", \"class_units\", \"ignore_index\")", "_FIXED_TYPES = (\"stride_units\", \"n_rows\", \"ignore_index\")"),
    _fault("a block of each number of classes", "block_n = max(128, min(4096, next_power_of_2(classes)))", "block_n = max(4, min(4096, next_power_of_2(classes)))"),
)  # fmt: skip

# what catches most comes first
_TESTS = (
    "ignored_rows_are_not_read",
    "no_rows",
    "small_integers_are_exact",
    "ignore_index",
    "strided_rows_with_poisoned_padding",
    "a_label_that_is_no_class_makes_the_loss_nan",
    "large_logits_keep_their_digits",
    "minus_infinity_rules_a_class_out",
    "the_number_of_classes_compiles_nothing_anew",
    "alignments_are_what_the_sizes_have",
    "rows_beyond_a_block_of_the_sum",
    "offsets_beyond_2_to_31_elements",
    "edges_of_blocks",
    "the_largest_may_stand_in_any_block",
)

SUITE = Suite(
    faults=FAULTS,
    tests=tuple(f"tests/triton/test_cross_entropy.py::test_{name}" for name in _TESTS),
    timeout_s=600.0,
    environment={"TRITON_INTERPRET": "1"},
)
