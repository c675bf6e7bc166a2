"""A module -> a HuggingFace directory. A kill at any moment leaves either the old checkpoint or the new one.

A save that changes the config has five steps:
    1. the weights, the new config, and notes of the old and the new config are written to a hidden folder
       and flushed
    2. shards, if any, are renamed to names that nothing points to
    3. config.json is renamed into place
    4. the weights (or the index of the shards) are renamed into place: now it is the new checkpoint
    5. the folder and the files that are no longer read are removed
Between 3 and 4, or after a kill there, a reader takes the old config from the notes (`files.py`). The next
save puts it back before it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fastbert.checkpoint.files import (
    CONFIG,
    NEW_CONFIG,
    OLD_CONFIG,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    SAVING,
    CheckpointError,
    Stamp,
    cause,
    config_of_weights,
    digest,
    flush_folder,
    is_dead,
    listed,
    own_tag,
)
from fastbert.layers import float8, quantized_files
from fastbert.layers.integers import IntegerWeight


def save(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    state_dict: dict[str, Tensor] | None = None,
) -> list[Path]:
    """Write config.json and model.safetensors (or shards and their index) as HuggingFace does.

    All files are first written beside the old ones and flushed to the disk, then renamed. So a save that
    fails or is killed leaves the old checkpoint whole, and the next save removes what it left behind.

    Args:
        model: a model of this package.
        directory: created if it is missing.
        max_shard_size: bytes, or text such as "500MB" or "5GB"; larger checkpoints are split.
        state_dict: values to save instead of the model's own, under the keys of its `state_dict()`; tied
            copies may be left out.

    Returns:
        The weight files written.

    Raises:
        CheckpointError: a file could not be written, or a weight is not finite or has no value.
    """
    limit = _bytes(max_shard_size)
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"save_directory: expected a path, got {type(directory).__name__}")
    directory = Path(directory)
    tied = model.tied_weights()
    own = model.state_dict()
    given = own if state_dict is None else _whole(directory, own.keys() - tied.keys(), own.keys(), state_dict)
    state = {key: given[key].detach() for key in own if key not in tied}
    for key, value in state.items():
        if value.is_meta:
            raise CheckpointError(f"{directory}: {key}: is on the meta device and has no value to save")
        # PyTorch has no extremes of 8-bit floats
        known = value.float() if value.dtype == torch.float8_e4m3fn else value
        if value.numel() and not all(v.isfinite() for v in torch.aminmax(known)):
            raise CheckpointError(f"{directory}: {key}: holds NaN or infinity; not saved")
    try:
        state = quantized_files.as_stored(model, state)
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}; not saved") from None
    config_text = _config_text(model, state)
    stamp = Stamp(digest(config_text.encode()), model.config.mathematics())
    shards = _split(state, limit)
    with _naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
        _settle(directory)
        return _write(directory, config_text.encode(), stamp, state, shards)


def _whole(
    directory: Path, needed: set[Any], known: Iterable[str], given: dict[str, Tensor]
) -> dict[str, Tensor]:
    """`given`, if it has a tensor for every needed key and none for an unknown one."""
    if not isinstance(given, dict):
        raise TypeError(f"state_dict: expected a dictionary of tensors, got {type(given).__name__}")
    missing, unknown = sorted(needed - given.keys()), sorted(given.keys() - set(known))
    if missing or unknown:
        raise CheckpointError(
            f"{directory}: state_dict: expected the keys of the model's own; "
            f"missing: {listed(missing) or 'none'}; unknown: {listed(unknown) or 'none'}"
        )
    return given


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn any error into a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # OSError, and safetensors' own for a full disk
        raise CheckpointError(
            f"{file}: could not be saved, what was there is unchanged: {cause(error)}"
        ) from error


def _bytes(size: int | str) -> int:
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    match = re.fullmatch(r"(\d+)\s*([A-Z]*)", str(size).strip().upper())
    value = int(match[1]) * units.get(match[2], 0) if match else 0
    if value < 1:
        raise ValueError(f"max_shard_size: expected a number of bytes or text such as '500MB', got {size!r}")
    return value


def _config_text(model: Any, state: dict[str, Tensor]) -> str:
    values = model.config.to_dict()
    values["architectures"] = [model.config.family.class_prefix + model.task]  # transformers' class name
    scales = {f"{name}.scale" for name, module in model.named_modules() if isinstance(module, IntegerWeight)}
    floats = {key: value for key, value in state.items() if value.is_floating_point() and value.itemsize > 1}
    dtypes = [value.dtype for key, value in floats.items() if key not in scales]
    values["dtype"] = str(dtypes[0]).removeprefix("torch.") if dtypes else "float32"
    values.pop("quantization_config", None)  # the weights decide, not the config
    if (entry := float8.entry_of(model) or quantized_files.entry_of(model)) is not None:
        values["quantization_config"] = entry
    if "torch_dtype" in values:  # the same key before transformers 5
        values["torch_dtype"] = values["dtype"]
    return json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _split(state: dict[str, Tensor], limit: int) -> list[list[str]]:
    """The keys of each shard, in order; a tensor over the limit has a shard of its own."""
    shards: list[list[str]] = [[]]
    room = limit
    for key, value in state.items():
        if value.nbytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(key)
        room -= value.nbytes
    return shards


def _write(
    directory: Path, config_text: bytes, stamp: Stamp, state: dict[str, Tensor], shards: list[list[str]]
) -> list[Path]:
    names = [SAFETENSORS] if len(shards) == 1 else _shard_names(directory, len(shards))
    with contextlib.ExitStack() as stack:  # its end removes what was not renamed
        workplace = stack.enter_context(_workplace(directory))
        for name, keys in zip(names, shards, strict=True):
            with _naming(directory / name):
                _write_safetensors(workplace / name, {key: state[key] for key in keys}, stamp)
        weights = workplace / SAFETENSORS, directory / SAFETENSORS
        if len(shards) > 1:  # under names that nothing points to until the index is renamed
            for name in names:
                os.replace(workplace / name, directory / name)
                stack.callback(_remove_unless_listed, directory / name)
            weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
            total = sum(value.nbytes for value in state.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            file = _written(
                directory, workplace, SAFETENSORS_INDEX, json.dumps(index, indent=2).encode() + b"\n"
            )
            weights = file, directory / SAFETENSORS_INDEX

        old = config_of_weights(directory)
        config = directory / CONFIG
        if old != config_text:
            new = _written(directory, workplace, CONFIG, config_text)
            if old is not None:
                _written(directory, workplace, OLD_CONFIG, old)
            _written(directory, workplace, NEW_CONFIG, config_text)
            _flush_directory(workplace)
            _flush_directory(directory)
            os.replace(new, config)
        try:
            os.replace(*weights)
            single = directory / SAFETENSORS
            if len(shards) > 1 and single.exists():
                single.unlink()  # it takes precedence over the index
        except BaseException:
            if old is None:
                config.unlink()
            elif old != config_text:
                os.replace(workplace / OLD_CONFIG, config)
            raise
        _flush_directory(directory)

    stale = {file.name for file in directory.glob("model-*-of-*.safetensors")} - set(names)
    if len(shards) == 1:
        stale.add(SAFETENSORS_INDEX)
    for name in stale:  # no index names them any more
        with contextlib.suppress(OSError):
            (directory / name).unlink(missing_ok=True)
    return [directory / name for name in names]


def _written(directory: Path, workplace: Path, name: str, content: bytes) -> Path:
    """Write and flush a file in the workplace; an error names its later place in the directory."""
    with _naming(directory / name), open(workplace / name, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    return workplace / name


def _shard_names(directory: Path, count: int) -> list[str]:
    """HuggingFace's names of shards; with a tag if one is taken, so that the old checkpoint stays whole."""
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if any((directory / name).exists() for name in names):
        tag = secrets.token_hex(4)
        names = [name.replace(".safetensors", f"-{tag}.safetensors") for name in names]
    return names


