"""One transformers encoder layer on our kernels, and when it must run as stock.

The layer keeps its parameters in its own sub-modules, and our mathematics (layers/encoder.py) reads them at
every call. So each of them is checked before every call; `gap` returns why a layer cannot be fused now.
`run_encoder` runs the layer on packed tokens. All other code calls it like the stock layer, with a padded
batch and a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.acceleration import blocks
from fastbert.acceleration.classes import Accelerated, Options
from fastbert.acceleration.watching import HARMLESS, collects, exporting, is_sharded, uncompiled
from fastbert.execution.call import Call
from fastbert.execution.plan import run as run_layers
from fastbert.execution.plan import survey
from fastbert.layers import bottleneck, disentangled, encoder, global_tokens
from fastbert.layers.batch import PackedBatch
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.modules import is_hooked, plain_dropout, rms_eps, watched
from fastbert.layers.modules import part as part_of
from fastbert.layers.quantized import check_finite
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES, Family
from fastbert.ops.activation import MODULES
from fastbert.runtime import prepared

# Arguments of a layer with which it may run fused
_SERVED = HARMLESS | {
    "attention_mask",
    "position_bias",
    "position_embeddings",
    "output_hidden_states",
    "relative_pos",
    "rel_embeddings",
    "is_index_masked",
    "is_index_global_attn",
    "is_global_attn",
}

# The parameters of XLNet's attention
_OWN_MATRICES = ("q", "k", "v", "o", "r", "r_r_bias", "r_s_bias", "r_w_bias", "seg_embed")


@dataclass
class LayerState:
    """What `accelerate` stores in a layer.

    Attributes:
        model_type: the family.
        name: the layer's name in the model that was accelerated.
        form: see `PackedLayer`; its activation is None if fastbert does not have it. BigBird's blocks are not
            in it, because they may change (`blocks.form_of`).
        act: the type of the activation module, or the function; `form.activation` is its name.
        options: see `Options`.
        reason: why only the stock layer can run, or None.
        further: linear layers that are checked besides those of `form.paths`, in the same form.
        fused_calls, stock_calls: number of calls that ran fused and as stock, without those of torch.compile.
    """

    model_type: str
    name: str
    form: LayerForm
    act: Any
    options: Options
    reason: str | None = None
    further: tuple[tuple[list[str], str], ...] = ()
    fused_calls: int = 0
    stock_calls: int = 0

    @classmethod
    def of(cls, layer: nn.Module, model_type: str, config: Any, name: str, options: Options) -> LayerState:
        """The state of a stock layer of a model with this transformers config."""
        heads = config.num_attention_heads
        family, reason = FAMILIES[model_type], None
        kind: dict[str, Any] = {}
        names, stock = family.layer, family.stock_layer
        # A replaced part may lack these attributes; then `gap` names it
        attention = _attribute(layer, names.query.split(".")[:-1])
        width = getattr(attention, "head_dim", config.hidden_size // heads)
        width = getattr(attention, "attention_head_size", width)
        act = _attribute(layer, stock.activation.split("."))
        activation = MODULES.get(_name_of(act))
        if family.bottleneck:
            stock, kind = bottleneck.stock_of(config, stock), {"bottleneck": bottleneck.bottleneck_of(config)}
        elif family.global_tokens:
            half = getattr(attention, "one_sided_attn_window_size", 0)
            kind = {"window": (half, half), "global_tokens": True}
        elif family.rotary or family.disentangled:
            try:
                kind = _kind(family, checked_config(model_type, config), layer)
            except (TypeError, ValueError) as error:
                reason = str(error)
        if kind.get("relative") is not None:
            stock = replace(stock, dropouts=(*stock.dropouts, disentangled.dropout(names)))
        form = LayerForm(names, stock, heads, width, activation, **kind)
        return cls(model_type, name, form, _identity(act), options, reason, _further_linears(form))


def checked_config(model_type: str, config: Any) -> EncoderConfig:
    """Our config from that of a transformers model.

    Raises:
        TypeError, ValueError: naming the key, what came and what was expected.
    """
    values = config.to_dict()
    # Only the layers read the activation
    values[FAMILIES[model_type].spelt("hidden_act")] = "gelu"
    config = EncoderConfig.from_dict(values)
    if config.model_type != model_type:
        raise ValueError(f"config: expected one of {model_type}, got one of {config.model_type}")
    return config


def _kind(family: Family, config: EncoderConfig, layer: nn.Module) -> dict[str, Any]:
    """The fields in which the form of a layer that knows positions differs from BERT's."""
    if family.disentangled:
        return {"relative": config.relative()}
    number, packed = getattr(layer, "layer_idx", 0), family.layer.query == family.layer.key
    return {
        "pre_norm": family.pre_norm or packed,
        "packed": packed,
        "gated": "first" if packed or family.layer.gate is not None else None,
        "window": config.window(number),
        "kv_heads": config.kv_heads,
        "rotary": config.rotary(number),
    }


