"""What one forward or training step of an encoder computes and moves, counted op by op.

Only sizes, lengths and dtypes go in; no device, no time. `devices.py` turns a `Work` into time.

- Operations are those of the real tokens: nothing is counted for padding.
- Bytes are the fewest that an op can move if its inputs and results lie in memory: each one once, as the
  `bytes` of the op's Case in `fastbert.testing`.
- In training in half precision the parameters and the residual stream are fp32 and the products' inputs and
  results are half precision (autocast). So weights and gradients are also converted once per step.
- Training has dropout 0.1: `draw` counts the operations that make its random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.lib.workloads import Model

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PASSES = (FORWARD, BACKWARD, OPTIMIZER)
HEADS = ("pretraining", "classification")
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
EIGHT_BIT = ("int8", "fp8")
# not a dtype: products of fp32 that the cpu backend leaves to torch's library, which has a roof of its own
LIBRARY = "fp32 library"
# not a dtype: products of bf16 on a CPU; their roof is bf16's where pairs are multiplied, else fp32's
PAIRS = "bf16 pairs"
# BERT's table of positions and of token types
POSITIONS, TYPES = 512, 2
# share of the tokens that have a label in pre-training
LABELLED = 0.15
# AdamW per parameter: reads parameter, gradient, both moments; writes parameter and both moments; all fp32
OPTIMIZER_BYTES = 28
# weight, gradient and both moments, fp32
STATE_BYTES = {"weights": 4, "gradients": 4, "moments": 8}
# Philox 4x32-10 makes four numbers in ten rounds of two wide products, four exclusive ors and two sums
DRAW_OPERATIONS = 20
# logits and their gradient are kept for backward where they fit: ops/linear_cross_entropy.py on a GPU
KEPT_LOGITS_BYTES = 2**29


@dataclass(frozen=True)
class Work:
    """What one op of a forward or a training step does, all its calls together.

    Attributes:
        op: its name.
        kind: "product", "attention", "rows" (element-wise work and work row by row), "draw" or "optimizer":
            which share of the device's roofs it reaches.
        tag: the dtype whose arithmetic roof counts, or LIBRARY.
        storage: the dtype class of what it moves, "fp32" or "half".
        flops: operations.
        moved: the fewest bytes.
        calls: how often it is launched.
        which: of PASSES.
    """

    op: str
    kind: str
    tag: str
    storage: str
    flops: float
    moved: float
    calls: int = 1
    which: str = FORWARD

    def times(self, n: int) -> Work:
        """This work n times."""
        return replace(self, flops=n * self.flops, moved=n * self.moved, calls=n * self.calls)


@dataclass(frozen=True)
class Precision:
    """The dtypes of one run.

    Attributes:
        tag: whose arithmetic the matrix products have.
        attention: of attention's products.
        io: bytes per element of the products' inputs and results.
        weight: bytes per element of the layers' matrices as they are read.
        stream: bytes per element of the residual stream.
        gradients: as `tag`, of the products of backward and of a vocabulary.
    """

    tag: str
    attention: str
    io: int
    weight: int
    stream: int
    gradients: str

    @property
    def storage(self) -> str:
        """The class of the dtype that activations have."""
        return "fp32" if self.io == 4 else "half"


def precision(tag: str, on_gpu: bool, train: bool) -> Precision:
    """The dtypes that `tag` means.

    8-bit products read and write fp32 on a CPU, bf16 on a GPU; attention is never 8-bit. On a CPU fp16's
    products are those of fp32, because csrc/cpu/linear_simd.cpp widens both factors, and bf16's are PAIRS.
    There fp32's own gradients and vocabularies are LIBRARY's.

    Raises:
        ValueError: for a dtype that is unknown or cannot train.
    """
    if tag not in ITEMSIZE:
        raise ValueError(f"dtype: got {tag!r}, expected one of {', '.join(ITEMSIZE)}")
    if train and (tag == "int8" or (tag == "fp8" and not on_gpu)):
        where = "a GPU" if on_gpu else "a CPU"
        raise ValueError(f"dtype: got {tag!r}, which does not train on {where}; expected fp32 or bf16")
    if tag in EIGHT_BIT:
        attention, io = ("bf16", 2) if on_gpu else ("fp32", 4)
        return Precision(tag, attention, io, 1, 4 if train else io, tag)
    io = ITEMSIZE[tag]
    arithmetic = tag if on_gpu else PAIRS if tag == "bf16" else "fp32"
    gradients = LIBRARY if tag == "fp32" and not on_gpu else arithmetic
    return Precision(arithmetic, tag, io, io, 4 if train else io, gradients)


def parameters(model: Model, head: str | None = None) -> int:
    """How many parameters the encoder has; with a head also the pooler's and the head's."""
    h = model.hidden
    layer = layer_parameters(model) + (3 * h + h) + (model.intermediate + h) + 4 * h
    total = (model.vocab + POSITIONS + TYPES) * h + 2 * h + model.layers * layer
    if head is None:
        return total
    check_head(head)
    total += h * h + h + 2 * h + 2
    return total + (h * h + h + 2 * h + model.vocab if head == "pretraining" else 0)


def layer_parameters(model: Model) -> int:
    """Elements of one layer's matrices."""
    return sum(n * k for n, k in model.gemms().values())


