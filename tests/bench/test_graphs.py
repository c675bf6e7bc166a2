"""What a graphed call costs the host: the benchmark runs, and its calls are replayed."""

from __future__ import annotations

import json

import pytest

from bench import graphs
from bench.lib import report, schema


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
