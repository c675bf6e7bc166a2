"""Backward of multi-head attention over packed sequences: dq, dk, dv, dbias, dgate from out and lse.

Math       P = exp(S - lse);  D = dropout(P);  delta = rowsum(dout ∘ out);  dP = gate * dropout'(dout vᵀ)
           dS = P ∘ (dP - delta);  dq = scale * dS k;  dk = scale * dSᵀ q;  dv = gate * Dᵀ dout
           dbias = Σ dS over its broadcast dimensions;  dgate = Σ_rows rowsum(D ∘ (dout vᵀ))
Tiling     Three kernels. Each sum is made in registers and in one order: no atomics.
           dq: BLOCK_M queries of a sequence and head walk over its keys. The kernel also writes delta, the
           normaliser of P, and each row's share of dgate.
           dk and dv: BLOCK_N keys walk over the queries. Their tiles are transposed, so that P and dS stay in
           registers as the left operand of a product. With fewer heads of k and v, BLOCK_N keys walk over the
           queries of each head that reads them, one head after the other.
           Tiles that a window hides are not visited.
           dbias: a tile of the bias walks over all sequences and heads (queries, keys) that share it. A small
           bias is summed in several parts, which are added at the end. Gradients of scores of distances are
           sums of the dense dS, which this kernel makes as the gradient of a bias (attention_relative.py).
           Slots of the grid as in kernels/attention.py; slots after the last tile zero the tail.
Precision  As in forward: products of the storage type are summed in float32; P and dS are rounded to the
           storage type before their product; the rest is float32, rounded once at the store. lse carries the
           rounding of a large sum (at a mask of float32's lowest value it has lost the sum itself), so the
           first kernel adds up exp(S - lse), and all kernels divide by that sum.
           out is rounded, and delta with it. Where a query sees one key, or nearly so, dS is smaller than
           that rounding. A row of dS sums to 0, so in half precision the first kernel sums it, divides the
           result by the normaliser and corrects delta by that. Where the correction is more than the rounding
           of dS itself, a second launch computes the tile again with the corrected delta.
Saved      out, lse and, where fastbert.ops.dropout.SAVED_ON says so, dropout's bits. Else the bits are drawn
           again from the seed: once for dq, once for dk and dv.
Files      attention_dq.py, attention_dkdv.py, attention_dbias.py: a kernel each. attention_backward_tiles.py:
           what they share. Here: how the work is cut, and the launches.
Source     Dao 2023, FlashAttention-2, alg. 2; delta: Dao et al. 2022, FlashAttention, app. B.2.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from fastbert.kernels import tuning
from fastbert.kernels.attention_dbias import _attention_bwd_dbias_kernel
from fastbert.kernels.attention_dkdv import _attention_bwd_dkdv_kernel
from fastbert.kernels.attention_dq import _attention_bwd_dq_kernel
from fastbert.kernels.attention_places import attention_places
from fastbert.kernels.attention_relative import relative_args, relative_bwd
from fastbert.kernels.attention_slots import HEIGHTS, grid, sections, slots
from fastbert.kernels.attention_tiles import LOG2_E, sides_of, span_of, words_of
from fastbert.kernels.launch import MOST_REGISTERS, launch
from fastbert.kernels.philox import as_int32_bits, threshold_bits

if TYPE_CHECKING:
    from fastbert.ops.attention import AttentionInputs
    from fastbert.ops.attention_inputs import AttentionNeeds
    from fastbert.ops.attention_relative import RelativeScores


# With scores of distances, wider heads would spill.
MAX_RELATIVE_HEADDIM = 64


class Config(NamedTuple):
    """How the work of one kernel is cut.

    Attributes:
        block_m, block_n: queries and keys of a tile.
        chunk: head dimensions per product over them; all of them where tiles stay in registers.
        num_warps, num_stages: Triton's.
        max_registers: the limit per thread. Some kernels spill to reach a limit, others without one.
    """

    block_m: int
    block_n: int
    chunk: int
    num_warps: int
    num_stages: int
    max_registers: int | None = MOST_REGISTERS


class Configs(NamedTuple):
    """One config per kernel."""

    dq: Config
    dkdv: Config
    dbias: Config


def ladder(
    headdim: int, dtype: torch.dtype, extras: bool, saved: bool, capability: tuple[int, int]
) -> tuple[Configs, ...]:
    """Configs from high tiles to low ones; none of them spills.

    `extras`: whether there is a bias, or bits of dropout to draw, which need registers. `saved`: whether
    there are saved bits, which need few.
    """
    block_d = max(16, triton.next_power_of_2(headdim))
    if dtype == torch.float32:
        # Products without tensor cores hold whole rows of their operands. Compiling showed what spills.
        most = {True: MOST_REGISTERS, False: None}
        dq = dkdv = dbias = Config(16, 16, min(32, block_d), 8, 1, most[headdim <= 32])
        if capability[0] == 12:
            dkdv = dkdv._replace(max_registers=most[headdim <= 32 or headdim > 64])
            dbias = dbias._replace(max_registers=most[headdim <= 64])
        return (Configs(dq, dkdv, dbias),)
    # The products of warp groups are 64 rows high and read from shared memory.
    warp_groups = capability[0] in (9, 10)
    wide = headdim > 64
    low = Config(32, 32, block_d, 4, 2)
    lowest = low._replace(num_stages=1) if wide and extras else low
    dq, dkdv = low, lowest
    if not (wide and extras) or capability[0] == 10:
        square = not (wide or extras) and (not saved or warp_groups or headdim <= 32)
        dq = Config(64, 64 if square else 32, block_d, 4, 2)
    if not (wide or extras) or (warp_groups and not (wide and extras and capability[0] == 9)):
        square = capability[0] == 9 and not (wide or extras)
        dkdv = Config(64 if square else 32, 64, block_d, 4, 2)
    dbias = Config(32, 16 if wide else 32, block_d, 4, 1)
    return Configs(dq, dkdv, dbias), Configs(low, lowest, dbias)


# By major capability and kernel: (queries, keys, warps, stages) that a tuner may try beside the ladder, for
# heads of 33 to 64 dimensions without a bias or bits to draw.
TILES: dict[tuple[int, str], tuple[tuple[int, int, int, int], ...]] = {
    (9, "dq"): (
        (128, 64, 8, 2),
        (64, 32, 4, 2),
        (64, 64, 8, 2),
        (128, 32, 8, 2),
        (64, 32, 4, 3),
    ),
    (9, "dkdv"): ((32, 64, 4, 2), (64, 64, 8, 2), (64, 64, 4, 3), (32, 64, 4, 3)),
}
# The kernels that have entries of their own in kernels/tuned.
TUNED_PARTS = ("dq", "dkdv")


def candidates(
    part: str, headdim: int, dtype: torch.dtype, extras: bool, saved: bool, capability: tuple[int, int]
) -> tuple[Config, ...]:
    """What a tuner may choose from for a kernel: the ladder's, then tiles that only a measurement can rank.

    The tiles are for heads of BERT's width, without a bias or bits to draw; compiling showed what spills.
    """
    found = [getattr(c, part) for c in ladder(headdim, dtype, extras, saved, capability)]
    if dtype != torch.float32 and 32 < headdim <= 64 and not extras:
        tiles = TILES.get((capability[0], part), ())
        found += [Config(m, n, 64, *rest) for m, n, *rest in tiles]
    return tuple(dict.fromkeys(found))


def tuning_key(part: str, headdim: int, dtype: torch.dtype, extras: bool, saved: bool) -> str:
    """The key of a kernel in kernels/tuned: "bfloat16 64 dq", "bfloat16 64 saved dkdv", "… extras …"."""
    kind = ["extras"] if extras else ["saved"] if saved else []
    return " ".join([str(dtype).removeprefix("torch."), str(headdim), *kind, part])


@lru_cache(maxsize=4096)
def configs_for(
    headdim: int,
    dtype: torch.dtype,
    extras: bool,
    saved: bool,
    seqlen_bucket: int,
    rows_bucket: int,
    device: tuning.Device,
) -> Configs:
    """The configs of the GPU's table where there is work for the whole GPU, else the heuristic's."""
    rungs = ladder(headdim, dtype, extras, saved, device.capability)
    chosen = heuristic(rungs, 2**seqlen_bucket, 2**rows_bucket, device.multiprocessors)
    if triton.cdiv(2**rows_bucket, _height(rungs[0])) < device.multiprocessors:
        return chosen
    for part in TUNED_PARTS:
        key = tuning_key(part, headdim, dtype, extras, saved)
        found = tuning.tuned(device, "attention_bwd", key, seqlen_bucket, below=False)
        if found is not None:
            chosen = chosen._replace(**{part: Config(**found)})
    return chosen


def lowered(configs: Configs, placed: bool = False) -> Configs:
    """Tiles for what takes registers: scores of distances, a window beside a bias or bits to draw.

    `placed`: whether there are positions, which take more.
    """
    dq, dkdv, dbias = (c._replace(block_m=min(c.block_m, 32), block_n=min(c.block_n, 32)) for c in configs)
    if placed:
        dq, dkdv = dq._replace(block_n=16), dkdv._replace(block_m=16)
    return Configs(dq, dkdv._replace(num_stages=1), dbias._replace(block_n=16))


def _height(configs: Configs) -> int:
    """The rows of the highest tile."""
    return max(configs.dq.block_m, configs.dkdv.block_n)


def heuristic(rungs: tuple[Configs, ...], max_seqlen: int, rows: int, multiprocessors: int) -> Configs:
    """The highest tiles that a sequence fills and of which there are enough for the device.

    `rows`: the number of queries, summed over the heads.
    """
    for configs in rungs:
        high = _height(configs)
        if high <= max_seqlen and 4 * triton.cdiv(rows, high) >= 3 * multiprocessors:
            return configs
    return rungs[-1]


def _gradients(q: Tensor, k: Tensor, v: Tensor, need: "AttentionNeeds") -> tuple[Tensor, ...]:
    """Memory for dq, dk and dv: side by side where q, k and v are, which saves a copy."""
    total, _, headdim = q.shape
    heads = [t.shape[1] for t in (q, k, v)]
    of_q, of_k = (n * headdim * q.element_size() for n in heads[:2])
    aside = k.data_ptr() - q.data_ptr() == of_q and v.data_ptr() - k.data_ptr() == of_k
    strides = (sum(heads) * headdim, headdim, 1)
    if all(need[:3]) and total > 0 and aside and q.stride() == k.stride() == v.stride() == strides:
        return torch.empty((total, sum(heads), headdim), dtype=q.dtype, device=q.device).split(heads, 1)
    shapes = (t.shape if needed else (0,) for t, needed in zip((q, k, v), need[:3], strict=True))
    return tuple(torch.empty(shape, dtype=q.dtype, device=q.device) for shape in shapes)


def attention_bwd(
    dout: Tensor,
    inputs: "AttentionInputs",
    out: Tensor,
    lse: Tensor,
    keep_bits: Tensor | None,
    need: "AttentionNeeds",
    places: Tensor | None = None,
    relative: "RelativeScores | None" = None,
    need_scores: Sequence[bool] = (False, False, False),
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dbias, dgate): the contract of `fastbert.ops.attention.attention_bwd`.

    With `relative` the gradients of its query, key and bias follow, in float32. headdim is at most
    `fastbert.kernels.attention.MAX_HEADDIM`, with `relative` MAX_RELATIVE_HEADDIM.
    """
    q, dropped = inputs.q, inputs.dropout_p > 0
    total, nheads, headdim = q.shape
    extras = inputs.bias is not None or relative is not None or (dropped and keep_bits is None)
    configs = configs_for(
        *(headdim, q.dtype, extras, dropped and keep_bits is not None, tuning.bucket(span_of(inputs))),
        *(tuning.bucket(total * nheads), tuning.device_of(q.device)),
    )
    if relative is not None or (extras and sides_of(inputs)[:2] != (None, None)):
        configs = lowered(configs, relative is not None and relative.positions is not None)
    saved = out, lse, keep_bits
    found = attention_bwd_with(configs, dout, inputs, *saved, need, places, relative, need_scores)
    if relative is None:
        return found[:5]
    return *found[:5], *relative_bwd(found[5], relative, need_scores, inputs.cu_seqlens.contiguous(), total)


