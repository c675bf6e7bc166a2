"""A transformers encoder that removes padding once per call, unless a gap (model_gaps.py) forbids it."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from fastbert.acceleration import blocks, layer_gaps, streams
from fastbert.acceleration import model_gaps as gaps
from fastbert.acceleration.classes import Accelerated, positional
from fastbert.acceleration.layer_gaps import AnyLayer
from fastbert.acceleration.spans import head_of_call
from fastbert.acceleration.streams import AcceleratedStream
from fastbert.acceleration.watching import exporting, is_sharded, uncompiled
from fastbert.execution.plan import Plan, plan_of
from fastbert.layers.embed import embed, launched
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.linear import apply_linear
from fastbert.layers.modules import is_hooked, part
from fastbert.models.config import EncoderConfig
from fastbert.models.encoder import layers_of, run_encoder
from fastbert.models.families import FAMILIES
from fastbert.models.heads.task_model import served_by
from fastbert.models.inputs import Inputs, packed_inputs
from fastbert.models.two_streams import content_stream
from fastbert.runtime import prepared


def _with_globals(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Longformer with one mask, in which global tokens have 2, as the stock model has it."""
    flags, mask = given.get(gaps.GLOBALS), given.get("attention_mask")
    if flags is None:
        return given
    return given | {"attention_mask": flags + 1 if mask is None else mask * (flags + 1)}


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
        if (
            fits
            and not (gaps.own_gap(self) or gaps.unfit(self, given))
            and (plan := self._plan()) is not None
        ):
            given = _with_globals(given)
            inputs = packed_inputs(self._input_config(), gaps.device_of(self), *map(given.get, gaps.INPUTS))
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
        stack = [m for m in self.modules() if isinstance(m, AnyLayer)]
        fused = sum(layer_gaps.gap(m, at_model=is_sharded(m)) is None for m in stack)
        reason = gaps.gap(self)
        padding = "padding taken out" if reason is None else f"padding left in, as {reason}"
        return f"{fused} of {len(stack)} layers run fused, {padding}"

    def _input_config(self) -> EncoderConfig:
        """The config for checking inputs, with the tables' present sizes (`resize_token_embeddings`)."""
        state = self.fastbert_state
        sizes = tuple(getattr(table, "num_embeddings", None) for table in gaps.tables(self))
        if sizes != state.sizes:
            keys = ("vocab_size", "max_position_embeddings", "type_vocab_size")
            for key, size in zip(keys, sizes, strict=True):
                if size is not None:
                    setattr(state.config, key, size)
            state.sizes = sizes
        return state.config

    def _plan(self) -> Plan | None:
        """The plan for the layers on packed tokens; None if `modules_gap` has a reason."""
        family = FAMILIES[self.fastbert_state.model_type]
        container = family.layers.partition(".")[0]
        around = [m for name, m in self._modules.items() if name != container and m is not None]
        layers, gap = layers_of(self, self.config, family), functools.partial(gaps.modules_gap, self)
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
        wants_states = gaps.asked(self, given, "output_hidden_states")
        wants_dict = gaps.asked(self, given, "return_dict", True)
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
            fields["pooler_output"] = self._pool(plan, last)
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

    def _embed(
        self, inputs: Inputs, seed: Tensor | None, known: dict[str, Any], dropout_p: float, called: bool
    ) -> Tensor:
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
        if not called and seed is None and (y := launched(root, *ids, known)) is not None:
            return y
        if not (called or any(is_hooked(child) for child in root.modules())):
            return embed(root, *ids, seed, dropout_p)
        names = ("input_ids", "position_ids", "token_type_ids", "inputs_embeds")
        taken = positional(type(root))
        rows = {n: t[None] for n, t in zip(names, ids, strict=True) if t is not None and n in taken}
        return root(**{"input_ids": None, **rows})[0]

    def _pool(self, plan: Plan, hidden: Tensor) -> Tensor | None:
        """The pooler's output of (batch, seqlen, hidden).

        The pooler is called as a module if FSDP gathers its parameters in hooks, or if it was replaced. Else
        our op runs, because PyTorch's tanh would wake a thread that spins beside our next call
        (csrc/cpu/NOTES.md).
        """
        pooler = self.pooler
        if pooler is None:
            return None
        parts, family = pooler._modules, FAMILIES[self.fastbert_state.model_type]
        if "pooler" not in plan.known:
            plan.known["pooler"] = (
                parts.keys() == {"dense", "activation"}
                and type(pooler).forward.__module__ == family.stock_module
                and type(parts["activation"]) is nn.Tanh
                and not is_hooked(pooler)
            )
        if plan.known["pooler"]:
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
