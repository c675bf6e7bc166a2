"""What a call of a graphed model costs the host: `python bench/graphs.py`.

The recorder here replays nothing, so only the host's work is left: checks of the inputs and weights, packing,
copies of inputs and outputs. It is counted on a CPU, where no GPU is waited for. The model has BERT-base's 12
layers with all their modules and tensors, but 64 columns, so that copies take next to no time. Its weights
are derived and watched as on a GPU: query, key and value joined, marks, no samples of the memory.

The lanes:
- `host`: all inputs are in CPU memory, as the tokens of a tokenizer are.
- `device`: they count as a GPU's, so the host first copies them to itself. A real copy waits for the GPU.

Each lane has its own processes, in turn; a sample is the median call of one process. Rows go to
bench/results/<machine>/graphs.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

LANES = ("host", "device")
CALLS = 300  # of each case in a round
WARM_UP = 20
COLUMNS = 64


def cases() -> dict[str, dict]:
    """Name -> arguments of a call."""
    generator = torch.Generator().manual_seed(0)

    def batch(lengths: list[int], seqlen: int = 128) -> dict[str, torch.Tensor]:
        shape = len(lengths), seqlen
        ids = torch.randint(5, 1000, shape, generator=generator)
        mask = (torch.arange(seqlen) < torch.tensor(lengths).unsqueeze(1)).long()
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}

    whole = batch([128])
    return {
        "ids-1x128": {"input_ids": whole["input_ids"]},
        "tokenizer-1x128": whole,
        "first_token-1x128": whole | {"first_token_only": True},
        "padded-8x128": batch([128, 90, 17, 64, 33, 128, 5, 77]),
    }


def graphed_model() -> Callable:
    """A graphed encoder whose weights are watched as on a GPU and whose replays do nothing."""
    import fastbert
    from fastbert.execution import cpu
    from fastbert.graphs.recorder import EagerRecorder, Recording
    from fastbert.layers import float_linear, linear
    from fastbert.models.auto import AutoModel
    from fastbert.models.config import EncoderConfig
    from fastbert.runtime import prepared

    class NoReplay(EagerRecorder):
        def record(self, function: Callable) -> Recording:
            return Recording(function(), lambda: None)

    # what a CPU has instead: layers in one call, panels of weights, samples of memory
    cpu.serves = lambda *_: "off"
    float_linear.linear_panel_maker = lambda *_: None
    prepared._samples_of = lambda *_: []
    prepared._pages_of = lambda *_: (None, {})
    kinds = linear.LINEAR_KINDS
    kinds[torch.nn.Linear] = kinds[torch.nn.Linear]._replace(joins=lambda x, modules: True)
    config = EncoderConfig(
        model_type="bert", hidden_size=COLUMNS, num_attention_heads=1, intermediate_size=COLUMNS
    )
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    return fastbert.graph(model, max_tokens=2048, max_batch=64, recorder=NoReplay)


def microseconds(call: Callable[[], object], calls: int) -> list[float]:
    """The times of calls, ascending."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return sorted(times)


def serve(lane: str, calls: int) -> dict[str, dict]:
    """Measure in this process: case -> least and median milliseconds."""
    torch.set_num_threads(1)
    graphed, found = graphed_model(), {}
    if lane == "device":
        from fastbert.graphs import staging

        staging.is_on_host = lambda t: False
    with torch.inference_mode():
        for name, given in cases().items():
            times = microseconds(lambda given=given: graphed(**given), calls)
            if graphed.last_fallback is not None:
                raise RuntimeError(f"{name}: {graphed.last_fallback}")
            found[name] = {"min_ms": times[0] / 1e3, "median_ms": statistics.median(times) / 1e3}
    return found


def ask(lane: str, calls: int) -> dict[str, dict]:
    """`serve` in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", lane, "--calls", str(calls)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{lane}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/graphs.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="processes per lane, interleaved")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls per case and process")
    parser.add_argument("--out", type=Path, help="folder (default: bench/results/<machine>)")
    parser.add_argument("--note", help="a remark to keep with the results")
    parser.add_argument("--serve", choices=LANES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("rounds", "calls"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected an integer >= 1, got {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.serve:
        print(json.dumps(serve(args.serve, args.calls)))
        return 0
    from bench.lib.machine import describe
    from bench.lib.report import Report
    from bench.lib.timing import summarise

    environment = describe(torch.device("cpu"))
    folder = args.out or ROOT / "bench" / "results" / environment["slug"]
    settings = {"rounds": args.rounds, "calls": args.calls}
    report = Report(folder / "graphs.json", settings, args.note)
    report.data["environment"] = environment
    start = time.monotonic()
    found: dict[str, list[dict]] = {lane: [] for lane in LANES}
    for _ in range(args.rounds):
        for lane in LANES:
            found[lane].append(ask(lane, args.calls))
    for lane, rounds in found.items():
        for case in cases():
            times = [measured[case] for measured in rounds]
            timing = summarise([each["median_ms"] for each in times], args.calls, "wall").facts()
            report.row(
                {
                    "step": "graphed call",
                    "status": "ok",
                    "name": f"fastbert-{lane}-{case}",
                    "candidate": "fastbert",
                    "lane": lane,
                    "case": case,
                    **timing,
                    "min_ms": min(each["min_ms"] for each in times),
                }
            )
    report.end(seconds=round(time.monotonic() - start, 1))
    print(f"# done in {report.data['seconds']:.0f} s: {report.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
