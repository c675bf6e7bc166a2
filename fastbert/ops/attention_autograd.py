"""The passes of `attention` as custom ops, which torch.compile sees, and as an autograd.Function.

The contract is in fastbert/ops/attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives
from fastbert.ops.attention_checks import check_operands, checked_window
from fastbert.ops.attention_grid import bits_shape
from fastbert.ops.attention_inputs import AttentionInputs, AttentionNeeds, Window
from fastbert.ops.attention_places import check_table
from fastbert.ops.attention_relative import RelativeScores
from fastbert.ops.schema import schema
from fastbert.runtime import dispatch

_INPUTS = len(AttentionInputs._fields)
# What `dispatch` calls the passes of training: one backend serves both.
_FORWARD_OF_TRAINING, _BACKWARD = "attention_fwd training", "attention_bwd training"
# The same with scores of distances that the backend reads
RELATIVE, _RELATIVE_FORWARD = "attention_fwd relative", "attention_fwd relative training"
_RELATIVE_BACKWARD = "attention_bwd relative training"


def _grouped(args: tuple[Any, ...]) -> tuple[AttentionInputs, bool, bool, Tensor | None]:
    """(inputs, return_probs, save_bits, places) of the custom op's arguments, whatever follows them."""
    inputs, (return_probs, save_bits, *more) = AttentionInputs(*args[:_INPUTS]), args[_INPUTS:]
    if type(inputs.window) is not Window:
        inputs = inputs._replace(window=Window(*inputs.window))
    return inputs, return_probs, save_bits, more[0] if more else None


_OPTIONS = "bool return_probs, bool save_bits, Tensor? places=None, bool training=False"
_SAVED = "Tensor out, Tensor lse, Tensor? keep_bits"
_NEEDS = "bool need_dq, bool need_dk, bool need_dv, bool need_dbias, bool need_dgate"


def _checked(args: tuple[Any, ...], places: Tensor | None) -> AttentionInputs:
    """The inputs of a custom op."""
    inputs = AttentionInputs(*args)
    inputs = inputs._replace(window=checked_window(False, tuple(inputs.window)))
    check_operands(inputs)
    check_table(places, inputs.cu_seqlens, inputs.max_seqlen, inputs.q)
    return inputs


@torch.library.custom_op(
    "fastbert::attention_fwd", mutates_args=(), schema=schema(AttentionInputs, _OPTIONS, returns=4)
)
def attention_fwd(*args: Any) -> tuple[Tensor, ...]:
    """(out, lse, probs, keep_bits); see fastbert/ops/attention.py for keep_bits.

    out is contiguous, with the shape and dtype of `q`; lse (nheads, total) in float32 (float64 for float64);
    probs (batch, nheads, max_seqlen, max_seqlen) in q's dtype, before dropout. probs and keep_bits are of
    shape (0,) unless `return_probs` and `save_bits`. `save_bits` needs dropout. `bias` is 4-D; sizes of 1
    broadcast. `places` is the table of fastbert/ops/attention_places.py for these lengths. `training` means
    that backward follows: the backend is then the one that serves backward.
    """
    # PyTorch leaves out arguments at their defaults
    return_probs, save_bits, places, training, *_ = *args[_INPUTS:], None, False
    inputs = _checked(args[:_INPUTS], places)
    function = _FORWARD_OF_TRAINING if training else "attention_fwd"
    return dispatch.call(function, inputs.q, inputs, return_probs, save_bits, places)


@attention_fwd.register_fake
def _(*args):
    inputs, return_probs, save_bits, _ = _grouped(args)
    q, max_seqlen = inputs.q, inputs.max_seqlen
    total, nheads, _ = q.shape
    batch = inputs.cu_seqlens.shape[0] - 1
    return (
        q.new_empty(q.shape),
        q.new_empty((nheads, total), dtype=checks.compute_dtype(q)),
        q.new_empty((batch, nheads, max_seqlen, max_seqlen) if return_probs else (0,)),
        q.new_empty(bits_shape(nheads, total, max_seqlen, save_bits), dtype=torch.int32),
    )


