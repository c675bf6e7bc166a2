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
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes that a block may use


def layer_norm_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): every distinct config, with and without the optional inputs.

    By default bfloat16 at several widths and the other dtypes at one for sm_90, and one width in bfloat16 for
    the others; `full` is the product. So for half precision beside float32, as in training under autocast.
    """
    import torch
    import triton

    from fastbert.kernels import layer_norm as kernels
    from fastbert.ops.layer_norm import LayerNormInputs, LayerNormNeeds, LayerNormSaved
    from tests.support.launchers import layer_norm_bwd, layer_norm_fwd

    widths = {}
    for hidden in (16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 12000):
        configs = kernels.heuristic(hidden), kernels.bwd_heuristic(hidden)
        blocks = (
            kernels.columns(hidden, kernels.FWD_ONE_BLOCK),
            kernels.columns(hidden, kernels.BWD_ONE_BLOCK),
        )
        column_blocks = tuple((block_n, triton.cdiv(hidden, block_n)) for block_n in blocks)
        widths.setdefault((configs, column_blocks), hidden)
    widths = sorted({*widths.values(), 768, 1024})
    few = (64, 768, 1024, 4096, 8192, 12000)

    def call(dtype: torch.dtype, hidden: int, everything: bool) -> None:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        x, weight = empty(16384, hidden), empty(hidden, dtype=torch.float32)
        rstd, seed = empty(16384, dtype=torch.float32), empty(1, dtype=torch.int64)
        if everything:
            layer_norm_fwd(kernels, x, weight, weight, x, weight, 1e-12, 0.1, seed, 3, True)
            layer_norm_bwd(kernels, x, x, weight, rstd, rstd, 0.1, seed, 3, True, True, True, True)
        else:
            layer_norm_fwd(kernels, x, weight, weight, None, None, 1e-12, 0.0, None, 0, False)
            layer_norm_bwd(kernels, x, x, weight, rstd, rstd, 0.0, None, 0, True, False, False, False)
            layer_norm_bwd(kernels, x, x, weight, rstd, rstd, 0.0, None, 0, False, True, True, True)

    def mixed(dtype: torch.dtype, hidden: int) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        x, wide, weight = empty(16384, hidden, dtype=dtype), empty(16384, hidden), empty(hidden)
        rstd, seed = empty(16384), empty(1, dtype=torch.int64)
        kernels.layer_norm_fwd(
            LayerNormInputs(x, weight, weight, wide, weight, 1e-12, 0.1, seed, 3), True, True
        )
        saved = LayerNormSaved(wide, weight, rstd, rstd, 0.1, seed, 3)
        kernels.layer_norm_bwd(wide, saved, LayerNormNeeds(True, True, True, True, dtype), x)

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for arch, dtype, hidden in itertools.product(SHARED_LIMIT, dtypes[1:], widths):
        if full or (dtype == torch.bfloat16 and (hidden == 768 or (arch == 90 and hidden in few))):
            name = f"{str(dtype).removeprefix('torch.')}-float32-{hidden}-all"
            yield name, arch, lambda a=dtype, b=hidden: mixed(a, b)
    for arch, dtype, hidden, everything in itertools.product(SHARED_LIMIT, dtypes, widths, (True, False)):
        default = dtype == torch.bfloat16 and hidden == 768
        if arch == 90:
            default = everything and hidden in (few if dtype == torch.bfloat16 else (768,))
        if full or default:
            name = f"{str(dtype).removeprefix('torch.')}-{hidden}-{'all' if everything else 'plain'}"
            yield name, arch, lambda a=dtype, b=hidden, c=everything: call(a, b, c)


def attention_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): configs that the tuner may choose, with various options.

    By default head dimension 64 in bfloat16 on every architecture, the highest tiles of the heuristic, plain
    and with everything, and float32 with everything on sm_90. `full` adds the other configs, float16, other
    head dimensions, and each option by itself.
    """
    import torch

    from fastbert.kernels import attention as kernels

    plain = {
        "plain": {},
        "causal": {"causal": True},
        "negative-scale": {"scale": -0.1},
        "gate": {"gate": True},
    }
    dropout = {
        "drawn": {"dropout_p": 0.1},
        "saved": {"dropout_p": 0.1, "save_bits": True},
        "saved-causal": {"dropout_p": 0.1, "save_bits": True, "causal": True, "gate": True},
        "saved-negative-scale": {"dropout_p": 0.1, "save_bits": True, "scale": -0.1},
    }
    extras = {
        "saved-keys": {"bias": (32, 1, 1, 512), "dropout_p": 0.1, "save_bits": True},
        "all-but-probs": {
            "bias": (32, 12, 512, 512),
            "dropout_p": 0.1,
            "save_bits": True,
            "causal": True,
            "gate": True,
        },
        "keys": {"bias": (32, 1, 1, 512)},
        "bias": {"bias": (1, 12, 512, 512)},
        "probs": {"probs": True},
        "all": {
            "bias": (32, 12, 512, 512),
            "dropout_p": 0.1,
            "save_bits": True,
            "probs": True,
            "causal": True,
            "gate": True,
        },
    }

    float32, bfloat16, float16 = torch.float32, torch.bfloat16, torch.float16
    kinds = {"": plain, "dropout": dropout, "extras": extras}
    for arch, dtype, headdim, (kind, options) in itertools.product(
        SHARED_LIMIT, (bfloat16, float32, float16), (64, 128, 16, 32, 80), kinds.items()
    ):
        configs = kernels.candidates(headdim, dtype, kind, divmod(arch, 10))
        for config, name in itertools.product(configs, options):
            usual = headdim == 64 and config == configs[0] and name in ("plain", "saved", "all")
            if full:
                wanted = dtype != float16 or usual
            else:
                wanted = usual and (dtype == bfloat16 or (dtype == float32 and arch == 90 and name == "all"))
            if wanted:
                tiles = f"{config.block_m}x{config.block_n}x{config.num_warps}x{config.num_stages}"
                title = f"{str(dtype).removeprefix('torch.')}-{headdim}-{tiles}-{name}"
                args, given = (config, dtype, headdim), dict(options[name])
                if dtype == float32:  # fastbert.ops.dropout.SAVED_ON
                    given.pop("save_bits", None)
                yield title, arch, lambda args=args, given=given: call_attention(*args, **given)


