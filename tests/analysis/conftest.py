"""Texts and a tokenizer."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from fastbert.analysis.treebank import read_conllu
from fastbert.tasks.examples import tokenized
from tests.support.treebank import conllu

VOCAB = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat and dog ran to tree in big red house while it rain "
    "##ed ##s , . ! ? not never no"
)
TEXTS = [
    "the cat sat on the mat .",
    "a big dog ran to a tree , and it rained !",
    "it rained",
    "the dogs sat in the red house while the cat ran .",
    "cats , dogs and trees .",
]
PAIRS = ["a dog ran .", "it sat on a tree .", "the red mat", "big cats ran to the house !", "it"]


@functools.cache
def make_tokenizer() -> Tokenizer:
    vocab = {word: i for i, word in enumerate(VOCAB.split())}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture
def texts():
    return tokenized(make_tokenizer(), TEXTS)


@pytest.fixture
def pairs():
    return tokenized(make_tokenizer(), TEXTS, PAIRS)


@pytest.fixture
def labelled(pairs):
    """With a class each."""
    return replace(pairs, labels=np.array([0, 2, 1, 1, 0]))


@pytest.fixture
def sentences(tmp_path):
    """Trees."""
    (tmp_path / "trees.conllu").write_text(conllu())
    return read_conllu(tmp_path / "trees.conllu")


def part(examples, name, number):
    """The numbers of one example."""
    return getattr(examples, name)[examples.starts[number] : examples.starts[number + 1]].tolist()
