"""One training step, ours and transformers': forward, backward and a fused AdamW step, dropout 0.1.

The heads: `classification` of sequences, which compares the encoders, and `pretraining`, which is BERT's
own: masked tokens and next sentence. For `pretraining` ours computes only the labelled rows. Parameters are
fp32; bf16 means autocast. All candidates begin with the same weights and get the same batch and optimizer.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import fastbert
from bench.lib import workloads
from bench.lib.engines import config_of, needed
from bench.lib.probe_steps import reason_of
from bench.lib.roofs import Roofs
from bench.lib.timing import interleave, mark, milliseconds, synchronize

CANDIDATES = ("fastbert", "transformers", "torch_compile")
HEADS = {"pretraining": "BertForPreTraining", "classification": "BertForSequenceClassification"}
PARTS = ("forward_ms", "backward_ms", "step_ms")


def batch(
    lengths: tuple[int, ...], vocab: int, head: str, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], int]:
    """(model inputs with labels, how many tokens have one): classes; for `pretraining` also 15% of the real
    tokens.
    """
    inputs, labelled = workloads.padded_inputs(lengths, vocab, "cpu"), 0
    generator = torch.Generator().manual_seed(1)
    ids = inputs["input_ids"]
    real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    chosen = (torch.rand(ids.shape, generator=generator) < 0.15) & real
    chosen[0, 0] = True  # at least one label, so that the loss is not empty
    classes = torch.randint(0, 2, ids.shape[:1], generator=generator)
    if head == "pretraining":
        inputs |= {"labels": torch.where(chosen, ids, -100), "next_sentence_label": classes}
        labelled = int(chosen.sum())
    else:
        inputs["labels"] = classes
    return {key: value.to(device) for key, value in inputs.items()}, labelled


def by_dtype(candidates: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(dtype, the candidates of it without it) of names such as "fastbert-bf16"."""
    for tag in dict.fromkeys(name.rpartition("-")[2] for name in candidates):
        yield tag, tuple(name.removesuffix(f"-{tag}") for name in candidates if name.endswith(f"-{tag}"))


def modules(
    model: workloads.Model,
    head: str,
    wanted: tuple[str, ...],
    device: torch.device | str = "cpu",
    **overrides: object,
) -> dict[str, torch.nn.Module | str]:
    """candidate -> module, or the reason why there is none. The compiled one shares transformers' weights.

    `overrides` are keys of the configuration.
    """
    name = HEADS[head]
    torch.manual_seed(0)
    config, found = config_of(model, **overrides), {}
    with torch.device(device):  # the weights are drawn there: on a CPU a large model takes seconds
        ours = getattr(fastbert, name)(config)
        if set(wanted) == {"fastbert"}:
            return {"fastbert": ours}
        try:
            transformers = needed("transformers")
            other = transformers.BertConfig.from_dict(ours.config.to_dict())
            other._attn_implementation = "sdpa"
            theirs = getattr(transformers, name)(other)
            theirs.load_state_dict(ours.state_dict())
            found = {"transformers": theirs, "torch_compile": torch.compile(theirs, dynamic=False)}
        except RuntimeError as error:
            found = dict.fromkeys(CANDIDATES, str(error))
    found["fastbert"] = ours
    return {candidate: found[candidate] for candidate in CANDIDATES if candidate in wanted}


def loss_of(module: torch.nn.Module, inputs: dict, autocast: bool) -> torch.Tensor:
    with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16, enabled=autocast):
        return module(**inputs).loss


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)


class Step:
    """A training step that can be called repeatedly; it keeps the times of the three parts of each call."""

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: dict, autocast: bool
    ):
        self.module, self.optimizer, self.inputs, self.autocast = module, optimizer, inputs, autocast
        self.device = inputs["input_ids"].device
        self.marks: list[list] = []

    def __call__(self) -> None:
        marks = [mark(self.device)]
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.module, self.inputs, self.autocast)
        marks.append(mark(self.device))
        loss.backward()
        marks.append(mark(self.device))
        self.optimizer.step()
        marks.append(mark(self.device))
        self.marks.append(marks)

    def parts(self, last: int) -> dict[str, float]:
        """Medians of forward, backward and step over the `last` calls, in milliseconds; on a GPU, its own."""
        synchronize(self.device)
        times = [[milliseconds(a, b) for a, b in itertools.pairwise(marks)] for marks in self.marks[-last:]]
        return dict(zip(PARTS, map(statistics.median, zip(*times, strict=True)), strict=True))


