"""All launches compile for every GPU generation, without spills and within its shared memory.

On sm_90 no register of a warp group's product is touched before the wait for it (tests/support/sass.py).
"""

import importlib

import pytest
import torch

from tests.support.processes import rows_of


def compiled(op: str, *options: str) -> list[dict]:
    """Rows of tests/support/triton_compile.py."""
    return rows_of("tests/support/triton_compile.py", op, *options)


def assert_fit(rows: list[dict], archs: frozenset[int] = frozenset((80, 90, 100, 120))) -> None:
    assert {r["arch"] for r in rows} == archs
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
    # that the lint has seen them: what is multiplied next was just computed, in registers
    assert (row["left_in_registers"] > 0) == (row["wgmma"] > 0), row
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


def gated_product(row: dict) -> None:
    """As `product_of_tma`; the gradient's pass has no product."""
    if row["kernel"] == "_linear_fwd_kernel":
        product_of_tma(row)


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


def product_of_integers(row: dict) -> None:
    """Tensor cores: a generation's own for 64 rows or more, `mma.sync` for fewer."""
    if row["kernel"] == "_linear_int8_kernel":
        tall = int(row["job"].split("-")[1]) > 32
        unit = {90: "wgmma", 100: "tcgen05"}.get(row["arch"], "mma") if tall else "mma"
        assert row[unit] > 0, row


def products_of_attention(row: dict) -> None:
    """Half precision uses each generation's own matrix product, except in tiles of less than its 64 rows."""
    assert_unit(row, int(row["job"].split("-")[2].split("x")[0]) >= 64)


def products_of_attention_backward(row: dict) -> None:
    """As forward. The rows are those of the left operand."""
    from fastbert.kernels import attention_backward as kernels
    from tests.support.triton_compile import PLAIN

    dtype, headdim, rung, name = row["job"].split("-", 3)
    saved = name.startswith("saved")
    extras = not saved and name not in PLAIN
    ladder = kernels.ladder(int(headdim), getattr(torch, dtype), extras, saved, divmod(row["arch"], 10))
    which = row["kernel"].split("_")[3]
    configs = ladder[0 if rung == "high" else -1]
    low = extras and ("window" in name or "relative" in name)
    config = getattr(kernels.lowered(configs) if low else configs, which)
    high = dtype != "float32" and (config.block_n if which == "dkdv" else config.block_m) >= 64
    assert (row["wgmma"] > 0) == (row["arch"] == 90 and high), row
    assert which == "dbias" or (row["left_in_registers"] > 0) == (row["wgmma"] > 0), row
    assert (row["tcgen05"] > 0) == (row["arch"] == 100 and high), row
    assert (row["mma"] > 0 or high) == (dtype != "float32"), row
    assert row["tf32"] == 0, row


def products_of_attention_received(row: dict) -> None:
    """Half precision uses each generation's own matrix product where a tile has its 64 rows."""
    half = not row["job"].startswith("float32")
    high = half and int(row["job"].split("-")[2].split("x")[1]) >= 64
    unit = {90: "wgmma", 100: "tcgen05"}.get(row["arch"], "mma") if high else "mma"
    assert [row[name] > 0 for name in ("wgmma", "tcgen05", "mma")] == [
        half and name == unit for name in ("wgmma", "tcgen05", "mma")
    ], row
    assert row["tf32"] == 0, row


# op -> what is asserted of each row
GATES = {
    "attention": products_of_attention,
    "attention_backward": products_of_attention_backward,
    "attention_places": None,
    "attention_received": products_of_attention_received,
    "attention_relative": None,
    "cross_entropy": None,
    "embedding": None,
    "feed_forward": product_of_tma,
    "first_attention": product_of_first_tokens,
    "layer_norm": None,
    "linear": product_of_tma,
    "linear_backward": None,
    "linear_fp8": None,
    "linear_gated": gated_product,
    "linear_int8": product_of_integers,
    "linear_norm": product_of_few_rows,
    "packing": None,
    "pooling": None,
    "rotary": None,
}
FULL = pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])


@pytest.mark.sweep
@FULL
@pytest.mark.parametrize("op", GATES)
def test_launches_fit(op, full):
    rows = compiled(op, *["--full"] * full)
    # The cast to 8-bit floats needs 8.9
    assert_fit(rows, *[frozenset((90, 100, 120))] * (op == "linear_fp8"))
    module = importlib.import_module(f"fastbert.kernels.{op}")
    assert {r["kernel"] for r in rows} == {name for name in vars(module) if name.endswith("_kernel")}
    for row in rows if GATES[op] else ():
        GATES[op](row)
    if op == "first_attention":
        assert {row["arch"] for row in rows if "-1024x" in row["job"]} == {80, 90, 100}


@pytest.mark.sweep
def test_the_last_to_arrive_sees_what_all_have_stored():
    """The order of memory in kernels/linear_norm.py, step by step, in PTX and in machine code.

    Stores of sums, a barrier of the block, a fence of the GPU with one atomic, a barrier, and loads past L1.
    """
    rows = rows_of("tests/support/memory_order_of_linear_norm.py", "80", "90", "100", "120")
    assert [row["arch"] for row in rows] == [80, 90, 100, 120]
    for row in rows:
        assert row["ptx"] == ["store", "barrier", "atomic", "barrier", "load"], row
        assert row["sass"] == ["store", "barrier", "fence", "atomic", "barrier", "load"], row


# kernels of the tables
MAY_BE_TUNED = (
    *("attention", "attention_bwd", "feed_forward_bwd", "layer_norm", "layer_norm_bwd", "linear"),
    *("linear_bwd", "linear_norm"),
)


@pytest.mark.sweep
@FULL
@pytest.mark.parametrize("op", MAY_BE_TUNED)
def test_kernels_that_may_be_tuned(op, full):
    """Every candidate of every entry of the tuner compiles, as it is timed and with all options it serves."""
    from bench import tune
    from fastbert.kernels import feed_forward, linear
    from tests.support.triton_compile import tuning_tasks

    rows = compiled(op, "--tuning", *["--full"] * full)
    assert_fit(rows)
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


@pytest.mark.sweep
def test_a_spill_is_seen():
    rows = compiled("layer_norm", "--jobs", "1", "--max-registers", "32")
    assert [spills(r) for r in rows if r["kernel"] == "_layer_norm_bwd_kernel"] == [True]
