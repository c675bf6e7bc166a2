"""Compile Triton kernels for GPUs that are not here, and read what the machine code needs.

The launchers of `kernels/<op>.py` run on meta tensors with a recorder in the place of `launch`. Each recorded
launch is compiled. Triton's own `cuobjdump` reads registers, stack (spills), shared memory and moves of tiles
from the cubin. Triton compiles only with its interpreter off, so tests run this as a process:

    python tests/support/triton_compile.py layer_norm [--full]      one JSON object per line
    python tests/support/triton_compile.py linear --tuning [--full] what bench/tune.py may time
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, product
from unittest import mock

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fastbert.ops.activation import ACTIVATIONS
from fastbert.ops.attention import AttentionInputs
from fastbert.ops.attention_inputs import AttentionNeeds, Window
from fastbert.ops.attention_received import AttentionReceivedInputs
from fastbert.ops.attention_relative import RelativeScores
from fastbert.ops.first_attention import FirstAttentionInputs
from fastbert.ops.layer_norm import KINDS, LayerNormInputs, LayerNormNeeds, LayerNormSaved
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved
from fastbert.ops.linear_int8 import LinearInt8Inputs
from fastbert.ops.linear_norm import ARRIVALS, LinearNormInputs
from fastbert.ops.pooling import MODES
from tests.support.launchers import embedding_bwd, embedding_fwd

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes that a block may use
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64
TOKENS = 16384  # of most jobs: 32 sequences of 512
# (name, architecture, calls that launch)
Jobs = Iterator[tuple]


def title(*parts: object) -> str:
    """The name of a job: its parts, dtypes without their module."""
    return "-".join(str(part).removeprefix("torch.") for part in parts)


def by(*sizes: int) -> str:
    return "x".join(map(str, sizes))


def empty(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """A function of a shape that makes a meta tensor, of `dtype` unless another one is given."""

    def of(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return of


def of_kernels(op: str):
    return importlib.import_module(f"fastbert.kernels.{op}")


# --- calls that launch --------------------------------------------------------------------------------------


def call_norm(kernels, dtype, hidden: int, name: str) -> None:
    """Launch a norm and its backward.

    Args:
        name: a kind of norm but LayerNorm, with the gradient of the sum; or LayerNorm, "plain", without the
            optional inputs, and backward for dx alone and for the sums alone; "all"; "mixed", of half
            precision beside a residual in float32, as in training under autocast, where backward takes the
            gradients of all outputs.
    """
    kind, t = name if name in KINDS else "layer_norm", empty(FP32)
    mixed, plain, usual = name == "mixed", name == "plain", kind == "layer_norm"
    x, weight, rstd = t(TOKENS, hidden, dtype=dtype), t(hidden), t(TOKENS)
    wide = t(TOKENS, hidden) if mixed else x
    dropout = (0.0, None, 0) if plain else (0.1, t(1, dtype=I64), 3)
    optional = (None, None) if plain else (wide, weight)
    bias, mean = (weight, rstd) if usual else (None, t(0))
    inputs = LayerNormInputs(x, weight, bias, *optional, 1e-12, *dropout, kind, not usual)
    kernels.layer_norm_fwd(inputs, not plain, mixed)
    saved = LayerNormSaved(wide, weight, mean, rstd, *dropout, kind)
    more = (x, wide) if mixed else () if usual else (None, x)
    for dx in (True, False) if plain else (True,):
        needs = LayerNormNeeds(dx, *[not (plain and dx)] * 3, *[dtype] * mixed)
        kernels.layer_norm_bwd(wide, saved, needs, *more)


def call_layer_norm(config, dtype, rows: int, hidden: int, dropout_p: float, backward: bool) -> None:
    """Launch LayerNorm in this config, with residual, bias and all that training saves or asks for."""
    kernels, t = of_kernels("layer_norm"), empty(FP32)
    x, weight, rstd = t(rows, hidden, dtype=dtype), t(hidden), t(rows)
    seed = t(1, dtype=I64) if dropout_p else None
    if backward:
        saved = LayerNormSaved(x, weight, rstd, rstd, dropout_p, seed, 3)
        kernels.layer_norm_bwd_with(config, x, saved, LayerNormNeeds(True, True, True, True))
    else:
        inputs = LayerNormInputs(x, weight, weight, x, weight, 1e-12, dropout_p, seed, 3)
        kernels.layer_norm_fwd_with(config, inputs, True)


def attention_inputs(
    dtype,
    headdim: int,
    total: int = TOKENS,
    nheads: int = 12,
    batch: int = 32,
    max_seqlen: int = 512,
    scale: float = 0.125,
    bias: tuple | None = None,
    dropout_p: float = 0.0,
    causal: bool = False,
    gate: bool = False,
    window: tuple[int, int] = (-1, -1),
    kv_heads: int | None = None,
) -> tuple[AttentionInputs, torch.Tensor]:
    """Attention's inputs and a table of its places; `bias`: its shape."""
    from fastbert.kernels import attention_slots

    t = empty(dtype)
    heads = nheads, kv_heads or nheads, kv_heads or nheads
    inputs = AttentionInputs(
        *t(total, sum(heads), headdim).split(heads, 1),
        t(batch + 1, dtype=I32),
        max_seqlen,
        scale,
        Window(*window)._replace(**{"right": 0} if causal else {}),
        None if bias is None else t(*bias),
        t(nheads) if gate else None,
        dropout_p,
        t(1, dtype=I64) if dropout_p else None,
        3,
    )
    n_slots = attention_slots.sections(total, batch, max_seqlen)[-1]
    return inputs, t(n_slots, attention_slots.FIELDS, dtype=I32)


