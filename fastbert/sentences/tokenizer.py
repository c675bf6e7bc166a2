"""Text to token ids: the tokenizer of a directory, and batches of token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from fastbert.checkpoint.files import read_json
from fastbert.models.config_values import MAX_SIZE


class EncodingError(ValueError):
    """A sentence that cannot be encoded.

    Attributes:
        index: the sentence's index, from 0.
        problem: what is wrong with it.
    """

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(f"sentences[{index}]: {problem}")
        self.index = index
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        # By default unpickling passes the message alone, which fails in the parent of a worker
        return type(self), (self.index, self.problem)


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of many texts, or pairs of texts, one after the other.

    Attributes:
        ids: (total,) int64, special tokens included.
        starts: (sentences + 1,) int64; sentence i is ids[starts[i]:starts[i + 1]].
        full_lengths: (sentences,) int64, tokens before truncation.
        types: (total,) int64, which text of a pair a token belongs to; None if there are no pairs.
    """

    ids: np.ndarray
    starts: np.ndarray
    full_lengths: np.ndarray
    types: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """(sentences,) int64, tokens kept."""
        return np.diff(self.starts)

    @property
    def truncated(self) -> np.ndarray:
        """Indices of the sentences that lost tokens."""
        return np.flatnonzero(self.full_lengths > self.lengths)

    def select(self, rows: np.ndarray) -> TokenBatch:
        """The sentences of these indices."""
        of_rows = [slice(self.starts[i], self.starts[i + 1]) for i in rows]
        ids = np.concatenate([self.ids[piece] for piece in of_rows])
        types = None if self.types is None else np.concatenate([self.types[piece] for piece in of_rows])
        starts = np.concatenate([[0], np.cumsum(self.lengths[rows])])
        return TokenBatch(ids, starts, self.full_lengths[rows], types)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a HuggingFace directory: from tokenizer.json, or WordPiece from vocab.txt.

    Padding and truncation stored in tokenizer.json are switched off. vocab.txt is read as BERT's, with
    do_lower_case, strip_accents, tokenize_chinese_chars and the special tokens of tokenizer_config.json.

    Raises:
        FileNotFoundError: neither file exists.
        ValueError: the content of a file does not match its name.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises a bare Exception
            raise ValueError(f"{path}: not a tokenizer of the tokenizers library ({error})") from None
        _check_ids(path, tokenizer)
        _check_runs(path, tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer
    if (directory / "vocab.txt").is_file():
        return _wordpiece(directory)
    others = ("vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model")
    found = [name for name in others if (directory / name).is_file()]
    hint = f" ({', '.join(found)} is there: save it once with transformers' fast tokenizer)" if found else ""
    raise FileNotFoundError(f"{directory}: no tokenizer.json and no vocab.txt{hint}")


def _check_ids(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse ids larger than any vocabulary: a copy of the tokenizer takes memory for all ids below."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    if highest >= MAX_SIZE:
        raise ValueError(f"{path}: token {token!r} has id {highest}; expected ids below {MAX_SIZE}")


def _check_runs(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that panics: its PanicException is no Exception, so later handlers would miss it."""
    try:
        tokenizer.encode_batch_fast(["a", ("a", "b")])
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(f"{path}: not a whole tokenizer: encoding fails ({error})") from None
        if not isinstance(error, Exception):
            raise


def _wordpiece(directory: Path) -> Tokenizer:
    path = directory / "vocab.txt"
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    try:
        words = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from None
    if words and not words[-1]:
        words.pop()
    vocab = {word.rstrip("\r"): i for i, word in enumerate(words)}

    special = {}
    for name in ("unk", "sep", "pad", "cls", "mask"):
        token = config.get(f"{name}_token") or f"[{name.upper()}]"
        special[name] = token.get("content") if isinstance(token, dict) else token
        if not isinstance(special[name], str):
            raise ValueError(f"{config_path}: {name}_token: expected a text, got {special[name]!r}")
        if special[name] not in vocab and name in ("unk", "sep", "cls"):
            raise ValueError(
                f"{path}: has no {name}_token {special[name]!r}; expected a BERT WordPiece vocabulary"
            )
    defaults = {"tokenize_chinese_chars": True, "strip_accents": None, "do_lower_case": True}
    chinese, accents, lower = (config.get(name, default) for name, default in defaults.items())
    for name, value in zip(defaults, (chinese, accents, lower), strict=True):
        if not isinstance(value, bool) and not (value is None and name == "strip_accents"):
            raise ValueError(f"{config_path}: {name}: expected true or false, got {value!r}")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=special["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=accents, lowercase=lower
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = special["cls"], special["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in special.values() if t in vocab]
    )
    return tokenizer


def tokenize(
    tokenizer: Tokenizer, texts: list[str] | list[str | tuple[str, str]], vocab_size: int
) -> TokenBatch:
    """The token ids of texts and pairs of texts, truncated by the tokenizer's settings.

    Raises:
        EncodingError: text that is not valid Unicode, or a token with an id of `vocab_size` or more.
    """
    try:
        encoded = tokenizer.encode_batch_fast(texts)
    except Exception as error:
        for index, text in enumerate(texts):
            if re.search("[\ud800-\udfff]", "".join(text)):
                raise EncodingError(index, "half of a surrogate pair is no valid Unicode") from None
        raise ValueError(f"the tokenizer failed: {error}") from error
    lengths = np.fromiter((len(e) for e in encoded), np.int64, len(encoded))
    full_lengths = lengths.copy()
    for index, one in enumerate(encoded):
        # Each overflow repeats the special tokens
        for rest in one.overflowing:
            full_lengths[index] += len(rest) - sum(rest.special_tokens_mask)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.fromiter((i for e in encoded for i in e.ids), np.int64, int(starts[-1]))
    if ids.size and ids.max() >= vocab_size:
        place = int(np.argmax(ids >= vocab_size))
        index = int(np.searchsorted(starts, place, side="right")) - 1
        token = tokenizer.id_to_token(int(ids[place]))
        problem = f"token {token!r} has id {ids[place]}, but the model knows {vocab_size} tokens"
        raise EncodingError(index, problem)
    types = None
    if any(isinstance(text, tuple) for text in texts):
        types = np.fromiter((i for e in encoded for i in e.type_ids), np.int64, int(starts[-1]))
    return TokenBatch(ids, starts, full_lengths, types)


def pack_batches(
    lengths: np.ndarray, batch_tokens: int, batch_size: int | None = None
) -> Iterator[np.ndarray]:
    """Split sentences into batches, the longest sentences first.

    Args:
        lengths: (sentences,) int64, tokens per sentence.
        batch_tokens: most tokens of a batch; a longer sentence is a batch of its own.
        batch_size: most sentences of a batch; None = no limit.

    Yields:
        Indices into `lengths`.
    """
    order = np.argsort(-lengths, kind="stable")  # longest first: a batch too large for memory fails at once
    first, tokens = 0, 0
    for place, index in enumerate(order):
        length = int(lengths[index])
        if place > first and (tokens + length > batch_tokens or place - first == batch_size):
            yield order[first:place]
            first, tokens = place, 0
        tokens += length
    if first < len(order):
        yield order[first:]
