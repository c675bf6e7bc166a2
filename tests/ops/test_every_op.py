"""What holds of every public op on every backend here: layouts, frozen operands, upstream gradients."""

from __future__ import annotations

import math

import pytest
import torch

from fastbert.runtime import dispatch
from fastbert.runtime.table import INFERENCE_ONLY, TABLE
from tests.support.hostile.public_ops import FIXED, PUBLIC, TABLES
from tests.support.inputs import name
from tests.support.ops import LAYOUTS, assert_compiled_is_eager, serves

OPS = [
    op
    for op in PUBLIC
    if not op.startswith("encoder_layer,") and op not in ("encoder_layer", "linear, panels")
]
MOVING = ("pack", "unpack")
LINEAR = (*MOVING, "rotary")  # which have derivatives of every order


def table_op(op: str) -> str:
    """The name of a public op's row in the table of backends."""
    return "packing" if op in MOVING else op.partition(",")[0]


TRAINED = [op for op in OPS if table_op(op) not in INFERENCE_ONLY]


def served(ops):
    return [
        pytest.param(op, backend, id=f"{op}-{backend}")
        for op in ops
        for backend in TABLE["cpu"][table_op(op)]
        if serves(table_op(op), backend, torch.float32)
    ]


def is_float(t) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def trainable(operands) -> list[str]:
    """The operands that have a gradient."""
    return [n for n, t in operands.items() if is_float(t) and n not in FIXED]


def results(op, operands, trained=None, dy=lambda t: t):
    """The output and the gradients of `trained` (None: of every float operand), for the op's own numbers."""
    leaves = {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in operands.items()}
    wanted = [n for n in trainable(leaves) if trained is None or n in trained]
    if table_op(op) in INFERENCE_ONLY:
        wanted = []
    for n in wanted:
        leaves[n].requires_grad_()
    y = PUBLIC[op].function(**leaves)
    assert y.requires_grad == bool(wanted)
    upstream = dy(torch.linspace(-1, 2, y.numel()).reshape(y.shape))
    grads = torch.autograd.grad(y, [leaves[n] for n in wanted], upstream) if wanted else ()
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}


def assert_close(actual, expected):
    for n, t in actual.items():
        assert t.shape == expected[n].shape
        torch.testing.assert_close(t, expected[n], rtol=1e-5, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize(("op", "backend"), served(OPS))
def test_layouts_change_nothing_and_no_operand_is_written(op, backend):
    base = PUBLIC[op].args()
    with dispatch.use_backend(**{table_op(op): backend}):
        expected = results(op, base)
        for move in LAYOUTS.values():
            moved = {n: move(t) if isinstance(t, torch.Tensor) and t.dim() else t for n, t in base.items()}
            before = {n: t.clone() for n, t in moved.items() if isinstance(t, torch.Tensor)}
            assert_close(results(op, moved, dy=lambda t, move=move: move(t) if t.dim() else t), expected)
            for n, t in before.items():
                assert torch.equal(moved[n], t), f"{n} was written"
        assert_close(results(op, base), expected)


@pytest.mark.parametrize(("op", "backend"), served(TRAINED))
def test_any_operand_may_be_frozen(op, backend):
    """Without gradients there is no graph. An expanded upstream gradient is like any other."""
    base = PUBLIC[op].args()
    floats = trainable(base)
    with dispatch.use_backend(**{table_op(op): backend}):
        expected = results(op, base)
        for some in ([], *([n] for n in floats), *([m for m in floats if m != n] for n in floats)):
            assert_close(results(op, base, some), expected)
        leaves = {n: t.requires_grad_() if n in floats else t for n, t in base.items()}
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y = PUBLIC[op].function(**leaves)
            assert not y.requires_grad
            assert_close({"y": y.clone()}, expected)
        dense, expanded = (
            results(op, base, dy=dy) for dy in (torch.ones_like, lambda t: torch.ones(()).expand(t.shape))
        )
        assert_close(expanded, dense)


@pytest.mark.parametrize("op", TRAINED)
def test_a_second_derivative_is_refused(op):
    leaves = PUBLIC[op].args()
    for n in trainable(leaves):
        leaves[n].requires_grad_()
    leaf = leaves[trainable(leaves)[0]]
    # also if the upstream gradient has none itself
    for loss in (lambda y: y.square().sum(), lambda y: y.sum()):
        (grad,) = torch.autograd.grad(loss(PUBLIC[op].function(**leaves)), leaf, create_graph=True)
        if op in LINEAR:
            assert not grad.requires_grad or grad.sum().backward() is None
            continue
        with pytest.raises(RuntimeError, match="differentiated once"):
            grad.sum().backward()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name)
