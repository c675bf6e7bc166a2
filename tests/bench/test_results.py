"""The files of bench/results are as their schema says, and the page of tables is made from them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from bench import plot
from bench.lib import results, roofs, schema, tables
from tests.support import suite_files

SUITE = sorted(results.RESULTS.glob(f"*/{results.SUITE_FILES}"))
WITH_ROWS = sorted(set(results.RESULTS.glob("*/*.json")) - set(SUITE))


def written(folder: Path, number: int = 1, **options: object) -> Path:
    """A made-up file of the suite in a folder, named as pytest-benchmark names it."""
    data = suite_files.suite_file(**options)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:04}_{data['commit_info']['id']}_20261101_100000.json"
    path.write_text(json.dumps(data))
    return path


# --- committed files ----------------------------------------------------------------------------------------


def test_every_file_of_the_suite_is_as_its_schema_says():
    """Not parametrised: there may be none yet."""
    for path in SUITE:
        run = results.read(path)
        assert path.parent.name == run.machine["slug"], path
        assert path.name.split("_")[1] == run.commit, path
        assert not run.smoke, f"{path}: a smoke run is no result"
        assert run.benchmarks or run.memory, path


@pytest.mark.parametrize("path", WITH_ROWS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_file_with_rows_is_as_its_schema_says(path):
    data = results.load(path)
    schema.check_rows(data)
    assert path.parent.name == data["environment"]["slug"]


def test_the_page_of_tables_is_made_from_the_files():
    assert plot.main(["tables", "--check"]) == 0, "run python bench/plot.py tables"


# --- reading ------------------------------------------------------------------------------------------------


def test_a_run_is_read_with_its_types(tmp_path):
    run = results.read(written(tmp_path))
    assert (run.commit, run.changed, run.note, run.smoke) == (suite_files.COMMIT, False, None, False)
    assert run.roofs == roofs.Roofs(suite_files.ROOFS["gflops"], 20.0)
    assert [each["candidate"] for each in run.without_a_time] == ["openvino-fp32"]
    assert len(run.of("encoder")) == 4
    first, last = run.benchmarks[0], run.benchmarks[-1]
    assert (first.group, first.candidate, first.seconds) == ("encoder-base-8x128", "fastbert-fp32", 1.0)
    assert (first.kind, first.ours, first.share, first.rounds) == ("encoder", True, 0.5, 3)
    assert (last.kind, last.ours, last.share) == ("ops", False, 0.8)


def test_the_newest_run_of_each_device(tmp_path):
    days = [f"2026-11-{day:02}T10:00:00+00:00" for day in (1, 2, 3)]
    written(tmp_path / "b", 2, date=days[0])
    written(tmp_path / "b", 1, date=days[2], commit="b" * 40)
    written(tmp_path / "a", 1, date=days[1], commit="a" * 40)
    (tmp_path / "a" / "probe.json").write_text("{}")
    (tmp_path / "README.md").write_text("")
    assert [run.commit[0] for run in results.newest(tmp_path)] == ["a", "b"]
    assert [run.date for run in results.read_all(tmp_path / "b")] == [days[0], days[2]]


def test_a_run_of_a_part_is_not_the_newest(tmp_path):
    first = written(tmp_path / "a", 1, date="2026-11-01T10:00:00+00:00")
    part = json.loads(first.read_text())
    last = part["benchmarks"][-1]["group"]
    part["benchmarks"] = [each for each in part["benchmarks"] if each["group"] == last]
    part["datetime"] = "2026-11-02T10:00:00+00:00"
    (first.parent / first.name.replace("0001", "0002")).write_text(json.dumps(part))
    assert len(results.read_all(tmp_path / "a")) == 2
    assert [run.date for run in results.newest(tmp_path)] == ["2026-11-01T10:00:00+00:00"]


# each: where a value is put, or None to take the key away, and what the error says
FAULTS = [
    ("fastbert.commit", "f" * 40, "fastbert.commit: got ffff"),
    ("fastbert.roofs.gflops.fp32", 0, "fastbert.roofs.gflops.fp32: 0 is less than or equal to"),
    ("benchmarks.1.extra_info.candidate", "other-fp32", r"\[1\].extra_info.candidate: got other-fp32"),
    ("benchmarks.0.extra_info.tokens_per_s", 900.0, r"tokens_per_s: got 900, expected 1024 from tokens and"),
    ("benchmarks.0.extra_info.over.transformers-fp32", 3.0, "got 3, expected 2 from the figures of fastbert"),
    ("benchmarks.0.extra_info.over.no-fp32", 1.5, "over.no-fp32: a ratio, and encoder-base-8x128 has"),
    ("fastbert.memory.0.over.transformers-fp32", 2.0, r"\[0\].over.transformers-fp32: got 2, expected 0.5"),
    ("fastbert.memory.1.candidate", "x", r"memory\[0\].over.transformers-fp32: a ratio, and memory-base-"),
    ("benchmarks.0.stats.rounds", 7, r"benchmarks\[0\].stats.data: 3 samples, expected stats.rounds"),
    ("benchmarks.0.stats.data.0", 0.5, r"stats.median: got 1, expected 0.99 from stats.data"),
    ("benchmarks.4.extra_info.gflops", 81.0, "gflops: got 81, expected 80 from flops and stats.median"),
]


def changed(data: dict, where: str, value: object) -> dict:
    """A copy of `data` with another value at a path of keys; None takes the key away."""
    data = copy.deepcopy(data)
    *path, last = (int(key) if key.isdigit() else key for key in where.split("."))
    inner = data
    for key in path:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(("where", "value", "message"), FAULTS, ids=[fault[2][:40] for fault in FAULTS])
def test_a_fault_is_named(where, value, message):
    good = suite_files.suite_file()
    schema.check(good)
    with pytest.raises(ValueError, match=message):
        schema.check(changed(good, where, value))


# --- the tables ---------------------------------------------------------------------------------------------


def page_of(tmp_path: Path) -> tuple[Path, list[str]]:
    """(a page with the two markers, the command's options)."""
    page = tmp_path / "page.md"
    page.write_text(
        f"Before\n<!-- suite results: made by `{tables.COMMAND}` -->\n<!-- end of suite results -->\n"
    )
    return page, ["tables", "--page", str(page), "--results", str(tmp_path / "results")]


def test_tables_of_a_run(tmp_path, capsys):
    page, options = page_of(tmp_path)
    path = written(tmp_path / "results" / suite_files.SLUG)
    assert plot.main([*options, "--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert plot.main(options) == 0
    assert plot.main([*options, "--check"]) == 0
    text = page.read_text()
    assert text.startswith("Before\n<!-- suite results")
    assert (
        f"`bench/results/{suite_files.SLUG}/{path.name}`; commit 012345678; 2026-11-01; roofs: fp32 100"
        in text
    )
    assert "| base-8x128 | fastbert-fp32 | 1,000.0 ms | 1,024 tokens/s | 50% | 2.00 |" in text
    assert "| base-ragged16 | fastbert-fp32 | 2,000.0 ms | 1,024 tokens/s | 50% | 4.00 |" in text
    assert "| linear-1024x768x768-fp32-forward | cpu-fp32 | 12.5 ms | 80.0 GFLOP/s | 80% | 1.60 |" in text
    assert "| packing-8x128-fp32-forward | cpu-fp32 | 1,000 µs | 10.0 GB/s | 80% | noisy |" in text
    assert "| base-ragged64 | fastbert-fp32 | 500 MiB | 100 MiB | 0.50 | error |" in text
    assert "- no time of `openvino-fp32` in encoder-base-8x128: not installed" in text
    assert "| transformers-fp32 |" not in text  # a peer has no row of its own


def test_tables_say_what_is_noisy_or_wrong():
    data = suite_files.suite_file()
    data["benchmarks"][0]["extra_info"] |= {"noisy": True, "correct": False}
    first = data["benchmarks"][0]
    each = results.Benchmark(first["group"], "fastbert-fp32", {}, 1.0, 3, first["extra_info"])
    head, _, row = tables.kind_table([each])
    assert head == "| group | ours | time | rate | of roof | × transformers |"
    assert row.startswith("| base-8x128 | fastbert-fp32 (incorrect) | ~1,000.0 ms | 1,024 tokens/s |")
    first["extra_info"]["p90_ms"] = 1234.5
    assert "| p90 1,234.50 ms |" in tables.kind_table([each])[2]
