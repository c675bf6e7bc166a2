"""A corpus of English text that every Python has, for tests of what an objective learns; and short trainings.

The text is the language reference's topics and the docstrings of the standard library: enough to see that
something is learnt, far too little to say how well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch

from bench.lib.texts import docstrings, split
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.documents import split_sentences
from fastbert.pretraining.objectives.masked import Losses, Objective
from fastbert.training.optimizers import decay_groups, optimizer
from fastbert.training.stream import Batch, Stream
from tests.support.numbered_text import tensors


def corpus_of_docstrings(tokenizer: Path, folder: Path) -> Corpus:
    """The corpus, written below `folder`. A topic is a document, and so are a hundred docstrings."""
    found = ["\n".join(split_sentences(" ".join(topics[name].split()))) for name in sorted(topics)]
    sentences = [sentence for text in docstrings() for sentence in split(text)]
    found += ["\n".join(sentences[i : i + 300]) for i in range(0, len(sentences), 300)]
    path = folder / "text.txt"
    path.write_text("\n\n".join(found))
    return Corpus.write([path], tokenizer, folder / "corpus")


def trained(
    objective: Objective, module: Losses, seed: int, steps: int = 300, sequences: int = 32, lr: float = 2e-3
) -> Iterator[tuple[Batch, dict[str, float], dict[str, float]]]:
    """Train; of each step its batch, its losses and what was counted.

    AdamW with a tenth of warm-up, then a linear fall, and a clipped norm of the gradients.
    """
    stream = Stream(objective, seed, sequences=sequences)
    made = optimizer("adamw", decay_groups(module, 0.01), lr)
    module.train()
    for step in range(steps):
        rise = steps // 10
        share = (step + 1) / rise if step < rise else (steps - step) / (steps - rise)
        for group in made.param_groups:
            group["lr"] = lr * share
        batch = stream.batch(step)
        torch.manual_seed(1000 * seed + step)
        losses, counted = module(tensors(batch.inputs), measure=True)
        sum(module.weights.get(name, 1.0) * loss for name, loss in losses.items()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        made.step()
        made.zero_grad()
        yield (
            batch,
            {name: loss.item() for name, loss in losses.items()},
            {name: number.item() for name, number in counted.items()},
        )


def unigram_loss(corpus: Corpus, labels: np.ndarray) -> float:
    """The mean -log of the labels' own shares in the corpus: what is known without reading the context."""
    counts = np.bincount(corpus.tokens(0, corpus.num_tokens), minlength=corpus.vocab_size)
    return float(-np.log(counts[labels] / corpus.num_tokens).mean())


def majority_loss(shares: np.ndarray) -> float:
    """The cross-entropy of always saying the classes' own shares, a vector that sums to 1."""
    some = shares[shares > 0]
    return float(-(some * np.log(some)).sum())
