"""Linear layers and norms of modules, on our ops if the module is plain.

A linear layer or norm that is no longer plain (LoRA, parametrized, hooked) is called itself, and the rest
stays fused. LINEAR_KINDS lists the plain linear layers: nn.Linear, the 8-bit ones by which `quantize`
replaces it, and the one that trains for integers. A layer whose parts are all plain knows their kind
(`Parts.kind`); without it each function looks at its module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from fastbert.layers.fake_quantized import (
    FakeQuantizedLinear,
    fake_joins,
    fake_layer_operands,
    fake_product,
)
from fastbert.layers.float8 import Float8Linear, fp8_joins, fp8_product, no_layer_operands
from fastbert.layers.float_linear import (
    float_add,
    float_feed,
    float_joins,
    float_layer_operands,
    float_norm,
    float_product,
)
from fastbert.layers.form import Half
from fastbert.layers.modules import calls_all, has_weight, is_no_norm, is_plain, rms_eps
from fastbert.layers.parts import activation_of
from fastbert.layers.quantized import QuantizedLinear, int8_joins, int8_layer_operands, int8_product
from fastbert.ops import checks
from fastbert.ops.activation import activate_eager
from fastbert.ops.layer_norm import layer_norm, no_norm, rms_norm


class LinearKind(NamedTuple):
    """How the plain linear layers of one class are multiplied.

    Attributes:
        op: the op that multiplies them.
        product: (x, owner, modules, activation, with_bias, gated) -> act(x @ [W1; W2; …].T + [b1; b2; …]),
            one product of one or several modules. `owner` keeps what is derived from several. `gated`: of one
            module, see `ops.linear`.
        joins: (x, modules) -> whether `product` takes several modules at once, and is faster that way.
        layer_operands: (x, owner, modules, gated) -> what `ops.encoder_layer` describes as linears, for each
            product of an encoder layer. The modules are query, key and value,
            or one that is all three, then attention output, intermediate (with both halves if `gated`),
            output, and perhaps a gate. None if they cannot run as a whole layer in `x`'s dtype.
        float_weight: whether `weight` is floating-point, so that another op may read it (`first_attention`,
            `linear_cross_entropy`).
        feed: (x, up, down, activation, gated) -> down(act(up(x))) less the bias of `down`, in fewer passes
            than two products; None where those are better.
        add: (x, module, residual) -> residual + module(x) as one op, or None.
        normed: (x, module, residual, norm, arrivals) -> norm(residual + module(x)) as one op, or None; the
            norm is plain. See `dense_norm` for `arrivals`.
    """

    op: str
    product: Callable[..., Tensor]
    joins: Callable[[Tensor, list[Any]], bool]
    layer_operands: Callable[[Tensor, nn.Module, list[Any], bool], list[tuple[Any, ...]] | None]
    float_weight: bool
    feed: Callable[..., Tensor | None] = lambda *_: None
    add: Callable[..., Tensor | None] = lambda *_: None
    normed: Callable[..., Tensor | None] = lambda *_: None


def _fp8_feed(x: Tensor, up: Any, down: Any, activation: str | None, gated: Half | None) -> Tensor | None:
    """See `LinearKind`. The pass that rounds the rows for the second product activates them."""
    if gated is not None:
        return None
    inner = fp8_product(x, up, [up])
    return fp8_product(inner, down, [down], with_bias=False, input_activation=activation)


def _empty_product(
    x: Tensor,
    owner: nn.Module,
    modules: list[Any],
    activation: str | None = None,
    with_bias: bool = True,
    gated: Half | None = None,
) -> Tensor:
    """The output of a linear layer without inputs or outputs: its bias in each row, or zeros."""
    (module,) = modules
    y = x.new_zeros(*x.shape[:-1], module.out_features, dtype=checks.autocast_dtype(x) or x.dtype)
    y = y + module.bias.to(y.dtype) if with_bias and module.bias is not None else y
    return activate_eager(y, activation, gated)


FLOAT = LinearKind(
    "linear", float_product, float_joins, float_layer_operands, True, float_feed, float_add, float_norm
)
INT8 = LinearKind("linear_int8", int8_product, int8_joins, int8_layer_operands, float_weight=False)
FAKE = LinearKind("linear_int8", fake_product, fake_joins, fake_layer_operands, float_weight=False)
FP8 = LinearKind("linear_fp8", fp8_product, fp8_joins, no_layer_operands, False, _fp8_feed)
# No head or no inner column is left
EMPTY = LinearKind("", _empty_product, lambda *_: False, no_layer_operands, float_weight=False)
LINEAR_KINDS: dict[type, LinearKind] = {
    nn.Linear: FLOAT,
    QuantizedLinear: INT8,
    Float8Linear: FP8,
    FakeQuantizedLinear: FAKE,
}


def kind_of(module: Any) -> LinearKind | None:
    """How a plain linear layer is multiplied; None if the module itself must be called."""
    kind = LINEAR_KINDS.get(type(module)) if is_plain(module, type(module)) else None
    return kind if kind is None or (module.in_features and module.out_features) else EMPTY


def common_kind(*modules: nn.Module) -> LinearKind | None:
    """How plain linear layers of one kind are multiplied; None if they are not of one kind."""
    kind = kind_of(modules[0])
    return kind if all(kind_of(m) is kind for m in modules[1:]) else None


def kind_of_layer(
    linears: Sequence[nn.Module], norms: Sequence[nn.Module], norm: type[nn.Module] = nn.LayerNorm
) -> LinearKind | None:
    """The kind of all linear layers, none of them empty, if also the norms are plain ones of `norm`."""
    kind = common_kind(*linears)
    return None if kind is EMPTY or not all(is_plain(m, norm) and has_weight(m) for m in norms) else kind


def has_float_weight(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether an op may read the module's `weight` and `bias` instead of calling it; see `LinearKind`."""
    kind = None if calls_all() else kind_of(module)
    return kind is not None and kind.float_weight


