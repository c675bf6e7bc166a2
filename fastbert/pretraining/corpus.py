"""A corpus on disk: the token ids of documents, memory-mapped.

A directory:

    index.json           counts, dtypes, sizes and SHA-256, a file's over its array up to the file's end;
                         written last
    tokenizer.json       the tokenizer that made the ids
    tokens-00000.bin …   ids, uint16 (uint32 for a vocabulary above 65,535), `shard_tokens` of them per file
    words-00000.bin …    one bit per token, the lowest first: whether a word starts there
    sentences.bin        int64, the first token of each sentence, and the number of tokens
    documents.bin        int64, the first sentence of each document, and the number of sentences
    spans.bin            int64, the first token of each span; spans are optional, see `spans.py`
    lengths.bin          uint32, the number of tokens of each span
    kinds.bin            uint8, the kind of each span, a place in index.json's `span_kinds`

All arrays are little-endian. The files of an array, one after the other, hold the same bytes however the
array is cut and however many threads made it. `hash` covers those bytes, the tokenizer, and all fields of
index.json that an example depends on. The rest of index.json, such as sizes and the cut, follows from them
and is checked. Text is stored, not masked examples, so that masks can differ from epoch to epoch.

A corpus is written beside its place, synced and renamed. So there is a whole corpus or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import Tokenizer

from fastbert.checkpoint.files import CheckpointError, cause, check_kept, digest, new_directory, read_json
from fastbert.pretraining.documents import documents
from fastbert.pretraining.spans import KINDS, Part, Source, find, sources_of
from fastbert.sentences.tokenizer import load_tokenizer

INDEX, TOKENIZER = "index.json", "tokenizer.json"
FORMAT, VERSION = "fastbert corpus", 2
SHARD_TOKENS = 1 << 28  # half a gigabyte of uint16
_CHUNK_CHARACTERS = 4 << 20  # characters of text that are tokenized at a time
_PART_TOKENS = 1 << 20  # tokens that are searched for spans at a time
# Names of BERT's and of RoBERTa's special tokens
_SPECIAL = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
_SPANS = {"spans": "<i8", "lengths": "<u4", "kinds": "u1"}  # array -> dtype
_NAMES = (INDEX, TOKENIZER, "tokens-*.bin", "words-*.bin", "sentences.bin", "documents.bin")
_NAMES += tuple(f"{name}.bin" for name in _SPANS)
_LAST = {"sentences": "tokens", "documents": "sentences"}  # array of starts -> what its last element counts
_COUNTS = ("tokens", "sentences", "documents", "vocab_size", "shard_tokens", "longest_sentence")


class CorpusError(ValueError):
    """A corpus cannot be read or written; the message names the file and the cause."""


@dataclass(frozen=True)
class Corpus:
    """An open corpus; see the module.

    Attributes:
        directory: where it is.
        hash: SHA-256 of all that an example depends on, hexadecimal.
        num_tokens, num_sentences, num_documents: counts.
        longest_sentence: tokens of the longest sentence.
        vocab_size: the tokenizer's vocabulary size; ids are below it.
        special_ids: "pad", "unk", "cls", "sep" and "mask" -> id.
        shard_tokens: tokens per file; the last file may have fewer.
        token_dtype: dtype of the ids.
        span_kinds: names of the kinds of spans; empty if the corpus was made without spans.
        num_spans: count.
    """

    directory: Path
    hash: str
    num_tokens: int
    num_sentences: int
    num_documents: int
    longest_sentence: int
    vocab_size: int
    special_ids: dict[str, int]
    shard_tokens: int
    token_dtype: np.dtype
    span_kinds: tuple[str, ...] = ()
    num_spans: int = 0

    # -- open ------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, directory: str | Path, verify: bool = True) -> Corpus:
        """The corpus in a directory.

        Args:
            directory: where it is.
            verify: whether to read all files once and compare their SHA-256 (about 1 s per GB), not only
                their sizes.

        Raises:
            CorpusError: there is no corpus, or a file is missing, too short, too long or changed.
        """
        directory = Path(directory)
        path = directory / INDEX
        if not path.is_file():
            raise CorpusError(f"{directory}: no corpus there (no {INDEX}); `fastbert prepare` makes one")
        try:
            index = read_json(path)
        except ValueError as error:
            raise CorpusError(str(error)) from None
        _check_index(path, index)
        for entries in _files_by_array(index).values():
            whole = hashlib.sha256() if verify else None
            for entry in entries:
                _check_file(directory / entry["name"], entry, whole)
        return cls._of(directory, index)

    @classmethod
    def _of(cls, directory: Path, index: dict[str, Any]) -> Corpus:
        """The corpus in a directory, from its index."""
        return cls(
            directory,
            index["hash"],
            index["tokens"],
            index["sentences"],
            index["documents"],
            index["longest_sentence"],
            index["vocab_size"],
            index["special_ids"],
            index["shard_tokens"],
            np.dtype(index["token_dtype"]).newbyteorder("<"),
            tuple(index.get("span_kinds", ())),
            index.get("spans", 0),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus.open, (self.directory, False)  # a worker maps the files itself

    @cached_property
    def sentence_starts(self) -> np.ndarray:
        """(num_sentences + 1,) int64: the first token of each sentence; at the end num_tokens."""
        return self._starts("sentences.bin", self.num_tokens)

    @cached_property
    def document_starts(self) -> np.ndarray:
        """(num_documents + 1,) int64: the first sentence of each document; at the end num_sentences."""
        return self._starts("documents.bin", self.num_sentences)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return load_tokenizer(self.directory)

    @cached_property
    def _shards(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        count = -(-self.num_tokens // self.shard_tokens)
        tokens = [self._map(f"tokens-{i:05d}.bin", self.token_dtype) for i in range(count)]
        return tokens, [self._map(f"words-{i:05d}.bin", np.dtype("u1")) for i in range(count)]

    def _starts(self, name: str, end: int) -> np.ndarray:
        """An array of starts, which rise from 0 to `end`: with other numbers planning would not end."""
        found = self._map(name, np.dtype("<i8"))
        if found[0] != 0 or found[-1] != end or (found[1:] <= found[:-1]).any():
            raise CorpusError(f"{self.directory / name}: expected numbers that rise from 0 to {end}")
        return found

    def _map(self, name: str, dtype: np.dtype) -> np.ndarray:
        return np.memmap(self.directory / name, dtype, "r").view(np.ndarray)

    # -- read ------------------------------------------------------------------------------------------------

    def tokens(self, begin: int, end: int) -> np.ndarray:
        """(end - begin,) ids of the tokens [begin, end); a view of the file if one file has all of them."""
        parts = [self._shards[0][i][a:b] for i, a, b in self._pieces(begin, end)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self.token_dtype)

    def word_starts(self, begin: int, end: int) -> np.ndarray:
        """(end - begin,) bool: whether a word starts at each of the tokens [begin, end)."""
        found = np.empty(end - begin, bool)
        done = 0
        for i, a, b in self._pieces(begin, end):
            bits = np.unpackbits(self._shards[1][i][a // 8 : -(-b // 8)], bitorder="little")
            found[done : done + b - a] = bits[a % 8 : a % 8 + b - a]
            done += b - a
        return found

    @cached_property
    def _span_arrays(self) -> list[np.ndarray]:
        if not self.span_kinds:
            raise CorpusError(
                f"{self.directory}: has no phrases or entities; `fastbert prepare --spans` finds them"
            )
        if self.num_spans == 0:  # an empty file cannot be mapped
            return [np.empty(0, dtype) for dtype in _SPANS.values()]
        return [self._map(f"{name}.bin", np.dtype(dtype)) for name, dtype in _SPANS.items()]

    def spans(self, begin: int, end: int) -> np.ndarray:
        """(n, 3) int64: first token, end and kind of the spans within the tokens [begin, end), ascending.

        Tokens are numbered as in the whole corpus. A span that is only partly in the range is left out.

        Raises:
            CorpusError: the corpus was made without spans.
        """
        if not 0 <= begin <= end <= self.num_tokens:
            raise IndexError(f"tokens [{begin}, {end}): expected a range within [0, {self.num_tokens}]")
        starts, lengths, kinds = self._span_arrays
        first, last = np.searchsorted(starts, [begin, end])
        found = np.empty((last - first, 3), np.int64)
        found[:, 0], found[:, 2] = starts[first:last], kinds[first:last]
        found[:, 1] = found[:, 0] + lengths[first:last]
        return found[found[:, 1] <= end]

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(file, first, last) of the pieces of the tokens [begin, end)."""
        if not 0 <= begin <= end <= self.num_tokens:
            raise IndexError(f"tokens [{begin}, {end}): expected a range within [0, {self.num_tokens}]")
        while begin < end:
            shard, first = divmod(begin, self.shard_tokens)
            last = min(self.shard_tokens, first + end - begin)
            yield shard, first, last
            begin += last - first

    def sentence(self, index: int) -> np.ndarray:
        """The ids of a sentence."""
        return self.tokens(*(int(at) for at in self.sentence_starts[index : index + 2]))

    def parts(self) -> Iterator[Part]:
        """The whole corpus in order, cut between sentences into parts of about a million tokens."""
        starts, sentence = self.sentence_starts, 0
        while sentence < self.num_sentences:
            first = int(starts[sentence])
            until = int(np.searchsorted(starts, first + _PART_TOKENS, side="right")) - 1
            until = min(max(until, sentence + 1), self.num_sentences)
            end = int(starts[until])
            begins = np.flatnonzero(self.word_starts(first, end))
            stops = np.searchsorted(begins, starts[sentence + 1 : until + 1] - first)
            stops = np.repeat(stops, np.diff(stops, prepend=0))
            yield Part(first, np.asarray(self.tokens(first, end)), np.append(begins, end - first), stops)
            sentence = until

    # -- write -----------------------------------------------------------------------------------------------

    @classmethod
    def write(
        cls,
        files: Sequence[str | Path],
        tokenizer: str | Path | Tokenizer,
        directory: str | Path,
        *,
        format: str | None = None,
        spans: str | Path | Source | Sequence[str | Path | Source] | None = None,
        shard_tokens: int = SHARD_TOKENS,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Corpus:
        """Tokenize files of text into a new corpus.

        Text that looks like a special token ("[MASK]") is text. A sentence without a token and a document
        without a sentence are left out. The tokenizer's threads (RAYON_NUM_THREADS) change no byte.

        Args:
            files, format: see `documents`.
            tokenizer: a directory with one, or the tokenizer.
            directory: the corpus's directory; must not exist, or be empty.
            spans: sources of phrases and entities: the path of a gazetteer, "pmi", or a source of `spans.py`;
                in a list, an earlier source has priority. None: the corpus has no spans.
            shard_tokens: tokens per file, a multiple of 8.
            overwrite: whether to replace an existing corpus.
            progress: called with (bytes of input, tokens) since its last call.

        Raises:
            CorpusError, ValueError: naming the file or the argument; nothing is left behind.
        """
        if type(shard_tokens) is not int or shard_tokens < 8 or shard_tokens % 8:
            raise ValueError(f"shard_tokens: expected a multiple of 8, got {shard_tokens!r}")
        directory = Path(directory)
        if overwrite:
            _check_overwritten(directory)
        if isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.from_str(tokenizer.to_str())  # a copy: the caller's settings do not change
            tokenizer.no_padding()
            tokenizer.no_truncation()
        else:
            tokenizer = load_tokenizer(tokenizer)
        sources = [] if spans is None else sources_of(spans)
        special_ids = _special_ids(tokenizer)
        description = tokenizer.to_str(pretty=True)
        tokenizer.encode_special_tokens = True  # a setting that is not saved: "[MASK]" in a text is text
        vocab_size = 1 + max(tokenizer.get_vocab().values())
        for source in sources:  # an error here comes before hours of work
            source.prepare(tokenizer, sorted(special_ids.values()))

        seen = 0

        def count(size: int) -> None:
            nonlocal seen
            seen += size

        with _as_corpus_error():
            check_kept(directory, files)
        with _as_corpus_error(), new_directory(directory, _NAMES, overwrite) as folder:
            writer = _Writer(folder, "<u2" if vocab_size <= 1 << 16 else "<u4", shard_tokens)
            for chunk in _chunks(documents(files, format, count)):
                added = writer.add(chunk, tokenizer)
                if progress is not None:
                    progress(seen, added)
                    seen = 0
            if writer.documents.count == 0:
                raise CorpusError(f"{', '.join(map(str, files))}: no sentence in any document")
            index = writer.close(description)
            index |= {"vocab_size": vocab_size, "special_ids": special_ids, "hash": ""}
            if sources:
                index = _with_spans(folder, index, find(cls._of(folder, index).parts, sources))
            index["hash"] = _hash_of(index)
            _write(folder / INDEX, json.dumps(index, indent=1).encode() + b"\n")
        return cls.open(directory, verify=False)


# --- reading ------------------------------------------------------------------------------------------------


def _check_index(path: Path, index: dict[str, Any]) -> None:
    if index.get("format") != FORMAT:
        raise CorpusError(f"{path}: format: expected {FORMAT!r}, got {index.get('format')!r}")
    if index.get("version") != VERSION:
        raise CorpusError(f"{path}: version: expected {VERSION}, got {index.get('version')!r}")
    for name in _COUNTS:
        if type(index.get(name)) is not int or index[name] < 1:
            raise CorpusError(f"{path}: {name}: expected an integer >= 1, got {index.get(name)!r}")
    if index.get("token_dtype") not in ("<u2", "<u4"):
        raise CorpusError(f"{path}: token_dtype: expected <u2 or <u4, got {index.get('token_dtype')!r}")
    ids, size = index.get("special_ids"), index["vocab_size"]
    if not (
        isinstance(ids, dict)
        and ids.keys() == _SPECIAL.keys()
        and all(type(i) is int and 0 <= i < size for i in ids.values())
    ):
        raise CorpusError(
            f"{path}: special_ids: expected ids of {', '.join(_SPECIAL)} below {size}, got {ids!r}"
        )
    if "span_kinds" in index:
        if index["span_kinds"] != list(KINDS):
            raise CorpusError(f"{path}: span_kinds: expected {list(KINDS)}, got {index['span_kinds']!r}")
        if type(index.get("spans")) is not int or index["spans"] < 0:
            raise CorpusError(f"{path}: spans: expected an integer >= 0, got {index.get('spans')!r}")
    if not isinstance(index.get("arrays"), dict) or index.get("hash") != _hash_of(index):
        raise CorpusError(f"{path}: hash: does not match the other entries; the file was changed")
    entries, sizes = index.get("files"), dict(itertools.islice(_sizes_of(index), 1 << 20))
    if not (
        isinstance(entries, list)
        and all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in entries)
        and sorted(e["name"] for e in entries) == sorted(sizes)
    ):
        raise CorpusError(f"{path}: files: expected name, bytes and sha256 of {', '.join([*sizes][:6])} …")
    for entry in entries:
        size = sizes[entry["name"]]
        if type(entry.get("bytes")) is not int or entry["bytes"] != (size or entry["bytes"]):
            raise CorpusError(
                f"{path}: files: {entry['name']}: expected {size} bytes, got {entry.get('bytes')!r}"
            )
    for array, parts in _files_by_array(index).items():
        if parts[-1].get("sha256") != index["arrays"].get(array):
            raise CorpusError(f"{path}: files: {parts[-1]['name']}: sha256: differs from that in arrays")


