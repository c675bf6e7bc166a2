"""Structural probes: whether a linear map of a layer's vectors shows the syntax tree as distances.

For words i and j of a sentence, d_B(i, j)² = ‖B (h_i - h_j)‖² should equal the number of edges between them
in the tree, and ‖B h_i‖² the depth of i. B (hidden × rank) of each layer minimises |d_tree - d_B²| over the
square of the sentence's length; for depths it minimises the difference over the length. All layers' B are
trained as one batched product. A word's vector is the mean of its pieces' vectors.

Two scores leave out punctuation: UUAS, the share of the tree's edges that the least spanning tree of d_B²
has; and the share of sentences in which the word of least depth is the root. Two more are Spearman's
correlations with the tree, for each word's distances and for the depths of a sentence. They are means over
sentences of each length from 5 to 50, then over lengths.

Source: Hewitt and Manning 2019, "A Structural Probe for Finding Syntax in Word Representations", sec. 2 to 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fastbert.analysis.intervals import Interval, finite, ratio_interval
from fastbert.analysis.probes import Recipe, check_finite, learn
from fastbert.analysis.treebank import Sentence, pieces_of
from fastbert.tasks.examples import Examples

LENGTHS = range(5, 51)


def tree_distances(heads: np.ndarray) -> np.ndarray:
    """Number of edges between all words of a tree: heads (n,), from 1, the root's 0 -> (n, n) int64.

    Raises:
        ValueError: there is no root, or more than one.
    """
    n, roots = len(heads), np.flatnonzero(heads == 0)
    if len(roots) != 1:
        raise ValueError(f"heads: expected one root, a 0, got {len(roots)}")
    found = np.zeros((n, n), np.int64)
    done: list[int] = []
    waiting = roots.tolist()
    while waiting:
        word = waiting.pop()
        parent = heads[word] - 1
        if parent >= 0:
            found[word, done] = found[done, word] = found[parent, done] + 1
        done.append(word)
        waiting.extend(np.flatnonzero(heads == word + 1).tolist())
    return found


def check() -> None:
    """Raise an ImportError with the command that installs SciPy, if it is not installed."""
    try:
        import scipy  # noqa: F401
    except ImportError as error:
        raise ImportError("structural probes need SciPy: pip install 'fastbert-kernels[analysis]'") from error


def spanning_trees(distances: np.ndarray) -> np.ndarray:
    """The least spanning tree of each matrix.

    Args:
        distances: (k, n, n), symmetric.

    Returns:
        (k, n - 1, 2) int64, its edges.

    Raises:
        ValueError: a distance is not finite.
    """
    from scipy.sparse.csgraph import minimum_spanning_tree
    from scipy.stats import rankdata

    finite("distances", distances)
    k, n = distances.shape[:2]
    pairs = (..., *np.triu_indices(n, 1))
    # ranks from 1, because a weight of 0 means no edge to SciPy
    weights = np.zeros(distances.shape, np.int64)
    weights[pairs] = rankdata(distances[pairs], "ordinal", axis=-1)
    edges = [np.transpose(minimum_spanning_tree(each).nonzero()) for each in weights]
    return np.array(edges, np.int64).reshape(k, max(n - 1, 0), 2)


def spearman(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Spearman's correlation over the last dimension; NaN if an argument has a NaN or does not vary."""
    from scipy.stats import rankdata

    # a NaN makes all ranks of its row NaN
    a, b = (r - r.mean(-1, keepdims=True) for r in (rankdata(each, axis=-1) for each in (one, other)))
    below = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.divide((a * b).sum(-1), below, out=np.full(below.shape, np.nan), where=below > 0)


