"""The C++ layer_norm: every dtype, instruction set, odd size and stride, against the reference in float64."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fastbert.backends import cpu, reference
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.layer_norm import LayerNormInputs, layer_norm_ref
from fastbert.runtime import dispatch, loader
from tests.support import cpu_build
from tests.support.cpu_checks import assert_same_on_any_threads
from tests.support.cpu_truth import HALF, assert_rounds_to, in_float64, randn, strided_rows
from tests.support.launchers import layer_norm_bwd, layer_norm_fwd
from tests.support.processes import python

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, *HALF)
SEED = torch.tensor([-0x123456789ABCDEF])
OFFSET = 2**32 - 7
_C = loader.extension
needs_cuda_part = pytest.mark.skipif(
    not getattr(_C, "cuda_archs", ""), reason="fastbert._C is built without CUDA"
)


# residual, x_bias, bias, dropout_p, dtype of the parameters, kind; all but LayerNorm return their sum
OPTIONS = (
    (False, False, True, 0.0, None, "layer_norm"),
    (True, True, True, 0.0, torch.float32, "layer_norm"),
    (True, False, False, 0.25, None, "layer_norm"),
    (False, True, True, 0.5, torch.float32, "layer_norm"),
    (True, True, False, 0.25, torch.float32, "rms_norm"),
    (False, False, False, 0.0, None, "rms_norm"),
    (True, True, True, 0.25, torch.float32, "no_norm"),
    (False, False, True, 0.0, None, "no_norm"),
)


def both_ways(rows, hidden, dtype, options):
    """Forward and backward of the backend, each output against float64."""
    has_residual, has_x_bias, has_bias, p, param_dtype, kind = options
    returns_sum = kind != "layer_norm"
    param_dtype = param_dtype or dtype
    x, x_memory = strided_rows(rows, hidden, dtype, 5, seed=1)
    residual, residual_memory = strided_rows(rows, hidden, dtype, 3, seed=2)
    dy, _ = strided_rows(rows, hidden, dtype, 1, seed=3)
    before = [m.clone() for m in (x_memory, residual_memory)]
    residual = residual if has_residual else None
    weight = 1 + 0.5 * randn(hidden, dtype=param_dtype, seed=4)
    bias = randn(hidden, dtype=param_dtype, seed=5) if has_bias else None
    x_bias = randn(hidden, dtype=param_dtype, seed=6) if has_x_bias else None
    seed = SEED if p else None

    inputs = (x, weight, bias, residual, x_bias, 1e-5, p, seed, OFFSET, kind, returns_sum)
    y, z, mean, rstd = layer_norm_fwd(cpu, *inputs, True)
    truth = layer_norm_fwd(reference, *in_float64(*inputs), True)
    assert y.dtype == dtype
    assert mean.dtype == rstd.dtype == torch.float32
    summed = x if truth[1].shape == (0,) else truth[1]
    # if a row is nearly constant (such as two elements), rstd magnifies the rounding of z
    largest = truth[3].max().item() if truth[3].numel() else 1.0
    scale = largest**2 * summed.abs().max().item() + 1 if rows else 1.0
    assert_rounds_to(y, truth[0], scale, "y")
    assert_rounds_to(z, truth[1], 1.0, "z")
    assert_rounds_to(mean, truth[2], 1.0, "mean")
    assert_rounds_to(rstd, truth[3], scale, "rstd")
    unsaved = layer_norm_fwd(cpu, *inputs, False)
    assert torch.equal(unsaved[0], y)
    assert [t.shape for t in unsaved[2:]] == [(0,)] * 2
    assert torch.equal(unsaved[1], z if returns_sum else z.new_empty(0))

    saved = (dy, z if z.numel() else x, weight, mean, rstd, p, seed, OFFSET, kind)
    needs = (True, True, has_x_bias, has_residual)
    dsum = randn(rows, hidden, dtype=dtype, seed=7) if returns_sum and has_residual else None
    grads = layer_norm_bwd(cpu, *saved, *needs, dsum=dsum)
    truth = layer_norm_bwd(reference, *in_float64(*saved), *needs, dsum=in_float64(dsum)[0])
    scale = largest**2 * (1 + summed.abs().max().item()) * 4 if rows else 1.0
    sums = 4 * scale * max(rows, 1) ** 0.5
    assert_rounds_to(grads[0], truth[0], scale, "dx")
    assert_rounds_to(grads[1], truth[1], scale, "dresidual")
    for name, grad, expected in zip(("dweight", "dbias", "dx_bias"), grads[2:], truth[2:], strict=True):
        assert grad.dtype == torch.float32
        assert_rounds_to(grad, expected, sums, name)
    for memory, copy in zip((x_memory, residual_memory), before, strict=True):
        assert torch.equal(memory.view(torch.uint8), copy.view(torch.uint8)), "an input was written"


# --- results --------------------------------------------------------------------------------------


SIZES = {  # (rows, hidden)
    "hidden": [(3, n) for n in (1, 2, 7, 8, 15, 16, 17, 31, 64, 96, 384, 768, 1000, 1024, 4096)],
    "rows": [(n, 33) for n in (0, 1, 2, 7, 130, 259)],
    "more rows than 16 bits": [(65535, 6), (65537, 6)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_size(isa, dtype, sizes, guarded):
    for size in SIZES[sizes]:
        for options in OPTIONS[1:2] if size[0] > 1000 else OPTIONS:
            both_ways(*size, dtype, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", (0.0, 0.25))
def test_only_what_is_wanted(isa, dtype, p, guarded):
    """Each gradient is the same whatever else is wanted; an unwanted one is empty."""
    dy, z, weight = (randn(6, 70, dtype=dtype, seed=s) for s in (1, 2, 3))
    args = (dy, z, weight[0], randn(6), randn(6, seed=1).abs(), p, SEED if p else None, 9)
    dx, dresidual, *sums = layer_norm_bwd(cpu, *args, True, True, True, True)
    for needs in itertools.product((True, False), repeat=4):
        need_dx, need_dweight, need_dxbias, need_dresidual = needs
        wanted = (need_dx, need_dresidual and (p > 0 or not need_dx), need_dweight, need_dweight, need_dxbias)
        grads = layer_norm_bwd(cpu, *args, *needs)
        for grad, truth, want in zip(grads, (dx, dresidual if p else dx, *sums), wanted, strict=True):
            assert grad.dtype == truth.dtype
            assert torch.equal(grad, truth if want else torch.empty(0, dtype=truth.dtype)), needs


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_nearly_all_outputs_are_correctly_rounded(isa, dtype):
    args = [randn(256, 768, dtype=dtype), 1 + 0.1 * randn(768, dtype=dtype), randn(768, dtype=dtype)]
    args += [randn(256, 768, dtype=dtype, seed=1), randn(768, dtype=dtype)]
    y = layer_norm_fwd(cpu, *args, 1e-12, 0.0, None, 0, False)[0]
    truth = layer_norm_ref(*[a.double() for a in args]).to(dtype)
    assert (y == truth).double().mean() >= 0.999


@pytest.mark.parametrize("shift", (0.0, 30.0, 3000.0, 1e6))
@pytest.mark.parametrize("hidden", (96, 768, 1024, 4096))
def test_float32_error_is_no_larger_than_torchs(isa, hidden, shift):
    x, weight, bias = randn(64, hidden) + shift, 1 + 0.1 * randn(hidden, seed=1), randn(hidden, seed=2)
    truth = F.layer_norm(x.double(), (hidden,), weight.double(), bias.double(), 1e-12)
    ours = (layer_norm_fwd(cpu, x, weight, bias, None, None, 1e-12, 0.0, None, 0, False)[0] - truth).abs()
    theirs = (F.layer_norm(x, (hidden,), weight, bias, 1e-12) - truth).abs()
    assert ours.mean() <= theirs.mean()
    assert ours.max() <= theirs.max() + 2**-22


@pytest.mark.parametrize("rows", (64, 1000, 5000))
def test_float32_column_sums_are_no_worse_than_torchs(isa, rows):
    x, dy, weight = randn(rows, 96), randn(rows, 96, seed=1) + 1, torch.ones(96)
    _, mean, rstd = torch.native_layer_norm(x, (96,), weight, None, 1e-12)
    truth = dy.double().sum(0)
    theirs = torch.ops.aten.native_layer_norm_backward(dy, x, (96,), mean, rstd, weight, weight, [True] * 3)[
        2
    ]
    ours = layer_norm_bwd(
        cpu, dy, x, weight, mean[:, 0], rstd[:, 0], 0.0, None, 0, False, True, False, False
    )[3]
    assert (ours - truth).abs().mean() <= (theirs - truth).abs().mean()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_rounding(isa, dtype):
    """The saved z = x + x_bias shows the conversion from float32: ties, subnormals, overflow, inf, NaN."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = halves.view(64, 1024)
    full_nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(
        torch.float32
    )  # rounding up carries into the sign
    for add in (0.0, 2**-9, 3 * 2**-12, 1.0, 2**-140, 1e5, full_nan):
        x_bias = torch.zeros(1024) + add if add is not full_nan else full_nan.expand(1024).contiguous()
        z = layer_norm_fwd(cpu, x, x_bias, None, None, x_bias, 1e-5, 0.0, None, 0, True)[1]
        expected = (x.float() + add).to(dtype)
        nan = expected.isnan()
        assert torch.equal(z.isnan(), nan)
        assert torch.equal(z[~nan].view(torch.int16), expected[~nan].view(torch.int16))


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_a_bad_row_stays_alone(isa, bad):
    x, weight = randn(9, 100), randn(100)
    clean = layer_norm_fwd(cpu, x, weight, None, None, None, 1e-5, 0.0, None, 0, True)
    x[4, 37] = bad
    dirty = layer_norm_fwd(cpu, x, weight, None, None, None, 1e-5, 0.0, None, 0, True)
    others = [r for r in range(9) if r != 4]
    assert dirty[0][4].isnan().all()
    for a, b in ((clean[0], dirty[0]), (clean[2], dirty[2]), (clean[3], dirty[3])):
        assert torch.equal(a[others], b[others])
    dy = randn(9, 100, seed=1)
    grads = [
        layer_norm_bwd(cpu, dy, z, weight, m, r, 0.0, None, 0, True, False, False, False)[0]
        for z, (_, _, m, r) in ((randn(9, 100), clean), (x, dirty))
    ]
    assert torch.equal(grads[0][others], grads[1][others])
    assert grads[1][4].isnan().all()


