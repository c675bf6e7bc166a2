"""Which variant of attention's forward for compute capability 9.0 is right and fastest, on one device.

python bench/gpu/queue/attention.py --json FILE.jsonl --budget 120

First each variant's error against float64, as a multiple of what rounding allows, and whether ten runs have
the same bits. Then medians of device time, interleaved, beside the mma.sync kernel and PyTorch's attention.
`--device cpu` shows that the script runs: all variants are then the CPU's attention.
"""

import argparse
import functools
import itertools
import os
import statistics
import sys
import time
from itertools import accumulate
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from bench.lib import workloads  # noqa: E402
from bench.lib.machine import describe  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402
from bench.lib.report import Report, count  # noqa: E402
from fastbert.backends.cuda import attention as launchers  # noqa: E402
from fastbert.ops.attention import AttentionInputs, attention, attention_ref  # noqa: E402
from fastbert.ops.attention_grid import keep_mask  # noqa: E402
from fastbert.testing.device_time import DeviceClock  # noqa: E402
from fastbert.testing.speed import _HostClock  # noqa: E402

VARIANTS = {f"variant{v}": v for v in range(4)}
RAGGED = (384, 272, 210, 178, 164, 150, 128, 96) * 8
CHECKED = ((1,), (17,), (64,), (65,), (128,), (500,), (570, 1, 64, 0, 129), (20,) * 150 + (300,), RAGGED[:8])
TIMED = {
    "16x512": (512,) * 16,
    "32x512": (512,) * 32,
    "ragged64": RAGGED,
    "squad64": workloads.draw_squad(64),
}
TIMED |= {"64x32": (32,) * 64, "32x128": (128,) * 32}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def made(lengths, nheads, dtype, device, p, sharpness=1.0):
    """Inputs of heads of 64, views of one packed tensor. Maxima of sharp scores grow from tile to tile."""
    g = torch.Generator().manual_seed(sum(lengths))
    q, k, v = torch.randn(sum(lengths), 3, nheads, 64, generator=g).to(dtype).to(device).unbind(1)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    seed = torch.tensor([1234], device=device) if p > 0 else None
    return AttentionInputs(q.mul_(sharpness), k, v, ends, max(lengths), 0.125, False, None, None, p, seed, 9)


def ours(inputs, variant):
    """(out, lse) by a variant, or by the kernel of mma.sync where it is None."""
    if not inputs.q.is_cuda:
        q, k, v, ends, size, scale, _, _, _, p, seed, offset = inputs
        options = dict(softmax_scale=scale, dropout_p=p, seed=seed, offset=offset, return_lse=True)
        return attention(q, k, v, ends, size, **options)[:2]
    os.environ["FASTBERT_ATTENTION_VARIANT"] = str(variant or 0)
    return launchers.forward(inputs, inputs.dropout_p > 0, variant is not None)[:2]


def check(inputs, variant):
    """Errors of out and lse over what rounding allows, and whether ten runs have the same bits."""
    q, k, v, ends, size, scale, _, _, _, p, seed, offset = inputs
    keep = keep_mask(seed, offset, ends[:-1], q.shape[1], size, p) if p > 0 else None
    options, (q, k, v) = (
        dict(softmax_scale=scale, dropout_p=p, keep_mask=keep),
        (t.double() for t in (q, k, v)),
    )
    expected, expected_lse, _ = attention_ref(q, k, v, ends, size, **options)
    terms = attention_ref(q, k, v.abs(), ends, size, **options)[0]
    eps = torch.finfo(inputs.q.dtype).eps
    bound = eps / 2 * (1.01 * terms + expected.abs() * (1 + eps)) + 4e-5 * terms + 1e-6
    out, lse = ours(inputs, variant)
    again = [ours(inputs, variant) for _ in range(10)]
    error = ((out.double() - expected).abs() / bound).nan_to_num(1e9).max().item()
    lse_error = ((lse.double() - expected_lse).abs() / (1 + expected_lse.abs()) / 8e-6).max().item()
    same = all(torch.equal(out, a) and torch.equal(lse, b) for a, b in again)
    right = error <= 1 and lse_error <= 1 and same
    return {
        "status": "ok" if right else "error",
        "error": f"{error:.3g} {lse_error:.3g} {same}",
        "same": same,
    }


