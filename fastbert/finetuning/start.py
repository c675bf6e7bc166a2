"""What a run begins with: the model and its head, and the learning rates of its parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastbert.finetuning.settings import ROUNDINGS, Settings
from fastbert.layers.fake_quantized import prepare
from fastbert.layers.quantized import is_quantized
from fastbert.models.base import PreTrainedModel
from fastbert.models.config import EncoderConfig
from fastbert.training.optimizers import decay_groups


def classes_of(config: EncoderConfig, names: Sequence[str]) -> list[str]:
    """The classes in the order of a checkpoint's own head if it has these names, else as given.

    transformers' checkpoints of one task differ in the order of their classes.
    """
    own = [config.id2label[i] for i in range(len(config.id2label))]
    return own if sorted(own) == sorted(names) else list(names)


def check_floats(model: nn.Module, path: str | Path) -> None:
    """Raise ValueError if the model of a path is quantised."""
    if is_quantized(model):
        raise ValueError(f"model: {path} is quantised, so it cannot be trained; expected floating point")


def first_model(
    kind: type[PreTrainedModel], path: str | Path, settings: Settings, classes: Sequence[str], labels: int
) -> PreTrainedModel:
    """The model of a run, on the CPU in float32.

    Its head is the checkpoint's if that has the same classes by name, and drawn anew otherwise, by torch's
    generator.

    Args:
        kind: an Auto class.
        path: a HuggingFace directory or a name on the hub.
        settings: `reinit`, `freeze` and `random_init` count here.
        classes: names; none for a head that has no classes.
        labels: outputs of the head; 0 if the head has a fixed number.

    Raises:
        ValueError: the model is quantised, is too small for `reinit`, or shares its layers.
    """
    config = EncoderConfig.from_pretrained(path)
    same = bool(classes) and sorted(config.id2label.values()) == sorted(classes)
    # The labels decide the problem type: a checkpoint of another task may have another
    given: dict[str, Any] = {"ignore_mismatched_sizes": True, "problem_type": None}
    given |= {"dtype": torch.float32, "device": "cpu"}
    if classes:
        ids = dict(enumerate(classes_of(config, classes)))
        given |= {"id2label": ids, "label2id": {name: i for i, name in ids.items()}}
    elif labels:
        given["num_labels"] = labels
    with warnings.catch_warnings():
        # The new head is what is wanted
        warnings.filterwarnings("ignore", message=".*freshly initialised")
        model = kind.from_pretrained(path, output_loading_info=False, **given)
    check_floats(model, path)
    if settings.random_init:
        return type(model)(model.config)
    if labels and not same:
        fresh = type(model)(model.config)
        head = {key: value for key, value in fresh.state_dict().items() if is_head(model, key)}
        model.load_state_dict(head, strict=False)
    encoder = model.base_model
    layers = _layers(encoder) if settings.reinit or settings.layer_decay != 1 else []
    if settings.reinit > len(layers):
        raise ValueError(f"reinit: the model has {len(layers)} layers, got {settings.reinit}")
    if settings.reinit:
        for part in (*layers[-settings.reinit :], getattr(encoder, "pooler", None)):
            if isinstance(part, nn.Module):
                model.init_weights(part)
    if settings.freeze:
        pooler = encoder.config.family.pooler
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(pooler is not None and name.startswith(f"{pooler}."))
    return model


def rounding(model: Any, settings: Settings) -> Any:
    """The model, whose layers round as `Settings.qat` says."""
    return model if settings.qat is None else prepare(model, ROUNDINGS[settings.qat])


def is_head(model: PreTrainedModel, name: str) -> bool:
    """Whether a parameter is the head's: no part of the encoder, its pooler included."""
    return not name.startswith(f"{model.base_model_prefix}.")


def _layers(encoder: PreTrainedModel) -> list[nn.Module]:
    family = encoder.config.family
    if encoder.config.shares_layers:
        raise ValueError(
            f"model: {encoder.config.model_type} shares its layers, which reinit and layer_decay need apart"
        )
    return list(encoder.get_submodule(family.layers).children())


def decayed_groups(decay: float) -> Callable[[nn.Module, float], list[dict[str, Any]]]:
    """The parameter groups of a module with `model`: the lower a layer, the smaller its learning rate.

    The factor is decay^(L + 1 - depth), where embeddings have depth 0, layer i of L (from 1) has i, and the
    head and the pooler have L + 1.

    Source: Clark et al. 2020, "ELECTRA", appendix A.2; its code has one more step above the layers.
    """

    def groups(module: Any, weight_decay: float) -> list[dict[str, Any]]:
        encoder = module.model.base_model
        layers = _layers(encoder)
        depths = {id(p): len(layers) + 1 for p in module.parameters()}
        pooler = getattr(encoder, "pooler", None)
        above = {id(p) for p in pooler.parameters()} if pooler is not None else set()
        depths |= {id(p): 0 for p in encoder.parameters() if id(p) not in above}
        depths |= {id(p): i for i, layer in enumerate(layers, 1) for p in layer.parameters()}
        made = []
        for group in decay_groups(module, weight_decay):
            for depth in sorted({depths[id(p)] for p in group["params"]}):
                members = [p for p in group["params"] if depths[id(p)] == depth]
                made.append({**group, "params": members, "lr_scale": decay ** (len(layers) + 1 - depth)})
        return made

    return groups
