"""Which backend served a timed row, and that nothing is checked while something is timed."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import precompile
from bench.lib import served
from fastbert.runtime import dispatch
from fastbert.testing import proving
from fastbert.testing.verdict_keys import Unit
from fastbert.testing.verdicts import Time, Verdict
from tests.support.triton_fixtures import interpreted


def test_a_row_of_ours_names_the_backend_of_every_op():
    found = served.backends("fastbert_graphs-bf16", "cpu", "bf16")
    assert set(found) == {f"{op} bf16" for op in dispatch.OPS}
    assert found["attention bf16"] == dispatch.serving_backend(
        "attention_fwd", torch.device("cpu"), torch.bfloat16
    )
    both = served.backends("accelerated-bf16", "cpu", "bf16 autocast")
    assert set(both) == {f"{op} {tag}" for op in dispatch.OPS for tag in ("bf16", "fp32")}
    assert served.backends("transformers_sdpa-bf16", "cpu", "bf16") == {}


def test_the_backends_are_those_that_serve_now():
    with dispatch.use_backend("reference", layer_norm="aten"):
        found = served.backends("fastbert-fp32", "cpu", "fp32")
    assert found.pop("layer_norm fp32") == "aten"
    assert set(found.values()) == {"reference"}


def test_on_a_gpu_kinds_of_calls_are_apart(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "serving_backend", lambda *call: asked.append(call) or "aten")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    found = served.backends("fastbert-bf16", "cuda", "bf16")
    assert {"linear bf16", "linear activation bf16", "feed_forward bf16"} <= set(found)
    assert {"attention bf16", "attention training bf16"} <= set(found)
    assert ("attention_fwd training", torch.device("cuda", 2), torch.bfloat16) in asked
    assert ("linear_fwd activation", torch.device("cuda", 2), torch.bfloat16) in asked
    assert {device for _, device, _ in asked} == {torch.device("cuda", 2)}


@pytest.mark.parametrize(
    ("name", "backend", "other"),
    [
        ("attention bf16", "cuda", False),
        ("attention fp32", "triton", False),
        ("attention bf16", "aten", True),
        ("attention training bf16", "aten", True),
        ("linear bf16", "aten", False),
        ("linear bf16", "triton", True),
        ("linear activation bf16", "aten", True),
        ("linear activation training bf16", "triton", False),
        ("linear activation fp32", "aten", False),
        ("feed_forward bf16", "aten", True),
        ("feed_forward fp32", "reference", True),
    ],
)
def test_what_is_not_the_tables_first_is_told(name, backend, other):
    assert served.others({name: backend}, "cuda") == ({name: backend} if other else {})
    told = served.told([{}, {name: backend}], "cuda")
    assert told == (f"{name} by {backend}" if other else "")


def test_every_kernel_is_checked_before_anything_is_timed(monkeypatch):
    asked = []

    def run(device, ops=None, dtypes=None):
        asked.append((device, ops, set(dtypes)))
        times = (Time("5x96", "forward", 1.0, "aten", 2.0),)
        yield Unit("linear", "triton", torch.bfloat16), Verdict(None, times=times)

    monkeypatch.setattr(proving, "warm_up", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    (row,) = served.prove("cuda")
    assert asked == [(torch.device("cuda", 1), None, {torch.bfloat16, torch.float32})]
    assert row["times"] == [
        {"case": "5x96", "passes": "forward", "ms": 1.0, "other": "aten", "other_ms": 2.0}
        | {"host_ms": None, "other_host_ms": None}
    ]
    assert {name: row[name] for name in ("op", "backend", "dtype", "outcome", "reason")} == {
        "op": "linear",
        "backend": "triton",
        "dtype": "bfloat16",
        "outcome": "passed",
        "reason": None,
    }


# --- compiling ahead ----------------------------------------------------------------------------------------


@pytest.mark.sweep
@interpreted
@pytest.mark.parametrize(
    "unit",
    [unit for unit in precompile.units(tiny=True) if isinstance(unit, precompile.Unit)],
    ids=lambda unit: unit.name,
)
def test_what_is_compiled_ahead_is_what_a_gpu_runs(unit, monkeypatch):
    """Each op whose calls the table gives to Triton, where a model of that pass has it."""
    used = set()
    real = dispatch._serving

    def noting(function, *rest):
        name, lasting = real(function, *rest)
        used.add((function.partition(" ")[0], name))
        return name, lasting

    monkeypatch.setattr(dispatch, "_serving", noting)
    precompile.compiled(unit, torch.device("cpu"))
    found = {function for function, name in used if name == "triton"}
    assert {"attention_fwd", "layer_norm_fwd", "embedding_fwd", "linear_fwd"} <= found
    backward = {"attention_bwd", "layer_norm_bwd", "embedding_bwd", "linear_bwd"}
    assert (backward <= found) is unit.training


def test_on_a_gpu_tritons_kernels_serve_unchecked():
    with precompile.unproven(torch.device("cuda", 0)):
        facts = "attention", torch.device("cuda", 0), torch.bfloat16, "training"
        assert proving.is_proven("triton", *facts)
        assert not proving.is_proven("cuda", *facts)
    assert dispatch.pins() == ()
