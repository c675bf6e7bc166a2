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


EMBEDDING = {
    "_embedding_fwd_kernel",
    "_embedding_bwd_kernel",
    "_wide_embedding_bwd_means_kernel",
    "_chunk_sums_kernel",
    "_table_bwd_kernel",
    "_sum_partials_kernel",
}
LAYER_NORM = {
    "_layer_norm_fwd_kernel",
    "_layer_norm_bwd_kernel",
    "_wide_fwd_stats_kernel",
    "_wide_bwd_means_kernel",
    "_sum_partials_kernel",
}


@pytest.mark.sweep
def test_layer_norm():
    assert_fit(compiled("layer_norm"), LAYER_NORM)


@pytest.mark.slow
def test_layer_norm_in_every_config():
    assert_fit(compiled("layer_norm", "--full"), LAYER_NORM)


def assert_linear(rows: list[dict]) -> None:
    """The kernel fits. Half precision uses each generation's tensor cores, and TMA where there is one."""
    assert_fit(rows, {"_linear_fwd_kernel"})
    for row in rows:
        plain = row["job"].startswith("float32") or "-771-" in row["job"]
        unit = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}[row["arch"]]
        moved = row["arch"] in (90, 100, 120) and not plain
        assert (row["tma_loads"] > 0) == (row["tma_stores"] > 0) == moved, row
        assert row["tf32"] == 0, row
        if not plain:
            assert row[unit] > 0, row


@pytest.mark.sweep
def test_linear():
    assert_linear(compiled("linear"))


@pytest.mark.slow
def test_linear_in_every_config():
    assert_linear(compiled("linear", "--full"))


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_linear_backward(full):
    rows = compiled("linear_backward", *["--full"] * full)
    assert_fit(rows, {"_linear_bwd_kernel", "_sum_partials_kernel"})


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_feed_forward(full):
    """It fits, and half precision uses each generation's tensor cores, and TMA where there is one."""
    rows = compiled("feed_forward", *["--full"] * full)
    assert_fit(rows, {"_feed_forward_bwd_kernel", "_sum_partials_kernel"})
    for row in rows:
        plain = row["job"].startswith("float32") or "-771-" in row["job"]
        if row["kernel"] == "_feed_forward_bwd_kernel":
            unit = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}[row["arch"]]
            moved = row["arch"] in (90, 100, 120) and not plain
            assert (row["tma_loads"] > 0) == (row["tma_stores"] > 0) == moved, row
            assert row["tf32"] == 0, row
            assert plain or row[unit] > 0, row


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_linear_norm(full):
    """It fits, and uses tensor cores: a generation's own for 64 rows, `mma.sync` for fewer."""
    rows = compiled("linear_norm", *["--full"] * full)
    assert_fit(rows, {"_linear_norm_kernel", "_normalize_kernel"})
    for row in rows:
        if row["kernel"] == "_linear_norm_kernel":
            tall = row["job"].split("-")[2].startswith("64x")
            unit = {90: "wgmma", 100: "tcgen05"}.get(row["arch"], "mma") if tall else "mma"
            assert row[unit] > 0, row
            assert row["tf32"] == 0, row


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


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_linear_that_may_be_tuned(full):
    from fastbert.kernels import linear

    rows = compiled("linear", "--tuning", *["--full"] * full)
    assert_fit(rows, {"_linear_fwd_kernel"})
    assert_all_entries(rows, "linear", full)
    for row in rows:
        dtype = row["job"].split()[1]
        config = linear.Config(*map(int, row["job"].split("/")[1].split("_")))
        assert (row["tma"] > 0) == config.tma == (row["arch"] != 80 and dtype != "float32"), row
        # the limit that `candidates` assumes
        most = linear.shared_memory(config, getattr(torch, dtype), divmod(row["arch"], 10))
        assert row["dynamic_shared"] <= most <= row["shared_limit"], row


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_that_may_be_tuned(full):
    rows = compiled("attention", "--tuning", *["--full"] * full)
    assert_fit(rows, {"_attention_fwd_kernel"})
    assert_all_entries(rows, "attention", full)


