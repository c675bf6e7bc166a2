"""BertModel, the encoder: what goes in and out, by HuggingFace's contract.

It is the encoder of every family in `families/`; `RobertaModel`, `DistilBertModel`, … are the same class
under the family's name, each in its own file. Task heads are in `heads/`, what all models share in `base.py`.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastbert.layers.disentangled import Convolution
from fastbert.layers.embed import launched
from fastbert.layers.embeddings import OWN, Embeddings, table
from fastbert.layers.encoder_layer import EncoderLayer
from fastbert.layers.modules import attach, calls_all, changed, part, watched
from fastbert.layers.parts import Activation
from fastbert.layers.patterns import BACKWARD, NAMES, Heads
from fastbert.layers.taps import Taps
from fastbert.models.base import PreTrainedModel
from fastbert.models.calls import EncoderCall
from fastbert.models.config import EncoderConfig
from fastbert.models.encoder import layers_of, run_encoder
from fastbert.models.input_checks import head_gates
from fastbert.models.inputs import Inputs, packed_inputs
from fastbert.models.outputs import BaseModelOutputWithPooling
from fastbert.models.pooler import Pooler, pool, pooler_activation, pooler_gap
from fastbert.models.stack import Stack


class BertModel(PreTrainedModel):
    """The encoder: embeddings, layers and (where the family has one) the pooler.

    Args:
        config: an EncoderConfig, or a transformers config object.
        add_pooling_layer: whether to create the pooler, if the family has one; None: as in transformers,
            where the encoders of some families have it only below a head.

    Attributes:
        embeddings_class: constructed from the config, and called with (input_ids, position_ids,
            token_type_ids, inputs_embeds, seed), all packed. A module of another class in its place is
            called as in transformers: padded, by name, and without a seed.
        layer_class: constructed from the config, and called as `EncoderLayer.forward` is on packed tokens.
        taps: hooks into what the layers compute inside, or None; see `fastbert.models.encoder.tapped`.

    A model with other mathematics subclasses this one in its own file, with its own layer and embeddings.

    Source: Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers", sec. 3.
    """

    is_base_model = True
    embeddings_class: ClassVar[type[Any]] = Embeddings
    layer_class: ClassVar[type[nn.Module]] = EncoderLayer
    taps: Taps | None = None
    # An `embeddings_class`, or a module that a caller has put there
    embeddings: Any
    __call__: EncoderCall

    def __init__(self, config: EncoderConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        config, family = self.config, self.family
        self.add_module(family.embeddings, self.embeddings_class(config))
        if "." in family.layers:
            self.add_module(family.layers.partition(".")[0], Stack(family.stock_model.stack_by_name))
        other_width = config.embedding_width != config.hidden_size
        if family.projection and (family.projection_always or other_width):
            bias = config.has_bias(family.projection)
            attach(self, family.projection, nn.Linear(config.projected_width, config.hidden_size, bias))
        elif other_width:
            raise ValueError(
                f"config embedding_size: {config.embedding_width} differs from hidden_size "
                f"{config.hidden_size}, and {config.model_type} has no projection between them"
            )
        attach(self, family.layers, _layers_of(config, self.layer_class))
        if family.final_norm:
            attach(self, family.final_norm, config.norm(config.hidden_size))
        if (relative := config.relative()) is not None:
            attach(self, "encoder.rel_embeddings", table(2 * relative.span, config.hidden_size))
        if family.disentangled and config.norm_rel_ebd == "layer_norm":
            attach(self, "encoder.LayerNorm", config.norm(config.hidden_size))
        if family.disentangled and config.conv_kernel_size:
            attach(self, "encoder.conv", Convolution(config))
        if family.two_streams:
            self.mask_emb = nn.Parameter(torch.empty(1, 1, config.hidden_size))
            self.dropout = nn.Dropout(config.hidden_dropout_prob)
        if family.relative_bias:
            attach(self, family.relative_bias, table(32, config.num_attention_heads))
        if add_pooling_layer is None:
            add_pooling_layer = not family.pooler_asked
        if family.pooler and add_pooling_layer:
            if "." in family.pooler:
                self.pooler = Pooler(config.get("pooler_dense", True))
            if config.get("pooler_dense", True):
                attach(self, family.pooler, nn.Linear(config.hidden_size, config.hidden_size))
                attach(self, pooler_activation(family), Activation("tanh"))
        self.post_init()

    @property
    def base_model(self) -> BertModel:
        """The encoder: this model."""
        return self

    @property
    def has_pooler(self) -> bool:
        """Whether the family has a pooler, and the model has one now."""
        pooler = self.config.family.pooler
        return pooler is not None and self._modules.get(pooler.partition(".")[0]) is not None

    def extra_repr(self) -> str:
        """How many layers run fused, in the words of an accelerated model."""
        gaps = [module.gap() for module in self.modules() if isinstance(module, EncoderLayer)]
        reason = self.gap()
        called = "" if reason is None else f"; modules are called, as {reason}"
        return f"fastbert: {gaps.count(None)} of {len(gaps)} layers run fused, padding taken out{called}"

    def gap(self) -> str | None:
        """Why some modules are called one by one on a padded batch; None if our ops run the whole model."""
        family = self.config.family
        stack = family.layers.partition(".")[0]
        if (reason := calls_all()) is not None:
            return reason
        embeddings = self._modules[family.embeddings]
        if isinstance(embeddings, OWN):
            reason = embeddings.gap()
        elif not isinstance(embeddings, self.embeddings_class):
            reason = f"{family.embeddings} is a {type(embeddings).__name__}"
        if reason is None and watched(self._modules[stack]):
            reason = f"{stack} has hooks or another forward"
        for i, layer in enumerate(self.layer_list() if reason is None else ()):
            if isinstance(layer, EncoderLayer) and (found := layer.gap()) is not None:
                return f"layer {i}: {found}"
        if reason is None and family.final_norm and changed(part(self, family.final_norm)):
            reason = f"{family.final_norm} was replaced, or has hooks or another forward"
        if reason is None and self.has_pooler and pooler_gap(self, family):
            reason = "the pooler was replaced, or has hooks or another forward"
        return reason

    def layer_list(self) -> list[Any]:
        """The layers in execution order; a shared layer appears once per use.

        Raises:
            TypeError: a module around layers was replaced; nothing here would call it.
        """
        family = self.config.family
        path = family.layers
        above = path.partition(".")[0]
        stack = self._modules[above]
        if not isinstance(stack, Stack if "." in path else nn.ModuleList):
            raise TypeError(
                f"model: {above} was replaced by a {type(stack).__name__}, but this package never calls it; "
                "replace single layers, or subclass the model"
            )
        for i, group in enumerate(part(self, path)._modules.values() if family.group_layers else ()):
            if type(group) is not nn.Module or watched(group):
                raise TypeError(
                    f"model: {path}.{i} has hooks or was replaced, but this package never calls it; hook or "
                    "replace its layers"
                )
        return layers_of(self, self.config, family)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        *,
        head_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool | None = None,
        first_token_only: bool = False,
        packed: bool = False,
    ) -> BaseModelOutputWithPooling | tuple[Any, ...]:
        """Encode a padded batch, whose padding is never computed, or a packed one (`cu_seqlens`).

        Args:
            input_ids: (batch, seqlen) int64 or int32; or pass `inputs_embeds`, (batch, seqlen, embedding
                size).
            attention_mask: (batch, seqlen) bool, int or float, non-zero = keep, holes legal; or 4-D
                (batch or 1, nheads or 1, seqlen or 1, seqlen), bool (True = attend) or additive. A 4-D mask
                only hides keys: all tokens are computed.
            token_type_ids, position_ids: (batch, seqlen); position_ids may be (1, seqlen).
            encoder_hidden_states, encoder_attention_mask, past_key_values, use_cache: must be None; this is
                no decoder.
            head_mask: (nheads,) or (layers, nheads): each head's output is multiplied by its entry.
            output_attentions: return the probabilities of every layer, (batch, nheads, seqlen, seqlen).
            output_hidden_states: return the embedding output and every layer's output.
            return_dict: False returns a tuple.
            cu_seqlens: (batch + 1,) int32, where each sequence starts if the sequences are packed one after
                another; the last entry is total. Tokens then have one dimension, (total,) instead of
                (batch, seqlen), in all arguments and results; attention_mask is None or 4-D, with
                max_seqlen for seqlen. Positions are counted from each sequence's start.
            max_seqlen: with cu_seqlens, the longest length or more. None reads the longest length from
                cu_seqlens (not under `torch.compile`).
            causal: whether a token attends only to itself and the tokens before it. None: config is_decoder.
            first_token_only: only position 0 of each sequence is wanted (CLS pooling, pooler_output):
                last_hidden_state is (batch, 1, hidden). The last layer then computes only those rows, also in
                training, unless hidden states or attentions are asked for, or that layer or a part of it has
                hooks.
            packed: whether to return (hidden, hidden states, probabilities, Inputs) for task heads, all
                packed; hidden states and probabilities are None if not asked for. hidden is (rows, hidden),
                with `first_token_only` (batch, hidden); the hidden states are (rows, hidden) either way.

        Returns:
            last_hidden_state (batch, seqlen, hidden), pooler_output (batch, hidden) or None, hidden_states,
            attentions. Rows of masked tokens are zeros, and so are their rows and columns of the attentions.
            The pooler reads position 0. For a batch of no sequences all tensors are empty. For packed tokens
            last_hidden_state is (total, hidden), with `first_token_only` (batch, hidden), and attentions are
            (batch, nheads, max_seqlen, max_seqlen).

        A call on a GPU synchronises once, to read the smallest and largest ids, which are checked, and the
        number of kept tokens. It needs no GPU sync if the host knows that number:
            - All inputs are CPU tensors. They are checked and packed there, then sent to the GPU.
            - input_ids are on the GPU and a 2-D attention_mask is a CPU tensor. The host does not check the
              ids. Our kernel makes the token of an id out of range NaN, and the next call raises an
              IndexError that names the id; PyTorch's kernel, if it serves, ends in a device assert.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        for name, value in (
            ("encoder_hidden_states", encoder_hidden_states),
            ("encoder_attention_mask", encoder_attention_mask),
            ("past_key_values", past_key_values),
            ("use_cache", use_cache or None),
        ):
            if value is not None:
                raise ValueError(
                    f"{name}: not supported; this is an encoder without cross attention or cache"
                )
        config = self.config
        inputs = self.checked(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            cu_seqlens,
            max_seqlen,
        )
        gates = None if head_mask is None else head_gates(config, head_mask, inputs.device)
        want_attentions = config.output_attentions if output_attentions is None else output_attentions
        want_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states

        hidden, states, attentions = self.encode_inputs(
            inputs, gates, want_attentions, want_states, first_token_only, causal
        )
        states, attentions = states if want_states else None, attentions if want_attentions else None
        if packed:
            return hidden, states, attentions, inputs
        return self.padded_output(inputs, hidden, states, attentions, first_token_only, return_dict)

    def checked(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> Inputs:
        """The checked and packed inputs of a call of `forward`, on the model's device."""
        device = self.device
        if cu_seqlens is not None:
            return Inputs.from_packed(
                *(self.config, device, input_ids, cu_seqlens, max_seqlen, token_type_ids, position_ids),
                *(inputs_embeds, attention_mask),
            ).to(device)
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen: expected None without cu_seqlens, got {max_seqlen!r}")
        given = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        return packed_inputs(self.config, device, *given)

    def padded_output(
        self,
        inputs: Inputs,
        hidden: Tensor,
        states: list[Tensor] | None,
        attentions: list[Tensor] | None,
        first_token_only: bool,
        return_dict: bool | None,
        pooled: Tensor | None = None,
    ) -> BaseModelOutputWithPooling | tuple[Any, ...]:
        """What `forward` returns, from packed tokens.

        `states` and `attentions` are None if not asked for; `pooled` is the pooler's output if it has run.
        """
        packing = inputs.packing
        if first_token_only:
            last, first = (hidden if packing.flat else hidden.unsqueeze(1)), hidden
        else:
            # Not deferred until it is read: a later read may have another grad mode or be outside a graph
            # that the caller captures, and OrderedDict's own code reads values without asking the output.
            last = packing.unpack(hidden)
            first = packing.first_rows(hidden) if packing.flat else last[:, 0]
        padded_states = None
        if states is not None:
            whole = packing.unpack(states[-1]) if first_token_only else last
            padded_states = (*(packing.unpack(s) for s in states[:-1]), whole)
        if self.has_pooler and pooled is None:
            pooled = self.pooled(inputs, hidden, first, first_token_only)
        output = BaseModelOutputWithPooling.of(
            last_hidden_state=last,
            pooler_output=pooled,
            hidden_states=padded_states,
            attentions=None if attentions is None else tuple(packing.unpack_scores(p) for p in attentions),
        )
        return self.as_output(output, return_dict)

    def pooled(self, inputs: Inputs, hidden: Tensor, first: Tensor, first_only: bool) -> Tensor:
        """The pooler's output, (batch, hidden).

        Args:
            inputs: the batch.
            hidden: see `padded_output`.
            first: (batch, hidden), the first token of each sequence.
            first_only: whether `hidden` is `first`.
        """
        family = self.config.family
        if not pooler_gap(self, family):
            return pool(self, family, first)
        return self.pooler(first[:, None] if first_only else inputs.packing.grid(hidden)[0])

    def forward_packed(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        causal: bool | None = None,
        first_token_only: bool = False,
    ) -> Tensor:
        """Encode sequences that are packed already; only the last hidden states are returned.

        Args:
            input_ids: (total,) ids of all sequences, one after another.
            cu_seqlens: (batch + 1,) int32, where each sequence starts; the last entry is total.
            max_seqlen: the longest length, or more.
            token_type_ids, position_ids: (total,); by default 0, and counted from each sequence's start.
            causal: see `forward`.
            first_token_only: only the first token of each sequence is wanted; see `forward`.

        The tensors are on the model's device, and checking them needs one GPU sync. There is no sync if all
        tensors, or `cu_seqlens` alone, are on the CPU; see `forward`.

        Returns:
            (total, hidden) on the model's device; with `first_token_only` (batch, hidden), zeros for an empty
            sequence.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        device = self.device
        inputs = Inputs.from_packed(
            self.config, device, input_ids, cu_seqlens, max_seqlen, token_type_ids, position_ids
        ).to(device)
        return self.encode_inputs(inputs, None, False, False, first_token_only, causal)[0]

    def encode_inputs(
        self,
        inputs: Inputs,
        gates: Tensor | None,
        want_attentions: bool,
        want_states: bool,
        first_only: bool,
        causal: bool | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Packed tokens through embeddings and layers; see `run_encoder`.

        Args:
            inputs: checked, on the model's device.
            gates: (layers, nheads) factors of the heads' outputs, or None.
            want_attentions, want_states: fill the lists that are returned.
            first_only: only the first token of each sequence is wanted.
            causal: see `forward`.
            seed: (1,) int64 of all dropouts, on the device; None: a new one.
        """
        config = self.config
        if causal is None:
            causal = bool(config.is_decoder)
        elif not isinstance(causal, bool):
            raise TypeError(f"causal: expected True, False or None, got {causal!r}")
        if causal and (patterns := config.fixed_patterns()) is not None:
            ahead = [NAMES[p] for row in patterns for p in row if p not in BACKWARD]
            if ahead:
                raise ValueError(
                    f"causal: got True, but config fixed_heads has {ahead[0]!r}, which looks ahead"
                )

        family = self.config.family
        embeddings = self._modules[family.embeddings]
        return run_encoder(
            self,
            family,
            self.layer_list(),
            functools.partial(self.embed_inputs, inputs),
            inputs,
            isinstance(embeddings, OWN) and embeddings.dropout_rate() > 0,
            gates=gates,
            want_attentions=want_attentions,
            want_states=want_states,
            first_only=first_only,
            recompute_every=self.checkpoint_every,
            layerdrop=self._layerdrop,
            causal=causal,
            taps=self.taps,
            seed=seed,
            schedule=config.elimination(),
        )

    def embed_inputs(
        self, inputs: Inputs, seed: Tensor | None = None, known: dict[str, Any] | None = None
    ) -> Tensor:
        """The embeddings of packed tokens, (rows, embedding size), as the first layer or the projection reads
        them.

        Args:
            inputs: checked, on the model's device.
            seed: (1,) int64 of the dropout, on the device; None: nothing drops.
            known: see `embed.launched`.
        """
        ids = (inputs.input_ids, inputs.position_ids, inputs.token_type_ids, inputs.inputs_embeds)
        family = self.config.family
        embeddings = self._modules[family.embeddings]
        ours = isinstance(embeddings, OWN)
        if (
            type(embeddings) is Embeddings
            and seed is None
            and (y := launched(embeddings, *ids, known)) is not None
        ):
            return y
        if inputs.inputs_embeds is not None and family.embeddings == family.word_table:
            return inputs.inputs_embeds
        own = ours or isinstance(embeddings, self.embeddings_class)
        reads = getattr(embeddings, "reads_neighbours", False)
        if not (calls_all() or (embeddings.gap() if ours else not own)):
            return embeddings(*ids, seed, **({"packing": inputs.packing} if reads else {}))
        packing, names = inputs.packing, ("input_ids", "position_ids", "token_type_ids", "inputs_embeds")
        given = {n: packing.grid(t)[0] for n, t in zip(names, ids, strict=True) if t is not None}
        if family.rotary:
            del given["position_ids"]
        kept = packing.grid(ids[1])[1]
        if reads and kept is not None:
            given["kept"] = kept
        if kept is not None and "input_ids" in given:
            given["input_ids"] = given["input_ids"].masked_fill(~kept, self.config.pad_token_id or 0)
        first = () if family.stock_model.embeds_by_name else (given.pop("input_ids", None),)
        return packing.from_grid(embeddings(*first, **given))


def _layers_of(config: EncoderConfig, layer_class: type[nn.Module]) -> nn.ModuleList:
    inside, heads, relative = config.family.group_layers, config.fixed_patterns(), config.relative()
    if inside is None:
        made, groups = [], config.layer_groups
        for number, (kept, size) in enumerate(zip(config.kept_heads(), config.inner_sizes(), strict=True)):
            if groups is not None and number >= len({*groups}):
                break
            # A family's own class may lack these arguments, so they are passed only if they matter
            own = {} if heads is None else {"heads": Heads(heads[number])}
            own |= {"number": number} if config.family.rotary else {}
            own |= {"relative": relative} if relative is not None else {}
            own |= {} if (blocks := config.blocks(number)) is None else {"blocks": blocks}
            if config.family.global_tokens:
                own |= {"window": config.window(number), "global_tokens": True}
            own |= {} if kept is None else {"kept": kept}
            own |= {} if size == config.intermediate_size else {"inner": size}
            made.append(layer_class(config, **own))
        return nn.ModuleList(made)
    alike = (Heads(heads[0]),) if heads else ()
    groups = []
    for _ in range(config.num_hidden_groups):
        group = nn.Module()
        layers = [layer_class(config, *alike) for _ in range(config.inner_group_num)]
        attach(group, inside, nn.ModuleList(layers))
        groups.append(group)
    return nn.ModuleList(groups)
