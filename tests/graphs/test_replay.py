"""A replay returns what the model returns; which memory it reads and keeps."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import load_tokenizer
from tests.graphs.test_families import NAMES, graphed
from tests.support.graphed_models import Graphed, fresh, lengths_batch, same, shared
from tests.support.hf_models import BERT_LAYERS, batch

# --- the same results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BERT_LAYERS)
def test_equals_the_model(name):
    """Right and left padding, holes, a full row; every kind of arguments and of results."""
    g = Graphed(shared(name))
    inputs = batch(name)  # with holes, on which MPNet's bias depends
    reason = "the mask has holes, which this family's attention depends on" if name == "mpnet" else None
    for extra in ({}, {"first_token_only": True}, {"return_dict": False}):
        g.check(**inputs, **extra, reason=reason)
    del inputs["attention_mask"]
    for extra in ({}, {"first_token_only": True}, {"return_dict": False}):
        g.check(**inputs, **extra)
    g.check(**lengths_batch([7, 1, 40, 0, 23]))
    g.check(**lengths_batch([7, 1, 40, 0, 23]), position_ids=torch.arange(40).flip(0)[None] + 2)
    assert g.graphed.replays == (5 if name == "mpnet" else 8)


def test_long_sequences_in_float32():
    """MiniLM's heads and lengths."""
    sizes = dict(hidden_size=384, num_attention_heads=12, intermediate_size=384, num_hidden_layers=1)
    g = Graphed(shared("bert", torch.float32, **sizes, max_position_embeddings=512), max_tokens=1024)
    for first_only, lengths in enumerate(([512, 511, 1], [300, 7, 7, 7, 120])):
        g.check(**lengths_batch(lengths), first_token_only=bool(first_only))


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "mpnet", *NAMES])
@pytest.mark.parametrize("first_only", [False, True])
@torch.no_grad()
def test_packed_sequences(name, first_only):
    g = graphed(name)
    ids = torch.arange(60) % 100 + 5
    largest = 58 if name in NAMES else 300  # a longer one may reach positions beyond those of the graph
    for ends, longest in (([0, 60], 60), ([0, 20, 20, 60], 40), ([0, 1, 2, 60, 60], largest)):
        cu_seqlens = torch.tensor(ends, dtype=torch.int32)
        for extra in ({}, {"position_ids": torch.arange(60).flip(0)}):
            given = (ids, cu_seqlens, longest)
            actual = g.graphed.forward_packed(*given, **extra, first_token_only=first_only)
            assert g.graphed.last_fallback is None
            same(actual, g.model.forward_packed(*given, **extra, first_token_only=first_only))
        packed = {"input_ids": ids, "cu_seqlens": cu_seqlens, "first_token_only": first_only}
        for more in ({}, {"max_seqlen": longest}):
            g.check(**packed, **more)
    with pytest.raises(ValueError, match="max_seqlen: expected None without cu_seqlens, got 3"):
        g.graphed(ids[None], max_seqlen=3)
    types = torch.arange(60) % 2
    if name == "bert":
        same(
            g.graphed.forward_packed(ids, cu_seqlens, 60, types),
            g.model.forward_packed(ids, cu_seqlens, 60, types),
        )


@torch.no_grad()
def test_for_the_heads():
    """`packed=True` returns the rows and the Inputs."""
    g = Graphed(shared())
    for extra in ({}, {"first_token_only": True}):
        hidden, states, probs, inputs = g.graphed(**batch("bert"), packed=True, **extra)
        expected, *_, wanted = g.model(**batch("bert"), packed=True, **extra)
        assert states is probs is None
        assert g.graphed.last_fallback is None
        same(hidden, expected)
        assert torch.equal(inputs.packing.cu_seqlens, wanted.packing.cu_seqlens)


def test_a_masked_first_token_and_int32_ids():
    """The pooler then reads zeros, as the model's does."""
    g = Graphed(shared())
    inputs = {name: value.int() for name, value in lengths_batch([5, 9, 3]).items()}
    inputs["attention_mask"][1, 0] = 0
    for first_only in (False, True):
        g.check(**inputs, token_type_ids=inputs["attention_mask"], first_token_only=first_only)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_in_a_sentence_encoder(pooling, tmp_path):
    g = Graphed(shared("bert", torch.float32))
    sentences = ["w7 w8 w9", "w20", " ".join(f"w{i}" for i in range(10, 30)), ""]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5, 120))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = load_tokenizer(tmp_path)
    with_graphs, without = (SentenceEncoder(m, tokenizer, pooling=pooling) for m in (g.graphed, g.model))
    assert abs(with_graphs.encode(sentences) - without.encode(sentences)).max() < 1e-5
    assert g.graphed.replays == 1
    assert not g.graphed.fallbacks


# --- memory -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_result_is_the_callers_own():
    """The next replay does not change it, and the caller may write into it."""
    g = Graphed(shared())
    inputs = [lengths_batch([30, 10], seed=seed) for seed in range(3)]
    dense = [{"input_ids": i["input_ids"]} for i in inputs]
    for given in (inputs, dense):
        expected = [copy.deepcopy(g.model(**i)) for i in given]
        first = g.graphed(**given[0])
        second = g.graphed(**given[1])
        same(first, expected[0])
        second.last_hidden_state.fill_(7)
        second.pooler_output.fill_(7)
        same(g.graphed(**given[1]), expected[1])
        same(g.graphed(**given[2]), expected[2])
        same(first, expected[0])


@torch.no_grad()
def test_bytes_held():
    g = Graphed(shared(), max_graphs=4, max_tokens=4096)
    assert g.graphed.bytes_held == 0
    held = set()
    for tokens in range(1, 200, 7):
        g.graphed(torch.full((1, min(tokens, 64)), 9).expand(-(-tokens // 64), -1))
        held.add(g.graphed.bytes_held)
        assert len(g.graphed.graphs) <= 4
    inputs = 3 * 4096 * 8 + 65 * 4
    assert inputs < min(held)
    assert max(held) <= inputs + 4 * (256 + 64) * 48 * 8
    g.graphed.clear()
    assert g.graphed.bytes_held == 0
    assert g.graphed.graphs == []
    g.check(**batch("bert"))


def test_nothing_keeps_a_dropped_model():
    g = Graphed(fresh())
    g.check(**batch("bert"))
    gone = weakref.ref(g.model), weakref.ref(next(g.model.parameters()))
    del g
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
