"""Layers that score distances, in one call: the same bits as op by op, and only where that is allowed."""

from __future__ import annotations

import copy

import pytest
import torch

from fastbert.acceleration import accelerate
from fastbert.execution import cpu as executor
from fastbert.execution.call import Call
from fastbert.execution.plan import survey
from fastbert.ops.attention_relative import RelativeScores
from fastbert.ops.encoder_layer import encoder_layer
from fastbert.runtime import dispatch
from tests.execution.test_cpu import BF16, FLOAT, assert_same_as_op_by_op, fused_layers, of, op_by_op, packed
from tests.execution.test_gpu import padded_right
from tests.support.hf_models import hf_model
from tests.support.inputs import ends_of
from tests.support.layer_calls import through

pytestmark = pytest.mark.skipif(
    dispatch.unsupported_reason("cpu", "linear", "cpu", torch.float32) is not None,
    reason="needs the compiled CPU kernels",
)

TERMS = [{"pos_att_type": ["c2p"]}, {"pos_att_type": ["p2c"]}, {"pos_att_type": None}]
TERMS += [{"share_att_key": False}, {"position_buckets": 256, "max_position_embeddings": 512}]


@pytest.mark.parametrize("config", TERMS, ids=str)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
@torch.no_grad()
def test_scores_of_distances_of_each_kind(config, int8, dtype):
    """Many rows score their distances in pieces: the same bits as each sequence alone."""
    model = of("deberta-v2", **config).to(dtype)
    model = model.quantize("int8") if int8 else model
    lengths = [150, 1, 299, 40, 260, 0, 33]
    ids, ends = torch.randint(5, 120, (sum(lengths),)), ends_of(lengths)
    assert_same_as_op_by_op(lambda: model(ids, cu_seqlens=ends)[0], len(model.layer_list()))
    alone = [model(one[None])[0][0] for one in ids.split(lengths) if one.numel()]
    assert torch.equal(torch.cat(alone), model(ids, cu_seqlens=ends)[0])


@pytest.mark.parametrize("where", ["attention.self.pos_key_proj", "rel_embeddings", "LayerNorm"])
def test_not_where_a_part_of_the_table_of_distances_is_hooked(where):
    model, inputs = of("deberta-v2", share_att_key=False), padded_right("deberta-v2")
    part = model.layer_list()[1] if where.startswith("attention") else model.encoder
    with torch.no_grad():
        assert fused_layers(model, inputs) == 3
        expected = model(**inputs)[0]
        handle = part.get_submodule(where).register_forward_hook(lambda *given: 2 * given[-1])
        # the weights of rel_embeddings are read, and no call is made
        assert fused_layers(model, inputs) == {"rel_embeddings": 3, "LayerNorm": 0}.get(where, 2)
        found = model(**inputs)[0]
        assert torch.equal(found, expected) == (where == "rel_embeddings")
        with op_by_op():
            assert torch.equal(model(**inputs)[0], found)
        handle.remove()
        assert fused_layers(model, inputs) == 3
        assert torch.equal(model(**inputs)[0], expected)


@torch.no_grad()
def test_pieces_with_a_bias_and_the_longest_reach():
    """288 is a step of the columns; a piece has one sequence or two."""
    model = of("deberta-v2", position_buckets=256, max_position_embeddings=512)
    lengths = [150, 288, 30, 60, 260]
    x, layer = torch.randn(sum(lengths), 48), model.layer_list()[1]
    sequences = packed(model, lengths, x, torch.randn(len(lengths), 3, 288, 288))
    assert_same_as_op_by_op(lambda: through(layer, x, sequences), 1)


@torch.no_grad()
def test_8_bits_of_an_accelerated_model():
    """Its tables are made by 8-bit copies of its own layers."""
    model = accelerate(hf_model("deberta-v2"), dtype="int8")
    inputs = padded_right("deberta-v2")
    assert_same_as_op_by_op(lambda: model(**inputs)[0], 3)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("int8", [False, True])
@torch.no_grad()
def test_tables_follow_the_weights(shared, int8):
    model, inputs = of("deberta-v2", share_att_key=shared), padded_right("deberta-v2")
    model = model.quantize("int8") if int8 else model
    before = model(**inputs)[0]
    names = ("query_proj", "key_proj") if shared else ("pos_query_proj", "pos_key_proj")
    for name in names:
        part = model.layer_list()[1].attention.self.get_submodule(name)
        for tensor in (*part.parameters(), *part.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.5).add_(0.01)
                found = model(**inputs)[0]
                assert torch.equal(found, copy.deepcopy(model)(**inputs)[0])
                assert not torch.equal(found, before)
                before = found


@torch.no_grad()
def test_bad_input_is_named():
    model, x = of("deberta-v2"), torch.randn(6, 48)
    batch = packed(model, [2, 4], x)
    taken = executor.takes(survey(model.layer_list())[1], x, Call(batch, 2))
    columns, (query, key) = torch.tensor([4, 5, 5, 6, 7, 7, 7], dtype=torch.int32), taken.layer.distances
    few = key._replace(panels=key.panels[:-64])

    def call(distances=(columns, 5, 13), relative=None, tables=(query, key)):
        layers = [taken.layer, taken.layer._replace(distances=tables)]
        more = {"bias": None, "relative": relative, "distances": distances}
        return encoder_layer(taken.launch, x, layers, batch.cu_seqlens, 4, **more)

    assert call().shape == (6, 48)
    for match, changed in (
        (r"distances: expected \(columns, first, last\)", {"distances": None}),
        (r"distances: .* and no relative", {"relative": RelativeScores(columns, bias=torch.zeros(3, 8))}),
        ("distances: expected rows of the tables", {"distances": (columns, -1, 7)}),
        ("distances: expected rows of the tables", {"distances": (columns, 5, 5)}),
        ("distances: expected rows of the tables", {"distances": (columns, 25, 33)}),
        ("distances: expected values from 0 to 6", {"distances": (columns, 5, 12)}),
        ("distances: expected at least 7 distances", {"distances": (columns[1:-1], 5, 13)}),
        ("distances: expected shape", {"distances": (columns[1:], 5, 13)}),
        ("distances: expected .* elements of panels", {"tables": (None, few)}),
    ):
        with pytest.raises(ValueError, match=match):
            call(**changed)
    with pytest.raises(TypeError, match="distances: expected"):
        call(distances=(columns.long(), 5, 13))
