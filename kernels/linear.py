"""A product with bias, activation and residual in its epilogue.

Math       pre = x @ weight.T + bias;  y = act(pre) + residual
Tiling     A program walks over every num_programs-th output tile of [BLOCK_M, BLOCK_N]. It goes down GROUP_M
           row tiles before it takes the next column tile, so that its inputs stay in the L2 cache. Rows after
           the last one read the last row again and are not stored; columns after IN are 0. The accumulator is
           cut into SPLIT parts before the epilogue: in one piece it spills.
Precision  float32 accumulators ("ieee": float32 inputs are not cut to TF32); deep sums of float32 in parts;
           bias, activation and residual in float32; one rounding at each store.
Saved      pre in storage dtype, where backward will ask for it.
Transport  With compute capability 9.x, 10.x and 12.x, tiles move by TMA, through tensor descriptors made on
           the host. Other GPUs, and matrices that TMA cannot describe (16-byte alignment), use pointers.
Files      linear_forward.py: the kernel; linear_backward.py: backward. Here: how the work is cut, the launch.
Source     Hendrycks and Gimpel 2016, Gaussian Error Linear Units; Tillet, Kung, Cox 2019, Triton, for the
           grouped order.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastbert.kernels import activation as activation_kernels
from fastbert.kernels import tuning
from fastbert.kernels.launch import MOST_REGISTERS, launch
from fastbert.kernels.linear_forward import _linear_fwd_kernel

if TYPE_CHECKING:
    from fastbert.ops.linear import LinearInputs

# Work of a tile's row or column, in elements of the tile. An estimate: with it tiles of 128 x 128 and 64 x 64
# do 0.90 and 0.65 of the work per second of those of 128 x 256.
OPERAND_WORK = 40
# Rows are counted in units, so that a run over many lengths asks for few configs.
ROW_UNIT = 64


def counted(rows: int) -> int:
    """The rows that a config is asked for: whole units, or a power of two below one."""
    return 2 ** tuning.bucket(rows) if rows < ROW_UNIT else triton.cdiv(rows, ROW_UNIT) * ROW_UNIT


class Config(NamedTuple):
    """How the kernel runs; a line of kernels/tuned/<gpu>.json.

    Attributes:
        block_m, block_n, block_k: rows, columns and depth of a tile.
        num_warps, num_stages: Triton's.
        split: parts of the accumulator in the epilogue.
        tma: whether tiles move by TMA; only for aligned matrices.
        group_m: row tiles taken before the next column tile.
        per_multiprocessor: programs per multiprocessor.
        bias_first: whether the accumulators begin with the bias: they must get some value, so that costs
            nothing. Not in float32, where each step of the product would round a large bias again; nor on
            capability 10, whose accumulators are not registers: there it spills.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split: int
    tma: bool
    group_m: int = 8
    per_multiprocessor: int = 1
    bias_first: bool = False


def heuristic(
    rows: int, out_features: int, dtype: torch.dtype, aligned: bool, device: tuning.Device
) -> Config:
    """The config where no table has one: of the ladder, the one that is done first.

    Time is counted, not measured: how many tiles the busiest multiprocessor has, times the work per tile.
    That is its area and, for operands that move through shared memory, `OPERAND_WORK` for each of its rows
    and columns. Among equally good configs, larger tiles win.
    """

    def time(config: Config) -> int:
        return work(config, rows, out_features, device)

    return min(ladder(dtype, aligned, device.capability), key=time)


def work(config: Config, rows: int, out_features: int, device: tuning.Device) -> int:
    """The counted time of `heuristic`: the work of the multiprocessor that has most tiles."""
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(out_features, config.block_n)
    area, edges = config.block_m * config.block_n, config.block_m + config.block_n
    return triton.cdiv(tiles, device.multiprocessors) * (area + OPERAND_WORK * edges)


def ladder(dtype: torch.dtype, aligned: bool, capability: tuple[int, int]) -> tuple[Config, ...]:
    """Configs from large tiles to small ones; all of them fit the GPU's shared memory and do not spill."""
    bias_first = dtype != torch.float32 and capability[0] != 10
    return tuple(c._replace(bias_first=bias_first) for c in _tiles(dtype, aligned, capability))


