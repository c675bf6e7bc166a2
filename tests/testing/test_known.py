"""The shipped table of proofs: its kernels serve at once, kernels that it lacks or contradicts do not."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.lib import proven
from fastbert.runtime import dispatch, loader, namespaces
from fastbert.runtime.table import TABLE
from fastbert.testing import checking, error_rule, proving, serving, speed, verdict_keys, verdicts
from fastbert.testing.verdict_keys import Unit
from fastbert.testing.verdicts import Verdict
from tests.support.fake_backends import fake_backend, run

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
LAYER_NORM = Unit("layer_norm", "triton", torch.float32)
COMMIT = "0123456789" * 4
TIMES = [["5x96", "forward", 1.0, "aten", 2.0], ["5x96", "training", 3.0, "aten", 2.0]]


@pytest.fixture
def table(nothing_known, tmp_path, monkeypatch):
    """A function that ships a verdict on layer_norm; a kernel that runs before it serves fails the test."""
    monkeypatch.setattr(verdicts, "FOLDER", tmp_path)
    verdicts._table.cache_clear()
    monkeypatch.setattr(checking, "DEVICES", ("cpu",))
    monkeypatch.setattr(checking, "checked", lambda *args, **options: pytest.fail("checked"))
    monkeypatch.setattr(error_rule, "self_check", lambda *args: pytest.fail("checked"))
    fake_backend(monkeypatch)

    def ship(outcome="passed", reason=None, times=(), **changes):
        key = verdict_keys.proof_key_of(Unit("layer_norm", "triton", torch.float32), CPU) | changes
        row = {"step": "selfcheck", "outcome": outcome, "reason": reason, "date": "2026-11-27T18:40:30Z"}
        proven.merge([row | {"times": times, "key": key}], COMMIT, tmp_path)
        verdicts._table.cache_clear()

    yield ship
    verdicts._table.cache_clear()


def served_by(kind=""):
    return dispatch.serving_backend(f"layer_norm_fwd {kind}".rstrip(), CPU, torch.float32)


@pytest.mark.parametrize("outcome", ["passed", "slower"])
def test_what_is_known_is_not_checked(table, cache, monkeypatch, outcome):
    """A proven kernel serves at once, in a graph's capture too, and a slower one does not."""
    table(outcome, None if outcome == "passed" else "slower than aten: 2.00 x its time")
    monkeypatch.setattr(proving, "_capturing", lambda device: True)
    with warnings.catch_warnings(action="error"):
        run()
    assert served_by() == ("triton" if outcome == "passed" else "aten")
    assert not cache.exists()  # and nothing is written


def test_its_times_decide_which_calls_it_serves(table, monkeypatch):
    for line in ("layer_norm", "layer_norm training"):
        monkeypatch.setitem(TABLE["cpu"], line, ("triton", "aten", "reference"))
    table(times=TIMES)
    assert served_by() == "triton"
    assert served_by("training") == "aten"
    ((unit, found),) = proving.warm_up(CPU, dtypes=[torch.float32])
    assert serving.beside(found, unit.op, "cpu") == (
        ", forward 0.50 x the time of aten, training 1.50 x the time of aten (does not serve)"
    )
    assert (found.kept, found.commit) == (False, COMMIT)


def test_another_kernel_is_timed_beside_it(table, monkeypatch):
    table()
    monkeypatch.setitem(TABLE["cpu"], "layer_norm", ("cuda", "triton", "aten", "reference"))
    case = error_rule.bench_cases("layer_norm", (5,))[0]
    assert speed._next("cuda", case, CPU, torch.float32, False) == "triton"


def test_a_proof_of_anything_else_does_not_count(table):
    for part in ("source", "tuned", "device", "capability", "triton", "torch", "dtype"):
        table(**{part: "another"})
        assert verdicts.known(LAYER_NORM, CPU) is None, part


