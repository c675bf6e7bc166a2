"""The suite's files of whole models: their rows, records and files; speeds are not checked here."""

from __future__ import annotations

import json
import sys

import pytest

from bench.lib import analysis, mlperf, mlperf_records, turns, workloads
from tests.support.benches import ROOFS, TINY, suite

# --- MLPerf -------------------------------------------------------------------------------------------------


def test_squad_rows_have_the_records_rate_and_the_remarks(tmp_path):
    wanted = ("fastbert-fp32", "fastbert-int8")
    rows = list(mlperf.bench_squad(TINY, wanted, 1, tmp_path, ROOFS, windows=3, samples=2))
    assert [row["candidate"] for row in rows] == list(wanted)
    for row in rows:
        assert (row["status"], row["sequences"], row["tokens"]) == ("ok", 3, sum(workloads.draw_squad(3)))
        assert row["samples_per_s"] == pytest.approx(3e3 / row["median_ms"])
        assert row["cosine_to"] == "fastbert-fp32"
        assert row["remarks"] == mlperf_records.WORKLOADS["squad"].remarks()
        assert "samples/s" in " ".join(turns.told(row))


@pytest.mark.sweep
def test_train_rows_have_packs_per_second_and_failed_ones_none(monkeypatch):
    wanted = ("fastbert-fp32", "fastbert-bf16", "transformers-bf16")
    monkeypatch.setitem(sys.modules, "transformers", None)
    rows = {r["candidate"]: r for r in mlperf.bench_train(TINY, wanted, ROOFS, lengths=(16, 16), samples=1)}
    assert list(rows) == list(wanted)
    for name in wanted[:2]:
        assert rows[name]["packs_per_s"] == pytest.approx(2e3 / rows[name]["median_ms"])
        assert rows[name]["head"] == "pretraining"
    assert rows["transformers-bf16"]["status"] == "error"
    assert "packs_per_s" not in rows["transformers-bf16"]


@pytest.mark.parametrize("samples", [1, 2])
def test_an_ablation_is_compared_and_timed(samples):
    """With one sample the call whose result is compared is the timed one."""
    pytest.importorskip("transformers")
    rows = list(analysis.bench_analysis(TINY, "a", "ablation", samples=samples, lengths=(9, 17, 30)))
    ours, plain = rows
    assert [row["candidate"] for row in rows] == list(analysis.CANDIDATES)
    for row in rows:
        assert row["status"] == "ok", row
        assert row["cosine"] > 0.9999
        assert len(row["samples_ms"]) == samples
        assert row["median_ms"] > 0
    assert "timed_share" not in ours
    assert plain["timed_share"] == analysis.HEADS_TIMED / (TINY.layers * TINY.heads)


# --- whole files --------------------------------------------------------------------------------------------


RUNS = {
    (): {
        "training-base-8x128-classification": 4,
        "accelerate-minilm-ragged16": 3,
        "accelerate-guard-minilm-layer": 1,
        "accelerate-guard-minilm-model": 1,
        **{f"analysis-minilm-ragged16-{what}": 2 for what in ("forward", "statistics", "importance")},
        "encode-minilm-sentences200": 3,
        "encode-minilm-single40": 3,
    },
    ("--everything", "-k", "squad"): {"mlperf-large-squad": 5},  # a short run has nothing of it
}


@pytest.mark.sweep
@pytest.mark.parametrize("options", RUNS, ids=str)
def test_files_of_the_suite(options, tmp_path):
    files = ("mlperf",) if options else ("training", "accelerate", "analysis", "encode", "memory")
    written = tmp_path / "out.json"
    options_of_all = ["--samples", 2, "--benchmark-json", written, *options]
    done = suite(*(f"bench/suite/test_{file}.py" for file in files), *options_of_all, OMP_NUM_THREADS="2")
    printed, data = done.stdout, json.loads(written.read_text())
    assert done.returncode == 0, (printed + done.stderr)[-3000:]
    groups = [entry["group"] for entry in data["benchmarks"]]
    assert {name: groups.count(name) for name in groups} == RUNS[options]
    assert all(entry["extra_info"]["correct"] for entry in data["benchmarks"])
    assert data["fastbert"]["without_a_time"] == []
    assert all(name in printed for name in RUNS[options])
    if options:
        assert "9,224 samples/s per H200" in printed
        assert "not the same: this device" in printed
        return
    rows = {row["candidate"]: row for row in data["fastbert"]["memory"]}
    assert list(rows) == ["fastbert-fp32", "transformers-fp32"]
    ours, theirs = rows.values()
    assert {row["group"] for row in rows.values()} == {"memory-base-ragged16-forward"}
    assert ours["over"] == {"transformers-fp32": ours["peak_mib"] / theirs["peak_mib"]}
    assert f"{ours['peak_mib']:,.0f} MiB at most" in printed