def gap(layer: Any, at_model: bool = False, state: LayerState | None = None) -> str | None:
    """Why the stock layer must run; None if the fused layer can.

    Args:
        layer: an encoder layer, accelerated or not.
        at_model: whether this runs before the whole model, when FSDP has not gathered parameters yet.
        state: the state of a layer that is not accelerated yet.
    """
    state = layer.fastbert_state if state is None else state
    if state is None:
        return "it was made after the model was accelerated"
    if state.reason is not None:
        return state.reason
    if _has_any_global_hook():
        return "there are global module hooks"
    form = blocks.form_of(layer, state.form)
    containers, linears, norms, dropouts, activation = form.paths
    home = FAMILIES[state.model_type].stock_module
    for path in containers:
        module = layer
        for name in path:
            module = module._modules.get(name)
            if module is None:
                return f"{'.'.join(path)} is gone"
        if type(module).forward.__module__ != home or watched(module):
            if collects("attentions"):
                return "output_attentions is asked for, which only the stock layer returns"
            return f"{'.'.join(path)} has hooks or another forward"
    for site, path in enumerate(dropouts):
        if path is None:
            continue
        above = layer
        for name in path[:-1]:
            above = above._modules[name]
        module = above._modules.get(path[-1])
        if not (_drops_by(above, path[-1]) if module is None else _drops_plainly(module)):
            return f"{'.'.join(path)} is not a plain dropout"
        scores_itself = FAMILIES[state.model_type].two_streams
        if site == 0 and not scores_itself and not _attends_by(above.__dict__, form):
            return f"{'.'.join(path[:-1])} has other heads, or scales scores in another way"
    if form.blocks is not None:
        if not _attends_by(part_of(layer, "attention.self").__dict__, form):
            return "attention.self has other heads"
        if not 0 <= blocks.rate_of_short_texts(layer.attention) < 1:
            return "config attention_probs_dropout_prob is not a plain dropout's"
    for path, dotted in (*linears, *state.further):
        module = layer
        for name in path:
            module = module._modules[name]
        if type(module) is not nn.Linear:
            reason = _unknown_linear(module)
            if reason is not None:
                return f"{dotted} {reason}"
        elif watched(module):
            return f"{dotted} has hooks or another forward"
        elif not _readable(module._parameters.get("weight"), at_model):
            return f"{dotted} has no weight of its own to read"
    if FAMILIES[state.model_type].two_streams:
        for (part,) in containers if issubclass(type(layer), Accelerated) else ():
            if not isinstance(layer._modules[part], Accelerated):
                return f"{part} was replaced after the model was accelerated"
        own = part_of(layer, "rel_attn")._parameters
        for matrix in _OWN_MATRICES:
            if not _readable(own.get(matrix), at_model):
                return f"rel_attn.{matrix} has no weight of its own to read"
    if state.form.packed:
        path, module = state.form.names.query, part_of(layer, state.form.names.query)
        if module.out_features != 3 * state.form.nheads * state.form.head_dim:
            return f"{path} has other heads"
    for path, dotted in norms:
        module = layer
        for name in path:
            module = module._modules[name]
        # ModernBERT's first layer has no norm before attention
        empty = type(module) is nn.Identity and state.form.pre_norm
        known = type(module) is nn.LayerNorm or rms_eps(module) is not None or bottleneck.is_no_norm(module)
        if not (known or empty):
            return f"{dotted} is a {type(module).__name__}"
        if watched(module):
            return f"{dotted} has hooks or another forward"
        if not empty and not _readable(module._parameters.get("weight"), at_model):
            return f"{dotted} has no weight of its own to read"
    if {state.form.stock.feed_forward, "feed_forward_chunk", "ff_chunk"} & layer.__dict__.keys():
        return "it has another feed-forward block"
    act = _attribute(layer, activation)
    if isinstance(act, nn.Module) and watched(act):
        return "the activation has hooks or another forward"
    if state.form.bottleneck is not None and (reason := _bottleneck_gap(layer, state)) is not None:
        return reason
    if getattr(layer, "is_decoder", False) or getattr(layer, "add_cross_attention", False):
        return "it belongs to a decoder"
    if layer.__dict__.get("chunk_size_feed_forward"):
        return "chunk_size_feed_forward is set"
    return None


