"""Faults of the tables of tuned configs, of what may be in them, and of the tool that writes them."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_TUNE = "bench/tune.py"
_ENTRIES = "bench/lib/entries.py"
_TUNING = "kernels/tuning.py"
_LINEAR = "kernels/linear.py"
_LINEAR_BACKWARD = "kernels/linear_backward.py"
_NORM = "kernels/layer_norm.py"
_BLOCK = "kernels/feed_forward.py"
_BACKWARD = "kernels/attention_backward.py"
_FEW = "kernels/linear_norm.py"


def _fault(file: str, name: str, old: str, new: str) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # look-up
    _fault(_LINEAR_BACKWARD, "backward reads forward's entries", 'tuning.tuned(device, "linear_bwd", key, rows_bucket)', 'tuning.tuned(device, "linear", key, rows_bucket)'),
    _fault(_LINEAR_BACKWARD, "backward's entry ignored", "return heuristic(out_features) if found is None else Config(**found)", "return heuristic(out_features)"),
    _fault(_LINEAR_BACKWARD, "backward's bucket of the columns", "config_for(tuning.bucket(rows), out_features, activation", "config_for(tuning.bucket(out_features), out_features, activation"),
    _fault(_NORM, "norm's backward reads forward's entries", 'tuning.tuned(device, "layer_norm_bwd", tuning_key', 'tuning.tuned(device, "layer_norm", tuning_key'),
    _fault(_NORM, "norm's key without dropout", "{' dropout' if dropout else ''}", ""),
    _fault(_NORM, "norm's entry ignored", "return heuristic(hidden) if found is None else Config(**found)", "return heuristic(hidden)"),
    _fault(_NORM, "norm's warps not launched", "(block_m, num_warps), block_n = config, columns(hidden, FWD_ONE_BLOCK)", "(block_m, num_warps), block_n = heuristic(hidden), columns(hidden, FWD_ONE_BLOCK)"),
    _fault(_NORM, "norm's widths swapped", "def columns(hidden: int, one_block: int) -> int:\n    \"\"\"BLOCK_N: the columns of a program, all of them up to `one_block`.\"\"\"\n    return WIDE_BLOCK if", "def columns(hidden: int, one_block: int) -> int:\n    \"\"\"BLOCK_N: the columns of a program, all of them up to `one_block`.\"\"\"\n    return 2 * WIDE_BLOCK if"),
    _fault(_BLOCK, "the block reads linear's entries", 'tuning.tuned(device, "feed_forward_bwd", key,', 'tuning.tuned(device, "linear", key,'),
    _fault(_BLOCK, "the block's key without its activation", '{out_features}x{inner} {activation}"', '{out_features}x{inner}"'),
    _fault(_BLOCK, "float32's tiles of the block", "        return ladder[-1:]\n", "        return ladder\n"),
    _fault(_BLOCK, "sums as another config would make them", "        by_product = sums_by_product(config, dy.dtype,", "        by_product = sums_by_product(config._replace(tma=True), dy.dtype,"),
    _fault(_BACKWARD, "one entry for both kernels", '*kind, part])', "*kind])"),
    _fault(_BACKWARD, "saved bits share an entry with none", '["extras"] if extras else ["saved"] if saved else []', '["extras"] if extras else []'),
    _fault(_BACKWARD, "the first kernel's entry for both", "chosen = chosen._replace(**{part: Config(**found)})", "chosen = chosen._replace(dq=Config(**found), dkdv=Config(**found))"),
    _fault(_BACKWARD, "an entry where there is little work", "if triton.cdiv(2**rows_bucket, _height(rungs[0])) < device.multiprocessors:", "if False:"),
    _fault(_FEW, "few rows' entry ignored", "    if found is not None:\n        return Config(**found)\n", ""),
    _fault(_FEW, "two launches read one's entries", 'words if one_launch else [*words, "two_launches"]', "words"),
    _fault(_FEW, "few rows' bucket of the columns", "sizes = tuning.bucket(x.shape[0]), x", "sizes = tuning.bucket(inputs.weight.shape[0]), x"),
    _fault(_FEW, "few rows read layer_norm's entries", 'tuning.tuned(device, "linear_norm", key,', 'tuning.tuned(device, "layer_norm", key,'),
    _fault(_FEW, "few rows' key without the depth", 'f"{in_features}x{out_features}"', 'f"{out_features}"'),
    _fault(_FEW, "few rows' launcher with the heuristic's config", "return linear_norm_fwd_with(config_for(*sizes, one_launch, x.dtype, device), inputs)", "return linear_norm_fwd_with(heuristic(x.shape[0], *sizes[1:], one_launch, device), inputs)"),
    _fault(_TUNING, "linear_norm's verdict without layer_norm's entries", '"linear_norm": ("layer_norm", "linear_norm")', '"linear_norm": ("linear_norm",)'),
    _fault(_TUNING, "feed_forward's verdict without linear's entries", '"feed_forward": ("linear", "feed_forward_bwd")', '"feed_forward": ("feed_forward_bwd",)'),
    _fault(_TUNING, "backward's entries in no verdict", '"attention": ("attention", "attention_bwd")', '"attention": ("attention",)'),
    _fault(_LINEAR, "entries of few rows never met", "return 2 ** tuning.bucket(rows) if rows < ROW_UNIT else triton", "return triton"),
    _fault(_LINEAR, "few rows change the heuristic's tiles", "return heuristic(max(rows, ROW_UNIT), out_features", "return heuristic(rows, out_features"),
    # candidates
    _fault("kernels/attention_slots.py", "a height without places", "HEIGHTS = (16, 32, 64, 128)", "HEIGHTS = (16, 32, 64)"),
    _fault(_LINEAR, "candidates beyond shared memory", "fit = (c for c in fit if shared_memory(c, dtype, capability) <= room)", "fit = (c for c in fit if shared_memory(c, dtype, capability) > 0)"),
    _fault(_LINEAR, "two programs in the room of one", "room = most_shared(capability) // programs", "room = most_shared(capability)"),
    _fault(_LINEAR, "candidates that spill", "most = 128 if capability[0] in (9, 10) else 64", "most = 128"),
    _fault(_LINEAR, "candidates with the bias first where it spills", "base = base._replace(bias_first=capability[0] != 10)", "base = base._replace(bias_first=True)"),
    _fault(_LINEAR, "no small tiles", "    (16, 64, 4),\n", ""),
    _fault(_BACKWARD, "tiles that need registers where bits are drawn", "32 < headdim <= 64 and not extras:", "32 < headdim <= 64:"),
    _fault(_BLOCK, "tiles without room for pre", "more = 2 * config.block_m * config.block_n // config.split if capability[0] in (9, 10) else 0", "more = 0"),
    _fault(_BLOCK, "tiles of few rows in training", "(c.block_m >= 32 and shared", "(shared"),
    # the tool
    _fault(_ENTRIES, "the worst tiles first", "sorted(rivals, key=works.get)", "sorted(rivals, key=works.get, reverse=True)"),
    _fault(_ENTRIES, "tiles of any work", "if works[tile] <= NEAR * min(works.values())]", "if works[tile] >= 0]"),
    _fault(_ENTRIES, "all candidates are timed", "sorted(places, key=places.get)]))[:MOST]", "sorted(places, key=places.get)]))"),
    _fault(_ENTRIES, "the heuristic is not timed", "dict.fromkeys([heuristic(task, device), *sorted", "dict.fromkeys([*sorted"),
    _fault(_ENTRIES, "one form of each tile", "place + 2 * at for", "place + 99 * at for"),
    _fault(_ENTRIES, "small batches first", "(dtypes.index(t.dtype), is_later(t), t.rank,", "(dtypes.index(t.dtype), is_later(t), -t.rank,"),
    _fault(_ENTRIES, "no few rows", "ROWS = (14, 12, 10, 8, 7, 6, 13, 5, 4, 0)", "ROWS = (14, 12, 10, 8, 7, 13)"),
    _fault(_ENTRIES, "sizes compiled once for all", "        return *shape_of(case), case.bias\n", "        return case.activation, case.bias\n"),
    _fault(_ENTRIES, "all numbers of parts are one tile", "return config.block_m, config.block_n, config.split_k", "return config.block_m, config.block_n"),
    _fault(_ENTRIES, "few rows in a dtype without a kernel", "if dtype not in testing.HALF:\n            # no kernel", "if dtype == torch.float64:\n            # no kernel"),
    _fault(_ENTRIES, "few rows after all others", "yield ROWS.index(bucket), LinearNormCase(", "yield 9, LinearNormCase("),
    _fault(_TUNE, "inference for training", "return KINDS[task.op].backward or getattr(task.case, \"dropout_p\", 0.0) > 0", "return KINDS[task.op].backward"),
    _fault(_TUNE, "gradients are not compared", "    return {name: value for name, value in found.items() if name not in case.output_names}\n", "    return {name: value for name, value in found.items() if name in case.output_names}\n"),
    _fault(_ENTRIES, "the other kernel timed with it", "return default._replace(**{part_of(task): config})", "return default._replace(dq=config, dkdv=config)"),
)  # fmt: skip

# what catches most comes first
_TESTS = (
    "without_an_entry_the_heuristic_chooses",
    "entries_come_once_and_what_matters_most_first",
    "all_candidates_begin_with_the_modules_own",
    "few_candidates_are_timed_the_heuristics_first",
    "large_and_small_batches_try_other_tiles",
    "the_gradient_in_a_feed_forward_has_tiles_of_its_own",
    "an_entry_of_one_launch_serves_no_two",
    "attentions_table_of_places_has_every_height",
    "attentions_backward_looks_up_where_there_is_work_for_the_gpu",
    "backward_of_attention_tries_what_its_kernels_may_run",
    "every_kernel_that_is_timed_is_compiled_ahead",
    "heuristics_without_a_table_are_as_they_were",
    "an_entry_is_what_run_time_looks_up",
    "the_launcher_runs_what_the_table_says",
    "the_other_kernels_of_a_backward_keep_their_config",
    "training_is_timed_as_training_runs_it",
    "a_wrong_gradient_cannot_win",
    "fuzz_every_config_that_a_table_may_hold_computes_the_same",
)

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/testing/test_verdicts.py::test_a_tuned_table_changes_the_verdicts_of_its_entries_alone",
        *(f"tests/triton/test_tuning.py::test_{name}" for name in _TESTS),
        "tests/triton/test_linear.py::test_many_lengths_meet_few_configs",
    ),
    timeout_s=600.0,
    environment={"TRITON_INTERPRET": "1"},
)