def _sizes_of(index: dict[str, Any]) -> Iterator[tuple[str, int | None]]:
    """(name, bytes) of each file that an index must list; None for the tokenizer's."""
    yield TOKENIZER, None
    for name in _LAST:
        yield f"{name}.bin", 8 * (index[name] + 1)
    for name, dtype in _SPANS.items():
        if "span_kinds" in index and index["spans"]:
            yield f"{name}.bin", index["spans"] * np.dtype(dtype).itemsize
    size, most = np.dtype(index["token_dtype"]).itemsize, index["shard_tokens"]
    for number in range(-(-index["tokens"] // most)):
        tokens = min(most, index["tokens"] - number * most)
        yield f"tokens-{number:05d}.bin", tokens * size
        yield f"words-{number:05d}.bin", -(-tokens // 8)


def _files_by_array(index: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The entries of index.json's files by their array, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in sorted(index["files"], key=lambda e: (len(e["name"]), e["name"])):
        found.setdefault(Path(entry["name"]).stem.partition("-")[0], []).append(entry)
    return found


def _hash_of(index: dict[str, Any]) -> str:
    """The corpus's hash, however its arrays are cut into files: see the module."""
    cut = ("hash", "files", "shard_tokens")
    return digest(json.dumps({k: v for k, v in index.items() if k not in cut}, sort_keys=True).encode())


def _check_file(path: Path, entry: dict[str, Any], whole: Any) -> None:
    """Compare a file's size. With `whole`, the digest of its array so far, compare the digest too."""
    if not path.is_file():
        raise CorpusError(f"{path}: is missing")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise CorpusError(f"{path}: {size} bytes, but the corpus was written with {entry['bytes']}")
    if whole is None:
        return
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            whole.update(piece)
    if whole.hexdigest() != entry.get("sha256"):
        raise CorpusError(f"{path}: was changed since it was written (its SHA-256 differs)")


# --- writing ------------------------------------------------------------------------------------------------


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    found = {}
    for name, spellings in _SPECIAL.items():
        ids = [i for i in map(tokenizer.token_to_id, spellings) if i is not None]
        if not ids:
            raise ValueError(f"tokenizer: has no {name} token ({' or '.join(spellings)})")
        found[name] = ids[0]
    return found


def _chunks(source: Iterable[list[str]]) -> Iterator[list[list[str]]]:
    """Lists of documents of about `_CHUNK_CHARACTERS` characters."""
    chunk, size = [], 0
    for document in source:
        chunk.append(document)
        size += sum(map(len, document))
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Array:
    """An array that grows on disk, cut into files of at most `most` bytes."""

    def __init__(self, folder: Path, name: str, dtype: str, most: int | None = None) -> None:
        self._folder, self._name, self._dtype, self._most = folder, name, np.dtype(dtype), most
        self._file: BinaryIO | None = None
        self._room = 0
        self._whole = hashlib.sha256()
        self.count, self.files = 0, []

    def add(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, self._dtype).data.cast("B")
        self.count += len(values)
        while len(data):
            if self._file is None:
                number = "" if self._most is None else f"-{len(self.files):05d}"
                self._file = (self._folder / f"{self._name}{number}.bin").open("xb")
                self._room = self._most or (1 << 62)
            piece = data[: self._room]
            self._file.write(piece)
            self._whole.update(piece)
            self._room -= len(piece)
            data = data[len(piece) :]
            if self._room == 0:
                self._close(self._file)

    def _close(self, file: BinaryIO) -> None:
        name, size = Path(file.name).name, file.tell()
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self.files.append({"name": name, "bytes": size, "sha256": self._whole.hexdigest()})
        self._file = None

    def close(self) -> str:
        """Close the last file; returns the digest of the whole array."""
        if self._file is not None:
            self._close(self._file)
        return self._whole.hexdigest()


class _Writer:
    """The arrays of a corpus under way."""

    def __init__(self, folder: Path, token_dtype: str, shard_tokens: int) -> None:
        self._folder, self._dtype, self._shard_tokens = folder, token_dtype, shard_tokens
        self.tokens = _Array(folder, "tokens", token_dtype, shard_tokens * np.dtype(token_dtype).itemsize)
        self.words = _Array(folder, "words", "u1", shard_tokens // 8)
        self.sentences = _Array(folder, "sentences", "<i8")
        self.documents = _Array(folder, "documents", "<i8")
        self._bits = np.empty(0, bool)  # the last tokens' bits, fewer than 8
        self._longest = 0

    def add(self, chunk: list[list[str]], tokenizer: Tokenizer) -> int:
        """Append documents; returns how many tokens they have."""
        try:
            encoded = tokenizer.encode_batch([s for d in chunk for s in d], add_special_tokens=False)
        except Exception as error:  # the Rust side raises a bare Exception
            raise CorpusError(f"the tokenizer failed: {cause(error)}") from error
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        total = int(lengths.sum())
        ids = np.fromiter((i for e in encoded for i in e.ids), self._dtype, total)
        words = np.fromiter((-1 if w is None else w for e in encoded for w in e.word_ids), np.int64, total)
        ends = np.cumsum(lengths)
        begins = np.ones(total, bool)
        begins[1:] = (words[1:] != words[:-1]) | (words[1:] < 0)
        filled = lengths > 0
        begins[(ends - lengths)[filled]] = True

        kept = np.add.reduceat(filled, np.cumsum([0, *map(len, chunk)])[:-1].astype(np.int64), dtype=np.int64)
        kept = kept[kept > 0]
        self.documents.add(self.sentences.count + np.cumsum(kept) - kept)
        self.sentences.add(self.tokens.count + (ends - lengths)[filled])
        self.tokens.add(ids)
        bits = np.concatenate([self._bits, begins])
        whole = len(bits) // 8 * 8
        self.words.add(np.packbits(bits[:whole], bitorder="little"))
        self._bits = bits[whole:]
        self._longest = max(self._longest, int(lengths.max(initial=0)))
        return total

    def close(self, tokenizer: str) -> dict[str, Any]:
        """Close all files; returns their entries for index.json."""
        self.words.add(np.packbits(self._bits, bitorder="little"))
        index = {
            "format": FORMAT,
            "version": VERSION,
            "token_dtype": self._dtype,
            "tokens": self.tokens.count,
            "sentences": self.sentences.count,
            "documents": self.documents.count,
            "longest_sentence": self._longest,
            "shard_tokens": self._shard_tokens,
        }
        self.documents.add(np.array([self.sentences.count]))
        self.sentences.add(np.array([self.tokens.count]))
        arrays = {name: getattr(self, name).close() for name in ("tokens", "words", "sentences", "documents")}
        content = tokenizer.encode()
        _write(self._folder / TOKENIZER, content)
        arrays["tokenizer"] = hashlib.sha256(content).hexdigest()
        entry = {"name": TOKENIZER, "bytes": len(content), "sha256": arrays["tokenizer"]}
        lists = (self.tokens, self.words, self.sentences, self.documents)
        index |= {"arrays": arrays, "files": [entry, *(f for array in lists for f in array.files)]}
        return index


def _with_spans(folder: Path, index: dict[str, Any], found: Iterable[np.ndarray]) -> dict[str, Any]:
    """Write spans beside the other arrays; returns the index with them."""
    arrays = [_Array(folder, name, dtype) for name, dtype in _SPANS.items()]
    starts, lengths, kinds = arrays
    for spans in found:
        starts.add(spans[:, 0])
        lengths.add(spans[:, 1] - spans[:, 0])
        kinds.add(spans[:, 2])
    index = index | {"span_kinds": list(KINDS), "spans": starts.count}
    index["arrays"] = index["arrays"] | {
        name: array.close() for name, array in zip(_SPANS, arrays, strict=True)
    }
    index["files"] = [*index["files"], *(file for array in arrays for file in array.files)]
    return index


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _check_overwritten(directory: Path) -> None:
    """Raise CorpusError if what would be overwritten is no corpus."""
    if os.path.lexists(directory):
        path = directory / INDEX
        if not path.is_file() or read_json(path).get("format") != FORMAT:
            raise CorpusError(f"{directory}: is no corpus (no {INDEX} of one), so it is not overwritten")


@contextlib.contextmanager
def _as_corpus_error() -> Iterator[None]:
    """Turn a CheckpointError, as `new_directory` raises, into a CorpusError."""
    try:
        yield
    except CheckpointError as error:
        raise CorpusError(str(error)) from error
