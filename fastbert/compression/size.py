"""What a model costs: parameters, bytes of its file, operations per token, and measured tokens per second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastbert.compression import shrink
from fastbert.compression.distillation.bilstm import BiLstmForSequenceClassification
from fastbert.layers import quantized_files
from fastbert.layers.modules import part
from fastbert.models.base import PreTrainedModel
from fastbert.models.heads.multiple_choice import BertForMultipleChoice


class Size(NamedTuple):
    """What a model costs.

    Attributes:
        parameters: the number of elements; tied ones count once.
        bytes: of all tensors, as a file stores them.
        flops: floating-point operations of all layers per token, in a text of `TOKENS` tokens.
    """

    parameters: int
    bytes: int
    flops: int


# Length of the texts of which operations are counted and speeds are measured
TOKENS = 128


def size_of(model: PreTrainedModel | BiLstmForSequenceClassification) -> Size:
    """The size of a model of this package."""
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}.values()
    of_lstm = isinstance(model, BiLstmForSequenceClassification)
    flops = model.operations() if of_lstm else 0
    for layer in () if of_lstm else model.base_model.layer_list():
        if not hasattr(layer, "form"):
            # XLNet's, whose products have no linear layers
            flops += 2 * sum(p.numel() for p in layer.parameters() if p.dim() > 1)
            flops += 4 * TOKENS * model.config.hidden_size
            continue
        form = layer.form
        for path in shrink.paths(form):
            linear = part(layer, path)
            flops += 2 * linear.in_features * linear.out_features
        reach = TOKENS if form.window is None else min(TOKENS, 1 + sum(form.window))
        flops += 4 * reach * form.nheads * form.head_dim
    size = sum(t.numel() * t.element_size() for t in tensors) - quantized_files.bytes_saved(model)
    return Size(model.num_parameters(), size, flops)


def tokens_per_second(
    models: Sequence[PreTrainedModel | BiLstmForSequenceClassification],
    *,
    sequences: int = 8,
    seconds: float = 2.0,
) -> list[float]:
    """Tokens per second of each model in inference, interleaved, on texts of `TOKENS` random tokens.

    If a model reads fewer tokens, all texts are as short.

    Args:
        models: models of this package on one device.
        sequences: the number of texts in a batch.
        seconds: how long to measure each model, at least; the result is the median of its calls.
    """
    device, draw = models[0].device, torch.Generator().manual_seed(0)
    vocabulary = min(model.config.vocab_size for model in models)
    length = min(TOKENS, *(model.config.max_tokens for model in models))
    # Of several choices one is enough
    shape = (sequences, *[1] * isinstance(models[0], BertForMultipleChoice), length)
    ids = torch.randint(vocabulary, shape, generator=draw).to(device)
    taken: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        for model in models:
            model(ids)
        while min(map(sum, taken)) < seconds:
            for model, times in zip(models, taken, strict=True):
                begin = time.perf_counter()
                model(ids)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - begin)
    return [ids.numel() / statistics.median(times) for times in taken]
