"""`fastbert.accelerate` and `fastbert.restore`: models of transformers on our kernels, in place."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from fastbert.acceleration import interface, streams
from fastbert.acceleration.classes import Accelerated, Options, swap, swap_back
from fastbert.acceleration.layer import AcceleratedLayer
from fastbert.acceleration.layer_gaps import LayerState, check_int8, gap, int8_gap
from fastbert.acceleration.model import AcceleratedModel
from fastbert.acceleration.model_gaps import ModelState
from fastbert.acceleration.parts import OWN, encoders, is_other_spans, kind_of, other_models, own_models
from fastbert.acceleration.sentences import AcceleratedSentences
from fastbert.acceleration.sentences import fits as encodes
from fastbert.acceleration.spans import AcceleratedSpans
from fastbert.acceleration.watching import is_sharded
from fastbert.layers.quantized import MODES
from fastbert.models.families import FAMILIES
from fastbert.ops.checks import FLOATS
from fastbert.runtime import prepared
from fastbert.runtime.prepared import module_of

# Versions of transformers, (least, first that is too new)
TESTED = ("5", "6")
# Why outputs of masked tokens are read
_EXPANDS = "query_expansion reads the outputs of masked tokens"
_OTHER_SPANS = "a question-answering head with a forward of its own reads the outputs of masked tokens"

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

    Accepted are BERT, RoBERTa, XLM-R, CamemBERT, DistilBERT, ELECTRA, ALBERT, ERNIE, MPNet, DeBERTa-v2 and
    v3, MobileBERT, XLNet, Longformer, BigBird, ModernBERT, nomic, gte, jina-embeddings-v3 and EuroBERT
    models, bare or with any head, and objects that hold one (PeftModel, SentenceTransformer, CrossEncoder, a
    pipeline). Other transformers models get only fastbert's attention, if their architecture lets attention
    be chosen. Models run so in inference and training, on any device.

    Each text of BigBird attends by its own length, as in the stock model's batch of one; what
    `set_attention_type` sets holds for all texts. XLNet's stock layers run if the batch must keep its
    padding: with memories, `perm_mask` or a query stream, or if a head reads masked tokens.

    Outputs and gradients are the stock model's within rounding. Rows of masked tokens, which mean nothing in
    most stock models, are zeros. ColBERT models score such rows as parts of a query. ColBERT models of
    sentence-transformers, PyLate and Stanford are recognised and keep the padding; pass `unpad=False` for
    any other ColBERT model. A question-answering head scores masked tokens. It trains on padded batches like
    the stock model; in eval mode masked tokens get no probability, unless `unpad=False`. Batches of
    `SentenceTransformer.encode` are measured in tokens: at most `batch_size` times those of the longest text,
    on a CPU at most 1,024, and always at least one text.

    With `dtype="int8"` the linear layers of the encoder layers run on 8-bit weights, for inference on a CPU,
    as after `quantize("int8")` in fastbert's own models. The model keeps its parameters and their dtype, so
    `state_dict`, `save_pretrained`, copies and pickles hold the floating-point model. A weight that changes
    is rounded again. The 8-bit weights need extra memory: one byte per weight, up to three if a layer does
    not run in one call (autocast, gradients enabled). Embeddings, poolers and heads do not change.

    A layer that cannot run on 8 bits runs in floating point, because a linear layer has an unmerged adapter
    or was moved to a GPU, or because fastbert does not have the activation. A call that needs a gradient
    through an 8-bit layer raises RuntimeError, in eval mode too; call the model under `torch.no_grad()`.
    torch.compile does not compile an 8-bit encoder, and refuses it with `fullgraph=True`. torch.export
    exports the stock model.

    Weights may be written in place, in eval mode too, and through `parameter.data`; the next call uses the
    new values. No cheap check sees a write to single elements or rows that PyTorch does not make, such as
    through a NumPy array that was taken before. If a weight lies in shared memory or in NumPy's memory, the
    next call sees any write over a whole tensor or row; perhaps no call sees a write to single elements, even
    by PyTorch. If a weight lies in a mapped file, as after `from_pretrained` without a conversion, Linux
    reports the first write to each page, of any element; later writes to a page are seen as in NumPy's
    memory. After a write that no call sees call `fastbert.clear(model)`.

    Another call changes the options. `fastbert.restore` undoes `accelerate`; `fastbert.explain` lists which
    parts run fused, which do not, and why.

    Args:
        model: an nn.Module, or an object whose attribute `model` is one.
        dtype: floating-point dtype to convert the model to first; or "int8", see above. A later call without
            "int8" ends it.
        strict: whether to raise if a part cannot be accelerated, or cannot run on 8 bits as asked, now or in
            a later call. Also if only attention would be accelerated on a CPU, which gains nothing; and from
            a call that masks tokens other than the config's `pad_token_id`, whose outputs would be zeros.
        attention: whether to fuse self-attention, with its output layer.
        ffn: whether to fuse the feed-forward blocks.
        layer_norm: whether to fuse LayerNorm with the residual sum before it.
        unpad: whether to remove padding from a batch once per call. If False, all layers run on padded
            batches.

    Returns:
        `model`, the same object.

    Warns:
        RuntimeWarning: if nothing of the model can be accelerated, or the version of transformers was not
            tested; the model is then unchanged. With "int8", if a layer runs in floating point. If the config
            has a token_schedule, which does not apply.

    Raises:
        TypeError: `model` is no module and has none, or another argument is of the wrong type.
        ValueError: an unknown string as `dtype`. With `strict`: a part cannot be accelerated; the model is
            then unchanged. With "int8", strict or not: a layer's weight is not on a CPU or not finite (also
            from a later call), or `attention=False` or `ffn=False` is given.
        RuntimeError: with `strict`, for an untested version of transformers. From a later call of a strict
            model whose layer cannot run fused any more, naming the layer and the reason, or that masks tokens
            other than padding.
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
                check_int8(module, LayerState.of(module, model_type, config, name, options))
    elif dtype is not None:
        root.to(dtype)
    _swap(root, found, options, reading)
    if any(
        getattr(module.config, "token_schedule", None) for _, module, (_, kind), _ in found if kind == "model"
    ):
        warnings.warn(
            "fastbert.accelerate: models of transformers compute all tokens, whatever config token_schedule "
            "says; fastbert.AutoModel and fastbert.SentenceEncoder apply it",
            RuntimeWarning,
            stacklevel=2,
        )
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


def _swap(root: nn.Module, found: list[Any], options: Options, reading: dict[int, str]) -> None:
    """Give encoders, their layers, question-answering heads and SentenceTransformers accelerated classes."""
    for name, module, (model_type, kind), config in found:
        state = module.fastbert_state if isinstance(module, Accelerated) else None
        if state is not None:
            # Weights were derived for the old options
            if state.options.int8 is not options.int8:
                prepared.clear(module)
            state.options = options
        elif kind == "layer":
            state = LayerState.of(module, model_type, config, name, options)
            if FAMILIES[model_type].two_streams:
                streams.swap_layer(module, state)
            else:
                swap(module, AcceleratedLayer, state)
        else:
            swap(module, AcceleratedModel, ModelState.of(module, model_type, name, options))
        if kind == "model":
            module.fastbert_state.reads_masked = reading.get(id(module))
    for head in root.modules():
        for module in head.children():
            if (
                isinstance(module, AcceleratedModel)
                and FAMILIES[module.fastbert_state.model_type].two_streams
            ):
                module.fastbert_state.reads = streams.read_by(head)
    for head in [m for m in root.modules() if kind_of(m) == "spans"]:
        if not isinstance(head, Accelerated):
            swap(head, AcceleratedSpans, None)
        for module in head.children():
            if isinstance(module, AcceleratedModel) and module.fastbert_state is not None:
                module.fastbert_state.spans = True
    for module in [m for m in root.modules() if encodes(m) and not isinstance(m, Accelerated)]:
        if next(encoders(module), None) is not None:
            swap(module, AcceleratedSentences, None)


def restore(model: _Model) -> _Model:
    """Undo `accelerate`: the model gets its stock classes back and keeps its present weights.

    Args:
        model: the argument of `accelerate`, or an object that holds it.

    Returns:
        `model`, the same object.

    Raises:
        TypeError: `model` is no module and has none.
        RuntimeError: FSDP has wrapped the model after `accelerate`.
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
    """id(module) -> why the outputs of masked tokens are read, for all modules inside a reader.

    A reader expands queries by masked tokens (ColBERT of sentence-transformers, PyLate or Stanford), or is a
    subclass of a question-answering head with a forward of its own.
    """
    found: dict[int, str] = {}
    for module in root.modules():
        if _expands_queries(module):
            found.update((id(child), _EXPANDS) for child in module.modules())
        elif is_other_spans(module):
            found.update((id(child), _OTHER_SPANS) for child in module.modules())
    return found


