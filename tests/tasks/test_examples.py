"""Texts as ids, segments, kinds and words; masks; answers; and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from fastbert.models.config import EncoderConfig
from fastbert.tasks.examples import KINDS, masked, paired, tokenized
from tests.analysis.conftest import part
from tests.support.hf_models import hf_config


def kinds_of(examples, number):
    return [KINDS[k] for k in part(examples, "kinds", number)]


def test_one_text(tokenizer):
    examples = tokenized(tokenizer, ["it rained, cat!"])
    assert [tokenizer.id_to_token(i) for i in examples.ids] == (
        ["[CLS]", "it", "rain", "##ed", ",", "cat", "!", "[SEP]"]
    )
    assert kinds_of(examples, 0) == (
        ["the first token", *["words"] * 3, "periods and commas", "words", "other punctuation", "separators"]
    )
    assert part(examples, "words", 0) == [-1, 0, 1, 1, 2, 3, 4, -1]
    assert part(examples, "segments", 0) == [0] * 8
    assert examples.lengths.tolist() == [8]


def test_a_pair(tokenizer):
    """A separator belongs to the text before it, and words are numbered through."""
    examples = tokenized(tokenizer, ["the cat", "it"], ["a dog ran", "it rained"])
    assert part(examples, "segments", 0) == part(examples, "types", 0) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert part(examples, "words", 0) == [-1, 0, 1, -1, 2, 3, 4, -1]
    of_words = ["separators", *["words"] * 3, "separators"]
    assert kinds_of(examples, 1) == ["the first token", "words", *of_words]
    assert part(examples, "words", 1) == [-1, 0, -1, 1, 2, 2, -1]


def test_chosen_examples_in_another_order(pairs):
    labelled = pairs.__class__(**{**vars(pairs), "labels": np.arange(5)})
    chosen = labelled.chosen([3, 0])
    for name in ("ids", "types", "segments", "kinds", "words"):
        assert part(chosen, name, 0) == part(pairs, name, 3)
        assert part(chosen, name, 1) == part(pairs, name, 0)
    assert chosen.labels.tolist() == [3, 0]
    of_tokens = pairs.__class__(**{**vars(pairs), "labels": np.arange(len(pairs.ids))})
    assert of_tokens.chosen([3, 0]).labels.tolist() == [
        *range(pairs.starts[3], pairs.starts[4]),
        *range(pairs.starts[0], pairs.starts[1]),
    ]


def test_the_tokenizer_is_not_changed(tokenizer):
    tokenizer.enable_truncation(6)
    try:
        assert tokenized(tokenizer, ["the cat sat on the mat"]).lengths.tolist() == [8]
        assert tokenizer.truncation["max_length"] == 6
    finally:
        tokenizer.no_truncation()


def test_masks(texts, tokenizer):
    """A share of each example's usual tokens, at places that do not depend on the other examples."""
    found = masked(texts, 4, share=0.3, seed=5)
    for number in range(len(texts)):
        before, after = part(texts, "ids", number), part(found, "ids", number)
        labels = part(found, "labels", number)
        usual = sum(word >= 0 for word in part(texts, "words", number))
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert len(changed) == int(np.ceil(0.3 * usual))
        assert all(after[i] == 4 and labels[i] == before[i] for i in changed)
        assert all(label == -100 for i, label in enumerate(labels) if i not in changed)
        assert all(part(texts, "words", number)[i] >= 0 for i in changed)
    assert not np.array_equal(masked(texts, 4, share=0.3, seed=6).ids, found.ids)
    assert np.array_equal(masked(texts, 4, share=0.3, seed=5).ids, found.ids)
    assert texts.labels is None
    alike = masked(tokenized(tokenizer, ["the cat sat on the mat"] * 8), 4)
    assert len({tuple(part(alike, "ids", number)) for number in range(8)}) > 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"texts": ["a"], "labels": []}, "labels: expected 1, one per text, got 0"),
        ({"texts": ["a"], "pairs": [None]}, r"pairs\[0\]: expected a str, got NoneType"),
        ({"texts": ["a"], "max_length": 2}, "max_length: expected an integer >= 3, got 2"),
    ],
)
def test_bad_arguments(tokenizer, arguments, expected):
    with pytest.raises(ValueError, match=expected):
        tokenized(tokenizer, **arguments)


