"""The search of PoWER-BERT: factors by rank, their price, and a schedule that finds filler."""

from __future__ import annotations

import pytest
import torch

import fastbert
from fastbert.compression.token_search import TokenSearch, search_groups
from fastbert.finetuning.losses import TaskLosses
from fastbert.layers import encoder
from fastbert.layers.batch import PackedBatch
from fastbert.layers.elimination import kept_of, most_received, ranks_of
from fastbert.training.optimizers import optimizer
from tests.compression.test_elimination import LENGTHS, by_modules, of
from tests.support.inputs import ends_of


def batch(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 60, (sum(lengths),), generator=generator)
    labels = torch.randint(2, (len(lengths),), generator=generator)
    return {"input_ids": ids, "cu_seqlens": ends_of(lengths), "max_seqlen": max(lengths), "labels": labels}


def search_of(dtype=torch.float64, **options):
    model = of(auto=fastbert.AutoModelForSequenceClassification, dtype=dtype, schedule=None, num_labels=2)
    return TokenSearch(TaskLosses(model), model, **options).to(dtype)


def test_ranks():
    received = torch.tensor([0.0, 3.0, 1.0, 3.0, 2.0, 9.0, 1.0, 5.0])
    sequences = PackedBatch(ends_of([5, 0, 3]), 5)
    ranks = ranks_of(received, sequences)
    assert ranks[0].tolist() == [0, 1, 4, 2, 3]
    assert ranks[2, :3].tolist() == [0, 2, 1]
    kept = kept_of([0.5], [5, 0, 3], torch.device("cpu"))[0]
    assert kept is not None
    assert most_received(received, sequences, kept).tolist() == [0, 1, 3, 5, 7]


def test_factors_of_one_change_nothing_and_have_their_price():
    search, inputs = search_of(bins=8), batch()
    found, _ = search(inputs)
    assert torch.equal(found["task"], search.losses(inputs)[0]["task"])
    assert found["tokens"].item() == 8 * (1 + 2 + 3 + 4)
    assert search.weights == {"tokens": 5e-4}
    assert search.schedule() == [1.0] * 4


def test_factors_multiply_the_tokens_of_their_rank():
    search, inputs = search_of(bins=4), batch((12,))
    with torch.no_grad():
        search.factors[1] = torch.tensor([0.9, 0.5, 0.5, 0.25])
    seen = {}
    plain, ids = search.model.base_model, inputs["input_ids"]
    plain.config.token_schedule = [1.0] * 4
    hidden = by_modules(plain, ids)[1][None]
    plain.config.token_schedule = None
    attended, probs = plain.encoder.layer[1].attend_by_modules(hidden)
    received = probs.sum((0, 1, 2))
    received[0] = torch.inf
    factors = torch.ones(12, dtype=torch.float64)
    for rank, token in enumerate(received.argsort(descending=True).tolist()):
        factors[token] = 1 if rank == 0 else search.factors[1, rank * 4 // 12].item()
    expected = plain.encoder.layer[1].feed_by_modules(attended * factors[:, None])
    original = encoder.layer

    def layer(form, parts, x, batch, asked):
        y = original(form, parts, x, batch, asked)
        seen[asked.number] = y[0]
        return y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "layer", layer)
        search(inputs)
    torch.testing.assert_close(seen[1], expected[0], rtol=1e-9, atol=1e-10)


def test_gradients_of_the_factors():
    search, inputs = search_of(bins=3), batch()
    found, _ = search(inputs)
    (found["task"] + 0.01 * found["tokens"]).backward()
    grad, step = search.factors.grad.clone(), 1e-5
    for at in ((0, 0), (1, 2), (2, 1), (3, 2)):
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                search.factors[at] += sign * step
                found, _ = search(inputs)
                losses.append(found["task"] + 0.01 * found["tokens"])
                search.factors[at] -= sign * step
        torch.testing.assert_close((losses[0] - losses[1]) / (2 * step), grad[at], rtol=1e-5, atol=1e-7)


def test_a_search_keeps_what_the_task_needs():
    """The label is whether token 7 is there, among filler: few tokens are needed, first of all late."""
    torch.manual_seed(0)
    config = fastbert.EncoderConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=3, intermediate_size=64, vocab_size=20
    )
    model = fastbert.AutoModelForSequenceClassification.from_config(config)
    search = TokenSearch(TaskLosses(model), model, weight=2e-4, bins=8)
    made = optimizer("adamw", search_groups(10.0)(search, 0.01), lr=2e-3)
    for group in made.param_groups:
        group["lr"] = 2e-3 * group.get("lr_scale", 1.0)
    search.optimized(made)
    draw = torch.Generator().manual_seed(0)

    def texts(count=32):
        ids = torch.randint(8, 20, (count, 24), generator=draw)
        labels = torch.randint(2, (count,), generator=draw)
        place = torch.randint(1, 24, (count,), generator=draw)
        ids[torch.arange(count), place] = torch.where(labels == 1, 7, ids[torch.arange(count), place])
        ids[:, 0] = 1
        return {
            "input_ids": ids.flatten(),
            "cu_seqlens": ends_of([24] * count),
            "max_seqlen": 24,
            "labels": labels,
        }

    search.train()
    for _ in range(150):
        found, _ = search(texts())
        made.zero_grad()
        (found["task"] + search.weights["tokens"] * found["tokens"]).backward()
        made.step()
        assert 0 <= search.factors.min() <= search.factors.max() <= 1
    schedule = search.schedule()
    assert schedule == sorted(schedule, reverse=True)
    assert schedule[-1] < 0.6
    fastbert.eliminate(model.eval(), schedule)
    test = texts(200)
    with torch.no_grad():
        right = (model(**test).logits.argmax(1) == test["labels"]).float().mean()
    assert right > 0.95


def test_bad_arguments():
    model = of(auto=fastbert.AutoModelForSequenceClassification)
    with pytest.raises(ValueError, match="model: expected one without a token_schedule"):
        TokenSearch(TaskLosses(model), model)
    fastbert.eliminate(model, None)
    for given, words in (({"bins": 0}, "bins: expected"), ({"weight": -1.0}, "weight: expected")):
        with pytest.raises(ValueError, match=words):
            TokenSearch(TaskLosses(model), model, **given)
