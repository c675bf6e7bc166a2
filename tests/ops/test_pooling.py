"""fastbert.ops.pooling against loops over the sequences, in float64."""

import numpy as np
import pytest
import torch

from fastbert.ops.pooling import MODES as POOLINGS
from fastbert.ops.pooling import pooling as pool
from fastbert.runtime import dispatch

LENGTHS = ([5], [1, 1, 1], [0, 3, 0, 7, 1, 0], [0, 0], [512, 3, 128], list(range(1, 40)))


def packed(lengths, width=24, dtype=torch.float32, tail=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(lengths) + tail, width, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)


def expected(hidden, lengths, mode):
    rows = []
    for piece in hidden.double()[: sum(lengths)].split(lengths):
        if len(piece) == 0:
            rows.append(torch.zeros(hidden.shape[1], dtype=torch.float64))
        else:
            weights = torch.arange(1.0, len(piece) + 1, dtype=torch.float64)[:, None]
            of_mode = {
                "mean": piece.mean(0),
                "max": piece.amax(0),
                "cls": piece[0],
                "lasttoken": piece[-1],
                "mean_sqrt_len_tokens": piece.sum(0) / len(piece) ** 0.5,
                "weightedmean": (weights * piece).sum(0) / weights.sum(),
            }
            rows.append(of_mode[mode])
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_equals_a_loop(lengths, mode, dtype):
    hidden, cu_seqlens = packed(lengths, dtype=dtype)
    out = pool(hidden, cu_seqlens, mode)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    truth = expected(hidden, lengths, mode)
    # half precision is summed in float32: the error is that of float32
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-6 if dtype != torch.float64 else 1e-14)


def test_sums_in_float32():
    hidden = torch.full(
        (4096, 2), 1.0 + 2.0**-7, dtype=torch.bfloat16
    )  # a bfloat16 sum would stop growing at 256
    out = pool(hidden, torch.tensor([0, 4096], dtype=torch.int32), "mean")
    assert torch.equal(out, torch.full((1, 2), 1.0 + 2.0**-7))


@pytest.mark.parametrize("mode", POOLINGS)
def test_rows_past_the_end_are_ignored(mode):
    hidden, cu_seqlens = packed([4, 2, 0], dtype=torch.float64, tail=5)
    hidden[6:] = float("nan")
    hidden.requires_grad_()
    out = pool(hidden, cu_seqlens, mode)
    torch.testing.assert_close(out, expected(hidden, [4, 2, 0], mode))
    (grad,) = torch.autograd.grad(out.sum(), hidden)
    assert torch.equal(grad[6:], torch.zeros_like(grad[6:]))


@pytest.mark.parametrize("mode", POOLINGS)
def test_nothing_to_pool(mode):
    none = torch.zeros(1, dtype=torch.int32)
    assert pool(torch.empty(0, 8), none, mode).shape == (0, 8)
    assert torch.equal(pool(torch.empty(0, 8), torch.zeros(3, dtype=torch.int32), mode), torch.zeros(2, 8))


def test_a_nan_is_not_hidden():
    hidden, cu_seqlens = packed([3, 2])
    hidden[1, 0] = float("nan")
    for mode in ("mean", "max"):
        out = pool(hidden, cu_seqlens, mode)
        assert out[0, 0].isnan()
        assert out[0, 1:].isfinite().all()
        assert out[1].isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"mode": "sum"}, ValueError, "mode: 'sum'; expected one of mean, cls, max"),
        ({"hidden": torch.zeros(2, 3, 4)}, ValueError, r"hidden: shape \(2, 3, 4\)"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, r"cu_seqlens: shape \(0,\)"),
        ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, "cu_seqlens: shape"),
        *(
            ({"cu_seqlens": torch.tensor(ends)}, ValueError, f"cu_seqlens: .*{words}")
            for ends, words in (
                ([0, 1, 100], "end within the 2 rows of hidden, got 100"),
                ([0, 2**30], "end within the 2 rows of hidden"),
                ([1, 2], "start at 0, got 1"),
                ([0, -5, 2], "non-decreasing, got 0 then -5 at 0"),
                ([0, 2, 1, 2], "non-decreasing, got 2 then 1 at 1"),
            )
        ),
    ],
)
def test_refuses(change, error, words):
    arguments = {
        "hidden": torch.zeros(2, 3),
        "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32),
        "mode": "mean",
    }
    with pytest.raises(error, match=words):
        pool(**{**arguments, **change})


def test_lengths_changed_before_backward_are_refused():
    hidden, cu_seqlens = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 4])
    y = pool(hidden, cu_seqlens, "mean")
    cu_seqlens.data[1] = 2**40
    with pytest.raises(ValueError, match="end within the 4 rows"):
        y.sum().backward()


# -- the op, by every backend --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_tokens_that_share_the_maximum_share_its_gradient(backend):
    hidden = torch.tensor([[2.0, 1.0], [2.0, 3.0], [0.0, 3.0], [2.0, 3.0]], requires_grad=True)
    with dispatch.use_backend(pooling=backend):
        pool(hidden, torch.tensor([0, 3, 4]), "max").sum().backward()
    assert torch.equal(hidden.grad, torch.tensor([[0.5, 0.0], [0.5, 0.5], [0.0, 0.5], [1.0, 1.0]]))


@pytest.mark.sweep
@pytest.mark.parametrize("mode", POOLINGS)
def test_compiled_is_eager(mode):
    compiled = torch.compile(pool, fullgraph=True, backend="aot_eager")
    for lengths in ([3, 0, 1, 5], [2, 9], [4, 4, 4]):
        hidden, cu_seqlens = packed(lengths, width=4)
        grads = []
        for function in (pool, compiled):
            h = hidden.clone().requires_grad_()
            out = function(h, cu_seqlens, mode)
            out.square().sum().backward()
            grads += [out.detach(), h.grad]
        assert torch.equal(grads[0], grads[2])
        assert torch.equal(grads[1], grads[3])
    torch._dynamo.reset()
