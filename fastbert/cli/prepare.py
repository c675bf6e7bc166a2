"""`fastbert prepare`: text to a corpus for pre-training."""

from __future__ import annotations

import argparse
import contextlib
import os

from fastbert.cli.progress import Progress
from fastbert.cli.usage import UsageError, say
from fastbert.pretraining.corpus import Corpus


def run(args: argparse.Namespace) -> int:
    """Write the corpus; returns the exit status."""
    if args.workers is not None:
        if args.workers < 1:
            raise UsageError(f"--workers {args.workers}: expected at least 1")
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # the tokenizer's threads; read at its first use
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    progress = Progress(args.text, "tokens", args.progress)
    with contextlib.closing(progress):
        corpus = Corpus.write(
            args.text,
            args.tokenizer,
            args.output,
            format=args.format,
            shard_tokens=args.shard_tokens,
            overwrite=args.overwrite,
            progress=progress,
        )
    say(
        f"{args.output}: {corpus.num_documents:,} documents, {corpus.num_sentences:,} sentences, "
        f"{corpus.num_tokens:,} tokens of a vocabulary of {corpus.vocab_size:,}; hash {corpus.hash}"
    )
    if corpus.num_documents == 1:
        say("one document: pairs of sentences (next-sentence prediction) need two")
    return 0
