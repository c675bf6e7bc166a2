"""What does DeBERTa-v3-base gain where attention reads the scores of distances instead of a dense bias?

    python bench/gpu/queue/relative.py --json FILE [--budget SECONDS] [--device cpu]

In bf16 on 8 x 128 and 4 x 512 tokens, a forward in inference and the forward and backward of training, all
interleaved: `read` (the Triton kernels read the scores), `dense` (attention is pinned to a backend that gets
them as a bias, `cuda` on a GPU) and transformers' own. `times_dense` is the time of `dense` over that of
`read`; the goal is 1.3 at 4 x 512. `apart` is the largest distance of the outputs of `read` and `dense`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

from bench.gpu import groups
from bench.lib import served, workloads
from bench.lib.engines import config_of, encoder_of, theirs
from bench.lib.timing import interleave
from fastbert.runtime import dispatch

BATCHES = {"8x128": (128,) * 8, "4x512": (512,) * 4}


def call_of(module: torch.nn.Module, inputs: dict[str, torch.Tensor], train: bool) -> Callable[[], object]:
    """A forward without gradients, or one with its backward."""

    def call() -> torch.Tensor:
        with torch.set_grad_enabled(train):
            hidden = module(**inputs).last_hidden_state
            if train:
                module.zero_grad(set_to_none=True)
                hidden.sum().backward()
        return hidden.detach()

    return call


def rows(modules: dict[str, torch.nn.Module], inputs: dict, device: torch.device, train: bool) -> list[dict]:
    """A row per way, which is a name of `modules`."""
    pins = {"dense": {"attention": "cuda" if device.type == "cuda" else "aten"}}
    within = {name: lambda name=name: dispatch.use_backend(**pins.get(name, {})) for name in modules}
    calls = {name: call_of(module.train(train), inputs, train) for name, module in modules.items()}
    outputs = {}
    for name, call in calls.items():
        with within[name]():
            outputs[name] = call().float()
    few = {"samples": (2, 2), "warmup": 1, "inner": 1} if device.type == "cpu" else {"samples": (10, 50)}
    timed = interleave(calls, device, within=within, **few)
    ms = {name: timing.median_ms for name, timing in timed.items()}
    found = {"times_dense": ms["dense"] / ms["read"]}
    if not train:  # dropout of the embeddings is the same, but rounding differs
        found["apart"] = (outputs["read"] - outputs["dense"]).abs().max().item()
    return [{"way": name, "ms": ms[name]} | (found if name == "read" else {}) for name in ms]


def line(row: dict) -> str:
    shown = (f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float))
    return " ".join([f"{row['name']}:", *shown, row.get("error", "")])


def main(argv: list[str] | None = None) -> int:
    args = groups.parsed(groups.options(__doc__, samples=1), argv)
    tiny, device, left = args.device == "cpu", torch.device(args.device), groups.timer(args)
    report = groups.begun(args, line)
    served.prove(device)
    small = {"hidden": 64, "layers": 2, "heads": 2, "intermediate": 128, "vocab": 211} if tiny else {}
    config = config_of(dataclasses.replace(workloads.DEBERTA, **small))
    with device:
        torch.manual_seed(0)
        ours = encoder_of(config).bfloat16()
        peer = theirs(config, "eager").bfloat16()
    modules = {"read": ours, "dense": ours, "transformers": peer}
    for train in (False, True):
        for batch, lengths in BATCHES.items():
            inputs = workloads.padded_inputs((8, 8) if tiny else lengths, config.vocab_size, device)
            head = {"step": "relative", "name": f"relative-{batch}-{'train' if train else 'forward'}"}
            with groups.recorded(report, head, left, 0 if tiny else 4):
                for row in rows(modules, inputs, device, train):
                    report.row(head | {"name": f"{head['name']}-{row['way']}", "status": "ok"} | row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
