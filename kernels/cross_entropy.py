"""Cross-entropy over the labelled rows, forward and backward.

Math       m = max_k x_k, l = log Σ_k exp(x_k - m);
           loss_i = l - (1 - s) (x_t - m) - s / K Σ_k (x_k - m);  loss = Σ loss_i / labelled rows
           dx_k = dloss / labelled rows * (exp((x_k - m) - l) - (1 - s) [k = t] - s / K)
Tiling     Forward: a program owns one row and walks over its classes in blocks. The row is read once; the
           sum is rescaled where a block has a larger maximum. One program then adds the rows' losses in a
           fixed order. Backward: a program owns one block of one row; each element is read once and written
           once. No atomics: repeats are bit-equal. Offsets of rows are 64-bit.
Ignored    The logits of ignored rows are not read; 0 is written for them. A label that is no class is not
           checked on a GPU: nothing is read for it either, and the loss is NaN.
Precision  Loads in storage dtype, then float32, one rounding at the store.
Saved      m and l separately: m + l has lost the digits of l where logits are large.
ALIGN      Widths and strides are passed in units of ALIGN elements. That tells the compiler how wide loads
           and stores may be: 2 elements for 30,522 classes. The number of classes itself compiles nothing
           anew.
Source     Szegedy et al. 2015, Rethinking the Inception Architecture, sec. 7; Milakov and Gimelshein 2018,
           Online normalizer calculation for softmax, alg. 3.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.launch import MOST_REGISTERS, cdiv, launch, next_power_of_2

# Arguments for which 1 and multiples of 16 compile nothing anew.
_FIXED_TYPES = ("stride_units", "n_rows", "class_units", "ignore_index")
# Rows whose losses are added at a time.
SUM_BLOCK = 1024


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _cross_entropy_fwd_kernel(
    x_ptr, labels_ptr, losses_ptr, lse_ptr, stride_units,
    n_rows, class_units, ignore_index, smoothing,
    SMOOTH: tl.constexpr, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`x` = [n_rows, classes], `losses` = [n_rows], `lse` = [2, n_rows]."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    if label != ignore_index:
        x_ptr += row * stride_units * ALIGN
        classes = class_units * ALIGN
        # While m is not known, Σ (x - m) is summed as Σ (x - base).
        base = tl.load(x_ptr).to(tl.float32)
        base = tl.where(base == float("-inf"), 0.0, base)
        top = tl.full((), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_N,), tl.float32)
        above = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, classes, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + cols, mask=cols < classes, other=float("-inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(x, 0))
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
            sums = sums * tl.exp(top - finite) + tl.exp(x - finite)
            top = new_top
            if SMOOTH:
                above += tl.where(cols < classes, x - base, 0.0)
        log_sum = tl.log(tl.sum(sums, 0))
        known = (label >= 0) & (label < classes)
        target = tl.load(x_ptr + label, mask=known, other=float("nan")).to(tl.float32)
        loss = log_sum - (1.0 - smoothing) * (target - top)
        if SMOOTH:
            loss -= smoothing * (tl.sum(above, 0) / classes + (base - top))
        tl.store(losses_ptr + row, loss)
        tl.store(lse_ptr + row, top)
        tl.store(lse_ptr + n_rows + row, log_sum)
    else:
        tl.store(losses_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        tl.store(lse_ptr + n_rows + row, 0.0)


@triton.jit(do_not_specialize=("n_rows", "ignore_index"))
def _mean_loss_kernel(
    losses_ptr, labels_ptr, loss_ptr, count_ptr, n_rows, ignore_index, BLOCK_M: tl.constexpr
):
    """The mean of the labelled rows' losses, and their number."""
    total = tl.zeros((BLOCK_M,), tl.float32)
    counts = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, n_rows, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        inside = rows < n_rows
        total += tl.load(losses_ptr + rows, mask=inside, other=0.0)
        labels = tl.load(labels_ptr + rows, mask=inside, other=0)
        counts += (inside & (labels != ignore_index)).to(tl.int32)
    count = tl.sum(counts, 0)
    tl.store(loss_ptr, tl.div_rn(tl.sum(total, 0), tl.maximum(count, 1).to(tl.float32)))
    tl.store(count_ptr, count.to(tl.int64))


