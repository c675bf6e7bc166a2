"""What `accelerate` stores in a transformers encoder layer, and why the layer must run as stock.

The layer keeps its parameters in its own sub-modules, and our mathematics (layers/encoder.py) reads them at
every call. So each of them is checked before every call: `gap` returns why a layer cannot be fused now, and
`int8_gap` why a fused layer runs in floating point.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.acceleration import blocks
from fastbert.acceleration.classes import Accelerated, Options
from fastbert.acceleration.watching import collects, is_sharded
from fastbert.layers import bottleneck, disentangled, global_tokens
from fastbert.layers.form import LayerForm
from fastbert.layers.modules import is_hooked, is_no_norm, part, plain_dropout, rms_eps, watched
from fastbert.layers.quantized import check_finite
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES, Family
from fastbert.ops.activation import MODULES
from fastbert.runtime import prepared

# The parameters of XLNet's attention
_OWN_MATRICES = ("q", "k", "v", "o", "r", "r_r_bias", "r_s_bias", "r_w_bias", "seg_embed")


@dataclass
class Calls:
    """The number of calls of a layer that ran fused and as stock, without those of torch.compile."""

    fused: int = 0
    stock: int = 0


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
        calls: see `Calls`; an object of its own, because a kept plan holds only while nothing else changes.
    """

    model_type: str
    name: str
    form: LayerForm
    act: Any
    options: Options
    reason: str | None = None
    further: tuple[tuple[list[str], str], ...] = ()
    calls: Calls = field(default_factory=Calls)

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


def _further_linears(form: LayerForm) -> tuple[tuple[list[str], str], ...]:
    """The linear layers of a layer's attention that `form.paths` lacks, in the same form."""
    scored = disentangled.projections(form) if form.relative is not None else ()
    others = global_tokens.projections(form.names) if form.global_tokens else ()
    return tuple((path.split("."), path) for path in (*filter(None, scored), *others))


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
    form, family = blocks.form_of(layer, state.form), FAMILIES[state.model_type]
    return (
        _containers_gap(layer, form, family.stock_module)
        or _dropouts_gap(layer, form, family.two_streams)
        or _linears_gap(layer, (*form.paths[1], *state.further), at_model)
        or _family_gap(layer, state, form, at_model)
        or _norms_gap(layer, form, at_model)
        or _feed_forward_gap(layer, form)
    )


def _containers_gap(layer: Any, form: LayerForm, home: str) -> str | None:
    """Why not all modules between the layer and its linear layers are those of the Python module `home`."""
    for path in form.paths[0]:
        module = layer
        for name in path:
            module = module._modules.get(name)
            if module is None:
                return f"{'.'.join(path)} is gone"
        if type(module).forward.__module__ != home or watched(module):
            if collects("attentions"):
                return "output_attentions is asked for, which only the stock layer returns"
            return f"{'.'.join(path)} has hooks or another forward"
    return None


def _dropouts_gap(layer: Any, form: LayerForm, scores_itself: bool) -> str | None:
    for site, path in enumerate(form.paths[3]):
        if path is None:
            continue
        above = _at(layer, path[:-1])
        module = above._modules.get(path[-1])
        if not (_drops_by(above, path[-1]) if module is None else _drops_plainly(module)):
            return f"{'.'.join(path)} is not a plain dropout"
        if site == 0 and not scores_itself and not _attends_by(above.__dict__, form):
            return f"{'.'.join(path[:-1])} has other heads, or scales scores in another way"
    return None


def _linears_gap(layer: Any, linears: Any, at_model: bool) -> str | None:
    for path, dotted in linears:
        module = _at(layer, path)
        if type(module) is not nn.Linear:
            reason = _unknown_linear(module)
        else:
            reason = _weight_gap(module, at_model)
        if reason is not None:
            return f"{dotted} {reason}"
    return None


def _weight_gap(module: nn.Module, at_model: bool) -> str | None:
    if watched(module):
        return "has hooks or another forward"
    if type(module) is nn.Identity or _readable(module._parameters.get("weight"), at_model):
        return None
    return "has no weight of its own to read"


