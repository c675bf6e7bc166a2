"""Which backend serves which op: one literal table, `device -> op -> backends, best first`.

`reference` closes every list. A backend is passed over where it is not installed, does not run on the device
or does not store the dtype; `explain()` says why. `dispatch.py` chooses by the table.
"""

from __future__ import annotations

import torch

OPS = (
    "attention",
    "attention_received",
    "cross_entropy",
    "embedding",
    "encoder_layers",
    "feed_forward",
    "first_attention",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_fp8",
    "linear_int8",
    "linear_norm",
    "packing",
    "pooling",
    "rotary",
)
# Ops without a backward.
INFERENCE_ONLY = (
    "attention_received",
    "encoder_layers",
    "first_attention",
    "linear_fp8",
    "linear_int8",
    "linear_norm",
)

HALF = (torch.bfloat16, torch.float16)

# A ranking is ordered by measurement, or by a count of bytes where bench/results has no row yet (see README).
# `cuda` (CUDA C++) comes first where it has a kernel: a self-check times it beside the next backend, so that
# it serves only on the devices where it is not slower. A key may name one kind of call: "linear activation"
# is for calls with an activation, "linear half" for calls in half precision, "linear activation half" for
# both. The most specific key counts. "attention training" is for calls that save for backward, and for their
# backward; "linear activation few" and "… some" for calls of inference with at most the rows that `ROWS`
# says. With such a key a self-check judges these calls apart: training by forward and backward together, few
# rows by forward of few rows. Other kernels are judged by all their times together. A kernel whose forward is
# faster may have a slower backward, and a kernel that is faster for many rows may be slower for few.
# "attention relative" is for calls with scores of distances, where the backend reads these itself.
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "attention": ("cpu", "aten", "reference"),
        "attention_received": ("cpu", "aten", "reference"),
        "cross_entropy": ("cpu", "aten", "reference"),
        "embedding": ("cpu", "aten", "reference"),
        # No model calls it on a CPU, where a layer is one call (ops/encoder_layer.py).
        "encoder_layers": ("aten", "reference"),
        "feed_forward": ("cpu", "aten", "reference"),
        "first_attention": ("aten", "reference"),
        "layer_norm": ("cpu", "aten", "reference"),
        "linear": ("cpu", "aten", "reference"),
        "linear_cross_entropy": ("cpu", "aten", "reference"),
        "linear_distillation": ("cpu", "aten", "reference"),
        # No model calls it on a CPU.
        "linear_fp8": ("aten", "reference"),
        "linear_int8": ("cpu", "aten", "reference"),
        # No model calls it on a CPU, where a launch costs nothing.
        "linear_norm": ("aten", "reference"),
        "packing": ("cpu", "aten", "reference"),
        "pooling": ("aten", "reference"),
        "rotary": ("cpu", "aten", "reference"),
    },
    # All of "cuda" was ranked by a count of bytes, before bench/results had a row of a GPU. What serves is
    # what a device's own self-checks find: on an H100 most as ranked, but LayerNorm's forward by `triton` (24
    # us for 16,384 x 768 in a forward of BERT-base, `cuda` 34).
    "cuda": {
        # No padded copies of q, k, v and no scores in memory. In half precision at length 512 and headdim 64,
        # backward moves 1.6 kB per token and head; aten moves 16 kB for the float32 scores and the three
        # tensors like them.
        "attention": ("cuda", "triton", "aten", "reference"),
        # The same passes without a compiler at run time, and a launch that costs the host less. In float32
        # `cuda` has no backward.
        "attention half": ("cuda", "triton", "aten", "reference"),
        # Scores of distances: 4 bytes per pair of tokens and head; as a dense bias they are 76, most of them
        # of the passes that make it (kernels/attention_relative.py). Without `triton` they are one.
        "attention relative": ("triton", "aten", "reference"),
        "attention training": ("triton", "aten", "reference"),
        "attention training half": ("cuda", "triton", "aten", "reference"),
        # No float32 copies and no scores in memory. In half precision at length 512 and headdim 64, it reads
        # 256 bytes per token and head; aten writes and reads 512 of copies and 2 kB of scores several times.
        "attention_received": ("triton", "aten", "reference"),
        # Reads the labelled logits once, and once more in backward; aten copies all rows in float32 first.
        "cross_entropy": ("triton", "aten", "reference"),
        # One pass; aten writes and reads three float32 sums. Backward writes a table's gradient once; aten
        # fills it with zeros, adds to it in float32 and casts it.
        "embedding": ("triton", "aten", "reference"),
        # The same kernels and cuBLAS's products, without the host's time for each.
        "encoder_layers": ("cuda", "aten", "reference"),
        # Two calls of `linear`, which is what models do in float32.
        "feed_forward": ("aten", "reference"),
        # The gradient between the two products is neither written nor read.
        "feed_forward half": ("cuda", "triton", "aten", "reference"),
        "feed_forward training half": ("cuda", "triton", "aten", "reference"),
        "first_attention": ("aten", "reference"),
        # No keys and values: for 32 x 512 tokens of BERT-base 1.3 GFLOP and 34 MB instead of the 64 GFLOP and
        # 279 MB of all rows (kernels/NOTES.md, "First tokens").
        "first_attention half": ("triton", "aten", "reference"),
        # One pass over z instead of three.
        "layer_norm": ("cuda", "triton", "aten", "reference"),
        "layer_norm training": ("cuda", "triton", "aten", "reference"),
        # cuBLAS moves not one byte more.
        "linear": ("aten", "reference"),
        # The same products, and the bias's gradient by our pass: PyTorch sums that of query, key and value in
        # a step of BERT-base, 16,384 x 2,304, at 0.4 of an H200's bandwidth.
        "linear training half": ("cuda", "aten", "reference"),
        # The activation moves once, not three times; backward reads its gradient once less, for the bias. In
        # float32 that is little compared with the products themselves.
        "linear activation half": ("cuda", "triton", "aten", "reference"),
        "linear activation training half": ("cuda", "triton", "aten", "reference"),
        # Parts of the depth, so that all multiprocessors read the weight, and a second launch to add them.
        "linear activation few half": ("cuda", "triton", "aten", "reference"),
        "linear activation some half": ("cuda", "triton", "aten", "reference"),
        # The product's columns, twice as many as the result's, are not written and read in between. The loops
        # are those of plain activations; which of the two backends is faster has not been measured.
        "linear gated half": ("cuda", "triton", "aten", "reference"),
        # cuBLAS's products with cross_entropy's kernels.
        "linear_cross_entropy": ("triton", "aten", "reference"),
        "linear_distillation": ("aten", "reference"),
        # Rows are rounded in one pass: 3 bytes move per element, by `aten` 39.
        "linear_fp8": ("triton", "aten", "reference"),
        # Two launches; `aten` takes some twenty, and writes and reads the sums as int32 and float32.
        "linear_int8": ("triton", "aten", "reference"),
        # Two calls, which is what models do in float32.
        "linear_norm": ("aten", "reference"),
        # Up to 256 rows one launch instead of two, or of three where cuBLAS splits the depth; or two, in
        # which all multiprocessors share the depth. Per element of the product it moves 8 bytes, as float32
        # sums, and not 4, within the L2 cache: whether that pays depends on the rows. More rows are two
        # calls, of which the norm is one pass.
        "linear_norm half": ("triton", "aten", "reference"),
        "linear_norm few half": ("triton", "aten", "reference"),
        "linear_norm some half": ("triton", "aten", "reference"),
        # Backward, which is `unpack`, writes each row once, where aten writes zeros first; forward is equal.
        "packing": ("triton", "aten", "reference"),
        # Reads the tokens once; aten writes them in float32 first, and their gradients too.
        "pooling": ("triton", "aten", "reference"),
        # One pass; aten writes and reads four float32 products of half the size.
        "rotary": ("triton", "aten", "reference"),
    },
}
# Kinds of calls by their rows -> the most rows of each kind; calls with more rows have no such word.
ROWS = {"few": 32, "some": 256}
BACKENDS = ("reference", "aten", "cpu", "triton", "cuda")
SELF_CHECKED = ("triton", "cuda")


