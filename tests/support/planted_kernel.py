"""A process with a planted kernel, good or bad: `triton`'s layer_norm, first in the CPU's table.

python -m tests.support.planted_kernel BEHAVIOUR first-use   call the op once; print who served and warned
python -m tests.support.planted_kernel BEHAVIOUR check REQUEST   be the process that checks kernels

BEHAVIOUR is one name for all dtypes, or such as "float32=good,bfloat16=segv".
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import types
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fastbert.backends import aten
from fastbert.ops.layer_norm import layer_norm, storage_dtype
from fastbert.runtime import dispatch
from fastbert.runtime.table import TABLE

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def behave(behaviour: str, args: tuple) -> tuple:
    """As one that is good, slow, wrong or killed, or that has a segmentation fault or hangs."""
    if behaviour == "segv":
        ctypes.string_at(0)
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "slow":
        time.sleep(0.5)
    y, *rest = aten.layer_norm_fwd(*args)
    return (y + 0.25 if behaviour == "wrong" else y, *rest)


def plant(behaviours: str) -> list[str]:
    """Plant the kernel; each call of it appends "triton" to the returned list."""
    by_dtype = dict(part.split("=") for part in behaviours.split(",")) if "=" in behaviours else {}
    served: list[str] = []

    def layer_norm_fwd(inputs, save, *rounded):
        served.append("triton")
        dtype = str(storage_dtype(inputs)).removeprefix("torch.")
        return behave(by_dtype.get(dtype, behaviours), (inputs, save, *rounded))

    module = types.ModuleType("fastbert.backends.triton")
    module.DTYPES = {"layer_norm": FLOATS}
    module.available = lambda device_type: None
    module.layer_norm_fwd, module.layer_norm_bwd = layer_norm_fwd, aten.layer_norm_bwd
    real = dispatch.backend_module
    dispatch.backend_module = lambda name: module if name == "triton" else real(name)
    TABLE["cpu"]["layer_norm"] = ("triton", "aten", "reference")
    return served


def first_use(served: list[str]) -> dict:
    with warnings.catch_warnings(record=True, action="always") as caught:
        layer_norm(torch.ones(2, 4), torch.ones(4))
        at_first = len(served)
        layer_norm(torch.ones(2, 4), torch.ones(4))
    at_second = len(served) - at_first
    return {
        "by": "triton" if at_second else "aten",
        "checked": at_first > at_second,
        "warnings": [str(w.message) for w in caught],
    }


if __name__ == "__main__":
    calls = plant(sys.argv[1])
    if sys.argv[2] == "first-use":
        print(json.dumps(first_use(calls)))
    else:
        from fastbert.testing import checking

        checking.main(sys.argv[3])
