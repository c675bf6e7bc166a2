"""`fastbert prepare`: text to a corpus for pre-training."""

from __future__ import annotations

import argparse
import contextlib
import os

from fastbert.cli.progress import Counts
from fastbert.cli.usage import UsageError, say
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.spans import PMI, Collocations, Source, sources_of


def run(args: argparse.Namespace) -> int:
    """Write the corpus; returns the exit status."""
    if args.workers is not None:
        if args.workers < 1:
            raise UsageError(f"--workers {args.workers}: expected at least 1")
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # the tokenizer's threads; read at its first use
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sources = spans_of(args)
    progress = Counts(args.text, "tokens", shown=args.progress)
    with contextlib.closing(progress):
        corpus = Corpus.write(
            args.text,
            args.tokenizer,
            args.output,
            format=args.format,
            spans=sources,
            shard_tokens=args.shard_tokens,
            overwrite=args.overwrite,
            progress=progress,
        )
    say(
        f"{args.output}: {corpus.num_documents:,} documents, {corpus.num_sentences:,} sentences, "
        f"{corpus.num_tokens:,} tokens of a vocabulary of {corpus.vocab_size:,}; hash {corpus.hash}"
    )
    for source in sources or ():
        say(source.report())
    if sources:
        say(f"{corpus.num_spans:,} phrases and entities")
    if corpus.num_documents == 1:
        say("one document: pairs of sentences (next-sentence prediction) need two")
    return 0


def spans_of(args: argparse.Namespace) -> list[Source] | None:
    """The sources that --spans names, with the settings of --min-pmi and --min-count."""
    settings = {name: getattr(args, name) for name in ("min_pmi", "min_count")}
    given = {name: value for name, value in settings.items() if value is not None}
    if given and PMI not in (args.spans or ()):
        raise UsageError(f"--{next(iter(given)).replace('_', '-')}: needs --spans {PMI}")
    if args.spans is None:
        return None
    return sources_of([Collocations(**given) if each == PMI else each for each in args.spans])
