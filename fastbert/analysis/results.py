"""A result on disk: a directory with numbers, arrays and pictures, whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastbert.checkpoint import files
from fastbert.models.base import PreTrainedModel
from fastbert.runtime.version import VERSION
from fastbert.tasks.examples import Examples

SCHEMA = 1


def facts(model: PreTrainedModel, examples: Examples, **options: Any) -> dict[str, Any]:
    """What a result depends on: versions, the config's and the examples' SHA-256, their number, options."""
    digest = hashlib.sha256()
    for array in (examples.ids, examples.starts, examples.types, examples.labels):
        digest.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
    config = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    return {
        "schema": SCHEMA,
        "fastbert": VERSION,
        "numpy": np.__version__,
        "torch": torch.__version__,
        "model": type(model).__name__,
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        "examples_sha256": digest.hexdigest(),
        "n": len(examples),
        "tokens": int(examples.starts[-1]),
        **options,
    }


def save(
    directory: str | Path,
    name: str,
    numbers: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    figures: Mapping[str, Any],
    page: str | None = None,
) -> Path:
    """Write `<name>.json`, `<name>.npz` and an SVG and a PNG per figure into a new directory.

    Args:
        directory: the new directory; must not exist, or be empty.
        name: name of the result.
        numbers: content of the JSON file.
        arrays: content of the NumPy file.
        figures: name -> matplotlib figure.
        page: content of `<name>.html`, or None.

    Raises:
        ValueError: the directory has files, or could not be written; nothing is left behind.
    """
    directory = check_free(directory)
    # file names may have bytes that are no UTF-8; they become escapes in JSON
    how = {"encoding": "utf-8", "errors": "backslashreplace"}
    named: dict[str, Any] = dict(arrays)
    with files.new_directory(directory) as place:
        text = json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        (place / f"{name}.json").write_text(text, **how)
        if page is not None:
            (place / f"{name}.html").write_text(page, **how)
        np.savez_compressed(place / f"{name}.npz", **named)
        for title, figure in figures.items():
            with warnings.catch_warnings():
                # a box is drawn for a glyph that the font lacks
                warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
                figure.savefig(place / f"{title}.svg", metadata={"Date": None})
                figure.savefig(place / f"{title}.png", dpi=150)
    return directory


def check_free(directory: str | Path) -> Path:
    """The directory, after a check that it does not exist or is empty, and can be written.

    Raises:
        ValueError: naming the directory, or the path above it that is no directory or cannot be written.
    """
    directory = Path(directory)
    if directory.is_symlink():  # its target may be missing
        directory = Path(os.path.realpath(directory))
    files.check_free(directory)
    return directory
