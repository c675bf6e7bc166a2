"""What bfloat16, 8-bit integers and 8-bit floats cost in accuracy: `python bench/bits.py`.

    python bench/bits.py [--json FILE] [--pretrained FOLDER]

Vectors of the sentences in examples/ by all-MiniLM-L6-v2, beside those in float32: cosines, and Spearman's
correlation of the similarities of all pairs. SQNR is of the outputs of each linear layer in dB, on the inputs
that it has in float32. int8-static has one range per layer, from the same sentences; int8-float rounds
weights alone. The loss is of the masked-LM that `examples/pretrain.sh` left in FOLDER, on texts of its own.

Everything is computed on a CPU: 8-bit floats, with the rest in bfloat16, in PyTorch's plain arithmetic.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from scipy.stats import rankdata  # noqa: E402
from torch import Tensor  # noqa: E402

import fastbert  # noqa: E402
from bench.lib import encode, machine  # noqa: E402
from bench.lib.engines import minilm_directory  # noqa: E402
from bench.lib.report import Report  # noqa: E402
from fastbert.layers import float8  # noqa: E402
from fastbert.sentences.tokenizer import load_tokenizer  # noqa: E402
from fastbert.training.checkpoints import newest  # noqa: E402

FORMATS = ("float32", "bfloat16", "int8", "int8-static", "int8-float", "fp8")
LENGTH = 64  # tokens of a text of the masked-LM, as in its training
SENTENCES = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()


def in_format(model: Any, name: str, options: dict[str, Any]) -> Any:
    """The model, changed in place."""
    if name.startswith("int8"):
        return model.quantize("int8", **options)
    if name == "float32":
        return model
    return float8.prepare(model.bfloat16()) if name == "fp8" else model.bfloat16()


def masked_texts(folder: Path) -> tuple[Tensor, Tensor]:
    """(ids (texts, LENGTH), labels) int64: beginnings of documents, 15% of the tokens masked."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    lines = (folder / "text.jsonl").read_text(encoding="utf-8").splitlines()
    found = tokenizer.encode_batch([json.loads(each)["text"] for each in lines])
    ids = torch.tensor([text.ids[:LENGTH] for text in found if len(text) >= LENGTH])
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    chosen[:, 0] = False  # [CLS]
    return ids.masked_fill(chosen, tokenizer.token_to_id("[MASK]")), ids.masked_fill(~chosen, -100)


@torch.no_grad()
def loss_of(model: Any, ids: Tensor, labels: Tensor) -> float:
    """Cross-entropy of the masked tokens in nats, in float32 from logits on."""
    logits = torch.cat([model(each).logits.float() for each in ids.split(64)])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


def rows(folder: Path | None) -> Iterator[dict[str, Any]]:
    directory = minilm_directory()
    if directory is None:
        raise SystemExit(encode.MISSING)
    full = np.zeros(0)
    above = np.triu_indices(len(SENTENCES), 1)
    trained = folder and (newest(folder / "run")[0] or folder) / "model"
    texts = None if folder is None else masked_texts(folder)
    for name in FORMATS:
        encoder = fastbert.SentenceEncoder.from_pretrained(directory, device="cpu")
        row: dict[str, Any] = {"step": "bits", "name": f"bits-minilm-{name}", "status": "ok", "format": name}
        kind, _, activations = name.partition("-")
        options: dict[str, Any] = {"activations": activations} if activations else {}

        def read(encoder: Any = encoder) -> Any:
            return encoder.encode(SENTENCES)

        if activations == "static":
            options["calibrate"] = read
        if kind in ("int8", "fp8"):
            layers = fastbert.quantization_report(encoder.model, kind, run=read, **options)
            found = [each.output_sqnr or 0.0 for each in layers]
            row |= {"sqnr_least": min(found), "sqnr_median": statistics.median(found)}
        in_format(encoder.model, name, options)
        vectors = encoder.encode(SENTENCES).astype(np.float64)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        full = vectors if name == "float32" else full
        cosines, pairs = (vectors * full).sum(1), [(v @ v.T)[above] for v in (vectors, full)]
        row |= {"cosine_mean": float(cosines.mean()), "cosine_least": float(cosines.min())}
        # Spearman's correlation is that of the ranks
        row["spearman"] = float(np.corrcoef(*(rankdata(each) for each in pairs))[0, 1])
        if trained is not None and texts is not None:
            model = fastbert.AutoModelForMaskedLM.from_pretrained(trained)
            if activations == "static":
                options["calibrate"] = functools.partial(model, texts[0][:256])
            row["masked_lm_loss"] = loss_of(in_format(model, name, options), *texts)
        yield row | {"sentences": len(SENTENCES)}


def line(row: dict[str, Any]) -> str:
    names = ("cosine_mean", "cosine_least", "spearman", "sqnr_least", "sqnr_median", "masked_lm_loss")
    return f"{row['name']:<24} " + ", ".join(f"{n} {row[n]:.5f}" for n in names if n in row)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/bits.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--pretrained", type=Path, metavar="FOLDER", help="of examples/pretrain.sh")
    args = parser.parse_args()
    report = Report(args.json, {}, None, line)
    report.data["environment"] = machine.describe(torch.device("cpu"))
    for row in rows(args.pretrained):
        report.row(row)
    report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
