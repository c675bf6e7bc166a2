"""sentence-transformers' Dense modules, as folders: a linear layer and an activation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from fastbert.checkpoint.files import CheckpointError, read_json, replace, write_json
from fastbert.checkpoint.read import read_weights
from fastbert.sentences.settings import choice, positive, switch

IDENTITY = "torch.nn.modules.linear.Identity"
_TANH = "torch.nn.modules.activation.Tanh"
# sentence-transformers' spelling -> our name
ACTIVATIONS = {
    IDENTITY: None,
    _TANH: "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
}


def read_dense(
    folder: Path,
    width: int,
    features: str = "sentence_embedding",
    activations: Sequence[str] = tuple(ACTIVATIONS),
) -> tuple[nn.Linear, str | None]:
    """(linear layer on the CPU, name of its activation or None) of a Dense module.

    Args:
        folder: the module's.
        width: numbers in an input.
        features: what the module reads and writes, by sentence-transformers' names.
        activations: spellings that are implemented.

    Raises:
        ValueError: naming the file, and what is wrong in it.
    """
    path = folder / "config.json"
    config = read_json(path)
    activation = ACTIVATIONS[choice(path, config, "activation_function", activations, _TANH)]
    for key in ("module_input_name", "module_output_name"):
        choice(path, config, key, (features,), features)
    if switch(path, config, "use_residual", False):
        raise ValueError(f"{path}: use_residual true is not implemented; expected false")
    bias = switch(path, config, "bias", True)
    sizes = positive(path, config, "in_features"), positive(path, config, "out_features")
    if sizes[0] != width or sizes[1] is None:
        raise ValueError(
            f"{path}: in_features {sizes[0]}, out_features {sizes[1]}; expected {width}, the width of what "
            "is before it, and a positive integer"
        )
    (file, *_), stored = read_weights(folder)
    shapes = {"linear.weight": (sizes[1], width)} | ({"linear.bias": (sizes[1],)} if bias else {})
    found = {key: tuple(entry.tensor.shape) for key, entry in stored.items()}
    if found != shapes:
        raise CheckpointError(f"{file}: tensors {found}; expected {shapes}")
    dtype = torch.promote_types(stored["linear.weight"].tensor.dtype, torch.float32)
    linear = nn.Linear(width, sizes[1], bias, dtype=dtype)
    linear.load_state_dict({key.removeprefix("linear."): entry.tensor for key, entry in stored.items()})
    if not all(parameter.isfinite().all() for parameter in linear.parameters()):
        raise CheckpointError(f"{file}: linear: not all numbers are finite")
    return linear.requires_grad_(False), activation


def write_dense(folder: Path, linear: nn.Linear, activation: str | None) -> None:
    """Write the folder that `read_dense` and sentence-transformers read.

    Raises:
        CheckpointError: naming the file that cannot be written.
    """
    folder.mkdir(exist_ok=True)
    tensors = {f"linear.{key}": tensor.contiguous() for key, tensor in linear.state_dict().items()}
    replace(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    config = {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "activation_function": next(key for key, name in ACTIVATIONS.items() if name == activation),
    }
    write_json(folder / "config.json", config)
