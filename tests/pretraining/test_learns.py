"""Every objective learns: after 300 steps each loss is below the entropy of its own labels.

The entropy is what the labels' shares alone tell, without reading the text. A tiny model learns the class of
a pair late and suddenly, with two layers of width 128 and a learning rate of 1e-3. The order of sentences
needs a text in which it matters: where a document is one docstring it is learnt by its first sentence, which
says what a function does; on chunks of a long document nothing is learnt in 300 steps. So of StructBERT's
three classes (next, previous, another document) it learns whether the document is another.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fastbert.models.config import EncoderConfig
from fastbert.pretraining.formats import DocSentences, FullSentences, SegmentPairs
from fastbert.pretraining.masking import Masking
from fastbert.pretraining.objectives.entities import Staged
from fastbert.pretraining.objectives.left_to_right import LeftToRight
from fastbert.pretraining.objectives.masked import Objective
from fastbert.pretraining.objectives.permutation import Permutation
from fastbert.pretraining.objectives.replaced_tokens import ReplacedTokens
from fastbert.pretraining.objectives.span_boundary import SpanBoundary
from fastbert.pretraining.objectives.word_order import WordOrder
from tests.support import learning_text

LENGTH = 64
STAGES = (("token", 0), ("word", 1), ("ngram", 2))


def pairs(corpus, relation):
    return SegmentPairs(corpus, LENGTH, 0, relation, short_share=0.0)


# name -> the objective of a corpus, and by how much the loss of each of its labels is below their entropy
CASES = {
    "next": (
        lambda corpus: Objective(pairs(corpus, "next"), Masking(max_predictions=20)),
        {"mlm": 0.1, "sentence": 0.035},
    ),
    "order": (
        lambda corpus: Objective(pairs(corpus, "order"), Masking("ngram")),
        {"mlm": 0.1, "sentence": 0.035},
    ),
    "three": (
        lambda corpus: WordOrder(pairs(corpus, "three"), Masking(max_predictions=20)),
        {"mlm": 0.3, "order": 1.0, "sentence": 0.05},
    ),
    "stages": (lambda corpus: Staged(DocSentences(corpus, LENGTH, 0), stages=STAGES), {"mlm": 0.1}),
    "left-to-right": (
        lambda corpus: LeftToRight(DocSentences(corpus, LENGTH, 0)),
        {"left_to_right": 1.0},
    ),
    "permutation": (lambda corpus: Permutation(DocSentences(corpus, LENGTH, 0)), {"permutation": 0.1}),
    "spans": (lambda corpus: SpanBoundary(FullSentences(corpus, LENGTH, 0)), {"mlm": 0.1, "sbo": 0.1}),
    "replaced": (
        lambda corpus: ReplacedTokens(FullSentences(corpus, LENGTH, 0)),
        {"mlm": 0.1, "rtd": 0.0042},
    ),
}


def labels_of(name: str, rows: list) -> np.ndarray:
    """The labels of a loss in some steps."""
    if name == "rtd":  # which are drawn
        ones = int(sum(counted["replaced"] for _, _, counted in rows))
        return np.arange(sum(batch.counts["rtd"] for batch, _, _ in rows)) < ones
    keys = {"order": "order_labels", "sentence": "sentence_labels", "sbo": "boundary_labels"}
    found = np.concatenate([batch.inputs[keys.get(name, "labels")] for batch, _, _ in rows])
    return found[found >= 0]


@pytest.fixture(scope="module")
def corpus_of(tokenizer_dir, tmp_path_factory):
    """Whether a document is one docstring -> the text."""

    @functools.cache
    def corpus(short):
        return learning_text.corpus_of_docstrings(tokenizer_dir, tmp_path_factory.mktemp("text"), short)

    return corpus


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_an_objective_learns(name, corpus_of):
    make, margins = CASES[name]
    corpus = corpus_of(name == "order")
    wide = "sentence" in margins
    family = {"order": "albert", "replaced": "electra"}.get(name, "bert")
    values = {"albert": {"classifier_dropout_prob": 0.0}}.get(family, {})
    width = 128 if wide else 64
    torch.manual_seed(0)
    config = EncoderConfig(
        family,
        vocab_size=corpus.vocab_size,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **(values if family == "bert" else {"embedding_size": width, **values}),
    )
    objective = make(corpus)
    module = objective.losses(objective.model(config))
    rows = list(learning_text.trained(objective, module, lr=1e-3 if wide else 2e-3))[-50:]
    assert rows[0][1].keys() == margins.keys()
    for loss, margin in margins.items():
        shares = np.unique(labels_of(loss, rows), return_counts=True)[1] / len(labels_of(loss, rows))
        entropy = -(shares * np.log(shares)).sum()
        found = np.mean([losses[loss] for _, losses, _ in rows])
        print(f"{name}: {loss} {found:.4f}, entropy {entropy:.4f}")
        assert found < entropy - margin, loss
