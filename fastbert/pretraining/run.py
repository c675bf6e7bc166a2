"""A run of pre-training: a corpus, a model and a recipe become the stages of the training loop.

A stage is a part of a phase with one depth of the model: phases are cut where layers are added (`growth.py`).
The stages of a phase share one stream of examples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastbert.checkpoint.files import (
    BIN,
    BIN_INDEX,
    CONFIG,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    digest,
    read_json,
)
from fastbert.checkpoint.read import weights_digest
from fastbert.models.config import EncoderConfig
from fastbert.models.config_checks import DEFAULTS
from fastbert.models.families import family_of
from fastbert.pretraining.corpus import TOKENIZER, Corpus
from fastbert.pretraining.growth import grow, grow_moments, newest_layers
from fastbert.pretraining.masking import SPAN_UNITS
from fastbert.pretraining.objectives.entities import Staged
from fastbert.pretraining.objectives.left_to_right import LeftToRight, RightToLeft
from fastbert.pretraining.objectives.masked import Objective
from fastbert.pretraining.objectives.permutation import Permutation
from fastbert.pretraining.objectives.replaced_tokens import ReplacedTokens
from fastbert.pretraining.objectives.span_boundary import SpanBoundary
from fastbert.pretraining.objectives.word_order import WordOrder
from fastbert.pretraining.recipe import Phase, Recipe, RecipeError, check_options
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.training.loop import Result, Stage, Trainer
from fastbert.training.module import Losses
from fastbert.training.parallel import Parallel

WEIGHTS = (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX)
# The keys of dropout; a config has the last one in some families only
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "mlp_dropout")
OBJECTIVES: dict[str, type[Objective]] = {
    "masked": Objective,
    "replaced-tokens": ReplacedTokens,
    "span-boundary": SpanBoundary,
    "word-order": WordOrder,
    "entities": Staged,
    "permutation": Permutation,
    "left-to-right": LeftToRight,
    "right-to-left": RightToLeft,
}


@dataclass(frozen=True)
class Growth:
    """When layers are added; see `growth.py`.

    Attributes:
        stages: (layers, steps) in order; steps None: all that are left.
        moments: "fresh" or "copied": the optimizer's moments after layers are added.
        freeze: whether only new layers train, in all stages but the first and the last (MSLT).
    """

    stages: tuple[tuple[int, int | None], ...]
    moments: str = "fresh"
    freeze: bool = False

    def __post_init__(self) -> None:
        if not self.stages or any(steps is None for _, steps in self.stages[:-1]):
            raise ValueError(f"stages: expected the steps of all stages but the last, got {self.stages!r}")
        if self.moments not in ("fresh", "copied"):
            raise ValueError(f"moments: expected fresh or copied, got {self.moments!r}")


@dataclass(frozen=True)
class Segment:
    """Steps [begin, end) of the run, within one phase and with one number of layers."""

    begin: int
    end: int
    phase: int
    phase_begin: int
    layers: int | None


def pretrain(
    data: str | Path | Corpus,
    model: str | Path | EncoderConfig,
    recipe: str | Recipe,
    output: str | Path,
    *,
    seed: int = 0,
    dtype: str = "fp32",
    growth: Growth | None = None,
    parallel: Parallel | None = None,
    verify: bool = True,
    **options: Any,
) -> Result:
    """Pre-train a model. Repeat the call to resume an interrupted run; see `fastbert/training/loop.py`.

    Args:
        data: a corpus of `fastbert prepare`.
        model: a config, a config.json, or a HuggingFace directory; if it has weights, training starts from
            them.
        recipe: a name of `recipes/`, a JSON file, or a recipe.
        output: the run's directory. Each checkpoint in it, `step-…`, has `model/`, which transformers loads.
        seed: seed of all that is random.
        dtype: "fp32", "bf16" or "fp16" (autocast).
        growth: layers that are added during the run.
        parallel: the processes; None: torchrun's processes, or this one alone.
        verify: whether to read the corpus once and compare its SHA-256.
        options: further arguments of `Trainer`: save_every, keep, log_every, workers, graphs, tensorboard,
            progress, say.

    Raises:
        ValueError: naming what is wrong.
        Interrupted: a signal arrived.
    """
    if Path(output).exists() and not Path(output).is_dir():
        raise ValueError(f"output: expected a directory or a new path; {output} is a file")
    corpus = data if isinstance(data, Corpus) else Corpus.open(data, verify)
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    config, weights = model_of(model, corpus, recipe)
    described = describe(corpus, config, weights, recipe, seed, dtype, growth)
    made = stages(corpus, config, weights, recipe, seed, growth)
    trainer = Trainer(
        made,
        output,
        described,
        seed=seed,
        dtype=dtype,
        parallel=parallel,
        finish=lambda folder: add_tokenizer(corpus, folder, recipe),
        **options,
    )
    return trainer.run()


def model_of(
    model: str | Path | EncoderConfig, corpus: Corpus, recipe: Recipe
) -> tuple[EncoderConfig, Path | None]:
    """(the model's config, the directory with its first weights or None).

    Raises:
        ValueError: the model does not fit the corpus or the recipe.
    """
    weights = None
    if isinstance(model, EncoderConfig):
        values = model.to_dict()
    else:
        path = Path(model)
        if path.is_dir():
            weights = path if any((path / name).is_file() for name in WEIGHTS) else None
            _check_tokenizer(path, corpus)
            path = path / CONFIG
        if not path.is_file():
            raise ValueError(f"model: {model}: expected a config.json, or a directory with one")
        values = read_json(path)
    values.setdefault("vocab_size", corpus.vocab_size)
    pad = corpus.special_ids["pad"]
    if weights is None:  # RoBERTa's positions of tokens depend on it
        values["pad_token_id"] = pad
    elif values.get("pad_token_id", pad) != pad:
        raise ValueError(f"model: pad_token_id is {values['pad_token_id']}, but the corpus has {pad}")
    if recipe.dropout is not None:
        family = family_of(values.get("model_type", "bert"))
        for name in DROPOUTS:
            if name in DEFAULTS | family.defaults:
                values.pop(family.spelt(name), None)
                values[name] = recipe.dropout
    config = EncoderConfig.from_dict(values)
    if config.model_type == "mpnet" and pad != 1:  # transformers has the number in its code
        raise ValueError(f"model: mpnet's [PAD] must have the id 1, but the corpus has {pad}")
    if config.vocab_size < corpus.vocab_size:
        raise ValueError(
            f"model: vocab_size is {config.vocab_size}, but the corpus {corpus.directory} has ids below "
            f"{corpus.vocab_size}"
        )
    longest = max(phase.max_length for phase in recipe.phases)
    most = config.max_tokens
    if most is not None and longest > most:
        raise ValueError(f"model: has {most} positions, but the recipe has sequences of {longest} tokens")
    return config, weights


def _check_tokenizer(directory: Path, corpus: Corpus) -> None:
    """Raise ValueError if a directory has a tokenizer with another vocabulary than the corpus's."""
    path = directory / TOKENIZER
    if path.is_file() and load_tokenizer(directory).get_vocab() != corpus.tokenizer.get_vocab():
        raise ValueError(f"model: {path} differs from the tokenizer that made {corpus.directory}")


def describe(
    corpus: Corpus,
    config: EncoderConfig,
    weights: Path | None,
    recipe: Recipe,
    seed: int,
    dtype: str,
    growth: Growth | None,
) -> dict[str, Any]:
    """What a run's result depends on: its config.json."""
    described = recipe.to_dict()
    described.pop("published")
    grown = None
    if growth is not None:
        grown = {
            "stages": [list(s) for s in growth.stages],
            "moments": growth.moments,
            "freeze": growth.freeze,
        }
    return {
        "corpus": corpus.hash,
        "tokenizer": digest((corpus.directory / TOKENIZER).read_bytes()),
        "model": config.to_dict(),
        "first_weights": None if weights is None else weights_digest(weights),
        "seed": seed,
        "dtype": dtype,
        "growth": grown,
        **described,
    }


def objective_of(recipe: Recipe, phase: Phase, corpus: Corpus, seed: int) -> Objective:
    """The examples of a phase.

    Raises:
        RecipeError: naming the field.
    """
    kind = OBJECTIVES.get(recipe.objective)
    if kind is None:
        raise RecipeError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {recipe.objective!r}")
    check_options("options", kind, recipe.options, ("format", "masking", "seed", "static"))
    form = recipe.format_of(phase, corpus, seed)
    made = kind(form, recipe.masking_of(phase), seed, recipe.static, **_as_tuples(recipe.options))
    units = {made.masking.unit, *(unit for unit, _ in getattr(made, "stages", ()))}
    # now, as the run would fail only when the epoch of these units begins
    if units & SPAN_UNITS.keys() and not corpus.span_kinds:
        raise RecipeError(
            f"objective: {recipe.objective} masks phrases or entities, but {corpus.directory} has none; "
            "`fastbert prepare --spans` finds them"
        )
    return made


def _as_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists as tuples, which frozen dataclasses have."""
    made = {}
    for key, value in options.items():
        is_list = isinstance(value, list)
        made[key] = tuple(tuple(v) if isinstance(v, list) else v for v in value) if is_list else value
    return made


def segments(recipe: Recipe, growth: Growth | None) -> list[Segment]:
    """The run's steps, cut at the ends of phases and where layers are added.

    Raises:
        ValueError: layers would be added after the last step.
    """
    steps = recipe.steps
    depths: list[tuple[int, int | None]] = [(0, None)] if growth is None else []
    if growth is not None:
        begin = 0
        for layers, count in growth.stages:
            depths.append((begin, layers))
            begin = steps if count is None else begin + count
        if depths[-1][0] >= steps:
            raise ValueError(
                f"grow: {depths[-1][1]} layers begin after {depths[-1][0]} steps, but the run has {steps}"
            )
    made, phase_begin = [], 0
    for number, phase in enumerate(recipe.phases):
        phase_end = phase_begin + phase.steps
        cuts = {phase_begin, phase_end, *(at for at, _ in depths if phase_begin < at < phase_end)}
        for begin, end in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
            layers = [layers for at, layers in depths if at <= begin][-1]
            made.append(Segment(begin, end, number, phase_begin, layers))
        phase_begin = phase_end
    return made


def stages(
    corpus: Corpus,
    config: EncoderConfig,
    weights: Path | None,
    recipe: Recipe,
    seed: int,
    growth: Growth | None = None,
) -> list[Stage]:
    """The stages of the training loop."""
    if growth is not None and weights is not None:
        raise ValueError("grow: needs a model without weights, because its layers come from smaller ones")
    if growth is not None and growth.stages[-1][0] != config.num_hidden_layers:
        raise ValueError(
            f"grow: ends with {growth.stages[-1][0]} layers, but the model has {config.num_hidden_layers}"
        )
    if growth is not None and any(isinstance(each, (list, tuple)) for each in config.fixed_heads or ()):
        raise ValueError(
            "grow: needs one list of fixed heads for all layers, because layers are copied; the model's "
            "fixed_heads has one per layer"
        )
    made: list[Stage] = []
    freezes, copies = (False, False) if growth is None else (growth.freeze, growth.moments == "copied")
    parts = segments(recipe, growth)
    objectives = [objective_of(recipe, phase, corpus, seed) for phase in recipe.phases]
    for number, part in enumerate(parts):
        phase, objective = recipe.phases[part.phase], objectives[part.phase]
        before = parts[max(number - 1, 0)]
        grows = before.layers != part.layers
        last = part.layers == parts[-1].layers
        frozen = before.layers if grows and freezes and not last else None
        fresh = recipe.fresh_optimizer and before.phase != part.phase
        micro_batches, size = recipe.cut(phase)
        done = part.begin - part.phase_begin
        made.append(
            Stage(
                part.end - part.begin,
                objective,
                builder(objective, config, weights, part.layers, frozen, recipe.layerdrop),
                recipe.schedule_of(phase),
                micro_batches,
                sequences=None if recipe.by_tokens else size,
                tokens=size * phase.max_length if recipe.by_tokens else None,
                first_micro_batch=done * micro_batches,
                first_step=done if recipe.fresh_optimizer else part.begin,
                enter=_fill if grows else None,
                moments=_moments if grows and copies and not fresh else None,
                fresh_optimizer=fresh,
                options=recipe.optimizer,
                clip=recipe.clip,
            )
        )
    return made


def builder(
    objective: Objective,
    config: EncoderConfig,
    weights: Path | None,
    layers: int | None,
    frozen: int | None,
    layerdrop: float = 0.0,
) -> Callable[[], Losses]:
    """A function that makes the module that is trained.

    Args:
        objective, config, weights: what it is made of; see `stages`.
        layers: number of layers; None: the config's.
        frozen: number of lowest layers that do not train; None: all train.
        layerdrop: see the recipe.
    """

    def build() -> Losses:
        values = config.to_dict()
        if layers is not None:
            values["num_hidden_layers"] = layers
        sized = EncoderConfig.from_dict(values)
        if weights is None:
            model = objective.model(sized)
        else:
            with torch.device("meta"):
                kind = type(objective.model(sized))
            model = kind.from_pretrained(weights, config=sized)
        module = objective.losses(model)
        for exported in module.exports.values():
            exported.layerdrop = layerdrop
        if frozen is not None:
            trained = newest_layers(model, frozen)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in trained and parameter.requires_grad)
        return module

    return build


def _fill(small: Losses, large: Losses) -> None:
    """Grow each exported model, and copy the objective's own heads."""
    for name, model in small.exports.items():
        grow(model, large.exports[name])
    inside = {id(p) for model in large.exports.values() for p in model.parameters()}
    own = dict(small.named_parameters())
    with torch.no_grad():
        for name, parameter in large.named_parameters():
            if id(parameter) not in inside:
                parameter.copy_(own[name])


def _moments(state: dict[str, Tensor], small: Losses, large: Losses) -> dict[str, Tensor]:
    """The optimizer's state, copied as `_fill` copies weights."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        by_name.setdefault(name, {})[key] = value
    grown = {}
    before = {id(p): name for name, p in small.named_parameters()}
    after = {id(p): name for name, p in large.named_parameters()}
    for name, model in small.exports.items():
        own = {}
        for key, p in model.named_parameters():
            if before[id(p)] in by_name:
                own[key] = by_name.pop(before[id(p)])
        parameters = dict(large.exports[name].named_parameters())
        for key, value in grow_moments(own, model, large.exports[name]).items():
            grown[after[id(parameters[key])]] = value
    return {f"{name}/{key}": v for name, kept in {**by_name, **grown}.items() for key, v in kept.items()}


def add_tokenizer(corpus: Corpus, folder: Path, recipe: Recipe) -> None:
    """Write the corpus's tokenizer into each exported directory, in transformers' format."""
    content = (corpus.directory / TOKENIZER).read_bytes()
    by_id = {i: token for token, i in corpus.tokenizer.get_vocab().items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max(phase.max_length for phase in recipe.phases),
        **{f"{name}_token": by_id[i] for name, i in sorted(corpus.special_ids.items())},
    }
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    for config in folder.glob(f"*/{CONFIG}"):
        (config.parent / TOKENIZER).write_bytes(content)
        (config.parent / "tokenizer_config.json").write_text(text, encoding="utf-8")


def published(recipe: Recipe) -> Sequence[str]:
    """The recipe's tables as lines of text."""
    lines = []
    for table in recipe.published:
        width = max(map(len, table["rows"]))
        lines.append(table["source"])
        lines.append(f"  {'':{width}}  " + "  ".join(table["columns"]))
        for name, row in table["rows"].items():
            cells = (f"{value:>{len(head)}}" for head, value in zip(table["columns"], row, strict=True))
            lines.append(f"  {name:{width}}  " + "  ".join(cells))
    return lines
