"""Linear layers and norms of modules, on our ops if the module is plain.

A linear layer or norm that is no longer plain (LoRA, parametrized, hooked) is called itself, and the rest
stays fused. LINEAR_KINDS lists the plain linear layers: nn.Linear, the 8-bit ones by which `quantize`
replaces it, and the one that trains for integers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn

from fastbert.layers.fake_quantized import (
    FakeQuantizedLinear,
    fake_joins,
    fake_layer_operands,
    fake_product,
)
from fastbert.layers.float8 import Float8Linear, fp8_joins, fp8_product, no_layer_operands
from fastbert.layers.form import Half
from fastbert.layers.modules import calls_all, has_weight, is_hooked, is_no_norm, is_plain, rms_eps
from fastbert.layers.parts import activation_of
from fastbert.layers.quantized import QuantizedLinear, int8_joins, int8_layer_operands, int8_product
from fastbert.ops import checks
from fastbert.ops.activation import activate_eager
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.feed_forward import feed_forward, pays
from fastbert.ops.layer_norm import layer_norm, no_norm, rms_norm
from fastbert.ops.linear import forward_of, linear
from fastbert.ops.linear import panel_maker as linear_panel_maker
from fastbert.ops.linear_norm import linear_norm, new_arrivals
from fastbert.ops.linear_norm import pays as joining_pays
from fastbert.runtime import dispatch, prepared


class _Panels(threading.local):
    """One thread's setting of panels.

    Attributes:
        kept: whether panels outlive the call that made them.
    """

    kept = True


_panels = _Panels()


@contextlib.contextmanager
def passing_panels() -> Iterator[None]:
    """A context in which this thread keeps no new panels, but makes them for each product.

    It is for many large batches in a row. There panels take as much memory as the weights and save little
    time, 3% for BERT-base at 1,024 rows (csrc/cpu/NOTES.md).
    """
    before, _panels.kept = _panels.kept, False
    try:
        yield
    finally:
        _panels.kept = before


def weight_panels(module: nn.Linear, x: Tensor, gated: bool = False) -> Tensor | None:
    """Panels of the module's weight for the serving backend, made at the first call and kept for inference.

    In `passing_panels` they are not kept. None in training, under torch.compile, and if the backend keeps no
    panels for this many rows. Panels for a gated product (`gated`) serve no other.
    """
    if module.training or torch.compiler.is_compiling():
        return None
    dtype = module.weight.dtype
    # Autocast does not cast float64
    if dtype != torch.float64:
        dtype = checks.autocast_dtype(x) or dtype
    make_panels = linear_panel_maker(x.device, dtype, x.shape[:-1].numel(), gated)
    if make_panels is None:
        return None

    def build():
        checks.float_tensor("weight", module.weight)
        return make_panels(module.weight.to(dtype).contiguous())

    return prepared.derived(module, ("panels", dtype, gated), (module.weight,), build, keep=_panels.kept)


def float_product(
    x: Tensor,
    owner: nn.Module,
    modules: list[nn.Linear],
    activation: str | None = None,
    with_bias: bool = True,
    gated: Half | None = None,
) -> Tensor:
    """act(x @ [W1; W2; …].T + [b1; b2; …]) of nn.Linear layers, as one product; see `LinearKind`."""
    if len(modules) == 1:
        module, own = modules[0], modules[0]._parameters
        rows, inner, outer, dtype = x.shape[0], module.in_features, module.out_features, x.dtype
        given, sizes = [x, own.get("weight"), own.get("bias")], [(rows, inner), (outer, inner), (outer,)]
        if with_bias and gated is None and checks.are_plain(given, [dtype] * 3, sizes):
            launch = dispatch.launcher(forward_of(activation, False, rows), x.device, dtype)
            panels = weight_panels(module, x) if checks.has_values(x) else None
            return launch(*given, activation, None, False, panels)[0]
        bias = module.bias if with_bias else None
        panels = weight_panels(module, x, gated is not None)
        return linear(x, module.weight, bias, activation, panels=panels, gated=gated)
    weights: list[Tensor] = [m.weight for m in modules]
    biases: list[Tensor] = [m.bias for m in modules]
    grad = torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in weights))
    if grad or torch.compiler.is_compiling():
        weight, bias = torch.cat(weights), torch.cat(biases)
    else:
        dtype = checks.autocast_dtype(x) or weights[0].dtype
        weight, bias = joined_weights(owner, weights, biases, dtype)
    return linear(x, weight, bias if with_bias else None, activation)


def joined_weights(
    owner: nn.Module, weights: list[Tensor], biases: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """([W1; W2; …], [b1; b2; …]) in `dtype`, which `owner` keeps until one of them changes."""
    return prepared.derived(
        owner,
        ("joined", dtype),
        (*weights, *biases),
        lambda: (torch.cat(weights).to(dtype), torch.cat(biases).to(dtype)),
    )


def float_joins(x: Tensor, modules: list[nn.Linear]) -> bool:
    """Whether one product of all the modules is faster than one product each.

    On a CPU it is not, and it would need a copy of the weights.
    """
    return x.is_cuda and all(m.bias is not None for m in modules)


def float_layer_operands(
    x: Tensor, owner: nn.Module, modules: list[nn.Linear], gated: bool = False
) -> list[tuple[Any, ...]] | None:
    """See `LinearKind`. Each module keeps its own panels."""
    if any(m.weight.dtype != x.dtype or m.weight.device != x.device for m in modules):
        return None
    return [(m.weight, weight_panels(m, x, gated and m is modules[-2]), None, m.bias, None) for m in modules]


class LinearKind(NamedTuple):
    """How the plain linear layers of one class are multiplied.

    Attributes:
        op: the op that multiplies them.
        product: (x, owner, modules, activation, with_bias, gated) -> act(x @ [W1; W2; …].T + [b1; b2; …]),
            one product of one or several modules. `owner` keeps what is derived from several. `gated`: of one
            module, see `ops.linear`.
        joins: (x, modules) -> whether `product` takes several modules at once, and is faster that way.
        layer_operands: (x, owner, modules, gated) -> (weight, panels, scale, bias, smooth) for each product
            of an encoder layer, as `ops.encoder_layer` describes them. The modules are query, key and value,
            or one that is all three, then attention output, intermediate (with both halves if `gated`),
            output, and perhaps a gate. None if they cannot run as a whole layer in `x`'s dtype.
        float_weight: whether `weight` is floating-point, so that another op may read it (`first_attention`,
            `linear_cross_entropy`).
    """

    op: str
    product: Callable[..., Tensor]
    joins: Callable[[Tensor, list[Any]], bool]
    layer_operands: Callable[[Tensor, nn.Module, list[Any], bool], list[tuple[Any, ...]] | None]
    float_weight: bool


FLOAT = LinearKind("linear", float_product, float_joins, float_layer_operands, float_weight=True)
INT8 = LinearKind("linear_int8", int8_product, int8_joins, int8_layer_operands, float_weight=False)
FAKE = LinearKind("linear_int8", fake_product, fake_joins, fake_layer_operands, float_weight=False)
FP8 = LinearKind("linear_fp8", fp8_product, fp8_joins, no_layer_operands, float_weight=False)
LINEAR_KINDS: dict[type, LinearKind] = {
    nn.Linear: FLOAT,
    QuantizedLinear: INT8,
    Float8Linear: FP8,
    FakeQuantizedLinear: FAKE,
}


def kind_of(module: nn.Module) -> LinearKind | None:
    """How a plain linear layer is multiplied; None if the module itself must be called."""
    return None if is_hooked(module) else LINEAR_KINDS.get(type(module))


def has_float_weight(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether an op may read the module's `weight` and `bias` instead of calling it; see `LinearKind`."""
    kind = None if calls_all() else kind_of(module)
    return kind is not None and kind.float_weight


