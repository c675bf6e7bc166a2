"""Where a checkpoint is: a directory, or the local copy of a hub repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from fastbert.checkpoint.files import (
    BIN,
    CONFIG,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    CheckpointError,
    cause,
    config_of_weights,
    parse_json,
    read_json,
)

# The files of a hub download. Those in .bin are fetched afterwards, if there are no safetensors.
_HUB_FILES = ["*.json", "vocab.txt", "merges.txt", "*.model", SAFETENSORS, "model-*.safetensors"]
_HUB_BIN_FILES = [BIN, "pytorch_model-*.bin"]


def resolve(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    force_download: bool = False,
    subfolder: str = "",
) -> Path:
    """The directory of a checkpoint: `name_or_path` itself, or the local copy of a hub repository.

    Args:
        name_or_path: a directory, or a HuggingFace hub name ("bert-base-uncased", "owner/name").
        revision, cache_dir, local_files_only, token, force_download: as in
            `huggingface_hub.snapshot_download`.
        subfolder: the folder in it that holds the checkpoint.

    Raises:
        CheckpointError: there is no such directory, and the hub does not have it or cannot be reached.
    """
    path = _local(name_or_path)
    if path.is_dir():
        return _inside(path, subfolder)
    if path.exists():
        raise CheckpointError(f"{path}: is a file; expected the directory that holds it")
    hub = _hub(name_or_path)
    options = {
        "revision": revision,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "token": token,
        "force_download": force_download,
    }
    files, bin_files = (
        [f"{subfolder}/{name}" if subfolder else name for name in names]
        for names in (_HUB_FILES, _HUB_BIN_FILES)
    )
    root = Path(_ask_hub(hub.snapshot_download, name_or_path, allow_patterns=files, **options))
    directory = _inside(root, subfolder)
    if not any((directory / name).exists() for name in (SAFETENSORS, SAFETENSORS_INDEX)):
        _ask_hub(hub.snapshot_download, name_or_path, allow_patterns=bin_files, **options)
    return directory


def _inside(directory: Path, subfolder: str) -> Path:
    if not isinstance(subfolder, str):
        raise TypeError(f"subfolder: expected a text, got {type(subfolder).__name__}")
    if not subfolder:
        return directory
    if not (directory / subfolder).is_dir():
        raise CheckpointError(f"{directory}: has no folder {subfolder!r}, which subfolder names")
    return directory / subfolder


def read_config(name_or_path: str | os.PathLike[str], subfolder: str = "", **options: Any) -> dict[str, Any]:
    """The content of a checkpoint's config.json.

    If a save was killed between its two renames, it is the config that belongs to the weights
    (`files.config_of_weights`).

    Args:
        name_or_path: a directory, a JSON file, or a hub name.
        subfolder: the folder in it that holds the file.
        options: revision, cache_dir, local_files_only, token, force_download, as in `resolve`.

    Raises:
        CheckpointError: no such file, or it is not a JSON object.
    """
    path = _local(name_or_path)
    if path.is_dir():
        return _read_own_config(_inside(path, subfolder))
    if not path.exists():
        options |= {"filename": CONFIG, "subfolder": subfolder or None}
        path = Path(_ask_hub(_hub(name_or_path).hf_hub_download, name_or_path, **options))
    return read_json(path)


def _read_own_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    content = config_of_weights(directory)
    if content is not None:
        return parse_json(content, path)
    if path.is_file():
        raise CheckpointError(
            f"{path}: is of a save that was killed before its weights were in place, and there was no "
            "config.json before that save; save again"
        )
    # Raises, with the cause
    return read_json(path)


def _local(name_or_path: str | os.PathLike[str]) -> Path:
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise TypeError(f"name_or_path: expected a path or a hub name, got {type(name_or_path).__name__}")
    if not os.fspath(name_or_path):
        raise CheckpointError("name_or_path: is empty; expected a directory or a hub name")
    return Path(name_or_path).expanduser()


def _hub(name: str | os.PathLike[str]) -> Any:
    text = os.fspath(name)
    if isinstance(name, Path) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text):
        raise CheckpointError(f"{text}: no such directory")
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{text}: no such directory; to fetch it by that name from the hub, install huggingface_hub"
        ) from error
    return huggingface_hub


def _ask_hub(function: Any, name: str | os.PathLike[str], **options: Any) -> str:
    try:
        return function(os.fspath(name), **options)
    except Exception as error:  # network, permission, cache, naming: dozens of types, some of other packages
        raise CheckpointError(
            f"{name}: no such directory here, and it could not be downloaded from the hub: {cause(error)}"
        ) from error
