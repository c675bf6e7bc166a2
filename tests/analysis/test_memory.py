"""What the statistics keep in memory, at the sizes of BERT-large and 512 tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastbert
from bench.footprint import Live
from fastbert.analysis.attention import attention_statistics
from fastbert.analysis.effective import effective_attention
from fastbert.analysis.heads import importance
from fastbert.analysis.identities import MAX_BYTES, Probabilities
from fastbert.runtime import prepared
from fastbert.tasks.examples import Examples

LAYERS, HEADS, TOKENS, WIDTH = 24, 16, 512, 64
MAPS = HEADS * TOKENS * TOKENS * 4  # bytes of the attention maps of a layer and sequence


class Counted(Live):
    """Also knows the largest storage."""

    largest = 0

    def _add(self, storage):
        self.largest = max(self.largest, storage.nbytes())
        super()._add(storage)


@pytest.mark.sweep
def test_no_layer_outlives_its_statistics(monkeypatch):
    """On fake tensors: all identities of 24 layers of BERT-large, for 8 sequences of 512 tokens."""
    # fake tensors have no values: the ops are called as torch.compile traces them
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    sequences = 8
    total = sequences * TOKENS
    with FakeTensorMode(), Counted() as live:
        cu_seqlens = torch.arange(0, total + 1, TOKENS, dtype=torch.int32)
        groups, found = torch.empty(total, 6), []
        for _ in range(LAYERS):
            q, k, other = (torch.empty(total, HEADS, WIDTH) for _ in range(3))
            one = Probabilities(q, k, cu_seqlens, TOKENS, WIDTH**-0.5)
            two = Probabilities(other, k, cu_seqlens, TOKENS, WIDTH**-0.5)
            rows = [one.entropy(), one.collision(), one.overlap(two), one.divergence(two), one.at_offset(1)]
            rows += [one.of_values(groups).sum(-1), one.received(groups).sum(-1)]
            found.append(torch.stack(rows, -1).sum(0))
    assert len(found) == LAYERS
    assert found[0].shape == (HEADS, 7)
    # the maps of one layer would be 128 MiB, those of all layers 3 GiB
    assert live.peak < MAX_BYTES < LAYERS * sequences * MAPS


def whole_model():
    """(a model of 24 layers and 16 narrow heads, a text of 512 tokens with a label)."""
    sizes = {"vocab_size": 50, "hidden_size": HEADS * 4, "num_hidden_layers": LAYERS, "num_labels": 2}
    config = fastbert.BertConfig(num_attention_heads=HEADS, intermediate_size=64, **sizes)
    torch.manual_seed(0)
    model = fastbert.BertForSequenceClassification(config).eval()
    draw = np.random.default_rng(0)
    zeros = np.zeros(TOKENS, np.int64)
    ids, starts, kinds = draw.integers(5, 50, TOKENS), np.array([0, TOKENS]), np.full(TOKENS, 4, np.int8)
    return model, Examples(ids, starts, zeros, zeros, kinds, np.arange(TOKENS), np.array([1]))


@pytest.mark.sweep
def test_no_map_is_made_on_the_way():
    model, texts = whole_model()
    with Counted() as live:
        attention_statistics(model, texts)
        assert prepared.remembered(model) == []
        effective_attention(model, texts)
    # one map of one head would be the largest tensor by far
    assert live.largest < TOKENS * TOKENS * 4
    assert live.peak < MAPS
    with Counted() as live:
        importance(model, texts)
    assert live.largest < TOKENS * TOKENS * 4
    assert live.peak < LAYERS * MAPS / 10
