"""What transformers says of an example: the oracle of the analysis tests, in float64."""

from __future__ import annotations

import functools

import numpy as np
import torch

from fastbert.analysis.treebank import Sentence
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


def maps_of(theirs, examples, number: int) -> list[np.ndarray]:
    """transformers' attention maps of one example, (nheads, length, length) per layer."""
    with torch.no_grad():
        out = theirs(**inputs_of(theirs, examples, number), output_attentions=True)
    return [layer[0].numpy() for layer in out.attentions]


def sentence(words: str, upos: str, heads: list[int], relations: str) -> Sentence:
    """A sentence of a treebank, from words with spaces between; heads are numbered from 1."""
    words, upos, relations = (tuple(text.split()) for text in (words, upos, relations))
    blank = ("_",) * len(words)
    return Sentence(words, upos, np.array(heads), relations, blank, blank)
