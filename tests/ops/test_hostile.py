"""Hostile numbers, one table per door: `fastbert._C`, `torch.ops.fastbert`, and the public functions.

A call that gets a hostile length, size, stride, id, bias shape, code or number of threads raises an error, or
gives what the call without it gives. It touches no memory that is not the caller's: inputs and outputs lie
between pages that may not be touched, so that an access outside ends the process. Each door is tried in a
process of its own (`python tests/ops/test_hostile.py DOOR`), which says what it tries before it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fastbert.ops import attention as attention_op
from fastbert.ops import encoder_layer as encoder_layer_op
from fastbert.ops.attention import attention
from fastbert.ops.cross_entropy import cross_entropy
from fastbert.ops.embedding import embedding
from fastbert.ops.first_attention import first_attention
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.ops.linear_cross_entropy import linear_cross_entropy
from fastbert.ops.linear_int8 import linear_int8
from fastbert.ops.packing import pack, unpack
from fastbert.ops.pooling import pooling
from fastbert.runtime import dispatch
from fastbert.runtime import native as _native

_C = _native.extension
ROOT = Path(__file__).resolve().parents[2]
ERRORS = (ValueError, TypeError, RuntimeError, IndexError)
INT32 = torch.int32
PAGE = mmap.PAGESIZE
HUGE = (2**62, 2**63 - 1)


# --- memory with nothing around it --------------------------------------------------------------------------


class Fence:
    """Tensors that end where a page begins that may not be touched, and before which there is one, too."""

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.memory = []

    def empty(self, shape, dtype, fill=0xA5):
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > 2**40:
            raise RuntimeError(f"out of memory: {size} bytes")
        used = -(-size // PAGE) * PAGE
        pages = mmap.mmap(-1, used + 2 * PAGE)
        pages[PAGE : PAGE + used] = bytes([fill]) * used
        first = ctypes.c_char.from_buffer(pages)
        start = ctypes.addressof(first)
        for page in (start, start + PAGE + used):
            assert self.libc.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0
        before = used - size
        self.memory.append((pages, before))
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        t = torch.frombuffer(pages, dtype=dtype, offset=PAGE + before, count=torch.Size(shape).numel())
        return t.view(shape)

    def copy(self, t):
        """`t` behind a fence, as far apart as its elements are; other strides than of dense rows stay."""
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        whole = self.empty((span,), t.dtype)
        fenced = whole.as_strided(t.shape, t.stride()) if t.numel() else self.empty(t.shape, t.dtype)
        if all(s > 0 or n == 1 for n, s in zip(t.shape, t.stride(), strict=True)):
            return fenced.copy_(t)
        whole.copy_(t.as_strided((span,), (1,)))
        return fenced

    def check(self):
        """Fails where something was written before a tensor; forgets them all."""
        for pages, before in self.memory:
            assert pages[PAGE : PAGE + before] == b"\xa5" * before, "written before the start of a tensor"
        self.memory.clear()


def fenced_outputs(fence):
    """What the backends allocate lies behind fences from here on."""

    def allocator(fill):
        def allocate(self, *size, dtype=None, **_):
            shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
            t = fence.empty(tuple(shape), dtype or self.dtype)
            return t.zero_() if fill == 0 else t

        return allocate

    torch.Tensor.new_empty, torch.Tensor.new_zeros = allocator(None), allocator(0)


# --- the door `fastbert._C` ---------------------------------------------------------------------------------


class Arg(NamedTuple):
    """One number that an exported function takes; a list of them is a tuple."""

    role: str  # code, size, stride, needed (an address), optional (an address), threads, number
    name: str
    value: object


def arg(role):
    return lambda name, value=None: Arg(role, name, value)


code, size, stride, needed, optional, number = map(
    arg, ("code", "size", "stride", "needed", "optional", "number")
)
THREADS = Arg("threads", "threads", 2)
SIZES = (-1, -(2**62), *HUGE)
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


def floats(*shape, fill=None):
    return torch.randn(shape) if fill is None else torch.full(shape, fill)


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def dropout_args(p=0.25):
    seed = ints(7)
    return [needed("seed", seed)._replace(role="optional"), number("offset", 1),
            number("threshold", int(p * 2**32)), number("scale", 1 / (1 - p))]  # fmt: skip


ENDS = (0, 3, 3, 8)  # of 9 rows
TOTAL, BATCH, HEADS, DIM, LONGEST = 9, 3, 3, 5, 5
WRONG_ENDS = [
    ((0, 3, 3, 2_000_000), "cu_seqlens"),
    ((0, 2**31 - 1, 2**31 - 1, 2**31 - 1), "cu_seqlens"),
    ((-100_000, 0, 3, 8), "cu_seqlens"),
    ((0, 8, 3, 8), "cu_seqlens"),
    ((0, -8, 3, 8), "cu_seqlens"),
    ((1, 3, 3, 8), "cu_seqlens"),
    ((0, 3, 3, 10), "cu_seqlens"),
    ((0, 0, 0, 8), "max_seqlen"),
]


def attention_args():
    def heads(name):
        tensor = needed(name, floats(TOTAL, HEADS, DIM))
        return tensor, stride(f"{name} row", HEADS * DIM), stride(f"{name} head", DIM)

    return [
        code("dtype", 0), size("batch", BATCH), size("nheads", HEADS), size("headdim", DIM),
        size("total", TOTAL), size("max_seqlen", LONGEST), needed("cu_seqlens", ints(*ENDS, dtype=INT32)),
        *heads("q"), *heads("k"), *heads("v"), number("softmax_scale", 0.5), number("causal", False),
        optional("bias", floats(BATCH, HEADS, LONGEST, LONGEST)), stride("bias batch", HEADS * LONGEST**2),
        stride("bias head", LONGEST**2), stride("bias row", LONGEST), optional("gate", floats(HEADS)),
        *dropout_args(),
    ]  # fmt: skip


CELLS = (BATCH, HEADS, LONGEST, LONGEST)
ATTENTION_ROWS = [
    *({"cu_seqlens": ints(*ends, dtype=INT32)} for ends, _ in WRONG_ENDS),
    {"max_seqlen": 2},
    {"max_seqlen": 0},
    {"total": 7},
]


def panels_size(depth, columns, int8=False):
    return (_C.cpu_linear_int8_panels_size if int8 else _C.cpu_linear_panels_size)(depth, columns)


def layer_weights(int8):
    hidden, inner = HEADS * DIM, 7

    def dense(name, depth, columns):
        panels = torch.zeros(panels_size(depth, columns, int8), dtype=torch.uint8 if int8 else torch.float32)
        scale = floats(columns, fill=1.0) if int8 else 0
        return [needed(f"{name} panels", panels), optional(f"{name} scale", scale),
                optional(f"{name} bias", floats(columns)), code(f"{name} dtype", 0)]  # fmt: skip

    nothing = [number("none", 0)] * 4
    inputs = [dense("query", hidden, 3 * hidden), nothing, nothing] if int8 else [
        dense(name, hidden, hidden) for name in ("query", "key", "value")
    ]  # fmt: skip
    outputs = [dense("attention output", hidden, hidden), dense("intermediate", hidden, inner),
               dense("output", inner, hidden)]  # fmt: skip
    norms = [[optional("norm", floats(hidden)), code("norm dtype", 0)] for _ in range(4)]
    return [a for group in (*inputs, *outputs, *norms) for a in group]


def layer_sizes():
    return [size("batch", BATCH), size("nheads", HEADS), size("headdim", DIM), size("total", TOTAL),
            size("max_seqlen", LONGEST), size("inner", 7)]  # fmt: skip


def encoder_layer_args(int8=False):
    hidden = HEADS * DIM
    return [
        code("dtype", 0), layer_sizes(), layer_weights(int8), needed("cu_seqlens", ints(*ENDS, dtype=INT32)),
        needed("x", floats(TOTAL, hidden)), stride("x_stride", hidden), number("attention_eps", 1e-5),
        number("output_eps", 1e-5), code("activation", 1), number("softmax_scale", 0.5),
        [optional("bias", floats(*CELLS)), stride("bias batch", HEADS * LONGEST**2),
         stride("bias head", LONGEST**2), stride("bias row", LONGEST)],
        optional("gate", floats(HEADS)), needed("y", floats(TOTAL, hidden)), THREADS, number("work", 0),
        number("work_bytes", 0),
    ]  # fmt: skip


def norm_args(*names, rows=4, hidden=5):
    """Strided matrices, then vectors, of a LayerNorm."""
    return [a for n in names for a in (needed(n, floats(rows, hidden)), stride(f"{n} stride", hidden))]


def vectors(*names, n=5):
    return [a for name in names for a in (optional(name, floats(n)), code(f"{name} dtype", 0))]


def lookup(name, rows, *ids):
    return [needed(name, floats(rows, 5)), stride(f"{name} stride", 5), size(f"{name} rows", rows),
            optional(f"{name} ids", ints(*ids))]  # fmt: skip


def table_grad(name, rows, *ids):
    return [needed(name, floats(rows, 5)), size(f"{name} rows", rows), number(f"{name} skip", 0),
            needed(f"{name} ids", ints(*ids))]  # fmt: skip


def optional_table(group):
    """A lookup that may be left out."""
    return [group[0]._replace(role="optional"), *group[1:]]


IDS = (6, 0, 3, 6)
WRONG_IDS = [{f"{name} ids": ints(0, 1, bad, 0)} for name in ("word", "position", "segment")
             for bad in (7, -1, 2**62, -(2**63))]  # fmt: skip


def embedding_fwd_args():
    return [
        code("dtype", 0), size("tokens", 4), size("hidden", 5), lookup("word", 7, *IDS),
        optional_table(lookup("position", 6, 0, 1, 2, 3)), optional_table(lookup("segment", 2, 0, 0, 1, 1)),
        *vectors("weight", "bias"), number("eps", 1e-5), *dropout_args(), needed("y", floats(4, 5)),
        optional("z", floats(4, 5)), optional("mean", floats(4)), optional("rstd", floats(4)), THREADS,
    ]  # fmt: skip


def embedding_bwd_args():
    return [
        code("dtype", 0), size("tokens", 4), size("hidden", 5), needed("dy", floats(4, 5)),
        needed("z", floats(4, 5)), *vectors("weight"), needed("mean", floats(4)), needed("rstd", floats(4)),
        *dropout_args(), *(optional_table(table_grad(*t)) for t in (
            ("word", 7, *IDS), ("position", 6, 0, 1, 2, 3), ("segment", 2, 0, 0, 1, 1))),
        optional("dinputs_embeds", floats(4, 5)), optional("dweight", floats(5)),
        optional("dbias", floats(5)),
        THREADS,
    ]  # fmt: skip


def cross_entropy_args():
    return [
        code("dtype", 0), size("rows", 4), size("classes", 5), needed("logits", floats(4, 5)),
        stride("logits stride", 5), needed("labels", ints(0, 4, -100, 2)), number("ignore_index", -100),
        number("label_smoothing", 0.1),
    ]  # fmt: skip


WRONG_LABELS = [{"labels": ints(0, bad, -100, 2)} for bad in (5, -1, 2**62, -(2**63))]
LSE, COUNT = lambda: needed("lse", floats(2, 4)), lambda: needed("count", ints(3))


def layer_norm_fwd_args():
    matrix = norm_args("x", "residual")
    matrix[2] = matrix[2]._replace(role="optional")
    return [
        code("dtype", 0), size("rows", 4), size("hidden", 5), *matrix, *vectors("weight", "bias", "x_bias"),
        number("eps", 1e-5), *dropout_args(), needed("y", floats(4, 5)), optional("z", floats(4, 5)),
        optional("mean", floats(4)), optional("rstd", floats(4)), THREADS,
    ]  # fmt: skip


def layer_norm_bwd_args():
    return [
        code("dtype", 0), size("rows", 4), size("hidden", 5), *norm_args("dy", "z"), *vectors("weight"),
        needed("mean", floats(4)), needed("rstd", floats(4)), *dropout_args(), optional("dx", floats(4, 5)),
        optional("dresidual", floats(4, 5)),
        *(optional(n, floats(5)) for n in ("dweight", "dbias", "dx_bias")),
        THREADS,
    ]  # fmt: skip


def product_args(panels):
    if panels:
        right = [needed("panels", floats(panels_size(5, 3))), number("b", 0), number("b stride", 0)]
    else:
        right = [number("panels", 0), needed("b", floats(5, 3)), stride("b stride", 3)]
    return [
        code("dtype", 0), size("rows", 4), size("columns", 3), size("depth", 5), needed("a", floats(4, 5)),
        stride("a row", 5), stride("a depth", 1), *right, *vectors("bias", n=3), code("activation", 1),
        optional("residual", floats(4, 3)), stride("residual stride", 3), needed("c", floats(4, 3)),
        optional("pre", floats(4, 3)), THREADS,
    ]  # fmt: skip


def bytes_of(n):
    return torch.zeros(n, dtype=torch.uint8)


def packing_args(rows_of_x, rows_of_out):
    return [
        needed("x", floats(rows_of_x, 5)), stride("x stride", 20), size("width", 20),
        needed("indices", ints(1, 2, 5)), size("total", 3), size("rows", 6),
        needed("out", floats(rows_of_out, 5)),
        THREADS,
    ]  # fmt: skip


WRONG_INDICES = [{"indices": ints(*bad)} for bad in (
    (1, 2, 6), (-1, 2, 5), (1, 1, 5), (2, 1, 5), (1, 2, 2**62), (-(2**63), 2, 5))]  # fmt: skip
WRONG_INDICES += [{"total": 7}]


class Export(NamedTuple):
    args: object  # () -> arguments in order
    rows: tuple | list = ()  # values by name, each refused


# Every function that the module exports, but for those of CUDA: what they are handed lies on a GPU.
RUNTIME = ("gomp_parallel", "gomp_parallel_start", "gomp_parallel_end", "omp_get_num_threads")
EXPORTS = {
    "cpu_attention_fwd": Export(lambda: [
        attention_args(), needed("out", floats(TOTAL, HEADS, DIM)), optional("lse", floats(HEADS, TOTAL)),
        optional("probs", floats(*CELLS)), optional("keep_bits", torch.zeros(HEADS, TOTAL, 1, dtype=INT32)),
        THREADS], ATTENTION_ROWS),
    "cpu_attention_bwd": Export(lambda: [
        attention_args(), optional("keep_bits", torch.zeros(HEADS, TOTAL, 1, dtype=INT32)),
        needed("dout", floats(TOTAL, HEADS, DIM)),
        *(optional(n, floats(TOTAL, HEADS, DIM)) for n in ("dq", "dk", "dv")), optional("ds", floats(*CELLS)),
        optional("dgate", torch.zeros(BATCH, HEADS, dtype=torch.float64)), THREADS], ATTENTION_ROWS),
    "cpu_encoder_layer_work": Export(lambda: [code("dtype", 0), layer_sizes(), THREADS]),
    "cpu_encoder_layer_fwd": Export(encoder_layer_args, [
        *ATTENTION_ROWS, {"query panels": 0}, {"key panels": 0}, {"value scale": 64}, {"output scale": 64},
        {"work": 64}]),
    "cpu_encoder_layer_fwd 8 bits": Export(lambda: encoder_layer_args(True), [
        {"cu_seqlens": ints(0, 3, 3, 2_000_000, dtype=INT32)}, {"query scale": 0}, {"output scale": 0}]),
    "cpu_embedding_fwd": Export(embedding_fwd_args, [
        *WRONG_IDS, {"word ids": 0, "word rows": 3}, {"position ids": 0, "position rows": 3}]),
    "cpu_embedding_bwd": Export(embedding_bwd_args, WRONG_IDS),
    "cpu_cross_entropy_fwd": Export(lambda: [
        *cross_entropy_args(), needed("loss", floats(1)), LSE(), COUNT(), THREADS], WRONG_LABELS),
    "cpu_cross_entropy_bwd": Export(lambda: [
        *cross_entropy_args(), needed("dloss", floats(1)), LSE(), COUNT(), needed("dlogits", floats(4, 5)),
        THREADS], WRONG_LABELS),
    "cpu_layer_norm_fwd": Export(layer_norm_fwd_args),
    "cpu_layer_norm_bwd": Export(layer_norm_bwd_args),
    "cpu_linear_panels_size": Export(lambda: [size("depth", 5), size("columns", 3)], [
        {"depth": 2**40, "columns": 2**40}]),
    "cpu_linear_panels": Export(lambda: [
        code("dtype", 0), size("depth", 5), size("columns", 3), needed("b", floats(3, 5)),
        stride("b depth", 1), stride("b column", 5), needed("panels", floats(panels_size(5, 3))), THREADS],
        [{"b depth": 2}]),
    "cpu_linear_product": Export(lambda: product_args(False), [{"a depth": 2}, {"b": 0, "panels": 0}]),
    "cpu_linear_product panels": Export(lambda: product_args(True)),
    "cpu_linear_activation_bwd": Export(lambda: [
        code("dtype", 0), size("rows", 4), size("columns", 3), needed("dy", floats(4, 3)),
        needed("pre", floats(4, 3)), code("activation", 1), optional("g", floats(4, 3)),
        optional("dbias", floats(3)), THREADS]),
    "cpu_linear_int8_panels_size": Export(lambda: [size("depth", 5), size("columns", 3)]),
    "cpu_linear_int8_panels": Export(lambda: [
        size("depth", 5), size("columns", 3), needed("weight", torch.ones(3, 5, dtype=torch.int8)),
        needed("panels", bytes_of(panels_size(5, 3, True))), THREADS], [{"depth": 65537}]),
    "cpu_linear_int8": Export(lambda: [
        code("dtype", 0), size("rows", 4), size("columns", 3), size("depth", 5), needed("x", floats(4, 5)),
        stride("x stride", 5), needed("panels", bytes_of(panels_size(5, 3, True))),
        needed("scale", floats(3)),
        *vectors("bias", n=3), code("activation", 1), needed("y", floats(4, 3)), THREADS],
        [{"depth": 65537}]),
    "cpu_packing_fwd": Export(lambda: packing_args(6, 3), WRONG_INDICES),
    "cpu_packing_bwd": Export(lambda: packing_args(3, 6), WRONG_INDICES),
    "Samples": Export(lambda: [[[
        needed("at", floats(8)), stride("piece stride", 8), size("count", 3), size("bytes", 4),
        size("window", 1)]]]),
    "best_cpu_isa": Export(list),
    "cpu_isa": Export(list),
    "preferred_cpu_isa": Export(list),
    "has_team": Export(list),
    "set_cpu_isa": Export(lambda: [Arg("number", "name", _C.cpu_isa())], [
        {"name": name} for name in ("", "avx1024", "x" * 10**6, "best\0", "AVX2")]),
    "set_team_start": Export(lambda: [Arg("number", name, 0) for name in RUNTIME], [
        {name: address} for name in RUNTIME for address in (1, 64, 2**47, 2**64 - 1, -1)]),
    "open_team": Export(lambda: [THREADS]),
    "close_team": Export(list),
}  # fmt: skip


def flat(args):
    return [a for part in args for a in (flat(part) if isinstance(part, list) else [part])]


def handed(args, change, fence):
    """The arguments as the function takes them, values by name replaced; tensors lie behind the fence."""

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
            words = "expected|too few|out of range|incompatible function arguments"
            tried.one(f"{name}: {row}", lambda change=change, call=call: call(change), words)
    _C.set_team_start(**_native._runtime())


# --- the door `torch.ops.fastbert` --------------------------------------------------------------------------


class Op(NamedTuple):
    args: object  # () -> arguments by name, in order
    rows: tuple | list = ()  # values by name, each refused
    free: tuple = ()  # arguments of which other sizes are no mistake: the result is then another one
    backends: tuple = ("cpu", "aten", "reference")


def attention_operands():
    return {
        **{name: floats(TOTAL, HEADS, DIM) for name in ("q", "k", "v")},
        "cu_seqlens": ints(*ENDS, dtype=INT32), "max_seqlen": LONGEST, "softmax_scale": 0.5, "causal": False,
        "bias": floats(*CELLS), "gate": floats(HEADS), "dropout_p": 0.25, "seed": ints(7), "offset": 1,
    }  # fmt: skip


def attention_saved():
    operands = attention_operands()
    out, lse, _, bits = attention_op.attention_fwd(*operands.values(), False, True)
    saved = {"keep_bits": bits, **{f"need_{n}": True for n in ("dq", "dk", "dv", "dbias", "dgate")}}
    first = {name: operands.pop(name) for name in ("q", "k", "v")}
    return {"dout": torch.ones(TOTAL, HEADS, DIM), **first, "out": out, "lse": lse, **operands, **saved}


def embedding_operands():
    return {
        "input_ids": ints(*IDS), "inputs_embeds": None, "word": floats(7, 5),
        "position_ids": ints(0, 1, 2, 3),
        "position": floats(6, 5), "token_type_ids": ints(0, 0, 1, 1), "segment": floats(2, 5),
        "ln_weight": floats(5), "ln_bias": floats(5), "padding_idx": 0, "eps": 1e-5, "dropout_p": 0.25,
        "seed": ints(7), "offset": 1, "save": True,
    }  # fmt: skip


def linear_loss_operands(some=range(8)):
    operands = {
        "x": floats(4, 5), "weight": floats(5, 5), "bias": floats(5), "labels": ints(0, 2, -100, 1),
        "labelled": 3, "ignore_index": -100, "label_smoothing": 0.1, "chunk_rows": 2,
    }  # fmt: skip
    names = list(operands)
    return {names[i]: operands[names[i]] for i in some}


BIASES = [{"bias": floats(*shape)} for shape in (
    (BATCH, HEADS, LONGEST, 2), (BATCH, HEADS, 2, LONGEST), (BATCH, HEADS, 2, 2),
    (2, HEADS, LONGEST, LONGEST),
    (BATCH, 2, LONGEST, LONGEST), (BATCH, HEADS, LONGEST, LONGEST + 1), (LONGEST, LONGEST), (0, 1, 1, 1),
)]  # fmt: skip
LENGTHS = [
    *({"cu_seqlens": ints(*ends, dtype=INT32)} for ends, _ in WRONG_ENDS),
    {"max_seqlen": 2}, {"max_seqlen": -1},
]  # fmt: skip
OPS = {
    "attention_fwd": Op(lambda: {**attention_operands(), "return_probs": True, "save_bits": True},
        [*LENGTHS, *BIASES, {"bias": floats(HEADS, LONGEST, LONGEST)}, {"seed": None}, {"dropout_p": 1.5}],
        ("cu_seqlens", "max_seqlen")),
    "attention_bwd": Op(attention_saved, [*LENGTHS, *BIASES, {"seed": None},
        {"keep_bits": floats(HEADS, TOTAL, 1)}, {"bias": None}, {"gate": None}], ("cu_seqlens",)),
    "cross_entropy_fwd": Op(lambda: {
        "logits": floats(4, 5), "labels": ints(0, 4, -100, 2), "ignore_index": -100, "label_smoothing": 0.1},
        WRONG_LABELS, ("logits", "ignore_index")),
    "cross_entropy_bwd": Op(lambda: {
        "dloss": torch.tensor(1.0), "logits": floats(4, 5), "labels": ints(0, 4, -100, 2),
        "lse": torch.ones(2, 4), "count": torch.tensor(3), "ignore_index": -100, "label_smoothing": 0.1},
        WRONG_LABELS, ("logits", "ignore_index")),
    "embedding_fwd": Op(embedding_operands, [
        *({name: ints(0, 1, bad, 0)} for name in ("input_ids", "position_ids", "token_type_ids")
          for bad in (7, -1, 2**62)), {"word": None}, {"position": None}, {"segment": None}],
        ("word", "position", "segment", "padding_idx")),
    "embedding_bwd": Op(lambda: {
        "dy": floats(4, 5), "z": floats(4, 5), "ln_weight": floats(5), "mean": floats(4), "rstd": floats(4),
        "input_ids": ints(*IDS), "position_ids": ints(0, 1, 2, 3), "token_type_ids": ints(0, 0, 1, 1),
        "word_rows": 7, "position_rows": 6, "segment_rows": 2, "padding_idx": 0, "dropout_p": 0.25,
        "seed": ints(7), "offset": 1, "need_dinputs_embeds": True, "need_dln": True}, [
        *({name: ints(0, 1, bad, 0)} for name in ("input_ids", "position_ids", "token_type_ids")
          for bad in (7, -1, 2**62)), {"input_ids": None}], ("padding_idx",)),
    "layer_norm_fwd": Op(lambda: {
        "x": floats(4, 5), "weight": floats(5), "bias": floats(5), "residual": floats(4, 5),
        "x_bias": floats(5), "eps": 1e-5, "dropout_p": 0.25, "seed": ints(7), "offset": 1, "save": True}),
    "layer_norm_bwd": Op(lambda: {
        "dy": floats(4, 5), "z": floats(4, 5), "weight": floats(5), "mean": floats(4), "rstd": floats(4),
        "dropout_p": 0.25, "seed": ints(7), "offset": 1,
        **{f"need_{n}": True for n in ("dx", "dweight", "dxbias", "dresidual")}}),
    "linear_fwd": Op(lambda: {
        "x": floats(40, 5), "weight": floats(3, 5), "bias": floats(3), "activation": "gelu",
        "residual": floats(40, 3), "save": True}, [{"activation": "mish"}]),
    "linear_bwd": Op(lambda: {
        "dy": floats(40, 3), "x": floats(40, 5), "weight": floats(3, 5), "pre": floats(40, 3),
        "activation": "gelu", "need_dx": True, "need_dweight": True, "need_dbias": True},
        [{"x": None}, {"weight": None}, {"pre": None}, {"activation": "mish"}], ("x", "weight")),
    "linear_cross_entropy_fwd": Op(linear_loss_operands, [
        *WRONG_LABELS, {"labelled": 4}, {"labelled": 2}, {"labelled": -2}, {"chunk_rows": 0}],
        ("chunk_rows", "ignore_index")),
    "linear_cross_entropy_bwd": Op(lambda: {
        "dloss": torch.tensor(1.0), **linear_loss_operands(range(4)), "lse": torch.ones(2, 4),
        "count": torch.tensor(3), "logits": torch.empty(0), **linear_loss_operands(range(4, 8)),
        "need_dx": True, "need_dweight": True, "need_dbias": True},
        [*WRONG_LABELS, {"labelled": 4}, {"labelled": 2}, {"chunk_rows": 0}, {"logits": floats(3, 3)},
         {"x": None}, {"weight": None}, {"bias": None}], ("chunk_rows", "ignore_index")),
    "linear_int8_fwd": Op(lambda: {
        "x": floats(4, 5), "weight": torch.ones(3, 5, dtype=torch.int8), "scale": torch.ones(3),
        "bias": floats(3), "activation": "gelu", "panels": bytes_of(panels_size(5, 3, True))},
        [{"activation": "mish"}], ("x", "panels")),
    "packing_fwd": Op(lambda: {"x": floats(6, 5), "indices": ints(1, 2, 5)},
        [row for row in WRONG_INDICES if "indices" in row], ("x", "indices")),
    "packing_bwd": Op(lambda: {"x": floats(3, 5), "indices": ints(1, 2, 5), "rows": 6},
        [*(row for row in WRONG_INDICES if "indices" in row), {"rows": 5}, {"rows": -1}], ("x", "indices")),
    "pooling_fwd": Op(lambda: {"hidden": floats(TOTAL, 4), "cu_seqlens": ints(*ENDS), "mode": "max"}, [
        *({"cu_seqlens": ints(*ends)} for ends, words in WRONG_ENDS if words == "cu_seqlens"),
        {"cu_seqlens": ints()}, {"mode": "sum"}], ("hidden", "cu_seqlens")),
    "pooling_bwd": Op(lambda: {
        "dy": floats(BATCH, 4), "hidden": floats(TOTAL, 4), "y": floats(BATCH, 4), "cu_seqlens": ints(*ENDS),
        "mode": "max"}, [
        *({"cu_seqlens": ints(*ends)} for ends, words in WRONG_ENDS if words == "cu_seqlens"),
        {"cu_seqlens": ints()}], ("hidden",),
        ("aten",)),  # the reference differentiates by autograd, which it cannot within a custom op
}  # fmt: skip


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


def try_ops(tried):
    allocators = torch.Tensor.new_empty, torch.Tensor.new_zeros
    for name, op in OPS.items():
        function, base = getattr(torch.ops.fastbert, name), op.args()
        rows = [(f"{row}", row) for row in op.rows]
        free = [
            (f"{n} {what}", {n: t}) for n, value in base.items() if isinstance(value, torch.Tensor)
            for what, t in misshaped(value)
        ]  # fmt: skip
        free += [(f"{n} = {v}", {n: v}) for n, known in base.items() if type(known) is int for v in SIZES]

        def call(change, base=base, function=function):
            fence = tried.fence
            values = [
                fence.copy(v) if isinstance(v, torch.Tensor) else v for v in {**base, **change}.values()
            ]
            fenced_outputs(fence)
            try:
                result = function(*values)
            finally:
                torch.Tensor.new_empty, torch.Tensor.new_zeros = allocators
            return tuple(t.clone() for t in result) if isinstance(result, tuple) else result.clone()

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


# --- the door of the public functions -----------------------------------------------------------------------


class Public(NamedTuple):
    function: object
    args: object  # () -> arguments by name
    rows: list  # (values by name, words of the error)
    compiled: bool = True


def layer_call(**kwargs):
    launch, weights, kwargs = kwargs.pop("launch"), kwargs.pop("weights"), kwargs
    return encoder_layer_op.encoder_layer(launch, kwargs.pop("x"), weights, **kwargs)


def layer_operands():
    make, launch, _keeps = encoder_layer_op.launchers(torch.device("cpu"), torch.float32, "linear")
    hidden, inner = HEADS * DIM, 7
    shapes = [(hidden, hidden)] * 4 + [(inner, hidden), (hidden, inner)]
    linears = [(w := floats(*s), None, None, floats(s[0])) for s in shapes]
    assert w.shape == (hidden, inner)
    weights = make(linears, [(floats(hidden), floats(hidden))] * 2)
    return {
        "launch": launch, "weights": weights, "x": floats(TOTAL, hidden),
        "cu_seqlens": ints(*ENDS, dtype=INT32), "max_seqlen": LONGEST, "nheads": HEADS, "inner": inner,
        "softmax_scale": 0.5, "bias": floats(*CELLS), "gate": floats(HEADS), "activation": "gelu",
        "eps": (1e-5, 1e-5),
    }  # fmt: skip


def public_attention():
    operands = attention_operands()
    for name in ("dropout_p", "seed", "offset"):
        del operands[name]
    return operands


WORDED_LENGTHS = [
    *(({"cu_seqlens": ints(*ends, dtype=INT32)}, words) for ends, words in WRONG_ENDS),
    ({"max_seqlen": 2}, "max_seqlen|bias"), ({"max_seqlen": -1}, "max_seqlen"),
]  # fmt: skip
WORDED_BIASES = [(row, "bias: expected") for row in BIASES]
PUBLIC = {
    "attention": Public(attention, public_attention, [*WORDED_LENGTHS, *WORDED_BIASES]),
    "attention, padded": Public(attention, lambda: {
        **{name: floats(BATCH, LONGEST, HEADS, DIM) for name in ("q", "k", "v")}, "bias": floats(*CELLS)},
        WORDED_BIASES),
    "encoder_layer": Public(layer_call, layer_operands, [
        *WORDED_LENGTHS, *WORDED_BIASES, ({"inner": 8}, "weights"), ({"inner": 2**40}, "expected"),
        ({"nheads": 5}, "bias|gate"), ({"x": floats(TOTAL, 2 * HEADS * DIM)}, "weights"),
        ({"x": floats(TOTAL, HEADS)}, "weights"), ({"x": floats(7, HEADS * DIM)}, "cu_seqlens")], False),
    "cross_entropy": Public(cross_entropy, lambda: {"logits": floats(4, 5), "labels": ints(0, 4, -100, 2)},
        [(row, "labels") for row in WRONG_LABELS]),
    "embedding": Public(embedding, lambda: {
        **{n: embedding_operands()[n] for n in (
            "input_ids", "word", "position_ids", "position", "token_type_ids", "segment", "ln_weight",
            "ln_bias")}}, [
        ({name: ints(0, 1, bad, 0)}, name) for name in ("input_ids", "position_ids", "token_type_ids")
        for bad in (7, -1, 2**62)]),
    "first_attention": Public(first_attention, lambda: {
        "x": floats(TOTAL, 5), "q": floats(BATCH, HEADS, DIM), "key_weight": floats(HEADS * DIM, 5),
        "value_weight": floats(HEADS * DIM, 5), "value_bias": floats(HEADS * DIM),
        "cu_seqlens": ints(*ENDS, dtype=INT32), "softmax_scale": 0.5, "bias": floats(*CELLS),
        "gate": floats(HEADS)}, [
        *(({"cu_seqlens": ints(*ends, dtype=INT32)}, words.replace("max_seqlen", "bias"))
          for ends, words in WRONG_ENDS), *WORDED_BIASES,
        ({"q": floats(BATCH + 1, HEADS, DIM)}, "cu_seqlens"), ({"q": floats(BATCH, HEADS * DIM)}, "q"),
        ({"q": floats(BATCH, HEADS, DIM + 1)}, "key_weight"), ({"x": floats(TOTAL, 4)}, "key_weight"),
        ({"x": floats(1, 5)}, "cu_seqlens"), ({"value_weight": floats(HEADS * DIM, 4)}, "value_weight"),
        ({"value_bias": floats(HEADS)}, "value_bias"), ({"gate": floats(HEADS + 1)}, "gate"),
        ({"gate": None, "softmax_scale": None}, "softmax_scale"),
        ({"bias": floats(1, 1, 1, 2)}, "bias")], False),
    "layer_norm": Public(layer_norm, lambda: {"x": floats(4, 5), "weight": floats(5)}, [
        ({"weight": floats(4)}, "weight"), ({"residual": floats(3, 5)}, "residual")]),
    "linear": Public(linear, lambda: {"x": floats(40, 5), "weight": floats(3, 5), "bias": floats(3)}, [
        ({"weight": floats(3, 4)}, "weight"), ({"bias": floats(2)}, "bias"),
        ({"residual": floats(39, 3)}, "residual")]),
    "linear, panels": Public(linear, lambda: {
        "x": floats(40, 5), "weight": floats(3, 5), "panels": torch.zeros(panels_size(5, 3))}, [
        ({"panels": floats(5)}, "panels"), ({"panels": floats(64, 5)}, "panels")], False),
    "linear_cross_entropy": Public(linear_cross_entropy, lambda: {
        "x": floats(4, 5), "weight": floats(5, 5), "bias": None, "labels": ints(0, 4, -100, 2)},
        [(row, "labels") for row in WRONG_LABELS]),
    "linear_int8": Public(linear_int8, lambda: {
        "x": floats(4, 5), "weight": torch.ones(3, 5, dtype=torch.int8), "scale": torch.ones(3)}, [
        ({"scale": floats(2)}, "scale"), ({"weight": torch.ones(3, 4, dtype=torch.int8)}, "weight")]),
    "pack": Public(pack, lambda: {"x": floats(2, 3, 5), "indices": ints(1, 2, 5)},
        [(row, "indices") for row in WRONG_INDICES if "indices" in row]),
    "unpack": Public(unpack, lambda: {"x": floats(3, 5), "indices": ints(1, 2, 5), "batch": 2, "seqlen": 3}, [
        *((row, "indices") for row in WRONG_INDICES if "indices" in row), ({"batch": 1}, "indices"),
        ({"batch": -1}, "batch"), ({"x": floats(4, 5)}, "x: expected")]),
    "pooling": Public(pooling, lambda: {"hidden": floats(TOTAL, 4), "cu_seqlens": ints(*ENDS),
    "mode": "max"}, [
        ({"cu_seqlens": ints(*ends)}, words) for ends, words in WRONG_ENDS if words == "cu_seqlens"]),
}  # fmt: skip


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


class Tried:
    """The calls of one door. Each is told before it is made: what was told last has crashed."""

    def __init__(self):
        self.fence, self.faults, self.told = Fence(), [], ""

    def fault(self, what):
        if what:
            self.faults.append(f"{self.told}: {what}")

    def one(self, told, call, words="", refused=True):
        """Call; `refused`: whether an error that has `words` (a pattern) is due, None if either will do."""
        self.told, result = told[:200].replace("\n", " "), None
        print(self.told, flush=True)
        try:
            result = call()
        except ERRORS as error:
            if refused is False or not str(error) or not re.search(words, str(error)):
                self.fault(f"{type(error).__name__}: {str(error)[:300]}; expected {words or 'no error'}")
        except Exception as error:  # what dynamo raises around an error of ours
            if refused is not True or not re.search(words, str(error)):
                self.fault(f"{type(error).__name__}: {str(error)[:300]}; expected {words}")
        else:
            self.fault("not refused" if refused else "")
        try:
            self.fence.check()
        except AssertionError as error:
            self.fault(str(error))
        return result


DOORS = {
    "native": try_native,
    "ops": try_ops,
    "public": try_public,
    "compiled": lambda tried: try_public(tried, compiled=True),
}


needs_kernels = pytest.mark.skipif(
    _C is None or _C.best_cpu_isa() == "none", reason="the CPU's compiled kernels are not here"
)


# --- tensors whose memory does not hold their values --------------------------------------------------------


def negated(t):
    """A view with the negative bit, of the values of `t`."""
    return torch._neg_view(-t)


def imaginary(t):
    """The same as users meet it."""
    return torch.complex(torch.zeros_like(t), -t).conj().imag


def lazily(operands, make):
    """The operands with every tensor made by `make`, which of integers gives a view with the negative bit."""
    return {
        n: t if not isinstance(t, torch.Tensor) else make(t) if t.is_floating_point() else negated(t)
        for n, t in operands.items()
    }


LAZY = {
    name: public for name, public in PUBLIC.items() if name not in ("attention, padded", "linear, panels")
}


@needs_kernels
@pytest.mark.parametrize("make", [negated, imaginary], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", LAZY)
def test_the_negative_bit_changes_nothing(name, make):
    """In every backend, of every operand, and of the gradient that arrives."""
    base = PUBLIC[name].args()
    if name == "linear_int8":  # 8 bits have no negative view of their own kind
        base["weight"] = base["weight"].float()
    lazy = lazily(base, make)
    if name == "linear_int8":
        base["weight"], lazy["weight"] = base["weight"].to(torch.int8), negated(base["weight"].to(torch.int8))
    assert any(isinstance(t, torch.Tensor) and t.is_neg() for t in lazy.values())
    backends = {
        "encoder_layer": [None],
        "pooling": ["aten", "reference"],
        "first_attention": ["aten", "reference"],
    }
    for backend in backends.get(name, ["cpu", "aten", "reference"]):
        with dispatch.use_backend(backend) if backend else contextlib.nullcontext():
            results = []
            for operands in (base, lazy):
                leaves = {
                    n: t.detach().requires_grad_()
                    if isinstance(t, torch.Tensor) and t.is_floating_point()
                    else t
                    for n, t in operands.items()
                }
                if name in ("encoder_layer", "first_attention", "linear_int8"):
                    leaves = operands
                y = PUBLIC[name].function(**leaves)
                grads = []
                if y.requires_grad:
                    dy = torch.linspace(-1, 2, y.numel()).reshape(y.shape)
                    wanted = [t for t in leaves.values() if isinstance(t, torch.Tensor) and t.requires_grad]
                    grads = torch.autograd.grad(y, wanted, dy if operands is base else make(dy))
                results.append((y.detach(), *grads))
            assert differ(*results, values=True) == "", backend


@needs_kernels
@pytest.mark.parametrize(
    "name", [name for name in LAZY if name not in ("encoder_layer", "first_attention", "linear_int8")]
)
def test_a_gradient_of_zero_without_memory(name):
    for backend in ["aten", "reference"] if name == "pooling" else ["cpu", "aten", "reference"]:
        with dispatch.use_backend(backend):
            leaves = {
                n: t.requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
                for n, t in PUBLIC[name].args().items()
            }
            y = PUBLIC[name].function(**leaves)
            wanted = [t for t in leaves.values() if isinstance(t, torch.Tensor) and t.requires_grad]
            for grad in torch.autograd.grad(y, wanted, torch._efficientzerotensor(y.shape)):
                assert not grad.any()
            zero = {
                n: torch._efficientzerotensor(t.shape) if t is leaves.get("x") else t
                for n, t in leaves.items()
            }
            if "x" in leaves:
                plain = {n: torch.zeros_like(t) if t is leaves["x"] else t for n, t in leaves.items()}
                assert torch.equal(PUBLIC[name].function(**zero), PUBLIC[name].function(**plain))


@needs_kernels
@pytest.mark.parametrize("int8", [False, True], ids=["linear", "linear_int8"])
def test_packed_weights_and_layers_of_negative_views(int8):
    """What is packed once, or handed to a fused layer, is read by address too."""
    from fastbert.ops import linear as linear_op
    from fastbert.ops import linear_int8 as linear_int8_op

    weight = torch.randint(-9, 9, (3, 40)).to(torch.int8) if int8 else torch.randn(3, 40)
    pack = (linear_int8_op if int8 else linear_op).panel_maker(torch.device("cpu"), torch.float32)
    assert torch.equal(pack(negated(weight)), pack(weight))
    make, _, _ = encoder_layer_op.launchers(torch.device("cpu"), torch.float32, "linear")
    operands = layer_operands()
    hidden, inner = HEADS * DIM, 7
    shapes = [(hidden, hidden)] * 4 + [(inner, hidden), (hidden, inner)]
    linears, norms = [(floats(*s), floats(s[0])) for s in shapes], [(floats(hidden), floats(hidden))] * 2
    results = []
    for change in (lambda t: t, negated):
        weights = make(
            [(change(w), None, None, change(b)) for w, b in linears], [tuple(map(change, n)) for n in norms]
        )
        results.append(layer_call(**{**operands, "weights": weights}))
    assert torch.equal(*results)


# --- the tests ----------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("door", DOORS)
def test_hostile_numbers_reach_nothing(door):
    run = subprocess.run(
        [sys.executable, str(Path(__file__)), door], cwd=ROOT, text=True, capture_output=True, timeout=300
    )
    tried = run.stdout.splitlines()
    assert run.returncode == 0, f"{run.returncode} after {tried[-1:]}: {run.stderr[-3000:]}"
    assert len(tried) > 60, tried


@needs_kernels
def test_every_exported_function_has_rows():
    exported = {
        name for name in dir(_C) if callable(getattr(_C, name)) and not name.startswith(("__", "cuda_"))
    }
    assert {name.split()[0] for name in EXPORTS} == exported


def test_every_custom_op_has_rows():
    registered = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names()
                  if name.startswith("fastbert::")}  # fmt: skip
    assert set(OPS) == registered


FROM_FORWARD = {
    "attention_bwd": ("dout", "out", "lse", "keep_bits"),
    "cross_entropy_bwd": ("dloss", "lse", "count"),
    "embedding_bwd": ("z", "ln_weight", "mean", "rstd", "input_ids", "position_ids", "token_type_ids"),
    "layer_norm_bwd": ("dy", "weight", "mean", "rstd"),
    "linear_bwd": ("x", "weight", "pre"),
    "linear_cross_entropy_bwd": ("dloss", "lse", "count", "logits"),
    "packing_bwd": ("x", "indices"),
    "pooling_bwd": ("dy", "y"),
}


@pytest.mark.parametrize(("op", "names"), FROM_FORWARD.items())
def test_what_backward_gets_is_refused_by_name_before_a_backend_sees_it(op, names):
    """A backend may not read it on a CPU, and another one on a GPU, where nothing stops it."""
    assert set(FROM_FORWARD) == {name for name in OPS if name.endswith("_bwd")}
    base = OPS[op].args()
    for name in names:
        wrong = base[name].new_zeros(*base[name].shape, 2)
        with dispatch.use_backend("aten"), pytest.raises(ValueError, match=rf"^{name}: expected"):
            getattr(torch.ops.fastbert, op)(*{**base, name: wrong}.values())


def test_every_public_op_has_rows():
    ops = {*dispatch.OPS, "pack", "unpack", "encoder_layer"} - {"packing"}
    assert {name.partition(",")[0] for name in PUBLIC} == ops


@pytest.mark.parametrize("after", [True, False], ids=["behind", "before"])
def test_the_fence_is_one(after):
    """A touch outside a fenced tensor ends the process, or shows."""
    code = (
        "import ctypes, torch\n"
        "from tests.ops.test_hostile import PAGE, Fence\n"
        "fence = Fence()\n"
        "t = fence.copy(torch.ones(5))\n"
        f"ctypes.memset(t.data_ptr() {'+ 20' if after else '- 1'}, 0, 1)\n"
        "fence.check()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert run.returncode != 0
    assert after or "written before the start" in run.stderr


if __name__ == "__main__":
    # a length that got through must not take the machine's memory
    resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
    torch.manual_seed(0)
    door = Tried()
    DOORS[sys.argv[1]](door)
    sys.exit("\n".join(door.faults[:50]) or 0)
