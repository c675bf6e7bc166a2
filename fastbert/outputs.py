"""What models return: HuggingFace's output classes, field for field.

Each is an ordered dict of the fields that are not None, with attribute, key, index and slice access, as
users of transformers (and its Trainer, which asks `isinstance(outputs, dict)`) expect.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torch.utils import _pytree


class ModelOutput(OrderedDict[Any, Any]):
    """Base of all outputs. Fields that are None are left out of the keys and of `to_tuple()`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # DDP, FSDP and torch.compile look through registered nodes
        _pytree.register_pytree_node(
            cls,
            lambda out: (list(out.values()), list(out.keys())),
            lambda values, keys: cls(**dict(zip(keys, values, strict=True))),
            serialized_type_name=f"{cls.__module__}.{cls.__name__}",
        )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None:
                super().__setitem__(f.name, value)

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are not None, in order."""
        return tuple(self[k] for k in self.keys())

    def __reduce__(self):
        return _rebuild, (type(self), dict(self.items()))


def _rebuild(cls: type, values: dict) -> ModelOutput:
    return cls(**values)


# Default of what a model always returns, so that type checkers need no test for None.
_ABSENT: Any = None


@dataclass
class BaseModelOutputWithPooling(ModelOutput):
    """last_hidden_state (batch, seqlen, hidden); pooler_output (batch, hidden); hidden_states: layers + 1
    tensors, the embedding output first; attentions: per layer (batch, nheads, seqlen, seqlen)."""

    last_hidden_state: Tensor = _ABSENT
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class PreTrainingOutput(ModelOutput):
    """prediction_logits (batch, seqlen, vocab_size); seq_relationship_logits (batch, 2)."""

    loss: Tensor | None = None
    prediction_logits: Tensor = _ABSENT
    seq_relationship_logits: Tensor = _ABSENT
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class AlbertPreTrainingOutput(ModelOutput):
    """prediction_logits (batch, seqlen, vocab_size); sop_logits (batch, 2): order of the two segments."""

    loss: Tensor | None = None
    prediction_logits: Tensor = _ABSENT
    sop_logits: Tensor = _ABSENT
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class LogitsOutput(ModelOutput):
    """logits of a masked-LM, sequence, token, pair or choice head; their shape is stated by the model's
    class.
    """

    loss: Tensor | None = None
    logits: Tensor = _ABSENT
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class QuestionAnsweringOutput(ModelOutput):
    """start_logits, end_logits (batch, seqlen)."""

    loss: Tensor | None = None
    start_logits: Tensor = _ABSENT
    end_logits: Tensor = _ABSENT
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