@torch.library.custom_op(
    "fastbert::attention_bwd",
    mutates_args=(),
    schema=schema("Tensor dout", AttentionInputs, _SAVED, _NEEDS, "Tensor? places", returns=5),
)
def attention_bwd(dout: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dbias, dgate), each of shape (0,) where not needed.

    dq, dk and dv are contiguous, of the shapes of q, k and v and in q's dtype (a backend's own may be side by
    side where q, k and v are, each with their strides); dbias has bias' shape, dgate is (nheads,), both in
    float32 (float64 for float64). `dout` is contiguous. `keep_bits` are those that forward saved; with None
    they are drawn again.
    """
    inputs, (out, lse, keep_bits, *needs, places) = _checked(args[:_INPUTS], args[-1]), args[_INPUTS:]
    q, need = inputs.q, AttentionNeeds(*needs)
    total, nheads, _ = q.shape
    for name, t in (("dout", dout), ("out", out)):
        checks.operand(name, t, q.shape, (q.dtype,), q)
    checks.operand("lse", lse, (nheads, total), (checks.compute_dtype(q),), q)
    bits = bits_shape(nheads, total, inputs.max_seqlen, True)
    checks.operand("keep_bits", keep_bits, bits, (torch.int32,), q)
    for name, t, needed in (("bias", inputs.bias, need.dbias), ("gate", inputs.gate, need.dgate)):
        if needed and t is None:
            raise ValueError(f"{name}: expected a torch.Tensor, whose gradient is asked for, got None")
    grads = dispatch.call(_BACKWARD, q, dout, inputs, out, lse, keep_bits, need, places)
    dqkv, others = grads[:3], grads[3:]
    return *(grad.contiguous() for grad in dqkv), *others


@attention_bwd.register_fake
def _(dout, *args):
    inputs, (_, lse, _, *needs, _) = AttentionInputs(*args[:_INPUTS]), args[_INPUTS:]
    qkv = zip(inputs[:3], needs[:3], strict=True)
    others = zip((inputs.bias, inputs.gate), needs[3:], strict=True)
    return (
        *(inputs.q.new_empty(t.shape if needed else (0,)) for t, needed in qkv),
        *(lse.new_empty(t.shape if needed else (0,)) for t, needed in others),
    )


def _compiled_bwd(dout, inputs, out, lse, keep_bits, need, places):
    """The custom op called as a backend's `attention_bwd` is."""
    return attention_bwd(dout, *inputs, out, lse, keep_bits, *need, places)


def _launched_bwd(dout, inputs, *args):
    function = _BACKWARD if len(args) == 5 else _RELATIVE_BACKWARD
    return dispatch.call(function, inputs.q, dout, inputs, *args)


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _setup_context(ctx, inputs: AttentionInputs, save_bits, places, output, relative=()):
    out, lse, _probs, keep_bits = output
    keep_bits = keep_bits if save_bits else None
    tensors = *inputs[:4], inputs.bias, inputs.gate, inputs.seed
    ctx.save_for_backward(*tensors, out, lse, keep_bits, places, *relative)
    ctx.set_materialize_grads(False)
    ctx.options = inputs[4:7], inputs.dropout_p, inputs.offset


def _backward(launch, ctx, dout):
    # once: layers that are computed again allow no second access
    q, k, v, cu_seqlens, bias, gate, seed, out, lse, keep_bits, places, *relative = ctx.saved_tensors
    if dout is None:
        return (None,) * (15 + len(relative))
    how, dropout_p, offset = ctx.options
    inputs = AttentionInputs._make((q, k, v, cu_seqlens, *how, bias, gate, dropout_p, seed, offset))
    wanted = ctx.needs_input_grad
    need = AttentionNeeds(*wanted[:3], *wanted[7:9])
    more = (RelativeScores(*relative), list(wanted[16:19])) if relative else ()
    dq, dk, dv, dbias, dgate, *found = launch(
        dout.contiguous(), inputs, out, lse, keep_bits, need, places, *more
    )
    qkv = (grad if needed else None for grad, needed in zip((dq, dk, dv), need[:3], strict=True))
    dbias = dbias.to(bias.dtype) if need.dbias else None
    dgate = dgate.to(gate.dtype) if need.dgate else None
    scores = [
        grad.to(t.dtype) if needed else None
        for grad, t, needed in zip(found, relative[1:4], wanted[16:19], strict=True)
    ]
    ends = (None, *scores, None) if relative else ()
    return *qkv, *(None,) * 4, dbias, dgate, *(None,) * 6, *ends


class AttentionFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers, without the cost of a custom op's dispatch.

    The fields of `RelativeScores` may follow the custom op's arguments.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        # a separate setup_context would cost an inspect.signature at every call
        inputs, return_probs, save_bits, places = _grouped(args)
        relative = args[_INPUTS + 3 :]
        more = (RelativeScores(*relative),) if relative else ()
        function = _RELATIVE_FORWARD if relative else _FORWARD_OF_TRAINING
        output = dispatch.call(function, inputs.q, inputs, return_probs, save_bits, places, *more)
        ctx.mark_non_differentiable(*output[1:])
        _setup_context(ctx, inputs, save_bits, places, output, relative)
        return output

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
        return _backward(_launched_bwd, ctx, dout)


def _setup_compiled(ctx, inputs, output):
    inputs, _return_probs, save_bits, places = _grouped(inputs)
    _setup_context(ctx, inputs, save_bits, places, output)


attention_fwd.register_autograd(
    lambda ctx, dout, *_: (*_backward(_compiled_bwd, ctx, dout), None), setup_context=_setup_compiled
)
