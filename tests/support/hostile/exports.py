"""The door `fastbert._C`: what every exported function takes, and the rows that it must refuse."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastbert.ops.dropout import threshold
from fastbert.runtime import loader
from tests.support.hostile.values import (
    BATCH,
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
    WRONG_INDICES,
    WRONG_LABELS,
    bytes_of,
    floats,
    ints,
    panels_size,
)

_C = loader.extension


class Arg(NamedTuple):
    """One number that an exported function takes. A list of them is passed as a tuple."""

    role: str  # code, size, stride, needed (an address), optional (an address), threads, number
    name: str
    value: object


def arg(role):
    return lambda name, value=None: Arg(role, name, value)


code, size, stride, needed, optional, number = map(
    arg, ("code", "size", "stride", "needed", "optional", "number")
)
THREADS = Arg("threads", "threads", 2)
KEPT = torch.zeros(8)  # alive as long as its address is used


class Owned:
    """Has the address of a tensor; the fence would copy the tensor itself."""

    _cdata = KEPT._cdata


class Stored:
    """Has the address of the tensor's storage."""

    _cdata = KEPT.untyped_storage()._cdata


OWNED, STORED = Owned(), Stored()
HOSTILE = {
    "code": (-1, 99),
    "size": SIZES,
    "stride": SIZES,
    "needed": (0,),
    "optional": (),
    "threads": (-1, 0, 2**20, 2**31 - 1),
    "number": (),
}
UNFIT = (2**70, None, "4", 1.5)  # no number of 64 bits


def dropout_args(p=0.25):
    seed = ints(7)
    return [
        needed("seed", seed)._replace(role="optional"),
        number("offset", 1),
        number("threshold", threshold(p)),
        number("scale", 1 / (1 - p)),
    ]


def attention_args():
    def heads(name):
        tensor = needed(name, floats(TOTAL, HEADS, DIM))
        return tensor, stride(f"{name} row", HEADS * DIM), stride(f"{name} head", DIM)

    return [
        code("dtype", 0),
        size("batch", BATCH),
        size("nheads", HEADS),
        size("headdim", DIM),
        size("total", TOTAL),
        size("max_seqlen", LONGEST),
        needed("cu_seqlens", ints(*ENDS, dtype=INT32)),
        *heads("q"),
        *heads("k"),
        *heads("v"),
        number("softmax_scale", 0.5),
        number("causal", False),
        optional("bias", floats(BATCH, HEADS, LONGEST, LONGEST)),
        stride("bias batch", HEADS * LONGEST**2),
        stride("bias head", LONGEST**2),
        stride("bias row", LONGEST),
        optional("gate", floats(HEADS)),
        *dropout_args(),
    ]


ATTENTION_ROWS = [
    *({"cu_seqlens": ints(*ends, dtype=INT32)} for ends, _ in WRONG_ENDS),
    {"max_seqlen": 2},
    {"max_seqlen": 0},
    {"total": 7},
]


def layer_weights(int8):
    hidden, inner = HEADS * DIM, 7

    def dense(name, depth, columns):
        panels = torch.zeros(panels_size(depth, columns, int8), dtype=torch.uint8 if int8 else torch.float32)
        scale = floats(columns, fill=1.0) if int8 else 0
        return [
            needed(f"{name} panels", panels),
            optional(f"{name} scale", scale),
            optional(f"{name} bias", floats(columns)),
            code(f"{name} dtype", 0),
        ]

    nothing = [number("none", 0)] * 4
    inputs = (
        [dense("query", hidden, 3 * hidden), nothing, nothing]
        if int8
        else [dense(name, hidden, hidden) for name in ("query", "key", "value")]
    )
    outputs = [
        dense("attention output", hidden, hidden),
        dense("intermediate", hidden, inner),
        dense("output", inner, hidden),
    ]
    norms = [[optional("norm", floats(hidden)), code("norm dtype", 0)] for _ in range(4)]
    return [a for group in (*inputs, *outputs, *norms) for a in group]


