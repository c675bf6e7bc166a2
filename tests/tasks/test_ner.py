"""CoNLL's columns on hand-made files, windows with the real tokenizer, and entity F1 against seqeval."""

from __future__ import annotations

import numpy as np
import pytest
import seqeval.metrics
import seqeval.scheme
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks import ner, ner_windows

# Tabs, spaces, CRLF, a token that is a no-break space, two documents; IOB1
TEXT = (
    "-DOCSTART- -X- -X- O\n\nMia NNP I-NP I-PER\r\nBo NNP I-NP B-PER\r\n\u00a0 X O O\r\n\r\n\r\n"
    "Rome\tNNP\tI-NP\tI-LOC\nRome  NNP  B-NP  I-ORG \n\n-DOCSTART- -X- -X- O\n\n. . O O"
)


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return load_tokenizer(minilm)


def test_sentences_are_read_as_iob2_and_written_with_a_column(tmp_path):
    path, out = tmp_path / "dev.txt", tmp_path / "out.txt"
    path.write_bytes(TEXT.encode())
    found = ner.read(path)
    assert found == [
        (0, ["Mia", "Bo", "\u00a0"], ["B-PER", "B-PER", "O"]),
        (0, ["Rome", "Rome"], ["B-LOC", "B-ORG"]),
        (1, ["."], ["O"]),
    ]
    ner.write(out, path, [["B-PER", "I-PER", "O"], ["O", "B-LOC"], ["O"]])
    lines = out.read_bytes().decode().split("\n")
    assert lines[:5] == [
        *("-DOCSTART- -X- -X- O O", "", "Mia NNP I-NP I-PER B-PER", "Bo NNP I-NP B-PER I-PER"),
        "\u00a0 X O O O",
    ]
    assert lines[7:9] == ["Rome\tNNP\tI-NP\tI-LOC\tO", "Rome  NNP  B-NP  I-ORG B-LOC"]
    assert len(lines) == TEXT.count("\n") + 2
    for wrong in ([["O"] * 5], [["O"] * 7]):
        with pytest.raises(ValueError, match="predictions: expected 6 tags, one per word of"):
            ner.write(out, path, wrong)
    path.write_text("Mia\nran\n\nhome\n")
    assert ner.read(path, labelled=False) == [(0, ["Mia", "ran"], []), (0, ["home"], [])]


def test_iob2_stays_and_iob1_becomes_it():
    assert ner.iob2(["I-A", "I-A", "B-A", "O", "I-B", "I-A"]) == ["B-A", "I-A", "B-A", "O", "B-B", "B-A"]
    assert ner.iob2(["B-A", "I-A", "O", "B-B"]) == ["B-A", "I-A", "O", "B-B"]


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("a O\nb X O\n", "line 2: expected 2 columns, found 3"),
        ("a\n", "line 1: expected 2 columns, found 1"),
        ("a O\n\nb E-PER\n", "line 3: expected a tag O, B-… or I-…, found 'E-PER'"),
        ("-DOCSTART- O\n\n", "expected one sentence at least"),
    ),
)
def test_defects_name_file_and_line(tmp_path, text, message):
    path = tmp_path / "train.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path}.*{message}"):
        ner.read(path)


TAGS = st.sampled_from(("O", "B-A", "I-A", "B-B", "I-B"))


@pytest.mark.parametrize("strict", (False, True))
@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=8), min_size=1, max_size=3))
def test_entity_scores_are_those_of_seqeval(strict, sentences):
    how = {"mode": "strict", "scheme": seqeval.scheme.IOB2} if strict else {}
    sides = [[[tags[side] for tags in sentence] for sentence in sentences] for side in (0, 1)]
    for name, value in ner.score(*sides, strict=strict).items():
        expected = getattr(seqeval.metrics, f"{name}_score")(*sides, zero_division=0, **how)
        assert value == pytest.approx(expected), name


def test_scores_count_whole_entities():
    assert ner.score([["B-A", "I-A", "B-B"]], [["B-A", "O", "B-B"]])["f1"] == 0.5
    assert ner.score([["O"]], [["O"]]) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    with pytest.raises(ValueError, match="predictions: expected 1, one list per sentence, got 0"):
        ner.score([["O"]], [])
    with pytest.raises(ValueError, match=r"predictions\[0\]: expected 1 tags, got 2"):
        ner.score([["O"]], [["O", "O"]])


