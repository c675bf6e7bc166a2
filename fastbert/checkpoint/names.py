"""The keys of a module, and how files spell them. Only this file knows old and foreign spellings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastbert.checkpoint.files import CheckpointError
from fastbert.checkpoint.read import Stored
from fastbert.layers.integers import IntegerWeight
from fastbert.layers.quantized_files import from_stored, holds_group

# Wrappers that put their name before every key: DataParallel, torch.compile, a LightningModule's attribute
_WRAPPERS = ("module.", "_orig_mod.", "model.")
# First parts of keys that only a training needed: TinyBERT's maps from the student's width to the teacher's
_TRAINING_AIDS = ("fit_dense", "fit_denses")
# Buffers that old versions stored and that hold no weights
_OLD_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_OLD_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}


class Names:
    """The keys of one module, and how a file may spell them.

    Attributes:
        state: key -> parameter or buffer.
        tied: tied key -> the key of the parameter that it shares.
        roots: first parts of the encoder's own keys: "embeddings", "encoder", ….
        int8: key -> the module whose integers, scales or factors it is.
        wrappers: what `rename` took off the keys' fronts.
    """

    def __init__(self, model: Any):
        self.family: Any = model.config.family
        self.state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self.tied: dict[str, str] = {k: v for k, v in model.tied_weights().items() if k in self.state}
        self.is_base: bool = model.is_base_model
        self.prefix = "" if self.is_base else model.base_model_prefix + "."
        self.stored_prefix: str = model.base_model_prefix + "."
        self.encoder = [key for key in self.state if key.startswith(self.prefix)]
        self.roots = {key[len(self.prefix) :].split(".")[0] for key in self.encoder}
        self.pooler: str = (self.family.pooler or "pooler") + "."
        self.int8: dict[str, IntegerWeight] = {
            f"{name}.{leaf}": module
            for name, module in model.named_modules()
            if isinstance(module, IntegerWeight)
            for leaf, tensor in module._buffers.items()
            if leaf != "bias" and tensor is not None
        }
        self.wrappers: set[str] = set()

    def canonical(self, key: str) -> str:
        """The module's spelling of a stored key, without its wrappers."""
        for old, new in _OLD_SUFFIXES.items():
            if key.endswith(old):
                key = key[: -len(old)] + new
        inside = key.startswith(self.stored_prefix)
        while key.startswith(self.stored_prefix):
            key = key[len(self.stored_prefix) :]
        root = key.split(".")[0]
        poolers = {"pooler"} - self.family.head_roots
        if root in self.roots | poolers or (inside and root not in self.family.known_head_roots):
            return self.prefix + key
        return key

    def is_pooler(self, key: str) -> bool:
        """Whether a key, in our spelling, is the pooler's."""
        return key.startswith(self.prefix + self.pooler)

    def may_be_left_over(self, key: str) -> bool:
        """Whether an unexpected key, in our spelling, is part of a head that this module does not have."""
        return key.split(".")[0] in self.family.known_head_roots or self.is_pooler(key)

    def is_training_aid(self, key: str) -> bool:
        """Whether a key, in our spelling, is of a part that only a training needed."""
        return key.split(".")[0] in _TRAINING_AIDS

    def part(self, key: str) -> str | None:
        """The part of a key, if that part may be missing as a whole; else None."""
        if self.is_base:
            return None
        if key.startswith(self.prefix):
            return "pooler" if self.is_pooler(key) else None
        pair = self.family.next_sentence
        if pair and key.startswith(pair + "."):
            return "sentence-pair head"
        return key.split(".")[0] if self.family.shares_head else "head"


def rename(names: Names, stored: dict[str, Stored]) -> dict[str, Stored]:
    """The stored tensors under the module's own keys."""
    renamed: dict[str, Stored] = {}
    # The encoder itself may have the name of a wrapper
    wrappers = tuple(name for name in _WRAPPERS if name != names.stored_prefix)
    spellings = names.family.spellings
    for key, item in (found for entry in stored.items() for found in _respelt(spellings, *entry)):
        if key.endswith(_OLD_BUFFERS):
            continue
        bare = key
        while bare.startswith(wrappers):
            bare = bare.split(".", 1)[1]
        if bare != key:
            names.wrappers.add(key.removesuffix(bare))
        ours = names.canonical(bare)
        if ours in renamed:
            raise CheckpointError(f"{item}: the same parameter as {renamed[ours].key}, stored twice")
        renamed[ours] = item
    return renamed


def _respelt(spellings: dict[str, tuple[str, ...]], key: str, item: Stored) -> Iterator[tuple[str, Stored]]:
    """A stored tensor under our own spelling: one, or several parameters that are stored side by side."""
    found = [f".{key}"]
    for theirs, ours in spellings.items():
        if f".{theirs}." in found[0]:
            found = [each.replace(f".{theirs}.", f".{own}.", 1) for each in found for own in ours]
    if len(found) == 1:
        yield found[0][1:], item
        return
    rows = item.tensor.shape[0] if item.tensor.dim() else 0
    if rows % len(found):
        raise CheckpointError(f"{item}: expected a multiple of {len(found)} rows, got {rows}")
    for each, tensor in zip(found, item.tensor.split(rows // len(found)), strict=True):
        yield each[1:], item._replace(tensor=tensor)


def resolve_ties(names: Names, found: dict[str, Stored]) -> None:
    """Drop stored copies of tied weights; a copy replaces an original that is missing."""
    for target, source in names.tied.items():
        copy = found.pop(target, None)
        if copy is None:
            continue
        original = found.setdefault(source, copy)
        if not _same(copy.tensor, original.tensor):
            raise CheckpointError(
                f"{copy}: differs from {original.key}, to which config tie_word_embeddings = true ties it; "
                f"if the file is right, set tie_word_embeddings to false in config.json"
            )
    # Old versions tied the bias of an untied decoder too, and stored one of its two names
    lm_head = names.family.lm_head
    if lm_head.bias is not None:
        pair = lm_head.bias, lm_head.decoder + ".bias"
        for absent, there in (pair, pair[::-1]):
            if absent in names.state and absent not in names.tied and absent not in found and there in found:
                found[absent] = found[there]


def unpack(names: Names, found: dict[str, Stored]) -> None:
    """Put the integers of weights of 4 bits in the place of what the files hold; see `as_stored`."""
    for key, module in names.int8.items():
        owner, _, leaf = key.rpartition(".")
        group = found.get(f"{owner}.group")
        if leaf != "weight" or key not in found:
            continue
        if group is None and found[key].tensor.dtype == torch.uint8 and holds_group(module):
            raise CheckpointError(f"{found[key]}: 4 bits per weight, and {owner}.group is missing")
        if group is not None:
            try:
                weight = from_stored(module, found[key].tensor, group.tensor)
            except ValueError as error:
                raise CheckpointError(f"{group}: {error}") from None
            found[key] = found[key]._replace(tensor=weight)
            del found[f"{owner}.group"]


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit (NaN too)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def numbered(path: str, keys: Iterable[str]) -> int:
    """How many numbered entries `path` has among the keys."""
    pattern = re.compile(rf"(?:^|\.){re.escape(path)}\.(\d+)\.")
    return 1 + max((int(m[1]) for key in keys if (m := pattern.search(key))), default=-1)
