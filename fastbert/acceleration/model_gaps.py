"""What `accelerate` stores in a transformers encoder, and why the encoder must keep the padded layout.

In the padded layout the stock model's code runs, with accelerated layers in it (layer.py). `gap` returns why
a model keeps that layout, and `unfit` why a call keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.acceleration import layer_gaps, streams
from fastbert.acceleration.classes import Options
from fastbert.acceleration.watching import HARMLESS, is_sharded
from fastbert.layers.modules import changed, has_other_forward, is_hooked, part, plain_dropout, watched
from fastbert.models.config import EncoderConfig
from fastbert.models.config_values import MAX_SIZE
from fastbert.models.encoder import layers_of
from fastbert.models.families import FAMILIES

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
GLOBALS = "global_attention_mask"


@dataclass
class ModelState:
    """What `accelerate` stores in an encoder.

    Attributes:
        model_type: the family.
        name: the encoder's name in the model that was accelerated.
        config: checks the encoder's inputs; None if only its layers can be accelerated.
        reason: why there is no config, or None.
        options: see `Options`.
        packed_calls, padded_calls: number of calls in either layout, without those of torch.compile.
        reads_masked: why the encoder's caller also reads outputs of masked tokens, or None.
        spans: whether the encoder is in a question-answering head; see `AcceleratedSpans`.
        reads: which outputs a caller reads, whether they are masked or not (`streams.read_by`).
        sizes: sizes of the embedding tables, as `config` has them.
    """

    model_type: str
    name: str
    config: EncoderConfig | None
    reason: str | None
    options: Options
    packed_calls: int = 0
    padded_calls: int = 0
    reads_masked: str | None = None
    spans: bool = False
    reads: streams.Read | None = "first"
    sizes: tuple[Any, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, model: Any, model_type: str, name: str, options: Options) -> ModelState:
        """The state of a stock encoder."""
        try:
            config = layer_gaps.checked_config(model_type, model.config)
            if config.family.rotary and config.rotary(0).trained is not None:
                raise ValueError("the angles of rotary positions depend on earlier calls (rope_type dynamic)")
            reads: streams.Read | None = "first"
            if config.family.two_streams:
                # transformers only compares token types
                config.type_vocab_size, reads = MAX_SIZE, None
            return cls(model_type, name, config, None, options, reads=reads)
        except (TypeError, ValueError) as error:
            return cls(model_type, name, None, str(error), options)


def gap(model: Any) -> str | None:
    """Why the model cannot run on packed tokens now, whatever its arguments; None if it can."""
    return own_gap(model) or modules_gap(model)


def own_gap(model: Any) -> str | None:
    """The part of `gap` that a kept plan does not cover."""
    state = model.fastbert_state
    if state is None:
        return "it was made after the model was accelerated"
    if state.config is None:
        return state.reason
    if not state.options.unpad:
        return "unpad=False"
    if state.reads_masked is not None:
        return state.reads_masked
    if state.spans and model.training:
        return "in training a question-answering head learns to score masked tokens, as in the stock model"
    if not state.options.attention:
        return "attention=False"
    family = FAMILIES[state.model_type]
    if family.two_streams and (reason := streams.own_gap(model)) is not None:
        return reason
    if _has_any_global_hook():
        return "there are global module hooks"
    above = model
    for name in family.layers.split("."):
        above = above._modules[name]
        if is_hooked(above) or has_other_forward(above):
            return f"{name} has hooks or another forward"
    return None


def modules_gap(model: Any) -> str | None:
    """The part of `gap` that stays None while no module below the model changes."""
    family = FAMILIES[model.fastbert_state.model_type]
    container, _, inside = family.layers.partition(".")
    # A list of layers is no stack with a forward of its own
    table, dropout = family.embeddings == family.word_table, family.stock_model.dropout
    parts = (*[family.embeddings] * (not table), *[container] * bool(inside), *["rotary_emb"] * family.rotary)
    for name in parts:
        if type(model._modules.get(name)).forward.__module__ != family.stock_module:
            return f"{name} is not the stock model's"
    if table and type(model._modules.get(family.embeddings)) is not nn.Embedding:
        return f"{family.embeddings} is not the stock model's"
    for module in tables(model):
        if getattr(module, "scale_grad_by_freq", False):
            return f"a table of {family.embeddings} counts masked tokens too (scale_grad_by_freq)"
    if dropout is not None and not plain_dropout(part(model.embeddings, dropout)):
        return f"embeddings.{dropout} is not a plain dropout"
    if family.two_streams and not plain_dropout(model.dropout):
        return "dropout is not a plain dropout"
    for name, module in model._modules.items():
        if module is None or name == container:
            continue
        for child in module.modules():
            if watched(child):
                return f"{name} has hooks or another forward"
    if family.shared_layers:
        above = part(model, family.layers)
        lists = (group._modules[family.group_layers] for group in above)
        between = (above, *above, *lists, part(model, cast(str, family.projection)))
        if any(is_hooked(m) or has_other_forward(m) for m in between) or any(
            type(group).forward.__module__ != family.stock_module for group in above
        ):
            return "a group of layers, or the mapping before them, has hooks or another forward"
    if family.relative_bias and watched(part(model, family.relative_bias)):
        return f"{family.relative_bias} has hooks or another forward"
    if family.disentangled:
        stack = part(model, container)._modules
        if (conv := stack.get("conv")) is not None:
            if type(conv).forward.__module__ != family.stock_module:
                return f"{container}.conv is not the stock model's"
            if any(map(watched, conv.modules())):
                return f"{container}.conv has hooks or another forward"
        for name in {"rel_embeddings", "LayerNorm"} & stack.keys():
            if (reason := changed(stack[name])) is not None:
                return f"{container}.{name} {reason}"
    for layer in layers_of(model, model.config, family):
        if not isinstance(layer, layer_gaps.AnyLayer) or layer.fastbert_state is None:
            return "a layer is not accelerated"
        if layer.__dict__.get("_compiled_call_impl") is not None:
            # Its arguments on packed tokens differ per layer, so each layer would be compiled again
            return f"{layer.fastbert_state.name} is compiled by itself"
        if watched(layer):
            return f"{layer.fastbert_state.name} has hooks or another forward"
        reason = layer_gaps.gap(layer, at_model=is_sharded(layer))
        if reason is not None:
            return f"{layer.fastbert_state.name}: {reason}"
    return None


def unfit(model: Any, given: dict[str, Any]) -> str | None:
    """Why a call with these arguments cannot run on packed tokens; None if it can."""
    family = FAMILIES[model.fastbert_state.model_type]
    for name in ("output_attentions", "output_hidden_states"):
        value = asked(model, given, name)
        if not value:
            continue
        if name == "output_attentions":
            return "output_attentions is asked for"
        if value is not True:
            return "hidden states are asked for by number"
        if torch.is_grad_enabled():
            return "hidden states are asked for with gradients"
    inputs = (*INPUTS, GLOBALS) if family.global_tokens else INPUTS
    for name, value in given.items():
        if value is None or value is False or name in HARMLESS or name in inputs:
            continue
        if name != "output_hidden_states" and not (name == "use_mems" and family.two_streams):
            return f"{name} is given"
    if family.two_streams and given.get("position_ids") is not None:
        return "position_ids are given, which the stock model ignores"
    if given.get("use_cache"):
        return "use_cache is given"
    mask, ids, embeds = given.get("attention_mask"), given.get("input_ids"), given.get("inputs_embeds")
    if (ids is None) is (embeds is None):
        return "not exactly one of input_ids and inputs_embeds is given"
    tokens = ids if ids is not None else embeds
    if not isinstance(tokens, Tensor) or tokens.dim() != (2 if ids is not None else 3) or tokens.numel() == 0:
        return "there are no tokens, or not of a batch's shape"
    # Packing would send the tokens to the device, where the stock model raises
    if tokens.is_cpu and device_of(model).type != "cpu":
        return "the tokens are on the CPU, but the model is not"
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return "the attention mask does not have two dimensions"
    shape = tokens.shape[:2]
    for name in ("attention_mask", "token_type_ids", "position_ids", GLOBALS):
        value = given.get(name)
        fits = (shape, (1, shape[1])) if name == "position_ids" else (shape,)
        if value is not None and getattr(value, "shape", None) not in fits:
            return f"{name} does not have the shape of the tokens"
    if not family.segments and given.get("token_type_ids") is not None:
        return "token_type_ids are given to a family without segments"
    return None


def asked(model: Any, given: dict[str, Any], name: str, default: bool = False) -> Any:
    """An option of a call, or else the config's value."""
    value = given.get(name)
    return getattr(model.config, name, default) if value is None else value


def tables(model: Any) -> tuple[Any, ...]:
    """The tables of words, positions and token types; None for a table that the model lacks."""
    family = FAMILIES[model.fastbert_state.model_type]
    root, name = model._modules[family.embeddings], family.word_table.rpartition(".")[2]
    if family.embeddings == family.word_table:
        return root, None, None
    return tuple(map(root._modules.get, (name, "position_embeddings", "token_type_embeddings")))


def device_of(model: Any) -> torch.device:
    """The device of the table of words, or of the first parameter."""
    # captum replaces the table by a module without a weight, which takes embeddings in place of ids
    weight = getattr(tables(model)[0], "weight", None)
    return next(model.parameters()).device if weight is None else weight.device
