"""Query, key and value from one product: views forward, and gradients that need no copy backward."""

from __future__ import annotations

import pytest
import torch

from fastbert.layers.attention import split


@pytest.mark.parametrize("change", ["order", "one is new", "scaled"])
def test_other_gradients_of_query_key_and_value_are_stacked(change):
    leaf = torch.randn(5, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    grads = list(torch.randn(5, 3, 2, 4, dtype=torch.float64).unbind(1))
    if change == "order":
        grads = grads[::-1]
    elif change == "one is new":
        grads[1] = grads[1].clone()
    else:
        grads[2] = 2 * grads[2]
    (found,) = torch.autograd.grad(split(leaf), leaf, grads)
    assert torch.equal(found, torch.stack(grads, 1))


def test_split_can_be_differentiated_twice():
    def scores(leaf):
        q, k, v = split(leaf)
        return (q * k).sum(-1, keepdim=True) * v

    leaf = torch.randn(2, 3, 1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(scores, leaf)
