"""What all kernels keep: the error rule, the same bits at each call, rows with gaps, and far offsets.

The inputs of one launcher are those of its own tests.
"""

from __future__ import annotations

import pytest
import torch

from fastbert import testing
from fastbert.backends import triton as backend
from fastbert.ops.activation import ACTIVATIONS
from fastbert.ops.linear_int8 import LinearInt8Inputs
from fastbert.runtime import dispatch
from fastbert.runtime.table import INFERENCE_ONLY
from fastbert.testing import verdicts
from fastbert.testing.error_rule import evaluate
from tests.support.launchers import embedding_fwd, layer_norm_bwd, layer_norm_fwd
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    HugeStrides,
    assert_bit_equal,
    assert_repeats,
    far,
    needs_lazy_memory,
    packed,
    padded,
    set_backends,
)
from tests.triton import (
    test_cross_entropy,
    test_embedding,
    test_embedding_backward,
    test_feed_forward,
    test_first_attention,
    test_layer_norm,
    test_linear,
    test_linear_backward,
    test_linear_fp8,
    test_linear_gated,
    test_linear_int8,
    test_linear_norm,
    test_packing,
    test_pooling,
    test_rotary,
)

pytestmark = pytest.mark.usefixtures("checked_memory")
BF16 = torch.bfloat16
OPS = [op for op in backend.DTYPES if op in dispatch.OPS]
# attention's tests cut theirs by length; the loss of a linear layer adds no kernel to that of cross_entropy
# Each case in one floating-point dtype, in turns; `make exhaustive` has them in every one.
CASES = [
    pytest.param(
        *(op, dtype, case),
        marks=pytest.mark.slow if op != "packing" and (i + j) % len(backend.DTYPES[op]) else (),
        id=f"{op}-{str(dtype).removeprefix('torch.')}-{case}",
    )
    for op in OPS
    if op != "attention"
    for i, case in enumerate(
        testing.cases(op)[: 3 if op == "linear_cross_entropy" else None]
        + (testing.gpu_cases(op)[2:] if op == "first_attention" else [])
    )
    for j, dtype in enumerate(backend.DTYPES[op])
]


def linear_norm_of(**args):
    return [test_linear_norm.kernels.linear_norm_fwd(test_linear_norm.LinearNormInputs(**args))]


def layer_norm_backward_args():
    args = test_layer_norm.forward_args(3, 70, BF16)
    _, z, mean, rstd = layer_norm_fwd(test_layer_norm.kernels, *args.values())
    given = {"dy": torch.randn_like(z), "z": z, "weight": args["weight"], "mean": mean, "rstd": rstd}
    options = {name: args[name] for name in ("dropout_p", "seed", "offset")}
    return given | options | {f"need_{n}": True for n in ("dx", "dweight", "dxbias", "dresidual")}


def pack_and_unpack(x, packed):
    indices = torch.tensor([0, 3, 4], device=DEVICE)
    kernels = test_packing.kernels
    return kernels.packing_fwd(x, indices), kernels.packing_bwd(packed, indices, 5)


def pooled(hidden, cu_seqlens, dy=None):
    kernels = test_pooling.kernels
    ys = [kernels.pooling_fwd(hidden, cu_seqlens, mode) for mode in test_pooling.MODES]
    if dy is None:
        return ys
    pairs = zip(ys, test_pooling.MODES, strict=True)
    return [kernels.pooling_bwd(dy, hidden, y, cu_seqlens, mode) for y, mode in pairs]


def rotated(x, cos, sin, positions, dy):
    args = cos, sin, positions, True
    kernels, x, dy = test_rotary.kernels, *(t.unflatten(1, (3, 8)) for t in (x, dy))
    return kernels.rotary_fwd(x, *args), kernels.rotary_bwd(dy, *args)


def rotary_args():
    x, *tables = test_rotary.inputs_of(5, 3, 8, 3, BF16)
    args = dict(zip(("cos", "sin", "positions"), tables, strict=True))
    return {"x": x.flatten(1), **args, "dy": x.flip(0).flatten(1)}


