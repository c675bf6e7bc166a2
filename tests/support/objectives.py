"""Objectives of pre-training under test: a corpus of numbers, tiny models, and 300 steps on real text."""

from __future__ import annotations

import functools
import itertools
import math
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


def train_steps(losses: Losses, objective: Objective, seed: int, steps: int = 300) -> None:
    """AdamW with a warm-up and a linear decay, batches of 32 sequences."""
    stream = Stream(objective, seed, sequences=32)
    optimizer = torch.optim.AdamW(losses.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 30, 1 - s / (steps + 1)))
    losses.train()
    for step in range(steps):
        means, _ = losses(tensors(stream.batch(step)))
        loss = sum(losses.weights.get(name, 1.0) * mean for name, mean in means.items())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(losses.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def learned(objective: Objective, held: Objective, seed: int) -> dict[str, tuple[float, float]]:
    """Loss -> (mean on text that was held out, the least that a guess without the text can have there)."""
    torch.manual_seed(seed)
    config = tiny(objective.format.corpus.vocab_size, hidden_size=64, intermediate_size=128)
    losses = objective.losses(objective.model(config))
    train_steps(losses, objective, seed)
    losses.eval()
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    labels: dict[str, list[np.ndarray]] = {}
    stream = Stream(held, 0, sequences=32)
    for number in range(8):
        batch = stream.batch(number)
        with torch.no_grad():
            means, _ = losses(tensors(batch))
        for name, mean in means.items():
            sums[name] = sums.get(name, 0.0) + mean.item() * batch.counts[name]
            counts[name] = counts.get(name, 0) + batch.counts[name]
            key = {"order": "order_labels", "sentence": "sentence_labels"}.get(name, "labels")
            labels.setdefault(name, []).append(batch.inputs[key])
    found = {}
    for name, total in sums.items():
        joined = np.concatenate(labels[name])
        _, shares = np.unique(joined[joined >= 0], return_counts=True)
        entropy = math.log(shares.sum()) - float((shares * np.log(shares)).sum() / shares.sum())
        assert shares.sum() == counts[name]
        found[name] = total / counts[name], entropy
    return found