@dataclass(frozen=True)
class Structure:
    """How well each layer's vectors show the trees of the tested sentences.

    Attributes:
        found: (layers + 1, sentences) int64, number of edges that the gold tree and the probe's tree share.
        edges: (sentences,) int64, number of edges of the gold trees.
        root: (layers + 1, sentences) bool: whether the word of least depth is the root.
        distance_correlation, depth_correlation: (layers + 1, sentences), Spearman's; NaN if undefined.
        lengths: (sentences,) number of words.
        linear_found, linear_correlation: (sentences,): the same for a chain, which joins neighbours.
        sentences: numbers of sentences (to train, held out, to test).
        rank: rank of B.
        seed: seed of the split, the probes and the intervals.
    """

    found: np.ndarray
    edges: np.ndarray
    root: np.ndarray
    distance_correlation: np.ndarray
    depth_correlation: np.ndarray
    lengths: np.ndarray
    linear_found: np.ndarray
    linear_correlation: np.ndarray
    sentences: tuple[int, int, int]
    rank: int
    seed: int

    def uuas(self) -> np.ndarray:
        """(layers + 1,): the share of edges found."""
        return self.found.sum(1) / max(int(self.edges.sum()), 1)

    def linear_uuas(self) -> float:
        """The share of edges between neighbours."""
        return float(self.linear_found.sum() / max(int(self.edges.sum()), 1))

    def interval(self, layer: int) -> Interval:
        """UUAS of a layer with its 95% bootstrap interval over sentences."""
        return ratio_interval(self.found[layer], self.edges, seed=self.seed)

    def root_accuracy(self) -> np.ndarray:
        """(layers + 1,): the share of sentences whose root is the word of least depth."""
        return self.root.mean(1)

    def distance_spearman(self) -> np.ndarray:
        """(layers + 1,): mean over lengths of the mean over sentences."""
        return self._over_lengths(self.distance_correlation)

    def depth_spearman(self) -> np.ndarray:
        """(layers + 1,): mean over lengths of the mean over sentences."""
        return self._over_lengths(self.depth_correlation)

    def linear_spearman(self) -> float:
        """The correlation of the distances in a chain."""
        return float(self._over_lengths(self.linear_correlation[None])[0])

    def _over_lengths(self, values: np.ndarray) -> np.ndarray:
        means = []
        for length in LENGTHS:
            some = values[:, self.lengths == length]
            known = ~np.isnan(some)
            if known.any():
                means.append(np.where(known, some, 0).sum(1) / np.maximum(known.sum(1), 1))
        return np.mean(means, 0) if means else np.full(len(values), np.nan)