def _further_linears(form: LayerForm) -> tuple[tuple[list[str], str], ...]:
    """The linear layers of a layer's attention that `form.paths` lacks, in the same form."""
    scored = disentangled.projections(form) if form.relative is not None else ()
    others = global_tokens.projections(form.names) if form.global_tokens else ()
    return tuple((path.split("."), path) for path in (*filter(None, scored), *others))


def _bottleneck_gap(layer: Any, state: LayerState) -> str | None:
    """Why a layer with bottlenecks cannot be fused, beside what holds for any layer; None if it can."""
    if not (state.options.attention and state.options.ffn):
        return "a layer with bottlenecks runs fused as a whole (attention=False or ffn=False)"
    own = state.form.bottleneck
    assert own is not None
    acts = [_attribute(layer, f"{feed}.intermediate.intermediate_act_fn".split(".")) for feed in own.feeds]
    if not knows_activation(layer, state) or any(_identity(act) is not state.act for act in acts):
        return "fastbert does not have the activation"
    watches = any(isinstance(act, nn.Module) and watched(act) for act in acts)
    return "the activation has hooks or another forward" if watches else None


def int8_gap(layer: Any, state: LayerState | None = None) -> str | None:
    """Why a fused layer that should run on 8 bits runs in floating point; None if it runs on 8 bits.

    Args:
        layer: an encoder layer, accelerated or not.
        state: the state of a layer that is not accelerated yet.
    """
    known: LayerState = layer.fastbert_state if state is None else state
    if FAMILIES[known.model_type].two_streams:
        return "its attention has no linear layers"
    if not knows_activation(layer, known):
        return "fastbert does not have the activation"
    for path, dotted in known.form.paths[1]:
        module = layer
        for name in path:
            module = module._modules[name]
        if type(module) is not nn.Linear:
            return f"{dotted} is a {type(module).__name__} with an adapter: merge it (merge_and_unload)"
        if is_hooked(module) or prepared.is_gathered(module):
            return f"{dotted} has hooks, or its weights are gathered for each call (FSDP)"
        device = module.__dict__["_parameters"]["weight"].device
        if device.type != "cpu":
            return f"{dotted} is on {device}, and int8 is for inference on a CPU"
    return None


def check_int8(layer: nn.Module, state: LayerState) -> None:
    """Raise ValueError if a linear layer is not on a CPU or not finite.

    Args:
        layer: an encoder layer, accelerated or not.
        state: its state.
    """
    for _, dotted in state.form.paths[1]:
        module = part_of(layer, dotted)
        weight = module._parameters.get("weight")
        if type(module) is not nn.Linear or type(weight) is not nn.Parameter:
            continue
        if weight.device.type != "cpu":
            hint = "load its weights first" if weight.is_meta else "call model.cpu() first"
            raise ValueError(
                f"model: {state.name}.{dotted} is on {weight.device}; int8 is for inference on a CPU: {hint}"
            )
        check_finite(weight, module.bias, f"{state.name}.{dotted}")


