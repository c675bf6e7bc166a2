"""The measured training step is the real one, and so is its memory; speeds are not checked here."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from bench import footprint, memory
from bench.gpu import groups
from bench.gpu import training as gpu_training
from bench.lib import attention, report, training, workloads
from fastbert.ops import linear
from fastbert.runtime import dispatch
from tests.support import launchers
from tests.support.benches import LENGTHS, ROOFS, TINY

# ---- the step ----


@pytest.mark.sweep
@pytest.mark.parametrize("head", training.HEADS)
def test_training_rows(head):
    wanted = ("fastbert", "transformers")
    rows = list(
        training.bench_training(TINY, "a", "bf16", wanted=wanted, head=head, samples=3, lengths=LENGTHS)
    )
    assert [row["candidate"] for row in rows] == ["fastbert-bf16", "transformers-bf16"]
    for row in rows:
        assert (row["status"], row["n"], row["tokens"]) == ("ok", 3, 25)
        assert all(row[part] > 0 for part in training.PARTS)
        assert 0.98 < row["grad_cosine"] < 1 - 1e-7  # bf16 against fp32
        assert row["name"] == f"training-{row['candidate']}-tiny-a-{head}"
        assert "of_floor" not in row  # no roofs, no floor


def test_a_training_step_trains():
    module = training.modules(TINY, "classification", ("fastbert",))["fastbert"]
    assert module.config.hidden_dropout_prob == 0.1
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    inputs, _ = training.batch(LENGTHS, TINY.vocab, "classification")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    step = training.Step(module.train(), optimizer, inputs, autocast=False)
    losses = {training.loss_of(module, inputs, False).item() for _ in range(3)}
    assert len(losses) == 3  # dropout is on
    step(), step()
    assert len(step.marks) == 2
    moved = [name for name, p in module.named_parameters() if not torch.equal(before[name], p)]
    assert len(moved) == len(before)


def test_the_worst_matrix_gradient_counts():
    module = training.modules(TINY, "classification", ("fastbert",))["fastbert"].train()
    inputs, _ = training.batch(LENGTHS, TINY.vocab, "classification")
    truth = training.gradients(module, inputs, autocast=False)
    again = training.gradients(module, inputs, autocast=False)
    assert training.cosine(again, truth) == pytest.approx(1.0)  # without dropout
    assert all(p.grad is None for p in module.parameters())
    assert module.training
    assert training.cosine({name: -g for name, g in truth.items()}, truth) == pytest.approx(-1.0)
    name = "bert.encoder.layer.0.output.dense.weight"
    assert training.cosine({**truth, name: truth[name] * 0}, truth) == 0.0
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert training.cosine({**truth, name: truth[name].roll(1)}, truth) < 0.9
    assert training.cosine({k: g for k, g in truth.items() if k != name}, truth) == 0.0


def test_the_parts_are_medians_of_the_last_steps(monkeypatch):
    moments = iter([0, 9, 9, 9, 0, 1, 3, 3.5, 5, 6.5, 9.5, 11, 20, 21.25, 23.5, 23.75])
    monkeypatch.setattr(training, "mark", lambda device: float(next(moments)))
    monkeypatch.setattr(training, "loss_of", lambda module, *_: module.weight.sum())
    module = nn.Linear(2, 2)
    step = training.Step(module, torch.optim.SGD(module.parameters()), {"input_ids": torch.ones(1)}, False)
    for _ in range(4):
        step()
    assert step.parts(3) == {"forward_ms": 1250.0, "backward_ms": 2250.0, "step_ms": 500.0}


def test_the_floor_counts_real_tokens_and_labelled_rows():
    inputs, labelled = training.batch(LENGTHS, TINY.vocab, "pretraining")
    assert labelled == int((inputs["labels"] != -100).sum()) > 0
    assert (inputs["labels"][inputs["attention_mask"] == 0] == -100).all()
    for head, rows in (("pretraining", labelled), ("classification", 0)):
        [row] = training.bench_training(
            TINY, "a", "bf16", wanted=("fastbert",), head=head, samples=3, lengths=LENGTHS, roofs=ROOFS
        )
        least = workloads.training_flops(LENGTHS, TINY, rows) / 200e9 * 1e3
        assert row["floor_ms"] == pytest.approx(least)
        assert row["of_floor"] == pytest.approx(least / row["median_ms"])


@pytest.mark.parametrize("head", training.HEADS)
def test_all_candidates_begin_alike(head):
    found = training.modules(TINY, head, training.CANDIDATES)
    theirs = found["transformers"]
    assert found["torch_compile"]._orig_mod is theirs
    ours = dict(found["fastbert"].named_parameters())
    assert all(torch.equal(ours[name], p) for name, p in theirs.named_parameters())
    rates = theirs.config.hidden_dropout_prob, theirs.config.attention_probs_dropout_prob
    assert rates == (0.1, 0.1)
    assert theirs.config._attn_implementation == "sdpa"


# ---- memory ----


@pytest.mark.sweep
def test_a_process_needs_what_its_step_saves():
    lengths = (512,) * 32
    [row] = memory.bench_memory("tiny", "a", ("fastbert-fp32",), lengths=lengths, what="classification")
    assert row["status"] == "ok", row
    assert (row["step"], row["head"]) == ("training_memory", "classification")
    assert row["name"] == "training_memory-fastbert-fp32-tiny-a-classification"
    saved = footprint.count("fastbert", TINY, lengths, "classification", "fp32")["saved_mib"]
    assert saved > 50
    assert saved < row["above_mib"] < 2 * saved + 60


def test_live_bytes_rise_and_fall_with_the_storages():
    old = torch.ones(5)
    with footprint.Live([old]) as live:
        a = torch.zeros(1000)
        assert live.now == 4000
        b = a.view(10, 100)  # no storage of its own
        c = b + 1
        old.add_(1)
        assert live.now == 8000
        del a, c
        assert live.now == 4000
        d = torch.zeros(10, dtype=torch.bfloat16)
        del b
        assert (live.now, live.peak, d.numel()) == (20, 8000, 10)


def test_what_autograd_saves_is_counted_once_and_while_it_lives():
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(8, 4)
    saved = footprint.Saved([weight])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
        y = x @ weight.T  # x; the weight is known
        z = (y + 1).sin()  # the sum, of which there is no other reference
        z2 = y * y  # y, twice
        assert saved.total() == 128 * 3
        kinds = [(row["what"], row["tensors"]) for row in saved.largest(5)]
        assert kinds == [("float32 8x4", 3)]
        del z
        assert saved.total() == 128 * 2
    del y, z2
    assert saved.total() == 128  # x itself


@pytest.mark.sweep
@pytest.mark.parametrize("tag", ["fp32", "bf16"])
@pytest.mark.parametrize("head", training.HEADS)
@pytest.mark.parametrize("candidate", footprint.CANDIDATES)
def test_fake_tensors_tell_what_real_ones_take(candidate, head, tag):
    lengths, model = (16,) * 3, workloads.Model("small", 64, 3, 2, 128, vocab=1000)
    fake, real = (
        footprint.count(candidate, model, lengths, head, tag, fake=fake)["saved_mib"] * 2**20
        for fake in (True, False)
    )
    more = 0
    if candidate == "fastbert":  # a GPU multiplies by [Wq; Wk; Wv], a copy; a CPU casts x three times
        layers = 3 if head == "pretraining" else 2  # in the last one only the first tokens ask
        more = layers * (-2 * 48 * 64 * 2 if tag == "bf16" else 3 * 64 * 64 * 4)
        if tag == "bf16" and linear.reads_wide(torch.device("cpu"), torch.bfloat16):  # a GPU keeps copies
            module = training.modules(model, head, (candidate,))[candidate]
            linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
            more += 2 * sum(m.weight.numel() for m in linears)
            more += 2 * model.vocab if head == "pretraining" else 0  # the bias of the logits
    assert fake - real == pytest.approx(more, abs=2048)  # lengths and seeds


@pytest.mark.sweep
def test_a_step_of_bert_base_needs_at_most_the_goal_of_transformers_memory():
    ours, theirs = footprint.rows(workloads.BASE, "full", "pretraining", "bf16")
    assert (ours["candidate"], theirs["candidate"]) == ("fastbert-bf16", "transformers-bf16")
    assert ours["tokens"] == 32 * 512
    assert ours["peak_mib"] <= footprint.GOAL * theirs["peak_mib"]
    assert ours["peak_mib"] > ours["saved_mib"] + 3 * ours["parameters_mib"]


# ---- attention alone ----


@pytest.mark.parametrize("tag", ["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [LENGTHS, (8, 8)])
def test_attention_alone_does_a_steps_work(noted, tag, lengths):
    seen = noted(dispatch, "call", lambda function, key, *args: (function, launchers.flat(args)))
    before, device = attention.op.SAVED_ON, torch.device("cpu")
    candidates = attention.calls(lengths, TINY, attention.DTYPES[tag], device)
    assert tuple(candidates) == attention.CANDIDATES
    for name, saved in (("fastbert", True), ("fastbert_other_bits", False)):
        del seen[:]
        candidates[name]()
        (forward, args), (backward, needs) = seen
        assert (forward, backward) == ("attention_fwd training", "attention_bwd training")
        assert args[0].shape == (sum(lengths), TINY.heads, TINY.hidden // TINY.heads)
        assert args[0].dtype == attention.DTYPES[tag]
        # the last one is the table of places, which a CPU does not need
        *args, places = args
        assert (args[-1], args[-5], places) == (saved, 0.1, None)
        *needs, places = needs
        assert (needs[-5:], places) == ([True] * 3 + [False] * 2, None)
        assert (needs[-6] is not None) == saved
    assert before == attention.op.SAVED_ON
    candidates["torch_sdpa"]()
    assert attention.flops((3, 5), workloads.BASE) == 14 * (9 + 25) * 768


# ---- the command ----


def arguments(monkeypatch, *options: str):
    """Parse arguments as on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return gpu_training.parse([*options])


