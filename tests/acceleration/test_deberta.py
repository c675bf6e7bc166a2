"""Accelerated DeBERTa-v2 and v3: a caller's own distances and masks, a changed convolution, 8 bits."""

from __future__ import annotations

import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import ConvLayer

import fastbert
from tests.support.accelerated_models import (
    LAYERS,
    build,
    calls,
    close,
    first_kept,
    same_outputs,
    stock,
)


@torch.no_grad()
def test_distances_and_masks_of_a_caller():
    """They reach the stock attention, inside a fused layer."""
    slow, fast = build("deberta-v2")
    inputs = first_kept("deberta-v2")
    hidden, kept = torch.randn(4, 40, 48), inputs["attention_mask"]
    given = {"relative_pos": torch.randint(-16, 16, (1, 40, 40)), "output_hidden_states": False}
    with calls(fast, fused=LAYERS, stock=0):
        actual = fast.encoder(hidden, kept, **given).last_hidden_state
    close(actual[kept.bool()], slow.encoder(hidden, kept, **given).last_hidden_state[kept.bool()])
    given, kept = {"query_states": hidden}, torch.ones(4, 40)
    with calls(fast, fused=0, stock=LAYERS):
        actual = fast.encoder(hidden, kept, **given).last_hidden_state
    close(actual, slow.encoder(hidden, kept, **given).last_hidden_state)
    seen = (torch.rand(4, 40, 40) > 0.3) | torch.eye(40).bool()
    for mask in (seen, seen.long(), seen.float()):
        with calls(fast, fused=LAYERS, stock=0):
            actual = fast.encoder(hidden, mask).last_hidden_state
        close(actual, slow.encoder(hidden, mask).last_hidden_state)


class _Twice(ConvLayer):
    def forward(self, *args):
        return 2 * super().forward(*args)


@torch.no_grad()
def test_a_convolution_of_another_class_is_called():
    slow, fast = build("deberta-v2", conv_kernel_size=3)
    inputs = first_kept("deberta-v2")
    slow.encoder.conv = fast.encoder.conv = _Twice(slow.config).eval()
    with calls(fast, packed=0, padded=1):
        same_outputs(fast(**inputs), slow(**inputs), inputs["attention_mask"].bool())
    assert "encoder.conv is not the stock model's" in str(fastbert.explain(fast))


def test_explain_knows_the_table_of_distances():
    (by,) = fastbert.explain(build("deberta-v2")[1]).executors
    assert (by.first, by.last, by.executor) == (0, LAYERS - 1, "cpu")


@torch.no_grad()
def test_8_bits_serve_packed_tokens_alone():
    fast, inputs = fastbert.accelerate(stock("deberta-v2"), dtype="int8"), first_kept("deberta-v2")
    with calls(fast, packed=1, fused=LAYERS, stock=0):
        fast(**inputs)
    inputs["attention_mask"][1, 0] = 0
    with calls(fast, packed=0, padded=1, fused=0, stock=LAYERS):
        fast(**inputs)
