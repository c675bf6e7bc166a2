"""The door `torch.ops.fastbert`: what every custom op takes, and the rows that it must refuse."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from fastbert.ops import attention as attention_op
from fastbert.ops import attention_places as places_op
from fastbert.ops.attention_inputs import EVERYWHERE
from fastbert.runtime import dispatch
from fastbert.runtime.table import op_of
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
    WRONG_POSITIONS,
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


def named(name, values):
    """Values in the order of the op's schema, by the schema's names."""
    arguments = getattr(torch.ops.fastbert, name).default._schema.arguments
    return dict(zip([a.name for a in arguments], values(), strict=False))  # the last ones may have defaults


def dropped():
    return {"dropout_p": 0.25, "seed": ints(7), "offset": 1}


def attention_operands():
    return {
        **{name: floats(TOTAL, HEADS, DIM) for name in ("q", "k", "v")},
        "cu_seqlens": ints(*ENDS, dtype=INT32),
        "max_seqlen": LONGEST,
        "softmax_scale": 0.5,
        "window": EVERYWHERE,
        "bias": floats(*CELLS),
        "gate": floats(HEADS),
        **dropped(),
    }


def received_operands():
    lengths = {"cu_seqlens": ints(*ENDS, dtype=INT32), "max_seqlen": LONGEST}
    heads = {name: floats(TOTAL, HEADS, DIM) for name in ("q", "k")}
    return {**heads, **lengths, "lse": floats(HEADS, TOTAL)}


def attention_table():
    return places_op.places_ref(ints(*ENDS, dtype=INT32), TOTAL, LONGEST)


def attention_saved():
    q, k, v, *rest = attention_operands().values()
    out, lse, _, bits = attention_op.attention_fwd(q, k, v, *rest, False, True)
    dout = torch.ones(TOTAL, HEADS, DIM)
    return dout, q, k, v, *rest, out, lse, bits, *[True] * 5, attention_table()


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
        "word_scale": None,
        "save": True,
    }


def loss_operands(*saved):
    return floats(4, 5), ints(0, 4, -100, 2), *saved, -100, 0.1


def linear_loss_operands():
    return floats(4, 5), floats(5, 5), floats(5), ints(0, 2, -100, 1), 3, -100, 0.1, 2


def distillation_operands():
    return (*[floats(4, 5), floats(6, 5), floats(6), floats(4, 3), floats(6, 3), floats(6)], 2.0, 3)


def rotary_operands():
    return floats(4, 3, 5), floats(6, 2), floats(6, 2), ints(0, 1, 5, 0), False


def ffn_operands(*between):
    return floats(40, 5), floats(7, 5), *between, floats(3, 7)


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
POOLED = [
    *({"cu_seqlens": ints(*ends)} for ends, words in WRONG_ENDS if words == "cu_seqlens"),
    {"cu_seqlens": ints()},
]
MISH, WRONG_COUNTS = {"activation": "mish"}, [{"labelled": 4}, {"labelled": 2}, {"chunk_rows": 0}]
WRONG_CHUNKS = [{"chunk_rows": 0}, {"temperature": 0.0}, {"temperature": float("nan")}]
PACKED = [row for row in WRONG_INDICES if "indices" in row]


def absent(*names):
    return [{name: None} for name in names]


OPS = {
    "attention_fwd": (
        lambda: (*attention_operands().values(), True, True, attention_table()),
        [
            *(*LENGTHS, *BIASES, *WRONG_PLACES, {"bias": floats(HEADS, LONGEST, LONGEST)}),
            *({"seed": None}, {"dropout_p": 1.5}),
        ],
        ("cu_seqlens", "max_seqlen"),
    ),
    "attention_bwd": (
        attention_saved,
        [
            *(*LENGTHS, *BIASES, *WRONG_PLACES, {"keep_bits": floats(HEADS, TOTAL, 1)}),
            *absent("seed", "bias", "gate"),
        ],
        ("cu_seqlens",),
    ),
    "attention_places": (
        lambda: (ints(*ENDS, dtype=INT32), TOTAL, LONGEST, torch.float32),
        [*LENGTHS, {"total": 7}],
        ("cu_seqlens", "max_seqlen"),
    ),
    "attention_received_fwd": (
        lambda: (*received_operands().values(), 0.5),
        LENGTHS,
        ("cu_seqlens", "max_seqlen"),
    ),
    "cross_entropy_fwd": (loss_operands, WRONG_LABELS, ("logits", "ignore_index")),
    "cross_entropy_bwd": (
        lambda: (torch.tensor(1.0), *loss_operands(torch.ones(2, 4), torch.tensor(3))),
        WRONG_LABELS,
        ("logits", "ignore_index"),
    ),
    "embedding_fwd": (
        lambda: embedding_operands().values(),
        [*WRONG_IDS, *absent("word", "position", "segment")],
        ("word", "position", "segment", "padding_idx"),
    ),
    "embedding_bwd": (
        lambda: (
            *(floats(4, 5), floats(4, 5), floats(5), floats(4), floats(4)),
            *(ints(*IDS), ints(0, 1, 2, 3), ints(0, 0, 1, 1), 7, 6, 2, 0),
            *(*dropped().values(), True, True),
        ),
        [*WRONG_IDS, *absent("input_ids")],
        ("padding_idx",),
    ),
    "layer_norm_fwd": (
        lambda: (
            *(floats(4, 5), floats(5), floats(5), floats(4, 5), floats(5), 1e-5),
            *(*dropped().values(), "layer_norm", True, True),
        ),
        [{"kind": "batch_norm"}],
    ),
    "layer_norm_bwd": (
        lambda: (
            *(floats(4, 5), floats(4, 5), floats(5), floats(4), floats(4)),
            *(*dropped().values(), "layer_norm", *[True] * 4, floats(4, 5)),
        ),
        [{"kind": "batch_norm"}],
    ),
    "feed_forward_fwd": (
        lambda: (*ffn_operands(floats(7)), "gelu", None, True),
        [MISH],
        ("x", "down_weight"),
    ),
    "feed_forward_bwd": (
        lambda: (floats(40, 3), *ffn_operands(), floats(40, 7), floats(40, 7), "gelu", None, *[True] * 4),
        [*absent("x", "up_weight", "down_weight", "pre", "inner"), MISH],
    ),
    "linear_fwd": (lambda: (floats(40, 5), floats(3, 5), floats(3), "gelu", floats(40, 3), True), [MISH]),
    "linear_bwd": (
        lambda: (floats(40, 3), floats(40, 5), floats(3, 5), floats(40, 3), "gelu", None, *[True] * 3),
        [*absent("x", "weight", "pre"), MISH],
        ("x", "weight"),
    ),
    "linear_cross_entropy_fwd": (
        linear_loss_operands,
        [*WRONG_LABELS, *WRONG_COUNTS, {"labelled": -2}],
        ("chunk_rows", "ignore_index"),
    ),
    "linear_cross_entropy_bwd": (
        lambda: (
            torch.tensor(1.0),
            *linear_loss_operands(),
            *(torch.ones(2, 4), torch.tensor(3), torch.empty(0), *[True] * 3),
        ),
        [*WRONG_LABELS, *WRONG_COUNTS, {"logits": floats(3, 3)}, *absent("x", "weight", "bias")],
        ("chunk_rows", "ignore_index"),
    ),
    "linear_distillation_fwd": (distillation_operands, WRONG_CHUNKS, ()),
    "linear_distillation_bwd": (
        lambda: (torch.tensor(1.0), *distillation_operands(), *[True] * 3),
        [*WRONG_CHUNKS, *absent("bias")],
        (),
    ),
    "linear_fp8_fwd": (
        lambda: (
            floats(4, 5),
            torch.ones(3, 5).to(torch.float8_e4m3fn),
            torch.ones(3),
            floats(3),
            *("gelu", None, "relu"),
        ),
        [MISH, {"input_activation": "mish"}],
        ("x",),
        ("aten", "reference"),
    ),
    "linear_int8_fwd": (
        lambda: (
            *(floats(4, 5), torch.ones(3, 5, dtype=torch.int8), torch.ones(3), floats(3)),
            *(
                "gelu",
                bytes_of(panels_size(5, 3, True)),
                None,
                torch.ones(5),
                torch.tensor([-1.0, 2.0]),
                False,
            ),
        ),
        [MISH, {"float_rows": True}],
        ("x", "panels"),
    ),
    "packing_fwd": (lambda: (floats(6, 5), ints(1, 2, 5)), PACKED, ("x", "indices")),
    "packing_bwd": (
        lambda: (floats(3, 5), ints(1, 2, 5), 6),
        [*PACKED, {"rows": 5}, {"rows": -1}],
        ("x", "indices"),
    ),
    "pooling_fwd": (
        lambda: (floats(TOTAL, 4), ints(*ENDS), "max"),
        [*POOLED, {"mode": "sum"}],
        ("hidden", "cu_seqlens"),
    ),
    # the reference differentiates by autograd, which it cannot within a custom op
    "pooling_bwd": (
        lambda: (floats(BATCH, 4), floats(TOTAL, 4), floats(BATCH, 4), ints(*ENDS), "max"),
        POOLED,
        ("hidden",),
        ("aten",),
    ),
    "rotary_fwd": (rotary_operands, [*WRONG_POSITIONS, {"sin": floats(5, 2)}], ("x", "cos", "sin")),
    "rotary_bwd": (rotary_operands, [*WRONG_POSITIONS, {"sin": floats(5, 2)}], ("dy", "cos", "sin")),
}
OPS = {name: Op(partial(named, name, values), *rest) for name, (values, *rest) in OPS.items()}


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
            if dispatch.unsupported_reason(backend, op_of(name), "cpu", torch.float32) is not None:
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
