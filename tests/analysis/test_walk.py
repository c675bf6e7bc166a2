"""Batches hold every example once; models of transformers become ours around the same tensors."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors
from torch import nn

import fastbert
from fastbert.analysis.attention import attention_statistics
from fastbert.analysis.change import change
from fastbert.analysis.effective import effective_attention
from fastbert.analysis.fixed import fixed_heads
from fastbert.analysis.geometry import geometry
from fastbert.analysis.heads import ablate, importance, pruning_curve
from fastbert.analysis.walk import at_rest, batches, native
from fastbert.tasks.examples import tokenized
from tests.support.analysis import both
from tests.support.hf_models import ANALYSED, hf_model


@pytest.mark.parametrize("tokens", [1, 25, 10_000])
def test_every_example_is_in_one_batch(pairs, tokens):
    ours = both("bert")[1]
    seen = []
    for batch in batches(ours, pairs, tokens):
        seen += batch.numbers.tolist()
        lengths = pairs.lengths[batch.numbers]
        assert lengths.sum() <= max(tokens, lengths.max())
        assert batch.lengths.tolist() == lengths.tolist()
        assert np.array_equal(batch.inputs.input_ids.numpy(), pairs.ids[batch.rows])
        assert np.array_equal(batch.inputs.token_type_ids.numpy(), pairs.types[batch.rows])
        values = torch.arange(float(len(batch.rows)))
        expected = [values[batch.sequence == i].mean() for i in range(len(batch))]
        torch.testing.assert_close(batch.means(values), torch.stack(expected))
    assert sorted(seen) == list(range(len(pairs)))


@pytest.mark.parametrize("family", ANALYSED)
@pytest.mark.parametrize("accelerated", [False, True])
def test_a_model_of_transformers(texts, family, accelerated):
    theirs = hf_model(family, transformers.AutoModelForSequenceClassification, num_labels=3)
    if accelerated:
        theirs.set_attn_implementation("sdpa") if family != "mpnet" else None
        theirs = fastbert.accelerate(theirs)
    ours = native(theirs)
    assert type(ours).__name__ == type(theirs).__name__
    assert type(ours).__module__.startswith("fastbert.")
    theirs_of = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.data_ptr() == theirs_of[name].data_ptr(), name
    ids = torch.from_numpy(texts.ids[: texts.starts[1]])[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
        next(theirs.parameters()).mul_(1.5)
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pooler", [False, True])
def test_an_encoder_of_transformers(texts, pooler):
    config = hf_model("bert").config
    theirs = transformers.BertModel(config, add_pooling_layer=pooler).eval()
    ours = native(theirs)
    assert ours.has_pooler == pooler
    assert attention_statistics(ours, texts).entropy.shape == (5, 3, 3)


def test_what_cannot_be_native():
    with pytest.raises(TypeError, match="model: expected a model of fastbert or of transformers, got Linear"):
        native(nn.Linear(2, 2))
    gpt = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20))
    with pytest.raises(ValueError, match="gpt2"):
        native(gpt)


ANALYSES = {
    "attention": attention_statistics,
    "effective": effective_attention,
    "geometry": lambda model, texts: geometry(model, texts, least=2),
    "change": lambda model, texts: change(model, both("bert")[1], texts),
    "against": lambda model, texts: change(both("bert")[1], model, texts),
    "heads": ablate,
    "importance": importance,
    "pruning": lambda model, texts: pruning_curve(model, texts, range(9)),
    "fixed": fixed_heads,
}


@pytest.mark.parametrize("name", ANALYSES)
def test_weights_that_are_no_numbers(texts, name):
    """Say so at the first batch, with an example that they spoil."""
    model = copy.deepcopy(both("bert")[1])
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[texts.ids[texts.starts[3] + 1]] = torch.nan
    rows = replace(texts.chosen([2, 1, 3]), labels=np.array([0, 1, 2]))
    with pytest.raises(ValueError, match=r"examples\[[12]\]: the model's numbers are not finite"):
        ANALYSES[name](model, rows)


def test_an_example_of_no_token(tokenizer):
    bare = tokenizer.from_str(tokenizer.to_str())
    bare.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    with pytest.raises(ValueError, match=r"examples\[1\]: expected one token at least, got none"):
        attention_statistics(both("bert")[1], tokenized(bare, ["the cat", ""]))


def fails_at_rest(model):
    with at_rest(model):
        assert not any(m.training for m in model.modules())
        assert not any(p.requires_grad for p in model.parameters())
        raise RuntimeError("planted")


def test_at_rest():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2)).train()
    model[1].eval()
    model[2].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="planted"):
        fails_at_rest(model)
    assert [m.training for m in model.modules()] == [True, True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]
