"""What the launchers launch compiles for every GPU generation without spilling, within its shared memory."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def compiled(op: str, *options: str) -> list[dict]:
    """Rows of tests/triton_compile.py, run with the interpreter off."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests/triton_compile.py"), op, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_fit(rows: list[dict], kernels: set[str]) -> None:
    assert {r["kernel"] for r in rows} == kernels
    assert {r["arch"] for r in rows} == {80, 90, 100, 120}
    assert [r for r in rows if r["stack"] or r["local"]] == []  # spilled registers live on the stack
    assert [r for r in rows if r["dynamic_shared"] > r["shared_limit"]] == []


LAYER_NORM = {
    "_layer_norm_fwd_kernel",
    "_layer_norm_bwd_kernel",
    "_wide_fwd_stats_kernel",
    "_wide_bwd_means_kernel",
    "_sum_partials_kernel",
}


def test_layer_norm():
    assert_fit(compiled("layer_norm"), LAYER_NORM)


@pytest.mark.slow
def test_layer_norm_in_every_config():
    assert_fit(compiled("layer_norm", "--full"), LAYER_NORM)


def assert_linear(rows: list[dict]) -> None:
    """It fits; half precision runs on each generation's tensor cores, moved by TMA where there is one."""
    assert_fit(rows, {"_linear_fwd_kernel"})
    for row in rows:
        plain = row["job"].startswith("float32") or "-771-" in row["job"]
        unit = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}[row["arch"]]
        assert (row["tma"] > 0) == (row["arch"] in (90, 100) and not plain), row
        assert row["tf32"] == 0, row
        if not plain:
            assert row[unit] > 0, row


def test_linear():
    assert_linear(compiled("linear"))


@pytest.mark.slow
def test_linear_in_every_config():
    assert_linear(compiled("linear", "--full"))


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_embedding(full):
    assert_fit(compiled("embedding", *["--full"] * full), {"_embedding_fwd_kernel"})


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_padding(full):
    assert_fit(compiled("padding", *["--full"] * full), {"_pack_kernel", "_unpack_kernel"})


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pooling(full):
    assert_fit(compiled("pooling", *["--full"] * full), {"_pooling_fwd_kernel"})


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
    """Each generation's own matrix product serves half precision, but for tiles under its 64 rows."""
    for r in rows:
        dtype, _, tiles = r["job"].split("-")[:3]
        half, high = dtype != "float32", int(tiles.split("x")[0]) >= 64
        assert (r["wgmma"] > 0) == (r["arch"] == 90 and half and high), r
        assert (r["tcgen05"] > 0) == (r["arch"] == 100 and half and high), r
        assert (r["mma"] > 0) == (half and not (high and r["arch"] in (90, 100))), r
        assert r["tf32"] == 0, r


def test_a_spill_is_seen():
    rows = compiled("layer_norm", "--jobs", "1", "--max-registers", "32")
    assert [r["stack"] > 0 for r in rows if r["kernel"] == "_layer_norm_bwd_kernel"] == [True]