def _attends_by(values: dict[str, Any], form: LayerForm) -> bool:
    """Whether an attention module with these attributes has the form's heads and scales by their size.

    Its window, if it has one, must be the form's.
    """
    heads = values.get("num_attention_heads", values.get("n_heads"))
    sizes, scale = (heads, values.get("attention_head_size")), form.head_dim**-0.5
    if form.global_tokens:
        heads, half = values.get("num_heads"), values.get("one_sided_attn_window_size")
        return (heads, values.get("head_dim"), (half, half)) == (form.nheads, form.head_dim, form.window)
    wanted = form.nheads, form.head_dim
    if form.rotary is not None:
        # transformers counts the token itself
        window = None if form.window is None else form.window[1] + 1
        shared = form.nheads // (form.kv_heads or form.nheads)
        sizes = values.get("sliding_window"), values.get("head_dim"), values.get("num_key_value_groups", 1)
        wanted = window, form.head_dim, shared
    return sizes == wanted and values.get("scaling", scale) == scale


def _drops_by(above: nn.Module, name: str) -> bool:
    """Whether a module has the number `name` as the probability of a dropout that ours computes too."""
    p = above.__dict__.get(name)
    return isinstance(p, (int, float)) and 0 <= p < 1


def _drops_plainly(module: nn.Module) -> bool:
    """Whether a module is a dropout that ours computes too, or an nn.Identity in its place."""
    return plain_dropout(module) or (type(module) is nn.Identity and not watched(module))


def _readable(weight: Any, at_model: bool) -> bool:
    kind = type(weight)
    if kind is nn.Parameter or kind is Tensor:
        return not weight.is_meta
    return at_model and kind.__name__ == "DTensor"


def _unknown_linear(module: nn.Module) -> str | None:
    """Why a module that replaces a linear layer cannot be called on packed tokens; None if it can."""
    if not type(module).__module__.startswith("peft.tuners.lora"):
        return f"is a {type(module).__name__}"
    if any(watched(child) for child in module.modules()):
        return "has hooks or another forward"
    if any(p.is_meta for p in module.parameters()):
        return "has no weight of its own to read"
    return None


def _attribute(root: Any, path: list[str]) -> Any:
    for name in path:
        root = getattr(root, name, None)
    return root


def _name_of(act: Any) -> str:
    return type(act).__name__ if isinstance(act, nn.Module) else getattr(act, "__name__", "")


def knows_activation(layer: nn.Module, state: LayerState) -> bool:
    """Whether fastbert has the feed-forward block's activation, which is still the one in `state`."""
    return (
        state.form.activation is not None and _identity(_attribute(layer, state.form.paths[4])) is state.act
    )


def _identity(act: Any) -> Any:
    return type(act) if isinstance(act, nn.Module) else act


