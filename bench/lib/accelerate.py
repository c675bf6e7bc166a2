"""`fastbert.accelerate`: a model's forward beside the stock model's and our own, and what the guard costs.

A row of an accelerated model counts only if, by `fastbert.explain`, every layer ran fused and without
padding; otherwise it has the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

import fastbert
from bench.lib import encoder
from bench.lib.engines import DTYPES, Bank, Forward, torch_forward
from bench.lib.probe_steps import reason_of
from bench.lib.roofs import Roofs
from bench.lib.timing import interleave

CANDIDATES = (
    "transformers-fp32",
    "accelerated-fp32",
    "fastbert-fp32",
    "transformers-bf16",
    "accelerated-bf16",
    "fastbert-bf16",
)
CHECKS = ("layer", "model")


def accelerated(module: torch.nn.Module) -> torch.nn.Module:
    """An accelerated copy of a transformers model. Raises where a part of it cannot run fused."""
    return fastbert.accelerate(copy.deepcopy(module), strict=True)


def proven(module: torch.nn.Module) -> dict[str, int]:
    """Calls so far, by `fastbert.explain`. Raises RuntimeError where a layer did not run fused and packed."""
    report = fastbert.explain(module)
    calls = {
        "packed_calls": sum(m.packed_calls for m in report.models),
        "padded_calls": sum(m.padded_calls for m in report.models),
        "fused_calls": sum(x.fused_calls for x in report.layers),
        "stock_calls": sum(x.stock_calls for x in report.layers),
    }
    if not calls["packed_calls"] or calls["padded_calls"] or calls["stock_calls"]:
        raise RuntimeError(f"the model did not run accelerated: {calls}")
    return calls


def if_proven(row: dict, module: torch.nn.Module) -> dict:
    """A measured row with the calls; an error row without figures where the model did not run accelerated."""
    try:
        return row | proven(module)
    except RuntimeError as error:
        facts = {key: row[key] for key in ("step", "name", "model", "workload", "candidate")}
        return facts | {"status": "error", "error": str(error)}


def build(bank: Bank, wanted: tuple[str, ...]) -> tuple[dict[str, Forward | str], dict[str, torch.nn.Module]]:
    """(candidate -> its forward or the reason why there is none, candidate -> its accelerated model)."""
    forwards: dict[str, Forward | str] = {}
    modules: dict[str, torch.nn.Module] = {}
    for name in wanted:
        engine, tag = name.split("-")
        try:
            if engine != "accelerated":
                forwards[name] = bank.forward(name)
                continue
            modules[name] = accelerated(bank.peer if DTYPES[tag] == torch.float32 else bank.half_peer)
            forwards[name] = torch_forward(modules[name])
        except Exception as error:
            forwards[name] = reason_of(error)
    return forwards, modules


def bench_accelerate(
    bank: Bank,
    workload: str,
    roofs: Roofs,
    *,
    wanted: tuple[str, ...] = CANDIDATES,
    samples: int = 7,
    lengths: tuple[int, ...] | None = None,
) -> Iterator[dict]:
    """A row for each candidate, as `encoder.bench_encoder`; those of accelerated models have their calls.

    Args:
        bank: the engines of one model.
        workload: a batch of bench/lib/workloads.py.
        roofs: the machine's, for the floor.
        wanted: names out of CANDIDATES.
        samples: calls of each candidate that count.
        lengths: the batch, if not `workload`'s own.
    """
    forwards, modules = build(bank, wanted)
    options = {"samples": samples, "lengths": lengths}
    for row in encoder.bench_encoder(bank.model, workload, forwards, roofs, **options):
        module = modules.get(row["candidate"])
        yield row if module is None or row["status"] != "ok" else if_proven(row, module)


def bench_guard(bank: Bank, check: str, samples: int = 7) -> dict:
    """A row: what the checks before a call cost, in microseconds per layer.

    Args:
        bank: the engines of one model.
        check: "layer": what a layer checks in the padded layout; "model": what the model asks before it
            takes out padding, of all its layers together.
        samples: at least as many.

    Raises:
        RuntimeError: the guard finds a reason against the fused path: its time is not that of a fused call.
    """
    from fastbert.acceleration import layer_gaps, model_gaps
    from fastbert.models.encoder import layers_of
    from fastbert.models.families import FAMILIES

    module = accelerated(bank.peer)
    stack = layers_of(module, module.config, FAMILIES["bert"])
    given = {"input_ids": torch.ones(1, 8, dtype=torch.int64)}
    call = {
        "layer": lambda: [layer_gaps.gap(one) for one in stack],
        "model": lambda: [model_gaps.gap(module) or model_gaps.unfit(module, given)],
    }[check]
    if any(reasons := call()):
        raise RuntimeError(f"the guard finds the accelerated model unfit: {reasons}")
    with torch.inference_mode():
        timing = interleave({check: call}, "cpu", samples=(samples, 50))[check]
    return {
        "step": "guard",
        "name": f"guard-{check}-{bank.model.name}",
        "status": "ok",
        **timing.facts(),
        "us_per_layer": timing.median_ms * 1e3 / len(stack),
        "layers": len(stack),
        "check": check,
        "candidate": "accelerated",
        "model": bank.model.name,
    }