def op_of(function: str) -> str:
    """The op of "linear_fwd" or "linear_bwd activation": "linear"."""
    return function.partition(" ")[0].rsplit("_", 1)[0]


def ranking(function: str, device_type: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The backends for calls of `function` ("linear_fwd", "linear_fwd activation"), best first."""
    op, words = op_of(function), function.split(" ")[1:]
    rankings = TABLE.get(device_type, {})
    half = ("half",) if dtype in HALF else ()
    # a call in training, or with few rows, that has no line of its own is ranked as any other in inference
    for count in range(len(words), -1, -1):
        each = words[:count]
        for name in (" ".join((op, *each, *half)), " ".join((op, *each))):
            if name in rankings:
                return rankings[name]
    return ("aten", "reference")


def rows_kind(rows: int) -> str:
    """The word of `ROWS` for calls with so many rows, behind a space; "" for more rows than all of them."""
    for word, most in ROWS.items():
        if rows <= most:
            return f" {word}"
    return ""


def call_kinds(op: str, device_type: str) -> tuple[str, ...]:
    """The kinds of the op's calls that the table has apart: "" for all calls, then such as "activation"."""
    keys = [key.split()[1:] for key in TABLE.get(device_type, {}) if key.split()[0] == op]
    return "", *sorted({" ".join(word for word in words if word != "half") for words in keys} - {""})
