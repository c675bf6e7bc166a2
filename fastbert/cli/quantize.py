"""`fastbert quantize`: a model of 8-bit or 4-bit integers in a new directory, and what it costs."""

from __future__ import annotations

import argparse
import functools
import shutil
from pathlib import Path

import numpy as np

from fastbert.analysis import results
from fastbert.cli.analyses.loading import model_of
from fastbert.cli.costs import costs
from fastbert.cli.usage import UsageError
from fastbert.compression import published
from fastbert.compression.quantization import QuantizedLayer, quantization_report
from fastbert.finetuning.run import TOKENIZER_FILES
from fastbert.models.base import PreTrainedModel
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.files import filled_lines


def run(args: argparse.Namespace) -> int:
    """Quantise, save and print; returns the exit status."""
    weights, embeddings = (None if kind == "float" else kind for kind in (args.weights, args.embeddings))
    if weights is None and embeddings is None:
        raise UsageError("--weights, --embeddings: expected bits for at least one, got float for both")
    if (args.smooth is None) != (args.calibrate is None):
        raise UsageError("--smooth, --calibrate: expected both or neither")
    output, source = results.check_free(args.output), Path(args.model)
    texts = [] if args.input is None else [text for _, text in filled_lines(args.input)]
    of_sentences = (source / "modules.json").is_file()
    if of_sentences:
        encoder = SentenceEncoder.from_pretrained(source, device="cpu")
        smaller = SentenceEncoder.from_pretrained(source, device="cpu")
        model, whole = smaller.model, encoder.model
    else:
        model, whole = (model_of(args.model, "cpu", pooler=True) for _ in range(2))
        encoder = _encoder(source, whole) if texts else None
        smaller = None if args.calibrate is None else _encoder(source, model)
    full, report = None, None
    if encoder is not None and texts:
        full = encoder.encode(texts)
    if args.report:
        call = None if full is None or encoder is None else lambda: encoder.encode(texts)
        report = quantization_report(whole, weights, embeddings=embeddings, run=call)
    how = {}
    if args.calibrate is not None and smaller is not None:
        typical = [text for _, text in filled_lines(args.calibrate)]
        how = {"smooth": args.smooth, "calibrate": functools.partial(smaller.encode, typical)}
    model.quantize(weights, embeddings=embeddings, **how)
    if of_sentences and encoder is not None:
        encoder.model = model
        encoder.save_pretrained(output)
    else:
        model.save_pretrained(output)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, output / name)
    parts = [f"{kind} {what}" for kind, what in ((weights, "layers"), (embeddings, "words")) if kind]
    print(f"{output}: {', '.join(parts)}")
    for line in costs(whole, model):
        print(f"  {line}")
    if full is not None and encoder is not None:
        encoder.model = model.base_model
        print(f"  {_cosines(full, encoder.encode(texts))}")
    for line in [] if report is None else _table(report):
        print(f"  {line}")
    for line in published.lines([weights or "tables"]):
        print(f"  {line}")
    return 0


def _encoder(source: Path, model: PreTrainedModel) -> SentenceEncoder:
    """The encoder of a model, whose vectors are compared: means over tokens."""
    return SentenceEncoder(model.base_model, load_tokenizer(source))


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
