"""Objectives of pre-training under test: a corpus of numbers, tiny models, and 300 steps on real text."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from fastbert.models.config import EncoderConfig
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.documents import split_sentences
from fastbert.pretraining.objectives.masked import Losses, Objective
from fastbert.pretraining.vocabulary import train
from fastbert.training.stream import Batch, Stream

PAD, UNK, CLS, SEP, MASK = range(5)
FIRST = 100  # the first number; below it are special tokens and numbers that no text has


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    """Deleted when the process ends."""
    return tempfile.TemporaryDirectory()


@functools.cache
def numbered(documents: int = 12, sentences: int = 16) -> Corpus:
    """Sentences of 3 to 12 tokens. The ids are FIRST, FIRST + 1, … in the order of the text."""
    rng = np.random.default_rng(0)
    at, lines = itertools.count(FIRST), []
    for _ in range(documents):
        for _ in range(sentences):
            lines.append(" ".join(str(next(at)) for _ in range(rng.integers(3, 13))))
        lines.append("")
    size = next(at)
    vocab = {name: i for i, name in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))}
    vocab |= {str(i): i for i in range(5, size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = Path(_folder().name)
    text = folder / f"numbers-{documents}.txt"
    text.write_text("\n".join(lines))
    return Corpus.write([text], tokenizer, folder / f"numbers-{documents}")


def tiny(vocab_size: int, family: str = "bert", **values: Any) -> EncoderConfig:
    """Two layers without dropout."""
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    values = {**sizes, "max_position_embeddings": 130, **values}
    no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return EncoderConfig(family, vocab_size=vocab_size, **no_dropout, **values)


def built(objective: Objective, dtype: torch.dtype = torch.float64, seed: int = 0, **values: Any) -> Losses:
    """The losses of a new tiny model, weights at unit scale, so that every part matters."""
    torch.manual_seed(seed)
    losses = objective.losses(objective.model(tiny(objective.format.corpus.vocab_size, **values)))
    with torch.no_grad():
        for parameter in losses.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return losses.to(dtype)


def batch_of(objective: Objective, count: int = 4, epoch: int = 0, first: int = 0) -> Batch:
    """Examples of an epoch, one after the other."""
    plan = objective.plan(epoch)
    return objective.collate([objective.example(plan, epoch, first + i) for i in range(count)])


def tensors(batch: Batch) -> dict[str, Any]:
    """The inputs of a batch as tensors."""
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in batch.inputs.items()
    }


def logits_of(losses: Losses, inputs: dict[str, Any]) -> Tensor:
    """(rows, vocab_size), of all rows."""
    with torch.no_grad():
        return losses.model.lm_logits(losses.encode(inputs).hidden)


def pieces(batch: Batch) -> Iterator[slice]:
    """The rows of each sequence."""
    ends = batch.inputs["cu_seqlens"].tolist()
    return (slice(a, b) for a, b in itertools.pairwise(ends))


def gradients(module: torch.nn.Module) -> Tensor:
    """All gradients in one vector, in the order of the parameters' names; zeros where there is none."""
    named = sorted(module.named_parameters())
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for _, p in named])


# --- learning -----------------------------------------------------------------------------------------------


@functools.cache
def english() -> tuple[Corpus, Corpus]:
    """The language reference of Python: nine topics of ten to train on, and the others."""
    folder = Path(_folder().name)
    texts = [topics[name] for name in sorted(topics)]
    lines = [
        "\n".join(split_sentences("\n".join(" ".join(p.split()) for p in text.split("\n\n") if p.strip())))
        for text in texts
    ]
    parts = {"train": [t for i, t in enumerate(lines) if i % 10], "held": lines[::10]}
    for name, part in parts.items():
        (folder / f"{name}.txt").write_text("\n\n".join(part))
    tokenizer = train([folder / "train.txt"], folder / "tokenizer", vocab_size=1000)
    return tuple(Corpus.write([folder / f"{name}.txt"], tokenizer, folder / name) for name in parts)


class Labels:
    """Counts of the labels of each loss, and what they say of others."""

    def __init__(self) -> None:
        self.counts: dict[str, np.ndarray] = {}

    def add(self, batch: Batch, vocab_size: int) -> None:
        """Count a batch's."""
        for name, labels in self.of(batch).items():
            if name not in self.counts:
                self.counts[name] = np.zeros(vocab_size)
            self.counts[name] += np.bincount(labels, minlength=vocab_size)

    @staticmethod
    def of(batch: Batch) -> dict[str, np.ndarray]:
        """Loss -> labels."""
        keys = {"order": "order_labels", "sentence": "sentence_labels"}
        found = {name: batch.inputs[keys.get(name, "labels")] for name in batch.counts}
        return {name: labels[labels >= 0] for name, labels in found.items()}

    def loss(self, name: str, labels: np.ndarray) -> float:
        """Sum of -log p of labels, p their share of what was counted; one is added to every count."""
        known = self.counts[name] + (1 if name != "sentence" else 0)
        return float(-np.log(known[labels] / known.sum()).sum())


def train_steps(losses: Losses, objective: Objective, seed: int, steps: int = 300) -> Labels:
    """AdamW, a warm-up and a linear decay. Returns the labels that were trained on."""
    stream, labels = Stream(objective, seed, sequences=64), Labels()
    optimizer = torch.optim.AdamW(losses.parameters(), lr=6e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 30, 1 - s / (steps + 1)))
    losses.train()
    for step in range(steps):
        batch = stream.batch(step)
        labels.add(batch, objective.format.corpus.vocab_size)
        means, _ = losses(tensors(batch))
        loss = sum(losses.weights.get(name, 1.0) * mean for name, mean in means.items())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(losses.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return labels


def learned(objective: Objective, held: Objective, seed: int) -> dict[str, tuple[float, float]]:
    """Loss -> (of the model, of the shares of the labels alone), means over text that was held out."""
    torch.manual_seed(seed)
    config = tiny(objective.format.corpus.vocab_size, hidden_size=64, intermediate_size=128)
    losses = objective.losses(objective.model(config))
    known = train_steps(losses, objective, seed)
    losses.eval()
    ours: dict[str, float] = {}
    shares: dict[str, float] = {}
    counts: dict[str, int] = {}
    stream = Stream(held, 0, sequences=32)
    for number in range(12):
        batch = stream.batch(number)
        with torch.no_grad():
            means, _ = losses(tensors(batch))
        for name, labels in Labels.of(batch).items():
            assert len(labels) == batch.counts[name]
            ours[name] = ours.get(name, 0.0) + means[name].item() * len(labels)
            shares[name] = shares.get(name, 0.0) + known.loss(name, labels)
            counts[name] = counts.get(name, 0) + len(labels)
    return {name: (ours[name] / counts[name], shares[name] / counts[name]) for name in ours}
