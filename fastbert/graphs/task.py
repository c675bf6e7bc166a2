"""Models with a head or of transformers, whose encoder is replayed from CUDA graphs before the rest runs."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NoReturn

from torch import nn

from fastbert.models.heads.task_model import served_by
from fastbert.runtime.prepared import module_of

_UNASKED = (
    "its encoder was not called, kept the padding (fastbert.explain says why), or was asked for hidden states"
)


class Around:
    """What both kinds of graphed models take from their `model`. Neither can be copied or pickled."""

    model: Any
    config = property(attrgetter("model.config"), doc="The model's.")
    device = property(attrgetter("model.device"), doc="The model's.")
    dtype = property(attrgetter("model.dtype"), doc="The model's.")
    training = property(attrgetter("model.training"), doc="The model's.")

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's."""
        return self.model.parameters()

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: its graphs are of this process and cannot be copied or pickled; copy or "
            "pickle the model and call fastbert.graph again"
        )


class GraphedTask(Around):
    """A model whose encoder is served by graphs, with a head or of transformers; made by `fastbert.graph`.

    Calls take and return what the model's calls do. What graphs cannot serve, the model computes itself.

    Attributes:
        model: the model; a model of transformers comes from `fastbert.accelerate`.
        encoder: the `GraphedModel` of its encoder, which has the counts of replays and fallbacks.
    """

    def __init__(self, model: nn.Module, encoder: Any):
        self.model, self.encoder = model, encoder
        self._recorded = module_of(encoder.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with its encoder replayed from a graph if one can serve."""
        encoder = self.encoder
        encoder._last.reason = _UNASKED
        token = served_by.set({**served_by.get(), self._recorded: encoder})
        try:
            output = self.model(*args, **kwargs)
        finally:
            served_by.reset(token)
        if encoder.last_fallback == _UNASKED:
            encoder._note(_UNASKED)
        return output

    last_fallback = property(attrgetter("encoder.last_fallback"), doc="See `GraphedModel`.")
    replays = property(attrgetter("encoder.replays"), doc="See `GraphedModel`.")

    def clear(self) -> None:
        """See `GraphedModel.clear`."""
        self.encoder.clear()
