"""The table of places by its kernel: on the GPU where there is one, else in the interpreter, sanitized."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import fastbert
from fastbert.ops import attention_places as op
from fastbert.ops.attention import attention
from fastbert.runtime import dispatch
from tests.support.attention_places import in_order, layouts, ranked
from tests.support.inputs import ends_of
from tests.support.triton_fixtures import DEVICE, assert_bit_equal, fuzz, kernels_of

kernels = kernels_of("attention_places")
slots = pytest.importorskip("fastbert.kernels.attention_slots")
pytestmark = pytest.mark.usefixtures("checked_memory")


def made(lengths, total, longest) -> list[tuple[int, ...]]:
    table = kernels.attention_places(ends_of(lengths, DEVICE), total, longest)
    assert (table.dtype, table.is_contiguous(), table.shape[1]) == (torch.int32, True, slots.FIELDS)
    return [tuple(row) for row in table.tolist()]


def without_ranking(patch: pytest.MonkeyPatch) -> None:
    for module in (slots, kernels):
        patch.setattr(module, "RANKED", -1)


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [0],
        [0, 0, 0],
        [1],
        [5] * 40,  # equal ones in several blocks
        [0] * 15 + [7, 9] + [0] * 15,  # a block ends between them
        list(range(150)),  # more than a chunk of others
        list(range(150, 0, -1)),
        [16 * 33, 1, 16 * 65 + 1],  # more tiles than are written at a time
    ],
    ids=lambda lengths: f"{len(lengths)}",
)
@pytest.mark.parametrize("capacity", [0, 16 * 140])
def test_blocks_chunks_and_tiles(monkeypatch, lengths, capacity):
    layout = lengths, sum(lengths) + capacity, max(lengths, default=0)
    assert made(*layout) == ranked(*layout)
    without_ranking(monkeypatch)
    assert made(*layout) == in_order(*layout)


@pytest.mark.parametrize("is_ranked", [False, True])
@pytest.mark.parametrize(
    "ends",
    [
        (0, 90, 100, 130),  # longer than max_seqlen
        (0, 40, 10, 60),  # falling
        (0, 90, 10, 60),  # by more than a tile
        (0, 30, 60, 5000),  # beyond the rows
        (-500, 30, 60, 90),
        (40, 60, 70, 90),  # rows before the first
        (0, 0, 0, -9),
    ],
)
def test_lengths_that_nobody_checked_write_nothing_elsewhere(monkeypatch, ends, is_ranked):
    """The sanitizer sees a store outside the table. No place is left as it was, the largest number.

    Where falling ends are not ranked, two sequences write one place, which the sanitizer refuses.
    """
    if not is_ranked:
        if sorted(ends) != list(ends):
            return
        without_ranking(monkeypatch)
    lengths = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    table = kernels.attention_places(lengths, 130, 40)
    if is_ranked:
        assert_bit_equal([table], [op.places_ref(lengths, 130, 40)])
    assert (table[:, 0] <= 3).all()
    assert (table[:, 0] >= 0).all()


def test_lengths_in_a_strided_or_negative_tensor():
    lengths = [20, 7, 33]
    ends = ends_of(lengths, DEVICE)
    expected = kernels.attention_places(ends, 70, 40)
    assert_bit_equal([kernels.attention_places(ends.repeat_interleave(2)[::2], 70, 40)], [expected])
    with dispatch.use_backend(attention="triton"):
        places = op.attention_places(torch._neg_view(-ends), 40, 70, torch.float32)
    assert_bit_equal([places.table], [expected])


@pytest.fixture
def launches(noted):
    """A list that names each launch of the kernel of places."""
    return noted(kernels, "launch", lambda kernel, *args, **config: kernel.fn.__name__)


def model(**more) -> fastbert.BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 32}
    config = fastbert.EncoderConfig(
        vocab_size=20, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **sizes, **more
    )
    return fastbert.BertModel(config).to(DEVICE).train()


@pytest.mark.sweep
@pytest.mark.parametrize("recompute", [False, True])
def test_one_table_per_forward_of_a_model(launches, recompute):
    """All layers read it, backward and recomputed layers too."""
    net = model()
    if recompute:
        net.gradient_checkpointing_enable()
    ids = torch.randint(0, 20, (3, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = (torch.arange(9) < torch.tensor([9, 2, 5])[:, None]).long().to(DEVICE)
    results = []
    for name in ("triton", "aten"):
        net.zero_grad()
        with dispatch.use_backend(attention=name):
            hidden = net(ids, attention_mask=mask).last_hidden_state
            hidden.square().sum().backward()
        results.append([hidden.detach(), *(p.grad for p in net.parameters() if p.grad is not None)])
    assert launches == ["_attention_places_kernel"]
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_a_call_without_a_table_makes_its_own(launches):
    q, k, v = torch.randn(3, 12, 1, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE).unbind(0)
    ends = ends_of([5, 7], DEVICE)
    with dispatch.use_backend(attention="triton"):
        places = op.attention_places(ends, 7, 12, q.dtype)
        assert len(launches) == 1
        out = attention(q.requires_grad_(), k, v, ends, 7, places=places)
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert len(launches) == 1
        own = attention(q, k, v, ends, 7)
        assert len(launches) == 2
        assert_bit_equal([own, *torch.autograd.grad(own.sum(), q)], [out, grad])
        attention(q.detach(), k, v, ends, 7, return_probs=True, places=places)
    assert places.table.shape[0] == slots.sections(12, 2, 7)[-1]


@fuzz(15)
@given(layouts())
def test_the_kernel_is_the_definition(layout):
    assert made(*layout) == ranked(*layout)
