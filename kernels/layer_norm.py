"""LayerNorm, RMSNorm and NoNorm with residual, bias and dropout in the same pass, forward and backward.

Math       z = residual + dropout(x + x_bias);  y = (z - mean) * rstd * weight + bias
           dz = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dsum, g = dy * weight;  dx = dropout'(dz)
           RMSNorm: x_hat = z * rstd, without mean(g); rstd is that of the mean of z * z
           NoNorm: x_hat = z, dz = g + dsum
           dweight = Σ_rows dy * x_hat, dbias = Σ_rows dy, dx_bias = Σ_rows dx
Tiling     A program owns BLOCK_M whole rows, so that a row is read once. Rows wider than *_ONE_BLOCK are cut
           into blocks of columns, and an earlier kernel finds each row's two means. In backward a program
           walks over every num_programs-th row tile with its column sums in registers; a second kernel adds
           those partial sums in a fixed order. No atomics, no locks: repeats are bit-equal.
Precision  Loads in storage dtype, then float32, one rounding at the store. The variance is that of centred
           values (wide rows: merged block by block, Chan et al. 1979), never E[z²] - E[z]². The divisions and
           roots for mean and rstd are correctly rounded; there is one of each per row.
Saved      z in storage dtype (only where it differs from x); mean, rstd where the norm has them. Dropout bits
           are drawn again in backward: ten Philox rounds serve four elements and cost no memory.
Files      layer_norm_forward.py, layer_norm_backward.py: the kernels. Here: how rows are cut, the launches.
Source     Ba, Kiros, Hinton 2016, Layer Normalization, eq. 4.
"""

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastbert.kernels import tuning
from fastbert.kernels.column_sums import SIZES, _sum_partials_kernel
from fastbert.kernels.launch import PROGRAMS, cdiv, launch, next_power_of_2, resident_programs
from fastbert.kernels.layer_norm_backward import _layer_norm_bwd_kernel, _wide_bwd_means_kernel
from fastbert.kernels.layer_norm_forward import _layer_norm_fwd_kernel, _wide_fwd_stats_kernel
from fastbert.kernels.philox import as_int32_bits, threshold_bits

if TYPE_CHECKING:
    from fastbert.ops.layer_norm import LayerNormInputs, LayerNormNeeds, LayerNormSaved

# The widest row that one program holds in forward.
FWD_ONE_BLOCK = 8192
# The widest in backward: at 8192 the three column sums would spill.
BWD_ONE_BLOCK = 4096
# The columns of one program in wider rows.
WIDE_BLOCK = 4096

# Whether a kind of norm has rstd, and a mean.
STATISTICS = {"layer_norm": (True, True), "rms_norm": (True, False), "no_norm": (False, False)}

