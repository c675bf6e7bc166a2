"""One line per op, case, pass, dtype and backend: µs, GFLOP/s, GB/s, share of the roof, × PyTorch's speed.

    python bench/bench_kernels.py [--op OP] [--workload 8x128] [--device cuda] [--pass backward] [--json FILE]

The shapes are BERT-base's for a workload of lib/workloads.py (`8x128` on a CPU, `full` on a GPU), from the
`testing.Case`s that the tests use too. Every backend is timed turn by turn with what a PyTorch user would
call: F.linear and F.gelu, F.layer_norm, SDPA on the padded batch with its mask, …; for `linear_int8` the same
F.linear on the weights in floating point. Medians.

`of_roof` is the least time that the machine's roofs allow (`roofs.py`: arithmetic peak of the dtype, or
memory bandwidth, whichever takes longer) over the time taken; with tensors that stay in a cache it can
exceed 1. `*` marks the backend that serves by default. Backward is the backward alone, the gradients of
every input.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from bench.lib import roofs as machine_roofs  # noqa: E402
from bench.lib import workloads  # noqa: E402
from bench.lib.machine import describe  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402
from bench.lib.report import Report, count, row_line  # noqa: E402
from bench.lib.roofs import TAGS, Roofs  # noqa: E402
from bench.lib.timing import interleave, rotations  # noqa: E402
from fastbert import testing  # noqa: E402
from fastbert.runtime import dispatch  # noqa: E402
from fastbert.testing import serving  # noqa: E402

PASSES = ("forward", "backward")
# times the forward's; the rest is bound by memory
FLOPS_OF_BACKWARD = {"linear": 2.0, "feed_forward": 2.0, "linear_cross_entropy": 2.0, "attention": 2.5}
LINE = "{:1}{:20} {:30} {:8} {:4} {:9} {:>10} {:>9} {:>8} {:>8} {:>8}"
HEAD = LINE.format("", "op", "case", "pass", "", "backend", "us", "gflops", "gbytes", "of_roof", "× torch")


def line(row: dict) -> str:
    """The printed form of a row."""
    if row["status"] == "skipped":
        return f"{row['name']:<60} skipped: {row['error']}"
    if row["status"] != "ok" or "times_torch" not in row:
        return row_line(row)
    names = [row[k] for k in ("op", "case", "pass", "dtype", "backend")]
    figures = (f"{row['median_ms'] * 1e3:,.1f}", *(f"{row[k]:,.1f}" for k in ("gflops", "gbs")))
    shares = f"{row['of_roof']:.0%}", f"{row['times_torch']:.2f}"
    return LINE.format("*" if row["serves"] else "", *names, *figures, *shares)


def torch_inputs(case: testing.Case, inputs: dict) -> dict:
    """Inputs of the plain PyTorch call: the case's own; for attention padded, for int8 in floating point."""
    if case.op == "linear_int8":
        x, weight, scale = inputs["x"], inputs["weight"], inputs["scale"]
        return {"x": x, "weight": (weight * scale[:, None]).to(x.dtype), "bias": inputs["bias"]}
    if case.op != "attention":
        return inputs
    sequences = inputs["qkv"].split(list(case.lengths))
    lengths = torch.tensor(case.lengths, device=inputs["qkv"].device)
    mask = torch.arange(max(case.lengths), device=lengths.device) < lengths[:, None]
    qkv = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    # (batch, 1, 1, seqlen), as transformers gives it
    return {"qkv": qkv, "mask": None if mask.all() else mask[:, None, None, :]}


def torch_call(case: testing.Case) -> Callable:
    """The plain PyTorch call, for `torch_inputs`."""
    if case.op == "attention":

        def sdpa(qkv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))  # each (batch, nheads, seqlen, headdim)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        return sdpa
    if case.op == "linear_int8":
        activation = {None: lambda y: y, "gelu": F.gelu}[case.activation]
        return lambda x, weight, bias: activation(F.linear(x, weight, bias))
    return case.eager


