"""Objectives of pre-training under test: a corpus of numbers, and tiny models."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from fastbert import testing
from fastbert.models.config import EncoderConfig
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.objectives.masked import Objective
from fastbert.training.module import Losses
from fastbert.training.stream import Batch
from tests.support.hf_models import unit_scale

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
    return unit_scale(losses, 1.0).to(dtype)


def stock(losses: Losses, cls: type = transformers.BertForMaskedLM) -> torch.nn.Module:
    """Transformers' model with the weights of ours."""
    config = transformers.BertConfig(**losses.model.config.to_dict())
    hf = cls._from_config(config, attn_implementation="eager").to(losses.model.dtype)
    hf.load_state_dict(losses.model.state_dict(), strict=False)
    hf.tie_weights()
    return hf.eval()


def batch_of(objective: Objective, count: int | None = None) -> Batch:
    """The first `count` examples, or all of a plan that has `lengths`, as one micro-batch."""
    plan = objective.plan(0)
    count = len(plan.lengths) if count is None else count
    return objective.collate([objective.example(plan, 0, i) for i in range(count)])


def tensors(batch: Batch) -> dict[str, Any]:
    """The inputs of a batch as the loop passes them."""
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in batch.inputs.items()}


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


def assert_exact(found: dict, exact: dict) -> None:
    """Tuples of tensors by dtype: in float64 to rounding, in float32 by the error rule."""
    of64, of32, truth, eager = (each[d] for each in (found, exact) for d in (torch.float64, torch.float32))
    for ours64, ours32, true, theirs in zip(of64, of32, truth, eager, strict=True):
        torch.testing.assert_close(ours64, true, rtol=1e-10, atol=1e-12)
        reason = testing.compare(ours32, theirs, true, torch.float32, 1e-6)[-1]
        assert not reason, reason


def assert_as_stock(
    objective: Objective, batch: Batch, name: str, loss_of: Callable, cls: type = transformers.BertForMaskedLM
) -> None:
    """The only loss, its gradients and right predictions are those of transformers' model, by `loss_of`."""
    inputs, exact, found = tensors(batch), {}, {}
    for dtype in (torch.float64, torch.float32):
        losses = built(objective, torch.float32).to(dtype)
        hf = stock(losses, cls)
        means, correct = losses(inputs, True)
        expected = loss_of(hf)
        assert set(means) == {name}
        means[name].backward(), expected.backward()
        exact[dtype] = expected.detach(), gradients(hf)
        found[dtype] = means[name].detach(), gradients(losses.model)
        assert correct[name] == (logits_of(losses, inputs).argmax(-1) == inputs["labels"]).sum()
    assert {n for n, _ in losses.model.named_parameters()} == {n for n, _ in hf.named_parameters()}
    assert_exact(found, exact)


def assert_work(objective: Objective, batch: Batch, losses: str, rows: int, pairs: int) -> None:
    """Assert a step's work: three forwards of all rows, of the pairs that see each other, of predictions."""
    h, f, layers, vocabulary = 32, 64, 2, objective.format.corpus.vocab_size
    expected = layers * (2 * (4 * h * h + 2 * h * f) * rows + 4 * h * pairs)
    expected += 2 * sum(batch.counts[loss] for loss in losses.split()) * h * (h + vocabulary)
    assert built(objective).work(batch) == 3 * expected