@triton.jit(do_not_specialize=_FIXED_TYPES)
def _cross_entropy_bwd_kernel(
    dloss_ptr, x_ptr, labels_ptr, lse_ptr, count_ptr, dx_ptr, stride_units,
    n_rows, class_units, ignore_index, smoothing,
    ALIGN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`dx` = [n_rows, classes], contiguous; `lse` = [2, n_rows]."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    classes = class_units * ALIGN
    inside = cols < classes
    label = tl.load(labels_ptr + row)
    dx_at = dx_ptr + row * class_units * ALIGN + cols
    if label != ignore_index:
        x_at = x_ptr + row * stride_units * ALIGN + cols
        x = tl.load(x_at, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp((x - tl.load(lse_ptr + row)) - tl.load(lse_ptr + n_rows + row))
        # At least 1: this row.
        count = tl.load(count_ptr).to(tl.float32)
        target = tl.where(cols == label, 1.0 - smoothing, 0.0) + smoothing / classes
        dx = (p - target) * tl.div_rn(tl.load(dloss_ptr), count)
        tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(dx_at, tl.zeros((BLOCK_N,), dx_ptr.dtype.element_ty), mask=inside)


# --- launchers ----------------------------------------------------------------------------------------------


def config(classes: int) -> tuple[int, int]:
    """(BLOCK_N, num_warps): 16 elements per thread, fewer for rows of up to 128 classes."""
    block_n = max(128, min(4096, next_power_of_2(classes)))
    return block_n, max(1, block_n // 512)


def cross_entropy_fwd(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, count): the contract of `fastbert.ops.cross_entropy.cross_entropy_fwd`."""
    rows, classes = logits.shape
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    lse = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    losses = torch.empty((rows,), dtype=torch.float32, device=logits.device)
    count = torch.empty((), dtype=torch.int64, device=logits.device)
    if rows > 0:
        block_n, num_warps = config(classes)
        align = math.gcd(16, classes, logits.stride(0))
        launch(
            _cross_entropy_fwd_kernel,
            (rows,),
            logits.device,
            logits,
            labels,
            losses,
            lse,
            logits.stride(0) // align,
            rows,
            classes // align,
            ignore_index,
            label_smoothing,
            SMOOTH=label_smoothing > 0,
            ALIGN=align,
            BLOCK_N=block_n,
            num_warps=num_warps,
            maxnreg=MOST_REGISTERS,
        )
    launch(
        _mean_loss_kernel,
        (1,),
        logits.device,
        losses,
        labels,
        loss,
        count,
        rows,
        ignore_index,
        BLOCK_M=SUM_BLOCK,
        num_warps=4,
    )
    return loss, lse, count


def cross_entropy_bwd(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    count: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """dlogits, contiguous: the contract of `fastbert.ops.cross_entropy.cross_entropy_bwd`."""
    rows, classes = logits.shape
    dlogits = torch.empty((rows, classes), dtype=logits.dtype, device=logits.device)
    if rows > 0:
        block_n, num_warps = config(classes)
        align = math.gcd(16, classes, logits.stride(0))
        launch(
            _cross_entropy_bwd_kernel,
            (rows, cdiv(classes, block_n)),
            logits.device,
            dloss,
            logits,
            labels,
            lse,
            count,
            dlogits,
            logits.stride(0) // align,
            rows,
            classes // align,
            ignore_index,
            label_smoothing,
            ALIGN=align,
            BLOCK_N=block_n,
            num_warps=num_warps,
            maxnreg=MOST_REGISTERS,
        )
    return dlogits
