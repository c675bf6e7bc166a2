"""The generated parts of README and docs: numbers from bench/results, op matrix and floors from the package.

    python docs/make.py            write them
    python docs/make.py --check    write nothing; exit status 1 if something would change

A generated part lies between `<!-- NAME: made by docs/make.py -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fastbert.runtime import dispatch

ROOT = Path(__file__).resolve().parent.parent
MACHINE = "cpu-intel-xeon-processor-family-6-model-207-2c"
RESULTS = ROOT / "bench" / "results" / MACHINE
PEERS = {
    "transformers": "transformers sdpa",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "torch_compile": "torch.compile",
    "sentence_transformers": "sentence-transformers",
}
DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
# the two kinds of training, and the steps whose rows are medians of samples
TRAINED = {"fp32": "fp32", "bf16": "bf16 autocast"}
TIMED = ("encoder", "training", "encode")


# ---- bench/results -> rows of numbers ----


@cache
def _result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _ratio(file: str, /, **wanted: object) -> float:
    """The ratio in the last row of `file` whose keys are as wanted: a later row replaces an earlier one."""
    found = [
        row for row in _result(file)["ratios"] if all(row.get(key) == value for key, value in wanted.items())
    ]
    if not found:
        raise ValueError(f"{file}.json: no ratio with {wanted}")
    return found[-1]["ratio"]


def _rate(file: str, model: str, candidate: str, workload: str, unit: str = "tokens_per_s") -> str:
    for row in _result(file)["rows"]:
        if (row.get("model"), row.get("candidate"), row.get("workload")) == (model, candidate, workload) and (
            unit in row
        ):
            return f"{row[unit]:,.0f}"
    raise ValueError(f"{file}.json: no {unit} of {candidate}, {model}, {workload}")


def _forward(dtype: str, workload: str, *peers: str) -> list[str]:
    """Real tokens per second of BERT-base, ours and the peers'."""
    theirs = [f"{PEERS[peer]} {_rate('bench_cpu', 'base', f'{peer}-{dtype}', workload)}" for peer in peers]
    return [_rate("bench_cpu", "base", f"fastbert-{dtype}", workload), ", ".join(theirs)]


def _times(file: str, ours: str, theirs: str, **wanted: object) -> str:
    """The ratio of our candidate to theirs, in fp32 and bf16."""
    found = []
    for dtype in ("fp32", "bf16"):
        candidates = {"ours": f"{ours}-{dtype}", "theirs": f"{theirs}-{dtype}"}
        found.append(f"{_ratio(file, **candidates, **wanted):.2f} × ({dtype})")
    return ", ".join(found)


def numbers() -> list[str]:
    """README's eight rows."""
    three = ("transformers", "onnxruntime", "openvino")
    step = dict(step="training", model="base", workload="8x128", head="classification")
    compiled = _ratio("bench_training", **step, dtype="fp32", theirs="torch_compile")
    memory = dict(step="memory", model="base", workload="ragged64", of="peak_mib")
    in_place = dict(step="encoder", model="base", workload="ragged16")
    stock = dict(step="encode", model="minilm", ours="accelerated-fp32", theirs="sentence_transformers-fp32")
    sentences = _ratio("bench_accelerate", **stock, workload="sentences1000")
    paragraphs = _ratio("bench_accelerate", **stock, workload="paragraphs1000")
    rows = [
        ["forward, fp32, 16 ragged sequences", *_forward("fp32", "ragged16", *three), "bench_cpu"],
        [
            "forward, bf16, 16 ragged sequences",
            *_forward("bf16", "ragged16", "transformers", "openvino"),
            "bench_cpu",
        ],
        ["forward, int8, 16 ragged sequences", *_forward("int8", "ragged16", "onnxruntime"), "bench_cpu"],
        ["forward, fp32, dense 8 x 128", *_forward("fp32", "8x128", *three), "bench_cpu"],
        [
            "training step, dense 8 x 128",
            _times("bench_cpu", "fastbert", "transformers", **step),
            f"speed of transformers sdpa; of torch.compile {compiled:.2f} × (fp32, `bench_training.json`)",
            "bench_cpu",
        ],
        [
            "peak memory of a forward, 64 ragged sequences",
            _times("bench_cpu", "fastbert", "transformers", **memory),
            "memory of transformers sdpa, the whole process",
            "bench_cpu",
        ],
        [
            "`fastbert.accelerate`, 16 ragged sequences",
            _times("bench_accelerate", "accelerated", "transformers", **in_place),
            "speed of the stock model",
            "bench_accelerate",
        ],
        [
            "`SentenceTransformer.encode`, MiniLM, fp32",
            f"{sentences:.2f} × (1,000 sentences), {paragraphs:.2f} × (1,000 paragraphs)",
            "speed of stock sentence-transformers",
            "bench_accelerate",
        ],
    ]
    head = ["BERT-base, real tokens per second", "fastbert", "beside", "source"]
    return _table(head, [[*row[:3], f"`{row[3]}.json`"] for row in rows])


