"""On a CPU a layer runs a large batch in blocks of sequences: same result, less memory."""

import pytest
import torch

from fastbert import BertModel, EncoderConfig
from fastbert.backends.cpu import sizes
from fastbert.execution import cpu
from fastbert.execution.blocks import blocks_of
from fastbert.execution.call import Call
from fastbert.execution.plan import survey
from fastbert.layers.batch import PackedBatch
from fastbert.layers.dense_norm import dense_norm
from fastbert.ops.dropout import keep_mask_2d
from fastbert.runtime import dispatch

SMALL = dict(
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=64,
    num_hidden_layers=2,
    vocab_size=100,
    max_position_embeddings=64,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(sizes, "BLOCK_ROWS", 40)
    monkeypatch.setattr(sizes, "MANY_ROWS", 30)
    # whole layers: tests/execution/test_cpu.py
    monkeypatch.setattr(cpu, "launchers", lambda *_: None)


@pytest.fixture
def rows(monkeypatch):
    """(first row of cu_seqlens, tokens) of every attention call."""
    seen = []
    call = dispatch.call

    def spy(function, key, *args):
        if function.partition(" ")[0] == "attention_fwd":
            assert args[0].cu_seqlens[0] == 0
            assert args[0].cu_seqlens[-1] == key.shape[0]
            seen.append(key.shape[0])
        return call(function, key, *args)

    monkeypatch.setattr(dispatch, "call", spy)
    return seen


def model(cls=BertModel, **options):
    torch.manual_seed(0)
    return cls(EncoderConfig(**(SMALL | options))).eval()


def batch(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 100, (len(lengths), max(lengths)), generator=g)
    return ids, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize("norm", ["another", "not_fused", "fused"])
def test_dense_norm_drops_and_scales_alike_on_every_path(norm):
    """Kept elements are scaled by 1 / (1 - p), whether or not the norm's pass does it."""
    torch.manual_seed(0)
    dense, own = torch.nn.Linear(16, 24), torch.nn.LayerNorm(24)
    x, residual, seed = torch.randn(9, 16), torch.randn(9, 24), torch.tensor([5])
    keep = keep_mask_2d(seed, 3, 9, 24, 0.4)
    expected = residual + dense(x) * keep / 0.6
    if norm == "another":
        y = dense_norm(dense, torch.nn.Identity(), x, residual, 0.4, seed, 3)
    else:
        y = dense_norm(dense, own, x, residual, 0.4, seed, 3, norm == "fused")
        expected = own(expected)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


LENGTHS = [
    [10] * 8,  # two blocks of 40
    [10] * 11,  # 60 and 50
    [20] * 4 + [11],  # 60, and the remaining 31 are just enough
    [1, 50, 3, 20, 20, 7, 33, 50],
    [60] + [1] * 39,
    [1] * 81,
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda v: f"{len(v)}x{max(v)}")
@torch.no_grad()
def test_blocks_give_what_the_whole_gives(monkeypatch, rows, lengths):
    ids, mask = batch(lengths)
    net = model()
    out = net(ids, mask, output_hidden_states=True)
    blocks = rows[: len(rows) // 2]
    assert len(blocks) > 1, "the batch went through as a whole"
    assert rows == blocks * 2
    assert sum(blocks) == sum(lengths)
    assert min(blocks) >= 30
    rows.clear()
    monkeypatch.setattr(sizes, "BLOCK_ROWS", 10**9)
    whole = net(ids, mask, output_hidden_states=True)
    assert rows == [sum(lengths)] * 2
    for a, b in zip(out.hidden_states, whole.hidden_states, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0)
    torch.testing.assert_close(out.pooler_output, whole.pooler_output, atol=2e-6, rtol=0)


@torch.no_grad()
def test_layers_that_run_whole_and_op_by_op_have_blocks_of_their_own(monkeypatch):
    monkeypatch.setattr(sizes, "FUSED_ROWS", 20)
    layer = model().layer_list()[0]
    x, ends = torch.randn(80, 32), torch.arange(0, 81, 10, dtype=torch.int32)
    call, (step,) = Call(PackedBatch(ends, 10), 0), survey([layer])
    for fused_layer, expected in (
        (True, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (False, [(0, 4), (4, 8)]),
        (True, [(0, 2), (2, 4), (4, 6), (6, 8)]),
    ):
        assert blocks_of(step, x, call, fused_layer) == expected


def test_a_gate_reaches_every_block(rows):
    ids, mask = batch([10] * 12)
    net = model()
    gate = torch.tensor([[1.0, 0.0], [0.5, 1.0]])
    with torch.no_grad():
        out = net(ids, mask, head_mask=gate).last_hidden_state
    assert len(rows) > 2
    # with gradients enabled there are no blocks
    expected = net(ids, mask, head_mask=gate).last_hidden_state.detach()
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)


def _as_fsdp(*_) -> None:
    """A hook beside which a layer stays packed."""


_as_fsdp.__module__ = "torch.distributed.fsdp"


@pytest.mark.parametrize("why", ["gradients", "training", "hook", "probabilities", "bias", "few", "rest"])
def test_everything_at_once_where_blocks_would_show(rows, why):
    # "rest": after a block of 60 only 21 would remain
    ids, mask = batch({"few": [10] * 7, "rest": [20] * 4 + [1]}.get(why, [10] * 12))
    net = model()
    options = {"output_attentions": True} if why == "probabilities" else {}
    if why == "training":
        net.train()
    if why == "hook":
        for layer in net.encoder.layer:
            layer.output.dense.register_forward_hook(_as_fsdp)
    given = torch.zeros(12, 1, 10, 10) if why == "bias" else mask
    with torch.set_grad_enabled(why == "gradients"):
        net(ids, given, **options)
    assert rows == [sum(mask.sum(1).tolist())] * 2
