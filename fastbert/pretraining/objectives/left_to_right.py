"""Left-to-right language modelling: each token predicts the next one. The ablation of BERT's paper.

    loss = mean over the tokens that have a next one of -log p(next token | tokens up to here)

Every layer is causal. The predictions go through the masked-LM head. The config that is saved says
`is_decoder`, so that the model stays causal in fine-tuning, here and in transformers.

The paper's "LTR & No NSP" has a standard left-to-right LM, "our input representation", and no sentence pairs.
So sequences are BERT's: [CLS] first, [SEP] after each segment, token types. [CLS] predicts the first token,
and nothing predicts [CLS]. [SEP] is predicted like any other token, and if it is not the last one, it
predicts what comes after it. The last token of a sequence predicts nothing.

In fine-tuning the first token sees only itself. BERT's heads for sequences read the first token, so they
learn nothing from a left-to-right model; read its last token instead. Heads for tokens work as they are.

Source: Devlin et al. 2018, "BERT", sec. 5.1, "LTR & No NSP".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastbert.models.base import PreTrainedModel
from fastbert.models.config import EncoderConfig, as_config
from fastbert.pretraining.formats import Example
from fastbert.pretraining.masking import IGNORED, Masked, Masking
from fastbert.pretraining.objectives.masked import MaskedExample, MaskedLosses, Objective
from fastbert.training.draws import Draws


@dataclass(frozen=True)
class LeftToRight(Objective):
    """Examples of left-to-right language modelling; see the module.

    Attributes:
        format: which sentences make a sequence; one without classes of pairs.
        masking: the default; nothing is masked.
        seed: nothing is drawn for a sequence.

    Raises:
        ValueError: naming the attribute.
    """

    causal: ClassVar[bool] = True
    token_loss: ClassVar[str] = "left_to_right"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format.num_labels:
            raise ValueError(
                "format: expected one without classes of pairs, which the first token would have to tell: "
                f"left to right it sees only itself; got {type(self.format).__name__}"
            )
        if self.masking != Masking():
            raise ValueError(
                f"masking: nothing is masked left to right; expected the default, got {self.masking}"
            )

    def mask(self, example: Example, draws: Draws) -> MaskedExample:
        """The next token of each token as its label; nothing is masked or drawn."""
        ids = np.asarray(example.ids).astype(np.int64)
        labels = np.full(len(ids), IGNORED)
        labels[:-1] = ids[1:]
        return MaskedExample(
            Masked(ids, labels, np.empty((0, 2), np.int64)), example.token_types, example.label
        )

    def model(self, config: EncoderConfig) -> PreTrainedModel:
        """A new causal model of the config's family.

        Raises:
            ValueError: a family that is never causal in transformers.
        """
        return super().model(EncoderConfig.from_dict(as_config(config).to_dict(), is_decoder=True))

    def losses(self, model: PreTrainedModel) -> MaskedLosses:
        """The module that is trained. The model becomes causal for good: its config says `is_decoder`."""
        before = model.config.is_decoder
        model.config.is_decoder = True
        try:
            model.config.validate()
        except ValueError:
            model.config.is_decoder = before
            raise
        return super().losses(model)