# --- launchers ----------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """How the rows are cut in forward; a line of kernels/tuned/<gpu>.json.

    Attributes:
        block_m: rows of a program.
        num_warps: Triton's.
    """

    block_m: int
    num_warps: int


class BackwardConfig(NamedTuple):
    """How the rows are cut in backward; a line of kernels/tuned/<gpu>.json.

    Attributes:
        block_m: rows of a tile.
        num_warps: Triton's.
        per_multiprocessor: programs per multiprocessor, where they sum columns.
    """

    block_m: int
    num_warps: int
    per_multiprocessor: int = PROGRAMS


def columns(hidden: int, one_block: int) -> int:
    """BLOCK_N: the columns of a program, all of them up to `one_block`."""
    return WIDE_BLOCK if hidden > one_block else max(16, next_power_of_2(hidden))


def heuristic(hidden: int) -> Config:
    """Forward's config where no table has one: 32 elements per thread.

    Up to 1024 columns no sum leaves its warp.
    """
    block_n = columns(hidden, FWD_ONE_BLOCK)
    return Config(max(1, 1024 // block_n), max(1, block_n // 1024))


def bwd_heuristic(hidden: int) -> BackwardConfig:
    """Backward's config where no table has one.

    16 elements per thread, because three column sums stay in registers.
    """
    block_n = columns(hidden, BWD_ONE_BLOCK)
    block_m = max(1, min(16, 2048 // block_n))
    return BackwardConfig(block_m, max(1, block_m * block_n // 512))


def candidates(hidden: int) -> tuple[Config, ...]:
    """What a tuner may choose from in forward: 8 to 32 elements per thread, of rows of BERT's widths."""
    usual = heuristic(hidden)
    if not 256 < hidden <= 1024:
        return (usual,)
    block_n = columns(hidden, FWD_ONE_BLOCK)
    found = [usual]
    for block_m, each in itertools.product((1, 2, 4), (32, 16, 8)):
        found.append(Config(block_m, max(1, block_m * block_n // (32 * each))))
    return tuple(dict.fromkeys(c for c in found if c.num_warps <= 8))


def bwd_candidates(hidden: int) -> tuple[BackwardConfig, ...]:
    """What a tuner may choose from in backward: other numbers of programs, then tiles of other heights.

    A thread has 8 or 16 elements: with 32 the three sums alone would take 96 registers.
    """
    usual = bwd_heuristic(hidden)
    if not 256 < hidden <= 1024:
        return (usual,)
    block_n = columns(hidden, BWD_ONE_BLOCK)
    found = [usual, *(usual._replace(per_multiprocessor=n) for n in (2, 4, 6))]
    for block_m, each in itertools.product((1, 4, 2), (16, 8)):
        config = BackwardConfig(block_m, block_m * block_n // (32 * each))
        found += [config, config._replace(per_multiprocessor=2)]
    return tuple(dict.fromkeys(c for c in found if c.num_warps <= 8))


def tuning_key(hidden: int, dropout: bool, dtype: torch.dtype) -> str:
    """The key of this computation in kernels/tuned, both ways: "bfloat16 768" or "bfloat16 768 dropout"."""
    return f"{str(dtype).removeprefix('torch.')} {hidden}{' dropout' if dropout else ''}"


@lru_cache(maxsize=4096)
def config_for(
    rows_bucket: int, hidden: int, dropout: bool, dtype: torch.dtype, device: tuning.Device
) -> Config:
    """Forward's config of the GPU's table, else the heuristic's."""
    found = tuning.tuned(device, "layer_norm", tuning_key(hidden, dropout, dtype), rows_bucket)
    return heuristic(hidden) if found is None else Config(**found)


@lru_cache(maxsize=4096)
def bwd_config_for(
    rows_bucket: int, hidden: int, dropout: bool, dtype: torch.dtype, device: tuning.Device
) -> BackwardConfig:
    """Backward's config of the GPU's table, else the heuristic's."""
    found = tuning.tuned(device, "layer_norm_bwd", tuning_key(hidden, dropout, dtype), rows_bucket)
    return bwd_heuristic(hidden) if found is None else BackwardConfig(**found)


def _dropout_args(dropout_p: float, offset: int) -> tuple[int, int, float]:
    return as_int32_bits(offset), threshold_bits(dropout_p), 1.0 / (1.0 - dropout_p)


def _stride(t: Tensor | None) -> int:
    return 0 if t is None else t.stride(0)


def layer_norm_fwd(inputs: "LayerNormInputs", save: bool, rounded: bool = False) -> tuple[Tensor, ...]:
    """(y, z, mean, rstd), and y in x's dtype if `rounded`: the contract of `fastbert.ops.layer_norm`."""
    x = inputs.x
    device = tuning.device_of(x.device)
    dtype = x.dtype if inputs.residual is None else inputs.residual.dtype
    config = config_for(tuning.bucket(x.shape[0]), x.shape[1], inputs.dropout_p > 0, dtype, device)
    return layer_norm_fwd_with(config, inputs, save, rounded)


def layer_norm_fwd_with(
    config: Config, inputs: "LayerNormInputs", save: bool, rounded: bool = False
) -> tuple[Tensor, ...]:
    """`layer_norm_fwd` with a given config, for the tuner and the tests."""
    x, weight, bias, residual, x_bias, eps, dropout_p, seed, offset, kind, return_sum = inputs
    rows, hidden = x.shape
    seed = seed if dropout_p > 0 else None
    summed = residual is not None or x_bias is not None or seed is not None
    save_z = (save or return_sum) and summed
    has_rstd, has_mean = STATISTICS[kind]
    wide = hidden > FWD_ONE_BLOCK and has_rstd
    dtype = x.dtype if residual is None else residual.dtype
    y = torch.empty((rows, hidden), dtype=dtype, device=x.device)
    z = torch.empty_like(y) if save_z else y.new_empty((0,))
    more = (torch.empty_like(y, dtype=x.dtype),) if rounded else ()
    held = has_rstd and (save or wide)
    rstd = x.new_empty((rows if held else 0,), dtype=torch.float32)
    mean = torch.empty_like(rstd) if has_mean else rstd.new_empty((0,))
    if rows > 0:
        (block_m, num_warps), block_n = config, columns(hidden, FWD_ONE_BLOCK)
        sources = (x, residual, x_bias)
        strides = (x.stride(0), _stride(residual))
        scalars = (rows, eps, *_dropout_args(dropout_p, offset))
        if wide:
            launch(
                _wide_fwd_stats_kernel,
                (rows,),
                x.device,
                *(*sources, seed, mean, rstd, *strides, *scalars),
                HIDDEN=hidden,
                BLOCK_N=block_n,
                KIND=kind,
                num_warps=num_warps,
            )
        launch(
            _layer_norm_fwd_kernel,
            (cdiv(rows, block_m), cdiv(hidden, block_n)),
            x.device,
            *(
                *sources,
                weight,
                bias,
                seed,
                y,
                z if save_z else None,
                mean,
                rstd,
                more[0] if rounded else None,
            ),
            *(*strides, y.stride(0), z.stride(0), *scalars),
            HIDDEN=hidden,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            SAVE_STATS=save,
            KIND=kind,
            num_warps=num_warps,
        )
    if not save:
        mean, rstd = x.new_empty((0,), dtype=torch.float32), x.new_empty((0,), dtype=torch.float32)
    return y, z, mean, rstd, *more


def layer_norm_bwd(
    dy: Tensor,
    saved: "LayerNormSaved",
    need: "LayerNormNeeds",
    drounded: Tensor | None = None,
    dsum: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, dresidual, dweight, dbias, dx_bias); the contract of `fastbert.ops.layer_norm.layer_norm_bwd`."""
    rows, hidden = dy.shape
    device = tuning.device_of(dy.device)
    config = bwd_config_for(tuning.bucket(rows), hidden, saved.dropout_p > 0, dy.dtype, device)
    return layer_norm_bwd_with(config, dy, saved, need, drounded, dsum)


def layer_norm_bwd_with(
    config: BackwardConfig,
    dy: Tensor,
    saved: "LayerNormSaved",
    need: "LayerNormNeeds",
    drounded: Tensor | None = None,
    dsum: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`layer_norm_bwd` with a given config, for the tuner and the tests."""
    z, weight, mean, rstd, dropout_p, seed, offset, kind = saved
    need_dx, need_dweight, need_dxbias, need_dresidual, x_dtype = need
    x_dtype = x_dtype or z.dtype
    rows, hidden = dy.shape
    has_rstd, _ = STATISTICS[kind]
    seed = seed if dropout_p > 0 else None
    own_dresidual = need_dresidual and (seed is not None or not need_dx or x_dtype != z.dtype)
    dx = torch.empty((rows, hidden) if need_dx else (0,), dtype=x_dtype, device=dy.device)
    dresidual = torch.empty((rows, hidden) if own_dresidual else (0,), dtype=dy.dtype, device=dy.device)
    sums = [
        dy.new_zeros((hidden if needed else 0,), dtype=torch.float32)  # zeros: the sums over no rows
        for needed in (need_dweight, need_dweight, need_dxbias)
    ]
    if rows == 0:
        return dx, dresidual, *sums

    (block_m, num_warps, per_multiprocessor), block_n = config, columns(hidden, BWD_ONE_BLOCK)
    programs, column_blocks = cdiv(rows, block_m), cdiv(hidden, block_n)
    needed = [s for s in sums if s.numel() > 0]
    if needed:
        resident = resident_programs(dy.device, per_multiprocessor)
        programs = min(programs, max(1, resident // column_blocks))
    partials = dy.new_empty((len(needed), programs, hidden), dtype=torch.float32)
    of_each = iter(partials)
    dweight, dbias, dx_bias = (next(of_each) if s.numel() > 0 else None for s in sums)
    means = None
    if hidden > BWD_ONE_BLOCK and has_rstd:
        means = dy.new_empty((2, rows), dtype=torch.float32)
        launch(
            _wide_bwd_means_kernel,
            (rows,),
            dy.device,
            *(dy, drounded, z, weight, mean, rstd, means, seed),
            *(dy.stride(0), z.stride(0), rows, *_dropout_args(dropout_p, offset)),
            HIDDEN=hidden,
            BLOCK_N=block_n,
            KIND=kind,
            DROPS_OUTPUT=False,
            num_warps=num_warps,
        )
    launch(
        _layer_norm_bwd_kernel,
        (programs, column_blocks),
        dy.device,
        *(dy, drounded, dsum, z, weight, mean, rstd, means, seed, dx if need_dx else None),
        *(dresidual if own_dresidual else None, dweight, dbias, dx_bias, dy.stride(0), z.stride(0)),
        *(rows, *_dropout_args(dropout_p, offset)),
        HIDDEN=hidden,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        KIND=kind,
        DROPS_OUTPUT=False,
        num_warps=num_warps,
    )
    if needed:
        outs = (*needed, None, None)[:3]
        launch(
            *(_sum_partials_kernel, (cdiv(hidden, 32), len(needed)), dy.device, partials, *outs, programs),
            HIDDEN=hidden,
            **SIZES,
        )
    return dx, dresidual, *sums
