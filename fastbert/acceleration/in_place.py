"""`fastbert.accelerate` and `fastbert.restore`: models of transformers on our kernels, in place."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from fastbert.acceleration import interface
from fastbert.acceleration import layer as layers
from fastbert.acceleration import model as models
from fastbert.acceleration.classes import Accelerated, Options, swap, swap_back
from fastbert.acceleration.layer import AcceleratedLayer, LayerState
from fastbert.acceleration.model import AcceleratedModel, AcceleratedSpans, ModelState
from fastbert.acceleration.parts import OWN, encoders, kind_of, other_models, own_models
from fastbert.acceleration.sentences import AcceleratedSentences
from fastbert.acceleration.sentences import fits as encodes
from fastbert.layers.quantized import MODES
from fastbert.runtime import prepared
from fastbert.runtime.prepared import module_of

TESTED = ("5", "6")  # transformers from the first to below the second

_Model = TypeVar("_Model")


def accelerate(
    model: _Model,
    *,
    dtype: torch.dtype | Literal["int8"] | None = None,
    strict: bool = False,
    attention: bool = True,
    ffn: bool = True,
    layer_norm: bool = True,
    unpad: bool = True,
) -> _Model:
    """Make a transformers or sentence-transformers model run on fastbert's kernels, in place.

    Accepted: BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT, ELECTRA, ALBERT, ERNIE and MPNet models, bare or
    with any head, and whatever holds them: PeftModel, SentenceTransformer, CrossEncoder, a pipeline. Other
    transformers models get fastbert's attention alone where their architecture lets one choose it. For
    inference and training, on any device. Outputs and gradients are the stock model's within rounding; rows
    of masked tokens, of no meaning in the stock model, are zeros. A question-answering head, which scores
    them, trains on padded batches as the stock model does; in eval mode masked tokens get no probability
    (`unpad=False` gives the stock model's). `SentenceTransformer.encode` takes its batches by tokens: at most
    as many as `batch_size` texts of the longest's length have, on a CPU at most 1,024 (and always a whole
    text).

    With `dtype="int8"` the linear layers of the encoder layers run on 8-bit weights, for inference on a CPU,
    as `quantize("int8")` makes them in fastbert's own models. The model keeps its parameters and their dtype:
    `state_dict`, `save_pretrained`, copies and pickles hold the floating-point model. A weight that changes
    is rounded anew. The 8-bit weights come on top: one byte per weight, up to three where a layer does not
    run in one call (autocast, gradients enabled). Embeddings, poolers and heads stay as they are.

    A layer runs in floating point where it cannot run on 8 bits: one of its linear layers has an unmerged
    adapter or was moved to a GPU, or the activation is none of fastbert's. A call that needs a gradient
    through an 8-bit layer raises RuntimeError, in eval mode too: call the model under `torch.no_grad()`.
    torch.compile leaves an 8-bit encoder as it is, and refuses it with `fullgraph=True`. An exported model is
    the stock one.

    Weights may be written in place, in eval too, and through `parameter.data`: the next call has them. What
    no cheap check sees is a write that PyTorch does not make, of single elements or rows, through a NumPy
    array that was taken before, say. Where a weight lies in a mapped file (as `from_pretrained` leaves those
    that it need not convert), in shared memory or in NumPy's, PyTorch's own writes are seen like that too:
    whole tensors by the next call, rows by one of the next 64, single elements perhaps never. After
    such a write call `fastbert.clear(model)`.

    A second call changes the options. `fastbert.restore` gives the stock model back; `fastbert.explain` says
    what runs fused, and what does not and why.

    Args:
        model: the model; an nn.Module, or an object whose `model` is one.
        dtype: convert the model to this floating-point dtype first; or "int8", see above. A later call
            without "int8" ends it.
        strict: raise where a part would not be accelerated, or not run on 8 bits though asked to, here or in
            a later call. Also where attention alone would be, on a CPU: that gains nothing.
        attention: fuse self-attention, its output layer included.
        ffn: fuse the feed-forward blocks.
        layer_norm: fuse LayerNorm with the residual sum before it.
        unpad: take padding out of a batch once a call. Else all layers run on padded batches.

    Returns:
        `model`, the same object.

    Warns:
        RuntimeWarning: where nothing of the model can be accelerated, or transformers is of a version that
            was not tested; the model is then untouched. With "int8", where a layer runs in floating point.

    Raises:
        TypeError: `model` is no module and has none, or another argument is of the wrong type.
        ValueError: with `strict`, where a part cannot be accelerated; nothing has changed then. From a later
            call of the model, then RuntimeError, naming the layer and the reason. With "int8", strict or not:
            a layer's weight is elsewhere than on a CPU, or not finite (from a later call too), or
            `attention=False` or `ffn=False` is given. Another string as `dtype`.
        RuntimeError: with `strict`, for an untested version of transformers.
    """
    root = module_of(model)
    options = Options(strict, attention, ffn, layer_norm, unpad, int8=isinstance(dtype, str))
    for name, value in vars(options).items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r}")
    _check_dtype(dtype, options)
    untested = _untested_version()
    if untested is not None:
        if strict:
            raise RuntimeError(f"model: {untested}")
        warnings.warn(
            f"fastbert.accelerate: {untested}; the model is untouched", RuntimeWarning, stacklevel=2
        )
        return model
    found = list(encoders(root))
    others = list(other_models(root))
    if not found and not others and own_models(root):
        words = f"{type(model).__name__} is {OWN}"
        if strict:
            raise ValueError(f"model: {words}; accelerate takes models of transformers (strict=True)")
        warnings.warn(f"fastbert.accelerate: {words}; the model is untouched", RuntimeWarning, stacklevel=2)
        return model
    reading = _reading_masked(root)
    if strict:
        _check(found, others if attention else [], options, reading)
    if options.int8:
        for name, module, (model_type, kind), config in found:
            if kind == "layer":
                layers.check_int8(module, LayerState.of(module, model_type, config, name, options))
    elif dtype is not None:
        root.to(dtype)
    for name, module, (model_type, kind), config in found:
        if isinstance(module, Accelerated) and module.fastbert_state is not None:
            if module.fastbert_state.options.int8 is not options.int8:
                prepared.clear(module)  # of what no longer serves
            module.fastbert_state.options = options
        elif kind == "layer":
            swap(module, AcceleratedLayer, LayerState.of(module, model_type, config, name, options))
        else:
            swap(module, AcceleratedModel, ModelState.of(module, model_type, name, options))
        if kind == "model":
            module.fastbert_state.reads_masked = reading.get(id(module))
    for head in [m for m in root.modules() if kind_of(m) == "spans"]:
        if not isinstance(head, Accelerated):
            swap(head, AcceleratedSpans, None)
        for module in head.children():
            if isinstance(module, AcceleratedModel) and module.fastbert_state is not None:
                module.fastbert_state.spans = True
    for module in [m for m in root.modules() if encodes(m) and not isinstance(m, Accelerated)]:
        if next(encoders(module), None) is not None:
            swap(module, AcceleratedSentences, None)
    applied = 0
    for _, module in others:
        if not attention:
            interface.undo(module)
        elif interface.allows(module) is None:
            interface.apply(module, strict=strict)
            applied += 1
    if not found and not applied:
        why = "; ".join(
            f"{type(m).__name__}: {interface.allows(m) if attention else 'attention=False'}"
            for _, m in others
        )
        warnings.warn(
            f"fastbert.accelerate: nothing of {type(model).__name__} can be accelerated"
            f"{f' ({why})' if why else ''}",
            RuntimeWarning,
            stacklevel=2,
        )
    elif options.int8:
        _warn_of_floats(found)
    return model


def restore(model: _Model) -> _Model:
    """Undo `accelerate`: the stock classes again, with whatever weights the model now has.

    Args:
        model: what was given to `accelerate`, or anything that holds it.

    Returns:
        `model`, the same object.

    Raises:
        TypeError: `model` is no module and has none.
        RuntimeError: FSDP has wrapped the model since.
    """
    root = module_of(model)
    prepared.clear(root)
    for module in root.modules():
        if isinstance(module, Accelerated):
            swap_back(module)
    for _, module in other_models(root):
        interface.undo(module)
    return model


def _untested_version() -> str | None:
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    version = transformers.__version__
    if TESTED[0] <= version.split(".")[0] < TESTED[1]:
        return None
    return f"transformers {version} is outside the tested range, >= {TESTED[0]}, < {TESTED[1]}"


def _reading_masked(root: nn.Module) -> dict[int, str]:
    """Why the outputs of masked tokens are read, by the ids of the modules inside whoever reads them: a
    sentence-transformers module that expands queries by masked tokens (ColBERT's), or a class made from a
    question-answering head, under a forward of its own.
    """
    found: dict[int, str] = {}
    for module in root.modules():
        expansion = getattr(module, "query_expansion", None)
        if isinstance(expansion, Mapping) and not expansion.get("attend"):
            found.update((id(child), models.EXPANDS) for child in module.modules())
        elif models.is_other_spans(module):
            found.update((id(child), models.OTHER_SPANS) for child in module.modules())
    return found


def _check_dtype(dtype: Any, options: Options) -> None:
    expected = f"a floating-point torch.dtype, {' or '.join(map(repr, MODES))} or None"
    if isinstance(dtype, str):
        if dtype not in MODES:
            raise ValueError(f"dtype: expected {expected}, got {dtype!r}")
        for name in ("attention", "ffn"):
            if not getattr(options, name):
                raise ValueError(f"{name}: expected True with dtype={dtype!r}, which needs all of a layer")
    elif dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected {expected}, got {dtype!r}")


def _warn_of_floats(found: list) -> None:
    """Warn where layers run in floating point though 8 bits were asked for, naming the first."""
    modules = [(name, module) for name, module, (_, kind), _ in found if kind == "layer"]
    reasons = [
        f"{name}: {reason}"
        for name, module in modules
        if (reason := layers.gap(module, layers.is_sharded(module)) or layers.int8_gap(module)) is not None
    ]
    if reasons or not modules:
        what = f"{len(reasons)} of {len(modules)} layers run" if modules else "the model runs"
        why = reasons[0] if reasons else "no layer of a family that int8 knows"
        warnings.warn(
            f"fastbert.accelerate: {what} in floating point, not int8 ({why}); fastbert.explain lists them",
            RuntimeWarning,
            stacklevel=3,
        )


def _check(found: list, others: list, options: Options, reading: dict[int, str]) -> None:
    """With `strict`: raise for what cannot be accelerated."""
    reasons = []
    for name, module, (model_type, kind), config in found:
        if kind == "model":
            state = ModelState.of(module, model_type, name, options)
            if options.unpad and state.reason is not None:
                reasons.append(f"{name or 'model'}: {state.reason}")
            if options.unpad and id(module) in reading:
                reasons.append(f"{name or 'model'}: {reading[id(module)]}")
            continue
        state = LayerState.of(module, model_type, config, name, options)
        reason = layers.gap(module, layers.is_sharded(module), state)
        if reason is None and options.ffn and state.form.activation is None:
            reason = "the activation is none of fastbert's"
        if reason is None and options.int8:
            reason = layers.int8_gap(module, state)
        if reason is not None:
            reasons.append(f"{name}: {reason}")
    for name, module in others:
        reason = interface.allows(module)
        if reason is None and options.int8:
            reason = "its layers are of no family that int8 knows"
        if reason is None and interface.on_cpu(module):
            reason = "attention alone would be fastbert's, which gains nothing on a CPU"
        if reason is not None:
            reasons.append(f"{name or type(module).__name__}: {reason}")
    if not found and not others:
        reasons.append("there is no transformers model in it")
    if reasons:
        raise ValueError(f"model: cannot be accelerated (strict=True): {'; '.join(reasons)}")
