"""What a batch of distillation counts, and the rows of a cache."""

from __future__ import annotations

import pickle

import numpy as np
import torch

import fastbert
from fastbert.compression.distillation import cache
from fastbert.compression.distillation.data import Taught
from fastbert.compression.distillation.reading import read
from fastbert.compression.distillation.recipes import READS
from fastbert.finetuning.encoded import Source, joined
from fastbert.sentences.tokenizer import load_tokenizer
from tests.support.rule_tasks import SIZES, WORDS, tiny_model


def test_batches_count_what_losses_are_means_of(tmp_path):
    words = load_tokenizer(tiny_model(tmp_path / "model"))
    encoded = [words.encode(text) for text in ("the cat", "a dog sees the hen", "red")]
    source = Source(joined(encoded, {"labels": np.array([0, -100, 2])}), False)
    found = Taught(source, tuple(name for name in READS if name != "mlm")).collate([(2, 2), (0, 0), (1, 1)])
    lengths = [3, 4, 7]
    assert found.lengths.tolist() == lengths
    of_tokens = ("cosine", "embeddings", "hidden", "attention", "queries", "keys", "values")
    assert found.counts == {
        "task": 2,
        **dict.fromkeys(("kd", "logits", "patient", "vectors", "angles"), 3),
        **dict.fromkeys(of_tokens, sum(lengths)),
        "scores": sum(n * n for n in lengths),
    }
    alone = Taught(source, ("task",)).collate([(1, 1)])
    assert (alone.counts, alone.inputs["labels"].tolist()) == ({"task": 0}, [-100])


def test_cached_rows_are_those_of_their_examples(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "BATCH_TOKENS", 12)
    words = load_tokenizer(tiny_model(tmp_path / "model"))
    draw, texts = np.random.default_rng(0), []
    for length in (3, 8, 1, 5, 2, 4):
        texts.append(" ".join(draw.choice(WORDS[5:], length)))
    source = Source(joined([words.encode(text) for text in texts], {}), True)
    teacher = fastbert.BertForSequenceClassification(fastbert.EncoderConfig(**SIZES)).eval()
    names = ("logits", "states.1", "first.2", "queries.2", "values.1")
    cache.write_cache(tmp_path, {"key": 1}, teacher, source, names)
    starts = np.concatenate([[0], np.cumsum(source.lengths)])
    stored = pickle.loads(pickle.dumps(cache.Cached(tmp_path / cache.FILE, starts)))
    for numbers in ([4, 0, 1], [5], [2, 3]):
        inputs = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in source.collate(numbers).inputs.items()
        }
        with torch.no_grad():
            expected = read(teacher, inputs, names).tensors
        found = stored.rows(np.array(numbers))
        assert found.keys() == expected.keys() == {*names}
        for name, t in expected.items():
            torch.testing.assert_close(found[name], t)