def call_attention(
    config,
    dtype,
    headdim: int,
    total: int = 16384,
    nheads: int = 12,
    batch: int = 32,
    max_seqlen: int = 512,
    scale: float = 0.125,
    bias: tuple | None = None,
    dropout_p: float = 0.0,
    save_bits: bool = False,
    probs: bool = False,
    causal: bool = False,
    gate: bool = False,
) -> None:
    """Launch attention on meta tensors; `bias`: its shape."""
    import torch

    from fastbert.kernels import attention as kernels
    from fastbert.ops.attention import AttentionInputs

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    inputs = AttentionInputs(
        *empty(total, 3, nheads, headdim).unbind(1),
        empty(batch + 1, dtype=torch.int32),
        max_seqlen,
        scale,
        causal,
        None if bias is None else empty(*bias),
        empty(nheads) if gate else None,
        dropout_p,
        empty(1, dtype=torch.int64) if dropout_p else None,
        3,
    )
    kernels.attention_fwd_with(config, inputs, probs, save_bits, places_of(inputs))


def places_of(inputs):
    """A table of attention's places for these inputs, on the meta device."""
    import torch

    from fastbert.kernels import attention_slots

    batch = inputs.cu_seqlens.shape[0] - 1
    n_slots = attention_slots.sections(inputs.q.shape[0], batch, inputs.max_seqlen)[-1]
    return torch.empty(n_slots, attention_slots.FIELDS, dtype=torch.int32, device="meta")


