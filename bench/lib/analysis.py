"""`fastbert.analysis` beside the plain way: transformers with eager attention, its maps, a forward per head.

- `forward`: the encoder's forward and the head, for the gain that the other rows include.
- `statistics`: `attention_statistics`, entropy, who is looked at and the patterns' features; plain: the same
  from the maps of `output_attentions`.
- `importance`: one backward for all examples; plain: a backward per example, with a factor per head.
- `ablation`: every head, by shared prefixes; plain: a forward per head, of which `HEADS_TIMED` are timed and
  their time is multiplied.

Both compute the same numbers on the same weights: `cosine` compares them before anything counts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import fastbert
from bench.lib import workloads
from bench.lib.engines import config_of, needed
from bench.lib.probe_steps import reason_of
from bench.lib.timing import Timing, interleave, summarise
from fastbert.analysis.attention import attention_statistics
from fastbert.analysis.heads import ablate, importance
from fastbert.analysis.measures import Measure
from fastbert.analysis.walk import at_rest, batches, encode
from fastbert.tasks.examples import FIRST, SEPARATOR, WORD, Examples

WHAT = ("forward", "statistics", "importance", "ablation")
CANDIDATES = ("fastbert-fp32", "transformers-fp32")
HEADS_TIMED = 2
PLAIN_BATCH = 8  # sequences of a padded batch of the plain way, which keeps the maps of all layers


def examples_of(lengths: tuple[int, ...], vocab: int, seed: int = 0) -> Examples:
    """Labelled examples of random tokens, each a pair of texts of about one length."""
    draw = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(starts[-1])
    kinds, segments = np.full(total, WORD, np.int8), np.zeros(total, np.int64)
    for start, end in itertools.pairwise(starts):
        middle = (start + end) // 2
        kinds[start], kinds[middle], kinds[end - 1] = FIRST, SEPARATOR, SEPARATOR
        segments[middle + 1 : end] = 1
    ids = draw.integers(min(1000, vocab // 2), vocab, total)
    words = np.where(kinds == WORD, np.arange(total), -1)
    labels = draw.integers(0, 2, len(lengths))
    return Examples(ids, starts, segments, segments, kinds, words, labels)


@dataclass
class Both:
    """Our classifier and that of transformers with its weights, and the examples."""

    ours: fastbert.BertForSequenceClassification
    theirs: nn.Module
    examples: Examples

    @classmethod
    def of(cls, model: workloads.Model, lengths: tuple[int, ...]) -> Both:
        """With random weights, at a scale at which heads differ."""
        transformers = needed("transformers")
        torch.manual_seed(0)
        ours = fastbert.AutoModelForSequenceClassification.from_config(config_of(model)).eval()
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                if name.endswith(("query.weight", "key.weight")):
                    parameter.mul_(4.0)
        config = transformers.BertConfig.from_dict(ours.config.to_dict())
        config._attn_implementation = "eager"
        theirs = transformers.BertForSequenceClassification(config).eval()
        theirs.load_state_dict(ours.state_dict())
        return cls(ours, theirs, examples_of(lengths, model.vocab))

    def padded(self, size: int) -> Iterator[tuple[np.ndarray, dict[str, torch.Tensor], torch.Tensor]]:
        """(numbers, inputs, labels) of padded batches, the longest examples first."""
        examples = self.examples
        order = np.argsort(-examples.lengths, kind="stable")
        for first in range(0, len(order), size):
            numbers = order[first : first + size]
            longest = int(examples.lengths[numbers].max())
            ids, types, mask = (torch.zeros(len(numbers), longest, dtype=torch.int64) for _ in range(3))
            for i, number in enumerate(numbers):
                rows = slice(*examples.starts[number : number + 2])
                length = int(examples.lengths[number])
                ids[i, :length] = torch.from_numpy(examples.ids[rows])
                types[i, :length] = torch.from_numpy(examples.types[rows])
                mask[i, :length] = 1
            inputs = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
            yield numbers, inputs, torch.from_numpy(examples.labels[numbers])


def our_forward(both: Both) -> np.ndarray:
    """(n,) losses."""
    measure, found = Measure.of(both.ours, both.examples), np.zeros(len(both.examples))
    with at_rest(both.ours), torch.inference_mode():
        for batch in batches(both.ours, both.examples):
            hidden = encode(both.ours, batch)
            found[batch.numbers] = measure(hidden, batch.inputs, measure.labels_of(batch))[0].numpy()
    return found


def plain_forward(both: Both) -> np.ndarray:
    """(n,) losses."""
    found = np.zeros(len(both.examples))
    with torch.inference_mode():
        for numbers, inputs, labels in both.padded(PLAIN_BATCH):
            logits = both.theirs(**inputs).logits
            found[numbers] = nn.functional.cross_entropy(logits, labels, reduction="none").numpy()
    return found


def our_statistics(both: Both) -> np.ndarray:
    """(4, n, layers, nheads): the features of the patterns and the entropy's spread."""
    found = attention_statistics(both.ours, both.examples)
    return np.stack([found.entropy, *(found.features()[name] for name in "vdb")])


