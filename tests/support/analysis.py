"""transformers' results for an example in float64: the oracle of the analysis tests."""

from __future__ import annotations

import copy
import functools

import numpy as np
import torch

from fastbert.analysis.attention import AttentionStatistics
from fastbert.analysis.treebank import Sentence
from fastbert.layers.modules import part
from fastbert.models.encoder import layers_of
from fastbert.models.families import FAMILIES
from fastbert.tasks.examples import KINDS
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
        labels = examples.labels[start:end][None] if examples.labels_tokens else examples.labels[[number]]
        given = {"labels": torch.from_numpy(labels)}
        if type(model).__name__.endswith("ForQuestionAnswering"):
            given = dict(zip(("start_positions", "end_positions"), given["labels"].unbind(1), strict=True))
        with torch.no_grad():
            found.append(model(**inputs_of(model, examples, number), **given, **kwargs).loss.item())
    return np.array(found)


def cosines(model, examples, pooling: str = "mean", **kwargs):
    """The cosine of the pooled last hidden states of examples 2i and 2i + 1, by the model's own forward."""
    vectors = []
    for number in range(len(examples)):
        with torch.no_grad():
            hidden = model(**inputs_of(model, examples, number), **kwargs)[0][0].numpy()
        vectors.append({"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.max(0)}[pooling])
    units = np.stack([v / np.linalg.norm(v) for v in vectors])
    return (units[::2] * units[1::2]).sum(1)


def without_head(theirs, layer: int, head: int):
    """transformers' model with the columns of one head in the attention's output layer at 0."""
    model = copy.deepcopy(theirs)
    family = FAMILIES[model.config.model_type]
    dense = part(layers_of(model.base_model, model.config, family)[layer], family.layer.attention_output)
    width = dense.weight.shape[1] // model.config.num_attention_heads
    with torch.no_grad():
        dense.weight[:, head * width : (head + 1) * width] = 0
    return model


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


def statistics(shape: tuple[int, int, int], length: int, texts: int = 2, **arrays) -> AttentionStatistics:
    """Made-up ones of examples of one length; 0 but for what is given."""
    names = ("entropy", "previous", "itself", "following", "own_text", "most_received", "spread")
    n = shape[0]
    whole = {name: np.zeros(shape, np.float32) for name in names}
    whole |= {"to_kind": np.zeros((len(KINDS), *shape), np.float32), "lengths": np.full(n, length)}
    whole |= {"share_of_kind": np.zeros((len(KINDS), n)), "share_of_text": np.full(n, 1 / texts)}
    return AttentionStatistics(**{**whole, "texts": np.full(n, texts), **arrays})