def least_bytes(model: Model, lengths: tuple[int, ...], tag: str, *, on_gpu: bool) -> int:
    """The fewest bytes that one forward moves, however its ops are fused: it reads the layers' matrices and
    three embeddings per token, and writes the last hidden state.
    """
    p = precision(tag, on_gpu, train=False)
    return model.layers * layer_parameters(model) * p.weight + 4 * sum(lengths) * model.hidden * p.io


def check_head(head: str) -> None:
    """Raises ValueError for an unknown head."""
    if head not in HEADS:
        raise ValueError(f"head: got {head!r}, expected one of {', '.join(HEADS)}")


def labelled_rows(lengths: tuple[int, ...], head: str) -> int:
    """How many tokens have a label."""
    return max(1, round(LABELLED * sum(lengths))) if head == "pretraining" else 0


# ---- single ops ----


def product(
    op: str, rows: int, k: int, n: int, p: Precision, *, bias: bool = False, kept: bool = False
) -> Work:
    """(rows, k) by (n, k). `kept`: it writes its result twice, before and after the activation."""
    moved = (rows * (k + n * (1 + kept)) + n * bias) * p.io + n * k * p.weight
    if p.weight == 1:
        # the scale of each output column
        moved += 4 * n
    return Work(op, "product", p.tag, p.storage, 2.0 * rows * k * n, moved)


def product_backward(op: str, rows: int, k: int, n: int, p: Precision, *, activation: bool = False) -> Work:
    """dx and dweight: two products. Reads x, weight, dy, and the pre-activation if there is one."""
    moved = (2 * rows * k + rows * n * (1 + activation)) * p.io + 2 * n * k * p.io
    return Work(op, "product", p.gradients, p.storage, 4.0 * rows * k * n, moved, which=BACKWARD)


def pairs(lengths: tuple[int, ...]) -> int:
    """How many (query, key) pairs one head has."""
    return sum(n * n for n in lengths)


def attention(lengths: tuple[int, ...], model: Model, p: Precision, which: str = FORWARD) -> Work:
    """All heads of one layer. Backward has 2.5 times forward's operations: it makes the scores again."""
    flops, tensors = (4.0, 4) if which == FORWARD else (10.0, 8)
    moved = tensors * sum(lengths) * model.hidden * p.io
    flops *= pairs(lengths) * model.hidden
    return Work("attention", "attention", p.attention, p.storage, flops, moved, which=which)


def draws(numbers: float, which: str = FORWARD) -> Work:
    """The random numbers of dropout; part of another op, so no call of its own."""
    return Work("dropout", "draw", "fp32", "fp32", DRAW_OPERATIONS * numbers, 0.0, 0, which)


def rows(op: str, p: Precision, flops: float, moved: float, which: str = FORWARD, calls: int = 1) -> Work:
    """Work that memory bounds."""
    return Work(op, "rows", "fp32", p.storage, flops, moved, calls, which)


# ---- forward and training ----


