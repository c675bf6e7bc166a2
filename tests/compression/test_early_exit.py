"""Texts that leave early, against each text alone through the whole model with all its hidden states."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import fastbert
from fastbert.compression import early_exit
from fastbert.compression.early_exit import EarlyExit
from fastbert.execution.plan import Plan
from fastbert.layers.modules import part
from fastbert.tasks.examples import Examples
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.model_pairs import build

CLOSE = dict(rtol=1e-9, atol=1e-9)
LENGTHS = torch.tensor([[40], [23], [9], [1]])


def inputs_of(name, holes=False):
    inputs = batch(name)
    mask = (torch.arange(40) < LENGTHS).long()
    if holes:
        mask[1, 3:7] = 0
    return {**inputs, "attention_mask": mask}


def exits_of(name, every=1, kind="fastbert", spread=40.0, **config):
    """In float64, with branches whose answers differ in certainty."""
    torch.manual_seed(0)
    exits = EarlyExit(build(name, "ForSequenceClassification", **config)[1].double(), kind, every).eval()
    for branch in exits.branches:
        branch.dense.weight.data.normal_(0, 0.3)
        branch.classifier.weight.data.mul_(spread)
        branch.classifier.bias.data.normal_()
    return exits


@torch.no_grad()
def alone(exits, inputs, threshold):
    """(logits, layers) of each text by itself, from the hidden states of the whole model."""
    model, found = exits.model, []
    encoder, family = model.base_model, model.family
    how = model.config.get("classifier_pooling")
    for i in range(4):
        row = {key: value[i : i + 1] for key, value in inputs.items()}
        out = model(**row, output_hidden_states=True)
        answer, depth = out.logits[0], len(out.hidden_states) - 1
        for branch, layer in zip(exits.branches, exits.exits, strict=True):
            x = out.hidden_states[layer][0]
            x = x if family.final_norm is None else part(encoder, family.final_norm)(x)
            x = x[row["attention_mask"][0] > 0]
            x = x.mean(0) if how in ("mean", "late") else x[0]
            logits = branch.classifier(torch.tanh(branch.dense(x)))
            p = logits.softmax(-1)
            entropy = -(p * p.log()).sum() / (math.log(len(p)) if exits.kind == "fastbert" else 1)
            if entropy < threshold:
                answer, depth = logits, layer
                break
        found.append((answer, depth))
    return torch.stack([logits for logits, _ in found]), torch.tensor([depth for _, depth in found])


def thresholds(exits, inputs):
    """Between the uncertainties that the branches have of the texts."""
    seen = []
    original, exits.uncertainty = exits.uncertainty, lambda x: seen.append(original(x)) or seen[-1]
    exits(**inputs, threshold=0.0)
    del exits.uncertainty
    each = torch.cat(seen).sort().values
    return [each[i].item() + 1e-9 for i in (0, len(each) // 4, len(each) // 2, len(each) - 1)]


# Config keys by which a branch reads other tokens, or layers differ
MORE = [("modernbert", {"classifier_pooling": "mean"}), ("deberta-v2", {"conv_kernel_size": 3})]


@pytest.mark.parametrize(("name", "config"), [*((name, {}) for name in FAMILY_NAMES), *MORE])
def test_texts_leave_as_they_would_alone(name, config):
    exits, different = exits_of(name, **config), set()
    for holes in (False, True):
        inputs = inputs_of(name, holes)
        for threshold in thresholds(exits, inputs):
            out, (logits, layers) = exits(**inputs, threshold=threshold), alone(exits, inputs, threshold)
            torch.testing.assert_close(out.logits, logits, **CLOSE)
            assert torch.equal(out.layers, layers)
            different.update(layers.tolist())
            # Another order, and other neighbours
            turned = exits(**{k: v.flip(0)[:3] for k, v in inputs.items()}, threshold=threshold)
            torch.testing.assert_close(turned.logits.flip(0), logits[1:], **CLOSE)
            assert torch.equal(turned.layers.flip(0), layers[1:])
    assert len(different) > 1


@pytest.mark.parametrize("name", ["bert", "nomic_bert", "big_bird"])
def test_packed_texts_and_masks_of_attention(name):
    exits, inputs = exits_of(name), inputs_of(name)
    kept = inputs["attention_mask"].bool()
    ends = torch.cat([torch.zeros(1, 1), LENGTHS.cumsum(0)]).flatten().to(torch.int32)
    flat = {key: value[kept] for key, value in inputs.items() if key != "attention_mask"}
    bias = torch.zeros(4, 1, 40, 40, dtype=torch.float64)
    bias.masked_fill_(torch.arange(40) >= LENGTHS[:, :, None, None], -torch.inf)
    for threshold in thresholds(exits, inputs):
        out = exits(**inputs, threshold=threshold)
        packed = exits(**flat, cu_seqlens=ends, max_seqlen=41, threshold=threshold)
        torch.testing.assert_close(packed.logits, out.logits, **CLOSE)
        assert torch.equal(packed.layers, out.layers)
        if name == "bert":
            hidden = exits(**{**inputs, "attention_mask": bias}, threshold=threshold)
            torch.testing.assert_close(hidden.logits, out.logits, **CLOSE)
            # A mask of packed texts has the size of the longest, which may leave
            last = exits(**flat, attention_mask=bias, cu_seqlens=ends, threshold=threshold)
            torch.testing.assert_close(last.logits, out.logits, **CLOSE)


@pytest.mark.parametrize("name", FAMILY_NAMES)
@torch.no_grad()
def test_threshold_0_is_the_plain_model_to_the_bit(name):
    model = build(name, "ForSequenceClassification")[1]
    exits, inputs = EarlyExit(model, every=2), inputs_of(name)
    out = exits(**inputs)
    assert torch.equal(out.logits, model(**inputs).logits)
    assert set(out.layers.tolist()) == {len(model.base_model.layer_list())}
    # Not even with an uncertainty of 0
    for branch in exits.branches:
        branch.classifier.weight.mul_(1e6)
    assert exits(**inputs, threshold=1e-30).layers.tolist() == [2] * 4
    assert torch.equal(exits(**inputs).logits, out.logits)
    if name == "bert":
        model.quantize("int8")
        assert torch.equal(exits(**inputs).logits, model(**inputs).logits)
        assert exits(**inputs, threshold=1.1).layers.tolist() == [2] * 4


def test_a_compiled_model_runs_as_it_is():
    exits, inputs = exits_of("bert"), inputs_of("bert")
    threshold = thresholds(exits, inputs)[1]
    out, compiled = exits(**inputs, threshold=threshold), torch.compile(exits)(**inputs, threshold=threshold)
    assert torch.equal(compiled.logits, out.logits)
    assert torch.equal(compiled.layers, out.layers)


def test_rows_that_leave_are_not_computed(monkeypatch):
    exits, ran = exits_of("bert", every=2, num_hidden_layers=6), []
    run = Plan.run

    def counted(plan, x, call):
        ran.append((len(plan.steps), len(x), call.batch.cu_seqlens.tolist()))
        return run(plan, x, call)

    monkeypatch.setattr(Plan, "run", counted)
    leave = iter([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0]])
    exits.uncertainty = lambda logits: torch.tensor(next(leave))
    out = exits(**inputs_of("bert"), threshold=0.5)
    assert ran == [(2, 73, [0, 40, 63, 72, 73]), (2, 24, [0, 23, 24]), (2, 23, [0, 23])]
    assert out.layers.tolist() == [2, 6, 2, 4]
    assert exits.exits == [2, 4]
    # If all leave, nothing is left to run
    ran.clear()
    exits.uncertainty = lambda logits: torch.zeros(4)
    assert exits(**inputs_of("bert"), threshold=0.5).layers.tolist() == [2] * 4
    assert len(ran) == 1


def test_empty_texts_and_batches():
    exits = exits_of("bert")
    ids, ends = torch.arange(5, 9), torch.tensor([0, 0, 4, 4], dtype=torch.int32)
    for threshold in (0.0, 9.0):
        out = exits(ids, cu_seqlens=ends, threshold=threshold)
        assert out.logits.shape == (3, 5)
        assert out.logits.isfinite().all()
        assert len(set(out.layers.tolist())) == 1
        none = exits(torch.zeros(0, 4, dtype=torch.int64), threshold=threshold)
        assert (none.logits.shape, none.layers.shape) == ((0, 5), (0,))


def test_uncertainty():
    logits = torch.tensor([[0.0, 0.0, 0.0], [100.0, 0.0, 0.0], [2.0, 1.0, -torch.inf]])
    share = EarlyExit.uncertainty(exits_of("bert"), logits)
    nats = EarlyExit.uncertainty(exits_of("bert", kind="deebert"), logits)
    p = 1 / (1 + math.exp(-1))
    expected = torch.tensor([math.log(3), 0, -p * math.log(p) - (1 - p) * math.log(1 - p)])
    torch.testing.assert_close(nats, expected)
    torch.testing.assert_close(share, expected / math.log(3))
    assert (nats >= 0).all()


def test_losses():
    inputs, labels = inputs_of("bert"), torch.tensor([0, 4, -100, 2])
    for kind in early_exit.KINDS:
        exits = exits_of("bert", kind=kind).train()
        for branch in exits.branches:
            branch.dropout.p = 0.0
        with torch.no_grad():
            out, expected = exits.model(**inputs, output_hidden_states=True), 0
        teacher = out.logits.softmax(-1)
        for branch, x in zip(exits.branches, out.hidden_states[1:-1], strict=True):
            p = branch.classifier(torch.tanh(branch.dense(x[:, 0]))).softmax(-1)
            if kind == "fastbert":
                expected = expected + (p * (p / teacher).log()).sum(-1).mean()
            else:
                expected = expected - p[[0, 1, 3], [0, 4, 2]].log().mean()
        loss = exits.loss(**inputs, labels=labels)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
        loss.backward()
        assert all(p.grad is None for p in exits.model.parameters())
        assert all(p.grad.abs().sum() > 0 for p in exits.branches.parameters())
    same = exits_of("bert")
    # A branch that answers as the model does has no loss
    with torch.no_grad():
        for branch in same.branches:
            branch.classifier.weight.zero_()
            branch.classifier.bias.copy_(same.model.classifier.bias)
        same.model.classifier.weight.zero_()
    assert same.loss(**inputs).abs() < 1e-6


def texts(count, seed=0):
    """The first token tells the label."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(4, 12, count)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids, labels = draw.integers(10, 90, starts[-1]), draw.integers(0, 2, count)
    ids[starts[:-1]] = np.where(labels, 7, 8)
    none = np.zeros_like(ids)
    return Examples(ids, starts, none, none, none.astype(np.int8), none, labels)


