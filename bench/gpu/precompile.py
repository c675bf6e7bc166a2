"""Compile the kernels of `make gpu`'s self-checks and timed steps on all cores, while the extension is built.

    python bench/gpu/precompile.py [--build] [--budget 70]
    python bench/gpu/precompile.py --device cpu      the same, tiny, in Triton's interpreter: compiles nothing

Each unit is a forward or a training step of a model of one layer, by Triton's kernels and on the batches that
are timed later, or an op's self-check, whose verdict is not kept. It has its own forked process. So Triton's
disk cache has the kernels under the keys of later processes. A unit that fails is printed; later steps record
the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.gpu import tools  # noqa: E402
from bench.lib import training, workloads  # noqa: E402
from bench.lib.engines import config_of  # noqa: E402
from bench.lib.machine import interpret  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402
from fastbert.runtime import dispatch  # noqa: E402
from fastbert.testing import error_rule, proving, speed  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one process compiles."""

    model: str
    workload: str
    training: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.workload} {'training' if self.training else 'forward'}"


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """The self-check of an op's Triton kernels in bfloat16."""

    op: str

    @property
    def name(self) -> str:
        return f"self-check of {self.op}"


def units(tiny: bool) -> list[Unit | SelfCheck]:
    """The batches of gpu/encoder.py and gpu/training.py on a GPU; training first, which takes longest."""
    if tiny:
        return [Unit("tiny", "1x128", True), Unit("tiny", "1x128"), SelfCheck("pooling")]
    able = dispatch.backend_module("triton").DTYPES
    checks = [SelfCheck(op) for op in able if torch.bfloat16 in able[op]]
    trained = [Unit("base", "full", True), Unit("large", "train", True)]
    batches = [batch for name in ("full", "squad", "latency") for batch in workloads.expand(name)]
    return trained + checks + [Unit(model, batch) for model in ("base", "large") for batch in batches]


def unproven(device: torch.device) -> contextlib.AbstractContextManager:
    """Where Triton's kernels serve without a self-check, as if CUDA's had failed; in the dry run, all."""
    if device.type == "cuda":
        return unittest.mock.patch.object(proving, "is_proven", lambda name, *_: name == "triton")
    able = [op for op in dispatch.OPS if not dispatch.unsupported_reason("triton", op, "cpu", torch.bfloat16)]
    return dispatch.use_backend(**dict.fromkeys(able, "triton"))


def compiled(unit: Unit | SelfCheck, device: torch.device) -> None:
    """Run the unit once."""
    import fastbert

    if isinstance(unit, SelfCheck):
        facts = unit.op, "triton", device, torch.bfloat16
        with dispatch.trial():
            if reason := error_rule.self_check(*facts):
                raise ValueError(reason)
            if device.type == "cuda":
                speed.compare(*facts)
        return
    tiny = device.type == "cpu"
    model = dataclasses.replace(workloads.MODELS[unit.model], layers=1)
    lengths = (3, 4) if tiny else workloads.lengths(unit.workload)
    with unproven(device):
        if unit.training:
            module = training.modules(model, "pretraining", ("fastbert",), device)["fastbert"].train()
            inputs, _ = training.batch(lengths, model.vocab, "pretraining", device)
            training.loss_of(module, inputs, autocast=True).backward()
        else:
            with device:
                module = fastbert.AutoModel.from_config(config_of(model), add_pooling_layer=False)
            with torch.inference_mode():
                inputs = workloads.padded_inputs(lengths, model.vocab, device, 0)
                module.to(torch.bfloat16).eval()(**inputs)
        if not tiny:
            torch.cuda.synchronize(device)


def work(unit: Unit | SelfCheck, device: torch.device) -> None:
    """The process of a unit; its exit status is 1 if it fails."""
    begin = time.monotonic()
    try:
        compiled(unit, device)
    except Exception as error:
        print(f"{unit.name}: {reason_of(error)[:300]}", flush=True)
        sys.exit(1)
    print(f"{unit.name}: {time.monotonic() - begin:.1f} s", flush=True)


def run(wanted: list[Unit | SelfCheck], device: torch.device, at_once: int, seconds: float) -> int:
    """Compile all units, some side by side; how many failed or did not end in time."""
    end, bad = time.monotonic() + seconds, 0
    one = functools.partial(work, device=device)
    for unit, status in tools.in_processes(wanted, one, at_once, lambda: end - time.monotonic()):
        if isinstance(status, str):
            print(f"{unit.name}: {status} after {seconds:.0f} s", flush=True)
        bad += status != 0
    return bad


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status is 1 if the build or a unit failed."""
    parser = argparse.ArgumentParser(
        prog="precompile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--build", action="store_true", help="build the extension in place at the same time")
    parser.add_argument("--budget", type=float, default=70.0, help="seconds in all")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    if args.device == "cpu":
        interpret()
    command = [sys.executable, str(ROOT / "setup.py"), "build_ext", "--inplace"]
    building = subprocess.Popen(command, cwd=ROOT) if args.build else None
    cores = max(1, len(os.sched_getaffinity(0)) - (building is not None))
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", 0)
    bad = run(units(args.device == "cpu"), device, cores, args.budget)
    if building is not None:
        try:
            status = building.wait(max(1.0, args.budget - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            building.kill()
            status = building.wait()
        print(f"build: exit status {status}", flush=True)
        bad += status != 0
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