@pytest.mark.parametrize("stride", (0, 3))
def test_row_strides(isa, stride):
    """Expanded rows (stride 0) and overlapping ones."""
    memory = randn(100)
    x = memory.as_strided((4, 10), (stride, 1))
    weight = randn(10, seed=1)
    y = layer_norm_fwd(cpu, x, weight, None, x, None, 1e-5, 0.0, None, 0, False)[0]
    assert torch.equal(
        y, layer_norm_fwd(cpu, x.clone(), weight, None, x.clone(), None, 1e-5, 0.0, None, 0, False)[0]
    )
    stats = torch.zeros(4), torch.ones(4)
    strided = layer_norm_bwd(cpu, x, x, weight, *stats, 0.0, None, 0, True, True, True, True)
    plain = layer_norm_bwd(cpu, x.clone(), x.clone(), weight, *stats, 0.0, None, 0, True, True, True, True)
    assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))


# --- dropout --------------------------------------------------------------------------------------


def test_dropped_elements_are_zero_whatever_they_were(isa):
    x = torch.full((16, 64), float("nan"))
    keep = keep_mask_2d(SEED, 1, 16, 64, 0.5)
    z = layer_norm_fwd(cpu, x, x[0], None, None, None, 1e-5, 0.5, SEED, 1, True)[1]
    assert (z[~keep] == 0).all()
    assert z[keep].isnan().all()