def relative_scores(inputs: AttentionInputs, which: str) -> RelativeScores | None:
    """Scores of distances: of queries, keys, distances alone ("q", "k", "b"), by positions ("p")."""
    t, (total, nheads, _), size = empty(inputs.q.dtype), inputs.q.shape, inputs.max_seqlen
    if not which:
        return None
    return RelativeScores(
        t(2 * size + 1, dtype=I32),
        *(t(nheads, total, 512).transpose(0, 1) if letter in which else None for letter in "qk"),
        t(nheads, 512) if "b" in which else None,
        t(inputs.cu_seqlens.shape[0] - 1, size, dtype=I64) if "p" in which else None,
    )


def call_attention(
    config, *sizes, save_bits: bool = False, probs: bool = False, relative: str = "", **options
) -> None:
    inputs, places = attention_inputs(*sizes, **options)
    more = probs, save_bits, places, relative_scores(inputs, relative)
    of_kernels("attention").attention_fwd_with(config, inputs, *more)


def call_attention_bwd(configs, *sizes, saved: bool = False, relative: str = "", **options) -> None:
    inputs, places = attention_inputs(*sizes, **options)
    total, nheads, _ = inputs.q.shape
    t = empty(inputs.q.dtype)
    out, lse = t(*inputs.q.shape), t(nheads, total, dtype=FP32)
    keep_bits = t(nheads, total, inputs.max_seqlen // 32, dtype=I32) if saved else None
    need = AttentionNeeds(True, True, True, inputs.bias is not None, inputs.gate is not None)
    kernels = of_kernels("attention_backward")
    more = places, relative_scores(inputs, relative), (bool(relative),)
    kernels.attention_bwd_with(configs, out, inputs, out, lse, keep_bits, need, *more)


def call_linear(
    config,
    dtype,
    rows: int,
    in_features: int,
    out_features: int,
    bias: bool = False,
    activation: str | None = None,
    residual: bool = False,
    save: bool = False,
) -> None:
    t = empty(dtype)
    x, weight = t(rows, in_features), t(out_features, in_features)
    extras = t(out_features) if bias else None, activation, t(rows, out_features) if residual else None
    of_kernels("linear").linear_fwd_with(config, LinearInputs(x, weight, *extras), save)


def call_linear_bwd(config, dtype, rows: int, out_features: int, activation: str | None) -> None:
    dy = empty(dtype)(rows, out_features)
    of_kernels("linear_backward").activation_bwd_with(config, dy, dy, activation, True, True)


def call_feed_forward(
    arch: int, config, dtype, rows: int, out: int, inner: int, activation: str, sums: bool
) -> None:
    kernels, t = of_kernels("feed_forward"), empty(dtype)
    by_product = kernels.sums_by_product(config, dtype, divmod(arch, 10))
    tensors = t(rows, out), t(out, inner), t(rows, inner)
    kernels.inner_gradient_with(config, *tensors, activation, sums, by_product)


def call_linear_norm(config, dtype, rows: int, in_features: int, out_features: int, one_launch: bool) -> None:
    t = empty(dtype)
    inputs = LinearNormInputs(
        t(rows, in_features),
        t(out_features, in_features),
        t(out_features),
        t(rows, out_features),
        t(out_features, dtype=FP32),
        t(out_features, dtype=FP32),
        1e-12,
        t(ARRIVALS, dtype=I32) if one_launch else None,
    )
    of_kernels("linear_norm").linear_norm_fwd_with(config, inputs)


def call_linear_int8(kernels, arch: int, dtype, rows: int, size: tuple[int, int], gated, activation) -> None:
    t, (depth, out) = empty(FP32), size
    given = t(rows, depth, dtype=dtype), t(out, depth, dtype=torch.int8), t(out), t(out, dtype=dtype)
    device = kernels.tuning.Device("", divmod(arch, 10), 100)
    with mock.patch.object(kernels.tuning, "device_of", return_value=device):
        panels = t(4 * out, dtype=torch.uint8)
        kernels.linear_int8_fwd(LinearInt8Inputs(*given, activation, panels, gated, t(depth), t(2)))


def call_embedding(kernels, dtype, hidden: int, everything: bool) -> None:
    """Launch the embedding and its backward: with all tables and dropout, or with neither."""
    t = empty(dtype)
    ids, seed = t(TOKENS, dtype=I64), t(1, dtype=I64)
    norm = (t(hidden, dtype=FP32),) * 2
    saved = t(TOKENS, hidden), t(TOKENS, hidden), norm[0], *[t(TOKENS, dtype=FP32)] * 2
    if everything:
        tables = ids, t(512, hidden), ids, t(2, hidden)
        embedding_fwd(kernels, ids, None, t(30522, hidden), *tables, *norm, 1e-12, 0.1, seed, 3, True)
        embedding_bwd(kernels, *saved, ids, ids, ids, 30522, 512, 2, 0, 0.1, seed, 3, True, True)
    else:
        none = (None,) * 5
        embedding_fwd(kernels, None, t(TOKENS, hidden), *none, *norm, 1e-12, 0.0, None, 0, False)
        embedding_bwd(kernels, *saved, None, None, None, 0, 0, 0, -1, 0.0, None, 0, True, False)


def call_first_attention(
    kernels, arch: int, dtype, width: int, head_dim: int, batch: int, longest: int
) -> None:
    """Launch attention of first tokens; with bias and gate where there is one sequence."""
    t, nheads, extras = empty(dtype), width // head_dim, batch == 1
    device = kernels.tuning.Device("", divmod(arch, 10), 132)
    config = kernels.config_for(batch, batch * longest, nheads, width, longest, device)
    inputs = FirstAttentionInputs(
        t(batch * longest, width),
        t(batch, nheads, head_dim),
        t(width, width),
        t(width, width),
        t(width),
        t(batch + 1, dtype=I32),
        0.125,
        t(batch, 1, 1, longest, dtype=FP32) if extras else None,
        t(nheads, dtype=FP32) if extras else None,
        longest,
    )
    kernels.first_attention_fwd_with(config, inputs)


def call_cross_entropy(kernels, dtype, classes: int, smoothing: float) -> None:
    logits, labels = empty(dtype)(2500, classes), empty(I64)(2500)
    loss, lse, count = kernels.cross_entropy_fwd(logits, labels, -100, smoothing)
    kernels.cross_entropy_bwd(loss, logits, labels, lse, count, -100, smoothing)


def call_pooling(kernels, dtype, width: int, mode: str) -> None:
    hidden, ends = empty(dtype)(TOKENS, width), empty(I32)(65)
    y = kernels.pooling_fwd(hidden, ends, mode)
    kernels.pooling_bwd(y, hidden, y, ends, mode)


# --- jobs ---------------------------------------------------------------------------------------------------


def layer_norm_jobs(kernels, full: bool) -> Jobs:
    """Every distinct config, with and without the optional inputs, and half precision beside float32.

    By default 768 columns in bfloat16; on sm_90 also the widest rows, and the other dtypes. `full`: all.
    """
    widths = {}
    for hidden in (16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 12000):
        configs = kernels.heuristic(hidden), kernels.bwd_heuristic(hidden)
        limits = kernels.FWD_ONE_BLOCK, kernels.BWD_ONE_BLOCK
        blocks = tuple((n, -(-hidden // n)) for n in (kernels.columns(hidden, limit) for limit in limits))
        widths.setdefault((configs, blocks), hidden)
    widths = sorted({*widths.values(), 768, 1024})
    names = ("mixed", "all", "plain", *(kind for kind in KINDS if kind != "layer_norm"))
    for arch, dtype, hidden, name in product(SHARED_LIMIT, (FP32, BF16, FP16), widths, names):
        default = hidden == 768 and dtype == BF16
        if arch == 90 and name != "mixed":
            default = hidden == 768
        default |= arch == 90 and hidden == 12000 and dtype == BF16
        default &= arch != 90 or name != "plain"
        if (full and (name, dtype) != ("mixed", FP32)) or default:
            yield title(dtype, hidden, name), arch, partial(call_norm, kernels, dtype, hidden, name)


PLAIN = {
    "plain": {},
    "causal": {"causal": True},
    "negative-scale": {"scale": -0.1},
    "gate": {"gate": True},
    "window": {"window": (64, 64)},
    "wide-window": {"window": (256, 200), "kv_heads": 4},
    "shared": {"kv_heads": 4, "gate": True},
}
LOCAL = {"window": (64, 64), "kv_heads": 4, "gate": True}
DRAWN, MASK, MORE = {"dropout_p": 0.1}, {"bias": (32, 12, 512, 512)}, {"causal": True, "gate": True}
KEYS, BIAS = {"bias": (32, 1, 1, 512)}, {"bias": (1, 12, 512, 512)}
HEADDIMS = 64, 128, 16, 32, 80


def attention_jobs(kernels, full: bool) -> Jobs:
    """Configs that the tuner may choose, with various options.

    By default head dimension 64, the highest tiles of the heuristic, plain and with everything; `full`: all.
    """
    saved = DRAWN | {"save_bits": True}
    dropout = {
        "drawn": DRAWN,
        "saved": saved,
        "saved-causal": saved | MORE,
        "saved-negative-scale": saved | {"scale": -0.1},
        "saved-window": saved | LOCAL,
    }
    extras = {
        "saved-keys": saved | KEYS,
        "all-but-probs": saved | MASK | MORE,
        "keys": KEYS,
        "bias": BIAS,
        "probs": {"probs": True},
        "all": saved | MASK | MORE | {"probs": True},
        "all-window": saved | MASK | LOCAL | {"probs": True},
    }
    relative = {
        "relative": {"relative": "qk"},
        "relative-placed": {"relative": "qkbp", "gate": True},
        "relative-saved": saved | {"relative": "qkb", "gate": True},
    }
    most = {name: saved | MASK | {"relative": "qkbp", "probs": True} for name in ("most", "most-window")}
    most["most"] |= MORE
    most["most-window"] |= LOCAL
    kinds = {"": PLAIN, "dropout": dropout, "extras": extras, "relative": relative, "most": most}
    for arch, dtype, headdim, (kind, options) in product(
        SHARED_LIMIT, (BF16, FP32, FP16), HEADDIMS, kinds.items()
    ):
        configs = kernels.candidates(headdim, dtype, kind, divmod(arch, 10))
        for config, name in product(configs, options):
            usual = ("plain", "window", "saved", "all", "relative", "most")
            wanted = headdim == 64 and config == configs[0] and name in usual
            if full:
                wanted = wanted or dtype != FP16
            else:
                wanted &= dtype == BF16 or (dtype == FP32 and arch == 90 and name == "all")
            if wanted:
                tiles = by(config.block_m, config.block_n, config.num_warps, config.num_stages)
                given = dict(options[name])
                if dtype == FP32:  # fastbert.ops.dropout.SAVED_ON
                    given.pop("save_bits", None)
                call = partial(call_attention, config, dtype, headdim, **given)
                yield title(dtype, headdim, tiles, name), arch, call


def attention_backward_jobs(kernels, full: bool) -> Jobs:
    """The configs of the ladder, with various options.

    By default head dimension 64 in bfloat16, the highest tiles. `full` adds low tiles, other dtypes and head
    dimensions, and each option by itself where BERT has it.
    """
    from_bits = DRAWN | {"saved": True}
    extras = {
        "keys": KEYS,
        "bias": BIAS,
        "rows": {"bias": (32, 12, 512, 1)},
        "drawn": DRAWN,
        "all": from_bits | MASK | MORE,
        "all-drawn": DRAWN | MASK | MORE,
        "all-window": from_bits | MASK | LOCAL,
        "all-drawn-window": DRAWN | MASK | LOCAL,
        "relative": {"relative": "qk"},
        "relative-all": from_bits | MASK | MORE | {"relative": "qkb"},
        "relative-window": from_bits | MASK | LOCAL | {"relative": "qkb"},
        "relative-drawn": DRAWN | MASK | LOCAL | {"relative": "qkb"},
        "relative-placed": {"relative": "qkp"},
        "relative-placed-all": from_bits | MASK | MORE | {"relative": "qkbp"},
        "relative-placed-drawn": DRAWN | MASK | LOCAL | {"relative": "qkbp"},
    }
    saved = {
        "saved": from_bits,
        "saved-all": from_bits | MORE | {"scale": -0.1},
        "saved-causal": from_bits | {"causal": True},
        "saved-window": from_bits | LOCAL,
    }
    for arch, dtype, headdim, options in product(
        SHARED_LIMIT, (BF16, FP32, FP16), HEADDIMS, (PLAIN, extras, saved)
    ):
        ladder = kernels.ladder(headdim, dtype, options is extras, options is saved, divmod(arch, 10))
        for configs, name in product(ladder, options):
            high = configs == ladder[0]
            scores = "relative" in options[name]
            if dtype == FP32 and "saved" in options[name]:
                wanted = False  # fastbert.ops.dropout.SAVED_ON: never
            elif scores and headdim > kernels.MAX_RELATIVE_HEADDIM:
                wanted = False
            elif full:
                combined = name in ("plain", "window", "all", "all-drawn", "saved-all", "saved-window")
                combined |= scores
                wanted = combined and (dtype != FP16 or (headdim == 64 and high))
                wanted = wanted or (headdim in (32, 64) and dtype == BF16 and high)
            else:
                wanted = headdim == 64 and dtype == BF16 and high
                wanted &= name in (
                    "saved",
                    "window",
                    "relative",
                    "relative-placed-drawn",
                    *(("all", "relative-all") if arch == 90 else ()),
                )
            if wanted:
                if scores or (options is extras and "window" in options[name]):
                    configs = kernels.lowered(configs, "p" in options[name].get("relative", ""))
                call = partial(call_attention_bwd, configs, dtype, headdim, **options[name])
                yield title(dtype, headdim, "high" if high else "low", name), arch, call


def attention_places_jobs(kernels, full: bool) -> Jobs:
    """The table of places, with sequences ranked and in order."""
    for arch, batch in product(SHARED_LIMIT, (32, kernels.RANKED + 1)):
        yield title(batch), arch, partial(kernels.attention_places, empty(I32)(batch + 1), TOKENS, 512)


def attention_received_jobs(kernels, full: bool) -> Jobs:
    """The configs of the ladder; by default bfloat16 and float32, head dimension 64; `full`: all."""
    for arch, dtype, headdim in product(SHARED_LIMIT, (BF16, FP32, FP16), HEADDIMS):
        if full or (dtype != FP16 and headdim == 64):
            q, _, k = empty(dtype)(TOKENS, 3, 12, headdim).unbind(1)
            lse, ends = empty(FP32)(12, TOKENS), empty(I32)(33)
            inputs = AttentionReceivedInputs(q, k, ends, 512, lse, 0.125)
            for config in kernels.ladder(headdim, dtype):
                name = title(dtype, headdim, by(*config))
                yield name, arch, partial(kernels.attention_received_with, config, inputs)


def attention_relative_jobs(kernels, full: bool) -> Jobs:
    """The gradients of all scores of distances, with positions and without; `full`: few columns as well."""
    for arch, columns, placed in product(SHARED_LIMIT, (512, 21, 1) if full else (512,), (False, True)):
        rows, distances = empty(FP32)(TOKENS, 12, columns), empty(I32)(1025)
        positions = empty(I64)(32, 512) if placed else None
        relative = RelativeScores(distances, rows, rows, empty(FP32)(12, columns), positions)
        ds, ends = empty(FP32)(32, 12, 512, 512), empty(I32)(33)
        name = title(columns, *("placed",) * placed)
        yield name, arch, partial(kernels.relative_bwd, ds, relative, (True,) * 3, ends, TOKENS)


def linear_backward_jobs(kernels, full: bool) -> Jobs:
    """By default GELU in bfloat16 at 3072 columns; `full`: all."""
    activations = *ACTIVATIONS, None
    for arch, dtype, out, activation in product(
        SHARED_LIMIT, (BF16, FP16, FP32), (17, 768, 3072), activations
    ):
        if full or (dtype == BF16 and out == 3072 and activation == "gelu"):
            dy = empty(dtype)(TOKENS, out)
            args = dy, LinearSaved(dy[:, :768], dy[:768].t(), dy, activation), LinearNeeds()
            yield title(dtype, out, activation), arch, partial(kernels.linear_bwd, *args)


def linear_jobs(kernels, full: bool) -> Jobs:
    """The configs of the heuristic.

    By default the largest tiles; on sm_90 with all that an epilogue can do, by TMA and by pointers.
    """
    gelu = {"bias": True, "activation": "gelu"}
    uses = {
        "bare": {},
        "gelu": gelu,
        "saved": gelu | {"save": True},
        "residual": {"residual": True},
        "all": gelu | {"residual": True, "save": True},
    }
    for arch, dtype, aligned in product(SHARED_LIMIT, (BF16, FP16, FP32), (True, False)):
        ladder = kernels.ladder(dtype, aligned, divmod(arch, 10))
        for config, options in product(ladder, uses):
            usual = dtype == BF16 and aligned and options == "gelu"
            if arch == 90:
                usual = (dtype == BF16 or aligned) and dtype != FP16 and options == "all"
            if full or (usual and config == ladder[0]):
                depth = 768 if aligned else 771
                call = partial(call_linear, config, dtype, TOKENS, depth, 3072, **uses[options])
                yield title(dtype, depth, by(*config[:3]), options), arch, call


def linear_gated_jobs(kernels, full: bool) -> Jobs:
    """The configs of the heuristic with GELU, bare or with everything, and the gradient's pass.

    By default the largest tiles with everything; on sm_90 all tiles.
    """
    for arch, dtype, aligned in product(SHARED_LIMIT, (BF16, FP16, FP32), (True, False)):
        ladder = kernels.linear.ladder(dtype, aligned, divmod(arch, 10))
        ladder = ladder[-1:] if dtype == FP32 else ladder
        for rung, everything in product(ladder, (True, False)):
            usual = dtype == BF16 and aligned and everything
            if full or (usual and (arch == 90 or rung == ladder[0])):
                config = kernels.halved(rung)
                depth = 768 if aligned else 771
                t, kind = empty(dtype), "all" if everything else "bare"
                bias, residual = (t(2304), t(TOKENS, 1152)) if everything else (None, None)
                given = LinearInputs(t(TOKENS, depth), t(2304, depth), bias, "gelu", residual, "first")
                call = partial(kernels.linear_fwd_with, config, given, everything)
                yield title(dtype, depth, by(*config[:3]), kind), arch, call
    for arch, dtype, activation in product(SHARED_LIMIT, (BF16, FP16, FP32), ACTIVATIONS):
        if full or (dtype == BF16 and activation == "gelu"):
            dy, pre = empty(dtype)(TOKENS, 1152), empty(dtype)(TOKENS, 2304)
            call = partial(kernels.gate_bwd, dy, pre, activation, True, True, "first")
            yield title(dtype, "backward", activation), arch, call


def embedding_jobs(kernels, full: bool) -> Jobs:
    """By default 768 columns in bfloat16, with everything, and on sm_90 the widest tokens."""
    widths = (16, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 12000)
    for arch, dtype, hidden, everything in product(SHARED_LIMIT, (BF16, FP16, FP32), widths, (True, False)):
        usual = everything and dtype == BF16
        if full or (usual and (hidden == 768 or (arch == 90 and hidden == 12000))):
            call = partial(call_embedding, kernels, dtype, hidden, everything)
            yield title(dtype, hidden, "all" if everything else "plain"), arch, call


def feed_forward_jobs(kernels, full: bool) -> Jobs:
    """The gradient between the two products.

    By default the largest tiles with GELU and the sums of columns in bfloat16; on sm_90 all tiles.
    """
    for arch, dtype, aligned in product(SHARED_LIMIT, (BF16, FP16, FP32), (True, False)):
        ladder = kernels.linear.ladder(dtype, aligned, divmod(arch, 10))
        ladder = ladder[-1:] if dtype == FP32 else ladder
        for config, activation, sums in product(ladder, ACTIVATIONS, (True, False)):
            usual = aligned and sums and activation == "gelu"
            usual &= dtype == BF16 if arch != 90 else dtype != FP16
            if full or (usual and (arch == 90 or config == ladder[0])):
                out = 768 if aligned else 771
                kind = f"{activation}-sums" if sums else activation
                call = partial(call_feed_forward, arch, config, dtype, TOKENS, out, 3072, activation, sums)
                yield title(dtype, out, by(*config[:3]), kind), arch, call


def first_attention_jobs(kernels, full: bool) -> Jobs:
    """By default BERT-base and BERT-large in bfloat16; on sm_90 also one sequence, with bias and gate."""
    shapes = ((768, 64), (1024, 64), (384, 32), (312, 26), (128, 64), (16, 16), (1024, 256), (1000, 8))
    for arch, dtype, shape, work in product(SHARED_LIMIT, (BF16, FP16), shapes, ((32, 512), (1, 128))):
        wanted = full or (dtype == BF16 and shape in ((768, 64), (1024, 64)) and (arch == 90 or work[0] > 1))
        if wanted and shape[0] <= kernels.most_width(divmod(arch, 10)):
            call = partial(call_first_attention, kernels, arch, dtype, *shape, *work)
            yield title(dtype, by(*shape), by(*work)), arch, call


def linear_norm_jobs(kernels, full: bool) -> Jobs:
    """A product of few rows with its norm, in one launch or two.

    By default tiles of 64 rows in bfloat16, in one launch, with some number of parts, at 768 columns; on
    sm_90 all tiles, two launches, the widest rows and a depth that is no multiple of a tile's.
    """
    sizes = (3072, 768), (771, 768), (1024, 1024), (768, 130), (4096, 2048)
    for arch, dtype, size, one_launch in product(SHARED_LIMIT, (BF16, FP16), sizes, (True, False)):
        for config in kernels.space(divmod(arch, 10)):
            usual = dtype == BF16 and size == sizes[0] and one_launch
            default = usual and config.split_k == {80: 1, 90: 8, 100: 2, 120: 3}[arch]
            default &= arch == 90 or config.block_m == 64
            if arch == 90 and config[:2] == (64, 64) and config.split_k == 8:
                default = dtype == BF16 and (usual or size in (sizes[1], sizes[-1]))
            ends = config.split_k in (2, kernels.SPLITS[-1])
            if default or (full and (usual or (ends and (dtype == BF16 or size[1] == 768)))):
                call = partial(call_linear_norm, config, dtype, 256, *size, one_launch)
                kind = "one" if one_launch else "two"
                yield title(dtype, by(*size), by(*config[:4]), kind), arch, call


def linear_int8_jobs(kernels, full: bool) -> Jobs:
    """BERT-base's products of one, some and many rows, gated and not; by default the first one in bfloat16.

    `full`: every dtype and activation, and a depth that is no multiple of a tile's.
    """
    sizes, kinds = ((768, 3072), (771, 130)), (None, "first")
    names = ("gelu", *(name for name in ACTIVATIONS if name != "gelu"))
    for arch, dtype, rows in product(SHARED_LIMIT, (BF16, FP16, FP32), (1, 256, TOKENS)):
        for size, gated, name in product(sizes, kinds, names):
            usual = dtype == BF16 and size == sizes[0] and name == "gelu"
            if usual or (full and (name == "gelu" or (rows == TOKENS and dtype == BF16))):
                call = partial(call_linear_int8, kernels, arch, dtype, rows, size, gated, name)
                yield title(dtype, rows, by(*size), gated or "plain", name), arch, call


def linear_fp8_jobs(kernels, full: bool) -> Jobs:
    """Rows of BERT-base, activated and not; `full`: every dtype, width and activation."""
    widths = (768, 3072, 17, 8192)
    for arch, dtype, width, name in product((90, 100, 120), (BF16, FP16, FP32), widths, (None, *ACTIVATIONS)):
        if full or (dtype == BF16 and width in widths[:2] and name in (None, "gelu")):
            x = empty(dtype)(TOKENS, width)
            yield title(dtype, width, name or "plain"), arch, partial(kernels.rounded_rows, x, name)


def packing_jobs(kernels, full: bool) -> Jobs:
    """By default 768 columns of two bytes; `full`: every size of element, one block of columns and more."""
    for arch, dtype, inner in product(SHARED_LIMIT, (BF16, torch.bool, FP32, I64), (1, 17, 768, 5000)):
        if full or (dtype == BF16 and inner == 768):
            t, indices = empty(dtype), empty(I64)(8000)
            calls = (
                partial(kernels.packing_fwd, t(TOKENS, inner), indices),
                partial(kernels.packing_bwd, t(8000, inner), indices, TOKENS),
            )
            yield title(dtype, inner), arch, *calls


def cross_entropy_jobs(kernels, full: bool) -> Jobs:
    """By default the vocabulary of BERT in bfloat16.

    `full`: every dtype, numbers of classes of every block and alignment, with and without label smoothing.
    """
    widths = (1, 2, 256, 516, 1032, 2064, 28996, 30522, 32768)
    for arch, dtype, classes, smoothing in product(SHARED_LIMIT, (BF16, FP16, FP32), widths, (0.0, 0.1)):
        if full or (dtype == BF16 and classes == 30522 and smoothing == 0.1):
            call = partial(call_cross_entropy, kernels, dtype, classes, smoothing)
            yield title(dtype, classes, f"smoothing{smoothing:g}"), arch, call


def pooling_jobs(kernels, full: bool) -> Jobs:
    """By default 768 columns of bfloat16, every mode; `full`: every dtype, several widths."""
    for arch, dtype, width, mode in product(SHARED_LIMIT, (BF16, FP16, FP32), (1, 17, 768), MODES):
        if full or (dtype == BF16 and width == 768):
            yield title(dtype, width, mode), arch, partial(call_pooling, kernels, dtype, width, mode)


def rotary_jobs(kernels, full: bool) -> Jobs:
    """By default ModernBERT-base's queries and keys in bfloat16, both pairings; `full`: dtypes and widths.

    The widths are those of base models, of whole and partly rotated heads, and no power of two.
    """
    shapes = (24, 64, 32), (32, 128, 64), (24, 64, 16), (5, 80, 33), (1, 3, 1)
    for arch, dtype, shape, interleaved in product(SHARED_LIMIT, (BF16, FP16, FP32), shapes, (False, True)):
        if full or (dtype == BF16 and shape == shapes[0]):
            heads, headdim, half = shape
            x, table = empty(dtype)(TOKENS, heads + heads // 2, headdim)[:, :heads], empty(FP32)(8192, half)
            args = x, table, table, empty(I64 if full else I32)(TOKENS), interleaved
            name = title(dtype, by(*shape), "interleaved" if interleaved else "halves")
            yield name, arch, *(partial(call, *args) for call in (kernels.rotary_fwd, kernels.rotary_bwd))


JOBS = {name.removesuffix("_jobs"): jobs for name, jobs in sorted(vars().items()) if name.endswith("_jobs")}

# --- what the tuner may time --------------------------------------------------------------------------------


def in_config(call: Callable[..., None], *sizes, **options) -> Callable:
    """A function of a config that launches."""
    return lambda config: call(config, *sizes, **options)


def tuning_uses(task, arch: int) -> dict[str, Callable]:
    """Name -> function of a config that launches: the call that is timed, and the one that takes most."""
    from bench import tune

    case, dtype = task.case, task.dtype
    if task.op == "linear":
        call = partial(in_config, call_linear, dtype, case.rows, case.in_features, case.out_features)
        timed = {"bias": case.bias, "activation": case.activation, "residual": case.residual}
        return {"timed": call(**timed), "most": call(**timed | {"bias": True, "save": True})}
    if task.op == "linear_bwd":
        return {"most": in_config(call_linear_bwd, dtype, case.rows, case.out_features, case.activation)}
    if task.op == "feed_forward_bwd":
        sizes = dtype, case.rows, case.out, case.inner, case.activation, True
        return {"most": in_config(partial(call_feed_forward, arch), *sizes)}
    if task.op == "linear_norm":
        sizes = dtype, case.rows, case.in_features, case.out_features, case.arrivals
        return {"most": in_config(call_linear_norm, *sizes)}
    if task.op.startswith("layer_norm"):
        sizes = dtype, case.rows, case.hidden, case.dropout_p, tune.KINDS[task.op].backward
        return {"most": in_config(call_layer_norm, *sizes)}
    sizes = dtype, case.headdim, case.total, case.nheads, len(case.lengths), case.max_seqlen
    timed = {"dropout_p": case.dropout_p}
    if task.op == "attention_bwd":
        facts = tune.KINDS[task.op].facts(case, dtype)
        whole = tune.module_of(task.op).ladder(*facts, divmod(arch, 10))[0]
        timed |= {"saved": case.dropout_p > 0}

        def launch(config, **given) -> None:
            call_attention_bwd(whole._replace(**{tune.part_of(task): config}), *sizes, **given)

        return {"timed": in_config(launch, **timed), "most": in_config(launch, **timed, **MORE)}
    most = timed | MORE
    if case.dropout_p:
        most |= {"save_bits": dtype != FP32}
    if case.bias:
        batch, longest = sizes[-2:]
        timed |= {"bias": (batch, 1, 1, longest)}
        most |= {"bias": (batch, case.nheads, longest, longest), "probs": True}
    return {
        name: in_config(call_attention, *sizes, **given) for name, given in (("timed", timed), ("most", most))
    }


def tuning_tasks(op: str) -> list:
    """The entries of bench/tune.py whose kernels differ by more than the sizes of a product."""
    from bench import tune

    found = {}
    for task in tune.tasks(tune.OPS, ["base", "large"], [BF16, FP16, FP32], False):
        sized = task.op in ("linear", "linear_bwd", "linear_norm", "feed_forward_bwd")
        words = task.key.split()[2 if sized else 1 :]
        if task.op == op:
            found.setdefault((task.dtype, *words, getattr(task.case, "bias", "")), task)
    return list(found.values())


def tuning_jobs(op: str, full: bool) -> Jobs:
    """Each candidate of the entries that bench/tune.py may write.

    An entry serves more than the call that was timed: each candidate runs in that call, and with all options
    that its key covers. By default bfloat16, the first entry, and of its candidates the one with most shared
    memory (`linear`) or the last (all other kernels).
    """
    from bench import tune

    tasks = tuning_tasks(op)
    for arch, task in product(SHARED_LIMIT, tasks if full else tasks[:1]):
        capability = divmod(arch, 10)
        device = tune.tuning.Device("no such device", capability, 100)
        configs = tune.KINDS[op].candidates(task, device)
        if not full and op == "linear":
            bytes_of = tune.module_of(op).shared_memory
            configs = [max(configs, key=lambda c: bytes_of(c, task.dtype, capability))]
        elif not full:
            configs = configs[-1:]
        for config, (use, call) in product(configs, tuning_uses(task, arch).items()):
            yield f"{task.name}/{tune.label(config)}/{use}", arch, partial(call, config)


# --- compiling ----------------------------------------------------------------------------------------------


def recorded(module, call: Callable[[], None]) -> list[tuple]:
    """The launches (kernel, args, config) that `call` makes through `module.launch`."""
    launches = []

    def launch(kernel, grid, device, *args, **config):
        launches.append((kernel, args, config))

    with mock.patch.object(module, "launch", launch):
        call()
    return launches


def source(kernel, args: tuple, config: dict, max_registers: int | None = None):
    """(ASTSource, options) for a launch, specialised as Triton's runtime specialises it."""
    import triton

    signature, constexprs, attrs = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = args[i] if i < len(args) else config[param.name]
        one = type(value) is int and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or one:
            signature[param.name], constexprs[(i,)] = "constexpr", value
            continue
        signature[param.name] = triton.runtime.jit.mangle_type(value)
        if isinstance(value, torch.Tensor):
            place = 0 if value.device.type == "meta" else value.data_ptr()
        else:  # a tensor descriptor made on the host and a float have no specialisation
            place = value if isinstance(value, int) and not param.do_not_specialize else 1
        if place % 16 == 0:
            attrs[(i,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in config.items() if k in ("num_warps", "num_stages", "maxnreg")}
    options |= {"enable_fp_fusion": True}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    return triton.compiler.ASTSource(kernel, signature, constexprs, attrs), options


def dumped(cubin: bytes, option: str) -> str:
    """What Triton's `cuobjdump` says of a cubin."""
    import triton

    cuobjdump = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuobjdump, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def resources(cubin: bytes, code: bool = False) -> dict:
    """Registers, stack and local bytes per thread, and static shared memory: from the cubin.

    Also what its instructions show: `reloads` from local memory, where spilled registers and nothing else of
    ours would lie, tiles moved by TMA, products of warp groups with their left operand in registers, and the
    `hazards` that `sass.py` finds in it; 0 and none where there is no stack and `code` is false.
    `foreign_copies`: whether TMA falls back to a call, whose argument takes stack, for the memory of another
    block.
    """
    from tests.support import sass

    text = dumped(cubin, "-res-usage")
    line = re.search(r"REG:\d+ STACK:\d+ .*", text)
    if line is None:
        raise RuntimeError(f"cuobjdump named no kernel: {text!r}")
    found = {k.lower(): int(v) for k, v in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", line.group())}
    listing = dumped(cubin, "-sass") if code or found["stack"] else ""
    names = {"reloads": "LDL", "tma_loads": "UTMALDG", "tma_stores": "UTMASTG"}
    found |= {key: len(re.findall(rf"\b{name}\b", listing)) for key, name in names.items()}
    found |= {"foreign_copies": int(b"__cuda_syscall_cp_async_bulk_tensor" in cubin)}
    grouped = "GMMA." in listing
    found["left_in_registers"] = sass.left_in_registers(listing) if grouped else 0
    return found | {"hazards": [str(h) for h in sass.hazards(listing)] if grouped else []}


def results(
    module, jobs: Iterator[tuple], max_registers: int | None = None, code: bool = True
) -> Iterator[dict]:
    """Compile every launch of the jobs through `module`, equal ones once: a dict of resources for each.

    `code`: look for TMA in the machine code as well, which takes as long as compiling. That of warp-group
    products is always looked at.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    known: dict[str, dict] = {}
    for name, arch, *calls in jobs:
        for kernel, args, config in chain(*(recorded(module, call) for call in calls)):
            src, options = source(kernel, args, config, max_registers)
            key = repr((kernel.fn.__name__, arch, src.signature, src.constants, src.attrs, options))
            if key not in known:
                compiled = triton.compile(src, target=GPUTarget("cuda", arch, 32), options=options)
                ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
                wgmma = ptx.count("wgmma.mma_async")
                known[key] = {
                    "num_warps": options["num_warps"],
                    "dynamic_shared": compiled.metadata.shared,
                    "wgmma": wgmma,
                    "tcgen05": ptx.count("tcgen05.mma"),
                    "mma": ptx.count("mma.sync"),
                    "tma": ptx.count("cp.async.bulk.tensor"),
                    "tf32": ptx.count("tf32"),
                    "shared_limit": SHARED_LIMIT[arch],
                    **resources(cubin, wgmma > 0 or (code and "cp.async.bulk.tensor" in ptx)),
                }
            yield {"kernel": kernel.fn.__name__, "job": name, "arch": arch, **known[key]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    from bench import tune

    parser.add_argument("op", choices={**JOBS, **tune.KINDS})
    parser.add_argument("--full", action="store_true", help="every config, dtype and architecture")
    parser.add_argument("--tuning", action="store_true", help="what bench/tune.py may time")
    parser.add_argument("--arch", type=int, choices=SHARED_LIMIT, action="append", help="only these")
    parser.add_argument("--dtype", help="only what --tuning has in this dtype")
    parser.add_argument("--jobs", type=int, help="only the first so many calls of the launchers")
    parser.add_argument("--max-registers", type=int, help="a limit per thread, to see what spills under it")
    options = parser.parse_args()
    if options.op not in (tune.KINDS if options.tuning else JOBS):
        parser.error(f"{options.op}: expected {', '.join(tune.KINDS)} with --tuning, else {', '.join(JOBS)}")
    if options.tuning:
        module, jobs = tune.module_of(options.op), tuning_jobs(options.op, options.full)
    else:
        module = of_kernels(options.op)
        jobs = JOBS[options.op](module, options.full)
    jobs = (job for job in jobs if job[1] in (options.arch or SHARED_LIMIT))
    jobs = (job for job in jobs if options.dtype is None or f" {options.dtype} " in job[0])
    jobs = islice(jobs, options.jobs)
    for row in results(module, jobs, options.max_registers, code=not options.tuning):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
