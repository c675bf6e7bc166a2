"""A transformers encoder that removes padding once per call, and when it must keep the padded layout.

In the padded layout the stock model's code runs, with accelerated layers in it (layer.py). `gap` returns why
a model keeps that layout, and `unfit` why a call keeps it.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.acceleration import blocks, streams
from fastbert.acceleration import layer as layers
from fastbert.acceleration.classes import Accelerated, Options, positional
from fastbert.acceleration.layer import AcceleratedLayer
from fastbert.acceleration.spans import head_of_call
from fastbert.acceleration.streams import AcceleratedStream
from fastbert.acceleration.watching import HARMLESS, exporting, is_sharded, uncompiled
from fastbert.execution.plan import Plan, plan_of
from fastbert.layers.embeddings import embed, launched
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.linear import apply_linear
from fastbert.layers.modules import changed, has_other_forward, is_hooked, part, plain_dropout, watched
from fastbert.models.config import EncoderConfig
from fastbert.models.config_values import MAX_SIZE
from fastbert.models.encoder import layers_of, run_encoder
from fastbert.models.families import FAMILIES
from fastbert.models.heads.task_model import served_by
from fastbert.models.inputs import Inputs, packed_inputs
from fastbert.models.two_streams import content_stream
from fastbert.runtime import prepared

_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
_GLOBALS = "global_attention_mask"
_LAYERS = AcceleratedLayer, AcceleratedStream
_TABLES = ("position_embeddings", "token_type_embeddings")
EXPANDS = "query_expansion reads the outputs of masked tokens"
OTHER_SPANS = "a question-answering head with a forward of its own reads the outputs of masked tokens"


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
            config = layers.checked_config(model_type, model.config)
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
    return _own_gap(model) or _modules_gap(model)


def _own_gap(model: Any) -> str | None:
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


def _modules_gap(model: Any) -> str | None:
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
    for module in _tables(model):
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
        if stack.get("conv") is not None:
            return f"{container}.conv reads the padded batch"
        for name in {"rel_embeddings", "LayerNorm"} & stack.keys():
            if (reason := changed(stack[name])) is not None:
                return f"{container}.{name} {reason}"
    for layer in layers_of(model, model.config, family):
        if not isinstance(layer, _LAYERS) or layer.fastbert_state is None:
            return "a layer is not accelerated"
        if layer.__dict__.get("_compiled_call_impl") is not None:
            # Its arguments on packed tokens differ per layer, so each layer would be compiled again
            return f"{layer.fastbert_state.name} is compiled by itself"
        if watched(layer):
            return f"{layer.fastbert_state.name} has hooks or another forward"
        reason = layers.gap(layer, at_model=is_sharded(layer))
        if reason is not None:
            return f"{layer.fastbert_state.name}: {reason}"
    return None


def unfit(model: Any, given: dict[str, Any]) -> str | None:
    """Why a call with these arguments cannot run on packed tokens; None if it can."""
    family = FAMILIES[model.fastbert_state.model_type]
    for name in ("output_attentions", "output_hidden_states"):
        value = _asked(model, given, name)
        if not value:
            continue
        if name == "output_attentions":
            return "output_attentions is asked for"
        if value is not True:
            return "hidden states are asked for by number"
        if torch.is_grad_enabled():
            return "hidden states are asked for with gradients"
    inputs = (*_INPUTS, _GLOBALS) if family.global_tokens else _INPUTS
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
    if tokens.is_cpu and _device(model).type != "cpu":
        return "the tokens are on the CPU, but the model is not"
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return "the attention mask does not have two dimensions"
    shape = tokens.shape[:2]
    for name in ("attention_mask", "token_type_ids", "position_ids", _GLOBALS):
        value = given.get(name)
        fits = (shape, (1, shape[1])) if name == "position_ids" else (shape,)
        if value is not None and getattr(value, "shape", None) not in fits:
            return f"{name} does not have the shape of the tokens"
    if not family.segments and given.get("token_type_ids") is not None:
        return "token_type_ids are given to a family without segments"
    return None


def _with_globals(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Longformer with one mask, in which global tokens have 2, as the stock model has it."""
    flags, mask = given.get(_GLOBALS), given.get("attention_mask")
    if flags is None:
        return given
    return given | {"attention_mask": flags + 1 if mask is None else mask * (flags + 1)}


def _asked(model: Any, given: dict[str, Any], name: str, default: bool = False) -> Any:
    """An option of a call, or else the config's value."""
    value = given.get(name)
    return getattr(model.config, name, default) if value is None else value