def attention_backward_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): the configs of the ladder, with various options.

    By default head dimension 64 in bfloat16, the highest tiles: with dropout on every architecture, with
    everything on sm_90. `full` adds low tiles, the other dtypes and head dimensions, plain and with
    everything, and each option by itself where BERT has it: bfloat16, head dimensions 32 and 64, high tiles.
    """
    import torch

    from fastbert.kernels import attention_backward as kernels

    batch = 32
    plain = {
        "plain": {},
        "causal": {"causal": True},
        "negative-scale": {"scale": -0.1},
        "gate": {"gate": True},
    }
    extras = {
        "keys": {"bias": (batch, 1, 1, 512)},
        "bias": {"bias": (1, 12, 512, 512)},
        "rows": {"bias": (batch, 12, 512, 1)},
        "drawn": {"dropout_p": 0.1},
        "all": {"bias": (batch, 12, 512, 512), "dropout_p": 0.1, "saved": True, "causal": True, "gate": True},
        "all-drawn": {"bias": (batch, 12, 512, 512), "dropout_p": 0.1, "causal": True, "gate": True},
    }
    saved = {
        "saved": {"dropout_p": 0.1, "saved": True},
        "saved-all": {"dropout_p": 0.1, "saved": True, "causal": True, "gate": True, "scale": -0.1},
        "saved-causal": {"dropout_p": 0.1, "saved": True, "causal": True},
    }
    float32, bfloat16, float16 = torch.float32, torch.bfloat16, torch.float16
    for arch, dtype, headdim, options in itertools.product(
        SHARED_LIMIT, (bfloat16, float32, float16), (64, 128, 16, 32, 80), (plain, extras, saved)
    ):
        ladder = kernels.ladder(headdim, dtype, options is extras, options is saved, divmod(arch, 10))
        for configs, name in itertools.product(ladder, options):
            high = configs == ladder[0]
            usual = headdim == 64 and dtype == bfloat16 and high
            if dtype == float32 and "saved" in options[name]:
                wanted = False  # fastbert.ops.dropout.SAVED_ON: never
            elif full:
                combined = name in ("plain", "all", "all-drawn", "saved-all")
                wanted = combined and (dtype != float16 or (headdim == 64 and high))
                wanted = wanted or (headdim in (32, 64) and dtype == bfloat16 and high)
            else:
                wanted = usual and name in (("all", "saved") if arch == 90 else ("saved",))
            if wanted:
                title = f"{str(dtype).removeprefix('torch.')}-{headdim}-{'high' if high else 'low'}-{name}"
                args = (configs, dtype, headdim)
                given = {"batch": batch} | options[name]
                yield title, arch, lambda args=args, given=given: call_attention_bwd(*args, **given)


def call_attention_bwd(
    configs,
    dtype,
    headdim: int,
    batch: int,
    total: int = 16384,
    nheads: int = 12,
    max_seqlen: int = 512,
    scale: float = 0.125,
    bias: tuple | None = None,
    dropout_p: float = 0.0,
    saved: bool = False,
    causal: bool = False,
    gate: bool = False,
) -> None:
    """Launch attention's backward on meta tensors; `bias`: its shape."""
    import torch

    from fastbert.kernels import attention_backward as kernels
    from fastbert.ops.attention import AttentionInputs, AttentionNeeds

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    out = empty(total, nheads, headdim)
    inputs = AttentionInputs(
        *empty(total, 3, nheads, headdim).unbind(1),
        empty(batch + 1, dtype=torch.int32),
        max_seqlen,
        scale,
        causal,
        None if bias is None else empty(*bias),
        empty(nheads) if gate else None,
        dropout_p,
        empty(1, dtype=torch.int64) if dropout_p else None,
        3,
    )
    lse = empty(nheads, total, dtype=torch.float32)
    keep_bits = empty(nheads, total, max_seqlen // 32, dtype=torch.int32) if saved else None
    need = AttentionNeeds(True, True, True, bias is not None, gate)
    kernels.attention_bwd_with(configs, out, inputs, out, lse, keep_bits, need, places_of(inputs))


def attention_places_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): the table of places, with sequences ranked and in order."""
    import torch

    from fastbert.kernels import attention_places as kernels

    for arch, batch in itertools.product(SHARED_LIMIT, (32, kernels.RANKED + 1)):
        ends = torch.empty(batch + 1, dtype=torch.int32, device="meta")
        yield f"{batch}", arch, lambda ends=ends: kernels.attention_places(ends, 16384, 512)


def linear_backward_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): by default GELU in bfloat16 at 3072 columns; `full`: all."""
    import torch

    from fastbert.kernels import linear_backward as kernels
    from fastbert.ops.activation import ACTIVATIONS

    def call(dtype: torch.dtype, out_features: int, activation: str | None) -> None:
        dy = torch.empty(16384, out_features, dtype=dtype, device="meta")
        kernels.linear_bwd(dy, dy[:, :768], dy[:768].t(), dy, activation, True, True, True)

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for arch, dtype, out_features, activation in itertools.product(
        SHARED_LIMIT, dtypes, (17, 768, 3072), (*ACTIVATIONS, None)
    ):
        if full or (dtype == torch.bfloat16 and out_features == 3072 and activation == "gelu"):
            args = (dtype, out_features, activation)
            name = f"{str(dtype).removeprefix('torch.')}-{out_features}-{activation}"
            yield name, arch, lambda args=args: call(*args)


