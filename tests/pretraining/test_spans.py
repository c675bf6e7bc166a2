"""Phrases and entities of a corpus, beside a search word by word and counts in exact fractions."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fastbert.cli.main import main
from fastbert.pretraining import corpus as corpus_module
from fastbert.pretraining import spans as module
from fastbert.pretraining.corpus import Corpus, CorpusError
from fastbert.pretraining.spans import Collocations, Gazetteer


def sentences(corpus: Corpus) -> list[list[tuple[int, tuple[int, ...]]]]:
    """(first token, ids) of each word of each sentence."""
    found = []
    for begin, end in zip(corpus.sentence_starts[:-1], corpus.sentence_starts[1:], strict=True):
        begin, end = int(begin), int(end)
        ids = corpus.tokens(begin, end).tolist()
        bounds = [*np.flatnonzero(corpus.word_starts(begin, end)).tolist(), end - begin]
        found.append([(begin + a, tuple(ids[a:b])) for a, b in itertools.pairwise(bounds)])
    return found


def longest_from_the_left(corpus: Corpus, kinds: dict[tuple, int]) -> list[list[int]]:
    """Spans of the texts in `kinds`, a text being the ids of each of its words."""
    most, found = max(map(len, kinds)), []
    for sentence in sentences(corpus):
        words, at = [ids for _, ids in sentence], 0
        while at < len(words):
            for count in range(min(most, len(words) - at), 0, -1):
                text = tuple(words[at : at + count])
                if text in kinds:
                    last, ids = sentence[at + count - 1]
                    found.append([sentence[at][0], last + len(ids), kinds[text]])
                    at += count
                    break
            else:
                at += 1
    return found


def texts_of(corpus: Corpus) -> list[str]:
    """One to five words of the corpus in a row, many of which overlap, as texts."""
    rng, found = np.random.default_rng(0), []
    lists = [s for s in sentences(corpus) if len(s) > 6]
    for i in range(150):
        sentence = lists[rng.integers(len(lists))]
        at, count = int(rng.integers(len(sentence) - 5)), 1 + i % 5
        for size in {count, max(1, count - 1)}:  # its beginning is an entry as well
            ids = [i for _, ids in sentence[at : at + size] for i in ids]
            text = corpus.tokenizer.decode(ids).replace(" ##", "")
            if tuple(corpus.tokenizer.encode(text, add_special_tokens=False).ids) == tuple(ids):
                found.append(text)
    assert len(found) > 150
    return found


def words_of(tokenizer: Tokenizer, text: str) -> tuple:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    words: dict[int, list[int]] = {}
    for i, word in zip(encoding.ids, encoding.word_ids, strict=True):
        words.setdefault(word, []).append(i)
    return tuple(tuple(ids) for ids in words.values())


def write_entries(path: Path, entries: list) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture(scope="module")
def plain(text_file, tokenizer_dir, tmp_path_factory) -> Corpus:
    return Corpus.write([text_file], tokenizer_dir, tmp_path_factory.mktemp("plain") / "shards")


@pytest.fixture(scope="module")
def gazetteer(plain, tmp_path_factory) -> Path:
    entries = [
        {"text": text} if i % 3 else {"text": text, "kind": "phrase"}
        for i, text in enumerate(texts_of(plain))
    ]
    return write_entries(tmp_path_factory.mktemp("names") / "names.jsonl", entries)


@pytest.fixture(scope="module")
def marked(text_file, tokenizer_dir, gazetteer, tmp_path_factory) -> Corpus:
    """The topics with the gazetteer's spans."""
    return Corpus.write(
        [text_file], tokenizer_dir, tmp_path_factory.mktemp("marked") / "shards", spans=gazetteer
    )


def all_spans(corpus: Corpus) -> list[list[int]]:
    return corpus.spans(0, corpus.num_tokens).tolist()


def expected_of(corpus: Corpus, gazetteer: Path) -> list[list[int]]:
    kinds: dict[tuple, int] = {}
    for line in gazetteer.read_text().splitlines():
        entry = json.loads(line)
        words = words_of(corpus.tokenizer, entry["text"])
        kinds[words] = max(kinds.get(words, 0), ("phrase", "entity").index(entry.get("kind", "entity")))
    return longest_from_the_left(corpus, kinds)


# --- a gazetteer --------------------------------------------------------------------------------------------


