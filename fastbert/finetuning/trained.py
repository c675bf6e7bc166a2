"""The first model of a run with its head, and the files of a trained model.

A model with the usual head is one HuggingFace directory. A model with another head (heads.py) is

    OUT/                    the encoder, a HuggingFace directory
      head.safetensors      all other weights
      head.json             the kind of the model, and which head
      beside/               the second encoder, if there is one

So a library that does not know the head finds no weights of a head, and says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastbert.checkpoint import hub
from fastbert.checkpoint.files import read_json, write_json
from fastbert.finetuning.heads import BESIDE, Above, Head
from fastbert.finetuning.settings import Settings
from fastbert.finetuning.start import first_model
from fastbert.models.auto import AutoModel
from fastbert.models.base import PreTrainedModel
from fastbert.models.config import EncoderConfig
from fastbert.sentences.tokenizer import load_tokenizer

WEIGHTS, FORM = "head.safetensors", "head.json"
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice", "ForQuestionAnswering")


def asked(head: Head, place: Path) -> Head:
    """The head of a run: what is asked for, else that of the checkpoint.

    Raises:
        ValueError: the model reads from right to left, as only `beside` does.
    """
    if EncoderConfig.from_pretrained(place).right_to_left:
        raise ValueError(f"model: {place} reads from right to left; expected it as beside")
    if head.beside is not None:
        other = hub.resolve(head.beside)
        if load_tokenizer(other).get_vocab() != load_tokenizer(place).get_vocab():
            raise ValueError(f"beside: expected the tokenizer of the model, got another in {other}")
        head = replace(head, beside=other)
    if head != Head() or not (place / FORM).is_file():
        return head
    stored = read_json(place / FORM)
    beside = place / BESIDE if stored.get(BESIDE) else None
    return Head(stored.get("head_mix", False), 0, stored.get("head_bilstm", False), beside)


def first(
    kind: Any, place: Path, settings: Settings, classes: Sequence[str], labels: int, head: Head
) -> PreTrainedModel:
    """The model of a run, on the CPU in float32, as `start.first_model` makes it, with its head.

    A checkpoint's own head is kept if it is of the same form, for the same kind of task and the same classes.

    Raises:
        ValueError: the model does not fit the head.
    """
    names = EncoderConfig.from_pretrained(place).id2label
    model = first_model(kind, place, settings, classes, labels)
    if head.head_layers:
        model = _deeper(model, head.head_layers)
    _attach(model, kind, head)
    above: Any = model._modules.get("above")
    if above is None:
        return model
    if settings.freeze and above.beside is not None:
        above.beside.requires_grad_(False)
    stored = read_json(place / FORM) if (place / FORM).is_file() else {}
    same = model.config.id2label == names and not settings.random_init
    if same and stored == _described(model):
        fill(_own(model), place)
    return model


def _attach(model: PreTrainedModel, kind: Any, head: Head) -> None:
    """Give a model the `above` that its head needs, if it needs one."""
    sequences = bool(kind.reads_first_only)
    beside = None
    if head.beside is not None:
        beside = AutoModel.from_pretrained(head.beside, dtype=torch.float32, add_pooling_layer=False)
        if beside.config.model_type != model.config.model_type:
            raise ValueError(
                f"beside: expected {model.config.model_type} as the model is, got {beside.config.model_type}"
            )
        if beside.config.max_tokens < model.config.max_tokens:
            raise ValueError(
                f"beside: expected {model.config.max_tokens} positions as the model has, "
                f"got {beside.config.max_tokens}"
            )
        beside.train(model.training)
    if head.head_mix or head.head_bilstm or beside or (sequences and model.config.is_decoder):
        model.above = Above(model.config, head, sequences, beside)


def _deeper(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The model with new layers on top of its encoder, which learn even if the encoder is frozen."""
    config = model.config
    if config.shares_layers:
        raise ValueError(f"head_layers: expected 0, because {config.model_type} shares its layers")
    values = {**config.to_dict(), config.family.spelt("num_hidden_layers"): config.num_hidden_layers + count}
    deep = type(model)(EncoderConfig.from_dict(values))
    deep.load_state_dict(model.state_dict(), strict=False)
    learns = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, parameter in deep.named_parameters():
        parameter.requires_grad_(learns.get(name, True))
    return deep.train(model.training)


def exports(model: nn.Module) -> dict[str, PreTrainedModel]:
    """Folder of a checkpoint -> what it has as a HuggingFace directory; all else are heads."""
    if not isinstance(model, PreTrainedModel):
        return {}
    above: Any = model._modules.get("above")
    if above is None:
        return {"model": model}
    return {"model": model.base_model, **({} if above.beside is None else {BESIDE: above.beside})}


def save(model: Any, folder: Path) -> None:
    """Write a trained model; see the module. A usual model is one HuggingFace directory."""
    if model._modules.get("above") is None:
        model.save_pretrained(folder)
        return
    for name, encoder in exports(model).items():
        encoder.save_pretrained(folder if name == "model" else folder / name)
    write_head(folder, _own(model), _described(model))


def write_head(folder: Path, weights: dict[str, Tensor], form: dict[str, Any]) -> None:
    """Write head.safetensors and head.json."""
    save_file({name: p.detach().cpu().contiguous() for name, p in weights.items()}, folder / WEIGHTS)
    write_json(folder / FORM, form)


def load(kind: Any, place: Path, device: torch.device | str | None, task: str) -> PreTrainedModel:
    """A trained model with its head, in eval mode.

    Args:
        kind: an Auto class.
        place: a HuggingFace directory, with head.json or with the head of the class.
        device: where to put the model.
        task: for messages.

    Raises:
        ValueError: there is no trained head of this kind.
    """
    with warnings.catch_warnings():
        # Refused below, by name
        warnings.filterwarnings("ignore", message=".*freshly initialised")
        model = kind.from_pretrained(place, device=device)
    missing = f"model: {place} has no trained head for {task}; fastbert finetune trains one"
    if not (place / FORM).is_file():
        # Heads for texts and for tokens have equal names and shapes
        named = [name for name in model.config.architectures or () if name.endswith(_HEADS)]
        if model.load_report.missing or (named and not named[0].endswith(model.task)):
            raise ValueError(missing)
        return model
    form = read_json(place / FORM)
    beside = place / BESIDE if form.get(BESIDE) else None
    _attach(model, kind, Head(form.get("head_mix", False), 0, form.get("head_bilstm", False), beside))
    if model._modules.get("above") is None or form != _described(model):
        raise ValueError(missing)
    fill(_own(model), place)
    return model.to(model.device).eval()


def _described(model: PreTrainedModel) -> dict[str, Any]:
    above: Any = model._modules["above"]
    return {"kind": model.task, **above.form()}


def _own(model: PreTrainedModel) -> dict[str, Tensor]:
    """Name -> each parameter that no export has."""
    exported = {id(p) for each in exports(model).values() for p in each.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in exported}


@torch.no_grad()
def fill(own: dict[str, Tensor], place: Path) -> None:
    """Load head.safetensors into parameters.

    Raises:
        ValueError: the file has other names or shapes.
    """
    stored = load_file(place / WEIGHTS)
    for name in sorted({*own, *stored}):
        shapes = [tuple(of[name].shape) if name in of else None for of in (own, stored)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{place / WEIGHTS}: {name}: expected shape {shapes[0]}, got {shapes[1]}")
        own[name].copy_(stored[name])