def _remove_unless_listed(shard: Path) -> None:
    """Remove a shard that no index names, because the save failed."""
    index = shard.parent / SAFETENSORS_INDEX
    with contextlib.suppress(OSError):
        if not index.exists() or shard.name not in index.read_text(encoding="utf-8", errors="replace"):
            shard.unlink(missing_ok=True)


def _write_safetensors(file: Path, tensors: dict[str, Tensor], stamp: Stamp) -> None:
    from safetensors.torch import save_file

    whole = {}
    for key, value in tensors.items():
        value = value.cpu().contiguous()
        # In this format each tensor has a storage of its own
        whole[key] = value.clone() if value.untyped_storage().nbytes() != value.nbytes else value
    seen: set[int] = set()
    for key, value in whole.items():
        if value.data_ptr() in seen and value.numel():
            whole[key] = value.clone()
        seen.add(value.data_ptr())
    save_file(whole, file, metadata={"format": "pt", **stamp.metadata()})
    # safetensors lets only the owner read it
    file.chmod(file.parent.stat().st_mode & 0o666)
    with open(file, "r+b") as handle:
        _order_metadata(handle)
        handle.flush()
        os.fsync(handle.fileno())


def _order_metadata(handle: BinaryIO) -> None:
    """Sort the metadata's entries, whose order safetensors changes from save to save.

    So equal models are saved as equal bytes.
    """
    size = int.from_bytes(handle.read(8), "little")
    header = json.loads(handle.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) <= size:  # always, unless the library's spelling of JSON changes
        handle.seek(8)
        handle.write(text.ljust(size))


def _flush_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):
        flush_folder(directory)


@contextlib.contextmanager
def _workplace(directory: Path) -> Iterator[Path]:
    """A hidden folder, from which files are renamed into place; its name contains `own_tag`."""
    folder = directory / f"{SAVING}{own_tag()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        if not _is_needed(directory, folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_needed(directory: Path, folder: Path) -> bool:
    """Whether config.json does not belong to the weights, and the folder holds the config that does."""
    config = directory / CONFIG
    return config.is_file() and config_of_weights(directory, [folder]) != config.read_bytes()


def _settle(directory: Path) -> None:
    """Put back a config that a killed save has replaced, and remove the folders of killed saves."""
    dead = [
        folder for folder in sorted(directory.glob(f"{SAVING}*")) if is_dead(folder.name.removeprefix(SAVING))
    ]
    for folder in dead:
        if _is_needed(directory, folder):
            if (folder / OLD_CONFIG).exists():
                os.replace(folder / OLD_CONFIG, directory / CONFIG)
            else:
                (directory / CONFIG).unlink()
    if dead:
        _flush_directory(directory)
    for folder in dead:
        shutil.rmtree(folder, ignore_errors=True)