def test_a_gazetteers_spans_are_the_longest_from_the_left(marked, gazetteer):
    expected = expected_of(marked, gazetteer)
    assert all_spans(marked) == expected
    assert marked.num_spans == len(expected) > 1000
    assert marked.span_kinds == ("phrase", "entity")
    assert {kind for *_, kind in expected} == {0, 1}
    lengths = {end - begin for begin, end, _ in expected}
    assert len(lengths) > 5


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [(corpus_module, "_PART_TOKENS", 40), (module, "_BASE", 1), (module, "_BATCH", 7)],
)
def test_neither_parts_nor_equal_hashes_change_a_span(
    marked, gazetteer, text_file, tokenizer_dir, tmp_path, monkeypatch, place, name, value
):
    """With the base 1 a hash is a sum of ids, which different words have in common."""
    monkeypatch.setattr(place, name, value)
    again = Corpus.write([text_file], tokenizer_dir, tmp_path / "c", spans=gazetteer)
    assert all_spans(again) == all_spans(marked)
    assert again.hash == marked.hash


def test_only_whole_words_of_one_sentence(tokenizer_dir, tmp_path):
    """600 pieces: most words are several tokens, and one word's tokens begin another word."""
    text = tmp_path / "a.txt"
    text.write_text("the theme of the\nname names the name\nthe\nname\n\nin the name of the")
    entries = write_entries(
        tmp_path / "g.jsonl", [{"text": "The"}, {"text": "the NAME"}, {"text": "name of"}]
    )
    made = Corpus.write([text], tokenizer_dir, tmp_path / "c", spans=str(entries))
    found = [made.tokenizer.decode(made.tokens(b, e).tolist()) for b, e, _ in all_spans(made)]
    found = [text.replace(" ##", "") for text in found]
    assert found == ["the", "the", "the name", "the", "the name", "the"]


def test_entries_that_no_text_can_have_are_left_out_and_counted(tokenizer_dir, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("a \u2603 b \u2604")  # both unknown to the tokenizer
    entries = [{"text": "\u200b"}, {"text": "\u2603"}, {"text": "a \u2603"}, {"text": ""}, {"text": "name"}]
    source = Gazetteer(write_entries(tmp_path / "g.jsonl", entries))
    made = Corpus.write([text], tokenizer_dir, tmp_path / "c", spans=source)
    assert (source.num_entries, source.num_left_out) == (1, 4)
    assert "1 entries; 4 left out" in source.report()
    assert made.num_spans == 0
    for corpus in (made, Corpus.open(tmp_path / "c")):  # a corpus in which none was found is a corpus
        assert corpus.spans(0, corpus.num_tokens).shape == (0, 3)
        assert corpus.span_kinds


def test_a_byte_level_tokenizers_words_with_and_without_a_space(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", *letters]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = tmp_path / "a.txt"
    text.write_text("Rome is old\nold Rome, Romes")
    entries = write_entries(tmp_path / "g.jsonl", [{"text": "Rome"}])
    made = Corpus.write([text], tokenizer, tmp_path / "c", spans=entries)
    assert all_spans(made) == [[0, 4, 1], [14, 19, 1]]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", r"names\.jsonl: line 2: is not valid JSON"),
        ('{"text": "Rome", "kind": "city"}', r"line 2: kind: expected one of phrase, entity, got 'city'"),
        ('{"text": "Rome", "type": "phrase"}', r'line 2: expected "text" and "kind", got \'type\''),
        (b'{"text": "\xff"}', r"names\.jsonl: line 2: not UTF-8"),
    ],
)
def test_a_bad_line_is_named_before_any_text_is_read(tokenizer_dir, tmp_path, line, match):
    path = tmp_path / "names.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=match):
        Corpus.write([tmp_path / "no such.txt"], tokenizer_dir, tmp_path / "c", spans=path)