def our_call(case: testing.Case, inputs: dict) -> Callable:
    """Our op as a model in eval calls it: with panels of the weight where the backend makes them."""
    module = importlib.import_module(f"fastbert.ops.{case.op}")
    if not hasattr(module, "panel_maker"):
        return case.call
    make_panels = module.panel_maker(inputs["x"].device, inputs["x"].dtype)
    if make_panels is None:
        return case.call
    options = {"activation": case.activation, "panels": make_panels(inputs["weight"])}
    return functools.partial(getattr(module, case.op), **options)


def one_call(function: Callable, case: testing.Case, inputs: dict, backward: bool) -> Callable[[], object]:
    """`function` on one set of inputs; with `backward`, the gradients of all its inputs alone."""
    if not backward:

        def forward() -> None:
            with torch.no_grad():
                function(**inputs)

        return forward
    kwargs = {
        name: value.detach().requires_grad_() if name in case.grad_inputs and value is not None else value
        for name, value in inputs.items()
    }
    wanted = [kwargs[name] for name in kwargs if name in case.grad_inputs and kwargs[name] is not None]
    outputs = function(**kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    douts = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, wanted, douts, retain_graph=True)


def work(case: testing.Case, dtype: torch.dtype, inputs: dict, backward: bool) -> tuple[float, float]:
    """(operations, fewest bytes moved) of one pass."""
    if not backward:
        return case.flops(), case.bytes(dtype)
    flops = FLOPS_OF_BACKWARD.get(case.op, 1.0) * case.flops()
    element = dtype.itemsize
    if case.op == "layer_norm":  # z, dy; dx, which is the residual's gradient too
        return flops, 3 * case.rows * case.hidden * element
    if case.op == "linear":  # x, weight, dy, and the pre-activation if there is one; dx, dweight
        rows, k, n = case.rows, case.in_features, case.out_features
        return flops, (2 * rows * k + 2 * n * k + rows * n * (2 if case.activation else 1)) * element
    if case.op == "feed_forward":  # dy, x, weights, pre and act(pre); dx and the weights' gradients
        weights = case.inner * (case.hidden + case.out)
        return flops, (case.rows * (case.out + 2 * case.hidden + 2 * case.inner) + 2 * weights) * element
    if case.op == "attention":  # q, k, v, out, dout; dq, dk, dv
        return flops, 8 * case.total * case.nheads * case.headdim * element
    if case.op == "embedding":  # z, dy; the tables' gradients
        tables = sum(inputs[name].nbytes for name in case.grad_inputs if inputs[name] is not None)
        return flops, 2 * case.tokens * case.hidden * element + tables
    if case.op == "cross_entropy":  # logits; dlogits
        return flops, 2 * case.rows * case.classes * element
    if case.op == "linear_cross_entropy":  # x, weight; dx, dweight
        return flops, 2 * (case.rows + case.classes) * case.in_features * element
    # packing and pooling move in backward what they moved in forward, the other way
    return flops, case.bytes(dtype)


