"""One way to launch a Triton kernel: on the tensors' device, on its current stream, with defaults pinned."""

from __future__ import annotations

from functools import cache

import torch

# Per thread, for `maxnreg`, up to 8 warps. Without a limit ptxas spills to fit one more program on a
# multiprocessor.
MOST_REGISTERS = 255


def launch(kernel, grid: tuple[int, ...], device: torch.device, *args, **config) -> None:
    """Launch `kernel` with the device guard that Triton lacks; `config`: constexprs, num_warps, num_stages.

    The fusion of multiply and add is pinned, because Triton 3.10 changes its default.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*args, **config, enable_fp_fusion=True)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, **config, enable_fp_fusion=True)


# Programs per multiprocessor of a kernel that walks over its work, where no table says otherwise.
PROGRAMS = 3


@cache
def resident_programs(device: torch.device, per_multiprocessor: int = PROGRAMS) -> int:
    """The number of programs of a kernel that walks over its work."""
    if device.type == "cuda":
        return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count
    # A few in the interpreter, which has two multiprocessors.
    return 2 * per_multiprocessor
