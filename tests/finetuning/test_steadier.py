"""Mixout, decay to the first weights, FreeLB and SMART, beside loops over padded batches of transformers."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastbert.finetuning.losses import FreeLBLosses, SmartLosses, TaskLosses, losses_of, symmetric_divergence
from fastbert.finetuning.settings import FreeLB, Settings, Smart
from fastbert.finetuning.start import first_model
from fastbert.finetuning.tasks import task_of
from fastbert.finetuning.toward_start import Mixout
from fastbert.training.optimizers import decay_groups, optimizer
from tests.finetuning.test_training import HEADS, encoded, padded
from tests.support.rule_tasks import written

SETTINGS = Settings(lr=1e-3, epochs=1, batch_size=8, max_length=32)
NUMBERS = np.array([1, 4, 0, 3])


@pytest.fixture(params=["cola", "stsb", "squad2", "swag", "ner"])
def case(request, tmp_path, model):
    """(task, our model in float64, transformers' model with the same weights, a batch's inputs for both)."""
    own, train = encoded(request.param, model, written(request.param, tmp_path / "data", 16, 8))
    torch.manual_seed(0)
    ours = first_model(own.head, model, SETTINGS, own.classes, own.labels)
    ours.save_pretrained(tmp_path / "first")
    theirs = HEADS[request.param].from_pretrained(tmp_path / "first", attn_implementation="eager")
    inputs = train.batch(NUMBERS, True).inputs
    packed = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    grid = padded(train, NUMBERS)
    for given in (packed, grid):
        if given.get("labels") is not None and given["labels"].is_floating_point():
            given["labels"] = given["labels"].double()
    return own, ours.double().train(), theirs.double().train(), packed, grid


def rows(packed, grid, x):
    """(total, width) -> the padded grid of transformers, zeros at padding."""
    mask = grid["attention_mask"].bool()
    return torch.zeros(*mask.shape, x.shape[1], dtype=x.dtype).masked_scatter(mask.unsqueeze(-1), x)


def stock(theirs, grid, delta=None):
    """transformers' output, with a padded perturbation of the embeddings of words."""
    if delta is None:
        return theirs(**grid)
    rest = {name: value for name, value in grid.items() if name != "input_ids"}
    return theirs(inputs_embeds=theirs.get_input_embeddings()(grid["input_ids"]) + delta, **rest)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(ours, theirs, tolerance=1e-7):
    found, expected = gradients(ours), gradients(theirs)
    assert found.keys() == expected.keys()
    largest = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= tolerance * largest, name


def trained(losses, packed):
    """The losses of all passes of one micro-batch, after their backwards."""
    torch.manual_seed(3)
    total = 0.0
    for result, _ in losses.rounds(losses, packed, False):
        result["task"].backward()
        total += float(result["task"].detach())
        torch.manual_seed(3)
    return total


def first_delta(monkeypatch):
    """The perturbation that a module draws, seen through `_Segments.each`'s caller."""
    found = []
    call = TaskLosses.output

    def seen(self, inputs, model=None):
        if "delta" in inputs:
            found.append(inputs["delta"].detach().clone())
        return call(self, inputs, model)

    monkeypatch.setattr(TaskLosses, "output", seen)
    return found


@pytest.mark.parametrize("ball", [None, 0.15])
def test_freelb(case, monkeypatch, ball):
    own, ours, theirs, packed, grid = case
    options = FreeLB(lr=0.1, init=0.2, ball=ball)
    losses = losses_of(ours, replace(SETTINGS, freelb=options), own.fields)
    deltas = first_delta(monkeypatch)
    loss = trained(losses, packed)
    assert type(losses) is FreeLBLosses
    assert len(deltas) == 3
    lengths = packed["cu_seqlens"].diff()
    for part, length in zip(deltas[0].split(lengths.tolist()), lengths, strict=True):
        size = options.init / (length * part.shape[1]) ** 0.5
        assert 0.9 * size < part.abs().max() <= size
        assert part.min() < 0 < part.max()
    delta, expected = rows(packed, grid, deltas[0]), 0.0
    axes = tuple(range(delta.dim() - 2, delta.dim()))
    for number in range(3):
        torch.testing.assert_close(rows(packed, grid, deltas[number]), delta, rtol=1e-6, atol=1e-9)
        delta.requires_grad_()
        part = stock(theirs, grid, delta).loss / 3
        part.backward()
        expected += part.item()
        gradient = delta.grad
        delta = delta.detach() + 0.1 * gradient / gradient.norm(dim=axes, keepdim=True)
        if ball is not None:
            delta = delta * (ball / delta.norm(dim=axes, keepdim=True)).clamp_max(1.0)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_equal_gradients(ours, theirs, 1e-5)