def apply_linear(
    module: nn.Module,
    x: Tensor,
    activation: str | None = None,
    gated: Half | None = None,
    kind: LinearKind | None = None,
) -> Tensor:
    """act(module(x)), fused if the module is a plain linear layer.

    With `gated` it is act(a) · b, where [a, b] = module(x) and `gated` is the activated half.
    """
    kind = kind or (None if calls_all() else kind_of(module))
    if kind is None:
        return activate_eager(module(x), activation, gated)
    return kind.product(x, module, [module], activation, gated=gated)


def apply_activated(module: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    """activation(module(x)), fused if both modules are plain."""
    everything = calls_all()
    name = None if everything else activation_of(activation)
    y = apply_linear(module, x, name, kind=None if everything else kind_of(module))
    return y if name is not None else activation(y)


def apply_joined(
    owner: nn.Module, modules: list[nn.Module], x: Tensor, kind: LinearKind | None = None
) -> Tensor | None:
    """The outputs of all modules side by side, (rows, columns of all), as one product.

    `owner` keeps the joined weights. None if the modules are better applied one by one.
    """
    kind = kind or common_kind(*modules)
    return None if kind is None or not kind.joins(x, modules) else kind.product(x, owner, modules)


def norm_op(module: Any, plain: bool = False) -> Callable[..., Any] | None:
    """Our op with the norm's parameters; None if the norm must be called itself.

    Our ops know nn.LayerNorm, RMSNorm (`rms_eps`) and NoNorm, without hooks. `plain`: the caller knows that
    there are none, and that there is a weight.
    """
    found = None
    if type(module) is nn.LayerNorm:
        found = partial(layer_norm, weight=module.weight, bias=module.bias, eps=module.eps)
    elif is_no_norm(module):
        found = partial(no_norm, weight=module.weight, bias=module.bias)
    elif (eps := rms_eps(module)) is not None:
        found = partial(rms_norm, weight=module.weight, eps=eps)
    return (
        found if plain or found is None or (has_weight(module) and is_plain(module, type(module))) else None
    )


def apply_norm(module: nn.Module, x: Tensor, plain: bool = False) -> Tensor:
    """module(x), by `norm_op` if it may; `plain` as there."""
    op = None if not plain and calls_all() else norm_op(module, plain)
    return module(x) if op is None else op(x)
