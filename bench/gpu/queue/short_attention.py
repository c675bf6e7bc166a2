"""Attention's forward of short texts, and with heads of 32, by each CUDA kernel that has the call.

    python bench/gpu/queue/short_attention.py --json FILE [--budget SECONDS] [--device cpu]

In bf16: short texts by the kernel for at most 64 tokens, and by the one for any length, which a larger
`max_seqlen` chooses; longer texts with heads of 32 and of 64, also causal, with the kernels for compute
capability 9.0 and without. A row has the time, and the greatest difference from the other kernel's output.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.gpu import groups  # noqa: E402
from bench.lib.timing import interleave  # noqa: E402
from fastbert.backends.cuda import attention as launchers  # noqa: E402
from fastbert.ops.attention import attention  # noqa: E402

LONGEST = 64  # of the kernel for short texts
MIXED = random.Random(0).sample(range(16, 65), 48) * 6
SHORT = {"256x16": [16] * 256, "64x32": [32] * 64, "256x32": [32] * 256, "256x64": [64] * 256, "mixed": MIXED}
LONG = {"64x128": [128] * 64, "32x256": [256] * 32, "32x512": [512] * 32}


def call(lengths: list[int], headdim: int, causal: bool, device: torch.device) -> functools.partial:
    """One forward with 12 heads; `max_seqlen` is missing."""
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    q, k, v = torch.randn(sum(lengths), 3, 12, headdim, device=device).bfloat16().unbind(1)
    return functools.partial(attention, q, k, v, ends, causal=causal)


def without_hopper() -> contextlib.AbstractContextManager:
    return unittest.mock.patch.object(launchers, "HOPPER", False)


def questions(device: torch.device) -> Iterator[tuple[str, dict, dict]]:
    """(name, candidates, contexts of theirs)."""
    tiny = device.type == "cpu"
    for headdim in (32, 64):
        for name, lengths in {"tiny": [5, 9]}.items() if tiny else SHORT.items():
            own = call(lengths, headdim, False, device)
            sizes = {"short": LONGEST, "any": LONGEST + 1}
            found = {which: functools.partial(own, max_seqlen=size) for which, size in sizes.items()}
            yield f"{name}-d{headdim}", found, {}
        for causal in (False,) if headdim == 32 else (False, True):
            for name, lengths in {"tiny": [70]}.items() if tiny else LONG.items():
                own = functools.partial(call(lengths, headdim, causal, device), max_seqlen=max(lengths))
                both = {"hopper": own, "mma_sync": own}
                yield f"{name}-d{headdim}" + "-causal" * causal, both, {"mma_sync": without_hopper}


def rows(device: torch.device, samples: int) -> Iterator[dict]:
    """A row for each call and kernel."""
    for name, candidates, within in questions(device):
        found = []
        for which, candidate in candidates.items():
            with within.get(which, contextlib.nullcontext)(), torch.inference_mode():
                found.append(candidate().float())
        with torch.inference_mode():
            timed = interleave(candidates, device, within=within, seconds=0.1, samples=(samples, 5 * samples))
        for which, timing in timed.items():
            same = {"difference": (found[0] - found[1]).abs().max().item()}
            yield {"name": f"{name}-{which}", "status": "ok", "candidate": which, **same, **timing.facts()}


def main(argv: list[str] | None = None) -> int:
    """Measure every call by both of its kernels."""
    args = groups.parsed(groups.options(__doc__, samples=10), argv)
    report = groups.begun(args)
    for row in rows(torch.device(args.device), 2 if args.device == "cpu" else args.samples):
        report.row({"step": "short_attention", **row})
    groups.ended(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
