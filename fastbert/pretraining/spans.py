"""Phrases and entities of a corpus: the units that ERNIE 1.0 masks as a whole.

A span is a run of words within one sentence, and has a kind, phrase or entity. Two sources:

    Gazetteer     a list of names and phrases; each of its entries is a span wherever its words occur
    Collocations  phrases of two or three words that occur together more often than their words alone suggest

Spans do not overlap. From left to right, the longest span that begins at a word is taken, and the search
continues behind it. Earlier sources have priority over later ones. The result does not depend on how the
text is cut.

Collocations. With N words in the corpus, of which x occurs c(x) times, an n-gram's score is the least ratio

    p(whole) / (p(part) · p(part) · …),    p(x) = c(x) / N

over all ways to cut it into parts; its logarithm to base 2 is the pointwise mutual information of Church &
Hanks for two words, and the PMI_n of Levine et al. for more. An n-gram is a phrase if it occurs `min_count`
times and its score is at least 2 ** `min_pmi`. No phrase has a word without a letter or digit, or a word that
the tokenizer does not know. Scores are products and quotients of float64 numbers, which are the same on every
machine, while logarithms are not.

Source: Sun et al. 2019, "ERNIE: Enhanced Representation through Knowledge Integration", sec. 3.2; Church &
Hanks 1990, "Word association norms, mutual information, and lexicography"; Levine et al. 2021, "PMI-Masking",
sec. 3; Agrawal & Srikant 1994, "Fast algorithms for mining association rules" (an n-gram is counted only if
its parts are frequent).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from fastbert.checkpoint.files import parse_json
from fastbert.pretraining.documents import lines
from fastbert.runtime import expected

KINDS = ("phrase", "entity")
PHRASE, ENTITY = range(2)
PMI = "pmi"  # the name of Collocations on the command line
MIN_PMI, MIN_COUNT = 6.0, 10
_BATCH = 1 << 14  # lines of a gazetteer that are tokenized together
_BASE = 0x9E3779B97F4A7C15  # base of the hash of words; odd
_SPREAD = np.uint64(0xD6E8FEB86659FD93)  # odd; moves low bits up


@dataclass(frozen=True)
class Part:
    """Some sentences of a corpus.

    Attributes:
        first: the corpus's number of the first token.
        ids: (tokens,) ids of the vocabulary.
        bounds: (words + 1,) int64: the first token of each word, counted from `first`; the last entry is the
            number of tokens.
        stops: (words,) int64: for each word, the first word after its sentence.
    """

    first: int
    ids: np.ndarray
    bounds: np.ndarray
    stops: np.ndarray

    def __len__(self) -> int:
        return len(self.stops)

    @cached_property
    def _sums(self) -> tuple[np.ndarray, np.ndarray]:
        """The sums of (id + 1) · base**place before each place, and base**-place, modulo 2**64."""
        count = len(self.ids)
        powers = np.full(count + 1, _BASE, np.uint64)
        inverse = np.full(count + 1, pow(_BASE, -1, 1 << 64), np.uint64)
        powers[0] = inverse[0] = 1
        np.cumprod(powers, out=powers)
        np.cumprod(inverse, out=inverse)
        sums = np.zeros(count + 1, np.uint64)
        np.cumsum((self.ids.astype(np.uint64) + np.uint64(1)) * powers[:-1], out=sums[1:])
        return sums, inverse

    def hashes(self, words: np.ndarray, count: int) -> np.ndarray:
        """(n,) uint64: the hash of the tokens of `count` words from each of `words` on."""
        sums, inverse = self._sums
        begins, ends = self.bounds[words], self.bounds[words + count]
        return (sums[ends] - sums[begins]) * inverse[begins] * _SPREAD

    def whole(self, count: int) -> np.ndarray:
        """The words with which `count` words of one sentence begin."""
        return np.flatnonzero(np.arange(count, len(self) + count) <= self.stops)


# Each call returns all parts of the corpus anew
Parts = Callable[[], Iterator[Part]]


class Source(Protocol):
    """Where spans come from."""

    def prepare(self, tokenizer: Tokenizer, special: Sequence[int]) -> None:
        """Read what is needed before any text is read; `special` are ids that no span has."""

    def learn(self, parts: Parts) -> None:
        """Read the whole corpus."""

    def candidates(self, part: Part) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
        """(first words, number of words, kinds) of spans, longer spans first; they may overlap."""
        ...

    def report(self) -> str:
        """One line about what the source has."""
        ...


def sources_of(spans: str | Path | Source | Sequence[str | Path | Source]) -> list[Source]:
    """The sources that a caller has named: "pmi", the path of a gazetteer, a source, or a list of these.

    Raises:
        FileNotFoundError, TypeError, ValueError: naming the file or the value.
    """
    named: Any = spans
    given = [named] if isinstance(named, (str, Path)) or hasattr(named, "candidates") else list(named)
    if not given:
        raise ValueError("spans: expected at least one source, got none")
    found: list[Source] = []
    for each in given:
        if isinstance(each, (str, Path)):
            found.append(Collocations() if each == PMI else Gazetteer(each))
        elif hasattr(each, "candidates"):
            found.append(each)
        else:
            raise TypeError(f"spans: expected {PMI!r}, a path or a source of spans, got {each!r}")
    return found


def find(parts: Parts, sources: Sequence[Source]) -> Iterator[np.ndarray]:
    """(n, 3) int64 arrays of (first token, end, kind), in ascending order, without overlap."""
    for source in sources:
        source.learn(parts)
    for part in parts():
        free = np.ones(len(part), bool)
        kept = [np.empty((0, 3), np.int64)]
        for source in sources:
            kept.append(_chosen(part, source, free))
            edges = np.zeros(len(part) + 1, np.int64)
            edges[kept[-1][:, 0]] += 1
            edges[kept[-1][:, 1]] -= 1
            free &= np.cumsum(edges[:-1]) == 0
        spans = np.concatenate(kept)
        spans = spans[np.argsort(spans[:, 0])]
        spans[:, :2] = part.bounds[spans[:, :2]] + part.first
        yield spans


def _chosen(part: Part, source: Source, free: np.ndarray) -> np.ndarray:
    """(n, 3) first word, end and kind of a source's spans among the `free` words."""
    longest = np.zeros(len(part), np.int64)
    kinds = np.zeros(len(part), np.int64)
    taken = np.append(0, np.cumsum(~free))
    for words, count, kind in source.candidates(part):
        fit = (longest[words] == 0) & (taken[words + count] == taken[words])
        longest[words[fit]], kinds[words[fit]] = count, kind[fit]
    begins = np.flatnonzero(longest)
    ends = begins + longest[begins]
    kept, last = [], 0
    for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        if begin >= last:
            kept.append(i)
            last = end
    kept = np.array(kept, np.int64)
    return np.stack([begins[kept], ends[kept], kinds[begins[kept]]], 1)


