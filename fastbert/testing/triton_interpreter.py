"""Triton's interpreter made fit for checks: bfloat16 and E4M3 as the GPU computes them.

`choose()` decides, before anything imports Triton, whether this process interprets (no GPU) or compiles.
Not modelled: memory order within a program, float atomics' order, TF32.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch


def choose() -> bool:
    """Interpret if there is no CUDA device, unless TRITON_INTERPRET is set. Return whether it interprets."""
    if importlib.util.find_spec("triton") is None:
        return False
    if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
        if "triton" in sys.modules:
            raise RuntimeError("triton_interpreter.choose() must run before anything imports Triton")
        os.environ["TRITON_INTERPRET"] = "1"
    if interpreting():
        _patch()
    return interpreting()


@cache
def _patch() -> None:
    patch_bfloat16()
    patch_e4m3()
    launch_in_turns()
    patch_language_once()
    remember_types()


def interpreting() -> bool:
    """Whether Triton interprets in this process."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def device() -> torch.device:
    """Where kernels under test run: the CPU in the interpreter, else the GPU."""
    return torch.device("cpu" if interpreting() else "cuda")


# --- bfloat16 -----------------------------------------------------------------------------------------------


def bits_to_float(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float_to_bits(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 bit patterns: to nearest, ties to even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet_nan = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(values), quiet_nan, rounded).reshape(np.shape(values))


def patch_bfloat16() -> None:
    """Make the interpreter do bfloat16 in float32 with one rounding at the end.

    By itself it is silently wrong: casts truncate, and `dot`, arithmetic, sums and comparisons work on the
    raw 16-bit patterns.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

    def is_bf16(handle: TensorHandle) -> bool:
        return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16

    def widen(handle: TensorHandle) -> TensorHandle:
        return TensorHandle(bits_to_float(handle.data), tl.float32) if is_bf16(handle) else handle

    def narrow(handle: TensorHandle) -> TensorHandle:
        return TensorHandle(float_to_bits(handle.data), tl.bfloat16)

    def rounded_once(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(self, *args):
            wide = [widen(arg) if isinstance(arg, TensorHandle) else arg for arg in args]
            result = original(self, *wide)
            if result.data.dtype == np.bool_:  # the interpreter would label a comparison as its operands
                return TensorHandle(result.data, tl.int1)
            # what was widened is another object
            return result if all(a is b for a, b in zip(args, wide, strict=True)) else narrow(result)

        return operation

    def cast_impl(self, src, dst_type, original=InterpreterBuilder.cast_impl):
        to_bf16 = dst_type.scalar == tl.bfloat16
        if not is_bf16(src) and not to_bf16:
            return original(self, src, dst_type)
        if is_bf16(src) and to_bf16:
            return src
        wide = widen(src) if is_bf16(src) else original(self, src, tl.float32)
        return narrow(wide) if to_bf16 else original(self, wide, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding, original=InterpreterBuilder.create_fp_to_fp):
        bits = {src.dtype.scalar.primitive_bitwidth, dst_type.scalar.primitive_bitwidth}
        truncating = rounding is not None and rounding != interpreter._ir.ROUNDING_MODE.RTNE
        if (is_bf16(src) or dst_type.scalar == tl.bfloat16) and 8 not in bits and not truncating:
            return cast_impl(self, src, dst_type)
        return original(self, src, dst_type, rounding)

    def create_dot(self, a, b, d, *args, original=InterpreterBuilder.create_dot):
        return original(self, widen(a), widen(b), d, *args)

    def widened_apply(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply_impl(self, input):  # sums, maxima, scans: in float32, rounded once
            builtin = self.combine_fn.fn.__module__ == "triton.language.standard"
            if not builtin or not any(is_bf16(t.handle) for t in input):
                return original(self, input)
            wide = (widen(t.handle) for t in input)
            result = original(self, tuple(self.to_tensor(handle.data, handle.dtype) for handle in wide))
            results = result if isinstance(result, (list, tuple)) else [result]
            return [
                self.to_tensor(float_to_bits(r.handle.data), tl.bfloat16) if r.dtype == tl.float32 else r
                for r in results
            ]

        return apply_impl

    for function in (cast_impl, create_fp_to_fp, create_dot):
        setattr(InterpreterBuilder, function.__name__, function)
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma"):
        setattr(InterpreterBuilder, name, rounded_once(getattr(InterpreterBuilder, name)))
    for cls in (ReduceOps, ScanOps):
        cls.apply_impl = widened_apply(cls.apply_impl)


def patch_e4m3() -> None:
    """Round float32 to E4M3 as a GPU does: to the nearest, ties to even, at most 448.

    By itself the interpreter takes ties up, and loses a carry out of the mantissa.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        to_nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.float8e4nv or not to_nearest:
            return original(self, src, dst_type, rounding_mode)
        values = torch.from_numpy(np.clip(src.data, -448.0, 448.0)).to(torch.float8_e4m3fn)
        return TensorHandle(values.view(torch.uint8).numpy(), dst_type.scalar)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def launch_in_turns() -> None:
    """Let one thread at a time interpret: Triton keeps the program's place and its language in globals.

    After two launches at the same time, `triton.language` would stay redirected, and whatever is compiled in
    this process afterwards would fail.
    """
    from triton.runtime.interpreter import GridExecutor

    original = GridExecutor.__call__
    turn = threading.RLock()

    def call(self, *args, **kwargs):
        with turn:
            return original(self, *args, **kwargs)

    GridExecutor.__call__ = call


def patch_language_once() -> None:
    """Redirect `triton.language` once per launch, not at every device function: a quarter of the time.

    Afterwards all of it is as it was, for what is compiled in this process: Triton never restores what device
    functions of other modules see, such as `tl.core`, with which `tl.sum` is written. And let a loop bound be
    an array of one element, which NumPy 2.4 refuses to Triton 3.6.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    done: set[int] = set()
    restores: list[Callable[[], None]] = []  # of the launch that runs

    def restore_all():
        while restores:
            restores.pop()()
        done.clear()

    def patch_lang(fn):
        namespace = id(fn.__globals__)
        if namespace in done:
            return interpreter._LangPatchScope()
        done.add(namespace)
        scope = original(fn)
        restores.append(scope.restore)
        if len(restores) == 1:
            scope.restore = restore_all
        return scope

    original_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        original_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang = patch_lang
    interpreter._patch_lang_tensor = patch_lang_tensor


def remember_types() -> None:
    """Make the shape in constexprs and the NumPy type of each Triton type once.

    The interpreter makes them anew for each operation of each program: a third of the time of attention over
    511 and 512 tokens in bfloat16 (Triton 3.9).
    """
    from triton.language import core
    from triton.runtime import interpreter

    make, np_dtype_of = core.tensor.__init__, interpreter._get_np_dtype
    known: dict[str, dict[Any, Any]] = {}
    np_dtypes: dict[str, object] = {}

    def init(self, handle, type):
        if type.name in known:
            self.__dict__.update(known[type.name], handle=handle, type=type, dtype=type.scalar)
        else:
            make(self, handle, type)
            own = {"handle", "type", "dtype"}
            known[type.name] = {name: value for name, value in vars(self).items() if name not in own}

    def np_dtype(tt_dtype):
        scalar = tt_dtype.scalar
        if isinstance(scalar, core.pointer_type):
            return np_dtype_of(tt_dtype)
        if scalar.name not in np_dtypes:
            np_dtypes[scalar.name] = np_dtype_of(tt_dtype)
        return np_dtypes[scalar.name]

    core.tensor.__init__ = init
    interpreter._get_np_dtype = np_dtype
