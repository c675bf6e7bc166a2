"""What runs before the layers: the embeddings, and MPNet's relative attention bias."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, ClassVar, TypeGuard, cast

import torch
from torch import Tensor, nn

from fastbert.layers.bottleneck import norm_of
from fastbert.layers.factored import FactoredTable
from fastbert.layers.linear import apply_linear
from fastbert.layers.modules import calls_all, changed, is_plain, plain_dropout, watched
from fastbert.layers.packing import Packing, follows, with_neighbours
from fastbert.layers.parts import HOOKS
from fastbert.layers.quantized_table import QuantizedEmbedding
from fastbert.ops import checks
from fastbert.ops.attention_relative import RelativeScores
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.embedding import EmbeddingInputs, embedding
from fastbert.ops.layer_norm import NARROW, layer_norm
from fastbert.runtime import dispatch


def _untrained_row(module: nn.Embedding) -> Tensor:
    """The table, whose padding row gets no gradient, as in nn.Embedding.

    It serves the tables whose padding row is no argument of the op.
    """
    weight, row = module.weight, module.padding_idx
    if row is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    rows = torch.arange(weight.shape[0], device=weight.device).unsqueeze(1)
    return torch.where(rows == row, weight.detach(), weight)


def table(rows: int, width: int, padding_idx: int | None = None) -> nn.Embedding:
    """An uninitialised embedding table.

    On the meta device PyTorch's own initialisation would import slow modules (docs/notes/torch.md).
    """
    return nn.Embedding(rows, width, padding_idx, _weight=torch.empty(rows, width))


def _words(config: Any, width: int) -> nn.Embedding:
    """An uninitialised table of words, as config word_embedding_rank has it."""
    rank, size = config.word_embedding_rank, config.vocab_size
    if rank is None:
        return table(size, width, config.pad_token_id)
    return FactoredTable(size, width, rank, config.pad_token_id)


def _is_plain_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether the module only looks up rows, in forward and backward."""
    return is_plain(module, nn.Embedding) and not (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    )


