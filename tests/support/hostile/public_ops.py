"""The door of the public functions: what each takes, and the rows that it must refuse."""

from __future__ import annotations

from functools import partial, wraps
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from fastbert.ops import encoder_layer as encoder_layer_op
from fastbert.ops.attention import attention
from fastbert.ops.attention_received import attention_received
from fastbert.ops.cross_entropy import cross_entropy
from fastbert.ops.embedding import embedding
from fastbert.ops.encoder_layer import FusedLayer, NarrowBlocks
from fastbert.ops.encoder_layers import LayerStack, LayerWeights, encoder_layers
from fastbert.ops.feed_forward import feed_forward
from fastbert.ops.first_attention import first_attention
from fastbert.ops.layer_norm import layer_norm, no_norm, rms_norm
from fastbert.ops.linear import linear
from fastbert.ops.linear_cross_entropy import linear_cross_entropy
from fastbert.ops.linear_distillation import linear_distillation
from fastbert.ops.linear_fp8 import FP8, linear_fp8
from fastbert.ops.linear_int8 import linear_int8
from fastbert.ops.linear_int8 import panel_maker as int8_panels
from fastbert.ops.linear_norm import linear_norm
from fastbert.ops.packing import pack, unpack
from fastbert.ops.pooling import pooling
from fastbert.ops.rotary import rotary
from tests.support.hostile.custom_ops import (
    attention_operands,
    distillation_operands,
    embedding_operands,
    received_operands,
    rotary_operands,
)
from tests.support.hostile.values import (
    BATCH,
    BIASES,
    CELLS,
    DIM,
    ENDS,
    HEADS,
    INT32,
    LONGEST,
    TOTAL,
    WRONG_ENDS,
    WRONG_IDS,
    WRONG_INDICES,
    WRONG_LABELS,
    WRONG_POSITIONS,
    floats,
    ints,
    panels_size,
)

# Tables of rotary positions, whose dtype is their own
TABLES = ("cos", "sin")
DISTILLED = ("x", "weight", "bias", "teacher_x", "teacher_weight", "teacher_bias")
# Floating-point operands without a gradient
FIXED = (*TABLES, *DISTILLED[3:])


class Public(NamedTuple):
    function: object
    args: object  # () -> arguments by name
    rows: list  # (values by name, words of the error): what is not refused by name in tests/ops alone
    compiled: bool = True


def layer_call(**kwargs):
    fields = {name: kwargs.pop(name) for name in FusedLayer._fields if name in kwargs}
    if "cos" in kwargs:
        fields["rotary"] = "by angles"
        kwargs["tables"] = {"by angles": (kwargs.pop("cos"), kwargs.pop("sin"))}
    layer = FusedLayer(**fields)
    return encoder_layer_op.encoder_layer(kwargs.pop("launch"), kwargs.pop("x"), [layer], **kwargs)


ROUNDING = None, None, False  # smooth, input_range, float_rows


def linears_of(shapes, kind):
    """Weights of these shapes, as launchers take them."""
    if kind != "linear_int8":
        return [(floats(*s), None, None, floats(s[0]), *ROUNDING) for s in shapes]
    pack = int8_panels(torch.device("cpu"), torch.float32)
    weights = [torch.ones(s, dtype=torch.int8) for s in shapes]
    rows = [(torch.ones(w.shape[1]), torch.ones(2), False) for w in weights]
    return [
        (w, pack(w), torch.ones(len(w)), floats(len(w)), *own) for w, own in zip(weights, rows, strict=True)
    ]


def layer_operands(kind="linear"):
    make, launch, _keeps = encoder_layer_op.launchers(torch.device("cpu"), torch.float32, kind)
    hidden, inner = HEADS * DIM, 7
    # in 8 bits query, key and value are one product
    shapes = [(3 * hidden, hidden)] if kind == "linear_int8" else [(hidden, hidden)] * 3
    linears = linears_of([*shapes, (hidden, hidden), (inner, hidden), (hidden, inner)], kind)
    weights = make(linears, [(floats(hidden), floats(hidden))] * 2)
    return {
        "launch": launch,
        "weights": weights,
        "x": floats(TOTAL, hidden),
        "cu_seqlens": ints(*ENDS, dtype=INT32),
        "max_seqlen": LONGEST,
        "nheads": HEADS,
        "headdim": DIM,
        "inner": inner,
        "softmax_scale": 0.5,
        "bias": floats(*CELLS),
        "gate": floats(HEADS),
        "activation": "gelu",
        "eps": (1e-5, 1e-5),
        "window": (2, 1),
        "cos": floats(6, 2),
        "sin": floats(6, 2),
        "positions": ints(*range(TOTAL)) % 6,
    }