# launcher -> (its kernels, its arguments, the call, which of them are matrices)
LAUNCHERS = {
    "cross_entropy": (
        test_cross_entropy.kernels,
        lambda: dict(zip(("logits", "labels"), test_cross_entropy.batch(5, 24, BF16), strict=True)),
        lambda **args: test_cross_entropy.run(test_cross_entropy.kernels, **args),
        ("logits",),
    ),
    "embedding": (
        test_embedding.kernels,
        lambda: test_embedding.forward_args(9, 70, BF16),
        lambda **args: test_embedding.run(args),
        ("word", "position", "segment"),
    ),
    "embedding_backward": (
        test_embedding_backward.kernels,
        lambda: test_embedding_backward.arguments(9, 70),
        lambda **args: test_embedding_backward.run(args),
        ("dy", "z"),
    ),
    "feed_forward": (
        test_feed_forward.kernels,
        lambda: test_feed_forward.arguments(5, 72, 48, BF16),
        lambda **args: test_feed_forward.run(args),
        ("dy", "down_weight"),
    ),
    "first_attention": (
        test_first_attention.kernels,
        lambda: test_first_attention.operands((2, 0, 3), bias="full", gate=True),
        lambda **args: [test_first_attention.run(args)],
        ("x", "key_weight", "value_weight"),
    ),
    "layer_norm": (
        test_layer_norm.kernels,
        lambda: test_layer_norm.forward_args(3, 70, BF16),
        lambda **args: layer_norm_fwd(test_layer_norm.kernels, *args.values()),
        ("x", "residual"),
    ),
    "layer_norm_backward": (
        test_layer_norm.kernels,
        layer_norm_backward_args,
        lambda **args: layer_norm_bwd(test_layer_norm.kernels, *args.values()),
        ("dy", "z"),
    ),
    "linear": (
        test_linear.kernels,
        lambda: test_linear.forward_args(35, 40, 72, BF16),
        lambda **args: test_linear.kernels.linear_fwd(*test_linear.inputs_of(args)),
        ("x", "weight", "residual"),
    ),
    "linear_backward": (
        test_linear_backward.kernels,
        lambda: test_linear_backward.arguments(5, 24, 72),
        lambda dy, pre, **_: test_linear_backward.passed(dy, pre, "gelu"),
        ("dy", "pre"),
    ),
    "linear_fp8": (
        test_linear_fp8.kernels,
        lambda: {"x": test_linear_fp8.rows_of(5, 72)},
        lambda x: [t.float() for t in test_linear_fp8.kernels.rounded_rows(x, "gelu")],
        ("x",),
    ),
    "linear_gated": (
        test_linear_gated.kernels,
        lambda: test_linear_gated.arguments(35, 40, 72, BF16),
        lambda **args: test_linear_gated.kernels.linear_fwd(*test_linear.inputs_of(args)),
        ("x", "weight", "residual"),
    ),
    "linear_gated_backward": (
        test_linear_gated.kernels,
        lambda: test_linear_gated.backward_arguments(5, 72),
        lambda **args: test_linear_gated.kernels.gate_bwd(*args.values()),
        ("dy", "pre"),
    ),
    "linear_int8": (
        test_linear_int8.kernels,
        lambda: test_linear_int8.arguments(35, 72, 40),
        lambda **args: [test_linear_int8.product(**args)],
        ("x",),
    ),
    "linear_norm": (
        test_linear_norm.kernels,
        lambda: test_linear_norm.arguments(5, 72, 40)._asdict(),
        linear_norm_of,
        ("x", "weight", "residual"),
    ),
    "packing": (
        test_packing.kernels,
        lambda: {n: test_packing.random_bits(k, 24, torch.int16) for n, k in (("x", 5), ("packed", 3))},
        pack_and_unpack,
        ("x", "packed"),
    ),
    "pooling": (
        test_pooling.kernels,
        lambda: dict(zip(("hidden", "cu_seqlens"), packed([3, 2], 20), strict=True)),
        pooled,
        ("hidden",),
    ),
    "pooling_backward": (
        test_pooling.kernels,
        lambda: (
            dict(zip(("hidden", "cu_seqlens"), packed([3, 2], 20), strict=True))
            | {"dy": torch.arange(40.0, device=DEVICE).reshape(2, 20)}
        ),
        pooled,
        ("hidden", "dy"),
    ),
    "rotary": (test_rotary.kernels, rotary_args, rotated, ("x", "dy")),
}
# kernels whose results may have gaps too
FAR_RESULTS = ("embedding", "layer_norm", "linear", "packing")
# limits of a program's columns, by kernels
LIMITS = {
    "embedding": ("ONE_BLOCK", "WIDE_BLOCK"),
    "embedding_backward": ("BWD_ONE_BLOCK", "WIDE_BLOCK"),
    "layer_norm": ("FWD_ONE_BLOCK", "WIDE_BLOCK"),
    "layer_norm_backward": ("BWD_ONE_BLOCK", "WIDE_BLOCK"),
    "linear_fp8": ("ONE_BLOCK",),
    "linear_int8": ("ONE_BLOCK",),
}
LAYOUTS = [(op, gap, ()) for op in LAUNCHERS for gap in (8, 9)] + [(op, 9, LIMITS[op]) for op in LIMITS]
LAYOUT_IDS = [f"{op}-{gap}{'-column_blocks' if limits else ''}" for op, gap, limits in LAYOUTS]


