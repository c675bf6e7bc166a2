"""What losses read of a model for a packed batch.

    logits                         (sequences, classes)
    token_logits                   (total, classes); of spans (total, 2), as start and as end
    vectors                        (sequences, width), of a sentence encoder
    states.L                       (total, hidden), the output of layer L
    first.L                        (sequences, hidden), its rows of first tokens
    queries.L, keys.L, values.L    (total, nheads, headdim), of layer L

L counts from 1; layer 0 is the embeddings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastbert.compression.distillation.bilstm import BiLstmForSequenceClassification
from fastbert.compression.distillation.sentences import SentenceVectors
from fastbert.finetuning.encoded import has_segments
from fastbert.layers.batch import PackedBatch
from fastbert.layers.taps import Taps
from fastbert.models.encoder import tapped
from fastbert.models.heads.masked_lm import MaskedLMModel
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.models.heads.token_classification import BertForTokenClassification

_QKV = ("queries", "keys", "values")
# What the logits of a model are of
TEXTS, TOKENS, SPANS, WORDS = "texts", "tokens", "spans", "words"
VECTORS, NOTHING = "vectors", "nothing"
_HEADS = (
    (MaskedLMModel, WORDS),
    (BertForTokenClassification, TOKENS),
    (BertForQuestionAnswering, SPANS),
    (BertForSequenceClassification, TEXTS),
    (BiLstmForSequenceClassification, TEXTS),
    (SentenceVectors, VECTORS),
)


def rows_of(model: Any) -> str:
    """What the logits of a model are of; `VECTORS` of a sentence encoder, `NOTHING` of another encoder."""
    return next((rows for head, rows in _HEADS if isinstance(model, head)), NOTHING)


def span_rows(logits: Tensor, ends: Tensor) -> Tensor:
    """(total, 2) scores of starts and ends -> (2 · sequences, longest): a start per row, then an end per row.

    Scores after a sequence's last token are -inf.

    Args:
        logits: the scores, packed.
        ends: (sequences + 1,) `cu_seqlens`, on the host.
    """
    parts = [*logits.split(ends.diff().tolist())]
    return pad_sequence(parts, batch_first=True, padding_value=-torch.inf).permute(2, 0, 1).flatten(0, 1)


def word_product(model: MaskedLMModel, encoded: Encoded) -> tuple[Tensor, Tensor, Tensor | None]:
    """(x, weight, bias) whose product x @ weight.T + bias is the logits of words of all tokens."""
    product = model.vocabulary_product()
    if product is None:
        raise ValueError(f"recipe: {type(model).__name__} has a quantised decoder; expected one of floats")
    return model.transform(encoded.hidden), *product


class Read(NamedTuple):
    """What was read of a model.

    Attributes:
        tensors: name -> tensor; see the module.
        encoded: what the model's head reads; None if it has no head.
        batch: the packed batch, if queries, keys or values were read.
    """

    tensors: dict[str, Tensor]
    encoded: Encoded | None = None
    batch: PackedBatch | None = None


class _Kept(Taps):
    """Keeps the queries, keys and values of some layers."""

    def __init__(self, wanted: Collection[str]) -> None:
        self.wanted = wanted
        self.tensors: dict[str, Tensor] = {}
        self.batch: PackedBatch | None = None

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sequences: PackedBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Taps`."""
        names = (f"{kind}.{layer + 1}" for kind in _QKV)
        found = {name: t for name, t in zip(names, (q, k, v), strict=True) if name in self.wanted}
        if found and sequences.bias is not None:
            raise ValueError(
                f"recipe: layer {layer + 1} adds more to attention's scores than queries and keys, such as "
                "scores of distances or a window, which losses of attention do not see"
            )
        self.tensors |= found
        self.batch = sequences
        return q, k, v, sequences.bias


def read(model: Any, inputs: dict[str, Any], wanted: Collection[str]) -> Read:
    """Run a model and keep what is wanted of it.

    Args:
        model: an encoder, a model with a head, a `BiLstmForSequenceClassification` or `SentenceVectors`.
        inputs: `input_ids` (total,), `cu_seqlens`, `max_seqlen` and, if there are any, `token_type_ids`.
        wanted: names; see the module.
    """
    ids, ends, longest = inputs["input_ids"], inputs["cu_seqlens"], inputs["max_seqlen"]
    if isinstance(model, BiLstmForSequenceClassification):
        return Read({"logits": model(ids, cu_seqlens=ends, max_seqlen=longest).logits})
    if isinstance(model, SentenceVectors):
        return Read({"vectors": model(ids, ends, longest)})
    types = inputs.get("token_type_ids") if has_segments(model.config) else None
    kinds = {name.partition(".")[0] for name in wanted}
    taps, states = _Kept(wanted), bool(kinds & {"states", "first"})
    with tapped(model.base_model, taps) if kinds & {*_QKV} else contextlib.nullcontext():
        if isinstance(model, TaskModel):
            encoded = model.encode(ids, None, types, None, None, None, None, states, ends, longest, None)
            found, packed = encoded.states, encoded.inputs
        else:
            given = {"cu_seqlens": ends, "max_seqlen": longest, "output_hidden_states": states}
            given |= {} if types is None else {"token_type_ids": types}
            encoded, (_, found, _, packed) = None, model(ids, **given, packed=True)
    tensors = taps.tensors
    for name in {"logits", "token_logits"} & {*wanted}:
        assert encoded is not None
        tensors[name] = model.logits(encoded)[0]
    for name in wanted:
        kind, _, number = name.partition(".")
        if kind in ("states", "first"):
            assert found is not None
            state = found[int(number)]
            tensors[name] = state if kind == "states" else packed.packing.first_rows(state)
    return Read(tensors, encoded, taps.batch)
