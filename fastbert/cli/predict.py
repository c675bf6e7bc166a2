"""`fastbert predict`: a fine-tuned model's answers for new examples, as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from fastbert.cli.finetune_arguments import task_options
from fastbert.cli.output import named_errors, replacing
from fastbert.cli.progress import Counts
from fastbert.cli.usage import UsageError, device_of
from fastbert.finetuning.predict import predict


def run(args: argparse.Namespace) -> int:
    """Write an answer per line; returns the exit status."""
    options = task_options(args)
    with contextlib.ExitStack() as stack:
        file = sys.stdout.buffer
        if args.output is not None:
            output = Path(args.output)
            if output.exists() and Path(args.input).exists() and output.samefile(args.input):
                raise UsageError(f"--output {output}: is the input file")
            file = stack.enter_context(replacing(output, args.overwrite))
        answers = predict(
            args.task,
            args.model,
            args.input,
            device=device_of(args.device),
            dtype=args.dtype,
            batch_tokens=args.batch_tokens,
            max_length=args.max_length,
            input_format=args.input_format,
            **options,
        )
        progress = Counts([], "examples", shown=args.progress)
        stack.callback(progress.close)
        for answer in answers:
            line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
            if args.output is None:
                file.write(line)
            else:
                with named_errors(output):
                    file.write(line)
            progress(0, 1)
        file.flush()
    return 0
