"""`bench/lib/kernels.py`: every op has cases, and calls that compute the same."""

from __future__ import annotations

import json

import pytest
import torch

from bench.gpu import kernels as step
from bench.lib import kernels, report, roofs
from fastbert import testing
from fastbert.runtime import dispatch
from tests.support.benches import ROOFS


def test_the_step_prints_and_records_every_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(roofs, "measure", lambda *_: ROOFS)
    path = tmp_path / "kernels.json"
    options = ("--device", "cpu", "--op", "packing", "--workload", "1x128", "--dtype", "float32", "--smoke")
    assert step.main([*options, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    data = json.loads(path.read_text())
    rows = [row for row in data["rows"] if row["step"] == "kernels"]
    backends = kernels.timed_backends("packing", torch.device("cpu"), torch.float32)
    assert [(row["pass"], row["backend"]) for row in rows] == [
        (which, name) for which in kernels.PASSES for name in backends
    ]
    for row in rows:
        assert row["n"] >= 7
        assert row["of_roof"] == pytest.approx(row["gbs"] / data["roofs"]["gbytes"])
        assert row["times_torch"] == pytest.approx(row["torch_ms"] / row["median_ms"])
        assert report.row_line(row) in printed
    assert [row["serves"] for row in rows].count(True) == 2


@pytest.mark.parametrize("op", dispatch.OPS)
def test_every_op_has_cases_to_time(op):
    found = testing.bench_cases(op, (5, 3))
    assert found
    for case in found:
        assert case.op == op
        assert case.flops() >= 0
        assert case.bytes(torch.float32) > 0
        inputs = case.inputs(torch.float32, "cpu", 0)
        forward, backward = (kernels.work(case, torch.float32, inputs, b) for b in (False, True))
        assert forward == (case.flops(), case.bytes(torch.float32))
        assert backward[0] >= forward[0]
        assert backward[1] > 0


@pytest.mark.parametrize("lengths", [(5, 3, 11), (4, 4)])
@pytest.mark.parametrize("op", dispatch.OPS)
def test_the_plain_call_computes_what_ours_does(op, lengths):
    for case in testing.bench_cases(op, lengths):
        inputs = case.inputs(torch.float32, "cpu", 0)
        with torch.no_grad():
            plain = kernels.torch_call(case)(**kernels.torch_inputs(case, inputs))
            ours = kernels.our_call(case, inputs)(**inputs)
        if op == "attention":  # (batch, nheads, seqlen, headdim), padded
            plain = torch.cat([b.transpose(0, 1)[:n] for b, n in zip(plain, lengths, strict=True)])
        tolerance = {"linear_int8": 0.05, "linear_fp8": 0.3}.get(op, 1e-4)
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


def test_a_backward_has_every_gradient():
    [case] = testing.bench_cases("attention", (5, 3))
    inputs = case.inputs(torch.float32, "cpu", 0)
    call = kernels.one_call(case.call, case, inputs, backward=True)
    for again in (call(), call()):
        [dqkv] = again
        assert dqkv.shape == inputs["qkv"].shape
        assert (dqkv != 0).any()
    assert not inputs["qkv"].requires_grad


def test_packed_weights_are_used_where_a_backend_packs(monkeypatch):
    from fastbert.ops import linear_int8

    case = testing.bench_cases("linear_int8", (3,))[0]
    inputs = case.inputs(torch.float32, "cpu", 0)
    seen = []
    monkeypatch.setattr(
        linear_int8, "panel_maker", lambda device, dtype: lambda weight: weight.view(torch.uint8)
    )
    monkeypatch.setattr(linear_int8, "linear_int8", lambda **kwargs: seen.append(kwargs))
    kernels.our_call(case, inputs)(**inputs)
    assert torch.equal(seen[0]["panels"], inputs["weight"].view(torch.uint8))
    assert seen[0]["activation"] == case.activation
    assert set(inputs) < set(seen[0])