def test_freelb_without_a_perturbation_is_plain(case):
    own, ours, theirs, packed, grid = case
    losses = losses_of(ours, replace(SETTINGS, freelb=FreeLB(steps=1, init=0.0)), own.fields)
    plain = stock(theirs, grid).loss
    plain.backward()
    assert trained(losses, packed) == pytest.approx(plain.item(), rel=1e-9)
    assert_equal_gradients(ours, theirs)


def answers(own, theirs, output, grid):
    """Rows of logits that a divergence compares, one list per field of the output."""
    if own.name == "squad2":
        kept = grid["attention_mask"].bool()
        lowest = torch.finfo(torch.float64).min / 4
        return [output[name].masked_fill(~kept, lowest) for name in own.fields]
    if own.name == "ner":
        return [output.logits[grid["labels"] != -100]]
    return [output.logits]


def divergence(own, a, b):
    if own.name == "stsb":
        return (a - b).square().mean()
    p, q = a.softmax(-1), b.softmax(-1)
    kl = torch.nn.functional.kl_div
    return (
        kl(q.log(), p, reduction="none").nan_to_num().sum(-1).mean()
        + kl(p.log(), q, reduction="none").nan_to_num().sum(-1).mean()
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_smart(case, monkeypatch, momentum):
    own, ours, theirs, packed, grid = case
    options = Smart(weight=2.0, lr=0.5, noise=0.05, momentum=momentum)
    losses = losses_of(ours, replace(SETTINGS, smart=options), own.fields)
    assert type(losses) is SmartLosses
    if momentum:
        with torch.no_grad():
            for p in losses.past.parameters():
                p.mul_(1.1)
        past = copy.deepcopy(theirs)
        with torch.no_grad():
            for p in past.parameters():
                p.mul_(1.1)
    deltas = first_delta(monkeypatch)
    loss = trained(losses, packed)
    assert len(deltas) == 2
    assert deltas[0].std() == pytest.approx(0.05, rel=0.1)
    delta = rows(packed, grid, deltas[0]).requires_grad_()
    clean = stock(theirs, grid)

    def apart(output):
        pairs = zip(answers(own, theirs, clean, grid), answers(own, theirs, output, grid), strict=True)
        return torch.stack([divergence(own, a, b) for a, b in pairs]).mean()

    (gradient,) = torch.autograd.grad(apart(stock(theirs, grid, delta)), delta, retain_graph=True)
    gradient = gradient / gradient.abs().amax((-2, -1), keepdim=True)
    moved = delta.detach() + 0.5 * gradient
    torch.testing.assert_close(rows(packed, grid, deltas[1]), moved, rtol=1e-6, atol=1e-9)
    expected = clean.loss + 2.0 * apart(stock(theirs, grid, moved))
    if momentum:
        with torch.no_grad():
            before = stock(past, grid)
        expected = expected + apart(before)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_equal_gradients(ours, theirs, 1e-5)


def test_equal_views_have_no_divergence(model):
    x = torch.randn(5, 3)
    assert symmetric_divergence(x, x) == 0
    assert symmetric_divergence(x, x + 1e3) < 1e-8
    assert symmetric_divergence(x[:0], x[:0]) == 0
    dropping = first_model(task_of("cola").head, model, SETTINGS, ["a", "b"], 2).train()
    for module in dropping.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    losses = SmartLosses(dropping, replace(SETTINGS, smart=Smart(lr=0.0, noise=1e-30)), ("logits",))
    inputs = {
        "input_ids": torch.randint(5, 40, (12,)),
        "cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32),
        "max_seqlen": 7,
        "labels": torch.tensor([0, 1]),
    }
    torch.manual_seed(1)
    loss = losses(inputs)[0]["task"]
    torch.manual_seed(1)
    assert loss == dropping(**inputs).loss


# -- near the first weights ----------------------------------------------------------------------------------


def linear_weights(model):
    """Names of the weights of linear layers in the encoder."""
    layers = ("attention.self.query", "key", "value", "attention.output.dense", "intermediate.dense")
    ends = tuple(f"{name}.weight" for name in (*layers, "output.dense", "pooler.dense"))
    return [name for name, _ in model.named_parameters() if name.startswith("bert.") and name.endswith(ends)]


def moved(model):
    """Weights as some training leaves them."""
    torch.manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)