@pytest.mark.parametrize(("op", "gap", "limits"), LAYOUTS, ids=LAYOUT_IDS)
def test_rows_with_gaps(op, gap, limits, monkeypatch):
    """Of NaN, each matrix has its own. Results share no memory: a custom op may not return aliases."""
    kernels, arguments, run, names = LAUNCHERS[op]
    for limit in limits:
        monkeypatch.setattr(kernels, limit, 32)
    args = arguments()
    strided = {name: padded(args[name], gap * (i + 1)) for i, name in enumerate(names)}
    actual, expected = run(**args | strided), run(**args)
    for a, e in zip(actual, expected, strict=True):
        if gap % 8:  # other tiles, as no tensor map has such rows
            torch.testing.assert_close(a, e, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(a, e)
    places = [t.untyped_storage().data_ptr() for t in actual if t.numel()]
    assert len(set(places)) == len(places)


# launchers whose results have another meaning without rows have tests of their own
NO_ROWS = [
    pytest.param(op, limits, id=op + "-column_blocks" * bool(limits))
    for op in LAUNCHERS
    if op.partition("_")[0] not in ("cross", "first", "packing", "pooling")
    for limits in dict.fromkeys(((), LIMITS.get(op, ())))
]


@pytest.mark.parametrize(("op", "limits"), NO_ROWS)
def test_no_rows(op, limits, monkeypatch):
    """Results have none either, and sums over the rows are 0."""
    kernels, arguments, run, _ = LAUNCHERS[op]
    for limit in limits:
        monkeypatch.setattr(kernels, limit, 32)
    args = arguments()
    tensors = {n: t for n, t in args.items() if isinstance(t, torch.Tensor)}
    rows = len(next(iter(tensors.values())))
    none = {n: t[:0] for n, t in tensors.items() if len(t) == rows}
    for a, full in zip(run(**args | none), run(**args), strict=True):
        expected = full[:0] if len(full) == rows else full
        assert (a.dtype, a.shape) == (expected.dtype, expected.shape)
        assert not a.any()


@pytest.mark.sweep
@needs_lazy_memory
@pytest.mark.parametrize(("op", "gap", "limits"), LAYOUTS, ids=LAYOUT_IDS)
def test_offsets_beyond_2_to_31_elements(op, gap, limits, monkeypatch):
    kernels, arguments, run, names = LAUNCHERS[op]
    for limit in limits:
        monkeypatch.setattr(kernels, limit, 32)
    args = arguments()
    expected = run(**args | {name: padded(args[name], gap) for name in names})
    if op in FAR_RESULTS:
        monkeypatch.setattr(kernels, "torch", HugeStrides())
    torch.use_deterministic_algorithms(False)  # deterministic mode would fill the lazy pages
    actual = run(**args | {name: far(args[name], gap) for name in names})
    assert any(t.dim() == 2 and t.stride(0) > 2**30 for t in actual) == (op in FAR_RESULTS)
    assert_bit_equal(actual, expected)


def ones_through(op, pre, activation):
    """(g, dbias): ones that pass an activation's slope at `pre`."""
    ones = torch.ones_like(pre)
    if op == "linear_backward":
        return test_linear_backward.passed(ones, pre, activation)
    return test_feed_forward.kernels.inner_gradient(ones[:, :1], ones[:1].T, pre, activation, True)


SLOPES = pytest.mark.parametrize("op", ["feed_forward", "linear_backward"])


@SLOPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_limits_and_nan_of_slopes(op, activation, dtype):
    """At ±∞ 1 and 0, tanh's 0; at 0 a half, relu's 0, tanh's 1; at NaN NaN, relu's 1 as in PyTorch."""
    pre = torch.tensor([[float("inf"), -float("inf"), 0.0, float("nan")]], dtype=dtype, device=DEVICE)
    g = ones_through(op, pre, activation)[0][0]
    expected = {"relu": [1.0, 0.0, 0.0], "tanh": [0.0, 0.0, 1.0]}.get(activation, [1.0, 0.0, 0.5])
    assert g[:3].tolist() == expected
    assert g[3].isnan() if activation != "relu" else g[3] == 1


@SLOPES
def test_a_nan_stays_in_its_column(op):
    pre = torch.randn(70, 40, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    clean = ones_through(op, pre.bfloat16(), "gelu")
    pre[33, 7] = float("nan")
    dirty = ones_through(op, pre.bfloat16(), "gelu")
    others = [c for c in range(40) if c != 7]
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[..., others], b[..., others])
    assert dirty[1][7].isnan()
    assert dirty[0].isnan().sum() == 1


def launch_embedding_backward(kernels, vector, rows, x):
    kernels._table_bwd(x, rows.long(), 2**20, -1, torch.float32)
    kernels._dz_and_sums(x, x, vector, rows, rows, 0.0, None, 0, x, None, None)


GRIDS = {
    "cross_entropy": lambda k, _, rows, x: (
        k.cross_entropy_fwd(x, rows, -100, 0.0),
        k.cross_entropy_bwd(rows, x, rows, rows, rows, -100, 0.0),
    ),
    "embedding": lambda k, v, rows, x: embedding_fwd(
        k, None, x, *[None] * 5, v, v, 1e-12, 0.0, None, 0, False
    ),
    "embedding_backward": launch_embedding_backward,
    "layer_norm": lambda k, v, rows, x: (
        layer_norm_fwd(k, x, v, None, None, None, 1e-12, 0.0, None, 0, True),
        layer_norm_bwd(k, x, x, v, rows, rows, 0.0, None, 0, True, False, False, False),
    ),
    "linear_backward": lambda k, _, rows, x: k._activation_bwd(x, x, "gelu", True, False),
    "linear_fp8": lambda k, _, rows, x: k.rounded_rows(x),
    "linear_int8": lambda k, v, rows, x: k.linear_int8_fwd(
        LinearInt8Inputs(x, x[:16], v, panels=v.repeat(4))
    ),
    "packing": lambda k, _, rows, x: (k.packing_fwd(x, rows.long()), k.packing_bwd(x, rows.long(), 2**25)),
    "pooling": lambda k, _, rows, x: (k.pooling_fwd(x, rows, "mean"), k.pooling_bwd(x, x, x, rows, "mean")),
    "rotary": lambda k, v, rows, x: k.rotary_fwd(x.unflatten(1, (4, 4)), x[:, :2], x[:, :2], rows, False),
}


@pytest.mark.parametrize("op", GRIDS)
def test_what_may_be_many_is_on_the_grid_axis_that_has_no_limit(op, monkeypatch):
    kernels, grids = LAUNCHERS[op][0], []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **config: grids.append(grid))
    GRIDS[op](kernels, *(torch.empty(shape, device="meta") for shape in (16, 2**24, (2**24, 16))))
    assert grids
    assert all(n <= 65535 for grid in grids for n in grid[1:])


