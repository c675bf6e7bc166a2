"""Hostile numbers, one table per door: `fastbert._C`, `torch.ops.fastbert`, and the public functions.

A call that gets a hostile length, size, stride, id, bias shape, code or number of threads raises an error, or
returns what the call without it returns. It touches no memory that is not the caller's. The tables are in
tests/support/hostile (`exports.py`, `custom_ops.py`, `public_ops.py`). All are tried in a process of their
own, `python -m tests.support.hostile.doors`; that of `fastbert._C` fails where a function was not tried.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastbert.ops import encoder_layer as encoder_layer_op
from fastbert.runtime import dispatch, loader
from fastbert.runtime.table import INFERENCE_ONLY
from tests.support.hostile.custom_ops import OPS, differ
from tests.support.hostile.public_ops import FIXED, PUBLIC, layer_call, layer_operands
from tests.support.hostile.values import DIM, HEADS, floats

_C = loader.extension
ROOT = Path(__file__).resolve().parents[2]
needs_kernels = pytest.mark.skipif(
    _C is None or _C.best_cpu_isa() == "none", reason="the CPU's compiled kernels are not here"
)


# --- tensors whose memory does not hold their values --------------------------------------------------------


def negated(t):
    """A view with the negative bit, of the values of `t`."""
    return torch._neg_view(-t)


def imaginary(t):
    """The same values as users get them: the imaginary part of a conjugate."""
    return torch.complex(torch.zeros_like(t), -t).conj().imag


def lazily(operands, make):
    """Apply `make` to every floating-point tensor, and `negated` to all others."""
    return {
        n: t if not isinstance(t, torch.Tensor) else make(t) if t.is_floating_point() else negated(t)
        for n, t in operands.items()
    }


LAZY = {
    name: public for name, public in PUBLIC.items() if name not in ("attention, padded", "linear, panels")
}
UNTRAINED = ("encoder_layer", "encoder_layer, kept", *INFERENCE_ONLY)


@needs_kernels
@pytest.mark.parametrize("make", [negated, imaginary], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", LAZY)
def test_the_negative_bit_changes_nothing(name, make):
    """In every backend, of every operand, and of the gradient that arrives."""
    base = PUBLIC[name].args()
    own = base["weight"].dtype if name in ("linear_fp8", "linear_int8") else None
    if own is not None:  # 8 bits have no negative view of their own kind
        base["weight"] = base["weight"].float()
    lazy = lazily(base, make)
    if own is not None:
        base["weight"] = lazy["weight"] = base["weight"].to(own)
    if own == torch.int8:
        lazy["weight"] = negated(base["weight"])
    assert any(isinstance(t, torch.Tensor) and t.is_neg() for t in lazy.values())
    backends = {
        "encoder_layer": [None],
        "encoder_layer, kept": [None],
        "encoder_layers": ["aten", "reference"],
        "linear_fp8": ["aten", "reference"],
        "pooling": ["aten", "reference"],
        "first_attention": ["aten", "reference"],
        "linear_norm": ["aten", "reference"],
    }
    for backend in backends.get(name, ["cpu", "aten", "reference"]):
        with dispatch.use_backend(backend) if backend else contextlib.nullcontext():
            results = []
            for operands in (base, lazy):
                leaves = {
                    n: t.detach().requires_grad_()
                    if isinstance(t, torch.Tensor) and t.is_floating_point() and n not in FIXED
                    else t
                    for n, t in operands.items()
                }
                if name in UNTRAINED:
                    leaves = operands
                y = PUBLIC[name].function(**leaves)
                grads = []
                if y.requires_grad:
                    dy = torch.linspace(-1, 2, y.numel()).reshape(y.shape)
                    wanted = [t for t in leaves.values() if isinstance(t, torch.Tensor) and t.requires_grad]
                    grads = torch.autograd.grad(y, wanted, dy if operands is base else make(dy))
                results.append((y.detach(), *grads))
            assert differ(*results, values=True) == "", backend


@needs_kernels
@pytest.mark.parametrize("name", [name for name in LAZY if name not in UNTRAINED])
def test_a_gradient_of_zero_without_memory(name):
    for backend in ["aten", "reference"] if name == "pooling" else ["cpu", "aten", "reference"]:
        with dispatch.use_backend(backend):
            leaves = {
                n: t.requires_grad_()
                if isinstance(t, torch.Tensor) and t.is_floating_point() and n not in FIXED
                else t
                for n, t in PUBLIC[name].args().items()
            }
            y = PUBLIC[name].function(**leaves)
            wanted = [t for t in leaves.values() if isinstance(t, torch.Tensor) and t.requires_grad]
            for grad in torch.autograd.grad(y, wanted, torch._efficientzerotensor(y.shape)):
                assert not grad.any()
            zero = {
                n: torch._efficientzerotensor(t.shape) if t is leaves.get("x") else t
                for n, t in leaves.items()
            }
            if "x" in leaves:
                plain = {n: torch.zeros_like(t) if t is leaves["x"] else t for n, t in leaves.items()}
                assert torch.equal(PUBLIC[name].function(**zero), PUBLIC[name].function(**plain))


@needs_kernels
@pytest.mark.parametrize("int8", [False, True], ids=["linear", "linear_int8"])
def test_packed_weights_and_layers_of_negative_views(int8):
    """Panels and fused layers read weights by address too."""
    from fastbert.ops import linear as linear_op
    from fastbert.ops import linear_int8 as linear_int8_op

    weight = torch.randint(-9, 9, (3, 40)).to(torch.int8) if int8 else torch.randn(3, 40)
    pack = (linear_int8_op if int8 else linear_op).panel_maker(torch.device("cpu"), torch.float32)
    assert torch.equal(pack(negated(weight)), pack(weight))
    make, _, _ = encoder_layer_op.launchers(torch.device("cpu"), torch.float32, "linear")
    operands = layer_operands()
    hidden, inner = HEADS * DIM, 7
    shapes = [(hidden, hidden)] * 4 + [(inner, hidden), (hidden, inner)]
    linears, norms = [(floats(*s), floats(s[0])) for s in shapes], [(floats(hidden), floats(hidden))] * 2
    results = []
    for change in (lambda t: t, negated):
        weights = make(
            [(change(w), None, None, change(b), None, None, False) for w, b in linears],
            [tuple(map(change, n)) for n in norms],
        )
        results.append(layer_call(**{**operands, "weights": weights}))
    assert torch.equal(*results)


# --- the tests ----------------------------------------------------------------------------------------------


@pytest.mark.sweep
@needs_kernels
def test_hostile_numbers_reach_nothing():
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.hostile.doors"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=900,
    )
    tried = run.stdout.splitlines()
    assert run.returncode == 0, f"{run.returncode} after {tried[-1:]}: {run.stderr[-3000:]}"
    assert len(tried) > 4000, len(tried)


def test_every_custom_op_has_rows():
    registered = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fastbert::")
    }
    assert set(OPS) == registered


FROM_FORWARD = {
    "attention_bwd": ("dout", "out", "lse", "keep_bits", "places"),
    "cross_entropy_bwd": ("dloss", "lse", "count"),
    "embedding_bwd": ("z", "ln_weight", "mean", "rstd", "input_ids", "position_ids", "token_type_ids"),
    "feed_forward_bwd": ("x", "up_weight", "down_weight", "pre", "inner"),
    "layer_norm_bwd": ("dy", "weight", "mean", "rstd", "dsum"),
    "linear_bwd": ("x", "weight", "pre"),
    "linear_cross_entropy_bwd": ("dloss", "lse", "count", "logits"),
    "linear_distillation_bwd": ("dloss",),
    "packing_bwd": ("x", "indices"),
    "pooling_bwd": ("dy", "y"),
    "rotary_bwd": ("dy", "cos", "sin", "positions"),
}


@pytest.mark.parametrize(("op", "names"), FROM_FORWARD.items())
def test_what_backward_gets_is_refused_by_name_before_a_backend_sees_it(op, names):
    """One backend may ignore it on a CPU, where another reads it on a GPU unchecked."""
    assert set(FROM_FORWARD) == {name for name in OPS if name.endswith("_bwd")}
    base = OPS[op].args()
    for name in names:
        wrong = base[name].new_zeros(*base[name].shape, 2)
        with dispatch.use_backend("aten"), pytest.raises(ValueError, match=rf"^{name}: expected"):
            getattr(torch.ops.fastbert, op)(*{**base, name: wrong}.values())


def test_every_public_op_has_rows():
    ops = {*dispatch.OPS, "pack", "unpack", "encoder_layer"} - {"packing"}
    assert {name.partition(",")[0] for name in PUBLIC} == ops


@pytest.mark.sweep
def test_the_fence_is_one():
    """An access before a fenced tensor is reported, and one behind it ends the process."""
    code = (
        "import ctypes, torch\n"
        "from tests.support.hostile.fences import Fence\n"
        "fence = Fence()\n"
        "t = fence.copy(torch.ones(5))\n"
        "ctypes.memset(t.data_ptr() - 1, 0, 1)\n"
        "try:\n"
        "    fence.check()\n"
        "except AssertionError as error:\n"
        "    print(error, flush=True)\n"
        "ctypes.memset(t.data_ptr() + 20, 0, 1)\n"
        "print('still here')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert run.returncode < 0
    assert run.stdout == "written before the start of a tensor\n"
