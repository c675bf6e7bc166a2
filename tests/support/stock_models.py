"""Tiny stock models, and asserts on what an accelerated one did compared with them."""

from __future__ import annotations

import torch
import transformers

import fastbert
from tests.support.accelerate_workers import worst_gradient
from tests.support.hf_models import PAD_POSITIONS, batch, hf_model

NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
CLASSIFIER = transformers.AutoModelForSequenceClassification


def tiny(auto: type = CLASSIFIER, name: str = "bert", **overrides) -> torch.nn.Module:
    """A tiny model in eval, the same at every call."""
    model = hf_model(name, auto, **{"num_hidden_layers": 2, **NO_DROPOUT, **overrides})
    if name != "mpnet":  # what from_pretrained chooses
        model.set_attn_implementation("sdpa")
    return model


def ragged(name: str, batch_size: int = 4, seqlen: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch with right padding and holes; every sequence has its first token, so that it may be packed."""
    inputs = batch(name, batch_size, seqlen, seed)
    inputs["attention_mask"][:, 0] = 1
    if name in PAD_POSITIONS:
        inputs["input_ids"][:, 0] = 7
    return inputs


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_fused(model) -> None:
    """Every layer took the fused path in every call, and every call of the model was packed."""
    how = fastbert.explain(model)
    assert how.layers, str(how)
    assert how.models, str(how)
    for layer in how.layers:
        assert layer.fused, str(how)
        assert layer.reason is None, str(how)
        assert layer.fused_calls > 0, str(how)
        assert layer.stock_calls == 0, str(how)
    for part in how.models:
        assert part.unpads, str(how)
        assert part.packed_calls > 0, str(how)
        assert part.padded_calls == 0, str(how)


def assert_stock(model, names=lambda name: True) -> None:
    """Every layer with such a name took the stock path in every call, and reports a reason."""
    how = fastbert.explain(model)
    layers = [layer for layer in how.layers if names(layer.name)]
    assert layers, str(how)
    for layer in layers:
        assert not layer.fused, str(how)
        assert layer.reason, str(how)
        assert layer.fused_calls == 0, str(how)
        assert layer.stock_calls > 0, str(how)


def assert_same_training(model, stock, inputs: dict, tolerance: float = 1e-5) -> None:
    """Equal logits and gradients on the same inputs."""
    results = []
    for one in (model, stock):
        one.zero_grad(set_to_none=True)
        logits = one(**inputs).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        gradients = {name.removeprefix("_orig_mod."): p.grad for name, p in one.named_parameters()}
        results.append((logits, gradients))
    (logits, gradients), (stock_logits, stock_gradients) = results
    assert_close(logits, stock_logits, tolerance)
    assert gradients.keys() == stock_gradients.keys()
    error, name = worst_gradient(gradients, stock_gradients)
    assert error <= tolerance, name


TEXTS = [
    "the model reads many words and some rows are short while others go on for quite a long time until they "
    "end",
    "paris is the capital of france",
    "some words",
    "when they end others go on and on for a long long time",
]
