"""`linear` by the `cpu` backend: csrc/cpu/linear; contract in fastbert/ops/linear.py.

A weight is multiplied from panels of 64 columns (csrc/cpu/linear.h). Inference keeps them (`linear_panels`).
Otherwise each task copies what it multiplies, which pays from `_FEWEST_ROWS` rows on; `aten` multiplies fewer
rows. A copy also rounds: so the weight may be float32 beside half-precision rows, and then no rounded weight
and no rounded gradient of it is ever in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.aten import linear as aten
from fastbert.backends.extension import DTYPE_CODES, STORED, vector
from fastbert.ops.activation import CODES, GATE_CODES
from fastbert.ops.checks import as_dtype
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved
from fastbert.runtime.loader import address
from fastbert.runtime.loader import extension as _C
from fastbert.runtime.plain import plain
from fastbert.runtime.processor import amd_family

DTYPES = STORED

# The fewest rows for which copying the weight for one product costs less than it gains.
_FEWEST_ROWS = 32
# From so many rows on, products in float32 are 1% faster from panels of the whole weight, and 3 to 7% if it
# was wide and is rounded first. Products by pairs are not.
_WHOLE_ROWS = 512


def mkl_leads(transposed: bool = False) -> bool:
    """Whether MKL's products in float32 are faster than ours where nothing is prepared (csrc/cpu/NOTES.md).

    On AMD's processors MKL uses no AVX-512. From Zen 5 on that is half the rate; on a Zen 4, which multiplies
    at one rate, it costs where the left matrix is stored row by row, not where it is `transposed`.
    """
    family = amd_family()
    return family is None or family < (26 if transposed else 25) or not _C.cpu_isa().startswith("avx512")


def by_pairs(dtype: torch.dtype) -> bool:
    """Whether products multiply pairs of bfloat16, at twice the rate of float32."""
    return dtype == torch.bfloat16 and _C.cpu_isa() == "avx512_bf16"


def _reads_whole(a: torch.Tensor) -> bool:
    """Whether a product with the rows `a` is faster where the whole weight is copied first."""
    return a.shape[0] >= _WHOLE_ROWS and not by_pairs(a.dtype)


def _strides(m: torch.Tensor) -> tuple[int, int]:
    """(row, column) strides of a matrix; one of them is 1. A dimension of one element may have any stride."""
    return (m.stride(0), 1) if m.stride(1) == 1 or m.shape[1] == 1 else (1, m.stride(1))


def _panels(b: torch.Tensor, panels: torch.Tensor | None = None, gated: bool = False) -> torch.Tensor:
    """The (depth, columns) matrix `b`, one of its strides 1, in panels: a vector of the same dtype."""
    depth, columns = b.shape
    panels = b.new_empty(_C.cpu_linear_panels_size(depth, columns, gated)) if panels is None else panels
    matrix = address(b), *_strides(b)
    threads = torch.get_num_threads()
    _C.cpu_linear_panels(DTYPE_CODES[b.dtype], depth, columns, *matrix, panels.data_ptr(), threads, gated)
    return panels


def _product(a, b, columns, bias=None, activation=None, residual=None, pre=None, stored=None, gated=None):
    """act(a @ b + bias) + residual, of `columns` columns; `a` (rows, depth) has one stride of 1.

    `b` is a vector of panels, or a matrix with one stride of 1, in `a`'s dtype or in float32. `stored` is the
    result's dtype: `a`'s, or float32 without `residual` and `pre`.
    """
    rows, depth = a.shape
    right = (address(b), 0, 0, 0) if b.dim() == 1 else (0, address(b), *_strides(b))
    c = a.new_empty(rows, columns, dtype=stored)
    added = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    _C.cpu_linear_product(
        *(DTYPE_CODES[a.dtype], rows, columns, depth),
        *(a.data_ptr(), *_strides(a), *right),
        *(*vector(bias), CODES[activation], *added),
        c.data_ptr(),
        0 if pre is None else pre.data_ptr(),
        torch.get_num_threads(),
        DTYPE_CODES[b.dtype],
        DTYPE_CODES[c.dtype],
        GATE_CODES[gated],
    )
    return c


def linear_panels(weight: Tensor, into: Tensor | None = None, gated: bool = False) -> Tensor:
    panels = _panels(plain(weight).contiguous().t(), into, gated)
    return panels.view(_panels_shape(weight, gated))


def _panels_shape(weight, gated):
    """The shape of kept panels; with a gate it has two dimensions, because the size may be the same."""
    size = _C.cpu_linear_panels_size(weight.shape[1], weight.shape[0], gated)
    return (2, size // 2) if gated else (size,)


def reads_wide() -> bool:
    return True


def linear_fwd(inputs: LinearInputs, save: bool) -> tuple[Tensor, Tensor]:
    x, weight, bias, activation, residual, gated, panels = inputs
    out, is_gated = weight.shape[0], gated is not None
    if panels is None:
        if x.shape[0] < _FEWEST_ROWS and weight.dtype == x.dtype:
            return aten.linear_fwd(inputs, save)
        whole = _reads_whole(x)
        right = _panels(as_dtype(weight, x.dtype).t(), gated=is_gated) if whole else weight.t()
    elif panels.shape != _panels_shape(weight, is_gated):
        maker = "panel_maker(…, gated=True)" if is_gated else "panel_maker(…)"
        raise ValueError(
            f"panels: expected what {maker} makes of weight {tuple(weight.shape)}, "
            f"got shape {tuple(panels.shape)}"
        )
    else:
        right = panels.view(-1) if is_gated else panels
    pre = x.new_empty((x.shape[0], out) if save and activation is not None else 0)
    saved = pre if pre.numel() else None
    columns = out // 2 if is_gated else out
    return _product(x, right, columns, bias, activation, residual, saved, gated=gated), pre


def linear_bwd(dy: Tensor, saved: LinearSaved, need: LinearNeeds) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, pre, activation, gated = saved
    rows, columns = dy.shape
    out = columns if gated is None else 2 * columns
    stored = getattr(weight, "dtype", dy.dtype)
    if rows < _FEWEST_ROWS and stored == dy.dtype:
        return aten.linear_bwd(dy, saved, need)
    g = dy if activation is None else dy.new_empty(rows, out)
    dbias = dy.new_empty(out if need.dbias else 0, dtype=torch.float32)
    if need.dbias or activation is not None:
        _C.cpu_linear_activation_bwd(
            *(DTYPE_CODES[dy.dtype], rows, columns, dy.data_ptr()),
            0 if activation is None else pre.data_ptr(),
            CODES[activation],
            0 if activation is None else g.data_ptr(),
            dbias.data_ptr() if need.dbias else 0,
            torch.get_num_threads(),
            GATE_CODES[gated],
        )
    # float32 needs neither widening nor pairs, and then copying for one product pays beside a slow MKL only
    by_mkl = dy.dtype == torch.float32
    dx = dweight = None
    if need.dx:
        right = as_dtype(weight, dy.dtype) if _reads_whole(dy) else weight
        dx = g @ weight if by_mkl and mkl_leads() else _product(g, right, weight.shape[1])
    if need.dweight:
        if rows == 0:
            dweight = x.new_zeros(out, x.shape[1], dtype=stored)
        elif by_mkl and mkl_leads(transposed=True):
            dweight = g.t() @ x
        else:
            dweight = _product(g.t(), x, x.shape[1], stored=stored)
    # a custom op may not return one tensor twice, not even an empty one
    return (
        dy.new_empty(0) if dx is None else dx,
        dy.new_empty(0) if dweight is None else dweight,
        dbias.to(stored),
    )
