"""Models with a head: the encoder is replayed, and the head's results are the model's own."""

from __future__ import annotations

import copy

import pytest
import torch

import fastbert
from fastbert.graphs.recorder import EagerRecorder
from tests.support.graphed_models import SIZES, lengths_batch
from tests.support.model_pairs import build, inputs_for

HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@pytest.mark.parametrize("task", HEADS)
def test_the_head_runs_on_replayed_tokens(task):
    _, model = build("bert", task)
    graphed, inputs = fastbert.graph(model.eval(), recorder=EagerRecorder, **SIZES), inputs_for("bert", task)
    with torch.no_grad():
        for times in (1, 2):
            found, wanted = graphed(**inputs), model(**inputs)
            assert graphed.replays == times
            assert found.keys() == wanted.keys()
            for a, b in zip(found.values(), wanted.values(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        # another model of the class is not served, nor is this one called by itself
        other = copy.deepcopy(model)
        other.base_model.embeddings.word_embeddings.weight.neg_()
        assert not torch.allclose(other(**inputs)[0], graphed(**inputs)[0])
    assert graphed.replays == 3
    graphed(**inputs)[0].sum().backward()
    assert "gradients are on" in graphed.last_fallback


def test_a_list_of_choices_and_bad_input_are_the_models():
    _, model = build("bert", "ForSequenceClassification")
    graphed = fastbert.graph(model.eval(), recorder=EagerRecorder, **SIZES)
    with torch.no_grad(), pytest.raises(ValueError, match="input_ids: token id 9999"):
        graphed(torch.full((2, 3), 9999))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(graphed)
    with torch.no_grad():
        assert graphed(**lengths_batch([3, 5])).logits.shape == model(**lengths_batch([3, 5])).logits.shape
    graphed.clear()
    assert graphed.encoder.graphs == []
