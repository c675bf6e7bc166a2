"""What Triton compiles our kernels to for sm_90: products of warp groups, tiles moved by TMA, mbarriers."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.ptx.test_triton import DTYPES, OPS, assert_right, rows_of

# op -> options that choose a case large enough for what sm_90 has, and what its kernels then have
LARGER = {
    "attention": (("--gpu", "--only", "70_19"), {"A in memory", "A in registers"}),
    "feed_forward": (("--gpu", "--only", "700"), {"A in memory", "tile global", "tile shared"}),
    "linear": (("--gpu", "--only", "700"), {"A in memory", "tile global", "tile shared"}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("op", OPS)
def test_every_op_on_sm_90(op):
    options = [word for dtype in DTYPES for word in ("--dtype", dtype)]
    assert_right(rows_of("emulated_ops", op, "--arch", "90", *options), OPS[op])


@pytest.mark.sweep
def test_clusters():
    """Blocks that read each other's shared memory, by Triton; tiles that come to all of them, by Gluon."""
    rows = rows_of("emulated_clusters")
    assert [r for r in rows if not r["right"]] == []
    assert {(r["kernel"], r["ctas"]) for r in rows} == {
        (kernel, ctas) for kernel in ("sums_kernel", "multicast_kernel") for ctas in (2, 4)
    }
    assert {"mapa", "ld.shared::cluster", "multicast::cluster"} <= {f for r in rows for f in r["forms"]}


@pytest.mark.sweep
@pytest.mark.parametrize("op", LARGER)
def test_larger_tiles_on_sm_90(op):
    options, forms = LARGER[op]
    rows = rows_of("emulated_ops", op, "--arch", "90", *options)
    assert [r for r in rows if r["reason"] or r["differs"]] == []
    assert forms <= set(rows[-1]["forms"])
