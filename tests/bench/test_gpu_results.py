"""What `make gpu` writes of a run: merged files, charts and README rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu import prove, records
from bench.lib import lines

ENVIRONMENT = {
    "device_type": "cuda",
    "device": "NVIDIA H999",
    "slug": "nvidia-h999",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "driver": "580.1",
}


def encoder_row(candidate: str, workload: str, ms: float, group: str = "plain", **facts) -> dict:
    row = {"step": "encoder", "name": f"encoder-{candidate}-base-{workload}", "status": "ok", "model": "base"}
    row |= {"candidate": candidate, "workload": workload, "median_ms": ms, "of_floor": 0.5, "group": group}
    return row | facts


MATRIX = """Before
<!-- proven kernels: made by `python bench/gpu/prove.py readme` -->
<!-- end of proven kernels -->
after
"""


@pytest.fixture
def pages(tmp_path) -> tuple[Path, Path, list[str]]:
    """(the page of numbers, the op matrix, the options that name them)."""
    readme, matrix = tmp_path / "README.md", tmp_path / "matrix.md"
    readme.write_text(MARKED)
    matrix.write_text(MATRIX)
    return readme, matrix, ["--readme", str(readme), "--matrix", str(matrix)]


@pytest.fixture
def finished(tmp_path) -> Path:
    """The made-up files of a run on a GPU."""
    folder = tmp_path / "out"
    head = {"schema": 1, "date": "2026-11-30T10:00:00+00:00", "commit": None, "changed": None}
    for name in ("checks", "encoder"):
        lines.append(folder / f"{name}.jsonl", "head", head | {"environment": ENVIRONMENT})
    lines.append(folder / "steps.jsonl", "head", head | {"finished": True})
    lines.append(folder / "steps.jsonl", "step", {"step": "build", "status": "ok"})
    for case, status in enumerate(("ok", "failed", "skipped", "ok")):
        row = {"step": "correctness", "name": f"linear-{case}", "status": status}
        lines.append(folder / "checks.jsonl", "row", row)
    lines.append(
        folder / "encoder.jsonl", "head", {"roofs": {"gflops": {"bf16": 788_000.0}, "gbytes": 4300.0}}
    )
    for row in (
        encoder_row("fastbert-bf16", "full", 99.0),  # measured again below
        encoder_row("fastbert-bf16", "full", 6.0),
        encoder_row("fastbert_graphs-bf16", "full", 5.5),
        encoder_row("transformers_sdpa-bf16", "full", 11.0),
        encoder_row("transformers_eager-bf16", "full", 22.0, "plain"),
        encoder_row("transformers_flash2-bf16", "full", 0.0) | {"status": "error", "error": "not installed"},
        encoder_row("fastbert-bf16", "full", 6.2, "compile"),
        encoder_row("fastbert_graphs-bf16", "full", 6.2, "compile"),
        encoder_row("torch_compile-bf16", "full", 9.3, "compile"),
    ):
        lines.append(folder / "encoder.jsonl", "row", row)
    lines.append(folder / "tuning.jsonl", "head", head | {"environment": ENVIRONMENT})
    row = {"step": "tuning", "name": "linear k 7", "status": "ok", "entry": ["linear", "k", 7]}
    lines.append(folder / "tuning.jsonl", "row", row | {"config": {"block_m": 64}})
    return folder


def test_merge_keeps_a_run_with_commit_date_and_versions(finished, tmp_path):
    results, tuned = tmp_path / "results", tmp_path / "tuned.json"
    *paths, last = records.merge(finished, results, tuned)
    assert last == tuned
    entries = {"device": "NVIDIA H999", "linear": {"k": {"7": {"block_m": 64}}}}
    assert json.loads(tuned.read_text()) == entries
    assert [path.name for path in paths] == ["steps.json", "checks.json", "encoder.json", "tuning.json"]
    assert {path.parent for path in paths} == {results / "nvidia-h999"}
    for path in paths:
        data = json.loads(path.read_text())
        assert data["environment"] == ENVIRONMENT  # steps.jsonl itself does not know it
        assert data["commit"] == records.commit_here()["commit"]
        assert "no git" in data["commit_of"]
        assert data["date"] == "2026-11-30T10:00:00+00:00"
        assert data["merged"] >= data["date"][:4]
    data = json.loads((results / "nvidia-h999" / "encoder.json").read_text())
    assert [row["median_ms"] for row in data["rows"] if row["candidate"] == "fastbert-bf16"] == [6.0, 6.2]
    ratios = {(r["ours"], r["theirs"]): round(r["ratio"], 3) for r in data["ratios"]}
    assert ratios == {
        ("fastbert-bf16", "transformers_sdpa-bf16"): 1.833,
        ("fastbert-bf16", "transformers_eager-bf16"): 3.667,
        ("fastbert_graphs-bf16", "torch_compile-bf16"): 1.5,
    }


def test_commits_can_be_stated_and_rows_say_whose_they_are(finished, tmp_path):
    other = tmp_path / "other"
    lines.append(
        other / "checks.jsonl", "head", {"environment": ENVIRONMENT, "date": "2026-12-01T10:00:00+00:00"}
    )
    lines.append(other / "checks.jsonl", "row", {"step": "graphs", "name": "g", "status": "ok"})
    commits = ["a" * 40, "b" * 40]
    records.merge([finished, other], tmp_path / "results", tmp_path / "tuned.json", commits)
    data = json.loads((tmp_path / "results" / "nvidia-h999" / "checks.json").read_text())
    assert (data["commit"], data["changed"], data["commit_of"]) == (
        "b" * 40,
        False,
        "stated when it was merged",
    )
    assert [row["commit"][0] for row in data["rows"]] == ["a"] * (len(data["rows"]) - 1) + ["b"]
    where = records.where(data, tmp_path / "results" / "x.json", tmp_path / "results")
    assert "commit bbbbbbbbb (some rows aaaaaaaaa), " in where
    # a file of one run says it once
    data = json.loads((tmp_path / "results" / "nvidia-h999" / "encoder.json").read_text())
    assert data["commit"] == "a" * 40
    assert not any("commit" in row for row in data["rows"])
    with pytest.raises(ValueError, match="--commit: got 1, expected one for each of 2 runs"):
        records.merge([finished, other], tmp_path / "results", tmp_path / "tuned.json", commits[:1])


MARKED = """# Title
<!-- gpu numbers: made by `python bench/gpu/prove.py readme` -->
old
<!-- end of gpu numbers -->
end
"""


def test_merge_puts_the_numbers_into_the_readme(finished, tmp_path, pages):
    results, readme = tmp_path / "results", pages[0]
    options = ["--results", str(results), *pages[2]]
    assert prove.main(["merge", str(finished), *options, "--tuned", str(tmp_path / "tuned.json")]) == 0
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith("# Title\n<!-- gpu numbers")
    assert text.endswith("<!-- end of gpu numbers -->\nend\n")
    assert "NVIDIA H999, bf16" in text
    assert "788 TFLOP/s and 4.3 TB/s" in text
    assert "Triton 3.6.0, driver 580.1" in text
    assert "bench/results/nvidia-h999/encoder.json" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows == [
        "| | base 32x512 |",
        "|---|---|",
        "| **fastbert** | 6.00 (50%) |",
        "| **fastbert, CUDA graphs** | 5.50 (50%) |",
        "| transformers eager | 22.00 (50%) |",
        "| transformers sdpa | 11.00 (50%) |",
        "| transformers, torch.compile max-autotune | 9.30 (50%) |",
        "| eager over the best eager peer | 1.83 × |",
        "| graphs over the best graphed peer | 1.50 × |",
    ]
    assert "Checks on this GPU: correctness 1 failed, 2 ok, 1 skipped." in text.replace("\n", " ")
    assert prove.main(["readme", "--check", *options]) == 0
    readme.write_text(text.replace("6.00", "5.00"))
    assert prove.main(["readme", "--check", *options]) == 1
    assert "5.00" in readme.read_text()  # a check writes nothing


def second_run(folder: Path, **facts) -> Path:
    """A later call of `make gpu` on the same machine: one row measured again, one new, and checks."""
    head = {"schema": 1, "date": "2026-11-30T11:00:00+00:00", "environment": ENVIRONMENT | facts}
    for name in ("encoder", "checks", "tuning"):
        lines.append(folder / f"{name}.jsonl", "head", head)
    lines.append(folder / "encoder.jsonl", "row", encoder_row("fastbert-bf16", "full", 5.0))
    lines.append(folder / "encoder.jsonl", "row", encoder_row("fastbert-bf16", "squad", 3.0))
    row = {"step": "determinism", "name": "linear", "status": "ok"}
    lines.append(folder / "checks.jsonl", "row", row)
    row = {"step": "tuning", "name": "linear k 8", "status": "ok", "entry": ["linear", "k", 8]}
    lines.append(folder / "tuning.jsonl", "row", row | {"config": {"block_m": 128}})
    return folder


def test_what_a_run_proves_is_shipped(finished, tmp_path):
    key = {"op": "linear", "device": "NVIDIA H999", "source": "1"}
    facts = {"outcome": "passed", "reason": None, "date": "2026-11-27", "times": [], "key": key}
    row = {"step": "selfcheck", "name": "linear-triton-bf16", "status": "ok"} | facts
    lines.append(finished / "checks.jsonl", "head", {"commit": "a" * 40, "changed": False})
    lines.append(finished / "checks.jsonl", "row", row)
    paths = records.merge(finished, tmp_path / "results", tmp_path / "tuned.json", (), tmp_path)
    assert tmp_path / "nvidia-h999.json" in paths
    assert json.loads((tmp_path / "nvidia-h999.json").read_text()) == {
        "device": "NVIDIA H999",
        "proofs": [{"commit": "a" * 40} | facts],
    }


@pytest.mark.parametrize("archived", [False, True])
def test_parts_are_merged_into_one_another(finished, tmp_path, archived):
    parts = [finished, second_run(tmp_path / "b")]
    if archived:
        for folder in parts:
            prove.pack(folder, "run.tar")
        parts = [folder / "run.tar" for folder in parts]
    results, tuned = tmp_path / "results", tmp_path / "tuned.json"
    paths = records.merge(parts, results, tuned)
    assert paths.count(tuned) == 1
    assert set(json.loads(tuned.read_text())["linear"]["k"]) == {"7", "8"}
    data = json.loads((results / "nvidia-h999" / "encoder.json").read_text())
    assert data["date"] == "2026-11-30T11:00:00+00:00"
    assert data["roofs"]["gbytes"] == 4300.0  # the first part's
    mine = [(r["workload"], r["median_ms"]) for r in data["rows"] if r["candidate"] == "fastbert-bf16"]
    assert mine == [("full", 6.2), ("full", 5.0), ("squad", 3.0)]  # 6.2: beside torch.compile
    steps = {row["step"] for row in json.loads((results / "nvidia-h999" / "checks.json").read_text())["rows"]}
    assert steps == {"correctness", "determinism"}
    assert not list(tmp_path.glob("results/*/steps.jsonl"))


def test_runs_on_two_devices_are_not_mixed(finished, tmp_path):
    other = second_run(tmp_path / "b", device="NVIDIA H998")
    for parts in ([finished, other], [other, finished]):
        with pytest.raises(ValueError, match="runs on NVIDIA H998 and NVIDIA H999: merge them one by one"):
            records.merge(parts, tmp_path / "results", tmp_path / "tuned.json")
    dry = second_run(tmp_path / "c", device_type="cpu")
    with pytest.raises(ValueError, match="a dry run on a CPU is no result"):
        records.merge([finished, dry], tmp_path / "results", tmp_path / "tuned.json")
    assert not (tmp_path / "results").exists()


def test_a_row_that_another_backend_served_is_marked(finished, tmp_path, pages):
    first = {"attention bf16": "triton", "linear bf16": "aten", "linear activation bf16": "triton"}
    rows = [
        encoder_row("fastbert-bf16", "full", 6.0, backends=first | {"attention bf16": "aten"}),
        encoder_row("fastbert_graphs-bf16", "full", 5.5, backends=first),
        encoder_row("transformers_sdpa-bf16", "full", 11.0, backends={}),
    ]
    for row in rows:
        lines.append(finished / "encoder.jsonl", "row", row)
    row = {"step": "training", "name": "t", "status": "ok", "model": "base", "workload": "full"}
    row |= {"candidate": "fastbert-bf16", "head": "pretraining", "median_ms": 9.0, "of_floor": 0.5}
    row |= {"group": "plain", "backends": {"layer_norm fp32": "aten", "layer_norm bf16": "triton"}}
    lines.append(finished / "training.jsonl", "head", {"date": "2026-11-30", "environment": ENVIRONMENT})
    lines.append(finished / "training.jsonl", "row", row)
    options = ["--results", str(tmp_path / "results"), *pages[2]]
    assert prove.main(["merge", str(finished), *options, "--tuned", str(tmp_path / "tuned.json")]) == 0
    text = pages[0].read_text()
    assert "| **fastbert** | 6.00 (50%) † |" in text
    assert "| **fastbert, CUDA graphs** | 5.50 (50%) |" in text
    assert "† Ops that another than their first backend serves: attention bf16 by aten." in text
    assert "| **fastbert** | 9.0 (50%) † |" in text
    assert "† Ops that another than their first backend serves: layer_norm fp32 by aten." in text


def test_proven_kernels_are_marked_in_the_matrix(finished, tmp_path, pages):
    good = ["attention-triton-bf16-a", "attention-triton-bf16-b", "linear-triton-fp16-a"]
    rows = [{"step": "correctness", "name": name, "status": "ok"} for name in good]
    rows.append({"step": "correctness", "name": "linear-triton-bf16-a", "status": "ok"})
    rows.append({"step": "correctness", "name": "linear-triton-bf16-b", "status": "failed"})
    rows.append({"step": "determinism", "name": "pooling-triton-bf16", "status": "ok"})
    rows.append({"step": "correctness", "name": "linear_cross_entropy-triton-fp32-a", "status": "ok"})
    for row in rows:
        lines.append(finished / "checks.jsonl", "row", row)
    options = ["--results", str(tmp_path / "results"), *pages[2]]
    assert prove.main(["merge", str(finished), *options, "--tuned", str(tmp_path / "tuned.json")]) == 0
    text = pages[1].read_text()
    assert text.startswith("Before\n")
    assert text.endswith("\nafter\n")
    assert "| op | kernels | NVIDIA H999 |" in text
    assert "| `attention` | `triton` | bf16 |" in text
    assert "| `linear` | `triton` | fp16 |" in text  # in bf16 one case failed
    assert "| `linear_cross_entropy` | `triton` | fp32 |" in text
    assert "| `pooling` | `triton` | – |" in text
    assert "| `layer_norm` | `cuda` | – |" in text
    assert "bench/results/nvidia-h999/checks.json" in text
    assert prove.main(["readme", "--check", *options]) == 0
    pages[1].write_text(text.replace("| bf16 |", "| fp32 |"))
    assert prove.main(["readme", "--check", *options]) == 1


def test_the_committed_readme_is_what_bench_results_say():
    text = records.PAGE.read_text()
    assert records.filled(text, records.sections()) == text, "run `python bench/gpu/prove.py readme`"
    text = records.MATRIX.read_text()
    assert records.filled(text, records.matrix()) == text, "run `python bench/gpu/prove.py readme`"