def _expands_queries(module: nn.Module) -> bool:
    """Whether a module expands queries by tokens that it masks, and scores them."""
    expansion = getattr(module, "query_expansion", None)
    if isinstance(expansion, Mapping):
        return not expansion.get("attend")
    # In PyLate
    expands = getattr(module, "do_query_expansion", None)
    if expands is not None:
        return bool(expands) and not getattr(module, "attend_to_expansion_tokens", None)
    return any(cls.__module__.partition(".")[0] in ("colbert", "pylate") for cls in type(module).__mro__)


def _check_dtype(dtype: Any, options: Options) -> None:
    expected = f"a floating-point torch.dtype, {' or '.join(map(repr, MODES))} or None"
    if isinstance(dtype, str):
        if dtype not in MODES:
            raise ValueError(f"dtype: expected {expected}, got {dtype!r}")
        for name in ("attention", "ffn"):
            if not getattr(options, name):
                raise ValueError(f"{name}: expected True with dtype={dtype!r}, which needs all of a layer")
    elif dtype is not None and dtype not in FLOATS:
        raise TypeError(f"dtype: expected {expected}, got {dtype!r}")


def _warn_of_floats(found: list[Any]) -> None:
    """Warn if layers run in floating point though 8 bits were asked for, and name the first layer."""
    modules = [(name, module) for name, module, (_, kind), _ in found if kind == "layer"]
    reasons = [
        f"{name}: {reason}"
        for name, module in modules
        if (reason := gap(module, is_sharded(module)) or int8_gap(module)) is not None
    ]
    if reasons or not modules:
        what = f"{len(reasons)} of {len(modules)} layers run" if modules else "the model runs"
        why = reasons[0] if reasons else "no layer of a family that int8 knows"
        warnings.warn(
            f"fastbert.accelerate: {what} in floating point, not int8 ({why}); fastbert.explain lists them",
            RuntimeWarning,
            stacklevel=3,
        )


def _check(found: list[Any], others: list[Any], options: Options, reading: dict[int, str]) -> None:
    """With `strict`: raise ValueError if a part cannot be accelerated."""
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
        reason = gap(module, is_sharded(module), state)
        if reason is None and options.ffn and state.form.activation is None:
            reason = "fastbert does not have the activation"
        if reason is None and options.int8:
            reason = int8_gap(module, state)
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
