"""What models return: HuggingFace's output classes, field for field.

Each is an ordered dict of the fields that are not None, with attribute, key, index and slice access, as
expected by users of transformers, its Trainer, its pipelines and accelerate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

from torch import Tensor
from torch.utils import _pytree

from fastbert.models.lookalike import Lookalike


class ModelOutput(Lookalike, OrderedDict[Any, Any]):
    """Base of all outputs. Keys and `to_tuple()` leave out fields that are None.

    It is constructed from fields or, as accelerate does, from one mapping: `type(output)({"loss": …})`.
    """

    looks_like = ("transformers.utils.generic", "ModelOutput")
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # DDP, FSDP and torch.compile look into registered nodes
        _pytree.register_pytree_node(
            cls,
            lambda out: (list(out.values()), list(out.keys())),
            lambda values, keys: _rebuild(cls, dict(zip(keys, values, strict=True))),
            serialized_type_name=f"{cls.__module__}.{cls.__name__}",
        )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """An output with these fields, in their order; all further fields are None.

        The same as the constructor, in a third of the time. Reading a field that is not passed finds the
        class's attribute.
        """
        output = cls.__new__(cls)
        attributes = output.__dict__
        for name, value in values.items():
            if value is not None:
                attributes[name] = value
                OrderedDict.__setitem__(output, name, value)
        return output

    def __post_init__(self) -> None:
        names = list(type(self).__dataclass_fields__)
        given = getattr(self, names[0])
        if given is None or type(given) is Tensor or not isinstance(given, Mapping):
            return
        others = [name for name in names[1:] if getattr(self, name) is not None]
        if others or not given.keys() <= set(names):
            raise TypeError(
                f"{type(self).__name__}: expected a mapping of its fields {names} and nothing else, "
                f"got {list(given)}" + (f" beside {others}" if others else "")
            )
        for name in names:
            self._set(name, given.get(name))

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        is_item = name in self
        if value is None and not is_item:  # most fields of a new output
            super().__setattr__(name, None)
        else:
            self._set(name, value, is_item)

    def __setitem__(self, key: str, value: Any) -> None:
        self._set(key, value, True)  # any key: pipelines add the inputs to what a model returns

    def _set(self, name: str, value: Any, is_item: bool = False) -> None:
        """Set a field both as attribute and as item, in the order of the fields; None removes the item.

        A name that is no field becomes an attribute, and with `is_item` also an item.
        """
        super().__setattr__(name, value)
        names = type(self).__dataclass_fields__
        if name not in names:
            if is_item:
                super().__setitem__(name, value)
            return
        if value is None:
            if name in self:
                super().__delitem__(name)
            return
        later: list[str] = []
        if self and name not in self:
            order = list(names)
            later = [n for n in order[order.index(name) + 1 :] if n in self]
        super().__setitem__(name, value)
        for n in later:
            self.move_to_end(n)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: its fields cannot be removed; set them to None")

    __delitem__ = pop = popitem = setdefault = update = clear = _refuse  # pyright: ignore[reportAssignmentType]

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are not None, in order."""
        return tuple(self[k] for k in self.keys())

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.items()))


def _rebuild(cls: type, values: dict[Any, Any]) -> ModelOutput:
    names = cls.__dataclass_fields__.keys()
    output = cls(**{key: value for key, value in values.items() if key in names})
    for key in values.keys() - names:
        output[key] = values[key]
    return output


# Default of a field that a model always returns, so that type checkers need no test for None.
_ABSENT: Any = None


@dataclass
class BaseModelOutputWithPooling(ModelOutput):
    """last_hidden_state (batch, seqlen, hidden); pooler_output (batch, hidden); hidden_states: layers + 1
    tensors, the embedding output first; attentions: per layer (batch, nheads, seqlen, seqlen), or
    Longformer's bands."""

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
    """logits of a masked-LM, sequence, token, pair or choice head; the model's class states their shape."""

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
