"""Progressive stacking: train a shallow model, stack its layers, train the deep model.

From L to k · L layers, layer i of the new model is layer i mod L of the old model. Embeddings, pooler and
heads are copied. The learning rate's schedule continues. The optimizer starts anew, or its moments are copied
as the weights are.

With `newest_layers` only the new layers, the pooler and the heads train (MSLT). Embeddings and old layers
keep their values, so that backward ends at the lowest new layer. A decoder that is tied to the word
embeddings keeps its matrix.

Layers that share weights (ALBERT) can be stacked if each shared layer takes the weights of one old layer
alone. That holds with one group of layers, or with k times as many groups.

Source: Gong et al. 2019, "Efficient Training of BERT by Progressively Stacking", sec. 4; Yang et al. 2020,
"Progressively Stacking 2.0: A Multi-stage Layerwise Training Method for BERT Training Speedup".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fastbert.layers import quantized
from fastbert.models.base import PreTrainedModel

_STAGE = re.compile(r"([1-9][0-9]*):([1-9][0-9]*|\*)")
# config keys that two models must have in common, so that their weights have one shape and one meaning
_COMMON = (
    "model_type",
    "hidden_size",
    "embedding_width",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
    "num_labels",
    "tie_word_embeddings",
)


def parse_growth(text: str) -> list[tuple[int, int | None]]:
    """The stages of "3:50000,6:70000,12:*": (layers, steps) of each, None for all steps that are left.

    Raises:
        ValueError: a stage is no pair of positive integers, its layers are no multiple of the previous
            stage's, or "*" is not the last stage's steps alone.
    """
    stages: list[tuple[int, int | None]] = []
    parts = text.split(",")
    for number, part in enumerate(parts, 1):
        found = _STAGE.fullmatch(part)
        if found is None:
            raise ValueError(f"grow: stage {number}: expected LAYERS:STEPS, such as 3:50000, got {part!r}")
        layers, steps = int(found[1]), None if found[2] == "*" else int(found[2])
        if (steps is None) != (number == len(parts)):
            raise ValueError(f"grow: expected * for the steps of the last stage and no other, got {text!r}")
        before = stages[-1][0] if stages else None
        if before and (layers == before or layers % before):
            raise ValueError(
                f"grow: stage {number}: expected a multiple of the {before} layers before, got {layers}"
            )
        stages.append((layers, steps))
    return stages


def grown_names(small: PreTrainedModel, large: PreTrainedModel) -> dict[str, str]:
    """Name in `large` -> name in `small` of the weights it takes, for all parameters and buffers.

    Raises:
        TypeError: an argument is no model of this package.
        ValueError: `large` is of another class, width or shape, or its number of layers is no multiple.
    """
    _check(small, large)
    if small.family.windows:
        raise ValueError(
            f"small: the first layer of {small.config.model_type} has no norm before attention, so no other "
            "layer can take its weights; expected a family whose layers are alike"
        )
    old, new = _layers(small), _layers(large)
    if not old or len(new) % len(old):
        raise ValueError(f"large: expected a multiple of small's {len(old)} layers, got {len(new)}")
    sources: dict[str, str] = {}
    for i, name in enumerate(new):
        source = old[i % len(old)]
        if sources.setdefault(name, source) != source:
            raise ValueError(
                f"large: {name} is shared by layers that grow from different old layers; expected "
                f"num_hidden_groups {small.config.num_hidden_groups * (len(new) // len(old))}, "
                f"got {large.config.num_hidden_groups}"
            )
    found = {}
    ours, theirs = large.state_dict(), small.state_dict()
    for name in ours:
        layer = next((prefix for prefix in sources if name.startswith(f"{prefix}.")), None)
        found[name] = name if layer is None else sources[layer] + name[len(layer) :]
    if missing := sorted(set(theirs).symmetric_difference(found.values())):
        raise ValueError(f"large: expected the weights of small, but only one of them has {missing[0]}")
    for name, source in found.items():
        if ours[name].shape != theirs[source].shape or ours[name].dtype != theirs[source].dtype:
            raise ValueError(
                f"large: {name}: expected {theirs[source].dtype} of the shape {tuple(theirs[source].shape)}, "
                f"got {ours[name].dtype} of the shape {tuple(ours[name].shape)}"
            )
    return found


@torch.no_grad()
def grow(small: PreTrainedModel, large: PreTrainedModel) -> None:
    """Copy the weights of `small` to `large`: layer i from layer i mod L, all else from its namesake.

    Args:
        small: a model of L layers, with any head.
        large: a model of the same class and widths with k · L layers; its weights are overwritten.

    Raises:
        TypeError, ValueError: see `grown_names`; nothing is changed then.
        RuntimeError: one of the models is quantised.
    """
    names = grown_names(small, large)
    ours, theirs = large.state_dict(), small.state_dict()
    for argument, model in (("small", small), ("large", large)):
        quantized.check_trainable(model, "grow")
        if any(tensor.is_meta for tensor in model.state_dict().values()):
            raise ValueError(f"{argument}: its weights are on the meta device, which holds no numbers")
    for name, source in names.items():
        ours[name].copy_(theirs[source])


def grow_moments(
    moments: Mapping[str, Mapping[str, object]], small: PreTrainedModel, large: PreTrainedModel
) -> dict[str, dict[str, object]]:
    """The state of an optimizer of `small`, copied as the weights are.

    Args:
        moments: parameter name in `small` -> its state, such as {"exp_avg": …, "exp_avg_sq": …, "step": …}.
            A parameter that was not trained may be missing; the result then lacks its copies.
        small, large: as for `grow`.

    Returns:
        Parameter name in `large` -> its state. Tensors are copies, one per parameter.

    Raises:
        ValueError: a name is no parameter of `small`, or a tensor with more than one number has another shape
            than its parameter; or see `grown_names`.
    """
    names = grown_names(small, large)
    parameters = dict(small.named_parameters())
    for name, state in moments.items():
        if name not in parameters:
            raise ValueError(f"moments: {name!r} is no parameter of small")
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameters[name].shape:
                raise ValueError(
                    f"moments: {name}: {key}: expected the shape {tuple(parameters[name].shape)}, "
                    f"got {tuple(value.shape)}"
                )
    return {
        name: {k: v.clone() if isinstance(v, Tensor) else v for k, v in moments[names[name]].items()}
        for name, _ in large.named_parameters()
        if names[name] in moments
    }


def newest_layers(model: PreTrainedModel, old: int) -> list[str]:
    """Names of the parameters that train while the `old` lowest layers are frozen; see the module.

    Args:
        model: a model that has grown.
        old: number of layers before it has grown, in [1, its layers).

    Raises:
        ValueError: naming the argument; also if an old layer and a new layer share weights.
    """
    layers = _layers(model)
    if type(old) is not int or not 1 <= old < len(layers):
        raise ValueError(f"old: expected an integer in [1, {len(layers)}), got {old!r}")
    if shared := set(layers[:old]) & set(layers[old:]):
        raise ValueError(f"model: {min(shared)} is both an old and a new layer; shared layers train together")
    new = {id(p) for name in layers[old:] for p in model.get_submodule(name).parameters()}
    pooler = model.family.pooler
    above = {id(p) for n, p in model.base_model.named_parameters() if pooler and n.startswith(f"{pooler}.")}
    frozen = {id(p) for p in model.base_model.parameters()} - new - above
    return [name for name, parameter in model.named_parameters() if id(parameter) not in frozen]


def _layers(model: PreTrainedModel) -> list[str]:
    """The names of the layers in execution order; a shared layer appears once per use."""
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    return [names[layer] for layer in model.base_model.layer_list()]


def _check(small: PreTrainedModel, large: PreTrainedModel) -> None:
    for name, model in (("small", small), ("large", large)):
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"{name}: expected a model of this package, got {type(model).__name__}")
    if type(small) is not type(large):
        raise ValueError(f"large: expected a {type(small).__name__} as small, got {type(large).__name__}")
    ours, theirs = ({key: getattr(m.config, key) for key in _COMMON} for m in (large, small))
    ours, theirs = (a | m.config.mathematics() for a, m in ((ours, large), (theirs, small)))
    for key in theirs:
        if key != "num_hidden_layers" and ours[key] != theirs[key]:
            raise ValueError(f"large: {key}: expected {theirs[key]!r} as in small, got {ours[key]!r}")
