"""`fastbert prune`: a smaller model in a new directory, and what it costs."""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from fastbert.analysis import results
from fastbert.analysis.intervals import estimate
from fastbert.analysis.measures import Measure
from fastbert.checkpoint.files import read_json
from fastbert.cli.analyses.loading import load_examples, model_of, naming_lines, pooling_of, transformer_of
from fastbert.cli.costs import costs
from fastbert.cli.usage import UsageError, say
from fastbert.compression import published, vocabulary
from fastbert.compression.elimination import eliminate
from fastbert.compression.pruning import Pruned, prune
from fastbert.compression.schedule_search import search_schedules, within
from fastbert.finetuning.run import copy_files
from fastbert.models.base import PreTrainedModel
from fastbert.models.heads.task_model import TaskModel
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.examples import Examples
from fastbert.tasks.files import filled_lines


def run(args: argparse.Namespace) -> int:
    """Prune, save and print; returns the exit status."""
    output = results.check_free(args.output)
    units = {name: _units(f"--{name}", getattr(args, name)) for name in ("heads", "neurons")}
    names = "layers", "vocabulary", "weights", "embedding_rank", "tokens"
    given = [*(getattr(args, name) for name in names), *units.values(), args.dense or None]
    if all(each is None for each in given):
        options = (f"--{name.replace('_', '-')}" for name in ("heads", "neurons", *names, "dense"))
        raise UsageError(f"{', '.join(options)}: expected at least one")
    _check_tokens(args)
    of_sentences = (Path(args.model) / "modules.json").is_file()
    model, examples, pooling = model_of(args.model, args.device, pooler=not of_sentences), None, None
    names = "layers", "weights", "embedding_rank", "score", "multiple", "seed"
    options = {**{name: getattr(args, name) for name in names}, **units}
    tokenizer = None
    if args.vocabulary is not None:
        whole = load_tokenizer(transformer_of(args.model))
        options["vocabulary"] = ids = vocabulary.used_ids(
            whole, (text for _, text in filled_lines(args.vocabulary))
        )
        tokenizer = vocabulary.without(whole, ids)
    if args.input is None:
        found = prune(model, **options)
    else:
        # `load_examples` also serves the analyses
        vars(args).update(kind="prune", conllu=None, edges=None)
        with naming_lines(args, model):
            examples, pooling = load_examples(args, model), pooling_of(args, model)
            found = prune(model, **options, examples=examples, pooling=pooling)
            if args.tokens is not None:
                _drop_tokens(found.model, args, examples, pooling)
    saved = found.dense() if args.dense else found.model
    _save(saved, Path(args.model), output, tokenizer)
    print(f"{output}: {_removed(found, model)}")
    for line in [*costs(model, saved), *_compressed(found, model)]:
        print(f"  {line}")
    if examples is not None:
        with naming_lines(args, model):
            if tokenizer is None:
                after = examples
            else:
                args.model = str(output)
                after = load_examples(args, found.model)
            print(f"  {_score([(model, examples), (found.model, after)], pooling, args.batch_tokens)}")
    for line in published.lines(_ways(found, args.tokens is not None)):
        print(f"  {line}")
    return 0


def _check_tokens(args: argparse.Namespace) -> None:
    if args.tokens is None:
        if args.rounds is not None:
            raise UsageError("--rounds: needs --tokens")
        return
    if not 0 < args.tokens <= 1:
        raise UsageError(f"--tokens {args.tokens:g}: expected a share in (0, 1]")
    for name, there in (("vocabulary", args.vocabulary is not None), ("dense", args.dense)):
        if there:
            raise UsageError(f"--{name}: expected none with --tokens")
    if args.input is None:
        raise UsageError("--input: --tokens needs examples")


def _drop_tokens(
    model: PreTrainedModel, args: argparse.Namespace, examples: Examples, pooling: str | None
) -> None:
    """Give a model the schedule of the best score that --tokens allows."""
    options: dict[str, Any] = {} if args.rounds is None else {"rounds": args.rounds}
    options |= {"pooling": pooling, "seed": args.seed, "say": say}
    points = search_schedules(eliminate(model, None), examples, **options)
    try:
        eliminate(model, within(points, args.tokens).schedule)
    except ValueError as error:
        raise UsageError(f"--tokens {args.tokens:g}: {error}") from None


