"""Checks of stored weights: all keys are there and none is unknown, right shapes and dtypes, finite values.

Errors name the file, the key and the likely cause.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fastbert.checkpoint.files import CONFIG, CheckpointError, listed, read_stamp
from fastbert.checkpoint.hub import read_config
from fastbert.checkpoint.names import Names, numbered
from fastbert.checkpoint.read import Stored

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_keys(
    names: Names, config: Any, files: list[Path], found: dict[str, Stored], strict: bool = True
) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Compare the keys of the files with the module's.

    Returns:
        (missing keys of heads, which may be fresh; stored keys that the module lacks; a reason -> the stored
        keys left out for it, which are training aids and, without `strict`, unknown keys).

    Raises:
        CheckpointError: any other difference.
    """
    expected = [key for key in names.state if key not in names.tied]
    missing = [key for key in expected if key not in found]
    extra = [key for key in found if key not in names.state]
    aids = [key for key in extra if names.is_training_aid(key)]
    unknown = [key for key in extra if not names.may_be_left_over(key) and key not in aids]
    unexpected = unknown if strict else []
    where = files[0] if len(files) == 1 else files[0].parent

    # A head or a pooler may be missing as a whole
    fresh = []
    parts: dict[str | None, list[str]] = {}
    for key in expected:
        parts.setdefault(names.part(key), []).append(key)
    for part, keys in parts.items():
        if part is not None and all(key in missing for key in keys):
            fresh += keys
    refused = [key for key in missing if key not in fresh]
    if refused or unexpected:
        problems = []
        if refused:
            problems.append(f"missing keys: {listed(refused)}")
        if unexpected:
            problems.append(f"unexpected keys: {listed(found[key].key for key in unexpected)}")
        why = _why(names, config, found)
        if refused and all(names.is_pooler(key) for key in refused):
            why = "; the file has no pooler: pass add_pooling_layer=False"
        elif unexpected and not refused:
            why += "; strict=False leaves them out"
        raise CheckpointError(f"{where}: {'; '.join(problems)}{why}")
    left_out = {"of the training alone": aids, "unknown": [] if strict else unknown}
    return fresh, [found[k].key for k in extra], {r: [found[k].key for k in ks] for r, ks in left_out.items()}


def _why(names: Names, config: Any, found: dict[str, Stored]) -> str:
    """The likely cause of missing or unexpected keys; "" if there is none."""
    scales = any(key.endswith(".scale") and _is_int8(found.get(key[:-5] + "weight")) for key in found)
    if scales and not names.int8:
        return "; the file holds 8-bit weights, but the config has no quantization_config of this package"
    if names.int8 and not scales:
        return "; config quantization_config says that the weights are 8-bit, but those of the file are not"
    count_key = "num_hidden_groups" if names.family.shared_layers else "num_hidden_layers"
    says, holds = getattr(config, count_key), numbered(names.family.layers, found)
    if config.layer_groups is not None:
        count_key, says = "layer_groups", len({*config.layer_groups})
    if holds and says != holds:
        return f"; config {names.family.spelt(count_key)} says {says}, the file has {holds}"
    if names.family.shared_layers:
        inner = numbered(names.family.group_layers, found)
        if inner and inner != config.inner_group_num:
            return f"; config inner_group_num says {config.inner_group_num}, the file has {inner}"
    segments = next((i for key, i in found.items() if key.endswith("token_type_embeddings.weight")), None)
    if segments is not None and not config.type_vocab_size:
        return f"; config type_vocab_size says 0, the file has {len(segments.tensor)}"
    first = {item.key.split(".")[0] for item in found.values()}
    if foreign := sorted(first & names.family.foreign_prefixes):
        return (
            f"; config model_type says {config.model_type!r}, but the file's keys begin with {foreign[0]!r}"
        )
    weight = names.family.lm_head.decoder + ".weight"
    if weight in names.state and weight not in names.tied and weight not in found:
        return f"; config tie_word_embeddings is false, so {weight} must be stored"
    return ""


def _is_int8(item: Stored | None) -> bool:
    return item is not None and item.tensor.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn)


def check_mathematics(config: Any, files: list[Path]) -> None:
    """Refuse a config.json from another save than the weights', if the weights name the config of their save.

    A config that agrees with the weights is accepted with any config.json. If config.json agrees with the
    weights, any config is accepted, because the caller has overridden keys.
    """
    for file in files:
        stamp = read_stamp(file) if file.suffix == ".safetensors" else None
        if stamp is None or not _differing(config, stamp.mathematics):
            continue
        try:
            stated = type(config).from_dict({"model_type": config.model_type, **read_config(file.parent)})
        # config.json is missing, or of another architecture
        except (CheckpointError, TypeError, ValueError):
            stated = config
        if differing := _differing(stated, stamp.mathematics):
            says = "; ".join(
                f"{stated.family.spelt(key)}: {CONFIG} says {ours!r}, the weights are saved with {theirs!r}"
                for key, (ours, theirs) in differing.items()
            )
            raise CheckpointError(
                f"{file.parent / CONFIG}: does not belong to {file.name}: {says}. If one of them was copied "
                "or edited, put it back; to change the mathematics, pass the key to from_pretrained and save"
            )