def gradients(module: torch.nn.Module, inputs: dict, autocast: bool) -> dict[str, torch.Tensor]:
    """parameter -> its gradient for one batch without dropout."""
    module.eval()
    module.zero_grad(set_to_none=True)
    loss_of(module, inputs, autocast).backward()
    module.train()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def cosine(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """The lowest cosine between two gradients of a weight matrix; 0 if one of the two has no such gradient.

    Vectors are left out: the gradient of a key's bias is 0 except for rounding.
    """
    if ours.keys() != truth.keys():
        return 0.0
    matrices = [(ours[name].flatten(), b.flatten()) for name, b in truth.items() if b.dim() > 1]
    return min(torch.cosine_similarity(a.double(), b.double(), dim=0).item() for a, b in matrices)


@dataclass
class Trial:
    """One candidate: its step, warmed up, or the reason why there is none."""

    step: Step | None = None
    error: str = ""
    grad_cosine: float | None = None
    first_call_s: float = 0.0


def trials(
    model: workloads.Model, inputs: dict, few: dict, tag: str, wanted: tuple[str, ...], head: str
) -> dict[str, Trial]:
    """candidate -> its trial, each step run once, on a GPU three times. Others run although one fails.

    Gradients are compared on the batch `few`.
    """
    device = inputs["input_ids"].device
    found, autocast = modules(model, head, wanted, device), tag == "bf16"
    optimizers: dict[int, torch.optim.Optimizer] = {}  # one for the modules that share weights
    truth: dict[str, torch.Tensor] | None = None
    result = {name: Trial() for name in found}
    for name in sorted(found, key=("transformers", "fastbert", "torch_compile").index):  # the truth first
        module, trial = found[name], Trial()
        result[name] = trial
        try:
            if isinstance(module, str):
                raise RuntimeError(module)
            own = id(next(module.parameters()))
            if own not in optimizers:
                optimizers[own] = optimizer_of(module)
            if name != "torch_compile":
                if truth is None:
                    truth = gradients(module, few, autocast=False)
                trial.grad_cosine = cosine(gradients(module, few, autocast), truth)
            step = Step(module.train(), optimizers[own], inputs, autocast)
            start = time.perf_counter()
            step()
            synchronize(device)
            trial.first_call_s = time.perf_counter() - start
            for _ in range(2 if device.type == "cuda" else 0):
                step()
            synchronize(device)
            trial.step = step
        except Exception as error:
            trial.error = reason_of(error)
    return result


def bench_training(
    model: workloads.Model,
    workload: str,
    tag: str,
    *,
    wanted: tuple[str, ...] = CANDIDATES,
    head: str = "classification",
    samples: int = 7,
    lengths: tuple[int, ...] | None = None,
    device: torch.device | str = "cpu",
    roofs: Roofs | None = None,
) -> Iterator[dict]:
    """A row for each candidate: median time of a step and its parts, and how well the gradients agree.

    Args:
        model: the encoder's sizes.
        workload: a batch of bench/lib/workloads.py.
        tag: "fp32", or "bf16" for autocast.
        wanted: names out of CANDIDATES; one that fails or is missing is a row with the reason.
        head: one of HEADS.
        samples: steps of each candidate, after one to warm up. One begins and ends with the device idle.
        lengths: the batch, if not `workload`'s own.
        device: where everything is.
        roofs: the machine's, for the floor.

    Yields:
        Rows as bench/results/README.md says. `grad_cosine` is the lowest of any weight matrix: its gradient
        for two sequences without dropout against transformers' in fp32 (ours, where it is missing or not
        wanted). The compiled module is not compared: it would compile again.
    """
    lengths = lengths or workloads.lengths(workload)
    inputs, labelled = batch(lengths, model.vocab, head, device)
    flops = workloads.training_flops(lengths, model, labelled)
    few, _ = batch(lengths[:2], model.vocab, head, device)
    tried = trials(model, inputs, few, tag, wanted, head)
    steps = {name: trial.step for name, trial in tried.items() if trial.step is not None}
    try:
        options = {"seconds": 0.0, "samples": (samples, samples), "warmup": 0, "inner": 1, "clock": "wall"}
        timed = interleave(steps, device, **options)
    except Exception as error:  # whose, is not known
        for trial in tried.values():
            trial.step, trial.error = None, trial.error or f"one of {', '.join(steps)}: {reason_of(error)}"
    for name, trial in tried.items():
        facts = {"model": model.name, "workload": workload, "candidate": f"{name}-{tag}", "head": head}
        row = {"step": "training", "name": f"training-{name}-{tag}-{model.name}-{workload}-{head}"}
        if trial.step is None:
            yield {**row, "status": "error", "error": trial.error, **facts}
            continue
        timing = timed[name]
        floor = None if roofs is None else roofs.seconds(flops, 0.0, tag)
        yield {
            **row,
            "status": "ok",
            **timing.facts(),
            **trial.step.parts(timing.n),
            **workloads.rates(lengths, flops, timing.median_ms, floor),
            "grad_cosine": trial.grad_cosine,
            "first_call_s": trial.first_call_s,
            **facts,
        }
