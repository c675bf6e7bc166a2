"""The encoder's forward on one workload by every engine, interleaved; the rows that the charts show."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from bench.lib import workloads
from bench.lib.engines import DTYPES, Bank, Forward
from bench.lib.probe_steps import reason_of
from bench.lib.roofs import Roofs
from bench.lib.timing import interleave, synchronize

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


class Engines:
    """The engines of one model at a time, each built once: another model replaces it.

    Args:
        bank_of: makes what builds a model's engines by name: a `Bank`, or that of bench/gpu/engines.py.
    """

    def __init__(self, bank_of: Callable[[workloads.Model], Bank]):
        self.bank_of = bank_of
        self._model: workloads.Model | None = None
        self._bank: Bank | None = None
        self._built: dict[str, Forward | str] = {}

    def of(self, model: workloads.Model, wanted: tuple[str, ...]) -> dict[str, Forward | str]:
        """Engine -> its forward, or the reason why there is none."""
        if self._model != model:
            self._bank, self._built = None, {}  # the old weights go before the new ones come
            gc.collect()
            self._bank, self._model = self.bank_of(model), model
        # what torch.compile made may have been reset since
        known = (name for name in self._built if not name.startswith("torch_compile"))
        self._built |= build(self._bank, tuple(name for name in wanted if name not in {*known}))
        return {name: self._built[name] for name in wanted}


def kept(hidden: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The vectors of the real tokens, (tokens, hidden) in float64; padded positions are left out."""
    mask = inputs.get("attention_mask")
    hidden = hidden if mask is None else hidden[mask.bool()]
    return hidden.reshape(-1, hidden.shape[-1]).double()


def least_bytes(model: workloads.Model, tokens: int, itemsize: int) -> int:
    """The fewest bytes that one forward moves: it reads the layers' matrices and three embeddings per token,
    and writes the last hidden state.
    """
    matrices = model.layers * sum(n * k for n, k in model.gemms().values())
    return (matrices + 4 * tokens * model.hidden) * itemsize


def floor_seconds(
    model: workloads.Model, lengths: tuple[int, ...], roofs: Roofs, tag: str, whole: bool
) -> float:
    """The least time of one forward on this machine: of the operations, and with `whole` of the bytes too."""
    moved = least_bytes(model, sum(lengths), DTYPES[tag].itemsize) if whole else 0
    return roofs.seconds(workloads.encoder_flops(lengths, model), moved, tag)


def bench_encoder(
    model: workloads.Model,
    workload: str,
    forwards: Mapping[str, Forward | str],
    roofs: Roofs,
    *,
    device: torch.device | str = "cpu",
    samples: int = 7,
    sets: int = 1,
    lengths: tuple[int, ...] | None = None,
    pause: float = PAUSE_SECONDS,
) -> Iterator[dict]:
    """A row for each engine; one that fails or is missing is a row with the reason.

    A sample is one call as the caller sees it: the device is idle before and after. The first two calls of
    each batch warm up, on a GPU three; in its second call a model of ours packs its weights. The outputs of
    the first calls are compared before anything is timed.

    Args:
        model: the encoder's sizes.
        workload: a batch of bench/lib/workloads.py.
        forwards: engine -> its forward, or the reason why there is none.
        roofs: the machine's, for the floor.
        device: where the inputs lie.
        samples: calls of each engine that count.
        sets: how many batches, of the same lengths with other tokens, the samples rotate through.
        lengths: the batch, if not `workload`'s own.
        pause: seconds of rest before each call on a CPU.

    Yields:
        Rows as bench/results/README.md says. `cosine` is the mean over the real tokens of the cosine between
        the engine's vector and that of `cosine_to`, so that an engine that is fast but wrong shows.
    """
    device = torch.device(device)
    lengths = lengths or workloads.lengths(workload)
    batches = [workloads.padded_inputs(lengths, model.vocab, device, seed) for seed in range(sets)]
    tokens, flops = sum(lengths), workloads.encoder_flops(lengths, model)
    warmups = 2 if device.type == "cuda" else 1
    calls: dict[str, list] = {}
    failed: dict[str, str] = {}
    first_call: dict[str, float] = {}
    vectors: dict[str, torch.Tensor] = {}
    for name, forward in forwards.items():
        if isinstance(forward, str):
            failed[name] = forward
            continue
        try:
            start = time.perf_counter()
            hidden = forward(batches[0])
            synchronize(device)
            first_call[name] = time.perf_counter() - start  # with torch.compile, mostly the compiling
            vectors[name] = kept(hidden, batches[0])  # a copy: the engine may write its buffer again
            calls[name] = [functools.partial(forward, inputs) for inputs in batches]
            for call in calls[name] * warmups:
                call()
            synchronize(device)
        except Exception as error:
            failed[name] = reason_of(error)
            calls.pop(name, None)
        hidden = None
    options = {"seconds": 0.0, "samples": (samples, samples), "warmup": 0, "inner": 1, "clock": "wall"}
    try:
        timed = interleave(calls, device, pause=0.0 if device.type == "cuda" else pause, **options)
    # it is not known which engine raised it
    except Exception as error:
        failed |= dict.fromkeys(calls, f"one of {', '.join(calls)}: {reason_of(error)}")
    truths = ("transformers-fp32", "transformers_eager-bf16", "fastbert-fp32", *vectors)
    against = next((name for name in truths if name in vectors and name not in failed), None)
    for name in forwards:
        row = {"step": "encoder", "name": f"encoder-{name}-{model.name}-{workload}"}
        facts = {"model": model.name, "workload": workload, "candidate": name}
        if name in failed:
            yield {**row, "status": "error", "error": failed[name], **facts}
            continue
        tag = name.split("-")[1]
        floors = {tag: tokens / (flops / peak * 1e-9) for tag, peak in roofs.gflops.items()}
        # on a GPU a single sequence is bound by the weights' bytes, not by arithmetic
        floor = floor_seconds(model, lengths, roofs, tag, whole=device.type == "cuda")
        yield {
            **row,
            "status": "ok",
            **timed[name].facts(),
            **workloads.rates(lengths, flops, timed[name].median_ms, floor),
            "floor_tokens_per_s": floors,
            "cosine": torch.cosine_similarity(vectors[name], vectors[against]).mean().item(),
            "cosine_to": against,
            "first_call_s": first_call[name],
            **facts,
        }
