"""Heads and syntax, on a treebank: which words are looked at, and which heads find the heads of words.

**Attention by label.** The tokens of nouns, pronouns, verbs, subjects, objects and negations (`LABELS`):

    share of attention    mean over an example's rows of the attention to the tokens of a label
    score                 the attention that a token of the label receives from all other tokens, over the
                          example's length; the largest if there are several such tokens. Examples without
                          such a token do not count

**Heads as parsers.** The candidates for a word's head are all other words of its sentence, without special
tokens. Attention to the tokens of a word is summed, and attention from them is averaged: A_ij is the
attention of word i to word j. An arc from a dependant d to its head h is found, in one of two directions
(`DIRECTIONS`), if

    the dependant looks at its head    h = argmax_j A_dj
    the head looks at its dependant    h = argmax_j A_jd

The arc of the root has no head and does not count. An attention head is chosen for a relation on one half of
the sentences and scored on the other half. Its baseline is the word at a fixed offset, chosen on the same
half.

Source: Kovaleva et al. 2019, "Revealing the Dark Secrets of BERT", sec. 4.2; Clark et al. 2019, "What Does
BERT Look At?", sec. 4.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastbert.analysis.identities import MAX_BYTES, Observer, Probabilities, check_bytes
from fastbert.analysis.intervals import RESAMPLES, Interval, resampled_means
from fastbert.analysis.treebank import Sentence, pieces_of
from fastbert.analysis.walk import BATCH_TOKENS, Batch, at_rest, batches, encode
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import Examples

LABELS = ("nouns", "pronouns", "verbs", "subjects", "objects", "negations")
NEGATIONS = ("not", "n't", "n’t", "never", "no")
DIRECTIONS = ("the dependant looks at its head", "the head looks at its dependant")
# the name of all arcs together
ALL = "all"


class Published(NamedTuple):
    """What Clark et al. found for a relation: its best head, layer-head from 1, and the best fixed offset.

    The numbers are shares of the arcs, for bert-base-uncased on the Wall Street Journal with Stanford
    dependencies. Their head is chosen on the data that it is scored on, and their "all" includes the roots.
    """

    relation: str
    head: str
    accuracy: float
    offset: float | None


# Universal relation -> the Stanford relation of the same meaning. Their pobj has no counterpart. In the paper
# auxpass has no number for an offset; the authors' notebook has 94.1% and 82.5% there.
PUBLISHED = {
    ALL: Published("all", "7-6", 0.345, 0.263),
    "det": Published("det", "8-11", 0.943, 0.517),
    "nsubj": Published("nsubj", "8-2", 0.585, 0.455),
    "obj": Published("dobj", "8-10", 0.868, 0.400),
    "amod": Published("amod", "4-10", 0.756, 0.683),
    "aux": Published("aux", "4-10", 0.811, 0.715),
    "aux:pass": Published("auxpass", "4-10", 0.825, None),
    "nmod:poss": Published("poss", "7-6", 0.805, 0.477),
    "ccomp": Published("ccomp", "8-1", 0.488, 0.124),
    "compound:prt": Published("prt", "6-7", 0.991, 0.914),
}


def labels_of(sentences: Sequence[Sentence]) -> np.ndarray:
    """Which of `LABELS` each word has, (words of all sentences, labels) bool.

    By part of speech, nouns are NOUN and PROPN, pronouns PRON, and verbs VERB. By relation, subtypes
    included, subjects are nsubj, and objects are obj and iobj. Negations are words with the feature
    Polarity=Neg or the older relation neg, and adverbs and determiners (advmod, det) whose form or lemma is
    in `NEGATIONS`.
    """
    rows = []
    for sentence in sentences:
        columns = sentence.upos, sentence.relations, sentence.words, sentence.lemmas, sentence.features
        for upos, relation, word, lemma, features in zip(*columns, strict=True):
            kind = relation.split(":")[0]
            negates = kind in ("advmod", "det") and bool({word.lower(), lemma.lower()} & {*NEGATIONS})
            rows.append(
                (
                    upos in ("NOUN", "PROPN"),
                    upos == "PRON",
                    upos == "VERB",
                    kind in ("nsubj", "nsubjpass"),
                    kind in ("obj", "iobj", "dobj"),
                    negates or kind == "neg" or "Polarity=Neg" in features.split("|"),
                )
            )
    return np.array(rows, bool).reshape(-1, len(LABELS))


def _pieces(examples: Examples, sentences: Sequence[Sentence]) -> tuple[np.ndarray, np.ndarray]:
    """`pieces_of`, after a check that the examples belong to the sentences."""
    if len(examples) != len(sentences):
        raise ValueError(f"sentences: expected {len(examples)}, one per example, got {len(sentences)}")
    starts, ends = pieces_of(examples)
    example = np.searchsorted(examples.starts, starts, side="right") - 1
    counts = np.bincount(example, minlength=len(examples))
    wrong = np.flatnonzero(counts != [len(sentence) for sentence in sentences])
    if len(wrong):
        number = wrong[0]
        raise ValueError(
            f"sentences[{number}]: {len(sentences[number])} words, but its example has {counts[number]}"
        )
    return starts, ends


# -- attention by label --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionByLabel:
    """Attention per example, layer and head to each of `LABELS`, in float32.

    Attributes:
        to_label: (labels, n, layers, nheads), the mean attention of an example's tokens to the label's
            tokens.
        share: (labels, n), the share of the tokens that have the label.
        score: (labels, n, layers, nheads), the score of the module; NaN in examples without the label.
    """

    to_label: np.ndarray
    share: np.ndarray
    score: np.ndarray

    def counts(self) -> np.ndarray:
        """(labels,) number of examples with the label."""
        return (self.share > 0).sum(1)

    def scores(self) -> np.ndarray:
        """(labels, layers, nheads): the mean score over the examples with the label; NaN without any."""
        known = np.where(np.isnan(self.score), 0, self.score).sum(1, dtype=np.float64)
        counts = self.counts()[:, None, None]
        return np.divide(known, counts, out=np.full(known.shape, np.nan), where=counts > 0)


def attention_by_label(
    model: PreTrainedModel,
    examples: Examples,
    sentences: Sequence[Sentence],
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> AttentionByLabel:
    """How much each head looks at the words of each label; no attention map is in memory.

    Args:
        model: an encoder, or a model with a head.
        examples: what `treebank.as_examples` returns.
        sentences: the sentences that the examples were made of.
        batch_tokens: most tokens that run at a time. It changes the result by rounding only.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    starts, ends = _pieces(examples, sentences)
    groups = np.zeros((len(examples.ids), len(LABELS)), np.float32)
    groups[examples.words >= 0] = np.repeat(labels_of(sentences), ends - starts, axis=0)
    shape = (len(LABELS), len(examples), len(model.base_model.layer_list()), model.config.num_attention_heads)
    to_label, score = np.zeros(shape, np.float32), np.full(shape, np.nan, np.float32)
    with at_rest(model), torch.inference_mode():
        for batch in batches(model, examples, batch_tokens):
            encode(model, batch, _ByLabel(groups, batch, to_label, score))
    number = np.repeat(np.arange(len(examples)), examples.lengths)
    counts = np.stack([np.bincount(number, weights=group, minlength=len(examples)) for group in groups.T])
    return AttentionByLabel(to_label, (counts / examples.lengths).astype(np.float32), score)


