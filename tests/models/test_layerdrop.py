"""LayerDrop: a step with skipped layers is a step of the model without them, and nothing of them runs."""

from __future__ import annotations

import copy

import pytest
import torch

from fastbert.layers import encoder, first_token
from fastbert.layers.modules import part
from fastbert.training.parallel import Parallel
from tests.compression.test_shrink import CUT, inputs_of
from tests.support.model_pairs import build

CLOSE = dict(rtol=1e-10, atol=1e-11)
LAYERS = 5
FAMILIES = [*(name for name in CUT if name != "xlnet"), "mobilebert"]


def deep(name, task="ForSequenceClassification", dropout=0.0, **options):
    """A model of five layers in training mode."""
    made = build(name, task, num_hidden_layers=LAYERS, **options)[1].double().train()
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    return made


def kept(seed, p):
    """The layers that run in a call with this seed."""
    torch.manual_seed(seed)
    return [i for i, draw in enumerate(torch.rand(LAYERS).tolist()) if draw >= p]


def without(model, numbers):
    """A copy with these layers alone."""
    made = copy.deepcopy(model)
    layers = part(made.base_model, made.family.layers)
    for i in reversed(range(LAYERS)):
        if i not in numbers:
            del layers[i]
    return made


def batch(name):
    inputs = inputs_of(name)
    return {**inputs, "labels": torch.arange(len(inputs["input_ids"])) % 2}


# Without layer 0 and with the last layer, and the other way round
@pytest.mark.parametrize("seed", [1, 11])
@pytest.mark.parametrize("name", [*FAMILIES, "convolution"])
def test_a_step_is_that_of_the_model_without_the_layers(name, seed):
    options = {"conv_kernel_size": 3, "conv_act": "gelu"} if name == "convolution" else {}
    name = "deberta-v2" if options else name
    more = {"attention_window": 8} if name == "longformer" else {}
    ours, inputs, runs = deep(name, **options, **more), batch(name), kept(seed, 0.5)
    assert 1 < len(runs) < LAYERS
    if options:
        runs = sorted({0, *runs})
    small = without(ours, runs)
    ours.layerdrop = 0.5
    torch.manual_seed(seed)
    found = ours(**inputs).loss
    expected = small(**inputs).loss
    torch.testing.assert_close(found, expected, **CLOSE)
    found.backward()
    expected.backward()
    layers, others = ours.base_model.layer_list(), small.base_model.layer_list()
    for i, layer in enumerate(layers):
        for key, p in layer.named_parameters():
            if i not in runs:
                assert p.grad is None, key
            elif (gradient := others[runs.index(i)].get_parameter(key).grad) is not None:
                torch.testing.assert_close(p.grad, gradient, **CLOSE)
    # In eval mode all layers run
    with torch.no_grad():
        ours.eval()
        found = ours(**inputs).loss
        ours.layerdrop = 0.0
        assert torch.equal(ours(**inputs).loss, found)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_skipped_layers_are_not_computed(monkeypatch, gradients, recompute):
    ours, inputs, numbers = deep("bert"), inputs_of("bert"), []
    layers = {id(layer): i for i, layer in enumerate(ours.base_model.layer_list())}

    def noting(layer):
        def noted(form, parts, *args, **kwargs):
            numbers.append(layers[id(parts.owner)])
            return layer(form, parts, *args, **kwargs)

        return noted

    for module in (encoder, first_token):
        monkeypatch.setattr(module, "layer", noting(module.layer))
    if recompute:
        ours.gradient_checkpointing_enable()
    ours.layerdrop = 0.4
    for seed in range(5):
        runs = kept(seed, 0.4)
        numbers.clear()
        torch.manual_seed(seed)
        with torch.set_grad_enabled(gradients):
            ours(**inputs)
        assert numbers == runs


def test_shared_layers_and_all_layers():
    ours, inputs = deep("albert"), batch("albert")
    ours.layerdrop = 0.5
    torch.manual_seed(1)
    ours(**inputs).loss.backward()
    config = copy.deepcopy(ours.config)
    config.num_hidden_layers = len(kept(1, 0.5))
    small = type(ours)(config).double().train()
    small.load_state_dict(ours.state_dict())
    for module in small.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.manual_seed(1)
    torch.testing.assert_close(ours(**inputs).loss, small(**inputs).loss, **CLOSE)
    # Without any layer the embeddings are the output
    none = deep("bert")
    none.layerdrop = 0.999
    states = none(**inputs_of("bert"), output_hidden_states=True).hidden_states
    assert len(states) == LAYERS + 1
    assert all(torch.equal(state, states[0]) for state in states)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_hidden_states_of_skipped_layers_repeat(name):
    ours, inputs, runs = deep(name, "ForMaskedLM"), inputs_of(name), kept(1, 0.5)
    small = without(ours, runs)
    ours.layerdrop = 0.5
    torch.manual_seed(1)
    found = ours(**inputs, output_hidden_states=True).hidden_states
    expected = small(**inputs, output_hidden_states=True).hidden_states
    assert len(found) == LAYERS + 1
    at = 0
    for i in range(LAYERS):
        at += i in runs
        last = name == "modernbert" and i == LAYERS - 1
        if at < len(runs) or last or name == "bert":
            torch.testing.assert_close(found[i + 1], expected[at], **CLOSE)
    torch.testing.assert_close(found[-1], expected[-1], **CLOSE)


def test_without_layerdrop_nothing_is_drawn():
    ours, inputs = deep("bert"), batch("bert")
    state = torch.get_rng_state()
    before = ours(**inputs).loss
    assert torch.equal(torch.get_rng_state(), state)
    ours.layerdrop = 0.3
    ours(**inputs)
    assert not torch.equal(torch.get_rng_state(), state)
    ours.layerdrop = 0
    assert torch.equal(ours(**inputs).loss, before)


def test_one_seed_is_one_step():
    ours, inputs = deep("bert", dropout=0.1), batch("bert")
    torch.manual_seed(5)
    before = ours(**inputs).loss
    ours.layerdrop = 0.3
    torch.manual_seed(5)
    first = ours(**inputs).loss
    torch.manual_seed(5)
    assert torch.equal(ours(**inputs).loss, first)
    assert not torch.equal(first, before)


@pytest.mark.parametrize("p", [1, -0.1, True, "half", float("nan")])
def test_bad_values(p):
    with pytest.raises(ValueError, match=r"layerdrop: expected a number in \[0, 1\), got"):
        deep("bert").layerdrop = p


def test_what_excludes_it(monkeypatch):
    ours = deep("bert")
    ours.layerdrop = 0.2
    assert ours.base_model.layerdrop == 0.2
    with pytest.raises(ValueError, match="output_attentions: expected False with layerdrop"):
        ours(**inputs_of("bert"), output_attentions=True)
    with pytest.raises(ValueError, match="layerdrop: expected 0 for xlnet"):
        deep("xlnet").layerdrop = 0.2
    several = Parallel(device="cpu")
    monkeypatch.setattr(several, "world", 2)
    with pytest.raises(ValueError, match="layerdrop: expected 0 with several processes"):
        several.wrap(ours)
