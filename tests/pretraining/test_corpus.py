"""The corpus on disk: what it holds, that nothing but text and tokenizer shape it, that damage is named."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fastbert.checkpoint import files
from fastbert.cli.main import main
from fastbert.pretraining import corpus as module
from fastbert.pretraining.corpus import Corpus, CorpusError
from fastbert.pretraining.documents import documents
from fastbert.pretraining.formats import SegmentPairs
from fastbert.sentences.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def corpus(text_file, tokenizer_dir, tmp_path_factory) -> Corpus:
    return Corpus.write([text_file], tokenizer_dir, tmp_path_factory.mktemp("corpus") / "shards")


def test_it_holds_what_the_tokenizer_makes(corpus, text_file, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    found = list(documents([text_file]))
    assert corpus.num_documents == len(found)
    assert corpus.num_sentences == sum(map(len, found))
    sentence = 0
    for document, first in zip(found, corpus.document_starts, strict=False):
        assert first == sentence
        for text in document:
            encoding = tokenizer.encode(text, add_special_tokens=False)
            begin, end = (int(at) for at in corpus.sentence_starts[sentence : sentence + 2])
            assert corpus.sentence(sentence).tolist() == encoding.ids
            words = encoding.word_ids
            starts = [i == 0 or words[i] != words[i - 1] for i in range(len(words))]
            assert corpus.word_starts(begin, end).tolist() == starts
            sentence += 1
    assert corpus.document_starts[-1] == corpus.num_sentences
    assert corpus.sentence_starts[-1] == corpus.num_tokens
    lengths = np.diff(corpus.sentence_starts)
    assert lengths.min() > 0
    assert lengths.max() == corpus.longest_sentence
    assert corpus.vocab_size == 600
    assert corpus.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert corpus.tokenizer.encode("a b").ids == tokenizer.encode("a b").ids
    assert not np.isin(corpus.tokens(0, corpus.num_tokens), [0, 2, 3, 4]).any()


def arrays(corpus: Corpus) -> dict[str, bytes]:
    found = {}
    for name in ("tokens", "words", "sentences", "documents"):
        files = sorted(corpus.directory.glob(f"{name}*.bin"))
        found[name] = b"".join(file.read_bytes() for file in files)
    return found


@pytest.mark.parametrize("shard_tokens", [8, 4096])
def test_the_cut_into_files_changes_nothing(
    corpus, text_file, tokenizer_dir, tmp_path, shard_tokens, monkeypatch
):
    monkeypatch.setattr(module, "_CHUNK_CHARACTERS", 5000)  # other chunks as well
    files = [text_file]
    if shard_tokens == 8:  # a hundred files are enough
        short = tmp_path / "short.txt"
        short.write_text("\n".join(text_file.read_text().splitlines()[:20]))
        files, corpus = [short], Corpus.write([short], tokenizer_dir, tmp_path / "whole")
    cut = Corpus.write(files, tokenizer_dir, tmp_path / "cut", shard_tokens=shard_tokens)
    assert len(list(cut.directory.glob("tokens-*"))) == -(-corpus.num_tokens // shard_tokens)
    assert arrays(cut) == arrays(corpus)
    assert cut.hash == corpus.hash
    Corpus.open(cut.directory)
    for begin, end in ((0, corpus.num_tokens), (3, 29), (16, 16), (5, 6), (7, 8), (8, 24)):
        assert np.array_equal(cut.tokens(begin, end), corpus.tokens(begin, end))
        assert np.array_equal(cut.word_starts(begin, end), corpus.word_starts(begin, end))
    for bad in ((-1, 3), (4, 3), (0, corpus.num_tokens + 1)):
        with pytest.raises(IndexError, match="expected a range within"):
            cut.tokens(*bad)


@pytest.mark.sweep
def test_threads_of_the_tokenizer_change_nothing(corpus, text_file, tokenizer_dir, tmp_path):
    command = [sys.executable, "-m", "fastbert", "prepare", str(text_file), "--tokenizer", str(tokenizer_dir)]
    command += ["--spans", "pmi", "--min-count", "4"]
    hashes = set()
    for workers in ("1", "3"):
        output = tmp_path / workers
        subprocess.run([*command, "--output", str(output), "--workers", workers], check=True)
        made = Corpus.open(output)
        assert arrays(made) == arrays(corpus)
        assert made.num_spans > 0
        hashes.add(made.hash)
    assert len(hashes) == 1


def test_a_special_token_in_a_text_is_text(tokenizer_dir, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a [SEP] b\nplain")
    made = Corpus.write([path], tokenizer_dir, tmp_path / "c")
    assert not np.isin(made.tokens(0, made.num_tokens), list(made.special_ids.values())[2:]).any()


def test_sentences_and_documents_without_tokens_are_left_out(tokenizer_dir, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\u200b\none two\n\u200b\n\n\u200b\n\nthree\n")  # BERT's normalisation drops U+200B
    made = Corpus.write([path], tokenizer_dir, tmp_path / "c")
    assert (made.num_documents, made.num_sentences) == (2, 2)
    assert made.document_starts.tolist() == [0, 1, 2]


def test_a_sentence_starts_a_word(tokenizer_dir, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("the\nin\na")  # one word each, the tokenizer's word 0
    made = Corpus.write([path], tokenizer_dir, tmp_path / "c")
    assert made.word_starts(0, 3).tolist() == [True] * 3


def test_a_vocabulary_above_65536_ids(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(70_000))]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "a.txt"
    path.write_text("w0 w69999\nw65531 never")
    made = Corpus.write([path], tokenizer, tmp_path / "c")
    assert made.tokens(0, 4).tolist() == [5, 70_004, 65_536, 1]
    assert made.tokens(0, 4).dtype == np.uint32


# --- damage -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_spans(text_file, tokenizer_dir, tmp_path_factory) -> Corpus:
    place = tmp_path_factory.mktemp("spans")
    (place / "names.jsonl").write_text('{"text": "the name"}')
    return Corpus.write([text_file], tokenizer_dir, place / "shards", spans=place / "names.jsonl")


@pytest.fixture
def copy(with_spans, tmp_path):
    return shutil.copytree(with_spans.directory, tmp_path / "copy")


FILES = ("tokens-00000", "words-00000", "sentences", "documents", "spans", "lengths", "kinds")


@pytest.mark.parametrize("name", [f"{name}.bin" for name in FILES])
def test_a_flipped_byte_a_short_and_a_missing_file_are_named(copy, name):
    path = copy / name
    good = path.read_bytes()
    for content, match in (
        (good[:-1] + bytes([good[-1] ^ 1]), "was changed since it was written"),
        (good[:-1], f"{len(good) - 1} bytes, but the corpus was written with {len(good)}"),
    ):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=f"{name}: {match}"):
            Corpus.open(copy)
    path.unlink()
    with pytest.raises(CorpusError, match=f"{name}: is missing"):
        Corpus.open(copy, verify=False)


def test_another_file_with_its_own_digest_is_named(copy):
    path, index = copy / "tokens-00000.bin", json.loads((copy / "index.json").read_text())
    path.write_bytes(path.read_bytes()[::-1])
    (entry,) = (entry for entry in index["files"] if entry["name"] == path.name)
    entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (copy / "index.json").write_text(json.dumps(index))
    with pytest.raises(CorpusError, match=r"index\.json: files: tokens-00000\.bin: sha256: differs from"):
        Corpus.open(copy)


def test_a_file_outside_the_corpus_is_refused(copy):
    path = copy / "index.json"
    files = [{"name": "../../etc/passwd", "bytes": 1, "sha256": ""}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}))
    with pytest.raises(CorpusError, match=r"index\.json: (\w+): "):
        Corpus.open(copy)
    path.write_text("{")
    with pytest.raises(CorpusError, match=r"index\.json: is not valid JSON"):
        Corpus.open(copy)


def leaves(value, path=()):
    """The path of each number and text in a JSON value."""
    if not isinstance(value, (dict, list)):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, inner in items for leaf in leaves(inner, (*path, key))]


def other_values(value):
    """What a damaged digit can make of a number or a text, and values of other types."""
    if isinstance(value, int):
        return [value + 1, value - 1, value + 8, value * 10 + 1, -value - 1, str(value), float(value)]
    return [value[:-1], value + "0", ("1" if value[:1] == "0" else "0") + value[1:], None, 7]


def told(corpus: Corpus):
    """All that a corpus says, its cut aside."""
    spans = corpus.spans(0, corpus.num_tokens).tolist()
    names = "hash num_tokens num_sentences num_documents longest_sentence vocab_size special_ids token_dtype"
    facts = [getattr(corpus, name) for name in names.split()]
    places = corpus.sentence_starts.tolist(), corpus.document_starts.tolist()
    starts = corpus.word_starts(0, corpus.num_tokens).tolist()
    return facts, spans, places, starts, corpus.tokens(0, corpus.num_tokens).tolist()


@pytest.mark.parametrize("shard_tokens", [16, 1 << 28])
def test_every_changed_value_of_the_index_is_named_or_changes_nothing(tokenizer_dir, tmp_path, shard_tokens):
    (tmp_path / "a.txt").write_text("the name of the name\nin the class\n\nthe class of the name")
    (tmp_path / "names.jsonl").write_text('{"text": "the name"}')
    place = tmp_path / "c"
    made = Corpus.write(
        [tmp_path / "a.txt"], tokenizer_dir, place, spans=tmp_path / "names.jsonl", shard_tokens=shard_tokens
    )
    assert made.num_spans > 0
    expected, index = told(Corpus.open(place)), json.loads((place / "index.json").read_text())
    passed = set()
    for path in leaves(index):
        changed = json.loads(json.dumps(index))
        *above, last = path
        at = changed
        for key in above:
            at = at[key]
        whole = at[last]
        for value in [*other_values(whole), KeyError]:
            at[last] = value
            if value is KeyError:
                del at[last]
            (place / "index.json").write_text(json.dumps(changed))
            try:
                found = told(Corpus.open(place))
            except CorpusError as error:
                assert str(place) in str(error)  # noqa: PT017
                assert len(str(error).splitlines()) == 1  # noqa: PT017
            else:
                assert found == expected, (path, value)
                passed.add(path)
            if isinstance(at, list):
                break
    assert passed <= {("shard_tokens",)}


@pytest.mark.parametrize(
    ("name", "array"), [("sentences", "sentence_starts"), ("documents", "document_starts")]
)
def test_starts_that_do_not_rise_are_named_before_planning(copy, name, array):
    """Also where nothing is verified: planning would not end."""
    path, dtype = copy / f"{name}.bin", "<i8"
    good = np.fromfile(path, dtype)
    for at, value in ((0, 1), (3, good[2]), (3, -5), (3, 1 << 60), (-1, good[-1] + 1)):
        bad = good.copy()
        bad[at] = value
        bad.tofile(path)
        found = Corpus.open(copy, verify=False)
        message = rf"{name}\.bin: expected numbers that rise from 0 to {good[-1]}$"
        for read in (lambda c: SegmentPairs(c, 32, 0).plan(0), lambda c: getattr(c, array)):
            with pytest.raises(CorpusError, match=message):
                read(found)


def test_what_is_there_is_kept(corpus, text_file, tokenizer_dir, tmp_path, monkeypatch):
    place = tmp_path / "c"
    kept = Corpus.write([text_file], tokenizer_dir, place)
    with pytest.raises(CorpusError, match="exists already"):
        Corpus.write([text_file], tokenizer_dir, place)
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine\n\n" * 3000 + b"\xff")
    monkeypatch.setattr(module, "_CHUNK_CHARACTERS", 1000)  # much is written before the fault is seen
    with pytest.raises(ValueError, match=r"bad\.txt: line 6001: not UTF-8"):
        Corpus.write([bad], tokenizer_dir, place, overwrite=True)
    with pytest.raises(FileNotFoundError, match=r"gone\.txt: no such file"):
        Corpus.write([tmp_path / "gone.txt"], tokenizer_dir, place, overwrite=True)
    with pytest.raises(CorpusError, match=r"bad\.txt: is no directory; expected one for .*inside/c"):
        Corpus.write([text_file], tokenizer_dir, bad / "inside" / "c")
    assert arrays(Corpus.open(place)) == arrays(kept)
    (tmp_path / "other").mkdir()
    with pytest.raises(CorpusError, match=r"other: is no corpus"):
        Corpus.write([text_file], tokenizer_dir, tmp_path / "other", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.txt", "c", "other"]
    short = tmp_path / "short.txt"
    short.write_text("one\n\ntwo")
    Corpus.write([short], tokenizer_dir, place, overwrite=True)
    assert Corpus.open(place).num_documents == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.txt", "c", "other", "short.txt"]


@pytest.mark.sweep
def test_a_full_disk_and_a_kill_leave_no_corpus(text_file, tokenizer_dir, tmp_path):
    code = (
        "import resource, signal, sys; from fastbert.cli.main import main; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "  # as a full disk: a write fails
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "prepare", str(text_file), "--tokenizer", str(tokenizer_dir)]
    done = subprocess.run([*command, "--output", str(tmp_path / "c")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "c: could not be written: OSError: [Errno 27]" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    left = tmp_path / f".c.new.{files.own_tag().rpartition('.')[0]}.999999999.tmp"
    left.mkdir()  # of a process that was killed
    Corpus.write([text_file], tokenizer_dir, tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_bad_arguments_are_named(text_file, tokenizer_dir, tmp_path):
    unmasked = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}, "[UNK]"))
    with pytest.raises(ValueError, match="shard_tokens: expected a multiple of 8, got 12"):
        Corpus.write([text_file], tokenizer_dir, tmp_path / "c", shard_tokens=12)
    with pytest.raises(ValueError, match=r"tokenizer: has no mask token \(\[MASK\] or <mask>\)"):
        Corpus.write([text_file], unmasked, tmp_path / "c")
    with pytest.raises(CorpusError, match="no corpus there"):
        Corpus.open(tmp_path)
    (tmp_path / "e.txt").write_text("\n")
    with pytest.raises(CorpusError, match=r"e\.txt: no sentence in any document"):
        Corpus.write([tmp_path / "e.txt"], tokenizer_dir, tmp_path / "c")
    assert not (tmp_path / "c").exists()


# --- the commands -------------------------------------------------------------------------------------------


def test_commands(json_file, tokenizer_dir, corpus, tmp_path, capsys):
    tokenizer, shards = str(tmp_path / "tok"), str(tmp_path / "shards")
    train = ["train-tokenizer", str(json_file), "--vocab-size", "600", "--output", tokenizer]
    assert main([*train, "--progress"]) == 0
    seen = capsys.readouterr().err
    digest = hashlib.sha256((tokenizer_dir / "tokenizer.json").read_bytes()).hexdigest()
    assert f"a vocabulary of 600; SHA-256 of tokenizer.json {digest}" in seen
    assert "words, " in seen
    assert "100%" in seen
    assert main(train) == 2
    assert "tok: exists already; expected a new or an empty directory, or overwrite=True (--overwrite)" in (
        capsys.readouterr().err
    )
    assert main([*train, "--overwrite", "--cased"]) == 0
    assert "Python" in (tmp_path / "tok" / "vocab.txt").read_text().split()
    prepare = ["prepare", str(json_file), "--tokenizer", str(tokenizer_dir), "--output", shards]
    assert main(prepare) == 0
    assert f"hash {corpus.hash}" in capsys.readouterr().err
    for options, status, lines in (
        ([], 2, 1),
        (["--workers", "0"], 2, 1),
        (["--overwrite", "--format", "text"], 0, 2),
    ):
        assert main([*prepare, *options]) == status
        assert len(capsys.readouterr().err.splitlines()) == lines
    assert Corpus.open(shards).num_documents == 1  # JSON read as text, of which a second line warns