@pytest.mark.parametrize("op", TRAINED)
def test_repeats_are_bit_equal(op, dtype):
    base, kept = PUBLIC[op].args(), ("gate", *TABLES)
    base = {n: t.to(dtype) if is_float(t) and n not in kept else t for n, t in base.items()}
    first = results(op, base, dy=lambda t: t.to(dtype if "entropy" not in op else t.dtype))
    for _ in range(5):
        for n, t in results(op, base, dy=lambda t: t.to(dtype if "entropy" not in op else t.dtype)).items():
            assert torch.equal(t, first[n]), n


LEADING = {  # operands with any number of leading dimensions
    "embedding": ("input_ids", "position_ids", "token_type_ids"),
    "feed_forward": ("x",),
    "layer_norm": ("x", "residual"),
    "layer_norm, none": ("x", "residual"),
    "layer_norm, rms": ("x", "residual"),
    "linear": ("x", "residual"),
    "linear_fp8": ("x",),
    "linear_int8": ("x",),
    "linear_norm": ("x", "residual"),
}


@pytest.mark.parametrize("lead", ((2, 2), (), (0,), (2, 0)), ids=str)
@pytest.mark.parametrize(("op", "backend"), served(LEADING))
def test_any_leading_dimensions(op, backend, lead):
    base, rows = PUBLIC[op].args(), math.prod(lead)
    some = {n: base[n][:rows].reshape((*lead, *base[n].shape[1:])) for n in LEADING[op]}
    with dispatch.use_backend(**{table_op(op): backend}):
        whole, found = results(op, base)["y"], results(op, base | some)
    assert found["y"].shape == (*lead, whole.shape[-1])
    assert_close({"y": found["y"]}, {"y": whole[:rows].reshape(found["y"].shape)})
    if rows == 0:
        assert not any(t.any() for t in found.values())


@pytest.mark.parametrize("op", INFERENCE_ONLY)
def test_ops_for_inference_refuse_gradients(op):
    base = PUBLIC[op].args()
    for leaf in filter(is_float, base.values()):
        leaf.requires_grad_()
        with pytest.raises(RuntimeError, match=r"for inference|requires a gradient.*no_grad"):
            PUBLIC[op].function(**base)
        with torch.no_grad():
            PUBLIC[op].function(**base)
        leaf.requires_grad_(False)


# operands with one row per token; linear_norm is never compiled
ROWS = {op: names for op, names in LEADING.items() if op != "linear_norm"} | {
    "cross_entropy": ("logits", "labels"),
    "feed_forward, gated": ("x",),
    "linear, gated": ("x", "residual"),
    "linear_cross_entropy": ("x", "labels"),
    "linear_distillation": ("x", "teacher_x"),
    "rotary": ("x", "positions"),
}


@pytest.mark.sweep_of(*(op for op in ROWS if op not in ("cross_entropy", "linear")))
@pytest.mark.parametrize("op", ROWS)
def test_compiled_is_eager(op):
    """Behind a producer that permutes."""
    base = PUBLIC[op].args()
    names = [n for n, t in base.items() if isinstance(t, torch.Tensor)]
    trained = trainable(base) if op in TRAINED else ()

    def step(*tensors):
        given = dict(zip(names, tensors, strict=True))
        permuted = {n: given[n].mT.contiguous().mT for n in ROWS[op] if given[n].dim() > 1}
        return PUBLIC[op].function(**base | given | permuted)

    def inputs_of(times):
        rows = [torch.cat([base[n]] * times) if n in ROWS[op] else base[n] for n in names]
        return [t.detach().requires_grad_(n in trained) for n, t in zip(names, rows, strict=True)]

    assert_compiled_is_eager(step, inputs_of, (2, 3, 5))