def attention_bwd_with(
    configs: Configs,
    dout: Tensor,
    inputs: "AttentionInputs",
    out: Tensor,
    lse: Tensor,
    keep_bits: Tensor | None,
    need: "AttentionNeeds",
    places: Tensor | None = None,
    relative: "RelativeScores | None" = None,
    need_scores: Sequence[bool] = (False, False, False),
) -> tuple[Tensor, ...]:
    """`attention_bwd` with given configs, for the tuner and the tests; with dS for the gradients of scores.

    dS is (batch, nheads, S, S); a batch of 1, its sum, where neither rows nor positions need it; (0,) where
    nothing needs it.
    """
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, _, bias, gate, dropout_p, seed, offset = inputs
    need_dq, need_dk, need_dv, need_dbias, need_dgate = need
    total, nheads, headdim = q.shape
    batch = cu_seqlens.shape[0] - 1
    seed, keep_bits = (seed, keep_bits) if dropout_p > 0 else (None, None)
    dq, dk, dv = _gradients(q, k, v, need)
    if total == 0:
        sizes = bias.shape if need_dbias else (0,), gate.shape if need_dgate else (0,), (0,)
        return dq, dk, dv, *(torch.zeros(size, dtype=torch.float32, device=q.device) for size in sizes)
    # Per row: delta, the normaliser of P, the share of dgate.
    rows = torch.empty((3 if need_dgate else 2, nheads, total), dtype=torch.float32, device=q.device)
    delta, norm = rows[0], rows[1]
    dgate_rows = rows[2] if need_dgate else None
    left, right, causal = sides_of(inputs)
    of_distances = relative_args(relative)
    # As in forward.
    folded = bias is None and relative is None and softmax_scale > 0
    cu_seqlens = cu_seqlens.contiguous()
    bias_strides = (0,) * 4
    if bias is not None:
        # A dimension of size 1 is shared: its stride is 0.
        bias_strides = tuple(s if n > 1 else 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
    strides = tuple(s for t in (dout, q, k, v) for s in t.stride()[:2])
    dropout = as_int32_bits(offset), threshold_bits(dropout_p), 1.0 / (1.0 - dropout_p)
    scales = softmax_scale, (softmax_scale if folded else 1.0) * LOG2_E, *dropout
    if places is None:
        places = attention_places(cu_seqlens, total, max_seqlen)
    firsts = dict(zip(HEIGHTS, sections(total, batch, max_seqlen), strict=False))
    shared = {
        "HEAD_DIM": headdim,
        "GROUP": nheads // k.shape[1],
        "CAUSAL": causal,
        "BIAS_HAS_ROWS": bias is not None and bias.shape[2] > 1,
        "BLOCK_D": max(16, triton.next_power_of_2(headdim)),
    }

    def words(block_n: int) -> tuple[Tensor | None, int]:
        found = None if keep_bits is None else words_of(keep_bits, block_n)
        return found, 0 if found is None else found.shape[2]

    # The storage type's relative rounding; 0 for float32, whose delta is as good as its sums.
    rounding = 0.0 if q.dtype == torch.float32 else torch.finfo(q.dtype).eps / 2
    config = configs.dq
    n_slots = slots(config.block_m, total, batch, max_seqlen)
    bits, bits_stride = words(config.block_n)
    rough = None
    if rounding > 0:
        rough = torch.empty((n_slots, nheads), dtype=torch.int32, device=q.device)
    for again in (False, True) if rounding > 0 and need_dq else (False,):
        launch(
            _attention_bwd_dq_kernel,
            grid(n_slots, nheads),
            q.device,
            *(dout, q, k, v, out, lse, places, bias, gate, seed, bits, dq if need_dq else None, delta, norm),
            *(dgate_rows, rough, *strides, *out.stride()[:2], *bias_strides),
            *(*(dq.stride()[:2] if need_dq else (0, 0)), lse.stride(0), bits_stride, firsts[config.block_m]),
            *(nheads, total, batch, *scales, left, right, *of_distances),
            FOLDED=folded,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            CHUNK=config.chunk,
            NUM_STAGES=config.num_stages,
            ROUNDING=0.0 if again else rounding,
            AGAIN=again,
            num_warps=config.num_warps,
            maxnreg=config.max_registers,
            **shared,
        )
    if need_dk or need_dv:
        config = configs.dkdv
        bits, bits_stride = words(config.block_n)
        launch(
            _attention_bwd_dkdv_kernel,
            grid(slots(config.block_n, total, batch, max_seqlen), k.shape[1]),
            q.device,
            *(dout, q, k, v, lse, places, bias, gate, seed, bits, rows, dk if need_dk else None),
            *(dv if need_dv else None, *strides, *bias_strides, *(dk if need_dk else dv).stride()[:2]),
            *(lse.stride(0), bits_stride, firsts[config.block_n], nheads, total, batch, *scales, left, right),
            *of_distances,
            FOLDED=folded,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            CHUNK=config.chunk,
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
            maxnreg=config.max_registers,
            **shared,
        )

    def summed_ds(shape: tuple[int, ...]) -> Tensor:
        """dS, summed to the shape of a bias."""
        config = configs.dbias
        tiles = triton.cdiv(shape[2], config.block_m) * triton.cdiv(shape[3], config.block_n)
        programs = shape[0] * shape[1] * tiles
        pairs = batch // shape[0] * (nheads // shape[1]) if programs > 0 else 0
        # Enough programs for the device. Their number depends on the device alone, so sums have one order.
        splits = max(1, min(pairs, 2 * tuning.device_of(q.device).multiprocessors // max(1, programs)))
        parts = torch.empty((splits, *shape), dtype=torch.float32, device=q.device)
        if programs > 0:
            bits, bits_stride = words(config.block_n)
            launch(
                _attention_bwd_dbias_kernel,
                (programs * splits,),
                q.device,
                *(dout, q, k, v, lse, cu_seqlens, bias, gate, seed, bits, delta, norm, parts, *strides),
                *(*bias_strides, lse.stride(0), bits_stride, nheads, total, batch, *shape[:2], max_seqlen),
                *(splits, *scales, left, right, *of_distances),
                BIAS_HAS_KEYS=shape[3] > 1,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                CHUNK=config.chunk,
                num_warps=config.num_warps,
                maxnreg=config.max_registers,
                **shared | {"BIAS_HAS_ROWS": shape[2] > 1},
            )
        return parts.sum(0)

    none = torch.empty((0,), dtype=torch.float32, device=q.device)
    dgate = dgate_rows.sum(1) if need_dgate else none
    if not any(need_scores):
        return dq, dk, dv, summed_ds(bias.shape) if need_dbias else none, dgate, none
    placed = relative is not None and relative.positions is not None
    apart = placed or any(need_scores[:2]) or (need_dbias and bias.shape[0] > 1)
    ds = summed_ds((batch if apart else 1, nheads, max_seqlen, max_seqlen))
    return dq, dk, dv, ds.sum_to_size(bias.shape) if need_dbias else none, dgate, ds
