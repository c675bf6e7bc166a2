"""The steps of memory order around the counter of `_linear_norm_kernel`, in PTX and in machine code.

    python tests/support/memory_order_of_linear_norm.py 80 90      one JSON object per architecture

Steps from the last store of the sums to the first load of them; equal neighbours count once. Triton compiles
only with its interpreter off, so tests run this as a process.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Stores and loads of float32 sums are of 16 bytes; the counter's own store is not.
PTX = {
    "store": r"st\.global\.v4\.b32",
    "barrier": r"bar\.sync|barrier\.sync",
    "atomic": r"atom\.global\.gpu\.acq_rel\.add",
    "load": r"ld\.global\.cg\.v4\.b32",
}
SASS = {
    "store": r"\bSTG\.E\.128\b",
    "barrier": r"\bBAR\.SYNC",
    "fence": r"\bMEMBAR\.(ALL|SC)\.GPU\b",
    "atomic": r"\bATOMG\S*\.ADD\.STRONG\.GPU\b",
    "load": r"\bLDG\.E\.128\.STRONG\.GPU\b",
}


def steps(text: str, patterns: dict[str, str]) -> list[str]:
    """The steps around the one atomic, in the order of the text."""
    seen = []
    for line in text.splitlines():
        seen += [name for name, pattern in patterns.items() if re.search(pattern, line)]
    if seen.count("atomic") != 1:
        raise ValueError(f"expected one atomic, got {seen.count('atomic')}")
    at = seen.index("atomic")
    first = max(i for i in range(at) if seen[i] == "store")
    last = next(i for i in range(at, len(seen)) if seen[i] == "load")
    return [name for name, _ in itertools.groupby(seen[first : last + 1])]


def found(arch: int) -> dict[str, object]:
    """The steps of the first job of test_compile.py on this architecture."""
    import triton
    from triton.backends.compiler import GPUTarget

    from fastbert.kernels import linear_norm as kernels
    from tests.support import triton_compile

    name, _, call = next(triton_compile.linear_norm_jobs(kernels, False))
    (kernel, args, config), *_ = triton_compile.recorded(kernels, call)
    source, options = triton_compile.source(kernel, args, config)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    listing = triton_compile.dumped(compiled.asm["cubin"], "-sass")
    return {"job": name, "arch": arch, "ptx": steps(compiled.asm["ptx"], PTX), "sass": steps(listing, SASS)}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for each in map(int, sys.argv[1:]):
        print(json.dumps(found(each)))