def linear_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): the configs of the heuristic.

    By default the largest tiles with GELU in bfloat16 on every architecture; on sm_90 also with everything
    that an epilogue can do, by pointers, and in float32. `full` is the product.
    """
    import torch

    from fastbert.kernels import linear as kernels

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    uses = {
        "bare": {},
        "gelu": {"bias": True, "activation": "gelu"},
        "saved": {"bias": True, "activation": "gelu", "save": True},
        "residual": {"residual": True},
        "all": {"bias": True, "activation": "gelu", "residual": True, "save": True},
    }
    for arch, dtype, aligned in itertools.product(SHARED_LIMIT, dtypes, (True, False)):
        ladder = kernels.ladder(dtype, aligned, divmod(arch, 10))
        for config, options in itertools.product(ladder, uses):
            usual = dtype == torch.bfloat16 and aligned and options == "gelu"
            if arch == 90:
                usual = (dtype == torch.bfloat16 or aligned) and dtype != torch.float16 and options == "all"
            if full or (usual and config == ladder[0]):
                in_features = 768 if aligned else 771
                tiles = "x".join(map(str, config[:3]))
                name = f"{str(dtype).removeprefix('torch.')}-{in_features}-{tiles}-{options}"
                args = (config, dtype, 16384, in_features, 3072)
                yield name, arch, lambda args=args, given=uses[options]: call_linear(*args, **given)


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
    """Launch a product of meta tensors."""
    import torch

    from fastbert.kernels import linear as kernels

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kernels.linear_fwd_with(
        config,
        empty(rows, in_features),
        empty(out_features, in_features),
        empty(out_features) if bias else None,
        activation,
        empty(rows, out_features) if residual else None,
        save,
    )


def call_linear_bwd(config, dtype, rows: int, out_features: int, activation: str | None) -> None:
    """Launch backward's pass on meta tensors."""
    import torch

    from fastbert.kernels import linear_backward as kernels

    dy = torch.empty(rows, out_features, dtype=dtype, device="meta")
    kernels.activation_bwd_with(config, dy, dy, activation, True, True)


def call_feed_forward(
    arch: int, config, dtype, rows: int, out: int, inner: int, activation: str, sums: bool
) -> None:
    """Launch the gradient between two products of meta tensors."""
    import torch

    from fastbert.kernels import feed_forward as kernels

    dy = torch.empty(rows, out, dtype=dtype, device="meta")
    weight, pre = (torch.empty(n, inner, dtype=dtype, device="meta") for n in (out, rows))
    by_product = kernels.sums_by_product(config, dtype, divmod(arch, 10))
    kernels.inner_gradient_with(config, dy, weight, pre, activation, sums, by_product)


def call_linear_norm(config, dtype, rows: int, in_features: int, out_features: int, one_launch: bool) -> None:
    """Launch a product with its norm on meta tensors, with every bias."""
    import torch

    from fastbert.kernels import linear_norm as kernels
    from fastbert.ops.linear_norm import ARRIVALS, LinearNormInputs

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    inputs = LinearNormInputs(
        empty(rows, in_features),
        empty(out_features, in_features),
        empty(out_features),
        empty(rows, out_features),
        empty(out_features, dtype=torch.float32),
        empty(out_features, dtype=torch.float32),
        1e-12,
        empty(ARRIVALS, dtype=torch.int32) if one_launch else None,
    )
    kernels.linear_norm_fwd_with(config, inputs)


def call_layer_norm(config, dtype, rows: int, hidden: int, dropout_p: float, backward: bool) -> None:
    """Launch LayerNorm on meta tensors, with residual, bias and all that training saves or asks for."""
    import torch

    from fastbert.kernels import layer_norm as kernels
    from fastbert.ops.layer_norm import LayerNormInputs, LayerNormNeeds, LayerNormSaved

    x = torch.empty(rows, hidden, dtype=dtype, device="meta")
    weight, rstd = (torch.empty(n, dtype=torch.float32, device="meta") for n in (hidden, rows))
    seed = torch.empty(1, dtype=torch.int64, device="meta") if dropout_p else None
    if backward:
        saved = LayerNormSaved(x, weight, rstd, rstd, dropout_p, seed, 3)
        kernels.layer_norm_bwd_with(config, x, saved, LayerNormNeeds(True, True, True, True))
    else:
        inputs = LayerNormInputs(x, weight, weight, x, weight, 1e-12, dropout_p, seed, 3)
        kernels.layer_norm_fwd_with(config, inputs, True)


