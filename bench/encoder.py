"""The encoder's forward on one workload by every engine, turn by turn; the rows that the charts show."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict

import torch

from bench import workloads
from bench.engines import Bank, Forward
from bench.probe_steps import reason_of
from bench.roofs import Roofs
from bench.timing import interleave

PAUSE_SECONDS = 0.02  # before each sample: see timing.interleave


def build(bank: Bank, wanted: tuple[str, ...]) -> dict[str, Forward | str]:
    """engine -> its forward, or the reason why there is none."""
    found: dict[str, Forward | str] = {}
    for name in wanted:
        try:
            found[name] = bank.forward(name)
        except Exception as error:
            found[name] = reason_of(error)
    return found


class _Run:
    """A forward on fixed inputs that remembers what it gave last."""

    def __init__(self, forward: Forward, inputs: dict[str, torch.Tensor]):
        self.forward, self.inputs = forward, inputs

    def __call__(self) -> None:
        self.hidden = self.forward(self.inputs)

    def kept(self) -> torch.Tensor:
        """(real tokens, hidden) in float64: what padded positions hold is nobody's business."""
        mask = self.inputs.get("attention_mask")
        hidden = self.hidden if mask is None else self.hidden[mask.bool()]
        return hidden.reshape(-1, hidden.shape[-1]).double()


def bench_encoder(
    model: workloads.Model,
    workload: str,
    forwards: Mapping[str, Forward | str],
    roofs: Roofs,
    *,
    samples: int = 7,
    lengths: tuple[int, ...] | None = None,
) -> Iterator[dict]:
    """A row for each engine; one that fails or is missing is a row with the reason.

    Args:
        model: the encoder's sizes.
        workload: a batch of bench/workloads.py.
        forwards: engine -> its forward, or the reason why there is none.
        roofs: of this machine, for the floor.
        samples: calls of each engine that count, after one to warm up.
        lengths: the batch, if not `workload`'s own.

    Yields:
        Rows as bench/results/README.md says. `cosine` is the mean over the real tokens of the cosine between
        the engine's vector and that of `cosine_to`: nobody is fast by being wrong.
    """
    lengths = lengths or workloads.lengths(workload)
    inputs = workloads.padded_inputs(lengths, model.vocab, "cpu")
    tokens, flops = sum(lengths), workloads.encoder_flops(lengths, model)
    runs: dict[str, _Run] = {}
    failed: dict[str, str] = {}
    first_call: dict[str, float] = {}
    for name, forward in forwards.items():
        if isinstance(forward, str):
            failed[name] = forward
            continue
        try:
            run, start = _Run(forward, inputs), time.perf_counter()
            run()
            first_call[name] = time.perf_counter() - start  # with torch.compile, mostly the compiling
            runs[name] = run
        except Exception as error:
            failed[name] = reason_of(error)
    options = {"seconds": 0.0, "samples": (samples, samples), "warmup": 0, "pause": PAUSE_SECONDS}
    try:
        timed = interleave(runs, "cpu", **options)
    except Exception as error:  # whose, is not known
        failed |= dict.fromkeys(runs, f"one of {', '.join(runs)}: {reason_of(error)}")
    against = next((n for n in ("transformers-fp32", "fastbert-fp32", *runs) if n in runs), None)
    truth = runs[against].kept() if against else None
    for name in forwards:
        row = {"step": "encoder", "name": f"encoder-{name}-{model.name}-{workload}"}
        facts = {"model": model.name, "workload": workload, "candidate": name}
        if name in failed:
            yield {**row, "status": "error", "error": failed[name], **facts}
            continue
        seconds = timed[name].median_ms * 1e-3
        floors = {tag: tokens / (flops / peak * 1e-9) for tag, peak in roofs.gflops.items()}
        yield {
            **row,
            "status": "ok",
            **{key: value for key, value in asdict(timed[name]).items() if value is not None},
            "tokens": tokens,
            "padded_tokens": len(lengths) * max(lengths),
            "tokens_per_s": tokens / seconds,
            "gflops": flops / seconds * 1e-9,
            "floor_tokens_per_s": floors,
            "of_floor": tokens / seconds / floors[name.split("-")[1]],
            "cosine": torch.cosine_similarity(runs[name].kept(), truth).mean().item(),
            "cosine_to": against,
            "first_call_s": first_call[name],
            **facts,
        }
