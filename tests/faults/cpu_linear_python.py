"""Faults of the launchers of linear and linear_int8, and of the weights packed for inference.

Nothing is built: they run on the extension as it is.
"""

# ruff: noqa: E501 (a table)

import torch

from tests.support.mutation import Fault, Suite

_PYTHON = "fastbert/backends/cpu/linear.py"
_INT8 = "fastbert/backends/cpu/linear_int8.py"
_LAYERS = "fastbert/layers/linear.py"
_PREPARED = "fastbert/runtime/prepared.py"
_SIZES = "fastbert/backends/cpu/sizes.py"
# The tests need one instruction set: AVX-512 where there is one.
_ONE_ISA = " and not avx2" if "AVX512" in torch.backends.cpu.get_cpu_capability() else ""


def _fault(name: str, old: str, new: str, file: str) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    _fault("bias gradient in PyTorch's default dtype", "dy.new_empty(out if need_dbias else 0, dtype=torch.float32)", "torch.empty(out if need_dbias else 0)", _PYTHON),
    _fault("strides of one column taken as they are", "m.stride(1) == 1 or m.shape[1] == 1", "m.stride(1) == 1", _PYTHON),
    _fault("panels of any weight as it lies", "_panels(plain(weight).contiguous().t(), into)", "_panels(plain(weight).t(), into)", _PYTHON),
    _fault("panels of any size taken", "    elif panels.shape != (_C", "    elif panels.dim() != 1 and panels.shape != (_C", _PYTHON),
    _fault("residual read as if contiguous", "(residual.data_ptr(), residual.stride(0))", "(residual.data_ptr(), residual.shape[1])", _PYTHON),
    _fault("b read as if contiguous", "(0, address(b), *_strides(b))", "(0, address(b), *_strides(b.contiguous()))", _PYTHON),
    _fault("a wide weight taken for a narrow one", "DTYPE_CODES[b.dtype],\n        DTYPE_CODES[c", "DTYPE_CODES[a.dtype],\n        DTYPE_CODES[c", _PYTHON),
    _fault("gradients of a wide weight rounded", "x.shape[1], stored=stored)", "x.shape[1]).to(stored)", _PYTHON),
    _fault("wide weights left to PyTorch", "_FEWEST_ROWS and weight.dtype == x.dtype:", "_FEWEST_ROWS:", _PYTHON),
    _fault("gradients of wide weights left to PyTorch", "_FEWEST_ROWS and stored == dy.dtype:", "_FEWEST_ROWS:", _PYTHON),
    _fault("panels of the whole weight for one row more", ">= _WHOLE_ROWS", "> _WHOLE_ROWS", _PYTHON),
    _fault("no rounded copy for many rows", "right = as_dtype(weight, dy.dtype) if _reads_whole(dy) else weight", "right = weight", _PYTHON),
    _fault("pre not saved", "if save and activation is not None else 0)", "if False else 0)", _PYTHON),
    _fault("bias forgotten", "_product(x, right, weight.shape[0], bias,", "_product(x, right, weight.shape[0], None,", _PYTHON),
    _fault("gradient of the activation forgotten", "g = dy if activation is None else dy.new_empty(dy.shape)", "g = dy if activation is None else dy.clone()\n    pre, activation = None, None", _PYTHON),
    _fault("few rows not left to PyTorch", "if x.shape[0] < _FEWEST_ROWS and", "if x.shape[0] < 0 and", _PYTHON),
    _fault("panels not used", "    if panels is None:\n        if x.shape[0]", "    if True:\n        if x.shape[0]", _PYTHON),
    _fault("one tensor for both empty gradients", "        dy.new_empty(0) if dx is None else dx,\n        dy.new_empty(0) if dweight is None else dweight,", "        *((lambda e: (e if dx is None else dx, e if dweight is None else dweight))(dy.new_empty(0))),", _PYTHON),
    _fault("panels in training", "if module.training or torch.compiler", "if torch.compiler", _LAYERS),
    _fault("panels under torch.compile", "if module.training or torch.compiler.is_compiling():", "if module.training:", _LAYERS),
    _fault("panels for one row more", "rows < MANY_ROWS", "rows <= MANY_ROWS", _SIZES),
    _fault("rows of one sequence counted", "dtype, x.shape[:-1].numel())", "dtype, x.shape[-2])", _LAYERS),
    _fault("the same panels for every dtype", '("panels", dtype), (module.weight,)', '"panels", (module.weight,)', _LAYERS),
    _fault("changes of the weight not seen", '("panels", dtype), (module.weight,)', '("panels", dtype), ()', _LAYERS),
    _fault("passing panels are kept", "build, keep=_panels.kept)", "build)", _LAYERS),
    _fault("panels pass for ever", "        _panels.kept = before\n", "        pass\n", _LAYERS),
    _fault("panels pass in every thread", "class _Panels(threading.local):", "class _Panels:", _LAYERS),
    _fault("what is not to be kept is never looked up", "if found is not None and found.seal", "if keep and found is not None and found.seal", _PREPARED),
    _fault("panels in half for float64 under autocast", "if dtype != torch.float64:", "if True:", _LAYERS),
    _fault("8-bit panels of any weight as it lies", "(out, depth), weight = weight.shape, plain(weight).contiguous()", "out, depth = weight.shape", _INT8),
    _fault("8-bit panels of any layout taken", "panels.numel() != _C.cpu_linear_int8_panels_size(depth, out)", "False", _INT8),
    _fault("8-bit x read as if contiguous", "x.data_ptr(), x.stride(0)", "x.data_ptr(), depth", _INT8),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/cpu/test_linear_prepared.py",
        "tests/cpu/test_linear_int8.py",
        "tests/cpu/test_linear.py",
        "-k",
        "not error_rule and not repeats and not threads and not sanitizer and not without_vnni" + _ONE_ISA,
    ),
    timeout_s=600.0,
)