@pytest.mark.parametrize(("op", "dtype", "case"), CASES)
def test_cases(op, dtype, case):
    rows = testing.run_case(case, "triton", dtype, DEVICE)
    trained = dtype.is_floating_point and op not in INFERENCE_ONLY
    assert any(row.quantity.startswith("d") for row in rows) == trained
    assert [f"{row.quantity}: {row.reason}" for row in rows if not row.passed] == []


@pytest.mark.sweep
@pytest.mark.parametrize("op", [op for op in OPS if op != "linear_norm"])
def test_the_table_serves_the_same_bits_each_time(op, monkeypatch, checked_memory):
    """After the self-check. No sum is atomic, as on a GPU the order of such sums changes."""
    set_backends(monkeypatch, op, "triton", "reference")
    case = testing.small_cases(op)[-1]
    inputs = case.inputs(BF16, DEVICE)
    before = {name: t.clone() for name, t in inputs.items() if isinstance(t, torch.Tensor)}
    y = case.call(**inputs)
    douts = [torch.randn_like(t) for t in (y if isinstance(y, tuple) else (y,))]
    assert verdicts.found
    assert all(verdict.passed for verdict in verdicts.found.values())
    launches = checked_memory.launches
    trained = op not in INFERENCE_ONLY
    assert_repeats(
        checked_memory, lambda: evaluate(case.call, case, inputs, None, trained, douts).values(), 1
    )
    assert DEVICE.type == "cuda" or checked_memory.launches >= launches + 2 * (1 + trained)
    for name, t in before.items():
        torch.testing.assert_close(inputs[name], t, rtol=0, atol=0, equal_nan=True)
