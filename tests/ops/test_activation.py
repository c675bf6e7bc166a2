"""The table of activations, against every file that reads it or keeps a list of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fastbert
from fastbert.layers.linear import apply_linear
from fastbert.models.config import EncoderConfig
from fastbert.ops import activation as table
from fastbert.ops.activation import ACTIVATIONS, CODES, MODULES, SPELLINGS
from fastbert.ops.linear import linear, linear_ref
from fastbert.ops.linear_int8 import linear_int8, linear_int8_ref
from fastbert.testing.op_cases import linear as linear_cases
from fastbert.testing.op_cases import linear_int8 as linear_int8_cases

ROOT = Path(__file__).parents[2]
Z = torch.linspace(-9, 9, 1441, dtype=torch.float64)
NEW = table.Activation(  # -z², which no kernel has
    code=99,
    reference=lambda z: -z * z,
    slope=lambda z: -2 * z,
    eager=lambda z: -z.square(),
    spellings=("minus_square",),
    modules=("MinusSquare",),
)


def camel(name: str) -> str:
    return "k" + "".join(word.capitalize() for word in name.split("_"))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_eager_is_the_formula_and_slope_its_derivative(name):
    entry, z = ACTIVATIONS[name], Z.clone().requires_grad_()
    y = entry.reference(z)
    torch.testing.assert_close(entry.eager(Z), y.detach(), rtol=1e-12, atol=1e-12)
    (slope,) = torch.autograd.grad(y.sum(), z)
    torch.testing.assert_close(entry.slope(Z), slope, rtol=1e-9, atol=1e-12)


def test_names_and_codes_and_spellings_are_unambiguous():
    codes = [a.code for a in ACTIVATIONS.values()]
    assert sorted(codes) == list(range(1, len(codes) + 1))
    assert {None: 0, **{name: a.code for name, a in ACTIVATIONS.items()}} == CODES
    for field, found in (("spellings", SPELLINGS), ("modules", MODULES)):
        all_of_them = [s for a in ACTIVATIONS.values() for s in getattr(a, field)]
        assert len(set(all_of_them)) == len(all_of_them) == len(found) > 0


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_is_what_transformers_means_by_it(spelling):
    activations = pytest.importorskip("transformers.activations")
    theirs = activations.ACT2FN[spelling]
    assert EncoderConfig(hidden_act=spelling).activation_name == SPELLINGS[spelling]
    expected = ACTIVATIONS[SPELLINGS[spelling]].reference(Z)
    torch.testing.assert_close(theirs(Z), expected, rtol=1e-6, atol=1e-6)
    assert MODULES[type(theirs).__name__] == SPELLINGS[spelling]


@pytest.mark.parametrize("file", ("linear.h", "linear_simd.cpp", "linear_int8_simd.cpp", "activation.h"))
def test_the_cpu_kernels_have_every_activation_in_order(file):
    text = (ROOT / "csrc" / "cpu" / file).read_text()
    names = [camel(name or "none") for name in sorted(CODES, key=CODES.get)]
    if file == "linear.h":
        enum = re.search(r"enum class Activation : int \{(.*?)\};", text, re.S)[1]
        assert [entry.split() for entry in enum.split(",")] == [
            [name, "=", str(code)] for code, name in enumerate(names)
        ]
    elif file == "activation.h":
        assert re.findall(r"case Activation::(\w+)", text) == 2 * names[1:]
    else:
        lists = [
            re.findall(r"Activation::(\w+)", part)
            for part in re.findall(r"constexpr [^;=]*\[\] = \{(.*?)\};", text, re.S)
        ]
        lists = [found for found in lists if found]
        assert lists
        assert all(found == names for found in lists)


def test_the_cuda_kernels_have_every_activation_in_order():
    text = (ROOT / "csrc" / "cuda" / "activation.cuh").read_text()
    names = [camel(name) for name in sorted(filter(None, CODES), key=CODES.get)]
    assert re.findall(r"case Activation::(\w+)", text) == 2 * names


def test_the_binding_takes_every_code_and_no_other():
    text = (ROOT / "csrc" / "bindings" / "bindings.h").read_text()
    refusal = re.search(r"code < 0 \|\| code > (\d+)\)\s+throw .*expected code 0 … (\d+), got", text)
    assert refusal.groups() == (str(max(CODES.values())),) * 2


@pytest.mark.parametrize("function", ("activate", "slope"))
def test_the_triton_kernels_have_a_branch_for_every_activation(function):
    text = (ROOT / "kernels" / "activation.py").read_text()
    body = re.search(rf"^def {function}\(.*?(?=^@|\Z)", text, re.S | re.M)[0]
    assert re.findall(r'ACTIVATION == "(\w+)"', body) == list(ACTIVATIONS)


@pytest.mark.parametrize("module", (linear_cases, linear_int8_cases), ids=("linear", "linear_int8"))
def test_a_case_has_every_activation(module):
    assert {case.activation for case in module.CASES} >= {None, *ACTIVATIONS}


@pytest.fixture
def planted(monkeypatch):
    """A new activation, added to the table alone."""
    monkeypatch.setitem(ACTIVATIONS, "minus_square", NEW)
    monkeypatch.setitem(SPELLINGS, "minus_square", "minus_square")
    monkeypatch.setitem(MODULES, "MinusSquare", "minus_square")


@pytest.mark.parametrize("backend", ("reference", "aten"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_an_entry_is_all_that_these_backends_need(planted, backend, dtype):
    torch.manual_seed(0)
    x = torch.randn(5, 24).to(dtype).requires_grad_()
    weight = torch.randn(40, 24).to(dtype)
    int8 = (x.detach(), torch.ones(6, 24, dtype=torch.int8), torch.ones(6), None, "minus_square")
    with fastbert.use_backend(backend):
        y = linear(x, weight, activation="minus_square")
        (dx,) = torch.autograd.grad(y.sum(), x)
        q = linear_int8(*int8)
    wide = x.detach().double().requires_grad_()
    truth = linear_ref(wide, weight.double(), activation="minus_square")
    (slope,) = torch.autograd.grad(truth.sum(), wide)
    near = dict(rtol=1e-4, atol=1e-3) if dtype == torch.float32 else dict(rtol=0.1, atol=5.0)
    torch.testing.assert_close(y.double(), truth, **near)
    torch.testing.assert_close(dx.double(), slope, **near)
    torch.testing.assert_close(q, linear_int8_ref(*int8))


def test_an_entry_is_all_that_configs_and_replaced_modules_need(planted):
    assert EncoderConfig(hidden_act="minus_square").activation_name == "minus_square"

    class Own(nn.Linear):
        pass

    module, x = Own(4, 3), torch.randn(2, 4)
    assert torch.equal(apply_linear(module, x, "minus_square"), -module(x).square())
