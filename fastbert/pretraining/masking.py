"""Which tokens of a sequence are predicted, and what the model sees in their place.

    unit     what is chosen as a whole
    token    a token
    word     all tokens of a word, by the tokenizer's own words
    ngram    up to `max_ngram` words in a row; n words with a probability in proportion to 1 / n (ALBERT)
    span     a geometric number of words, at most `max_span` (SpanBERT)
    phrase   a phrase or an entity of the corpus, or else a word (ERNIE 1.0, second stage)
    entity   an entity of the corpus, or else a word (ERNIE 1.0, third stage; its first stage has unit word)

Candidates are all tokens but special ones. Of the chosen tokens 80% become [MASK], 10% become a random token
and 10% stay; all of them are predicted. `choose` sets how many are chosen:

    exact      min(max_predictions, max(1, round(share * length))) tokens, special ones counted in the
               length. Units are taken in random order. A unit that exceeds the budget is skipped; a unit of
               several words (n-gram, span) is shortened instead.
    bernoulli  each token, word, phrase or entity with probability `share`

ERNIE's three stages mask words, then phrases, then entities; each stage starts with the weights of the
previous stage. ERNIE's own code draws per unit, as bernoulli does, and what a token becomes per token, as
here. An entity is a phrase too: a segmentation into phrases does not cut through a name.

Source: Devlin et al. 2018, "BERT", sec. 3.1 and google-research/bert's create_pretraining_data.py; Lan et al.
2019, "ALBERT", sec. 3.1; Joshi et al. 2019, "SpanBERT", sec. 3.1; fairseq's word budget; Sun et al. 2019,
"ERNIE: Enhanced Representation through Knowledge Integration", sec. 3.2, and PaddlePaddle/ERNIE's batching.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastbert.pretraining.spans import ENTITY, KINDS, PHRASE
from fastbert.runtime import expected
from fastbert.training.draws import Draws

IGNORED = -100  # the label of a token that is not predicted
UNITS = ("token", "word", "ngram", "span", "phrase", "entity")
# unit -> the kinds of the corpus's spans that it takes as a whole
SPAN_UNITS = {"phrase": (PHRASE, ENTITY), "entity": (ENTITY,)}
_BERNOULLI = ("token", "word", *SPAN_UNITS)


@dataclass(frozen=True)
class Vocabulary:
    """The ids that masking writes.

    Attributes:
        size: ids are in [0, size).
        mask: the id of [MASK].
        special: ids that are never chosen; they are drawn only with `with_special`.
    """

    size: int
    mask: int
    special: tuple[int, ...]

    def __post_init__(self) -> None:
        special = sorted({*self.special, self.mask})
        if not all(0 <= i < self.size for i in special) or len(special) >= self.size:
            raise ValueError(f"special: expected ids of a vocabulary of {self.size}, got {special}")
        object.__setattr__(self, "special", tuple(special))

    def random(self, draws: Draws, count: int, with_special: bool = False) -> np.ndarray:
        """(count,) ids, uniform; special ids are left out unless `with_special`."""
        if with_special:
            return draws.below(self.size, count)
        found = draws.below(self.size - len(self.special), count)
        for i in self.special:  # in ascending order, so that each is stepped over
            found += found >= i
        return found


@dataclass(frozen=True)
class Masked:
    """A masked sequence.

    Attributes:
        ids: (length,) int64, what the model sees.
        labels: (length,) int64, the original ids of the predicted tokens, `IGNORED` elsewhere.
        spans: (n, 2) int64, first token and end of each chosen unit, in ascending order; units may touch.
    """

    ids: np.ndarray
    labels: np.ndarray
    spans: np.ndarray


@dataclass(frozen=True)
class Masking:
    """A masking rule; see the module.

    Attributes:
        unit: "token", "word", "ngram", "span", "phrase" or "entity".
        choose: "exact" or "bernoulli" (not for n-grams and spans).
        share: share of the tokens that are predicted, in (0, 1].
        max_predictions: most predicted tokens of a sequence; None: no limit.
        mask_share: share of the chosen tokens that become [MASK].
        random_share: share of the chosen tokens that become a random token.
        word_budget: with unit "word" and "exact", whether `share` and `max_predictions` count "tokens"
            (Google's rule) or "words". With "words" the tokens of a word are all masked, all random or all
            kept (fairseq's rule).
        random_specials: whether a random token may be a special one, as in Google's code and transformers.
        max_ngram, max_span, span_p: see the module; `span_p` is the geometric distribution's parameter.

    Raises:
        ValueError: naming the attribute.
    """

    unit: str = "token"
    choose: str = "exact"
    share: float = 0.15
    max_predictions: int | None = None
    mask_share: float = 0.8
    random_share: float = 0.1
    word_budget: str = "tokens"
    random_specials: bool = False
    max_ngram: int = 3
    max_span: int = 10
    span_p: float = 0.2

    def __post_init__(self) -> None:
        expected.one_of(UNITS, unit=self.unit)
        expected.one_of(("exact", "bernoulli"), choose=self.choose)
        expected.one_of(("tokens", "words"), word_budget=self.word_budget)
        expected.numbers("in (0, 1]", share=self.share, span_p=self.span_p)
        expected.numbers("in [0, 1]", mask_share=self.mask_share, random_share=self.random_share)
        if self.mask_share + self.random_share > 1:
            raise ValueError(
                f"random_share: {self.random_share} and mask_share {self.mask_share} are more than 1 together"
            )
        if self.max_predictions is not None:
            expected.integers(1, max_predictions=self.max_predictions)
        expected.integers(1, max_ngram=self.max_ngram, max_span=self.max_span)
        if self.choose == "bernoulli" and self.unit not in _BERNOULLI:
            raise ValueError(
                f"choose: bernoulli is for the units {', '.join(_BERNOULLI)}; {self.unit} needs exact"
            )
        if self.choose == "bernoulli" and self.max_predictions is not None:
            raise ValueError("max_predictions: expected None with choose = bernoulli, which has no limit")
        if self.word_budget == "words" and (self.unit, self.choose) != ("word", "exact"):
            raise ValueError("word_budget: words needs unit = word and choose = exact")

    def __call__(
        self,
        ids: np.ndarray,
        word_starts: np.ndarray,
        vocabulary: Vocabulary,
        draws: Draws,
        spans: np.ndarray | None = None,
    ) -> Masked:
        """Mask one sequence.

        Args:
            ids: (length,), special tokens included.
            word_starts: (length,) bool, whether a word starts at each token. A special token is a word.
            vocabulary: the ids that masking writes.
            draws: the sequence's stream.
            spans: (n, 3) integers, first token, end and kind of the phrases and entities within the
                sequence, ascending. The units phrase and entity need them; other units take None.

        Raises:
            ValueError: spans are missing, not expected, out of order or not of whole words.
        """
        if (spans is not None) != (self.unit in SPAN_UNITS):
            raise ValueError(
                f"spans: unit = {self.unit} "
                + ("needs the phrases and entities of the sequence" if spans is None else "takes none")
            )
        ids = np.asarray(ids).astype(np.int64)
        starts = np.asarray(word_starts, bool).copy()
        candidate = ~np.isin(ids, vocabulary.special)
        # a word ends where a special token is
        starts |= ~candidate
        starts[1:] |= ~candidate[:-1]
        starts[:1] = True
        if spans is not None:
            starts = self._joined(candidate, starts, np.asarray(spans))
        spans = self._spans(candidate, starts, draws)
        unit = np.full(len(ids), -1)
        for i, (begin, end) in enumerate(spans):
            unit[begin:end] = i
        chosen = np.flatnonzero(unit >= 0)
        labels = np.full(len(ids), IGNORED)
        labels[chosen] = ids[chosen]
        seen = ids.copy()
        if len(chosen):
            together = self.unit == "span" or self.word_budget == "words"
            # one draw per unit, or one per token
            fate = draws.words(len(spans))[unit[chosen]] if together else draws.words(len(chosen))
            fate = (fate >> np.uint64(11)).astype(np.float64) / (1 << 53)
            seen[chosen[fate < self.mask_share]] = vocabulary.mask
            drawn = chosen[(fate >= self.mask_share) & (fate < self.mask_share + self.random_share)]
            seen[drawn] = vocabulary.random(draws, len(drawn), self.random_specials)
        return Masked(seen, labels, spans)

    def _joined(self, candidate: np.ndarray, starts: np.ndarray, spans: np.ndarray) -> np.ndarray:
        """(length,) bool: where units start if each span of this rule's kinds is one unit."""
        if spans.ndim != 2 or spans.shape[1] != 3 or spans.dtype.kind not in "iu":
            raise ValueError(f"spans: expected (n, 3) integers, got {spans.dtype} of the shape {spans.shape}")
        begins, ends, kinds = spans.T
        if len(spans) and not (
            begins[0] >= 0
            and ends[-1] <= len(starts)
            and (begins < ends).all()
            and (ends[:-1] <= begins[1:]).all()
            and np.isin(kinds, range(len(KINDS))).all()
        ):
            raise ValueError(
                "spans: expected first tokens, ends and kinds, ascending and not overlapping, within "
                f"{len(starts)} tokens and {len(KINDS)} kinds, got {spans.tolist()}"
            )
        whole, special = np.append(starts, True), np.append(0, np.cumsum(~candidate))
        if not (whole[begins] & whole[ends] & (special[begins] == special[ends])).all():
            raise ValueError("spans: one begins or ends within a word, or has a special token")
        starts = starts.copy()
        for begin, end in spans[np.isin(kinds, SPAN_UNITS[self.unit]), :2].tolist():
            starts[begin + 1 : end] = False
        return starts

    def _spans(self, candidate: np.ndarray, starts: np.ndarray, draws: Draws) -> np.ndarray:
        """(n, 2) first token and end of the chosen units, in ascending order."""
        if self.unit == "token":
            begins = np.flatnonzero(candidate)
            ends = begins + 1
        else:
            begins = np.flatnonzero(starts)
            ends = np.append(begins[1:], len(starts))
            kept = candidate[begins]
            begins, ends = begins[kept], ends[kept]
        if len(begins) == 0:
            return np.empty((0, 2), np.int64)
        if self.choose == "bernoulli":
            chosen = np.flatnonzero(draws.chance(self.share, len(begins)))
            return np.stack([begins[chosen], ends[chosen]], 1)
        by_words = self.word_budget == "words"
        length = len(begins) if by_words else len(candidate)
        budget = max(1, round(self.share * length))
        if self.max_predictions is not None:
            budget = min(budget, self.max_predictions)
        order = draws.shuffled(len(begins))
        if self.unit == "token" or by_words:
            chosen = np.sort(order[:budget])
            return np.stack([begins[chosen], ends[chosen]], 1)
        return self._longer(begins, ends, order, budget, draws)

    def _longer(
        self, begins: np.ndarray, ends: np.ndarray, order: np.ndarray, budget: int, draws: Draws
    ) -> np.ndarray:
        """Units of one or more words, from each word in `order`, within a budget of tokens."""
        count = len(begins)
        sizes = self._sizes(draws, count)
        taken = np.zeros(count, bool)
        # whether the next word follows without a special token between
        joined = np.append(begins[1:] == ends[:-1], False)
        chosen = []
        for word, size in zip(order.tolist(), sizes.tolist(), strict=True):
            if budget == 0:
                break
            last = word
            while last - word + 1 < size and joined[last]:
                last += 1
            # shorten a unit that touches a taken word or exceeds the budget
            while last >= word and (taken[word : last + 1].any() or ends[last] - begins[word] > budget):
                last -= 1
            if last < word:
                continue
            taken[word : last + 1] = True
            budget -= int(ends[last] - begins[word])
            chosen.append((begins[word], ends[last]))
        return np.array(sorted(chosen), np.int64).reshape(-1, 2)

    def _sizes(self, draws: Draws, count: int) -> np.ndarray:
        """(count,) number of words of each unit, before it is shortened."""
        if self.unit == "word" or self.unit in SPAN_UNITS:
            return np.ones(count, np.int64)
        if self.unit == "ngram":
            weights = 1.0 / np.arange(1, self.max_ngram + 1)
        else:  # a geometric distribution cut at max_span and made to sum to 1
            weights = self.span_p * (1 - self.span_p) ** np.arange(self.max_span)
        limits = np.cumsum(weights / weights.sum())[:-1]
        uniform = (draws.words(count) >> np.uint64(11)).astype(np.float64) / (1 << 53)
        return 1 + np.searchsorted(limits, uniform, side="right")
