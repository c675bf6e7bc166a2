"""Word, position and segment embeddings summed, LayerNorm and dropout in one pass; and backward.

Math       z = word[id] (or inputs_embeds) + position[pos] + segment[type];
           y = dropout((z - mean) * rstd * weight + bias)
           dz = rstd * (g - mean(g) - x_hat * mean(g * x_hat)), g = dn * weight, dn = dropout'(dy);
           dtable[v] = Σ dz over the tokens with id v;  dweight = Σ_tokens dn * x_hat, dbias = Σ_tokens dn
Tiling     A program owns BLOCK_M whole tokens. Tokens wider than *ONE_BLOCK are cut into blocks of columns:
           forward gathers them twice, for the statistics and for the result; in backward a kernel before it
           finds each token's two means.
           A table's gradient: the tokens sorted by id, so that a row of the table is a run of them. CHUNK of
           them that lie in one run are summed by a program of their own; then a program for each row of the
           table adds the chunks in its run and the fewer than 2 CHUNK tokens beside them, in their order. A
           run of any length is so shared out, every row is written once, and there are no atomics: repeats
           are bit-equal.
Precision  Loads in storage dtype, then float32, one rounding at each store. The variance is that of centred
           values (wide tokens: merged block by block, Chan et al. 1979). The divisions and roots for mean and
           rstd are correctly rounded. dz goes to the tables in float32.
Saved      z in storage dtype, mean, rstd, where backward will ask for them. Dropout bits are drawn again.
Source     Devlin et al. 2018, BERT, fig. 2; Ba, Kiros, Hinton 2016, Layer Normalization, eq. 4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.launch import launch, resident_programs
from fastbert.kernels.layer_norm import _sum_partials_kernel
from fastbert.kernels.philox import as_int32_bits, philox_keep, threshold_bits

ONE_BLOCK = 8192  # widest token that is held at once
BWD_ONE_BLOCK = 4096  # the same in backward, beside the column sums
WIDE_BLOCK = 4096  # columns at a time in wider ones
CHUNK = 128  # sorted tokens that one program sums for a table's gradient


@triton.jit
def _row_starts(ids_ptr, stride, rows, row_mask):
    """Offsets of the tokens' rows in a table, [BLOCK_M] in int64; without ids token t has row t."""
    picked = rows
    if ids_ptr is not None:
        picked = tl.load(ids_ptr + rows, mask=row_mask, other=0)
    return picked * stride


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
    seed_ptr, y_ptr, z_ptr, mean_ptr, rstd_ptr, word_stride, position_stride, segment_stride,
    y_stride, n_rows, eps, offset, threshold, keep_scale,
    HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tokens of one tile. `word_ptr` is inputs_embeds where `ids_ptr` is None."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < n_rows
    word_at = _row_starts(ids_ptr, word_stride, rows, row_mask)
    position_at = _row_starts(position_ids_ptr, position_stride, rows, row_mask)
    segment_at = _row_starts(segment_ids_ptr, segment_stride, rows, row_mask)
    mean = tl.zeros((BLOCK_M,), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)  # Σ (z - mean)²
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for col_start in range(0, HIDDEN, BLOCK_N):
        cols = col_start + tl.arange(0, BLOCK_N)
        mask = row_mask[:, None] & (cols < HIDDEN)[None, :]
        z = _gathered(
            word_ptr, position_ptr, segment_ptr, word_at, position_at, segment_at, cols, mask
        )  # fmt: skip
        if HIDDEN <= BLOCK_N:
            mean = tl.div_rn(tl.sum(z, 1), HIDDEN * 1.0)
            centred = tl.where(mask, z - mean[:, None], 0.0)
            squares = tl.sum(centred * centred, 1)
        else:
            count = tl.minimum(HIDDEN - col_start, BLOCK_N).to(tl.float32)
            share = count / (col_start + count)
            block_mean = tl.sum(z, 1) / count
            centred = tl.where(mask, z - block_mean[:, None], 0.0)
            delta = block_mean - mean
            mean += delta * share
            squares += tl.sum(centred * centred, 1) + delta * delta * col_start * share
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, HIDDEN * 1.0) + eps))
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=row_mask)
        tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    for col_start in range(0, HIDDEN, BLOCK_N):
        cols = col_start + tl.arange(0, BLOCK_N)
        col_mask = cols < HIDDEN
        mask = row_mask[:, None] & col_mask[None, :]
        if HIDDEN > BLOCK_N:
            z = _gathered(
                word_ptr, position_ptr, segment_ptr, word_at, position_at, segment_at, cols, mask
            )  # fmt: skip
        at = rows[:, None] * y_stride + cols[None, :]
        if z_ptr is not None:
            tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=mask)
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
        y = (z - mean[:, None]) * rstd[:, None] * weight[None, :] + bias[None, :]
        if seed_ptr is not None:
            keep = philox_keep(seed_ptr, offset, 0, rows, col_start, threshold, BLOCK_M, BLOCK_N)
            y = tl.where(keep, y * keep_scale, 0.0)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dn_tile(
    dy_ptr, z_ptr, seed_ptr, dy_stride, z_stride, rows, col_start, mask, mean, rstd,
    offset, threshold, keep_scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`dn`, `x_hat` = [BLOCK_M, BLOCK_N] in float32; dn is 0 outside the matrix."""
    cols = col_start + tl.arange(0, BLOCK_N)
    dn = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if seed_ptr is not None:
        keep = philox_keep(seed_ptr, offset, 0, rows, col_start, threshold, BLOCK_M, BLOCK_N)
        dn = tl.where(keep, dn * keep_scale, 0.0)
    z = tl.load(z_ptr + rows[:, None] * z_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return dn, (z - mean[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=("n_rows", "offset", "threshold"))
def _embedding_bwd_kernel(
    dy_ptr, z_ptr, weight_ptr, mean_ptr, rstd_ptr, means_ptr, seed_ptr, dz_ptr, dembeds_ptr, dweight_ptr,
    dbias_ptr, dy_stride, z_stride, n_rows, offset, threshold, keep_scale,
    HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th tile of tokens; this program's column sums go to its row of the partial sums.

    `dz` in float32 for the tables, `dembeds` the same in storage dtype. Of wide tokens a program takes one
    column block; `means_ptr` then gives each token's mean(g) and mean(g * x_hat).
    """
    program = tl.program_id(0)
    col_start = tl.program_id(1) * BLOCK_N
    cols = col_start + tl.arange(0, BLOCK_N)
    col_mask = cols < HIDDEN
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(program, tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < n_rows
        mask = row_mask[:, None] & col_mask[None, :]
        mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        dn, x_hat = _dn_tile(
            dy_ptr, z_ptr, seed_ptr, dy_stride, z_stride, rows, col_start, mask, mean, rstd,
            offset, threshold, keep_scale, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if dweight_ptr is not None:
            dweight += dn * x_hat
            dbias += dn
        g = dn * weight
        if HIDDEN <= BLOCK_N:
            g_mean = tl.sum(g, 1) / HIDDEN  # [BLOCK_M]
            gx_mean = tl.sum(g * x_hat, 1) / HIDDEN
        else:
            g_mean = tl.load(means_ptr + rows, mask=row_mask, other=0.0)
            gx_mean = tl.load(means_ptr + n_rows + rows, mask=row_mask, other=0.0)
        dz = rstd[:, None] * (g - g_mean[:, None] - x_hat * gx_mean[:, None])
        at = rows[:, None] * HIDDEN + cols[None, :]
        if dz_ptr is not None:
            tl.store(dz_ptr + at, dz, mask=mask)
        if dembeds_ptr is not None:
            tl.store(dembeds_ptr + at, dz.to(dembeds_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        partial_at = program.to(tl.int64) * HIDDEN + cols
        tl.store(dweight_ptr + partial_at, tl.sum(dweight, 0), mask=col_mask)
        tl.store(dbias_ptr + partial_at, tl.sum(dbias, 0), mask=col_mask)


@triton.jit(do_not_specialize=("n_rows", "offset", "threshold"))
def _wide_embedding_bwd_means_kernel(
    dy_ptr, z_ptr, weight_ptr, mean_ptr, rstd_ptr, means_ptr, seed_ptr, dy_stride, z_stride, n_rows, offset,
    threshold, keep_scale, HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """mean(g) and mean(g * x_hat) of one token, summed block by block."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    mean = tl.load(mean_ptr + rows)
    rstd = tl.load(rstd_ptr + rows)
    g_sum = tl.zeros((1,), tl.float32)
    gx_sum = tl.zeros((1,), tl.float32)
    for col_start in range(0, HIDDEN, BLOCK_N):
        cols = col_start + tl.arange(0, BLOCK_N)
        col_mask = cols < HIDDEN
        dn, x_hat = _dn_tile(
            dy_ptr, z_ptr, seed_ptr, dy_stride, z_stride, rows, col_start, col_mask[None, :], mean, rstd,
            offset, threshold, keep_scale, 1, BLOCK_N,
        )  # fmt: skip
        g = dn * tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        g_sum += tl.sum(g, 1)
        gx_sum += tl.sum(g * x_hat, 1)
    tl.store(means_ptr + rows, g_sum / HIDDEN)
    tl.store(means_ptr + n_rows + rows, gx_sum / HIDDEN)


@triton.jit
def _sorted_sum(
    dz_ptr, order_ptr, first, last, cols, col_mask,
    HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ of the tokens [first, last) in sorted order: [BLOCK_M, BLOCK_N], to be added up over its rows."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_M):
        at = start + tl.arange(0, BLOCK_M)
        inside = at < last
        row = tl.load(order_ptr + at, mask=inside, other=0) * HIDDEN  # [BLOCK_M] in int64
        mask = inside[:, None] & col_mask[None, :]
        total += tl.load(dz_ptr + row[:, None] + cols[None, :], mask=mask, other=0.0)
    return total


@triton.jit
def _chunk_sums_kernel(
    dz_ptr, order_ptr, sorted_ptr, sums_ptr,
    HIDDEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """sums[c] = Σ dz of the c-th CHUNK tokens in sorted order, if they have one id; else nobody reads it."""
    chunk = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < HIDDEN
    first = chunk * CHUNK
    if tl.load(sorted_ptr + first) == tl.load(sorted_ptr + first + CHUNK - 1):
        total = _sorted_sum(
            dz_ptr, order_ptr, first, first + CHUNK, cols, col_mask, HIDDEN, BLOCK_M, BLOCK_N
        )  # fmt: skip
        tl.store(sums_ptr + chunk.to(tl.int64) * HIDDEN + cols, tl.sum(total, 0), mask=col_mask)


@triton.jit(do_not_specialize=("skipped",))
def _table_bwd_kernel(
    dz_ptr, order_ptr, starts_ptr, sums_ptr, dtable_ptr, skipped,
    HIDDEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row of the table: its run of sorted tokens is [starts[row], starts[row + 1]); 0 if `skipped`."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < HIDDEN
    first = tl.load(starts_ptr + row)
    last = tl.load(starts_ptr + row + 1)
    last = tl.where(row == skipped, first, last)
    first_chunk = (first + CHUNK - 1) // CHUNK  # of those that lie in the run
    last_chunk = last // CHUNK
    some = first_chunk < last_chunk
    total = _sorted_sum(
        dz_ptr, order_ptr, first, tl.where(some, first_chunk * CHUNK, last), cols, col_mask,
        HIDDEN, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    for start in range(first_chunk, last_chunk, BLOCK_M):
        chunks = start + tl.arange(0, BLOCK_M)
        at = chunks.to(tl.int64)[:, None] * HIDDEN + cols[None, :]
        mask = (chunks < last_chunk)[:, None] & col_mask[None, :]
        total += tl.load(sums_ptr + at, mask=mask, other=0.0)
    total += _sorted_sum(
        dz_ptr, order_ptr, tl.where(some, last_chunk * CHUNK, last), last, cols, col_mask,
        HIDDEN, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    dtable = tl.sum(total, 0).to(dtable_ptr.dtype.element_ty)
    tl.store(dtable_ptr + row.to(tl.int64) * HIDDEN + cols, dtable, mask=col_mask)


# --- launchers ----------------------------------------------------------------------------------------------


def fwd_config(hidden: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps): 32 elements a thread, and up to 1024 columns no sum leaves its warp."""
    block_n = WIDE_BLOCK if hidden > ONE_BLOCK else max(16, triton.next_power_of_2(hidden))
    return max(1, 1024 // block_n), block_n, max(1, block_n // 1024)


def embedding_fwd(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    word: Tensor | None,
    position_ids: Tensor | None,
    position: Tensor | None,
    token_type_ids: Tensor | None,
    segment: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, z, mean, rstd); the contract of `fastbert.ops.embedding.embedding_fwd`. Ids are not checked."""
    source = word if inputs_embeds is None else inputs_embeds
    rows = inputs_embeds.shape[0] if input_ids is None else input_ids.shape[0]
    hidden = source.shape[1]
    y = torch.empty((rows, hidden), dtype=source.dtype, device=source.device)
    z = torch.empty_like(y) if save else source.new_empty((0,))
    mean = source.new_empty((rows if save else 0,), dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if rows > 0:
        block_m, block_n, num_warps = fwd_config(hidden)
        launch(
            _embedding_fwd_kernel, (triton.cdiv(rows, block_m),), source.device,
            input_ids, source, position_ids, position, token_type_ids, segment, ln_weight, ln_bias,
            seed if dropout_p > 0 else None, y,
            z if save else None, mean if save else None, rstd if save else None,
            source.stride(0), 0 if position is None else position.stride(0),
            0 if segment is None else segment.stride(0), y.stride(0), rows, eps,
            as_int32_bits(offset), threshold_bits(dropout_p), 1.0 / (1.0 - dropout_p),
            HIDDEN=hidden, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps,
        )  # fmt: skip
    return y, z, mean, rstd


def bwd_config(hidden: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps): 16 elements a thread, because two column sums stay in registers."""
    block_n = WIDE_BLOCK if hidden > BWD_ONE_BLOCK else max(16, triton.next_power_of_2(hidden))
    block_m = max(1, min(16, 2048 // block_n))
    return block_m, block_n, max(1, block_m * block_n // 512)


def table_config(hidden: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): 2048 elements a tile, which is 16 for each of 128 threads, in rows of 1 KB."""
    block_n = max(16, min(256, triton.next_power_of_2(hidden)))
    return 2048 // block_n, block_n


def embedding_bwd(
    dy: Tensor,
    z: Tensor,
    ln_weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    token_type_ids: Tensor | None,
    word_rows: int,
    position_rows: int,
    segment_rows: int,
    padding_idx: int,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    need_dinputs_embeds: bool,
    need_dln: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dword, dposition, dsegment, dinputs_embeds, dln_weight, dln_bias); the contract of
    `fastbert.ops.embedding.embedding_bwd`.
    """
    rows, hidden = dy.shape
    tables = (
        (input_ids, word_rows, padding_idx), (position_ids, position_rows, -1),
        (token_type_ids, segment_rows, -1),
    )  # fmt: skip
    need_dz = any(n > 0 for _, n, _ in tables)
    dembeds = dy.new_empty((rows, hidden) if need_dinputs_embeds else (0,))
    dln = [dy.new_zeros((hidden if need_dln else 0,), dtype=torch.float32) for _ in range(2)]
    if rows == 0:
        return *(dy.new_zeros((n, hidden) if n else (0,)) for _, n, _ in tables), dembeds, *dln

    dz = dy.new_empty((rows, hidden), dtype=torch.float32) if need_dz else None
    if need_dz or need_dinputs_embeds or need_dln:
        _dz_and_sums(
            dy, z, ln_weight, mean, rstd, dropout_p, seed, offset, dz,
            dembeds if need_dinputs_embeds else None, dln if need_dln else None,
        )  # fmt: skip
    dtables = [_table_bwd(dz, ids, n, skipped, dy.dtype) if n else dy.new_empty((0,))
               for ids, n, skipped in tables]  # fmt: skip
    return *dtables, dembeds, *dln


def _dz_and_sums(dy, z, ln_weight, mean, rstd, dropout_p, seed, offset, dz, dembeds, dln) -> None:
    """Fill `dz`, `dembeds` and the two of `dln`, where they are not None."""
    rows, hidden = dy.shape
    seed = seed if dropout_p > 0 else None
    block_m, block_n, num_warps = bwd_config(hidden)
    programs, column_blocks = triton.cdiv(rows, block_m), triton.cdiv(hidden, block_n)
    if dln is not None:
        programs = min(programs, max(1, resident_programs(dy.device) // column_blocks))
    partials = (None, None) if dln is None else dy.new_empty((2, programs, hidden), dtype=torch.float32)
    scalars = (
        dy.stride(0), z.stride(0), rows,
        as_int32_bits(offset), threshold_bits(dropout_p), 1.0 / (1.0 - dropout_p),
    )  # fmt: skip
    means = None
    if hidden > BWD_ONE_BLOCK:
        means = dy.new_empty((2, rows), dtype=torch.float32)
        launch(
            _wide_embedding_bwd_means_kernel, (rows,), dy.device,
            dy, z, ln_weight, mean, rstd, means, seed, *scalars,
            HIDDEN=hidden, BLOCK_N=block_n, num_warps=num_warps,
        )  # fmt: skip
    launch(
        _embedding_bwd_kernel, (programs, column_blocks), dy.device,
        dy, z, ln_weight, mean, rstd, means, seed, dz, dembeds, *partials, *scalars,
        HIDDEN=hidden, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps,
    )  # fmt: skip
    if dln is not None:
        launch(
            _sum_partials_kernel, (triton.cdiv(hidden, 32), 2), dy.device,
            partials, *dln, None, programs, HIDDEN=hidden, BLOCK_M=64, BLOCK_N=32, num_warps=4,
        )  # fmt: skip


def _table_bwd(dz: Tensor, ids: Tensor, table_rows: int, skipped: int, dtype: torch.dtype) -> Tensor:
    """(table_rows, hidden) in `dtype`: row v is the sum of `dz` over the tokens whose id is v."""
    (rows, hidden), device = dz.shape, dz.device
    sorted_ids, order = torch.sort(ids, stable=True)  # stable: the tokens of an id keep their order
    starts = torch.searchsorted(
        sorted_ids, torch.arange(table_rows + 1, device=device), out_int32=True
    )  # fmt: skip
    block_m, block_n = table_config(hidden)
    sizes = {"HIDDEN": hidden, "CHUNK": CHUNK, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4}
    chunks, column_blocks = rows // CHUNK, triton.cdiv(hidden, block_n)
    sums = dz.new_empty((chunks, hidden))
    if chunks > 0:
        launch(
            _chunk_sums_kernel, (chunks, column_blocks), device, dz, order, sorted_ids, sums, **sizes
        )  # fmt: skip
    dtable = dz.new_empty((table_rows, hidden), dtype=dtype)
    launch(
        _table_bwd_kernel, (table_rows, column_blocks), device,
        dz, order, starts, sums, dtable, skipped, **sizes,
    )  # fmt: skip
    return dtable
