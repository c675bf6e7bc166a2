"""A model without some heads, neurons, layers or word pieces: a new, physically smaller model; and back.

A head takes its rows of query, key and value with it, and its columns of the attention's output layer. A
neuron takes a row of the intermediate layer (two of a gated block) and a column of the output layer. The
config of the smaller model has `pruned_heads` and `intermediate_sizes`, so its files load as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fastbert.layers import disentangled, global_tokens, quantized
from fastbert.layers.encoder_layer import EncoderLayer
from fastbert.layers.form import LayerForm
from fastbert.layers.modules import is_plain, part
from fastbert.layers.quantized import num_weights
from fastbert.models.base import PreTrainedModel
from fastbert.models.config_values import brief

_Model = TypeVar("_Model", bound=PreTrainedModel)
# Config keys that may be a list with one entry per layer
_PER_LAYER = ("layer_types", "attention_window", "fixed_heads", "token_schedule")


def check(model: PreTrainedModel) -> None:
    """Raise an error unless a model's layers can be cut.

    Raises:
        TypeError: it is no model of this package.
        ValueError: its layers have other mathematics, are shared, quantised or replaced; the message says so.
    """
    check_ours(model)
    family, shares = model.family, model.config.shares_layers
    if shares or family.bottleneck or family.two_streams:
        why = "shares its layers' weights" if shares else "has layers of another kind"
        raise ValueError(f"model: {model.config.model_type} {why}, which cannot be cut")
    for i, layer in enumerate(model.base_model.layer_list()):
        if not isinstance(layer, EncoderLayer):
            raise ValueError(f"model: layer {i} is of another class, {type(layer).__name__}")
        for path in paths(layer.form):
            if layer.int8 or not is_plain(module := part(layer, path), nn.Linear):
                kind = "quantised" if layer.int8 else type(module).__name__
                raise ValueError(f"model: expected plain linear layers, but {path} of layer {i} is {kind}")
    if quantized.is_quantized(model):
        raise ValueError("model: expected a table of words in floating point, but it is quantised")


def check_ours(model: object) -> None:
    """Raise TypeError unless it is a model of this package."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a model of fastbert, got {type(model).__name__}")


class Axis(NamedTuple):
    """The axis of a linear layer's weight that heads or neurons divide.

    Attributes:
        path: the path of the linear layer in its layer.
        dim: 0 for outputs, which a bias has too; 1 for inputs.
        unit: "heads" or "neurons".
        shape: the axis's shape as (before, -1, after, width), where the units are in the middle.
    """

    path: str
    dim: int
    unit: str
    shape: tuple[int, int, int, int]

    def __call__(self, t: Tensor, kept: Tensor, size: int | None) -> Tensor:
        """`t` with the units `kept` alone; or, if `size` is given, with zeros in place of its other units.

        Args:
            t: the weight, or the bias.
            kept: the numbers of units, ascending.
            size: the number of units of the result, of which `t` has those of `kept`.
        """
        apart = t.unflatten(self.dim, self.shape)
        dim = self.dim + 1
        if size is None:
            return apart.index_select(dim, kept).flatten(self.dim, self.dim + 3)
        shape = [*apart.shape[:dim], size, *apart.shape[dim + 1 :]]
        return apart.new_zeros(shape).index_copy_(dim, kept, apart).flatten(self.dim, self.dim + 3)


def axes(form: LayerForm) -> list[Axis]:
    """The axes of a layer's linear layers that heads or neurons divide."""
    names, size = form.names, form.head_dim
    found = []
    for path in paths(form):
        dim, unit, shape = 0, "heads", (1, -1, 1, size)
        if path == names.attention_output:
            dim = 1
        elif path == names.output:
            dim, unit, shape = 1, "neurons", (1, -1, 1, 1)
        elif path in (names.intermediate, names.gate):
            halves = 2 if form.gated is not None and names.gate is None else 1
            unit, shape = "neurons", (halves, -1, 1, 1)
        elif form.packed:
            shape = (1, -1, 3, size) if form.head_major else (3, -1, 1, size)
        if unit == "heads" and (form.kv_heads is not None or form.heads is not None):
            # Heads stay that share keys and values, and those beside fixed ones
            continue
        found.append(Axis(path, dim, unit, shape))
    return found


def paths(form: LayerForm) -> tuple[str, ...]:
    """The paths of all linear layers of a layer of this form."""
    more: tuple[str | None, ...] = disentangled.projections(form) if form.relative is not None else ()
    more += global_tokens.projections(form.names) if form.global_tokens else ()
    return tuple(dict.fromkeys(path for path in (*form.linears, *more) if path is not None))


def inner_size(layer: Any) -> int:
    """The number of neurons of a layer's feed-forward block."""
    return part(layer, layer.form.names.output).in_features


def numbers(layer: Any) -> list[int]:
    """What the model's config calls the heads that a layer has."""
    kept = layer.form.kept
    return list(range(layer.form.nheads) if kept is None else kept)