# --- determinism, threads, processes --------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(isa, dtype):
    rows, hidden = 1111, 96
    x, residual, dy = (randn(rows, hidden, dtype=dtype, seed=s) for s in range(3))
    weight, x_bias = randn(hidden), randn(hidden, seed=1)

    def call():
        y, z, *stats = layer_norm_fwd(cpu, x, weight, x_bias, residual, x_bias, 1e-5, 0.1, SEED, 2, True)
        needs = (True,) * 4
        return (y, z, *stats, *layer_norm_bwd(cpu, dy, z, weight, *stats, 0.1, SEED, 2, *needs))

    assert_same_on_any_threads(call, repeats=100)


# --- which backend runs ---------------------------------------------------------------------------


def test_cuda_refuses_politely_without_a_device():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    from fastbert.backends import cuda

    reason = cuda.available("cuda")
    assert "built without CUDA" in reason or "torch.cuda.is_available() is False" in reason
    assert cuda.available("cpu") == "runs on cuda, not on cpu"
    with (
        dispatch.use_backend(layer_norm="cuda"),
        pytest.raises(dispatch.BackendError, match="runs on cuda, not on cpu"),
    ):
        dispatch.call("layer_norm_fwd", randn(2, 3), LayerNormInputs(randn(2, 3), randn(3), eps=0.1), False)


