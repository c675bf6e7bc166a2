"""The benchmarks run and say what they measured; how fast is not asked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastbert import dispatch, testing

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *arguments: object) -> dict:
    path = arguments[-1]
    command = [sys.executable, str(ROOT / "bench" / script), *map(str, arguments[:-1]), "--json", str(path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


def test_bench_cpu(tmp_path):
    options = ("--model", "tiny", "--workload", "1x128", "--only", "fastbert", "--only", "transformers")
    result = run("bench_cpu.py", *options, "--samples", 2, "--threads", 1, tmp_path / "cpu.json")
    rows = {row["candidate"]: row for row in result["rows"]}
    assert list(rows) == ["fastbert-fp32", "transformers-fp32", "fastbert-bf16", "transformers-bf16"]
    for row in rows.values():
        assert row["ms"] > 0
        assert row["n"] == 2
        assert row["cosine"] > 0.999


def test_bench_kernels(tmp_path):
    options = ("--op", "padding", "--workload", "1x128", "--dtype", "float32", "--threads", 1)
    result = run("bench_kernels.py", *options, tmp_path / "kernels.json")
    assert [(row["op"], row["backend"]) for row in result["rows"]] == [("padding", "aten")]
    assert result["rows"][0]["times_eager"] > 0


@pytest.mark.parametrize("op", dispatch.OPS)
def test_every_op_has_cases_to_time(op):
    found = testing.bench_cases(op, (5, 3))
    assert found
    for case in found:
        assert case.op == op
        assert case.flops() >= 0
        assert case.bytes(torch.float32) > 0
