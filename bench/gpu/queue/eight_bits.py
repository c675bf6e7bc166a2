"""torch's products in eight bits beside bf16, at the four shapes of a layer: what an 8-bit encoder can gain.

    python bench/gpu/queue/eight_bits.py --json FILE [--budget SECONDS] [--device cpu]

BERT-base's and -large's products of 16,384 rows: F.linear in bf16, `torch._scaled_mm` in fp8 with one scale
and with a scale per row, `torch._int_mm`. Operands are quantised before; nothing that surrounds the product
is counted. On a CPU only bf16 is tried.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.gpu import groups  # noqa: E402
from bench.lib import workloads  # noqa: E402
from bench.lib.machine import describe  # noqa: E402
from bench.lib.probe_steps import Bench, Candidate  # noqa: E402
from bench.lib.report import Report  # noqa: E402

ROWS = 16384


def candidates(name: str, rows: int, n: int, k: int, device: torch.device) -> dict[str, Candidate]:
    """The ways to compute one product, by name."""
    x, w = (torch.randn(size, k, device=device) for size in (rows, n))
    bias = torch.randn(n, device=device).bfloat16()

    def bf16():
        a, b = x.bfloat16(), w.bfloat16()
        return lambda: torch.nn.functional.linear(a, b, bias)

    def fp8(by_row: bool):
        def make():
            def scaled(t):
                most = t.abs().amax(1, keepdim=True) if by_row else t.abs().amax()
                scale = most / 448.0
                return (t / scale).to(torch.float8_e4m3fn), scale

            (a, scale_a), (b, scale_b) = scaled(x), scaled(w)
            scale_b = scale_b.t() if by_row else scale_b
            return lambda: torch._scaled_mm(
                a, b.t(), scale_a, scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        return make

    def int8():
        a, b = ((t / t.abs().amax() * 127).round().to(torch.int8) for t in (x, w))
        return lambda: torch._int_mm(a, b.t())

    makers = {"bf16": bf16}
    if device.type == "cuda":
        makers |= {"fp8_tensor": fp8(False), "fp8_rows": fp8(True), "int8": int8}
    work = 2.0 * rows * n * k
    return {f"{kind}-{name}-{rows}x{n}x{k}": Candidate(make, flops=work) for kind, make in makers.items()}


def main(argv: list[str] | None = None) -> int:
    """Time every product."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups.add_options(parser, samples=50)
    args = parser.parse_args(argv)
    groups.check_options(parser, args)
    tiny, device = args.device == "cpu", torch.device(args.device)
    report = Report(args.json, {"device": args.device}, args.note)
    report.data["environment"] = describe(device)
    report.save()
    bench = Bench(device, tiny, report.row)
    bench.step = "eight-bits"
    for model in (workloads.TINY,) if tiny else (workloads.BASE, workloads.LARGE):
        for name, (n, k) in model.gemms().items():
            found = candidates(f"{model.name}-{name}", 16 if tiny else ROWS, n, k, device)
            with torch.inference_mode():
                bench.measure(found, seconds=0.3, samples=(5, args.samples))
            bench.free()
    return 0


if __name__ == "__main__":
    sys.exit(main())
