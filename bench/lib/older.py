"""Figures of docs/numbers.md from files of before the suite: another processor, and memory counted for a GPU.

Each file is one run of a script that the suite has replaced; the files stay as they were measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from bench.lib.quoted import HEADS, PEERS
from bench.lib.results import RESULTS
from bench.lib.tables import table

MACHINE = "cpu-intel-xeon-processor-family-6-model-207-2c"
WORKLOADS = ("1x128", "1x512", "8x128", "ragged16")
# the two kinds of training, and the steps whose rows are medians of samples
TRAINED = {"fp32": "fp32", "bf16": "bf16 autocast"}
TIMED = ("encoder", "training", "encode")


@cache
def result(name: str) -> dict[str, Any]:
    """A file of the machine's results."""
    return json.loads((RESULTS / MACHINE / f"{name}.json").read_text())


def ratio(file: str, /, **wanted: object) -> float:
    """The ratio in the last row of `file` whose keys are as wanted: a later row replaces an earlier one."""
    found = [row for row in result(file)["ratios"] if all(row.get(k) == v for k, v in wanted.items())]
    if not found:
        raise ValueError(f"{file}.json: no ratio with {wanted}")
    return found[-1]["ratio"]


def times(file: str, ours: str, theirs: str, **wanted: object) -> str:
    """The ratio of our candidate to theirs, in fp32 and bf16."""
    pairs = {tag: dict(ours=f"{ours}-{tag}", theirs=f"{theirs}-{tag}") for tag in ("fp32", "bf16")}
    return ", ".join(f"{ratio(file, **pair, **wanted):.2f} × ({tag})" for tag, pair in pairs.items())


def forward() -> list[str]:
    """Real tokens per second of BERT-base by every engine, dtype by dtype."""
    rows = {
        (row["candidate"], row["workload"]): f"{row['tokens_per_s']:,.0f}"
        for row in result("bench_cpu")["rows"]
        if row["step"] == "encoder" and row["model"] == "base" and row["status"] == "ok"
    }
    body = []
    for tag in ("fp32", "bf16", "int8"):
        for engine, label in ({"fastbert": "**fastbert**"} | PEERS).items():
            cells = [rows.get((f"{engine}-{tag}", workload)) for workload in WORKLOADS]
            if any(cells):
                dynamic = " (dynamic)" if (engine, tag) == ("onnxruntime", "int8") else ""
                body.append([f"{label} {tag}{dynamic}", *(cell or "–" for cell in cells)])
    return table(["BERT-base, real tokens per second", *WORKLOADS], body)


def minilm() -> list[str]:
    """MiniLM's forward: our speed over each peer's."""
    found = [
        row for row in result("bench_cpu")["ratios"] if (row["step"], row["model"]) == ("encoder", "minilm")
    ]
    workloads = list(dict.fromkeys(row["workload"] for row in found))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for row in found:
        peer, _, dtype = row["theirs"].partition("-")
        rows.setdefault((dtype, PEERS[peer]), {})[row["workload"]] = f"{row['ratio']:.2f}"
    body = [
        [f"{dtype}, over {peer}", *(cells.get(w, "–") for w in workloads)]
        for (dtype, peer), cells in sorted(rows.items(), reverse=True)
    ]
    return table(["MiniLM, times a peer's speed", *workloads], body)


def training() -> list[str]:
    """A training step: our speed over that of transformers and of torch.compile of it."""
    body = []
    for head, text in HEADS.items():
        step = dict(step="training", model="base", workload="8x128", head=head)
        pairs = [dict(ours=f"fastbert-{dtype}", theirs=f"transformers-{dtype}") for dtype in TRAINED]
        found = [ratio("bench_cpu", **step, **pair) for pair in pairs]
        others = [dict(dtype=dtype, theirs="torch_compile") for dtype in TRAINED]
        found += [ratio("bench_training", **step, **other) for other in others]
        body.append([text, *(f"{each:.2f}" for each in found)])
    heads = (f"{peer}, {tag}" for peer in ("transformers", "torch.compile") for tag in TRAINED.values())
    return table(["BERT-base's step at 8 x 128, times the speed of", *heads], body)


def shares() -> list[str]:
    """Our share of transformers' memory in a forward, and the speed of accelerated models."""
    memory = dict(step="memory", model="base", workload="ragged64")
    whole, above = (
        times("bench_cpu", "fastbert", "transformers", **memory, of=of) for of in ("peak_mib", "above_mib")
    )
    encoder = dict(step="encoder", model="base", workload="ragged16")
    stock = dict(step="encode", model="minilm", ours="accelerated-fp32", theirs="sentence_transformers-fp32")
    speed = times("bench_accelerate", "accelerated", "transformers", **encoder)
    body = [
        ["BERT-base, forward of 64 ragged sequences", whole, "peak memory of transformers' process"],
        ["the same, above the loaded model", above, "transformers' memory"],
        ["BERT-base, `ragged16`, after `fastbert.accelerate`", speed, "speed of the stock model"],
    ]
    for text in ("sentences", "paragraphs"):
        found = ratio("bench_accelerate", **stock, workload=f"{text}1000")
        what = f"`SentenceTransformer.encode`, MiniLM, 1,000 {text}, after it"
        body.append([what, f"{found:.2f} × (fp32)", "speed of the stock model"])
    return table(["", "fastbert", "of"], body)


def counted() -> list[str]:
    """Our share of transformers' memory in a training step on a GPU, counted on tensors without data."""
    step = dict(step="footprint", model="base", workload="full", theirs="transformers", of="peak_mib")
    peaks = {
        (row["head"], row["candidate"]): f"{row['peak_mib'] / 1024:.1f} GiB"
        for row in result("bench_training")["rows"]
        if row["step"] == "footprint"
    }
    body = []
    for head in ("pretraining", "classification"):
        ours, theirs = (peaks[head, f"{name}-bf16"] for name in ("fastbert", "transformers"))
        share = f"{ratio('bench_training', **step, head=head):.2f} × (bf16 autocast): {ours} of {theirs}"
        body.append([f"training step of {head} at 32 x 512 on a GPU, peak", share])
    return [
        *table(["BERT-base, counted, not measured", "share of transformers' memory"], body),
        "",
        file("bench_training") + ".",
    ]


def file(name: str) -> str:
    """Path, commit and date of a file."""
    data = result(name)
    return f"`bench/results/{MACHINE}/{name}.json`, commit {data['commit'][:9]}, {data['date'][:10]}"


def spreads() -> list[str]:
    """How sure the rows of each file are: samples, and the spread between a row's quartiles."""
    body = []
    for name in ("bench_cpu", "bench_training", "bench_accelerate"):
        timed = [r for r in result(name)["rows"] if r["status"] == "ok" and r["step"] in TIMED]
        samples = ", ".join(map(str, sorted({row["n"] for row in timed})))
        spread = sorted(row["spread"] for row in timed)
        body.append([file(name), samples, f"{spread[len(spread) // 2]:.0%}", f"{spread[-1]:.0%}"])
    return table(["file", "samples per row", "median spread", "largest spread"], body)


def all_of_it() -> list[str]:
    """Everything measured on that processor."""
    parts: Iterable[list[str]] = (spreads(), forward(), minilm(), training(), shares())
    return [line for part in parts for line in (*part, "")][:-1]