def apply_linear(
    module: nn.Module, x: Tensor, activation: str | None = None, gated: Half | None = None
) -> Tensor:
    """act(module(x)), fused if the module is a plain linear layer.

    With `gated` it is act(a) · b, where [a, b] = module(x) and `gated` is the activated half.
    """
    return _applied(None if calls_all() else kind_of(module), module, x, activation, gated)


def _applied(
    kind: LinearKind | None, module: Any, x: Tensor, activation: str | None, gated: Half | None = None
) -> Tensor:
    """act(module(x)), as `kind` multiplies; the module is called if `kind` is None."""
    if kind is None:
        return activate_eager(module(x), activation, gated)
    if is_empty(module):
        return activate_eager(_empty_product(module, x, module.bias), activation, gated)
    return kind.product(x, module, [module], activation, gated=gated)


def all_plain(
    linears: Sequence[nn.Module], norms: Sequence[nn.Module], norm: type[nn.Module] = nn.LayerNorm
) -> bool:
    """Whether the linear layers are plain, of one kind and not empty, and the norms plain ones of `norm`."""
    own = type(linears[0])
    return (
        own in LINEAR_KINDS
        and all(is_plain(m, own) and not is_empty(m) for m in linears)
        and all(is_plain(m, norm) for m in norms)
    )


