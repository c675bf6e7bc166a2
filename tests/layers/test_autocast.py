"""Training under autocast: what an encoder layer casts, and that the rest is as if it were cast."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert.layers import encoder
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from fastbert.ops import layer_norm
from fastbert.runtime import dispatch
from tests.support.hf_models import hf_config

LAYERS, TOKENS, HIDDEN = 3, 24, 48


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 64}
    return AutoModel.from_config(EncoderConfig.from_hf(hf_config("bert", **sizes))).train()


def gradients(bert: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """The hidden states, and every parameter's gradient of a weighted sum of them, with dropout."""
    bert.zero_grad()
    torch.manual_seed(3)
    ids = torch.arange(TOKENS).reshape(2, -1) % bert.config.vocab_size
    with torch.autocast("cpu", dtype):
        states = bert(ids, output_hidden_states=True).hidden_states
    sum((state * torch.linspace(-1, 1, HIDDEN)).sum() for state in states).backward()
    parameters = [p.grad for p in bert.parameters() if p.grad is not None]
    return [t.clone() for t in (*(s.detach() for s in states), *parameters)]


class Casts(TorchDispatchMode):
    """Counts the casts and sums of activations outside the backends."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()
        self.inside = 0
        call = dispatch.call

        def watched(*args):
            self.inside += 1
            try:
                return call(*args)
            finally:
                self.inside -= 1

        monkeypatch.setattr(dispatch, "call", watched)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not self.inside and name in ("_to_copy", "add", "add_") and args[0].shape == (TOKENS, HIDDEN):
            self.seen[f"{name} {str(out.dtype).removeprefix('torch.')}"] += 1
        return out


def test_casts_per_layer(monkeypatch):
    """A layer's input is cast for query, key and value, and nothing else; backward mirrors that."""
    bert = model()
    ids = torch.arange(TOKENS)[None] % bert.config.vocab_size
    with dispatch.use_backend("aten"), Casts(monkeypatch) as casts:
        with torch.autocast("cpu", torch.bfloat16):
            y = bert(ids).last_hidden_state
        assert casts.seen == {"_to_copy bfloat16": 3 * LAYERS}
        casts.seen.clear()
        y.square().sum().backward()
    assert casts.seen == {"_to_copy float32": 3 * LAYERS, "add float32": 3 * LAYERS}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_the_bits_are_those_of_casts(dtype, monkeypatch):
    bert = model()
    with dispatch.use_backend("aten"):
        ours = gradients(bert, dtype)
        monkeypatch.setattr(layer_norm, "_takes_both", lambda *_: False)
        monkeypatch.setattr(encoder, "takes_rounded", lambda *_: False)
        cast = gradients(bert, dtype)
    assert len(ours) == len(cast) > 16 * LAYERS
    for a, b in zip(ours, cast, strict=True):
        assert torch.equal(a, b)


def test_a_hooked_layer_sees_what_it_saw():
    """The products' input is handed over cast only where no code of a user's sees it."""
    bert, seen = model(), []
    up = bert.encoder.layer[1].intermediate.dense
    up.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    gradients(bert, torch.bfloat16)
    assert seen == [torch.float32]