def without(
    model: _Model,
    *,
    heads: Mapping[int, Collection[int]] | None = None,
    neurons: Mapping[int, Collection[int]] | None = None,
    layers: Sequence[int] | None = None,
    vocabulary: Sequence[int] | None = None,
) -> _Model:
    """A copy of a model without some of its parts. The model itself is not changed.

    Args:
        model: a model of this package with plain linear layers.
        heads: layer -> the heads to remove, as they are numbered in the layer now.
        neurons: layer -> the neurons to remove, numbered likewise.
        layers: the layers to keep, ascending; None for all. `heads` and `neurons` number the given model's
            layers.
        vocabulary: the ids of word pieces to keep, ascending, which become 0, 1, …; None for all. See
            `fastbert.compression.vocabulary`.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    check(model)
    every = list(model.base_model.layer_list())
    kept = list(range(len(every))) if layers is None else list(layers)
    if any(type(i) is not int or not 0 <= i < len(every) for i in kept) or kept != sorted(set(kept)):
        raise ValueError(f"layers: expected ascending numbers of {len(every)} layers, got {layers!r}")
    if every and model.family.windows and kept[:1] != [0]:
        raise ValueError(
            "layers: expected layer 0 among those to keep: it alone has no norm before attention"
        )
    left = [
        {
            "heads": _left("heads", heads, i, layer.form.nheads, len(every)),
            "neurons": _left("neurons", neurons, i, inner_size(layer), len(every)),
        }
        for i, layer in enumerate(every)
    ]
    if any(map(len, (heads or {}).values())) and model.config.kv_heads is not None:
        raise ValueError("heads: expected none, as heads of the model share keys and values")
    if any(map(len, (heads or {}).values())) and any(layer.form.heads is not None for layer in every):
        raise ValueError("heads: expected none, as some heads of the model are fixed")
    places = [f"{name_of(model, layer)}." for layer in every]
    state = dict(model.state_dict(keep_vars=True))
    cut = {key: value for key, value in state.items() if not key.startswith(tuple(places))}
    for number, i in enumerate(kept):
        own = {k.removeprefix(places[i]): v for k, v in state.items() if k.startswith(places[i])}
        _units(own, every[i].form, left[i], None)
        cut |= {places[number] + key: value for key, value in own.items()}
    config = model.config
    inner = [len(left[i]["neurons"]) for i in kept]
    differ = any(size != config.family.inner(config.intermediate_size) for size in inner)
    changes: dict[str, Any] = {
        "num_hidden_layers": len(kept),
        "intermediate_sizes": inner if differ else None,
    }
    gone = [
        {*range(config.num_attention_heads)} - {numbers(every[i])[h] for h in left[i]["heads"]} for i in kept
    ]
    changes["pruned_heads"] = {i: sorted(own) for i, own in enumerate(gone) if own} or None
    given = config.to_dict()
    for key in _PER_LAYER:
        if isinstance(given.get(key), list) and len(given[key]) == len(every):
            if key == "fixed_heads" and not isinstance(given[key][0], list):
                # One list of names is for all layers
                continue
            changes[key] = [given[key][i] for i in kept]
    if vocabulary is not None:
        changes |= _cut_vocabulary(model, cut, list(vocabulary))
    return made(model, changes, cut)


def _cut_vocabulary(model: PreTrainedModel, state: dict[str, Tensor], ids: list[int]) -> dict[str, Any]:
    """Keep the rows of these ids in the table of words and the decoder; returns the changes of the config."""
    config, size, head = model.config, model.config.vocab_size, model.config.lm_head
    if not ids or ids != sorted(set(ids)) or not all(type(i) is int and 0 <= i < size for i in ids):
        raise ValueError(f"vocabulary: expected ascending ids below {size}, got {brief(ids)}")
    changes: dict[str, Any] = {"vocab_size": len(ids)}
    for key, value in config.to_dict().items():
        if key.endswith("_token_id") and isinstance(value, int):
            if value not in ids:
                raise ValueError(f"vocabulary: expected config {key} {value} among the ids")
            changes[key] = ids.index(value)
    table = name_of(model, part(model.base_model, model.family.word_table))
    names = f"{table}.weight", f"{head.decoder}.weight", f"{head.decoder}.bias", head.bias
    cut: dict[int, Tensor] = {}
    for key in names:
        if key in state and state[key].shape[0] == size:
            # A tied tensor stays one
            t = state[key]
            if id(t) not in cut:
                rows = t.detach().index_select(0, torch.tensor(ids, device=t.device))
                cut[id(t)] = nn.Parameter(rows, requires_grad=t.requires_grad)
            state[key] = cut[id(t)]
    return changes


def dense(model: _Model) -> _Model:
    """A copy of a model with all heads and neurons of the unpruned sizes, and the same function.

    What a layer lacks is filled with zeros: rows and biases of query, key, value and the intermediate layer,
    and columns of the output layers. A factored table of words is multiplied out, and shared layers are
    repeated. transformers loads its files.

    Args:
        model: a model of this package, such as `without` makes. It is not changed.

    Raises:
        TypeError, ValueError: as `without`.
    """
    check_ours(model)
    if num_weights(model):
        check(model)
    whole = model.config.word_embedding_rank is None and model.config.layer_groups is None
    model = unshared(unfactored(model))
    if model.config.family.shared_layers and not whole:
        return model
    check(model)
    config, state = model.config, dict(model.state_dict(keep_vars=True))
    whole_size = config.family.inner(config.intermediate_size)
    every = list(model.base_model.layer_list())
    sizes = {
        "heads": config.num_attention_heads,
        "neurons": max([whole_size, *map(inner_size, every)]),
    }
    for layer in every:
        place = f"{name_of(model, layer)}."
        own = {k.removeprefix(place): v for k, v in state.items() if k.startswith(place)}
        units = {"heads": numbers(layer), "neurons": list(range(inner_size(layer)))}
        _units(own, layer.form, units, sizes)
        state |= {place + key: value for key, value in own.items()}
    changes: dict[str, Any] = {"pruned_heads": None, "intermediate_sizes": None}
    if sizes["neurons"] != whole_size:
        changes["intermediate_size"] = sizes["neurons"]
    return made(model, changes, state)


@torch.no_grad()
def unfactored(model: _Model) -> _Model:
    """A copy of a model with its factored table of words multiplied out; a model without one as it is."""
    if model.config.word_embedding_rank is None:
        return model
    words: Any = model.get_input_embeddings()
    product = (words.weight.double() @ words.projection.weight.double().T).to(words.weight.dtype)
    table = nn.Parameter(product, words.weight.requires_grad)
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    state = {key: table if value is words.weight else value for key, value in state.items()}
    del state[f"{name_of(model, words)}.projection.weight"]
    return made(model, {"word_embedding_rank": None}, state)


def unshared(model: _Model) -> _Model:
    """A copy of a model with each layer by itself; a model without config layer_groups as it is."""
    groups = model.config.layer_groups
    if groups is None:
        return model
    place = f"{name_of(model, part(model.base_model, model.family.layers))}."
    state = dict(model.state_dict(keep_vars=True))
    shared = {key: state.pop(key) for key in list(state) if key.startswith(place)}
    for number, group in enumerate(groups):
        own = f"{place}{group}."
        for key in [key for key in shared if key.startswith(own)]:
            # A tensor of its own for each layer
            state[f"{place}{number}.{key.removeprefix(own)}"] = shared[key].clone()
    return made(model, {"layer_groups": None}, state)


def _units(
    own: dict[str, Tensor], form: LayerForm, units: dict[str, list[int]], sizes: dict[str, int] | None
) -> None:
    """Replace a layer's tensors by those with other heads and neurons; see `Axis`."""
    for axis in axes(form):
        for key in (f"{axis.path}.weight", f"{axis.path}.bias"):
            if key not in own or (axis.dim == 1 and key.endswith("bias")):
                continue
            t = own[key]
            kept = torch.tensor(units[axis.unit], dtype=torch.int64, device=t.device)
            found = axis(t.detach(), kept, None if sizes is None else sizes[axis.unit])
            own[key] = nn.Parameter(found, requires_grad=t.requires_grad)