# --- a gazetteer --------------------------------------------------------------------------------------------


class Gazetteer:
    """A file of names and phrases, one JSON object per line: {"text": "New York", "kind": "entity"}.

    An entry matches where its tokens occur, from the start of a word to the end of a word, so the tokenizer
    decides on case and accents. A missing `kind` means "entity"; an entry with both kinds is an entity. An
    entry without a token, or with a word that the tokenizer does not know, is left out and counted.

    Args:
        path: path of the file.

    Attributes:
        num_entries: number of lines that are searched for.
        num_left_out: number of lines that are left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: from `prepare`, if a line is no such object; the message names file and line.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"spans: {self.path}: no such file")
        self.num_entries = self.num_left_out = 0
        self._tables: dict[int, _Entries] = {}  # number of words -> entries, the longest first

    def prepare(self, tokenizer: Tokenizer, special: Sequence[int]) -> None:
        """Read the file."""
        texts, kinds = self._read()
        kept = np.zeros(len(texts), bool)
        found: dict[int, dict[tuple[int, ...], int]] = {}  # number of words -> ids -> kind
        for first in range(0, len(texts), _BATCH):
            batch = texts[first : first + _BATCH]
            # in a byte-level tokenizer a word's ids differ between the start of a text and behind a space
            for form in (batch, [f" {text}" for text in batch]):
                for i, encoding in enumerate(tokenizer.encode_batch(form, add_special_tokens=False), first):
                    ids, words = tuple(encoding.ids), encoding.word_ids
                    if ids and not any(each in ids for each in special):
                        kept[i] = True
                        count = sum(j == 0 or w is None or w != words[j - 1] for j, w in enumerate(words))
                        same = found.setdefault(count, {})
                        same[ids] = max(kinds[i], same.get(ids, kinds[i]))
        self.num_entries, self.num_left_out = int(kept.sum()), int((~kept).sum())
        self._tables = {count: _Entries(found[count]) for count in sorted(found, reverse=True)}

    def _read(self) -> tuple[list[str], list[int]]:
        texts, kinds = [], []
        for number, line in lines(self.path):
            if not line.strip():
                continue
            place = f"{self.path}: line {number}"
            entry = parse_json(line, place)
            if not isinstance(entry.get("text"), str):
                raise ValueError(f'{place}: expected an object with a text in "text"')
            if unknown := entry.keys() - {"text", "kind"}:
                raise ValueError(f'{place}: expected "text" and "kind", got {min(unknown)!r}')
            if entry.get("kind", "entity") not in KINDS:
                raise ValueError(f"{place}: kind: expected one of {', '.join(KINDS)}, got {entry['kind']!r}")
            texts.append(entry["text"])
            kinds.append(KINDS.index(entry.get("kind", "entity")))
        if not texts:
            raise ValueError(f"{self.path}: no entries")
        return texts, kinds

    def learn(self, parts: Parts) -> None:
        """Nothing to do: all spans are in the file."""

    def candidates(self, part: Part) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
        """See `Source`."""
        for count, entries in self._tables.items():
            words = part.whole(count)
            found = entries.find(part, words, count)
            words, found = words[found >= 0], found[found >= 0]
            yield words, count, entries.kinds[found]

    def report(self) -> str:
        """See `Source`."""
        text = f"{self.path}: {self.num_entries:,} entries"
        if self.num_left_out:
            text += (
                f"; {self.num_left_out:,} left out (no tokens, or a word that the tokenizer does not know)"
            )
        return text


class _Entries:
    """A gazetteer's entries with the same number of words; found by a hash, then compared."""

    def __init__(self, entries: dict[tuple[int, ...], int]) -> None:
        self.kinds = np.fromiter(entries.values(), np.int64, len(entries))
        self._lengths = np.fromiter(map(len, entries), np.int64, len(entries))
        bounds = np.append(0, np.cumsum(self._lengths))
        self._firsts = bounds[:-1]
        self._ids = np.fromiter((i for ids in entries for i in ids), np.int64, int(bounds[-1]))
        each = np.arange(len(entries))
        hashes = Part(0, self._ids, bounds, each + 1).hashes(each, 1)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]
        # whether any hash has these upper bits; this rules out nearly all words of a text
        bits = min(28, (16 * len(entries)).bit_length())
        self._shift = np.uint64(64 - bits)
        self._seen = np.zeros(1 << bits, bool)
        self._seen[hashes >> self._shift] = True

    def find(self, part: Part, words: np.ndarray, count: int) -> np.ndarray:
        """(n,) the entry that matches `count` words from each of `words` on; -1 for none."""
        found = np.full(len(words), -1)
        hashes = part.hashes(words, count)
        left = np.flatnonzero(self._seen[hashes >> self._shift])
        at = np.searchsorted(self._hashes, hashes[left])
        while len(left):  # more than once only if entries have the same hash
            there = at < len(self._hashes)
            left, at = left[there], at[there]
            there = self._hashes[at] == hashes[left]
            left, at = left[there], at[there]
            entry = self._order[at]
            same = self._same(part, words[left], count, entry)
            found[left[same]] = entry[same]
            left, at = left[~same], at[~same] + 1
        return found

    def _same(self, part: Part, words: np.ndarray, count: int, entry: np.ndarray) -> np.ndarray:
        begins, lengths = part.bounds[words], self._lengths[entry]
        same = part.bounds[words + count] - begins == lengths
        maybe = np.flatnonzero(same)
        if len(maybe):
            sizes = lengths[maybe]
            starts = np.cumsum(sizes) - sizes
            steps = np.arange(sizes.sum()) - np.repeat(starts, sizes)
            theirs = part.ids[np.repeat(begins[maybe], sizes) + steps]
            ours = self._ids[np.repeat(self._firsts[entry[maybe]], sizes) + steps]
            same[maybe] = np.logical_and.reduceat(theirs == ours, starts)
        return same


