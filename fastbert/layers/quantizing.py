"""What `quantize` does to a model of this package, and what it writes into config.json.

The linear layers of every encoder layer are replaced by those of `quantized.py`, and the table of words on
request by that of `quantized_table.py`. A model that is refused is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.layers import quantized_table
from fastbert.layers.modules import attach, is_plain, part
from fastbert.layers.quantized import QUANTIZED, QuantizedLinear
from fastbert.layers.smoothing import Calibration, check_calibration, ranges, smoothing
from fastbert.runtime import prepared

# The entry of a quantised checkpoint in config.json. It has no `quant_method` on purpose. Without one
# transformers raises; an unknown one it skips with a warning, and loads the integers as weights. "weights"
# and "embeddings" are absent if they are floating-point.
CONFIG = {
    "format": "fastbert-int8",
    "weights": "int8, symmetric, one float32 scale per output channel",
    "activations": "8 bits, asymmetric, one range per token, dynamic",
}
ACTIVATIONS = {
    "dynamic": CONFIG["activations"],
    "static": "8 bits, asymmetric, one range per layer, static",
    "float": "floating point",
}
WEIGHTS = {
    "int8": CONFIG["weights"],
    "int4": "int4, symmetric, groups of 32 with a factor from 1 to 18, one float32 scale per output channel",
}
EMBEDDINGS = {
    "int8": "int8, symmetric, one float32 scale per row",
    "int4": "int4, symmetric, two per byte, one float32 scale per row",
}


def in_config(config: Any) -> bool:
    """Whether a config marks its checkpoint as one with weights quantised by this package."""
    entry = config.get("quantization_config")
    return (
        isinstance(entry, dict)
        and entry.get("format") == CONFIG["format"]
        and entry.get("weights") in (None, *WEIGHTS.values())
        and entry.get("embeddings") in (None, *EMBEDDINGS.values())
        and entry.get("activations") in (None, *ACTIVATIONS.values())
    )


def kinds_of(model: nn.Module) -> tuple[str | None, str | None]:
    """What `quantize` has made of a model: (weights, embeddings), each "int8", "int4" or None."""
    bits: dict[type, int] = {type(m): m.bits for m in model.modules() if isinstance(m, QUANTIZED)}
    weights, embeddings = (f"int{bits[kind]}" if kind in bits else None for kind in QUANTIZED)
    return weights, embeddings


def quantize(
    model: Any,
    weights: str | None = "int8",
    *,
    embeddings: str | None = None,
    activations: str = "dynamic",
    smooth: float | None = None,
    calibrate: Calibration | None = None,
) -> Any:
    """Quantise the encoder layers' linear layers, the table of words or both in place, for inference.

    The model is put in eval mode, and its remaining parameters are frozen: gradients of a part of the model
    would look like gradients of the whole. A part that is quantised so already is not changed.

    Args:
        model: a model of this package with plain linear layers. It may move to another device afterwards.
        weights: "int8"; "int4", which files store in 4 bits and which runs as int8; or None.
        embeddings: "int8", "int4" or None: the table of words, and a decoder that is tied to it.
        activations: how the linear layers round their inputs. "dynamic": each token to 8 bits by its own
            range. "static": all tokens to 8 bits by one range per layer, the least and the largest input of
            `calibrate`; what lies outside is clipped. "float": not at all; weights alone are integers.
        smooth: from 0 to 1, how much of the range of inputs moves into the weights (SmoothQuant's alpha, 0.5
            in the paper): outputs do not change but for rounding. None: nothing moves.
        calibrate: typical inputs for `smooth` and for "static", an iterable of dicts of the model's keyword
            arguments; or a function without arguments that runs the model on them.

    Returns:
        `model`.

    Raises:
        ValueError: an unknown value, or None for both; a model without values (on the meta device); a weight
            that is not finite; a part with other bits or activations already; `smooth` outside 0 to 1, with
            "float" activations, or without weights; `calibrate` missing, or without use.
        TypeError: a linear layer is no plain nn.Linear (LoRA, parametrized, hooked), or the table no plain
            nn.Embedding. The message names it.

    A model that is refused is not changed.
    """
    check_kinds(weights, embeddings, activations)
    if model.device.type == "meta":
        raise ValueError("model: on meta, where weights have no values: load its weights first")
    calibration = calibrated(model, weights, activations, smooth, calibrate)
    _replace(model, weights, embeddings, activations, calibration)
    return model


def calibrated(
    model: Any, weights: str | None, activations: str, smooth: float | None, calibrate: Calibration | None
) -> dict[str, dict[str, Tensor]]:
    """Name -> `smooth`, `input_range` of each linear layer, as far as they are wanted. See `quantize`."""
    check_calibration(activations, smooth, calibrate)
    if calibrate is None:
        return {}
    if weights is None:
        raise ValueError(f"smooth: expected None without weights, got {smooth!r}")
    found = list(each_linear(model))
    for _, _, module, name in found:
        check_plain(module, name)
    both = ranges(model, found, calibrate)
    factors = {} if smooth is None else smoothing(both, found, smooth)
    made: dict[str, dict[str, Tensor]] = {name: {"smooth": own} for name, own in factors.items()}
    if activations == "static":
        for name, (least, largest) in both.items():
            # 0 is in each range, and alone in that of a layer without heads
            least, largest = (F.pad(end * factors.get(name, 1.0), (0, 1)) for end in (least, largest))
            made.setdefault(name, {})["input_range"] = torch.stack((least.amin(), largest.amax()))
    return made


def check_kinds(weights: Any, embeddings: Any, activations: Any = "dynamic") -> None:
    """Raise ValueError unless `quantize` takes these arguments."""
    for name, value, known in (("weights", weights, WEIGHTS), ("embeddings", embeddings, EMBEDDINGS)):
        if value is not None and (not isinstance(value, str) or value not in known):
            raise ValueError(f"{name}: expected {', '.join(map(repr, known))} or None, got {value!r}")
    if weights is None and embeddings is None:
        raise ValueError("weights, embeddings: expected at least one, got None for both")
    if not isinstance(activations, str) or activations not in ACTIVATIONS:
        raise ValueError(f"activations: expected {', '.join(map(repr, ACTIVATIONS))}, got {activations!r}")
    if weights is None and activations != "dynamic":
        raise ValueError(f"activations: expected 'dynamic' without weights, got {activations!r}")


def prepare(model: Any, config: Any) -> None:
    """Put empty quantised parts into a model on the meta device, which then loads a quantised checkpoint.

    Args:
        config: the checkpoint's, which says what is quantised (`in_config`).
    """
    entry = config.get("quantization_config")
    weights, embeddings, activations = (
        next((kind for kind, text in known.items() if text == entry.get(name)), None)
        for name, known in (("weights", WEIGHTS), ("embeddings", EMBEDDINGS), ("activations", ACTIVATIONS))
    )
    _replace(model, weights, embeddings, activations or "dynamic", {})
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            empty = partial(torch.empty, dtype=torch.float32, device=module.weight.device)
            if entry.get("smooth"):
                module.smooth = empty(module.in_features)
            if activations == "static":
                module.input_range = empty(2)


def _replace(
    model: Any,
    weights: str | None,
    embeddings: str | None,
    activations: str,
    calibration: Mapping[str, dict[str, Tensor]],
) -> None:
    made = [] if weights is None else linears(model, weights, activations, calibration)
    table = None if embeddings is None else quantized_table.replacement(model, embeddings)
    for layer, path, module in made:
        attach(layer, path, module)
    if table is not None:
        quantized_table.put(model, table)
    prepared.clear(model)
    model.eval()
    model.requires_grad_(False)


def each_linear(model: Any) -> Iterator[tuple[nn.Module, str, Any, str]]:
    """(layer, path in the layer, linear layer, name in the model) of each linear layer that is quantised.

    Raises:
        TypeError: a layer has mathematics of its own.
    """
    names = {id(module): name for name, module in model.named_modules()}
    # A shared layer appears once
    for layer in {id(layer): layer for layer in model.base_model.layer_list()}.values():
        if not hasattr(layer, "form"):
            raise TypeError(f"{names[id(layer)]}: a {type(layer).__name__} has no int8 form")
        for path in layer.form.linears:
            yield layer, path, part(layer, path), f"{names[id(layer)]}.{path}"


def check_plain(module: nn.Module, name: str) -> None:
    """Raise TypeError unless the linear layer `name` is a plain nn.Linear."""
    if not is_plain(module, nn.Linear):
        raise TypeError(
            f"{name}: expected a plain nn.Linear, got {type(module).__name__}"
            f"{'' if type(module) is not nn.Linear else ' with hooks'}: merge adapters, and remove "
            "hooks and parametrizations, before quantising"
        )


def linears(
    model: Any,
    weights: str,
    activations: str = "dynamic",
    calibration: Mapping[str, dict[str, Tensor]] | None = None,
) -> list[tuple[nn.Module, str, QuantizedLinear]]:
    """(layer, path, what replaces the linear layer there) of all linear layers that are not quantised yet.

    Args:
        weights: "int8" or "int4".
        activations: one of `ACTIVATIONS`.
        calibration: what `calibrated` returned.

    Raises:
        TypeError, ValueError: as `quantize`.
    """
    bits, made = {"int8": 8, "int4": 4}[weights], []
    for layer, path, module, name in each_linear(model):
        if not isinstance(module, QuantizedLinear):
            check_plain(module, name)
            own = QuantizedLinear.from_linear(module, name, bits, **(calibration or {}).get(name, {}))
            own.activations = activations
            made.append((layer, path, own))
        elif module.bits != bits:
            raise ValueError(
                f"weights: {name} has {module.bits} bits already, got {weights!r}; load the floating-point "
                "checkpoint and quantise that"
            )
        elif module.activations != activations:
            raise ValueError(
                f"activations: {name} has {module.activations!r} already, got {activations!r}; load the "
                "floating-point checkpoint and quantise that"
            )
    return made
