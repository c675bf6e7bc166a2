"""Faults of the Triton linear, its activations and its look-up of configs."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_KERNEL = "kernels/linear.py"
_FORWARD = "kernels/linear_forward.py"
_ACTIVATION = "kernels/activation.py"
_TUNING = "kernels/tuning.py"


def _fault(name: str, old: str, new: str, file: str = _KERNEL) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # tile order
    _fault("last group taken for a full one", "height = tl.minimum(row_tiles - first_row, GROUP_M)", "height = GROUP_M", _FORWARD),
    _fault("row within the group forgotten", "return first_row + within % height,", "return first_row,", _FORWARD),
    _fault("column tile from the group's full height", "within // height\n", "within // GROUP_M\n", _FORWARD),
    _fault("every program takes every tile", "tl.num_programs(0), flatten=TMA)", "1, flatten=TMA)", _FORWARD),
    _fault("last tile forgotten", "row_tiles * COL_TILES, tl.num", "row_tiles * COL_TILES - 1, tl.num", _FORWARD),
    _fault("column tiles rounded down", "(OUT + BLOCK_N - 1) // BLOCK_N", "(OUT + BLOCK_N // 2) // BLOCK_N", _FORWARD),
    # masks and offsets
    _fault("row beyond the last read", "tl.minimum(row_start + tl.arange(0, BLOCK_M), n_rows - 1)", "(row_start + tl.arange(0, BLOCK_M))", _FORWARD),
    _fault("column beyond the last read", "tl.minimum(col_start + tl.arange(0, BLOCK_N), OUT - 1)", "(col_start + tl.arange(0, BLOCK_N))", _FORWARD),
    _fault("int32 rows of x", "n_rows - 1).to(tl.int64)", "n_rows - 1)", _FORWARD),
    _fault("int32 rows of weight", "OUT - 1).to(tl.int64)", "OUT - 1)", _FORWARD),
    _fault("int32 rows of y", "at = rows.to(tl.int64)[:, None] * y_stride", "at = rows[:, None] * y_stride", _FORWARD),
    _fault("int32 rows of the residual", "residual_ptr + rows.to(tl.int64)[:, None]", "residual_ptr + rows[:, None]", _FORWARD),
    _fault("row mask dropped", "mask = (rows < n_rows)[:, None] & (cols < OUT)[None, :]", "mask = (rows >= 0)[:, None] & (cols < OUT)[None, :]", _FORWARD),
    _fault("column mask off by one", "& (cols < OUT)[None, :]", "& (cols < OUT - 1)[None, :]", _FORWARD),
    _fault("depth mask dropped from x", "mask=inside[None, :], other=0.0", "mask=(ks >= 0)[None, :], other=0.0", _FORWARD),
    _fault("depth mask off by one", "inside = ks < IN - k", "inside = ks < IN - k - 1", _FORWARD),
    _fault("always read as a whole number of blocks", "if IN % BLOCK_K == 0:", "if IN % 8 == 0:", _FORWARD),
    _fault("stride of weight forgotten", "outs[None, :] * weight_stride", "outs[None, :] * IN", _FORWARD),
    _fault("stride of x forgotten", "rows[:, None] * x_stride", "rows[:, None] * IN", _FORWARD),
    _fault("stride of the residual swapped for y's", "[:, None] * residual_stride", "[:, None] * y_stride", _FORWARD),
    _fault("first block of weight at every depth", "weight_tile = weight.load([col_start, k])", "weight_tile = weight.load([col_start, 0])", _FORWARD),
    _fault("first block of x at every depth", "x_tile = tl.load(x_at + k)  #", "x_tile = tl.load(x_at)  #", _FORWARD),
    # accumulator and its parts
    _fault("accumulator kept from the last tile", "        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n",
           "        if tile == tl.program_id(0):\n            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n", _FORWARD),
    _fault("only the last block of depth counts", "weight_tile.T, acc, input", "weight_tile.T, acc * 0, input", _FORWARD),
    _fault("even and odd columns for halves", "tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))\n    return tl.split(tl.permute(cut, (0, 2, 1)))",
           "tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2))\n    return tl.split(cut)", _FORWARD),
    _fault("right half over the left", "            col_start + HALF,\n", "            col_start,\n", _FORWARD),
    # epilogue
    _fault("bias forgotten", "acc += _bias(bias_ptr, col_start", "acc + _bias(bias_ptr, col_start", _FORWARD),
    _fault("bias forgotten in float32", "acc += _bias(bias_ptr, cols, OUT)", "acc + _bias(bias_ptr, cols, OUT)", _FORWARD),
    _fault("bias before the product in float32", "bias_first = dtype != torch.float32 and capability[0] != 10", "bias_first = capability[0] != 10"),
    _fault("bias before the product on capability 10", "bias_first = dtype != torch.float32 and capability[0] != 10", "bias_first = dtype != torch.float32"),
    _fault("the config's place of the bias ignored", "BIAS_FIRST=config.bias_first", "BIAS_FIRST=False"),
    _fault("bias twice", "if bias_ptr is not None and not BIAS_FIRST:", "if bias_ptr is not None:", _FORWARD),
    _fault("bias of the first columns", "_bias(bias_ptr, col_start + tl.arange(0, BLOCK_N), OUT)", "_bias(bias_ptr, tl.arange(0, BLOCK_N), OUT)", _FORWARD),
    _fault("bias after the activation is saved", "pre.store([row_start, col_start], acc.to(DTYPE))", "pre.store([row_start, col_start], activate(acc, ACTIVATION, False, False).to(DTYPE))", _FORWARD),
    _fault("residual before the activation", "        acc = activate(acc, ACTIVATION, FEW_DIGITS=", "        if residual_ptr is not None:\n            acc += tl.load(residual_ptr + rows.to(tl.int64)[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)\n            residual_ptr = None\n        acc = activate(acc, ACTIVATION, FEW_DIGITS=", _FORWARD),
    _fault("activation of the rounded product", "acc = activate(acc, ACTIVATION,", "acc = activate(acc.to(DTYPE).to(tl.float32), ACTIVATION,", _FORWARD),
    _fault("few digits in every dtype", "few = DTYPE == tl.bfloat16", "few = True", _FORWARD),
    _fault("y stored one row down", "y.store([row_start, col_start]", "y.store([row_start + 1, col_start]", _FORWARD),
    # activations
    _fault("tanh form for erf", '            z = gelu(z, FEW_DIGITS)', '            z = _divided(z, 1.0 + _exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)), FEW_DIGITS)', _ACTIVATION),
    _fault("cheap gelu in float32", "HALF_PRECISION: tl.constexpr = DTYPE != tl.float32", "HALF_PRECISION: tl.constexpr = True", _FORWARD),
    _fault("exact gelu not given", "CHEAP=HALF_PRECISION and not EXACT", "CHEAP=HALF_PRECISION", _FORWARD),
    _fault("exact gelu not asked for", "EXACT=activation_kernels.EXACT_GELU", "EXACT=False"),
    _fault("exact gelu always", "EXACT=activation_kernels.EXACT_GELU", "EXACT=True"),
    _fault("any word asks for exact gelu", 'return wanted == "1"', 'return wanted != ""', _ACTIVATION),
    _fault("cheap gelu of any size", "u = _magnitude(z, 16.0 if", "u = _magnitude(z, 60.0 if", _ACTIVATION),
    _fault("cheap gelu's digit in bfloat16", "r = r * u - 0.47983377", "r = r * u - 0.48083377", _ACTIVATION),
    _fault("cheap gelu of any size in float16", "if FEW_DIGITS else 15.0)", "if FEW_DIGITS else 60.0)", _ACTIVATION),
    _fault("cheap gelu's digit in float16", "r = r * u - 0.472460395", "r = r * u - 0.473460395", _ACTIVATION),
    _fault("cheap gelu's first digit in float16", "r = 0.00318999 * u", "r = 0.00308999 * u", _ACTIVATION),
    _fault("cheap gelu's last term", "r = r * u - 1.0005708", "r = r * u - 1.0", _ACTIVATION),
    _fault("bfloat16's cheap gelu in float16", "        r = 0.00318999 * u - 0.040898229\n        r = r * u - 0.472460395\n        r = r * u - 1.14547481\n        r = r * u - 1.0005708\n", "        r = 0.00263501 * u - 0.03713265\n        r = r * u - 0.479834\n        r = r * u - 1.14143745\n        r = r * u - 1.00072505\n", _ACTIVATION),
    _fault("cheap gelu without u", "tl.maximum(z, 0.0) - u * tl.exp2(r)", "tl.maximum(z, 0.0) - tl.exp2(r)", _ACTIVATION),
    _fault("a coefficient's sign", "p = p * t + 0.11274342", "p = p * t - 0.11274342", _ACTIVATION),
    _fault("a coefficient's digit in float32", "p = p * t + 0.10464792", "p = p * t + 0.10465392", _ACTIVATION),
    _fault("u of any size", "tl.minimum(tl.abs(z), MOST, propagate_nan=tl.PropagateNan.ALL)", "tl.abs(z)", _ACTIVATION),
    _fault("NaN becomes a number", "(tl.abs(z), MOST, propagate_nan=tl.PropagateNan.ALL)", "(tl.abs(z), MOST)", _ACTIVATION),
    _fault("relu drops NaN", "tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)", "tl.maximum(z, 0.0)", _ACTIVATION),
    _fault("silu without its sign", "_exp(-z)", "_exp(z)", _ACTIVATION),
    _fault("tanh's polynomial too far out", "tl.where(u < 0.625,", "tl.where(u < 1.0,", _ACTIVATION),
    _fault("tanh's coefficient", "p * square + 0.133314416", "p * square + 0.133344416", _ACTIVATION),
    _fault("tanh without its sign far out", "tl.where(z < 0, -far, far)", "far", _ACTIVATION),
    _fault("tanh by the logistic function alone", "tl.where(u < 0.625,", "tl.where(u < 0.0,", _ACTIVATION),
    _fault("root for the quotient", "x = x * root * root", "x = x * root", _ACTIVATION),
    _fault("few digits' root of another polynomial", "0.09301 * square + (0.5698 * u", "0.11038 * square + (0.6004 * u", _ACTIVATION),
    _fault("tail of the wrong sign", "return tl.maximum(z, 0.0) - u * t * p", "return tl.maximum(z, 0.0) + u * t * p", _ACTIVATION),
    _fault("cube forgotten", "0.044715 * z * z * z", "0.044715 * z * z", _ACTIVATION),
    # launcher and configs
    _fault("pre saved without an activation", "if save and activation is not None else", "if save else"),
    _fault("pre not saved", "if save and activation is not None else", "if False else"),
    _fault("TMA for rows that are not aligned", "t.stride(0) * t.element_size() % 16 == 0", "t.stride(0) > 0"),
    _fault("TMA from any start", "t.data_ptr() % 16 == 0", "t.data_ptr() >= 0"),
    _fault("TMA of a column with a stride", "        and t.stride(1) == 1\n", ""),
    _fault("TMA of rows that overlap", "        and t.stride(0) >= t.shape[1]\n", ""),
    _fault("TMA of float32 on a GPU", "if dtype == torch.float32 or not aligned:", "if not aligned:"),
    _fault("tables for matrices that are not aligned", "tuning.bucket(rows)) if aligned else None", "tuning.bucket(rows))"),
    _fault("table never read", "    if found is not None:\n        return Config(**found)\n", ""),
    _fault("TMA where there is none", "if capability[0] in (9, 10):\n        return (\n", "if capability[0] in (8, 9, 10):\n        return (\n"),
    _fault("TMA of the newest GPUs forgotten", "if capability[0] == 12:", "if capability[0] == 11:"),
    _fault("candidates of any size", "c.num_stages >= 2 and shared_memory(c, dtype, capability) <= room", "c.num_stages >= 2"),
    _fault("candidates of one stage", "c.num_stages >= 2 and", "c.num_stages >= 1 and"),
    _fault("ladder not among the candidates", "dict.fromkeys((*found, *fit))", "dict.fromkeys(fit)"),
    _fault("room of another GPU", "if capability in ((8, 0), (8, 7)) else 99", "if capability[0] == 8 else 99"),
    _fault("every stage in shared memory", "stages = max(1, stages - 1)", "stages = max(1, stages)"),
    _fault("parts of the epilogue take no room", "elements += 2 * config.block_m", "elements += 0 * config.block_m"),
    _fault("room in elements", "return elements * dtype.itemsize + 1024", "return elements * 2 + 1024"),
    _fault("programs for the device forgotten", "device_of(x.device).multiprocessors * config.per_multiprocessor", "device_of(x.device).multiprocessors"),
    _fault("the slowest tiles", "return min(ladder(", "return max(ladder("),
    _fault("waves not counted", "triton.cdiv(tiles, device.multiprocessors) * (area", "tiles * (area"),
    _fault("operands cost nothing", "area + OPERAND_WORK * edges", "area + 0 * edges"),
    _fault("rows not counted in units", "        counted(x.shape[0]),\n", "        x.shape[0],\n"),
    _fault("bucket of the rows themselves", "return max(0, rows - 1).bit_length()", "return rows", _TUNING),
    _fault("first bucket for every length", "buckets[nearest]", "buckets[min(buckets)]", _TUNING),
    _fault("table of another GPU", 'TUNED / ("-".join(re.findall(r"[a-z0-9]+", name.lower())) + ".json")', 'TUNED / "nvidia-test-gpu-x.json"', _TUNING),
)  # fmt: skip

# what catches most comes first; node ids keep their order, a whole file would take its own
_TESTS = (
    "exact_on_small_integers",
    "the_heuristic_counts_tiles_of_the_busiest_multiprocessor",
    "only_devices_with_tma_and_aligned_half_precision_get_tma",
    "candidates_are_the_ladder_and_what_fits",
    "shared_memory_counts_stages_and_parts",
    "the_table_of_a_gpu_stands_before_the_heuristic",
    "the_config_that_is_found_is_launched",
    "many_lengths_meet_few_configs",
    "a_start_that_is_not_aligned",
    "single_columns_whose_stride_says_nothing",
    "one_row_expanded_to_many",
    "nan_stays_in_its_row_and_column",
    "tile_order",
    "activations_of_what_is_not_finite",
    "activations_in_float32",
    "cheap_gelu",
    "cheap_gelu_at_its_ends",
    "cheap_gelu_in_every_stretch",
    "exact_gelu_is_asked_for_by_the_environment",
    "float32_adds_the_bias_last",
    "activations_are_correctly_rounded",
    "the_activation_takes_the_unrounded_product",
    "strided_rows_with_poisoned_padding",
    "offsets_beyond_2_to_31_elements",
    "parts_of_the_accumulator",
    "what_forward_returns",
    "no_rows",
    "repeats_are_bit_equal_without_atomics",
)

SUITE = Suite(
    faults=FAULTS,
    tests=tuple(f"tests/triton/test_linear.py::test_{name}" for name in _TESTS),
    timeout_s=600.0,
    environment={"TRITON_INTERPRET": "1"},
)
