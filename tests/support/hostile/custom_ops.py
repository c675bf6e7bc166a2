"""The door `torch.ops.fastbert`: what every custom op takes, and the rows that it must refuse."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastbert.ops import attention as attention_op
from fastbert.ops import attention_places as places_op
from fastbert.runtime import dispatch
from tests.support.hostile.fences import fenced_outputs
from tests.support.hostile.values import (
    BATCH,
    BIASES,
    CELLS,
    DIM,
    ENDS,
    HEADS,
    IDS,
    INT32,
    LONGEST,
    SIZES,
    TOTAL,
    WRONG_ENDS,
    WRONG_IDS,
    WRONG_INDICES,
    WRONG_LABELS,
    bytes_of,
    floats,
    ints,
    panels_size,
)


class Op(NamedTuple):
    args: object  # () -> arguments by name, in order
    rows: tuple | list = ()  # values by name, each refused
    free: tuple = ()  # arguments that may have other sizes: the result is then another one
    backends: tuple = ("cpu", "aten", "reference")


def dropped():
    return {"dropout_p": 0.25, "seed": ints(7), "offset": 1}


def attention_operands():
    return {
        **{name: floats(TOTAL, HEADS, DIM) for name in ("q", "k", "v")},
        "cu_seqlens": ints(*ENDS, dtype=INT32),
        "max_seqlen": LONGEST,
        "softmax_scale": 0.5,
        "causal": False,
        "bias": floats(*CELLS),
        "gate": floats(HEADS),
        **dropped(),
    }


NEEDS = {"need_dx": True, "need_dweight": True, "need_dbias": True}


def attention_table():
    return places_op.places_ref(ints(*ENDS, dtype=INT32), TOTAL, LONGEST)


def attention_saved():
    operands = attention_operands()
    out, lse, _, bits = attention_op.attention_fwd(*operands.values(), False, True)
    saved = {"keep_bits": bits, **{f"need_{n}": True for n in ("dq", "dk", "dv", "dbias", "dgate")}}
    first = {name: operands.pop(name) for name in ("q", "k", "v")}
    saved |= {"places": attention_table()}
    return {"dout": torch.ones(TOTAL, HEADS, DIM), **first, "out": out, "lse": lse, **operands, **saved}


def embedding_operands():
    return {
        "input_ids": ints(*IDS),
        "inputs_embeds": None,
        "word": floats(7, 5),
        "position_ids": ints(0, 1, 2, 3),
        "position": floats(6, 5),
        "token_type_ids": ints(0, 0, 1, 1),
        "segment": floats(2, 5),
        "ln_weight": floats(5),
        "ln_bias": floats(5),
        "padding_idx": 0,
        "eps": 1e-5,
        **dropped(),
        "save": True,
    }


def loss_operands(**saved):
    operands = {"logits": floats(4, 5), "labels": ints(0, 4, -100, 2), **saved}
    return {**operands, "ignore_index": -100, "label_smoothing": 0.1}


def linear_loss_operands(some=range(8)):
    operands = {
        "x": floats(4, 5),
        "weight": floats(5, 5),
        "bias": floats(5),
        "labels": ints(0, 2, -100, 1),
        "labelled": 3,
        "ignore_index": -100,
        "label_smoothing": 0.1,
        "chunk_rows": 2,
    }
    names = list(operands)
    return {names[i]: operands[names[i]] for i in some}


LENGTHS = [
    *({"cu_seqlens": ints(*ends, dtype=INT32)} for ends, _ in WRONG_ENDS),
    {"max_seqlen": 2},
    {"max_seqlen": -1},
]
# A start, a length and a first row far away, a sequence that is not there, and places that follow otherwise.
WRONG_PLACES = [
    *({"places": attention_table().index_fill(1, torch.tensor([field]), 2**31 - 1)} for field in range(4)),
    {"places": attention_table().flip(0)},
    {"places": attention_table()[1:].contiguous()},
    {"places": attention_table().long()},
]
OPS = {
    "attention_fwd": Op(
        lambda: {
            **attention_operands(),
            "return_probs": True,
            "save_bits": True,
            "places": attention_table(),
        },
        [
            *LENGTHS,
            *BIASES,
            *WRONG_PLACES,
            {"bias": floats(HEADS, LONGEST, LONGEST)},
            {"seed": None},
            {"dropout_p": 1.5},
        ],
        ("cu_seqlens", "max_seqlen"),
    ),
    "attention_bwd": Op(
        attention_saved,
        [
            *LENGTHS,
            *BIASES,
            *WRONG_PLACES,
            {"seed": None},
            {"keep_bits": floats(HEADS, TOTAL, 1)},
            {"bias": None},
            {"gate": None},
        ],
        ("cu_seqlens",),
    ),
    "attention_places": Op(
        lambda: {
            "cu_seqlens": ints(*ENDS, dtype=INT32),
            "total": TOTAL,
            "max_seqlen": LONGEST,
            "dtype": torch.float32,
        },
        [*LENGTHS, {"total": 7}],
        ("cu_seqlens", "max_seqlen"),
    ),
    "cross_entropy_fwd": Op(
        loss_operands,
        WRONG_LABELS,
        ("logits", "ignore_index"),
    ),
    "cross_entropy_bwd": Op(
        lambda: {"dloss": torch.tensor(1.0), **loss_operands(lse=torch.ones(2, 4), count=torch.tensor(3))},
        WRONG_LABELS,
        ("logits", "ignore_index"),
    ),
    "embedding_fwd": Op(
        embedding_operands,
        [
            *WRONG_IDS,
            {"word": None},
            {"position": None},
            {"segment": None},
        ],
        ("word", "position", "segment", "padding_idx"),
    ),
    "embedding_bwd": Op(
        lambda: {
            "dy": floats(4, 5),
            "z": floats(4, 5),
            "ln_weight": floats(5),
            "mean": floats(4),
            "rstd": floats(4),
            "input_ids": ints(*IDS),
            "position_ids": ints(0, 1, 2, 3),
            "token_type_ids": ints(0, 0, 1, 1),
            "word_rows": 7,
            "position_rows": 6,
            "segment_rows": 2,
            "padding_idx": 0,
            **dropped(),
            "need_dinputs_embeds": True,
            "need_dln": True,
        },
        [
            *WRONG_IDS,
            {"input_ids": None},
        ],
        ("padding_idx",),
    ),
    "layer_norm_fwd": Op(
        lambda: {
            "x": floats(4, 5),
            "weight": floats(5),
            "bias": floats(5),
            "residual": floats(4, 5),
            "x_bias": floats(5),
            "eps": 1e-5,
            **dropped(),
            "save": True,
        }
    ),
    "layer_norm_bwd": Op(
        lambda: {
            "dy": floats(4, 5),
            "z": floats(4, 5),
            "weight": floats(5),
            "mean": floats(4),
            "rstd": floats(4),
            **dropped(),
            **{f"need_{n}": True for n in ("dx", "dweight", "dxbias", "dresidual")},
        }
    ),
    "feed_forward_fwd": Op(
        lambda: {
            "x": floats(40, 5),
            "up_weight": floats(7, 5),
            "up_bias": floats(7),
            "down_weight": floats(3, 7),
            "activation": "gelu",
            "save": True,
        },
        [{"activation": "mish"}],
        ("x", "down_weight"),
    ),
    "feed_forward_bwd": Op(
        lambda: {
            "dy": floats(40, 3),
            "x": floats(40, 5),
            "up_weight": floats(7, 5),
            "down_weight": floats(3, 7),
            "pre": floats(40, 7),
            "inner": floats(40, 7),
            "activation": "gelu",
            **{f"need_d{n}": True for n in ("x", "up_weight", "up_bias", "down_weight")},
        },
        [
            {"x": None},
            {"up_weight": None},
            {"down_weight": None},
            {"pre": None},
            {"inner": None},
            {"activation": "mish"},
        ],
    ),
    "linear_fwd": Op(
        lambda: {
            "x": floats(40, 5),
            "weight": floats(3, 5),
            "bias": floats(3),
            "activation": "gelu",
            "residual": floats(40, 3),
            "save": True,
        },
        [{"activation": "mish"}],
    ),
    "linear_bwd": Op(
        lambda: {
            "dy": floats(40, 3),
            "x": floats(40, 5),
            "weight": floats(3, 5),
            "pre": floats(40, 3),
            "activation": "gelu",
            **NEEDS,
        },
        [{"x": None}, {"weight": None}, {"pre": None}, {"activation": "mish"}],
        ("x", "weight"),
    ),
    "linear_cross_entropy_fwd": Op(
        linear_loss_operands,
        [*WRONG_LABELS, {"labelled": 4}, {"labelled": 2}, {"labelled": -2}, {"chunk_rows": 0}],
        ("chunk_rows", "ignore_index"),
    ),
    "linear_cross_entropy_bwd": Op(
        lambda: {
            "dloss": torch.tensor(1.0),
            **linear_loss_operands(range(4)),
            "lse": torch.ones(2, 4),
            "count": torch.tensor(3),
            "logits": torch.empty(0),
            **linear_loss_operands(range(4, 8)),
            **NEEDS,
        },
        [
            *WRONG_LABELS,
            {"labelled": 4},
            {"labelled": 2},
            {"chunk_rows": 0},
            {"logits": floats(3, 3)},
            {"x": None},
            {"weight": None},
            {"bias": None},
        ],
        ("chunk_rows", "ignore_index"),
    ),
    "linear_int8_fwd": Op(
        lambda: {
            "x": floats(4, 5),
            "weight": torch.ones(3, 5, dtype=torch.int8),
            "scale": torch.ones(3),
            "bias": floats(3),
            "activation": "gelu",
            "panels": bytes_of(panels_size(5, 3, True)),
        },
        [{"activation": "mish"}],
        ("x", "panels"),
    ),
    "packing_fwd": Op(
        lambda: {"x": floats(6, 5), "indices": ints(1, 2, 5)},
        [row for row in WRONG_INDICES if "indices" in row],
        ("x", "indices"),
    ),
    "packing_bwd": Op(
        lambda: {"x": floats(3, 5), "indices": ints(1, 2, 5), "rows": 6},
        [*(row for row in WRONG_INDICES if "indices" in row), {"rows": 5}, {"rows": -1}],
        ("x", "indices"),
    ),
    "pooling_fwd": Op(
        lambda: {"hidden": floats(TOTAL, 4), "cu_seqlens": ints(*ENDS), "mode": "max"},
        [
            *({"cu_seqlens": ints(*ends)} for ends, words in WRONG_ENDS if words == "cu_seqlens"),
            {"cu_seqlens": ints()},
            {"mode": "sum"},
        ],
        ("hidden", "cu_seqlens"),
    ),
    "pooling_bwd": Op(
        lambda: {
            "dy": floats(BATCH, 4),
            "hidden": floats(TOTAL, 4),
            "y": floats(BATCH, 4),
            "cu_seqlens": ints(*ENDS),
            "mode": "max",
        },
        [
            *({"cu_seqlens": ints(*ends)} for ends, words in WRONG_ENDS if words == "cu_seqlens"),
            {"cu_seqlens": ints()},
        ],
        ("hidden",),
        ("aten",),
    ),  # the reference differentiates by autograd, which it cannot within a custom op
}


def misshaped(t):
    """(what was done to the tensor, the result), each of other sizes, another dtype, or on other strides."""
    for dim in range(t.dim()):
        if t.shape[dim] > 0:
            yield f"one less in {dim}", t.narrow(dim, 0, t.shape[dim] - 1).contiguous()
        yield f"one more in {dim}", torch.cat((t, t.narrow(dim, 0, min(1, t.shape[dim]))), dim)
    yield "of no dimension", t.flatten()[0] if t.numel() else t.new_zeros(())
    yield "empty", t.new_zeros(0)
    yield "in one more dimension", t.unsqueeze(-1)
    if t.dtype.is_floating_point:
        yield "as float64", t.double()
        yield "as bfloat16", t.bfloat16()
        yield "as integers", t.long()
    else:
        yield "as another integer", t.to(INT32 if t.dtype != INT32 else torch.int64)
        yield "as float32", t.float()
    if t.dim() > 0:
        apart = t.new_zeros(*t.shape, 2)
        apart[..., 0] = t
        yield "with gaps", apart[..., 0]
        yield "the last dimension first", t.transpose(0, -1).contiguous().transpose(0, -1)
        yield "broadcast", t.narrow(t.dim() - 1, 0, min(1, t.shape[-1])).expand(t.shape)


def differ(result, expected, values):
    """How the results differ: in shape, or in `values`; "" where they do not."""
    result, expected = (r if isinstance(r, tuple) else (r,) for r in (result, expected))
    if [t.shape for t in result] != [t.shape for t in expected]:
        return "results of other shapes"
    close = {"rtol": 1e-2, "atol": 1e-2, "equal_nan": True}
    if values and not all(
        torch.allclose(a.double(), e.double(), **close) for a, e in zip(result, expected, strict=True)
    ):
        return "results of other values"
    return ""


def fenced_call(fence, function, args):
    """What the function gives, with its operands and what it allocates behind fences."""
    values = [fence.copy(v) if isinstance(v, torch.Tensor) else v for v in args.values()]
    allocators = torch.Tensor.new_empty, torch.Tensor.new_zeros
    fenced_outputs(fence)
    try:
        result = function(*values)
    finally:
        torch.Tensor.new_empty, torch.Tensor.new_zeros = allocators
    return tuple(t.clone() for t in result) if isinstance(result, tuple) else result.clone()


def try_ops(tried):
    for name, op in OPS.items():
        function, base = getattr(torch.ops.fastbert, name), op.args()
        rows = [(f"{row}", row) for row in op.rows]
        free = [
            (f"{n} {what}", {n: t})
            for n, value in base.items()
            if isinstance(value, torch.Tensor)
            for what, t in misshaped(value)
        ]
        free += [(f"{n} = {v}", {n: v}) for n, known in base.items() if type(known) is int for v in SIZES]

        def call(change, base=base, function=function):
            return fenced_call(tried.fence, function, {**base, **change})

        for backend in op.backends:
            if dispatch.unsupported_reason(backend, dispatch._op_of(name), "cpu", torch.float32) is not None:
                continue
            with dispatch.use_backend(backend):
                told = f"{name} by {backend}"
                expected = tried.one(f"{told}: as it should be", lambda call=call: call({}), refused=False)
                for words, change in rows:
                    tried.one(f"{told}: {words}", lambda change=change, call=call: call(change))
                for words, change in free:
                    result = tried.one(
                        f"{told}: {words}", lambda change=change, call=call: call(change), refused=None
                    )
                    if result is not None and not set(change) & set(op.free):
                        tried.fault(differ(result, expected, "broadcast" not in words))