class StructuralProbes(nn.Module):
    """B of every layer, for distances and for depths: 2 x layers probes."""

    def __init__(self, layers: int, width: int, rank: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        one = torch.rand(width, rank, generator=draw) * 0.1 - 0.05
        self.maps = nn.Parameter(one.expand(2 * layers, -1, -1).clone())

    @property
    def distance(self) -> Tensor:
        """B for distances, (layers, width, rank)."""
        return self.maps.chunk(2)[0]

    @property
    def depth(self) -> Tensor:
        """B for depths, (layers, width, rank)."""
        return self.maps.chunk(2)[1]

    def distances(self, words: Tensor) -> Tensor:
        """(layers, sentences, n, width) -> (layers, sentences, n, n)."""
        seen = words.flatten(1, 2) @ self.distance
        seen = seen.view(*words.shape[:3], -1)
        square = seen.square().sum(-1)
        found = square[..., :, None] + square[..., None, :] - 2 * seen @ seen.transpose(-1, -2)
        return found.clamp_min(0)

    def depths(self, words: Tensor) -> Tensor:
        """(layers, sentences, n, width) -> (layers, sentences, n)."""
        return (words.flatten(1, 2) @ self.depth).square().sum(-1).view(words.shape[:3])


@dataclass(frozen=True)
class _Trees:
    """Sentences for the probes: where their words' pieces are, and their trees."""

    sentences: Sequence[Sentence]
    starts: np.ndarray
    ends: np.ndarray
    first_word: np.ndarray

    def words(self, states: Tensor, numbers: np.ndarray, device: torch.device) -> Tensor:
        """The vectors of the words of some sentences, (layers, sentences, n, width), 0 beyond the end."""
        lengths = [len(self.sentences[i].words) for i in numbers]
        found = torch.zeros(len(states), len(numbers), max(lengths), states.shape[-1])
        for at, (i, length) in enumerate(zip(numbers, lengths, strict=True)):
            begin = self.first_word[i]
            starts, ends = (torch.from_numpy(e[begin : begin + length]) for e in (self.starts, self.ends))
            rows = states[:, starts[0] : ends[-1]].float()
            counts = ends - starts
            owner = torch.repeat_interleave(torch.arange(length), counts)
            total = rows.new_zeros(len(states), length, states.shape[-1]).index_add(1, owner, rows)
            found[:, at, :length] = total / counts[None, :, None]
        return found.to(device)

    def distances(self, numbers: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """(distances (sentences, n, n), depths (sentences, n), lengths), -1 beyond the end."""
        lengths = [len(self.sentences[i].words) for i in numbers]
        most = max(lengths)
        apart = torch.full((len(numbers), most, most), -1.0)
        depth = torch.full((len(numbers), most), -1.0)
        for at, (i, length) in enumerate(zip(numbers, lengths, strict=True)):
            heads = np.asarray(self.sentences[i].heads)
            found = torch.from_numpy(tree_distances(heads)).float()
            apart[at, :length, :length] = found
            depth[at, :length] = found[int(np.flatnonzero(heads == 0)[0])]
        return apart, depth, torch.tensor(lengths, dtype=torch.float32)

    def losses(self, probes: StructuralProbes, states: Tensor, numbers: np.ndarray) -> Tensor:
        """The losses of distances, then of depths, of each layer and sentence: (2 x layers, sentences)."""
        device = probes.maps.device
        words = self.words(states, numbers, device)
        apart, depth, lengths = (t.to(device) for t in self.distances(numbers))
        of_distance = (probes.distances(words) - apart).abs() * (apart >= 0)
        of_depth = (probes.depths(words) - depth).abs() * (depth >= 0)
        return torch.cat([of_distance.sum((-1, -2)) / lengths.square(), of_depth.sum(-1) / lengths])


def usable_of(sentences: Sequence[Sentence]) -> np.ndarray:
    """The numbers of the sentences with an arc.

    Raises:
        ValueError: there are too few sentences for a split.
    """
    usable = np.flatnonzero([len(sentence.words) > 1 for sentence in sentences])
    if len(usable) < 10:
        raise ValueError(f"sentences: a split needs 10 of two words at least, got {len(usable)}")
    return usable


def structural_probe(
    states: Tensor,
    sentences: Sequence[Sentence],
    examples: Examples,
    *,
    rank: int = 64,
    lr: float = 1e-3,
    batch: int = 20,
    epochs: int = 20,
    patience: int = 3,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Structure:
    """The probes of every layer, on a split of the sentences in 8 : 1 : 1.

    Args:
        states: (layers + 1, rows, hidden), the hidden states of all words' pieces, in order.
        sentences: sentences with trees; sentences of one word are left out.
        examples: what `as_examples` returns for these sentences.
        rank: rank of B, at most hidden.
        lr: Adam's learning rate.
        batch: sentences per step.
        epochs, patience: as in `Recipe`.
        seed: seed of the split, the probes and the intervals.
        device: where the probes learn; `states` may be anywhere.

    Raises:
        ImportError: SciPy is not installed.
        ValueError: naming the argument, what came and what was expected.
    """
    check()
    if not isinstance(rank, int) or not 1 <= rank <= states.shape[-1]:
        raise ValueError(f"rank: expected an integer from 1 to {states.shape[-1]}, got {rank!r}")
    starts, ends = pieces_of(examples)
    if states.shape[1] != (ends - starts).sum():
        raise ValueError(
            f"states: expected {(ends - starts).sum()} rows, the words' pieces, got {states.shape[1]}"
        )
    check_finite(states)
    sizes = ends - starts
    ends = np.cumsum(sizes)
    counts = np.array([len(sentence.words) for sentence in sentences])
    trees = _Trees(sentences, ends - sizes, ends, np.cumsum(counts) - counts)
    usable = usable_of(sentences)
    drawn = np.random.default_rng(seed).permutation(usable)
    tenth = len(drawn) // 10
    test, held_out, train = np.sort(drawn[:tenth]), drawn[tenth : 2 * tenth], drawn[2 * tenth :]
    probes = StructuralProbes(len(states), states.shape[-1], rank, seed).to(device)
    optimizer = torch.optim.Adam(probes.parameters(), lr=lr)
    recipe = Recipe(lr=lr, batch=batch, epochs=epochs, patience=patience)

    def of_epoch() -> Tensor:
        parts = np.array_split(held_out, math.ceil(len(held_out) / batch))
        with torch.no_grad():
            found = [trees.losses(probes, states, some) for some in parts]
        return torch.cat(found, 1).sum(1).cpu()

    learn(probes, optimizer, train, lambda some: trees.losses(probes, states, some), of_epoch, recipe, seed)
    return _scored(probes, states, trees, test, (len(train), len(held_out), len(test)), rank, seed)


def _scored(
    probes: StructuralProbes,
    states: Tensor,
    trees: _Trees,
    test: np.ndarray,
    sentences: tuple[int, int, int],
    rank: int,
    seed: int,
) -> Structure:
    layers = len(states)
    found, root = np.zeros((layers, len(test)), np.int64), np.zeros((layers, len(test)), bool)
    apart_r, depth_r = (np.full((layers, len(test)), np.nan) for _ in range(2))
    edges, linear_found = (np.zeros(len(test), np.int64) for _ in range(2))
    linear_r = np.full(len(test), np.nan)
    for at, number in enumerate(test):
        sentence = trees.sentences[number]
        heads = np.asarray(sentence.heads)
        words = trees.words(states, np.array([number]), probes.distance.device)
        with torch.no_grad():
            apart = probes.distances(words)[:, 0].double().cpu().numpy()
            depth = probes.depths(words)[:, 0].double().cpu().numpy()
        gold = tree_distances(heads)
        chain = np.abs(np.subtract.outer(np.arange(len(heads)), np.arange(len(heads))))
        # edges between words that are not punctuation
        plain = np.array([tag != "PUNCT" for tag in sentence.upos])
        usual = np.flatnonzero(plain)
        wanted = {
            (min(i, h - 1), max(i, h - 1)) for i, h in enumerate(heads) if h > 0 and plain[i] and plain[h - 1]
        }
        edges[at] = len(wanted)
        if len(usual):
            both = np.concatenate([apart, chain[None]])[:, usual][:, :, usual]
            trees_of = usual[spanning_trees(both)]
            counted = [sum((min(e), max(e)) in wanted for e in tree.tolist()) for tree in trees_of]
            found[:, at], linear_found[at] = counted[:-1], counted[-1]
            root[:, at] = heads[usual[depth[:, usual].argmin(1)]] == 0
        apart_r[:, at] = _mean_known(spearman(apart, gold))
        linear_r[at] = _mean_known(spearman(chain[None], gold[None]))[0]
        depths = gold[int(np.flatnonzero(heads == 0)[0])]
        depth_r[:, at] = spearman(depth, depths)
    lengths = np.array([len(trees.sentences[i].words) for i in test])
    return Structure(
        *(found, edges, root, apart_r, depth_r, lengths, linear_found, linear_r, sentences, rank, seed)
    )


def _mean_known(values: np.ndarray) -> np.ndarray:
    """(k, n) -> (k,): the mean without NaN; NaN if all are NaN."""
    known = ~np.isnan(values)
    total = np.where(known, values, 0).sum(-1)
    return np.divide(total, known.sum(-1), out=np.full(total.shape, np.nan), where=known.any(-1))