def tuning_uses(task, arch: int) -> dict[str, Callable]:
    """Name -> function of a config that launches: the call that is timed, and the one that takes most."""
    import torch

    from bench import tune

    case, dtype = task.case, task.dtype
    if task.op == "linear":
        sizes = case.rows, case.in_features, case.out_features
        timed = {"bias": case.bias, "activation": case.activation, "residual": case.residual}
        most = timed | {"bias": True, "save": True}
        return {
            "timed": lambda c: call_linear(c, dtype, *sizes, **timed),
            "most": lambda c: call_linear(c, dtype, *sizes, **most),
        }
    if task.op == "linear_bwd":
        return {"most": lambda c: call_linear_bwd(c, dtype, case.rows, case.out_features, case.activation)}
    if task.op == "feed_forward_bwd":
        sizes = case.rows, case.out, case.inner, case.activation, True
        return {"most": lambda c: call_feed_forward(arch, c, dtype, *sizes)}
    if task.op == "linear_norm":
        sizes = case.rows, case.in_features, case.out_features, case.arrivals
        return {"most": lambda c: call_linear_norm(c, dtype, *sizes)}
    if task.op.startswith("layer_norm"):
        sizes = case.rows, case.hidden, case.dropout_p, tune.KINDS[task.op].backward
        return {"most": lambda c: call_layer_norm(c, dtype, *sizes)}
    timed = {"batch": len(case.lengths), "max_seqlen": case.max_seqlen, "dropout_p": case.dropout_p}
    if task.op == "attention_bwd":
        facts = tune.KINDS[task.op].facts(case, dtype)
        whole = tune.module_of(task.op).ladder(*facts, divmod(arch, 10))[0]
        batch, sizes = timed.pop("batch"), (case.total, case.nheads)
        timed |= {"saved": case.dropout_p > 0}

        def launch(config, **given) -> None:
            configs = whole._replace(**{tune.part_of(task): config})
            call_attention_bwd(configs, dtype, case.headdim, batch, *sizes, **given)

        return {
            "timed": lambda c: launch(c, **timed),
            "most": lambda c: launch(c, **timed, causal=True, gate=True),
        }
    sizes = case.headdim, case.total, case.nheads
    most = timed | {"causal": True, "gate": True}
    if case.dropout_p:
        most |= {"save_bits": dtype != torch.float32}
    if case.bias:
        timed |= {"bias": (timed["batch"], 1, 1, case.max_seqlen)}
        most |= {"bias": (timed["batch"], case.nheads, *(case.max_seqlen,) * 2), "probs": True}
    return {
        "timed": lambda c: call_attention(c, dtype, *sizes, **timed),
        "most": lambda c: call_attention(c, dtype, *sizes, **most),
    }


def tuning_tasks(op: str) -> list:
    """The entries of bench/tune.py whose kernels differ by more than the sizes of a product."""
    import torch

    from bench import tune

    found = {}
    for task in tune.tasks(
        tune.OPS, ["base", "large"], [torch.bfloat16, torch.float16, torch.float32], False
    ):
        sized = task.op in ("linear", "linear_bwd", "linear_norm", "feed_forward_bwd")
        words = task.key.split()[2 if sized else 1 :]
        if task.op == op:
            found.setdefault((task.dtype, *words, getattr(task.case, "bias", "")), task)
    return list(found.values())


