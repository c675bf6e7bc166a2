"""The weights of a checkpoint's files: {key as stored: tensor}, memory-mapped.

The files are model.safetensors, pytorch_model.bin or shards of either. Pickles are read only by
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.checkpoint.files import (
    BIN,
    BIN_INDEX,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    CheckpointError,
    cause,
    listed,
    read_json,
)


class Stored(NamedTuple):
    """One tensor of a file."""

    file: Path
    # As the file spells it
    key: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.file}: {self.key}"


def weights_of(
    directory: str | os.PathLike[str] | None,
    use_safetensors: bool | None,
    state_dict: dict[str, Tensor] | None,
) -> tuple[list[Path], dict[str, Stored]]:
    """What `read_weights` returns; or the same for the caller's tensors, with "state_dict" as the file."""
    if state_dict is None:
        if directory is None:
            raise TypeError("directory: expected a path if there is no state_dict, got None")
        return read_weights(Path(directory), use_safetensors)
    where = Path("state_dict")
    return [where], _given(where, state_dict)


def weights_digest(directory: str | os.PathLike[str]) -> str:
    """SHA-256 of all files of weights in a directory."""
    found = hashlib.sha256()
    for path in weights_of(directory, None, None)[0]:
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _given(where: Path, state_dict: dict[str, Tensor]) -> dict[str, Stored]:
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict: expected a dictionary of tensors, got {type(state_dict).__name__}")
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"state_dict: expected texts as keys, got {key!r}")
        if not isinstance(value, Tensor) or value.is_meta:
            kind = "a tensor on meta" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"state_dict: {key}: expected a tensor with values, got {kind}")
    return {key: Stored(where, key, tensor.detach()) for key, tensor in state_dict.items()}


def read_weights(
    directory: Path, use_safetensors: bool | None = None
) -> tuple[list[Path], dict[str, Stored]]:
    """(files read, key as stored -> tensor).

    The first that exists is read: model.safetensors, its shards, pytorch_model.bin, its shards.
    `use_safetensors` True allows only safetensors, False only .bin.
    """
    layouts = [(SAFETENSORS, SAFETENSORS_INDEX), (BIN, BIN_INDEX)]
    if use_safetensors is not None:
        layouts = layouts[:1] if use_safetensors else layouts[1:]
    for name, index in layouts:
        if os.path.lexists(directory / name):
            return [directory / name], _open_file(directory / name)
        if os.path.lexists(directory / index):
            return _open_shards(directory / index)
    there = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else None
    if there is None:
        raise CheckpointError(f"{directory}: no such directory")
    hint = "" if use_safetensors is None else f"; use_safetensors is {use_safetensors}"
    if "adapter_model.safetensors" in there:
        hint = "; adapter_model.safetensors is a PEFT adapter: load its base model and merge it first"
    elif foreign := [n for n in there if n.endswith((".h5", ".msgpack", ".onnx", ".gguf", ".ckpt.index"))]:
        hint = f"; {foreign[0]} is of a format that is not read here"
    names = [name for layout in layouts for name in layout]
    raise CheckpointError(f"{directory}: no weights; expected {', '.join(names[:-1])} or {names[-1]}{hint}")


def _open_shards(index: Path) -> tuple[list[Path], dict[str, Stored]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: expected a non-empty object of key to file name")
    for key, name in weight_map.items():
        plain = isinstance(name, str) and name not in ("", ".", "..") and len(name) < 256
        if not plain or re.search(r"[/\\\0]", name):
            raise CheckpointError(
                f"{index}: weight_map: {key}: expected the name of a file beside it, got {name!r}"
            )
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{index}: missing shards beside it: {listed(absent)}")
    stored: dict[str, Stored] = {}
    for file in files:
        content = _open_file(file)
        if twice := sorted(stored.keys() & content.keys()):
            raise CheckpointError(f"{file}: also in {stored[twice[0]].file.name}: {listed(twice)}")
        stored.update(content)
    absent = [key for key, name in weight_map.items() if key not in stored or stored[key].file.name != name]
    if absent:
        raise CheckpointError(
            f"{index.parent / weight_map[absent[0]]}: lacks what {index.name} says: {listed(absent)}"
        )
    return files, stored


def _open_file(file: Path) -> dict[str, Stored]:
    if not file.is_file():
        raise CheckpointError(f"{file}: is not a file, or a link to one that is gone")
    content = _open_safetensors(file) if file.suffix == ".safetensors" else _open_bin(file)
    if not content:
        raise CheckpointError(f"{file}: holds no tensors")
    return {key: Stored(file, key, tensor) for key, tensor in content.items()}


def _open_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as reader:
            return {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118 - the reader is no dict
    except Exception as error:  # SafetensorError, OSError, and torch's own for dtypes it lacks
        raise CheckpointError(f"{file}: truncated, or not a safetensors file: {cause(error)}") from error


def _open_bin(file: Path) -> dict[str, Tensor]:
    import pickle
    import zipfile

    archive = zipfile.is_zipfile(file)
    if archive:
        _check_archive(file)
    try:  # files older than torch 1.6 are no zip archives and cannot be mapped
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        reason = re.search(r"unsupported (global|class)[^\n]*", str(error), re.IGNORECASE)
        if reason is None:
            problem = "truncated, or not a PyTorch file (pickles of other kinds are not read)"
        else:
            problem = f"refused: its pickle asks for more than tensors, which would run code: {reason[0]}"
        raise CheckpointError(f"{file}: {problem}") from error
    except Exception as error:  # RuntimeError, EOFError, ValueError…: a damaged archive can raise any
        raise CheckpointError(f"{file}: truncated, or not a PyTorch file: {cause(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a dictionary of tensors, got {type(content).__name__}")
    for key, value in content.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{file}: expected texts as keys, got {key!r}")
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{file}: {key}: expected a tensor, got {type(value).__name__}")
        if value.is_meta:
            raise CheckpointError(f"{file}: {key}: was saved from the meta device and has no values")
    return content


def _check_archive(file: Path) -> None:
    """Refuse a zip archive that unpacks to more than it holds: PyTorch compresses nothing."""
    import zipfile

    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except Exception as error:  # BadZipFile, OSError, NotImplementedError, and codecs' own for odd names
        raise CheckpointError(f"{file}: truncated, or not a PyTorch file: {cause(error)}") from error
    if unpacked > (size := file.stat().st_size):
        raise CheckpointError(
            f"{file}: is compressed: it unpacks to {unpacked:,} bytes from {size:,}; PyTorch stores its "
            "archives uncompressed, and compressed ones are not read"
        )