def _ways(found: Pruned[Any], tokens: bool) -> tuple[str, ...]:
    """What was pruned, in the words of `published`."""
    of_units = "structured" if found.neurons else "heads" if found.heads else ""
    return of_units, "weights" if found.zeros else "", "tokens" if tokens else ""


def _units(option: str, given: str | None) -> Any:
    """A share, or the numbers of a file."""
    if given is None:
        return None
    if not given.endswith(".json"):
        try:
            return float(given)
        except ValueError:
            raise UsageError(f"{option} {given}: expected a share, or a .json file") from None
    content = read_json(Path(given))
    if not isinstance(content, dict) or not all(
        layer.isdecimal() and isinstance(numbers, list) for layer, numbers in content.items()
    ):
        raise UsageError(f"{option} {given}: expected an object of lists by layer")
    return {int(layer): numbers for layer, numbers in content.items()}


def _save(model: PreTrainedModel, source: Path, output: Path, tokenizer: Tokenizer | None) -> None:
    """Save a model as its source was: as a sentence encoder, or with the tokenizer's files beside it."""
    if not isinstance(model, TaskModel) and (source / "modules.json").is_file():
        encoder = SentenceEncoder.from_pretrained(source, device=model.device)
        encoder.model = model
        encoder.save_pretrained(output)
    else:
        model.save_pretrained(output)
        copy_files(Path(transformer_of(str(source))), output)
    if tokenizer is None:
        return
    tokenizer.save(str(output / "tokenizer.json"))
    if (output / "vocab.txt").is_file():
        words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
        (output / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    if (config := output / "tokenizer_config.json").is_file():
        # Its ids are those of tokenizer.json, which has them too
        content = read_json(config)
        content.pop("added_tokens_decoder", None)
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _removed(found: Pruned[Any], model: PreTrainedModel) -> str:
    layers, parts = len(model.base_model.layer_list()), []
    for name in ("heads", "neurons"):
        if gone := sum(map(len, getattr(found, name).values())):
            parts.append(f"{gone:,} {name}")
    if len(found.layers) < layers:
        parts.append(f"{layers - len(found.layers)} of {layers} layers")
    schedule = found.model.config.token_schedule
    if schedule not in (None, model.config.token_schedule):
        parts.append(f"{1 - sum(schedule) / len(schedule):.0%} of the layers' tokens")
    if found.zeros:
        parts.append(f"{found.zeros:.1%} of the weights")
    if pieces := model.config.vocab_size - found.model.config.vocab_size:
        parts.append(f"{pieces:,} word pieces")
    without = f"without {', '.join(parts)}" if parts else "nothing was removed"
    rank = found.model.config.word_embedding_rank
    return without if rank is None else f"{without}; words in a table of rank {rank}"


def _compressed(found: Pruned[Any], model: PreTrainedModel) -> list[str]:
    """What zeros save: the size after gzip, before and after."""
    if found.zeros is None:
        return []
    sizes = [_zipped(each) / 1e6 for each in (model, found.model)]
    ratio = sizes[0] / sizes[1]
    return [
        f"{'size after gzip, MB':<28} {sizes[0]:>14,.1f} -> {sizes[1]:>14,.1f}  {ratio:.2f} x",
        "zeros are computed as all weights are, so they save no time",
    ]


def _zipped(model: PreTrainedModel) -> int:
    """Bytes of a model's tensors after gzip at its fastest level."""
    packer, count = zlib.compressobj(1, wbits=31), 0
    for t in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
        count += len(packer.compress(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return count + len(packer.flush())


def _score(each: list[tuple[PreTrainedModel, Examples]], pooling: str | None, batch_tokens: int) -> str:
    texts, name = [], ""
    for model, examples in each:
        measure = Measure.of(model, examples, pooling)
        name = measure.score_name
        texts.append(estimate(measure.scores(batch_tokens), seed=0).text(".4f"))
    return f"{name:<28} {texts[0]:>14} -> {texts[1]:>14}"
