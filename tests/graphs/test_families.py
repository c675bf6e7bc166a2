"""Families whose layers differ from BERT's: a graph computes what the model does, to the bit."""

from __future__ import annotations

import copy
import operator
from unittest import mock

import pytest
import torch

import fastbert
from fastbert.execution import cpu
from fastbert.graphs import calls, training
from fastbert.graphs import model as graphs
from fastbert.graphs.buckets import Bucket
from fastbert.graphs.recorder import EagerRecorder
from fastbert.graphs.staging import Stage
from fastbert.graphs.training import graph_training
from fastbert.layers import disentangled
from fastbert.layers.batch import Relative
from fastbert.models.bert import BertModel
from fastbert.runtime import dispatch, prepared
from tests.support.graphed_models import (
    CPU,
    OTHERS,
    SIZES,
    Graphed,
    fresh,
    lengths_batch,
    pruned,
    same,
    shared,
)
from tests.support.hf_models import FAMILY_NAMES, batch

NAMES = (*FAMILY_NAMES[FAMILY_NAMES.index("modernbert") : FAMILY_NAMES.index("longformer")], *OTHERS)
# Their results depend on padded columns, so a mask with holes is the model's own
COUNTING = ("modernbert", "deberta-v2", "mobilebert", "jina_bert")
HOLES = "the mask has holes, which this family's attention depends on"
# Without LayerNorm nothing bounds MobileBERT's hidden states
FORMS = {"mobilebert": {"normalization_type": "layer_norm"}, "big_bird": {"attention_type": "original_full"}}


def graphed(name, dtype=torch.float64, **config):
    return Graphed(shared(name, dtype, **{**FORMS.get(name, {}), **config}))


def left(lengths, seqlen=None):
    """Left-padded ids and mask of sequences of these lengths."""
    return {key: value.flip(1) for key, value in lengths_batch(lengths, seqlen).items()}


@pytest.mark.parametrize("config", [{"word_embedding_rank": 7}, {"layer_groups": [0, 1, 0]}], ids=str)
def test_factored_words_and_shared_layers(config):
    g = Graphed(fresh("bert", **config))
    for _ in range(2):
        g.check(**lengths_batch([7, 1, 40, 0, 23]))
        g.check(input_ids=lengths_batch([9] * 3)["input_ids"], first_token_only=True)
    assert g.graphed.replays == 4


def test_a_convolution_of_three_tokens():
    g = graphed("deberta-v2", conv_kernel_size=3)
    for _ in range(2):
        g.check(**lengths_batch([7, 1, 40, 0, 23]))
        g.check(**left([7, 1, 30]))
    assert g.graphed.replays == 4
    trained = graph_training(copy.deepcopy(g.model).train(), recorder=EagerRecorder, **SIZES)
    for _ in range(2):  # the first call only looks at the model
        trained(**lengths_batch([5, 9]))
    assert trained.last_fallback is None


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_model(name):
    """Each batch is called before it is recorded, as it is recorded, and as a usual call."""
    g = graphed(name)
    for extra in ({}, {"first_token_only": True}, {"return_dict": False}):
        for _ in range(2):
            g.check(**lengths_batch([7, 1, 40, 0, 23]), **extra)
            g.check(input_ids=lengths_batch([9] * 3)["input_ids"], **extra)
            g.check(**left([7, 1, 30]), **extra)
    assert g.graphed.replays == 18
    ids = lengths_batch([30] * 4)["input_ids"]
    last = torch.ones(4, 30).long()
    last[3, 7] = 0
    for mask in (batch(name)["attention_mask"][:, :30], torch.arange(30).expand(4, -1) % 3 < 2, last):
        for _ in range(2):
            g.check(input_ids=ids, attention_mask=mask, reason=HOLES if name in COUNTING else None)
            # A graph of the bucket has been recorded, and could serve the mask with holes
            g.check(**lengths_batch(mask.sum(1).tolist(), 30))
    if g.model.family.segments:
        for _ in range(2):
            g.check(**lengths_batch([5, 9]), token_type_ids=lengths_batch([5, 9])["attention_mask"])


@pytest.mark.parametrize("name", NAMES)
def test_usual_calls_are_quick(name, monkeypatch):
    g, inputs = graphed(name), lengths_batch([7, 1, 30])
    # Without a table of types they are ignored
    types = {"token_type_ids": inputs["attention_mask"]} if name in ("gte", "deberta-v2") else {}
    g.check(**inputs, **types)
    monkeypatch.setattr(graphs, "check_inputs", mock.Mock(side_effect=AssertionError("not quick")))
    for given in (inputs, lengths_batch([0, 3, 30])):
        g.check(**given, **types)


