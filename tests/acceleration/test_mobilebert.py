"""Accelerated MobileBERT: usual dtypes, options, dropout and graphs; its forms are in test_model.py."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

import fastbert
from fastbert.graphs.recorder import EagerRecorder
from tests.models.test_mobilebert import FORMS, LENGTHS, ragged
from tests.support.accelerated_models import (
    HEAD,
    LAYERS,
    calls,
    close,
    first_kept,
    same_outputs,
    stock,
)


def both(form="published", auto=HEAD, **config):
    """(the stock model, the same model accelerated) in float64, whose [PAD] has an embedding."""
    slow = stock("mobilebert", auto, **{**FORMS[form], **config}).double()
    slow.get_input_embeddings().weight.data[0] = 1.0
    return slow, fastbert.accelerate(copy.deepcopy(slow))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["published", "own bottleneck", "LayerNorm"])
@torch.no_grad()
def test_inference_in_usual_dtypes(form, dtype):
    """transformers' NoNorm has no eps, which the layers in one call must not need."""
    exact, inputs = stock("mobilebert", **FORMS[form]), ragged(LENGTHS)
    exact.get_input_embeddings().weight.data[0] = 0
    slow = copy.deepcopy(exact).to(dtype)
    fast, kept = fastbert.accelerate(copy.deepcopy(slow)), inputs["attention_mask"].bool()
    with calls(fast, packed=1, fused=LAYERS):
        found = fast(**inputs)[0]
    expected = exact.double()(**inputs)[0]
    own = (slow(**inputs)[0] - expected)[kept].abs().max()
    assert (found - expected)[kept].abs().max() <= 2 * own


@pytest.mark.parametrize("options", [{"attention": False}, {"ffn": False}, {"act": "mish"}], ids=str)
@torch.no_grad()
def test_a_layer_runs_fused_as_a_whole_or_as_stock(options):
    slow, _ = both(auto=transformers.AutoModel, hidden_act=options.pop("act", "relu"))
    fast = fastbert.accelerate(copy.deepcopy(slow), **options)
    inputs = first_kept("mobilebert")
    with calls(fast, packed=0, padded=1, fused=0, stock=LAYERS):
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool(), 1e-9)
    said = "as a whole (attention=False or ffn=False)" if options else "fastbert does not have the activation"
    assert said in fastbert.explain(fast).layers[0].reason
    with pytest.raises(ValueError, match=r"does not have the activation|runs fused as a whole"):
        fastbert.accelerate(slow, strict=True, **options)


def test_dropouts():
    """Embeddings drop by their own module, and layers at the end of their last bottleneck."""
    slow, fast = both(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    assert fast.train().mobilebert.encoder.layer[0].dropout_rates() == (0.2, 0.0, 0.3)
    wide = both("no bottleneck", hidden_dropout_prob=0.3)[1].train()
    assert wide.mobilebert.encoder.layer[0].dropout_rates() == (0.0, 0.3, 0.3)
    inputs, found = first_kept("mobilebert"), []
    for model in (slow.train(), fast):
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and "embeddings" not in name:
                module.p = 0.0
        torch.manual_seed(0)
        found.append(model(**inputs).logits)
    close(*found, 1e-9)


@torch.no_grad()
def test_a_graphed_model_runs_without_graphs():
    slow, fast = both()
    graphed, inputs = fastbert.graph(fast, recorder=EagerRecorder), first_kept("mobilebert")
    inputs["attention_mask"][1:, 9:] = 0
    inputs["attention_mask"][:, :9] = 1
    close(graphed(**inputs).logits, slow(**inputs).logits, 1e-9)
    assert "the embeddings are given" in graphed.last_fallback