def rows_of(args) -> list[dict]:
    left = groups.timer(args)
    return list(groups.measured(gpu_training.plan(args, ROOFS, left), left, args.device, args.budget))


def test_a_small_budget_leaves_rows_that_say_so(monkeypatch):
    args = arguments(monkeypatch, "--budget", "0.5", "--models", "base", "--heads", "pretraining")
    rows = rows_of(args)
    assert all(row["status"] == "skipped" for row in rows)
    assert [row["candidate"] for row in rows if row["step"] == "training"] == [
        "fastbert-bf16",
        "transformers-bf16",
        "torch_compile-bf16",
    ]
    assert re.match(r"[01] s left of --budget 0, about 14 s needed", rows[0]["error"])
    assert "skipped: " in report.row_line(rows[0])
    assert rows[0]["name"] == "training-fastbert-bf16-base-full-pretraining"


@pytest.mark.sweep
def test_a_group_that_fails_costs_the_next_nothing(monkeypatch):
    def fails(*_, **__):
        raise MemoryError("planted")
        yield

    args = arguments(monkeypatch, "--device", "cpu", "--models", "tiny", "--heads", "pretraining")
    args.steps, args.candidates, args.dtypes = ["training", "footprint"], ["fastbert"], ["bf16"]
    monkeypatch.setattr(training, "bench_training", fails)
    rows = rows_of(args)
    assert [(row["step"], row["status"]) for row in rows] == [("training", "error"), ("footprint", "ok")]
    assert rows[0]["error"] == "MemoryError: planted"