class AcceleratedLayer(PackedLayer, Accelerated):
    """Mixin of an accelerated encoder layer."""

    @property
    def form(self) -> LayerForm:
        """See `PackedLayer`."""
        return blocks.form_of(self, self.fastbert_state.form)

    @property
    def fuses_norm(self) -> bool:
        """See `PackedLayer`."""
        return self.fastbert_state.options.layer_norm

    def fastbert_how(self) -> str:
        """See `Accelerated`."""
        reason = gap(self, is_sharded(self))
        return "fused" if reason is None else f"stock, as {reason}"

    @property
    def int8(self) -> bool:
        """See `PackedLayer`."""
        return self.fastbert_state.options.int8 and int8_gap(self) is None

    @property
    def label(self) -> str:
        """See `PackedLayer`."""
        return self.fastbert_state.name

    def look(self, everything: str | None) -> Parts:
        """See `PackedLayer`. The model's `gap`, or `forward`, has checked the layer."""
        return self.parts()

    def options(self) -> object:
        """See `PackedLayer`."""
        state = self.fastbert_state
        return state.options, state.form, state.act

    def is_called(self) -> bool:
        """See `PackedLayer`. The call of transformers' class recomputes activations in backward."""
        return is_hooked(self) or (self.training and getattr(self, "gradient_checkpointing", False))

    def may_skip_rows(self) -> bool:
        """See `PackedLayer`. `gap` has checked for hooks."""
        return True

    def dropout_rates(self) -> tuple[float, ...]:
        """See `PackedLayer`."""
        rates = super().dropout_rates()
        if self.form.blocks is None or not part_of(self, "attention.self").training:
            return rates
        return (blocks.rate_of_short_texts(self.attention), *rates[1:])

    def fuses_ffn(self) -> bool:
        """Whether our ops compute the feed-forward block, and not its stock modules, on packed rows too."""
        state = self.fastbert_state
        return state.options.ffn and knows_activation(self, state)

    def parts(self) -> Parts:
        """See `PackedLayer`."""
        parts = super().parts()
        return parts if self.fuses_ffn() else parts._replace(feed=self.feed_by_modules)

    def begin(self, hidden: Tensor) -> None:
        """See `PackedLayer`.

        Raises:
            RuntimeError: 8-bit weights were asked for and cannot serve the call, which needs a gradient, or
                with `strict` would run in floating point.
        """
        self._count(True)
        state, gradients = self.fastbert_state, torch.is_grad_enabled()
        if not state.options.int8:
            return
        reason = int8_gap(self) if state.options.strict or gradients else None
        if reason is not None and state.options.strict:
            raise RuntimeError(f"{state.name}: {reason}; it would run in floating point (strict=True)")
        if not gradients or reason is not None:
            return
        parameters = (p for _, dotted in state.form.paths[1] for p in part_of(self, dotted).parameters())
        if hidden.requires_grad or any(p.requires_grad for p in parameters):
            raise RuntimeError(
                f"{state.name}: runs on 8-bit weights, which have no gradient. For inference call the model "
                'under torch.no_grad(); to train it, call fastbert.accelerate(model) without dtype="int8" '
                "first, and with it afterwards"
            )

    def _attends_as_stock(self) -> bool:
        """Whether attention runs as stock on a padded batch, with the caller's distances or global tokens."""
        family = FAMILIES[self.fastbert_state.model_type]
        return family.disentangled or family.global_tokens

    def _count(self, fused: bool) -> None:
        # A counter would be a constant of the compiled code
        if not torch.compiler.is_compiling():
            self.fastbert_state.fused_calls += fused
            self.fastbert_state.stock_calls += not fused

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The stock layer's call, or with a `PackedBatch` the call of `EncoderLayer.forward`."""
        if args and type(args[0]) is PackedBatch:
            # FSDP gathers the parameters only now
            reason = gap(self) if is_sharded(self) else None
            if reason is not None:
                raise RuntimeError(
                    f"{self.fastbert_state.name}: {reason}; accelerate(…, unpad=False) avoids this"
                )
            self.begin(hidden_states)
            return encoder.layer(self.form, self.parts(), hidden_states, *args)
        if exporting() or self.fastbert_state is None:
            return super().forward(hidden_states, *args, **kwargs)
        state = self.fastbert_state
        if state.options.int8 and torch.compiler.is_compiling():
            return uncompiled(self, hidden_states, *args, **kwargs)
        stock = state.form.stock
        given = dict(zip(stock.positional, args, strict=False)) | kwargs
        reason = gap(self)
        form, places = state.form, {}
        if reason is None:
            bias, reason = self._bias(hidden_states, given)
        if reason is None and form.rotary is not None:
            places, reason = self._places(hidden_states, given)
            if form.window is not None and not self._has_window(given):
                form = replace(form, window=None)
        if reason is not None or len(args) > len(stock.positional):
            self._count(False)
            if state.options.strict:
                raise RuntimeError(f"{state.name}: {reason}; it would run as stock (strict=True)")
            return super().forward(hidden_states, *args, **kwargs)
        seed = None
        if any(self.dropout_rates()):
            seed = torch.randint(2**62, (1,), dtype=torch.int64, device=hidden_states.device)
        batch, seqlen, width = hidden_states.shape
        rows = hidden_states.reshape(batch * seqlen, width)
        ends = torch.arange(batch + 1, dtype=torch.int32, device=hidden_states.device) * seqlen
        packed = PackedBatch(ends, seqlen, bias, seed, **places)
        as_stock = self._attends_as_stock()
        if state.options.attention and not as_stock:
            steps = [step._replace(form=form) for step in survey([self], inside=True)]
            out = run_layers(steps, rows, Call(packed, 0))
        else:
            if form.rotary is None and not as_stock:
                attended = self.attend_by_modules(hidden_states, *args, **kwargs)[0]
            else:
                # transformers' attention takes them in another order
                attended = self.attend_by_modules(hidden_states, **given)[0]
            self.begin(rows)
            out = encoder.feed_forward(self.form, self.parts(), attended.reshape(rows.shape), packed)
        out = out.reshape(hidden_states.shape)
        return (out, *[None] * (stock.tuple_size - 1)) if stock.tuple_size else out

    def _bias(self, hidden: Tensor, given: dict[str, Any]) -> tuple[Tensor | None, str | None]:
        """(additive attention bias or None, None), or (None, why these arguments need the stock layer)."""
        mask, relative = given.get("attention_mask"), given.get("position_bias")
        if self.form.blocks is not None:
            return None, "only the stock layer attends by blocks of a padded batch"
        for name, value in given.items():
            if value is None or value is False or name in _SERVED:
                continue
            return None, f"{name} is asked for" if name.startswith("output_") else f"{name} is given"
        if hidden.dim() != 3:
            return None, f"the hidden states have {hidden.dim()} dimensions"
        batch, seqlen, _ = hidden.shape
        if batch * seqlen == 0:
            return None, "there are no tokens"
        if self._attends_as_stock():
            # With this mask
            return None, "int8 is for packed tokens alone" if self.fastbert_state.options.int8 else None
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] != seqlen:
                return None, "the attention mask is of a kind that only the stock layer knows"
            if mask.dim() == 2:
                mask = mask.bool()[:, None, None, :]
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, device=mask.device).masked_fill(mask.logical_not(), -torch.inf)
            elif not mask.is_floating_point():
                return None, "the attention mask is of integers in four dimensions"
            if mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, self.form.nheads):
                return None, "the attention mask is of a kind that only the stock layer knows"
            mask = mask.expand(-1, -1, seqlen, -1)
        if relative is not None:
            # The encoder repeats the bias for each sequence
            relative = relative[:1]
            mask = relative if mask is None else mask + relative
        return mask, None

    def _places(self, hidden: Tensor, given: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """(positions and tables of a `PackedBatch`, None), or ({}, why only the stock layer knows these).

        The tables have the cosines and sines of each token that the stock model passes.
        """
        batch, seqlen, _ = hidden.shape
        passed, width = given.get("position_embeddings"), self.form.head_dim
        pair = [t for t in passed if isinstance(t, Tensor)] if isinstance(passed, (tuple, list)) else []
        shapes = [tuple(t.shape) for t in pair]
        known = (1, seqlen, width), (batch, seqlen, width)
        if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0] not in known:
            return {}, "the position embeddings are of a kind that only the stock layer knows"
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # Both halves are alike
        tables = tuple(t.flatten(0, 1)[:, : width // 2].to(dtype).contiguous() for t in pair)
        positions = torch.arange(shapes[0][0] * seqlen, device=hidden.device)
        if shapes[0][0] != batch:
            positions = positions.repeat(batch)
        return {"positions": positions, "tables": {self.form.rotary: tables}}, None

    def _has_window(self, given: dict[str, Any]) -> bool:
        """Whether attention must apply the window, as in FlashAttention; a mask of four dimensions has it."""
        mask, attention = given.get("attention_mask"), part_of(self, self.form.stock.containers[0])
        flash = "flash" in str(getattr(attention.config, "_attn_implementation", None))
        return flash and (mask is None or mask.dim() == 2)