class AcceleratedModel(Accelerated):
    """Mixin of an accelerated encoder (BertModel, RobertaModel, …)."""

    _modules: dict[str, Any]
    config: Any
    embeddings: Any
    pooler: Any
    clamp_len: int
    attn_type: str

    @prepared.plain_train
    def train(self, mode: bool = True) -> Self:
        """Set training mode; if a module's mode changes, forget what was derived from the weights."""
        return super().train(mode) if prepared.before_mode(self, mode) else self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stock model's call."""
        state = self.fastbert_state
        if state is None or exporting():
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # transformers' code for global tokens cannot be compiled
            if state.options.int8 or FAMILIES[state.model_type].global_tokens:
                return uncompiled(self, *args, **kwargs)
            return super().forward(*args, **kwargs)
        names = positional(self.fastbert_base)
        given = dict(zip(names, args, strict=False)) | kwargs
        head = head_of_call.get()
        fits = len(args) <= len(names) and not (head is not None and head.reads_masked)
        if fits and not (_own_gap(self) or unfit(self, given)) and (plan := self._plan()) is not None:
            given = _with_globals(given)
            inputs = packed_inputs(self._input_config(), _device(self), *map(given.get, _INPUTS))
            if state.options.strict:
                _check_masked(state.name, self.config, given)
            # The stock model computes outputs of masked tokens too, which heads may read
            if not streams.reads_masked(state.reads, inputs) and inputs.position_ids.shape[0] > 0:
                state.packed_calls += 1
                if head is not None:
                    head.kept = inputs.packing.mask
                if FAMILIES[state.model_type].bottleneck:
                    inputs = self._with_embeddings(inputs, given)
                return self._run_packed(plan, inputs, given)
        state.padded_calls += 1
        return super().forward(*args, **kwargs)

    def fastbert_how(self) -> str:
        """See `Accelerated`."""
        stack = [m for m in self.modules() if isinstance(m, _LAYERS)]
        fused = sum(layers.gap(m, at_model=is_sharded(m)) is None for m in stack)
        reason = gap(self)
        padding = "padding taken out" if reason is None else f"padding left in, as {reason}"
        return f"{fused} of {len(stack)} layers run fused, {padding}"

    def _input_config(self) -> EncoderConfig:
        """The config for checking inputs, with the tables' present sizes (`resize_token_embeddings`)."""
        state = self.fastbert_state
        sizes = tuple(getattr(table, "num_embeddings", None) for table in _tables(self))
        if sizes != state.sizes:
            keys = ("vocab_size", "max_position_embeddings", "type_vocab_size")
            for key, size in zip(keys, sizes, strict=True):
                if size is not None:
                    setattr(state.config, key, size)
            state.sizes = sizes
        return state.config

    def _plan(self) -> Plan | None:
        """The plan for the layers on packed tokens; None if `_modules_gap` has a reason."""
        family = FAMILIES[self.fastbert_state.model_type]
        container = family.layers.partition(".")[0]
        around = [m for name, m in self._modules.items() if name != container and m is not None]
        layers, gap = layers_of(self, self.config, family), functools.partial(_modules_gap, self)
        return plan_of(self._modules[container], layers, self.layer_class, around=around, gap=gap)

    @property
    def layer_class(self) -> type:
        """The class of layers that are called on packed tokens."""
        two_streams = FAMILIES[self.fastbert_state.model_type].two_streams
        return AcceleratedStream if two_streams else PackedLayer

    @property
    def fastbert_packed(self) -> PackedEncoder:
        """What `fastbert.graph` records."""
        return PackedEncoder(self)

    def _encode(self, plan: Plan, inputs: Inputs, **asked: Any) -> tuple[Any, ...]:
        """Packed tokens through embeddings and layers; see `run_encoder`."""
        family = FAMILIES[self.fastbert_state.model_type]
        if family.two_streams:
            how: Any = self.clamp_len, self.attn_type == "uni"
            return content_stream(self, family, plan, inputs, *how, **asked)
        dropped, dropout_p = family.stock_model.dropout, 0.0
        if dropped is not None:
            dropout = part(self.embeddings, dropped)
            dropout_p = dropout.p if dropout.training else 0.0
        called = family.block_sparse and blocks.drops_first(self.embeddings, dropout_p)
        embed_rows = functools.partial(self._embed, inputs, dropout_p=dropout_p, called=called)
        parts = self, family, plan, embed_rows, inputs, dropout_p > 0 and not called
        return run_encoder(*parts, **asked)

    def _run_packed(self, plan: Plan, inputs: Inputs, given: dict[str, Any]) -> Any:
        family = FAMILIES[self.fastbert_state.model_type]
        wants_states = _asked(self, given, "output_hidden_states")
        wants_dict = _asked(self, given, "return_dict", True)
        wants_mems = family.two_streams and streams.wants_mems(self, given.get("use_mems"))
        graphed = served_by.get().get(self)
        if graphed is not None and not (wants_states or wants_mems):
            hidden, states = graphed.encode_inputs(inputs), []
        else:
            hidden, states, _ = self._encode(plan, inputs, want_states=wants_states or wants_mems)
        if family.two_streams:
            output = streams.output(self, inputs, hidden, states, wants_mems, wants_states)
            return output if wants_dict else output.to_tuple()
        packing = inputs.packing
        last = packing.unpack(hidden)
        fields: dict[str, Any] = {"last_hidden_state": last}
        if family.pooler:
            fields["pooler_output"] = self._pool(last)
        if wants_states:
            fields["hidden_states"] = (*(packing.unpack(s) for s in states[:-1]), last)
        stock = family.stock_model
        homes = ("transformers.modeling_outputs", family.stock_module)
        kind = next(c for home in homes if (c := getattr(sys.modules[home], stock.output, None)) is not None)
        output = kind(**fields)
        if not wants_dict and stock.tuple_keeps_none:
            return tuple(fields.values())
        return output if wants_dict else output.to_tuple()

    def _with_embeddings(self, inputs: Inputs, given: dict[str, Any]) -> Inputs:
        """MobileBERT's inputs with the stock embeddings, which read masked neighbours too, of all tokens."""
        names = ("input_ids", "position_ids", "token_type_ids", "inputs_embeds")
        embedded = self.embeddings(**{name: given.get(name) for name in names})
        return replace(inputs, inputs_embeds=inputs.packing.pack(embedded))

    def _embed(self, inputs: Inputs, seed: Tensor | None, dropout_p: float, called: bool) -> Tensor:
        """The embedding output (rows, width); `called` says whether only the module itself can make it.

        Under FSDP only a call of the module gathers its parameters.
        """
        family = FAMILIES[self.fastbert_state.model_type]
        root = self._modules[family.embeddings]
        if family.bottleneck:
            # By `_with_embeddings`
            return cast(Tensor, inputs.inputs_embeds)
        if isinstance(root, nn.Embedding):
            return root(inputs.input_ids) if inputs.inputs_embeds is None else inputs.inputs_embeds
        ids = (inputs.input_ids, inputs.position_ids, inputs.token_type_ids, inputs.inputs_embeds)
        if not called and seed is None and (y := launched(root, *ids)) is not None:
            return y
        if not (called or any(is_hooked(child) for child in root.modules())):
            return embed(root, *ids, seed, dropout_p)
        names = ("input_ids", "position_ids", "token_type_ids", "inputs_embeds")
        taken = positional(type(root))
        rows = {n: t[None] for n, t in zip(names, ids, strict=True) if t is not None and n in taken}
        return root(**{"input_ids": None, **rows})[0]

    def _pool(self, hidden: Tensor) -> Tensor | None:
        """The pooler's output of (batch, seqlen, hidden).

        The pooler is called as a module if FSDP gathers its parameters in hooks, or if it was replaced. Else
        our op runs, because PyTorch's tanh would wake a thread that spins beside our next call
        (csrc/cpu/NOTES.md).
        """
        pooler = self.pooler
        if pooler is None:
            return None
        parts, family = pooler._modules, FAMILIES[self.fastbert_state.model_type]
        if (
            parts.keys() == {"dense", "activation"}
            and type(pooler).forward.__module__ == family.stock_module
            and type(parts["activation"]) is nn.Tanh
            and not is_hooked(pooler)
        ):
            return apply_linear(parts["dense"], hidden[:, 0], "tanh")
        activation = family.stock_model.pooler_activation
        if activation is None:
            return pooler(hidden)
        return self._modules[activation](pooler(hidden[:, 0]))


