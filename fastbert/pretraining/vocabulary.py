"""Train a WordPiece vocabulary.

Merges are byte-pair encoding's, as in the `tokenizers` library's WordPieceTrainer: the most frequent pair of
adjacent pieces becomes one piece, until the vocabulary is full. That library takes equally frequent pairs
in the order of a hash table, which differs from run to run (tokenizers#1794). Here ties are broken by the
text of the pieces, so the same text always makes the same vocabulary, bit for bit.

Source: Schuster & Nakajima 2012, "Japanese and Korean voice search"; Sennrich et al. 2016, "Neural machine
translation of rare words with subword units".
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from fastbert.checkpoint.files import check_kept, new_directory, replace
from fastbert.pretraining.documents import documents
from fastbert.runtime import expected

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FILES = ("vocab.txt", "tokenizer_config.json", "tokenizer.json")
VOCAB_SIZE = 30_528  # BERT's 30,522 and 6 more, a multiple of 64
_LONGEST_WORD = 100  # characters; WordPiece reads a longer word as [UNK]


def train(
    files: Sequence[str | Path],
    directory: str | Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    lowercase: bool = True,
    min_frequency: int = 2,
    alphabet: int = 1000,
    format: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Tokenizer:
    """Train a tokenizer on files of text and save it: vocab.txt, tokenizer.json, tokenizer_config.json.

    Args:
        files, format: see `documents`.
        directory: where to save it; must not exist, or be empty.
        vocab_size: most pieces, special tokens included. A smaller vocabulary is filled with [unused0], … to
            a multiple of 64, within `vocab_size`.
        lowercase: whether case and accents are dropped, as in BERT's uncased models.
        min_frequency: a pair that occurs less often is not merged.
        alphabet: most characters of the vocabulary, the most frequent ones; words with any other character
            are [UNK].
        overwrite: whether to replace an existing tokenizer. A directory with other files is never replaced.
        progress: called with (bytes of input, words) since its last call.

    Returns:
        The tokenizer.

    Raises:
        ValueError: naming the argument or the file, or most words would be [UNK]; nothing has changed.
    """
    expected.integers(len(SPECIAL) + 1, vocab_size=vocab_size)
    expected.integers(1, min_frequency=min_frequency, alphabet=alphabet)
    check_kept(Path(directory), files)
    with new_directory(Path(directory), FILES, overwrite) as folder:
        words = _counted(_pipeline(lowercase), files, format, progress)
        tokenizer, vocabulary = _made(words, files, vocab_size, lowercase, min_frequency, alphabet)
        _save(tokenizer, folder, vocabulary, lowercase)
    return tokenizer


def _counted(
    tokenizer: Tokenizer,
    files: Sequence[str | Path],
    format: str | None,
    progress: Callable[[int, int], None] | None,
) -> Counter[str]:
    """How often each word occurs."""
    seen = 0

    def count(size: int) -> None:
        nonlocal seen
        seen += size

    words: Counter[str] = Counter()
    for chunk in _batched(documents(files, format, count), 1000):
        found = _words(tokenizer, (sentence for document in chunk for sentence in document))
        words.update(found)
        if progress is not None:
            progress(seen, len(found))
            seen = 0
    return words


def _made(
    words: Counter[str],
    files: Sequence[str | Path],
    vocab_size: int,
    lowercase: bool,
    min_frequency: int,
    alphabet: int,
) -> tuple[Tokenizer, list[str]]:
    """The tokenizer for counted words, and its pieces."""
    pieces = wordpieces(words, vocab_size - len(SPECIAL), min_frequency, alphabet)
    if not pieces:
        few = f" of the {alphabet} characters that alphabet allows" if words else ""
        raise ValueError(f"{', '.join(map(str, files))}: no words{few}")
    _check_written(words, pieces, vocab_size, alphabet)
    vocabulary = [*SPECIAL, *pieces]
    filled = min(vocab_size, -(-len(vocabulary) // 64) * 64)
    vocabulary += [f"[unused{i}]" for i in range(filled - len(vocabulary))]

    tokenizer = _pipeline(lowercase)
    tokenizer.model = models.WordPiece(
        {piece: i for i, piece in enumerate(vocabulary)},
        unk_token="[UNK]",
        max_input_chars_per_word=_LONGEST_WORD,
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return tokenizer, vocabulary


def _check_written(words: Counter[str], pieces: list[str], vocab_size: int, alphabet: int) -> None:
    """Raise ValueError if most words of the text cannot be written: they would be [UNK]."""
    known = set(pieces)
    characters = {w: {c if i == 0 else f"##{c}" for i, c in enumerate(w)} for w in words}
    unknown = sum(count for word, count in words.items() if not known.issuperset(characters[word]))
    if 2 * unknown > words.total():
        needed = len(SPECIAL) + len(set().union(*characters.values()))
        raise ValueError(
            f"vocab_size: of the text's words {unknown / words.total():.0%} would be [UNK] with {vocab_size} "
            f"pieces and an alphabet of {alphabet}; its characters alone need {needed}"
        )


def _pipeline(lowercase: bool) -> Tokenizer:
    """BERT's normalisation and split into words, without a vocabulary."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _words(tokenizer: Tokenizer, sentences: Iterable[str]) -> list[str]:
    normal, split = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    # Many sentences per call, to save time: a line break between them only separates words
    texts = ["\n".join(batch) for batch in _batched(sentences, 64)]
    return [word for text in texts for word, _ in split(normal(text)) if len(word) <= _LONGEST_WORD]


