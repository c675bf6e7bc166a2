r"""The encoder's input: word, position and segment embeddings summed, LayerNorm, dropout.

Forward, per token, in float32 (float64 for float64 tables):

    z = word[id] (or inputs_embeds) + position[pos] + segment[type]
    mean = Σ z / hidden,  var = Σ (z - mean)² / hidden,  rstd = 1 / sqrt(var + eps)
    y = dropout((z - mean) * rstd * ln_weight + ln_bias)

Backward, with dn = dropout'(dy), x_hat = (z - mean) * rstd and g = dn * ln_weight:

    dz = rstd * (g - mean(g) - x_hat * mean(g * x_hat))
    dword[v] = Σ dz over the tokens with id v (0 in row padding_idx),  dposition, dsegment the same way
    dinputs_embeds = dz,  dln_weight = Σ_tokens dn * x_hat,  dln_bias = Σ_tokens dn

Dropout comes after the norm. Its bits: `fastbert.ops.dropout`, plane 0, row = index of the token, col =
column. The tables' gradients are summed in float32 in a fixed order, so repeats are bit-equal. Narrow tables
of half precision are computed in float32, like narrow rows in `fastbert.ops.layer_norm`.

The word table may hold integers of 8 or 4 bits with one scale per row, `fastbert.ops.integer_table`. Then
word[id] is a row of these integers times the row's scale, and the dtype is ln_weight's.

A backend whose kernel reads no memory for an id outside its table, and reports the id, has one more function:

    bad_ids(device) -> an object whose `check()` raises an IndexError for a reported id

Source: Devlin et al. 2018, "BERT", fig. 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives, integer_table
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.layer_norm import NARROW, layer_norm_ref, widened
from fastbert.ops.schema import schema
from fastbert.runtime import dispatch


class EmbeddingInputs(NamedTuple):
    """What forward computes from: flat ids, tables and options; only backward reads `padding_idx`."""

    input_ids: TensorOrNone
    inputs_embeds: Tensor | None
    word: TensorOrNone
    position_ids: TensorOrNone
    position: TensorOrNone
    token_type_ids: TensorOrNone
    segment: TensorOrNone
    ln_weight: Tensor
    ln_bias: Tensor
    padding_idx: int
    eps: float
    dropout_p: float
    seed: TensorOrNone
    offset: int
    word_scale: TensorOrNone = None

    @property
    def source(self) -> Tensor:
        """The tensor that has the dtype, the device and the width (its last dimension) of the result."""
        if self.word_scale is not None:
            return self.ln_weight
        return self.word if self.inputs_embeds is None else self.inputs_embeds

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return (self.input_ids if self.inputs_embeds is None else self.inputs_embeds).shape[0]

    def words(self, dtype: torch.dtype) -> Tensor:
        """The word embeddings, (tokens, hidden) in `dtype`; a new tensor."""
        if self.inputs_embeds is not None:
            return self.inputs_embeds.to(dtype, copy=True)
        if self.word_scale is None:
            return torch.nn.functional.embedding(self.input_ids, self.word).to(dtype)
        width = self.ln_weight.shape[0]
        return integer_table.looked_up(self.word, self.word_scale, self.input_ids, width, dtype)

    def in_floats(self) -> EmbeddingInputs:
        """The same with `inputs_embeds` in place of a table of integers."""
        if self.word_scale is None:
            return self
        words = self.words(self.source.dtype)
        return self._replace(input_ids=None, inputs_embeds=words, word=None, word_scale=None)


class EmbeddingSaved(NamedTuple):
    """What backward computes from, besides dy; `<table>_rows` is 0 if the table needs no gradient."""

    z: Tensor
    ln_weight: Tensor
    mean: Tensor
    rstd: Tensor
    input_ids: TensorOrNone
    position_ids: TensorOrNone
    token_type_ids: TensorOrNone
    word_rows: int
    position_rows: int
    segment_rows: int
    padding_idx: int
    dropout_p: float
    seed: TensorOrNone
    offset: int


def embedding_ref(
    input_ids: TensorOrNone,
    word: TensorOrNone,
    ln_weight: Tensor,
    ln_bias: Tensor,
    position_ids: TensorOrNone = None,
    position: Tensor | None = None,
    token_type_ids: TensorOrNone = None,
    segment: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    padding_idx: int | None = None,
    eps: float = 1e-12,
    dropout_p: float = 0.0,
    keep_mask: Tensor | None = None,
    word_scale: Tensor | None = None,
) -> Tensor:
    """Plain PyTorch, differentiable by autograd; computes in float64 for float64 tables, else in float32.

    `keep_mask` (the shape of the output, bool) says which elements dropout keeps; None keeps all.
    """
    source = word if inputs_embeds is None else inputs_embeds
    if word_scale is not None:
        source = ln_weight
        inputs_embeds = integer_table.looked_up(
            word, word_scale, input_ids, len(ln_weight), checks.compute_dtype(ln_weight)
        )
    compute = checks.compute_dtype(source)
    if inputs_embeds is None:
        z = torch.nn.functional.embedding(input_ids, word.to(compute), padding_idx)
    else:
        z = inputs_embeds.to(compute)
    if position is not None:
        z = z + position.to(compute)[position_ids]
    if segment is not None:
        z = z + segment.to(compute)[token_type_ids]
    y = layer_norm_ref(z, ln_weight, ln_bias, eps=eps)
    if keep_mask is not None:
        y = y * keep_mask / (1.0 - dropout_p)
    return y.to(source.dtype)


# --- custom ops: what torch.compile sees --------------------------------------------------------------------


@torch.library.custom_op(
    "fastbert::embedding_fwd", mutates_args=(), schema=schema(EmbeddingInputs, "bool save", returns=4)
)
def embedding_fwd(*args: Any) -> tuple[Tensor, ...]:
    """(y, z, mean, rstd) for flat ids; z, mean, rstd are empty where not saved. `padding_idx` < 0: none."""
    inputs, save = EmbeddingInputs(*args[:-1]), args[-1]
    input_ids, inputs_embeds, word, position_ids, position, token_type_ids, segment = inputs[:7]
    ln_weight, ln_bias, _, _, dropout_p, seed, offset, word_scale = inputs[7:]
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("input_ids, inputs_embeds: expected exactly one of the two")
    name, source = ("word", word) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    if source is None:
        raise ValueError("word: expected a torch.Tensor, because input_ids is given, got None")
    if word_scale is not None and inputs_embeds is not None:
        raise ValueError("word_scale: expected None, because inputs_embeds is given, got a tensor")
    if word_scale is None:
        rows, hidden = checks.matrix(name, source)
    else:
        hidden = ln_weight.shape[0] if ln_weight.dim() else 0
        integer_table.check(word, word_scale, hidden, ln_weight)
        rows, source = source.shape[0], ln_weight
    tokens = rows if input_ids is None else input_ids.shape[0]
    for name, table, ids_name, ids in (
        ("word", None if input_ids is None else word, "input_ids", input_ids),
        ("position", position, "position_ids", position_ids),
        ("segment", segment, "token_type_ids", token_type_ids),
    ):
        if (table is None) != (ids is None):
            raise ValueError(f"{name}, {ids_name}: expected both or neither")
        if table is not None and ids is not None:
            rows = table.shape[0]
            if name != "word" or word_scale is None:
                checks.operand(name, table, (rows, hidden), (source.dtype,), source, strided=True)
            checks.operand(ids_name, ids, (tokens,), (torch.int64,), source)
            checks.ids_in_range(ids_name, "id", ids, rows, f"a {name} table")
    for name, vector in (("ln_weight", ln_weight), ("ln_bias", ln_bias)):
        checks.operand(name, vector, (hidden,), (source.dtype, torch.float32), source)
    checks.dropout(dropout_p, seed, offset, source)
    return dispatch.call("embedding_fwd", source, inputs, save)


@embedding_fwd.register_fake
def _(*args):
    inputs, save = EmbeddingInputs(*args[:-1]), args[-1]
    source, rows = inputs.source, inputs.tokens
    stats = checks.compute_dtype(source)
    return (
        source.new_empty((rows, source.shape[-1])),
        source.new_empty((rows, source.shape[-1]) if save else (0,)),
        source.new_empty((rows if save else 0,), dtype=stats),
        source.new_empty((rows if save else 0,), dtype=stats),
    )


@torch.library.custom_op(
    "fastbert::embedding_bwd",
    mutates_args=(),
    schema=schema("Tensor dy", EmbeddingSaved, "bool need_dinputs_embeds, bool need_dln", returns=6),
)
def embedding_bwd(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """(dword, dposition, dsegment, dinputs_embeds, dln_weight, dln_bias).

    `word_rows`, `position_rows` and `segment_rows` are the tables' sizes, or 0 where the gradient is not
    needed. A gradient that is not needed has shape (0,). dln_weight and dln_bias are float32 (float64 for
    float64); all other gradients have dy's dtype.
    """
    saved, needs = EmbeddingSaved(*args[:-2]), args[-2:]
    tokens, hidden = checks.matrix("dy", dy)
    checks.operand("z", saved.z, dy.shape, (dy.dtype,), dy)
    checks.operand("ln_weight", saved.ln_weight, (hidden,), (dy.dtype, torch.float32), dy)
    for name, statistic in (("mean", saved.mean), ("rstd", saved.rstd)):
        checks.operand(name, statistic, (tokens,), (checks.compute_dtype(dy),), dy)
    for name, size_name in zip(saved._fields[4:7], saved._fields[7:10], strict=True):
        ids, rows = getattr(saved, name), getattr(saved, size_name)
        if rows < 0:
            raise ValueError(f"{size_name}: expected an integer >= 0, got {rows}")
        checks.operand(name, ids, (tokens,), (torch.int64,), dy, needed=rows > 0)
        if ids is not None and rows > 0:
            checks.ids_in_range(name, "id", ids, rows, f"{size_name}")
    checks.dropout(saved.dropout_p, saved.seed, saved.offset, dy)
    return dispatch.call("embedding_bwd", dy, dy, saved, *needs)


@embedding_bwd.register_fake
def _(dy, *args):
    saved, (need_dinputs_embeds, need_dln) = EmbeddingSaved(*args[:-2]), args[-2:]
    word_rows, position_rows, segment_rows = saved.word_rows, saved.position_rows, saved.segment_rows
    rows, hidden = dy.shape
    sizes = (word_rows, position_rows, segment_rows, rows if need_dinputs_embeds else 0)
    wanted = (word_rows > 0, position_rows > 0, segment_rows > 0, need_dinputs_embeds)
    tables = (dy.new_empty((n, hidden) if want else (0,)) for n, want in zip(sizes, wanted, strict=True))
    return *tables, *(saved.mean.new_empty((hidden if need_dln else 0,)) for _ in range(2))


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _setup_context(ctx: Any, inputs: EmbeddingInputs, output: tuple[Tensor, ...]) -> None:
    _y, z, mean, rstd = output
    need = ctx.needs_input_grad
    # word, position, segment: a table without a gradient needs neither its ids nor its rows
    ids = inputs.input_ids, inputs.position_ids, inputs.token_type_ids
    tables = inputs.word, inputs.position, inputs.segment
    trained = need[2], need[4], need[6]
    ids = (t if needed else None for t, needed in zip(ids, trained, strict=True))
    ctx.save_for_backward(z, inputs.ln_weight, mean, rstd, inputs.seed, *ids)
    ctx.set_materialize_grads(False)
    ctx.table_rows = [t.shape[0] if needed else 0 for t, needed in zip(tables, trained, strict=True)]
    ctx.padding_idx, ctx.dropout_p, ctx.offset = inputs.padding_idx, inputs.dropout_p, inputs.offset
    ctx.ln_bias_dtype = inputs.ln_bias.dtype


def _backward(launch: Callable[..., Any], ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 16
    z, ln_weight, mean, rstd, seed, *ids = ctx.saved_tensors
    options = ctx.padding_idx, ctx.dropout_p, seed, ctx.offset
    saved = EmbeddingSaved._make((z, ln_weight, mean, rstd, *ids, *ctx.table_rows, *options))
    need = ctx.needs_input_grad
    dword, dposition, dsegment, dinputs_embeds, dln_weight, dln_bias = launch(
        dy.contiguous(), saved, need[1], need[7] or need[8]
    )
    grads = (
        None,
        dinputs_embeds if need[1] else None,
        dword if need[2] else None,
        None,
        dposition if need[4] else None,
        None,
        dsegment if need[6] else None,
        checks.as_dtype(dln_weight, ln_weight.dtype) if need[7] else None,
        checks.as_dtype(dln_bias, ctx.ln_bias_dtype) if need[8] else None,
    )
    return *grads, *(None,) * 7


class EmbeddingFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers, without the cost of a custom op's dispatch."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        # a separate setup_context would cost an inspect.signature at every call
        inputs = EmbeddingInputs(*args[:-1])
        output = dispatch.call("embedding_fwd", inputs.source, inputs, args[-1])
        _setup_context(ctx, inputs, output)
        return output[0]

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        return _backward(lambda *args: dispatch.call("embedding_bwd", args[0], *args), ctx, dy)


def _compiled_bwd(dy, saved, need_dinputs_embeds, need_dln):
    """The custom op, called as a backend's `embedding_bwd` is."""
    return embedding_bwd(dy, *saved, need_dinputs_embeds, need_dln)


