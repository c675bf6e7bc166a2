"""`fastbert.eliminate`: a model whose layers keep ever fewer tokens, by the attention that tokens receive.

After attention each layer keeps the first token and those that receive most attention, and the layers that
follow compute these alone. A token that leaves keeps its last state, so outputs have all tokens.

Source: Goyal et al. 2020, "PoWER-BERT: Accelerating BERT Inference via Progressive Word-vector Elimination".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from fastbert.compression.shrink import check_ours
from fastbert.models.base import PreTrainedModel

_Model = TypeVar("_Model", bound=PreTrainedModel)


def eliminate(model: _Model, schedule: Sequence[float] | None) -> _Model:
    """Let each layer of a model keep only a share of the tokens; returns the model, which is changed.

    The parameters stay as they are; fine-tune the model to recover what it lost. `save_pretrained` writes the
    schedule as config key `token_schedule`, and `from_pretrained` reads it.

    Args:
        model: a model of this package.
        schedule: the share of each text's tokens that each layer keeps, one number in (0, 1] per layer, not
            rising. A text keeps that share of its own length, rounded up. None keeps all tokens again.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected. Layers with windows, with
            scores of distances, with bottlenecks or with causal attention compute all tokens.

    Source: Goyal et al. 2020.
    """
    check_ours(model)
    config: Any = model.config
    own = list(schedule) if isinstance(schedule, Iterable) else schedule
    before, config.token_schedule = config.token_schedule, own
    try:
        config.validate()
    except (TypeError, ValueError):
        config.token_schedule = before
        raise
    return model


@contextlib.contextmanager
def scheduled(model: PreTrainedModel, schedule: Sequence[float] | None) -> Iterator[None]:
    """A block in which a model has a schedule, see `eliminate`; its end restores the old one."""
    before = model.config.token_schedule
    try:
        eliminate(model, schedule)
        yield
    finally:
        model.config.token_schedule = before


def check_whole(model: PreTrainedModel) -> int:
    """The number of layers of a model; ValueError if it has a schedule, or cannot have one."""
    if model.config.token_schedule is not None:
        raise ValueError("model: expected one without a token_schedule")
    layers = len(model.base_model.layer_list())
    with scheduled(model, [1.0] * layers):
        return layers
