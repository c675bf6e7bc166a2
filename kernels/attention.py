"""Multi-head attention over packed sequences of any lengths, with bias, gate and dropout; forward.

Math       S = softmax_scale * q kᵀ + bias;  P = softmax(S) per row;  lse = log Σ_j exp S_ij
           out = gate * dropout(P) v.  A row without an allowed key has out 0, lse -inf and probs 0.
           Scores of distances are added to the bias (attention_relative.py, with what they cost).
Tiling     A program owns BLOCK_M queries of one sequence and head. It walks over their keys, BLOCK_N at a
           time, with an online softmax. The host knows only `total`, so a slot of the grid finds its sequence
           and tile in a table of places, made once per forward (attention_places.py); the longest sequence
           comes first, so that the last programs to start are short. Heads vary fastest: a token's heads are
           neighbours in memory. Slots after the last tile zero the rows after the last sequence. q, k, v are
           read in place, through their strides; heads of q that share a head of k and v read it in turn. Only
           the last block of keys is masked (causal: the blocks on the diagonal). Blocks that a window hides
           from all rows are not visited. The blocks at its edges are masked; where few are whole, all are.
Precision  Products of the storage type are summed in float32 (float32: IEEE products, no TF32). Softmax in
           float32, exp as exp2. P is rounded to the storage type for P v; out is rounded once, at the store.
           Without a bias the scale is folded into exp2's factor. With one, the maximum is subtracted before
           the factor: a mask of float32's lowest value must not overflow to -inf.
Saved      lse. Probabilities, where asked for, are computed again from the final maximum and sum. Their grid
           holds every tile of max_seqlen, because cells outside a sequence are written too.
           Dropout bits: plane = head, row = row in the packed layout, column = key in its sequence.
Files      attention_places.py: the table. attention_tiles.py: what forward and backward share.
           attention_forward.py: the kernel. Here: how the work is cut, and the launch.
Source     Milakov, Gimelshein 2018, Online normalizer calculation for softmax, alg. 3;
           Dao 2023, FlashAttention-2, alg. 1.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from fastbert.kernels import tuning
from fastbert.kernels.attention_forward import _attention_fwd_kernel
from fastbert.kernels.attention_places import attention_places
from fastbert.kernels.attention_relative import relative_args
from fastbert.kernels.attention_slots import HEIGHTS, grid, in_planes, sections, slots
from fastbert.kernels.attention_tiles import LOG2_E, sides_of, span_of, words_of
from fastbert.kernels.launch import MOST_REGISTERS, launch
from fastbert.kernels.philox import as_int32_bits, threshold_bits

if TYPE_CHECKING:
    from fastbert.ops.attention import AttentionInputs
    from fastbert.ops.attention_relative import RelativeScores

# Wider heads would spill.
MAX_HEADDIM = 128
# Tiles of keys without a mask that are worth a loop of their own in a window.
_WHOLE = 4
_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


def _most_registers(headdim: int, dtype: torch.dtype) -> int | None:
    """The limit of registers per thread under which ptxas spills nothing; None: no limit.

    Found by compiling. In float32 the ptxas of Triton 3.6 needs a limit for wide heads; that of 3.9 spills to
    reach one.
    """
    if dtype != torch.float32:
        return MOST_REGISTERS
    return 168 if headdim > 64 and _TRITON < (3, 9) else None


class Config(NamedTuple):
    """How the work is cut.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        chunk: head dimensions per product of q and k; all of them where q stays in registers.
        split: whether the blocks of keys that need no mask have their own loop.
        num_warps, num_stages: Triton's.
    """

    block_m: int
    block_n: int
    chunk: int
    split: bool
    num_warps: int
    num_stages: int


def extras_of(bias: bool, dropout: bool, probs: bool, relative: bool = False, window: bool = False) -> str:
    """What a call has beside the products, which needs registers.

    "", "dropout" alone, or other "extras"; with scores of distances "relative", or "most" if there is a bias
    or a window or probabilities as well.
    """
    if relative:
        return "most" if bias or probs or window else "relative"
    return "extras" if bias or probs else "dropout" if dropout else ""


def ladder(headdim: int, dtype: torch.dtype, extras: str, capability: tuple[int, int]) -> tuple[Config, ...]:
    """Configs from high tiles to low ones; none of them spills.

    `extras`: a result of `extras_of`.
    """
    block_d = max(16, triton.next_power_of_2(headdim))
    if dtype == torch.float32:
        # Products without tensor cores hold whole rows of their operands.
        if headdim > 64:
            return (Config(16, 16, 16, False, 8, 1),)
        return (Config(32, 16, 16, False, 8 if headdim > 32 and capability[0] == 12 else 4, 1),)
    low = Config(32, 32, block_d, False, 4, 2)
    if extras == "most" or (extras == "relative" and headdim > 64):
        return (low,)
    if extras == "dropout" and capability[0] == 9 and 16 < headdim <= 64:
        return Config(64, 64, block_d, True, 4, 2), low
    if extras:
        return Config(64, 32, block_d, False, 4, 2), low
    if headdim > 64 and capability[0] not in (9, 10):
        # The operands are in registers: 64 keys would spill.
        return Config(64, 32, block_d, True, 4, 2), low
    if headdim > 64 or headdim <= 16:
        return Config(64, 64, block_d, True, 4, 2), low
    middle = Config(64, 64, block_d, True, 4, 3)
    if capability[0] == 9:
        # A warp group's product is 64 rows high: two are in flight.
        return Config(128, 64, block_d, True, 4, 3), middle, low
    return middle, low


# By major capability: (queries, keys, warps, stages) that a tuner may try with dropout or other extras, for
# heads of 33 to 64 dimensions. Compiling showed that they do not spill.
EXTRA_TILES = {
    9: (
        (64, 64, 4, 2),
        (128, 64, 8, 2),
        (64, 32, 4, 3),
        (64, 64, 8, 2),
        (128, 32, 8, 2),
        (128, 64, 8, 3),
    ),
}


def candidates(
    headdim: int, dtype: torch.dtype, extras: str, capability: tuple[int, int]
) -> tuple[Config, ...]:
    """What a tuner may choose from: the ladder, then configs that only a measurement can rank."""
    found = ladder(headdim, dtype, extras, capability)
    block_d = max(16, triton.next_power_of_2(headdim))
    if dtype == torch.float32 or block_d > 64 or extras in ("relative", "most"):
        return found
    if extras:
        tiles = EXTRA_TILES.get(capability[0], ()) if block_d == 64 else ()
        more = [Config(m, n, block_d, extras == "dropout", *rest) for m, n, *rest in tiles]
        return tuple(dict.fromkeys((*found, *more)))
    more = (
        Config(128, 64, block_d, True, 8, 2),
        Config(64, 64, block_d, True, 4, 2),
        Config(128, 128, block_d, True, 8, 2),
        Config(128, 64, block_d, True, 4, 2),
        Config(64, 128, block_d, True, 4, 2),
    )
    # The float32 values of scores and of out that a thread can hold; with more it spills. From sm_90 on the
    # operands of a product may stay in shared memory.
    most = {9: 128, 10: 96}.get(capability[0], 64)
    more = [c for c in more if c.block_m * (c.block_n + block_d) <= most * 32 * c.num_warps]
    return found + tuple(config for config in more if config not in found)


def heuristic(configs: tuple[Config, ...], max_seqlen: int, rows: int, multiprocessors: int) -> Config:
    """The highest tiles that a sequence fills and of which there are enough for the device.

    `rows`: the number of queries, summed over the heads.
    """
    for config in configs:
        programs = triton.cdiv(rows, config.block_m)
        if config.block_m <= max_seqlen and 4 * programs >= 3 * multiprocessors:
            return config
    return configs[-1]


def tuning_key(headdim: int, dtype: torch.dtype, extras: str) -> str:
    """The key of this computation in kernels/tuned, such as "bfloat16 64" or "bfloat16 64 dropout"."""
    return f"{str(dtype).removeprefix('torch.')} {headdim} {extras}".rstrip()


@lru_cache(maxsize=4096)
def config_for(
    headdim: int,
    dtype: torch.dtype,
    extras: str,
    seqlen_bucket: int,
    rows_bucket: int,
    device: tuning.Device,
) -> Config:
    """The config of the GPU's table where there is work for the whole GPU, else the heuristic's.

    Both are looked up by the bucket of max_seqlen.
    """
    configs = ladder(headdim, dtype, extras, device.capability)
    chosen = heuristic(configs, 2**seqlen_bucket, 2**rows_bucket, device.multiprocessors)
    if triton.cdiv(2**rows_bucket, configs[0].block_m) < device.multiprocessors:
        return chosen
    found = tuning.tuned(device, "attention", tuning_key(headdim, dtype, extras), seqlen_bucket, below=False)
    return chosen if found is None else Config(**found)


def attention_fwd(
    inputs: "AttentionInputs",
    return_probs: bool,
    save_bits: bool,
    places: Tensor | None = None,
    relative: "RelativeScores | None" = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, probs, keep_bits): the contract of `fastbert.ops.attention.attention_fwd`.

    headdim is at most MAX_HEADDIM.
    """
    q = inputs.q
    total, nheads, headdim = q.shape
    config = config_for(
        headdim,
        q.dtype,
        extras_of(
            *(inputs.bias is not None, inputs.dropout_p > 0, return_probs, relative is not None),
            sides_of(inputs)[:2] != (None, None),
        ),
        tuning.bucket(span_of(inputs)),
        tuning.bucket(total * nheads),
        tuning.device_of(q.device),
    )
    return attention_fwd_with(config, inputs, return_probs, save_bits, places, relative)


