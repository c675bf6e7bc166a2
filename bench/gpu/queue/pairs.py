"""Does the first product of a feed-forward block gain where two blocks of a cluster share the weight?

    python bench/gpu/queue/pairs.py --json FILE [--budget SECONDS] [--device cpu]

The sm_90a product with bias and GELU, in bf16 on 32 x 512 tokens: base (768 to 3,072), large (1,024 to 4,096)
and ModernBERT-base's gated one (768 to 2 x 1,152). `single` and `pairs` are one library's kernels,
interleaved. `times_single` is the time of `single` over that of `pairs`; the goal is 1.03. `same_bits` says
whether both return the same. On a CPU both ways are the op's own product of tiny sizes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.gpu import groups  # noqa: E402
from bench.lib.timing import interleave  # noqa: E402
from fastbert.backends.cuda import linear as launchers  # noqa: E402
from fastbert.ops.linear import linear  # noqa: E402

# depth and rows of the weight, and the gate
CASES: dict[str, tuple[int, int, str | None]] = {
    "base": (768, 3072, None),
    "large": (1024, 4096, None),
    "gated": (768, 2304, "first"),
}
TOKENS = 32 * 512


def ways(
    tokens: int, depth: int, columns: int, gated: str | None, device: torch.device
) -> dict[str, Callable[[], torch.Tensor]]:
    """The same product by single blocks and by pairs."""
    x, weight = (torch.randn(n, depth, device=device).bfloat16() for n in (tokens, columns))
    bias = torch.randn(columns, device=device).bfloat16()

    def product(pairs: bool) -> torch.Tensor:
        if device.type == "cpu":
            return linear(x, weight, bias, activation="gelu", gated=gated)
        return launchers.hopper_product(x, weight, bias, "gelu", False, gated=gated, pairs=pairs)[0]

    return {"single": functools.partial(product, False), "pairs": functools.partial(product, True)}


def rows(device: torch.device, samples: int) -> Iterator[dict]:
    """A row for each case and way."""
    tiny = device.type == "cpu"
    for case, (depth, columns, gated) in CASES.items():
        sizes = (4, depth // 16, columns // 16) if tiny else (TOKENS, depth, columns)
        calls = ways(*sizes, gated, device)
        single, pairs = (call() for call in calls.values())
        timed = interleave(calls, device, seconds=0.01 if tiny else 1.0, samples=(samples, 50 * samples))
        for way, timing in timed.items():
            row = {"name": f"ffn1-{case}-{way}", "status": "ok", "candidate": way, **timing.facts()}
            if way == "pairs":
                row["times_single"] = timed["single"].median_ms / timing.median_ms
                row["same_bits"] = torch.equal(single, pairs)
            yield row


def main(argv: list[str] | None = None) -> int:
    """Measure every case both ways."""
    args = groups.parsed(groups.options(__doc__, samples=10), argv)
    report = groups.begun(args)
    for row in rows(torch.device(args.device), 2 if args.device == "cpu" else args.samples):
        report.row({"step": "pairs", **row})
    groups.ended(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
