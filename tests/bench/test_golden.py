"""Golden vectors: recorded, joined, and held against this machine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu import checks, golden
from fastbert import testing
from tests.support.triton_fixtures import interpreted

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def files():
    """One case of two ops by a backend that runs everywhere."""
    found = {}
    for op in ("layer_norm", "packing"):
        found |= golden.record(testing.small_cases(op)[0], "aten", torch.bfloat16, torch.device("cpu"))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_arrays_keep_every_bit(dtype):
    values = torch.tensor([0.0, -0.0, math.inf, math.nan, 1.5]).to(dtype)
    kept = golden.tensor(golden.array(values), str(dtype).removeprefix("torch."))
    assert kept.dtype == dtype
    assert golden.array(kept) == golden.array(values)


def test_a_recorded_call_is_computed_again_to_the_bit(files):
    calls = [name for name in files if name.endswith("call.json")]
    assert len(calls) == 2
    rows = list(golden.check(files))
    assert {equal for _, equal, _ in rows} == {True}
    assert {reason for *_, reason in rows} == {""}
    quantities = {name.split()[-1] for name, *_ in rows}
    # outputs and gradients of both
    assert {"y", "dx", "dweight", "pack", "dpadded"} <= quantities


def changed(files: dict[str, bytes], name: str, change) -> dict[str, bytes]:
    (path,) = (each for each in files if each.startswith("layer_norm") and each.endswith(name))
    array = np.load(golden.io.BytesIO(files[path]))
    change(array.reshape(-1))
    file = golden.io.BytesIO()
    np.save(file, array)
    return files | {path: file.getvalue()}


def test_a_last_bit_is_near_and_a_wrong_value_is_wrong(files):
    def last_bit(bits):
        bits[3] ^= 1

    def sign(bits):
        bits[3] ^= np.int16(-(2**15))

    def state(found):
        ((_, equal, reason),) = (
            row for row in golden.check(found) if row[0].endswith(" y") and "norm" in row[0]
        )
        return equal, bool(reason)

    assert state(changed(files, "out/y.npy", last_bit)) == (False, False)
    assert state(changed(files, "out/y.npy", sign)) == (False, True)


def test_inputs_are_the_recorded_ones(files):
    # other inputs: what was recorded no longer belongs to them
    def other(bits):
        bits[:] = bits[::-1].copy()

    wrong = [name for name, _, reason in golden.check(changed(files, "in/x.npy", other)) if reason]
    assert any(name.endswith(" y") for name in wrong)
    wrong = [name for name, _, reason in golden.check(changed(files, "in/dout-0.npy", other)) if reason]
    assert any(name.endswith(" dx") for name in wrong)
    assert not any(name.endswith(" y") for name in wrong)


def test_what_runs_elsewhere_is_held_against_the_error_rule_alone(files):
    def elsewhere(data):
        return json.dumps(json.loads(data) | {"backend": "cuda"}).encode()

    moved = {name: elsewhere(data) if name.endswith("call.json") else data for name, data in files.items()}
    rows = [row for row in golden.check(moved) if "layer_norm" in row[0]]
    assert {(equal, reason) for _, equal, reason in rows} == {(None, "")}


def test_a_case_that_is_gone_is_wrong(files):
    gone = {name: data.replace(b'"case": "', b'"case": "no such ') for name, data in files.items()}
    assert [reason for *_, reason in golden.check(gone)] == ["this checkout has no such case"] * 2


def test_launches_are_recorded_in_order_with_their_grids(monkeypatch):
    from triton.runtime.jit import JITFunction

    def run(self, *args, grid, warmup):
        return self.name

    monkeypatch.setattr(JITFunction, "run", run)
    kernels = [object.__new__(JITFunction) for _ in range(2)]
    for index, kernel in enumerate(kernels):
        kernel.name = f"kernel {index}"
    with golden.launches() as found:
        assert kernels[1].run(1.0, grid=(3, 2), warmup=False) == "kernel 1"
        kernels[0].run(grid=(7,), warmup=False)
    assert found == [((3, 2), "kernel 1"), ((7,), "kernel 0")]
    # and none after the block
    assert JITFunction.run is run


COMPILES = """
import json, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from bench.gpu import golden

@triton.jit
def a_kernel(ptr):
    tl.store(ptr, 1.0)

source = triton.compiler.ASTSource(a_kernel, {"ptr": "*fp32"}, {})
folder, code = golden.code_of(triton.compile(source, target=GPUTarget("cuda", 90, 32)))
assert code[f"{folder}/code.cubin"][:4] == bytes([0x7F]) + b"ELF"
assert b".visible .entry a_kernel" in code[f"{folder}/code.ptx"]
assert json.loads(code[f"{folder}/metadata.json"])["num_warps"] == 4
print(folder)
"""


def test_the_code_of_a_kernel(tmp_path):
    pytest.importorskip("triton")
    # Triton compiles only where its interpreter is off, and reads a kernel's source from a file
    path = tmp_path / "compiles.py"
    path.write_text(COMPILES)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(path)]
    run = subprocess.run(command, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("kernels/a_kernel-")


@pytest.mark.sweep
@interpreted
def test_the_check_writes_one_archive_that_this_machine_confirms(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        checks,
        "op_units",
        lambda dtypes: [checks.Unit("pooling", "triton", dtype) for dtype in dtypes],
    )
    assert checks.main(["golden", "--device", "cpu", "--json", str(tmp_path / "checks.jsonl")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checks.jsonl", "golden.zip"]
    capsys.readouterr()
    assert golden.main([str(tmp_path / "golden.zip")]) == 0
    assert "6 equal to this machine's to the bit, 0 wrong" in capsys.readouterr().out


def test_bad_files_and_calls_are_named(tmp_path, capsys):
    (tmp_path / "golden.zip").write_bytes(b"PK no")
    for arguments in ([str(tmp_path / "golden.zip")], [str(tmp_path / "none.zip")]):
        with pytest.raises(SystemExit):
            golden.main(arguments)
        assert "cannot be read" in capsys.readouterr().err
    golden.write(tmp_path / "golden.zip", {})
    assert golden.main([str(tmp_path / "golden.zip")]) == 1
    with pytest.raises(SystemExit):
        checks.main(["golden", "--device", "cpu"])
    assert "--json: golden needs it" in capsys.readouterr().err