WORD = st.sampled_from(
    ("rain", "Zürich", "unaffable", "\u200b", "U.S.", "counterrevolutionaries'", "qz" * 45)
)
DOCUMENTS = st.lists(st.lists(st.lists(WORD, min_size=1, max_size=14), max_size=5), max_size=3)


@settings(deadline=None)
@given(documents=DOCUMENTS, max_length=st.integers(9, 40), context=st.integers(0, 3))
def test_each_word_is_scored_once_at_its_first_token(tokenizer, documents, max_length, context):
    sentences = [ner.Sentence(n, words, []) for n, document in enumerate(documents) for words in document]
    words = [word for sentence in sentences for word in sentence.words]
    owners = [sentence.document for sentence in sentences for _ in sentence.words]
    found, unknown, cut = ner_windows.windows(sentences, tokenizer, max_length=max_length, context=context)
    scored = np.concatenate([[], *(window.words[window.words >= 0] for window in found)])
    assert scored.tolist() == list(range(len(words)))
    whole = {n: [] for n in owners}
    pieces = [tokenizer.encode(word, add_special_tokens=False).ids for word in words]
    assert (unknown, cut) == (pieces.count([]), sum(len(ids) > max_length - 2 for ids in pieces))
    pieces = [ids[: max_length - 2] or [100] for ids in pieces]
    for owner, ids in zip(owners, pieces, strict=True):
        whole[owner] += ids
    for window in found:
        ids, numbers = window.ids.tolist(), window.words
        assert len(ids) <= max_length
        assert (ids[0], ids[-1], numbers[0], numbers[-1]) == (101, 102, -1, -1)
        for place in np.flatnonzero(numbers >= 0):
            piece = pieces[numbers[place]]
            assert ids[place : place + len(piece)] == piece
        # Its context is of the same document
        owner = owners[numbers.max()]
        assert f" {ids[1:-1]}"[2:-1] in str(whole[owner])
        assert len(ids) - 2 == len(whole[owner]) or len(ids) >= max_length - 2 * max(map(len, pieces)) - 1
        # A document that fits is one window
        assert len(whole[owner]) > max_length - 2 or (numbers >= 0).sum() == owners.count(owner)


def test_a_window_has_context_on_both_sides_and_ends_with_a_sentence(tokenizer):
    sentences = [ner.Sentence(0, ["rain"] * 5, []) for _ in range(6)]
    found = ner_windows.windows(sentences, tokenizer, max_length=22, context=4).windows
    places = [np.flatnonzero(window.words >= 0).tolist() for window in found]
    assert places == [list(range(1, 11)), list(range(6, 16)), list(range(11, 21))]
    assert [len(window.ids) for window in found] == [22] * 3
    # A sentence of more words than a window scores is cut between words
    long = ner.Sentence(0, ["rain"] * 30, [])
    found = ner_windows.windows([long], tokenizer, max_length=22, context=4).windows
    assert [int((window.words >= 0).sum()) for window in found] == [12, 12, 6]


def test_tags_go_back_to_their_sentences():
    sentences = [ner.Sentence(0, ["a", "b"], []), ner.Sentence(0, ["c"], [])]
    assert ner_windows.tags_of(["O", "B-A", "O"], sentences) == [["O", "B-A"], ["O"]]
    with pytest.raises(ValueError, match="labels: expected 3, one per word, got 2"):
        ner_windows.tags_of(["O", "O"], sentences)


def test_wrong_arguments_are_named(tokenizer, minilm):
    sentences = [ner.Sentence(0, ["a"], [])]
    with pytest.raises(ValueError, match="context: expected 0 to 3 for max_length 10, got 4"):
        ner_windows.windows(sentences, tokenizer, max_length=10, context=4)
    with pytest.raises(ValueError, match="tokenizer: expected one without truncation"):
        ner_windows.windows(sentences, Tokenizer.from_file(str(minilm / "tokenizer.json")))