# Kernel of the tables -> what its candidates launch.
MAY_BE_TUNED = {
    "attention_bwd": {"_attention_bwd_dq_kernel", "_attention_bwd_dkdv_kernel"},
    "feed_forward_bwd": {"_feed_forward_bwd_kernel", "_sum_partials_kernel"},
    "layer_norm": {"_layer_norm_fwd_kernel"},
    "layer_norm_bwd": {"_layer_norm_bwd_kernel", "_sum_partials_kernel"},
    "linear_bwd": {"_linear_bwd_kernel", "_sum_partials_kernel"},
    "linear_norm": {"_linear_norm_kernel"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_that_may_be_tuned(full):
    from fastbert.kernels import feed_forward

    for op, kernels in MAY_BE_TUNED.items():
        rows = compiled(op, "--tuning", *["--full"] * full)
        assert_fit(rows, kernels)
        assert_all_entries(rows, op, full)
        for row in rows:
            if row["kernel"] == "_feed_forward_bwd_kernel" and row["arch"] == 90:
                # the limit that `candidates` assumes
                dtype, config = row["job"].split()[1], row["job"].split("/")[1].split("_")
                config = feed_forward.linear.Config(*map(int, config))
                most = feed_forward.shared_memory(config, getattr(torch, dtype), (9, 0))
                assert row["dynamic_shared"] <= most, row


def assert_all_entries(rows: list[dict], op: str, full: bool) -> None:
    """Every candidate of every entry of the tuner compiles, as it is timed and with all options it serves."""
    from bench import tune
    from tests.support.triton_compile import tuning_tasks

    timed_alone = op in ("attention", "attention_bwd", "linear")
    assert {row["job"].split("/")[2] for row in rows} == ({"timed", "most"} if timed_alone else {"most"})
    if full:
        tasks = tuning_tasks(op)
        for arch in (80, 90, 100, 120):
            device = tune.tuning.Device("", divmod(arch, 10), 1)
            wanted = {
                f"{t.name}/{tune.label(c)}" for t in tasks for c in tune.KINDS[op].candidates(t, device)
            }
            assert {row["job"].rpartition("/")[0] for row in rows if row["arch"] == arch} == wanted


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_embedding(full):
    assert_fit(compiled("embedding", *["--full"] * full), EMBEDDING)


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_padding(full):
    assert_fit(compiled("packing", *["--full"] * full), {"_packing_fwd_kernel", "_packing_bwd_kernel"})


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pooling(full):
    kernels = {"_pooling_fwd_kernel", "_pooling_bwd_kernel"}
    assert_fit(compiled("pooling", *["--full"] * full), kernels)


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_first_attention(full):
    """It fits, by tensor cores; on sm_120 tokens of 768 columns at most."""
    names = (
        "_first_attention_asked_kernel",
        "_first_attention_mixed_kernel",
        "_first_attention_value_kernel",
    )
    rows = compiled("first_attention", *["--full"] * full)
    assert_fit(rows, set(names))
    assert all(r["mma"] > 0 and r["tf32"] == 0 for r in rows)
    widths = {(r["arch"], int(r["job"].split("-")[1].split("x")[0])) for r in rows}
    assert {(arch, 1024) for arch in (80, 90, 100)} < widths
    assert max(width for arch, width in widths if arch == 120) == 768


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cross_entropy(full):
    kernels = {"_cross_entropy_fwd_kernel", "_cross_entropy_bwd_kernel", "_mean_loss_kernel"}
    assert_fit(compiled("cross_entropy", *["--full"] * full), kernels)


@pytest.mark.sweep
def test_attention():
    rows = compiled("attention")
    assert_fit(rows, {"_attention_fwd_kernel"})
    assert_warp_group_products(rows)


@pytest.mark.slow
def test_attention_in_every_config():
    rows = compiled("attention", "--full")
    assert_fit(rows, {"_attention_fwd_kernel"})
    assert_warp_group_products(rows)


def assert_warp_group_products(rows: list[dict]) -> None:
    """Half precision uses each generation's own matrix product, except in tiles of less than its 64 rows."""
    for r in rows:
        dtype, _, tiles = r["job"].split("-")[:3]
        half, high = dtype != "float32", int(tiles.split("x")[0]) >= 64
        assert (r["wgmma"] > 0) == (r["arch"] == 90 and half and high), r
        assert (r["tcgen05"] > 0) == (r["arch"] == 100 and half and high), r
        assert (r["mma"] > 0) == (half and not (high and r["arch"] in (90, 100))), r
        assert r["tf32"] == 0, r


@pytest.mark.sweep
def test_attention_places():
    assert_fit(compiled("attention_places"), {"_attention_places_kernel"})


ATTENTION_BACKWARD = {
    "_attention_bwd_dq_kernel",
    "_attention_bwd_dkdv_kernel",
    "_attention_bwd_dbias_kernel",
}


@pytest.mark.sweep
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_backward(full):
    from fastbert.kernels import attention_backward as kernels

    rows = compiled("attention_backward", *["--full"] * full)
    assert_fit(rows, ATTENTION_BACKWARD)
    for r in rows:
        dtype, headdim, rung, name = r["job"].split("-", 3)
        saved = name.startswith("saved")
        extras = not saved and name not in ("plain", "causal", "negative-scale", "gate")
        ladder = kernels.ladder(int(headdim), getattr(torch, dtype), extras, saved, divmod(r["arch"], 10))
        configs = ladder[0 if rung == "high" else -1]
        which = r["kernel"].split("_")[3]
        rows_of_product = {  # those of the left operand
            "dq": configs.dq.block_m,
            "dkdv": configs.dkdv.block_n,
            "dbias": configs.dbias.block_m,
        }[which]
        high = dtype != "float32" and rows_of_product >= 64
        assert (r["wgmma"] > 0) == (r["arch"] == 90 and high), r
        assert (r["tcgen05"] > 0) == (r["arch"] == 100 and high), r
        assert (r["mma"] > 0 or high) == (dtype != "float32"), r
        assert r["tf32"] == 0, r


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
