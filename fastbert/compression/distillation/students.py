"""Teachers, and students to begin with: the teacher's layers, a directory, a config, a model, or a BiLSTM."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fastbert.checkpoint import hub
from fastbert.checkpoint.files import CONFIG, digest, read_json
from fastbert.checkpoint.read import weights_digest
from fastbert.compression import shrink
from fastbert.compression.distillation.bilstm import (
    MODEL_TYPE,
    BiLstmConfig,
    BiLstmForSequenceClassification,
)
from fastbert.compression.distillation.families import in_family
from fastbert.compression.distillation.objective import depth_of
from fastbert.compression.distillation.reading import (
    NOTHING,
    SPANS,
    TEXTS,
    TOKENS,
    VECTORS,
    rows_of,
)
from fastbert.compression.distillation.recipes import (
    OF_SENTENCES,
    SENTENCES,
    TASK,
    TEXT,
    Recipe,
    layer_pairs,
)
from fastbert.compression.distillation.sentences import SentenceVectors, student_settings, teacher_vectors
from fastbert.finetuning import tasks, trained
from fastbert.finetuning.features import NerFeatures
from fastbert.finetuning.sequences import SequenceTask
from fastbert.finetuning.settings import Settings
from fastbert.finetuning.spans import Squad
from fastbert.finetuning.start import first_model
from fastbert.finetuning.tagging import Ner
from fastbert.finetuning.task import Task
from fastbert.models.auto import AutoModel, AutoModelForMaskedLM
from fastbert.models.base import PreTrainedModel
from fastbert.models.config import EncoderConfig
from fastbert.pretraining.run import WEIGHTS
from fastbert.sentences.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Student:
    """What a student begins as.

    Attributes:
        make: the model with its first weights, on the CPU in float32, by torch's generator.
        described: what the first weights depend on; JSON values.
        place: the directory of its own tokenizer; None: the teacher's.
    """

    make: Callable[[], Any]
    described: Any
    place: Path | None = None


def task_of(recipe: Recipe, given: str | Task | None) -> Task | None:
    """The task of an argument of `distill`; None for a recipe that reads no labelled examples.

    Raises:
        ValueError: naming `task`.
    """
    if recipe.data != TASK:
        if given is not None:
            raise ValueError(f"task: expected None, as the recipe reads no labelled examples, got {given!r}")
        return None
    task = given if isinstance(given, Task) else tasks.task_of("csv" if given is None else given)
    if not isinstance(task, (SequenceTask, Ner, Squad)) or isinstance(task, NerFeatures):
        raise ValueError(f"task: expected one with labels of texts, tokens or spans, got {task.name}")
    return task


def kind_of(recipe: Recipe, task: Task | None) -> Any:
    """The Auto class of a recipe's models."""
    if task is not None:
        return task.head
    return AutoModelForMaskedLM if recipe.masks else AutoModel


def teacher_of(recipe: Recipe, task: Task | None, place: Path, device: torch.device) -> Any:
    """The teacher in eval mode, without gradients, in float32.

    Raises:
        ValueError: the directory lacks the head that the recipe learns from, or it has several labels.
    """
    kind = kind_of(recipe, task)
    if recipe.data == SENTENCES:
        model = teacher_vectors(place, device)
    elif task is not None:
        try:
            model = trained.load(kind, place, device, task.name)
        except ValueError as error:
            raise ValueError(f"teacher: {error}") from None
        if model.config.problem_type == "multi_label_classification":
            raise ValueError(f"teacher: {place} has several labels per text; expected one class or number")
        if rows_of(model) == NOTHING:
            raise ValueError(f"teacher: {type(model).__name__} has no scores of single tokens to learn from")
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*freshly initialised")
            model = kind.from_pretrained(place, device=device)
        if recipe.masks and model.load_report.missing:
            raise ValueError(f"teacher: {place} has no masked-LM head; expected a pre-trained model with one")
    return model.float().requires_grad_(False).eval()