def tuning_jobs(op: str, full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): each candidate of the entries that bench/tune.py may write.

    An entry serves more than the call that was timed: each candidate runs in that call, and with all options
    that its key covers. By default bfloat16, the first entry, and of its candidates the one with most shared
    memory (`linear`) or the last (the others).
    """
    from bench import tune

    tasks = tuning_tasks(op)
    for arch, task in itertools.product(SHARED_LIMIT, tasks if full else tasks[:1]):
        capability = divmod(arch, 10)
        device = tune.tuning.Device("no such device", capability, 100)
        configs = tune.KINDS[op].candidates(task, device)
        if not full and op == "linear":
            bytes_of = tune.module_of(op).shared_memory
            configs = [max(configs, key=lambda c: bytes_of(c, task.dtype, capability))]
        elif not full:
            configs = configs[-1:]
        for config, (use, call) in itertools.product(configs, tuning_uses(task, arch).items()):
            yield f"{task.name}/{tune.label(config)}/{use}", arch, lambda f=call, c=config: f(c)


def embedding_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): by default 768 columns in bfloat16, with everything.

    `full` adds other widths and dtypes, and what has neither positions nor segments nor dropout.
    """
    import torch

    from fastbert.kernels import embedding as kernels
    from tests.support.launchers import embedding_bwd, embedding_fwd

    def call(dtype: torch.dtype, hidden: int, everything: bool) -> None:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        ids, seed = empty(16384, dtype=torch.int64), empty(1, dtype=torch.int64)
        norm = (empty(hidden, dtype=torch.float32),) * 2
        saved = empty(16384, hidden), empty(16384, hidden), norm[0], *[empty(16384, dtype=torch.float32)] * 2
        if everything:
            tables = ids, empty(512, hidden), ids, empty(2, hidden)
            embedding_fwd(kernels, ids, None, empty(30522, hidden), *tables, *norm, 1e-12, 0.1, seed, 3, True)
            rows = ids, ids, ids, 30522, 512, 2, 0
            embedding_bwd(kernels, *saved, *rows, 0.1, seed, 3, True, True)
        else:
            rest = (None,) * 5
            embedding_fwd(kernels, None, empty(16384, hidden), *rest, *norm, 1e-12, 0.0, None, 0, False)
            embedding_bwd(kernels, *saved, None, None, None, 0, 0, 0, -1, 0.0, None, 0, True, False)

    widths = (16, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 12000)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for arch, dtype, hidden, everything in itertools.product(SHARED_LIMIT, dtypes, widths, (True, False)):
        if full or (everything and dtype == torch.bfloat16 and hidden in (768, 8192, 12000)):
            name = f"{str(dtype).removeprefix('torch.')}-{hidden}-{'all' if everything else 'plain'}"
            yield name, arch, lambda a=dtype, b=hidden, c=everything: call(a, b, c)


def feed_forward_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): the gradient between the two products.

    By default the largest tiles with GELU and the sums of columns in bfloat16 on every architecture; on sm_90
    also the other tiles, float16 and float32. `full` is the product with every activation, without the sums,
    and by pointers.
    """
    import torch

    from fastbert.kernels import feed_forward as kernels
    from fastbert.ops.activation import ACTIVATIONS

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for arch, dtype, aligned in itertools.product(SHARED_LIMIT, dtypes, (True, False)):
        ladder = kernels.linear.ladder(dtype, aligned, divmod(arch, 10))
        ladder = ladder[-1:] if dtype == torch.float32 else ladder
        for config, activation, sums in itertools.product(ladder, ACTIVATIONS, (True, False)):
            usual = aligned and sums and activation == "gelu"
            first = config == ladder[0] and dtype == torch.bfloat16
            if full or (usual and (first or arch == 90)):
                out = 768 if aligned else 771
                tiles = "x".join(map(str, config[:3]))
                kind = f"{activation}-sums" if sums else activation
                name = f"{str(dtype).removeprefix('torch.')}-{out}-{tiles}-{kind}"
                yield (
                    name,
                    arch,
                    lambda args=(arch, config, dtype, 16384, out, 3072, activation, sums): call_feed_forward(
                        *args
                    ),
                )


def first_attention_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): by default BERT-base and BERT-large in bfloat16.

    A batch of 32 x 512 tokens without anything, and one sequence of 128 with bias and gate. `full`: float16,
    other widths, and heads of every size.
    """
    import torch

    from fastbert.kernels import first_attention as kernels
    from fastbert.ops.first_attention import FirstAttentionInputs

    def call(arch: int, dtype: torch.dtype, width: int, head_dim: int, lengths: tuple, extras: bool) -> None:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        (batch, longest), nheads = lengths, width // head_dim
        device = kernels.tuning.Device("", divmod(arch, 10), 132)
        config = kernels.config_for(batch, batch * longest, nheads, width, longest, device)
        inputs = FirstAttentionInputs(
            empty(batch * longest, width),
            empty(batch, nheads, head_dim),
            empty(width, width),
            empty(width, width),
            empty(width),
            empty(batch + 1, dtype=torch.int32),
            0.125,
            empty(batch, 1, 1, longest, dtype=torch.float32) if extras else None,
            empty(nheads, dtype=torch.float32) if extras else None,
            longest,
        )
        kernels.first_attention_fwd_with(config, inputs)

    dtypes = (torch.bfloat16, torch.float16)
    shapes = ((768, 64), (1024, 64), (384, 32), (312, 26), (128, 64), (16, 16), (1024, 256), (1000, 8))
    lengths = ((32, 512), (1, 128))
    for arch, dtype, (width, head_dim), work in itertools.product(SHARED_LIMIT, dtypes, shapes, lengths):
        wanted = full or (dtype == torch.bfloat16 and width in (768, 1024) and head_dim == 64)
        if wanted and width <= kernels.most_width(divmod(arch, 10)):
            name = f"{str(dtype).removeprefix('torch.')}-{width}x{head_dim}-{work[0]}x{work[1]}"
            args = arch, dtype, width, head_dim, work, work[0] == 1
            yield name, arch, lambda args=args: call(*args)


