"""Our attention in transformers models of no family, through transformers' attention interface.

`apply` sets the name "fastbert" on a model instead of "sdpa". Its attention modules then call the functions
of `attention.py`. Projections, norms and feed-forward stay the model's own. `undo` restores the model.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fastbert.acceleration.attention import NAME, SITE, Site, register

# Where a model keeps the implementations that `undo` restores
BEFORE = "_fastbert_interface_before"

# Text encoders in which nothing after attention mixes a padded row into another, heads included
PACKED = frozenset(("data2vec-text", "esm", "roberta-prelayernorm", "roc_bert", "xlm-roberta-xl", "xmod"))


def sites(model: nn.Module) -> dict[str, Site]:
    """Name of the module -> `Site`, for a model that `apply` has changed."""
    return {name: m.__dict__[SITE] for name, m in model.named_modules() if SITE in m.__dict__}


def allows(model: nn.Module) -> str | None:
    """Why `apply` cannot change this transformers model; None if it can, or already has.

    Raises:
        TypeError: `model` is no transformers.PreTrainedModel.
    """
    for part in _parts(model):
        name = type(part).__name__
        if not part._supports_sdpa:
            return f"{name} does not support attn_implementation='sdpa', which fastbert's attention replaces"
        if not part._can_set_attn_implementation():
            return f"{name} does not let its attention implementation be set"
        chosen = part.config._attn_implementation
        if chosen not in ("sdpa", NAME):
            return f"{name} is set to the attention implementation {chosen!r}; ours replaces 'sdpa'"
        if part.config.output_attentions:
            return f"{name}'s config asks for output_attentions"
    if not any(_asks(module) for module in model.modules()):
        return f"no module of {type(model).__name__} asks transformers' attention interface"
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        if _names_sdpa(cls):
            return f"{cls.__name__} compares with the name 'sdpa' itself"
    return None


def on_cpu(model: nn.Module) -> bool:
    """Whether a model is on a CPU, where attention takes too little of the time for a gain."""
    weight = next(model.parameters(), None)
    return weight is not None and weight.device.type == "cpu"


def apply(model: Any, *, strict: bool = False) -> Any:
    """Give a transformers model our attention, in place; returns it. Another call changes `strict`.

    Args:
        model: a transformers.PreTrainedModel. As with `set_attn_implementation`, its config changes, which
            other models may share.
        strict: whether a call that our attention cannot compute raises RuntimeError instead of running in
            sdpa.

    Raises:
        TypeError: `model` is no transformers.PreTrainedModel.
        ValueError: `allows(model)` has a reason.
    """
    reason = allows(model)
    if reason is not None:
        raise ValueError(f"model: {reason}")
    register()
    if BEFORE not in model.__dict__:
        before = _implementations(model.config)
        model.set_attn_implementation(NAME)
        model.__dict__[BEFORE] = before
    packs = all(_packs(part.config) and not _scores_padding(part) for part in _parts(model))
    for name, module in model.named_modules():
        if SITE in module.__dict__:
            module.__dict__[SITE].strict = strict
        elif _asks(module):
            module.__dict__[SITE] = Site(name, packs, strict)
    return model


def undo(model: Any) -> Any:
    """Restore the implementations that the model had before `apply`; returns the model.

    Raises:
        TypeError: `model` is no transformers.PreTrainedModel.
    """
    _parts(model)
    before = model.__dict__.pop(BEFORE, None)
    if before is not None:
        model.set_attn_implementation(before)
    for module in model.modules():
        module.__dict__.pop(SITE, None)
    return model


def _parts(model: nn.Module) -> list[Any]:
    """The transformers models in `model`, `model` first."""
    from transformers import PreTrainedModel

    if not issubclass(type(model), PreTrainedModel):
        raise TypeError(f"model: expected a transformers.PreTrainedModel, got {type(model).__name__}")
    return [module for module in model.modules() if issubclass(type(module), PreTrainedModel)]


def _implementations(config: Any) -> str | dict[Any, Any]:
    """The argument of `set_attn_implementation` that sets what `config` and its parts have now."""
    parts = {key: getattr(config, key) for key in config.sub_configs}
    parts = {key: _implementations(part) for key, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **parts} if parts else config._attn_implementation


def _packs(config: Any) -> bool:
    # is_folding_model: ESM with a structure module after it
    unlike = ("is_decoder", "add_cross_attention", "is_folding_model")
    return config.model_type in PACKED and not any(getattr(config, name, False) for name in unlike)


def _scores_padding(model: nn.Module) -> bool:
    """Whether a model has a question-answering head, whose softmax runs over padded rows too."""
    return any(cls.__name__.endswith("ForQuestionAnswering") for cls in type(model).__mro__)


def _asks(module: nn.Module) -> bool:
    """Whether the module's forward looks its attention function up in transformers' interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _names_sdpa(cls: type) -> bool:
    """Whether a method of a model's class has the name "sdpa" in it; transformers' base class may."""
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base.__module__ == "transformers.modeling_utils":
            break
        for value in vars(base).values():
            code = getattr(inspect.unwrap(value), "__code__", None) if inspect.isfunction(value) else None
            for const in () if code is None else code.co_consts:
                if const == "sdpa" or (isinstance(const, (tuple, frozenset)) and "sdpa" in const):
                    return True
    return False