def forward(
    model: Model, lengths: tuple[int, ...], tag: str, *, on_gpu: bool, pooling: bool = False
) -> list[Work]:
    """One forward in inference, to the last hidden state.

    Args:
        model: the encoder's sizes.
        lengths: tokens of each sequence.
        tag: of ITEMSIZE.
        on_gpu: see `precision`.
        pooling: also the mean of each sequence.
    """
    check_lengths(lengths)
    p = precision(tag, on_gpu, train=False)
    t, h, f = sum(lengths), model.hidden, model.intermediate
    layer = [
        product("qkv", t, h, 3 * h, p, bias=True),
        attention(lengths, model, p),
        product("attention output", t, h, h, p),
        rows("residual + LayerNorm", p, 16.0 * t * h, 2 * (3 * t * h + 2 * h) * p.io, calls=2),
        product("FFN1 + GELU", t, h, f, p, bias=True),
        product("FFN2", t, f, h, p),
    ]
    if not on_gpu:
        # the whole layer is one call of the backend
        layer = [replace(work, calls=int(i == 0)) for i, work in enumerate(layer)]
    works = [embedding(t, h, p), *(work.times(model.layers) for work in layer)]
    if len(set(lengths)) > 1:
        # the batch arrives and leaves padded; only the result is large
        moved = t * h * p.io + len(lengths) * max(lengths) * h * p.io + 16 * t
        works.append(rows("packing", p, 0.0, moved))
    if pooling:
        works.append(rows("pooling", p, float(t * h), t * h * p.io + len(lengths) * (4 * h + 4)))
    return works


def embedding(tokens: int, hidden: int, p: Precision) -> Work:
    """Three tables and LayerNorm."""
    moved = 24 * tokens + (4 * tokens * hidden + 2 * hidden) * p.io
    return rows("embedding", p, 10.0 * tokens * hidden, moved)


def training(
    model: Model, lengths: tuple[int, ...], tag: str, *, on_gpu: bool, head: str = "pretraining"
) -> list[Work]:
    """One training step: forward, backward and AdamW, dropout 0.1, fp32 parameters.

    Args:
        model, lengths, on_gpu: as `forward`.
        tag: "fp32"; or "bf16", "fp16" for autocast; on a GPU also "fp8", for which only products change.
        head: of HEADS.
    """
    check_lengths(lengths)
    check_head(head)
    p = precision(tag, on_gpu, train=True)
    # autocast converts fp32 weights; what a product then reads has the dtype of its other input
    p = replace(p, weight=p.io)
    t, h, n = sum(lengths), model.hidden, parameters(model, head)
    tables = (model.vocab + POSITIONS + TYPES) * h * 4
    # a classifier reads the first token only, so the last layer computes no other
    last = head == "classification"
    layers = [work.times(model.layers - last) for work in training_layer(model, lengths, p, on_gpu)]
    layers += training_layer(model, lengths, p, on_gpu, first_only=True) if last else []
    return [
        embedding(t, h, replace(p, io=p.stream)),
        draws(t * h),
        *layers,
        *head_work(model, labelled_rows(lengths, head), len(lengths), p),
        rows("embedding", p, 10.0 * t * h, 2 * t * h * p.stream + tables, BACKWARD),
        Work("AdamW", "optimizer", "fp32", "fp32", 12.0 * n, OPTIMIZER_BYTES * n, 1, OPTIMIZER),
    ]


def training_layer(
    model: Model, lengths: tuple[int, ...], p: Precision, on_gpu: bool, first_only: bool = False
) -> list[Work]:
    """Forward and backward of one layer.

    Weights change with every step, so each step lays them out anew: a GPU joins query, key and value, a CPU
    makes panels of all matrices. `first_only`: past the keys and values, each sequence's first token only.
    """
    every, h, f = sum(lengths), model.hidden, model.intermediate
    t = len(lengths) if first_only else every
    numbers = model.heads * (every if first_only else pairs(lengths))
    joined = 2 * h if first_only else 3 * h
    heads = [attention(lengths, model, p, which) for which in (FORWARD, BACKWARD)]
    if first_only:
        heads = [replace(work, flops=work.flops / pairs(lengths) * every) for work in heads]
    io, stream = p.io, p.stream
    norm = t * h * (io + 3 * stream + (0 if io == stream else io + stream))
    found = [
        product("qkv", every, h, joined, p, bias=True),
        heads[0],
        product("attention output", t, h, h, p),
        rows("residual + LayerNorm", p, 16.0 * t * h, 2 * norm, calls=2),
        draws(numbers + 2 * t * h),
        product("FFN1 + GELU", t, h, f, p, bias=True, kept=True),
        product("FFN2", t, f, h, p),
        product_backward("qkv", every, h, joined, p),
        heads[1],
        product_backward("attention output", t, h, h, p),
        rows("residual + LayerNorm", p, 16.0 * t * h, 2 * t * h * (3 * stream + io), BACKWARD, calls=2),
        # attention's decisions are kept, those of the hidden states are drawn again
        draws(2 * t * h, BACKWARD),
        product_backward("FFN1 + GELU", t, h, f, p, activation=True),
        product_backward("FFN2", t, f, h, p),
    ]
    matrices = layer_parameters(model)
    laid_out = 2 * io * (3 * h * h if on_gpu else matrices)
    converted = 0 if io == stream else matrices * (io + stream)
    # the gradients of a tensor with two readers are added; on a CPU query, key and value read x separately
    sums = 2 * 3 * t * h * stream + (0 if on_gpu else 2 * 3 * every * h * io)
    return [
        *found,
        rows("weights", p, 0.0, laid_out + converted, calls=6),
        rows("weights", p, 0.0, converted, BACKWARD, calls=6 if converted else 0),
        rows("sums of gradients", p, 0.0, sums, BACKWARD, calls=2 if on_gpu else 4),
    ]