def test_bad_masks(tokenizer, texts):
    with pytest.raises(ValueError, match=r"share: expected a number in \(0, 1\], got 0"):
        masked(texts, 4, share=0)
    with pytest.raises(ValueError, match=r"examples\[1\]: has no token to mask"):
        masked(tokenized(tokenizer, ["it", ""]), 4)


def test_what_a_model_cannot_read(tokenizer):
    config = EncoderConfig.from_hf(hf_config("bert", max_position_embeddings=16))
    with pytest.raises(ValueError, match=r"examples\[1\]: 22 tokens; the model reads at most 16"):
        tokenized(tokenizer, ["it", "cat " * 20]).check(config)
    with pytest.raises(ValueError, match="examples: expected one at least, got none"):
        tokenized(tokenizer, []).check(config)
    small = EncoderConfig.from_hf(hf_config("bert", vocab_size=10))
    with pytest.raises(ValueError, match=r"examples\[1\]: token id \d+, but the model knows 10 tokens"):
        tokenized(tokenizer, ["the cat", "the house"]).check(small)


# -- answers and pairs ---------------------------------------------------------------------------------------

QUESTION, CONTEXT = "it rained", "The cat, a big red cat, sat on  the mats."


def words_of(tokenizer, examples, number=0):
    start, (first, last) = examples.starts[number], examples.labels[number]
    return [tokenizer.id_to_token(i) for i in examples.ids[start + first : start + last + 1]]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("cat", "cat"),
        ("a big red cat", "a big red cat"),
        ("mats", "mat ##s"),
        ("mat", "mat"),
        # part of a word, and white space at the ends
        ("ed ca", "red cat"),
        (" on  ", "on"),
        (CONTEXT, "the cat , a big red cat , sat on the mat ##s ."),
    ],
)
def test_tokens_of_an_answer(tokenizer, answer, expected):
    start = CONTEXT.index(answer)
    examples = tokenized(
        tokenizer, [QUESTION] * 2, [CONTEXT] * 2, answers=[None, (start, start + len(answer))]
    )
    assert examples.labels.shape == (2, 2)
    assert examples.labels[0].tolist() == [0, 0]
    assert words_of(tokenizer, examples, 1) == expected.split()


def test_an_answer_that_was_cut_off(tokenizer):
    """Whole answers only, as transformers' scripts do it."""
    context = "the cat sat on a mat"
    spans = [(0, 7), (8, 14), (12, 16), (15, 20)]
    for length, kept in ((9, 2), (10, 3), (12, 4)):
        examples = tokenized(tokenizer, ["the dog"] * 4, [context] * 4, answers=spans, max_length=length)
        assert [label.any() for label in examples.labels] == [i < kept for i in range(4)], length
    assert words_of(tokenizer, examples, 3) == ["a", "mat"]


def test_answers_are_checked(tokenizer):
    for answer, expected in (
        ((4, 4), r"answers\[1\]: 4 to 4 are no words of a text of 41 characters"),
        ((30, 32), r"answers\[1\]: 30 to 32 are no words"),
        ((1, 2, 3), r"answers\[1\]: expected a start and an end, got \(1, 2, 3\)"),
    ):
        with pytest.raises(ValueError, match=expected):
            tokenized(tokenizer, [QUESTION] * 2, [CONTEXT] * 2, answers=[None, answer])
    with pytest.raises(ValueError, match=r"answers\[0\]: no token has any of the characters 3 to 4"):
        tokenized(tokenizer, [QUESTION], ["a b\x00 c"], answers=[(3, 4)])


def test_pairs_that_are_read_alone(tokenizer):
    examples = paired(tokenizer, ["the cat", "it"], ["a dog ran", "it rained"], [0.5, -1], max_length=4)
    shown = [part(examples, "words", i) for i in range(4)]
    assert shown == [[-1, 0, 1, -1], [-1, 0, 1, -1], [-1, 0, -1], [-1, 0, 1, -1]]
    assert part(examples, "segments", 1) == [0] * 4
    assert examples.labels.tolist() == [0.5, 0.5, -1, -1]
    assert paired(tokenizer, ["the cat"], ["it"]).labels is None
