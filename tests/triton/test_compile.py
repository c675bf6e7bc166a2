"""All launches compile for every GPU generation, without spills and within its shared memory.

On sm_90 no register of a warp group's product is touched before the wait for it (tests/support/sass.py).
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]


def compiled(op: str, *options: str) -> list[dict]:
    """Rows of tests/support/triton_compile.py."""
    return rows_of("triton_compile.py", op, *options)


def compiled_products(folder: pathlib.Path, scope: str) -> list[dict]:
    """Rows of tests/support/product_jobs.py; the cubins go to `folder`."""
    return rows_of("product_jobs.py", str(folder), scope)


def rows_of(script: str, *options: str) -> list[dict]:
    """What a script of tests/support prints, run with the interpreter off."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests/support" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_fit(rows: list[dict], kernels: set[str]) -> None:
    assert {r["kernel"] for r in rows} == kernels
    assert {r["arch"] for r in rows} == {80, 90, 100, 120}
    assert [r for r in rows if spills(r)] == []
    assert [r for r in rows if r["dynamic_shared"] > r["shared_limit"]] == []
    assert [r for r in rows if r["hazards"]] == []


def spills(row: dict) -> bool:
    """Whether spilled registers are read back from the stack.

    The TMA of Triton 3.6 has a stack on sm_120 that nothing is read from: the argument of a call for memory
    of another block, which is never made.
    """
    unread = row["foreign_copies"] and row["arch"] == 120 and row["stack"] <= 8
    return bool(row["local"] or row["reloads"] or (row["stack"] and not unread))


def assert_unit(row: dict, high: bool) -> None:
    """Each generation's own product of warp groups in `high` tiles; else `mma.sync`; neither in float32."""
    half = not row["job"].startswith("float32")
    own = {90: "wgmma", 100: "tcgen05"}
    for arch, unit in own.items():
        assert (row[unit] > 0) == (row["arch"] == arch and half and high), row
    assert (row["mma"] > 0) == (half and not (high and row["arch"] in own)), row
    assert row["tf32"] == 0, row


def product_of_tma(row: dict) -> None:
    """Half precision uses each generation's tensor cores, and TMA where there is one."""
    if row["kernel"] == "_sum_partials_kernel":
        return
    plain = row["job"].startswith("float32") or "-771-" in row["job"]
    unit = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}[row["arch"]]
    moved = row["arch"] in (90, 100, 120) and not plain
    assert (row["tma_loads"] > 0) == (row["tma_stores"] > 0) == moved, row
    assert row["tf32"] == 0, row
    assert plain or row[unit] > 0, row


def product_of_few_rows(row: dict) -> None:
    """Tensor cores: a generation's own for 64 rows, `mma.sync` for fewer."""
    if row["kernel"] == "_linear_norm_kernel":
        tall = row["job"].split("-")[2].startswith("64x")
        unit = {90: "wgmma", 100: "tcgen05"}.get(row["arch"], "mma") if tall else "mma"
        assert row[unit] > 0, row
        assert row["tf32"] == 0, row


def product_of_first_tokens(row: dict) -> None:
    """Tensor cores; on sm_120 tokens of 768 columns at most."""
    assert row["mma"] > 0, row
    assert row["tf32"] == 0, row
    assert row["arch"] != 120 or int(row["job"].split("-")[1].split("x")[0]) <= 768, row


def products_of_attention(row: dict) -> None:
    """Half precision uses each generation's own matrix product, except in tiles of less than its 64 rows."""
    assert_unit(row, int(row["job"].split("-")[2].split("x")[0]) >= 64)


