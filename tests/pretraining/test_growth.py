"""Progressive stacking: of every family, the deep model is the shallow one's stack applied several times."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastbert
from fastbert.layers.modules import attach, part
from fastbert.models.config import EncoderConfig
from fastbert.pretraining.growth import grow, grow_moments, grown_names, newest_layers, parse_growth
from tests.support.hf_models import BERT_LAYERS, batch, hf_config, hf_model


def model_of(name: str, task: str = "", seed: int = 0, **changes) -> nn.Module:
    """A tiny model of a family with random weights of unit scale, in eval."""
    if name == "albert-groups":
        changes = {"num_hidden_groups": 2, "inner_group_num": 2, **changes}
    plain = "albert" if name == "albert-groups" else name
    torch.manual_seed(seed)
    config = EncoderConfig.from_hf(hf_config(plain, **changes))
    model = getattr(fastbert, f"AutoModel{task}").from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.5 / parameter.shape[1] ** 0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(scale * torch.randn_like(parameter))
    return model


def deep(name: str, task: str = "", times: int = 2, **changes) -> nn.Module:
    """A model of 3 · times layers with other weights; groups of shared layers are stacked as well."""
    if name == "albert-groups":
        changes = {"num_hidden_groups": 2 * times, **changes}
    return model_of(name, task, seed=9, num_hidden_layers=3 * times, **changes)


def stack(root: nn.Module, path: str, times: int) -> None:
    """Let a list of layers run several times."""
    attach(root, path, nn.ModuleList(list(part(root, path)) * times))


@pytest.mark.sweep
@pytest.mark.parametrize("task", ["", "ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("family", (*BERT_LAYERS, "nomic_bert"))
def test_layer_i_has_the_weights_of_layer_i_mod_l(family, task):
    small, large = model_of(family, task), deep(family, task, 3)
    before = copy.deepcopy(small.state_dict())
    grow(small, large)
    ours, theirs = large.base_model.layer_list(), small.base_model.layer_list()
    assert len(ours) == 3 * len(theirs)
    of_layers = set()
    for i, layer in enumerate(ours):
        state = theirs[i % len(theirs)].state_dict()
        assert state.keys() == layer.state_dict().keys()
        for name, value in layer.state_dict().items():
            assert torch.equal(value, state[name])
            of_layers.add(value.data_ptr())
    old, new = dict(small.named_parameters()), dict(large.named_parameters())
    rest = {name for name, value in new.items() if value.data_ptr() not in of_layers}
    assert {name.split(".")[0] for name in rest} >= (
        {"embeddings"} if task == "" else {large.base_model_prefix}
    )
    assert any("word_embeddings" in name for name in rest)
    for name in rest:
        assert torch.equal(new[name], old[name])
    after = small.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())  # small is left as it was
    assert not {p.data_ptr() for p in new.values()} & {p.data_ptr() for p in old.values()}


@pytest.mark.parametrize("family", BERT_LAYERS)
def test_twice_the_layers_are_the_stack_applied_twice(family):
    """In float64: of our own stack to the bit, of transformers' stack to rounding."""
    changes = {"num_hidden_groups": 2, "inner_group_num": 2} if family == "albert-groups" else {}
    stock = hf_model("albert" if changes else family, **changes).double()
    small = fastbert.AutoModel.from_config(EncoderConfig.from_hf(stock.config)).double().eval()
    small.load_state_dict(stock.state_dict())
    large = deep(family).double()
    grow(small, large)
    inputs = batch(family)
    with torch.no_grad():
        found = large(**inputs).last_hidden_state
        once = small(**inputs).last_hidden_state
        for model in (small, stock):
            if family.startswith("albert"):
                model.config.num_hidden_layers *= 2
            if family == "albert-groups":
                model.config.num_hidden_groups *= 2
            if family != "albert":
                stack(model, small.family.layers, 2)
        twice, expected = small(**inputs).last_hidden_state, stock(**inputs).last_hidden_state
    kept = inputs["attention_mask"].bool()
    assert torch.equal(found, twice)
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-9, atol=1e-9)
    assert (found - once).abs().max() > 0.1


def test_ten_layers_and_one_are_told_apart():
    """encoder.layer.1 and encoder.layer.10, whose names begin alike."""
    small = model_of("bert", num_hidden_layers=6)
    large = model_of("bert", seed=1, num_hidden_layers=12)
    names = grown_names(small, large)
    for i in range(12):
        name = "encoder.layer.{}.output.dense.weight"
        assert names[name.format(i)] == name.format(i % 6)


def test_shared_layers_grow_with_one_group_or_as_many_times_the_groups():
    small = model_of("albert", num_hidden_layers=4, num_hidden_groups=2)
    large = model_of("albert", seed=1, num_hidden_layers=8, num_hidden_groups=2)
    before = copy.deepcopy(large.state_dict())
    words = r"large: .*albert_layers\.0 is shared by .* num_hidden_groups 4, got 2"
    with pytest.raises(ValueError, match=words):
        grow(small, large)
    assert all(torch.equal(value, before[name]) for name, value in large.state_dict().items())
    small = model_of("albert", num_hidden_layers=4)  # one group fills any number of groups
    grow(small, large)
    sums = {value.sum().item() for name, value in large.state_dict().items() if "ffn.weight" in name}
    assert len(sums) == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 7}, "large: expected a multiple of small's 3 layers, got 7"),
        ({"hidden_size": 96}, "large: hidden_size: expected 48 as in small, got 96"),
        ({"num_attention_heads": 6}, "large: num_attention_heads: expected 3 as in small, got 6"),
        ({"hidden_act": "relu"}, "large: hidden_act: expected 'gelu' as in small, got 'relu'"),
    ],
)
def test_another_width_or_depth_is_named(changes, match):
    large = model_of("bert", "ForMaskedLM", **{"num_hidden_layers": 6, **changes})
    before = copy.deepcopy(large.state_dict())
    with pytest.raises(ValueError, match=match):
        grow(model_of("bert", "ForMaskedLM"), large)
    assert all(torch.equal(value, before[name]) for name, value in large.state_dict().items())


