"""Vocabularies without unused word pieces: the same pieces for the corpus, and the same function."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, processors

from fastbert.compression import shrink, vocabulary
from tests.analysis.conftest import make_tokenizer
from tests.support.model_pairs import build

CORPUS = ["the cat sat on the mats .", "a dog rained"]
OTHERS = ["the cats sat on a dog ! it rained , not a big cat"]


def pieces(tokenizer, text):
    return tokenizer.encode(text).tokens


def test_the_corpus_keeps_its_pieces():
    whole = make_tokenizer()
    ids = vocabulary.used_ids(whole, iter(CORPUS))
    small = vocabulary.without(whole, ids)
    for text in CORPUS:
        assert pieces(small, text) == pieces(whole, text)
        assert [ids[i] for i in small.encode(text).ids] == whole.encode(text).ids
    kept = small.get_vocab()
    # Special tokens and single characters stay, other pieces that are not used go
    assert {"[UNK]", "[CLS]", "[SEP]", "a", ".", ",", "!", "##s", "##ed"} <= kept.keys()
    assert not {"tree", "house", "never"} & kept.keys()
    assert sorted(kept.values()) == list(range(len(ids)))
    assert pieces(small, "a tree")[2] == "[UNK]"


@pytest.mark.parametrize("texts", [0, 1, 1024, 1025])
def test_long_corpora_are_cut_in_parts(texts):
    found = vocabulary.used_ids(make_tokenizer(), ["the mat"] * texts + ["never"])
    words = {make_tokenizer().id_to_token(i) for i in found}
    assert "never" in words
    assert ("mat" in words) == (texts > 0)


def test_processors_have_the_new_ids():
    vocab = {word: i for i, word in enumerate(["x", "[UNK]", "cat", "[CLS]", "dog", "[SEP]"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    for processor in (
        processors.BertProcessing(("[SEP]", 5), ("[CLS]", 3)),
        processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 3), ("[SEP]", 5)]),
    ):
        tokenizer.post_processor = processors.Sequence([processor])
        small = vocabulary.without(tokenizer, vocabulary.used_ids(tokenizer, ["dog"]))
        assert small.get_vocab() == {"x": 0, "[UNK]": 1, "[CLS]": 2, "dog": 3, "[SEP]": 4}
        found = small.encode("dog")
        assert (found.tokens, found.ids) == (["[CLS]", "dog", "[SEP]"], [2, 3, 4])


def test_padding_has_the_new_id():
    vocab = {word: i for i, word in enumerate(["x", "[UNK]", "cat", "[PAD]", "dog"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.enable_padding(pad_id=3, pad_token="[PAD]", length=3)
    small = vocabulary.without(tokenizer, vocabulary.used_ids(tokenizer, ["dog"]))
    assert small.encode("dog").ids == [3, 2, 2]
    assert small.encode("dog").tokens == ["dog", "[PAD]", "[PAD]"]


@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("name", ["bert", "electra", "roberta", "modernbert"])
@torch.no_grad()
def test_the_model_computes_the_same(name, task, tmp_path):
    ours = build(name, task)[1].double()
    ids = [0, 1, 2, 3, 4, *range(20, 60, 3)]
    small = shrink.without(ours, vocabulary=ids)
    given = torch.from_numpy(np.random.default_rng(0).integers(0, len(ids), (2, 9)))
    expected = ours(input_ids=torch.tensor(ids)[given]).logits
    found = small(input_ids=given).logits
    torch.testing.assert_close(
        found, expected[..., ids] if task == "ForMaskedLM" else expected, rtol=1e-12, atol=1e-12
    )
    assert small.config.vocab_size == len(ids)
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path, dtype="auto").eval()
    assert torch.equal(again(input_ids=given).logits, found)
    if task == "ForMaskedLM":
        assert small.get_output_embeddings().weight is small.get_input_embeddings().weight


def test_ids_of_the_config_are_renumbered():
    ours = build("bert", "ForMaskedLM", pad_token_id=7, sep_token_id=9)[1]
    config = shrink.without(ours, vocabulary=[2, 7, 8, 9]).config
    assert (config.pad_token_id, config.sep_token_id) == (1, 3)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"vocabulary: expected ascending ids below 120, got \[\]"),
        ([0, 2, 1], "vocabulary: expected ascending ids below 120"),
        ([0, 120], "vocabulary: expected ascending ids below 120"),
        ([0, 1.0], "vocabulary: expected ascending ids below 120"),
        ([1, 2], "vocabulary: expected config pad_token_id 0 among the ids"),
    ],
)
def test_bad_ids(ids, message):
    with pytest.raises(ValueError, match=message):
        shrink.without(build("bert", "ForMaskedLM")[1], vocabulary=ids)


def test_other_tokenizers():
    with pytest.raises(ValueError, match="tokenizer: expected WordPiece, got BPE, whose pieces are made of"):
        vocabulary.used_ids(Tokenizer(models.BPE()), [])
    content = json.loads(make_tokenizer().to_str())
    unknown = content["model"]["vocab"]["[UNK]"]
    ids = [i for i in sorted(content["model"]["vocab"].values()) if i != unknown]
    with pytest.raises(ValueError, match=r"ids: expected that of the special token '.UNK.' among them"):
        vocabulary.without(make_tokenizer(), ids)