def trained(tmp_path, kind="deebert", output="run"):
    torch.manual_seed(0)
    model = build("bert", "ForSequenceClassification", num_labels=2)[1]
    return EarlyExit(model, kind).fit(texts(256), tmp_path / output, epochs=20, lr=1e-2, progress=False)


def test_branches_learn_and_files_keep_them(tmp_path):
    before = copy.deepcopy(build("bert", "ForSequenceClassification", num_labels=2)[1].state_dict())
    exits, held = trained(tmp_path), texts(128, seed=1)
    assert not exits.training
    assert all(torch.equal(t, before[key]) for key, t in exits.model.state_dict().items())
    whole, early = exits.curve(held, [0.0, 9.0])
    assert whole.layers == 3
    assert early.layers == 1
    assert early.accuracy > 0.95 > whole.accuracy
    assert exits.threshold == 0
    # The same run again takes no step, and has the same branches
    again = trained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(exits.parameters(), again.parameters(), strict=True))
    model = copy.deepcopy(exits.model)
    model.classifier.bias.data.add_(1)
    with pytest.raises(ValueError, match=r"model: the run in .* has '.*', got '.*'"):
        EarlyExit(model, "deebert").fit(texts(256), tmp_path / "run", epochs=20, lr=1e-2)
    exits.threshold = 0.3
    exits.save_pretrained(tmp_path / "saved")
    loaded, ids = EarlyExit.from_pretrained(tmp_path / "saved"), torch.randint(5, 90, (6, 9))
    assert (loaded.kind, loaded.every, loaded.threshold) == ("deebert", 1, 0.3)
    one, other = exits(ids), loaded(ids)
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.layers, other.layers)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(stock(ids).logits, loaded(ids, threshold=0).logits, rtol=1e-4, atol=1e-5)
    (tmp_path / "saved" / "exits.json").write_text('{"kind": "deebert", "every": 2, "threshold": 0}')
    with pytest.raises(fastbert.CheckpointError, match=r"exits.safetensors: does not fit exits.json"):
        EarlyExit.from_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "exits.json").write_text('{"kind": "deebert"}')
    with pytest.raises(fastbert.CheckpointError, match=r"exits.json: KeyError: 'every'"):
        EarlyExit.from_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "exits.json").unlink()
    with pytest.raises(fastbert.CheckpointError, match=r"exits\.json"):
        EarlyExit.from_pretrained(tmp_path / "saved")


