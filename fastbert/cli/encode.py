"""`fastbert encode`: embed the lines of a text file."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fastbert.checkpoint import hub
from fastbert.cli.output import WRITERS, named_errors, replacing
from fastbert.cli.progress import Counts
from fastbert.cli.usage import DTYPES, INT8, UsageError, device_of, say
from fastbert.sentences.embedder import Embedder
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.settings import modules_of, reader_of
from fastbert.sentences.sparse_encoder import SparseEncoder
from fastbert.sentences.tokenizer import EncodingError

_CHUNK_BYTES = 16 << 20  # text held in memory at a time, beside --chunk-lines


def run(args: argparse.Namespace) -> int:
    """Write the embeddings; returns the exit status."""
    device = device_of(args.device)
    if args.dtype == INT8 and device.type != "cpu":
        raise UsageError(f"--dtype {INT8}: runs on a CPU, not on {device}; add --device cpu")
    if args.chunk_lines < 1:
        raise UsageError(f"--chunk-lines {args.chunk_lines}: expected at least 1")
    output = Path(args.output)
    kind = output.suffix.lower()
    if kind not in WRITERS:
        raise UsageError(f"--output {output}: unknown kind {kind!r}; expected {', '.join(WRITERS)}")
    with contextlib.ExitStack() as stack:
        if args.threads is not None:
            stack.enter_context(_threads(args.threads))
        name, stream = stack.enter_context(_input(args.input))
        if _reads(stream, output):
            raise UsageError(f"--output {output}: is the input file")
        file = stack.enter_context(replacing(output, args.overwrite))  # a bad path fails before encoding
        encoder = _encoder(args, device)
        if args.dtype == INT8:
            encoder.quantize(INT8)
        batch_tokens = max(8192, encoder.max_length) if args.batch_tokens is None else args.batch_tokens
        encoder.check_batch_tokens(batch_tokens)
        with named_errors(output):
            writer = WRITERS[kind](file, encoder.width)
        source = 0 if args.input == "-" else args.input  # 0: the descriptor of stdin
        progress = Counts([source], "sentences", "tokens", shown=args.progress)
        stack.callback(progress.close)
        line, truncated, first_truncated = 0, 0, 0  # lines done so far
        for texts, size in _chunks(name, stream, args.chunk_lines):
            try:
                tokens = encoder.tokenize(texts)
                if tokens.truncated.size:
                    if args.on_long == "error":
                        raise encoder.too_long(tokens)
                    truncated += tokens.truncated.size
                    first_truncated = first_truncated or line + int(tokens.truncated[0]) + 1
                per_token = size / max(len(tokens.ids), 1)
                rows = encoder.encode_tokens(
                    tokens,
                    batch_tokens=batch_tokens,
                    progress=lambda n, count, per_token=per_token: progress(per_token * count, n, count),
                )
            except EncodingError as error:
                raise UsageError(f"{name}: line {line + error.index + 1}: {error.problem}") from error
            with named_errors(output):
                writer.write(texts, rows)
            line += len(texts)
        with named_errors(output):
            writer.close()
        progress.close()
        if truncated:
            say(
                f"{truncated} of {line} lines held more than {encoder.max_length} tokens and were cut there "
                f"(the first: line {first_truncated})"
            )
        if line == 0:
            say(f"{name}: no lines; {output} holds no embeddings")
    return 0


def _encoder(args: argparse.Namespace, device: torch.device) -> Embedder:
    """The encoder of the directory's kind."""
    options: dict[str, Any] = {
        "max_length": args.max_length,
        "prompt": args.prompt,
        "dtype": DTYPES.get(args.dtype),
        "device": device,
    }
    reader = reader_of(modules_of(hub.resolve(args.model)))
    if reader == "MultiVectorEncoder":
        raise UsageError(
            f"--model {args.model}: makes one vector per token (ColBERT), but the output has one row per "
            "line; call fastbert.MultiVectorEncoder from Python"
        )
    if reader == "SentenceEncoder":
        return SentenceEncoder.from_pretrained(
            args.model, pooling=args.pooling, normalize=args.normalize, **options
        )
    if args.pooling is not None or args.normalize is not None:
        raise UsageError(f"--pooling, --normalize: do not apply to {args.model}, which has SPLADE pooling")
    return SparseEncoder.from_pretrained(args.model, **options)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    most = 4 * (os.cpu_count() or 1)  # more threads do not help, and the system limits their number
    if not 1 <= count <= most:
        raise UsageError(f"--threads {count}: expected 1 to {most}, four per CPU of this machine")
    before, rayon = torch.get_num_threads(), os.environ.get("RAYON_NUM_THREADS")
    torch.set_num_threads(count)
    os.environ["RAYON_NUM_THREADS"] = str(count)  # the tokenizer's threads; read at its first use
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if rayon is None:
            del os.environ["RAYON_NUM_THREADS"]
        else:
            os.environ["RAYON_NUM_THREADS"] = rayon


@contextlib.contextmanager
def _input(path: str) -> Iterator[tuple[str, BinaryIO]]:
    if path == "-":
        yield "stdin", sys.stdin.buffer
        return
    with open(path, "rb") as stream:
        yield path, stream


def _reads(stream: BinaryIO, path: Path) -> bool:
    """Whether a stream, which may be stdin, reads this file."""
    with contextlib.suppress(OSError, ValueError):  # no such file, or a stream without a descriptor
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    return False


def _chunks(name: str, stream: BinaryIO, lines: int) -> Iterator[tuple[list[str], int]]:
    """Lists of at most `lines` texts, each with its bytes. Lines end in LF or CRLF; a BOM is dropped."""
    texts: list[str] = []
    size = 0
    for number, raw in enumerate(stream, 1):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{name}: line {number}: not UTF-8 (byte {error.start + 1} is 0x{raw[error.start]:02x})"
            ) from error
        if number == 1:
            text = text.removeprefix("\ufeff")
        texts.append(text.removesuffix("\n").removesuffix("\r"))
        size += len(raw)
        if len(texts) == lines or size >= _CHUNK_BYTES:
            yield texts, size
            texts, size = [], 0
    if texts:
        yield texts, size
