"""Config keys that differ by layer: heads, sizes of feed-forward blocks, kept tokens, shared weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from fastbert.layers.patterns import BACKWARD, LEARNED, NAMES, SEPARATORS
from fastbert.models.config_values import MAX_SIZE, brief, refused


def check(config: Any) -> None:
    """Check the keys of this module.

    Raises:
        TypeError, ValueError: naming the key, what came and what was expected.
    """
    _check_fixed_heads(config)
    _check_pruned_heads(config)
    _check_inner_sizes(config)
    _check_token_schedule(config)
    _check_groups(config)


def _check_fixed_heads(config: Any) -> None:
    """See `EncoderConfig.fixed_patterns`."""
    given, layers, heads = config.fixed_heads, config.num_hidden_layers, config.num_attention_heads
    if given is None:
        return
    family = config.family
    if family.unlimited or family.disentangled or family.block_sparse or family.global_tokens:
        reasons = {
            "rotates queries and keys": family.rotary,
            "scores distances by queries and keys": family.disentangled or family.two_streams,
            "attends by blocks of queries and keys": family.block_sparse,
            "has global tokens' queries": True,
        }
        what = next(what for what, there in reasons.items() if there)
        raise ValueError(
            f"config fixed_heads: expected None, as {config.model_type} {what}, which fixed heads do not have"
        )
    rows = [given] if isinstance(given, (list, tuple)) and given and isinstance(given[0], str) else given
    if (
        not isinstance(rows, (list, tuple))
        or len(rows) not in ({layers} if rows is given else {1})
        or any(not isinstance(row, (list, tuple)) or len(row) != heads for row in rows)
    ):
        kinds = f"None, {heads} names for all layers or {layers} lists of {heads} names"
        raise refused(config, "fixed_heads", kinds)
    names = [name for name in NAMES if name != NAMES[SEPARATORS]]
    for layer, row in enumerate(rows):
        where = "config fixed_heads" if rows is not given else f"config fixed_heads[{layer}]"
        if unknown := [name for name in row if name not in names]:
            raise ValueError(f"{where}: expected names of {', '.join(names)}, got {brief(unknown[0])}")
        if NAMES[LEARNED] not in row:
            raise ValueError(f"{where}: expected at least one {NAMES[LEARNED]!r} head, got none")
        ahead = [name for name in row if NAMES.index(name) not in BACKWARD]
        if config.is_decoder and ahead:
            raise ValueError(
                f"{where}: {ahead[0]!r}, but with is_decoder True no token sees a later one; expected names "
                f"of {', '.join(NAMES[i] for i in BACKWARD)}"
            )
    if config.family.shared_layers and any(list(row) != list(rows[0]) for row in rows):
        raise ValueError(
            f"config fixed_heads: {config.model_type} shares its layers' weights, so all layers must be alike"
        )


def _check_pruned_heads(config: Any) -> None:
    """See `EncoderConfig.kept_heads`."""
    given, layers, heads = config.pruned_heads, config.num_hidden_layers, config.num_attention_heads
    if not given:
        return
    if not isinstance(given, dict):
        raise refused(config, "pruned_heads", "lists of heads by layer", TypeError)
    for layer, gone in given.items():
        if not (isinstance(layer, int) or (isinstance(layer, str) and layer.isdecimal())) or not (
            0 <= int(layer) < layers
        ):
            raise ValueError(
                f"config pruned_heads: expected numbers of {layers} layers as keys, got {brief(layer)}"
            )
        if (
            not isinstance(gone, (list, tuple))
            or any(type(head) is not int or not 0 <= head < heads for head in gone)
            or len(set(gone)) < len(gone)
        ):
            raise ValueError(
                f"config pruned_heads[{layer}]: expected different heads below {heads}, got {brief(gone)}"
            )
    if config.family.shared_layers or config.fixed_heads is not None:
        why = "shares its layers" if config.family.shared_layers else "has config fixed_heads"
        raise ValueError(f"config pruned_heads: expected none, as {config.model_type} {why}")


def _check_inner_sizes(config: Any) -> None:
    given, layers = config.intermediate_sizes, config.num_hidden_layers
    if given is None:
        return
    if (
        not isinstance(given, (list, tuple))
        or len(given) != layers
        or any(type(size) is not int or not 0 <= size <= MAX_SIZE for size in given)
    ):
        sizes = f"None or {layers} integers from 0 to {MAX_SIZE}, one per layer"
        raise refused(config, "intermediate_sizes", sizes)
    if config.family.shared_layers or config.family.bottleneck:
        shares = config.family.shared_layers
        why = "shares its layers" if shares else "has several feed-forward blocks per layer"
        raise ValueError(f"config intermediate_sizes: expected None, as {config.model_type} {why}")


def _check_token_schedule(config: Any) -> None:
    given, layers = config.token_schedule, config.num_hidden_layers * (config.get("inner_group_num") or 1)
    if given is None:
        return
    if (
        not isinstance(given, (list, tuple))
        or len(given) != layers
        or any(isinstance(f, bool) or not isinstance(f, (int, float)) or not 0 < f <= 1 for f in given)
    ):
        raise refused(config, "token_schedule", f"None or {layers} fractions in (0, 1], one per layer")
    if any(before < after for before, after in pairwise(given)):
        raise refused(config, "token_schedule", "fractions that do not rise from layer to layer")
    family = config.family
    reasons = {
        "attends by windows, distances or blocks, or has bottlenecks": family.counts_columns
        or family.block_sparse,
        "has config fixed_heads": config.fixed_heads is not None,
        "has config is_decoder": config.is_decoder,
    }
    for why, there in reasons.items():
        if there:
            raise ValueError(f"config token_schedule: expected None, as {config.model_type} {why}")


def _check_groups(config: Any) -> None:
    given, layers, family = config.layer_groups, config.num_hidden_layers, config.family
    if given is None:
        return
    if (
        not isinstance(given, (list, tuple))
        or len(given) != layers
        or any(type(group) is not int for group in given)
        or sorted({*given}) != list(range(len({*given})))
    ):
        raise refused(config, "layer_groups", f"None or {layers} numbers of groups, from 0 without gaps")
    own = [row for row in (config.fixed_heads or ()) if not isinstance(row, str)]
    reasons = {
        "shares its layers already": family.shared_layers,
        "has layers that differ": family.windows or family.block_sparse or family.global_tokens,
        "has layers of another kind": family.bottleneck or family.two_streams,
        "has config pruned_heads": bool(config.pruned_heads),
        "has config intermediate_sizes": config.intermediate_sizes is not None,
        "has config fixed_heads that differ": any(row != own[0] for row in own),
    }
    if why := next((why for why, there in reasons.items() if there), None):
        raise ValueError(f"config layer_groups: expected None, as {config.model_type} {why}")