def test_bad_sources_are_named(text_file, tokenizer_dir, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for spans, kind, match in (
        (tmp_path / "gone.jsonl", FileNotFoundError, r"spans: .*gone\.jsonl: no such file"),
        ([7], TypeError, "spans: expected 'pmi', a path or a source of spans, got 7"),
        (empty, ValueError, r"empty\.jsonl: no entries"),
    ):
        with pytest.raises(kind, match=match):
            Corpus.write([text_file], tokenizer_dir, tmp_path / "c", spans=spans)
    with pytest.raises(ValueError, match=r"min_pmi: expected a number in \[0, 64\], got -1"):
        Collocations(min_pmi=-1)
    with pytest.raises(ValueError, match="min_count: expected an integer >= 1, got 0"):
        Collocations(min_count=0)
    assert list(tmp_path.iterdir()) == [empty]


# --- collocations -------------------------------------------------------------------------------------------


def phrases_of(corpus: Corpus, least: Fraction, min_count: int) -> dict[tuple, int]:
    """Two and three words whose score is `least`, in exact fractions."""
    special = set(corpus.special_ids.values())

    def is_word(ids: tuple[int, ...]) -> bool:
        text = "".join(corpus.tokenizer.id_to_token(i) for i in ids)
        return special.isdisjoint(ids) and any(map(str.isalnum, text))

    counts: Counter[tuple] = Counter()
    for sentence in sentences(corpus):
        words = [ids if is_word(ids) else None for _, ids in sentence]
        for size in (1, 2, 3):
            for at in range(len(words) - size + 1):
                if None not in words[at : at + size]:
                    counts[tuple(words[at : at + size])] += 1
    total = sum(count for text, count in counts.items() if len(text) == 1)

    def p(*words: tuple[int, ...]) -> Fraction:
        return Fraction(counts[words], total)

    good = {}
    for text, count in counts.items():
        cuts = {1: [], 2: [[text[:1], text[1:]]]}.get(
            len(text), [[text[:1], text[1:]], [text[:2], text[2:]], [text[:1], text[1:2], text[2:]]]
        )
        scores = [p(*text) / np.prod([p(*part) for part in cut]) for cut in cuts]
        if scores and count >= min_count and min(scores) >= least:
            good[text] = 0
    return good


@pytest.mark.sweep
@pytest.mark.parametrize(("min_pmi", "min_count"), [(5, 4), (3, 5), (8, 2)])
def test_collocations_beside_exact_fractions(plain, min_pmi, min_count, monkeypatch):
    expected = phrases_of(plain, Fraction(2**min_pmi), min_count)
    sizes = Counter(map(len, expected))
    assert min(sizes[2], sizes[3]) > 3
    for tokens in (1 << 20, 300):
        monkeypatch.setattr(corpus_module, "_PART_TOKENS", tokens)
        source = Collocations(min_pmi, min_count)
        source.prepare(plain.tokenizer, sorted(plain.special_ids.values()))
        found = np.concatenate(list(module.find(plain.parts, [source])))
        assert found.tolist() == longest_from_the_left(plain, expected)
        assert source.num_phrases == (sizes[2], sizes[3])
        assert f"{sizes[2]} phrases of two words and {sizes[3]} of three" in source.report()


def made_of_words(lines: list[str], folder: Path, **settings) -> tuple[Corpus, list[str]]:
    """A corpus of one token per word, and its phrases."""
    words = sorted({word for line in lines for word in line.split()} - {"zzz"})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = folder / "words.txt"
    path.write_text("\n".join(lines))
    made = Corpus.write([path], tokenizer, folder / "c", spans=Collocations(**settings), overwrite=True)
    found = [" ".join(vocabulary[i] for i in made.tokens(b, e)) for b, e, _ in all_spans(made)]
    return made, sorted(set(found))


def test_a_third_word_needs_to_belong_to_the_other_two(tmp_path):
    """ "new york" is a phrase, and "the new york" none, though its three words seldom meet by chance."""
    rng = np.random.default_rng(1)
    filler = [f"w{i}" for i in range(200)]
    lines = []
    for i in range(400):
        words = rng.choice(filler, 8).tolist()
        words[2:2] = ["new", "york"] if i % 4 == 0 else ["carte", "a", "jouer"] if i % 4 == 1 else []
        words[2:2] = ["the"]
        lines.append(" ".join(words))
    _, found = made_of_words(lines, tmp_path, min_pmi=3.5, min_count=20)
    assert found == ["carte a jouer", "new york"]


def test_a_third_word_that_pairs_avoid(tmp_path):
    """400 words, x, y and z 100 times each, and together 10: of the parts (x y, z) the score is
    10 · 400 / (10 · 100) = 4, but of three words 10 · 400² / 100³ = 1.6.
    """
    lines = ["x y z"] * 10 + ["x", "y", "z"] * 90 + ["w"] * 100
    assert made_of_words(lines, tmp_path, min_pmi=0.5, min_count=10)[1] == ["x y z"]
    assert made_of_words(lines, tmp_path, min_pmi=0.7, min_count=10)[1] == []


def test_punctuation_and_unknown_words_are_in_no_phrase(tmp_path):
    lines = ["( ) zzz zzz north pole", "zzz zzz ( ) north pole", "w1 w2", "w2 w3", "w3 w1"] * 20
    _, found = made_of_words(lines, tmp_path, min_pmi=0, min_count=10)
    assert found == ["north pole", "w1 w2", "w2 w3", "w3 w1"]


def test_counts_and_scores_at_the_threshold(tmp_path):
    """16 words, "a b" four times, a and b four times each: the score is 4 · 16 / (4 · 4) = 2 ** 2."""
    lines = ["a b"] * 4 + ["c d e f g h i j"]
    assert made_of_words(lines, tmp_path, min_pmi=2, min_count=4)[1] == ["a b"]
    assert made_of_words(lines, tmp_path, min_pmi=2.001, min_count=4)[1] == []
    assert made_of_words(lines, tmp_path, min_pmi=2, min_count=5)[1] == []
    made, found = made_of_words(["a"], tmp_path, min_pmi=0, min_count=2)  # no word is frequent
    assert (made.num_spans, found) == (0, [])


def test_an_earlier_source_has_priority(plain, gazetteer):
    sources = [Gazetteer(gazetteer), Collocations(4.0, 4)]
    alone = {}
    special = sorted(plain.special_ids.values())
    for source in sources:
        source.prepare(plain.tokenizer, special)
        alone[source] = np.concatenate(list(module.find(plain.parts, [source])))
    for order in (sources, sources[::-1]):
        found = np.concatenate(list(module.find(plain.parts, order)))
        assert (found[1:, 0] >= found[:-1, 1]).all()
        first, second = ({tuple(row) for row in alone[source].tolist()} for source in order)
        rows = {tuple(row) for row in found.tolist()}
        assert first <= rows
        covered = np.zeros(plain.num_tokens, bool)
        for begin, end, _ in first:
            covered[begin:end] = True
        assert rows - first >= {row for row in second if not covered[row[0] - 3 : row[1] + 3].any()}
        assert rows - first
        assert not any(covered[begin:end].any() for begin, end, _ in rows - first)


# --- on disk ------------------------------------------------------------------------------------------------


def test_spans_within_a_range(marked):
    rng, rows = np.random.default_rng(0), all_spans(marked)
    for _ in range(200):
        begin = int(rng.integers(marked.num_tokens))
        end = min(begin + int(rng.integers(40)), marked.num_tokens)
        found = marked.spans(begin, end)
        assert found.dtype == np.int64
        assert found.tolist() == [row for row in rows if row[0] >= begin and row[1] <= end]
    for begin, end, _ in rows[:50]:  # exactly one, and one token too few on either side
        assert len(marked.spans(begin, end)) == 1
        assert len(marked.spans(begin + 1, end)) == len(marked.spans(begin, end - 1)) == 0
    for bad in ((-1, 3), (4, 3), (0, marked.num_tokens + 1)):
        with pytest.raises(IndexError, match="expected a range within"):
            marked.spans(*bad)


def test_a_corpus_without_spans_is_as_before(plain, marked):
    index = json.loads((plain.directory / "index.json").read_text())
    assert not {"spans", "span_kinds"} & index.keys()
    assert plain.span_kinds == ()
    assert plain.hash != marked.hash
    words = "has no phrases or entities; `fastbert prepare --spans` finds them"
    with pytest.raises(CorpusError, match=words):
        plain.spans(0, 3)
    for name in ("tokens-00000.bin", "words-00000.bin", "sentences.bin", "documents.bin", "tokenizer.json"):
        assert (plain.directory / name).read_bytes() == (marked.directory / name).read_bytes()


def test_the_hash_has_the_spans(tokenizer_dir, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("in the name of the name")
    hashes = {Corpus.write([text], tokenizer_dir, tmp_path / "none").hash}
    for i, entry in enumerate(
        ({"text": "the"}, {"text": "the", "kind": "phrase"}, {"text": "the name"}, {"text": "\u2603"})
    ):
        path = write_entries(tmp_path / "g.jsonl", [entry])
        hashes.add(Corpus.write([text], tokenizer_dir, tmp_path / str(i), spans=path).hash)
    assert len(hashes) == 5


def test_the_command(marked, gazetteer, text_file, tokenizer_dir, tmp_path, capsys):
    prepare = ["prepare", str(text_file), "--tokenizer", str(tokenizer_dir), "--output", str(tmp_path / "c")]
    assert main([*prepare, "--spans", str(gazetteer)]) == 0
    seen = capsys.readouterr().err
    assert f"hash {marked.hash}" in seen
    assert f"{marked.num_spans:,} phrases and entities" in seen
    both = ["--overwrite", "--spans", str(gazetteer), "--spans", "pmi"]
    assert main([*prepare, *both, "--min-pmi", "4", "--min-count", "4"]) == 0
    made = Corpus.open(tmp_path / "c")
    assert made.num_spans > marked.num_spans
    source = Collocations(4.0, 4)
    Corpus.write([text_file], tokenizer_dir, tmp_path / "d", spans=[gazetteer, source])
    assert Corpus.open(tmp_path / "d").hash == made.hash
    assert source.report() in capsys.readouterr().err
    for options, text in (
        (["--spans", "gone.jsonl"], "spans: gone.jsonl: no such file"),
        (["--spans", str(gazetteer), "--min-pmi", "4"], "--min-pmi: needs --spans pmi"),
        (["--min-count", "4"], "--min-count: needs --spans pmi"),
        (["--spans", "pmi", "--min-count", "0"], "min_count: expected an integer >= 1, got 0"),
    ):
        assert main([*prepare, "--overwrite", *options]) == 2
        seen = capsys.readouterr().err
        assert text in seen
        assert len(seen.splitlines()) == 1
