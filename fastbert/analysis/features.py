"""The hidden states of all layers for some tokens, from one forward; a file can hold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fastbert.analysis.walk import BATCH_TOKENS, Batch, at_rest, batches
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import Examples

Seen = Callable[[Batch, int, Tensor], None]


def hidden_states(
    model: PreTrainedModel,
    examples: Examples,
    rows: np.ndarray,
    *,
    dtype: torch.dtype = torch.bfloat16,
    path: str | Path | None = None,
    batch_tokens: int = BATCH_TOKENS,
    seen: Seen | None = None,
) -> Tensor:
    """The outputs of the embeddings and of every layer for some tokens, on the CPU.

    Args:
        model: an encoder, or a model with a head; it runs in eval mode.
        examples: the texts.
        rows: (tokens,) rows of the arrays of `examples`, each once, in ascending order.
        dtype: dtype of the result. bfloat16 takes 2 bytes per token, hidden unit and layer.
        path: path of a file that holds the result and is mapped into memory; None: in memory.
        batch_tokens: most tokens that run at a time.
        seen: called with (batch, layer, hidden states (total, hidden)) of every batch and layer.

    Returns:
        (layers + 1, tokens, hidden); index 0 is the embedding output.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    rows = np.asarray(rows, np.int64)
    if len(rows) and (rows[0] < 0 or rows[-1] >= len(examples.ids) or (np.diff(rows) <= 0).any()):
        raise ValueError(
            f"rows: expected ascending numbers from 0 to {len(examples.ids) - 1}, each at most once"
        )
    shape = len(model.base_model.layer_list()) + 1, len(rows), model.config.hidden_size
    if path is None:
        found = torch.empty(shape, dtype=dtype)
    else:
        size = int(np.prod(shape))
        found = torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
    with at_rest(model), torch.inference_mode():
        for batch in batches(model, examples, batch_tokens):
            into = np.searchsorted(rows, batch.rows)
            wanted = (
                np.flatnonzero(rows[np.minimum(into, len(rows) - 1)] == batch.rows) if len(rows) else into[:0]
            )
            source = torch.from_numpy(wanted).to(batch.sequence.device)
            target = torch.from_numpy(into[wanted])
            states = model.base_model.encode_inputs(batch.inputs, None, False, True, False)[1]
            batch.check(states[-1])
            for layer, hidden in enumerate(states):
                found[layer, target] = hidden[source].to(dtype).cpu()
                if seen is not None:
                    seen(batch, layer, hidden)
    return found


def with_random_weights(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """An encoder like the model's with fresh weights, on its device: a baseline without training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(model.base_model)(model.config)
    return fresh.to(device=model.device, dtype=model.dtype).eval()