def test_other_models_are_named():
    small = model_of("bert", "ForMaskedLM")
    for large, match in (
        (deep("bert"), "large: expected a BertForMaskedLM as small, got BertModel"),
        (deep("bert", "ForMaskedLM").half(), r"large: .*: expected torch\.float32 of the shape"),
    ):
        with pytest.raises(ValueError, match=match):
            grow(small, large)
    with pytest.raises(TypeError, match="large: expected a model of this package, got Linear"):
        grow(small, nn.Linear(2, 2))
    without = fastbert.BertModel(deep("bert").config, add_pooling_layer=False)
    with pytest.raises(ValueError, match=r"only one of them has pooler\.dense\.bias"):
        grow(model_of("bert"), without)


# --- moments ------------------------------------------------------------------------------------------------


def adam_of(model: nn.Module, seed: int) -> tuple[torch.optim.Adam, dict]:
    """An optimizer after a step, and its state by name."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer, {name: optimizer.state[p] for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["bert", "mpnet", "albert-groups"])
def test_moments_are_copied_as_the_weights_are(family):
    small, large = model_of(family, "ForMaskedLM"), deep(family, "ForMaskedLM")
    _, moments = adam_of(small, 1)
    grown, names = grow_moments(moments, small, large), grown_names(small, large)
    parameters = dict(large.named_parameters())
    assert grown.keys() == parameters.keys()
    pointers = set()
    for name, state in grown.items():
        assert state.keys() == {"exp_avg", "exp_avg_sq", "step"}
        for key, value in state.items():
            assert torch.equal(value, moments[names[name]][key])
            pointers.add(value.data_ptr())
    assert len(pointers) == 3 * len(grown)  # each has its own
    assert not pointers & {v.data_ptr() for state in moments.values() for v in state.values()}
    optimizer = torch.optim.Adam(large.parameters(), lr=1e-3)
    optimizer.state.update({parameters[name]: state for name, state in grown.items()})
    for parameter in large.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 2 for p in large.parameters())


# --- what trains --------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("task", ["", "ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("family", [name for name in BERT_LAYERS if name != "albert"])
def test_new_layers_pooler_and_heads_train(family, task):
    """And backward ends at the lowest new layer."""
    model = deep(family, task)
    old = len(model.base_model.layer_list()) // 2
    names = newest_layers(model, old)
    layers = model.base_model.layer_list()
    new = {id(p) for layer in layers[old:] for p in layer.parameters()}
    encoder = {id(p): n for n, p in model.base_model.named_parameters()}
    for name, parameter in model.named_parameters():
        above = id(parameter) not in encoder or encoder[id(parameter)].startswith("pooler.")
        assert (name in names) == (id(parameter) in new or above), name
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in names)
    inputs = {name: value for name, value in batch(family).items() if name != "attention_mask"}
    output = model(**inputs, output_hidden_states=True)
    output.hidden_states[-1].square().sum().backward()
    assert not any(state.requires_grad for state in output.hidden_states[: old + 1])
    assert {id(p) for p in parameters.values() if p.grad is not None and id(p) in encoder} == new


def test_what_cannot_be_frozen_is_named():
    words = r"model: encoder\.albert_layer_groups\.0.* shared layers train together"
    with pytest.raises(ValueError, match=words):
        newest_layers(deep("albert"), 3)
    for old in (0, 6, True, "3"):
        with pytest.raises(ValueError, match=r"old: expected an integer in \[1, 6\), got"):
            newest_layers(deep("bert"), old)


# --- the option ---------------------------------------------------------------------------------------------


def test_stages_of_the_option():
    assert parse_growth("3:50000,6:70000,12:*") == [(3, 50000), (6, 70000), (12, None)]
    assert parse_growth("12:*") == [(12, None)]
    assert parse_growth("2:1,6:10,12:*") == [(2, 1), (6, 10), (12, None)]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "grow: stage 1: expected LAYERS:STEPS, such as 3:50000, got ''"),
        ("3:5,6", "grow: stage 2: expected LAYERS:STEPS, such as 3:50000, got '6'"),
        ("3:0,6:*", "grow: stage 1: expected"),
        ("\u0663:5,6:*", "grow: stage 1: expected"),
        ("3:*,6:*", r"grow: expected \* for the steps of the last stage and no other, got '3:\*,6:\*'"),
        ("3:5,6:7", r"grow: expected \* for the steps of the last stage and no other"),
        ("3:5,7:*", "grow: stage 2: expected a multiple of the 3 layers before, got 7"),
    ],
)
def test_bad_stages_are_named(text, match):
    with pytest.raises(ValueError, match=match):
        parse_growth(text)
