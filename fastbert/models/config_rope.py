"""The config key `rope_parameters` of families whose layers all rotate alike, in both spellings.

transformers 5 writes `rope_parameters`; transformers 4 writes `rope_theta` and `rope_scaling`. A config may
have both if they agree. It keeps and saves `rope_parameters`.
"""

from __future__ import annotations

import math
from typing import Any

from fastbert.layers.batch import Rotary
from fastbert.models.config_values import brief, one_of

# Keys of transformers 4
OLD = ("rope_theta", "rope_scaling", "partial_rotary_factor")
POOLINGS = ("bos", "mean", "late")
# rope_type -> the keys that it has beside rope_type and rope_theta
_TYPES: dict[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "dynamic": ("factor",)}


def settle(values: dict[str, Any], given: dict[str, Any], usual: float) -> None:
    """Write the keys of `given` into `values`, a family's defaults and `given`, in transformers 5's spelling.

    Args:
        usual: the family's base.

    Raises:
        TypeError, ValueError: naming the key, what came and what was expected.
    """
    theta, scaling = values.pop("rope_theta", None), values.pop("rope_scaling", None)
    parameters, share = given.get("rope_parameters"), values.pop("partial_rotary_factor", None)
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            raise TypeError(f"config {key}: expected an object, got {brief(value)}")
    found = {**(parameters or scaling or {})}
    if share is not None:
        found.setdefault("partial_rotary_factor", share)
    if parameters and scaling and _standard(parameters, usual) != _standard(scaling, usual):
        raise ValueError(
            f"config rope_scaling: {brief(scaling)} differs from rope_parameters, another spelling of it; "
            "expected one of the two, or both alike"
        )
    if theta is not None and found.get("rope_theta", theta) != theta:
        raise ValueError(
            f"config rope_theta: {theta!r} differs from rope_theta = {found['rope_theta']!r} of "
            "rope_parameters, another spelling of it; expected one of the two, or both alike"
        )
    values["rope_parameters"] = _standard(found, usual if theta is None else theta)
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if values.get("head_dim", 1) is None and type(width) is int and type(heads) is int and heads > 0:
        values["head_dim"] = width // heads
    if values.get("num_key_value_heads", 1) is None:
        values["num_key_value_heads"] = heads


def _standard(parameters: dict[str, Any], theta: Any) -> dict[str, Any]:
    """Parameters with their type and base, without keys that say nothing."""
    found = {"rope_theta": theta, "rope_type": parameters.get("type", "default"), **parameters}
    found.pop("type", None)
    if found.get("partial_rotary_factor") in (None, 1.0):
        found.pop("partial_rotary_factor", None)
    return found


def rotary(config: Any) -> Rotary:
    """By which angles the layers rotate queries and keys."""
    own = config.rope_parameters
    trained = config.max_position_embeddings if own["rope_type"] == "dynamic" else None
    return Rotary(own["rope_theta"], own.get("factor", 1.0), trained)


def check(config: Any) -> None:
    """Check the keys of this module.

    Raises:
        TypeError, ValueError: naming the key, what came and what was expected.
    """
    own = config.__dict__.get("rope_parameters")
    if not isinstance(own, dict):
        raise TypeError(f"config rope_parameters: expected an object, got {brief(own)}")
    kind = own.get("rope_type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(
            f"config rope_parameters: rope_type {brief(kind)} is not supported; expected one of "
            f"{', '.join(_TYPES)}"
        )
    if unknown := sorted(own.keys() - {"rope_type", "rope_theta", *_TYPES[kind]}, key=str):
        raise ValueError(
            f"config rope_parameters: {unknown[0]} is not supported; expected "
            f"{', '.join(('rope_type', 'rope_theta', *_TYPES[kind]))}"
        )
    for key in ("rope_theta", *_TYPES[kind]):
        value: Any = own.get(key)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"config rope_parameters: expected {key} as a finite number > 0, got {value!r}")
    if kind == "dynamic" and own["factor"] < 1:
        raise ValueError(f"config rope_parameters: expected a factor >= 1, got {own['factor']!r}")
    shared = config.kv_heads
    if shared is not None and (type(shared) is not int or shared < 1 or config.num_attention_heads % shared):
        raise ValueError(
            f"config num_key_value_heads: expected a divisor of num_attention_heads = "
            f"{config.num_attention_heads}, got {shared!r}"
        )
    if shared is not None and config.pruned_heads:
        raise ValueError("config pruned_heads: expected none, as heads share keys and values")
    if "classifier_pooling" in config.__dict__:
        one_of(config, "classifier_pooling", POOLINGS)
    if config.head_dim % 2 or config.head_dim < 4:
        raise ValueError(
            f"config num_attention_heads: heads of {config.head_dim} columns cannot be rotated; expected an "
            "even number >= 4"
        )
