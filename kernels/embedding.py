"""Word, position and segment embeddings summed, LayerNorm and dropout in one pass; and backward.

Math       z = word[id] (or inputs_embeds) + position[pos] + segment[type];
           y = dropout((z - mean) * rstd * weight + bias)
           dz = rstd * (g - mean(g) - x_hat * mean(g * x_hat)), g = dn * weight, dn = dropout'(dy);
           dtable[v] = Σ dz over the tokens with id v;  dweight = Σ_tokens dn * x_hat, dbias = Σ_tokens dn
Tiling     A program owns BLOCK_M whole tokens. Tokens wider than *ONE_BLOCK are cut into blocks of columns:
           forward gathers them twice, for the statistics and for the result; in backward an earlier kernel
           finds each token's two means.
           A table's gradient: the tokens are sorted by id, so that a row of the table is a run of them. Each
           aligned chunk of CHUNK tokens within one run is summed by one program. Then one program per row of
           the table adds the chunks in its run and the fewer than 2 CHUNK tokens beside them, in order. So a
           run of any length is shared out, every row is written once, and there are no atomics: repeats are
           bit-equal.
Precision  Loads in storage dtype, then float32, one rounding at each store. The variance is that of centred
           values (wide tokens: merged block by block, Chan et al. 1979). The divisions and roots for mean and
           rstd are correctly rounded. dz goes to the tables in float32.
Ids        An id outside its table makes its token NaN, and is reported to the host (bad_ids.py): the token
           reads the nearest row, but has NaN for rstd. In backward no row of that table gets its gradient.
Saved      z in storage dtype, mean, rstd, where backward will ask for them. Dropout bits are drawn again.
Files      layer_norm_backward.py: dz, dweight and dbias, by LayerNorm's kernels. embedding_backward.py: the
           tables. Here: forward's kernel, and the launches.
Source     Devlin et al. 2018, BERT, fig. 2; Ba, Kiros, Hinton 2016, Layer Normalization, eq. 4.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.bad_ids import (
    ARGUMENTS,
    INPUT_IDS,
    POSITION_IDS,
    TOKEN_TYPE_IDS,
    bad_ids,
    tell_bad,
)
from fastbert.kernels.column_sums import SIZES, _sum_partials_kernel
from fastbert.kernels.embedding_backward import _chunk_sums_kernel, _table_bwd_kernel
from fastbert.kernels.launch import cdiv, launch, next_power_of_2, resident_programs
from fastbert.kernels.layer_norm_backward import _layer_norm_bwd_kernel, _wide_bwd_means_kernel
from fastbert.kernels.layer_norm_forward import centred_rows, merged, row_of, rstd_of
from fastbert.kernels.philox import as_int32_bits, dropped, threshold_bits

if TYPE_CHECKING:
    from fastbert.ops.embedding import EmbeddingInputs, EmbeddingSaved

# The widest token that forward holds at once.
ONE_BLOCK = 8192
# The same in backward, beside the column sums.
BWD_ONE_BLOCK = 4096
# Columns at a time in wider tokens.
WIDE_BLOCK = 4096
# Sorted tokens that one program sums for a table's gradient.
CHUNK = 128


@triton.jit
def _row_starts(ids_ptr, stride, rows, row_mask, table_rows, bad_ptr, TABLE: tl.constexpr):
    """(offsets of the tokens' rows in a table, whether their ids are bad): [BLOCK_M] in int64 and bool.

    Without ids token t has row t. An id outside the table is replaced by the nearest id in it, and reported
    at `bad_ptr`.
    """
    picked = rows
    bad = rows != rows
    if ids_ptr is not None:
        asked = tl.load(ids_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        picked = tl.minimum(tl.maximum(asked, 0), table_rows - 1)
        bad = asked != picked
        tell_bad(bad, asked, bad_ptr, TABLE)
    return picked * stride, bad


@triton.jit
def _gathered(word_ptr, position_ptr, segment_ptr, word_at, position_at, segment_at, cols, mask):
    """`z` = [BLOCK_M, BLOCK_N] in float32, 0 outside the matrix."""
    z = tl.load(word_ptr + word_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if position_ptr is not None:
        row = position_ptr + position_at[:, None]
        z += tl.load(row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if segment_ptr is not None:
        row = segment_ptr + segment_at[:, None]
        z += tl.load(row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit(do_not_specialize=("n_rows", "offset", "threshold"))
def _embedding_fwd_kernel(
    ids_ptr, word_ptr, position_ids_ptr, position_ptr, segment_ids_ptr, segment_ptr, weight_ptr, bias_ptr,
    seed_ptr, y_ptr, z_ptr, mean_ptr, rstd_ptr, bad_ptr,
    word_stride, position_stride, segment_stride, y_stride,
    word_rows, position_rows, segment_rows, n_rows, eps, offset, threshold, keep_scale,
    HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tokens of one tile. `word_ptr` is inputs_embeds where `ids_ptr` is None."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < n_rows
    word_at, bad_word = _row_starts(ids_ptr, word_stride, rows, row_mask, word_rows, bad_ptr, INPUT_IDS)
    position_at, bad_position = _row_starts(
        position_ids_ptr, position_stride, rows, row_mask, position_rows, bad_ptr, POSITION_IDS
    )
    segment_at, bad_segment = _row_starts(
        segment_ids_ptr, segment_stride, rows, row_mask, segment_rows, bad_ptr, TOKEN_TYPE_IDS
    )
    mean = tl.zeros((BLOCK_M,), tl.float32)
    # Σ (z - mean)²
    squares = tl.zeros((BLOCK_M,), tl.float32)
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for col_start in range(0, HIDDEN, BLOCK_N):
        cols = col_start + tl.arange(0, BLOCK_N)
        mask = row_mask[:, None] & (cols < HIDDEN)[None, :]
        z = _gathered(word_ptr, position_ptr, segment_ptr, word_at, position_at, segment_at, cols, mask)
        if HIDDEN <= BLOCK_N:
            mean, centred = centred_rows(z, mask, HIDDEN)
            squares = tl.sum(centred * centred, 1)
        else:
            mean, squares = merged(mean, squares, z, mask, col_start, HIDDEN, BLOCK_N)
    rstd = rstd_of(squares, eps, HIDDEN)
    rstd = tl.where(bad_word | bad_position | bad_segment, float("nan"), rstd)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=row_mask)
        tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    for col_start in range(0, HIDDEN, BLOCK_N):
        cols = col_start + tl.arange(0, BLOCK_N)
        col_mask = cols < HIDDEN
        mask = row_mask[:, None] & col_mask[None, :]
        if HIDDEN > BLOCK_N:
            z = _gathered(word_ptr, position_ptr, segment_ptr, word_at, position_at, segment_at, cols, mask)
        at = rows[:, None] * y_stride + cols[None, :]
        if z_ptr is not None:
            tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=mask)
        y = (z - mean[:, None]) * rstd[:, None] * row_of(weight_ptr, cols, HIDDEN)
        y += row_of(bias_ptr, cols, HIDDEN)
        y = dropped(y, (seed_ptr, offset, threshold, keep_scale), rows, col_start, BLOCK_M, BLOCK_N)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


# --- launchers ----------------------------------------------------------------------------------------------


def fwd_config(hidden: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps): 32 elements per thread. Up to 1024 columns no sum leaves its warp."""
    block_n = WIDE_BLOCK if hidden > ONE_BLOCK else max(16, next_power_of_2(hidden))
    return max(1, 1024 // block_n), block_n, max(1, block_n // 1024)


def embedding_fwd(
    inputs: "EmbeddingInputs", save: bool | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(y, z, mean, rstd): the contract of `fastbert.ops.embedding.embedding_fwd`; `save` None: y alone.

    The token of an id outside its table is NaN, and the next call raises an IndexError for the id.
    """
    input_ids, inputs_embeds, word, position_ids, position, token_type_ids, segment, *rest = inputs
    ln_weight, ln_bias, _padding_idx, eps, dropout_p, seed, offset, _no_scale = rest
    source = word if inputs_embeds is None else inputs_embeds
    device, (source_rows, hidden) = source.device, source.shape
    bad = bad_ids(device)
    bad.check()
    position_rows = 0 if position is None else position.shape[0]
    segment_rows = 0 if segment is None else segment.shape[0]
    table_rows, given = (source_rows, position_rows, segment_rows), (input_ids, position_ids, token_type_ids)
    rows = source_rows if input_ids is None else input_ids.shape[0]
    if rows > 0 and 0 in table_rows:
        for ids, count, (name, _) in zip(given, table_rows, ARGUMENTS[:3], strict=True):
            if ids is not None and count == 0:
                raise IndexError(f"{name}s of a table without rows")
    y = torch.empty((rows, hidden), dtype=source.dtype, device=device)
    z = mean = rstd = None
    if save is not None:
        z = torch.empty_like(y) if save else source.new_empty((0,))
        mean = source.new_empty((rows if save else 0,), dtype=torch.float32)
        rstd = torch.empty_like(mean)
    if rows > 0:
        block_m, block_n, num_warps = fwd_config(hidden)
        launch(
            _embedding_fwd_kernel,
            (cdiv(rows, block_m),),
            device,
            *(input_ids, source, position_ids, position, token_type_ids, segment, ln_weight, ln_bias),
            *(
                seed if dropout_p > 0 else None,
                y,
                *((z, mean, rstd) if save else (None, None, None)),
                bad.cells,
            ),
            *(0 if table is None else table.stride(0) for table in (source, position, segment)),
            *(y.stride(0), *table_rows, rows, eps),
            *(as_int32_bits(offset), threshold_bits(dropout_p), 1.0 / (1.0 - dropout_p)),
            HIDDEN=hidden,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=num_warps,
        )
    return y, z, mean, rstd


def bwd_config(hidden: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps): 16 elements per thread, because two column sums stay in registers."""
    block_n = WIDE_BLOCK if hidden > BWD_ONE_BLOCK else max(16, next_power_of_2(hidden))
    block_m = max(1, min(16, 2048 // block_n))
    return block_m, block_n, max(1, block_m * block_n // 512)


def table_config(hidden: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): 2048 elements per tile, which is 16 for each of 128 threads, in rows of 1 KB."""
    block_n = max(16, min(256, next_power_of_2(hidden)))
    return 2048 // block_n, block_n


def embedding_bwd(
    dy: Tensor, saved: "EmbeddingSaved", need_dinputs_embeds: bool, need_dln: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The contract of `fastbert.ops.embedding.embedding_bwd`.

    Returns (dword, dposition, dsegment, dinputs_embeds, dln_weight, dln_bias).
    """
    z, ln_weight, mean, rstd, input_ids, position_ids, token_type_ids, *rest = saved
    word_rows, position_rows, segment_rows, padding_idx, dropout_p, seed, offset = rest
    rows, hidden = dy.shape
    tables = (
        (input_ids, word_rows, padding_idx),
        (position_ids, position_rows, -1),
        (token_type_ids, segment_rows, -1),
    )
    need_dz = any(n > 0 for _, n, _ in tables)
    dembeds = dy.new_empty((rows, hidden) if need_dinputs_embeds else (0,))
    dln = [dy.new_zeros((hidden if need_dln else 0,), dtype=torch.float32) for _ in range(2)]
    if rows == 0:
        return *(dy.new_zeros((n, hidden) if n else (0,)) for _, n, _ in tables), dembeds, *dln

    dz = dy.new_empty((rows, hidden), dtype=torch.float32) if need_dz else None
    if need_dz or need_dinputs_embeds or need_dln:
        wanted = dembeds if need_dinputs_embeds else None, dln if need_dln else None
        _dz_and_sums(dy, z, ln_weight, mean, rstd, dropout_p, seed, offset, dz, *wanted)
    dtables = [
        _table_bwd(dz, ids, n, skipped, dy.dtype) if n else dy.new_empty((0,)) for ids, n, skipped in tables
    ]
    return *dtables, dembeds, *dln


def _dz_and_sums(dy, z, ln_weight, mean, rstd, dropout_p, seed, offset, dz, dembeds, dln) -> None:
    """Fill `dz`, `dembeds` and the two tensors of `dln`, where they are not None."""
    rows, hidden = dy.shape
    seed = seed if dropout_p > 0 else None
    block_m, block_n, num_warps = bwd_config(hidden)
    programs, column_blocks = cdiv(rows, block_m), cdiv(hidden, block_n)
    if dln is not None:
        programs = min(programs, max(1, resident_programs(dy.device) // column_blocks))
    partials = (None, None) if dln is None else dy.new_empty((2, programs, hidden), dtype=torch.float32)
    strides = dy.stride(0), z.stride(0)
    scalars = rows, as_int32_bits(offset), threshold_bits(dropout_p), 1.0 / (1.0 - dropout_p)
    means = None
    if hidden > BWD_ONE_BLOCK:
        means = dy.new_empty((2, rows), dtype=torch.float32)
        launch(
            _wide_bwd_means_kernel,
            (rows,),
            dy.device,
            *(dy, None, z, ln_weight, mean, rstd, means, seed, *strides, *scalars),
            HIDDEN=hidden,
            BLOCK_N=block_n,
            KIND="layer_norm",
            DROPS_OUTPUT=True,
            num_warps=num_warps,
        )
    launch(
        _layer_norm_bwd_kernel,
        (programs, column_blocks),
        dy.device,
        *(dy, None, None, z, ln_weight, mean, rstd, means, seed, dembeds, dz, *partials, None),
        *(*strides, *scalars),
        HIDDEN=hidden,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        KIND="layer_norm",
        DROPS_OUTPUT=True,
        num_warps=num_warps,
    )
    if dln is not None:
        launch(
            *(_sum_partials_kernel, (cdiv(hidden, 32), 2), dy.device, partials, *dln, None, programs),
            HIDDEN=hidden,
            **SIZES,
        )


def _table_bwd(dz: Tensor, ids: Tensor, table_rows: int, skipped: int, dtype: torch.dtype) -> Tensor:
    """(table_rows, hidden) in `dtype`: row v is the sum of `dz` over the tokens whose id is v."""
    (rows, hidden), device = dz.shape, dz.device
    # Stable: the tokens of an id keep their order.
    sorted_ids, order = torch.sort(ids, stable=True)
    starts = torch.searchsorted(sorted_ids, torch.arange(table_rows + 1, device=device), out_int32=True)
    block_m, block_n = table_config(hidden)
    sizes = {"HIDDEN": hidden, "CHUNK": CHUNK, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4}
    chunks, column_blocks = rows // CHUNK, cdiv(hidden, block_n)
    sums = dz.new_empty((chunks, hidden))
    if chunks > 0:
        launch(_chunk_sums_kernel, (chunks, column_blocks), device, dz, order, sorted_ids, sums, **sizes)
    dtable = dz.new_empty((table_rows, hidden), dtype=dtype)
    launch(
        *(_table_bwd_kernel, (table_rows, column_blocks), device, dz, order, starts, sums, dtable, skipped),
        **sizes,
    )
    return dtable