def _batched(source: Iterable[Any], size: int) -> Iterable[list[Any]]:
    source = iter(source)
    while batch := list(itertools.islice(source, size)):
        yield batch


def wordpieces(words: dict[str, int], size: int, min_frequency: int = 2, alphabet: int = 1000) -> list[str]:
    """At most `size` pieces for words and their counts: characters, then merges in their order.

    A piece that does not begin a word begins with "##". Depends on the counts alone, not on their order.
    """
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    common = sorted(characters, key=lambda c: (-characters[c], c))[:alphabet]
    kept = set(common)
    items = [(w, n) for w, n in sorted(words.items()) if kept.issuperset(w)]
    pieces = sorted({w[0] for w, _ in items} | {f"##{c}" for w, _ in items for c in w[1:]})
    pieces = sorted(pieces, key=lambda p: (-characters[p[-1]], p))[:size]
    numbers = {piece: i for i, piece in enumerate(pieces)}
    parts = [[numbers.get(c if i == 0 else f"##{c}", -1) for i, c in enumerate(w)] for w, _ in items]
    counts = [n for _, n in items]

    pairs: Counter[tuple[int, int]] = Counter()
    places: dict[tuple[int, int], set[int]] = {}
    for place, word in enumerate(parts):
        for pair in itertools.pairwise(word):
            if min(pair) >= 0:
                pairs[pair] += counts[place]
                places.setdefault(pair, set()).add(place)

    def entry(pair: tuple[int, int]) -> tuple[Any, ...]:
        return -pairs[pair], pieces[pair[0]], pieces[pair[1]], pair

    queue = [entry(pair) for pair in pairs]
    heapq.heapify(queue)
    while queue and len(pieces) < size:
        negative, left, right, pair = heapq.heappop(queue)
        if -negative != pairs.get(pair):
            continue  # an old entry: the pair's count has changed
        if -negative < min_frequency:
            break
        merged = left + right.removeprefix("##")
        number = numbers.setdefault(merged, len(pieces))
        if number == len(pieces):  # else another merge has made the piece before
            pieces.append(merged)
        changed = set()
        for place in sorted(places.pop(pair)):
            before = parts[place]
            after = _merged(before, pair, number)
            parts[place], count = after, counts[place]
            for old in itertools.pairwise(before):
                if min(old) >= 0 and old != pair:
                    pairs[old] -= count
                    changed.add(old)
            for new in itertools.pairwise(after):
                if min(new) >= 0:
                    pairs[new] += count
                    places.setdefault(new, set()).add(place)
                    changed.add(new)
        pairs.pop(pair, None)
        changed.discard(pair)
        for each in changed:
            if pairs[each] > 0:
                heapq.heappush(queue, entry(each))
            else:
                del pairs[each]
                places.pop(each, None)
    return pieces


def _merged(word: list[int], pair: tuple[int, int], number: int) -> list[int]:
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and word[i] == pair[0] and word[i + 1] == pair[1]:
            out.append(number)
            i += 2
        else:
            out.append(word[i])
            i += 1
    return out


def _save(tokenizer: Tokenizer, directory: Path, vocabulary: list[str], lowercase: bool) -> None:
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lowercase,
        "strip_accents": None,
        "tokenize_chinese_chars": True,
        "model_max_length": 512,
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL},
    }
    replace(directory / "vocab.txt", "".join(f"{piece}\n" for piece in vocabulary).encode())
    replace(directory / "tokenizer_config.json", json.dumps(settings, indent=2).encode() + b"\n")
    replace(directory / "tokenizer.json", tokenizer.to_str(pretty=True).encode() + b"\n")
