"""The encoder on a CPU beside its peers, in one run: `python bench/bench_cpu.py [--model base]`.

Ours, transformers (sdpa), ONNX Runtime (fp32 and dynamic int8) and OpenVINO (fp32 and bf16), the last two
where they are installed (`pip install .[bench]`). All have the same random weights and the same inputs, are
pinned to the same number of threads and are timed turn by turn; medians. Every peer's output is compared with
transformers' in fp32 first: the mean cosine of the kept tokens' vectors stands in the table, so that nobody
is fast by being wrong. Real tokens per second: padding does not count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench import workloads  # noqa: E402
from bench.peers import build_peer  # noqa: E402
from bench.probe import commit_here, cpu_facts, package_version  # noqa: E402
from bench.timing import interleave  # noqa: E402

WORKLOADS = ("1x128", "1x512", "8x128", "ragged16")
MODELS = {**workloads.MODELS, "minilm": workloads.Model("minilm", 384, 6, 12, 1536)}
PEERS = ("transformers", "onnxruntime", "openvino")
COLUMNS = ("workload", "candidate", "ms", "tokens_per_s", "gflops", "cosine", "spread", "n")
EXPORTED = ("onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32", "openvino-bf16")
LINE = "{:10} {:20} {:>10} {:>13} {:>8} {:>9} {:>7} {:>4}"

Forward = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def torch_forward(module: torch.nn.Module) -> Forward:
    """Last hidden state by a PyTorch model, in inference mode."""

    def forward(inputs):
        with torch.inference_mode():
            return module(**inputs).last_hidden_state

    return forward


def export(module: torch.nn.Module, folder: Path) -> Path:
    """The transformers model as ONNX, of dynamic batch and length."""
    path = folder / "model.onnx"
    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = {name: torch.ones(2, 16, dtype=torch.int64) for name in names}  # one tensor would be one input
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (), str(path), kwargs=example, input_names=names, verbose=False,
            output_names=["last_hidden_state"], dynamo=True,
            dynamic_shapes={n: {0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen")} for n in names},
        )  # fmt: skip
    return path


def arrays(inputs: dict[str, torch.Tensor]) -> dict:
    """NumPy inputs of an exported model; the mask is always there."""
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    return {
        "input_ids": inputs["input_ids"].numpy(),
        "attention_mask": mask.numpy(),
        "token_type_ids": inputs["token_type_ids"].numpy(),
    }


def onnxruntime_forward(path: Path, threads: int, int8: bool) -> Forward:
    """ONNX Runtime, its transformer fusions on; `int8` quantises the weights dynamically, per channel."""
    import onnxruntime

    if int8:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        target = path.with_name("int8.onnx")
        quantize_dynamic(str(path), str(target), per_channel=True, weight_type=QuantType.QInt8)
        path = target
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, arrays(inputs))[0])


def openvino_forward(path: Path, threads: int, precision: str) -> Forward:
    """OpenVINO, latency hint, `precision` "f32" or "bf16"."""
    import openvino

    config = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(str(path), "CPU", {**config, "PERFORMANCE_HINT": "LATENCY"})
    return lambda inputs: torch.from_numpy(compiled(arrays(inputs))[0])


def candidates(
    model: workloads.Model, threads: int, folder: Path, only: tuple[str, ...]
) -> dict[str, Forward]:
    """name -> forward, of everything wanted that is installed; what is not is said on stderr."""
    import fastbert

    name, peer = build_peer(model, False, torch.device("cpu"))
    if name != "transformers_sdpa":
        sys.exit("bench_cpu needs transformers: pip install .[bench]")
    peer.eval()
    found = {}
    for dtype, tag in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        ours = fastbert.AutoModel.from_config(peer.config, add_pooling_layer=False).eval()
        ours.load_state_dict(peer.state_dict())
        found[f"fastbert-{tag}"] = torch_forward(ours.to(dtype))
        theirs = build_peer(model, False, torch.device("cpu"))[1].eval()
        theirs.load_state_dict(peer.state_dict())
        found[f"transformers-{tag}"] = torch_forward(theirs.to(dtype))
    found = {name: forward for name, forward in found.items() if name.startswith(only)}
    exported = [name for name in EXPORTED if name.startswith(only)]
    if not exported:
        return found
    try:
        path = export(peer, folder)
    except Exception as error:
        print(
            f"# no ONNX export, so no ONNX Runtime and OpenVINO: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
        return found
    makers = {
        "onnxruntime-fp32": lambda: onnxruntime_forward(path, threads, False),
        "onnxruntime-int8": lambda: onnxruntime_forward(path, threads, True),
        "openvino-fp32": lambda: openvino_forward(path, threads, "f32"),
        "openvino-bf16": lambda: openvino_forward(path, threads, "bf16"),
    }
    for name in exported:
        try:
            found[name] = makers[name]()
        except Exception as error:
            print(f"# {name} is left out: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    return found


def kept_vectors(hidden: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """(real tokens, hidden) in float32."""
    mask = inputs.get("attention_mask")
    return (hidden if mask is None else hidden[mask.bool()]).reshape(-1, hidden.shape[-1]).float()


def main() -> int:
    """Time what the arguments name; print a line and rewrite the JSON file after each workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("base", "large", "minilm", "tiny"), default="base")
    parser.add_argument("--workload", action="append", choices=workloads.names())
    parser.add_argument("--only", action="append", help="candidates whose name begins with this")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows here, after each workload")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = MODELS[args.model]
    rows: list[dict] = []
    head = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **commit_here(),
        "cpu": cpu_facts(),
        "versions": {name: package_version(name) for name in PEERS},
        "model": args.model,
        "threads": args.threads,
        "torch": torch.__version__,
    }
    print(f"# BERT-{args.model}, {args.threads} threads, torch {torch.__version__}")
    print(LINE.format(*COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        forwards = candidates(model, args.threads, Path(folder), tuple(args.only or ("",)))
        for name in args.workload or WORKLOADS:
            lengths = workloads.lengths(name)
            inputs = workloads.padded_inputs(lengths, model.vocab, "cpu")
            truth = kept_vectors(
                forwards.get("transformers-fp32", next(iter(forwards.values())))(inputs), inputs
            )
            cosine = {
                k: torch.cosine_similarity(kept_vectors(f(inputs), inputs), truth).mean().item()
                for k, f in forwards.items()
            }
            timed = interleave(
                {k: partial(f, inputs) for k, f in forwards.items()},
                "cpu", seconds=0.0, samples=(args.samples, args.samples), warmup=1,
            )  # fmt: skip
            for candidate, timing in timed.items():
                seconds = timing.median_ms * 1e-3
                row = {
                    "workload": name,
                    "candidate": candidate,
                    "ms": round(timing.median_ms, 1),
                    "tokens_per_s": round(sum(lengths) / seconds),
                    "gflops": round(workloads.encoder_flops(lengths, model) / seconds / 1e9, 1),
                    "cosine": round(cosine[candidate], 5),
                    "spread": round(timing.spread, 2),
                    "n": timing.n,
                }
                rows.append(row)
                print(LINE.format(*(str(row[c]) for c in COLUMNS)), flush=True)
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