def layer_sizes():
    return [
        size("batch", BATCH),
        size("nheads", HEADS),
        size("headdim", DIM),
        size("total", TOTAL),
        size("max_seqlen", LONGEST),
        size("inner", 7),
    ]


def encoder_layer_args(int8=False):
    hidden = HEADS * DIM
    return [
        code("dtype", 0),
        layer_sizes(),
        layer_weights(int8),
        needed("cu_seqlens", ints(*ENDS, dtype=INT32)),
        needed("x", floats(TOTAL, hidden)),
        stride("x_stride", hidden),
        number("attention_eps", 1e-5),
        number("output_eps", 1e-5),
        code("activation", 1),
        number("softmax_scale", 0.5),
        [
            optional("bias", floats(*CELLS)),
            stride("bias batch", HEADS * LONGEST**2),
            stride("bias head", LONGEST**2),
            stride("bias row", LONGEST),
        ],
        optional("gate", floats(HEADS)),
        needed("y", floats(TOTAL, hidden)),
        THREADS,
        number("work", 0),
        number("work_bytes", 0),
    ]


def norm_args(*names, rows=4, hidden=5):
    """Strided matrices, then vectors, of a LayerNorm."""
    return [a for n in names for a in (needed(n, floats(rows, hidden)), stride(f"{n} stride", hidden))]


def vectors(*names, n=5):
    return [a for name in names for a in (optional(name, floats(n)), code(f"{name} dtype", 0))]


def lookup(name, rows, *ids):
    return [
        needed(name, floats(rows, 5)),
        stride(f"{name} stride", 5),
        size(f"{name} rows", rows),
        optional(f"{name} ids", ints(*ids)),
    ]


def table_grad(name, rows, *ids):
    return [
        needed(name, floats(rows, 5)),
        size(f"{name} rows", rows),
        number(f"{name} skip", 0),
        needed(f"{name} ids", ints(*ids)),
    ]


def optional_table(group):
    """A lookup that may be left out."""
    return [group[0]._replace(role="optional"), *group[1:]]


WRONG_IDS = [
    {f"{name} ids": ints(0, 1, bad, 0)}
    for name in ("word", "position", "segment")
    for bad in (7, -1, 2**62, -(2**63))
]


def embedding_fwd_args():
    return [
        code("dtype", 0),
        size("tokens", 4),
        size("hidden", 5),
        lookup("word", 7, *IDS),
        optional_table(lookup("position", 6, 0, 1, 2, 3)),
        optional_table(lookup("segment", 2, 0, 0, 1, 1)),
        *vectors("weight", "bias"),
        number("eps", 1e-5),
        *dropout_args(),
        needed("y", floats(4, 5)),
        optional("z", floats(4, 5)),
        optional("mean", floats(4)),
        optional("rstd", floats(4)),
        THREADS,
    ]


def embedding_bwd_args():
    return [
        code("dtype", 0),
        size("tokens", 4),
        size("hidden", 5),
        needed("dy", floats(4, 5)),
        needed("z", floats(4, 5)),
        *vectors("weight"),
        needed("mean", floats(4)),
        needed("rstd", floats(4)),
        *dropout_args(),
        *(
            optional_table(table_grad(*t))
            for t in (("word", 7, *IDS), ("position", 6, 0, 1, 2, 3), ("segment", 2, 0, 0, 1, 1))
        ),
        optional("dinputs_embeds", floats(4, 5)),
        optional("dweight", floats(5)),
        optional("dbias", floats(5)),
        THREADS,
    ]


def cross_entropy_args():
    return [
        code("dtype", 0),
        size("rows", 4),
        size("classes", 5),
        needed("logits", floats(4, 5)),
        stride("logits stride", 5),
        needed("labels", ints(0, 4, -100, 2)),
        number("ignore_index", -100),
        number("label_smoothing", 0.1),
    ]


LSE, COUNT = lambda: needed("lse", floats(2, 4)), lambda: needed("count", ints(3))


