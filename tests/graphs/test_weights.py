"""Weights that are written, replaced or derived anew while recordings read them."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert.execution import cpu
from fastbert.graphs import model as graphs
from fastbert.graphs.recorder import Recording
from fastbert.layers import attention
from fastbert.runtime import dispatch, prepared
from tests.support.graphed_models import Graphed, GraphLike, fresh, lengths_batch, same
from tests.support.hf_models import batch


@pytest.fixture
def g(monkeypatch):
    """As on a GPU, its weights are derived tensors; a CPU's fused layer has an object of its own."""
    monkeypatch.setattr(cpu, "serves", lambda *_: "off")
    return Graphed(fresh("bert", torch.float32))


@torch.no_grad()
def scale(model, factor=1.1):
    for parameter in model.parameters():
        parameter.mul_(factor)


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with torch.enable_grad():
        model(**batch("bert")).last_hidden_state.square().mean().backward()
    optimizer.step()


def load(model, **options):
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()}, **options)


def by_data(model):
    """Write without the version counter."""
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def by_row(model):
    for parameter in model.parameters():
        parameter.data[0] *= 0.9


def in_inference_mode(model):
    with torch.inference_mode():
        model.encoder.layer[0].attention.self.query.weight.mul_(1.5)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "change",
    [
        *(scale, step, load, by_data, by_row, in_inference_mode, lambda m: m.train().eval()),
        lambda m: [parameter.detach().numpy().__imul__(0.9) for parameter in m.parameters()],
    ],
)
def test_weights_changed_in_place_stay_valid(change, g):
    """Graphs are not recorded again, and derived weights are rebuilt."""
    calls = ({"return_dict": False}, {"return_dict": False, "first_token_only": True}, {"packed": True})

    def call():
        for extra in calls:
            for inputs in (batch("bert"), lengths_batch([3, 4])):
                with torch.no_grad():
                    # a copy derives its own weights: those of the model may have been overwritten by graphs
                    fns = (g.graphed, copy.deepcopy(g.model))
                    actual, expected = (f(**inputs, **extra)[:2] for f in fns)
                for a, e in zip(actual, expected, strict=True):
                    assert (a is None) == (e is None)
                    if e is not None:
                        same(a, e)
                assert g.graphed.last_fallback is None

    call()
    recorded = g.recorded
    for _ in range(2):
        change(g.model)
        call()
    assert g.recorded == recorded == 5


def test_whether_weights_were_written_is_asked_of_the_host_alone(g):
    """An operation on tensors of the device might wait for it."""

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was called")

    g.check(**batch("bert"))
    assert g.graphed._derived
    with Refuse():
        assert g.graphed._settle()
        assert all(prepared.is_current(*entry) for entry in g.graphed._derived.values())
    by_row(g.model)
    with Refuse():
        assert not all(prepared.is_current(*entry) for entry in g.graphed._derived.values())
    g.check(**batch("bert"))
    assert g.recorded == 1


def test_a_write_that_the_model_itself_found_first(g):
    """The model then has other derived weights than the graph, and has set the marks again."""
    g.check(**batch("bert"))
    by_data(g.model)
    with torch.no_grad():
        g.model(**batch("bert"))
    g.check(**batch("bert"))
    assert g.recorded == 1


def test_every_kind_of_recording_has_its_derived_weights(g):
    """In one bucket of tokens, the recording that needs the fewest weights comes first."""
    for order in ((True, False), (False, True)):
        for first_only in order:
            g.check(**lengths_batch([3, 4]), first_token_only=first_only)
        scale(g.model)
    assert g.recorded == 2


def test_derived_weights_of_a_backend_that_is_not_asked(g):
    """They are not rebuilt, so their recordings must be dropped."""
    g.check(**batch("bert"))
    scale(g.model)
    with dispatch.use_backend("aten"):
        g.check(**batch("bert"))
    g.check(**batch("bert"))


def test_derived_weights_that_cannot_be_overwritten(monkeypatch):
    """Everything is recorded anew."""

    class Opaque:
        def __init__(self, weight):
            self.weight = weight

    def projected(form, parts, x, values):
        key = parts.key
        made = prepared.derived(parts.owner, "opaque", (key.weight,), lambda: Opaque(key.weight * 2))
        return tuple(F.linear(x, made.weight).reshape(-1, form.nheads, form.head_dim) for _ in range(3))

    monkeypatch.setattr(cpu, "serves", lambda *_: "off")
    monkeypatch.setattr(attention, "queries_keys_values", projected)
    g = Graphed(fresh())
    for recorded in (1, 2):
        g.check(**batch("bert"))
        assert g.recorded == recorded
        scale(g.model)


def swap_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def transpose(model):
    weight = model.encoder.layer[2].attention.output.dense.weight
    weight.data = weight.data.t()


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Adapter(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x.mean()


def wrap(model):
    old = model.encoder.layer[0].output.dense
    new = Adapter(old.in_features, old.out_features, dtype=model.dtype)
    new.load_state_dict(old.state_dict())
    model.encoder.layer[0].output.dense = new.eval()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.encoder.layer.__setitem__(1, copy.deepcopy(m.encoder.layer[0])),
        lambda m: load(m, assign=True),
        swap_data,
        transpose,
        lambda m: setattr(m.encoder.layer[2].output.dense, "bias", nn.Parameter(torch.ones(48).double())),
        lambda m: setattr(m.encoder.layer[2].output.dense, "bias", None),
        lambda m: m.float(),
        lambda m: m.half().double(),
        lambda m: parametrize.register_parametrization(m.pooler.dense, "weight", Twice()).eval(),
        lambda m: m.resize_token_embeddings(130),
        lambda m: m.add_module("extra", nn.Linear(2, 2).eval()),
    ],
)
def test_replaced_parameters_are_noticed(change):
    g = Graphed(fresh())
    g.check(**batch("bert"))
    g.check(**lengths_batch([3, 4]))
    assert g.recorded == 2
    change(g.model)
    for graphs_now, inputs in enumerate((lengths_batch([3, 4]), batch("bert")), 1):
        g.check(**inputs)
        assert len(g.graphed.graphs) == graphs_now  # no old one is left
    assert g.recorded == 4
    assert len(g.recorders) == 2


@pytest.mark.parametrize(
    "change", [wrap, lambda m: setattr(m.encoder.layer[0].output.dense, "__class__", Adapter)]
)
def test_parts_with_code_of_their_own_are_called(change):
    g = Graphed(fresh())
    g.check(**batch("bert"))
    change(g.model)
    g.check(**batch("bert"), reason="layer 0: output.dense is a Adapter")


def test_the_memory_that_a_graph_reads_stays():
    """A replay that proves outdated afterwards must not have read freed memory."""
    g = Graphed(fresh())
    g.check(**batch("bert"))
    pointer = g.model.encoder.layer[0].output.dense.weight.data_ptr()
    swap_data(g.model)
    gc.collect()
    assert any(t.data_ptr() == pointer for t in g.graphed._weights.memory)
    g.check(**batch("bert"))
    assert all(t.data_ptr() != pointer for t in g.graphed._weights.memory)


def test_a_model_that_never_rests():
    """If weights change during every replay, the model itself computes the result in the end."""
    model = fresh()

    class Restless(GraphLike):
        def record(self, function):
            made = super().record(function)

            def replay():
                made.replay()
                scale(model, 1.0)

            return Recording(made.outputs, replay)

    recorder = Restless(model)
    graphed = graphs.graph(model, recorder=lambda device: recorder)
    with torch.no_grad():
        same(graphed(**batch("bert")), model(**batch("bert")))
    assert graphed.last_fallback == "the model changed during the call"
