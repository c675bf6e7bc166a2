"""Which tests `make test` runs, which `make sweep` adds, and which only `make exhaustive` runs.

`make test` runs a few of each parametrised test's parameter sets. One rule chooses them here, so that no test
needs a list of its own. The chosen sets cover

- each combination of backend, instruction set, op, pass, dtype and family that the test's parameters have,
- each value of every other parameter (each case, each bad input, each option),
- of a long list of numbers, such as all lengths from 1 to 130, its ends and two numbers between.

All others get the marker `sweep`, and so do the tests of WHOLE, which are exhaustive or costly as a whole.
`slow` marks what takes hours. A parameter set that is named by its full id runs without `-m`.
"""

from __future__ import annotations

import pathlib
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

# Parameters of which `make test` needs every combination.
COMBINED = frozenset({"backend", "dtype", "every_isa", "family", "isa", "op", "task", "which"})
# A parameter with more numbers than this is a sweep: only some of its numbers must be covered.
MANY, SOME = 6, 4

# folder of tests/ -> tests that leave all their parameter sets to `make sweep`, because they take seconds:
# fuzzing, sanitizers and compilers, wheels, Inductor, two processes, whole runs of a benchmark, every length.
# `test_a[triton` leaves the sets whose id begins with `triton`.
WHOLE = {
    "acceleration": """
        test_accelerated_after_it_was_compiled test_compile_leaves_the_encoder_as_it_is
        test_compiled_by_inductor test_compiled_in_one_graph test_compiled_shapes_are_dynamic
        test_compiled_without_a_graph_break test_data_parallel_training test_everything_else_that_encode_gives
        test_import_asks_for_no_transformers test_layers_compiled_one_by_one
        test_mapped_and_compiled_heads_are_the_stock_models test_onnx_export_takes_the_stock_path
        test_thousands_of_calls_of_threads
        test_torch_export_takes_the_stock_path test_trained_model_answers_as_well_as_stock
        test_trainer_follows_the_stock_loss_curve
        test_weights_that_only_their_own_module_may_read_keep_the_layer_stock
    """,
    "bench": """
        test_a_dry_run_checks_every_triton_kernel test_a_dry_run_is_no_result
        test_a_dry_run_leaves_eight_files_at_most_and_one_has_all test_a_dry_run_passes_every_step
        test_a_dry_run_times_every_engine test_a_dry_run_trains test_a_dry_run_tunes
        test_a_file_of_the_suite test_a_group_that_fails_costs_the_next_nothing
        test_a_hang_a_crash_and_an_ending_process_are_rows
        test_a_kill_loses_nothing_and_leaves_no_worker test_a_peak_is_forgotten
        test_a_whole_run_has_the_kernels_of_every_call
        test_a_planted_wrong_kernel_has_no_line_of_speed test_a_process_needs_what_its_step_saves
        test_a_process_that_fails_or_hangs_is_a_row
        test_a_wrong_name_is_named test_a_replay_must_draw_the_mask_of_the_seed_it_finds
        test_a_step_of_bert_base_needs_at_most_the_goal_of_transformers_memory test_a_whole_run
        test_a_broken_promise_fails_the_test_of_ours
        test_an_encoder_budget_leaves_out_torch_compile_first
        test_an_engine_ends_with_a_benchmark_that_is_killed test_an_engine_that_fails_is_an_error_row
        test_correctness_of_a_small_training_step test_encode_compares_the_vectors_and_counts_the_texts
        test_every_row_has_its_figures test_gpu_bandwidth_step test_gpu_gemm_step_covers_every_shape
        test_gpu_matrix_step_covers_every_dtype_at_full_size test_gpu_peer_steps
        test_gpu_sdpa_step_covers_every_backend
        test_graphs_see_stale_weights_and_calls_that_are_not_replayed
        test_json_says_what_was_measured_where test_memory_grows_with_the_batch test_memory_sees_growth
        test_no_process_is_left test_options_choose test_other_needs_its_equals_sign
        test_paragraphs_are_prose_distinct_and_the_same_again test_smoke
        test_smoke_on_cuda_that_computes_on_the_cpu
        test_the_check_writes_one_archive_that_this_machine_confirms
        test_the_command_records_what_it_prints test_the_exported_peers_compute_the_same
        test_the_encode_file_of_the_suite_says_that_the_weights_are_missing
        test_the_goal_is_printed_beside_ours_on_a_gpu
        test_the_memory_file_of_the_suite_is_saved_without_a_time test_the_picture_of_the_cost_model
        test_what_a_hanging_step_has_started_ends_with_it test_without_a_compiler_the_roofs_are_torchs
    """,
    "checkpoint": """
        test_a_deep_model_still_loads test_every_state_that_a_kill_leaves_is_old_or_new test_killed_saves
    """,
    "cli": """
        test_a_process_that_is_ended_saves test_leftovers_of_killed_runs_are_removed
        test_only_one_process_at_a_time_trains_into_a_run
    """,
    "cpu": """
        test_cuda_kernels_on_the_host test_cuda_makes_only_what_is_wanted
        test_every_task_runs_once_under_sanitizers test_instruction_set_units_share_no_function
        test_kernels_under_address_and_undefined_sanitizers test_kernels_under_more_sanitizers
        test_kernels_under_the_thread_sanitizer
    """,
    "house": """
        test_type_checkers_pass_what_is_right_and_flag_what_is_wrong test_wheel
    """,
    "layers": """
        test_compile_full_graph test_compiled_models_see_them test_eager_autocast_and_compiled_agree
        test_embeddings_of_minilm_keep_their_direction test_kernels_under_address_and_undefined_sanitizers
        test_kernels_under_the_thread_sanitizer
    """,
    "models": """
        test_a_compiled_layer_trains_with_the_masks_of_eager
        test_a_compiled_model_draws_a_new_mask_at_every_call test_a_hundred_steps_repeated_are_bit_equal
        test_classification_follows_the_stock_loss_curve test_compile_full_graph_dynamic
        test_compile_with_attentions_and_a_mask test_compile_with_inductor test_compiled_in_training
        test_data_parallel_training_equals_transformers_in_one_process
        test_fsdp2_in_bfloat16_is_no_worse_than_transformers_own
        test_half_precision_error_is_no_larger_than_transformers_own test_many_lengths_leave_nothing_behind
    """,
    "ops": """
        test_any_lengths_and_masks test_compiled_probs_and_padded_layout test_every_length
        test_every_length_alone_is_as_in_a_batch test_float32_is_no_worse_than_eager_in_the_median[triton
        test_hostile_numbers_reach_nothing test_inductor_equals_eager
        test_inductor_gives_the_eager_loss_and_gradients test_only_the_gradients_that_are_wanted
        test_opcheck[triton test_poison_outside_the_sequences_changes_nothing
        test_strides_are_respected[triton test_the_fence_is_one
    """,
    "ptx": """
        test_every_op test_every_op_on_sm_90 test_larger_tiles_on_sm_90 test_one_number_a_row_has_no_gradient
        test_tutorials
    """,
    "pretraining": """
        test_a_full_disk_and_a_kill_leave_no_corpus test_it_learns test_left_to_right_learns
        test_orders_and_places_have_equal_chance
        test_pairs_of_sentences_are_learnt test_permutation_learns test_stages_learn
        test_the_discriminator_learns test_thirty_steps_are_those_of_transformers
        test_threads_of_the_tokenizer_change_nothing test_word_order_learns
    """,
    "runtime": """
        test_the_table_of_gpus_trains_a_model
    """,
    "testing": """
        test_a_check_finds_its_kernels_compiled test_a_compilation_that_hangs_is_ended
        test_a_process_that_dies_costs_one_kernel test_code_that_does_not_compile_is_noted
        test_in_spare_time_what_is_next_is_compiled_but_not_while_something_is_timed
        test_what_is_damaged_in_the_cache_is_made_anew
        test_what_the_checks_launch_is_known_without_a_gpu
        test_without_the_process_the_checks_compile
        test_a_hang_ends_at_the_limit test_a_hang_is_ended_and_kept_and_again_checks_anew
        test_a_killed_check_is_tried_again_but_not_for_ever test_ctrl_c_ends_the_process_and_blames_no_kernel
        test_it_ends_with_its_parent test_processes_that_check_at_once
        test_whatever_one_kernel_does_the_others_are_checked
    """,
    "training": """
        test_a_checkpoint_goes_on_under_another_kind test_a_full_disk_at_every_writing_operation
        test_a_full_disk_ends_all[fsdp test_a_gradient_of_one_process_is_not_finite[fsdp
        test_a_kill_at_every_file_operation test_a_kill_at_every_file_operation_of_growth
        test_a_signal_to_one_or_all[SIGINT test_a_signal_to_one_or_all[SIGTERM-None
        test_a_signal_to_one_or_all[SIGTERM-ranks0 test_a_signal_to_one_or_all[SIGTERM-ranks1-fsdp3
        test_a_signal_to_the_whole_group_leaves_the_workers_to_the_parent test_bfloat16
        test_float16_and_its_scaler test_kills_at_random_moments test_layers_that_share_their_weights
        test_micro_batches_by_tokens test_other_optimizers test_processes_equal_one[ddp3
        test_processes_equal_one[fsdp3 test_processes_read_what_one_reads test_resumed_bits_equal[kill
        test_resumed_bits_equal[raise-ddp3 test_resumed_bits_equal[raise-fsdp
        test_saved_models_are_whole_directories test_small_disks test_stages test_torchrun
        test_torchrun_is_terminated test_workers_end_after_a_parent_that_was_killed
    """,
    "triton": """
        test_a_sharp_softmax test_a_spill_is_seen test_a_stack_is_a_spill_but_for_one test_attention
        test_attention_backward test_attention_places test_attention_that_may_be_tuned
        test_bits_beyond_2_to_31_words test_cross_entropy test_dropout_bits_are_the_definitions
        test_embedding test_every_length_of_small_tiles test_feed_forward test_first_attention test_fuzz
        test_in_a_process_of_its_own test_kernels_that_may_be_tuned test_layer_norm test_linear
        test_linear_backward test_linear_norm test_linear_that_may_be_tuned
        test_more_sequences_than_are_ranked test_neighbours_and_unused_cells_may_be_nan
        test_norms_gradients_of_few_tokens test_offsets_beyond_2_to_31_elements test_padding
        test_pooling test_registers_are_those_of_nvdisasm test_repeats_are_bit_equal_without_atomics
        test_rows_wider_than_one_block test_runs_of_many_chunks_by_the_error_rule
        test_saved_bits_and_drawn_ones_are_one test_strided_inputs_with_poisoned_gaps
        test_strided_rows_with_poisoned_padding test_the_last_to_arrive_sees_what_all_have_stored
        test_wide_tokens_by_the_error_rule
    """,
}