def minilm() -> list[str]:
    """MiniLM's forward: our speed over each peer's."""
    found = [
        row for row in _result("bench_cpu")["ratios"] if (row["step"], row["model"]) == ("encoder", "minilm")
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
    return _table(["MiniLM, times a peer's speed", *workloads], body)


def training() -> list[str]:
    """A training step: our speed over that of transformers and of torch.compile of it."""
    heads = {"classification": "classification", "pretraining": "masked tokens and next sentence"}
    body = []
    for head, text in heads.items():
        step = dict(step="training", model="base", workload="8x128", head=head)
        pairs = [dict(ours=f"fastbert-{dtype}", theirs=f"transformers-{dtype}") for dtype in TRAINED]
        ratios = [_ratio("bench_cpu", **step, **pair) for pair in pairs]
        others = [dict(dtype=dtype, theirs="torch_compile") for dtype in TRAINED]
        ratios += [_ratio("bench_training", **step, **other) for other in others]
        body.append([text, *(f"{ratio:.2f}" for ratio in ratios)])
    peers = ("transformers", "torch.compile")
    head = ["BERT-base", *(f"{peer}, {dtype}" for peer in peers for dtype in TRAINED.values())]
    return _table(head, body)


def memory() -> list[str]:
    """Our share of transformers' memory: of a forward, measured, and of a training step, counted."""
    forward = dict(step="memory", model="base", workload="ragged64")
    whole, above = (
        _times("bench_cpu", "fastbert", "transformers", **forward, of=of) for of in ("peak_mib", "above_mib")
    )
    step = dict(step="footprint", model="base", workload="full", theirs="transformers", of="peak_mib")
    counted = {
        head: _ratio("bench_training", **step, head=head) for head in ("pretraining", "classification")
    }
    peaks = {
        (row["head"], row["candidate"]): f"{row['peak_mib'] / 1024:.1f} GiB"
        for row in _result("bench_training")["rows"]
        if row["step"] == "footprint"
    }
    body = [
        ["forward of 64 ragged sequences, peak of the process", whole, "measured, `bench_cpu.json`"],
        ["the same, above the loaded model", above, "measured, `bench_cpu.json`"],
    ]
    for head, ratio in counted.items():
        ours, theirs = (peaks[head, f"{name}-bf16"] for name in ("fastbert", "transformers"))
        share = f"{ratio:.2f} × (bf16 autocast): {ours} of {theirs}"
        what = f"training step of {head} at 32 x 512 on a GPU, peak"
        body.append([what, share, "counted, `bench_training.json`"])
    return _table(["BERT-base", "share of transformers' memory", "how, and where"], body)


def in_place() -> list[str]:
    """Accelerated models: our speed over the stock model's."""
    encoder = dict(step="encoder", model="base", workload="ragged16")
    stock = dict(step="encode", model="minilm", ours="accelerated-fp32", theirs="sentence_transformers-fp32")
    body = [["BERT-base, `ragged16`", _times("bench_accelerate", "accelerated", "transformers", **encoder)]]
    for text in ("sentences", "paragraphs"):
        ratio = _ratio("bench_accelerate", **stock, workload=f"{text}1000")
        body.append([f"`SentenceTransformer.encode`, MiniLM, 1,000 {text}", f"{ratio:.2f} × (fp32)"])
    return _table(["after `fastbert.accelerate`", "times the stock model's speed"], body)


def spreads() -> list[str]:
    """How sure the rows of each file are: samples, and the spread between a row's quartiles."""
    body = []
    for name in ("bench_cpu", "bench_training", "bench_accelerate"):
        data = _result(name)
        timed = [r for r in data["rows"] if r["status"] == "ok" and r["step"] in TIMED]
        samples = sorted({row["n"] for row in timed})
        spread = sorted(row["spread"] for row in timed)
        middle, most = f"{spread[len(spread) // 2]:.0%}", f"{spread[-1]:.0%}"
        when = f"{data['date'][:10]}, commit {data['commit'][:9]}"
        body.append([f"`{name}.json`", when, ", ".join(map(str, samples)), middle, most])
    return _table(["file", "measured", "samples per row", "median spread", "largest spread"], body)


# ---- the package -> op matrix, floors ----


def _passes(backend: str, op: str) -> str:
    return "fwd, bwd" if dispatch.has_backward(backend, op) else "fwd"


def matrix() -> list[str]:
    """A row per op, a column per backend: passes, and the dtypes it stores."""
    body = []
    for op in dispatch.OPS:
        cells = []
        for backend in dispatch.BACKENDS:
            stored = dispatch.backend_module(backend).DTYPES.get(op)
            if stored is None:
                cells.append("–")
                continue
            dtypes = " ".join(name for dtype, name in DTYPES.items() if dtype in stored)
            cells.append(f"{_passes(backend, op)} · {dtypes}")
        body.append([f"`{op}`", *cells])
    return _table(["op", *(f"`{backend}`" for backend in dispatch.BACKENDS)], body)


def order() -> list[str]:
    """A row per line of the dispatch table."""
    body = [
        [f"`{line}`", device, ", ".join(f"`{name}`" for name in backends)]
        for device, lines in dispatch.TABLE.items()
        for line, backends in lines.items()
    ]
    return _table(["op, or a part of its calls", "device", "backends, best first"], body)


KERNELS = "Triton kernels and their launchers: `fastbert/kernels` is a link to `kernels/`"
IMPORT = re.compile(r"^(?:from fastbert import|from fastbert\.|import fastbert\.)(\w+)", re.MULTILINE)


def floors() -> list[str]:
    """A row per room, the highest floor first: its floor, what it is, and the rooms that it imports."""
    source = (ROOT / "tests" / "house" / "test_floors.py").read_text()
    (text,) = re.findall(r"^FLOORS = (\(.*?^\))", source, re.DOTALL | re.MULTILINE)
    plan = ast.literal_eval(text)
    order = [room for rooms in plan for room in rooms]
    body = []
    for floor, rooms in reversed(list(enumerate(plan))):
        for room in rooms:
            folder = ROOT / "kernels" if room == "kernels" else ROOT / "fastbert" / room
            files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
            imported = {name for file in files for name in IMPORT.findall(file.read_text())} - {room}
            uses = ", ".join(f"`{name}`" for name in order if name in imported)
            body.append([str(floor), f"`{room}`", _what(room, files), uses or "–"])
    return _table(["floor", "room of `fastbert/`", "what", "imports, as it is loaded"], body)


def _what(room: str, files: list[Path]) -> str:
    """The first line of a room's docstring."""
    if room == "kernels":
        return KERNELS
    (start,) = [file for file in files if file.stem == "__init__" and file.parent.name == room] or files
    return ast.get_docstring(ast.parse(start.read_text())).splitlines()[0].rstrip(".")


# ---- files ----


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


PARTS: dict[str, list[tuple[str, Callable[[], list[str]]]]] = {
    "README.md": [("eight rows", numbers)],
    "docs/numbers.md": [
        ("spreads", spreads),
        ("minilm", minilm),
        ("training", training),
        ("memory", memory),
        ("in place", in_place),
    ],
    "docs/op-matrix.md": [("op matrix", matrix), ("dispatch table", order)],
    "docs/floors.md": [("floors", floors)],
}


def made(text: str, name: str, lines: list[str]) -> str:
    """`text` with the part `name` replaced. ValueError where its two markers are not there once each."""
    begin, end = f"<!-- {name}: made by docs/make.py -->\n", f"<!-- end of {name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected {begin.strip()} and {end.strip()}, once each")
    body = begin + "\n" + "\n".join(lines) + "\n\n" + end
    return re.sub(re.escape(begin) + r".*?" + re.escape(end), lambda _: body, text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Write the generated parts; with --check, only say which files are out of date."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    changed = []
    for file, parts in PARTS.items():
        path = ROOT / file
        before = after = path.read_text()
        for name, make in parts:
            after = made(after, name, make())
        if after != before:
            changed.append(file)
            if not arguments:
                path.write_text(after)
    for file in changed:
        print(f"{file}: {'out of date' if arguments else 'written'}")
    return 1 if arguments and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
