"""Replaced-token detection: a small model fills gaps, and the kept model finds the fillings (ELECTRA).

    generator      a masked LM; reads the masked text
    filled text    at each predicted position a token drawn from the generator's softmax, without a gradient
    discriminator  reads the filled text; predicts for each token whether it differs from the original

    loss = mean over the predicted tokens of -log p(token)
         + 50 · mean over all tokens of the binary cross-entropy of "differs"

So a drawn token that equals the original counts as original. 85% of the predicted tokens become [MASK] and
15% stay; DeBERTa-v3 masks all of them. What the models share of their embeddings (E: table of words):

    shared         one embedding block, its LayerNorm included, of the discriminator's embedding size; a model
                   with another hidden size has a projection of its own (ELECTRA)
    disentangled   E of the discriminator = E of the generator, without a gradient, + a trained difference
                   that starts at 0; the rest is each model's own (DeBERTa-v3)
    separate       nothing

So with "disentangled" the generator's loss alone trains the generator's table. A checkpoint's model has the
sum as its table.

Google's code draws the positions with replacement, so it predicts slightly fewer. Here they are distinct.
Microsoft's code takes the generator's step before the discriminator reads its table, and clips the gradients
of each model alone. Here both models take one step together.

Source: Clark et al. 2020, "ELECTRA", sec. 2, 3.2 and app. A; google-research/electra's run_pretraining.py; He
et al. 2021, "DeBERTaV3", sec. 3.3; microsoft/DeBERTa's rtd_task.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fastbert.models.base import class_of
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.masked_lm import MaskedLMModel
from fastbert.models.heads.replaced_tokens import ReplacedTokensModel
from fastbert.models.heads.task_model import TaskModel
from fastbert.ops import checks
from fastbert.ops.linear_cross_entropy import CHUNK_BYTES
from fastbert.pretraining.masking import IGNORED, Masking
from fastbert.pretraining.objectives.masked import MaskedExample, Objective, encode
from fastbert.runtime import expected
from fastbert.training.module import Losses, Results
from fastbert.training.stream import Batch
from fastbert.training.work import encoder_work, linear_work

EMBEDDINGS = ("shared", "disentangled", "separate")


@dataclass(frozen=True)
class ReplacedTokens(Objective):
    """Examples of replaced-token detection; see the module.

    Attributes:
        generator_share: the generator's width as a share of the discriminator's: 1/4 in ELECTRA-small and
            -large, 1/3 in -base, 1 in DeBERTa-v3.
        generator_depth: the generator's number of layers as a share of the discriminator's: 1 in ELECTRA, 1/2
            in DeBERTa-v3.
        embeddings: what both models share of them: "shared", "disentangled" or "separate"; see the module.
        weight: weight of the discriminator's loss.
    """

    masking: Masking = field(default_factory=lambda: Masking(mask_share=0.85, random_share=0.0))
    generator_share: float = 1 / 4
    generator_depth: float = 1.0
    embeddings: str = "shared"
    weight: float = 50.0

    of_model: ClassVar[tuple[str, ...]] = ("generator_share", "generator_depth", "embeddings", "weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_no_pairs("replaced tokens")
        shares = {"generator_share": self.generator_share, "generator_depth": self.generator_depth}
        expected.numbers("in (0, 1]", **shares)
        expected.one_of(EMBEDDINGS, embeddings=self.embeddings)
        expected.numbers(">= 0", weight=self.weight)

    def collate(self, examples: Sequence[MaskedExample]) -> Batch:
        """Pack sequences."""
        batch = super().collate(examples)
        predicted = batch.counts["mlm"]
        counts = {"mlm": predicted, "rtd": int(batch.lengths.sum()), "replaced": predicted}
        return replace(batch, counts=counts)

    def model(self, config: EncoderConfig) -> ReplacedTokensModel:
        """A new discriminator.

        Raises:
            ValueError: the family has none.
        """
        for task in ("ForReplacedTokens", "ForPreTraining"):
            found = class_of(config.family, task)
            if found is not None and issubclass(found, ReplacedTokensModel):
                return found(config)
        raise ValueError(
            "config model_type: replaced tokens need a family with a discriminator, electra or deberta-v2; "
            f"got {config.model_type!r}"
        )

    def losses(self, model: TaskModel) -> Losses:
        """The module that is trained; its generator is new."""
        sizes = self.generator_share, self.generator_depth
        return ReplacedTokenLosses(model, *sizes, self.embeddings, self.weight)


def generator_config(config: EncoderConfig, share: float, depth: float = 1.0) -> EncoderConfig:
    """The generator's config: a discriminator's `config` with a share of the width and number of its layers.

    Hidden size, heads and intermediate size are the share of the width; embeddings and the size of a head
    stay. A generator that is narrower than a head has one head. It has at least one layer.

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
        num_hidden_layers=max(1, round(config.num_hidden_layers * depth)),
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
        model: the discriminator, from which fine-tuning starts. With "disentangled" its table of words
            becomes the generator's, and holds the difference from then on.
        generator_share, generator_depth, embeddings, weight: see `ReplacedTokens`.

    Attributes:
        generator: a masked LM.

    Raises:
        TypeError: the model is no discriminator.
        ValueError: the models would share an embedding block that does not fit both.
    """

    def __init__(
        self,
        model: TaskModel,
        generator_share: float = 1 / 4,
        generator_depth: float = 1.0,
        embeddings: str = "shared",
        weight: float = 50.0,
    ) -> None:
        super().__init__()
        if not isinstance(model, ReplacedTokensModel):
            raise TypeError(f"model: expected a discriminator, got {type(model).__name__}")
        self.model, self.embeddings = model, embeddings
        config = generator_config(model.config, generator_share, generator_depth)
        self.generator = cast(type[MaskedLMModel], class_of(config.family, "ForMaskedLM"))(config)
        if embeddings == "shared":
            own, other = (m.base_model.embeddings for m in (model, self.generator))
            if [p.shape for p in own.parameters()] != [p.shape for p in other.parameters()]:
                raise ValueError(
                    f"embeddings: shared ones of {config.model_type} have the hidden size of both models; "
                    f"expected generator_share 1, got {generator_share:g}"
                )
            self.generator.base_model.embeddings = own
            self.generator.tie_weights()
        elif embeddings == "disentangled":
            with torch.no_grad():
                own, other = (m.get_input_embeddings().weight for m in (model, self.generator))
                other.copy_(own)
                own.zero_()
        self.exports = {"model": self.model, "generator": self.generator}
        self.weights = {"rtd": weight}

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """See `Losses.forward`."""
        labels, count = inputs["labels"], inputs["labelled"]
        encoded = encode(self.generator, inputs)
        losses = {"mlm": self.generator.vocabulary_loss(encoded, labels, count)}
        hidden, originals = encoded.labelled(labels, count)
        tokens, right = self.fill(hidden, originals, measure)
        predicted = labels != IGNORED
        filled = inputs["input_ids"].masked_scatter(predicted, tokens)
        replaced = predicted & (filled != labels)
        encoded = encode(self.model, {**inputs, **self.embedded(filled)})
        logits, _ = self.model.logits(encoded)
        losses["rtd"] = self.model.loss(logits, replaced, encoded)
        if right is None:
            return losses, {}
        found = ((logits > 0) == replaced).sum()
        return losses, {"mlm": right, "rtd": found, "replaced": replaced.sum()}

    def embedded(self, ids: Tensor) -> dict[str, Tensor | None]:
        """What the discriminator reads of the ids (total,): the ids, or the rows of the sum of two tables."""
        if self.embeddings != "disentangled":
            return {"input_ids": ids}
        own, other = (m.get_input_embeddings() for m in (self.model, self.generator))
        return {"input_ids": None, "inputs_embeds": other(ids).detach() + own(ids)}

    def exported(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Losses.exported`: the discriminator's table is the sum of both."""
        if self.embeddings != "disentangled":
            return state
        table = f"{self.model.base_model_prefix}.{self.model.family.word_table}.weight"
        own = f"model.{table}"
        return {**state, own: state[f"generator.{table}"] + state[own]}

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
            layers = config.num_hidden_layers * (1 - model.layerdrop)
            found += encoder_work(batch.lengths, hidden, layers, config.intermediate_size)
            found += linear_work(total, width, hidden) if width != hidden else 0.0
            if model is self.model:
                found += linear_work(total, hidden, hidden) + linear_work(total, hidden, 1)
            else:
                predicted = batch.counts["mlm"]
                found += linear_work(predicted, hidden, width)
                found += linear_work(predicted, width, config.vocab_size)
        return found
