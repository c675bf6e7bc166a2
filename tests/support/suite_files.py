"""What a run of the benchmark suite writes, made up: two groups of the encoder, three of the ops."""

from __future__ import annotations

import statistics

SLUG = "cpu-a-processor-2c"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOFS = {"gflops": {"fp32": 100.0, "bf16": 100.0, "fp16": 100.0, "int8": 400.0}, "gbytes": 20.0}


def times(median: float) -> dict:
    """pytest-benchmark's statistics of three samples."""
    data = [median * 1.01, median, median * 0.99]
    stats = {"min": min(data), "max": max(data), "median": statistics.median(data), "rounds": 3, "data": data}
    return stats | {"q1": data[2], "q3": data[0], "mean": median}


def encoder(workload: str, tokens: int, padded: int, candidate: str, seconds: float, **over: object) -> dict:
    """A benchmark of the encoder."""
    extra = {
        "model": "base",
        "workload": workload,
        "tokens": tokens,
        "padded_tokens": padded,
        "tokens_per_s": tokens / seconds,
        "gflops": 50.0,
        "floor_ms": 1.0,
        "of_floor": 0.5,
        "floor_tokens_per_s": {"fp32": 2000.0, "bf16": 2000.0, "fp16": 2000.0, "int8": 9000.0},
        "cosine": 1.0,
        "cosine_to": "transformers-fp32",
    }
    params = {"model": "base", "workload": workload, "candidate": candidate}
    return benchmark(f"encoder-base-{workload}", params, extra, seconds, over)


def op(name: str, case: str, candidate: str, flops: float, moved: float, seconds: float, **over) -> dict:
    """A benchmark of an op's forward in fp32."""
    backend = candidate.split("-")[0]
    params = {"op": name, "case": case, "dtype": "fp32", "pass": "forward", "candidate": candidate}
    extra = {key: params[key] for key in ("op", "case", "dtype", "pass")} | {
        "workload": "8x128",
        "backend": backend,
        "flops": flops,
        "moved_bytes": moved,
        "gflops": flops / seconds * 1e-9,
        "gbs": moved / seconds * 1e-9,
        "of_roof": 0.8,
        "serves": backend == "cpu",
    }
    return benchmark(f"ops-{name}-{case}-fp32-forward", params, extra, seconds, over)


def benchmark(group: str, params: dict, extra: dict, seconds: float, over: dict) -> dict:
    """A line of a file's `benchmarks`."""
    common = {"candidate": params["candidate"], "correct": True, "noisy": False, "spread": 0.02}
    common["over"] = {name.replace("_fp32", "-fp32"): ratio for name, ratio in over.items()}
    return {
        "group": group,
        "name": f"test[{group}-{params['candidate']}]",
        "params": params,
        "extra_info": extra | common,
        "stats": times(seconds),
    }


def memory(candidate: str, peak: float, over: dict) -> dict:
    """The memory of one process."""
    sizes = {"peak_mib": peak, "above_mib": peak - 400.0, "model": "base", "workload": "ragged64"}
    sizes |= {"correct": True, "noisy": False}
    return {"group": "memory-base-ragged64", "name": "test", "candidate": candidate, "over": over} | sizes


def suite_file(
    commit: str = COMMIT, date: str = "2026-11-01T10:00:00+00:00", ours: float = 1.0, slug: str = SLUG
) -> dict:
    """The content of a file; our times are multiplied by `ours`."""
    benchmarks = [
        encoder("8x128", 1024, 1024, "fastbert-fp32", ours, transformers_fp32=2.0 / ours),
        encoder("8x128", 1024, 1024, "transformers-fp32", 2.0),
        encoder("ragged16", 2048, 4096, "fastbert-fp32", 2.0 * ours, transformers_fp32=8.0 / (2.0 * ours)),
        encoder("ragged16", 2048, 4096, "transformers-fp32", 8.0),
        op("linear", "1024x768x768", "cpu-fp32", 1e9, 1e7, 0.0125 * ours, torch_fp32=0.02 / (0.0125 * ours)),
        op("linear", "1024x768x768", "torch-fp32", 1e9, 1e7, 0.02),
        op("linear", "1024x768x2304-gelu", "cpu-fp32", 3e9, 2e7, 0.04 * ours),
        op("packing", "8x128", "cpu-fp32", 0.0, 1e7, 0.001 * ours, torch_fp32="too noisy: torch-fp32"),
        op("packing", "8x128", "torch-fp32", 0.0, 1e7, 0.002),
    ]
    lost = {"group": "encoder-base-8x128", "name": "test[x]", "candidate": "openvino-fp32"}
    return {
        "machine_info": {
            "device_type": "cpu",
            "device": "a processor",
            "slug": slug,
            "threads": 2,
            "torch": "2.13.0+cpu",
            "cpu": {"name": "a processor", "cores": 2},
        },
        "commit_info": {"id": commit, "dirty": False},
        "datetime": date,
        "version": "5.3.1",
        "fastbert": {
            "schema": 1,
            "commit": commit,
            "changed": False,
            "note": None,
            "settings": {"smoke": False, "samples": 3},
            "roofs": ROOFS,
            "seconds": 1.5,
            "memory": [
                memory("fastbert-fp32", 500.0, {"transformers-fp32": 0.5, "onnxruntime-fp32": "error"}),
                memory("transformers-fp32", 1000.0, {}),
            ],
            "without_a_time": [lost | {"why": "not installed: pip install openvino"}],
        },
        "benchmarks": benchmarks,
    }
