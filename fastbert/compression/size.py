"""What a model costs: parameters, bytes of its file, operations per token, and measured tokens per second."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fastbert.compression import shrink
from fastbert.compression.distillation.bilstm import BiLstmForSequenceClassification
from fastbert.layers import quantized_files
from fastbert.layers.elimination import count
from fastbert.layers.modules import part
from fastbert.models.base import PreTrainedModel
from fastbert.models.heads.multiple_choice import BertForMultipleChoice


class Size(NamedTuple):
    """What a model costs.

    Attributes:
        parameters: the number of elements; tied ones count once.
        bytes: of all tensors, as a file stores them.
        flops: floating-point operations of all layers per token, in a text of `TOKENS` tokens. Tokens that
            leave (config `token_schedule`) cost nothing where they are not computed.
    """

    parameters: int
    bytes: int
    flops: int


# Length of the texts of which operations are counted and speeds are measured
TOKENS = 128


def size_of(model: PreTrainedModel | BiLstmForSequenceClassification) -> Size:
    """The size of a model of this package."""
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values()}.values()
    if isinstance(model, BiLstmForSequenceClassification):
        flops = model.operations()
    else:
        flops = round(flops_of(model, [TOKENS], model.config.token_schedule) / TOKENS)
    size = sum(t.numel() * t.element_size() for t in tensors) - quantized_files.bytes_saved(model)
    return Size(model.num_parameters(), size, flops)


def flops_of(model: PreTrainedModel, lengths: Iterable[int], schedule: Sequence[float] | None) -> int:
    """Floating-point operations of all layers on texts.

    A layer that drops tokens also adds up what each token receives, which costs half of what attention does.
    All that follows attention computes the kept tokens alone.

    Args:
        model: a model of this package.
        lengths: the tokens of each text.
        schedule: see `fastbert.eliminate`; None: all tokens stay.
    """
    # Per layer: operations per token before and after tokens leave, those per pair, and the window
    layers: list[tuple[int, int, int, int | None]] = []
    for layer in model.base_model.layer_list():
        if not hasattr(layer, "form"):
            # XLNet's, whose products have no linear layers
            weights = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
            layers.append((2 * weights, 0, 4 * model.config.hidden_size, None))
            continue
        form, names, before, after = layer.form, layer.form.names, 0, 0
        for path in shrink.paths(form):
            linear = part(layer, path)
            size = 2 * linear.in_features * linear.out_features
            if path in (names.query, names.key, names.value):
                before += size
            else:
                after += size
        window = None if form.window is None else 1 + sum(form.window)
        layers.append((before, after, 4 * form.nheads * form.head_dim, window))
    total = 0
    for length, texts in Counter(lengths).items():
        n = int(length)
        for number, (first, rest, pair, window) in enumerate(layers):
            kept = n if schedule is None else count(schedule[number], int(length))
            reach = n if window is None else min(n, window)
            total += texts * n * (first + reach * pair) + texts * kept * rest
            total += texts * n * reach * pair // 2 if kept < n else 0
            n = kept
    return total


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
