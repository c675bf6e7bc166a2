"""Left-to-right language modelling: each token predicts the next one. The ablation of BERT's paper.

Right to left is the same over reversed sequences: each token predicts the token on its left. The two models
beside each other are as in ELMo.

    loss = mean over all tokens but the last of -log p(next token | tokens up to here)

Every layer is causal. The predictions go through the masked-LM head. The saved config has `is_decoder` true,
so that the model stays causal in fine-tuning, here and in transformers.

The paper's "LTR & No NSP" has a standard left-to-right LM, "our input representation", and no sentence pairs.
So sequences are BERT's: [CLS] first, [SEP] after each segment, token types. [CLS] predicts the first token,
and nothing predicts [CLS]. [SEP] is predicted like any other token; unless it is the last token, it predicts
the token after it. The last token of a sequence predicts nothing.

In fine-tuning the first token attends only to itself. BERT's heads for sequences read the first token, so
they learn nothing from a left-to-right model; `fastbert finetune` reads its last token instead. Heads for
tokens need no change.

A right-to-left model takes each sequence reversed, and so its first position is the last token. Its saved
config has `right_to_left` true besides. `fastbert finetune` reads it beside a left-to-right model only.

Source: Devlin et al. 2018, "BERT", sec. 5.1, "LTR & No NSP".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fastbert.models.config import EncoderConfig, as_config
from fastbert.models.heads.task_model import TaskModel
from fastbert.pretraining.formats import Example
from fastbert.pretraining.masking import IGNORED, Masked, Masking
from fastbert.pretraining.objectives.masked import MaskedExample, Objective
from fastbert.training.draws import Draws
from fastbert.training.module import Losses


@dataclass(frozen=True)
class LeftToRight(Objective):
    """Examples of left-to-right language modelling; see the module.

    Attributes:
        format: which sentences make a sequence; must have no classes of pairs.
        masking: must be the default; nothing is masked.
        seed: unused, as nothing is drawn for a sequence.

    Raises:
        ValueError: naming the attribute.
    """

    causal: ClassVar[bool] = True
    token_loss: ClassVar[str] = "left_to_right"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format.num_labels:
            raise ValueError(
                "format: expected one without classes of pairs, because left to right the first token, which "
                f"would predict the class, attends only to itself; got {type(self.format).__name__}"
            )
        if self.masking != Masking():
            raise ValueError(
                f"masking: nothing is masked left to right; expected the default, got {self.masking}"
            )

    def mask(self, example: Example, draws: Draws) -> MaskedExample:
        """Label each token with the next token; nothing is masked or drawn."""
        ids = np.asarray(example.ids).astype(np.int64)
        labels = np.full(len(ids), IGNORED)
        labels[:-1] = ids[1:]
        return MaskedExample(
            Masked(ids, labels, np.empty((0, 2), np.int64)), example.token_types, example.label
        )

    def model(self, config: EncoderConfig) -> TaskModel:
        """A new causal model of the config's family.

        Raises:
            ValueError: the family is never causal in transformers.
        """
        return super().model(EncoderConfig.from_dict(as_config(config).to_dict(), is_decoder=True))

    def losses(self, model: TaskModel) -> Losses:
        """The module that is trained. Sets the config's `is_decoder`, so the model stays causal."""
        before = model.config.is_decoder
        model.config.is_decoder = True
        try:
            model.config.validate()
        except ValueError:
            model.config.is_decoder = before
            raise
        return super().losses(model)


@dataclass(frozen=True)
class RightToLeft(LeftToRight):
    """`LeftToRight` over reversed sequences; see the module."""

    token_loss: ClassVar[str] = "right_to_left"

    def mask(self, example: Example, draws: Draws) -> MaskedExample:
        """Reverse the sequence, and label each token with the token on its left."""
        ids, types = (np.ascontiguousarray(x[::-1]) for x in (example.ids, example.token_types))
        return super().mask(replace(example, ids=ids, token_types=types), draws)

    def losses(self, model: TaskModel) -> Losses:
        """The module that is trained. Sets the config's `is_decoder` and `right_to_left`."""
        made = super().losses(model)
        model.config.update({"right_to_left": True})
        return made
