"""Weights of files -> a module.

Loading has four steps, and only the last one changes the module:
    read    model.safetensors, pytorch_model.bin or shards of either -> {key as stored: tensor}, memory-mapped
    names   old and foreign spellings -> the module's own key
    check   missing, unexpected, shape, dtype, finite: refused with file, key and cause
    load    values are copied into the parameters, cast to their dtype

`hub.py` finds a checkpoint, and `save.py` writes one.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.checkpoint.check import FLOATS, check_keys, check_mathematics, check_shapes, check_value
from fastbert.checkpoint.files import CONFIG, CheckpointError, listed
from fastbert.checkpoint.names import Names, numbered, rename, resolve_ties, unpack
from fastbert.checkpoint.read import Stored, weights_of
from fastbert.layers import float8, quantizing

logger = logging.getLogger(__name__)

# Up to this many layers take no time on the meta device
_FEW_LAYERS = 100


@dataclass
class LoadReport:
    """What `load_weights` found.

    Attributes:
        files: the files read.
        missing: the module's keys that no file holds (of a fresh head); empty for a complete checkpoint.
        unused: stored keys that the module lacks, which are those of other heads, training aids and, without
            `strict`, unknown keys.
        mismatched: (key, shape in the file, shape in the module) of the weights that were not loaded because
            their shapes differ; the module's are fresh.
    """

    files: list[Path]
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)


def load_weights(
    model: Any,
    directory: str | os.PathLike[str] | None,
    *,
    ignore_mismatched_sizes: bool = False,
    use_safetensors: bool | None = None,
    state_dict: dict[str, Tensor] | None = None,
    strict: bool = True,
) -> LoadReport:
    """Load a checkpoint's weights into a model, cast to the dtypes of its parameters.

    Parameters on the meta device are replaced by parameters on the CPU, others are written in place. Nothing
    is changed if anything is refused. A head (or its pooler) of which the files hold no key is initialised,
    with one warning.

    Args:
        model: a model of this package; its `config`, `base_model_prefix`, `is_base_model` and
            `tied_weights()` are read.
        directory: holds model.safetensors, pytorch_model.bin or shards of either with their index; None if
            `state_dict` is given.
        ignore_mismatched_sizes: True initialises a weight whose shape differs from the file's, with one
            warning that names it; False refuses it.
        use_safetensors: True reads only safetensors, False only .bin, None safetensors or else .bin.
        state_dict: tensors to load; no file is read then.
        strict: False leaves out keys that are not known, with one warning; True refuses them.

    Returns:
        LoadReport: files read, fresh keys, keys left over.

    Raises:
        CheckpointError: naming file, key and cause.
    """
    if not isinstance(strict, bool):
        raise TypeError(f"strict: expected True or False, got {strict!r}")
    config = model.config
    foreign = config.get("quantization_config")
    if foreign and not quantizing.in_config(config) and not float8.in_config(config):
        method = foreign.get("quant_method", foreign.get("format")) if isinstance(foreign, dict) else foreign
        raise CheckpointError(
            f"{Path(directory or '') / CONFIG}: quantization_config: expected none, or weights of this "
            f"package's quantize(), got {method!r}; load the floating-point checkpoint and quantise that"
        )
    names = Names(model)
    files, stored = weights_of(directory, use_safetensors, state_dict)
    where = files[0].parent if state_dict is None else files[0]
    found = rename(names, stored)
    resolve_ties(names, found)
    unpack(names, found)
    fresh, unused, left_out = check_keys(names, config, files, found, strict)
    report = LoadReport(files, fresh, unused)
    report.mismatched = check_shapes(names, config, found, ignore_mismatched_sizes)
    if state_dict is None:
        check_mathematics(config, files)
    for key in names.state:
        if key in found:
            check_value(names, key, found[key])

    _assign(model, names, found, fresh={*report.missing, *(key for key, _, _ in report.mismatched)})
    problems = []
    if report.missing:
        problems.append(f"has no weights for {listed(report.missing)}")
    if report.mismatched:
        shapes = (f"{key} {stored}, here {own}" for key, stored, own in report.mismatched)
        problems.append(f"has weights of other shapes, left out: {listed(shapes)}")
    if problems:
        problems[-1] += ": freshly initialised, train them before use"
    problems += [f"left out, {reason}: {listed(keys)}" for reason, keys in left_out.items() if keys]
    if names.wrappers:
        problems.append(f"read the keys without {listed(sorted(names.wrappers))}, which a wrapper put there")
    if problems:
        warnings.warn(f"{where}: {'; '.join(problems)}", UserWarning, stacklevel=3)
    if report.unused:
        logger.info("%s: left over, not in this model: %s", where, listed(report.unused))
    if state_dict is not None:
        report.files = []
    return report


def check_depth(
    config: Any,
    directory: str | os.PathLike[str] | None,
    *,
    use_safetensors: bool | None = None,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Refuse a config with far more layers than the weights have, before anything is built for them.

    Args:
        config: the EncoderConfig.
        directory, use_safetensors, state_dict: as in `load_weights`; `directory` may be None if `state_dict`
            is given.

    Raises:
        CheckpointError: naming the config key, or what is wrong with the files.
        TypeError: `state_dict` is no dictionary of tensors.
    """
    family = config.family
    keys = ["num_hidden_groups", "inner_group_num"] if family.shared_layers else ["num_hidden_layers"]
    layers = math.prod(getattr(config, key) for key in keys)
    if config.layer_groups is not None:
        keys, layers = ["layer_groups"], len({*config.layer_groups})
    if layers <= _FEW_LAYERS:
        return
    files, stored = weights_of(directory, use_safetensors, state_dict)
    theirs = [path for path, ours in family.spellings.items() if ours == (family.layers,)]
    holds = max(numbered(path, stored) for path in (family.layers, *theirs))
    if family.shared_layers:
        holds *= numbered(family.group_layers, stored)
    if layers > holds:
        says = " * ".join(family.spelt(key) for key in keys)
        raise CheckpointError(f"{files[0]}: config {says} says {layers}, the file has {holds}")


