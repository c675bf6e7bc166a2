"""Every op with BERT-base's shapes, forward and backward: each backend beside the plain PyTorch call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.lib import kernels, workloads
from fastbert import testing
from fastbert.runtime import dispatch
from fastbert.runtime.table import INFERENCE_ONLY

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WORKLOADS = {"cpu": ("1x128", "1x512", "8x128", "ragged16"), "cuda": ("full", "squad", "latency-128")}
# what `make bench` has time for; --everything adds the rest
SHORT = {"cpu": ("8x128",), "cuda": ("full", "squad")}


def cases(device: torch.device) -> Iterator[object]:
    """(op, workload, the case's short id, dtype, pass, candidate)."""
    for op in dispatch.OPS:
        for workload in WORKLOADS[device.type]:
            for case in testing.bench_cases(op, workloads.lengths(workload)):
                for tag, dtype in DTYPES.items():
                    for which in kernels.PASSES:
                        if which == "backward" and op in INFERENCE_ONLY:
                            continue
                        for backend in [*kernels.timed_backends(op, device, dtype), "torch"]:
                            marks = [] if workload in SHORT[device.type] else [pytest.mark.long]
                            name = kernels.short_id(case.id, workload)
                            yield pytest.param(
                                op,
                                workload,
                                name,
                                tag,
                                which,
                                f"{backend}-{tag}",
                                marks=marks,
                                id=f"{op}-{backend}-{tag}-{name}-{which}",
                            )


@pytest.fixture(scope="session")
def correctness() -> dict[tuple, str]:
    """(op, workload, case, dtype, backend) -> why it is incorrect; "" for one that is correct."""
    return {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = list(cases(torch.device(metafunc.config.getoption("device"))))
    metafunc.parametrize(("op", "workload", "case", "dtype", "which", "candidate"), found)


def test_ops(in_turns, peak, correctness, device, request, op, workload, case, dtype, which, candidate):
    every = testing.bench_cases(op, workloads.lengths(workload))
    (found,) = (c for c in every if kernels.short_id(c.id, workload) == case)

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        backends = [name.split("-")[0] for name in wanted]
        options = {
            "backends": [name for name in backends if name != "torch"],
            "plain_row": "torch" in backends,
            "samples": request.config.getoption("samples"),
        }
        measured = kernels.bench_case(
            found, workload, DTYPES[dtype], device, which == "backward", peak, **options
        )
        for row in measured:
            key = (op, workload, case, dtype, row["backend"])
            if row["backend"] != "torch" and key not in correctness:
                correctness[key] = kernels.incorrect(found, row["backend"], DTYPES[dtype], device)
            yield row | {"incorrect": correctness.get(key, "")}

    in_turns(rows)