@pytest.mark.parametrize("mask", ["column", "element"])
def test_mixout(case, mask):
    own, ours, theirs, packed, grid = case
    for module in ours.base_model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.4  # mixout switches it off
    losses = losses_of(ours, replace(SETTINGS, mixout=0.7, mixout_mask=mask), own.fields)
    first = {name: p.detach().clone() for name, p in ours.named_parameters()}
    moved(ours)
    torch.manual_seed(3)
    mixed = {name: w.detach().clone() for name, w in losses.mixout.mixed().items()}
    assert [*mixed] == linear_weights(ours)
    with torch.no_grad():
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            q.copy_(mixed.get(name, p))
            if name in mixed:
                kept = mixed[name] != first[name]
                whole = first[name] + (p - first[name]) / 0.3
                torch.testing.assert_close(mixed[name][kept], whole[kept])
                shares = kept.double().mean(0)
                assert bool(((shares == 0) | (shares == 1)).all()) is (mask == "column")
                assert 0.1 < kept.double().mean() < 0.6
    plain = theirs(**grid).loss
    assert trained(losses, packed) == pytest.approx(plain.item(), rel=1e-9)
    plain.backward()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if name in mixed:  # dW = dW̃ · M / (1 - p)
                p.grad *= (mixed[name] != first[name]) / 0.3
    assert_equal_gradients(ours, theirs)


def test_the_mean_of_mixed_weights_is_the_weight(model):
    ours = first_model(task_of("cola").head, model, SETTINGS, ["a", "b"], 2)
    mixout = Mixout(ours, 0.5, "element")
    moved(ours)
    torch.manual_seed(0)
    name = "bert.encoder.layer.0.output.dense.weight"
    draws = torch.stack([mixout.mixed()[name].detach() for _ in range(400)])
    weight, start = ours.get_parameter(name).detach(), mixout.starts[name]
    error = (draws.mean(0) - weight) / (weight - start)
    assert error.abs().max() < 5 * 400**-0.5
    assert abs(error.mean()) < 5 * (400 * weight.numel()) ** -0.5


@pytest.mark.parametrize("bad", [None, 0.0, 1.0])
def test_decay_to_the_first_weights(model, bad):
    ours = first_model(task_of("cola").head, model, SETTINGS, ["a", "b"], 2)
    losses = losses_of(ours, replace(SETTINGS, decay_to_start=True), ("logits",))
    first = {name: p.detach().clone() for name, p in ours.named_parameters()}
    moved(ours)
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    made = optimizer("adamw", decay_groups(losses, 0.5), lr=0.1)
    losses.optimized(made)
    if bad is not None:
        made.found_inf = torch.tensor(bad)
    for p in ours.parameters():
        p.grad = torch.zeros_like(p)
    made.step()
    for name, p in ours.named_parameters():
        expected = before[name]
        if not name.endswith("bias") and "LayerNorm" not in name and bad != 1:
            start = first[name] if name.startswith("bert.") else 0
            expected = expected - 0.1 * 0.5 * (expected - start)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-7, msg=name)


def test_the_running_mean_of_the_weights(model):
    ours = first_model(task_of("cola").head, model, SETTINGS, ["a", "b"], 2)
    losses = losses_of(ours, replace(SETTINGS, smart=Smart(momentum=0.75)), ("logits",))
    before = ours.classifier.weight.detach().clone()
    made = optimizer("adamw", decay_groups(losses, 0.0), lr=0.1)
    losses.optimized(made)
    ours.classifier.weight.grad = torch.ones_like(before)
    made.step()
    torch.testing.assert_close(losses.past.classifier.weight, before * 0.75 + ours.classifier.weight * 0.25)
    assert all(p.grad is None and not p.requires_grad for p in losses.past.parameters())
