"""Movement pruning: schedules, masks and gradients by hand, and the pruned model."""

from __future__ import annotations

import copy

import pytest
import torch

from fastbert.compression import shrink
from fastbert.compression.movement import Movement, MovementPruning
from fastbert.compression.pruning import chosen
from fastbert.layers.modules import part
from tests.compression.test_shrink import inputs_of
from tests.support.model_pairs import build

CLOSE = dict(rtol=1e-10, atol=1e-12)
NOW = {"warmup": 0.0, "cooldown": 0.0}


def small(name="bert"):
    return build(name, "ForSequenceClassification")[1].double().train()


def batch(name="bert"):
    inputs = inputs_of(name)
    return {**inputs, "labels": torch.arange(len(inputs["input_ids"])) % 2}


def drawn(pruning, seed=0, steps=None):
    """Random scores, after some steps; all by default."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for scores in pruning.scores:
            scores.copy_(torch.randn(scores.shape, generator=draw, dtype=torch.float64) * 3)
    for _ in range(pruning.steps if steps is None else steps):
        pruning.step()
    return pruning


@pytest.mark.parametrize(
    ("options", "first", "last"),
    [(Movement(), 1.0, 0.15), (Movement(kind="soft"), 0.0, 0.1), (Movement(keep=0.5), 1.0, 0.5)],
)
def test_the_schedule_is_cubic(options, first, last):
    found = [options.value(step, 100) for step in range(101)]
    assert found[:11] == [first] * 11
    assert found[80:] == [last] * 21
    # t = 35 of T = 70: an eighth of the way is left
    assert found[45] == pytest.approx(last + (first - last) / 8, rel=1e-12)
    assert found[24] == pytest.approx(last + (first - last) * 0.8**3, rel=1e-12)
    one = Movement(**NOW)
    assert [one.value(step, 1) for step in (0, 1)] == [1.0, 0.15]


def test_a_hard_mask_keeps_the_largest_of_each_matrix():
    pruning = drawn(MovementPruning(small(), 7, Movement(keep=0.3)))
    for scores, mask in zip(pruning.scores, pruning.masks(), strict=True):
        kept = mask.bool()
        assert int(kept.sum()) == round(0.3 * scores.numel())
        assert scores[kept].min() >= scores[~kept].max()
        assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert len(pruning.scores) == 3 * 6


def test_a_soft_mask_keeps_what_is_above_the_threshold():
    pruning = drawn(MovementPruning(small(), 7, Movement(kind="soft", threshold=0.4)))
    for scores, mask in zip(pruning.scores, pruning.masks(), strict=True):
        assert torch.equal(mask.bool(), scores > torch.logit(torch.tensor(0.4, dtype=torch.float64)))


def test_blocks_compete_over_all_layers():
    pruning = drawn(MovementPruning(small(), 7, Movement(units="blocks", keep=0.25, multiple=16)))
    masks = pruning.masks()
    heads, neurons = ([numbers[unit] for numbers in pruning._layers] for unit in ("heads", "neurons"))
    for numbers, multiple in ((heads, 1), (neurons, 16)):
        own = [pruning.scores[i].detach() for i in numbers]
        gone = chosen(own, 0.75, multiple)
        for layer, number in enumerate(numbers):
            assert (masks[number] == 0).nonzero()[:, 0].tolist() == gone[layer]
    assert {int(masks[i].sum()) for i in neurons} <= {0, 16, 32, 48, 64, 80}
    soft = drawn(MovementPruning(small(), 7, Movement("soft", "blocks", multiple=16)))
    for numbers in soft._layers:
        scores, mask = soft.scores[numbers["neurons"]].detach(), soft.masks()[numbers["neurons"]].bool()
        above = int((scores.sigmoid() > 0.1).sum())
        assert above <= int(mask.sum()) < above + 16 or mask.all()
        assert mask.all() or scores[mask].min() > scores[~mask].max()


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "deberta-v2", "eurobert"])
@pytest.mark.parametrize("units", ["weights", "blocks"])
def test_gradients_are_straight_through(name, units):
    """Against the model with masked weights: dW = g ∘ M, and dS = the sum of g ∘ W over a score's weights."""
    ours, inputs = small(name).eval(), batch(name)
    pruning = drawn(MovementPruning(ours, 4, Movement(units=units, keep=0.5, multiple=1)))
    masks, plain = pruning.masks(), copy.deepcopy(pruning.pruned().model)
    if units == "blocks":
        plain = shrink.without(ours)
        with torch.no_grad():
            for each in pruning._weights:
                weight, unit = plain.get_parameter(each.key), masks[each.scores]
                size = weight.shape[each.axis.dim]
                # The unit of each row or column, by the axis itself
                places = torch.arange(len(unit)).double()[:, None].expand(-1, each.axis.shape[3])
                places = places[None, :, None].expand(each.axis.shape[0], -1, each.axis.shape[2], -1)
                factor = unit[places.reshape(-1).long()]
                assert len(factor) == size
                weight.mul_(factor[:, None] if each.axis.dim == 0 else factor)
    loss, expected = ours(**inputs).loss, plain(**inputs).loss
    torch.testing.assert_close(loss, expected, **CLOSE)
    loss.backward()
    expected.backward()
    sums = [torch.zeros_like(scores) for scores in pruning.scores]
    for each in pruning._weights:
        gradient, weight = plain.get_parameter(each.key).grad, each.linear.weight
        kept = plain.get_parameter(each.key) != 0
        torch.testing.assert_close(weight.grad, gradient * kept, **CLOSE)
        product = gradient * weight.detach()
        if each.axis is not None:
            product = product if each.axis.dim == 0 else product.T
            product = product.unflatten(0, each.axis.shape).movedim(1, 0).flatten(1).sum(1)
        sums[each.scores] += product
    for scores, total in zip(pruning.scores, sums, strict=True):
        torch.testing.assert_close(scores.grad, total, **CLOSE)
        assert total.abs().max() > 0
    others = {key for key, p in ours.named_parameters() if p.grad is not None} - {
        each.key for each in pruning._weights
    }
    for key in others:
        torch.testing.assert_close(ours.get_parameter(key).grad, plain.get_parameter(key).grad, **CLOSE)


