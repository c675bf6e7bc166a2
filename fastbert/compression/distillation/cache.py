"""A teacher's outputs for all examples, computed once: a file of rows in the order of the data.

    DIR/outputs.safetensors     name (see `reading.py`) -> (examples, …) or (all tokens, …)

The file's metadata has what the outputs depend on. Outputs are exact: whole logits, whole hidden states. Of
the logits of words only the largest are there (`losses.likeliest`). All outputs are in memory while the file
is written, and mapped from it afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastbert.checkpoint.files import own_tag
from fastbert.compression.distillation.losses import likeliest
from fastbert.compression.distillation.objective import CACHED_WORDS
from fastbert.compression.distillation.reading import Read, read, word_product
from fastbert.ops.linear import linear
from fastbert.sentences.tokenizer import pack_batches

FILE, KEY = "outputs.safetensors", "fastbert"
BATCH_TOKENS = 8192
# Rows whose logits of words are in memory at a time
_ROWS = 1024


class Cached:
    """The outputs in a cache's directory, by the numbers of examples.

    Args:
        path: the file.
        starts: (examples + 1,) int64, the first token of each example.
    """

    def __init__(self, path: Path, starts: np.ndarray) -> None:
        self.path, self.starts = path, starts
        self.tensors = load_file(path)

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker maps the file itself
        return Cached, (self.path, self.starts)

    def rows(self, numbers: np.ndarray) -> dict[str, Tensor]:
        """name -> the rows of some examples, in this order."""
        return {name: t[_places(name, numbers, self.starts)] for name, t in self.tensors.items()}


def _of_examples(name: str) -> bool:
    """Whether a tensor has a row per example, not per token."""
    return name.partition(".")[0] in ("logits", "first", "vectors")


def _places(name: str, numbers: np.ndarray, starts: np.ndarray) -> Tensor:
    """The rows of some examples in a tensor of all."""
    if _of_examples(name):
        return torch.from_numpy(np.asarray(numbers))
    return torch.from_numpy(np.concatenate([np.arange(*starts[i : i + 2]) for i in numbers]))


def gathered(
    model: Any,
    source: Any,
    wanted: Collection[str],
    dtype: torch.dtype = torch.float32,
    words: tuple[int, float] | None = None,
) -> dict[str, Tensor]:
    """name -> the rows of all examples, in their order, on the CPU.

    Args:
        model: in eval mode.
        source: of the first epoch's examples; see `training.stream.Source`.
        wanted: names of `reading.py`.
        dtype: float32, or the dtype of autocast.
        words: (k, T): the k likeliest words of each token at temperature T besides; or None.
    """
    plan, device, starts = source.plan(0), model.device, starts_of(source)
    half = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    whole: dict[str, Tensor] = {}
    for group in pack_batches(np.asarray(plan.lengths), BATCH_TOKENS):
        # A row that is alone is multiplied by other kernels, with other roundings, than one among several
        numbers = np.repeat(group, 2) if len(group) == 1 else group
        batch = source.collate([source.example(plan, 0, int(number)) for number in numbers])
        with torch.no_grad(), half:
            made = read(model, batch.on(device), wanted)
            found = made.tensors if words is None else {**made.tensors, **_words(model, made, *words)}
        for name, t in found.items():
            rows = t[: len(t) // 2] if len(numbers) != len(group) else t
            if name not in whole:
                count = len(starts) - 1 if _of_examples(name) else int(starts[-1])
                whole[name] = rows.new_empty(count, *rows.shape[1:], device="cpu")
            whole[name][_places(name, group, starts)] = rows.cpu()
    return whole


def _words(model: Any, made: Read, count: int, temperature: float) -> dict[str, Tensor]:
    """The likeliest words of each token, and their scores."""
    assert made.encoded is not None
    x, weight, bias = word_product(model, made.encoded)
    parts = [likeliest(linear(part, weight, bias), count, temperature) for part in x.split(_ROWS)]
    words, scores = (torch.cat(each) for each in zip(*parts, strict=True))
    return dict(zip(CACHED_WORDS, (words.int(), scores), strict=True))


def starts_of(source: Any) -> np.ndarray:
    """(examples + 1,) int64, the first token of each example of the first epoch."""
    return np.concatenate([[0], np.cumsum(source.plan(0).lengths, dtype=np.int64)])


def write_cache(
    folder: Path,
    key: Mapping[str, Any],
    teacher: Any,
    source: Any,
    wanted: Collection[str],
    dtype: torch.dtype = torch.float32,
    words: tuple[int, float] | None = None,
) -> None:
    """Write the file of a teacher's outputs, unless it is there.

    Args:
        folder: the cache's directory.
        key: what the outputs depend on; JSON values.
        teacher, source, wanted, dtype, words: see `gathered`.

    Raises:
        ValueError: the directory has outputs that depend on something else, or lack a name.
    """
    path = folder / FILE
    if path.is_file():
        _check(path, key, {*wanted, *(CACHED_WORDS if words else ())})
        return
    folder.mkdir(parents=True, exist_ok=True)
    whole = gathered(teacher, source, wanted, dtype, words)
    new = folder / f"{own_tag()}.new"
    save_file(whole, new, {KEY: json.dumps(dict(key), sort_keys=True)})
    new.replace(path)


def _check(path: Path, key: Mapping[str, Any], wanted: Collection[str]) -> None:
    with safe_open(path, "pt") as file:
        stored, names = json.loads((file.metadata() or {}).get(KEY, "{}")), {*file.keys()}
    for name in sorted({*stored, *key}):
        if stored.get(name) != key.get(name):
            raise ValueError(
                f"cache: {path} was made with another {name}; expected the same, or another directory"
            )
    if missing := sorted({*wanted} - names):
        raise ValueError(f"cache: {path} has no {missing[0]}, which this recipe reads; use another directory")
