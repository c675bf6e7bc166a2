"""How much attention each token receives; the contract is in fastbert/ops/attention_received.py.

Math       received_j = Σ_h Σ_i exp(softmax_scale q_hi · k_hj - lse_hi); a query whose lse is -inf gives 0.
Tiling     A program owns BLOCK_N keys of one sequence and head and walks over the queries, BLOCK_M at a time.
           Its tile of scores is transposed, so that a key's sum stays in few threads. PyTorch then adds the
           heads: no atomics. One program for all heads would save the float32 sums, 8 bytes per token and
           head, 3% of q and k in half precision; but a sequence of 128 tokens would have 2 programs, not 24.
           The grid has ⌈max_seqlen / BLOCK_N⌉ slots per sequence, and programs past its end return at once;
           a table of places would take a launch of its own. The slots after the last sequence zero the tail.
Precision  Products of the storage type are summed in float32 (float32: IEEE products, no TF32); exp as exp2.
Saved      Nothing; k may have fewer heads than q, and both are read in place, through their strides.
Source     Goyal et al. 2020, PoWER-BERT, sec. 3.2.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels import tuning
from fastbert.kernels.attention_backward_tiles import UNIT
from fastbert.kernels.attention_slots import grid, in_planes
from fastbert.kernels.attention_tiles import LOG2_E, _key_head, _load_rows, _slot, _whole_place
from fastbert.kernels.launch import MOST_REGISTERS, cdiv, launch, next_power_of_2

if TYPE_CHECKING:
    from fastbert.ops.attention_received import AttentionReceivedInputs


@triton.jit(do_not_specialize=("total", "n_sequences", "n_tiles"))
def _attention_received_kernel(
    q_ptr, k_ptr, lse_ptr, cu_seqlens_ptr, received_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride,
    total, n_sequences, n_tiles, unit,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A head's part of one tile of keys, `received` = [nheads, total], or of rows after the last sequence."""
    head = tl.program_id(0)
    wide_head = head.to(tl.int64)
    sequence, start, length, first_key = _whole_place(cu_seqlens_ptr, _slot(), n_sequences, n_tiles, BLOCK_N)
    received_ptr += wide_head * total
    if sequence == n_sequences:
        for first in range(start + first_key, total, length):
            rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_N)
            tl.store(received_ptr + rows, tl.zeros((BLOCK_N,), tl.float32), mask=rows < total)
    else:
        if first_key < length:
            wide_start = start.to(tl.int64)
            q_ptr += wide_start * q_stride + wide_head * q_head_stride
            k_ptr += wide_start * k_stride + _key_head(head, GROUP).to(tl.int64) * k_head_stride
            lse_ptr += wide_head * total + wide_start
            k = _load_rows(k_ptr, k_stride, first_key, length, HEAD_DIM, True, BLOCK_N, BLOCK_D)
            acc = tl.zeros((BLOCK_N,), tl.float32)
            for first_row in tl.range(0, length, BLOCK_M, num_stages=NUM_STAGES):
                q = _load_rows(q_ptr, q_stride, first_row, length, HEAD_DIM, True, BLOCK_M, BLOCK_D)
                scores = tl.dot(k, tl.trans(q), input_precision="ieee")  # [BLOCK_N, BLOCK_M]
                rows = first_row + tl.arange(0, BLOCK_M)
                lse = tl.load(lse_ptr + rows, mask=rows < length, other=float("-inf"))
                # Scores of a query that sees nothing may be NaN.
                sees = (lse != float("-inf"))[None, :]
                acc += tl.sum(tl.where(sees, tl.exp2(scores * unit - (lse * UNIT)[None, :]), 0.0), 1)
            keys = first_key + tl.arange(0, BLOCK_N)
            tl.store(received_ptr + wide_start + keys, acc, mask=keys < length)


class Config(NamedTuple):
    """How the work is cut: queries and keys of a tile, Triton's options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def ladder(headdim: int, dtype: torch.dtype) -> tuple[Config, ...]:
    """Configs from high tiles to low ones; none of them spills."""
    if dtype == torch.float32:
        # Products without tensor cores hold whole rows of their operands.
        return (Config(16, 16, 8 if headdim > 64 else 4, 1),)
    return Config(64, 128, 8, 3), Config(64, 64, 4, 3), Config(32, 32, 4, 2)


@lru_cache(maxsize=4096)
def config_for(headdim: int, dtype: torch.dtype, seqlen: int, rows: int, multiprocessors: int) -> Config:
    """The highest tiles that a sequence fills and of which there are enough for the device.

    `seqlen`, `rows`: buckets of max_seqlen and of the number of keys, summed over the heads.
    """
    configs = ladder(headdim, dtype)
    for config in configs:
        enough = 4 * cdiv(2**rows, config.block_n) >= 3 * multiprocessors
        if enough and config.block_n <= 2**seqlen:
            return config
    return configs[-1]


def attention_received_fwd(inputs: "AttentionReceivedInputs") -> Tensor:
    """`received`: the contract of `fastbert.ops.attention_received`; headdim <= attention's MAX_HEADDIM."""
    q, _, _, max_seqlen, _, _ = inputs
    total, nheads, headdim = q.shape
    multiprocessors = tuning.device_of(q.device).multiprocessors
    buckets = tuning.bucket(max_seqlen), tuning.bucket(total * nheads)
    return attention_received_with(config_for(headdim, q.dtype, *buckets, multiprocessors), inputs)


def attention_received_with(config: Config, inputs: "AttentionReceivedInputs") -> Tensor:
    """`attention_received_fwd` with a given config."""
    q, k, cu_seqlens, max_seqlen, lse, softmax_scale = inputs
    total, nheads, headdim = q.shape
    batch = cu_seqlens.shape[0] - 1
    received = torch.empty((nheads, total), dtype=torch.float32, device=q.device)
    if total > 0:
        n_tiles = max(1, cdiv(max_seqlen, config.block_n))
        launch(
            _attention_received_kernel,
            grid(in_planes(n_tiles * (batch + 1)), nheads),
            q.device,
            *(q, k, lse, cu_seqlens.contiguous(), received),
            *(*q.stride()[:2], *k.stride()[:2]),
            *(total, batch, n_tiles, softmax_scale * LOG2_E),
            HEAD_DIM=headdim,
            GROUP=nheads // k.shape[1],
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_D=max(16, next_power_of_2(headdim)),
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
            maxnreg=MOST_REGISTERS,
        )
    return received.sum(0)
