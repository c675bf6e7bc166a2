"""Time by kernel: the rows of a whole run on a CPU, and what a failing candidate leaves."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import breakdown
from bench.lib import lines, schema
from tests.support.triton_fixtures import interpreted

OPTIONS = ["--device", "cpu", "--models", "tiny", "--samples", "1"]


@pytest.mark.sweep
@interpreted
def test_a_whole_run_has_the_kernels_of_every_call(tmp_path, capsys):
    file = tmp_path / "breakdown.jsonl"
    assert breakdown.main([*OPTIONS, "--json", str(file)]) == 0
    data = lines.read(file)
    assert data["finished"]
    batches = [("forward", batch) for batch in breakdown.FORWARDS] + [("training", "1x128")]
    expected = [(*what, who) for what in batches for who in ("fastbert", "transformers")]
    found = [(r["pass"], r["workload"], r["candidate"].split("-")[0].split("_")[0]) for r in data["rows"]]
    assert found == expected
    printed = capsys.readouterr().out
    for row in data["rows"]:
        times = [kernel["us"] for kernel in row["kernels"]]
        assert times == sorted(times, reverse=True)
        assert row["busy_ms"] * 1e3 >= sum(times) - 1e-6 > 0
        assert row["launches"] >= sum(kernel["launches"] for kernel in row["kernels"]) > 0
        assert row["wall_ms"] > 0
        assert bool(row["backends"]) is row["candidate"].startswith("fastbert")
        assert row["name"] in printed
    schema.check_rows(data)


def test_launches_and_times_are_of_one_call():
    x = torch.ones(64, 64)
    row = breakdown.measured(lambda: torch.mm(torch.mm(x, x), x), torch.device("cpu"), 1)
    launches = {kernel["kernel"]: kernel["launches"] for kernel in row["kernels"]}
    assert launches["aten::mm"] == 2