@pytest.mark.parametrize("steps", [0, 3, 7])
def test_the_penalty_is_the_mean_of_all_means(steps):
    pruning = drawn(MovementPruning(small(), 7, Movement(kind="soft", penalty=30.0, **NOW)), steps=steps)
    share = 1 - (1 - steps / 7) ** 3
    means = [scores.sigmoid().mean() for scores in pruning.scores]
    found = pruning.penalty()
    torch.testing.assert_close(found, 30 * share * sum(means) / len(means), **CLOSE)
    found.backward()
    for scores in pruning.scores:
        slope = scores.sigmoid() * (1 - scores.sigmoid())
        expected = 30 * share * slope / (len(means) * scores.numel())
        torch.testing.assert_close(scores.grad, expected, **CLOSE)
    assert MovementPruning(small(), 7).penalty() == 0


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("units", ["weights", "blocks"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "longformer"])
@torch.no_grad()
def test_the_pruned_model_is_the_masked_model(name, units, kind, tmp_path):
    ours, inputs = small(name).eval(), inputs_of(name)
    before = ours(**inputs).logits
    weights = {key: p.clone() for key, p in ours.named_parameters()}
    options = {"keep": 0.4} if kind == "hard" else {"threshold": 0.4}
    pruning = drawn(MovementPruning(ours, 3, Movement(kind, units, multiple=16, **options)))
    masked = ours(**inputs).logits
    assert (masked - before).abs().max() > 1e-4
    found = pruning.finish()
    assert torch.equal(ours(**inputs).logits, before)
    assert all(torch.equal(p, weights[key]) for key, p in ours.named_parameters())
    if units == "weights":
        assert torch.equal(found.model(**inputs).logits, masked)
        assert (found.heads, found.neurons, found.after) == ({}, {}, found.before)
    else:
        torch.testing.assert_close(found.model(**inputs).logits, masked, **CLOSE)
        assert found.after.flops < found.before.flops
        assert found.model.config.pruned_heads
        assert any(layer.form.nheads == 0 for layer in found.model.base_model.layer_list()) or found.heads
    found.model.save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path, dtype="auto").eval()
    assert torch.equal(again(**inputs).logits, found.model(**inputs).logits)