def _tiles(dtype: torch.dtype, aligned: bool, capability: tuple[int, int]) -> tuple[Config, ...]:
    if capability == (0, 0):
        # Small, so that small tests have several tiles.
        sizes = ((32, 64, 64), (16, 32, 32))
        return tuple(Config(*size, 4, 2, 2, tma=aligned, group_m=2) for size in sizes)
    if dtype == torch.float32 or not aligned:
        # No tensor cores, or elements that are loaded one by one.
        sizes = ((64, 64, 32), (32, 32, 32))
        return tuple(Config(*size, 4, 2, 1, tma=False, per_multiprocessor=2) for size in sizes)
    if capability[0] in (9, 10):
        return (
            Config(128, 256, 64, 8, 3, 4, tma=True),
            Config(128, 128, 64, 8, 4, 2, tma=True),
            Config(64, 64, 64, 4, 5, 1, tma=True, per_multiprocessor=2),
        )
    if capability[0] == 12:
        # 99 KB of shared memory; two programs of the small tiles fit into 100.
        return (
            Config(128, 128, 64, 8, 3, 2, tma=True),
            Config(64, 64, 64, 4, 3, 1, tma=True, per_multiprocessor=2),
            Config(32, 64, 64, 4, 4, 1, tma=True, per_multiprocessor=2),
        )
    # The smallest of these GPUs have 99 KB too.
    return (
        Config(128, 128, 32, 8, 4, 4, tma=False),
        Config(64, 64, 64, 4, 4, 1, tma=False, per_multiprocessor=2),
        Config(32, 64, 64, 4, 4, 1, tma=False, per_multiprocessor=2),
    )