def linear_norm_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): a product of few rows with its norm, in one launch or two.

    By default each tile in bfloat16, in one launch, with some number of parts, at 768 columns; on sm_90 also
    two launches, the widest rows and a depth that is no multiple of a tile's. `full` adds every number of
    parts there, and two and the most parts at all sizes.
    """
    import torch

    from fastbert.kernels import linear_norm as kernels

    sizes = (3072, 768), (771, 768), (1024, 1024), (768, 130), (4096, 2048)
    dtypes = (torch.bfloat16, torch.float16)
    for arch, dtype, (depth, out), one_launch in itertools.product(
        SHARED_LIMIT, dtypes, sizes, (True, False)
    ):
        for config in kernels.space(divmod(arch, 10)):
            usual = dtype == torch.bfloat16 and (depth, out) == sizes[0] and one_launch
            default = usual and config.split_k == {80: 1, 90: 8, 100: 2, 120: 3}[arch]
            if arch == 90 and config[:2] == (64, 64) and config.split_k == 8:
                default = dtype == torch.bfloat16 and (usual or (depth, out) in (sizes[1], sizes[-1]))
            ends = config.split_k in (2, kernels.SPLITS[-1])
            if default or (full and (usual or (ends and (dtype == torch.bfloat16 or out == 768)))):
                tiles = "x".join(map(str, config[:4]))
                kind = "one" if one_launch else "two"
                name = f"{str(dtype).removeprefix('torch.')}-{depth}x{out}-{tiles}-{kind}"
                args = config, dtype, 256, depth, out, one_launch
                yield name, arch, lambda args=args: call_linear_norm(*args)


def packing_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): by default 768 columns of two bytes.

    `full`: every size of element, and widths of one block and of several.
    """
    import torch

    from fastbert.kernels import packing as kernels

    def call(dtype: torch.dtype, inner: int) -> None:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        indices = empty(8000, dtype=torch.int64)
        kernels.packing_fwd(empty(16384, inner), indices)
        kernels.packing_bwd(empty(8000, inner), indices, 16384)

    dtypes = (torch.bfloat16, torch.bool, torch.float32, torch.int64)
    for arch, dtype, inner in itertools.product(SHARED_LIMIT, dtypes, (1, 17, 768, 5000)):
        if full or (dtype == torch.bfloat16 and inner == 768):
            yield f"{str(dtype).removeprefix('torch.')}-{inner}", arch, lambda a=dtype, b=inner: call(a, b)


def cross_entropy_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): by default the vocabulary of BERT in bfloat16.

    `full`: every dtype, numbers of classes of every block and alignment, with and without label smoothing.
    """
    import torch

    from fastbert.kernels import cross_entropy as kernels

    def call(dtype: torch.dtype, classes: int, smoothing: float) -> None:
        logits = torch.empty(2500, classes, dtype=dtype, device="meta")
        labels = torch.empty(2500, dtype=torch.int64, device="meta")
        loss, lse, count = kernels.cross_entropy_fwd(logits, labels, -100, smoothing)
        kernels.cross_entropy_bwd(loss, logits, labels, lse, count, -100, smoothing)

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    widths = (1, 2, 256, 516, 1032, 2064, 28996, 30522, 32768)
    for arch, dtype, classes, smoothing in itertools.product(SHARED_LIMIT, dtypes, widths, (0.0, 0.1)):
        if full or (dtype == torch.bfloat16 and classes == 30522 and smoothing == 0.1):
            name = f"{str(dtype).removeprefix('torch.')}-{classes}-smoothing{smoothing:g}"
            yield name, arch, lambda a=dtype, b=classes, c=smoothing: call(a, b, c)


def pooling_jobs(full: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, architecture, call that launches): by default 768 columns of bfloat16, the three modes.

    `full`: every dtype, and one block of columns and several.
    """
    import torch

    from fastbert.kernels import pooling as kernels
    from fastbert.ops.pooling import MODES

    def call(dtype: torch.dtype, width: int, mode: str) -> None:
        hidden = torch.empty(16384, width, dtype=dtype, device="meta")
        ends = torch.empty(65, dtype=torch.int32, device="meta")
        y = kernels.pooling_fwd(hidden, ends, mode)
        kernels.pooling_bwd(y, hidden, y, ends, mode)

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for arch, dtype, width, mode in itertools.product(SHARED_LIMIT, dtypes, (1, 17, 768), MODES):
        if full or (dtype == torch.bfloat16 and width == 768):
            name = f"{str(dtype).removeprefix('torch.')}-{width}-{mode}"
            yield name, arch, lambda a=dtype, b=width, c=mode: call(a, b, c)