def test_ratios_are_speeds_or_shares_of_memory():
    facts = {"model": "base", "workload": "full", "head": "pretraining", "status": "ok"}

    def rows(step, key, group=None, **values):
        return [
            facts | {"step": step, "candidate": f"{n}-bf16", key: v, "group": group}
            for n, v in values.items()
        ]

    measured = [
        *rows("training", "median_ms", "plain", fastbert=20.0, transformers=50.0),
        *rows("training", "median_ms", "compile", fastbert=21.0, transformers=51.0, torch_compile=29.4),
        *rows("attention", "median_ms", fastbert=2.0, fastbert_other_bits=2.2),
        *(
            {**a, "above_mib": 1.0}
            for a in rows("training_memory", "peak_mib", fastbert=65.0, transformers=100.0)
        ),
    ]
    found = {(r["step"], r["theirs"], r["of"], round(r["ratio"], 3)) for r in groups.ratios(measured)}
    assert found == {
        ("training", "transformers-bf16", "median_ms", 2.5),
        ("training", "transformers-bf16", "median_ms", round(51 / 21, 3)),
        ("training", "torch_compile-bf16", "median_ms", 1.4),
        ("attention", "fastbert_other_bits-bf16", "median_ms", 1.1),
        ("training_memory", "transformers-bf16", "peak_mib", 0.65),
        ("training_memory", "transformers-bf16", "above_mib", 1.0),
    }
    text = [groups.ratio_line(r) for r in groups.ratios(measured)]
    assert any("0.65 of the peak_mib of transformers-bf16" in t for t in text)