def test_a_verdict_of_this_machine_overrides_the_table(table):
    table("slower", "slower than aten: 2.00 x its time")
    key = verdict_keys.key_of(Unit("layer_norm", "triton", torch.float32), CPU)
    for reason in (None, "wrong"):
        verdicts.store(key, Verdict(reason))
        found = verdicts.known(LAYER_NORM, CPU)
        assert (found.reason, found.kept, found.commit) == (reason, True, "")


def test_again_checks_a_proven_kernel(table, monkeypatch):
    table()
    asked = []
    monkeypatch.setattr(
        checking,
        "checked",
        lambda device, units, **_: asked.extend(units) or [(LAYER_NORM, Verdict("wrong"))],
    )
    for again in (False, True):
        ((_, verdict),) = proving.warm_up(CPU, dtypes=[torch.float32], again=again)
        assert verdict.passed is not again
        assert asked == [LAYER_NORM] * again


# --- keys ---------------------------------------------------------------------------------------------------


def test_a_wheel_knows_the_sources_of_its_cuda_kernels(monkeypatch):
    built = {"cuda_sources": "attention=a;layer_norm=b;linear=c", "cuda_archs": "80;90a;120", "nvcc": "13.0"}
    monkeypatch.setattr(verdict_keys, "_device_facts", lambda device: ("NVIDIA H200", "9.0", "580"))

    def key(op="linear", **changes):
        monkeypatch.setattr(loader, "extension", SimpleNamespace(**(built | changes)))
        verdict_keys.kernel_hash.cache_clear()
        return verdict_keys.proof_key_of(Unit(op, "cuda", torch.bfloat16), GPU)

    found = key()
    assert (found["nvcc"], found["arch"]) == ("13.0", "90a")
    assert "triton" not in found
    # the other architectures in the extension change nothing here
    assert key(cuda_archs="90a") == found
    assert key(cuda_archs="80;120")["arch"] == "80;120"
    other = {"cuda_sources": "attention=a;layer_norm=b;linear=other"}
    for op, differs in (("linear", True), ("feed_forward", True), ("layer_norm", False)):
        assert (key(op, **other)["source"] != key(op)["source"]) is differs
    assert key(cuda_sources="") is None
    monkeypatch.setattr("fastbert.backends.cuda.linear.EXACT_GELU", True)
    assert key() is None
    assert key("layer_norm") is not None
    verdict_keys.kernel_hash.cache_clear()


def test_comments_in_cuda_sources_change_no_proof(tmp_path):
    tree = ast.parse((ROOT / "setup.py").read_text())
    wanted = [
        node
        for node in tree.body
        if getattr(node, "name", "") == "cuda_sources"
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "COMMENT")
    ]
    names = {"hashlib": hashlib, "re": re, "Path": Path, "CSRC": tmp_path}
    exec(compile(ast.Module(wanted, []), "setup.py", "exec"), names)
    before = '#include "tile.h"\nint f() { return 1; }  // one\n/* two\n   three */ char* s = "a // b";\n'
    (tmp_path / "tile.h").write_text("// a tile\n")

    def found(text: str) -> str:
        (tmp_path / "linear.cu").write_text(text)
        return names["cuda_sources"](tmp_path)["linear"]

    for old, new, same in (
        ("// one", "// another", True),
        ("three", "four", True),
        ("return 1;", "return  1;", True),
        ("return 1;", "return 2;", False),
        ("a // b", "a // c", False),
    ):
        assert (found(before.replace(old, new)) == found(before)) is same, old


# --- the tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(verdicts.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_says_when_and_what(path):
    data = json.loads(path.read_text())
    assert verdicts.table_of(data["device"]) == path
    assert len(verdicts._table(path)) == len(data["proofs"]) > 0
    for row in data["proofs"]:
        assert row["key"]["device"] == data["device"]
        assert len(row["commit"]) == 40
        assert row["date"][:2] == "20"
        assert row["outcome"] in ("passed", "slower")
        assert len(verdicts.times_of(row["times"])) == len(row["times"]) > 0