JOBS = {
    "attention": attention_jobs,
    "attention_backward": attention_backward_jobs,
    "attention_places": attention_places_jobs,
    "cross_entropy": cross_entropy_jobs,
    "embedding": embedding_jobs,
    "feed_forward": feed_forward_jobs,
    "first_attention": first_attention_jobs,
    "layer_norm": layer_norm_jobs,
    "linear": linear_jobs,
    "linear_backward": linear_backward_jobs,
    "linear_norm": linear_norm_jobs,
    "packing": packing_jobs,
    "pooling": pooling_jobs,
}


def recorded(module, call: Callable[[], None]) -> list[tuple]:
    """The launches (kernel, args, config) that `call` makes through `module.launch`."""
    launches = []
    original = module.launch
    module.launch = lambda kernel, grid, device, *args, **config: launches.append((kernel, args, config))
    try:
        call()
    finally:
        module.launch = original
    return launches


def source(kernel, args: tuple, config: dict, max_registers: int | None = None):
    """(ASTSource, options) for a launch, specialised as Triton's runtime specialises it."""
    import torch
    import triton

    pointers = {
        torch.float32: "*fp32",
        torch.bfloat16: "*bf16",
        torch.float16: "*fp16",
        torch.int64: "*i64",
        torch.int32: "*i32",
        torch.int16: "*i16",
        torch.uint8: "*u8",
        torch.int8: "*i8",
        torch.bool: "*i1",
    }
    signature, constexprs, attrs = {}, {}, {}
    aligned = [["tt.divisibility", 16]]
    for i, param in enumerate(kernel.params):
        value = args[i] if i < len(args) else config[param.name]
        one = type(value) is int and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or one:
            signature[param.name], constexprs[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = pointers[value.dtype]
            if value.device.type == "meta" or value.data_ptr() % 16 == 0:
                attrs[(i,)] = aligned
        elif hasattr(value, "block_shape"):  # a tensor descriptor made on the host
            signature[param.name] = triton.runtime.jit.mangle_type(value)
        elif isinstance(value, int):
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(i,)] = aligned
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            raise TypeError(f"{param.name}: no Triton type for {value!r}")
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
    module,
    jobs: Iterator[tuple],
    max_registers: int | None = None,
    code: bool = True,
    keep: pathlib.Path | None = None,
) -> Iterator[dict]:
    """Compile every launch of the jobs through `module`, equal ones once: a dict of resources for each.

    `code`: look for TMA in the machine code as well, which takes as long as compiling. That of warp-group
    products is always looked at. `keep`: a folder for the cubins, which rows name as `cubin`.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    known: dict[str, dict] = {}
    for name, arch, call in jobs:
        for kernel, args, config in recorded(module, call):
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
                if keep is not None:
                    path = keep / f"{kernel.fn.__name__}-{name}-{len(known)}.cubin"
                    path.write_bytes(cubin)
                    known[key]["cubin"] = str(path)
            yield {"kernel": kernel.fn.__name__, "job": name, "arch": arch, **known[key]}


def main() -> None:
    """Command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sys.path.insert(0, str(ROOT))
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
        module = importlib.import_module(f"fastbert.kernels.{options.op}")
        jobs = JOBS[options.op](options.full)
    jobs = (job for job in jobs if job[1] in (options.arch or SHARED_LIMIT))
    jobs = (job for job in jobs if options.dtype is None or f" {options.dtype} " in job[0])
    jobs = itertools.islice(jobs, options.jobs)
    for row in results(module, jobs, options.max_registers, code=not options.tuning):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