def shared_memory(config: Config, dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """An upper bound of the bytes that a program of `config` takes, whatever its epilogue does."""
    stages = config.num_stages
    if dtype == torch.float32 or capability[0] not in (9, 10):
        # The tile in use lies in registers.
        stages = max(1, stages - 1)
    elements = stages * (config.block_m + config.block_n) * config.block_k
    if config.tma:
        # A part on its way out, and the residual on its way to the layout of the product.
        elements += 2 * config.block_m * config.block_n // config.split
    # 1024: barriers.
    return elements * dtype.itemsize + 1024


def candidates(dtype: torch.dtype, capability: tuple[int, int]) -> tuple[Config, ...]:
    """What a tuner may choose from for aligned matrices.

    The ladder, its neighbours in stages and in `group_m`, and in half precision `space`, as far as they fit
    into shared memory. Small tiles are for few rows. bench/tune.py times the few with the least `work`.
    """
    found = ladder(dtype, True, capability)
    if capability == (0, 0):
        return found
    more = [c._replace(num_stages=c.num_stages + 1) for c in found]
    more += space(dtype, capability)
    more += [c._replace(group_m=group) for c in found for group in (4, 16)]
    more += [c._replace(num_stages=c.num_stages - 1) for c in found]
    room = most_shared(capability)
    fit = [c for c in more if c.num_stages >= 2 and shared_memory(c, dtype, capability) <= room]
    return tuple(dict.fromkeys((*found, *fit)))


# (rows, columns, warps) of the tiles that a tuner may try, in half precision. A warp group's product is 64
# rows high: two on one such tile would cut its columns, whose parts then take more room than is counted.
SHAPES = (
    (128, 256, 8),
    (64, 256, 4),
    (256, 128, 8),
    (128, 128, 8),
    (128, 128, 4),
    (128, 64, 4),
    (128, 64, 8),
    (256, 64, 8),
    (64, 128, 4),
    (64, 64, 4),
    (32, 64, 4),
    (32, 128, 4),
    (16, 64, 4),
    (16, 128, 4),
)
# Depth of a tile -> the most stages of it that are tried.
DEPTHS = {64: 6, 128: 4, 32: 6}


def space(dtype: torch.dtype, capability: tuple[int, int]) -> tuple[Config, ...]:
    """`SHAPES` in every depth, with as many stages as fit, for one program per multiprocessor and for two.

    The accumulators of a thread are counted: more than `most` spill, as compiling showed.
    """
    if dtype == torch.float32:
        return ()
    tma = capability[0] in (9, 10, 12)
    # With TMA a thread holds no addresses; on capability 12 operands are in registers.
    most = 128 if capability[0] in (9, 10) else 64
    found = []
    for (block_m, block_n, warps), (depth, stages) in itertools.product(SHAPES, DEPTHS.items()):
        held = block_m * block_n // (32 * warps)
        if held > most or (depth == 32 and tma):
            continue
        # Parts of 32 elements per thread.
        base = Config(block_m, block_n, depth, warps, stages, max(1, held // 32), tma)
        base = base._replace(bias_first=capability[0] != 10)
        # Two programs share the registers if they have 4 warps each.
        for programs in (1, 2) if warps == 4 else (1,):
            room = most_shared(capability) // programs
            fit = (base._replace(num_stages=n) for n in range(stages, 1, -1))
            fit = (c for c in fit if shared_memory(c, dtype, capability) <= room)
            found += [c._replace(per_multiprocessor=programs) for c in itertools.islice(fit, 1)]
    return tuple(dict.fromkeys(found))


def most_shared(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a program may have; CUDA C++ Programming Guide, compute capabilities."""
    if capability[0] in (9, 10):
        return 227 * 1024
    return (163 if capability in ((8, 0), (8, 7)) else 99) * 1024


def tuning_key(
    in_features: int, out_features: int, activation: str | None, residual: bool, dtype: torch.dtype
) -> str:
    """The key of this computation in kernels/tuned: "bfloat16 768x3072 gelu"."""
    words = [str(dtype).removeprefix("torch."), f"{in_features}x{out_features}"]
    return " ".join(words + ([activation] if activation else []) + (["residual"] if residual else []))


@lru_cache(maxsize=16384)
def config_for(
    rows: int,
    in_features: int,
    out_features: int,
    activation: str | None,
    residual: bool,
    dtype: torch.dtype,
    aligned: bool,
    device: tuning.Device,
) -> Config:
    """The config of the GPU's table, which is for aligned matrices; else the heuristic's."""
    key = tuning_key(in_features, out_features, activation, residual, dtype)
    found = tuning.tuned(device, "linear", key, tuning.bucket(rows), below=False) if aligned else None
    if found is not None:
        return Config(**found)
    # Fewer rows than a unit are a whole one: the heuristic knows no tiles for less.
    return heuristic(max(rows, ROW_UNIT), out_features, dtype, aligned, device)


def fits_tensor_map(*matrices: Tensor) -> bool:
    """Whether starts and rows lie on 16 bytes and no two rows overlap: what a tensor map can describe."""
    return all(
        t.data_ptr() % 16 == 0
        and t.stride(0) * t.element_size() % 16 == 0
        and t.stride(0) >= t.shape[1]
        # The stride of a single column may be anything.
        and t.stride(1) == 1
        for t in matrices
    )


def linear_fwd(inputs: LinearInputs, save: bool) -> tuple[Tensor, Tensor]:
    """(y, pre): the contract of `fastbert.ops.linear.linear_fwd`, without panels and gates."""
    x, weight, _, activation, residual, *_ = inputs
    out_features = weight.shape[0]
    aligned = fits_tensor_map(x, weight) and out_features * x.element_size() % 16 == 0
    config = config_for(
        counted(x.shape[0]),
        x.shape[1],
        out_features,
        activation,
        residual is not None,
        x.dtype,
        aligned,
        tuning.device_of(x.device),
    )
    return linear_fwd_with(config, inputs, save)


def linear_fwd_with(config: Config, inputs: LinearInputs, save: bool) -> tuple[Tensor, Tensor]:
    """`linear_fwd` with a given config, for the tuner and the tests; TMA needs aligned matrices."""
    x, weight, bias, activation, residual, *_ = inputs
    rows, out_features = x.shape[0], weight.shape[0]
    y = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    pre = torch.empty_like(y) if save and activation is not None else x.new_empty((0,))
    if rows == 0:
        return y, pre
    saved = pre if pre.numel() > 0 else None
    x_arg, weight_arg, y_arg, pre_arg = x, weight, y, saved
    if config.tma:
        part = [config.block_m, config.block_n // config.split]
        x_arg = TensorDescriptor.from_tensor(x, [config.block_m, config.block_k])
        weight_arg = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])
        y_arg = TensorDescriptor.from_tensor(y, part)
        pre_arg = None if saved is None else TensorDescriptor.from_tensor(saved, part)
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(out_features, config.block_n)
    programs = min(tiles, tuning.device_of(x.device).multiprocessors * config.per_multiprocessor)
    launch(
        _linear_fwd_kernel,
        (programs,),
        x.device,
        *(x_arg, weight_arg, None, bias, None, residual, y_arg, pre_arg, None),
        *(x.stride(0), weight.stride(0), y.stride(0), 0 if residual is None else residual.stride(0), rows),
        IN=x.shape[1],
        OUT=out_features,
        ACTIVATION=activation,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        SPLIT=config.split,
        TMA=config.tma,
        EXACT=activation_kernels.EXACT_GELU,
        BIAS_FIRST=config.bias_first,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=MOST_REGISTERS,
    )
    return y, pre
