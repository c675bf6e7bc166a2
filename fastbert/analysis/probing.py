"""How well each layer shows labelled spans: edge probes, mixes of layers, description length, control tasks.

- Edge probes: how well a small network predicts the labels of spans from one layer, or from a learned mix of
  layers 0 to l. The expected layer is Σ l Δ_l / Σ Δ_l, where Δ_l is what layer l adds to the score of the
  mix of the layers below. The centre is Σ l s_l of the mix of all layers.
- Description length (online code): the labels are sent block by block. Each block is coded by a probe that
  has learned from the earlier blocks, the first block with log₂ K bits per label. Compression is
  n log₂ K / MDL; 1 means that nothing is learned.
- Control task: every word type has one random label. Selectivity is accuracy minus accuracy on the control
  task. It measures what the vectors hold and not what the probe memorises.

A result means something only in comparison with the embeddings (layer 0) and a model with random weights.

Source: Tenney et al. 2019, "BERT Rediscovers the Classical NLP Pipeline", sec. 3; Voita and Titov 2020,
"Information-Theoretic Probing with Minimum Description Length", sec. 2; Hewitt and Liang 2019, "Designing and
Interpreting Probes with Control Tasks", sec. 2.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastbert.analysis.intervals import Interval, ratio_interval
from fastbert.analysis.probes import DEFAULT, Probes, Recipe, Spans, fit, losses, one_layer_each, up_to_each
from fastbert.analysis.targets import Targets

LINEAR = DEFAULT._replace(inner=0)
# the end of each block of the online code, as a share of the examples
BLOCKS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class EdgeProbe:
    """Scores of probes on the tested examples.

    Attributes:
        label_names: names of the classes.
        counts: (layers + 1, examples, 3) int64, right, predicted and true labels of the probe of each layer.
        counts_up_to: the same for the mix of layers 0 to l.
        weights: (layers + 1,) s of the mix of all layers.
        targets: numbers of targets (to train, held out, to test).
        seed: seed of the split, the probes and the intervals.
    """

    label_names: tuple[str, ...]
    counts: np.ndarray
    counts_up_to: np.ndarray
    weights: np.ndarray
    targets: tuple[int, int, int]
    seed: int

    def scores(self) -> np.ndarray:
        """(layers + 1,): micro-averaged F1 of each layer's probe."""
        return _f1(self.counts.sum(1))

    def scores_up_to(self) -> np.ndarray:
        """(layers + 1,): micro-averaged F1 of the mix of layers 0 to l."""
        return _f1(self.counts_up_to.sum(1))

    def interval(self, layer: int) -> Interval:
        """F1 of a layer's probe with its 95% bootstrap interval over examples."""
        right, predicted, true = np.moveaxis(self.counts[layer], -1, 0)
        return ratio_interval(2 * right, predicted + true, seed=self.seed)

    def added(self) -> np.ndarray:
        """(layers,): Δ_l, what layer l adds to the score of the mix of the layers below it."""
        return np.diff(self.scores_up_to())

    def expected_layer(self) -> float:
        """Σ l Δ_l / Σ Δ_l, with layers from 1; NaN if no layer adds anything to the embeddings."""
        added = self.added()
        total = added.sum()
        return float((np.arange(1, len(added) + 1) * added).sum() / total) if total > 0 else math.nan

    def centre(self) -> float:
        """Σ l s_l of the mix of all layers; the embeddings are layer 0."""
        return float((np.arange(len(self.weights)) * self.weights).sum())


def _f1(counts: np.ndarray) -> np.ndarray:
    """(…, 3) -> (…,); 0 if nothing is predicted or true."""
    right, predicted, true = np.moveaxis(counts, -1, 0)
    return 2 * right / np.maximum(predicted + true, 1)


