"""What Triton compiles our kernels to, run in the emulator, keeps the error rule.

Triton's compiler is the independent truth: its layouts, fragments, swizzles and waits must come out right.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fastbert.backends.aten import linear_fp8
from fastbert.testing import error_rule
from tests.ptx.emulator import library
from tests.support import processes

DTYPES = ("bfloat16", "float16", "float32")
ATTENTION = {"_attention_places_kernel", "_attention_fwd_kernel", "_attention_bwd_dq_kernel"}
ATTENTION |= {"_attention_bwd_dkdv_kernel", "_attention_bwd_dbias_kernel", "_attention_bwd_columns_kernel"}
# op -> the kernels of its small cases
OPS = {
    "attention": ATTENTION,
    "attention_received": {"_attention_received_kernel"},
    "cross_entropy": {"_cross_entropy_fwd_kernel", "_mean_loss_kernel", "_cross_entropy_bwd_kernel"},
    "embedding": {
        "_embedding_fwd_kernel",
        "_layer_norm_bwd_kernel",
        "_sum_partials_kernel",
        "_table_bwd_kernel",
    },
    "feed_forward": {"_linear_fwd_kernel", "_feed_forward_bwd_kernel", "_sum_partials_kernel"},
    "first_attention": {
        "_first_attention_asked_kernel",
        "_first_attention_mixed_kernel",
        "_first_attention_value_kernel",
    },
    "layer_norm": {"_layer_norm_fwd_kernel", "_layer_norm_bwd_kernel", "_sum_partials_kernel"},
    "linear": {
        "_linear_fwd_kernel",
        "_linear_bwd_kernel",
        "_linear_gated_bwd_kernel",
        "_sum_partials_kernel",
    },
    "linear_fp8": {"_fp8_rows_kernel"},
    "linear_int8": {"_int8_rows_kernel", "_linear_int8_kernel"},
    "linear_norm": {"_linear_norm_kernel", "_normalize_kernel"},
    "packing": {"_packing_fwd_kernel", "_packing_bwd_kernel"},
    "pooling": {"_pooling_fwd_kernel", "_pooling_bwd_kernel"},
    "rotary": {"_rotary_kernel"},
}


def rows_of(module: str, *options: str) -> list[dict]:
    """What a module of this folder prints, run with Triton's interpreter off."""
    library.engine()  # skips where no compiler is
    return processes.rows_of("-m", f"tests.ptx.{module}", *options)


def assert_right(rows: list[dict], kernels: set[str]) -> None:
    """Every row keeps the error rule, and schedules and seeds change no bit."""
    assert [r for r in rows if r["reason"]] == []
    assert [r for r in rows if r["differs"]] == []
    assert {k for r in rows for k in r["kernels"]} == kernels


@pytest.mark.sweep
@pytest.mark.parametrize("op", OPS)
def test_every_op(op):
    options = [word for dtype in DTYPES for word in ("--dtype", dtype)]
    if op == "linear_fp8":
        if not linear_fp8._scales_rows(torch.device("cpu")):
            pytest.skip("this PyTorch has no product of float8 rows on a CPU")
        options += ["--arch", "90"]
    assert_right(rows_of("emulated_ops", op, *options), OPS[op])


@pytest.mark.sweep
@pytest.mark.parametrize("contract", ((), ("--contract",)), ids=("as Triton", "as ptxas may"))
@pytest.mark.parametrize(("op", "case"), (("layer_norm", "9x1-residual"), ("embedding", "7x11x1-dropout")))
def test_one_number_a_row_has_no_gradient(op, case, contract):
    """What becomes one fma must not leave the rounding of a product; the interpreter has no fma."""
    options = [*contract, *(word for dtype in DTYPES for word in ("--dtype", dtype))]
    rows = rows_of("emulated_ops", op, "--all", "--only", case, *options)
    assert [r for r in rows if r["reason"] or r["differs"]] == []
    assert {r["dtype"] for r in rows} == set(DTYPES)


def test_bytes_do_not_depend_on_the_fusion_of_products_and_sums():
    """Where one rounding less is another integer."""
    rows = rows_of("emulated_ops", "linear_int8", "--only", "ties", "--contract", "--dtype", "float32")
    assert_right(rows, OPS["linear_int8"])


def test_a_deep_sum_of_float32_is_made_in_parts():
    """Its errors are half of one chain's, whose products and sums are rounded in order."""
    rows = rows_of("emulated_ops", "linear", "--all", "--only", "16x3072", "--dtype", "float32")
    assert [r for r in rows if r["reason"] or r["differs"]] == []
    (mean,) = (r["errors"][2] for r in rows if r["quantity"] == "y")
    case = next(c for c in error_rule.cases("linear") if "16x3072" in c.id)
    inputs = case.inputs(torch.float32, "cpu")
    chain = torch.zeros(16, 64)
    for x, weight in zip(inputs["x"].T, inputs["weight"].T, strict=True):
        chain = (chain.double() + x[:, None].double() * weight.double()).float()
    truth = inputs["x"].double() @ inputs["weight"].double().T
    assert mean < 0.6 * (chain - truth).abs().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_every_case(op):
    rows = rows_of("emulated_ops", op, "--all")
    assert [r for r in rows if r["reason"] or r["differs"]] == []
    assert rows
