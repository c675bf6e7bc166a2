"""Executor `gpu`: the layers' mathematics, and a plan that is kept until something changes.

On a CPU with `on_gpu` saying yes, and the reference in the kernels' place; in float64, so that any difference
is a fault. The kernels: tests/ptx/test_cuda_encoder_layers.py.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import fastbert
from fastbert.acceleration import model_gaps
from fastbert.execution import gpu, launchers, plan
from fastbert.execution.call import Call
from fastbert.graphs.recorder import EagerRecorder, Recording
from fastbert.layers.batch import PackedBatch
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from fastbert.ops import encoder_layers as op
from fastbert.runtime import dispatch, prepared
from tests.support.hf_models import BERT_LAYERS, batch, hf_config


def of(name: str, **overrides):
    torch.manual_seed(5)
    config = EncoderConfig.from_hf(hf_config(name, **overrides))
    return AutoModel.from_config(config).eval().double()


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """The numbers of the layers that ran in one call each time; every call is on a GPU while `on` is true."""

    class Served(list):
        on, surveys = True, 0

    seen, run, survey = Served(), gpu.run, plan.survey

    def watched(group, *args):
        seen.append([step.number for step, _ in group])
        return run(group, *args)

    def counted(*args, **kwargs):
        seen.surveys += 1
        return survey(*args, **kwargs)

    monkeypatch.setattr(gpu, "run", watched)
    monkeypatch.setattr(plan, "survey", counted)
    monkeypatch.setattr(op, "gap", lambda stack, device: None)
    monkeypatch.setattr(launchers, "on_gpu", lambda device: seen.on)
    with torch.no_grad():
        yield seen


def truth(served, call):
    """The result of the other executors."""
    served.on = False
    try:
        return call()
    finally:
        served.on = True


def check(served, model, inputs, **options):
    expected = truth(served, lambda: copy.deepcopy(model)(**inputs, **options))
    served.clear()
    actual = model(**inputs, **options)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-10)
    return actual, expected


@pytest.mark.parametrize("name", BERT_LAYERS)
@pytest.mark.parametrize("what", ["plain", "states", "first", "causal"])
def test_every_family(name, what, served):
    model, inputs = of(name), batch(name)
    options = {
        "plain": {},
        "states": {"output_hidden_states": True},
        "first": {"first_token_only": True},
        "causal": {"causal": True},
    }[what]
    for _ in range(3):
        actual, expected = check(served, model, inputs, **options)
        assert served == [list(range(len(model.layer_list())))]
        for one, other in zip(actual.hidden_states or (), expected.hidden_states or (), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_layers_with_heads_of_their_own(served):
    model, inputs = of("bert"), batch("bert")
    config = EncoderConfig.from_hf(hf_config("bert"))
    config.pruned_heads = {0: [0]}
    model = AutoModel.from_config(config).eval().double()
    kept(served, model, inputs)
    check(served, model, inputs)
    assert served == [[0, 1, 2]]
    mask = torch.zeros(*inputs["input_ids"].shape, 1).transpose(1, 2)[:, None]
    check(served, model, inputs | {"attention_mask": mask.double()})
    assert served == [[1, 2]]  # the bias of all heads does not fit the first layer


# --- the plan that is kept ----------------------------------------------------------------------------------


def kept(served, model, inputs):
    """The model, after calls whose plan is kept."""
    for _ in range(3):
        model(**inputs)
    served.surveys = 0
    model(**inputs)
    assert served.surveys == 0
    return model


def test_one_plan_for_many_calls(served):
    model = kept(served, of("bert"), batch("bert"))
    longer = {name: torch.cat([t, t], 1)[:, :11] for name, t in batch("bert").items()}
    for options in ({}, {"first_token_only": True}, {"output_hidden_states": True}):
        check(served, model, longer, **options)
    with dispatch.use_backend("reference"):
        served.clear()
        model(**longer)
    assert served == []
    check(served, model, longer)
    assert served == [[0, 1, 2]]
    # the deep copies of the other executors alone
    served.surveys = 0
    model(**longer)
    assert served.surveys == 0


def test_recorders_hear_of_what_a_kept_plan_uses(served):
    """A recorded graph updates derived weights in place, and the stack that it runs stays right."""
    model, inputs = kept(served, of("bert"), batch("bert")), batch("bert")
    with prepared.collect_used() as used:
        model(**inputs)
    assert [name[0] for _, name, _ in used] == ["layers"] * 3
    stack, memory = used[0][2], used[0][2].layers[0].qkv_weight
    halve(first(model).attention.self.key.weight)
    model(**inputs)
    assert all(prepared.update_in_place(*each) for each in used)
    assert stack.layers[0].qkv_weight is memory
    assert torch.equal(memory[48:96], first(model).attention.self.key.weight)
    check(served, model, inputs)


def test_a_shared_layer_that_runs_once_more(served):
    model = kept(served, of("albert"), batch("albert"))
    model.config.num_hidden_layers += 1
    check(served, model, batch("albert"))
    assert served == [list(range(len(model.layer_list())))]


def first(model) -> nn.Module:
    return model.encoder.layer[0]


def hook(module):
    module.register_forward_hook(lambda module, inputs, output: output * 1.5)


def other_forward(module):
    own = module.forward
    module.forward = lambda *args: own(*args) * 1.5


def halve(parameter):
    with torch.no_grad():
        parameter.mul_(0.5)


def set_data(parameter):
    parameter.data = torch.randn_like(parameter)


class Half(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5


def swap_layers(m):
    layers = list(m.encoder.layer)
    m.encoder.layer[0], m.encoder.layer[1] = layers[1], layers[0]


def train_without_dropout(layer):
    for module in layer.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


CHANGES = {
    "in place": lambda m: halve(first(m).output.dense.weight),
    "joined": lambda m: halve(first(m).attention.self.key.bias),
    "data": lambda m: set_data(first(m).intermediate.dense.weight),
    "data in place": lambda m: first(m).output.LayerNorm.weight.data.mul_(2),
    "parameter": lambda m: setattr(first(m).output.dense, "bias", nn.Parameter(torch.randn(48).double())),
    "module": lambda m: setattr(first(m).intermediate, "dense", nn.Linear(48, 80).double()),
    "layer": lambda m: m.encoder.layer.__setitem__(0, copy.deepcopy(m.encoder.layer[1])),
    "one layer less": lambda m: m.encoder.layer.__delitem__(1),
    "layers swapped": swap_layers,
    "eps": lambda m: setattr(first(m).output.LayerNorm, "eps", 0.5),
    "hook": lambda m: hook(first(m).attention.output.dense),
    "hook of a layer": lambda m: hook(first(m)),
    "forward": lambda m: other_forward(first(m).intermediate.dense),
    "class": lambda m: setattr(first(m).output.dense, "__class__", Half),
    "scaling": lambda m: setattr(first(m).attention.self, "scaling", 0.01),
    "activation": lambda m: setattr(first(m).intermediate, "intermediate_act_fn", nn.Tanh()),
    "norm": lambda m: setattr(first(m).output, "LayerNorm", nn.Identity()),
    "mode": lambda m: train_without_dropout(first(m)),
    "clear": fastbert.clear,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, served):
    model = kept(served, of("bert"), batch("bert"))
    CHANGES[change](model)
    for _ in range(3):
        check(served, model, batch("bert"))
    if change in ("in place", "data", "eps", "clear"):
        kept(served, model, batch("bert"))  # again


def test_global_changes_are_seen(served, monkeypatch):
    model = kept(served, of("bert"), batch("bert"))
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: output * 1.5 if type(module) is nn.Linear else None
    )
    check(served, model, batch("bert"))
    assert served == []
    handle.remove()
    check(served, model, batch("bert"))
    own = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: own(self, x) * 1.5)
    check(served, model, batch("bert"))
    assert served == []


def test_gradients_and_inference_mode(served):
    model, inputs = kept(served, of("bert"), batch("bert")), batch("bert")
    with torch.enable_grad():
        served.clear()
        model(**inputs)[0].sum().backward()
        assert served == []
    with torch.inference_mode():
        check(served, model, inputs)
    assert model(**inputs)[0].is_inference() is False


def test_a_plan_is_freed_with_its_model(served):
    model = kept(served, of("bert"), batch("bert"))
    assert prepared.beside(model.encoder).state is not None
    weight, tensor = weakref.ref(model.encoder), weakref.ref(first(model).output.dense.weight)
    del model
    gc.collect()
    assert (weight(), tensor()) == (None, None)


def test_a_model_that_always_changes_is_seldom_watched(served, noted):
    model, inputs, made = of("bert"), batch("bert"), noted(plan, "state_of")
    for _ in range(4 * plan.MOST_MADE):
        halve(first(model).output.dense.bias)
        check(served, model, inputs)
    assert 0 < len(made) <= 2 * (plan.MOST_MADE + 4)


def stock_of(name: str):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    return transformers.AutoModel.from_config(hf_config(name)).eval().double()


def padded_right(name: str):
    """A batch that an accelerated model packs: every sequence keeps its first token."""
    mask = torch.arange(40) < torch.tensor([[5], [40], [2], [13]])
    return batch(name) | {"attention_mask": mask.long()}


class OtherEmbeddings:
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * 1.5


def other_class(module):
    module.__class__ = type("Other", (OtherEmbeddings, type(module)), {})
    return module


# beside the layers
AROUND = {
    "hook of embeddings": lambda m: hook(m.embeddings),
    "hook of a table": lambda m: hook(m.embeddings.word_embeddings),
    "class of embeddings": lambda m: other_class(m.embeddings),
    "hook of the stack": lambda m: m.encoder.register_forward_hook(lambda *_: None),
    "hook of the pooler": lambda m: hook(m.pooler.dense),
    "other embeddings": lambda m: setattr(m, "embeddings", other_class(copy.deepcopy(m.embeddings))),
    "eps of embeddings": lambda m: setattr(m.embeddings.LayerNorm, "eps", 0.5),
}


@pytest.mark.parametrize("change", [*CHANGES, *AROUND])
def test_an_accelerated_model_sees_a_change(change, served):
    model = kept(served, fastbert.accelerate(stock_of("bert")), padded_right("bert"))
    before = model.fastbert_state.padded_calls
    (CHANGES | AROUND)[change](model)
    for _ in range(3):
        actual, expected = check(served, model, padded_right("bert"))
        torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=1e-10)
    padded = model.fastbert_state.padded_calls - before
    assert padded == (0 if model_gaps.gap(model) is None else 3)


@pytest.mark.parametrize("which", ["embeddings", "encoder.layer.0.output"])
def test_an_accelerated_model_sees_another_forward_of_a_class(which, served, monkeypatch):
    model = kept(served, fastbert.accelerate(stock_of("bert")), padded_right("bert"))
    kind = type(model.get_submodule(which))
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args, **kwargs: own(*args, **kwargs) * 1.5)
    check(served, model, padded_right("bert"))
    assert model.fastbert_state.padded_calls == 1


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_accelerated_models(name, served, noted):
    model, inputs, asked = stock_of(name), padded_right(name), noted(model_gaps, "modules_gap")
    stock, mask = model(**inputs)[0], inputs["attention_mask"].bool()
    fastbert.accelerate(model)
    kept(served, model, inputs)
    assert served[-1] == list(range(model.config.num_hidden_layers))
    assert len(asked) == 2  # not while the plan holds
    torch.testing.assert_close(model(**inputs)[0][mask], stock[mask], rtol=0, atol=1e-10)
    fastbert.accelerate(model, layer_norm=False)  # other options of the same modules
    served.clear()
    torch.testing.assert_close(model(**inputs)[0][mask], stock[mask], rtol=0, atol=1e-10)
    assert served == []


def test_a_plan_holds_while_a_graph_runs_the_layers(served, noted):
    class NoReplay(EagerRecorder):
        def record(self, function):
            return Recording(function(), lambda: None)

    model, inputs = fastbert.accelerate(stock_of("bert")), padded_right("bert")
    asked = noted(model_gaps, "modules_gap")
    graphed = fastbert.graph(model, recorder=NoReplay)
    for _ in range(3):
        graphed(**inputs)
    asked.clear()
    graphed(**inputs)
    assert (graphed.replays, asked) == (4, [])
    hook(model.embeddings)
    graphed(**inputs)
    assert (graphed.replays, len(asked)) == (4, 1)


def test_explain_says_why_not(monkeypatch):
    monkeypatch.setattr(op, "gap", lambda stack, device: "the moon is full")
    ends, x = torch.tensor([0, 4], dtype=torch.int32), torch.zeros(4, 48, dtype=torch.float64)
    (found,) = plan.explain(plan.survey(of("bert").layer_list()), x, Call(PackedBatch(ends, 4), 2))
    assert (found.executor, found.refused["gpu"]) == ("launchers", "the moon is full")
