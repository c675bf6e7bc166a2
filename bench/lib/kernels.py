"""Every op, case, pass, dtype and backend beside the plain PyTorch call: what is timed, and what it moves.

The shapes are BERT-base's for a workload of bench/lib/workloads.py, from the `testing.Case`s that the tests
use too. All backends of a case are interleaved with the plain PyTorch call: F.linear and
F.gelu, F.layer_norm, SDPA on the padded batch with its mask, …; for `linear_int8` the product in floating
point.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F

from bench.lib.probe_steps import reason_of
from bench.lib.roofs import TAGS, Roofs
from bench.lib.timing import interleave, rotations
from fastbert import testing
from fastbert.runtime import dispatch
from fastbert.testing import serving

PASSES = ("forward", "backward")
# times the forward's; the rest is bound by memory
FLOPS_OF_BACKWARD = {"linear": 2.0, "feed_forward": 2.0, "linear_cross_entropy": 2.0, "attention": 2.5}


def short_id(case_id: str, workload: str) -> str:
    """A case's id with the workload's name in place of the lengths of more than 16 sequences."""
    return re.sub(r"\d+(?:_\d+){16,}", workload, case_id)


def torch_inputs(case: testing.Case, inputs: dict) -> dict:
    """Inputs of the plain PyTorch call: the case's own; for attention padded, for int8 in floating point."""
    if case.op in ("linear_int8", "linear_fp8"):
        x, weight, scale = inputs["x"], inputs["weight"], inputs["scale"]
        return {"x": x, "weight": (weight.float() * scale[:, None]).to(x.dtype), "bias": inputs["bias"]}
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
            q, k, v = (t.transpose(1, 2) for t in qkv.chunk(3, 2))  # each (batch, nheads, seqlen, headdim)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        return sdpa
    if case.op in ("linear_int8", "linear_fp8"):
        activation = {None: lambda y: y, "gelu": F.gelu}[case.activation]
        return lambda x, weight, bias: activation(F.linear(x, weight, bias))
    return case.eager


def our_call(case: testing.Case, inputs: dict) -> Callable:
    """Our op as a model in eval calls it: with panels of the weight where the backend makes them."""
    module = importlib.import_module(f"fastbert.ops.{case.op}")
    if not hasattr(module, "panel_maker"):
        return case.call
    gate = {"gated": case.gated} if getattr(case, "gated", None) else {}
    make_panels = module.panel_maker(inputs["x"].device, inputs["x"].dtype, **dict.fromkeys(gate, True))
    if make_panels is None:
        return case.call
    options = {"activation": case.activation, "panels": make_panels(inputs["weight"]), **gate}
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
    if case.op == "linear_distillation":  # x, weight; dx, dweight; the logits are kept
        rows, k, n = case.rows, case.in_features, case.classes
        return 4 * rows * k * n, 2 * (rows + n) * k * element
    # packing, pooling and rotary move in backward what they moved in forward, the other way
    return flops, case.bytes(dtype)


def timed_backends(op: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Backends whose speed matters: not the reference, and not Triton's interpreter."""
    left_out = {"reference", "triton"} if device.type == "cpu" else {"reference"}
    return [
        name
        for name in dispatch.BACKENDS
        if name not in left_out and dispatch.unsupported_reason(name, op, device.type, dtype) is None
    ]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New memory is filled with NaN, so that what a kernel does not write shows.

    With torch's deterministic mode, which is what fills `torch.empty`.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations of torch's own that have no deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            if not torch.empty(8, device="cpu").isnan().all():
                raise RuntimeError("torch.utils.deterministic.fill_uninitialized_memory is off")
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def incorrect(case: testing.Case, backend: str, dtype: torch.dtype, device: torch.device | str) -> str:
    """Which result of a backend breaks the error rule and how, forward and backward; "" if none does.

    Memory that the backend does not write is NaN. What the backend raises is the reason.
    """
    with poisoned():
        try:
            rows = testing.run_case(case, backend, dtype, device)
        except Exception as error:
            return reason_of(error)
    return "; ".join(f"{row.quantity}: {row.reason}" for row in rows if not row.passed)


def contexts(names: Iterable[str], op: str) -> dict[str, Callable[[], contextlib.AbstractContextManager]]:
    """Backend -> what pins it: the pin holds for the whole process, so it is set around each sample."""
    return {name: functools.partial(dispatch.use_backend, **{op: name}) for name in names}


def bench_case(
    case: testing.Case,
    workload: str,
    dtype: torch.dtype,
    device: torch.device,
    backward: bool,
    roofs: Roofs,
    *,
    backends: Iterable[str] | None = None,
    plain_row: bool = False,
    samples: int = 7,
) -> Iterator[dict]:
    """A row for every backend that runs this case here, all interleaved with the plain PyTorch call.

    Args:
        case: what is computed.
        workload: its name, for the rows.
        dtype: dtype of the floating tensors.
        device: where it runs.
        backward: the gradients alone, instead of forward.
        roofs: the machine's.
        backends: which; None: those of `timed_backends`.
        plain_row: whether the plain PyTorch call has a row of its own, as candidate "torch".
        samples: the fewest of each candidate.

    Yields:
        Rows as bench/results/README.md says. A backend that fails is a row with the reason.
    """
    tag = TAGS[dtype]
    sets = [case.inputs(dtype, device, s) for s in range(rotations(case.bytes(dtype), device, limit=4))]
    flops, moved = work(case, dtype, sets[0], backward)
    least = roofs.seconds(flops, moved, "int8" if case.op in ("linear_int8", "linear_fp8") else tag)
    plain = [one_call(torch_call(case), case, torch_inputs(case, inputs), backward) for inputs in sets]
    part = "activation" if getattr(case, "activation", None) else ""
    kind = f"{part} training".lstrip() if backward else part
    served_by = serving.choice(case.op, kind, device, dtype).backend
    label = case.id if len(case.id) <= 30 else workload
    names = timed_backends(case.op, device, dtype) if backends is None else list(backends)
    pins, failed, candidates = contexts(names, case.op), {}, {"torch": plain}
    for name in names:
        try:
            with pins[name]():
                calls = [case.call if backward else our_call(case, inputs) for inputs in sets]
                ours = [one_call(c, case, inputs, backward) for c, inputs in zip(calls, sets, strict=True)]
                ours[0]()
            candidates[name] = ours
        except Exception as error:
            failed[name] = reason_of(error)
    try:
        timed = interleave(candidates, device, seconds=0.15, samples=(samples, max(50, samples)), within=pins)
    except Exception as error:  # whose, is not known
        failed |= dict.fromkeys(candidates, f"one of {', '.join(candidates)}: {reason_of(error)}")
    for name in [*names, *(["torch"] if plain_row else [])]:
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
            "candidate": f"{name}-{tag}",
        }
        if name in failed:
            yield {**row, "status": "error", "error": failed[name], **facts}
            continue
        seconds = timed[name].median_ms * 1e-3
        yield {
            **row,
            **timed[name].facts(),
            "flops": flops,
            "moved_bytes": moved,
            "gflops": flops / seconds * 1e-9,
            "gbs": moved / seconds * 1e-9,
            "of_roof": least / seconds,
            "torch_ms": timed["torch"].median_ms,
            "times_torch": timed["torch"].median_ms / timed[name].median_ms,
            **facts,
        }
