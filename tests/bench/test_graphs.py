"""What a call costs the host: the benchmarks run, and graphed calls are replayed, plain ones one call."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench import graphs
from bench.lib import report, schema
from tests.support import cuda_build


@pytest.mark.sweep
def test_a_whole_run(tmp_path, capsys):
    options = ["--rounds", "1", "--calls", "2", "--out", str(tmp_path)]
    assert graphs.main(options) == 0
    data = json.loads((tmp_path / "graphs.json").read_text())
    assert data["finished"]
    expected = [("fastbert", lane, case) for lane in graphs.LANES for case in graphs.cases()]
    assert [(r["candidate"], r["lane"], r["case"]) for r in data["rows"]] == expected
    printed = capsys.readouterr().out
    for row in data["rows"]:
        assert 0 < row["min_ms"] <= row["median_ms"]
        assert (row["n"], row["inner"]) == (1, 2)
        assert report.row_line(row) in printed
    schema.check_rows(data)


@pytest.mark.sweep
def test_a_plain_call(tmp_path):
    """Every case runs its layers in one call of the extension."""
    cuda_build.emulated_extension()
    command = [sys.executable, "bench/host.py", "--calls", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=graphs.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "host.json").read_text())
    own, served = list(graphs.cases()), [r["case"] for r in data["rows"] if r.get("serving")]
    accelerated = [case for case in own if case != "first_token-1x128"]
    assert served == 2 * own + 2 * accelerated
    assert [r["case"] for r in data["rows"] if r.get("replayed")] == ["eager", "recorded"]
    assert all(0 < r["min_us"] <= r["median_us"] for r in data["rows"])