class _ByLabel(Observer):
    """Fills the arrays with what a batch's heads do."""

    def __init__(self, groups: np.ndarray, batch: Batch, to_label: np.ndarray, score: np.ndarray) -> None:
        self.batch, self.to_label, self.score = batch, to_label, score
        self.groups = batch.on_device(groups)
        self.members = [group.nonzero()[:, 0] for group in self.groups.t()]
        self.of_rows = (1 / batch.lengths[batch.sequence])[:, None]

    def seen(self, layer: int, probabilities: Probabilities) -> None:
        """See `Observer`."""
        batch, numbers = self.batch, self.batch.numbers
        masses = batch.means(probabilities.of_values(self.groups))
        self.to_label[:, numbers, layer] = masses.permute(2, 0, 1).cpu().numpy()
        own = probabilities.at_offset(0) * self.of_rows
        received = (probabilities.received(self.of_rows)[..., 0] - own).clamp_min(0.0)
        for label, rows in enumerate(self.members):
            some = received[rows]
            most = some.new_full((len(batch), some.shape[1]), -torch.inf)
            most.scatter_reduce_(0, batch.sequence[rows][:, None].expand_as(some), some, "amax")
            most = most.masked_fill(most == -torch.inf, torch.nan)
            self.score[label, numbers, layer] = most.cpu().numpy()


