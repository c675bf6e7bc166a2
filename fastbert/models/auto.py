"""The Auto classes: they choose the family's class by the config's `model_type`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastbert.models.base import PreTrainedModel, class_of
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.multiple_choice import BertForMultipleChoice
from fastbert.models.heads.next_sentence import BertForNextSentencePrediction
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.models.heads.token_classification import BertForTokenClassification


class AutoConfig:
    """Reads the config of any family: `AutoConfig.from_pretrained(path)`; there are no instances."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("AutoConfig: use from_pretrained(…) or for_model(model_type, …)")

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> EncoderConfig:
        """`EncoderConfig.from_pretrained`, under transformers' name."""
        return EncoderConfig.from_pretrained(path, **kwargs)

    @classmethod
    def for_model(cls, model_type: str, **kwargs: Any) -> EncoderConfig:
        """A config of a family with that family's defaults; `kwargs` override them."""
        return EncoderConfig(model_type, **kwargs)


class AutoTaskModel(PreTrainedModel):
    """Chooses the family's class by `model_type`: `from_pretrained(path)`, `from_config(config)`.

    If all these classes extend one of BERT's, so does the Auto class: for a type checker `from_pretrained`
    returns an instance of the class on which it is called.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise TypeError(f"{type(self).__name__}: use from_pretrained(path) or from_config(config)")

    @classmethod
    def class_for(cls, config: EncoderConfig) -> type[PreTrainedModel]:
        """The class of `config`'s family.

        Raises:
            ValueError: the family has no such head.
        """
        found = class_of(config.family, cls.task)
        if found is None:
            have = [name for name, family in FAMILIES.items() if class_of(family, cls.task)]
            raise ValueError(
                f"config model_type: {config.model_type!r} has no head {cls.task!r}; "
                f"expected one of {', '.join(have)}"
            )
        return found


class AutoModel(AutoTaskModel, BertModel):
    """Chooses the encoder class by `model_type`."""


class AutoModelForMaskedLM(AutoTaskModel, BertForMaskedLM):
    """Chooses the masked-LM class by `model_type`."""


class AutoModelForPreTraining(AutoTaskModel):
    """Chooses the pre-training class by `model_type`; the masked-LM class where the family has no other."""

    task = "ForPreTraining"

    @classmethod
    def class_for(cls, config: EncoderConfig) -> type[PreTrainedModel]:
        """The class of `config`'s family."""
        own = class_of(config.family, cls.task)
        return AutoModelForMaskedLM.class_for(config) if own is None else own


class AutoModelForNextSentencePrediction(AutoTaskModel, BertForNextSentencePrediction):
    """Chooses the next-sentence class by `model_type`."""


class AutoModelForSequenceClassification(AutoTaskModel, BertForSequenceClassification):
    """Chooses the sequence-classification class by `model_type`."""


class AutoModelForMultipleChoice(AutoTaskModel, BertForMultipleChoice):
    """Chooses the multiple-choice class by `model_type`."""


class AutoModelForTokenClassification(AutoTaskModel, BertForTokenClassification):
    """Chooses the token-classification class by `model_type`."""


class AutoModelForQuestionAnswering(AutoTaskModel, BertForQuestionAnswering):
    """Chooses the question-answering class by `model_type`."""
