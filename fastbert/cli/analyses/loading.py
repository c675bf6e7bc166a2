"""The inputs of `fastbert analyze`: the model, and the file with the texts."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastbert.analysis.targets import LabelledText, read_edges
from fastbert.analysis.treebank import as_examples, blocks_of, fitting, read_conllu
from fastbert.cli.usage import UsageError, device_of
from fastbert.compression import shrink
from fastbert.models.auto import AutoModel
from fastbert.models.base import PreTrainedModel, class_of
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.task_model import TaskModel
from fastbert.sentences.settings import modules_of, sentence_settings
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.examples import Examples, masked, paired, tokenized
from fastbert.tasks.files import filled_lines
from fastbert.tasks.inputs import read, spans_of

# analyses that measure a loss, and the command `prune`
MEASURED = ("heads", "importance", "fixed", "prune")
# analyses that train a head of their own for the labels
LEARNING = ("starts",)
# option that names a file to analyze -> content of the file
FILES = {
    "input": "a file of examples",
    "conllu": "a treebank in the CoNLL-U format",
    "edges": "a file of labelled spans",
}
# analysis -> the options of `FILES` that it reads; all other analyses read `input`
READS = {"syntax": ("conllu",), "probe": ("conllu", "edges"), "links": ("edges",)}
# analysis -> the options that it may read besides
ALSO_READS = {"report": ("conllu",)}


def file_of(args: argparse.Namespace) -> str:
    """The option of `FILES` that names the analysis's file.

    Raises:
        UsageError: it is missing, or the analysis does not read a file that an option names.
    """
    readable, also = READS.get(args.kind, ("input",)), ALSO_READS.get(args.kind, ())
    named = [name for name in FILES if getattr(args, name) is not None and name not in also]
    expected = " or ".join(f"--{name}" for name in readable)
    if not set(named) & set(readable):
        what = " or ".join(FILES[name] for name in readable)
        raise UsageError(f"{expected.replace(' or ', ', ')}: {args.kind} needs {what}")
    for name in named:
        if name not in readable:
            raise UsageError(f"--{name}: {args.kind} does not read it; expected {expected} alone")
    if len(named) > 1:
        raise UsageError(f"--{named[1]}: {args.kind} reads one file; expected {expected} alone")
    return named[0]


def transformer_of(directory: str) -> str:
    """The folder of the model and its tokenizer, which may be below a sentence-transformers directory."""
    modules = modules_of(Path(directory)) or []
    return str(modules[0].folder) if modules and modules[0].kind == "Transformer" else directory


def model_of(directory: str, device: str | None, *, pooler: bool = False) -> PreTrainedModel:
    """The model of a directory, with the head that its config names, else the encoder; in eval mode.

    An encoder has no pooler, or if `pooler`, the pooler that its files have.
    """
    directory = transformer_of(directory)
    config = EncoderConfig.from_pretrained(directory)
    named = (config.get("architectures") or [""])[0]
    cls = class_of(config.family, named.removeprefix(config.family.class_prefix))
    options: dict[str, Any] = {}
    if cls is None or not issubclass(cls, TaskModel):
        # no analysis reads the pooler, and a sentence encoder's directory may have none
        cls, options = AutoModel, {} if pooler else {"add_pooling_layer": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*: has no pooler")
        return cls.from_pretrained(directory, dtype="auto", device=device_of(device), **options).eval()


def analysed(directory: str, device: str | None) -> PreTrainedModel:
    """`model_of`, with the same function and all heads of the config: those that were pruned have zeros."""
    model = model_of(directory, device)
    return shrink.dense(model) if pruned_heads(directory) else model


def pruned_heads(directory: str) -> int:
    """The number of heads that the layers of a directory's model lack."""
    config = EncoderConfig.from_pretrained(transformer_of(directory))
    return sum(config.num_attention_heads - len(kept) for kept in config.kept_heads() if kept is not None)


@contextlib.contextmanager
def naming_lines(args: argparse.Namespace, model: PreTrainedModel) -> Iterator[None]:
    """A block whose errors also name the file and the line, if they name an example by its number."""
    try:
        yield
    except (ValueError, UsageError) as error:
        found = re.match(r"(examples|texts|pairs|labels|answers|sentences)\[(\d+)\]: ", str(error))
        name, number = found.groups() if found else ("", "0")
        of_words = name == "sentences" or args.input is None
        # if sentences are left out, the numbers are not those of the file
        if not found or (of_words and args.on_long != "error"):
            raise
        index, file = int(number), str(args.input)
        if of_words:
            file = str(args.edges if args.conllu is None else args.conllu)
        elif args.pairs and _compares(args, model):
            index //= 2
        if of_words and args.conllu is not None:
            places = (f"{file}, line {block[0][0]}" for block in blocks_of(file))
        else:
            places = (where for where, _ in filled_lines(file))
        where = next(itertools.islice(places, index, None), file)
        raise UsageError(f"{where}: {error}") from error


@contextlib.contextmanager
def naming_targets(texts: list[Any]) -> Iterator[None]:
    """A block whose errors also name the file and the line, if they name a target by its number."""
    try:
        yield
    except ValueError as error:
        found = re.match(r"targets\[(\d+)\]: ", str(error))
        if not found or not isinstance(texts[0], LabelledText):
            raise
        where = [text.where for text in texts for _ in text.spans][int(found[1])]
        raise UsageError(f"{where}: {error}") from error


def _compares(args: argparse.Namespace, model: PreTrainedModel) -> bool:
    """Whether the texts of a pair are two examples, for an encoder without a head."""
    compared = args.kind in MEASURED or (args.kind == "report" and args.pairs)
    return compared and not isinstance(model, TaskModel)