def products_of_attention_backward(row: dict) -> None:
    """As forward. The rows are those of the left operand."""
    from fastbert.kernels import attention_backward as kernels

    dtype, headdim, rung, name = row["job"].split("-", 3)
    saved = name.startswith("saved")
    extras = not saved and name not in ("plain", "causal", "negative-scale", "gate")
    ladder = kernels.ladder(int(headdim), getattr(torch, dtype), extras, saved, divmod(row["arch"], 10))
    which = row["kernel"].split("_")[3]
    config = getattr(ladder[0 if rung == "high" else -1], which)
    high = dtype != "float32" and (config.block_n if which == "dkdv" else config.block_m) >= 64
    assert (row["wgmma"] > 0) == (row["arch"] == 90 and high), row
    assert (row["tcgen05"] > 0) == (row["arch"] == 100 and high), row
    assert (row["mma"] > 0 or high) == (dtype != "float32"), row
    assert row["tf32"] == 0, row


# Op -> its kernels, and what is asserted of each row.
GATES = {
    "attention": ({"_attention_fwd_kernel"}, products_of_attention),
    "attention_backward": (
        {f"_attention_bwd_{part}_kernel" for part in ("dq", "dkdv", "dbias")},
        products_of_attention_backward,
    ),
    "attention_places": ({"_attention_places_kernel"}, None),
    "cross_entropy": (
        {"_cross_entropy_fwd_kernel", "_cross_entropy_bwd_kernel", "_mean_loss_kernel"},
        None,
    ),
    "embedding": (
        {
            *("_embedding_fwd_kernel", "_embedding_bwd_kernel", "_wide_embedding_bwd_means_kernel"),
            *("_chunk_sums_kernel", "_table_bwd_kernel", "_sum_partials_kernel"),
        },
        None,
    ),
    "feed_forward": ({"_feed_forward_bwd_kernel", "_sum_partials_kernel"}, product_of_tma),
    "first_attention": (
        {f"_first_attention_{part}_kernel" for part in ("asked", "mixed", "value")},
        product_of_first_tokens,
    ),
    "layer_norm": (
        {
            *("_layer_norm_fwd_kernel", "_layer_norm_bwd_kernel", "_sum_partials_kernel"),
            *("_wide_fwd_stats_kernel", "_wide_bwd_means_kernel"),
        },
        None,
    ),
    "linear": ({"_linear_fwd_kernel"}, product_of_tma),
    "linear_backward": ({"_linear_bwd_kernel", "_sum_partials_kernel"}, None),
    "linear_norm": ({"_linear_norm_kernel", "_normalize_kernel"}, product_of_few_rows),
    "packing": ({"_packing_fwd_kernel", "_packing_bwd_kernel"}, None),
    "pooling": ({"_pooling_fwd_kernel", "_pooling_bwd_kernel"}, None),
}
FULL = pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])


@pytest.mark.sweep
@FULL
@pytest.mark.parametrize("op", GATES)
def test_launches_fit(op, full):
    kernels, check = GATES[op]
    rows = compiled(op, *["--full"] * full)
    assert_fit(rows, kernels)
    for row in rows if check else ():
        check(row)
    if op == "first_attention":
        assert {row["arch"] for row in rows if "-1024x" in row["job"]} == {80, 90, 100}


@pytest.mark.sweep
def test_the_last_to_arrive_sees_what_all_have_stored():
    """The order of memory in kernels/linear_norm.py, step by step, in PTX and in machine code.

    Stores of sums, a barrier of the block, a fence of the GPU with one atomic, a barrier, and loads past L1.
    """
    rows = rows_of("memory_order_of_linear_norm.py", "80", "90", "100", "120")
    assert [row["arch"] for row in rows] == [80, 90, 100, 120]
    for row in rows:
        assert row["ptx"] == ["store", "barrier", "atomic", "barrier", "load"], row
        assert row["sass"] == ["store", "barrier", "fence", "atomic", "barrier", "load"], row


