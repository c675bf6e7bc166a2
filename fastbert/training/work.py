"""How near a step is to what the machine could do: its work, over a measured roof and a datasheet's peak.

Work counts the products of real tokens only, never padding, and three forwards per step (forward, and twice
as much backward):

    3 [Σ layers (2 (4 h² + 2 h f) Σ n + 4 h Σ n²) + 2 labelled h (h + V)]

Where a token attends to a part of its sequence only, such as earlier tokens, the number of these pairs
replaces n².

The roof is the rate of one large product in the same dtype on this device, measured when the run starts. MFU
is work over the datasheet's peak, where the device is one of `PEAKS`.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

# Name of a device -> dense matrix products in bfloat16 and float16, FLOP/s, without sparsity (datasheets).
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
}


def encoder_work(
    lengths: np.ndarray,
    hidden: int,
    layers: float,
    intermediate: int,
    *,
    rows: int | None = None,
    pairs: float | None = None,
) -> float:
    """Floating-point operations of a training step of an encoder on sequences of some lengths.

    Args:
        lengths: (n,) integers, the tokens of each sequence.
        hidden, intermediate: sizes of the encoder.
        layers: number of layers that are computed, on average.
        rows: number of rows that the layers compute; None: one per token.
        pairs: number of pairs of a row and a row that it attends to; None: each token attends to all of its
            sequence.
    """
    n = np.asarray(lengths, np.float64)
    per_row = 2 * (4 * hidden**2 + 2 * hidden * intermediate)
    all_rows = n.sum() if rows is None else rows
    all_pairs = (n**2).sum() if pairs is None else pairs
    return float(3 * layers * (per_row * all_rows + 4 * hidden * all_pairs))


def vocabulary_work(labelled: int, hidden: int, vocabulary: int) -> float:
    """Floating-point operations of a training step of a masked-LM head on the labelled tokens."""
    return 3.0 * 2 * labelled * hidden * (hidden + vocabulary)


def linear_work(tokens: int, inputs: int, outputs: int) -> float:
    """Floating-point operations of a training step of a linear layer on some tokens."""
    return 3.0 * 2 * tokens * inputs * outputs


def roof(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large product, the median of five."""
    if device.type == "cuda":
        return 2 * 4096**3 / _seconds(4096, device, dtype, 5)
    # half precision on a CPU may be a hundred times as slow as float32
    size = 1024 if _seconds(256, device, dtype, 1) < 0.005 else 256
    return 2 * size**3 / _seconds(size, device, dtype, 5)


def _seconds(size: int, device: torch.device, dtype: torch.dtype, calls: int) -> float:
    """The median time of a product of two (size, size) matrices, after one that is not counted."""
    a = torch.ones(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(calls + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """The datasheet's FLOP/s of a device; None if it is not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for key, value in PEAKS.items() if key in name), None)
