"""Models that tests quantise, and how alike two results must be."""

from __future__ import annotations

import torch

import fastbert
from fastbert.models.config import EncoderConfig
from tests.support.hf_models import batch, hf_model

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@torch.no_grad()
def ours(family, cls="AutoModel", **overrides):
    """A float model of ours with the family's tiny random weights."""
    hf = hf_model(family, **overrides)
    config = EncoderConfig.from_hf(hf.config)
    auto = getattr(fastbert, cls)
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    encoder = model.base_model
    encoder.load_state_dict({k: v for k, v in hf.state_dict().items() if k in encoder.state_dict()})
    for parameter in (p for n, p in model.named_parameters() if model is not encoder and p.dim() > 1):
        if parameter.shape[0] < 10:  # a classifier at unit scale
            parameter.normal_(0.0, 1.0)
    return model


def hidden(model, **more):
    with torch.no_grad():
        return model(**batch(model.config.model_type), **more).last_hidden_state


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1)


def alike(int8, full, kept, least=0.99):
    """Rows of an int8 model and of its float original point the same way, and are not the same."""
    assert not torch.equal(int8, full)
    assert cosine(int8[kept], full[kept]).min() > least


def hook(module):
    module.register_forward_hook(lambda *a: None)
