"""Keywords, similarities and files as in sentence-transformers."""

import logging
import os
import pickle
import re
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

import fastbert
from fastbert.sentences.encoder import SentenceEncoder, encode
from fastbert.sentences.settings import sentence_settings
from fastbert.sentences.similarity import quantized
from fastbert.sentences.tokenizer import EncodingError, pack_batches
from tests.support.hf_models import hf_config
from tests.support.sentence_folders import SENTENCES, rewrite


def test_batch_size_limits_the_sentences_of_a_batch_beside_its_tokens(encoder, embeddings):
    sizes = []
    rows = encoder.encode(SENTENCES[:50], batch_size=7, progress=lambda n, tokens: sizes.append(n))
    assert sizes == [7] * 7 + [1]
    assert np.abs(rows - embeddings[:50]).max() < 1e-6
    batches = list(pack_batches(np.array([9, 1, 5, 1, 1, 1]), 10, 2))
    assert [b.tolist() for b in batches] == [[0], [2, 1], [3, 4], [5]]
    batches = list(pack_batches(np.array([9, 1, 5, 1, 1, 1]), 10, 9))
    assert [b.tolist() for b in batches] == [[0], [2, 1, 3, 4, 5]]
    assert len(encode(encoder, SENTENCES[:3], batch_size=1)) == 3
    for wrong in (0, -1, 2.0, True, "all"):
        for call in (encoder.encode, lambda s, **k: encoder.encode_tokens(encoder.tokenize(s), **k)):
            with pytest.raises(ValueError, match=r"batch_size: .* expected an integer >= 1, or None"):
                call(["a"], batch_size=wrong)