def timed_backends(op: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Backends whose speed matters: not the reference, and not Triton's interpreter."""
    left_out = {"reference", "triton"} if device.type == "cpu" else {"reference"}
    return [
        name
        for name in dispatch.BACKENDS
        if name not in left_out and dispatch.unsupported_reason(name, op, device.type, dtype) is None
    ]


def bench_case(
    case: testing.Case, workload: str, dtype: torch.dtype, device: torch.device, backward: bool, roofs: Roofs
) -> Iterator[dict]:
    """A row for every backend that runs this case here; one that fails is a row with the reason."""
    tag = TAGS[dtype]
    sets = [case.inputs(dtype, device, s) for s in range(rotations(case.bytes(dtype), device, limit=4))]
    flops, moved = work(case, dtype, sets[0], backward)
    least = roofs.seconds(flops, moved, "int8" if case.op == "linear_int8" else tag)
    plain = [one_call(torch_call(case), case, torch_inputs(case, inputs), backward) for inputs in sets]
    part = "activation" if getattr(case, "activation", None) else ""
    served_by = serving.choice(case.op, part, device, dtype).backend
    label = case.id if len(case.id) <= 30 else workload
    for name in timed_backends(case.op, device, dtype):
        row = {
            "step": "kernels",
            "name": "-".join([case.op, name, tag, label, *(["backward"] if backward else [])]),
            "status": "ok",
        }
        facts = {
            "op": case.op,
            "case": label,
            "workload": workload,
            "pass": PASSES[backward],
            "dtype": tag,
            "backend": name,
            "serves": served_by == name,
        }
        try:
            # a pin holds for the whole process, so each run has one backend, beside PyTorch
            with dispatch.use_backend(**{case.op: name}):
                calls = [case.call if backward else our_call(case, inputs) for inputs in sets]
                ours = [one_call(c, case, inputs, backward) for c, inputs in zip(calls, sets, strict=True)]
                timed = interleave({"torch": plain, name: ours}, device, seconds=0.15, samples=(7, 50))
        except Exception as error:
            text = reason_of(error)
            yield {**row, "status": "error", "error": text, **facts}
            continue
        seconds = timed[name].median_ms * 1e-3
        yield {
            **row,
            **{key: value for key, value in asdict(timed[name]).items() if value is not None},
            "gflops": flops / seconds * 1e-9,
            "gbs": moved / seconds * 1e-9,
            "of_roof": least / seconds,
            "torch_ms": timed["torch"].median_ms,
            "times_torch": timed["torch"].median_ms / timed[name].median_ms,
            **facts,
        }


def bench_workload(
    workload: str,
    device: torch.device,
    roofs: Roofs,
    ops: tuple[str, ...] = dispatch.OPS,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    passes: tuple[str, ...] = PASSES,
    left: Callable[[], float] = lambda: math.inf,
) -> Iterator[dict]:
    """Rows of every op, case, dtype and pass that BERT-base uses on one workload.

    `left` returns the seconds that are left of the budget. Once it is spent, each further case is a row that
    says so.
    """
    for op in ops:
        for dtype in dtypes:
            for which in passes:
                if which == "backward" and op in getattr(dispatch, "INFERENCE_ONLY", ()):
                    continue
                for case in testing.bench_cases(op, workloads.lengths(workload)):
                    if left() > 0:
                        yield from bench_case(case, workload, dtype, device, which == "backward", roofs)
                    else:
                        name = f"{op}-{TAGS[dtype]}-{case.id}-{which}"[:200]
                        row = {"step": "kernels", "name": name, "status": "skipped", "workload": workload}
                        yield row | {"error": "the budget is spent"}


def seconds_left(begin: float, budget: float) -> float:
    """Seconds left of a budget that began at `begin` on time.monotonic()."""
    return budget - (time.monotonic() - begin)


def main() -> int:
    """Time what the arguments name; print and record each row at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=dispatch.OPS, action="append", help="only this op (may be repeated)")
    parser.add_argument("--device", default="cpu")
    known = workloads.names()
    parser.add_argument("--workload", choices=known, action="append", help="a batch (may be repeated)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), action="append")
    parser.add_argument("--pass", choices=PASSES, action="append", dest="passes", help="default: both")
    parser.add_argument("--threads", type=count, help="threads on a CPU")
    parser.add_argument("--json", type=Path, help="write the rows here, after each one (*.jsonl: appended)")
    parser.add_argument("--roofs", type=Path, help="the probe's file: its roofs are not measured again")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds in all")
    parser.add_argument("--smoke", action="store_true", help="tiny roofs: tries the code only")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    begin = time.monotonic()
    batches = args.workload or ["full" if device.type == "cuda" else "8x128"]
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "roofs")}
    settings |= {"workload": batches}
    report = Report(args.json, settings, None, line)
    report.data["environment"] = describe(device)
    print(
        f"# {report.data['environment']['device']}; torch {torch.__version__}; {', '.join(batches)}",
        flush=True,
    )
    roofs = machine_roofs.known_or_measured(args.roofs, device, args.smoke, report.row)
    report.data["roofs"] = asdict(roofs)
    print(HEAD, flush=True)
    dtypes = tuple(getattr(torch, name) for name in args.dtype or ("float32", "bfloat16"))
    chosen = tuple(args.op or dispatch.OPS), dtypes, tuple(args.passes or PASSES)
    for workload in batches:
        left = functools.partial(seconds_left, begin, args.budget)
        for row in bench_workload(workload, device, roofs, *chosen, left):
            report.row(row)
    report.data["finished"] = True
    report.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
