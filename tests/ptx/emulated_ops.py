"""Cases of ops on what Triton compiles our kernels to, in the PTX emulator: one JSON object per line.

    python -m tests.ptx.emulated_ops linear attention [--dtype bfloat16] [--all] [--arch 80]

Each case runs with late and early copies and with several orders of warps and blocks. The first run keeps the
error rule, and other runs return its bits. Triton compiles only with its interpreter off, so tests run this
as a process.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator

import torch

from fastbert.runtime import dispatch
from fastbert.runtime.namespaces import has_backward
from fastbert.runtime.table import HALF
from fastbert.testing import error_rule
from tests.ptx.emulated_launches import Emulation, emulated

# (schedule of copies, seed of the order of warps and blocks); all runs equal the first.
RUNS = (("late", 0), ("early", 1), ("late", 2))


def rows(case: error_rule.Case, dtype: torch.dtype, emulation: Emulation) -> Iterator[dict]:
    """One row per output and gradient of a case."""
    begin = time.perf_counter()
    backward = has_backward("triton", case.op)
    inputs = case.inputs(dtype, "cpu", 0)
    with torch.no_grad():
        outputs = case.oracle(**error_rule.with_grad(inputs, (), torch.float64))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    douts = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(dtype) for o in outputs]

    def evaluated(function, as_dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        return error_rule.evaluate(function, case, inputs, as_dtype, backward, douts)

    oracle, eager = evaluated(case.oracle, torch.float64), evaluated(case.eager)
    found = []
    emulation.launched.clear()
    for schedule, seed in RUNS:
        emulation.schedule, emulation.seed = schedule, seed
        with dispatch.use_backend(**{case.op: "triton"}):
            found.append(evaluated(case.call))
    for name, truth in oracle.items():
        floor = 0.0 if dtype in HALF else case.floor(inputs, name)
        first = found[0][name]
        *errors, reason = error_rule.compare(first, eager[name], truth, dtype, floor)
        differs = [run for run, other in zip(RUNS, found, strict=True) if not same(first, other[name])]
        yield {
            "case": repr(case),
            "dtype": str(dtype).removeprefix("torch."),
            "quantity": name,
            "errors": errors,
            "reason": reason,
            "differs": differs,
            "kernels": sorted(set(emulation.launched)),
            "forms": sorted(hopper_forms(emulation)),
            "seconds": time.perf_counter() - begin,
        }


def hopper_forms(emulation: Emulation) -> set[str]:
    """What the kernels so far have of sm_90: tiles stored and loaded, products with A in registers or not."""
    found = set()
    for kernel in emulation.kernels.values():
        found |= {f"tile {way}" for way in re.findall(r"bulk\.tensor\.\dd\.(global|shared)", kernel.ptx)}
        found |= {f"A in {a}" for a in re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\{|%rd)", kernel.ptx)}
    return {f.replace("{", "registers").replace("%rd", "memory") for f in found}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, NaN included."""
    one, other = (t.reshape(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(one, other)


def main() -> None:
    """Command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="+")
    parser.add_argument("--dtype", action="append", help="bfloat16 by default")
    parser.add_argument("--all", action="store_true", help="all cases, not only those of a self-check")
    parser.add_argument("--gpu", action="store_true", help="the larger cases of a self-check on a GPU")
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--first", type=int, help="only so many cases of each op")
    parser.add_argument("--arch", type=int, default=80)
    parser.add_argument("--contract", action="store_true", help="sums of products as multiply-adds")
    options = parser.parse_args()
    emulation = Emulation(arch=options.arch, contract=options.contract)
    with emulated(emulation):
        for op in options.ops:
            chosen = error_rule.gpu_cases if options.gpu else error_rule.small_cases
            cases = error_rule.cases(op) if options.all else chosen(op)
            cases = [c for c in cases if options.only is None or options.only in repr(c)]
            for case in cases[: options.first]:
                for name in options.dtype or ["bfloat16"]:
                    dtype = getattr(torch, name)
                    if dispatch.unsupported_reason("triton", op, "cpu", dtype) is None:
                        for row in rows(case, dtype, emulation):
                            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
