"""Optimizers against their published formulas in float64, number by number."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import fastbert
from fastbert.models.config import EncoderConfig
from fastbert.training.optimizers import KINDS, AdamW, decay_groups, optimizer

LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.98), 1e-6, 0.1


def published(kind, weights, grads, decay):
    """The weights after one step per list of `grads`, in Python's floats; a list is a tensor."""
    m, v = [0.0] * len(weights), [0.0] * len(weights)
    w = list(weights)
    for t, gradient in enumerate(grads, 1):
        r = []
        for i, g in enumerate(gradient):
            m[i] = BETAS[0] * m[i] + (1 - BETAS[0]) * g
            v[i] = BETAS[1] * v[i] + (1 - BETAS[1]) * g * g
            mean, square = m[i], v[i]
            if kind != "adamw-google":
                mean, square = mean / (1 - BETAS[0] ** t), square / (1 - BETAS[1] ** t)
            r.append(mean / (math.sqrt(square) + EPS) + decay * w[i])
        ratio = 1.0
        norms = math.sqrt(sum(x * x for x in w)), math.sqrt(sum(x * x for x in r))
        if kind == "lamb" and decay and all(norms):
            ratio = norms[0] / norms[1]
        w = [x - LR * ratio * y for x, y in zip(w, r, strict=True)]
    return w


@pytest.mark.parametrize("decay", [DECAY, 0.0])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_published_ones(kind, decay):
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(7, generator=generator).double(), torch.zeros(3).double()]  # a norm of 0
    params = [nn.Parameter(start.clone()) for start in starts]
    made = optimizer(kind, [{"params": params, "weight_decay": decay}], LR, BETAS, EPS)
    grads = [[torch.randn(p.shape, generator=generator).double() for p in params] for _ in range(6)]
    grads[3][0].zero_()
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        made.step()
    for i, p in enumerate(params):
        expected = published(kind, starts[i].tolist(), [step[i].tolist() for step in grads], decay)
        torch.testing.assert_close(
            p.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-13
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_bit_for_bit(kind):
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    made = optimizer(kind, decay_groups(model, DECAY), LR)

    def step(model, made, generator):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        made.step()

    for _ in range(3):
        step(model, made, generator)
    other = copy.deepcopy(model)
    again = optimizer(kind, decay_groups(other, DECAY), LR)
    again.load_state_dict(copy.deepcopy(made.state_dict()))
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    for _ in range(3):
        step(model, made, generator), step(other, again, twin)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_what_does_not_decay():
    config = EncoderConfig(
        "bert", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20
    )
    model = fastbert.BertForPreTraining(config)
    model.bert.pooler.requires_grad_(False)
    names = {p: name for name, p in model.named_parameters()}
    decayed, plain = decay_groups(model, 0.25)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    assert {names[p] for p in plain["params"]} == {
        name
        for name in names.values()
        if ("LayerNorm" in name or name.endswith("bias")) and ".pooler." not in name
    }
    both = [*decayed["params"], *plain["params"]]
    assert len(both) == len({id(p) for p in both}) == len([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_a_gradient_stay(kind):
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    made = optimizer(kind, [p, q], lr=0.1)
    p.grad = torch.ones(3)
    assert made.step(lambda: 5.0) == 5.0
    assert torch.equal(q, torch.ones(3))
    assert not torch.equal(p, torch.ones(3))


def test_bad_arguments_are_named():
    p = nn.Parameter(torch.ones(2))
    for values, match in (
        ({"kind": "sgd"}, "kind: expected one of adamw, adamw-google, lamb, got 'sgd'"),
        ({"kind": "lamb", "lr": -1.0}, "lr: expected a finite number >= 0"),
        ({"kind": "adamw", "betas": (0.9, 1.0)}, "betas: expected two numbers"),
        ({"kind": "lamb", "eps": float("nan")}, "eps: expected"),
        ({"kind": "adamw-google", "weight_decay": float("inf")}, "weight_decay: expected"),
    ):
        with pytest.raises(ValueError, match=match):
            optimizer(groups=[p], **values)
    sparse = nn.Embedding(3, 2, sparse=True)
    made = optimizer("lamb", sparse.parameters())
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="expected dense gradients"):
        made.step()


def test_adamw_is_torchs():
    """Bit for bit, also of two dtypes, without a gradient, with a scaler's factor and where it skips."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(5, 3, generator=generator), torch.randn(4, generator=generator).double()]
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    runs = []
    for kind in (torch.optim.AdamW, AdamW):
        params = [nn.Parameter(start.clone()) for start in [*starts, torch.ones(2)]]
        made = kind(params, **options, **({"fused": True} if kind is torch.optim.AdamW else {}))
        runs.append((params, made))
    for step in range(5):
        grads = [torch.randn(start.shape, generator=generator, dtype=start.dtype) for start in starts]
        for params, made in runs:
            for p, g in zip(params, grads, strict=False):
                p.grad = g.clone()
            if step == 2:
                made.found_inf = torch.ones(())
            if step == 3:
                made.grad_scale, made.found_inf = torch.tensor(8.0), torch.zeros(())
            made.step()
    (params, torchs), (own, ours) = runs
    assert all(map(torch.equal, params, own))
    assert ours.state[own[0]]["step"] == 4
    torchs.load_state_dict(ours.state_dict())
    ours.load_state_dict(torchs.state_dict())
    for key, value in torchs.state[params[1]].items():
        assert torch.equal(value, ours.state[own[1]][key])
    with pytest.raises(ValueError, match="amsgrad: expected False, got True"):
        AdamW([{"params": own, "amsgrad": True}])
