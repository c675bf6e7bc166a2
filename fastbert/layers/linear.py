"""Linear layers and norms of modules, on our ops where the module is the plain one.

A linear layer or norm that is no longer plain (LoRA, parametrized, hooked) is called instead, and the rest
stays fused. A linear layer that `quantize` replaced counts as plain.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbert.layers.modules import is_plain
from fastbert.layers.quantized import QuantizedLinear, int8_product
from fastbert.ops import checks
from fastbert.ops.activation import activate_eager
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.ops.linear import panel_maker as linear_panel_maker
from fastbert.runtime import prepared

# From so many rows on, panels of a weight are made for the call and not kept.
MANY_ROWS = 1536


def weight_panels(module: nn.Linear, x: Tensor) -> Tensor | None:
    """Panels of the module's weight for the serving backend, made at the first call and kept for inference.

    None in training, under torch.compile, where the backend makes no panels, and for so many rows that making
    them for the one call costs next to nothing.
    """
    if module.training or torch.compiler.is_compiling() or x.shape[:-1].numel() >= MANY_ROWS:
        return None
    dtype = module.weight.dtype
    # Autocast leaves float64 alone.
    if dtype != torch.float64:
        dtype = checks.autocast_dtype(x) or dtype
    make_panels = linear_panel_maker(x.device, dtype)
    if make_panels is None:
        return None

    def build():
        checks.float_tensor("weight", module.weight)
        return make_panels(module.weight.to(dtype).contiguous())

    return prepared.derived(module, ("panels", dtype), (module.weight,), build)


def apply_linear(module: nn.Module, x: Tensor, activation: str | None = None) -> Tensor:
    """act(module(x)), fused where the module is a plain nn.Linear."""
    if is_plain(module, nn.Linear):
        return linear(x, module.weight, module.bias, activation, panels=weight_panels(module, x))
    if is_plain(module, QuantizedLinear):
        return int8_product(x, module, [module], activation)
    return activate_eager(module(x), activation)


def apply_norm(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), on our op where the module is a plain nn.LayerNorm."""
    if is_plain(module, nn.LayerNorm):
        return layer_norm(x, module.weight, module.bias, eps=module.eps)
    return module(x)


def dense_norm(
    dense: nn.Module,
    norm: nn.Module,
    x: Tensor,
    residual: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    fuse: bool = True,
) -> Tensor:
    """norm(residual + dropout(dense(x))).

    The linear layer's bias, the dropout and the sum are computed in the norm's pass where the norm is the
    plain nn.LayerNorm and `fuse` is set.
    """
    x_bias = None
    if is_plain(dense, nn.Linear):
        x, x_bias = linear(x, dense.weight, panels=weight_panels(dense, x)), dense.bias
    elif is_plain(dense, QuantizedLinear):
        x, x_bias = int8_product(x, dense, [dense], with_bias=False), dense.bias
    else:
        x = dense(x)
    if fuse and is_plain(norm, nn.LayerNorm):
        return layer_norm(
            x,
            norm.weight,
            norm.bias,
            residual=residual,
            x_bias=x_bias,
            eps=norm.eps,
            dropout_p=dropout_p,
            seed=seed,
            offset=offset,
        )
    if x_bias is not None:
        x = x + x_bias
    if dropout_p > 0:
        x = x * (keep_mask_2d(seed, offset, *x.shape, dropout_p).to(x.dtype) * (1.0 / (1.0 - dropout_p)))
    return norm(x + residual)


def pool_first(dense: nn.Module, first: Tensor) -> Tensor:
    """BERT's pooler: tanh(dense(first token)), (batch, hidden) -> (batch, hidden) (Devlin et al. 2018,
    "C").
    """
    return torch.tanh(apply_linear(dense, first))
