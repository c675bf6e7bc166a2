"""What a plain call and a training step cost the host on a GPU: `python bench/host.py`.

It needs no GPU: tensors are in CPU memory, our host code is linked with the tests' stand-in for the CUDA
runtime and for cuBLASLt, whose launches do nothing, and Triton's launches are left out. What remains is
Python and C++. A real launch costs the host about 2 us more, and the driver's queue may be full. The model
has BERT-base's modules and tensors, but 64 columns, so that PyTorch's own operations around the layers take
almost no time. The stand-in is built by `python -m tests.support.cuda_build`, which needs nvcc.

The candidates are fastbert's own model, and transformers' after `fastbert.accelerate`, which has no
`first_token_only`. A row is a case with 12 layers: its least and median time, and the time per layer, by the
difference from 2 layers. `serving` is whether all layers ran in one call. Rows go to
bench/results/<machine>/host.json.

A training step is pre-training's as our loop takes it: forward and backward under bf16 autocast, the clipped
norm, AdamW. `recorded` has the encoder's forward and backward from a graph whose replay does nothing.
PyTorch's kernels over lists of tensors are left out: a GPU needs few of them.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import pkgutil
import statistics
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.graphs import COLUMNS, cases, microseconds  # noqa: E402

# what an H100 tells
MULTIPROCESSORS, CAPABILITY = 132, (9, 0)
CANDIDATES = ("fastbert", "accelerated")


def idle_extension() -> ModuleType:
    """The extension on the tests' stand-in, whose launches and products do nothing."""
    built = sorted((ROOT / "build" / "tests").glob(f"cuda_ptx-{sys.implementation.cache_tag}/_C*.so"))
    if not built:
        raise SystemExit("bench/host.py: the stand-in is not built: run python -m tests.support.cuda_build")
    ctypes.CDLL(str(built[0].with_name("libcublasLt.so.0"))).emulator_products(0)
    # a name of its own: pybind11 gives a second `fastbert._C` the first one's module
    spec = importlib.util.spec_from_file_location("fastbert_on_ptx._C", built[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ctypes.CDLL(str(built[0])).emulator_idle(1)
    return module


def pretend_gpu() -> None:
    """Let this process take CPU tensors for a GPU's, on a device that does nothing."""
    from fastbert.backends import cuda, triton
    from fastbert.backends.aten import linear as products
    from fastbert.execution import launchers
    from fastbert.kernels import tuning
    from fastbert.layers import linear
    from fastbert.ops import attention_places, checks
    from fastbert.runtime import dispatch, prepared
    from fastbert.runtime.table import TABLE

    cuda.available = triton.available = lambda device_type: None
    cuda.device.extension, cuda.device.place = idle_extension(), lambda device: (0, 0)
    cuda.device.multiprocessors = lambda device: MULTIPROCESSORS
    cuda.device.is_hopper = cuda.device.has_group_products = lambda device: True
    device = tuning.Device("", CAPABILITY, MULTIPROCESSORS)
    tuning.device_of = lambda _: device
    for module in pkgutil.iter_modules([str(ROOT / "kernels")]):
        kernels = importlib.import_module(f"fastbert.kernels.{module.name}")
        if hasattr(kernels, "launch") and module.name != "launch":
            kernels.launch = lambda *args, **config: None
    TABLE["cpu"], dispatch.SELF_CHECKED = TABLE["cuda"], ()
    launchers.on_gpu = lambda device: True
    linear.FLOAT = linear.FLOAT._replace(joins=lambda x, modules: True)
    linear.LINEAR_KINDS[torch.nn.Linear] = linear.FLOAT
    # what a CPU has instead: products that take time, samples of memory, values that are looked at
    checks.has_values = lambda t: False
    checks.ids_in_range = checks.lengths = attention_places.check_table = lambda *_: None
    products.bf16_is_slow = lambda: False
    products.F = _NoProducts
    prepared._samples_of = lambda *_: []
    prepared._pages_of = lambda *_: (None, {})


class _NoProducts:
    @staticmethod
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])


def model(candidate: str, layers: int, dtype: torch.dtype) -> torch.nn.Module:
    """BERT with BERT-base's modules and few columns: fastbert's own, or transformers' accelerated."""
    sizes = {"hidden_size": COLUMNS, "num_attention_heads": 1, "intermediate_size": COLUMNS}
    sizes["num_hidden_layers"] = layers
    if candidate == "accelerated":
        from transformers import BertConfig, BertModel

        from fastbert import accelerate

        return accelerate(BertModel(BertConfig(**sizes)).eval(), dtype=dtype)
    from fastbert.models.auto import AutoModel
    from fastbert.models.config import EncoderConfig

    return AutoModel.from_config(EncoderConfig(model_type="bert", **sizes)).eval().to(dtype)