def _left(name: str, given: Any, layer: int, size: int, layers: int) -> list[int]:
    """The units of a layer that stay, after a check of what `given` says of the layer."""
    if given is None:
        return list(range(size))
    if layer == 0:
        unknown = [i for i in given if type(i) is not int or not 0 <= i < layers]
        if unknown:
            raise ValueError(f"{name}: expected numbers of {layers} layers as keys, got {unknown[0]!r}")
    gone = set(given.get(layer, ()))
    if wrong := [unit for unit in gone if type(unit) is not int or not 0 <= unit < size]:
        raise ValueError(f"{name}[{layer}]: expected numbers below {size}, got {wrong[0]!r}")
    return [unit for unit in range(size) if unit not in gone]


def name_of(model: nn.Module, module: nn.Module) -> str:
    """The path of a module in a model."""
    return next(name for name, found in model.named_modules() if found is module)


def made(model: _Model, changes: dict[str, Any], state: dict[str, Tensor]) -> _Model:
    """A model like `model` with another config, and copies of these tensors."""
    config = type(model.config).from_dict(model.config.to_dict(), **changes)
    base, options = model.base_model, {}
    if model is base and model.family.pooler:
        options["add_pooling_layer"] = base.has_pooler
    with torch.device("meta"):
        found = type(model)(config, **options)
    copies: dict[int, Tensor] = {}
    for value in state.values():
        copies.setdefault(id(value), value.detach().clone())
    found.load_state_dict({key: copies[id(value)] for key, value in state.items()}, assign=True)
    found.tie_weights()
    for key, parameter in found.named_parameters():
        parameter.requires_grad_(state[key].requires_grad)
    return found.train(model.training)
