"""What transformers says of an example: the oracle of the analysis tests, in float64."""

from __future__ import annotations

import functools

import numpy as np
import torch

from fastbert.models.families import FAMILIES
from tests.support.model_pairs import build


@functools.cache
def both(family: str, task: str = "ForSequenceClassification", **config):
    """(transformers' model with eager attention, ours), in float64 and in eval mode."""
    theirs, ours = build(family, task, **{"num_labels": 3, **config})
    return theirs.double(), ours.double()


def inputs_of(model, examples, number: int) -> dict[str, torch.Tensor]:
    """The inputs of one example for a model of transformers or ours."""
    start, end = examples.starts[number : number + 2]
    inputs = {"input_ids": torch.from_numpy(examples.ids[start:end])[None]}
    if FAMILIES[model.config.model_type].segments:
        inputs["token_type_ids"] = torch.from_numpy(examples.types[start:end])[None]
    return inputs


def losses(model, examples, **kwargs):
    """The loss of each example, by the model's own forward on one padded sequence."""
    found = []
    for number in range(len(examples)):
        start, end = examples.starts[number : number + 2]
        inputs = inputs_of(model, examples, number)
        labels = examples.labels[start:end][None] if examples.labels_tokens else examples.labels[[number]]
        with torch.no_grad():
            found.append(model(**inputs, labels=torch.from_numpy(labels), **kwargs).loss.item())
    return np.array(found)


def maps_of(theirs, examples, number: int) -> list[np.ndarray]:
    """transformers' attention maps of one example, (nheads, length, length) per layer."""
    with torch.no_grad():
        out = theirs(**inputs_of(theirs, examples, number), output_attentions=True)
    return [layer[0].numpy() for layer in out.attentions]