def test_branches_learn_from_the_model_without_labels(tmp_path):
    exits = trained(tmp_path, "fastbert")
    ids = torch.randint(5, 90, (32, 9))
    with torch.no_grad():
        model = exits.model(ids).logits.softmax(-1)
    branches = exits(ids, threshold=9.0).logits.softmax(-1)
    torch.manual_seed(0)
    fresh = EarlyExit(exits.model).eval()(ids, threshold=9.0).logits.softmax(-1)
    assert (branches - model).abs().mean() < 0.5 * (fresh - model).abs().mean()


def test_bad_arguments():
    def made(name="bert", task="ForSequenceClassification", **config):
        return build(name, task, **config)[1]

    exits = EarlyExit(made())
    for call, message in (
        (lambda: EarlyExit(made(task="ForMaskedLM")), "model: expected a sequence classifier of fastbert"),
        (lambda: EarlyExit(made(num_labels=1)), "model: expected one of several classes per text"),
        (
            lambda: EarlyExit(made(problem_type="multi_label_classification")),
            "model: expected one of several",
        ),
        (lambda: EarlyExit(made(), "pabee"), "kind: expected one of fastbert, deebert, got 'pabee'"),
        (lambda: EarlyExit(made(), every=3), "every: expected an integer from 1 to 2, got 3"),
        (lambda: EarlyExit(made(), every=True), "every: expected an integer from 1 to 2, got True"),
        (lambda: exits(torch.ones(1, 2).long(), threshold=-1), "threshold: expected a number >= 0, got -1"),
        (lambda: exits(torch.ones(1, 2).long(), threshold="x"), "threshold: expected a number, got 'x'"),
        (lambda: exits(), "input_ids, inputs_embeds: expected exactly one"),
        (lambda: EarlyExit(made(), "deebert").loss(torch.ones(1, 2).long()), "labels: expected"),
        (lambda: exits.fit(["a"]), r"examples: expected Examples \(`tokenized` makes them\), got list"),
        (lambda: exits.fit(texts(2), epochs=0), "epochs: expected a finite number > 0, got 0"),
        (lambda: exits.fit(texts(2), batch_size=0), "batch_size: expected an integer >= 1, got 0"),
        (
            lambda: EarlyExit(made(), "deebert").fit(replace(texts(2), labels=None)),
            "examples: expected classes for kind 'deebert', got none",
        ),
        (
            lambda: exits.fit(replace(texts(2), labels=np.ones(2))),
            "examples: expected a class number per text",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    fastbert.eliminate(exits.model, [1, 0.5, 0.5])
    for call in (exits, exits.loss):
        with pytest.raises(ValueError, match="model: expected no config token_schedule"):
            call(torch.ones(1, 2).long())
    exits.model.train()
    with pytest.raises(ValueError, match="model: expected eval mode, got training mode"):
        exits(torch.ones(1, 2).long())