@pytest.mark.parametrize(
    ("asked", "level", "terminal", "shown"),
    (
        (True, "WARNING", True, True),
        (True, "WARNING", False, False),
        (None, "WARNING", True, False),
        (None, "INFO", True, True),
        (None, "DEBUG", False, False),
        (False, "INFO", True, False),
    ),
)
def test_progress_bar(encoder, monkeypatch, capsys, asked, level, terminal, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    logger = logging.getLogger("fastbert")
    monkeypatch.setattr(logger, "level", logging.getLevelName(level))
    logger.manager._clear_cache()
    told = []
    encoder.encode(
        SENTENCES[:40],
        batch_size=10,
        show_progress_bar=asked,
        progress=lambda sentences, tokens: told.append(sentences),
    )
    assert told == [10] * 4
    out, err = capsys.readouterr()
    assert out == ""
    if shown:
        assert err.startswith("10 of 40 sentences, ")
        assert err.count("\n") == 1
        assert re.search(r"\r40 of 40 sentences, [\d,]+/s *\n$", err)
    else:
        assert err == ""


def test_similarity_is_sentence_transformers(encoder):
    from sentence_transformers.util import SimilarityFunction

    a, b = torch.randn(5, 384), torch.randn(3, 384)
    assert encoder.similarity_fn_name == "cosine"
    for name in ("cosine", "dot", "euclidean", "manhattan"):
        one = SentenceEncoder(encoder.model, encoder._tokenizer, similarity_fn_name=name)
        theirs = SimilarityFunction.to_similarity_fn(name)(a, b)
        scores = one.similarity(a.numpy(), b)
        assert scores.shape == (5, 3)
        assert torch.allclose(scores, theirs, atol=1e-4)
        assert torch.equal(one.similarity(a[0], b.numpy()), one.similarity(a[:1], b))
        assert torch.equal(one.similarity(list(a), b.tolist()), scores)
        assert torch.equal(one.similarity(a, list(b.numpy())), scores)
        assert one.similarity(a.bfloat16(), b.double()).dtype == torch.float64
        assert torch.equal(one.similarity(a.long(), b), one.similarity(a.trunc(), b))
    same = SentenceEncoder(encoder.model, encoder._tokenizer, similarity_fn_name="euclidean")
    assert torch.equal(same.similarity(a.repeat(9, 1), a.repeat(9, 1)).diagonal(), torch.zeros(45))
    with pytest.raises(ValueError, match="similarity_fn_name: 'cos'; expected one of cosine, dot"):
        SentenceEncoder(encoder.model, encoder._tokenizer, similarity_fn_name="cos")
    with pytest.raises(ValueError, match="embeddings2: rows of 383 numbers; expected 384"):
        encoder.similarity(a, b[:, 1:])
    with pytest.raises(ValueError, match=r"embeddings1: shape \(1, 5, 384\); expected \(rows, width\)"):
        encoder.similarity(a[None], b)


def test_the_directorys_similarity_is_taken(copy):
    path = copy / "config_sentence_transformers.json"
    rewrite(path, similarity_fn_name="dot")
    assert SentenceEncoder.from_pretrained(copy, device="cpu").similarity_fn_name == "dot"
    rewrite(path, similarity_fn_name="maxsim")
    with pytest.raises(ValueError, match="similarity_fn_name 'maxsim'; expected one of cosine"):
        sentence_settings(copy)


def test_it_says_what_it_is(encoder):
    assert repr(encoder) == (
        "SentenceEncoder(BertModel, 6 layers, 384 dimensions, pooling mean, normalized, at most 256 tokens, "
        "float32 on cpu)"
    )
    assert encoder.get_embedding_dimension() == encoder.get_sentence_embedding_dimension() == 384


@pytest.mark.parametrize(
    ("sentences", "options"),
    (
        ("one text", {}),
        ({"text": "one text"}, {}),
        ({"text": ("one", "pair")}, {}),
        (("two", "texts"), {}),
        ([("a pair", "of texts"), "and a text"], {}),
        ([["a pair", "that is much too long, " * 200]], {}),
        ([{"text": "a text"}, {"text": ["a", "pair"]}], {"prompt": "query: "}),
        (np.array(["an", "array"]), {"truncate_dim": 100}),
        ("one text", {"truncate_dim": 100, "normalize_embeddings": True}),
        (["a", "b"], {"prompt": "", "batch_size": 1}),
    ),
)
def test_inputs_are_taken_as_sentence_transformers_takes_them(encoder, stock, sentences, options):
    ours, theirs = encoder.encode(sentences, **options), stock.encode(sentences, **options)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-5
    function = encode(encoder, sentences, **options)
    assert np.array_equal(function, ours)


@pytest.mark.sweep
@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
def test_precisions_are_sentence_transformers(encoder, precision):
    from sentence_transformers.util import quantize_embeddings

    texts, dim = SENTENCES[:120], 99
    rows = encoder.encode(texts, truncate_dim=dim)
    rows = quantize_embeddings(rows, precision)
    ours = encoder.encode(texts, precision=precision, truncate_dim=dim)
    assert ours.dtype == rows.dtype
    assert np.array_equal(ours, rows)
    assert encoder.encode([], precision=precision).dtype == rows.dtype
    if not precision.endswith("int8"):
        assert np.array_equal(encoder.encode(texts[0], precision=precision, truncate_dim=dim), rows[0])


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_a_zero_has_no_positive_sign(precision):
    from sentence_transformers.util import quantize_embeddings

    rows = np.array([[0.0, 1.0, -0.0, -1.0, 0.0, 0.5, 0.0, 2.0]], np.float32)
    assert np.array_equal(quantized(rows, precision), quantize_embeddings(rows, precision))


@pytest.mark.filterwarnings("error")
def test_a_dimension_without_a_range_has_one_step():
    assert quantized(np.ones((2, 3), np.float32), "uint8").tolist() == [[0] * 3] * 2


@pytest.mark.sweep
def test_prompts_by_name(copy, stock):
    path = copy / "config_sentence_transformers.json"
    rewrite(path, prompts={"query": "find: ", "passage": "read: ", "none": ""}, default_prompt_name="passage")
    one = SentenceEncoder.from_pretrained(copy, device="cpu")
    for call, said in (
        (one.encode, "read: a"),
        (one.encode_document, "read: a"),
        (one.encode_query, "find: a"),
        (lambda text: one.encode_query(text, prompt_name="none"), "a"),
        (lambda text: one.encode_query(text, prompt=""), "a"),
        (lambda text: one.encode(text, prompt_name="query"), "find: a"),
    ):
        assert np.abs(call("a") - stock.encode(said)).max() < 1e-5, said
    one.save_pretrained(copy.parent / "again")
    again = SentenceEncoder.from_pretrained(copy.parent / "again", device="cpu")
    assert (again.prompt, again.prompts) == (one.prompt, one.prompts)
    assert sentence_settings(copy, prompt="").prompt == ""
    rewrite(path, prompts={"query": None, "other": "see: "}, default_prompt_name="other")
    one = SentenceEncoder.from_pretrained(copy, device="cpu")
    theirs = type(stock)(str(copy), device="cpu")
    for method in ("encode", "encode_query", "encode_document"):
        assert np.abs(getattr(one, method)("a") - getattr(theirs, method)("a")).max() < 1e-5, method
    rewrite(path, prompts={"query": 3})
    with pytest.raises(ValueError, match="prompts: expected an object of texts"):
        sentence_settings(copy)


SETTINGS = (
    {},
    {"pooling": "cls", "normalize": False, "prompt": "query: ", "lower_case": True, "max_length": 12},
    {"pooling": "max", "similarity_fn_name": "dot", "max_length": 20},
    {"pooling": "lasttoken"},
    {"pooling": "mean_sqrt_len_tokens", "normalize": False},
    {"pooling": "weightedmean"},
)


@pytest.mark.sweep
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.get("pooling", "mean"))
def test_what_it_saves_sentence_transformers_and_it_load(encoder, tmp_path, settings):
    from sentence_transformers import SentenceTransformer

    given = {"pooling": "mean", "normalize": True, "max_length": 256, **settings}
    one = SentenceEncoder(encoder.model, encoder._tokenizer, **given)
    texts = [*SENTENCES[:20], "", "An UPPER-CASE sentence, " * 9]
    expected = one.encode(texts)
    one.save_pretrained(tmp_path / "folder")
    again = SentenceEncoder.from_pretrained(tmp_path / "folder", device="cpu")
    assert np.array_equal(again.encode(texts), expected)
    assert repr(again) == repr(one)
    for name in ("pooling", "normalize", "max_length", "lower_case", "prompt", "similarity_fn_name"):
        assert getattr(again, name) == getattr(one, name), name
    theirs = SentenceTransformer(str(tmp_path / "folder"), device="cpu")
    assert np.abs(theirs.encode(texts) - expected).max() < 1e-5
    assert theirs.get_embedding_dimension() == one.get_embedding_dimension()
    assert theirs.similarity_fn_name == one.similarity_fn_name
    assert theirs.tokenizer.pad_token == "[PAD]"
    assert theirs.tokenizer.mask_token == "[MASK]"
    # the tokenizer by itself does not truncate
    assert Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json")).truncation is None
    assert [p.name for p in (tmp_path / "folder").rglob("*.tmp")] == []