def head_work(model: Model, labelled: int, batch: int, p: Precision) -> list[Work]:
    """The pooler and its classifier; with labelled rows also the masked-token head, on those rows only."""
    h, v = model.hidden, model.vocab
    found = [product("head", batch, h, h, p, bias=True), product_backward("head", batch, h, h, p)]
    if labelled:
        found += [
            product("head", labelled, h, h, p, bias=True, kept=True),
            product_backward("head", labelled, h, h, p, activation=True),
            product("head", labelled, h, v, replace(p, tag=p.gradients), bias=True),
            product_backward("head", labelled, h, v, p),
            rows("head", p, 4.0 * labelled * v, 2 * labelled * v * p.io, FORWARD),
            rows("head", p, 4.0 * labelled * v, 2 * labelled * v * p.io, BACKWARD),
        ]
    return found


def check_lengths(lengths: tuple[int, ...]) -> None:
    """Raises ValueError unless there is a sequence and each has a token."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths: got {lengths}, expected at least one, each at least 1")


def training_memory(
    model: Model, lengths: tuple[int, ...], tag: str, *, on_gpu: bool, head: str = "pretraining"
) -> dict[str, int]:
    """Bytes that a training step needs on one device: weights, gradients, moments, copies, activations.

    `copies` are the half-precision weights of autocast; `activations` is what autograd keeps from forward.
    Scratch memory of kernels and of the allocator is not counted.
    """
    check_lengths(lengths)
    p = precision(tag, on_gpu, train=True)
    t, h, layers = sum(lengths), model.hidden, model.layers
    n, labelled = parameters(model, head), labelled_rows(lengths, head)
    found = {name: size * n for name, size in STATE_BYTES.items()}
    found["copies"] = 0 if p.io == p.stream else layers * layer_parameters(model) * p.io
    # q, k, v, attention's result, the inputs of two products; before both LayerNorms; around the activation
    layer = t * h * (6 * p.io + 2 * p.stream) + 2 * t * model.intermediate * p.io
    # dropout's bits and attention's logarithms
    layer += model.heads * (pairs(lengths) // 8 + 4 * t)
    logits = labelled * model.vocab * p.io
    kept = logits if 2 * logits <= KEPT_LOGITS_BYTES else 0
    # of the last layer of a classifier only the keys and values of all tokens
    whole = layers - 1 if head == "classification" else layers
    rest = (layers - whole) * t * h * 3 * p.io
    found["activations"] = whole * layer + rest + t * h * p.stream + kept + labelled * h * 3 * p.io
    return found


def inference_memory(model: Model, lengths: tuple[int, ...], tag: str, *, on_gpu: bool) -> dict[str, int]:
    """Bytes that one forward needs: weights, and the results of one layer that live at one time."""
    check_lengths(lengths)
    p = precision(tag, on_gpu, train=False)
    matrices = model.layers * layer_parameters(model)
    weights = matrices * p.weight + (parameters(model) - matrices) * p.io
    activations = sum(lengths) * (3 * model.hidden + max(3 * model.hidden, model.intermediate)) * p.io
    return {"weights": weights, "activations": activations}
