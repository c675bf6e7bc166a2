"""Weights packed for inference: when they are made and dropped, and that they change no result."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from fastbert.backends.cpu import linear as launcher
from fastbert.backends.cpu import sizes
from fastbert.layers import float_linear as layers
from fastbert.layers.linear import apply_linear
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from fastbert.runtime import dispatch, loader, prepared
from tests.support.cpu_truth import assert_same_bits, randn
from tests.support.hf_models import batch, hf_config

FLOAT, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

pytestmark = pytest.mark.skipif(
    loader.cpu_gap() is not None, reason=f"needs the cpu backend: {loader.cpu_gap()}"
)


@pytest.fixture(autouse=True)
def all_on_our_kernels(monkeypatch):
    """Compute all products by our kernels; `aten`, which gets those of few rows, may give other bits."""
    monkeypatch.setattr(launcher, "_FEWEST_ROWS", 0)


@pytest.fixture
def made(monkeypatch):
    """(shape, dtype) of every weight that is packed and kept, in order."""
    seen, real = [], layers.linear_panel_maker

    def panel_maker(*key):
        pack = real(*key)
        if pack is None:
            return None
        return lambda weight: seen.append((tuple(weight.shape), weight.dtype)) or pack(weight)

    monkeypatch.setattr(layers, "linear_panel_maker", panel_maker)
    return seen


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.Linear(24, 70).eval()


def held(*dtypes):
    return [("panels", dtype, False) for dtype in dtypes]


def of_bert(**overrides):
    torch.manual_seed(1)
    return AutoModel.from_config(EncoderConfig.from_hf(hf_config("bert", **overrides))).eval()


def hidden(model, **kwargs):
    with torch.no_grad():
        return model(**batch("bert"), **kwargs).last_hidden_state


# --- when they are made -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (FLOAT, BF16, FP16), ids=str)
def test_made_once_per_weight_and_without_any_effect_on_the_result(module, made, monkeypatch, dtype):
    module.to(dtype)
    inputs = [randn(rows, 24, dtype=dtype) for rows in (1, 5, 40, 300)]
    with torch.no_grad():
        packed = [apply_linear(module, x, "gelu") for x in inputs for _ in range(2)]
        assert made == [((70, 24), dtype)]
        assert prepared.remembered(module) == held(dtype)
        monkeypatch.setattr(layers, "weight_panels", lambda module, x: None)
        plain = [apply_linear(module, x, "gelu") for x in inputs for _ in range(2)]
    for a, b in zip(packed, plain, strict=True):
        assert_same_bits(a, b)


def test_every_linear_layer_of_a_model_has_one(made):
    model = of_bert()
    first = hidden(model)
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)]
    assert sorted(shape for shape, _ in made) == sorted(shapes)
    kept = [name for name in prepared.remembered(model) if name[0] != "layer"]  # that refers to the same
    assert kept == held(*[FLOAT] * len(shapes))
    count = len(made)
    assert_same_bits(hidden(model), first)
    assert len(made) == count


@pytest.mark.parametrize("autocast", (None, BF16), ids=str)
def test_a_model_gives_the_same_bits_with_and_without(monkeypatch, autocast):
    model = of_bert()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        packed = hidden(model)
        assert prepared.remembered(model)
        prepared.clear(model)
        monkeypatch.setattr(layers, "weight_panels", lambda *_, **__: None)
        assert_same_bits(hidden(model), packed)
    # which records that the layer cannot be fused
    assert {name[0] for name in prepared.remembered(model)} <= {"layer"}


def test_one_per_dtype_under_autocast(module, made):
    x = randn(40, 24)
    for _ in range(2):
        for dtype in (None, BF16, FP16):
            with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
                y = apply_linear(module, x)
                assert_same_bits(y, layers.linear(x, module.weight, module.bias))
    assert [dtype for _, dtype in made] == [FLOAT, BF16, FP16]
    assert prepared.remembered(module) == held(FLOAT, BF16, FP16)


def test_float64_is_left_alone(module, made):
    module.double()
    x = randn(40, 24, dtype=torch.float64)
    for dtype in (None, BF16):  # autocast does not touch float64
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
            assert apply_linear(module, x).dtype == torch.float64
    assert made == []
    assert prepared.remembered(module) == []


def test_not_for_another_backend(module, made):
    with torch.no_grad():
        for name in ("aten", "reference"):
            with dispatch.use_backend(name):
                apply_linear(module, randn(40, 24))
        assert made == []
        apply_linear(module, randn(40, 24))
        assert made
        with dispatch.use_backend("aten"):  # the kept panels are not passed to it
            assert layers.weight_panels(module, randn(40, 24)) is None


def test_never_in_training_mode(made):
    model = of_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    inputs = batch("bert")
    model.train()
    model(**inputs).last_hidden_state.sum().backward()
    hidden(model)
    assert made == []
    assert prepared.remembered(model) == []


def test_not_for_many_rows(module, made):
    many = sizes.MANY_ROWS
    with torch.no_grad():
        for shape in ((many, 24), (2, many // 2, 24), (many + 1, 24), (1, many, 24)):
            apply_linear(module, randn(*shape))
            assert made == []
            assert prepared.remembered(module) == []
        apply_linear(module, randn(many - 1, 24))
        assert len(made) == 1


@torch.no_grad()
def test_made_for_each_product_where_they_pass(module, made):
    x = randn(5, 24)
    with layers.passing_panels():
        passing = [apply_linear(module, x) for _ in range(2)]
    assert len(made) == 2
    assert prepared.remembered(module) == []
    kept = apply_linear(module, x)
    assert prepared.remembered(module) == held(FLOAT)
    for one in passing:
        assert_same_bits(one, kept)
    # those that are there are used
    with layers.passing_panels():
        assert_same_bits(apply_linear(module, x), kept)
    assert len(made) == 3
    assert prepared.remembered(module) == held(FLOAT)


def test_replaced_and_hooked_modules_are_called_instead(module, made):
    handle = module.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        apply_linear(module, randn(40, 24))
    assert made == []
    handle.remove()


# --- when they are dropped --------------------------------------------------------------------------------

CHANGES = {
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "copy_": lambda m: m.weight.copy_(m.weight * 2),
    "optimizer": None,
    "swap": lambda m: setattr(m, "weight", nn.Parameter(m.weight * 2)),
    "data": lambda m: setattr(m.weight, "data", m.weight.data * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_packed_anew_and_the_old_one_dropped(module, made, change):
    x = randn(40, 24)
    with torch.no_grad():
        before = apply_linear(module, x)
        old = weakref.ref(layers.weight_panels(module, x))
    if change == "optimizer":
        module.weight.grad = torch.ones_like(module.weight)
        torch.optim.AdamW([module.weight], lr=0.1).step()
    else:
        with torch.no_grad():
            CHANGES[change](module)
    with torch.no_grad():
        after = apply_linear(module, x)
        assert not torch.equal(after, before)
        assert_same_bits(after, layers.linear(x, module.weight, module.bias))
        assert len(made) == 2
        assert prepared.remembered(module) == held(FLOAT)
        gc.collect()
        assert old() is None, "the old copy is still held"


def test_after_inference_a_module_trains_in_eval_mode_and_runs_in_another_dtype(module):
    """The gradients are those of the weight, and a cast weight is another one."""
    x = randn(40, 24)
    with torch.no_grad():
        apply_linear(module, x)
    found, expected = (
        torch.autograd.grad(y.square().sum(), module.parameters())
        for y in (apply_linear(module, x), nn.functional.linear(x, module.weight, module.bias))
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    module.bfloat16()
    with torch.no_grad():
        y = apply_linear(module, x.bfloat16())
    assert_same_bits(y, layers.linear(x.bfloat16(), module.weight, module.bias).detach())


def test_train_drops_them():
    model = of_bert()
    hidden(model)
    assert prepared.remembered(model)
    packed = weakref.ref(prepared._cache[model.layer_list()[0].output.dense][("panels", FLOAT, False)][1])
    model.train()
    assert prepared.remembered(model) == []
    gc.collect()
    assert packed() is None


def test_freed_with_the_module(module):
    with torch.no_grad():
        apply_linear(module, randn(40, 24))
        packed = weakref.ref(layers.weight_panels(module, randn(40, 24)))
    before = len(prepared._cache)
    assert packed() is not None
    owner = nn.Sequential(nn.Linear(24, 9).eval())
    with torch.no_grad():
        apply_linear(owner[0], randn(40, 24))
        other = weakref.ref(layers.weight_panels(owner[0], randn(40, 24)))
    assert len(prepared._cache) == before + 1
    del owner
    gc.collect()
    assert other() is None
    assert packed() is not None
    assert len(prepared._cache) == before


def test_inference_mode(module, made):
    """Panels made in inference mode serve outside it. Weights made in it are packed at every call."""
    x = randn(40, 24)
    with torch.inference_mode():
        inside = apply_linear(module, x)
    x.requires_grad_()
    outside = apply_linear(module, x)
    outside.sum().backward()
    assert_same_bits(inside, outside.detach())
    assert x.grad is not None
    assert len(made) == 1
    with torch.inference_mode():
        twin = nn.Linear(24, 70).eval()
        for _ in range(2):
            y = apply_linear(twin, x.detach())
        assert_same_bits(y, layers.linear(x.detach(), twin.weight, twin.bias))
    assert len(made) == 3
    assert prepared.remembered(twin) == []
