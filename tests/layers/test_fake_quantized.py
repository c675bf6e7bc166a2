"""Training that rounds computes what the quantised model computes, and its gradients pass rounding."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastbert
from fastbert.compression import qat
from fastbert.layers import linear as layers
from fastbert.layers.fake_quantized import FakeQuantizedEmbedding, FakeQuantizedLinear
from fastbert.layers.quantized import QuantizedLinear, is_quantized
from fastbert.models.config import EncoderConfig
from fastbert.ops.activation import activate_eager
from fastbert.ops.linear_int8 import quantize_rows
from fastbert.runtime import dispatch
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.quantized_models import hidden, hook, ours

BERT = "AutoModelForSequenceClassification"


def prepared_layer(bits=8, bias=True, width=40, out=24, dtype=torch.float32):
    torch.manual_seed(bits)
    linear = nn.Linear(width, out, bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.mul_(torch.logspace(-1, 1, out, dtype=dtype)[:, None])
    return FakeQuantizedLinear(linear, bits)


def rows(count=9, width=40, dtype=torch.float32):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(dtype) + 0.3


def without_dropout(model):
    """The model in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def rounded_weight(module):
    """The weight as inference has it, in float64, by plain loops."""
    whole = module.weight.detach()
    weight = whole.clone()
    if module.bits == 4:
        for row, first in itertools.product(range(len(weight)), range(0, weight.shape[1], 32)):
            step, part = whole[row].float().abs().max() / 126, weight[row, first : first + 32]
            least = min(max(1, math.ceil(part.float().abs().max() / step / 7)), 18)
            tried = [
                (part.float() / (m * step)).round().clamp(-7, 7) * (m * step)
                for m in range(least, max(least - 3, 0), -1)
            ]
            part.copy_(min(tried, key=lambda found: (found - part.float()).square().sum().item()))
        step = whole.float().abs().amax(1, keepdim=True) / 126
        return (weight.float() / step).round().double() * step.double()
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round().double() * scale.double()


# --- what is computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_training_computes_what_int8_inference_computes(family, backend):
    """To the bit, also with gradients. DeBERTa adds its scores in another order there."""
    with dispatch.use_backend(backend):
        model = qat.prepare(ours(family))
        int8 = qat.convert(copy.deepcopy(model))
        expected = hidden(int8)
        assert torch.equal(hidden(model), expected)
        learning = without_dropout(model)(**batch(family)).last_hidden_state
        assert learning.requires_grad
        if family != "deberta-v2":
            assert torch.equal(learning, expected)
        assert torch.equal(hidden(model.eval()), expected)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [8, 32, 40, 96])
@torch.no_grad()
def test_the_weights_are_rounded_by_channel_and_group(bits, width):
    module, x = prepared_layer(bits, width=width), rows(width=width)
    centred, _, step = quantize_rows(x)
    expected = (centred.double() * step.double()) @ rounded_weight(module).T + module.bias.double()
    torch.testing.assert_close(module(x).double(), expected, rtol=1e-6, atol=1e-5)


