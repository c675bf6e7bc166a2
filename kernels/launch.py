"""One way to launch a Triton kernel: on the tensors' device, on its current stream, with defaults pinned.

Triton's own way, `kernel[grid](…)`, binds, classifies and formats all arguments at every launch, which takes
the host longer than a small kernel runs. Here a launch that is like an earlier one goes to the compiled
kernel at once. Two launches are alike where their keys are equal, and a key distinguishes all that Triton's
specialization does, and more:

    tensor       its dtype, and whether its address is a multiple of 16
    int          its range (32 bits, or which), and if it is specialized: whether it is 1, or a multiple of 16
    constexpr    its value, as every option's
    all          their types; None is a constexpr, a float is float32, a bool is one bit

Every first launch of a key is Triton's own, which compiles; its kernel is kept. So is every launch under
another version of Triton than those whose `JITFunction.run` this repeats, in the interpreter, under hooks, in
debug mode, and with arguments of other types (tensor descriptors).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from fastbert.runtime.streams import current_stream, on

# Per thread, for `maxnreg`, up to 8 warps. Without a limit ptxas spills to fit one more program on a
# multiprocessor.
MOST_REGISTERS = 255
# The versions of Triton whose `JITFunction.run` passes to a compiled kernel what `_launch` does.
REPEATED = ("3.6", "3.9")
_is_repeated = triton.__version__.rpartition(".")[0] in REPEATED
# Forms kept, and keys of one; more than any model has. Beyond, all are forgotten.
MOST_KEPT = 4096
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def launch(kernel, grid: tuple[int, ...], device: torch.device, *args, **config) -> None:
    """Launch `kernel` with the device guard that Triton lacks; `config`: constexprs, num_warps, num_stages.

    The fusion of multiply and add is pinned, because Triton 3.10 changes its default.
    """
    if device.type != "cuda":
        kernel[grid](*args, **config, enable_fp_fusion=True)
    else:
        with on(device):
            _launch(kernel, grid, device.index, args, config)


# --- launches that are like an earlier one ------------------------------------------------------------------

# By the kernel's id, the arguments' types, and the constexprs and options: a `_Form` to launch by.
_forms: dict[tuple, _Form] = {}


class _Form(NamedTuple):
    """How launches of a kernel with the same types, constexprs and options are distinguished.

    Attributes:
        split: (*args) -> (key, what the compiled kernel gets for them); None if Triton must launch.
        tail: the constexprs after them, which the compiled kernel skips.
        known: by (index of the device, key): (run, function, packed metadata, the compiled kernel).
        kernel: kept, so that its id is not another's.
    """

    split: Callable | None
    tail: tuple
    known: dict[tuple, tuple]
    kernel: object


def _launch(kernel, grid, index, args, config) -> None:
    """`kernel[grid](…)` on the current device, which is that of `index`."""
    runtime = knobs.runtime
    if not _is_repeated or _has_calls(runtime.launch_enter_hook) or _has_calls(runtime.launch_exit_hook):
        kernel[grid](*args, **config, enable_fp_fusion=True)
        return
    told = (id(kernel), *map(type, args), *config, *config.values())
    form = _forms.get(told)
    if form is None:
        form = _keep(_forms, told, _form(kernel, args, config))
    split, tail, known, _ = form
    if (
        split is None
        or kernel.pre_run_hooks
        or runtime.debug
        or runtime.add_stages_inspection_hook is not None
    ):
        kernel[grid](*args, **config, enable_fp_fusion=True)
        return
    key, values = split(index, *args)
    found = known.get(key)
    if found is None:
        compiled = kernel[grid](*args, **config, enable_fp_fusion=True)
        if type(compiled) is CompiledKernel:
            _keep(known, key, (compiled.run, compiled.function, compiled.packed_metadata, compiled))
        return
    run, function, metadata, _ = found
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    run(x, y, z, current_stream(index), function, metadata, None, None, None, *values, *tail)


def _has_calls(hook) -> bool:
    """Whether a hook of `knobs.runtime` does something; Triton's own is a chain of functions."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _keep(where: dict, key: tuple, value):
    if len(where) >= MOST_KEPT:
        where.clear()
    where[key] = value
    return value


def _form(kernel, args: tuple, config: dict) -> _Form:
    """The form of launches with such types, constexprs and options."""
    by_triton = _Form(None, (), {}, kernel)
    if type(kernel) is not JITFunction or kernel.debug or knobs.compilation.instrumentation_mode:
        return by_triton
    given, rest = kernel.params[: len(args)], kernel.params[len(args) :]
    if len(given) < len(args) or not all(p.is_constexpr and p.name in config for p in rest):
        return by_triton
    prepare, key, values = [], ["index"], []
    for parameter, value in zip(given, args, strict=True):
        name, kind = parameter.name, type(value)
        values.append(name)
        if parameter.is_constexpr:
            key.append(name)
        elif kind in _TENSORS:
            prepare.append(f"at_{name} = {name}.data_ptr()")
            key += [f"{name}.dtype", f"at_{name} & 15 == 0"]
            values[-1] = f"at_{name}"
        elif kind is int:
            key.append(f"{name} >> 31")
            if not parameter.do_not_specialize:
                key.append(f"{name} == 1 or ({name} & 15 and 2)")
        elif kind not in (float, bool, type(None)):
            return by_triton
    lines = [
        f"def split(index, {', '.join(p.name for p in given)}):",
        *(f"    {line}" for line in prepare),
        f"    return ({', '.join(key)},), ({', '.join(values)},)",
    ]
    space: dict = {}
    exec("\n".join(lines), space)
    return _Form(space["split"], tuple(config[p.name] for p in rest), {}, kernel)


# --- sizes of grids -----------------------------------------------------------------------------------------


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. `triton.cdiv` takes the host a microsecond, because kernels may call it too."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1; see `cdiv`."""
    return 1 << (n - 1).bit_length()


# Programs per multiprocessor of a kernel that walks over its work, where no table says otherwise.
PROGRAMS = 3


@cache
def resident_programs(device: torch.device, per_multiprocessor: int = PROGRAMS) -> int:
    """The number of programs of a kernel that walks over its work."""
    if device.type == "cuda":
        return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count
    # A few in the interpreter, which has two multiprocessors.
    return 2 * per_multiprocessor