# folder of tests/ -> parameters of which a few values are enough in `make test`
SAMPLED = {"triton": frozenset({"case"})}

# fixtures that compile, run a whole benchmark or train in two processes: their tests are left to `make sweep`
BUILDS = {
    *("dry", "emulated", "emulated_extension", "emulated_launches"),
    *("small_kernels", "smoke", "two_processes", "whole"),
}

# folders whose tests need a build of a minute: what `make test` would run of them gets the marker `built`,
# and is left to `make sweep` too
BUILT_FOLDERS = frozenset({"ptx"})

Need = tuple[Hashable, ...]


def is_whole(nodeid: str) -> bool:
    """Whether a test, such as "tests/ops/test_linear.py::test_cases[gelu]", is one of WHOLE."""
    path, _, name = nodeid.partition("::")
    whole = WHOLE.get(pathlib.PurePath(path).parent.name, "").split()
    return any(name.startswith(f"{w}[") or name == w or ("[" in w and name.startswith(w)) for w in whole)


def identity(value: object) -> Hashable:
    """What tells two values of a parameter apart; values may be unhashable."""
    return type(value).__name__, value if isinstance(value, (str, int, float)) else repr(value)


def is_numeric(value: object) -> bool:
    """Whether a value is a number or a collection of numbers."""
    if isinstance(value, (tuple, list, range)):
        return all(map(is_numeric, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def left_out(
    sets: Sequence[dict[str, object]], sampled: frozenset[str] = frozenset()
) -> dict[str, set[Hashable]]:
    """By parameter: the values that need no covering, of a long list of numbers or of one of `sampled`."""
    values: dict[str, dict[Hashable, object]] = defaultdict(dict)
    for parameters in sets:
        for name, value in parameters.items():
            values[name].setdefault(identity(value), value)
    found = {}
    for name, named in values.items():
        long = len(named) > MANY and name not in COMBINED
        if long and (name in sampled or all(map(is_numeric, named.values()))):
            kept = {round(i * (len(named) - 1) / (SOME - 1)) for i in range(SOME)}
            found[name] = {key for i, key in enumerate(named) if i not in kept}
    return found


def cover(
    ids: Sequence[str], sets: Sequence[dict[str, object]], sampled: frozenset[str] = frozenset()
) -> set[str]:
    """The ids of the parameter sets that `make test` runs; at least one.

    Args:
        ids: one id per parameter set.
        sets: name -> value of the parameters.
        sampled: parameters of which a few values are enough.

    Greedy: the set that covers the most comes first. A checksum of the id decides between equals, so that the
    cases spread over backends and dtypes, in the same way on every machine.
    """
    skipped = left_out(sets, sampled)
    needs: dict[str, set[Need]] = {}
    for name, parameters in zip(ids, sets, strict=True):
        keys = {key: identity(value) for key, value in parameters.items()}
        found: set[Need] = {(k, v) for k, v in keys.items() if v not in skipped.get(k, ())}
        found.add(tuple((k, keys[k]) for k in sorted(COMBINED & keys.keys())))
        needs[name] = found
    missing, kept = set().union(*needs.values()), set()
    left = sorted(ids, key=lambda name: zlib.crc32(name.encode()))
    while missing:
        best = max(left, key=lambda name: len(needs[name] & missing))
        kept.add(best)
        left.remove(best)
        missing -= needs[best]
    return kept


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the marker `sweep` to what `make test` leaves out."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if is_whole(item.nodeid) or BUILDS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.sweep)
        elif hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            groups[item.nodeid.partition("[")[0]].append(item)
    for path, group in groups.items():
        sampled = SAMPLED.get(pathlib.PurePath(path.partition("::")[0]).parent.name, frozenset())
        kept = cover([item.nodeid for item in group], [item.callspec.params for item in group], sampled)
        for item in group:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.sweep)
    for item in items:
        folder = pathlib.PurePath(item.nodeid.partition("::")[0]).parent.name
        if folder in BUILT_FOLDERS and item.get_closest_marker("sweep") is None:
            item.add_marker(pytest.mark.built)
            item.add_marker(pytest.mark.sweep)