embedding_fwd.register_autograd(
    lambda ctx, dy, *_: _backward(_compiled_bwd, ctx, dy),
    setup_context=lambda ctx, inputs, output: _setup_context(ctx, EmbeddingInputs(*inputs[:-1]), output),
)


# --- public function ----------------------------------------------------------------------------------------


def embedding(
    input_ids: Tensor | None,
    word: Tensor | None,
    ln_weight: Tensor,
    ln_bias: Tensor,
    *,
    position_ids: Tensor | None = None,
    position: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    segment: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    padding_idx: int | None = None,
    eps: float = 1e-12,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    word_scale: Tensor | None = None,
) -> Tensor:
    """dropout(LayerNorm(word[input_ids] + position[position_ids] + segment[token_type_ids])).

    Ids of CPU tensors are checked against their tables. On other devices a check would wait for the device:
    there our kernel makes the token of an id out of range NaN, and the next call raises an IndexError that
    names the id. PyTorch's kernel ends in a device assert.

    Args:
        input_ids: (...,) int64 or int32, or None with `inputs_embeds`.
        word: (vocab, hidden). Not read, and may be None, where `inputs_embeds` is given. With `word_scale`
            integers: int8 (vocab, hidden), or uint8 (vocab, ⌈hidden / 2⌉) with two of 4 bits per byte.
        ln_weight: (hidden,); its dtype may differ from the tables'.
        ln_bias: (hidden,).
        position_ids: ids of a shape that broadcasts to the tokens'; None without `position`.
        position: (positions, hidden) of the word table's dtype, or None.
        token_type_ids: as `position_ids`; None without `segment`.
        segment: (types, hidden) of the word table's dtype, or None.
        inputs_embeds: (..., hidden) in place of `input_ids`, of the tables' dtype.
        padding_idx: row of `word` that gets no gradient, or None; a negative one counts from the end.
        eps: added to the variance, >= 0.
        dropout_p: probability of dropping an element of the normalised sum, in [0, 1), exact to 2**-17.
        seed: int64 tensor of one element on the tables' device; needed where dropout_p > 0.
        offset: the call site, in [0, 2**32).
        word_scale: (vocab,) float32, the value of one integer step in each row of `word`
            (`fastbert.ops.integer_table`); None for a `word` of floats. Not read where `inputs_embeds` is
            given. The other tables then have ln_weight's dtype.

    Returns:
        (..., hidden) in the tables' dtype; under autocast, promoted with the norm's, as PyTorch's norms are.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected, ids out of range
            included.

    Source: Devlin et al. 2018, "BERT", fig. 2.
    """
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither" if input_ids is None else "both"
        raise ValueError(f"input_ids, inputs_embeds: expected exactly one of the two, got {given}")
    if inputs_embeds is None:
        input_ids, table, padding_idx = _check_words(input_ids, word, padding_idx, word_scale, ln_weight)
        source = table if word_scale is None else ln_weight
        shape, input_ids, word = input_ids.shape, _flat_ids(input_ids, input_ids.shape), checks.rows(table)
    else:
        checks.float_tensor("inputs_embeds", inputs_embeds)
        if inputs_embeds.dim() == 0 or inputs_embeds.shape[-1] == 0:
            raise ValueError(
                f"inputs_embeds: expected shape (..., hidden), hidden >= 1, got {tuple(inputs_embeds.shape)}"
            )
        source, shape, padding_idx = inputs_embeds, inputs_embeds.shape[:-1], -1
        word = word_scale = None
        inputs_embeds = checks.rows(inputs_embeds)
    hidden = source.shape[-1]
    source_name = "word" if word_scale is None else "ln_weight"
    like = (source_name if inputs_embeds is None else "inputs_embeds", source, shape)
    position_ids, position = _check_table("position", position, "position_ids", position_ids, *like)
    token_type_ids, segment = _check_table("segment", segment, "token_type_ids", token_type_ids, *like)
    floats = word if word_scale is None else None
    trainable = inputs_embeds, floats, position, segment, ln_weight, ln_bias
    ordinary = not (ln_weight is None or ln_bias is None) and checks.are_ordinary(source, *trainable)
    if not ordinary:
        checks.float_tensor("ln_weight", ln_weight, source)
        checks.float_tensor("ln_bias", ln_bias, source)
    checks.shapes((hidden,), ln_weight=ln_weight, ln_bias=ln_bias)
    eps = checks.eps(eps)
    seed = checks.dropout(dropout_p, seed, offset, source)
    promoted = source.dtype
    if not ordinary or hidden <= NARROW:
        if checks.autocast_dtype(source) is not None:
            promoted = torch.promote_types(promoted, ln_weight.dtype)
        ln_weight, ln_bias = (checks.norm_vector(v, source.dtype) for v in (ln_weight, ln_bias))
        trainable = widened(source, inputs_embeds, floats, position, segment, ln_weight, ln_bias)
        inputs_embeds, floats, position, segment, ln_weight, ln_bias = trainable
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trainable)
    word = floats if word_scale is None else word
    tokens = input_ids, inputs_embeds, word, position_ids, position, token_type_ids, segment
    options = padding_idx, eps, float(dropout_p), seed, offset, word_scale
    inputs = EmbeddingInputs(*tokens, ln_weight, ln_bias, *options)
    if torch.compiler.is_compiling():
        y = embedding_fwd(*inputs, save)[0]
    elif save:
        y = EmbeddingFunction.apply(*inputs, save)
    else:
        y = dispatch.call("embedding_fwd", inputs.source, inputs, save)[0]
    return checks.as_dtype(y.view(*shape, hidden), promoted)