def embed(
    root: Any,
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    token_type_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Packed ids (total,) or inputs_embeds (total, width) -> (total, width): word + position + segment
    embeddings, LayerNorm, dropout (Devlin et al. 2018, sec. 3 and fig. 2).

    Args:
        root: the module that holds the tables and the norm under HuggingFace's names.
        seed, dropout_p: the dropout's seed and probability; its call site is 0.
    """
    modules = root._modules
    modern = "tok_embeddings" in modules
    word = modules["tok_embeddings" if modern else "word_embeddings"]
    norm = modules["norm" if modern else "LayerNorm"]
    position, segment = modules.get("position_embeddings"), modules.get("token_type_embeddings")
    projection = modules.get("embed_proj")
    factored, integers = isinstance(word, FactoredTable), is_plain(word, QuantizedEmbedding)
    if factored and inputs_embeds is None:
        input_ids, inputs_embeds = None, word(input_ids)
    tables = [m for m in (None if factored or integers else word, position, segment) if m is not None]
    plain = projection is None and all(map(_is_plain_table, tables))
    if plain and is_plain(norm, nn.LayerNorm) and norm.weight is not None:
        return embedding(
            input_ids,
            word.weight,
            norm.weight,
            torch.zeros_like(norm.weight) if norm.bias is None else norm.bias,
            position_ids=None if position is None else position_ids,
            position=None if position is None else _untrained_row(position),
            token_type_ids=None if segment is None else token_type_ids,
            segment=None if segment is None else segment.weight,
            inputs_embeds=inputs_embeds,
            padding_idx=word.padding_idx,
            eps=norm.eps,
            dropout_p=dropout_p,
            seed=seed,
            offset=0,
            word_scale=word.scale if integers else None,
        )
    x = word(input_ids) if inputs_embeds is None else inputs_embeds
    if segment is not None:
        x = x + segment(token_type_ids)
    if position is not None:
        x = x + position(position_ids)
    if projection is not None:
        x = projection(x)
    return _dropped(norm(x), dropout_p, seed)


def _dropped(x: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor:
    if dropout_p == 0:
        return x
    assert seed is not None
    return x * (keep_mask_2d(seed, 0, x.shape[0], x.shape[1], dropout_p).to(x.dtype) / (1.0 - dropout_p))


# The modules of embeddings without segments, and with them.
_NAMES = [
    ("word_embeddings", "position_embeddings", *segments, "LayerNorm", "dropout")
    for segments in ((), ("token_type_embeddings",))
]
_KINDS = [[*[nn.Embedding] * (len(names) - 2), nn.LayerNorm, nn.Dropout] for names in _NAMES]


def launched(
    root: nn.Module,
    input_ids: Tensor | None,
    position_ids: Tensor,
    token_type_ids: Tensor | None,
    inputs_embeds: Tensor | None,
) -> Tensor | None:
    """What `embed` returns for packed ids in inference without dropout, straight from the launcher.

    None if anything is unusual; then the caller calls `embed`. `root` may be of any class, whose forward the
    caller checks. The ids must be in range, as in checked inputs.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    if input_ids is None or inputs_embeds is not None:
        return None
    names, kinds = (each[token_type_ids is not None] for each in (_NAMES, _KINDS))
    modules = [*map(root._modules.get, names)]
    if [*map(type, modules)] != kinds or len(root._modules) != len(modules):
        return None
    held = [*map(vars, modules)]
    if (
        any(chain.from_iterable(map(HOOKS, (vars(root), *held))))
        or any("forward" in own for own in (vars(root), *held))
        or any(own["max_norm"] is not None for own in held[:-2])
        or calls_all()
    ):
        return None
    *tables, norm = (own["_parameters"].get("weight") for own in held[:-1])
    bias, width, eps = held[-2]["_parameters"]["bias"], held[-2]["normalized_shape"], held[-2]["eps"]
    ids = [input_ids, position_ids, token_type_ids][: len(tables)]
    sizes = [(own["num_embeddings"], *width) for own in held[:-2]]
    if width <= (NARROW,) or not checks.are_plain(
        [*tables, norm, bias, *ids],
        [getattr(norm, "dtype", torch.int64)] * (len(tables) + 2) + [torch.int64] * len(ids),
        [*sizes, width, width, *[input_ids.shape] * len(ids)],
    ):
        return None
    if len(tables) < 3:
        tables.append(None)
    word, position, segment = tables
    ids_and_tables = input_ids, None, word, position_ids, position, token_type_ids, segment
    inputs = EmbeddingInputs(*ids_and_tables, norm, bias, -1, checks.eps(eps), 0.0, None, 0)
    return dispatch.launcher("embedding_fwd", word.device, word.dtype)(inputs, None)[0]


class Embeddings(nn.Module):
    """Word + position + segment embeddings, LayerNorm, dropout (Devlin et al. 2018, sec. 3 and fig. 2).

    Args:
        config: the model's `EncoderConfig`, which says whether there is a table of positions.

    Attributes:
        dropped_by: name of the dropout.
        reads_neighbours: whether `forward` takes the places of the tokens.
    """

    _modules: dict[str, Any]
    dropped_by: ClassVar[str] = "dropout"
    reads_neighbours: ClassVar[bool] = False

    def __init__(self, config: Any):
        super().__init__()
        family, width = config.family, config.embedding_width
        self.word_embeddings = _words(config, width)
        if config.has_positions:
            self.position_embeddings = table(
                config.max_position_embeddings,
                width,
                config.pad_token_id if family.position_padding_idx else None,
            )
        if config.has_segments:
            self.token_type_embeddings = table(config.type_vocab_size, width)
        normed = config.hidden_size if family.projects_first else width
        self.LayerNorm = nn.LayerNorm(normed, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.pad_positions = family.pad_positions

    def dropout_rate(self) -> float:
        """The probability of the dropout module now; 0 if another module, which is called, replaces it."""
        module = self._modules[self.dropped_by]
        return module.p if isinstance(module, nn.Dropout) and module.training else 0.0

    def gap(self) -> str | None:
        """Why the modules must be called on a padded batch; None if our op may compute everything."""
        if watched(self):
            return "embeddings has hooks or another forward"
        for name, module in self._modules.items():
            if name == self.dropped_by:
                if not plain_dropout(module):
                    return "embeddings.dropout is not a plain dropout"
            elif (reason := changed(module)) is not None:
                return f"embeddings.{name} {reason}"
            elif getattr(module, "scale_grad_by_freq", False):
                return f"embeddings.{name} counts masked tokens too (scale_grad_by_freq)"
        return None

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """Packed ids (total,) or inputs_embeds (total, width) -> (total, width).

        A padded batch, (batch, seqlen) or (batch, seqlen, width), goes through the modules one by one, as in
        transformers; position and segment ids may then be missing.
        """
        if (input_ids is None or input_ids.dim() == 1) and (
            inputs_embeds is None or inputs_embeds.dim() == 2
        ):
            ids = (input_ids, position_ids, token_type_ids, inputs_embeds)
            return embed(self, *ids, seed, self.dropout_rate())
        x = self._sum(input_ids, position_ids, token_type_ids, inputs_embeds)
        return self.dropout(self.LayerNorm(x))

    def _sum(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        """The sum of the embeddings, by modules; see `forward`."""
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        at = self._modules.get("position_embeddings")
        if at is not None and position_ids is None:
            position_ids = self._positions(x, input_ids)
        if "token_type_embeddings" in self._modules:
            if token_type_ids is None:
                token_type_ids = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
            x = x + self.token_type_embeddings(token_type_ids)
        x = x if at is None else x + at(position_ids)
        projection = self._modules.get("embed_proj")
        return x if projection is None else projection(x)

    def _positions(self, x: Tensor, input_ids: Tensor | None) -> Tensor:
        """Positions (batch or 1, seqlen) as the family counts them."""
        pad = self.position_embeddings.padding_idx if self.pad_positions else None
        if pad is not None and input_ids is not None:
            real = input_ids.ne(pad).long()
            return real.cumsum(1) * real + pad
        start = 0 if pad is None else pad + 1
        return torch.arange(start, start + x.shape[1], device=x.device)[None]


class DroppedEmbeddings(Embeddings):
    """Embeddings that are dropped before the norm, and whose words config rescale_embeddings may multiply.

    Args:
        config: the model's `EncoderConfig`.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.factor = config.hidden_size**0.5 if config.rescale_embeddings else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """See `Embeddings`."""
        if self.factor is not None:
            words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
            input_ids, inputs_embeds = None, words * self.factor
        ids, rate = (input_ids, position_ids, token_type_ids, inputs_embeds), self.dropout_rate()
        dims = 1 if inputs_embeds is None else 2
        if dims < next(t.dim() for t in (inputs_embeds, input_ids) if t is not None):
            return self.LayerNorm(self.dropout(self._sum(*ids)))
        if rate == 0.0:
            return embed(self, *ids, None, 0.0)
        norm = self.LayerNorm
        x = _dropped(self._sum(*ids), rate, seed)
        return cast(Tensor, layer_norm(x, norm.weight, norm.bias, eps=norm.eps))


class TokenEmbeddings(Embeddings):
    """Word embeddings, LayerNorm, dropout: of a family whose layers know the positions.

    Args:
        config: the model's `EncoderConfig`.
    """

    dropped_by = "drop"

    def __init__(self, config: Any):
        nn.Module.__init__(self)
        self.tok_embeddings = _words(config, config.hidden_size)
        self.norm = config.norm(config.hidden_size)
        self.drop = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """As `Embeddings.forward`; `position_ids` and `token_type_ids` are not read."""
        tokens, norm = self.tok_embeddings, self.norm
        flat = input_ids is not None and input_ids.dim() == 1
        if not (flat or (inputs_embeds is not None and inputs_embeds.dim() == 2)):
            return self.drop(norm(tokens(input_ids) if inputs_embeds is None else inputs_embeds))
        return embed(self, input_ids, None, None, inputs_embeds, seed, self.dropout_rate())


class TrigramEmbeddings(Embeddings):
    """MobileBERT's embeddings: three adjacent words, a linear layer, position, segment, norm, dropout.

    A neighbour that is masked, or of another sequence, counts as zeros. So a sequence has the same embeddings
    in any batch; transformers reads a padding token after the last one of a padded sequence.

    Args:
        config: the model's `EncoderConfig`. Its trigram_input says whether the neighbours are read.

    Source: Sun et al. 2020, "MobileBERT", sec. 3.2, "Embedding Factorization".
    """

    reads_neighbours = True

    def __init__(self, config: Any):
        nn.Module.__init__(self)
        hidden = config.hidden_size
        self.word_embeddings = table(config.vocab_size, config.embedding_width, config.pad_token_id)
        self.position_embeddings = table(config.max_position_embeddings, hidden)
        self.token_type_embeddings = table(config.type_vocab_size, hidden)
        # `embedding_transformation` is put here by the model
        self.LayerNorm = norm_of(config, hidden)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.trigram_input = config.trigram_input
        self.transforms = config.trigram_input or config.embedding_width != hidden

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        seed: Tensor | None = None,
        packing: Packing | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """As `Embeddings.forward`.

        Args:
            packing: the places of packed tokens.
            kept: (batch, seqlen) bool, which tokens of a padded batch are not masked; None for all.

        Raises:
            TypeError: the model computes in float16, whose range its hidden states exceed.
        """
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if torch.float16 in (x.dtype, checks.autocast_dtype(x)):
            raise TypeError(
                "model: expected float32, float64 or bfloat16, got float16, whose range MobileBERT's hidden "
                "states exceed"
            )
        if self.trigram_input:
            x = with_neighbours(x, follows(packing, kept, x))
        if self.transforms:
            dense: Any = self.embedding_transformation
            x = dense(x) if packing is None else apply_linear(dense, x)
        if position_ids is None:
            position_ids = torch.arange(x.shape[-2], device=x.device)[None]
        if token_type_ids is None:
            token_type_ids = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
        x = x + self.position_embeddings(position_ids) + self.token_type_embeddings(token_type_ids)
        x = self.LayerNorm(x)
        return self.dropout(x) if packing is None else _dropped(x, self.dropout_rate(), seed)


class WordEmbeddings(nn.Embedding):
    """Word embeddings alone: of a family whose layers know the positions and norm first.

    Args:
        config: the model's `EncoderConfig`.
    """

    def __init__(self, config: Any):
        size, width = config.vocab_size, config.hidden_size
        super().__init__(size, width, config.pad_token_id, _weight=torch.empty(size, width))

    def gap(self) -> str | None:
        """See `Embeddings`."""
        return "the table of words has hooks or another forward" if watched(self) else None

    def dropout_rate(self) -> float:
        """See `Embeddings`; nothing is dropped."""
        return 0.0

    def forward(self, input_ids: Tensor, *_: Any) -> Tensor:
        """Ids of any shape -> (…, hidden); nothing else is read."""
        return super().forward(input_ids)


# The classes of embeddings that say themselves whether the modules must be called
OWN = Embeddings, WordEmbeddings, QuantizedEmbedding


def relative_bias(
    table: nn.Module, seqlen: int, device: torch.device, positions: Tensor | None = None
) -> RelativeScores:
    """MPNet's bucketed relative attention bias (Raffel et al. 2019, sec. 2.1; Song et al. 2020).

    Args:
        table: embedding of 32 buckets, (32, nheads).
        seqlen: S.
        positions: (batch, S) positions of the packed tokens if they are not consecutive, else None.
    """
    # Larger distances share the last buckets
    reach = 128 if positions is not None else max(seqlen - 1, 0)
    distance = torch.arange(-reach, reach + 1, device=device)  # key - query
    # half of the 32 buckets per direction: 8 exact, 8 logarithmic up to a distance of 128
    size = distance.abs()
    far = 8 + (torch.log(size.clamp_min(1).float() / 8) / math.log(128 / 8) * 8).long()
    bucket = torch.where(size < 8, size, far.clamp_max(15)) + 16 * (distance > 0)
    rows = table(torch.arange(32, device=device))
    return RelativeScores(bucket.to(torch.int32), bias=rows.t(), positions=positions)
