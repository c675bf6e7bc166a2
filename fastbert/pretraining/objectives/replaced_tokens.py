"""Replaced-token detection: a small model fills gaps, and the kept model finds the fillings (ELECTRA).

    generator      a masked LM; reads the masked text
    filled text    at each predicted position a token drawn from the generator's softmax, without a gradient
    discriminator  reads the filled text; predicts for each token whether it differs from the original

    loss = mean over the predicted tokens of -log p(token)
         + 50 · mean over all tokens of the binary cross-entropy of "differs"

So a drawn token that equals the original counts as original. 85% of the predicted tokens become [MASK] and
15% stay. Both models share one embedding block, its LayerNorm included, of the discriminator's embedding
size. A model with another hidden size has a projection of its own.

Google's code draws the positions with replacement, so it predicts slightly fewer. Here they are distinct.

Source: Clark et al. 2020, "ELECTRA", sec. 2, 3.2 and app. A; google-research/electra's run_pretraining.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastbert.models.base import class_of
from fastbert.models.config import EncoderConfig
from fastbert.models.electra import ElectraForMaskedLM, ElectraForPreTraining
from fastbert.models.heads.task_model import TaskModel
from fastbert.ops import checks
from fastbert.ops.linear_cross_entropy import CHUNK_BYTES
from fastbert.pretraining.masking import IGNORED, Masking
from fastbert.pretraining.objectives.masked import MaskedExample, Objective, encode
from fastbert.training.module import Losses, Results
from fastbert.training.stream import Batch
from fastbert.training.work import encoder_work, linear_work


@dataclass(frozen=True)
class ReplacedTokens(Objective):
    """Examples of replaced-token detection; see the module.

    Attributes:
        generator_share: the generator's width as a share of the discriminator's: 1/4 in ELECTRA-small and
            -large, 1/3 in -base.
        weight: weight of the discriminator's loss.
    """

    masking: Masking = field(default_factory=lambda: Masking(mask_share=0.85, random_share=0.0))
    generator_share: float = 1 / 4
    weight: float = 50.0

    of_model: ClassVar[tuple[str, ...]] = ("generator_share", "weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format.num_labels:
            raise ValueError(
                f"format: replaced tokens have no loss for the {self.format.num_labels} classes of a pair; "
                "expected a format without pairs"
            )
        if not 0 < self.generator_share <= 1:
            raise ValueError(f"generator_share: expected a number in (0, 1], got {self.generator_share!r}")
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"weight: expected a number >= 0, got {self.weight!r}")

    def collate(self, examples: Sequence[MaskedExample]) -> Batch:
        """Pack sequences."""
        batch = super().collate(examples)
        predicted = batch.counts["mlm"]
        counts = {"mlm": predicted, "rtd": int(batch.lengths.sum()), "replaced": predicted}
        return replace(batch, counts=counts)

    def model(self, config: EncoderConfig) -> ElectraForPreTraining:
        """A new discriminator.

        Raises:
            ValueError: the family has none.
        """
        found = class_of(config.family, "ForPreTraining")
        if found is None or not issubclass(found, ElectraForPreTraining):
            raise ValueError(
                f"config model_type: replaced tokens need electra's discriminator, got {config.model_type!r}"
            )
        return found(config)

    def losses(self, model: TaskModel) -> Losses:
        """The module that is trained; its generator is new."""
        return ReplacedTokenLosses(model, self.generator_share, self.weight)


def generator_config(config: EncoderConfig, share: float) -> EncoderConfig:
    """The generator's config: a discriminator's `config` with a share of the width of its layers.

    Hidden size, heads and intermediate size are that share; depth, embeddings and the size of a head stay. A
    generator that is narrower than a head has one head.

    Raises:
        ValueError: the share leaves no whole number of heads.
    """
    hidden = round(config.hidden_size * share)
    heads = max(1, hidden // config.head_dim)
    if hidden < 1 or (hidden > config.head_dim and hidden % config.head_dim):
        raise ValueError(
            f"generator_share: {share:g} of hidden_size {config.hidden_size} is {hidden}; "
            f"expected a multiple of the size of a head, {config.head_dim}"
        )
    return EncoderConfig.from_dict(
        config.to_dict(),
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=max(1, round(config.intermediate_size * share)),
        embedding_size=config.embedding_width,
    )


def drawn(logits: Tensor) -> Tensor:
    """(rows, classes) -> (rows,) int64: a class for each row, drawn with the probabilities of its softmax.

    The class is the largest of logit + Gumbel noise, where the noise is -log of an exponential variable from
    torch's generator. It needs one more array of the logits' shape, in float32 at least.

    Source: Gumbel 1954; Maddison et al. 2014, "A* Sampling", sec. 2.
    """
    # PyTorch promises that no exponential variable is 0, which would win against any logit
    noise = torch.empty_like(logits, dtype=checks.compute_dtype(logits)).exponential_().log_()
    return torch.sub(logits, noise, out=noise).argmax(-1)


class ReplacedTokenLosses(Losses):
    """The generator's masked tokens ("mlm") and the discriminator's replaced tokens ("rtd").

    Its `forward` also counts the predicted tokens that were replaced ("replaced"). That share falls as the
    generator learns; if it stays near 1, the generator does not learn.

    Args:
        model: the discriminator, from which fine-tuning starts.
        generator_share, weight: see `ReplacedTokens`.

    Attributes:
        generator: a masked LM. It shares the discriminator's embedding block.
    """

    def __init__(self, model: TaskModel, generator_share: float = 1 / 4, weight: float = 50.0) -> None:
        super().__init__()
        if not isinstance(model, ElectraForPreTraining):
            raise TypeError(f"model: expected an ElectraForPreTraining, got {type(model).__name__}")
        self.model = model
        self.generator = ElectraForMaskedLM(generator_config(model.config, generator_share))
        self.generator.base_model.embeddings = model.base_model.embeddings
        self.generator.tie_weights()
        self.exports = {"model": self.model, "generator": self.generator}
        self.weights = {"rtd": weight}

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """See `Losses.forward`."""
        labels, count = inputs["labels"], inputs["labelled"]
        encoded = encode(self.generator, inputs)
        losses = {"mlm": self.generator.lm_loss(encoded, labels, count)}
        hidden, originals = encoded.labelled(labels, count)
        tokens, right = self.fill(hidden, originals, measure)
        predicted = labels != IGNORED
        filled = inputs["input_ids"].masked_scatter(predicted, tokens)
        replaced = predicted & (filled != labels)
        encoded = encode(self.model, {**inputs, "input_ids": filled})
        logits, _ = self.model.logits(encoded)
        losses["rtd"] = self.model.loss(logits, replaced, encoded)
        if right is None:
            return losses, {}
        found = ((logits > 0) == replaced).sum()
        return losses, {"mlm": right, "rtd": found, "replaced": replaced.sum()}

    @torch.no_grad()
    def fill(self, hidden: Tensor, originals: Tensor, measure: bool) -> tuple[Tensor, Tensor | None]:
        """The tokens that the generator draws at the predicted positions.

        The logits and their noise are made for as many rows at a time as fit `CHUNK_BYTES`.

        Args:
            hidden: (predicted, hidden), the generator's last hidden states.
            originals: (predicted,) int64.
            measure: whether to count.

        Returns:
            (predicted,) int64, and how many originals are the generator's most probable token; None unless
            `measure`.
        """
        budget = CHUNK_BYTES.get(hidden.device.type, 2**27)
        # a number has at most 4 bytes in the logits and 4 in the noise; twice that in float64
        rows = max(1, budget // (8 * self.generator.config.vocab_size))
        tokens, right = [], []
        for some, truth in zip(hidden.split(rows), originals.split(rows), strict=True):
            logits = self.generator.lm_logits(some)
            tokens.append(drawn(logits))
            if measure:
                right.append((logits.argmax(-1) == truth).sum())
        return torch.cat(tokens), torch.stack(right).sum() if measure else None

    def work(self, batch: Batch) -> float:
        """See `Losses.work`. The generator's logits count once: a loss and draws from them share them."""
        total, found = int(batch.lengths.sum()), 0.0
        for model in (self.generator, self.model):
            config = model.config
            hidden, width = config.hidden_size, config.embedding_width
            found += encoder_work(batch.lengths, hidden, config.num_hidden_layers, config.intermediate_size)
            found += linear_work(total, width, hidden) if width != hidden else 0.0
            if model is self.model:
                found += linear_work(total, hidden, hidden) + linear_work(total, hidden, 1)
            else:
                predicted = batch.counts["mlm"]
                found += linear_work(predicted, hidden, width)
                found += linear_work(predicted, width, config.vocab_size)
        return found