@needs_cuda_part
def test_cuda_launch_without_a_device_raises_its_error():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    memory = torch.zeros(8)  # never read
    row = (memory.data_ptr(), 8)
    vectors = (memory.data_ptr(), 0) * 2 + (0, 0)
    with pytest.raises(RuntimeError, match=r"(?i)cuda|driver|device"):
        _C.cuda_layer_norm_fwd(
            0, 1, 8, *row, *row, *vectors, 1e-5, 0, 0, 0, 0, 1.0, *(4 * (memory.data_ptr(),)), 0, 0, 0, 0
        )


def test_extension_loads_alone_without_torch_or_driver():
    run = python(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('_C', {_C.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert module.cpu_isa() in ('none', 'avx2', 'avx2_vnni', 'avx512', 'avx512_bf16')\n"
        "assert 'torch' not in sys.modules\n",
        CUDA_VISIBLE_DEVICES="",
    )
    assert run.returncode == 0, run.stderr


def test_extension_needs_no_symbol_of_torch():
    if shutil.which("nm") is None:
        pytest.skip("needs nm (binutils)")
    table = subprocess.run(["nm", "-D", _C.__file__], text=True, capture_output=True, check=True).stdout
    names = [line.split()[-1] for line in table.splitlines()]
    assert "PyInit__C" in names, "nm sees nothing"
    assert [n for n in names if re.search(r"c10|at\d*(native|Tensor)|torch|GOMP|omp_", n)] == []
    undefined = [line.split()[-1] for line in table.splitlines() if " U " in line]
    assert [n for n in undefined if re.match(r"_?cu[A-Z]|cuda", n)] == [], "cudart is not static"


# --- the sources under other compilers ------------------------------------------------------------


@pytest.mark.sweep
def test_instruction_set_units_share_no_function(tmp_path):
    """The linker could keep the copy of a weak symbol in an AVX-512 unit for all units."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm (binutils)")
    cxx = cpu_build.compiler()
    sources = sorted((ROOT / "csrc" / "cpu").glob("*_simd.cpp"))
    units = [(source, isa) for source in sources for isa in cpu_build.isas_of(source)]
    assert {isa for _, isa in units} == set(cpu_build.ISA_FLAGS)
    for source, isa in units:
        out = tmp_path / f"{source.stem}.{isa}.o"
        flags = [*cpu_build.FLAGS, "-O0", *cpu_build.ISA_FLAGS[isa], f"-DFASTBERT_ISA={isa}"]
        command = [cxx, *flags, "-c", str(source), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        table = subprocess.run(["nm", str(out)], text=True, capture_output=True, check=True).stdout
        fields = [line.split()[1:] for line in table.splitlines() if len(line.split()) == 3]
        # DW.ref.…: a pointer that every unit with a destructor has, no code
        defined = [(kind, name) for kind, name in fields if not name.startswith("DW.ref.")]
        assert [name for kind, name in defined if kind in "WwVvu"] == [], f"{source.name} for {isa}"
        exported = {name for kind, name in defined if kind.isupper()}
        assert exported
        assert all(re.search(rf"\d{isa}", name) for name in exported), exported