def edge_probe(
    states: Tensor,
    targets: Targets,
    *,
    recipe: Recipe = DEFAULT,
    loss: str | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> EdgeProbe:
    """Probes of every layer and of the mixes of layers 0 to l, on a split of the examples in 8 : 1 : 1.

    Args:
        states: (layers + 1, rows, hidden), the hidden states of `targets.rows`.
        targets: what to predict.
        recipe: how the probes are built and trained.
        loss: "softmax": one label per target, the most likely is predicted; "sigmoid": all labels above 1/2
            are predicted. None: softmax if every target has one label.
        seed: seed of the split, the probes and the intervals.
        device: where the probes learn; `states` may be anywhere.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    targets.check(states)
    loss = loss or ("softmax" if (targets.labels.sum(1) == 1).all() else "sigmoid")
    parts = targets.split(seed)
    train, held_out, test = (targets.spans(numbers) for numbers in parts)
    layers = len(states)
    # the mix of layer 0 alone is its own probe
    mixes = torch.cat([one_layer_each(layers), up_to_each(layers)[1:]])
    probes = Probes(mixes, states.shape[-1], train.bounds.shape[1], len(targets.label_names), recipe, seed)
    probes.to(device)
    fit(probes, states, train, held_out, loss=loss, seed=seed)
    logits = probes.logits(states, test.bounds)
    counts = _counts(logits, test, loss, targets.example[parts[2]])
    with torch.no_grad():
        weights = probes.weights_of_layers()[-1].double().cpu().numpy()
    return EdgeProbe(
        targets.label_names,
        counts[:layers],
        np.concatenate([counts[:1], counts[layers:]]),
        weights,
        (len(train), len(held_out), len(test)),
        seed,
    )


def _counts(logits: Tensor, test: Spans, loss: str, example: np.ndarray) -> np.ndarray:
    """(probes, examples, 3): right, predicted and true labels."""
    true = torch.from_numpy(test.labels)
    if loss == "softmax":
        predicted = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.argmax(-1, True), True)
    else:
        predicted = logits > 0
    each = torch.stack(
        [(predicted & true).sum(-1), predicted.sum(-1), true.sum(-1).expand(len(logits), -1)], -1
    )
    return _by_example(each.numpy(), example)


def _by_example(values: np.ndarray, example: np.ndarray) -> np.ndarray:
    """Sums over each example's targets: (probes, n, …) -> (probes, examples, …)."""
    _, number = np.unique(example, return_inverse=True)
    found = np.zeros((len(values), number.max() + 1, *values.shape[2:]), values.dtype)
    np.add.at(found.swapaxes(0, 1), number, values.swapaxes(0, 1))
    return found


@dataclass(frozen=True)
class OnlineCode:
    """Number of bits that the labels take, given a layer's vectors.

    Attributes:
        label_names: names of the classes.
        bits: (layers + 1, examples) bits of each example's labels.
        targets: (examples,) number of labels of each example.
        blocks: (blocks,) number of examples known at the end of each block.
        seed: seed of the order, the probes and the intervals.
    """

    label_names: tuple[str, ...]
    bits: np.ndarray
    targets: np.ndarray
    blocks: np.ndarray
    seed: int

    def description_length(self) -> np.ndarray:
        """(layers + 1,), in bits."""
        return self.bits.sum(1)

    def compression(self) -> np.ndarray:
        """(layers + 1,): n log₂ K over the description length."""
        return self._uniform().sum() / self.description_length()

    def interval(self, layer: int) -> Interval:
        """The compression by a layer with its 95% bootstrap interval over examples."""
        return ratio_interval(self._uniform(), self.bits[layer], seed=self.seed)

    def _uniform(self) -> np.ndarray:
        return self.targets * math.log2(len(self.label_names))


def check_code(targets: Targets) -> None:
    """Raise a ValueError if `online_code` cannot code the labels of the targets."""
    if len(targets.label_names) < 2:
        raise ValueError(f"targets: a code needs two labels at least, got {len(targets.label_names)}")
    targets.check_labels()


def online_code(
    states: Tensor,
    targets: Targets,
    *,
    recipe: Recipe = DEFAULT,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> OnlineCode:
    """The description length of the labels by the probes of every layer.

    Args:
        states: (layers + 1, rows, hidden), the hidden states of `targets.rows`.
        targets: targets with one label each, of two classes at least.
        recipe: how the probes are built and trained. A tenth of the known examples is held out to compare
            epochs.
        seed: seed of the order, the probes and the intervals.
        device: where the probes learn; `states` may be anywhere.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    targets.check(states)
    check_code(targets)
    classes = len(targets.label_names)
    examples = np.unique(targets.example)
    order = np.random.default_rng(seed).permutation(examples)
    ends = np.unique([max(1, round(share * len(order))) for share in BLOCKS])
    bits = np.zeros((len(states), len(targets)))
    place = np.empty(targets.example.max() + 1, np.int64)  # place of each example in the order
    place[order] = np.arange(len(order))
    of_target = place[targets.example]
    bits[:, of_target < ends[0]] = math.log2(classes)
    for begin, end in itertools.pairwise(ends):
        known = np.flatnonzero(of_target < begin)
        coded = np.flatnonzero((of_target >= begin) & (of_target < end))
        # the last tenth of what is known
        late = of_target[known] >= begin - begin // 10
        learned, held_out = targets.spans(known[~late]), targets.spans(known[late])
        mixes = one_layer_each(len(states))
        probes = Probes(mixes, states.shape[-1], learned.bounds.shape[1], classes, recipe, seed).to(device)
        fit(probes, states, learned, held_out, loss="softmax", seed=seed)
        spans = targets.spans(coded)
        logits = probes.logits(states, spans.bounds).double()
        bits[:, coded] = losses(logits, torch.from_numpy(spans.labels), "softmax").numpy() / math.log(2)
    _, counts = np.unique(targets.example, return_counts=True)
    return OnlineCode(targets.label_names, _by_example(bits, targets.example), counts, ends, seed)


@dataclass(frozen=True)
class ControlTask:
    """Accuracy on a task, and on a task with a random label per word type, on the tested examples.

    Attributes:
        right, right_control: (layers + 1, examples) int64, right targets of each example.
        targets: (examples,) number of targets of each example.
        seed: seed of the labels, the split, the probes and the intervals.
    """

    right: np.ndarray
    right_control: np.ndarray
    targets: np.ndarray
    seed: int

    def accuracy(self) -> np.ndarray:
        """(layers + 1,): accuracy on the task."""
        return self.right.sum(1) / self.targets.sum()

    def control(self) -> np.ndarray:
        """(layers + 1,): accuracy on the control task."""
        return self.right_control.sum(1) / self.targets.sum()

    def selectivity(self) -> np.ndarray:
        """(layers + 1,): the accuracy minus the control's."""
        return self.accuracy() - self.control()

    def interval(self, layer: int) -> Interval:
        """The selectivity of a layer with its 95% bootstrap interval over examples."""
        change = self.right[layer] - self.right_control[layer]
        return ratio_interval(change, self.targets, seed=self.seed)


def control_task(
    states: Tensor,
    targets: Targets,
    *,
    recipe: Recipe = LINEAR,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> ControlTask:
    """The accuracy of the probes of every layer on a task and on its control task.

    Args:
        states: (layers + 1, rows, hidden), the hidden states of `targets.rows`.
        targets: targets with one label each.
        recipe: how the probes are built and trained; by default linear probes, which the source recommends.
        seed: seed of the labels, the split, the probes and the intervals.
        device: where the probes learn; `states` may be anywhere.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    targets.check(states)
    parts = targets.split(seed)
    example = targets.example[parts[2]]
    right = []
    for task in (targets, targets.control(seed)):
        train, held_out, test = (task.spans(numbers) for numbers in parts)
        mixes = one_layer_each(len(states))
        probes = Probes(mixes, states.shape[-1], train.bounds.shape[1], task.labels.shape[1], recipe, seed)
        probes.to(device)
        fit(probes, states, train, held_out, loss="softmax", seed=seed)
        guess = probes.logits(states, test.bounds).argmax(-1).numpy()
        right.append(_by_example((guess == test.labels.argmax(1)).astype(np.int64), example))
    _, counts = np.unique(example, return_counts=True)
    return ControlTask(right[0], right[1], counts, seed)