def is_empty(module: Any) -> bool:
    """Whether a plain linear layer has no inputs or no outputs: no head or no inner column is left."""
    return module.in_features == 0 or module.out_features == 0


def _empty_product(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """The output of an empty linear layer: `bias` in each row, or zeros."""
    y = x.new_zeros(*x.shape[:-1], module.out_features, dtype=checks.autocast_dtype(x) or x.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def apply_activated(module: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    """activation(module(x)), fused if both modules are plain."""
    everything = calls_all()
    name = None if everything else activation_of(activation)
    y = _applied(None if everything else kind_of(module), module, x, name)
    return y if name is not None else activation(y)


def apply_joined(owner: nn.Module, modules: list[nn.Module], x: Tensor) -> Tensor | None:
    """The outputs of all modules side by side, (rows, columns of all), as one product.

    `owner` keeps the joined weights. None if the modules are better applied one by one.
    """
    kind, own = kind_of(modules[0]), type(modules[0])
    if kind is None or not all(is_plain(m, own) for m in modules) or not kind.joins(x, modules):
        return None
    return kind.product(x, owner, modules)


def norm_op(module: Any) -> Callable[..., Any] | None:
    """Our op with the norm's parameters; None if the norm must be called itself.

    Our ops know nn.LayerNorm, RMSNorm (`rms_eps`) and NoNorm, without hooks.
    """
    found = None
    if type(module) is nn.LayerNorm:
        found = partial(layer_norm, weight=module.weight, bias=module.bias, eps=module.eps)
    elif is_no_norm(module):
        found = partial(no_norm, weight=module.weight, bias=module.bias)
    elif (eps := rms_eps(module)) is not None:
        found = partial(rms_norm, weight=module.weight, eps=eps)
    return None if found is None or is_hooked(module) or not has_weight(module) else found


def apply_norm(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), by `norm_op` if it may."""
    op = None if calls_all() else norm_op(module)
    return module(x) if op is None else op(x)


def dense_norm(
    dense: nn.Module,
    norm: nn.Module,
    x: Tensor,
    residual: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    fuse: bool = True,
    arrivals: list[Tensor] | None = None,
    rounds: list[Tensor] | None = None,
) -> Tensor:
    """norm(residual + dropout(dense(x))).

    If `fuse` is set and our op computes the norm, its pass also adds the linear layer's bias, drops, and adds
    the residual; in inference a LayerNorm is one op with the product where that pays. `arrivals` keeps the
    counters of that op from call to call, in the order in which the device runs the calls. Under autocast
    `rounds`, if given, gets the result once more, for a product that `takes_rounded`. Before a NoNorm the
    product adds the bias, as it does where no residual follows.
    """
    if fuse and dropout_p == 0.0 and (y := _joined_norm(dense, norm, x, residual, arrivals)) is not None:
        return y
    product = (apply_linear(dense, x), None) if is_no_norm(norm) else product_and_bias(dense, x)
    return _add_norm(norm, *product, residual, dropout_p, seed, offset, fuse, rounds)


def feed_forward_norm(
    up: Any,
    down: Any,
    norm: nn.Module,
    x: Tensor,
    activation: str | None,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    fuse: bool = True,
    arrivals: list[Tensor] | None = None,
    rounds: list[Tensor] | None = None,
    rounded: Tensor | None = None,
    tap: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """norm(x + dropout(down(act(up(x))))), as `dense_norm` does it.

    In training the two products are one op where that pays. `rounded`, if given, is multiplied in place of
    `x`. `tap`, if given, replaces the tensor between the products.
    """
    rounded = x if rounded is None else rounded
    if tap is None and joins_products(up, down, rounded, activation):
        y = feed_forward(rounded, up.weight, up.bias, down.weight, cast(str, activation))
        return _add_norm(norm, y, down.bias, x, dropout_p, seed, offset, fuse, rounds)
    if tap is None and not calls_all() and kind_of(up) is kind_of(down) is FP8 and not is_empty(up):
        # The pass that rounds the rows for the second product activates them
        inner = fp8_product(rounded, up, [up])
        y = fp8_product(inner, down, [down], with_bias=False, input_activation=activation)
        return _add_norm(norm, y, down.bias, x, dropout_p, seed, offset, fuse, rounds)
    inner = apply_linear(up, rounded, activation)
    if tap is not None:
        inner = tap(inner)
    return dense_norm(down, norm, inner, x, dropout_p, seed, offset, fuse, arrivals, rounds)


def joins_products(up: nn.Module, down: nn.Module, x: Tensor, activation: str | None) -> bool:
    """Whether the op `feed_forward` computes both products of a feed-forward block, and is better."""
    return (
        activation is not None
        and pays(x)
        and is_plain(up, nn.Linear)
        and is_plain(down, nn.Linear)
        and not is_empty(up)
        and _is_trained(x, up, down)
    )


def dropped(x: Tensor, dropout_p: float, seed: Tensor | None, offset: int) -> Tensor:
    """Dropout of (rows, columns), its bits as in the ops."""
    keep = keep_mask_2d(cast(Tensor, seed), offset, x.shape[0], x.shape[1], dropout_p)
    return x * (keep.to(x.dtype) * (1.0 / (1.0 - dropout_p)))


def takes_rounded(dense: nn.Module, x: Tensor) -> bool:
    """Whether the layer multiplies in the autocast dtype, so that it may be given `x` cast already."""
    half = checks.autocast_dtype(x) in (torch.bfloat16, torch.float16)
    return half and is_plain(dense, nn.Linear) and not torch.compiler.is_compiling()


def joined_takes_rounded(modules: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether the layers multiply in the autocast dtype, all of them in one product of a tensor like `x`."""
    first = modules[0]
    if not takes_rounded(first, x):
        return False
    joins = LINEAR_KINDS[nn.Linear].joins
    once = all(m is first for m in modules)
    return once or (all(is_plain(m, nn.Linear) for m in modules) and joins(x, list(modules)))


def _is_trained(x: Tensor, *modules: nn.Linear | nn.LayerNorm) -> bool:
    """Whether backward will pass through these layers."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(
        p.requires_grad for m in modules for p in (m.weight, m.bias) if p is not None
    )


def _joined_norm(
    dense: nn.Module, norm: nn.Module, x: Tensor, residual: Tensor, arrivals: list[Tensor] | None
) -> Tensor | None:
    """norm(residual + dense(x)) as one op; None where it is not one. `arrivals` keeps counters made here."""
    if not (
        not torch.compiler.is_compiling()
        and is_plain(dense, nn.Linear)
        and not is_empty(dense)
        and is_plain(norm, nn.LayerNorm)
        and norm.weight is not None
        and dense.weight.dtype == residual.dtype == x.dtype
        and joining_pays(x, dense.weight.shape[0])
        and checks.autocast_dtype(x) is None
        and not (_is_trained(x, dense, norm) or (torch.is_grad_enabled() and residual.requires_grad))
    ):
        return None
    if arrivals is not None and not arrivals:
        arrivals.append(new_arrivals(x.device))
    return linear_norm(
        x,
        dense.weight,
        dense.bias,
        residual,
        norm.weight,
        norm.bias,
        eps=norm.eps,
        arrivals=arrivals[0] if arrivals else None,
    )


def product_and_bias(dense: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(product, bias) whose sum is dense(x), the bias not added yet; None if there is nothing to add."""
    kind = kind_of(dense)
    if kind is None:
        return dense(x), None
    if is_empty(dense):
        return _empty_product(dense, x, None), dense.bias
    return kind.product(x, dense, [dense], with_bias=False), dense.bias


def _add_norm(
    norm: nn.Module,
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    fuse: bool,
    rounds: list[Tensor] | None = None,
) -> Tensor:
    """norm(residual + dropout(x + x_bias)); `rounds` gets the same for products, see `layer_norm`."""
    if fuse and (op := norm_op(norm)) is not None:
        how: dict[str, Any] = {"dropout_p": dropout_p, "seed": seed, "offset": offset}
        found = op(x, residual=residual, x_bias=x_bias, rounded=rounds is not None, **how)
        if rounds is None:
            return found
        rounds.append(found[1])
        return found[0]
    if x_bias is not None:
        x = x + x_bias
    if dropout_p > 0:
        x = dropped(x, dropout_p, seed, offset)
    y = norm(x + residual)
    if rounds is not None:
        rounds.append(y)
    return y


class _Split(torch.autograd.Function):
    """`unbind(1)` whose gradients are not copied where attention's backward has written them side by side."""

    @staticmethod
    def forward(ctx, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.unbind(1)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        whole = grads[0]._base
        if (
            whole is None
            or torch.is_grad_enabled()
            or any(g._base is not whole for g in grads)
            or whole.shape != (grads[0].shape[0], 3, *grads[0].shape[1:])
            or any(
                g.data_ptr() != own.data_ptr() or g.stride() != own.stride()
                for g, own in zip(grads, whole.unbind(1), strict=True)
            )
        ):
            return torch.stack(grads, 1)
        return whole


def split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(total, 3, nheads, head_dim) -> query, key and value, views of it."""
    trains = qkv.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    q, k, v = _Split.apply(qkv) if trains else qkv.unbind(1)
    return q, k, v
