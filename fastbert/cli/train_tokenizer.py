"""`fastbert train-tokenizer`: a WordPiece vocabulary from text."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from pathlib import Path

from fastbert.cli.progress import Counts
from fastbert.cli.usage import say
from fastbert.pretraining import vocabulary


def run(args: argparse.Namespace) -> int:
    """Train and save the tokenizer; returns the exit status."""
    output = Path(args.output)
    progress = Counts(args.text, "words", shown=args.progress)
    with contextlib.closing(progress):
        tokenizer = vocabulary.train(
            args.text,
            output,
            vocab_size=args.vocab_size,
            lowercase=not args.cased,
            min_frequency=args.min_frequency,
            alphabet=args.alphabet,
            format=args.format,
            overwrite=args.overwrite,
            progress=progress,
        )
    digest = hashlib.sha256((output / "tokenizer.json").read_bytes()).hexdigest()
    say(f"{output}: a vocabulary of {tokenizer.get_vocab_size():,}; SHA-256 of tokenizer.json {digest}")
    return 0
