"""Query, key and value from one product: views forward, and gradients that need no copy backward."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert.layers.encoder import split
from fastbert.ops.attention import attention
from fastbert.runtime import dispatch
from tests.support.triton_fixtures import interpreted


class Counted(TorchDispatchMode):
    """Counts the calls of aten's ops."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


@interpreted
def test_gradients_that_attention_writes_side_by_side_are_not_copied():
    leaf = torch.randn(7, 3, 2, 16, requires_grad=True)
    ends = torch.tensor([0, 4, 7], dtype=torch.int32)
    found = {}
    for backend in ("triton", "aten"):
        with dispatch.use_backend(attention=backend):
            out = attention(*split(leaf), ends, 4)
            with Counted() as counted:
                (found[backend],) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        assert bool(counted.seen["aten::stack"]) is (backend == "aten")
    torch.testing.assert_close(found["triton"], found["aten"], rtol=1e-4, atol=1e-5)


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