def test_calls_follow_scores_weights_and_modes():
    """No mask is out of date: in eval mode, under inference, after a step, a new score or a new weight."""
    ours, inputs = small(), inputs_of("bert")
    pruning = drawn(MovementPruning(ours, 10, Movement(keep=0.3)), steps=5)
    seen = []
    for change in ("nothing", "step", "score", "weight", "load"):
        if change == "step":
            pruning.step()
        if change == "score":
            drawn(pruning, 1, 0)
        if change == "weight":
            part(ours.base_model.layer_list()[0], "output.dense").weight.data.mul_(3)
        if change == "load":
            state = {key: t.clone() for key, t in pruning.state_dict().items()}
            state["taken"].fill_(10)
            pruning.load_state_dict(state)
        with torch.no_grad():
            expected = pruning.pruned().model.eval()(**inputs).logits
        assert all(expected.ne(other).any() for other in seen), change
        seen.append(expected)
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                found = ours.eval()(**inputs).logits
                assert torch.equal(ours(**inputs).logits, found)
            torch.testing.assert_close(found.detach().clone(), expected, **CLOSE)
        ours.train()(**batch()).loss.backward()


def test_a_plain_loop_learns():
    """Scores of weights that grow in the loss's direction rise, and the model learns beside."""
    torch.manual_seed(0)
    ours, inputs = build("bert", "ForSequenceClassification")[1].train(), batch()
    pruning = MovementPruning(ours, 30, Movement(keep=0.3))
    optimizer = torch.optim.AdamW(
        [{"params": ours.parameters()}, {"params": pruning.scores, "lr": 1e-2, "weight_decay": 0.0}], lr=1e-3
    )
    losses = []
    for _ in range(30):
        loss = ours(**inputs).loss + pruning.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pruning.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert pruning.is_final
    made = pruning.finish().model
    assert made.eval()(**inputs).loss.item() < 0.5 * losses[0]
    for layer in made.base_model.layer_list():
        assert abs((part(layer, "output.dense").weight == 0).double().mean() - 0.7) < 0.01


def test_errors_leave_the_weights():
    ours = small()
    MovementPruning(ours, 3)
    with pytest.raises(ValueError, match="input_ids: token id 1000000"):
        ours(input_ids=torch.tensor([[10**6]]))
    assert all(isinstance(layer.output.dense.weight, torch.nn.Parameter) for layer in ours.bert.encoder.layer)
    ours.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="model: expected no activation checkpointing"):
        ours(**batch())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "medium"}, "kind: expected one of hard, soft, got 'medium'"),
        ({"units": "rows"}, "units: expected one of weights, blocks, got 'rows'"),
        ({"kind": "soft", "keep": 0.5}, "keep: expected None, as it is for kind 'hard', got 'soft'"),
        ({"threshold": 0.1}, "threshold: expected None, as it is for kind 'soft', got 'hard'"),
        ({"penalty": 1.0}, "penalty: expected None"),
        ({"keep": 0.0}, r"keep: expected a number in \(0, 1\], got 0.0"),
        ({"keep": float("nan")}, "keep: expected a number"),
        ({"keep": True}, "keep: expected a number"),
        ({"kind": "soft", "threshold": 1.0}, r"threshold: expected a number in \(0, 1\), got 1.0"),
        ({"kind": "soft", "penalty": -1}, "penalty: expected a finite number >= 0, got -1"),
        ({"lr": 0}, "lr: expected a finite number > 0, got 0"),
        ({"warmup": 0.5, "cooldown": 0.5}, "cooldown: expected less than 1 with warmup, got 0.5"),
        ({"multiple": 0}, "multiple: expected an integer >= 1, got 0"),
    ],
)
def test_bad_options(given, message):
    with pytest.raises(ValueError, match=message):
        Movement(**given)


def test_bad_models():
    with pytest.raises(ValueError, match="steps: expected an integer >= 1, got 0"):
        MovementPruning(small(), 0)
    with pytest.raises(ValueError, match="model: albert shares its layers"):
        MovementPruning(build("albert", "ForMaskedLM")[1], 3)
