"""`linear` by the `cpu` backend: csrc/cpu/linear; contract in fastbert/ops/linear.py.

A weight is multiplied from panels of 64 columns (csrc/cpu/linear.h). Inference keeps them (`linear_panels`).
Otherwise they are made for the call, which pays from `_PANEL_ROWS` rows on; `aten` multiplies fewer rows.
"""

from __future__ import annotations

import torch

from fastbert.backends.aten import linear as aten
from fastbert.backends.extension import DTYPE_CODES, STORED, vector
from fastbert.ops.activation import CODES
from fastbert.runtime.dispatch import plain
from fastbert.runtime.loader import address
from fastbert.runtime.loader import extension as _C
from fastbert.runtime.processor import amd_family

DTYPES = STORED

# The fewest rows for which making panels for one product costs less than it gains.
_PANEL_ROWS = 32


def mkl_leads() -> bool:
    """Whether MKL's products in float32 are faster than ours where nothing is prepared (csrc/cpu/NOTES.md).

    On AMD's processors MKL uses no AVX-512. From Zen 5 on that is half the rate.
    """
    family = amd_family()
    return family is None or family < 26 or not _C.cpu_isa().startswith("avx512")


def _strides(m: torch.Tensor) -> tuple[int, int]:
    """(row, column) strides of a matrix; one of them is 1. A dimension of one element may have any stride."""
    return (m.stride(0), 1) if m.stride(1) == 1 or m.shape[1] == 1 else (1, m.stride(1))


def _panels(b: torch.Tensor, panels: torch.Tensor | None = None) -> torch.Tensor:
    """The (depth, columns) matrix `b`, one of its strides 1, in panels: a vector of the same dtype."""
    depth, columns = b.shape
    panels = b.new_empty(_C.cpu_linear_panels_size(depth, columns)) if panels is None else panels
    matrix = address(b), *_strides(b)
    threads = torch.get_num_threads()
    _C.cpu_linear_panels(DTYPE_CODES[b.dtype], depth, columns, *matrix, panels.data_ptr(), threads)
    return panels


def _product(a, b, columns, bias=None, activation=None, residual=None, pre=None):
    """act(a @ b + bias) + residual; `a` (rows, depth) has one stride of 1.

    `b` is a vector of panels, or (depth, columns) row by row.
    """
    rows, depth = a.shape
    right = (address(b), 0, 0) if b.dim() == 1 else (0, address(b), b.stride(0))
    c = a.new_empty(rows, columns)
    added = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    _C.cpu_linear_product(
        *(DTYPE_CODES[a.dtype], rows, columns, depth),
        *(a.data_ptr(), *_strides(a), *right),
        *(*vector(bias), CODES[activation], *added),
        c.data_ptr(),
        0 if pre is None else pre.data_ptr(),
        torch.get_num_threads(),
    )
    return c


def linear_panels(weight, into=None):
    return _panels(plain(weight).contiguous().t(), into)


def linear_fwd(x, weight, bias, activation, residual, save, panels=None):
    if panels is None:
        if x.shape[0] < _PANEL_ROWS:
            return aten.linear_fwd(x, weight, bias, activation, residual, save)
        panels = _panels(weight.t())
    elif panels.shape != (_C.cpu_linear_panels_size(weight.shape[1], weight.shape[0]),):
        raise ValueError(
            f"panels: expected what panel_maker(…) makes of weight {tuple(weight.shape)}, "
            f"got shape {tuple(panels.shape)}"
        )
    pre = x.new_empty((x.shape[0], weight.shape[0]) if save and activation is not None else 0)
    y = _product(x, panels, weight.shape[0], bias, activation, residual, pre if pre.numel() else None)
    return y, pre


def linear_bwd(dy, x, weight, pre, activation, need_dx, need_dweight, need_dbias):
    rows, out = dy.shape
    if rows < _PANEL_ROWS:
        return aten.linear_bwd(dy, x, weight, pre, activation, need_dx, need_dweight, need_dbias)
    g = dy if activation is None else dy.new_empty(dy.shape)
    dbias = dy.new_empty(out if need_dbias else 0, dtype=torch.float32)
    if need_dbias or activation is not None:
        _C.cpu_linear_activation_bwd(
            *(DTYPE_CODES[dy.dtype], rows, out, dy.data_ptr()),
            0 if activation is None else pre.data_ptr(),
            CODES[activation],
            0 if activation is None else g.data_ptr(),
            dbias.data_ptr() if need_dbias else 0,
            torch.get_num_threads(),
        )
    # float32 needs neither widening nor pairs, and then copying for one product pays beside a slow MKL only
    if dy.dtype == torch.float32 and mkl_leads():
        dx, dweight = g @ weight if need_dx else None, g.t() @ x if need_dweight else None
    else:
        dx = _product(g, weight, weight.shape[1]) if need_dx else None
        dweight = _product(g.t(), x, x.shape[1]) if need_dweight else None
    # a custom op may not return one tensor twice, not even an empty one
    return (
        dy.new_empty(0) if dx is None else dx,
        dy.new_empty(0) if dweight is None else dweight,
        dbias.to(dy.dtype),
    )