def student_of(
    given: Any, recipe: Recipe, task: Task | None, teacher: Any, family: str | None = None
) -> Student:
    """The student of the arguments `student` and `student_family` of `distill`.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    if isinstance(teacher, SentenceVectors):
        return _of_sentences(given, recipe, teacher, family)
    kind = kind_of(recipe, task)
    of_layers = isinstance(given, Sequence) and not isinstance(given, str)
    if family is not None and not of_layers:
        raise ValueError(
            f"student_family: expected None, as the student is no list of layers, got {family!r}"
        )
    if isinstance(given, str) and given == MODEL_TYPE:
        return _bilstm(recipe, task, teacher)
    if isinstance(given, (str, Path)):
        return _of_directory(Path(given), kind, teacher)
    if isinstance(given, EncoderConfig):
        return Student(lambda: _new(kind, given.to_dict(), teacher), given.to_dict())
    if isinstance(given, PreTrainedModel):
        if given.task != kind.task:
            raise ValueError(f"student: expected a model {kind.task}, got {type(given).__name__}")
        whole = copy.deepcopy(given).cpu().float().requires_grad_(True)
        values = {name: t.detach().contiguous().clone() for name, t in whole.state_dict().items()}
        described = {"weights": digest(save(values)), "config": whole.config.to_dict()}
        return Student(lambda: copy.deepcopy(whole), described)
    if of_layers and all(type(layer) is int for layer in given):
        layers = list(given)
        _of_layers(teacher, layers, family)  # raises now, not when the run begins
        described = {"layers": layers} if family is None else {"layers": layers, "family": family}
        return Student(lambda: _of_layers(teacher, layers, family), described)
    raise TypeError(
        "student: expected a directory, a config, a model, a list of the teacher's layers or "
        f"{MODEL_TYPE!r}, got {type(given).__name__}"
    )


def _of_sentences(given: Any, recipe: Recipe, teacher: SentenceVectors, family: str | None) -> Student:
    """A student that is a sentence encoder."""
    settings = teacher.settings
    if isinstance(given, (str, Path)) and given != MODEL_TYPE and not Path(given).is_file():
        settings = student_settings(hub.resolve(given), settings)
        given = settings.transformer
    begun = student_of(given, recipe, None, teacher.model, family)
    if begun.place is None:
        settings = replace(settings, transformer=teacher.settings.transformer)
    described = {"model": begun.described, "pooling": settings.pooling, "normalize": settings.normalize}
    return Student(lambda: SentenceVectors(begun.make(), settings), described, begun.place)


def _of_layers(teacher: Any, layers: list[int], family: str | None) -> Any:
    cut = shrink.without(teacher, layers=layers).cpu()
    if family is not None and family != cut.config.model_type:
        cut = in_family(cut, family)
    return cut.requires_grad_(True)


def _of_directory(given: Path, kind: Any, teacher: Any) -> Student:
    if given.is_file():
        values = read_json(given)
        return Student(lambda: _new(kind, values, teacher), values)
    place = hub.resolve(given)
    own = place if any((place / name).is_file() for name in ("tokenizer.json", "vocab.txt")) else None
    if not any((place / name).is_file() for name in WEIGHTS):
        values = read_json(place / CONFIG)
        return Student(lambda: _new(kind, values, teacher), values, own)
    return Student(lambda: _loaded(kind, place, teacher), {"weights": weights_digest(place)}, own)


def _loaded(kind: Any, place: Path, teacher: Any) -> Any:
    """A checkpoint, with a new head if its own is not of the teacher's classes."""
    if rows_of(teacher) in (TEXTS, TOKENS, SPANS):
        names = [*_names(teacher).values()] if rows_of(teacher) != SPANS else []
        model = first_model(kind, place, Settings(1.0, 1, 1, 3), names, len(names))
        return _with_classes(model, teacher)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*freshly initialised|.*has no pooler")
        return kind.from_pretrained(place, dtype=torch.float32)


def _new(kind: Any, values: Mapping[str, Any], teacher: Any) -> Any:
    config = EncoderConfig.from_dict(dict(values))
    if rows_of(teacher) in (TEXTS, TOKENS):
        config.id2label = _names(teacher)
        config.label2id = {name: i for i, name in config.id2label.items()}
    return _with_classes(kind.from_config(config), teacher)


def _with_classes(model: Any, teacher: Any) -> Any:
    model.config.problem_type = teacher.config.problem_type
    return model


def _names(teacher: Any) -> dict[int, str]:
    return {i: teacher.config.id2label[i] for i in range(teacher.config.num_labels)}


