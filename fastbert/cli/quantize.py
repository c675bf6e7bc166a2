"""`fastbert quantize`: a model of integers or 8-bit floats in a new directory, and what it costs."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import numpy as np

from fastbert.analysis import results
from fastbert.cli.analyses.loading import model_of
from fastbert.cli.costs import costs
from fastbert.cli.usage import UsageError
from fastbert.compression import published
from fastbert.compression.quantization import QuantizedLayer, quantization_report
from fastbert.finetuning.run import copy_files
from fastbert.layers import float8
from fastbert.models.base import PreTrainedModel
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.files import filled_lines


def run(args: argparse.Namespace) -> int:
    """Quantise, save and print; returns the exit status."""
    weights, embeddings = (None if kind == "float" else kind for kind in (args.weights, args.embeddings))
    if weights is None and embeddings is None:
        raise UsageError("--weights, --embeddings: expected bits for at least one, got float for both")
    output, source = results.check_free(args.output), Path(args.model)
    texts, typical = ([] if file is None else _lines(file) for file in (args.input, args.calibrate))
    (whole, before), (model, after) = (_loaded(source, bool(texts or typical)) for _ in range(2))
    options = {
        "embeddings": embeddings,
        "activations": args.activations,
        "smooth": args.smooth,
        "calibrate": functools.partial(before.encode, typical) if typical else None,
    }
    report = None
    if args.report:
        read = functools.partial(before.encode, texts) if texts else None
        report = quantization_report(whole, weights, **options, run=read)
    if typical:
        options["calibrate"] = functools.partial(after.encode, typical)
    if weights == "fp8":
        # For the files: here the layers compute in plain arithmetic
        float8.check_alone(**options)
        float8.prepare(model.bfloat16())
    else:
        model.quantize(weights, **options)
    if (source / "modules.json").is_file():
        after.save_pretrained(output)
    else:
        model.save_pretrained(output)
        copy_files(source, output)
    parts = [f"{kind} {what}" for kind, what in ((weights, "layers"), (embeddings, "words")) if kind]
    print(f"{output}: {', '.join(parts)}")
    for line in costs(whole, model, timed=weights != "fp8"):
        print(f"  {line}")
    if texts:
        print(f"  {_cosines(*(encoder.encode(texts) for encoder in (before, after)))}")
    for line in [] if report is None else _table(report):
        print(f"  {line}")
    for line in published.lines([weights or "tables"]):
        print(f"  {line}")
    return 0


def _lines(file: str) -> list[str]:
    return [text for _, text in filled_lines(file)]


def _loaded(source: Path, reads: bool) -> tuple[PreTrainedModel, Any]:
    """(the model, a sentence encoder of it, or None if it reads no texts).

    The vectors of a model that is no sentence encoder are means over tokens.
    """
    if (source / "modules.json").is_file():
        encoder = SentenceEncoder.from_pretrained(source, device="cpu")
        return encoder.model, encoder
    model = model_of(str(source), "cpu", pooler=True)
    return model, SentenceEncoder(model.base_model, load_tokenizer(source)) if reads else None


def _cosines(full: np.ndarray, vectors: np.ndarray) -> str:
    found = (full * vectors).sum(1) / np.linalg.norm(full, axis=1) / np.linalg.norm(vectors, axis=1)
    name = f"cosine, {len(found)} texts"
    return f"{name:<28} {found.min():>14.4f} the least, {found.mean():.4f} the mean"


def _table(report: list[QuantizedLayer]) -> list[str]:
    width = max(len(row.name) for row in report)
    lines = [f"{'SQNR in dB':<{width}}  weights  outputs  outliers"]
    for row in report:
        more = (row.output_sqnr, row.outliers)
        found = [f"{row.weight_sqnr:.1f}", *("-" if value is None else f"{value:.1f}" for value in more)]
        lines.append(f"{row.name:<{width}}  {found[0]:>7}  {found[1]:>7}  {found[2]:>8}")
    return lines
