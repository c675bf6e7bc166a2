"""Config keys of layers of which some see a window of tokens; both spellings.

transformers 4 writes `global_attn_every_n_layers`, `global_rope_theta` and `local_rope_theta`; transformers 5
writes `layer_types` and `rope_parameters`. A config may have both if they agree, and is saved with both. It
keeps the first spelling, and a list of `layer_types` only if no number says the same.
"""

from __future__ import annotations

from typing import Any

from fastbert.layers.batch import Rotary
from fastbert.models.config_values import brief, integers, numbers, one_of, refused

FULL, SLIDING = "full_attention", "sliding_attention"
# layer type -> the key of its base in transformers 4
_THETAS = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
POOLINGS = ("cls", "mean")


def respelt(given: dict[str, Any]) -> dict[str, Any]:
    """Config keys in the first spelling, where `given` may have both.

    Raises:
        TypeError, ValueError: naming the key, what came and what was expected.
    """
    found = dict(given)
    types, every = found.pop("layer_types", None), found.get("global_attn_every_n_layers")
    if types is not None:
        _check_types(types)
        alike = _every(types, [every or 3])
        if every is not None and alike != every:
            raise ValueError(
                f"config layer_types: {brief(types)} differs from global_attn_every_n_layers = {every!r}, "
                "another spelling of it; expected one of the two, or both alike"
            )
        found["global_attn_every_n_layers"] = alike
        if alike is None:
            found["layer_types"] = list(types)
    parameters, scaling = found.pop("rope_parameters", None), found.pop("rope_scaling", None)
    if scaling is not None:
        _bases({FULL: scaling}, "rope_scaling")
    for kind, theta in _bases(parameters, "rope_parameters").items():
        key = _THETAS[kind]
        if found.get(key) not in (None, theta):
            raise ValueError(
                f"config {key}: {found[key]!r} differs from rope_theta = {theta!r} of "
                f"rope_parameters.{kind}, another spelling of it; expected one of the two, or both alike"
            )
        found[key] = theta
    return found


def overridden(values: dict[str, Any], overrides: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both in the first spelling, `values` without what `overrides` has in either spelling."""
    values, overrides = respelt(values), respelt(overrides)
    if "global_attn_every_n_layers" in overrides:
        values.pop("layer_types", None)
    return values, overrides


def layer_types(config: Any) -> list[str]:
    """The type of each layer, FULL or SLIDING."""
    own = config.__dict__.get("layer_types")
    if own is not None:
        return list(own)
    every = config.global_attn_every_n_layers
    return [SLIDING if i % every else FULL for i in range(config.num_hidden_layers)]


def rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """What the layers of each type rotate by, as transformers 5 spells it."""
    bases = {FULL: config.global_rope_theta, SLIDING: config.local_rope_theta or config.global_rope_theta}
    return {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}


def window(config: Any, layer: int) -> tuple[int, int] | None:
    """How many tokens before and after its own a token of the layer sees; None for all."""
    half = config.local_attention // 2
    return None if layer_types(config)[layer] == FULL else (half, half)


def rotary(config: Any, layer: int) -> Rotary:
    """By which angles the layer rotates queries and keys."""
    base = config.__dict__[_THETAS[layer_types(config)[layer]]]
    # transformers 4: local layers may have the global base
    return Rotary(float(config.__dict__[_THETAS[FULL]] if base is None else base))


def check(config: Any) -> None:
    """Check the keys of this module.

    Raises:
        TypeError, ValueError: naming the key, what came and what was expected.
    """
    own = config.__dict__.get("layer_types")
    if own is not None:
        _check_types(own)
        if len(own) != config.num_hidden_layers:
            raise ValueError(
                f"config layer_types: expected one type per layer, {config.num_hidden_layers}, got {len(own)}"
            )
    least = {"global_attn_every_n_layers": 1, "local_attention": 0}
    integers(config, least, () if own is None else ("global_attn_every_n_layers",))
    bases = [key for key in _THETAS.values() if key == _THETAS[FULL] or config.__dict__[key] is not None]
    numbers(config, *bases, positive=True)
    if config.head_dim % 2:
        raise ValueError(
            f"config num_attention_heads: heads of {config.head_dim} columns cannot be rotated; expected an "
            "even number"
        )
    one_of(config, "classifier_pooling", POOLINGS)
    if config.__dict__.get("sparse_pred_ignore_index", -100) != -100:
        raise refused(config, "sparse_pred_ignore_index", "-100")


def _check_types(types: Any) -> None:
    if not isinstance(types, (list, tuple)) or any(kind not in (FULL, SLIDING) for kind in types):
        raise ValueError(
            f"config layer_types: expected a list of {FULL!r} and {SLIDING!r}, got {brief(types)}"
        )


def _every(types: Any, first: list[int]) -> int | None:
    """The n for which each n-th layer, from layer 0 on, is FULL and no other is; None if there is none."""
    for n in (*first, *range(1, len(types) + 1)):
        if all((kind == FULL) == (i % n == 0) for i, kind in enumerate(types)):
            return n
    return None


def _bases(parameters: Any, key: str) -> dict[str, Any]:
    """layer type -> its base, of those that `parameters` has.

    Raises:
        TypeError, ValueError: it scales the angles, or has another form.
    """
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or not parameters.keys() <= {FULL, SLIDING}:
        raise TypeError(f"config {key}: expected objects {FULL} and {SLIDING}, got {brief(parameters)}")
    found = {}
    for kind, own in parameters.items():
        where = f"config {key}" if key == "rope_scaling" else f"config {key}.{kind}"
        if own is None:
            continue
        if not isinstance(own, dict):
            raise TypeError(f"{where}: expected an object, got {brief(own)}")
        rope_type = own.get("rope_type", own.get("type", "default"))
        if rope_type != "default":
            raise ValueError(f"{where}: rope_type {rope_type!r} is not supported; expected 'default'")
        if unknown := sorted(own.keys() - {"rope_type", "type", "rope_theta"}):
            raise ValueError(f"{where}: {unknown[0]} is not supported; expected rope_type and rope_theta")
        if "rope_theta" in own:
            found[kind] = own["rope_theta"]
    return found
