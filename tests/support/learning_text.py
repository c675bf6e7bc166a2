"""A corpus of English text that every Python has, for tests of what an objective learns; and short trainings.

The text is the language reference's topics and the docstrings of the standard library: enough to see that
something is learnt, far too little to say how well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch

from bench.lib.texts import docstrings, split
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.documents import split_sentences
from fastbert.pretraining.objectives.masked import Losses, Objective
from fastbert.training.optimizers import decay_groups, optimizer
from fastbert.training.stream import Batch, Stream
from tests.support.numbered_text import tensors


def corpus_of_docstrings(tokenizer: Path, folder: Path, short: bool = False) -> Corpus:
    """The corpus, written below `folder`. A topic is a document, and so are a hundred docstrings.

    Args:
        short: whether a document is one docstring.
    """
    found = [sentences for text in docstrings() if len(sentences := split(text)) > 1]
    if not short:
        sentences = [sentence for text in docstrings() for sentence in split(text)]
        found = [split_sentences(" ".join(topics[name].split())) for name in sorted(topics)]
        found += [sentences[i : i + 300] for i in range(0, len(sentences), 300)]
    path = folder / "text.txt"
    path.write_text("\n\n".join("\n".join(document) for document in found))
    return Corpus.write([path], tokenizer, folder / "corpus")


def trained(
    objective: Objective, module: Losses, lr: float, steps: int = 300
) -> Iterator[tuple[Batch, dict[str, float], dict[str, float]]]:
    """Train on batches of 32; of each step its batch, its losses and what was counted.

    AdamW with a tenth of warm-up, then a linear fall, and a clipped norm of the gradients.
    """
    stream = Stream(objective, 0, sequences=32)
    made = optimizer("adamw", decay_groups(module, 0.01), lr)
    module.train()
    for step in range(steps):
        rise = steps // 10
        share = (step + 1) / rise if step < rise else (steps - step) / (steps - rise)
        for group in made.param_groups:
            group["lr"] = lr * share
        batch = stream.batch(step)
        torch.manual_seed(step)
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
