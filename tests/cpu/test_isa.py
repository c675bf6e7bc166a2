"""The choice of the instruction set: what a processor has, what is preferred on it, FASTBERT_ISA."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastbert.backends import cpu
from fastbert.runtime import dispatch, loader
from fastbert.testing import serving
from tests.support import cpu_build
from tests.support.cpu_checks import on_each_isa
from tests.support.cpu_truth import randn
from tests.support.hostile.custom_ops import OPS
from tests.support.launchers import layer_norm_bwd, layer_norm_fwd

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("none", "avx2", "avx2_vnni", "avx512", "avx512_bf16")
_C = loader.extension


AVX2 = "avx2 fma f16c bmi bmi2"
VNNI = f"{AVX2} avxvnni"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"
BF16 = f"{AVX512} avx512bf16"


# --- on other processors ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library():
    loaded = ctypes.CDLL(str(cpu_build.faked_isa()))
    for name in ("fake_best", "fake_preferred", "fake_current"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


@pytest.fixture
def processor(library):
    """(a function that makes csrc/cpu/isa.cpp see a processor, the library to ask)."""

    def fake(features: str, vendor: str = "intel"):
        library.fake_processor(f" {features} ".encode(), vendor.encode())
        return library

    return fake


@pytest.mark.parametrize(
    ("features", "vendor", "best", "preferred"),
    (
        ("", "intel", "none", "none"),
        ("", "amd", "none", "none"),
        (AVX2, "intel", "avx2", "avx2"),
        (AVX2, "amd", "avx2", "avx2"),  # Zen 1 to 3
        (VNNI, "intel", "avx2_vnni", "avx2_vnni"),
        ("avxvnni", "intel", "none", "none"),
        (AVX512, "intel", "avx512", "avx512"),
        (BF16, "intel", "avx512_bf16", "avx512"),  # vdpbf16ps at half the rate of float32
        (BF16, "amd", "avx512_bf16", "avx512_bf16"),  # Zen 4 and 5: at twice that rate
        (BF16, "", "avx512_bf16", "avx512"),  # another vendor: not measured
        ("avx512f avx512bw avx512vl avx512dq avx512bf16", "amd", "none", "none"),
        (f"{AVX2} avx512bf16", "amd", "avx2", "avx2"),
    ),
)
def test_best_and_preferred(processor, features, vendor, best, preferred):
    fake = processor(features, vendor)
    assert fake.fake_best().decode() == best
    assert fake.fake_preferred().decode() == preferred
    assert fake.fake_current().decode() == preferred


EACH = ((AVX2, "avx2"), (VNNI, "avx2_vnni"), (AVX512, "avx512"), (BF16, "avx512_bf16"))


@pytest.mark.parametrize(("full", "best"), EACH)
def test_every_feature_is_needed(processor, full, best):
    lower = NAMES[: NAMES.index(best)]
    features = full.split()
    assert processor(full).fake_best().decode() == best
    for missing in features:
        some = " ".join(name for name in features if name != missing)
        assert processor(some).fake_best().decode() in lower, missing


@pytest.mark.parametrize("vendor", ("intel", "amd"))
@pytest.mark.parametrize(("features", "best"), (*EACH, (f"{BF16} avxvnni", "avx512_bf16")))
def test_set_isa_takes_what_the_processor_has(processor, features, vendor, best):
    for name in NAMES:
        fake = processor(features, vendor)
        has = NAMES.index(name) <= NAMES.index(best) and (name != "avx2_vnni" or "avxvnni" in features)
        assert bool(fake.fake_set(name.encode())) == has, name
        expected = name.encode() if has else fake.fake_preferred()
        assert fake.fake_current() == expected, "a refused name changes nothing"
    for name in ("", "AVX2", "avx512bf16", "avx512_", "avx5", "sse2"):
        assert not fake.fake_set(name.encode()), name


@pytest.mark.parametrize("vendor", ("intel", "amd"))
def test_best_is_the_preferred_one(processor, vendor):
    fake = processor(f"{BF16} avxvnni", vendor)
    for before in NAMES:
        assert fake.fake_set(before.encode())
        assert fake.fake_set(b"best")
        assert fake.fake_current() == (b"avx512_bf16" if vendor == "amd" else b"avx512")


def test_pick(processor):
    fake = processor(f"{BF16} avxvnni")
    for tables, picked in ((2, (0, 1, 1, 2, 2)), (3, (0, 1, 1, 2, 3))):
        for name, expected in zip(NAMES, picked, strict=True):
            assert fake.fake_set(name.encode())
            assert fake.fake_pick(tables) == expected, (tables, name)


# --- on this one ------------------------------------------------------------------------------------------

VALUES = (*NAMES, "best", "sse9", "AVX2")


@pytest.fixture(scope="module")
def reports():
    """The output of `fastbert env --json` with FASTBERT_ISA unset ("") and with each of VALUES."""
    code = (
        "import importlib, json, os\n"
        "from fastbert.backends import cpu\n"
        "from fastbert.cli import env\n"
        "from fastbert.runtime import loader\n"
        f"for value in {('', *VALUES)!r}:\n"
        "    os.environ['FASTBERT_ISA'] = value\n"
        "    importlib.reload(loader)\n"  # reads it
        "    print(json.dumps([value, cpu.available('cpu'), env.environment()]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "FASTBERT_ISA"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return {value: (gap, report) for value, gap, report in map(json.loads, run.stdout.splitlines())}


@pytest.mark.sweep
def test_without_a_wish_the_preferred_one_serves(reports):
    assert _C.best_cpu_isa() in NAMES
    assert NAMES.index(_C.preferred_cpu_isa()) <= NAMES.index(_C.best_cpu_isa())
    gap, report = reports[""]
    assert report["extension"]["cpu_isa"] == _C.preferred_cpu_isa()
    assert (gap is None) == (_C.best_cpu_isa() != "none")


@pytest.mark.parametrize("value", VALUES)
def test_isa_from_the_environment(reports, value):
    """An unknown or missing instruction set switches the kernels off, and the report says why."""
    gap, report = reports[value]
    extension, best = report["extension"], _C.best_cpu_isa()
    assert (extension["best_cpu_isa"], extension["preferred_cpu_isa"]) == (best, _C.preferred_cpu_isa())
    served = next(
        row
        for row in report["backends"]
        if (row["op"], row["device"], row["dtype"]) == ("attention", "cpu", "bfloat16")
    )
    if value == "best":
        assert extension["cpu_isa"] == _C.preferred_cpu_isa()
    elif value == "avx2_vnni" and extension["cpu_isa"] == "none":  # not every processor with AVX-512 has it
        assert gap.endswith(f"({best}), got {value}")
    elif value in NAMES and NAMES.index(value) <= NAMES.index(best):
        assert extension["cpu_isa"] == value
    else:
        assert extension["cpu_isa"] == "none"
        assert gap.startswith(
            "FASTBERT_ISA: expected none, avx2, avx2_vnni, avx512, avx512_bf16 or best, and no more than"
        )
        assert gap.endswith(f"({best}), got {value}")
    assert ("at its speed" in extension["bf16_on_a_cpu"]) == (extension["cpu_isa"] in NAMES[1:4])
    if extension["cpu_isa"] == "none":
        assert served["backend"] != "cpu"
        assert gap in served["why"]
    else:
        assert (gap, served["backend"]) == (None, "cpu")


def test_an_op_without_kernels_for_bf16_pairs_runs_those_for_avx512():
    x, weight = torch.randn(37, 100).bfloat16(), torch.randn(100)

    def results():
        y, _, mean, rstd = layer_norm_fwd(cpu, x, weight, None, None, None, 1e-5, 0.0, None, 0, True)
        grads = layer_norm_bwd(cpu, y, x, weight, mean, rstd, 0.0, None, 0, True, True, False, False)
        return y, mean, rstd, *grads[:1], *grads[2:4]

    for a, b in zip(*on_each_isa(results, "avx512", "avx512_bf16"), strict=True):
        assert torch.equal(a, b)


needs_kernels = pytest.mark.skipif(
    getattr(_C, "best_cpu_isa", str)() in ("", "none"), reason="this processor has no AVX2"
)


@needs_kernels
def test_the_kernels_serve_by_default():
    found = {(line.op, line.dtype): line.backend for line in serving.choices("cpu")}
    for op in ("attention", "cross_entropy", "embedding", "layer_norm", "linear", "linear_int8", "packing"):
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            assert found[op, dtype] == ("aten" if dtype == "float64" and op != "packing" else "cpu"), op


@needs_kernels
def test_isa_none_is_refused():
    """By every function of the kernels, where another backend does not serve instead."""
    calls = {name: op.args() for name, op in OPS.items() if "cpu" in op.backends and "pooling" not in name}
    weight, before = randn(5, 6), _C.cpu_isa()
    with dispatch.use_backend("cpu"):
        for name, args in calls.items():  # the backend is chosen at the first call
            getattr(torch.ops.fastbert, name)(*args.values())
        _C.set_cpu_isa("none")
        try:
            assert cpu.available("cpu") == "switched off by FASTBERT_ISA=none"
            assert "cuda" in cpu.available("cuda")
            assert _C.cpu_linear_int8_panels_size(6, 5) == 0
            for name, args in calls.items():
                if name.startswith("linear_distillation"):
                    continue  # on some processors its products are PyTorch's
                if name.startswith("packing") or name == "attention_places":  # these need no instruction set
                    getattr(torch.ops.fastbert, name)(*args.values())
                    continue
                with pytest.raises(RuntimeError, match="no SIMD kernels"):
                    getattr(torch.ops.fastbert, name)(*args.values())
            for pack, w in ((cpu.linear_panels, weight), (cpu.linear_int8_panels, weight.to(torch.int8))):
                with pytest.raises(RuntimeError, match="no SIMD kernels"):
                    pack(w)
        finally:
            _C.set_cpu_isa(before)
    assert cpu.available("cpu") is None
