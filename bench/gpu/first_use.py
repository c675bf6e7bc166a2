"""How long the first use of a model takes on a GPU where nothing is compiled or checked yet.

    python bench/gpu/first_use.py [--dtype bf16|fp16] [--training] [--warm]

The model is BERT-base with random weights, on 16 sequences of 512 tokens: a forward in the dtype, or a step
of pre-training under autocast. Caches of verdicts and of Triton are new folders, unless `--warm` leaves the
user's own. One JSON object per line: the first calls in order, then which kernels were checked, in how long,
and how many lie in Triton's cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

CALLS = 3


def told(**facts: object) -> None:
    """Print one line."""
    print(json.dumps(facts), flush=True)


def caches(warm: bool) -> tuple[Path, Path]:
    """(the folder of verdicts, that of Triton), new ones unless `warm`; before anything is imported."""
    if not warm:
        folder = tempfile.mkdtemp(prefix="first-use-")
        os.environ |= {"FASTBERT_CACHE": f"{folder}/fastbert", "TRITON_CACHE_DIR": f"{folder}/triton"}
    verdicts = os.environ.get("FASTBERT_CACHE") or Path.home() / ".cache" / "fastbert"
    triton = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(verdicts) / "self_checks", Path(triton)


def run(device_name: str, dtype_name: str, in_training: bool) -> None:
    """Time the first calls."""
    begin = time.perf_counter()
    import torch

    import fastbert
    from bench.lib import training, workloads
    from bench.lib.engines import config_of

    device = torch.device(device_name)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype_name]
    tiny = device.type == "cpu"
    model = dataclasses.replace(workloads.TINY, layers=1) if tiny else workloads.BASE
    lengths = (3, 4) if tiny else (512,) * 16
    if in_training:
        module = training.modules(model, "pretraining", ("fastbert",), device)["fastbert"].train()
        inputs, _ = training.batch(lengths, model.vocab, "pretraining", device)
    else:
        module = fastbert.AutoModel.from_config(config_of(model), add_pooling_layer=False)
        module = module.to(device, dtype).eval()
        inputs = workloads.padded_inputs(lengths, model.vocab, device, 0)
    told(what="imported and built", seconds=round(time.perf_counter() - begin, 3))
    for call in range(1, CALLS + 1):
        begin = time.perf_counter()
        if in_training:
            with torch.autocast(device.type, dtype):
                loss = module(**inputs).loss
            loss.backward()
        else:
            with torch.inference_mode():
                module(**inputs)
        if not tiny:
            torch.cuda.synchronize(device)
        told(
            what="step" if in_training else "forward",
            call=call,
            seconds=round(time.perf_counter() - begin, 3),
        )


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="first_use", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="cpu: a dry run of a tiny model")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--training", action="store_true", help="steps of pre-training")
    parser.add_argument("--warm", action="store_true", help="with the user's own caches")
    args = parser.parse_args(argv)
    verdicts, triton = caches(args.warm)
    run(args.device, args.dtype, args.training)
    for path in sorted(verdicts.glob("*.json")):
        data = json.loads(path.read_text())
        kernel = " ".join(data["key"][name] for name in ("op", "backend", "dtype"))
        told(what="checked", kernel=kernel, outcome=data["outcome"], seconds=data["seconds"])
    told(what="compiled", kernels=len(list(triton.glob("*/*.cubin"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