def attention_fwd_with(
    config: Config,
    inputs: "AttentionInputs",
    return_probs: bool,
    save_bits: bool,
    places: Tensor | None = None,
    relative: "RelativeScores | None" = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention_fwd` with a given config, for the tuner and the tests."""
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, _, bias, gate, dropout_p, seed, offset = inputs
    total, nheads, headdim = q.shape
    batch = cu_seqlens.shape[0] - 1
    seed = seed if dropout_p > 0 else None
    out = torch.empty((total, nheads, headdim), dtype=q.dtype, device=q.device)
    lse = torch.empty((nheads, total), dtype=torch.float32, device=q.device)
    shape = (batch, nheads, max_seqlen, max_seqlen) if return_probs else (0,)
    probs = torch.empty(shape, dtype=q.dtype, device=q.device)
    shape = (nheads, total, triton.cdiv(max_seqlen, 32)) if save_bits else (0,)
    keep_bits = torch.empty(shape, dtype=torch.int32, device=q.device)
    if total == 0 and probs.numel() == 0:
        return out, lse, probs, keep_bits
    # Without a bias the greatest product is the greatest score, unless the scale turns the order.
    folded = bias is None and relative is None and softmax_scale > 0
    left, right, causal = sides_of(inputs)
    split = config.split
    if left is not None and right is not None:
        split = split and left + right >= config.block_m + _WHOLE * config.block_n
    n_tiles = max(1, triton.cdiv(max_seqlen, config.block_m))
    first_slot = 0
    if return_probs:
        places, n_slots = None, in_planes(n_tiles * (batch + 1))
    else:
        if places is None:
            places = attention_places(cu_seqlens, total, max_seqlen)
        first_slot = sections(total, batch, max_seqlen)[HEIGHTS.index(config.block_m)]
        n_slots = slots(config.block_m, total, batch, max_seqlen)
    bias_strides = (0,) * 4
    if bias is not None:
        # A dimension of size 1 is shared: its stride is 0.
        bias_strides = tuple(s if n > 1 else 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
    words = words_of(keep_bits, config.block_n) if save_bits else None
    launch(
        _attention_fwd_kernel,
        grid(n_slots, nheads),
        q.device,
        *(q, k, v, places, cu_seqlens.contiguous() if return_probs else None, bias, gate, seed, out, lse),
        *(probs if return_probs else None, words, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        *(*bias_strides, *out.stride()[:2], lse.stride(0)),
        *(*(probs.stride()[:3] if return_probs else (0, 0, 0)), 0 if words is None else words.shape[2]),
        *(first_slot, total, batch, n_tiles, max_seqlen, softmax_scale),
        *((softmax_scale if folded else 1.0) * LOG2_E, as_int32_bits(offset), threshold_bits(dropout_p)),
        *(1.0 / (1.0 - dropout_p), left, right, *relative_args(relative)),
        HEAD_DIM=headdim,
        GROUP=nheads // k.shape[1],
        CAUSAL=causal,
        FOLDED=folded,
        BIAS_HAS_ROWS=bias is not None and bias.shape[2] > 1,
        SPLIT=split,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(headdim)),
        CHUNK=config.chunk,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        maxnreg=_most_registers(headdim, q.dtype),
    )
    return out, lse, probs, keep_bits
