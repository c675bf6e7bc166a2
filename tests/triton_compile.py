"""Offline compile gate for Triton kernels: what the launchers launch, compiled for GPUs that are not here.

The launchers of `kernels/<op>.py` run on meta tensors with a recorder in the place of `launch`. Each recorded
launch is compiled, and Triton's own `cuobjdump` reads registers, stack (spills) and shared
memory from the cubin. Triton compiles only with its interpreter off, so tests run this as a process:

    python tests/triton_compile.py layer_norm [--full]      one JSON object a line
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes a block may use


def layer_norm_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): every distinct config, with and without the optional inputs.

    By default bfloat16 at several widths and the other dtypes at one for sm_90, and one width in bfloat16 for
    the others; `full` is the product.
    """
    import torch
    import triton

    from fastbert.kernels import layer_norm as kernels

    widths = {}
    for hidden in (16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 12000):
        configs = kernels.fwd_config(hidden), kernels.bwd_config(hidden)
        column_blocks = tuple(triton.cdiv(hidden, block_n) for _, block_n, _ in configs)
        widths.setdefault((configs, column_blocks), hidden)
    widths = sorted({*widths.values(), 768, 1024})
    few = (64, 768, 1024, 4096, 8192, 12000)

    def call(dtype: torch.dtype, hidden: int, everything: bool) -> None:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        x, weight = empty(16384, hidden), empty(hidden, dtype=torch.float32)
        rstd, seed = empty(16384, dtype=torch.float32), empty(1, dtype=torch.int64)
        if everything:
            kernels.layer_norm_fwd(x, weight, weight, x, weight, 1e-12, 0.1, seed, 3, True)
            kernels.layer_norm_bwd(x, x, weight, rstd, rstd, 0.1, seed, 3, True, True, True)
        else:
            kernels.layer_norm_fwd(x, weight, weight, None, None, 1e-12, 0.0, None, 0, False)
            kernels.layer_norm_bwd(x, x, weight, rstd, rstd, 0.0, None, 0, False, False, False)

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for arch, dtype, hidden, everything in itertools.product(SHARED_LIMIT, dtypes, widths, (True, False)):
        default = dtype == torch.bfloat16 and hidden == 768
        if arch == 90:
            default = everything and hidden in (few if dtype == torch.bfloat16 else (768,))
        if full or default:
            name = f"{str(dtype).removeprefix('torch.')}-{hidden}-{'all' if everything else 'plain'}"
            yield name, arch, lambda a=dtype, b=hidden, c=everything: call(a, b, c)


JOBS = {"layer_norm": layer_norm_jobs}


def recorded(module, call: Callable[[], None]) -> list[tuple]:
    """The launches (kernel, args, config) that `call` makes through `module.launch`."""
    launches = []
    original = module.launch
    module.launch = lambda kernel, grid, device, *args, **config: launches.append((kernel, args, config))
    try:
        call()
    finally:
        module.launch = original
    return launches


def source(kernel, args: tuple, config: dict, max_registers: int | None = None):
    """(ASTSource, options) for a launch, specialised as Triton's runtime specialises it."""
    import torch
    import triton

    pointers = {
        torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64",
        torch.int32: "*i32", torch.uint8: "*u8", torch.int8: "*i8", torch.bool: "*i1",
    }  # fmt: skip
    signature, constexprs, attrs = {}, {}, {}
    aligned = [["tt.divisibility", 16]]
    for i, param in enumerate(kernel.params):
        value = args[i] if i < len(args) else config[param.name]
        one = type(value) is int and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or one:
            signature[param.name], constexprs[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name], attrs[(i,)] = pointers[value.dtype], aligned
        elif hasattr(value, "block_shape"):  # a tensor descriptor made on the host
            signature[param.name] = triton.runtime.jit.mangle_type(value)
        elif isinstance(value, int):
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(i,)] = aligned
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            raise TypeError(f"{param.name}: no Triton type for {value!r}")
    options = {k: v for k, v in config.items() if k in ("num_warps", "num_stages")}
    options |= {"enable_fp_fusion": True, "maxnreg": max_registers}
    return triton.compiler.ASTSource(kernel, signature, constexprs, attrs), options


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local bytes a thread (spills live there), static shared memory: from the cubin."""
    import triton

    cuobjdump = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    line = re.search(r"REG:\d+ STACK:\d+ .*", text)
    if line is None:
        raise RuntimeError(f"cuobjdump named no kernel: {text!r}")
    return {k.lower(): int(v) for k, v in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", line.group())}


def results(op: str, full: bool, jobs: int | None = None, max_registers: int | None = None) -> Iterator[dict]:
    """Compile every launch of the op's (first `jobs`) jobs: a dict of resources for each."""
    import triton
    from triton.backends.compiler import GPUTarget

    module = importlib.import_module(f"fastbert.kernels.{op}")
    for name, arch, call in itertools.islice(JOBS[op](full), jobs):
        for kernel, args, config in recorded(module, call):
            src, options = source(kernel, args, config, max_registers)
            compiled = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)
            yield {
                "kernel": kernel.fn.__name__,
                "job": name,
                "arch": arch,
                "num_warps": options["num_warps"],
                "dynamic_shared": compiled.metadata.shared,
                "shared_limit": SHARED_LIMIT[arch],
                **resources(compiled.asm["cubin"]),
            }


def main() -> None:
    """Command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=JOBS)
    parser.add_argument("--full", action="store_true", help="every config, dtype and architecture")
    parser.add_argument("--jobs", type=int, help="only the first so many calls of the launchers")
    parser.add_argument("--max-registers", type=int, help="a limit per thread, to see what spills under it")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    for row in results(options.op, options.full, options.jobs, options.max_registers):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
