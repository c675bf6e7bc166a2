"""Seconds of a model's first use, with nothing compiled or checked yet.

    python bench/gpu/queue/first_use.py --json FILE [--budget SECONDS] [--device cpu]

BERT-base with random weights on 16 x 512 tokens: forwards in bf16, and steps of pre-training under autocast,
each in its own process with empty caches of verdicts and of Triton. A row has the seconds of the imports and
of the first calls in order, the checked kernels, and the number of compiled kernels.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from bench.gpu import groups
from bench.lib import report

CALLS = 3


def timed(what: str, device_name: str) -> dict:
    """Seconds of the imports and of the first calls in this process."""
    begin = time.perf_counter()
    import torch

    import fastbert
    from bench.lib import training, workloads
    from bench.lib.engines import config_of
    from bench.lib.timing import synchronize

    device, dtype = torch.device(device_name), torch.bfloat16
    tiny = device.type == "cpu"
    model = dataclasses.replace(workloads.TINY, layers=1) if tiny else workloads.BASE
    lengths = (3, 4) if tiny else (512,) * 16
    if what == "step":
        module = training.modules(model, "pretraining", ("fastbert",), device)["fastbert"].train()
        inputs, _ = training.batch(lengths, model.vocab, "pretraining", device)
    else:
        module = fastbert.AutoModel.from_config(config_of(model), add_pooling_layer=False)
        module = module.to(device, dtype).eval()
        inputs = workloads.padded_inputs(lengths, model.vocab, device, 0)
    seconds = [time.perf_counter() - begin]
    for _ in range(CALLS):
        begin = time.perf_counter()
        if what == "step":
            with torch.autocast(device.type, dtype):
                module(**inputs).loss.backward()
        else:
            with torch.inference_mode():
                module(**inputs)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return {"model": model.name, "imports_s": seconds[0], "calls_s": seconds[1:]}


def measured(what: str, device: str) -> dict:
    """`timed` in a process with empty caches, and what then lies in them."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"FASTBERT_CACHE": f"{folder}/fastbert", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, what, device]
        done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
        if done.returncode != 0:
            return {"status": "failed", "reason": done.stderr[-1500:]}
        checked = [json.loads(path.read_text()) for path in Path(folder).glob("fastbert/self_checks/*.json")]
        kernels = {" ".join(c["key"][n] for n in ("op", "backend", "dtype")): c["seconds"] for c in checked}
        compiled = len(list(Path(folder).glob("triton/*/*.cubin")))
        found = json.loads(done.stdout.splitlines()[-1])
        return {"status": "ok", **found, "checked_s": kernels, "compiled": compiled}


def line(row: dict) -> str:
    if row["status"] != "ok":
        return report.row_line(row)
    calls = ", ".join(f"{seconds:.2f}" for seconds in row["calls_s"])
    kernels = f"{len(row['checked_s'])} kernels checked, {row['compiled']} compiled"
    return f"{row['name']}: calls of {calls} s; {kernels}"


def main(argv: list[str] | None = None) -> int:
    args = groups.parsed(groups.options(__doc__, samples=1), argv)
    rows = groups.begun(args, line)
    for what in ("forward", "step"):
        rows.row({"step": "first_use", "name": f"first-use-{what}"} | measured(what, args.device))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["forward"], ["step"]):
        print(json.dumps(timed(*sys.argv[1:])))
    else:
        sys.exit(main())