def _differing(config: Any, stored: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> (the config's value, the stored one) of the values that differ."""
    ours = config.mathematics()
    return {k: (ours[k], stored[k]) for k in ours if k in stored and ours[k] != stored[k]}


def check_shapes(
    names: Names, config: Any, found: dict[str, Stored], ignore_mismatched: bool
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Refuse tensors of another shape; or remove them from `found` and return them, as in `LoadReport`."""
    wrong, left_out, cut = [], [], 0
    for key, param in names.state.items():
        item, inside = found.get(key), f".{names.family.layers}." in f".{key}"
        if item is not None and item.tensor.is_nested:
            raise CheckpointError(f"{item}: is a nested tensor; expected one shape")
        if item is None or item.tensor.shape == param.shape:
            continue
        if ignore_mismatched and key not in names.int8:
            left_out.append((key, tuple(found.pop(key).tensor.shape), tuple(param.shape)))
            continue
        text = f"{item}: shape {tuple(item.tensor.shape)}, but the config makes it {tuple(param.shape)}"
        if item.tensor.dim() == param.dim():
            axis = next(
                i for i, (a, b) in enumerate(zip(item.tensor.shape, param.shape, strict=True)) if a != b
            )
            size_key = _size_key(names, key, axis)
            size = item.tensor.shape[axis]
            cut += inside and size < param.shape[axis]
            # A wrong hidden_size shows outside the layers too
            counts = not inside or size_key != "hidden_size"
            if counts and getattr(config, size_key, None) == param.shape[axis]:
                says = f"{names.family.spelt(size_key)} says {param.shape[axis]}"
                text += f" (config {says}, the file has {size})"
        wrong.append(text)
    if wrong:
        more = f" … and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        if cut == len(wrong):
            more += ". A pruned model needs its own config.json, with pruned_heads and intermediate_sizes"
        raise CheckpointError("; ".join(wrong[:5]) + more)
    return left_out


def _size_key(names: Names, key: str, axis: int) -> str:
    """The config key that sets the size of one axis of a parameter."""
    family, layer = names.family, names.family.layer
    hidden = "embedding_size" if family.projection and ".embeddings." in "." + key else "hidden_size"
    lm = family.lm_head
    decoders = (lm.decoder + ".weight", lm.decoder + ".bias", lm.bias)
    above = [path for path in (layer.intermediate, layer.gate) if path is not None]
    inner = tuple(f".{path}.{leaf}" for path in above for leaf in ("weight", "scale", "bias"))
    labels = ("classifier", "classifier.out_proj", "qa_outputs")
    labelled = tuple(f"{module}.{leaf}" for module in labels for leaf in ("weight", "bias"))
    projection = (f"{family.projection}.weight",) if family.projection else ()
    for suffixes, sizes in (
        (f"{family.word_table}.weight", ("vocab_size", hidden)),
        ("position_embeddings.weight", ("max_position_embeddings", hidden)),
        ("token_type_embeddings.weight", ("type_vocab_size", hidden)),
        ("relative_attention_bias.weight", ("relative_attention_num_buckets", "num_attention_heads")),
        (tuple(d for d in decoders if d), ("vocab_size", hidden)),
        (inner, ("intermediate_size", hidden)),
        (f".{layer.output}.weight", (hidden, "intermediate_size")),
        (labelled, ("num_labels", hidden)),
        (projection, ("hidden_size", "embedding_size")),
    ):
        if key.endswith(suffixes) and not key.endswith("pre_classifier.weight"):
            return sizes[axis]
    return hidden


def check_value(names: Names, key: str, item: Stored) -> None:
    """Refuse a tensor that holds no weights, is not finite, or is too large for the model's dtype."""
    tensor, dtype = item.tensor, names.state[key].dtype
    if key in names.int8:
        problem = names.int8[key].problem(key.rpartition(".")[2], tensor)
        if problem:
            raise CheckpointError(f"{item}: {problem}")
        return
    if tensor.dtype not in FLOATS or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
        raise CheckpointError(
            f"{item}: dtype {kind}; expected float32, float64, float16 or bfloat16 (no quantised weights)"
        )
    if tensor.numel() == 0:
        return
    # One pass without a copy; low and high are NaN if an element is
    low, high = (float(v) for v in torch.aminmax(tensor))
    if not (abs(low) < float("inf") and abs(high) < float("inf")):
        raise CheckpointError(f"{item}: holds {'NaN' if low != low else 'infinity'}; expected finite weights")
    if max(-low, high) > torch.finfo(dtype).max:
        raise CheckpointError(f"{item}: {max(-low, high):.3g} is too large for {dtype}, the model's dtype")