def load_examples(args: argparse.Namespace, model: PreTrainedModel) -> Examples:
    """The examples of the input file, with labels if the analysis needs them."""
    if args.kind in LEARNING:
        return _labelled(args, model)
    measured, name = args.kind in MEASURED, type(model).__name__
    of_words, of_answers = (
        measured and isinstance(model, head) for head in (BertForMaskedLM, BertForQuestionAnswering)
    )
    of_vectors = _compares(args, model)
    in_report = args.kind == "report" and args.labels is not None
    takes_labels = of_vectors or (isinstance(model, TaskModel) and not isinstance(model, BertForMaskedLM))
    if in_report and not takes_labels:
        raise UsageError(f"--labels: the report of {name} needs none")
    of_answers = of_answers or (in_report and isinstance(model, BertForQuestionAnswering))
    if of_vectors and not args.pairs:
        raise UsageError(
            f"--model {args.model}: {args.kind} of {name}, which has no head, measures the cosine of two "
            "texts; expected --pairs"
        )
    if measured and not (of_words or of_answers or of_vectors) and args.labels is None:
        raise UsageError(f"--labels: {args.kind} of {name} needs the key of the labels in {args.input}")
    if args.labels is not None and not measured and not in_report:
        raise UsageError(f"--labels: {args.kind} needs none")
    _check_most(args)
    labels = None if of_words else (args.labels or "answers") if of_answers else args.labels
    found = read(args.input, pairs=args.pairs or of_answers, labels=labels)
    found = {name: values[: args.max_examples] for name, values in found.items()}
    if of_answers:
        found["answers"] = spans_of(found.pop("labels"), found["pairs"])
    tokenizer = load_tokenizer(transformer_of(args.model))
    max_length = model.config.max_tokens if args.on_long == "truncate" else None
    if of_vectors:
        return _pairs(args, tokenizer, found, max_length)
    examples = tokenized(tokenizer, **found, max_length=max_length)
    return masked(examples, mask_id(tokenizer, args.model), seed=args.seed) if of_words else examples


def _labelled(args: argparse.Namespace, model: PreTrainedModel) -> Examples:
    """Examples with the file's own labels, for any head of the model."""
    if args.labels is None:
        raise UsageError(f"--labels: {args.kind} needs the key of the labels in {args.input}")
    _check_most(args)
    found = read(args.input, pairs=args.pairs, labels=args.labels)
    found = {name: values[: args.max_examples] for name, values in found.items()}
    max_length = model.config.max_tokens if args.on_long == "truncate" else None
    return tokenized(load_tokenizer(transformer_of(args.model)), **found, max_length=max_length)


def _pairs(
    args: argparse.Namespace, tokenizer: Tokenizer, found: dict[str, list[Any]], max_length: int | None
) -> Examples:
    """Pairs for an encoder without a head, prepared by the settings of a sentence-transformers directory."""
    settings = sentence_settings(args.model)
    for name in ("texts", "pairs"):
        texts = [(settings.prompt + text).strip() for text in found[name]]
        found[name] = [text.lower() for text in texts] if settings.lower_case else texts
    most = settings.max_length
    if max_length is not None and most is not None:
        max_length = min(max_length, most)
    examples = paired(tokenizer, **found, max_length=max_length)
    if most is not None and examples.lengths.max() > most:
        number = int(np.argmax(examples.lengths > most))
        raise UsageError(
            f"examples[{number}]: {examples.lengths[number]} tokens; the encoder reads at most {most}"
        )
    return examples


def pooling_of(args: argparse.Namespace, model: PreTrainedModel) -> str | None:
    """How an encoder without a head makes its vectors; None for a model with a head."""
    return None if isinstance(model, TaskModel) else sentence_settings(args.model).pooling


def load_words(args: argparse.Namespace, model: PreTrainedModel) -> tuple[list[Any], Examples, int]:
    """(`Sentence`s of the treebank or `LabelledText`s, their examples, number of sentences left out).

    A sentence is left out if it is longer than the model reads, or has a word for which the tokenizer has no
    token; with `--on-long error` it is an error.
    """
    for name in ("pairs", "labels"):
        if getattr(args, name):
            raise UsageError(f"--{name}: {args.kind} needs none")
    if args.on_long == "truncate":
        raise UsageError("--on-long: a tree is not cut; expected error, or none to leave long sentences out")
    return words_of(args, model)


def words_of(args: argparse.Namespace, model: PreTrainedModel) -> tuple[list[Any], Examples, int]:
    """As `load_words`, without its check of the options."""
    _check_most(args)
    of_trees = args.conllu is not None
    file = args.conllu if of_trees else args.edges
    read: list[Any] = (read_conllu if of_trees else read_edges)(file, args.max_examples)
    tokenizer, max_length = load_tokenizer(transformer_of(args.model)), model.config.max_tokens
    kept = read if args.on_long == "error" else fitting(tokenizer, read, max_length)
    if not kept:
        raise UsageError(
            f"--{'conllu' if of_trees else 'edges'} {file}: each of its {len(read):,} sentences is longer "
            f"than {max_length} tokens, or has a word of which the tokenizer leaves nothing"
        )
    return kept, as_examples(tokenizer, kept, max_length), len(read) - len(kept)


def _check_most(args: argparse.Namespace) -> None:
    if args.max_examples < 1:
        raise UsageError(f"--max-examples: expected an integer >= 1, got {args.max_examples}")


def mask_id(tokenizer: Tokenizer, directory: str) -> int:
    """The id of the mask token; UsageError if the tokenizer has none."""
    for token in ("[MASK]", "<mask>"):
        found = tokenizer.token_to_id(token)
        if found is not None:
            return found
    raise UsageError(f"--model {directory}: its tokenizer has no mask token")