# -- heads as parsers ----------------------------------------------------------------------------------------


def check_halves(sentences: int) -> None:
    """Raise a ValueError if there are too few sentences for `Parsing.best`."""
    if sentences < 4:
        raise ValueError(
            f"sentences: expected 4 at least, two to choose heads on and two to score, got {sentences}"
        )


class Best(NamedTuple):
    """The attention head for a relation, chosen on one half of the sentences and scored on the other half.

    Attributes:
        relation: as in the treebank, or `ALL`.
        layer, head: numbers from 0.
        direction: an index into `DIRECTIONS`.
        accuracy: the share of the other half's arcs that it finds, with its 95% bootstrap interval over
            sentences.
        arcs: number of the relation's arcs in the other half.
        offset: the most frequent offset, in words from the dependant to its head, in the first half.
        baseline: the share of the other half's arcs with this offset.
    """

    relation: str
    layer: int
    head: int
    direction: int
    accuracy: Interval
    arcs: int
    offset: int
    baseline: float


@dataclass(frozen=True)
class Parsing:
    """Which arcs the attention heads find. Each word but the root has an arc.

    Attributes:
        sentence: (arcs,) int64, the number of the arc's sentence.
        offset: (arcs,) int64, from the dependant to its head, in words.
        relation: (arcs,) int64, an index into `relations`.
        right: (arcs, layers, nheads, directions) bool.
        relations: names, the most frequent first.
        sentences: number of sentences.
    """

    sentence: np.ndarray
    offset: np.ndarray
    relation: np.ndarray
    right: np.ndarray
    relations: tuple[str, ...]
    sentences: int

    def of(self, relation: str = ALL) -> np.ndarray:
        """(arcs,) bool: whether an arc has a relation.

        Raises:
            ValueError: no arc has it.
        """
        if relation == ALL:
            return np.ones(len(self.sentence), bool)
        if relation not in self.relations:
            raise ValueError(f"relation: expected {ALL!r} or one of {self.relations}, got {relation!r}")
        return self.relation == self.relations.index(relation)

    def accuracy(self, relation: str = ALL) -> np.ndarray:
        """(layers, nheads, directions): the share of a relation's arcs that each head finds."""
        return self.right[self.of(relation)].mean(0)

    def chooses(self, seed: int = 0) -> np.ndarray:
        """(sentences,) bool: the half, rounded up, on which heads are chosen."""
        found = np.zeros(self.sentences, bool)
        order = np.random.default_rng(seed).permutation(self.sentences)
        found[order[: (self.sentences + 1) // 2]] = True
        return found

    def best(self, *, least: int = 20, seed: int = 0, resamples: int = RESAMPLES) -> list[Best]:
        """The best head for all arcs, then for each relation, the most frequent first; of a tie the first.

        Args:
            least: fewest arcs of a relation in each half; rarer relations are left out.
            seed: seed of the halves and of the resamples.
            resamples: number of resamples for the intervals.

        Raises:
            ValueError: there are fewer than 4 sentences, two for each half.
        """
        check_halves(self.sentences)
        half = self.chooses(seed)
        chooses, scored = half[self.sentence], np.flatnonzero(~half)
        found, totals = [], []
        for name in (ALL, *self.relations):
            of = self.of(name)
            first, second = of & chooses, of & ~chooses
            if min(first.sum(), second.sum()) < max(least, 1):
                continue
            accuracy = self.right[first].mean(0)
            layer, head, direction = (int(i) for i in np.unravel_index(accuracy.argmax(), accuracy.shape))
            offsets, counts = np.unique(self.offset[first], return_counts=True)
            offset = int(offsets[counts.argmax()])
            right = self.right[second, layer, head, direction]
            for weights in (right, None):
                of_sentences = np.bincount(self.sentence[second], weights, minlength=self.sentences)
                totals.append(of_sentences[scored])
            interval = Interval(float(right.mean()), np.nan, np.nan, len(scored), seed)
            baseline = float((self.offset[second] == offset).mean())
            found.append(Best(name, layer, head, direction, interval, int(second.sum()), offset, baseline))
        if not found:
            return []
        means = resampled_means(np.stack(totals, 1), seed=seed, resamples=resamples)
        made = []
        for best, hits, arcs in zip(found, means[:, ::2].T, means[:, 1::2].T, strict=True):
            low, high = np.percentile(hits[arcs > 0] / arcs[arcs > 0], [2.5, 97.5])
            made.append(best._replace(accuracy=best.accuracy._replace(low=float(low), high=float(high))))
        return made


def parse(
    model: PreTrainedModel,
    examples: Examples,
    sentences: Sequence[Sentence],
    *,
    batch_tokens: int = BATCH_TOKENS,
    max_bytes: int = MAX_BYTES,
) -> Parsing:
    """Compare the word that each attention head looks at most with each word's head in the tree.

    Args:
        model: an encoder, or a model with a head.
        examples: what `treebank.as_examples` returns.
        sentences: the sentences that the examples were made of.
        batch_tokens: most tokens that run at a time.
        max_bytes: most memory of attention maps, which exist for one layer and some sentences at a time.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    starts, _ = _pieces(examples, sentences)
    check_maps(model, examples, max_bytes)
    if not len(starts):
        raise ValueError("sentences: expected one at least, got none")
    counts = np.array([len(sentence) for sentence in sentences])
    number = np.repeat(np.arange(len(sentences)), counts)
    word = np.concatenate([np.arange(count) for count in counts])
    heads = np.concatenate([sentence.heads for sentence in sentences])
    names = [relation for sentence in sentences for relation in sentence.relations]
    arcs = np.flatnonzero(heads)
    if not len(arcs):
        raise ValueError("sentences: expected one with two words at least; these have no arc")
    ordered = Counter(names[arc] for arc in arcs).most_common()
    relations = tuple(name for name, _ in sorted(ordered, key=lambda item: (-item[1], item[0])))
    index = {name: i for i, name in enumerate(relations)}
    layers, nheads = len(model.base_model.layer_list()), model.config.num_attention_heads
    found = Parsing(
        sentence=number[arcs],
        offset=heads[arcs] - 1 - word[arcs],
        relation=np.array([index[names[arc]] for arc in arcs]),
        right=np.zeros((len(arcs), layers, nheads, len(DIRECTIONS)), bool),
        relations=relations,
        sentences=len(sentences),
    )
    with at_rest(model), torch.inference_mode():
        for batch in batches(model, examples, batch_tokens):
            encode(model, batch, _Parser(examples, batch, counts, word[arcs], found, max_bytes))
    return found


def check_maps(model: PreTrainedModel, examples: Examples, max_bytes: int) -> None:
    """Raise a ValueError if the maps of the longest example exceed `max_bytes`."""
    cell = model.config.num_attention_heads * (8 if model.dtype == torch.float64 else 4)
    check_bytes(max_bytes, int(examples.lengths.max(initial=0)), cell)


class _Some(NamedTuple):
    """Some consecutive sentences of a batch, of W words at most and S tokens.

    Attributes:
        pieces: (sentences, S, W), 1 where a token belongs to a word.
        hidden: (sentences, 1, W, W) bool, whether the second word is no candidate for the first.
        numbers: numbers of their arcs, in `Parsing`.
        sentence, dependant, head: (arcs,) places of the arcs in these sentences.
    """

    pieces: Tensor
    hidden: Tensor
    numbers: np.ndarray
    sentence: Tensor
    dependant: Tensor
    head: Tensor


class _Parser(Observer):
    """Fills `Parsing.right` with what a batch's heads find."""

    def __init__(
        self,
        examples: Examples,
        batch: Batch,
        counts: np.ndarray,
        dependants: np.ndarray,
        found: Parsing,
        max_bytes: int,
    ) -> None:
        self.batch, self.found, self.max_bytes = batch, found, max_bytes
        self.words = batch.on_device(examples.words)
        self.counts, self.dependants = counts[batch.numbers], dependants
        self.some: dict[tuple[int, int], _Some] = {}

    def _of(self, first: int, last: int, longest: int) -> _Some:
        """The sentences first to last - 1; kept, as they are the same in every layer."""
        if (first, last) not in self.some:
            self.some[first, last] = self._made(first, last, longest)
        return self.some[first, last]

    def _made(self, first: int, last: int, longest: int) -> _Some:
        batch, device = self.batch, self.words.device
        counts = torch.from_numpy(self.counts[first:last]).to(device)
        most = int(self.counts[first:last].max())
        inside = (batch.sequence >= first) & (batch.sequence < last)
        rows = (inside & (self.words >= 0)).nonzero()[:, 0]
        pieces = torch.zeros(last - first, longest, most, device=device)
        pieces[batch.sequence[rows] - first, batch.position[rows], self.words[rows]] = 1
        place = torch.arange(most, device=device)
        there = place < counts[:, None]
        hidden = ~(there[:, :, None] & there[:, None, :]) | (place[:, None] == place)
        arcs = self.found.sentence
        # the arcs of a sentence follow each other
        ends = [np.searchsorted(arcs, batch.numbers[first:last], side) for side in ("left", "right")]
        numbers = np.concatenate([np.arange(a, b) for a, b in zip(*ends, strict=True)])
        sentence = np.repeat(np.arange(last - first), ends[1] - ends[0])
        dependant = self.dependants[numbers]
        head = dependant + self.found.offset[numbers]
        places = (torch.from_numpy(each).to(device) for each in (sentence, dependant, head))
        return _Some(pieces, hidden[:, None], numbers, *places)

    def seen(self, layer: int, probabilities: Probabilities) -> None:
        """See `Observer`."""
        for first, last, maps in probabilities.maps():
            some = self._of(first, last, maps.shape[-1])
            words = merged(maps, some.pieces).masked_fill_(some.hidden, -1.0)
            # (arcs, nheads) per direction: the word that is taken for the dependant's head
            taken = [words.argmax(axis)[some.sentence, :, some.dependant] for axis in (-1, -2)]
            right = torch.stack(taken, -1) == some.head[:, None, None]
            self.found.right[some.numbers, layer] = right.cpu().numpy()


def merged(maps: Tensor, pieces: Tensor) -> Tensor:
    """Attention between words: summed over the tokens of the word looked at, averaged over those that look.

    Args:
        maps: (sentences, nheads, S, S) between tokens.
        pieces: (sentences, S, W), 1 where a token belongs to a word; special tokens belong to none.

    Returns:
        (sentences, nheads, W, W); 0 for words without a token.
    """
    pieces = pieces.to(maps.dtype)
    to_words = torch.einsum("bhij,bjw->bhiw", maps, pieces)
    sums = torch.einsum("bhiw,biu->bhuw", to_words, pieces)
    return sums / pieces.sum(1).clamp_min(1)[:, None, :, None]
