"""Training under autocast: its bits are those of casts, and hooks see what they saw."""

from __future__ import annotations

import pytest
import torch

from fastbert.layers import linear
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


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_the_bits_are_those_of_casts(dtype, monkeypatch):
    bert = model()
    with dispatch.use_backend("aten"):
        ours = gradients(bert, dtype)
        monkeypatch.setattr(layer_norm, "_takes_both", lambda *_: False)
        monkeypatch.setattr(linear, "takes_rounded", lambda *_: False)
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