def plain_statistics(both: Both) -> np.ndarray:
    """The same, by the maps of a batch."""
    examples, theirs = both.examples, both.theirs
    shape = len(examples), theirs.config.num_hidden_layers, theirs.config.num_attention_heads
    found = np.zeros((4, *shape), np.float32)
    with torch.inference_mode():
        for numbers, inputs, _ in both.padded(PLAIN_BATCH):
            maps = theirs(**inputs, output_attentions=True).attentions
            mask, types = inputs["attention_mask"], inputs["token_type_ids"]
            n = mask.sum(1)
            special = torch.zeros_like(mask)
            for i, number in enumerate(numbers):
                kinds = examples.kinds[slice(*examples.starts[number : number + 2])]
                special[i, : len(kinds)] = torch.from_numpy((kinds != WORD).astype(np.int64))
            kept = mask.bool()
            own = (types[:, :, None] == types[:, None, :]) & kept[:, :, None] & kept[:, None, :]
            rows = mask[:, None, :, None].float()
            for layer, a in enumerate(maps):
                a = a * rows
                entropy = torch.special.entr(a).sum((-1, -2)) / n[:, None]
                to_special = (a * special[:, None, None, :]).sum((-1, -2)) / n[:, None]
                column = (a.sum(-2) / n[:, None, None]).amax(-1)
                near = sum(a.diagonal(k, -2, -1).sum(-1) for k in (-1, 0, 1)) / n[:, None]
                own_text = (a * own[:, None]).sum((-1, -2)) / n[:, None]
                base = special.sum(1) / n, 1 / n, (3 * n - 2) / n**2, own.sum((1, 2)) / n**2
                excess = [
                    (x - b[:, None]) / (1 - b[:, None])
                    for x, b in zip((to_special, column, near, own_text), base, strict=True)
                ]
                each = entropy, torch.maximum(*excess[:2]), *excess[2:]
                found[:, numbers, layer] = torch.stack(each).numpy()
    return found


def our_importance(both: Both) -> np.ndarray:
    """(n, layers, nheads) derivatives."""
    return importance(both.ours, both.examples).derivatives


def plain_importance(both: Both) -> np.ndarray:
    """The same: a backward per example."""
    theirs = both.theirs
    layers, heads = theirs.config.num_hidden_layers, theirs.config.num_attention_heads
    factors = torch.ones(layers, heads, requires_grad=True)
    found = np.zeros((len(both.examples), layers, heads))

    def scaled(layer: int) -> Callable:
        def hook(module: nn.Module, given: tuple) -> tuple:
            x = given[0].unflatten(-1, (heads, -1)) * factors[layer][:, None]
            return (x.flatten(-2), *given[1:])

        return hook

    hooks = [
        each.attention.output.dense.register_forward_pre_hook(scaled(i))
        for i, each in enumerate(theirs.bert.encoder.layer)
    ]
    try:
        for parameter in theirs.parameters():
            parameter.requires_grad_(False)
        for numbers, inputs, labels in both.padded(1):
            loss = nn.functional.cross_entropy(theirs(**inputs).logits, labels)
            found[numbers[0]] = torch.autograd.grad(loss, factors)[0].numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def our_ablation(both: Both) -> np.ndarray:
    """(n, layers, nheads) losses."""
    return ablate(both.ours, both.examples).loss