def _bilstm(recipe: Recipe, task: Task | None, teacher: Any) -> Student:
    if task is None:
        raise ValueError(f"student: a BiLSTM learns from {TASK}, which this recipe does not read")
    if rows_of(teacher) != TEXTS:
        raise ValueError(f"student: a BiLSTM has scores of texts; expected another student for {task.name}")
    table = teacher.get_input_embeddings().weight
    sizes = {"vocab_size": table.shape[0], "embedding_size": table.shape[1]}
    config = BiLstmConfig(**sizes, id2label=_names(teacher), max_tokens=teacher.config.max_tokens)

    def make() -> BiLstmForSequenceClassification:
        model = BiLstmForSequenceClassification(config)
        model.embeddings.weight.data.copy_(table)
        return model

    return Student(make, MODEL_TYPE)


def same_words(student: Student, place: Path) -> bool:
    """Whether the student reads the teacher's tokens."""
    if student.place is None:
        return True
    return load_tokenizer(student.place).get_vocab() == load_tokenizer(place).get_vocab()


def _heads(config: Any, layer: int) -> int:
    """The number of heads of a layer, which counts from 1."""
    kept = config.kept_heads()[layer - 1]
    return config.num_attention_heads if kept is None else len(kept)


def check_pair(
    recipe: Recipe,
    weights: Sequence[Mapping[str, float]],
    student: Any,
    teacher: Any,
    same_tokens: bool,
    layer_map: Sequence[int] | None,
    relation_heads: int | None,
) -> list[tuple[int, int]]:
    """The pairs of layers that are compared; raises unless the losses can compare these two models.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    names = [*dict.fromkeys(name for phase in weights for name in phase)]
    replacing = recipe.replaces
    alone = recipe.data != TEXT and not replacing and {*names} <= {*OF_SENTENCES}
    rows = rows_of(teacher)
    if not same_tokens and not (alone and rows in (TEXTS, VECTORS)):
        raise ValueError(
            "student: has another vocabulary than the teacher; expected the same, or a recipe that compares "
            "whole texts (kd, bilstm, sentences)"
        )
    if rows != rows_of(student):
        raise ValueError(f"student: {type(student).__name__} has no scores of {rows}, as the teacher has")
    if "logits" in names and rows != TEXTS:
        raise ValueError(f"recipe: squared errors are of scores of texts; expected kd for those of {rows}")
    own, other, depths = student.config, teacher.config, (depth_of(student), depth_of(teacher))
    if not (alone or depths[0]):
        raise ValueError("student: a BiLSTM has no layers to compare; expected recipe kd or bilstm")
    of_width = replacing or {*names} & {"cosine", "patient"}
    if of_width and own.hidden_size != other.hidden_size:
        raise ValueError(
            f"student: hidden_size: expected {other.hidden_size} as the teacher has, got {own.hidden_size}"
        )
    if alone:
        if layer_map is not None:
            raise ValueError("layer_map: expected None with a recipe that compares no layers")
        return []
    pairs = layer_pairs(recipe.matched, *depths, layer_map)
    if "patient" in names and not pairs:
        raise ValueError("student: expected two layers at least, because pkd leaves the last out")
    by_heads = {"scores", "attention"} | ({"values"} if relation_heads is None else set())
    for m, n in pairs if {*names} & by_heads or relation_heads is not None else ():
        mine, theirs = _heads(own, m), _heads(other, n)
        if not mine or not theirs:
            who = f"the student's layer {m}" if theirs else f"the teacher's layer {n}"
            raise ValueError(f"layer_map: expected layers with heads, but {who} has none")
        if {*names} & by_heads and mine != theirs:
            raise ValueError(
                f"student: num_attention_heads: expected {theirs} as the teacher has in layer {n}, got "
                f"{mine} in layer {m}"
            )
        for who, width in (("student", mine * own.head_dim), ("teacher", theirs * other.head_dim)):
            if relation_heads is not None and width % relation_heads:
                raise ValueError(
                    f"relation_heads: expected a divisor of {width}, the width of the {who}'s attention, "
                    f"got {relation_heads}"
                )
    if replacing:
        ends = [n for _, n in pairs]
        if own.model_type != other.model_type or own.family.shared_layers:
            raise ValueError(
                f"student: model_type: expected {other.model_type} as the teacher has, with layers of its "
                f"own, got {own.model_type}"
            )
        if ends != sorted(set(ends)) or ends[-1] != depths[1]:
            raise ValueError(f"layer_map: expected rising numbers that end with {depths[1]}, got {ends}")
    return pairs