def test_a_step_of_the_optimizer_is_seen_by_inference():
    model = without_dropout(qat.prepare(ours("bert", BERT)))
    before = hidden(model.base_model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model.base_model(**batch("bert")).last_hidden_state[:, 0].sum().backward()
    optimizer.step()
    after = hidden(model.base_model)
    assert not torch.equal(after, before)
    assert torch.equal(after, hidden(qat.convert(copy.deepcopy(model)).base_model))


def test_autocast():
    model = qat.prepare(ours("bert"))
    with torch.autocast("cpu", torch.bfloat16):
        learning = model(**batch("bert")).last_hidden_state
        assert torch.equal(learning, hidden(qat.convert(copy.deepcopy(model))))
        learning.float().square().sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    assert model.layer_list()[0].intermediate.dense.weight.grad.abs().sum() > 0


# --- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("activation", "gated", "bias"),
    [
        (None, None, True),
        (None, None, False),
        ("gelu", None, True),
        ("silu", "first", True),
        ("relu", None, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_pass_rounding_unchanged(bits, activation, gated, bias, dtype):
    """Against autograd through x + (x̂ - x).detach(), in float64; the error is not above eager PyTorch's."""
    module = prepared_layer(bits, bias, dtype=dtype)
    x = rows(dtype=dtype).requires_grad_()
    y = layers.apply_linear(module, x, activation, gated)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(dy)
    ours_ = [x.grad, module.weight.grad, *([module.bias.grad] if bias else [])]
    centred, _, step = quantize_rows(x.detach())
    x_hat, w_hat = centred.double() * step.double(), rounded_weight(module)

    def straight(kind):
        leaves = [
            t.detach().to(kind).requires_grad_() for t in (x, module.weight, module.bias) if t is not None
        ]
        through = [
            leaf + (hat.to(kind) - leaf).detach() for leaf, hat in zip(leaves, (x_hat, w_hat), strict=False)
        ]
        z = F.linear(*through, *(leaves[2:]))
        activate_eager(z, activation, gated).backward(dy.to(kind))
        return [leaf.grad for leaf in leaves]

    for got, truth, eager in zip(ours_, straight(torch.float64), straight(dtype), strict=True):
        assert got.dtype == dtype
        error, allowed = ((t.double() - truth).norm() for t in (got, eager))
        assert error <= 2 * allowed + 1e-7 * truth.norm()


def test_layers_of_other_bits_are_products_of_their_own():
    eight, four, bare = prepared_layer(8), prepared_layer(4), prepared_layer(8, bias=False)
    assert layers.FAKE.joins(rows(), [eight, eight])
    assert not layers.FAKE.joins(rows(), [eight, four])
    assert not layers.FAKE.joins(rows(), [eight, bare])


def test_only_asked_gradients_are_computed():
    module = prepared_layer()
    module.weight.requires_grad_(False)
    x = rows().requires_grad_()
    module(x).sum().backward()
    assert module.weight.grad is None
    assert x.grad is not None
    assert module.bias.grad is not None
    (dx,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        dx.sum().backward()


def test_the_table_rounds_each_row_and_its_gradient_is_the_rows():
    model = qat.prepare(ours("bert"), embeddings=4)
    table = model.get_input_embeddings()
    assert type(table) is FakeQuantizedEmbedding
    ids = torch.tensor([[5, 0, 7, 5]])
    found = table(ids)
    rows_ = table.weight.detach()[ids]
    scale = rows_.abs().amax(-1, keepdim=True) / 7
    torch.testing.assert_close(found.detach(), (rows_ / scale.clamp_min(1e-30)).round() * scale)
    found.backward(torch.ones_like(found))
    counts = torch.bincount(ids.flatten(), minlength=len(table.weight)).float()
    counts[table.padding_idx] = 0
    assert torch.equal(table.weight.grad, counts[:, None].expand_as(table.weight))
    full = qat.prepare(ours("bert"), embeddings=8)
    near, far, plain = (hidden(m) for m in (full, model, qat.prepare(ours("bert"))))
    assert 0 < (near - plain).norm() < (far - plain).norm()


# --- in place -----------------------------------------------------------------------------------------------


def test_the_parameters_stay(tmp_path):
    model = ours("bert", BERT)
    before, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.eval().modules()]
    assert qat.prepare(model, 4, 8) is model
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert not is_quantized(model)
    assert [m.training for m in model.modules()] == modes
    model.save_pretrained(tmp_path)
    loaded = getattr(fastbert, BERT).from_pretrained(tmp_path)
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())
    assert "bits=4" in repr(model)
    copied = copy.deepcopy(model)
    assert torch.equal(hidden(copied.base_model), hidden(model.base_model))


def test_converting():
    expected = ours("bert", BERT).quantize("int8")
    model = qat.convert(qat.prepare(ours("bert", BERT)))
    assert {n for n, m in model.named_modules() if type(m) is QuantizedLinear}
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    )
    with pytest.raises(ValueError, match=r"^model: expected one that `prepare` has prepared"):
        qat.convert(model)


@pytest.mark.parametrize(("bits", "embeddings"), [(8, None), (4, 8), (8, 4)])
def test_converting_asks_for_the_bits_that_were_trained(monkeypatch, bits, embeddings):
    model = qat.prepare(ours("bert", BERT), bits, embeddings)
    asked = []
    monkeypatch.setattr(type(model), "quantize", lambda self, *given, **more: asked.append((*given, more)))
    qat.convert(model)
    more = {} if embeddings is None else {"embeddings": f"int{embeddings}"}
    assert asked == [(f"int{bits}", more)]
    kinds = {type(m) for m in model.modules()}
    assert not kinds & {FakeQuantizedLinear, FakeQuantizedEmbedding}
    plain = ours("bert", BERT)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert repr(model) == repr(plain)


def test_what_is_refused():
    for name, value in (
        ("weights", 5),
        ("weights", None),
        ("weights", True),
        ("embeddings", 2),
        ("embeddings", 8.0),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected .*8 or 4, got {value!r}"):
            qat.prepare(ours("bert"), **{name: value})
    model = ours("bert", "AutoModelForMaskedLM")
    with pytest.raises(ValueError, match=r"^embeddings: expected None, because the decoder reads"):
        qat.prepare(model, embeddings=8)
    assert not any(isinstance(m, FakeQuantizedLinear) for m in model.modules())
    hook(model.base_model.layer_list()[1].output.dense)
    with pytest.raises(
        TypeError, match=r"^bert\.encoder\.layer\.1\.output\.dense: expected a plain nn\.Linear"
    ):
        qat.prepare(model)
    prepared = qat.prepare(ours("bert"))
    with pytest.raises(TypeError, match="got FakeQuantizedLinear"):
        qat.prepare(prepared)


def test_a_layer_with_a_hook_still_rounds():
    model = qat.prepare(ours("bert"))
    expected = hidden(model)
    seen = []
    model.layer_list()[1].output.dense.register_forward_hook(lambda m, i, o: seen.append(o))
    torch.testing.assert_close(hidden(model), expected)
    assert len(seen) == 1


def test_a_masked_language_model_of_few_layers_learns():
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 48}
    model = qat.prepare(fastbert.BertForMaskedLM(EncoderConfig("bert", vocab_size=40, **sizes)), 4).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    ids = torch.randint(5, 40, (8, 12))
    losses = []
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
