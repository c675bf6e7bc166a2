"""`bench_encoder`: the encoder beside a GPU's engines, tried on a CPU."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import encoder as gpu_encoder
from bench.gpu import engines as gpu_engines
from bench.gpu import groups
from bench.lib import encoder, lines, report, roofs, workloads
from tests.support.benches import LENGTHS, ROOFS, TINY


def test_the_gpu_engines_have_the_same_weights():
    bank = gpu_engines.Bank(TINY, "cpu")
    wanted = ("fastbert-bf16", "fastbert_graphs-bf16", "transformers_eager-bf16", "torch_encoder-bf16")
    rows = list(
        encoder.bench_encoder(TINY, "squad", encoder.build(bank, wanted), ROOFS, samples=1, lengths=LENGTHS)
    )
    assert [row["status"] for row in rows] == ["ok"] * 4, rows
    assert all(row["cosine"] > 0.9999 and row["cosine_to"] == "transformers_eager-bf16" for row in rows)
    with torch.no_grad():  # one changed weight is noticed
        bank.state["encoder.layer.1.output.dense.bias"][:5] += 3.0
    found = encoder.build(bank, wanted[:1]) | encoder.build(bank, wanted[3:])  # the first one exists already
    _, last = encoder.bench_encoder(TINY, "squad", found, ROOFS, samples=1, lengths=LENGTHS)
    assert last["cosine"] < 0.99


def test_graphs_that_are_not_replayed_are_an_error(monkeypatch):
    monkeypatch.setattr(gpu_engines, "MOST_TOKENS", 4)
    bank = gpu_engines.Bank(TINY, "cpu")
    found = encoder.build(bank, ("fastbert_graphs-bf16",))
    (row,) = encoder.bench_encoder(TINY, "squad", found, ROOFS, samples=1, lengths=LENGTHS)
    assert row["error"] == "RuntimeError: no graph was replayed: there are more than 4 tokens"


def test_samples_go_turn_by_turn_through_the_batches_and_the_first_is_compared():
    seen = []

    def forward(inputs):
        seen.append(inputs["input_ids"])
        return inputs["input_ids"][..., None].float().expand(-1, -1, TINY.hidden)

    rows = list(
        encoder.bench_encoder(
            TINY, "squad", {"fastbert-bf16": forward}, ROOFS, samples=4, sets=2, lengths=LENGTHS
        )
    )
    assert [row["n"] for row in rows] == [4]
    first, _, _, *timed = seen  # the first is compared, then each batch warms up
    assert len(timed) == 4
    assert not torch.equal(timed[0], timed[1])
    assert torch.equal(first, timed[0])
    assert torch.equal(timed[0], timed[2])
    assert torch.equal(timed[1], timed[3])
    assert rows[0]["inner"] == 1


def test_the_floor_counts_bytes_where_they_take_longer():
    one, many = (128,), (512,) * 32
    compute = workloads.encoder_flops(many, workloads.BASE) / 200e9
    assert encoder.floor_seconds(workloads.BASE, many, ROOFS, "bf16", whole=False) == pytest.approx(compute)
    assert encoder.floor_seconds(workloads.BASE, many, ROOFS, "bf16", whole=True) == pytest.approx(compute)
    slow = roofs.Roofs(ROOFS.gflops, 0.1)
    moved = 2 * (12 * 12 * 768 * 768 + 4 * 128 * 768)  # bf16: 12 layers of 12 hidden², and the tokens' rows
    assert encoder.floor_seconds(workloads.BASE, one, slow, "bf16", whole=True) == pytest.approx(moved / 1e8)


@pytest.mark.sweep
def test_an_encoder_budget_leaves_out_torch_compile_first(tmp_path, capsys, monkeypatch):
    options = ["--device", "cpu", "--models", "tiny", "--workloads", "squad", "--smoke", "--samples", "2"]
    options += ["--engines", "fastbert-bf16", "torch_compile", "--budget", "100"]
    table = tmp_path / "probe.jsonl"
    for row in (
        {"step": "matrix", "name": "matmul-torch-fp32-8", "status": "ok", "gflops": 100.0},
        {"step": "matrix", "name": "matmul-torch-bf16-8", "status": "ok", "gflops": 400.0},
        {"step": "gemm", "name": "linear-torch-bf16-8", "status": "ok", "gflops": 900.0},
        {"step": "bandwidth", "name": "copy-torch-fp32-8", "status": "ok", "gbs": 50.0},
    ):
        lines.append(table, "row", row)
    options += ["--roofs", str(table), "--json", str(tmp_path / "encoder.jsonl")]
    monkeypatch.setattr(gpu_encoder, "COMPILE_SECONDS", {"tiny": 1000.0})
    assert gpu_encoder.main(options) == 0
    data = lines.read(tmp_path / "encoder.jsonl")
    assert [(row["candidate"], row["status"]) for row in data["rows"]] == [
        ("fastbert-bf16", "ok"),
        ("torch_compile-bf16", "skipped"),
    ]
    assert "s left of --budget 100, about 1000 s needed" in data["rows"][1]["error"]
    assert data["roofs"] == {
        "gflops": {"fp32": 100.0, "fp16": 100.0, "bf16": 400.0, "int8": 400.0},
        "gbytes": 50.0,
    }
    assert data["finished"] is True
    assert data["rows"][0]["cosine"] == pytest.approx(1.0)
    printed = capsys.readouterr().out
    for row in data["rows"]:
        assert report.row_line(row) in printed


def test_ratios_are_of_engines_timed_together():
    def row(candidate, ms, group="plain", status="ok"):
        facts = {"step": "encoder", "model": "base", "workload": "full", "candidate": candidate}
        return facts | {"median_ms": ms, "group": group, "status": status}

    rows = [
        row("fastbert-bf16", 2.0),
        row("fastbert_graphs-bf16", 1.0),
        row("transformers_sdpa-bf16", 3.0),
        row("torch_encoder-bf16", 9.0, status="error"),
        row("transformers_sdpa_graphs-bf16", 1.5),
        row("fastbert-bf16", 4.0, "compile"),
        row("fastbert_graphs-bf16", 2.0, "compile"),
        row("torch_compile-bf16", 6.0, "compile"),
        row("torch_encoder-bf16", 5.0, "alone"),
        row("accelerated-bf16", 1.0),
    ]
    found = [(r["ours"], r["theirs"], r["ratio"]) for r in groups.ratios(rows)]
    assert found == [
        ("fastbert-bf16", "transformers_sdpa-bf16", 1.5),
        ("fastbert_graphs-bf16", "transformers_sdpa_graphs-bf16", 1.5),
        ("fastbert_graphs-bf16", "torch_compile-bf16", 3.0),
    ]
