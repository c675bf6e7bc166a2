"""One way to launch a Triton kernel: on the tensors' device, on its current stream, with defaults pinned."""

from __future__ import annotations

from functools import cache

import torch

# A thread, for `maxnreg`, up to 8 warps: without a limit ptxas spills to fit one program more on a
# multiprocessor.
MOST_REGISTERS = 255


def launch(kernel, grid: tuple[int, ...], device: torch.device, *args, **config) -> None:
    """Launch `kernel` with the device guard that Triton lacks; `config`: constexprs, num_warps, num_stages.

    Fusion of multiply and add is pinned because Triton's default for it changes with 3.10.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*args, **config, enable_fp_fusion=True)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, **config, enable_fp_fusion=True)


@cache
def resident_programs(device: torch.device) -> int:
    """Programs of a kernel that walks over its work: three per multiprocessor; a few in the interpreter."""
    return 3 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6
