"""`fastbert prune`: a smaller model in a new directory, and what it costs."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fastbert.analysis import results
from fastbert.analysis.intervals import estimate
from fastbert.analysis.measures import Measure
from fastbert.checkpoint.files import read_json
from fastbert.cli.analyses.loading import load_examples, model_of, naming_lines, pooling_of
from fastbert.cli.usage import UsageError
from fastbert.compression import vocabulary
from fastbert.compression.pruning import Pruned, prune
from fastbert.compression.size import TOKENS, tokens_per_second
from fastbert.finetuning.run import TOKENIZER_FILES
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
    layers = _layers(args.layers)
    if layers is None and args.vocabulary is None and all(given is None for given in units.values()):
        raise UsageError("--heads, --neurons, --layers, --vocabulary: expected at least one")
    of_sentences = (Path(args.model) / "modules.json").is_file()
    model, examples, pooling = model_of(args.model, args.device, pooler=not of_sentences), None, None
    options = {"layers": layers, "score": args.score, "multiple": args.multiple, "seed": args.seed, **units}
    tokenizer = None
    if args.vocabulary is not None:
        whole = load_tokenizer(args.model)
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
    saved = found.dense() if args.dense else found.model
    _save(saved, Path(args.model), output, tokenizer)
    print(f"{output}: {_removed(found, model)}")
    for line in _costs(found, model):
        print(f"  {line}")
    if examples is not None:
        with naming_lines(args, model):
            if tokenizer is None:
                after = examples
            else:
                args.model = str(output)
                after = load_examples(args, found.model)
            print(f"  {_score([(model, examples), (found.model, after)], pooling, args.batch_tokens)}")
    return 0


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


def _layers(given: str | None) -> list[int] | None:
    try:
        return None if given is None else [int(number) for number in given.split(",")]
    except ValueError:
        raise UsageError(f"--layers {given}: expected numbers with commas between") from None


def _save(model: PreTrainedModel, source: Path, output: Path, tokenizer: Tokenizer | None) -> None:
    """Save a model as its source was: as a sentence encoder, or with the tokenizer's files beside it."""
    if not isinstance(model, TaskModel) and (source / "modules.json").is_file():
        encoder = SentenceEncoder.from_pretrained(source, device=model.device)
        encoder.model = model
        encoder.save_pretrained(output)
    else:
        model.save_pretrained(output)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, output / name)
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
    if pieces := model.config.vocab_size - found.model.config.vocab_size:
        parts.append(f"{pieces:,} word pieces")
    return f"without {', '.join(parts)}" if parts else "nothing was removed"


def _costs(found: Pruned[Any], model: PreTrainedModel) -> list[str]:
    before, after = found.before, found.after
    speeds = tokens_per_second([model, found.model])
    rows = [
        (
            "parameters",
            f"{before.parameters:,}",
            f"{after.parameters:,}",
            before.parameters / after.parameters,
        ),
        ("size, MB", f"{before.bytes / 1e6:,.1f}", f"{after.bytes / 1e6:,.1f}", before.bytes / after.bytes),
        (
            f"MFLOP per token, {TOKENS} tokens",
            f"{before.flops / 1e6:,.1f}",
            f"{after.flops / 1e6:,.1f}",
            before.flops / max(after.flops, 1),
        ),
        ("tokens per second", f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", speeds[1] / speeds[0]),
    ]
    return [f"{name:<28} {a:>14} -> {b:>14}  {ratio:.2f} x" for name, a, b, ratio in rows]


def _score(each: list[tuple[PreTrainedModel, Examples]], pooling: str | None, batch_tokens: int) -> str:
    texts, name = [], ""
    for model, examples in each:
        measure = Measure.of(model, examples, pooling)
        name = measure.score_name
        texts.append(estimate(measure.scores(batch_tokens), seed=0).text(".4f"))
    return f"{name:<28} {texts[0]:>14} -> {texts[1]:>14}"
