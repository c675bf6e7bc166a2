"""What the model does itself, and the reason that the graphed model gives for it."""

from __future__ import annotations

import warnings

import pytest
import torch

from fastbert.graphs import model as graphs
from fastbert.graphs.calls import by_grid
from fastbert.layers.taps import Taps
from fastbert.models.encoder import tapped
from fastbert.runtime import dispatch
from tests.support.graphed_models import Graphed, GraphLike, fresh, lengths_batch, same, shared
from tests.support.hf_models import batch

# --- fall-backs ---------------------------------------------------------------------------------------------


FALLBACKS = {
    "output_attentions is asked for": {"output_attentions": True},
    "output_hidden_states is asked for": {"output_hidden_states": True},
    "head_mask is given": {"head_mask": torch.ones(3, dtype=torch.float64)},
    "attention_mask has four dimensions": {"attention_mask": torch.zeros(4, 1, 40, 40, dtype=torch.float64)},
    "inputs_embeds is given": {
        "input_ids": None,
        "inputs_embeds": torch.ones(4, 40, 48, dtype=torch.float64),
        "token_type_ids": None,
    },
    "there are no tokens": {"attention_mask": torch.zeros(4, 40)},
    "causal is given": {"causal": False},  # which overrides a config's is_decoder
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_what_the_model_does_itself(reason):
    g = Graphed(shared())
    g.check(**{**batch("bert"), **FALLBACKS[reason]}, reason=reason)
    assert dict(g.graphed.fallbacks) == {reason: 1}
    assert g.graphed.replays == 0
    assert g.recorded == 0
    g.check(**batch("bert"))
    assert dict(g.graphed.fallbacks) == {reason: 1}
    assert g.graphed.replays == 1


def test_sequences_longer_than_the_positions():
    """They are legal with position_ids, but graphs do not support them."""
    model = shared()
    longest = model.config.max_tokens
    ids = torch.arange(longest + 1)[None] % 100 + 5
    g = Graphed(model)
    g.check(ids, position_ids=ids % 50, reason=f"input_ids are more than {longest} per sequence")
    g.check(ids[:, 1:], position_ids=ids[:, 1:] % 50)
    with torch.no_grad():
        for call in (g.graphed, model):
            with pytest.raises(ValueError, match="input_ids: a sequence of 73 tokens is longer than the 72"):
                call(ids)


@pytest.mark.parametrize("name", ["modernbert", "eurobert"])
def test_windows_and_shared_heads_in_float32(name, monkeypatch):
    """On a GPU `cuda` passes them on, to a grid if PyTorch's ops are next."""
    device, aten = torch.device("cuda", 0), dispatch.backend_module("aten").attention_fwd
    monkeypatch.setattr(dispatch, "serving_backend", lambda *args: "cuda")
    monkeypatch.setattr(dispatch, "next_function", lambda *args: aten)
    for dtype in (torch.float32, torch.bfloat16):
        for other in (name, "bert"):
            model = fresh(other, dtype, num_attention_heads=4, hidden_size=128)
            monkeypatch.setattr(type(model), "device", device)
            assert (by_grid(model) is not None) == (dtype == torch.float32 and other == name)


@pytest.mark.parametrize(
    ("serving", "head_dim", "grid"),
    [
        ("triton", 128, None),
        ("triton", 136, "aten"),
        ("cuda", 64, None),
        ("cuda, triton", 80, None),
        ("cuda, aten", 80, "aten"),
        ("cuda, triton", 136, "aten"),
        ("reference", 64, "reference"),
    ],
)
def test_attention_by_a_grid(serving, head_dim, grid, monkeypatch):
    """On a GPU the time of every backend except the kernel grows with the graph's longest sequence."""
    model, device = fresh(dtype=torch.float16), torch.device("cuda", 0)
    monkeypatch.setattr(type(model.config), "head_dim", head_dim)
    assert by_grid(model) is None  # on a CPU
    serving, _, following = serving.partition(", ")
    behind = lambda *args: dispatch.backend_module(following).attention_fwd  # noqa: E731
    monkeypatch.setattr(dispatch, "serving_backend", lambda *args: serving)
    monkeypatch.setattr(dispatch, "next_function", behind)
    monkeypatch.setattr(type(model), "device", device)
    reason = grid and f"attention is served by {grid}, on a grid of all sequences that a graph has room for"
    assert by_grid(model) == reason


def test_what_a_grid_serves_is_not_recorded(monkeypatch):
    g, reasons = Graphed(shared()), ["by a grid", "by a grid", None]
    g.check(**lengths_batch([3]))
    monkeypatch.setattr(graphs, "by_grid", lambda model: reasons.pop(0) if model is g.model else None)
    g.check(**batch("bert"), reason="by a grid")
    g.check(**batch("bert"), reason="by a grid")
    assert g.recorded == 1
    g.check(**batch("bert"))  # asked again: a self-check may have passed since
    g.check(**batch("bert"))  # once recorded, not asked
    assert not reasons
    assert g.recorded == 2


def test_batches_outside_the_buckets():
    g = Graphed(shared(), max_tokens=100, max_batch=3)
    g.check(**lengths_batch([50, 51]), reason="there are more than 100 tokens")
    g.check(**lengths_batch([9, 9, 9, 9]), reason="there are more than 3 sequences")
    g.check(torch.ones(0, 4, dtype=torch.long), reason="there are no tokens")
    g.check(**lengths_batch([50, 48, 2]))
    with torch.no_grad():
        ids, cu_seqlens = torch.full((101,), 8), torch.tensor([0, 60, 101], dtype=torch.int32)
        same(g.graphed.forward_packed(ids, cu_seqlens, 60), g.model.forward_packed(ids, cu_seqlens, 60))
    assert g.graphed.last_fallback == "there are more than 100 tokens"
    assert g.recorded == 1
    assert g.graphed.replays == 1
    assert g.graphed.fallbacks.total() == 4


def test_taps():
    """A graph would not show what its layers compute."""

    class Watching(Taps):
        seen = 0

        def context(self, layer, context, sequences):
            self.seen += 1
            return context

    g = Graphed(fresh())
    g.check(**batch("bert"))
    with tapped(g.model, taps := Watching()):
        g.check(**batch("bert"), reason="taps are set")
    assert taps.seen >= len(g.model.layer_list())
    g.check(**batch("bert"))
    assert g.graphed.replays == 2


def test_gradients():
    g = Graphed(fresh())
    reason = "gradients are on: call under torch.inference_mode() or torch.no_grad()"
    assert g.graphed(**batch("bert")).last_hidden_state.requires_grad
    assert g.graphed.last_fallback == reason
    ids = torch.full((9,), 8)
    out = g.graphed.forward_packed(ids, torch.tensor([0, 9], dtype=torch.int32), 9)
    assert out.requires_grad
    assert g.graphed.last_fallback == reason
    assert g.graphed.fallbacks[reason] == 2
    g.model.requires_grad_(False)
    assert not g.graphed(**batch("bert")).last_hidden_state.requires_grad
    assert g.graphed.last_fallback is None


def test_training():
    g = Graphed(fresh(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    g.check(**batch("bert"))
    g.model.train()
    assert g.graphed.training
    g.check(**batch("bert"), reason="the model is in training mode")
    g.model.eval()
    g.check(**batch("bert"))
    g.model.encoder.layer[1].attention.train()
    g.check(**batch("bert"), reason="a part of the model is in training mode")


@pytest.mark.parametrize("where", ["", "encoder.layer.1.output.dense"])
def test_hooks_see_every_call(where):
    g, seen = Graphed(fresh()), []
    for _ in range(2):  # before and after anything is recorded
        handle = g.model.get_submodule(where).register_forward_hook(lambda *_: seen.append(1))
        with torch.no_grad():
            g.graphed(**batch("bert"))
        assert seen.pop() == 1
        assert "hook" in g.graphed.last_fallback
        handle.remove()
        g.check(**batch("bert"))


def test_a_replaced_forward_runs():
    g = Graphed(fresh())
    g.model.forward = lambda *args, **kwargs: "mine"
    with torch.no_grad():
        assert g.graphed(**batch("bert")) == "mine"
    assert g.graphed.last_fallback == "the model's forward was replaced"


def test_a_device_without_graphs():
    graphed = graphs.graph(shared())
    with torch.no_grad():
        same(graphed(**batch("bert")), shared()(**batch("bert")))
    assert graphed.last_fallback == "the model is on cpu, where there are no graphs"
    assert graphed.bytes_held == 0


def test_what_cannot_be_recorded():
    class Broken(GraphLike):
        def record(self, function):
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    model = shared()
    graphed = graphs.graph(model, recorder=lambda device: Broken(model, device))
    reason = "recording failed: RuntimeError: operation not permitted"
    with torch.no_grad():
        with pytest.warns(RuntimeWarning, match="Bucket.tokens=.* has no graph: recording failed"):
            same(graphed(**batch("bert")), model(**batch("bert")))
        assert graphed.last_fallback == reason
        with warnings.catch_warnings(action="error"):  # not tried again
            same(graphed(**batch("bert")), model(**batch("bert")))
    assert graphed.fallbacks == {reason: 2}
    assert graphed.graphs == []


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        g = Graphed(fresh())
        g.check(
            **batch("bert"),
            reason="the model was made in inference mode: changes of its weights would not be noticed",
        )


@pytest.mark.sweep
def test_under_torch_compile():
    g = Graphed(shared("bert", torch.float32))
    g.check(**batch("bert"))
    replays = g.graphed.replays
    compiled = torch.compile(lambda **inputs: g.graphed(**inputs).last_hidden_state, backend="eager")
    with torch.no_grad():
        same(compiled(**batch("bert")), g.model(**batch("bert")).last_hidden_state)
    assert g.graphed.replays == replays
    torch._dynamo.reset()


# --- inference mode -----------------------------------------------------------------------------------------


def test_inference_mode_and_no_grad_mix():
    g = Graphed(shared())
    found = []
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            found.append(g.graphed(**batch("bert")).last_hidden_state)
            assert found[-1].is_inference() == (mode is torch.inference_mode)
            assert torch.equal(found[0], found[-1])
    assert g.recorded == 1
    assert g.graphed.replays == 3