def narrow_operands(kind="linear"):
    """Those of a layer with bottlenecks."""
    operands = layer_operands(kind)
    for name in ("cos", "sin", "positions"):
        del operands[name]
    hidden, inner, width = HEADS * DIM, 7, 6
    feed = [(inner, width), (width, inner)]
    shapes = [(hidden, width), (hidden, width), (hidden, hidden), (width, hidden), *feed]
    shapes += [(width, hidden), (hidden, width), (width, hidden), *feed]
    make, _launch, _keeps = encoder_layer_op.launchers(torch.device("cpu"), torch.float32, kind)
    norms = [(floats(size), floats(size)) for size in (width, width, width, hidden, width, width)]
    return {
        **operands,
        "weights": make(linears_of(shapes, kind), norms),
        "narrow": NarrowBlocks(width, keys=True, values=False, feeds=1),
    }


def kept_operands():
    """Those of a layer that keeps some tokens; `kept` has where they end."""
    operands = {**layer_operands(), "bias": None, "window": None}
    lengths = [b - a for a, b in pairwise(ENDS)]
    return {**operands, "x": floats(ENDS[-1], HEADS * DIM), "positions": ints(*range(ENDS[-1])) % 6} | {
        "kept": ints(*accumulate(((n + 1) // 2 for n in lengths), initial=0), dtype=INT32)
    }


def kept_call(kept, **operands):
    return layer_call(kept=(kept, int(kept[-1])), **operands)[0]


def layers_operands():
    hidden, inner = HEADS * DIM, 7
    shapes = dict(qkv=3 * hidden, out=hidden, norm=hidden, up=inner, down=hidden, last=hidden)
    found = {"x": floats(TOTAL, hidden), "cu_seqlens": ints(*ENDS, dtype=INT32), "max_seqlen": LONGEST}
    found |= {"bias": floats(*CELLS), "activation": "gelu", "eps": 1e-5}
    for name, rows in shapes.items():
        columns = () if name in ("norm", "last") else (inner if name == "down" else hidden,)
        found |= {f"{name}_weight": floats(rows, *columns), f"{name}_bias": floats(rows)}
    return found


def layers_call(x, cu_seqlens, max_seqlen, bias=None, activation="gelu", eps=1e-5, **parameters):
    """One layer, from its parameters."""
    layer = LayerWeights(HEADS, DIM, activation, eps, eps, **parameters)
    return encoder_layers(x, LayerStack([layer]), cu_seqlens, max_seqlen, bias=bias)[0]


def both_of(norm, **options):
    """The sum of both results: the normalised rows, and what was added up."""
    return wraps(norm)(lambda **operands: sum(norm(**operands, **options, return_sum=True)))


def norm_operands(*vectors):
    return {"x": floats(4, 5), **{name: floats(5) for name in vectors}, "residual": floats(4, 5)}


def linear_operands(columns, **options):
    given = dict(x=floats(40, 5), weight=floats(columns, 5), bias=floats(columns), residual=floats(40, 3))
    return given | {"activation": "gelu", **options}


def feed_operands(columns, **options):
    given = dict(x=floats(40, 5), up_weight=floats(columns, 5), up_bias=floats(columns))
    return given | {"down_weight": floats(3, 7), "activation": "gelu", **options}


def public_attention():
    operands = attention_operands()
    for name in ("dropout_p", "seed", "offset"):
        del operands[name]
    return operands


WORDED_LENGTHS = [
    *(({"cu_seqlens": ints(*ends, dtype=INT32)}, words) for ends, words in WRONG_ENDS),
    ({"max_seqlen": 2}, "max_seqlen|bias"),
    ({"max_seqlen": -1}, "max_seqlen"),
]
WORDED_BIASES = [(row, "bias: expected") for row in BIASES]
WORDED_LABELS = [(row, "labels") for row in WRONG_LABELS]
WORDED_INDICES = [(row, "indices") for row in WRONG_INDICES if "indices" in row]
WORDED_TABLES = [({"cos": floats(6, 3), "sin": floats(6, 3)}, "cos"), ({"sin": floats(5, 2)}, "sin")]
PUBLIC = {
    "attention": Public(attention, public_attention, [*WORDED_LENGTHS, *WORDED_BIASES]),
    "attention_received": Public(
        attention_received,
        received_operands,
        [
            *WORDED_LENGTHS,
            *(({"lse": lse}, "lse") for lse in (floats(TOTAL, HEADS), floats(HEADS, TOTAL).double())),
        ],
    ),
    "attention, padded": Public(
        attention,
        lambda: {name: floats(BATCH, LONGEST, HEADS, DIM) for name in "qkv"} | {"bias": floats(*CELLS)},
        WORDED_BIASES,
    ),
    "encoder_layer": Public(
        layer_call,
        layer_operands,
        [
            *WORDED_LENGTHS,
            *WORDED_BIASES,
            ({"inner": 8}, "weights"),
            ({"inner": 2**40}, "expected"),
            ({"nheads": 5}, "bias|gate"),
            ({"headdim": 2**40}, "weights"),
            ({"x": floats(TOTAL, 2 * HEADS * DIM)}, "weights"),
            ({"x": floats(TOTAL, HEADS)}, "weights"),
            ({"x": floats(7, HEADS * DIM)}, "cu_seqlens|positions"),
            *(({"positions": ints(*[bad] * TOTAL)}, "positions") for bad in (6, -1, 2**62, -(2**63))),
            *WORDED_TABLES,
        ],
        False,
    ),
    "encoder_layer, kept": Public(
        kept_call,
        kept_operands,
        [
            ({"kept": ints(*ENDS, dtype=INT32) * 2}, "cu_seqlens"),
            ({"kept": ints(0, 3, 3, 3, dtype=INT32)}, "kept"),
            ({"kept": ints(0, 4, 4, 6, dtype=INT32)}, "kept"),
            ({"kept": ints(*ENDS, dtype=INT32)[1:]}, "kept|cu_seqlens"),
            ({"kept": ints(*ENDS)}, "cu_seqlens"),
            ({"bias": floats(*CELLS)}, "bias"),
            ({"window": (2, 1)}, "kept"),
            ({"x": floats(TOTAL + 1, HEADS * DIM), "positions": ints(*[0] * (TOTAL + 1))}, "cu_seqlens"),
        ],
        False,
    ),
    "encoder_layers": Public(
        layers_call,
        layers_operands,
        [
            *WORDED_LENGTHS,
            *WORDED_BIASES,
            ({"x": floats(TOTAL, HEADS)}, "x"),
            ({"x": floats(0, HEADS * DIM)}, "x"),
            ({"qkv_weight": floats(HEADS * DIM, HEADS * DIM)}, "layer 0, qkv_weight"),
            ({"norm_bias": floats(3)}, "layer 0, norm_bias"),
            ({"last_weight": floats(HEADS * DIM).double()}, "layer 0, last_weight"),
            ({"activation": "gelp"}, "layer 0, activation"),
            ({"eps": -1.0}, "eps"),
        ],
        False,
    ),
    "cross_entropy": Public(
        cross_entropy, lambda: dict(logits=floats(4, 5), labels=ints(0, 4, -100, 2)), WORDED_LABELS
    ),
    "embedding": Public(
        embedding,
        lambda: {
            n: t for n, t in embedding_operands().items() if isinstance(t, torch.Tensor) and n != "seed"
        },
        [(row, next(iter(row))) for row in WRONG_IDS],
    ),
    "first_attention": Public(
        first_attention,
        lambda: dict(
            **dict(x=floats(TOTAL, 5), q=floats(BATCH, HEADS, DIM), softmax_scale=0.5),
            **{f"{name}_weight": floats(HEADS * DIM, 5) for name in ("key", "value")},
            **dict(value_bias=floats(HEADS * DIM), cu_seqlens=ints(*ENDS, dtype=INT32)),
            **dict(bias=floats(*CELLS), gate=floats(HEADS)),
        ),
        [
            *((row, words.replace("max_seqlen", "bias")) for row, words in WORDED_LENGTHS[: len(WRONG_ENDS)]),
            *WORDED_BIASES,
            ({"q": floats(BATCH + 1, HEADS, DIM)}, "cu_seqlens"),
            ({"q": floats(BATCH, HEADS, DIM + 1)}, "key_weight"),
            ({"x": floats(1, 5)}, "cu_seqlens"),
        ],
        False,
    ),
    "layer_norm": Public(layer_norm, partial(norm_operands, "weight", "bias", "x_bias"), []),
    "layer_norm, none": Public(both_of(no_norm), partial(norm_operands, "weight", "bias", "x_bias"), []),
    "layer_norm, rms": Public(both_of(rms_norm, eps=1e-6), partial(norm_operands, "weight", "x_bias"), []),
    "feed_forward": Public(
        feed_forward,
        lambda: feed_operands(7),
        [
            ({"up_weight": floats(7, 4)}, "up_weight"),
            ({"up_bias": floats(3)}, "up_bias"),
            ({"down_weight": floats(3, 5)}, "down_weight"),
            ({"activation": "mish"}, "activation"),
            ({"activation": None}, "activation"),
        ],
    ),
    "feed_forward, gated": Public(
        feed_forward,
        lambda: feed_operands(14, gated="second"),
        [
            ({"up_weight": floats(7, 5)}, "up_weight"),
            ({"up_bias": floats(7)}, "up_bias"),
            ({"down_weight": floats(3, 14)}, "down_weight"),
            ({"gated": "third"}, "gated"),
        ],
    ),
    "linear": Public(linear, lambda: linear_operands(3), []),
    "linear, gated": Public(
        linear,
        lambda: linear_operands(6, gated="first"),
        [({"gated": "third"}, "gated"), ({"activation": None}, "activation")],
    ),
    "linear_norm": Public(
        linear_norm,
        lambda: (
            dict(x=floats(4, 5), weight=floats(3, 5), residual=floats(4, 3))
            | {n: floats(3) for n in ("bias", "norm_weight", "norm_bias")}
        ),
        [({"arrivals": floats(16)}, "arrivals"), ({"arrivals": ints(0, dtype=INT32)}, "arrivals")],
        False,
    ),
    "linear, panels": Public(
        linear,
        lambda: dict(x=floats(40, 5), weight=floats(3, 5), panels=torch.zeros(panels_size(5, 3))),
        [({"panels": floats(5)}, "panels"), ({"panels": floats(64, 5)}, "panels")],
        False,
    ),
    "linear_cross_entropy": Public(
        linear_cross_entropy,
        lambda: dict(x=floats(4, 5), weight=floats(5, 5), bias=None, labels=ints(0, 4, -100, 2)),
        WORDED_LABELS,
    ),
    "linear_distillation": Public(
        linear_distillation,
        lambda: dict(zip(DISTILLED, distillation_operands(), strict=False)),
        [({"temperature": t}, "temperature") for t in (0.0, -1.0, float("nan"), float("inf"))],
    ),
    "linear_fp8": Public(
        linear_fp8,
        lambda: dict(x=floats(4, 5), weight=torch.ones(3, 5).to(FP8), scale=torch.ones(3)),
        [({"input_activation": "mish"}, "input_activation")],
    ),
    "linear_int8": Public(
        linear_int8,
        lambda: dict(
            x=floats(4, 5),
            weight=torch.ones(3, 5).char(),
            scale=torch.ones(3),
            smooth=torch.ones(5),
            input_range=torch.tensor([-1.0, 2.0]),
        ),
        [
            ({"smooth": torch.ones(4)}, "smooth"),
            ({"input_range": torch.ones(3)}, "input_range"),
            ({"float_rows": True}, "smooth: expected None with float_rows"),
            ({"float_rows": True, "smooth": None}, "input_range: expected None with float_rows"),
            ({"float_rows": 1}, "float_rows: expected True or False"),
        ],
    ),
    "pack": Public(pack, lambda: dict(x=floats(2, 3, 5), indices=ints(1, 2, 5)), WORDED_INDICES),
    "unpack": Public(
        unpack,
        lambda: dict(x=floats(3, 5), indices=ints(1, 2, 5), batch=2, seqlen=3),
        [
            *WORDED_INDICES,
            ({"batch": 1}, "indices"),
            ({"batch": -1}, "batch"),
            ({"x": floats(4, 5)}, "x: expected"),
        ],
    ),
    "pooling": Public(
        pooling,
        lambda: dict(hidden=floats(TOTAL, 4), cu_seqlens=ints(*ENDS), mode="max"),
        [({"cu_seqlens": ints(*ends)}, words) for ends, words in WRONG_ENDS if words == "cu_seqlens"],
    ),
    "rotary": Public(
        rotary,
        lambda: dict(zip(("x", "cos", "sin", "positions"), rotary_operands(), strict=False)),
        [
            *((row, "positions") for row in WRONG_POSITIONS),
            *WORDED_TABLES,
            ({"x": floats(1, 4, 3, 5)}, "positions"),
            ({"x": floats(1, 7, 3, 5), "positions": None}, "cos"),
        ],
    ),
}


def try_public(tried, compiled=False):
    for name, public in PUBLIC.items():
        if compiled and not public.compiled:
            continue
        function, base = public.function, public.args()
        if compiled:
            torch._dynamo.reset()
            function = torch.compile(function, backend="aot_eager", dynamic=True)

        def call(change, base=base, function=function):
            fenced = {
                n: tried.fence.copy(t) if isinstance(t, torch.Tensor) else t
                for n, t in {**base, **change}.items()
            }
            return function(**fenced)

        tried.one(f"{name}: as it should be", lambda call=call: call({}), refused=False)
        for change, words in public.rows:
            tried.one(f"{name}: {change}", lambda change=change, call=call: call(change), words)
