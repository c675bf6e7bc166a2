"""The Triton attention of first tokens: on the GPU where there is one, else in the sanitized interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import aten, triton
from fastbert.ops import first_attention as op
from fastbert.runtime import dispatch
from fastbert.testing.op_cases.first_attention import FirstAttentionCase
from tests.support.triton_fixtures import DEVICE, HALF, counted, fuzz, interpreted, kernels_of, padded

kernels = kernels_of("first_attention")
pytestmark = [pytest.mark.usefixtures("checked_memory"), pytest.mark.sweep]


def operands(lengths=(20, 0, 33, 1), dtype=torch.bfloat16, seed=0, **options):
    """Arguments of the public function."""
    case = FirstAttentionCase(lengths, **options)
    longest = max(lengths)
    return case.inputs(dtype, DEVICE, seed) | {"softmax_scale": case.softmax_scale, "max_seqlen": longest}


def run(made, **changes):
    with dispatch.use_backend(first_attention="triton"):
        return op.first_attention(**made | changes)


def assert_near(actual, made):
    """Within one rounding step of float64, and a little for values near 0."""
    wide = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in made.items()
    }
    bias = wide["bias"]
    if bias is not None and bias.dim() == 3:
        wide["bias"] = bias[None]
    truth = op.first_attention_ref(**wide)
    assert (actual.dtype, actual.shape) == (made["x"].dtype, truth.shape)
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), truth, rtol=2 * eps, atol=2 * eps)


def assert_rule(case, dtype):
    rows = testing.run_case(case, "triton", dtype, DEVICE)
    assert [r.quantity for r in rows] == ["y"]
    assert [r.reason for r in rows if not r.passed] == []


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_large_part_that_cancels_by_the_error_rule(dtype):
    """One rounding of what the query asks of a column, or of a column's sum, would be worse than eager."""
    for bias in ("", "sequence"):
        assert_rule(FirstAttentionCase((48, 5, 64), 4, 64, bias=bias, cancelling=True), dtype)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_any_number_of_parts_gives_the_same(parts):
    """Parts without tokens, with one tile and with several; their order does not depend on the batch."""
    made = operands((1, 16, 17, 0, 200, 33), nheads=3, head_dim=32, bias="full", gate=True)
    inputs = op.FirstAttentionInputs(**made)
    config = kernels.config_for(6, 267, 3, 96, 200, kernels.tuning.device_of(DEVICE))
    whole = kernels.first_attention_fwd_with(config._replace(parts=parts), inputs)
    assert_near(whole, made)
    alone = inputs._replace(
        x=inputs.x[34:234],
        q=inputs.q[4:5],
        cu_seqlens=torch.tensor([0, 200], dtype=torch.int32, device=DEVICE),
        bias=inputs.bias[4:5],
    )
    assert torch.equal(kernels.first_attention_fwd_with(config._replace(parts=parts), alone), whole[4:5])


def test_every_form_of_bias():
    made = operands((20, 9, 33))
    bias = torch.randn(3, 3, 40, 40, device=DEVICE)
    bias[:, :, 1:] = torch.nan  # of other queries
    bias[:, :, :, 33:] = torch.nan  # past the longest sequence
    same = bias[:, :, :1, :1].clone()
    forms = [bias, bias[:1], bias[:, :1], bias[0], bias[:, :, :1], same, bias.half(), bias.mT.contiguous().mT]
    for form in forms:
        four = form if form.dim() == 4 else form[None]
        whole = four.expand(3, 3, -1, 40)[:, :, :1, :33].contiguous()
        assert torch.equal(run(made, bias=form), run(made, bias=whole))
        assert_near(run(made, bias=form), made | {"bias": whole})
    padded_mask = torch.zeros(3, 1, 1, 33, device=DEVICE)
    padded_mask[:, :, :, 5:] = torch.finfo(torch.float32).min  # a mask that is not -inf
    assert_near(run(made, bias=padded_mask), made | {"bias": padded_mask})


def test_queries_that_see_nothing():
    made = operands((20, 40, 70, 5), bias="full", gate=True)
    made["bias"][1] = -torch.inf
    made["bias"][2, 0, :, 35:] = -torch.inf  # a whole part of its tokens
    y = run(made)
    assert not y[1].any()
    assert y[2].all()
    assert not y[3, :16].any()
    assert y[3, 16:].all()
    assert_near(y, made)


def test_a_query_of_zeros_and_tiny_and_huge_ones():
    """The power of two by which they are scaled is neither 0 nor infinite."""
    for dtype, factor in product(HALF, (0.0, 2.0**-14, 2.0**-24, 64.0)):
        made = operands((40, 3), dtype)
        made["q"] = made["q"] * factor
        if dtype == torch.float16 and factor == 64.0:
            # what the query asks is beyond float16; the scores are not
            made["key_weight"] = made["key_weight"] * 64
            made["q"] = made["q"] * 64
            made["x"] = made["x"] * 2.0**-14
        assert_near(run(made), made)


def test_rows_past_the_end_and_other_sequences_are_not_read():
    made = operands((20, 33), tail=30)
    y = run(made)
    assert y.isfinite().all()
    made["x"][53:] = torch.inf
    assert torch.equal(run(made), y)
    made["x"][:20] = torch.nan
    spoiled = run(made)
    assert torch.equal(spoiled[1], y[1])
    assert spoiled[0].isnan().all()


def test_padding_sequences_of_a_graph():
    """Empty sequences at the end of a batch; a bound of the lengths that is far too high."""
    made = operands((20, 33))
    ends = torch.tensor([0, 20, 53, 53, 53, 53], dtype=torch.int32, device=DEVICE)
    q = torch.cat((made["q"], torch.full_like(made["q"][:1].expand(3, -1, -1), torch.nan)))
    y = run(made, q=q, cu_seqlens=ends, max_seqlen=4096)
    assert not y[2:].any()
    assert_near(y[:2], made)