# Kernel of the tables -> what its candidates launch.
MAY_BE_TUNED = {
    "attention": {"_attention_fwd_kernel"},
    "attention_bwd": {"_attention_bwd_dq_kernel", "_attention_bwd_dkdv_kernel"},
    "feed_forward_bwd": {"_feed_forward_bwd_kernel", "_sum_partials_kernel"},
    "layer_norm": {"_layer_norm_fwd_kernel"},
    "layer_norm_bwd": {"_layer_norm_bwd_kernel", "_sum_partials_kernel"},
    "linear": {"_linear_fwd_kernel"},
    "linear_bwd": {"_linear_bwd_kernel", "_sum_partials_kernel"},
    "linear_norm": {"_linear_norm_kernel"},
}


@pytest.mark.sweep
@FULL
@pytest.mark.parametrize("op", MAY_BE_TUNED)
def test_kernels_that_may_be_tuned(op, full):
    """Every candidate of every entry of the tuner compiles, as it is timed and with all options it serves."""
    from bench import tune
    from fastbert.kernels import feed_forward, linear
    from tests.support.triton_compile import tuning_tasks

    rows = compiled(op, "--tuning", *["--full"] * full)
    assert_fit(rows, MAY_BE_TUNED[op])
    timed_alone = op in ("attention", "attention_bwd", "linear")
    assert {row["job"].split("/")[2] for row in rows} == ({"timed", "most"} if timed_alone else {"most"})
    for arch in (80, 90, 100, 120) if full else ():
        device = tune.tuning.Device("", divmod(arch, 10), 1)
        tasks = tuning_tasks(op)
        wanted = {f"{t.name}/{tune.label(c)}" for t in tasks for c in tune.KINDS[op].candidates(t, device)}
        assert {row["job"].rpartition("/")[0] for row in rows if row["arch"] == arch} == wanted
    # the limits that `candidates` assumes
    for row in rows:
        dtype, label = row["job"].split()[1], row["job"].split("/")[1].split("_")
        facts = getattr(torch, dtype), divmod(row["arch"], 10)
        if op == "linear":
            config = linear.Config(*map(int, label))
            assert (row["tma"] > 0) == config.tma == (row["arch"] != 80 and dtype != "float32"), row
            assert row["dynamic_shared"] <= linear.shared_memory(config, *facts) <= row["shared_limit"], row
        elif row["kernel"] == "_feed_forward_bwd_kernel" and row["arch"] == 90:
            most = feed_forward.shared_memory(linear.Config(*map(int, label)), *facts)
            assert row["dynamic_shared"] <= most, row


# their products take what was just computed from registers
PRODUCTS = {"_attention_fwd_kernel", "_attention_bwd_dq_kernel", "_attention_bwd_dkdv_kernel"}


@pytest.mark.slow  # 100 seconds; test_sass.py has BERT-base's configs in the sweep
@pytest.mark.parametrize("full", [False, True])
def test_products_in_every_config(full):
    """Each config that the heuristic or the tuner may choose; test_sass.py takes those of BERT-base."""
    with tempfile.TemporaryDirectory() as folder:
        rows = compiled_products(pathlib.Path(folder), "all" if full else "configs")
    assert {r["kernel"] for r in rows} >= PRODUCTS
    for r in rows:
        assert (r["left_in_registers"] > 0) == (r["wgmma"] > 0), r["job"]
        assert r["hazards"] == [], r["job"]
    for kernel in PRODUCTS:
        dtypes = {r["job"].split("-")[0] for r in rows if r["kernel"] == kernel and r["left_in_registers"]}
        assert dtypes == {"bfloat16", "float16"}


@pytest.mark.sweep
def test_a_spill_is_seen():
    rows = compiled("layer_norm", "--jobs", "1", "--max-registers", "32")
    assert [spills(r) for r in rows if r["kernel"] == "_layer_norm_bwd_kernel"] == [True]


@pytest.mark.sweep
def test_a_stack_is_a_spill_but_for_one():
    row = {"arch": 120, "stack": 8, "local": 0, "reloads": 0, "foreign_copies": 1}
    assert not spills(row)
    others = {"arch": 90}, {"stack": 16}, {"local": 8}, {"reloads": 1}, {"foreign_copies": 0}
    assert [spills(row | other) for other in others] == [True] * 5