# --- collocations -------------------------------------------------------------------------------------------


class Collocations:
    """Phrases of two or three words, found in the corpus itself; see the module.

    The corpus is read once for each length of one to three words. Memory holds the different n-grams of that
    length whose parts are frequent (16 bytes each). Words are identified by a hash of 64 bits.

    Args:
        min_pmi: least pointwise mutual information, in bits.
        min_count: least number of times that a phrase occurs.

    Attributes:
        num_phrases: (number of phrases of two words, of three words).

    Raises:
        ValueError: naming the argument.
    """

    def __init__(self, min_pmi: float = MIN_PMI, min_count: int = MIN_COUNT) -> None:
        if isinstance(min_pmi, bool) or not isinstance(min_pmi, (int, float)) or not 0 <= min_pmi <= 64:
            raise ValueError(f"min_pmi: expected a number in [0, 64], got {min_pmi!r}")
        expected.integers(1, min_count=min_count)
        self.min_pmi, self.min_count = min_pmi, min_count
        self.num_phrases = (0, 0)

    def prepare(self, tokenizer: Tokenizer, special: Sequence[int]) -> None:
        """Find the tokens that the words of phrases may have."""
        size = 1 + max(tokenizer.get_vocab().values())
        # a lone byte of a character decodes to U+FFFD
        shown = tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
        self._written = np.array([any(c.isalnum() or c == "\ufffd" for c in text) for text in shown])
        self._special = np.zeros(size, bool)
        self._special[list(special)] = True

    def learn(self, parts: Parts) -> None:
        """Count the words, then the pairs of frequent words, then the triples of frequent pairs."""
        count, total = _Counts(), 0
        for part in parts():
            words = self._lexical(part)
            total += len(words)
            count.add(part.hashes(words, 1))
        self._words, words = count.above(self.min_count)
        count = _Counts()
        for part in parts():
            count.add(self._pair_keys(part, self._numbers(part))[1])
        self._pairs, pairs = count.above(self.min_count)
        count = _Counts()
        for part in parts():
            count.add(self._triple_keys(part, self._numbers(part))[1])
        self._triples, triples = count.above(self.min_count)

        least, size = 2.0**self.min_pmi, max(len(words), 1)
        first, second = np.divmod(self._pairs, size)
        self._good_pairs = pairs * total / (words[first] * words[second]) >= least
        pair, third = np.divmod(self._triples, size)
        first, second = first[pair], second[pair]
        last = _places(self._pairs, second * size + third)  # the pair of its last two words
        score = np.minimum(
            triples * total / (pairs[pair] * words[third]), triples * total / (words[first] * pairs[last])
        )
        apart = triples * total / (words[first] * words[second]) * total / words[third]
        self._good_triples = np.minimum(score, apart) >= least
        self.num_phrases = int(self._good_pairs.sum()), int(self._good_triples.sum())

    def candidates(self, part: Part) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
        """See `Source`."""
        numbers = self._numbers(part)
        for count, (words, keys), known, good in (
            (3, self._triple_keys(part, numbers), self._triples, self._good_triples),
            (2, self._pair_keys(part, numbers), self._pairs, self._good_pairs),
        ):
            words = words[_marked(known, good, keys)]
            yield words, count, np.full(len(words), PHRASE)

    def report(self) -> str:
        """See `Source`."""
        two, three = self.num_phrases
        return f"{PMI}: {two:,} phrases of two words and {three:,} of three"

    def _lexical(self, part: Part) -> np.ndarray:
        """The words that phrases may have."""
        if len(part) == 0:
            return np.empty(0, np.int64)
        written = np.logical_or.reduceat(self._written[part.ids], part.bounds[:-1])
        return np.flatnonzero(written & ~np.logical_or.reduceat(self._special[part.ids], part.bounds[:-1]))

    def _numbers(self, part: Part) -> np.ndarray:
        """(words,) the number of each word; -1 if it is rare or may be in no phrase."""
        numbers = np.full(len(part), -1)
        words = self._lexical(part)
        numbers[words] = _places(self._words, part.hashes(words, 1))
        return numbers

    def _pair_keys(self, part: Part, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first words, keys) of the pairs of frequent words."""
        words = part.whole(2)
        words = words[(numbers[words] >= 0) & (numbers[words + 1] >= 0)]
        return words, numbers[words] * len(self._words) + numbers[words + 1]

    def _pair_places(self, part: Part, numbers: np.ndarray) -> np.ndarray:
        """(words,) the place in `_pairs` of the pair from each word on; -1 for a rare pair."""
        found = np.full(len(part), -1)
        words, keys = self._pair_keys(part, numbers)
        found[words] = _places(self._pairs, keys)
        return found

    def _triple_keys(self, part: Part, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first words, keys) of the triples of frequent pairs."""
        pairs, words = self._pair_places(part, numbers), part.whole(3)
        words = words[(pairs[words] >= 0) & (pairs[words + 1] >= 0)]
        return words, pairs[words] * len(self._words) + numbers[words + 2]


