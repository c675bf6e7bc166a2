"""Training a WordPiece vocabulary: the merges, determinism, what transformers reads."""

from __future__ import annotations

import collections
import itertools
import random
import subprocess
import sys

import pytest
import transformers

from fastbert.pretraining.documents import documents
from fastbert.pretraining.vocabulary import SPECIAL, train, wordpieces
from fastbert.sentences.tokenizer import load_tokenizer


def slow_wordpieces(words: dict[str, int], size: int, min_frequency: int) -> list[str]:
    """The definition, pair by pair: count all pairs anew before each merge."""
    split = {w: [c if i == 0 else f"##{c}" for i, c in enumerate(w)] for w in words}
    frequency = collections.Counter()
    for word, count in words.items():
        for c in word:
            frequency[c] += count
    pieces = sorted({p for parts in split.values() for p in parts}, key=lambda p: (-frequency[p[-1]], p))[
        :size
    ]
    while len(pieces) < size:
        pairs = collections.Counter()
        for word, parts in split.items():
            for pair in itertools.pairwise(parts):
                if set(pair) <= set(pieces):
                    pairs[pair] += words[word]
        if not pairs:
            break
        left, right = min(pairs, key=lambda p: (-pairs[p], p))
        if pairs[left, right] < min_frequency:
            break
        merged = left + right.removeprefix("##")
        if merged not in pieces:
            pieces.append(merged)
        for word, parts in split.items():
            i = 0
            while i + 1 < len(parts):
                if (parts[i], parts[i + 1]) == (left, right):
                    parts[i : i + 2] = [merged]
                i += 1
            split[word] = parts
    return pieces


@pytest.mark.parametrize("seed", range(4))
def test_merges_are_those_of_the_definition(seed):
    rng = random.Random(seed)
    words = {
        "".join(rng.choices("abc" if seed % 2 else "abcdefg", k=rng.randint(1, 9))): rng.randint(1, 6)
        for _ in range(60)
    }
    for size, least in ((12, 1), (60, 2), (500, 1)):
        assert wordpieces(words, size, least) == slow_wordpieces(words, size, least)


def test_the_order_of_the_words_changes_nothing(text_file):
    words = collections.Counter(w for d in documents([text_file]) for s in d for w in s.lower().split())
    shuffled = list(words.items())
    random.Random(0).shuffle(shuffled)
    assert wordpieces(words, 900) == wordpieces(dict(shuffled), 900)


@pytest.mark.sweep
def test_another_process_gives_the_same_bytes(text_file, tokenizer_dir, tmp_path):
    code = (
        "import sys; from fastbert.pretraining.vocabulary import train; "
        f"train([{str(text_file)!r}], {str(tmp_path)!r}, vocab_size=600)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONHASHSEED": "7", "PATH": ""})
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (tokenizer_dir / name).read_bytes()


def test_transformers_reads_it(tokenizer_dir, texts):
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    assert theirs.model_max_length == 512
    ours = load_tokenizer(tokenizer_dir)
    for text in texts[:5]:
        assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert theirs.mask_token_id == SPECIAL.index("[MASK]")
    words = (tokenizer_dir / "vocab.txt").read_text().splitlines()
    assert words == [ours.id_to_token(i) for i in range(600)]
    (tokenizer_dir / "tokenizer.json").rename(tokenizer_dir / "aside")
    try:  # vocab.txt alone is the same tokenizer
        assert load_tokenizer(tokenizer_dir).encode(texts[0]).ids == ours.encode(texts[0]).ids
    finally:
        (tokenizer_dir / "aside").rename(tokenizer_dir / "tokenizer.json")


def test_a_small_text_is_filled_to_a_multiple_of_64(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Ärger über Ärger.\n" * 3)
    cased = train([path], tmp_path / "cased", lowercase=False, vocab_size=5000)
    assert cased.get_vocab_size() == 64
    assert cased.encode("Ärger").tokens == ["[CLS]", "Ärger", "[SEP]"]
    assert train([path], tmp_path / "lower").encode("Ärger").tokens == ["[CLS]", "arger", "[SEP]"]
    assert train([path], tmp_path / "few", vocab_size=20).get_vocab_size() == 20


@pytest.mark.parametrize("options", [{"vocab_size": 10}, {"vocab_size": 600, "alphabet": 3}])
def test_a_vocabulary_without_most_words_is_refused(options, text_file, tmp_path):
    pattern = (
        r"vocab_size: of the text's words \d+% would be \[UNK\] with \d+ pieces and an alphabet of \d+; its "
    )
    with pytest.raises(ValueError, match=pattern + r"characters alone need \d+"):
        train([text_file], tmp_path / "t", **options)
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_named(tmp_path, text_file):
    for name, value in (("vocab_size", 5), ("min_frequency", 0), ("alphabet", 0), ("vocab_size", 1e4)):
        with pytest.raises(ValueError, match=f"{name}: expected an integer >= "):
            train([text_file], tmp_path / "t", **{name: value})
    empty = tmp_path / "e.txt"
    empty.write_text("\n\n")
    with pytest.raises(ValueError, match=r"e\.txt: no words"):
        train([empty], tmp_path / "t")
    empty.write_text("one two three four\n")
    with pytest.raises(ValueError, match=r"e\.txt: no words of the 1 characters that alphabet allows"):
        train([empty], tmp_path / "t", alphabet=1)
    assert not (tmp_path / "t").exists()
