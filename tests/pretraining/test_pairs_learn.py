"""Masked tokens and pairs of sentences are learnt: BERT's next one, ALBERT's order, StructBERT's classes.

A tiny model learns the class of a pair late and suddenly. What it took, with two layers of width 128 and
AdamW: batches of 32 pairs of 64 tokens, and a learning rate of 1e-3. The loss of the next sentence leaves
that of the majority after about 100 steps. The order of sentences needs a text in which it matters: where a
document is one docstring it is learnt from step 120 on, by its first sentence, which says what a function
does; on chunks of a long document nothing is learnt in 300 steps, at 32 or at 64 tokens. So of StructBERT's
three classes (next, previous, another document) it learns in 300 steps whether the document is another.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.lib.texts import docstrings, split
from fastbert.models.config import EncoderConfig
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.formats import SegmentPairs
from fastbert.pretraining.masking import IGNORED, Masking
from fastbert.pretraining.objectives.masked import Objective
from fastbert.pretraining.objectives.word_order import WordOrder
from tests.support import learning_text

LENGTH, WIDTH = 64, 128


def corpus_of(relation: str, tokenizer, folder) -> Corpus:
    """Topics and hundreds of docstrings together; for the order of sentences, a docstring per document."""
    if relation != "order":
        return learning_text.corpus_of_docstrings(tokenizer, folder)
    texts = [sentences for text in docstrings() if len(sentences := split(text)) > 1]
    (folder / "text.txt").write_text("\n\n".join("\n".join(sentences) for sentences in texts))
    return Corpus.write([folder / "text.txt"], tokenizer, folder / "corpus")


@pytest.mark.sweep
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("family", "relation"), [("bert", "next"), ("albert", "order"), ("bert", "three")])
def test_pairs_of_sentences_are_learnt(family, relation, seed, tokenizer_dir, tmp_path):
    """300 steps: both losses are below those of what is known without reading the text."""
    corpus = corpus_of(relation, tokenizer_dir, tmp_path)
    masking = Masking(max_predictions=20) if family == "bert" else Masking("ngram")
    kind = WordOrder if relation == "three" else Objective
    objective = kind(SegmentPairs(corpus, LENGTH, seed, relation, short_share=0.0), masking, seed)
    own = {"embedding_size": WIDTH, "classifier_dropout_prob": 0.0} if family == "albert" else {}
    torch.manual_seed(seed)
    config = EncoderConfig(
        family,
        vocab_size=corpus.vocab_size,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **own,
    )
    module = objective.losses(objective.model(config))
    rows = list(learning_text.trained(objective, module, seed, sequences=32, lr=1e-3))[-50:]
    classes = np.concatenate([batch.inputs["sentence_labels"] for batch, _, _ in rows])
    labels = np.concatenate([batch.inputs["labels"] for batch, _, _ in rows])
    shares = np.bincount(classes) / len(classes)
    majority = learning_text.majority_loss(shares)
    unigram = learning_text.unigram_loss(corpus, labels[labels != IGNORED])
    sentence, mlm = (np.mean([losses[name] for _, losses, _ in rows]) for name in ("sentence", "mlm"))
    right = sum(counted["sentence"] for _, _, counted in rows) / len(classes)
    print(f"sentence {sentence:.4f} of {majority:.4f}, right {right:.3f}, mlm {mlm:.3f} of {unigram:.3f}")
    assert sentence < 0.95 * majority
    assert right > shares.max() + 0.03
    assert mlm < unigram - 0.1