class PackedEncoder:
    """An accelerated encoder, with the methods of `BertModel` that `fastbert.graph` calls.

    Attributes:
        model: the encoder.
    """

    taps = None

    def __init__(self, model: Any):
        self.model, self.config = model, model._input_config()
        self.family = self.config.family

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def gap(self) -> None:
        """See `BertModel`. The encoder's `forward` has checked the modules."""

    def encode_inputs(
        self, inputs: Inputs, gates: Tensor | None, want_attentions: bool, want_states: bool, first_only: bool
    ) -> tuple[Any, ...]:
        """See `BertModel`."""
        asked = {"gates": gates, "want_attentions": want_attentions, "want_states": want_states}
        return self.model._encode(self.model._plan(), inputs, **asked, first_only=first_only)


def _check_masked(name: str, config: Any, given: dict[str, Any]) -> None:
    """Refuse masked tokens that are no padding, because a caller may read their outputs (ColBERT's queries).

    It waits for the ids' device in calls where `check_inputs` has waited too.

    Raises:
        RuntimeError: there is such a token.
    """
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    pad = getattr(config, "pad_token_id", None)
    if ids is None or mask is None or pad is None or mask.device != ids.device:
        return
    if ((mask == 0) & (ids != pad)).any():
        raise RuntimeError(
            f"{name or 'model'}: attention_mask masks tokens other than pad_token_id = {pad}, whose outputs "
            "would be zeros (strict=True); unpad=False computes them as the stock model does"
        )


def _tables(model: Any) -> tuple[Any, ...]:
    """The tables of words, positions and token types; None for a table that the model lacks."""
    family = FAMILIES[model.fastbert_state.model_type]
    root, name = model._modules[family.embeddings], family.word_table.rpartition(".")[2]
    if family.embeddings == family.word_table:
        return root, None, None
    return tuple(getattr(root, table, None) for table in (name, *_TABLES))


def _device(model: Any) -> torch.device:
    # captum replaces the table by a module without a weight, which takes embeddings in place of ids
    weight = getattr(_tables(model)[0], "weight", None)
    return next(model.parameters()).device if weight is None else weight.device