def _check_words(
    input_ids: object, word: object, padding_idx: int | None, word_scale: object, ln_weight: object
) -> tuple[Tensor, Tensor, int]:
    """(input_ids, word, padding_idx or -1), checked."""
    if word_scale is None:
        word = checks.float_tensor("word", word)
    else:
        like = checks.float_tensor("ln_weight", ln_weight)
        word = integer_table.check(word, word_scale, like.shape[-1] if like.dim() else 0, like)
    if word.dim() != 2 or 0 in word.shape:
        raise ValueError(f"word: expected shape (vocab, hidden), got {tuple(word.shape)}")
    vocab = word.shape[0]
    input_ids = checks.int_tensor("input_ids", input_ids, word)
    checks.ids_in_range("input_ids", "token id", input_ids, vocab, "a vocabulary")
    if padding_idx is None:
        return input_ids, word, -1
    if not isinstance(padding_idx, int) or not -vocab <= padding_idx < vocab:
        raise ValueError(f"padding_idx: expected an integer in [{-vocab}, {vocab}), got {padding_idx!r}")
    return input_ids, word, padding_idx % vocab


def _check_table(name, table, ids_name, ids, source_name, like, shape) -> tuple[Tensor | None, Tensor | None]:
    """(flat ids, table), checked."""
    if table is None and ids is None:
        return None, None
    if table is None or ids is None:
        given, missing = (ids_name, name) if table is None else (name, ids_name)
        raise ValueError(f"{missing}: expected a tensor, because {given} is given, got None")
    checks.float_tensor(name, table, like)
    if table.dim() != 2 or table.shape[0] == 0 or table.shape[1] != like.shape[-1]:
        raise ValueError(f"{name}: expected shape (rows, {like.shape[-1]}), got {tuple(table.shape)}")
    checks.same_dtype(name, table, source_name, like)
    checks.int_tensor(ids_name, ids, like)
    if ids.dim() > len(shape) or any(
        n not in (1, m) for n, m in zip(reversed(ids.shape), reversed(shape), strict=False)
    ):
        raise ValueError(
            f"{ids_name}: expected a shape that broadcasts to {tuple(shape)}, got {tuple(ids.shape)}"
        )
    checks.ids_in_range(ids_name, "id", ids, table.shape[0], f"a {name} table")
    return _flat_ids(ids, shape), checks.rows(table)


def _flat_ids(ids: Tensor, shape: torch.Size) -> Tensor:
    if ids.dtype is torch.int64 and ids.shape == shape and ids.is_contiguous():
        return ids.view(-1)
    return ids.to(torch.int64).expand(shape).reshape(-1).contiguous()  # reshape may keep strides