def candidates(inputs):
    """Name -> call of all that is timed."""
    q, k, v, ends, size, *_ = inputs
    found = {name: functools.partial(ours, inputs, v) for name, v in VARIANTS.items()}
    if not q.is_cuda or inputs.dropout_p > 0:
        return found
    found["mma_sync"] = functools.partial(ours, inputs, None)
    if q.shape[0] < size * (len(ends) - 1):

        def varlen():
            from torch.nn.attention.varlen import varlen_attn  # not in every torch

            return varlen_attn(q, k, v, ends, ends, size, size)

        return found | {"torch_varlen": varlen}
    heads = [t.unflatten(0, (-1, size)).transpose(1, 2) for t in (q, k, v)]
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        in_backend = sdpa_kernel(getattr(SDPBackend, name))(F.scaled_dot_product_attention)
        found[f"torch_{name.lower()}"] = functools.partial(in_backend, *heads)
    return found


def timed(inputs, samples):
    """(candidate, row) of each, all interleaved."""
    clocks = {}
    for name, call in candidates(inputs).items():
        run = lambda n, call=call: [call() for _ in range(n)][-1]  # noqa: E731
        try:
            clock = DeviceClock() if inputs.q.is_cuda else _HostClock()
            clock.once(run, 3)
            warm = clock.once(run, 3)
            number = max(1, min(50, int(2.0 / max(warm.ms, 1e-4))))
            clock.spin_for(warm.host_ms * number)
            clocks[name] = functools.partial(clock.sample, run, number)
        except Exception as error:
            yield name, {"status": "error", "error": reason_of(error)}
    rounds = [{name: clocks[name]() for name in list(clocks)[:: 1 - turn % 2 * 2]} for turn in range(samples)]
    flops = 4 * 64 * inputs.q.shape[1] * inputs.cu_seqlens.diff().double().square().sum().item()
    for name in clocks:
        ms = sorted(each[name].ms for each in rounds)
        row = {
            "status": "ok",
            "median_ms": statistics.median(ms),
            "n": len(ms),
            "spread": (ms[-1] - ms[0]) / ms[0],
        }
        bound = any(each[name].launch_bound for each in rounds)
        yield name, row | {"gflops": flops / row["median_ms"] / 1e6, "launch_bound": bound}


def rows(args, begin):
    """The rows of both parts."""
    tiny, wrong = args.device == "cpu", "the budget is spent"
    for lengths in CHECKED[2:4] if tiny else CHECKED:
        shape = "_".join(map(str, lengths[:8]))
        for tag, p, sharpness, name in itertools.product(DTYPES, (0, 0.25), (1, 8), VARIANTS):
            inputs = made(lengths, 2, DTYPES[tag], args.device, p, sharpness)
            row = {"name": f"check-{name}-{tag}-{shape}-p{p}-sharp{sharpness}"}
            try:
                yield row | check(inputs, VARIANTS[name])
            except Exception as error:
                yield row | {"status": "error", "error": reason_of(error)}
    cases = [(name, heads, 0.0) for name in TIMED for heads in (12, 16)]
    for name, heads, p in (
        [("64x32", 1, 0.0)] if tiny else [*cases, ("32x512", 12, 0.1), ("ragged64", 12, 0.1)]
    ):
        label = f"time-{name}x{heads}-p{p}"
        if time.monotonic() - begin > args.budget:
            yield {"name": label, "status": "skipped", "error": wrong}
            continue
        inputs = made(TIMED[name], heads, torch.bfloat16, args.device, p)
        for candidate, row in timed(inputs, 2 if tiny else args.samples):
            yield {"name": f"{label}-{candidate}"} | row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="FILE.jsonl")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--samples", type=count, default=15)
    parser.add_argument("--variants", nargs="+", choices=list("0123"), default=list("0123"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args, begin = parser.parse_args(), time.monotonic()
    VARIANTS = {f"variant{v}": int(v) for v in args.variants}
    report = Report(args.json.with_suffix(".jsonl"), {"budget": args.budget, "samples": args.samples}, None)
    report.data["environment"] = describe(torch.device(args.device))
    report.save()
    for row in rows(args, begin):
        report.row(row)
    report.data["finished"] = True
    report.save()
    sys.exit(any(row["name"].startswith("check") and row["status"] == "error" for row in report.data["rows"]))