def layer_norm_fwd_args():
    matrix = norm_args("x", "residual")
    matrix[2] = matrix[2]._replace(role="optional")
    return [
        code("dtype", 0),
        size("rows", 4),
        size("hidden", 5),
        *matrix,
        *vectors("weight", "bias", "x_bias"),
        number("eps", 1e-5),
        *dropout_args(),
        needed("y", floats(4, 5)),
        optional("z", floats(4, 5)),
        optional("mean", floats(4)),
        optional("rstd", floats(4)),
        THREADS,
    ]


def layer_norm_bwd_args():
    return [
        code("dtype", 0),
        size("rows", 4),
        size("hidden", 5),
        *norm_args("dy", "z"),
        *vectors("weight"),
        needed("mean", floats(4)),
        needed("rstd", floats(4)),
        *dropout_args(),
        optional("dx", floats(4, 5)),
        optional("dresidual", floats(4, 5)),
        *(optional(n, floats(5)) for n in ("dweight", "dbias", "dx_bias")),
        THREADS,
    ]


def product_args(panels):
    if panels:
        right = [needed("panels", floats(panels_size(5, 3))), number("b", 0)]
        right += [number("b stride", 0), number("b column stride", 0)]
    else:
        right = [number("panels", 0), needed("b", floats(5, 3)), stride("b stride", 3)]
        right += [stride("b column stride", 1)]
    return [
        code("dtype", 0),
        size("rows", 4),
        size("columns", 3),
        size("depth", 5),
        needed("a", floats(4, 5)),
        stride("a row", 5),
        stride("a depth", 1),
        *right,
        *vectors("bias", n=3),
        code("activation", 1),
        optional("residual", floats(4, 3)),
        stride("residual stride", 3),
        needed("c", floats(4, 3)),
        optional("pre", floats(4, 3)),
        THREADS,
        code("b dtype", 0),
        code("c dtype", 0),
    ]


def packing_args(rows_of_x, rows_of_out):
    return [
        needed("x", floats(rows_of_x, 5)),
        stride("x stride", 20),
        size("width", 20),
        needed("indices", ints(1, 2, 5)),
        size("total", 3),
        size("rows", 6),
        needed("out", floats(rows_of_out, 5)),
        THREADS,
    ]


class Export(NamedTuple):
    args: object  # () -> arguments in order
    rows: tuple | list = ()  # values by name, each refused


