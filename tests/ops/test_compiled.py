"""The ops together under Inductor, in one graph, forward and backward."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops.cross_entropy import cross_entropy
from fastbert.ops.embedding import embedding
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.ops.packing import pack, unpack

HIDDEN, INNER, VOCAB = 16, 32, 29


def parameters():
    g = torch.Generator().manual_seed(0)
    shapes = {
        "word": (VOCAB, HIDDEN),
        "position": (40, HIDDEN),
        "w": (HIDDEN,),
        "b": (HIDDEN,),
        "up": (INNER, HIDDEN),
        "up_bias": (INNER,),
        "down": (HIDDEN, INNER),
        "down_bias": (HIDDEN,),
    }
    return {k: (0.5 * torch.randn(*s, generator=g)).requires_grad_() for k, s in shapes.items()}


def model(p, ids, indices, labels, seed):
    """A masked language model without attention: all ops of this package except one."""
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    x = embedding(
        ids,
        p["word"],
        p["w"],
        p["b"],
        position=p["position"],
        position_ids=positions,
        padding_idx=0,
        eps=1e-5,
        dropout_p=0.1,
        seed=seed,
    )
    x = pack(x, indices)
    h = linear(linear(x, p["up"], p["up_bias"], "gelu"), p["down"])
    x = layer_norm(
        h, p["w"], p["b"], residual=x, x_bias=p["down_bias"], eps=1e-5, dropout_p=0.1, seed=seed, offset=1
    )
    x = unpack(x, indices, *ids.shape)
    return cross_entropy(linear(x, p["word"]).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


@pytest.mark.sweep
def test_inductor_gives_the_eager_loss_and_gradients():
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    p, seed = parameters(), torch.tensor([3])
    for batch, seqlen in ((2, 5), (3, 9)):
        ids = torch.randint(VOCAB, (batch, seqlen))
        mask = torch.arange(seqlen)[None, :] < torch.arange(seqlen - batch + 1, seqlen + 1)[:, None]
        indices = mask.flatten().nonzero().flatten()
        labels = torch.where(mask, ids, -100)
        expected, actual = model(p, ids, indices, labels, seed), compiled(p, ids, indices, labels, seed)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        leaves = list(p.values())
        for name, a, e in zip(
            p, torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True
        ):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6, msg=name)
