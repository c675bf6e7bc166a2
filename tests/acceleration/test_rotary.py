"""Accelerated models whose layers rotate queries and keys: masks, windows, angles, heads."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import fastbert
from tests.support.accelerated_models import (
    LAYERS,
    build,
    calls,
    close,
    first_kept,
    same_outputs,
)


def test_a_dictionary_of_masks_is_all_that_hides():
    """A caller's own masks, here with another window than the config's."""
    slow, fast = build("modernbert")
    ids = first_kept("modernbert")["input_ids"]
    distance = (torch.arange(40)[:, None] - torch.arange(40)).abs()
    masks = {"full_attention": None, "sliding_attention": (distance <= 20).expand(4, 1, 40, 40)}
    with torch.no_grad(), calls(fast, packed=0, padded=1, fused=LAYERS, stock=0):
        actual = fast(ids, attention_mask=masks)
    with torch.no_grad():
        expected = slow(ids, attention_mask=masks)
        same_outputs(actual, expected, torch.ones_like(ids).bool())
        assert not torch.allclose(expected[0], slow(ids)[0], atol=0.1)


@pytest.mark.parametrize("padding", [False, True])
def test_layers_of_a_model_on_flash_attention_apply_the_window(padding):
    """FlashAttention is passed a mask of padding alone, or none."""
    slow, fast = build("modernbert")
    inputs = first_kept("modernbert")
    kept = inputs["attention_mask"].bool()
    if not padding:
        kept = torch.ones_like(kept)
    hidden = torch.randn(4, 40, 48, generator=torch.Generator().manual_seed(0))
    angles = slow.rotary_emb(hidden, torch.arange(40)[None], "sliding_attention")
    distance = (torch.arange(40)[:, None] - torch.arange(40)).abs()
    seen = (distance <= 8) & kept[:, None, None, :]
    fast.config._attn_implementation = "flash_attention_2"
    with torch.no_grad(), calls(fast, fused=1, stock=0):
        mask = kept.long() if padding else None
        actual = fast.layers[1](hidden, attention_mask=mask, position_embeddings=angles)
    with torch.no_grad():
        close(actual[kept], slow.layers[1](hidden, seen, angles)[kept])


@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
def test_scaled_angles(kind):
    """Our own models refuse the first; the second depends on earlier calls of the stock model."""
    rope = {"rope_type": kind, "rope_theta": 1000.0, "factor": 2.0}
    slow, fast = build("nomic_bert", rope_parameters=rope)
    inputs = first_kept("nomic_bert")
    dynamic = kind == "dynamic"
    with torch.no_grad(), calls(fast, padded=1, fused=LAYERS * dynamic, stock=LAYERS * (not dynamic)):
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())
    report = fastbert.explain(fast)
    assert ("earlier calls" if dynamic else "rope_type") in report.models[0].reason
    with pytest.raises(ValueError, match="rope_type"):
        fastbert.accelerate(copy.deepcopy(slow), strict=True)


@pytest.mark.parametrize(
    ("name", "kind", "pooling"),
    [
        *(("modernbert", k, p) for k in ("ForMaskedLM", "ForMultipleChoice") for p in ("cls", "mean")),
        *(("eurobert", "ForSequenceClassification", p) for p in ("bos", "mean", "late")),
        ("modernbert", "ForTokenClassification", "mean"),
    ],
)
def test_heads(name, kind, pooling):
    slow, fast = build(name, getattr(transformers, f"AutoModel{kind}"), classifier_pooling=pooling)
    inputs = first_kept(name)
    kept = inputs["attention_mask"].bool()
    if kind == "ForSequenceClassification":
        kept = ...
    if kind == "ForMultipleChoice":
        inputs, kept = ({k: v.view(2, 2, 40) for k, v in inputs.items()}, torch.ones(2, 2).bool())
    with torch.no_grad(), calls(fast, packed=1, fused=LAYERS, stock=0):
        actual = fast(**inputs).logits
    with torch.no_grad():
        close(actual[kept], slow(**inputs).logits[kept])