# Every function that the module exports, except those of CUDA, whose operands are on a GPU.
RUNTIME = ("gomp_parallel", "gomp_parallel_start", "gomp_parallel_end", "omp_get_num_threads")
EXPORTS = {
    "cpu_attention_fwd": Export(
        lambda: [
            attention_args(),
            needed("out", floats(TOTAL, HEADS, DIM)),
            optional("lse", floats(HEADS, TOTAL)),
            optional("probs", floats(*CELLS)),
            optional("keep_bits", torch.zeros(HEADS, TOTAL, 1, dtype=INT32)),
            THREADS,
        ],
        ATTENTION_ROWS,
    ),
    "cpu_attention_bwd": Export(
        lambda: [
            attention_args(),
            optional("keep_bits", torch.zeros(HEADS, TOTAL, 1, dtype=INT32)),
            needed("dout", floats(TOTAL, HEADS, DIM)),
            *(optional(n, floats(TOTAL, HEADS, DIM)) for n in ("dq", "dk", "dv")),
            optional("ds", floats(*CELLS)),
            optional("dgate", torch.zeros(BATCH, HEADS, dtype=torch.float64)),
            THREADS,
        ],
        ATTENTION_ROWS,
    ),
    "cpu_encoder_layer_work": Export(lambda: [code("dtype", 0), layer_sizes(), THREADS]),
    "cpu_encoder_layer_fwd": Export(
        encoder_layer_args,
        [
            *ATTENTION_ROWS,
            {"query panels": 0},
            {"key panels": 0},
            {"value scale": 64},
            {"output scale": 64},
            {"work": 64},
        ],
    ),
    "cpu_encoder_layer_fwd 8 bits": Export(
        lambda: encoder_layer_args(True),
        [{"cu_seqlens": ints(0, 3, 3, 2_000_000, dtype=INT32)}, {"query scale": 0}, {"output scale": 0}],
    ),
    "cpu_embedding_fwd": Export(
        embedding_fwd_args,
        [*WRONG_IDS, {"word ids": 0, "word rows": 3}, {"position ids": 0, "position rows": 3}],
    ),
    "cpu_embedding_bwd": Export(embedding_bwd_args, WRONG_IDS),
    "cpu_cross_entropy_fwd": Export(
        lambda: [*cross_entropy_args(), needed("loss", floats(1)), LSE(), COUNT(), THREADS], WRONG_LABELS
    ),
    "cpu_cross_entropy_bwd": Export(
        lambda: [
            *cross_entropy_args(),
            needed("dloss", floats(1)),
            LSE(),
            COUNT(),
            needed("dlogits", floats(4, 5)),
            THREADS,
        ],
        WRONG_LABELS,
    ),
    "cpu_layer_norm_fwd": Export(layer_norm_fwd_args),
    "cpu_layer_norm_bwd": Export(layer_norm_bwd_args),
    "cpu_linear_panels_size": Export(
        lambda: [size("depth", 5), size("columns", 3)], [{"depth": 2**40, "columns": 2**40}]
    ),
    "cpu_linear_panels": Export(
        lambda: [
            code("dtype", 0),
            size("depth", 5),
            size("columns", 3),
            needed("b", floats(3, 5)),
            stride("b depth", 1),
            stride("b column", 5),
            needed("panels", floats(panels_size(5, 3))),
            THREADS,
        ],
        [{"b depth": 2}],
    ),
    "cpu_linear_product": Export(
        lambda: product_args(False),
        [{"a depth": 2}, {"b": 0, "panels": 0}, {"b column stride": 2}, {"c dtype": 1}],
    ),
    "cpu_linear_product panels": Export(lambda: product_args(True)),
    "cpu_linear_activation_bwd": Export(
        lambda: [
            code("dtype", 0),
            size("rows", 4),
            size("columns", 3),
            needed("dy", floats(4, 3)),
            needed("pre", floats(4, 3)),
            code("activation", 1),
            optional("g", floats(4, 3)),
            optional("dbias", floats(3)),
            THREADS,
        ]
    ),
    "cpu_linear_int8_panels_size": Export(lambda: [size("depth", 5), size("columns", 3)]),
    "cpu_linear_int8_panels": Export(
        lambda: [
            size("depth", 5),
            size("columns", 3),
            needed("weight", torch.ones(3, 5, dtype=torch.int8)),
            needed("panels", bytes_of(panels_size(5, 3, True))),
            THREADS,
        ],
        [{"depth": 65537}],
    ),
    "cpu_linear_int8": Export(
        lambda: [
            code("dtype", 0),
            size("rows", 4),
            size("columns", 3),
            size("depth", 5),
            needed("x", floats(4, 5)),
            stride("x stride", 5),
            needed("panels", bytes_of(panels_size(5, 3, True))),
            needed("scale", floats(3)),
            *vectors("bias", n=3),
            code("activation", 1),
            needed("y", floats(4, 3)),
            THREADS,
        ],
        [{"depth": 65537}],
    ),
    "cpu_packing_fwd": Export(lambda: packing_args(6, 3), WRONG_INDICES),
    "cpu_packing_bwd": Export(lambda: packing_args(3, 6), WRONG_INDICES),
    "Samples": Export(
        lambda: [
            [
                [
                    needed("at", floats(8)),
                    stride("piece stride", 8),
                    size("count", 3),
                    size("bytes", 4),
                ]
            ]
        ]
    ),
    "MappedPages": Export(lambda: [[[needed("at", floats(8)), size("bytes", 32)]]]),
    "TensorPlaces": Export(lambda: [[Arg("number", "tensor", KEPT._cdata)]]),
    "ModelWatch": Export(
        lambda: [
            [Arg("number", "name", OWNED)],
            [Arg("number", "table", {})],
            [Arg("number", "hooks", {})],
            [Arg("number", "attributes", {"training": False})],
            [Arg("number", "tensor", OWNED)],
            [Arg("number", "source", OWNED)],
            [Arg("number", "storage", STORED)],
        ],
    ),
    "HostBatch": Export(
        lambda: [
            size("vocab_size", 5),
            size("type_vocab_size", 2),
            number("pad", -1),
            number("tensor_type", torch.Tensor),
        ],
        [{"pad": -2}, {"pad": 2**62}],
    ),
    "tensor_codes": Export(lambda: [number("tensor", KEPT._cdata)]),
    "tensor_write_state": Export(
        lambda: [number("tensor", KEPT._cdata), number("storage", KEPT.untyped_storage()._cdata)],
        [{"tensor": 0}, {"storage": 0}],
    ),
    "set_write_functions": Export(
        lambda: [Arg("number", name, 0) for name in loader._WRITE_FUNCTIONS],
        [{name: address} for name in loader._WRITE_FUNCTIONS for address in (1, 64, 2**47, 2**64 - 1, -1)],
    ),
    "set_tensor_functions": Export(
        lambda: [Arg("number", name, 0) for name in loader._TENSOR_FUNCTIONS],
        [{name: address} for name in loader._TENSOR_FUNCTIONS for address in (1, 64, 2**47, 2**64 - 1, -1)],
    ),
    "best_cpu_isa": Export(list),
    "cpu_isa": Export(list),
    "preferred_cpu_isa": Export(list),
    "has_team": Export(list),
    "set_cpu_isa": Export(
        lambda: [Arg("number", "name", _C.cpu_isa())],
        [{"name": name} for name in ("", "avx1024", "x" * 10**6, "best\0", "AVX2")],
    ),
    "set_team_start": Export(
        lambda: [Arg("number", name, 0) for name in RUNTIME],
        [{name: address} for name in RUNTIME for address in (1, 64, 2**47, 2**64 - 1, -1)],
    ),
    "open_team": Export(lambda: [THREADS]),
    "close_team": Export(list),
    "set_always_alone": Export(
        lambda: [number("alone", False), number("microseconds", 1000)],
        [{"microseconds": -1}],
    ),
}