def test_a_run_replaces_its_kernels_and_leaves_the_others(tmp_path):
    def row(op="linear", outcome="passed", source="1", **key):
        key = {"op": op, "device": "A GPU", "source": source, "triton": "3.6.0"} | key
        return {"step": "selfcheck", "outcome": outcome, "reason": None, "date": "", "times": [], "key": key}

    rows = [row(), row("packing"), row("pooling", "failed"), row() | {"key": None}, {"step": "graphs"}]
    (path,) = proven.merge(rows, COMMIT, tmp_path)
    assert path.name == "a-gpu.json"
    assert proven.merge([row("packing")], None, tmp_path) == []  # of which commit?
    proven.merge([row(source="2"), row(triton="3.9.0") | {"commit": "f" * 40}], COMMIT, tmp_path)
    found = json.loads(path.read_text())["proofs"]
    assert [(p["key"]["op"], p["key"]["source"], p["key"]["triton"], p["commit"][:1]) for p in found] == [
        ("linear", "2", "3.6.0", "0"),
        ("linear", "1", "3.9.0", "f"),
        ("packing", "1", "3.6.0", "0"),
    ]


# --- fastbert env -------------------------------------------------------------------------------------------


def test_what_is_known_of_each_kernel(table, monkeypatch):
    from fastbert.backends import cuda, triton

    real = {"triton": triton, "cuda": cuda}
    before = dispatch.backend_module
    for where in (dispatch, namespaces):
        monkeypatch.setattr(where, "backend_module", lambda name: real.get(name) or before(name))
    monkeypatch.setattr(triton, "available", lambda device_type: None)
    monkeypatch.setattr(cuda, "available", lambda device_type: "was built without CUDA")
    monkeypatch.setattr(verdict_keys, "_device_facts", lambda device: ("NVIDIA H200", "9.0", "13000 580.65"))
    monkeypatch.setattr(checking, "DEVICES", ("cuda",))
    slow = "slower than aten: 2.00 x its time"
    times = verdicts.times_of(TIMES[:1])
    table(times=TIMES[:1], device="NVIDIA H200", capability="9.0")
    table("slower", slow, device="NVIDIA H200", capability="9.0", dtype="float16")
    for op, dtype, verdict in (
        ("layer_norm", torch.bfloat16, Verdict("y: max error", date="2026-01-01")),
        ("packing", torch.float32, Verdict(None, date="2026-01-01", times=times)),
        ("packing", torch.bfloat16, Verdict(slow, date="2026-01-01", outcome="slower")),
        ("pooling", torch.float32, Verdict("died", outcome="killed", deaths=1)),
        ("pooling", torch.bfloat16, Verdict("died", date="2026-01-01", outcome="killed", deaths=3)),
    ):
        verdicts.store(verdict_keys.key_of(Unit(op, "triton", dtype), GPU), verdict)
    rows = {f"{p.op} {p.dtype} {p.backend}": p for p in serving.proofs(GPU)}
    expected = {
        "layer_norm float32 triton": ("proven", "at 012345678, 2026-11-27, forward 0.50 x the time of aten"),
        "layer_norm float16 triton": ("slower", f"at 012345678, 2026-11-27: {slow}"),
        "layer_norm bfloat16 triton": ("failed here", "2026-01-01: y: max error"),
        "packing float32 triton": ("checked here", "2026-01-01, 0.50 x the time of aten"),
        "packing bfloat16 triton": ("slower here", f"2026-01-01: {slow}"),
        "pooling float32 triton": ("unverified", "checked at first use again: died"),
        "pooling bfloat16 triton": ("killed here", "2026-01-01: died"),
        "attention float32 triton": ("unverified", "checked at first use"),
        "linear float32 triton": ("unverified", serving.UNRANKED),
        "layer_norm float32 cuda": ("cannot run here", "was built without CUDA"),
    }
    found = {name: (rows[name].state.removesuffix(" on NVIDIA H200"), rows[name].detail) for name in expected}
    assert found == expected
    assert rows["packing float32 triton"].times == times
    assert serving.proofs(CPU) == []