class _Counts:
    """Counts how often each key occurs in arrays of keys."""

    def __init__(self) -> None:
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, keys: np.ndarray) -> None:
        self._runs.append(np.unique(keys, return_counts=True))
        # merge runs of similar length, so that a key is moved a logarithmic number of times
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            self._merge()

    def _merge(self) -> None:
        (keys, counts), (more, others) = self._runs.pop(), self._runs.pop()
        keys, places = np.unique(np.concatenate([keys, more]), return_inverse=True)
        total = np.zeros(len(keys), np.int64)
        np.add.at(total, places, np.concatenate([counts, others]))
        self._runs.append((keys, total))

    def above(self, least: int) -> tuple[np.ndarray, np.ndarray]:
        """(keys, counts as float64) of the keys that occur `least` times or more, in ascending order."""
        while len(self._runs) > 1:
            self._merge()
        keys, counts = self._runs[0]
        return keys[counts >= least], counts[counts >= least].astype(np.float64)


def _places(known: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """(n,) the place of each key in the ascending array `known`; -1 if it is not there."""
    if len(known) == 0:
        return np.full(len(keys), -1)
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[at] == keys, at, -1)


def _marked(known: np.ndarray, marks: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """(n,) bool: whether each key is in `known` and marked there."""
    at = _places(known, keys)
    found = at >= 0
    found[found] = marks[at[found]]
    return found