def test_saving_replaces_what_was_there(encoder, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    encoder.save_pretrained(folder)
    given = {
        "pooling": "cls",
        "prompt": "p: ",
        "prompts": {"default": "p: "},
        "max_length": 30,
        "segments": False,
    }
    other = SentenceEncoder(encoder.model, encoder._tokenizer, **given)
    other.save_pretrained(folder)
    again = SentenceEncoder.from_pretrained(folder, device="cpu")
    assert {name: getattr(again, name) for name in given} == given
    assert not again.normalize
    before = (folder / "tokenizer.json").read_bytes()
    monkeypatch.setattr(type(encoder.model), "save_pretrained", lambda *_: None)
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(fastbert.CheckpointError, match=r"tokenizer\.json: could not be saved.*No space left"):
        encoder.save_pretrained(folder)
    assert (folder / "tokenizer.json").read_bytes() == before
    assert list(folder.rglob("*.tmp")) == []
    other.model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match="model: Linear has no save_pretrained"):
        other.save_pretrained(folder)


@pytest.mark.sweep
def test_a_quantised_one_is_saved_as_it_is(directory, tmp_path):
    plain, one = (SentenceEncoder.from_pretrained(directory, device="cpu") for _ in range(2))
    plain.quantize()
    one.quantize("int8", smooth=0.5, calibrate=SENTENCES[:5])
    one.save_pretrained(tmp_path)
    again = SentenceEncoder.from_pretrained(tmp_path, device="cpu")
    assert np.array_equal(again.encode(SENTENCES[:5]), one.encode(SENTENCES[:5]))
    assert not np.array_equal(again.encode(SENTENCES[:5]), plain.encode(SENTENCES[:5]))
    assert repr(again).endswith("int8 layers, the rest float32 on cpu)")


def test_an_encoding_error_crosses_processes():
    error = pickle.loads(pickle.dumps(EncodingError(3, "too long")))
    assert (type(error), str(error)) == (EncodingError, "sentences[3]: too long")
    assert (error.index, error.problem) == (3, "too long")


@pytest.mark.parametrize("name", ["modernbert", "nomic_bert", "deberta-v2", "longformer", "big_bird"])
def test_other_families(directory, tmp_path, name):
    """A folder that sentence-transformers has saved, with texts longer than the window."""
    from sentence_transformers import SentenceTransformer, models

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(tmp_path / "plain")
    rewrite(tmp_path / "plain" / "tokenizer_config.json", model_input_names=tokenizer.model_input_names)
    config = hf_config(name, vocab_size=len(tokenizer), initializer_range=0.3)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "plain")
    modules = [models.Transformer(str(tmp_path / "plain"), max_seq_length=64), models.Pooling(48, "mean")]
    theirs = SentenceTransformer(modules=modules, device="cpu")
    theirs.save(str(tmp_path / "saved"))
    texts = [*SENTENCES[:30], "", "a very long text " * 30]
    found = SentenceEncoder.from_pretrained(tmp_path / "saved", device="cpu").encode(texts)
    expected = theirs.encode(texts)
    assert np.abs(found - expected).max() < 1e-5
    alone = np.concatenate([theirs.encode([text]) for text in texts[-2:]])
    assert np.abs(found[-2:] - alone).max() < 1e-5