# Where a bucket ends, a window (64 tokens on each side) or the near distances of DeBERTa end
EDGES = ([1], [31, 1], [32], [33], [63, 1], [64], [65, 3], [128], [129], [130, 126], [257], [300, 7, 7, 120])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["modernbert", "nomic_bert", "eurobert", "deberta-v2"])
@torch.no_grad()
def test_bits_at_edges(name, dtype, fused, monkeypatch):
    """Also where layers run op by op, as on a GPU."""
    if not fused:
        monkeypatch.setattr(cpu, "serves", lambda *_: "off")
    kinds = {"modernbert": {"local_attention": 128}, "deberta-v2": {"position_buckets": 64}}
    g = graphed(name, dtype, max_position_embeddings=320, num_hidden_layers=2, **kinds.get(name, {}))
    for lengths in EDGES:
        inputs = lengths_batch(lengths)
        wanted = g.model(**inputs).last_hidden_state
        for _ in range(2):
            assert torch.equal(g.graphed(**inputs).last_hidden_state, wanted)
            assert g.graphed.last_fallback is None


# --- what a graph reads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nomic_bert", "modernbert"])
def test_positions_beyond_the_tokens_of_the_bucket(name):
    """A token in the last column of a wide batch; a table of the bucket's own length would be too short."""
    g = graphed(name, max_position_embeddings=2048)
    for _ in range(2):
        g.check(**left([3, 1], 2048))
    for position, reason in ((2047, None), (2048, "a position may be beyond 2047")):
        given = {**lengths_batch([2, 5]), "position_ids": torch.full((1, 5), position)}
        g.check(**given, reason=reason)


def test_dynamic_scaling_of_texts_that_are_longer_than_those_of_training():
    """Their angles depend on the longest text, so the model itself computes them."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}
    g = Graphed(fresh("nomic_bert", rope_parameters=scaling))
    g.check(**lengths_batch([72, 5]))
    g.check(**lengths_batch([73, 5]), reason="input_ids are more than 72 per sequence")
    ids, ends = torch.full((80,), 9), torch.tensor([0, 73, 80], dtype=torch.int32)
    g.check(input_ids=ids, cu_seqlens=ends, reason="a sequence may have more than 72 tokens")


@pytest.mark.parametrize("name", ["bert", "deberta-v2"])
def test_packed_sequences_longer_than_those_of_graphs(name):
    g = graphed(name)
    given = {"input_ids": torch.full((100,), 9), "position_ids": torch.arange(100) % 50}
    ends = torch.tensor([0, 73, 100], dtype=torch.int32)
    g.check(**given, cu_seqlens=ends, reason="a sequence may have more than 72 tokens")
    g.check(**given, cu_seqlens=torch.tensor([0, 72, 100], dtype=torch.int32))


@pytest.mark.parametrize("name", ["modernbert", "deberta-v2", "gte", "jina_bert"])
def test_weights_that_are_written_after_recording(name, monkeypatch):
    """Tables of distances are derived weights: they are derived again in place, and nothing is recorded."""
    monkeypatch.setattr(cpu, "serves", lambda *_: "off")
    g = Graphed(fresh(name, torch.float32))
    inputs = lengths_batch([20, 9])
    g.check(**inputs)
    for path, parameter in g.model.named_parameters():
        if not any(
            part in path for part in ("rel_embed", "encoder.LayerNorm", "layer.1", "layers.1", "word")
        ):
            continue
        with torch.no_grad():
            before = g.graphed(**inputs).last_hidden_state
            parameter.mul_(1.5)
            found = g.graphed(**inputs).last_hidden_state
            # A copy derives its own weights: those of the model may have been overwritten by graphs
            same(found, copy.deepcopy(g.model)(**inputs).last_hidden_state)
        assert "key" in path or not torch.equal(found, before), path
    assert g.recorded == 1


def test_what_graphs_read_is_kept():
    """Further lengths do not free the columns of distances that a graph reads."""
    relative = Relative(32, 16, 512, ("c2p",), True)
    columns = [disentangled._kept_columns(relative, 32 * i, CPU)[0] for i in range(1, 100)]
    again = [disentangled._kept_columns(relative, 32 * i, CPU)[0] for i in range(1, 100)]
    assert all(a is b for a, b in zip(columns, again, strict=True))


@torch.no_grad()
def test_tables_of_distances_outlast_kernels_that_remove_marks(monkeypatch):
    """Some kernels of a GPU remove the marks of the memory they read, as if it was written."""
    model, tables = fresh("deberta-v2", torch.float32), []

    def linear(x, weight, bias):
        assert weight.data_ptr()
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(disentangled, "linear", linear)
    monkeypatch.setattr(disentangled, "apply_linear", lambda m, x: linear(x, m.weight, m.bias))
    for _ in range(2):
        with prepared.collect_used() as used:
            model(**lengths_batch([5, 9]))
        tables.append([value for _, name, value in used if name[0] == "distances"])
    assert len(tables[0]) == 3
    assert all(map(operator.is_, *tables))


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta-v2", "mobilebert"])
def test_in_8_bits(name):
    g = Graphed(fresh(name, torch.float32, **FORMS.get(name, {})).quantize())
    for _ in range(2):
        g.check(**lengths_batch([5, 9, 3]))
    assert g.graphed.replays == 2


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta-v2"])
def test_layers_without_some_heads_and_neurons(name, int8):
    model = pruned(fresh(name, torch.float32 if int8 else torch.float64))
    g = Graphed(model.quantize() if int8 else model)
    for _ in range(2):
        g.check(**lengths_batch([5, 9, 3]))
    assert g.graphed.replays == 2


# --- what graphs do not take --------------------------------------------------------------------------------

REFUSED = {
    "xlnet": "its layers have two streams, which graphs do not know",
    "longformer": "its layers have global tokens, which graphs do not know",
    "deberta-v2": "a convolution of more than three tokens, or with groups, follows its first layer",
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_refused(name):
    g = Graphed(fresh(name, **({"conv_kernel_size": 5} if name == "deberta-v2" else {})))
    g.check(**lengths_batch([5, 9]), reason=REFUSED[name])
    assert f"(graph: {REFUSED[name]}" in str(fastbert.explain(g.graphed))
    trained = graph_training(g.model.train(), recorder=EagerRecorder, **SIZES)
    trained(**lengths_batch([5, 9]))
    assert trained.last_fallback == REFUSED[name]


def test_long_texts_of_big_bird():
    """They attend by blocks. Their graphs have room for short texts alone, whatever the bucket."""
    g = graphed("big_bird", attention_type="block_sparse", block_size=4, num_random_blocks=1)
    for lengths in ([28, 3], [28, 27, 28, 9], [5, 29, 2], [29]):
        reason = "a sequence may have more than 28 tokens" if 29 in lengths else None
        for _ in range(2):
            g.check(**lengths_batch(lengths, 40), reason=reason)


def test_explain_names_the_graph():
    g = graphed("modernbert")
    g.check(**lengths_batch([5, 9]))
    with torch.no_grad():
        assert str(fastbert.explain(g.graphed)).endswith("layers 0 to 2 by executor graph")
        g.graphed(**batch("modernbert"))
        assert f"(graph: {HOLES}" in str(fastbert.explain(g.graphed))


def test_which_embeddings_report_bad_ids(monkeypatch):
    """A table's own module ends in an assert of the device, so ids are checked on the host."""
    monkeypatch.setattr(dispatch, "serving_function", lambda *_: "tells")
    own = {"eurobert": {}, "neobert": {}, "mobilebert": {}, "big_bird": {"rescale_embeddings": True}}
    own["deberta-v2"] = {"embedding_size": 24}
    for name in (*NAMES, "bert", "electra"):
        for config in (own.get(name), {}):
            if config is not None:
                model = fresh(name, **config)
                tells = Stage(model.config, CPU, torch.float32)._kernel_tells()
                assert tells is (name not in own or config != own[name])