def _norms_gap(layer: Any, form: LayerForm, at_model: bool) -> str | None:
    for path, dotted in form.paths[2]:
        module = _at(layer, path)
        # ModernBERT's first layer has no norm before attention
        empty = type(module) is nn.Identity and form.pre_norm
        known = type(module) is nn.LayerNorm or rms_eps(module) is not None or is_no_norm(module)
        if not (known or empty):
            return f"{dotted} is a {type(module).__name__}"
        if (reason := _weight_gap(module, at_model)) is not None:
            return f"{dotted} {reason}"
    return None


def _feed_forward_gap(layer: Any, form: LayerForm) -> str | None:
    """What the layer's own attributes change, besides its parts."""
    if {form.stock.feed_forward, "feed_forward_chunk", "ff_chunk"} & layer.__dict__.keys():
        return "it has another feed-forward block"
    if _is_watched(_attribute(layer, form.paths[4])):
        return "the activation has hooks or another forward"
    if getattr(layer, "is_decoder", False) or getattr(layer, "add_cross_attention", False):
        return "it belongs to a decoder"
    return "chunk_size_feed_forward is set" if layer.__dict__.get("chunk_size_feed_forward") else None


def _family_gap(layer: Any, state: LayerState, form: LayerForm, at_model: bool) -> str | None:
    """What only some families have: blocks (BigBird), packed heads, two streams (XLNet) and bottlenecks."""
    if form.blocks is not None:
        if not _attends_by(part(layer, "attention.self").__dict__, form):
            return "attention.self has other heads"
        if not 0 <= blocks.rate_of_short_texts(layer.attention) < 1:
            return "config attention_probs_dropout_prob is not a plain dropout's"
    if form.packed and part(layer, form.names.query).out_features != 3 * form.nheads * form.head_dim:
        return f"{form.names.query} has other heads"
    if FAMILIES[state.model_type].two_streams:
        return _streams_gap(layer, form, at_model)
    return None if form.bottleneck is None else _bottleneck_gap(layer, state)


def _streams_gap(layer: Any, form: LayerForm, at_model: bool) -> str | None:
    for (name,) in form.paths[0] if isinstance(layer, Accelerated) else ():
        if not isinstance(layer._modules[name], Accelerated):
            return f"{name} was replaced after the model was accelerated"
    own = part(layer, "rel_attn")._parameters
    unread = (name for name in _OWN_MATRICES if not _readable(own.get(name), at_model))
    found = next(unread, None)
    return None if found is None else f"rel_attn.{found} has no weight of its own to read"


def _bottleneck_gap(layer: Any, state: LayerState) -> str | None:
    if not (state.options.attention and state.options.ffn):
        return "a layer with bottlenecks runs fused as a whole (attention=False or ffn=False)"
    own = state.form.bottleneck
    assert own is not None
    acts = [_attribute(layer, f"{feed}.intermediate.intermediate_act_fn".split(".")) for feed in own.feeds]
    if not knows_activation(layer, state) or any(_identity(act) is not state.act for act in acts):
        return "fastbert does not have the activation"
    return "the activation has hooks or another forward" if any(map(_is_watched, acts)) else None


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
        module = _at(layer, path)
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
        module = part(layer, dotted)
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


def _at(layer: Any, path: list[str]) -> Any:
    for name in path:
        layer = layer._modules[name]
    return layer


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


def _is_watched(act: Any) -> bool:
    return isinstance(act, nn.Module) and watched(act)


class AnyLayer(Accelerated):
    """What the mixins of accelerated encoder layers share."""

    def fastbert_how(self) -> str:
        """See `Accelerated`."""
        reason = gap(self, is_sharded(self))
        return "fused" if reason is None else f"stock, as {reason}"

    def check_gathered(self) -> None:
        """Raise RuntimeError if FSDP has gathered the parameters for a call that cannot run."""
        reason = gap(self) if is_sharded(self) else None
        if reason is not None:
            raise RuntimeError(
                f"{self.fastbert_state.name}: {reason}; accelerate(…, unpad=False) avoids this"
            )
