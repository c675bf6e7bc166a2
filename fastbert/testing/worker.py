"""The process that checks kernels for another one: `python -P -m fastbert.testing.worker REQUEST`.

REQUEST is JSON: {"device", "uuid", "units": [[op, backend, dtype, the verdict's file], …]}. What it finds is
printed, a JSON object per line: first {"ready": true}, or {"cannot": reason}, then a verdict for each unit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import torch

from fastbert.runtime import dispatch
from fastbert.testing import checking, known, verdict_keys, verdicts
from fastbert.testing.verdict_keys import Unit
from fastbert.testing.verdicts import FAILED, Verdict


def uuid_of(device: torch.device) -> str:
    """What tells GPUs of the same kind apart; "" where torch does not know."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def main(request: str) -> None:
    """Check what the request asks for."""
    wanted = json.loads(request)
    # what anything else prints is no verdict
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict) -> None:
        print(json.dumps(message), file=channel, flush=True)

    _end_with(os.getppid())
    device = torch.device(wanted["device"])
    try:
        # fails where the device admits one process only
        torch.zeros(1, device=device).add_(1).cpu()
    except Exception as error:
        send({"cannot": f"{type(error).__name__}: {error}"})
        return
    if uuid_of(device) != wanted["uuid"]:
        send({"cannot": f"{device} is another device there"})
        return
    units = [Unit(op, backend, getattr(torch, dtype)) for op, backend, dtype, _ in wanted["units"]]
    for unit, (*_, file) in zip(units, wanted["units"], strict=True):
        own = verdicts.stem(verdict_keys.key_of(unit.op, unit.backend, device, unit.dtype))
        if own != file:
            send({"cannot": f"it would check {own}"})
            return
    send({"ready": True})
    for unit in units:
        try:
            found, broken = checking.check(unit, device), False
        except dispatch.BackendError as error:
            found, broken = Verdict(str(error), date=verdicts.now(), outcome=FAILED), True
        # the kernels that rank above it are timed beside it
        known.found[unit, device] = found
        send(verdicts.facts_of(found) | {"broken": broken})
        if broken:
            return
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _end_with(parent: int) -> None:
    """End this process soon after its parent has ended, even while a kernel hangs."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="fastbert-watch", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
