"""The encoder's forward by every engine: real tokens per second, and the share of the machine's roof."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.gpu.engines import ENGINES as GPU_ENGINES
from bench.lib import encoder, workloads
from bench.lib.engines import ENGINES, MODELS

WORKLOADS = {
    "cpu": ("1x128", "1x512", "1x1024", "1x2048", "1x4096", "8x128", "long16", "ragged16", "ragged64"),
    "cuda": ("full", "squad"),
}
# of texts that BERT's positions do not reach
LONG = ("1x1024", "1x2048", "1x4096", "long16")
# family -> its workloads of those, and whether it has shorter ones too
LONG_OF = {
    "modernbert": (("1x1024", "long16"), True),
    "longformer": (("1x1024", "1x2048", "1x4096"), False),
    "big_bird": (("1x1024", "1x2048", "1x4096"), False),
}
# device -> model -> what `make bench` has time for; --everything adds the rest
SHORT = {
    "cpu": {
        "base": ("8x128", "ragged16"),
        "minilm": ("8x128",),
        "modernbert": ("8x128",),
        "deberta-v3": ("8x128",),
        "xlnet": (),
        "mobilebert": (),
        "longformer": (),
        "bigbird": (),
    },
    "cuda": {"base": ("full", "squad"), "large": ("full", "squad")},
}
CANDIDATES = {"cpu": ENGINES, "cuda": GPU_ENGINES}
COMPILED = "torch_compile"
# peers that take the longest on ragged batches, each slower than another one of its precision
SLOW = ("transformers-bf16", "onnxruntime-fp32")
SETS = {"cpu": 1, "cuda": 4}  # batches that the samples rotate through


def cases(device: str) -> Iterator[object]:
    """(model, workload, candidate), the workloads of one model together: its engines are built once."""
    for model, short in SHORT[device].items():
        for workload in WORKLOADS[device]:
            reach, others = LONG_OF.get(MODELS[model].family, ((), True))
            if workload not in reach if workload in LONG else not others:
                continue
            for candidate in CANDIDATES[device]:
                # XLNet has no int8
                if model == "xlnet" and candidate == "fastbert-int8":
                    continue
                rare = workload not in short or candidate.startswith(COMPILED)
                rare = rare or (device == "cpu" and workload == "ragged16" and candidate in SLOW)
                marks = [pytest.mark.long] if rare else []
                yield pytest.param(
                    model, workload, candidate, marks=marks, id=f"encoder-{candidate}-{model}-{workload}"
                )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = list(cases(metafunc.config.getoption("device")))
    metafunc.parametrize(("model", "workload", "candidate"), found)


def test_encoder(in_turns, peak, engines, device, few, request, model, workload, candidate):
    option = request.config.getoption
    size = workloads.TINY if option("smoke") else MODELS[model]
    slow = device.type == "cpu" and (model != "minilm" or workload.startswith("ragged"))
    samples = few if slow else option("samples")

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        forwards = engines.of(size, wanted)
        options = {"device": device, "samples": samples, "sets": SETS[device.type]}
        yield from encoder.bench_encoder(size, workload, forwards, peak, **options)
        torch._dynamo.reset()  # every shape is compiled for itself, and kept until here

    in_turns(rows)