def test_more_sequences_than_a_product_has_rows():
    made = operands((3, 0, 20) * 6, bias="full")
    assert_near(run(made), made)


def test_strided_inputs_with_poisoned_gaps():
    made = operands(bias="full", gate=True)
    expected = run(made)
    strided = {n: padded(made[n], 8) for n in ("x", "key_weight", "value_weight")}
    joined = torch.full((4, 3, 2, 16), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    joined[:, :, 1] = made["q"]
    strided["q"] = joined[:, :, 1]
    for name in ("value_bias", "gate"):
        strided[name] = torch.stack((made[name], made[name] * torch.nan), 1)[:, 0]
    strided["cu_seqlens"] = torch.stack((made["cu_seqlens"],) * 2, 1)[:, 0]
    assert torch.equal(run(made, **strided), expected)
    turned = {n: made[n].mT.contiguous().mT for n in ("x", "key_weight", "value_weight")}
    assert torch.equal(run(made, **turned), expected)


def test_no_sequence_and_no_token():
    made = operands((0, 0))
    assert not run(made).any()
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert run(made, q=made["q"][:0], cu_seqlens=none).shape == (0, 48)


def test_widths_that_do_not_fit_go_to_the_next_backend(monkeypatch):
    seen = counted(monkeypatch, aten.first_attention, "first_attention_fwd")
    run(operands((5, 3), nheads=2, head_dim=32))
    assert seen == []
    monkeypatch.setattr(kernels, "most_width", lambda capability: 63)
    made = operands((5, 3), nheads=2, head_dim=32)
    with dispatch.use_backend(first_attention="aten"):
        expected = op.first_attention(**made)
    seen.clear()
    assert torch.equal(run(made), expected)
    assert len(seen) == 1


def test_when_it_pays(monkeypatch):
    """By what the host knows: tokens, queries, the width, and the shared memory of the GPU."""

    def pays(tokens, batch, width):
        x = torch.empty(tokens, width, dtype=torch.bfloat16, device=DEVICE)
        return triton.first_attention_pays(x, batch)

    assert [pays(tokens, 32, 768) for tokens in (255, 256)] == [False, True]
    assert [pays(n, n, 768) for n in (16, 17)] == [True, False]
    for capability, most in (((8, 0), 1024), ((8, 6), 768), ((12, 0), 768)):
        monkeypatch.setattr(
            kernels.tuning, "device_of", lambda _, c=capability: kernels.tuning.Device("", c, 1)
        )
        assert pays(4096, 8, most)
        assert not pays(4096, 8, most + 1)


@pytest.mark.parametrize(
    ("batch", "total", "longest", "parts"),
    [
        (32, 32 * 512, 512, 4),
        (1, 17, 17, 2),
        (132, 132 * 512, 512, 1),
        (0, 0, 0, 1),
        (512, 4096, 512, 2),  # 8 parts would take 151 MB
    ],
)
def test_parts_fill_the_multiprocessors(batch, total, longest, parts):
    device = kernels.tuning.Device("", (9, 0), 132)
    assert kernels.config_for(batch, total, 12, 768, longest, device).parts == parts


@interpreted
@torch.no_grad()
def test_in_a_graphed_model(monkeypatch):
    """A graph of first tokens calls the kernels, with rows and sequences to spare, and equals the model."""
    from tests.support.graphed_models import Graphed, fresh, lengths_batch

    model = fresh("bert", torch.bfloat16)
    g = Graphed(model, max_tokens=160, max_batch=16)
    calls = counted(monkeypatch, kernels, "first_attention_fwd")
    with dispatch.use_backend(first_attention="triton"):
        for lengths in ([40, 33, 1, 60], [70], [64, 9]):
            inputs = lengths_batch(lengths)
            actual = g.graphed(**inputs, first_token_only=True)
            assert g.graphed.last_fallback is None
            replayed = len(calls)
            assert replayed > 0
            expected = g.model(**inputs, first_token_only=True)
            assert len(calls) == replayed + 1
            for name, value in expected.items():
                torch.testing.assert_close(actual[name], value, rtol=0, atol=0.1)
            calls.clear()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "shape", [(12, 64), (16, 64), (1, 128), (2, 32), (17, 16), (6, 52), (3, 256)], ids=str
)
def test_heads_by_the_error_rule(shape, dtype):
    """More heads than a product has rows; widths of one chunk of columns, of several, of no whole one."""
    nheads, head_dim = shape
    assert_rule(FirstAttentionCase((37, 0, 70, 3), nheads, head_dim, bias="full", gate=True, tail=2), dtype)


@pytest.mark.parametrize("longest", [0, 1, 63, 64, 65, 511, 512])
def test_lengths_by_the_error_rule(longest):
    for dtype in HALF:
        assert_rule(FirstAttentionCase((longest, 2, longest), 2, 32, tail=1), dtype)


@fuzz(20)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.sampled_from([(1, 16), (3, 8), (2, 40), (5, 20), (18, 16)]),
    st.sampled_from(["", "shared", "sequence", "full"]),
    st.booleans(),
    st.sampled_from(HALF),
    st.integers(0, 3),
)
def test_fuzz(lengths, shape, bias, extras, dtype, tail):
    options = {"bias": bias if max(lengths) else "", "gate": extras, "value_bias": not extras, "tail": tail}
    made = operands(tuple(lengths), dtype, len(lengths), nheads=shape[0], head_dim=shape[1], **options)
    assert_near(run(made), made)