def measured(candidate: str, dtype: torch.dtype, calls: int) -> list[dict]:
    from fastbert.runtime import prepared

    found = []
    whole, short = model(candidate, 12, dtype), model(candidate, 2, dtype)
    for name, given in cases().items():
        if candidate == "accelerated" and "first_token_only" in given:
            continue
        times = microseconds(lambda given=given: whole(**given), calls)
        few = microseconds(lambda given=given: short(**given), calls)
        plan = prepared.beside(whole.encoder)
        found.append(
            {
                "step": "plain call",
                "name": f"{candidate}-plain-{str(dtype).removeprefix('torch.')}-{name}",
                "status": "ok",
                "candidate": candidate,
                "case": name,
                "min_us": times[0],
                "median_us": statistics.median(times),
                "layer_us": (times[0] - few[0]) / 10,
                "serving": plan is not None and plan.state is not None,
            }
        )
    return found


def steps(calls: int) -> list[dict]:
    """A row for a training step, recorded and not."""
    from fastbert.graphs.training import encoders_of, serving
    from fastbert.models.auto import AutoModelForPreTraining
    from fastbert.models.config import EncoderConfig
    from fastbert.pretraining.objectives.masked import MaskedLosses
    from fastbert.training.optimizers import decay_groups, optimizer
    from fastbert.training.update import Update

    no_list_kernels()
    sizes = {"hidden_size": COLUMNS, "num_attention_heads": 1, "intermediate_size": COLUMNS}
    config = EncoderConfig(model_type="bert", vocab_size=1000, **sizes)
    ids, seqlen = torch.randint(5, 1000, (4 * 32,), generator=torch.Generator().manual_seed(0)), 32
    labels = torch.where(torch.arange(len(ids)) % 7 == 0, ids, -100)
    inputs = {
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "cu_seqlens": torch.arange(0, len(ids) + 1, seqlen, dtype=torch.int32),
        "max_seqlen": seqlen,
        "labels": labels,
        "labelled": int((labels >= 0).sum()),
        "sentence_labels": torch.zeros(4, dtype=torch.int64),
    }
    found = []
    for name in ("eager", "recorded"):
        losses = MaskedLosses(AutoModelForPreTraining.from_config(config), num_labels=2).train()
        graphed = encoders_of(losses) if name == "recorded" else []
        adam = optimizer("adamw", decay_groups(losses, 0.01))
        update = Update(adam, torch.amp.GradScaler("cpu", enabled=False), 0.0, torch.device("cpu"))

        def step(losses=losses, graphed=graphed, adam=adam, update=update) -> None:
            with serving(graphed), torch.autocast("cpu", torch.bfloat16):
                each, _ = losses(inputs)
            sum(each.values()).backward()
            update.step(1, 1.0)
            adam.zero_grad(set_to_none=True)

        times = microseconds(step, calls)
        found.append(
            {
                "step": "training step",
                "name": f"fastbert-training-{name}",
                "status": "ok",
                "candidate": "fastbert",
                "case": name,
                "min_us": times[0],
                "median_us": statistics.median(times),
                "replayed": all(each.last_fallback is None for each in graphed),
            }
        )
    return found


def no_list_kernels() -> None:
    """Leave out PyTorch's kernels over lists of tensors, and replays."""
    from fastbert.graphs import training
    from fastbert.graphs.recorder import EagerRecorder, Recording

    class Idle(EagerRecorder):
        def record_pair(self, forward, backward):
            return tuple(
                Recording(each.outputs, lambda: None) for each in super().record_pair(forward, backward)
            )

    training.recorder_for = Idle
    training.GraphedTraining._check = lambda *_: None  # nothing is computed
    one = torch.ones(())
    for place in (torch, torch._VF):
        for name in ("_foreach_add_", "_foreach_sub_", "_foreach_mul_", "_foreach_copy_", "_fused_adamw_"):
            setattr(place, name, lambda *args, **options: None)
        place._foreach_norm = lambda tensors: [one.new_ones(()) for _ in tensors]
        place._foreach_mul = lambda tensors, factor: [t.new_empty(t.shape) for t in tensors]


def line(row: dict) -> str:
    if row["step"] == "training step":
        return f"{row['name']}: {row['min_us']:.0f} us at least, median {row['median_us']:.0f}"
    one = "in one call" if row["serving"] else "layer by layer"
    return (
        f"{row['name']}: {row['min_us']:.0f} us at least, median {row['median_us']:.0f}, "
        f"{row['layer_us']:.1f} a layer, {one}"
    )


def main(argv: list[str] | None = None) -> int:
    from bench.lib.machine import describe
    from bench.lib.report import Report

    parser = argparse.ArgumentParser(prog="bench/host.py", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000, help="calls per case")
    parser.add_argument("--out", type=Path, help="folder (default: bench/results/<machine>)")
    args = parser.parse_args(argv)
    if args.calls < 1:
        parser.error(f"--calls: expected an integer >= 1, got {args.calls}")
    torch.set_num_threads(1)
    pretend_gpu()
    environment = describe(torch.device("cpu"))
    folder = args.out or ROOT / "bench" / "results" / environment["slug"]
    report = Report(folder / "host.json", {"calls": args.calls}, None, line)
    report.data["environment"] = environment
    with torch.inference_mode():
        for candidate, dtype in itertools.product(CANDIDATES, (torch.bfloat16, torch.float32)):
            for row in measured(candidate, dtype, args.calls):
                report.row(row)
    for row in steps(max(1, args.calls // 10)):
        report.row(row)
    report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