def has_pooler(
    config: Any,
    directory: str | os.PathLike[str] | None,
    *,
    use_safetensors: bool | None = None,
    state_dict: dict[str, Tensor] | None = None,
) -> bool:
    """Whether the weights have a pooler, or a part of one; arguments and errors as `check_depth`."""
    _, stored = weights_of(directory, use_safetensors, state_dict)
    return any(f".{config.family.pooler}." in f".{key}" for key in stored)


def stored_dtype(
    directory: str | os.PathLike[str] | None,
    use_safetensors: bool | None = None,
    state_dict: dict[str, Tensor] | None = None,
) -> torch.dtype:
    """The dtype of the first floating-point weight; arguments as `load_weights`.

    Raises:
        CheckpointError: the files cannot be read, or hold no such weight.
    """
    files, stored = weights_of(directory, use_safetensors, state_dict)
    for item in stored.values():
        if item.tensor.dtype in FLOATS:
            return item.tensor.dtype
    raise CheckpointError(f"{files[0]}: no float weights; expected float32, float64, float16 or bfloat16")


@torch.no_grad()
def _assign(model: Any, names: Names, found: dict[str, Stored], fresh: set[str]) -> None:
    # id of a parameter on meta -> its replacement
    made: dict[int, Tensor] = {}
    for key, param in names.state.items():
        if not param.is_meta or id(param) in made or key in names.tied:
            continue
        value = torch.empty(param.shape, dtype=param.dtype, device="cpu")
        if key in fresh:
            _initialise(key, value, model.config)
        else:
            value.copy_(found[key].tensor)
        is_parameter = isinstance(param, nn.Parameter)
        made[id(param)] = nn.Parameter(value, param.requires_grad) if is_parameter else value
    for key, param in names.state.items():
        if not param.is_meta:
            if key in found:
                param.copy_(found[key].tensor)
            continue
        source = names.state[names.tied.get(key, key)]
        owner, _, name = key.rpartition(".")
        module = model.get_submodule(owner)
        table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        table[name] = made[id(source)]


def _initialise(key: str, value: Tensor, config: Any) -> None:
    """Initialise a fresh weight as `init_weights` does: random matrices, zero biases, unit norms."""
    if key.endswith("bias"):
        value.zero_()
    elif value.dim() == 1:
        value.fill_(1.0)
    else:
        config.draw_(key.removesuffix(".weight"), value)
