"""Models whose layers share weights in groups, against models with equal layers."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch

import fastbert
from fastbert.compression import shrink
from fastbert.compression.sharing import share
from fastbert.layers.modules import part
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.model_pairs import build

REFUSED = ("albert", "albert-groups", "modernbert", "mobilebert", "big_bird", "longformer")
NAMES = [name for name in FAMILY_NAMES if name not in REFUSED]
CLOSE = dict(rtol=1e-10, atol=1e-10)


def equal_layers(model, groups, start):
    """A copy whose layers have the weights that their group begins with."""
    found = copy.deepcopy(model)
    layers = [dict(layer.named_parameters()) for layer in part(model.base_model, model.family.layers)]
    for i, layer in enumerate(part(found.base_model, model.family.layers)):
        members = [layers[j] for j, group in enumerate(groups) if group == groups[i]]
        for key, p in layer.named_parameters():
            each = [own[key].data for own in members]
            p.data.copy_(sum(each) / len(each) if start == "mean" else each[0])
    return found


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_shared_models_are_models_with_equal_layers(name, tmp_path):
    theirs, ours = build(name, "ForSequenceClassification", num_hidden_layers=4)
    ours, inputs = ours.double(), batch(name)
    inputs["attention_mask"] = torch.ones(4, 40, dtype=torch.int64)
    for (groups, each), start in itertools.product((("1", [0] * 4), ("2", [0, 0, 1, 1])), ("mean", "first")):
        small = share(ours, int(groups), start)
        assert small.config.layer_groups == each
        expected = equal_layers(ours, each, start)(**inputs).logits
        torch.testing.assert_close(small(**inputs).logits, expected, **CLOSE)
        assert len(part(small.base_model, small.family.layers)) == int(groups)
    layer = sum(p.numel() for p in ours.base_model.layer_list()[0].parameters())
    assert ours.num_parameters() - small.num_parameters() == 2 * layer
    folders = [tmp_path / folder for folder in ("whole", "small", "dense")]
    for model, folder in zip((ours, small, shrink.dense(small)), folders, strict=True):
        model.save_pretrained(folder)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in folders]
    assert sizes[0] - sizes[1] > 2 * 8 * layer
    assert abs(sizes[2] - sizes[0]) < 1000
    again = type(small).from_pretrained(folders[1], dtype="auto").eval()
    assert torch.equal(again(**inputs).logits, small(**inputs).logits)
    assert again.config.layer_groups == [0, 0, 1, 1]
    stock = type(theirs).from_pretrained(folders[2], dtype="auto").eval()
    torch.testing.assert_close(stock(**inputs).logits, expected, rtol=1e-4, atol=1e-4)


def test_groups_of_any_order_train():
    ours, inputs = build("bert", "ForSequenceClassification", num_hidden_layers=4)[1].double(), batch("bert")
    inputs["attention_mask"] = torch.ones(4, 40, dtype=torch.int64)
    groups, labels = [1, 0, 1, 0], torch.tensor([0, 1, 2, 3])
    small = share(ours, groups, "first")
    whole = equal_layers(ours, groups, "first")
    for model in (small, whole):
        model(**inputs, labels=labels).loss.backward()
    layers, apart = (part(model.base_model, "encoder.layer") for model in (small, whole))
    assert small.base_model.layer_list() == [layers[1], layers[0], layers[1], layers[0]]
    for key, p in layers[1].named_parameters():
        expected = apart[0].get_parameter(key).grad + apart[2].get_parameter(key).grad
        torch.testing.assert_close(p.grad, expected, **CLOSE)
    # 8 bits, and heads that are gated by layer
    gates = torch.rand(4, 3, dtype=torch.float64)
    with torch.no_grad():
        found = [model(**inputs, head_mask=gates).logits for model in (small, whole)]
        torch.testing.assert_close(*found, **CLOSE)
        small, whole = small.float().quantize("int8"), whole.float().quantize("int8")
        torch.testing.assert_close(small(**inputs).logits, whole(**inputs).logits)


def test_files_that_do_not_fit(tmp_path):
    ours = build("bert", "ForMaskedLM", num_hidden_layers=4)[1]
    share(ours, 2).save_pretrained(tmp_path)
    for groups, message in (
        (None, "config num_hidden_layers says 4, the file has 2"),
        ([0, 1, 2, 2], "config layer_groups says 3, the file has 2"),
    ):
        with pytest.raises(fastbert.CheckpointError, match=message):
            fastbert.BertForMaskedLM.from_pretrained(tmp_path, layer_groups=groups)
    # Other groups of as many layers show in no shape
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_groups": [0, 1, 1, 1]}))
    with pytest.raises(fastbert.CheckpointError, match=r"config\.json: does not belong to .*layer_groups"):
        fastbert.BertForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("groups", "start", "message"),
    [
        (0, "mean", "groups: expected a number from 1 to 3, or one per layer, got 0"),
        (4, "mean", "groups: expected a number from 1 to 3, or one per layer, got 4"),
        (True, "mean", "groups: expected a number from 1 to 3, or one per layer, got True"),
        ([0, 2, 2], "mean", "config layer_groups: expected None or 3 numbers of groups, from 0 without gaps"),
        ([0, 0], "mean", "config layer_groups: expected None or 3 numbers of groups"),
        (1, "last", "start: expected one of mean, first, got 'last'"),
    ],
)
def test_bad_arguments(groups, start, message):
    with pytest.raises(ValueError, match=message):
        share(build("bert", "ForMaskedLM")[1], groups, start)


def test_models_that_cannot_share():
    for name in REFUSED:
        with pytest.raises(ValueError, match=r"config layer_groups: expected None, as|which cannot be cut"):
            share(build(name, "ForMaskedLM")[1])
    once = share(build("bert", "ForMaskedLM")[1])
    with pytest.raises(ValueError, match="model: bert shares its layers' weights, which cannot be cut"):
        fastbert.prune(once, layers=[0])
    pruned = shrink.without(build("bert", "ForMaskedLM")[1], heads={0: [1]})
    with pytest.raises(
        ValueError, match="config layer_groups: expected None, as bert has config pruned_heads"
    ):
        share(pruned)
    fixed = fastbert.BertConfig(
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=2,
        fixed_heads=[["learned", "current"], ["learned"] * 2],
    )
    with pytest.raises(ValueError, match="as bert has config fixed_heads that differ"):
        share(fastbert.BertModel(fixed))
