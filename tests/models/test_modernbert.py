"""ModernBERT against transformers: windows, rotary positions, both spellings of its config."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from tests.support.hf_models import hf_model
from tests.support.model_pairs import close, half_errors, kept_rows, native

# Around the window's edges: 64 tokens each side
LENGTHS = (1, 64, 65, 129, 130, 131)
MORE = (2, 63, 66, 128, 257, 600)
SIZES = dict(
    hidden_size=48,
    num_attention_heads=3,
    num_hidden_layers=4,
    intermediate_size=64,
    vocab_size=120,
    pad_token_id=0,
)


@functools.cache
def both(**config):
    """(transformers' model, ours), in float32 and in eval; shared between tests that change neither."""
    hf = hf_model("modernbert", num_hidden_layers=4, **config)
    return hf, native(hf)


def ragged(lengths=LENGTHS):
    ids = torch.randint(5, 120, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long(),
    }


@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param(MORE, marks=pytest.mark.sweep)], ids=str)
@torch.no_grad()
def test_lengths_around_the_window(lengths):
    """Longer than the positions of the config too: no table limits them."""
    hf, model = (copy.deepcopy(m).double() for m in both(local_attention=128))
    inputs = ragged(lengths)
    kept = inputs["attention_mask"].bool()
    found, wanted = kept_rows(model, inputs), kept_rows(hf, inputs)
    close(found, wanted, 1e-9)
    packed = dict(cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int())
    close(model(inputs["input_ids"][kept], **packed).last_hidden_state, found, 1e-12)
    first = model(**inputs, first_token_only=True).last_hidden_state[:, 0]
    close(first, model(**inputs).last_hidden_state[:, 0], 1e-12)
    for row, length in enumerate(lengths):
        alone = model(inputs["input_ids"][row : row + 1, :length]).last_hidden_state[0]
        close(alone, found[sum(lengths[:row]) :][:length], 1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1.1), (torch.bfloat16, 1.0)])
def test_error_is_no_larger_than_transformers_own(dtype, most):
    """In float32 the two differ by the order of sums alone."""
    hf, model = both(local_attention=128)
    mine, theirs = half_errors((model, hf), dtype, [ragged((*LENGTHS, 300))])
    assert mine.mean() <= most * theirs.mean()
    assert mine.square().mean() <= most * theirs.square().mean()
