"""The modules that are embeddings; `embed.py` has their mathematics."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fastbert.layers.bottleneck import norm_of
from fastbert.layers.embed import dropped_rows, embed
from fastbert.layers.factored import FactoredTable
from fastbert.layers.linear import apply_linear
from fastbert.layers.modules import changed, plain_dropout, watched
from fastbert.layers.packing import Packing, follows, with_neighbours
from fastbert.layers.quantized_table import QuantizedEmbedding
from fastbert.ops import checks
from fastbert.ops.layer_norm import layer_norm


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
                config.first_position - 1 if family.position_padding_idx else None,
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
        x = dropped_rows(self._sum(*ids), rate, seed)
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
        return self.dropout(x) if packing is None else dropped_rows(x, self.dropout_rate(), seed)


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
