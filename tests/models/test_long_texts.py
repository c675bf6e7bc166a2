"""Texts as long as the models are trained for, in one ragged packed batch, against transformers."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.hf_models import hf_model
from tests.support.model_pairs import close, native, no_larger_errors

pytestmark = pytest.mark.sweep

# The longest of the config, and the edges of the window and of blocks beside it
LENGTHS = (8192, 1, 129, 4097)
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
SIZES |= {"max_position_embeddings": max(LENGTHS)}
# Layer 0 sees all tokens, layer 1 a window
CONFIGS = {"modernbert": {"local_attention": 128}, "gte": {}}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_longest_texts_equal_transformers(name):
    hf = hf_model(name, **SIZES, **CONFIGS[name])
    model = native(hf)
    # It keeps no matrix of scores
    hf.set_attn_implementation("sdpa")
    ids = torch.randint(5, 120, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    texts = ids.split(LENGTHS)

    exact, double = copy.deepcopy(hf).double(), copy.deepcopy(model).double()
    wanted = torch.cat([exact(text[None]).last_hidden_state[0] for text in texts])
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    close(double(ids, cu_seqlens=ends).last_hidden_state, wanted, 1e-9)

    batches = [{"input_ids": text[None], "attention_mask": torch.ones_like(text[None])} for text in texts]
    no_larger_errors((model, hf), torch.bfloat16, batches)
