"""Weights that are written in place, in eval, past PyTorch's version counter: the next output has them."""

from __future__ import annotations

import copy
import ctypes

import numpy
import pytest
import torch

import fastbert
from fastbert.acceleration.layer import AcceleratedLayer
from fastbert.config import EncoderConfig
from fastbert.layers import LayerMath, part
from fastbert.models import AutoModel
from tests.hf_models import batch, hf_config, hf_model

FLOAT, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = {FLOAT: "fp32", BF16: "bf16", FP16: "fp16", torch.int8: "int8"}
BITS = {1: numpy.int8, 2: numpy.int16, 4: numpy.int32}


def native(dtype=FLOAT, name="bert"):
    torch.manual_seed(0)
    model = AutoModel.from_config(EncoderConfig.from_hf(hf_config(name))).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3)
    return model.quantize() if dtype == torch.int8 else model.to(dtype)


def accelerated(dtype=FLOAT, name="bert"):
    torch.manual_seed(0)
    return fastbert.accelerate(hf_model(name).to(dtype)).requires_grad_(False)


def run(model):
    with torch.inference_mode():
        return model(**batch(model.config.model_type)).last_hidden_state


def fresh(model):
    """What the model should give: a copy derives its own weights."""
    return run(copy.deepcopy(model))


def check_next(model, change):
    """`change` changes the next output, and to what it should be."""
    run(model)
    before = run(model)
    change()
    after = run(model)
    assert torch.equal(after, fresh(model))
    assert not torch.equal(after, before)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, LayerMath)]


def dense(model, name="intermediate"):
    layer = layers_of(model)[-1]
    return part(layer, getattr(layer.form.names, name))


def sources(model):
    """All that the encoder layers read: weights, scales, biases."""
    return [t for layer in layers_of(model) for t in (*layer.parameters(), *layer.buffers())]


def array(t):
    """A NumPy array of the tensor's memory, as integers where NumPy lacks the dtype."""
    return t.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[t.itemsize]).numpy()


def teacher(p):
    student = torch.ones_like(p)
    p.data.mul_(0.5).add_(0.5 * student) if p.is_floating_point() else p.data.neg_().add_(student)


IDIOMS = {
    "mul_": lambda p: p.data.mul_(-1),
    "copy_": lambda p: p.data.copy_(p.flip(0)),
    "teacher": teacher,
    "detached": lambda p: p.detach().neg_(),
    "foreach": lambda p: torch._foreach_mul_([p.data], -1),
    "out": lambda p: torch.neg(p, out=p.data),
    "row": lambda p: p.data[-1].neg_(),
    "row set": lambda p: p.data.__setitem__(5, 1),
    "column": lambda p: p.data[:, 3].neg_(),
    "element": lambda p: p.data[1, 2].neg_(),
    "flat view": lambda p: p.data.view(-1)[70:75].neg_(),
    "numpy": lambda p: numpy.copyto(array(p), array(p)[::-1].copy()),
    "numpy row": lambda p: array(p).__setitem__(3, 0),
    "numpy element": lambda p: array(p).__setitem__((3, 4), 0),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).neg_(),
    "dlpack numpy": lambda p: numpy.from_dlpack(p.detach().view(torch.uint8)).fill(0),
    "address": lambda p: ctypes.memset(p.data_ptr(), 0, p.nbytes),
}


@pytest.fixture(params=["fused", "op by op"])
def layers(request, monkeypatch):
    if request.param == "op by op":
        for kind in (LayerMath, AcceleratedLayer):
            monkeypatch.setattr(kind, "_fused", lambda *_: None)
    return request.param


MODELS = [
    pytest.param(make, dtype, id=f"{make.__name__}-{KINDS[dtype]}")
    for make in (native, accelerated)
    for dtype in KINDS
    if make is native or dtype.is_floating_point
]


@pytest.mark.parametrize("idiom", IDIOMS)
@pytest.mark.parametrize(("make", "dtype"), MODELS)
def test_a_write_in_place_changes_the_next_output(make, dtype, layers, idiom):
    model = make(dtype)
    weight = dense(model).weight
    check_next(model, lambda: IDIOMS[idiom](weight))
    check_next(model, lambda: weight.data[5].add_(1))  # and again


@pytest.mark.parametrize(("make", "dtype"), MODELS)
def test_every_weight_of_a_layer_counts(make, dtype, layers):
    model = make(dtype)
    keys = [part(layer, layer.form.names.key).bias for layer in layers_of(model)]
    for tensor in sources(model):
        run(model)
        before = run(model)
        tensor.data.view(-1)[::2].add_(1)  # not to all, which a norm would take away again
        after = run(model)
        assert torch.equal(after, fresh(model))
        # softmax does not see what is added to all scores of a query
        assert not torch.equal(after, before) or any(tensor is bias for bias in keys)
