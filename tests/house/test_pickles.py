"""Public objects come back from a pickle and from `torch.save` as they were, and answer the same."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import fastbert
from tests.support.pickled import IDS, MASK, answer, objects, own

pytest.importorskip("sentence_transformers", minversion="6")


@pytest.fixture(scope="module")
def stored() -> dict[str, tuple[object, bytes, bytes]]:
    """Name -> the object, its pickle, and what `torch.save` writes."""
    found = {}
    for name, value in objects().items():
        file = io.BytesIO()
        torch.save(value, file)
        found[name] = value, pickle.dumps(value), file.getvalue()
    return found


def test_objects_come_back(stored):
    for name, (value, pickled, saved) in stored.items():
        for again in (pickle.loads(pickled), torch.load(io.BytesIO(saved), weights_only=False)):
            assert type(again) is type(value), name
            if isinstance(value, (torch.nn.Module, fastbert.SentenceEncoder)):
                assert torch.equal(answer(again), answer(value)), name
            if name.startswith("accelerated"):
                assert (
                    str(fastbert.explain(again)).splitlines()[0]
                    == str(fastbert.explain(value)).splitlines()[0]
                )
    config, output = (pickle.loads(stored[name][1]) for name in ("config", "output"))
    assert config.to_dict() == stored["config"][0].to_dict()
    assert torch.equal(output[0], fastbert_output(stored))
    assert pickle.loads(stored["error"][1]).args == ("no such file",)
    assert pickle.loads(stored["classes"][1]) == stored["classes"][0]


def fastbert_output(stored) -> torch.Tensor:
    with torch.no_grad():
        return stored["BertModel"][0](IDS, attention_mask=MASK)[0]


def test_a_graphed_model_says_that_it_has_no_pickle():
    graphed = fastbert.graph(own("BertModel", "bert"))
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"GraphedModel: .*model and call fastbert\.graph again"):
            copied(graphed)
