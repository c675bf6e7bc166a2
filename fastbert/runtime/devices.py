"""Devices by name, with errors that name the argument."""

from __future__ import annotations

import torch


def device_of(device: torch.device | str | int, name: str = "device") -> torch.device:
    """The device that a value names, whether this machine has it or not.

    Args:
        device: what `torch.device` takes.
        name: the argument's name, for messages.

    Raises:
        ValueError: no such kind of device.
        TypeError: a value of another type.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: expected a device such as 'cpu' or 'cuda:0', got {device!r}") from error


def check_there(device: torch.device, name: str = "device") -> None:
    """Raise ValueError for a GPU that torch does not show."""
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"{name}: {str(device)!r}, but torch shows {count} GPUs here")