def flat(args):
    return [a for part in args for a in (flat(part) if isinstance(part, list) else [part])]


def handed(args, change, fence):
    """The arguments as the function takes them, with `change` by name; tensors are behind the fence."""

    def one(a):
        value = change.get(a.name, a.value)
        if isinstance(value, torch.Tensor):
            value = fence.copy(value).data_ptr()
        return value

    return [tuple(handed(a, change, fence)) if isinstance(a, list) else one(a) for a in args]


def native_rows(export):
    """(name of the row, values by name) of calls that are refused."""
    for row in export.rows:
        yield ", ".join(f"{name} = {str(value)[:60]}" for name, value in row.items()), row
    for a in {a.name: a for a in flat(export.args())}.values():
        unfit = () if a.name in ("none", "causal", "name") or isinstance(a.value, float) else UNFIT
        for value in (*HOSTILE[a.role], *unfit):
            yield f"{a.name} = {value!r}", {a.name: value}


def try_native(tried):
    for name, export in EXPORTS.items():
        function = getattr(_C, name.split()[0])

        def call(change, export=export, function=function):
            return function(*handed(export.args(), change, tried.fence))

        tried.one(f"{name}: as it should be", lambda call=call: call({}), refused=False)
        for row, change in native_rows(export):
            words = "expected|too few|out of range|incompatible (function|constructor) arguments"
            tried.one(f"{name}: {row}", lambda change=change, call=call: call(change), words)
    _C.set_team_start(**loader._runtime())
    loader._hand_over_tensor_functions(_C)