@pytest.mark.parametrize("trains", [False, True])
def test_scores_of_distances_as_a_dense_bias(trains, monkeypatch):
    """Where attention does not read them, a graph has at most 64 MiB of them per layer."""
    longest = {"max_position_embeddings": 4096}
    model = fresh("deberta-v2", torch.float32, **longest).train(trains)
    assert calls.reads_distances(model)  # as the kernels of a CPU do
    wants = ("reads_relative", ("attention relative training" if trains else "attention relative",))
    mpnet, jina = (fresh(name, **longest) for name in ("mpnet", "jina_bert"))
    none = fresh("deberta-v2", pos_att_type=[], **longest)
    reason = "attention does not read scores of distances, which would fill a matrix for all the graph's room"
    # 3 heads: DeBERTa has a matrix per head and sequence, MPNet and jina-v2 per head
    cases = (
        (model, 512, 21, None),
        (model, 512, 22, reason),
        (none, 4096, 22, None),
        (mpnet, 4096, 22, reason),
    )
    cases += (jina, 2364, 22, None), (jina, 2365, 22, reason)
    devices = torch.device("cpu"), torch.device("cuda", 0)
    for device, reads in ((devices[0], None), (devices[1], lambda *_: True), (devices[1], None)):
        monkeypatch.setattr(BertModel, "device", device)
        monkeypatch.setattr(
            dispatch,
            "serving_function",
            lambda name, ops, *_, found=reads: found if (name, ops) == wants else None,
        )
        for each, tokens, sequences, expected in cases:
            found = calls.dense_scores(each.train(trains), Bucket(tokens, sequences, False, False))
            assert found == (expected if device.type == "cuda" and reads is None else None)


def test_a_bucket_whose_scores_are_too_many_is_not_recorded(monkeypatch):
    g, model = graphed("deberta-v2"), fresh("deberta-v2").train()
    trained = graph_training(model, recorder=EagerRecorder, **SIZES)
    for room in (graphs, training):
        monkeypatch.setattr(
            room, "dense_scores", lambda model, bucket: "many" if bucket.tokens > 32 else None
        )
    for lengths, reason in (([30, 9], "many"), ([23, 9], None)):
        g.check(**lengths_batch(lengths), reason=reason)
        for _ in range(2):
            trained(**lengths_batch(lengths)).last_hidden_state.sum().backward()
        assert trained.last_fallback == reason