def plain_ablation(both: Both, count: int = HEADS_TIMED) -> np.ndarray:
    """(n, count): the losses without the last `count` heads of the first layer."""
    theirs = both.theirs
    heads = theirs.config.num_attention_heads
    found = []
    for head in range(heads - count, heads):

        def without(module: nn.Module, given: tuple, head: int = head) -> tuple:
            x = given[0].unflatten(-1, (heads, -1)).clone()
            x[..., head, :] = 0
            return (x.flatten(-2), *given[1:])

        hook = theirs.bert.encoder.layer[0].attention.output.dense.register_forward_pre_hook(without)
        try:
            found.append(plain_forward(both))
        finally:
            hook.remove()
    return np.stack(found, 1)


CALLS = {
    "forward": (our_forward, plain_forward),
    "statistics": (our_statistics, plain_statistics),
    "importance": (our_importance, plain_importance),
    "ablation": (our_ablation, plain_ablation),
}


def compared(what: str, ours: np.ndarray, theirs: np.ndarray) -> float:
    """The cosine of what both have computed."""
    if what == "ablation":
        ours = ours[:, 0, -theirs.shape[1] :]
    a, b = ours.ravel(), theirs.ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def times(timing: Timing, factor: float) -> dict:
    """The figures of a row, multiplied where a part of the work was timed."""
    found = timing.facts()
    for key in ("median_ms", "min_ms", "cpu_ms"):
        if key in found:
            found[key] *= factor
    found["samples_ms"] = tuple(ms * factor for ms in found["samples_ms"])
    return found


def bench_analysis(
    model: workloads.Model,
    workload: str,
    what: str,
    *,
    wanted: tuple[str, ...] = CANDIDATES,
    samples: int = 3,
    lengths: tuple[int, ...] | None = None,
) -> Iterator[dict]:
    """A row for each candidate: milliseconds for all examples.

    Args:
        model: its sizes.
        workload: a batch of bench/lib/workloads.py, whose sequences are the examples.
        what: names out of WHAT.
        wanted: names out of CANDIDATES.
        samples: samples per candidate, after one that warms up; 1: the first call counts.
        lengths: the examples', if not `workload`'s own.
    """
    lengths = workloads.lengths(workload) if lengths is None else lengths
    facts = {"step": "analysis", "model": model.name, "workload": workload, "what": what}
    facts |= {"tokens": sum(lengths)}
    try:
        both = Both.of(model, lengths)
    except Exception as error:
        reason = reason_of(error)
        for name in wanted:
            yield {
                **facts,
                "name": f"analysis-{what}-{name}",
                "candidate": name,
                "status": "error",
                "error": reason,
            }
        return
    functions = dict(zip(CANDIDATES, CALLS[what], strict=True))
    results, first = {}, {}
    for name in CANDIDATES:  # also warms up
        begin = time.perf_counter()
        results[name] = functions[name](both)
        first[name] = (time.perf_counter() - begin) * 1e3
    cosine = compared(what, *results.values())
    if samples == 1:  # a call of many minutes is its own warm-up
        timings = {name: summarise([first[name]], 1, "wall") for name in wanted}
    else:
        calls = {name: (lambda f=functions[name]: f(both)) for name in wanted}
        timings = interleave(calls, "cpu", samples=(samples, samples), warmup=0, inner=1)
    heads = model.layers * model.heads
    for name, timing in timings.items():
        plain_ablations = what == "ablation" and name == CANDIDATES[1]
        factor = heads / HEADS_TIMED if plain_ablations else 1.0
        row = {**facts, "name": f"analysis-{what}-{name}", "candidate": name, "status": "ok"}
        row |= {**times(timing, factor), "cosine": cosine}
        if plain_ablations:
            row["timed_share"] = 1 / factor
        yield row | {"tokens_per_s": sum(lengths) / row["median_ms"] * 1e3}
